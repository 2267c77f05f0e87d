//! Small cases against trying every set of pools, every choice for the rest and every number of quanta.

use std::collections::BTreeMap;

use super::super::planner::Planner;
use super::*;

/// What trying everything finds.
#[derive(Debug, Default)]
struct Everything {
    /// By number of branches: the number of local ones in the plan with the most of them.
    counts: BTreeMap<usize, usize>,
    /// The largest usable size.
    largest: u64,
}

#[derive(Clone, Copy)]
struct Place {
    node: usize,
    local: bool,
    format: BranchFormat,
    room: u64,
}

fn everything(shape: Shape, policy: &Policy, request: &Request, places: &[Place]) -> Everything {
    let fs = |format| (format == BranchFormat::Image).then_some(policy.fs_type);
    let usable = |format, size: u64| shape.usable(Bytes::new(size), fs(format)).get();
    let up =
        |size: u64, format| if format == BranchFormat::Image { size.next_multiple_of(4096) } else { size };
    let least = |format| {
        let useful = shape.size_for(Bytes::new(1), fs(format)).unwrap().get();
        up(shape.minimum(fs(format)).get().max(useful), format)
    };
    let limit = request.limit.unwrap_or(Bytes::MAX).get();
    let quantum = policy.quantum.get();
    let size = request.size.get().max(1);
    let mut found = Everything::default();
    for set in 1_u32..1 << places.len() {
        let chosen: Vec<Place> =
            places.iter().enumerate().filter(|(i, _)| set & (1 << i) != 0).map(|(_, place)| *place).collect();
        let one_node = chosen.iter().all(|place| place.node == chosen[0].node);
        if chosen.len() < policy.min_branches as usize
            || chosen.len() > policy.max_branches as usize
            || ((policy.placement == Placement::Local || request.reach == Reach::OneNode) && !one_node)
        {
            continue;
        }
        let locals = chosen.iter().filter(|place| place.local).count();
        for last in 0..chosen.len() {
            let others: Vec<Place> =
                chosen.iter().enumerate().filter(|(i, _)| *i != last).map(|(_, place)| *place).collect();
            let last = chosen[last];
            // All sums of usable bytes that whole quanta of the others can have.
            let mut sums = vec![0_u64];
            for other in &others {
                let worths: Vec<u64> = (1..=other.room / quantum)
                    .map(|n| n * quantum)
                    .filter(|size| *size >= least(other.format))
                    .map(|size| usable(other.format, size))
                    .collect();
                sums = sums.iter().flat_map(|sum| worths.iter().map(move |worth| sum + worth)).collect();
                sums.sort_unstable();
                sums.dedup();
            }
            for sum in sums {
                let room = up(
                    last.room.saturating_sub(4095 * u64::from(last.format == BranchFormat::Image)),
                    last.format,
                );
                if room < least(last.format) {
                    continue;
                }
                found.largest = found.largest.max(sum + usable(last.format, room));
                let Some(missing) = size.checked_sub(sum).filter(|missing| *missing > 0) else { continue };
                let floor = usable(last.format, least(last.format));
                if missing > usable(last.format, room) || sum + missing.max(floor) > limit {
                    continue;
                }
                let best = found.counts.entry(chosen.len()).or_default();
                *best = (*best).max(locals);
            }
        }
    }
    found
}

fn places(planner: &Planner<'_, Shape>, pools: &[PoolView], consumer: Option<&NodeName>) -> Vec<Place> {
    let place = |candidate: &super::super::space::Candidate| Place {
        node: pools[candidate.at()].node.as_str()[1..].parse().unwrap(),
        local: Some(&pools[candidate.at()].node) == consumer,
        format: candidate.format,
        room: candidate.room,
    };
    planner.candidates.iter().map(place).collect()
}

prop_compose! {
    fn questions(quantum: u64)(
        pools in pools(6, 5 * quantum, quantum),
        size in 1_u64..=16 * quantum,
        whole in any::<bool>(),
        slack in prop_oneof![Just(None), (0_u64..5000).prop_map(Some)],
        (least, more) in (1_u32..=3, 0_u32..=3),
        consumer in prop_oneof![Just(None), Just(Some("n0"))],
        reach in prop_oneof![Just(Reach::OneNode), Just(Reach::AnyNode)],
        (strategy, placement, format) in (strategies(), placements(), formats()),
        fs_type in prop_oneof![Just(FsType::Ext4), Just(FsType::Xfs), Just(FsType::Btrfs)],
    ) -> (Request, Policy, Vec<PoolView>) {
        let size = if whole { size.next_multiple_of(quantum) } else { size };
        let policy = Policy {
            quantum: Bytes::new(quantum),
            min_branches: least,
            max_branches: least + more,
            strategy,
            placement,
            format,
            fs_type,
            ..Policy::default()
        };
        let request = Request {
            limit: slack.map(|slack| Bytes::new(size + slack)),
            consumer: consumer.map(|node| node.parse().unwrap()),
            reach,
            ..request(Bytes::new(size))
        };
        (request, policy, pools)
    }
}

fn compare(
    shape: Shape,
    request: &Request,
    policy: &Policy,
    pools: &[PoolView],
) -> Result<(), TestCaseError> {
    let consumer = request.consumer.as_ref();
    let planner = Planner::new(&shape, request, policy, pools);
    let truth = everything(shape, policy, request, &places(&planner, pools, consumer));

    let unlimited = Request { limit: None, ..request.clone() };
    let largest = Planner::new(&shape, &unlimited, policy, pools).largest();
    prop_assert_eq!(largest.get(), truth.largest);
    if !largest.is_zero() {
        let most = Request { size: largest, ..unlimited };
        prop_assert!(Planner::new(&shape, &most, policy, pools).plan().is_ok());
    }

    let plan = match planner.plan() {
        Ok(plan) => plan,
        Err(refusal) => {
            let reason = refusal.reason;
            prop_assert!(truth.counts.is_empty(), "refused ({}), feasible with {:?}", reason, truth.counts);
            return Ok(());
        }
    };
    let Some((count, locals)) = truth.counts.first_key_value() else {
        return Err(TestCaseError::fail("planned what is not feasible"));
    };
    let all_local = truth.counts.iter().any(|(count, locals)| count == locals);
    let local = plan.branches.iter().filter(|branch| Some(&branch.node) == consumer).count();
    if policy.placement == Placement::PreferLocal && all_local {
        prop_assert_eq!(local, plan.branches.len(), "all can be local");
    } else if policy.strategy == Strategy::Fewest {
        prop_assert_eq!(plan.branches.len(), *count);
        // With a forced number, whole quanta and formats can keep a larger number of local ones out of reach.
        if policy.placement == Placement::PreferLocal
            && *count > usize::try_from(policy.min_branches).unwrap()
        {
            prop_assert_eq!(local, *locals);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn what_is_feasible_minimal_and_largest_is_what_trying_everything_finds(
        question in questions(8192),
        shape in prop_oneof![Just(Shape::Nothing), Just(Shape::Linear), Just(Shape::Stairs)],
    ) {
        let (request, policy, pools) = question;
        compare(shape, &request, &policy, &pools)?;
    }

    #[test]
    fn with_the_filesystems_of_the_product_too(question in questions(512 << 20)) {
        let (request, policy, pools) = question;
        compare(Shape::Product, &request, &policy, &pools)?;
    }
}
