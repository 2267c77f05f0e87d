//! Long runs of larger worlds, with every fault, and the store restored from backups.

use proptest::prelude::*;

use super::world::{Broken, Event, World};

/// One of the things that can happen, chosen by numbers.
fn event(world: &World, kind: u8, a: usize, b: usize) -> Event {
    let node = u8::try_from(a % usize::from(world.nodes())).unwrap();
    // Old states are read often, and the newest more often.
    let read = if b.is_multiple_of(3) { a % world.past.len() } else { world.past.len() - 1 };
    match kind {
        0 => Event::Want(if b.is_multiple_of(4) { None } else { Some(node) }),
        1..=7 => {
            let attached = if b.is_multiple_of(3) { a % world.wanted_past.len() } else { newest(world) };
            Event::Lead { attached, read: world.past.len() - 1 }
        }
        8..=13 => Event::OwnerDecides { read },
        14..=25 => Event::OwnerActs,
        26 => Event::OwnerAgentCrashes,
        27 => Event::OwnerReboots { clean: b.is_multiple_of(2) },
        28 => Event::ConsumerReboots(node),
        29 if b % 8 == 1 => Event::Turns,
        29 if b.is_multiple_of(8) => Event::Restore { read: a % world.past.len() },
        _ => Event::Consume { node, needed: b % 5 != 1, read },
    }
}

fn newest(world: &World) -> usize {
    world.wanted_past.iter().position(|wanted| *wanted == world.wanted).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_long_run_of_four_nodes_breaks_a_promise_and_each_comes_to_rest(
        used in any::<bool>(),
        restores in any::<bool>(),
        durable in any::<bool>(),
        choices in prop::collection::vec((0_u8..40, any::<usize>(), any::<usize>()), 1..400),
    ) {
        let mut world = World::new(3, used, Broken::Nothing);
        world.durable = durable;
        for (kind, a, b) in choices {
            let event = event(&world, kind, a, b);
            if matches!(event, Event::Restore { .. }) && !restores {
                continue;
            }
            world = world.after(event);
            if let Err(broken) = world.check() {
                prop_assert!(false, "{event:?}: {broken}: {world:?}");
            }
        }
        if let Err(broken) = world.check_settles() {
            prop_assert!(false, "{broken}");
        }
    }
}
