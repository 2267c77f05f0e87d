//! Every run of a small world.

use std::collections::HashMap;

use super::world::{Broken, Event, Node, World};

/// How much may go wrong in one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Budget {
    crashes: u8,
    stops: u8,
    reboots: u8,
    turns: u8,
}

struct Search {
    others: u8,
    wanted: &'static [Option<Node>],
    used: bool,
    durable: bool,
    budget: Budget,
    /// Runs whose orders go beyond are not followed.
    epochs: u16,
    /// Of so many states one is asked whether it comes to rest.
    settle: Option<u64>,
    lawless: bool,
    broken: Broken,
}

/// What was found, with the events that led there.
type Counterexample = (String, Vec<Event>);

impl Search {
    /// The number of states, or the first that breaks a promise: with the fewest events.
    fn run(&self) -> Result<usize, Counterexample> {
        let mut first = World::new(self.others, self.used, self.broken);
        // Leaders know any list of attachments at any time: the volume is wanted everywhere, as often as they like.
        first.wanted_past = self.wanted.to_vec();
        first.lawless = self.lawless;
        first.durable = self.durable;
        let mut found: Vec<(Option<(usize, Event)>, Budget)> = vec![(None, self.budget)];
        let mut front = vec![(0, first.clone())];
        let mut seen: HashMap<u128, Budget> = HashMap::new();
        seen.insert(digest(&first, self.budget), self.budget);
        while !front.is_empty() {
            let mut next = Vec::new();
            for (at, world) in std::mem::take(&mut front) {
                let budget = found[at].1;
                for (event, left) in self.events(&world, budget) {
                    let after = world.after(event);
                    if after.object.access.is_some_and(|order| order.epoch > self.epochs) {
                        continue;
                    }
                    let key = digest(&after, left);
                    if seen.insert(key, left).is_some() {
                        continue;
                    }
                    let number = found.len();
                    found.push((Some((at, event)), left));
                    let settles = self.settle.is_some_and(|one_of| key.is_multiple_of(u128::from(one_of)));
                    let checked =
                        after.check().and_then(|()| if settles { after.check_settles() } else { Ok(()) });
                    if let Err(broken) = checked {
                        return Err((broken, trace(&found, number)));
                    }
                    next.push((number, after));
                }
            }
            front = next;
        }
        Ok(found.len())
    }

    fn events(&self, world: &World, budget: Budget) -> Vec<(Event, Budget)> {
        let mut events: Vec<(Event, Budget)> =
            world.steps().into_iter().map(|event| (event, budget)).collect();
        if let Some(crashes) = budget.crashes.checked_sub(1) {
            events.push((Event::OwnerReboots { clean: false }, Budget { crashes, ..budget }));
        }
        if let Some(stops) = budget.stops.checked_sub(1) {
            events.push((Event::OwnerReboots { clean: true }, Budget { stops, ..budget }));
        }
        if let Some(turns) = budget.turns.checked_sub(1).filter(|_| world.may_turn()) {
            events.push((Event::Turns, Budget { turns, ..budget }));
        }
        if let Some(reboots) = budget.reboots.checked_sub(1) {
            let nodes = 1..world.nodes();
            events.extend(nodes.map(|node| (Event::ConsumerReboots(node), Budget { reboots, ..budget })));
        }
        events
    }
}

/// Names a state by 128 bits of hash: with a million states two meet by chance once in 10^26 searches.
fn digest(world: &World, budget: Budget) -> u128 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, world, budget).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    half(1) << 64 | half(2)
}

fn trace(found: &[(Option<(usize, Event)>, Budget)], mut at: usize) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((before, event)) = found[at].0 {
        events.push(event);
        at = before;
    }
    events.reverse();
    events
}

const CALM: Budget = Budget { crashes: 0, stops: 0, reboots: 0, turns: 0 };

/// Two nodes besides the owner.
const REMOTE: &[Option<Node>] = &[Some(1), Some(2), None];

/// The owner node, and one other.
const HOME: &[Option<Node>] = &[Some(0), Some(1), None];

fn search(others: u8, wanted: &'static [Option<Node>], epochs: u16, budget: Budget) -> Search {
    Search {
        others,
        wanted,
        used: false,
        durable: false,
        budget,
        epochs,
        settle: Some(128),
        lawless: false,
        broken: Broken::Nothing,
    }
}

fn holds(search: &Search) {
    match search.run() {
        Ok(states) => {
            println!("{states} states");
            assert!(states > 1000, "only {states} states: the model does not move");
        }
        Err((broken, events)) => panic!("{broken}\n{events:#?}"),
    }
}

