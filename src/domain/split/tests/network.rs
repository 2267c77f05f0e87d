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
        encryption: ability(false),
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
    Within::new(shape, request, policy, pools.iter().collect(), network)
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
    assert!(
        refusal.reason.starts_with(
            "16Gi would fit over several nodes only, and a volume is placed on one node where nodes cannot reach each other's \
             branches: the largest volume that fits on one now is 15Gi"
        ),
        "{}",
        refusal.reason
    );
}

#[test]
fn where_only_others_reach_each_other_the_refusal_tells_of_the_nodes_that_could_hold_it() {
    let pools =
        [pool("a", "p", Bytes::gib(10)), pool("b", "p", Bytes::gib(8)), pool("c", "p", Bytes::gib(1))];
    let network = network(&[("a", NONE), ("b", NONE), ("c", ALL), ("d", ALL)]);
    let refusal = refused(&request(Bytes::gib(15)), &Policy::default(), &pools, &network);
    assert_eq!(refusal.largest, Bytes::gib(10));
    assert_eq!(refusal.pools[0].reason, "it could give 10Gi");
    assert!(refusal.reason.contains("would fit over several nodes only"), "{}", refusal.reason);
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

fn for_many(sharing: Sharing, gib: u64) -> Request {
    Request { sharing, ..request(Bytes::gib(gib)) }
}

#[test]
fn a_volume_for_readers_on_several_nodes_is_of_directories_that_others_reach() {
    let pools = [
        pool("a", "p", Bytes::gib(40)),
        enforced("b", "p", Bytes::gib(10)),
        enforced("c", "p", Bytes::gib(10)),
        enforced("d", "p", Bytes::gib(20)),
    ];
    let network = network(&[("a", ALL), ("b", ALL), ("c", ALL), ("d", ONLY_NVME)]);
    let policy = Policy::default();
    let readers = |gib| for_many(Sharing::ManyReaders, gib);
    assert_eq!(split(&readers(15), &policy, &pools, &network), [directory("b", 10), directory("c", 5)]);
    // As large as no directories in reach: on one node, where any number of pods reads it.
    assert_eq!(split(&readers(30), &policy, &pools, &network), [image("a", 30)]);
    let there = Request { consumer: Some("d".parse().unwrap()), ..readers(15) };
    assert_eq!(
        split(&there, &policy, &pools, &network),
        [directory("d", 15)],
        "d cannot attach what others have"
    );
    let images = Policy { format: FormatChoice::Image, ..policy };
    assert_eq!(split(&readers(15), &images, &pools, &network), [image("a", 15)]);
    let refusal = refused(&readers(45), &images, &pools, &network);
    assert!(
        refusal
            .reason
            .contains("placed on one node unless its branches are directories that are reached by nfs"),
        "{}",
        refusal.reason
    );
    assert_eq!(refusal.largest, Bytes::gib(40));
}

#[test]
fn a_volume_for_writers_on_several_nodes_has_one_directory_or_is_refused() {
    let pools = [
        pool("a", "p", Bytes::gib(40)),
        enforced("b", "p", Bytes::gib(10)),
        enforced("c", "p", Bytes::gib(12)),
    ];
    let all = network(&[("a", ALL), ("b", ALL), ("c", ALL)]);
    let policy = Policy::default();
    let writers = |gib| for_many(Sharing::ManyWriters, gib);
    assert_eq!(split(&writers(11), &policy, &pools, &all), [directory("c", 11)]);
    let refusal = refused(&writers(13), &policy, &pools, &all);
    assert_eq!(refusal.largest, Bytes::gib(12));
    assert!(refusal.reason.starts_with("13Gi does not fit in one branch (a volume that several nodes write"));
    let two = Policy { min_branches: 2, ..policy.clone() };
    assert!(refused(&writers(1), &two, &pools, &all).reason.contains("minBranches is 2"));
    // Nobody could reach a directory, or there is one node only: who asks for several is told.
    let images = network(&[("a", ONLY_NVME), ("b", ONLY_NVME), ("c", ONLY_NVME)]);
    for nobody in [&images, &network(&[("b", ALL)]), &Network::default()] {
        let refusal = refused(&writers(5), &policy, &pools, nobody);
        assert!(refusal.reason.contains("ReadWriteOnce"), "{}", refusal.reason);
        assert_eq!(refusal.largest, Bytes::ZERO);
    }
    // No disk that could hold a directory that others reach.
    let only_images = refused(&writers(5), &policy, &pools[..1], &all);
    assert!(only_images.reason.contains("0 of 1 pools qualify"), "{}", only_images.reason);
    // A class that keeps volumes on one node has them for the pods there.
    let local = Policy { placement: Placement::Local, ..policy.clone() };
    assert_eq!(split(&writers(13), &local, &pools, &images), [image("a", 13)]);
    // Also the branch at hand must be one that others reach.
    let not_b = network(&[("a", ALL), ("b", CONSUMES), ("c", ALL)]);
    let on_b = Request { consumer: Some("b".parse().unwrap()), ..writers(5) };
    assert_eq!(split(&on_b, &policy, &pools, &not_b), [directory("c", 5)]);
}

#[test]
fn a_single_node_spreads_over_its_disks_whatever_it_can_carry() {
    let pools =
        [pool("a", "p", Bytes::gib(10)), pool("a", "q", Bytes::gib(10)), pool("a", "r", Bytes::gib(10))];
    let policy = Policy { strategy: Strategy::Spread, placement: Placement::Any, ..Policy::default() };
    let plan = |can| split(&request(Bytes::gib(9)), &policy, &pools, &network(&[("a", can)])).len();
    assert_eq!((plan(ALL), plan(NONE)), (3, 3));
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
    fn where_nodes_tell_of_nothing_plans_are_those_of_one_node(question in any_question()) {
        let (shape, request, policy, pools) = question;
        // Several nodes cannot write there, and whoever asks for that is refused.
        prop_assume!(request.sharing != Sharing::ManyWriters);
        let one = Request { reach: Reach::OneNode, ..request.clone() };
        let network = Network::new(["n0", "n1", "n2"].map(|name| NodeReach::silent(name.parse().unwrap())));
        let within = within(&shape, &request, &policy, &pools, &network);
        let alone = Planner::new(&shape, &one, &policy, &pools);
        prop_assert_eq!(within.capacity(), alone.capacity());
        match (within.plan(), alone.plan()) {
            (Ok(a), Ok(b)) => prop_assert_eq!(a, b),
            (Err(a), Err(b)) => prop_assert_eq!(a.largest, b.largest),
            (a, b) => prop_assert!(false, "{a:?} {b:?}"),
        }
    }

    #[test]
    fn volumes_for_several_nodes_can_be_used_by_several_or_lie_on_one(
        question in any_question(),
        network in networks(),
        sharing in prop_oneof![Just(Sharing::ManyReaders), Just(Sharing::ManyWriters)],
    ) {
        let (shape, request, policy, pools) = question;
        let request = Request { sharing, ..request };
        let Ok(plan) = within(&shape, &request, &policy, &pools, &network).plan() else { return Ok(()) };
        let on_one = plan.branches.iter().all(|branch| branch.node == plan.branches[0].node);
        let exported = |branch: &PlannedBranch| {
            branch.format == BranchFormat::Directory
                && network.node(&branch.node).is_some_and(|node| node.owns(Transport::Nfs))
        };
        prop_assert!(on_one || plan.branches.iter().all(exported), "{:?}", plan);
        if sharing == Sharing::ManyWriters {
            prop_assert!(on_one, "{:?}", plan);
        }
    }

    #[test]
    fn what_a_node_can_get_is_the_same_by_its_offer_as_by_the_planner(
        question in any_question(),
        network in networks(),
    ) {
        let (shape, _, policy, pools) = question;
        for node in network.nodes() {
            let name = node.node.clone();
            let own: Vec<PoolView> = pools.iter().filter(|view| view.node == name).cloned().collect();
            let request = Request { consumer: Some(name.clone()), topology: vec![name.clone()], ..request(Bytes::ZERO) };
            let whole = within(&shape, &request, &policy, &pools, &network).capacity();
            let attaches = node.attaches();
            if Offer::counts(attaches, &policy) {
                let offer = Offer::with(
                    &shape, attaches, VolumeMode::Filesystem, &policy, pools.iter().collect(), &network,
                );
                prop_assert_eq!(offer.on_with(&shape, &name, &policy, &own, &network), whole, "{}", name);
            } else {
                prop_assert_eq!(within(&shape, &request, &policy, &own, &network).capacity(), whole, "{}", name);
            }
        }
    }

    #[test]
    fn nothing_is_refused_that_the_pools_in_reach_could_hold(question in any_question(), network in networks()) {
        let (shape, request, policy, pools) = question;
        let request = Request {
            reach: Reach::AnyNode,
            sharing: Sharing::Exclusive,
            consumer: Some("n0".parse().unwrap()),
            topology: Vec::new(),
            ..request
        };
        let policy = Policy { format: FormatChoice::Image, ..policy };
        let known = |name: &NodeName| network.node(name).cloned().unwrap_or_else(|| NodeReach::silent(name.clone()));
        let consumer = known(&"n0".parse().unwrap());
        let in_reach = |view: &PoolView| reachable(&known(&view.node), &consumer, BranchFormat::Image).is_ok();
        let near: Vec<PoolView> = pools.iter().filter(|view| in_reach(view)).cloned().collect();
        let over = within(&shape, &request, &policy, &pools, &network).plan();
        // Where no other node serves it, the disks of the one are what it is spread over.
        let alone = near.iter().all(|view| view.node == consumer.node);
        let expected = Planner::new(&shape, &request, &policy, &near).plan().ok();
        if alone {
            prop_assert_eq!(over.is_ok(), expected.is_some());
        } else {
            prop_assert_eq!(over.ok(), expected);
        }
    }

    #[test]
    fn where_all_reach_all_nothing_is_refused_for_the_network(question in any_question()) {
        let (shape, request, policy, pools) = question;
        let request = Request { sharing: Sharing::Exclusive, ..request };
        let network = network(&[("n0", ALL), ("n1", ALL), ("n2", ALL), ("elsewhere", ALL)]);
        let with = within(&shape, &request, &policy, &pools, &network).plan();
        prop_assert_eq!(with.ok(), Planner::new(&shape, &request, &policy, &pools).plan().ok());
    }
}

#[test]
fn a_class_whose_demands_keep_nodes_apart_is_told_so() {
    use crate::domain::policy::{Authentication, Encryption};
    let pools = [pool("a", "p", Bytes::gib(12)), pool("b", "p", Bytes::gib(12))];
    // They reach each other, and can neither encrypt nor prove who they are.
    let reached = network(&[("a", ALL), ("b", ALL)]);
    let encrypted = Policy { encryption: Encryption::Required, ..Policy::default() };
    let authenticated = Policy { authentication: Authentication::Required, ..Policy::default() };
    for (policy, said) in [(encrypted, "requires encryption"), (authenticated, "requires authentication")] {
        let two = Policy { min_branches: 2, ..policy.clone() };
        for (size, policy) in [(16, &policy), (8, &two)] {
            let refusal = refused(&request(Bytes::gib(size)), policy, &pools, &reached.under(policy));
            assert!(refusal.reason.contains(said), "{}", refusal.reason);
        }
    }
}
