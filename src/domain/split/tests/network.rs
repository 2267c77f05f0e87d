//! Plans over nodes that cannot all reach each other.

use super::properties::{any_question, check};
use super::*;
use crate::domain::reach::{Ability, NodeReach, Transport, TransportReport, reachable};

/// What a node can: as owner and as consumer by NVMe, then the same by NFS.
type Can = [bool; 4];

const ALL: Can = [true; 4];
const NONE: Can = [false; 4];
const CONSUMES: Can = [false, true, false, true];
const ONLY_NVME: Can = [true, true, false, false];

fn node(name: &str, can: Can) -> NodeReach {
    let ability = |able: bool| Ability { able, reason: if able { "" } else { "no module" }.to_owned() };
    let report = |transport, owner, consumer| TransportReport {
        transport,
        owner: ability(owner),
        consumer: ability(consumer),
        authentication: ability(false),
        identity: None,
    };
    let [nvme_owner, nvme_consumer, nfs_owner, nfs_consumer] = can;
    NodeReach {
        node: name.parse().unwrap(),
        transports: vec![
            report(Transport::NvmeTcp, nvme_owner, nvme_consumer),
            report(Transport::Nfs, nfs_owner, nfs_consumer),
        ],
        addresses: vec!["10.0.0.1".to_owned()],
    }
}

fn network(nodes: &[(&str, Can)]) -> Network {
    Network::new(nodes.iter().map(|(name, can)| node(name, *can)))
}

fn used_on(consumer: &str, gib: u64) -> Request {
    Request { consumer: Some(consumer.parse().unwrap()), ..request(Bytes::gib(gib)) }
}

fn within<'a>(
    shape: &'a Shape,
    request: &'a Request,
    policy: &'a Policy,
    pools: &'a [PoolView],
    network: &'a Network,
) -> Within<'a, Shape> {
    Within { overhead: shape, request, policy, pools: pools.iter().collect(), network }
}

/// Node, size in GiB and format of each branch, without overheads.
fn split(
    request: &Request,
    policy: &Policy,
    pools: &[PoolView],
    network: &Network,
) -> Vec<(String, u64, BranchFormat)> {
    let plan = within(&Shape::Nothing, request, policy, pools, network).plan().unwrap();
    plan.branches.iter().map(|b| (b.node.to_string(), b.size.get() >> 30, b.format)).collect()
}

fn refused(request: &Request, policy: &Policy, pools: &[PoolView], network: &Network) -> Infeasible {
    within(&Shape::Nothing, request, policy, pools, network).plan().expect_err("must be refused")
}

fn image(node: &str, gib: u64) -> (String, u64, BranchFormat) {
    (node.to_owned(), gib, BranchFormat::Image)
}

fn directory(node: &str, gib: u64) -> (String, u64, BranchFormat) {
    (node.to_owned(), gib, BranchFormat::Directory)
}

#[test]
fn branches_lie_only_where_the_consumer_reaches_them() {
    let pools =
        [pool("a", "p", Bytes::gib(10)), pool("b", "p", Bytes::gib(40)), pool("c", "p", Bytes::gib(30))];
    let network = network(&[("a", CONSUMES), ("b", CONSUMES), ("c", ALL)]);
    let policy = Policy::default();
    assert_eq!(split(&used_on("a", 30), &policy, &pools, &network), [image("c", 30)]);
    assert_eq!(split(&used_on("a", 35), &policy, &pools, &network), [image("a", 10), image("c", 25)]);
    assert_eq!(split(&used_on("b", 35), &policy, &pools, &network), [image("b", 35)]);
    let refusal = refused(&used_on("a", 41), &policy, &pools, &network);
    assert_eq!(refusal.largest, Bytes::gib(40));
    assert_eq!(refusal.pools[1].reason, "node b cannot export branches by nvme-tcp: no module");
    assert!(
        refusal.reason.ends_with("2 of 3 pools qualify (1 on nodes that cannot export by nvme-tcp)"),
        "{}",
        refusal.reason
    );
}

