//! What holds for every plan.

use std::collections::HashSet;

use super::super::planner::Planner;
use super::*;

prop_compose! {
    fn questions(quantum: u64)(
        pools in pools(24, 30 * quantum, quantum),
        size in 0_u64..=200 * quantum,
        slack in prop_oneof![Just(None), (0_u64..20_000).prop_map(Some)],
        (least, more) in (1_u32..=4, 0_u32..=12),
        consumer in prop_oneof![Just(None), Just(Some("n0")), Just(Some("elsewhere"))],
        topology in prop::collection::vec(prop_oneof![Just("n0"), Just("n1")], 0..3),
        block in prop::bool::weighted(0.1),
        reach in prop_oneof![Just(Reach::OneNode), Just(Reach::AnyNode)],
        sharing in sharings(),
        (strategy, placement, format, unenforced) in (strategies(), placements(), formats(), any::<bool>()),
    ) -> (Request, Policy, Vec<PoolView>) {
        let request = Request {
            size: Bytes::new(size),
            limit: slack.map(|slack| Bytes::new(size + slack)),
            mode: if block { VolumeMode::Block } else { VolumeMode::Filesystem },
            consumer: consumer.map(|node| node.parse().unwrap()),
            topology: topology.into_iter().map(|node| node.parse().unwrap()).collect(),
            reach,
            sharing,
        };
        let policy = Policy {
            quantum: Bytes::new(quantum),
            min_branches: least,
            max_branches: least + more,
            strategy,
            placement,
            format,
            accept_unenforced: unenforced,
            ..Policy::default()
        };
        (request, policy, pools)
    }
}

/// Small figures with odd overheads, and real ones with those of the product.
pub(super) fn any_question()
-> impl proptest::strategy::Strategy<Value = (Shape, Request, Policy, Vec<PoolView>)> {
    prop_oneof![
        (shapes(), questions(8192))
            .prop_map(|(shape, (request, policy, pools))| (shape, request, policy, pools)),
        questions(512 << 20).prop_map(|(request, policy, pools)| (Shape::Product, request, policy, pools)),
    ]
}

