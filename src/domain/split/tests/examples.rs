use super::super::planner::Planner;
use super::*;
use crate::domain::pool::Media;

fn gib(n: u64) -> Bytes {
    Bytes::gib(n)
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// Names and sizes in GiB of a plan without overheads.
fn sizes(request: &Request, policy: &Policy, pools: &[PoolView]) -> Vec<(String, u64)> {
    let plan = Planner::new(&Shape::Nothing, request, policy, pools).plan().unwrap();
    plan.branches.iter().map(|branch| (branch.pool.to_string(), branch.size.get() >> 30)).collect()
}

fn is(found: Vec<(String, u64)>, expected: &[(&str, u64)]) {
    let found: Vec<(&str, u64)> = found.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    assert_eq!(found, expected);
}

fn refusal(request: &Request, policy: &Policy, pools: &[PoolView]) -> Infeasible {
    Planner::new(&Shape::Nothing, request, policy, pools).plan().expect_err("must be refused")
}

fn strategy(strategy: Strategy) -> Policy {
    Policy { strategy, placement: Placement::Any, ..Policy::default() }
}

#[test]
fn a_volume_that_fits_on_one_disk_gets_the_smallest_disk_that_fits() {
    let pools = [enforced("a", "big", gib(100)), enforced("a", "mid", gib(20)), enforced("a", "low", gib(5))];
    is(sizes(&request(gib(10)), &Policy::default(), &pools), &[("mid", 10)]);
}

#[test]
fn a_volume_larger_than_any_disk_takes_the_largest_whole_and_the_rest_best_fit() {
    let pools = [
        enforced("a", "p1", gib(300)),
        enforced("a", "p2", gib(90)),
        enforced("b", "p3", gib(200)),
        enforced("b", "p4", gib(60)),
    ];
    is(sizes(&request(gib(350)), &Policy::default(), &pools), &[("p1", 300), ("p4", 50)]);
}

#[test]
fn the_rest_may_use_what_is_less_than_a_quantum() {
    let half = Bytes::mib(512);
    let pools =
        [enforced("a", "p1", gib(10).saturating_add(half)), enforced("a", "p2", gib(3).saturating_add(half))];
    let plan = plan(&request(gib(13).saturating_add(half)), &Policy::default(), &pools).unwrap();
    assert_eq!(plan.capacity, gib(13).saturating_add(half));
    assert_eq!(plan.branches.len(), 2);
    assert!(super::plan(&request(gib(14)), &Policy::default(), &pools).is_err());
}

#[test]
fn two_pools_on_one_filesystem_count_once() {
    let mut pools =
        [enforced("a", "p1", gib(10)), enforced("a", "p2", gib(10)), enforced("b", "p3", gib(10))];
    for view in &mut pools {
        view.pool.device = "same".to_owned();
    }
    is(sizes(&request(gib(20)), &Policy::default(), &pools), &[("p1", 10), ("p3", 10)]);
    let refused = refusal(&request(gib(21)), &Policy::default(), &pools);
    assert_eq!(refused.largest, gib(20));
    assert_eq!(refused.pools[1].reason, "it shares its filesystem with pool p1, which counts for both");
}

#[test]
fn local_disks_come_first_while_the_number_of_branches_stays_the_same() {
    let pools =
        [enforced("here", "l1", gib(10)), enforced("here", "l2", gib(5)), enforced("there", "r", gib(40))];
    let at = |size| Request { consumer: Some(node("here")), ..request(gib(size)) };
    is(sizes(&at(14), &Policy::default(), &pools), &[("l1", 10), ("l2", 4)]);
    is(sizes(&at(30), &Policy::default(), &pools), &[("r", 30)]);
    is(sizes(&at(48), &Policy::default(), &pools), &[("l1", 10), ("r", 38)]);
}

#[test]
fn a_local_volume_without_a_known_consumer_lies_on_one_node() {
    let policy = Policy { placement: Placement::Local, ..Policy::default() };
    let pools = [
        enforced("a", "a1", gib(6)),
        enforced("a", "a2", gib(6)),
        enforced("b", "b1", gib(50)),
        enforced("c", "c1", gib(11)),
    ];
    is(sizes(&request(gib(10)), &policy, &pools), &[("b1", 10)]);
    let on_a = Request { topology: vec![node("a")], ..request(gib(10)) };
    is(sizes(&on_a, &policy, &pools), &[("a1", 6), ("a2", 4)]);
    let refused = refusal(&Request { consumer: Some(node("c")), ..request(gib(12)) }, &policy, &pools);
    assert_eq!(refused.largest, gib(11));
    assert!(
        refused.reason.ends_with("1 of 4 pools qualify (3 not on the consumer's node)"),
        "{}",
        refused.reason
    );
}

#[test]
fn a_volume_on_one_node_takes_the_fewest_branches_then_the_node_with_the_most_room() {
    let one = |size| Request { reach: Reach::OneNode, ..request(gib(size)) };
    let pools = [
        enforced("a", "a1", gib(6)),
        enforced("a", "a2", gib(6)),
        enforced("b", "b1", gib(8)),
        enforced("c", "c1", gib(9)),
        enforced("d", "d1", gib(9)),
    ];
    is(sizes(&one(5), &Policy::default(), &pools), &[("a1", 5)]);
    is(sizes(&one(8), &Policy::default(), &pools), &[("c1", 8)]);
    is(sizes(&one(10), &Policy::default(), &pools), &[("a1", 6), ("a2", 4)]);
    is(sizes(&one(5), &strategy(Strategy::Balanced), &pools), &[("a1", 3), ("a2", 2)]);
    let on_b = Request { consumer: Some(node("b")), ..one(5) };
    is(sizes(&on_b, &strategy(Strategy::Fewest), &pools), &[("b1", 5)]);
}

#[test]
fn spreading_on_one_node_is_over_its_disks() {
    let pools = [enforced("a", "a1", gib(60)), enforced("a", "a2", gib(60)), enforced("a", "a3", gib(60))];
    let one = Request { reach: Reach::OneNode, ..request(gib(9)) };
    is(sizes(&one, &strategy(Strategy::Spread), &pools), &[("a1", 3), ("a2", 3), ("a3", 3)]);
}

#[test]
fn a_refusal_says_when_it_is_for_the_one_node() {
    let pools = [enforced("a", "a1", gib(40)), enforced("b", "b1", gib(60))];
    let one = |size| Request { reach: Reach::OneNode, ..request(gib(size)) };
    let reason = |request: &Request| refusal(request, &strategy(Strategy::Fewest), &pools).reason;
    assert_eq!(
        reason(&one(80)),
        "80Gi would fit over several nodes only, and this one is placed on one node: \
         the largest volume that fits on one now is 60Gi; 2 of 2 pools qualify"
    );
    let used = Request { consumer: Some(node("a")), ..one(50) };
    assert!(
        reason(&used).starts_with(
            "50Gi does not fit on node a, where it is used, and this one is placed on one node: \
             the largest volume that fits there now is 40Gi"
        ),
        "{}",
        reason(&used)
    );
    assert!(reason(&one(101)).starts_with("101Gi does not fit: the largest volume that fits now is 60Gi"));
    let elsewhere = Request { consumer: Some(node("c")), ..one(1) };
    assert!(reason(&elsewhere).contains("no volume fits there now"), "{}", reason(&elsewhere));
}

#[test]
fn the_capacity_of_a_node_is_that_of_its_own_pools() {
    let pools = [enforced("a", "a1", gib(40)), enforced("a", "a2", gib(10)), enforced("b", "b1", gib(60))];
    let on = |name| {
        let used = Request { consumer: Some(node(name)), reach: Reach::OneNode, ..request(Bytes::ZERO) };
        capacity(&used, &Policy::default(), &pools)
    };
    assert_eq!((on("a").total, on("a").maximum_volume_size), (gib(50), gib(50)));
    assert_eq!((on("b").total, on("b").maximum_volume_size), (gib(60), gib(60)));
    assert!(on("c").total.is_zero());
    let all =
        capacity(&Request { reach: Reach::OneNode, ..request(Bytes::ZERO) }, &Policy::default(), &pools);
    assert_eq!((all.total, all.maximum_volume_size), (gib(110), gib(60)));
}

#[test]
fn balanced_shares_are_in_proportion_to_free_space() {
    let pools = [enforced("a", "p1", gib(60)), enforced("b", "p2", gib(30)), enforced("c", "p3", gib(10))];
    is(sizes(&request(gib(50)), &strategy(Strategy::Balanced), &pools), &[("p1", 30), ("p2", 15), ("p3", 5)]);
}

#[test]
fn balanced_leaves_out_pools_whose_share_is_no_branch() {
    let pools = [enforced("a", "p1", gib(60)), enforced("b", "p2", gib(40)), enforced("c", "tiny", gib(1))];
    is(sizes(&request(gib(10)), &strategy(Strategy::Balanced), &pools), &[("p1", 6), ("p2", 4)]);
}

#[test]
fn spread_is_over_nodes_first_and_even() {
    let pools = [
        enforced("a", "a1", gib(90)),
        enforced("a", "a2", gib(80)),
        enforced("b", "b1", gib(70)),
        enforced("c", "c1", gib(5)),
    ];
    let policy = strategy(Strategy::Spread);
    is(sizes(&request(gib(15)), &policy, &pools), &[("a1", 5), ("b1", 5), ("c1", 5)]);
    is(sizes(&request(gib(25)), &policy, &pools), &[("a1", 10), ("b1", 10), ("c1", 5)]);
    is(sizes(&request(gib(240)), &policy, &pools), &[("a1", 85), ("a2", 80), ("b1", 70), ("c1", 5)]);
}

#[test]
fn spread_finds_other_nodes_behind_many_larger_disks_of_one() {
    let mut pools: Vec<PoolView> = (0..40).map(|i| enforced("a", &format!("p{i}"), gib(100))).collect();
    pools.extend((0..7).map(|i| enforced(&format!("b{i}"), "p", gib(10))));
    let policy = Policy { max_branches: 8, ..strategy(Strategy::Spread) };
    assert_eq!(sizes(&request(gib(8)), &policy, &pools).len(), 8);
    let plan = plan(&request(gib(8)), &policy, &pools).unwrap();
    let nodes: std::collections::HashSet<&NodeName> =
        plan.branches.iter().map(|branch| &branch.node).collect();
    assert_eq!(nodes.len(), 8);
}

#[test]
fn a_forced_number_of_branches_is_even() {
    let pools = [enforced("a", "p1", gib(90)), enforced("b", "p2", gib(90)), enforced("c", "p3", gib(90))];
    let policy = Policy { min_branches: 3, ..Policy::default() };
    is(sizes(&request(gib(9)), &policy, &pools), &[("p1", 3), ("p2", 3), ("p3", 3)]);
}

#[test]
fn refusals_name_the_obstacle() {
    let mut pools = vec![
        enforced("a", "p1", gib(41)),
        enforced("a", "p2", gib(20)),
        enforced("b", "p3", gib(500)),
        enforced("b", "p4", gib(500)),
        enforced("c", "p5", gib(0)),
    ];
    pools[2].pool.state = PoolState::Absent;
    pools[2].pool.message = "its filesystem is not mounted".to_owned();
    pools[3].pool.media = Media::Hdd;
    let nvme = Policy { media: vec![Media::Nvme, Media::Unknown], ..Policy::default() };
    let refused = refusal(&request(gib(100)), &nvme, &pools);
    assert_eq!(
        refused.reason,
        "100Gi does not fit: the largest volume that fits now is 61Gi; 2 of 5 pools qualify (1 absent, 1 full, \
         1 media hdd not in nvme,unknown)"
    );
    let reasons: Vec<&str> = refused.pools.iter().map(|verdict| verdict.reason.as_str()).collect();
    assert_eq!(
        reasons,
        [
            "it could give 41Gi",
            "it could give 20Gi",
            "the pool is absent: its filesystem is not mounted",
            "media hdd not in nvme,unknown",
            "0 can be promised, the smallest branch is 4Ki",
        ]
    );

    let three = Policy { min_branches: 3, ..nvme.clone() };
    let reason = refusal(&request(gib(10)), &three, &pools).reason;
    assert!(
        reason.starts_with("minBranches 3 needs as many filesystems, and only 2 can be used"),
        "{reason}"
    );
    let two = Policy { min_branches: 2, ..nvme.clone() };
    let reason = refusal(&Request { limit: Some(gib(1)), ..request(gib(1)) }, &two, &pools).reason;
    assert!(
        reason.contains("does not fit into 2 branches in quanta of 1Gi: the smallest volume"),
        "{reason}"
    );
    let reason = refusal(&Request { limit: Some(gib(1)), ..request(gib(2)) }, &nvme, &pools).reason;
    assert!(reason.starts_with("2Gi is more than the limit of 1Gi"), "{reason}");
    let reason = refusal(&request(gib(1)), &nvme, &[]).reason;
    assert_eq!(reason, "1Gi does not fit: there is no room for any volume now; 0 of 0 pools qualify");
}

#[test]
fn a_block_volume_is_one_raw_image() {
    let pools = [enforced("a", "p1", gib(10)), enforced("a", "p2", gib(20))];
    let block = |size| Request { mode: VolumeMode::Block, ..request(gib(size)) };
    let planned = plan(&block(8), &Policy::default(), &pools).unwrap();
    let [branch] = planned.branches.as_slice() else { panic!("one branch") };
    assert_eq!((branch.pool.as_str(), branch.format, branch.fs_type), ("p1", BranchFormat::Image, None));
    assert_eq!(branch.size, gib(8));
    let refused = plan(&block(25), &Policy::default(), &pools).unwrap_err();
    assert_eq!(refused.largest, gib(20));
    assert!(refused.reason.contains("a block volume of several is not supported"), "{}", refused.reason);
    let two = Policy { min_branches: 2, ..Policy::default() };
    assert!(plan(&block(1), &two, &pools).unwrap_err().reason.contains("not supported"));
}

#[test]
fn the_format_follows_what_the_pool_can_do() {
    let mut plain = pool("a", "plain", gib(10));
    let quota = enforced("a", "quota", gib(20));
    let format = |policy: &Policy, view: &PoolView| {
        plan(&request(gib(5)), policy, std::slice::from_ref(view)).map(|plan| plan.branches[0].format)
    };
    let auto = Policy::default();
    assert_eq!(format(&auto, &quota), Ok(BranchFormat::Directory));
    assert_eq!(format(&auto, &plain), Ok(BranchFormat::Image));
    let directory = Policy { format: FormatChoice::Directory, ..auto.clone() };
    assert!(format(&directory, &plain).unwrap_err().reason.contains("without size enforcement"));
    let accepted = Policy { accept_unenforced: true, ..directory };
    assert_eq!(format(&accepted, &plain), Ok(BranchFormat::Directory));
    plain.pool.image_filesystems = Vec::new();
    assert!(format(&auto, &plain).unwrap_err().reason.contains("without ext4 images"));
    assert_eq!(format(&Policy { accept_unenforced: true, ..auto }, &plain), Ok(BranchFormat::Directory));
}

#[test]
fn what_an_image_filesystem_takes_is_added() {
    let pools = [pool("a", "p1", gib(10)), pool("a", "p2", gib(10))];
    let planned = Planner::new(&Shape::Linear, &request(gib(12)), &Policy::default(), &pools).plan().unwrap();
    assert_eq!(planned.capacity, gib(12));
    assert_eq!(planned.branches[0].size, gib(10));
    assert!(planned.branches[0].usable < gib(10));
    assert!(planned.branches[1].size > gib(2));
}

#[test]
fn capacity_tells_all_space_and_the_largest_single_volume() {
    let pools = [enforced("a", "p1", gib(10)), enforced("b", "p2", gib(20)), enforced("c", "p3", gib(30))];
    let policy = Policy { max_branches: 2, ..Policy::default() };
    let found = capacity(&request(Bytes::ZERO), &policy, &pools);
    assert_eq!((found.total, found.maximum_volume_size), (gib(60), gib(50)));
    assert_eq!(found.minimum_volume_size, Bytes::new(4096));
    let local = Policy { placement: Placement::Local, ..policy };
    let on_b = Request { topology: vec![node("b")], ..request(Bytes::ZERO) };
    assert_eq!(capacity(&on_b, &local, &pools).maximum_volume_size, gib(20));
}