#[test]
fn a_volume_that_moves_between_two_nodes_never_has_two_writers() {
    holds(&search(2, REMOTE, 6, CALM));
}

#[test]
fn a_volume_that_moves_to_and_from_its_owner_never_has_two_writers() {
    holds(&search(1, HOME, 7, CALM));
}

#[test]
fn an_owner_that_crashes_never_lets_two_write_and_never_hides_what_was_lost() {
    holds(&search(2, REMOTE, 3, Budget { crashes: 1, stops: 1, ..CALM }));
}

#[test]
fn a_volume_that_was_used_before_there_were_orders_goes_on_and_moves_like_others() {
    holds(&Search { used: true, ..search(1, HOME, 5, Budget { crashes: 1, ..CALM }) });
}

#[test]
fn an_owner_whose_branch_is_durable_may_crash_and_go_on_with_its_generation() {
    let crashes = Budget { crashes: 2, ..CALM };
    holds(&Search { durable: true, ..search(2, REMOTE, 3, crashes) });
    holds(&Search { durable: true, ..search(1, HOME, 4, crashes) });
}

#[test]
fn a_branch_that_becomes_durable_or_ceases_to_be_never_hides_what_was_lost() {
    for durable in [true, false] {
        holds(&Search { durable, ..search(1, &[Some(1), None], 3, Budget { crashes: 2, turns: 2, ..CALM }) });
    }
}

#[test]
fn consumers_that_reboot_change_nothing() {
    holds(&search(2, REMOTE, 4, Budget { crashes: 1, reboots: 1, ..CALM }));
}

#[test]
fn the_owner_alone_keeps_two_from_writing_whatever_leaders_write() {
    holds(&Search { lawless: true, settle: None, ..search(2, REMOTE, 3, CALM) });
    let crash = Budget { crashes: 1, ..CALM };
    holds(&Search { lawless: true, settle: None, ..search(1, HOME, 2, crash) });
}

/// What a rule that is left out leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Harm {
    /// Somebody writes who must not.
    Danger,
    /// The same, where leaders do not keep the rules either.
    DangerWithLawlessLeaders,
    /// Whoever is wanted does not get the branch.
    Stall,
}

#[test]
fn each_rule_is_needed_the_search_finds_what_happens_without_it() {
    let crash = Budget { crashes: 1, stops: 1, ..CALM };
    let turns = Budget { crashes: 1, turns: 1, ..CALM };
    let cases = [
        (Broken::GrantsOverAHolder, Harm::Danger, REMOTE, CALM),
        (Broken::GrantsTheUngoverned, Harm::Danger, HOME, CALM),
        (Broken::SettlesForTheOwner, Harm::Stall, HOME, CALM),
        (Broken::GrantsWithoutAReport, Harm::Danger, REMOTE, CALM),
        (Broken::WritesWithoutVersion, Harm::Danger, REMOTE, CALM),
        (Broken::ReusesAnEpoch, Harm::Stall, REMOTE, CALM),
        (Broken::SparesLiveConnections, Harm::Danger, REMOTE, CALM),
        (Broken::OverlooksItsOwnUse, Harm::Danger, HOME, CALM),
        (Broken::NotesBeforeFencing, Harm::DangerWithLawlessLeaders, HOME, CALM),
        (Broken::KeepsTheGeneration, Harm::Danger, REMOTE, CALM),
        (Broken::IgnoresCrashes, Harm::Danger, REMOTE, crash),
        (Broken::ClaimsDurability, Harm::Danger, REMOTE, crash),
        (Broken::TakesNowForThen, Harm::Danger, REMOTE, turns),
        (Broken::StopsAlwaysClean, Harm::Danger, REMOTE, crash),
        (Broken::ForgetsItsMark, Harm::Danger, REMOTE, CALM),
        (Broken::ReportsWhatIsMeant, Harm::Danger, REMOTE, CALM),
        (Broken::TrustsTheObjectAtHome, Harm::Danger, HOME, CALM),
        (Broken::KeepsOldAttachments, Harm::Stall, REMOTE, CALM),
    ];
    for (broken, harm, wanted, budget) in cases {
        let settle = (harm == Harm::Stall).then_some(1);
        let lawless = harm == Harm::DangerWithLawlessLeaders;
        let search = Search { broken, settle, lawless, ..search(2, wanted, 4, budget) };
        match search.run() {
            Ok(states) => panic!("{broken:?}: nothing is found in {states} states"),
            Err((what, events)) => {
                let what: String = what.chars().take(120).collect();
                println!("{broken:?} after {} events: {what}", events.len());
            }
        }
    }
}