#[test]
fn a_node_without_disks_is_served_from_others_if_it_can_attach() {
    let pools = [pool("a", "p", Bytes::gib(10)), pool("b", "p", Bytes::gib(10))];
    let network = network(&[("a", ALL), ("b", ALL), ("compute", CONSUMES), ("bare", NONE)]);
    for placement in [Placement::PreferLocal, Placement::Any] {
        let policy = Policy { placement, ..Policy::default() };
        let plan = split(&used_on("compute", 15), &policy, &pools, &network);
        assert_eq!(plan, [image("a", 10), image("b", 5)]);
        let refusal = refused(&used_on("bare", 1), &policy, &pools, &network);
        assert_eq!(refusal.largest, Bytes::ZERO);
        assert_eq!(
            refusal.pools[0].reason,
            "node bare cannot attach branches of other nodes by nvme-tcp: no module"
        );
        let refusal = refused(&used_on("unknown", 1), &policy, &pools, &network);
        assert!(refusal.pools[0].reason.contains("its agent tells of no such transport"));
    }
    let local = Policy { placement: Placement::Local, ..Policy::default() };
    assert_eq!(refused(&used_on("compute", 1), &local, &pools, &network).largest, Bytes::ZERO);
}

#[test]
fn a_directory_that_the_consumer_cannot_reach_becomes_an_image_and_its_own_stays_one() {
    let pools = [enforced("a", "p", Bytes::gib(10)), enforced("b", "p", Bytes::gib(10))];
    let policy = Policy::default();
    let nvme = network(&[("a", ONLY_NVME), ("b", ONLY_NVME)]);
    assert_eq!(split(&used_on("a", 15), &policy, &pools, &nvme), [directory("a", 10), image("b", 5)]);
    let both = network(&[("a", ALL), ("b", ALL)]);
    assert_eq!(split(&used_on("a", 15), &policy, &pools, &both), [directory("a", 10), directory("b", 5)]);
    let directories = Policy { format: FormatChoice::Directory, ..policy };
    let refusal = refused(&used_on("a", 15), &directories, &pools, &nvme);
    assert_eq!(refusal.pools[1].reason, "node b cannot export branches by nfs: no module");
}

#[test]
fn while_the_consumer_is_unknown_a_directory_must_be_in_reach_of_all_who_may_be_it() {
    let pools = [enforced("a", "p", Bytes::gib(10)), enforced("b", "p", Bytes::gib(10))];
    let policy = Policy::default();
    let some = network(&[("a", ALL), ("b", ALL), ("c", ONLY_NVME)]);
    assert_eq!(split(&request(Bytes::gib(15)), &policy, &pools, &some), [image("a", 10), image("b", 5)]);
    let on_a_or_b =
        Request { topology: vec!["a".parse().unwrap(), "b".parse().unwrap()], ..request(Bytes::gib(15)) };
    assert_eq!(split(&on_a_or_b, &policy, &pools, &some), [directory("a", 10), directory("b", 5)]);
}

#[test]
fn where_no_node_reaches_another_a_volume_lies_on_one() {
    let pools = [
        enforced("a", "p", Bytes::gib(10)),
        enforced("a", "q", Bytes::gib(5)),
        pool("b", "p", Bytes::gib(12)),
    ];
    let bare = network(&[("a", NONE), ("b", NONE)]);
    let policy = Policy::default();
    assert_eq!(
        split(&request(Bytes::gib(15)), &policy, &pools, &bare),
        [directory("a", 10), directory("a", 5)]
    );
    let refusal = refused(&request(Bytes::gib(16)), &policy, &pools, &bare);
    assert_eq!(refusal.largest, Bytes::gib(15));
    assert!(refusal.reason.contains("the largest volume that fits now is 15"), "{}", refusal.reason);
}

#[test]
fn strategies_shape_plans_over_the_nodes_in_reach() {
    let pools = [
        pool("a", "p", Bytes::gib(40)),
        pool("b", "p", Bytes::gib(20)),
        pool("c", "p", Bytes::gib(20)),
        pool("d", "p", Bytes::gib(80)),
    ];
    let network = network(&[("a", ALL), ("b", ALL), ("c", ALL), ("d", CONSUMES)]);
    let shaped = |strategy, placement| {
        let policy = Policy { strategy, placement, ..Policy::default() };
        split(&used_on("a", 16), &policy, &pools, &network)
    };
    assert_eq!(shaped(Strategy::Fewest, Placement::Any), [image("b", 16)]);
    assert_eq!(shaped(Strategy::Fewest, Placement::PreferLocal), [image("a", 16)]);
    assert_eq!(shaped(Strategy::Balanced, Placement::Any), [image("a", 8), image("b", 4), image("c", 4)]);
    let spread = shaped(Strategy::Spread, Placement::Any);
    assert_eq!(spread.len(), 3);
    assert!(spread.iter().all(|(node, size, _)| node != "d" && (5..=6).contains(size)), "{spread:?}");
}