pub(super) fn check(
    shape: Shape,
    request: &Request,
    policy: &Policy,
    pools: &[PoolView],
    plan: &Plan,
) -> Result<(), TestCaseError> {
    let count = u32::try_from(plan.branches.len()).unwrap();
    prop_assert!((policy.min_branches..=policy.max_branches).contains(&count));
    prop_assert_eq!(plan.capacity, plan.branches.iter().map(|branch| branch.usable).sum::<Bytes>());
    prop_assert!(plan.capacity >= request.size);
    prop_assert!(request.limit.is_none_or(|limit| plan.capacity <= limit));
    let mut filesystems = HashSet::new();
    let mut odd = 0;
    for (index, branch) in plan.branches.iter().enumerate() {
        prop_assert_eq!(branch.index as usize, index);
        let view =
            pools.iter().find(|view| view.node == branch.node && view.pool.name == branch.pool).unwrap();
        prop_assert_eq!(view.pool.state, PoolState::Ready);
        prop_assert!(branch.size <= view.pool.allocatable(), "more than the pool has");
        prop_assert!(
            branch.usable <= shape.usable(branch.size, branch.fs_type),
            "more than the filesystem leaves"
        );
        prop_assert!(!branch.usable.is_zero());
        prop_assert!(branch.size >= shape.minimum(branch.fs_type));
        let filesystem =
            if view.pool.device.is_empty() { view.pool.name.to_string() } else { view.pool.device.clone() };
        prop_assert!(filesystems.insert((branch.node.clone(), filesystem)), "a filesystem is used twice");
        odd += usize::from(branch.size.get() % policy.quantum.get() != 0);
        match branch.format {
            BranchFormat::Directory => {
                prop_assert_eq!(branch.fs_type, None);
                prop_assert_eq!(branch.size, branch.usable);
                prop_assert!(view.pool.enforcement != Enforcement::None || policy.accept_unenforced);
            }
            BranchFormat::Image => {
                prop_assert_eq!(branch.size.get() % 4096, 0);
                prop_assert_eq!(branch.fs_type.is_none(), request.mode == VolumeMode::Block);
            }
        }
    }
    prop_assert!(odd <= 1, "more than one branch is no multiple of the quantum");
    if request.mode == VolumeMode::Block {
        prop_assert!(count == 1 && plan.branches[0].format == BranchFormat::Image);
    }
    let least = |branch: &PlannedBranch| {
        let useful = shape.size_for(Bytes::new(1), branch.fs_type).unwrap();
        let grain = if branch.format == BranchFormat::Image { 4096 } else { 1 };
        shape.minimum(branch.fs_type).max(useful).round_up_to(Bytes::new(grain)).unwrap()
    };
    prop_assert!(
        plan.capacity == request.size
            || request.mode == VolumeMode::Block
            || plan.branches.iter().any(|branch| branch.size == least(branch)),
        "more than was asked for, and no branch is as small as can be"
    );
    if policy.placement == Placement::Local || request.reach == Reach::OneNode {
        let node = request.consumer.as_ref().unwrap_or(&plan.branches[0].node);
        prop_assert!(plan.branches.iter().all(|branch| branch.node == *node));
        prop_assert!(request.topology.is_empty() || request.topology.contains(node));
    }
    if let Some(consumer) = &request.consumer {
        prop_assert!(
            plan.branches.is_sorted_by_key(|branch| branch.node != *consumer),
            "local ones are first"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_plan_keeps_the_rules(question in any_question()) {
        let (shape, request, policy, pools) = question;
        if let Ok(plan) = Planner::new(&shape, &request, &policy, &pools).plan() {
            check(shape, &request, &policy, &pools, &plan)?;
        }
    }

    #[test]
    fn every_strategy_accepts_the_same_requests(question in any_question()) {
        let (shape, request, policy, pools) = question;
        let accepted = [Strategy::Fewest, Strategy::Balanced, Strategy::Spread].map(|strategy| {
            let policy = Policy { strategy, ..policy.clone() };
            Planner::new(&shape, &request, &policy, &pools).plan().is_ok()
        });
        prop_assert!(accepted.iter().all(|ok| *ok == accepted[0]), "{:?}", accepted);
    }

    #[test]
    fn the_order_of_the_pools_changes_nothing(question in any_question(), turn in 0_usize..24) {
        let (shape, request, policy, pools) = question;
        let mut turned = pools.clone();
        if !turned.is_empty() {
            let by = turn % turned.len();
            turned.rotate_left(by);
            turned[by..].reverse();
        }
        prop_assert_eq!(
            Planner::new(&shape, &request, &policy, &pools).plan(),
            Planner::new(&shape, &request, &policy, &turned).plan()
        );
    }

    #[test]
    fn a_refusal_names_every_pool_and_the_largest_size_that_works(question in any_question()) {
        let (shape, request, policy, pools) = question;
        let Err(refusal) = Planner::new(&shape, &request, &policy, &pools).plan() else { return Ok(()) };
        prop_assert_eq!(refusal.pools.len(), pools.len());
        prop_assert!(refusal.pools.iter().all(|verdict| !verdict.reason.is_empty()));
        prop_assert!(!refusal.reason.is_empty());
        if !refusal.largest.is_zero() && request.limit.is_none_or(|limit| refusal.largest <= limit) {
            let works = Request { size: refusal.largest, ..request };
            prop_assert!(Planner::new(&shape, &works, &policy, &pools).plan().is_ok(), "{}", refusal.reason);
        }
    }

    #[test]
    fn the_published_capacity_is_true(question in any_question()) {
        let (shape, request, policy, pools) = question;
        let request = Request { limit: None, ..request };
        let capacity = Planner::new(&shape, &request, &policy, &pools).capacity();
        prop_assert!(capacity.maximum_volume_size <= capacity.total);
        let works = |size| {
            let request = Request { size, ..request.clone() };
            Planner::new(&shape, &request, &policy, &pools).plan().is_ok()
        };
        if !capacity.maximum_volume_size.is_zero() {
            prop_assert!(works(capacity.maximum_volume_size));
        }
        prop_assert!(!works(capacity.maximum_volume_size.saturating_add(Bytes::new(1))));
    }

    #[test]
    fn no_figures_make_it_panic(
        rooms in prop::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX), Just(0)], 0..6),
        size in any::<u64>(),
        quantum in prop_oneof![any::<u64>(), Just(0), Just(1), Just(u64::MAX)],
        (least, most) in (any::<u32>(), any::<u32>()),
        (strategy, placement, format) in (strategies(), placements(), formats()),
    ) {
        let pools: Vec<PoolView> =
            rooms.iter().enumerate().map(|(i, room)| enforced("n", &format!("p{i}"), Bytes::new(*room))).collect();
        let policy = Policy {
            quantum: Bytes::new(quantum), min_branches: least % 8, max_branches: most % 300, strategy, placement, format,
            ..Policy::default()
        };
        let _ = plan(&request(Bytes::new(size)), &policy, &pools);
        let _ = capacity(&request(Bytes::new(size)), &policy, &pools);
    }
}