prop_compose! {
    /// Nodes of [`pools`], one without disks, and one of which nothing is known.
    fn networks()(cans in prop::collection::vec(any::<[bool; 4]>(), 4), known in 2_usize..=4) -> Network {
        let names = ["n0", "n1", "elsewhere", "n2"];
        Network::new(names.iter().zip(cans).take(known).map(|(name, can)| node(name, can)))
    }
}

/// Whether a node reaches all branches of a plan.
fn serves(network: &Network, consumer: &NodeName, plan: &Plan) -> bool {
    let known =
        |name: &NodeName| network.node(name).cloned().unwrap_or_else(|| NodeReach::silent(name.clone()));
    plan.branches.iter().all(|b| reachable(&known(&b.node), &known(consumer), b.format).is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_plan_can_be_used_where_it_is_to_be(question in any_question(), network in networks()) {
        let (shape, request, policy, pools) = question;
        let Ok(plan) = within(&shape, &request, &policy, &pools, &network).plan() else { return Ok(()) };
        check(shape, &request, &policy, &pools, &plan)?;
        let one_node = plan.branches.iter().all(|branch| branch.node == plan.branches[0].node);
        match &request.consumer {
            Some(consumer) => prop_assert!(serves(&network, consumer, &plan), "{:?}", plan),
            None if request.topology.is_empty() => {
                prop_assert!(one_node || network.nodes().any(|node| serves(&network, &node.node, &plan)));
            }
            None => prop_assert!(request.topology.iter().any(|node| serves(&network, node, &plan)), "{:?}", plan),
        }
    }

    #[test]
    fn what_is_published_is_true_and_a_page_more_is_refused(question in any_question(), network in networks()) {
        let (shape, request, policy, pools) = question;
        let request = Request { limit: None, ..request };
        let capacity = within(&shape, &request, &policy, &pools, &network).capacity();
        let works = |size| {
            let request = Request { size, ..request.clone() };
            within(&shape, &request, &policy, &pools, &network).plan().is_ok()
        };
        let most = capacity.maximum_volume_size;
        prop_assert!(most <= capacity.total);
        prop_assert!(most.is_zero() || works(most));
        for more in [1, 4096] {
            prop_assert!(!works(most.saturating_add(Bytes::new(more))));
        }
    }

    #[test]
    fn nothing_is_refused_that_the_pools_in_reach_could_hold(question in any_question(), network in networks()) {
        let (shape, request, policy, pools) = question;
        let request = Request { reach: Reach::AnyNode, consumer: Some("n0".parse().unwrap()), ..request };
        let policy = Policy { format: FormatChoice::Image, ..policy };
        let known = |name: &NodeName| network.node(name).cloned().unwrap_or_else(|| NodeReach::silent(name.clone()));
        let consumer = known(&"n0".parse().unwrap());
        let in_reach = |view: &PoolView| reachable(&known(&view.node), &consumer, BranchFormat::Image).is_ok();
        let near: Vec<PoolView> = pools.iter().filter(|view| in_reach(view)).cloned().collect();
        let over = within(&shape, &request, &policy, &pools, &network).plan();
        prop_assert_eq!(over.ok(), Planner::new(&shape, &request, &policy, &near).plan().ok());
    }

    #[test]
    fn where_all_reach_all_nothing_is_refused_for_the_network(question in any_question()) {
        let (shape, request, policy, pools) = question;
        let network = network(&[("n0", ALL), ("n1", ALL), ("n2", ALL), ("elsewhere", ALL)]);
        let with = within(&shape, &request, &policy, &pools, &network).plan();
        prop_assert_eq!(with.ok(), Planner::new(&shape, &request, &policy, &pools).plan().ok());
    }
}
