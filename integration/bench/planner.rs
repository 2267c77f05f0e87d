//! How the planner's time grows with the cluster: 100, 1,000 and 10,000 nodes of 8 pools each, by every strategy. The
//! design asks for less than 10 ms at the largest.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use union_csi::domain::Bytes;
use union_csi::domain::policy::{Placement, Policy, Strategy};
use union_csi::domain::pool::PoolView;
use union_csi::domain::reach::Network;
use union_csi::domain::split::{Offer, Reach, Request, Sharing, plan, plan_within};
use union_csi::domain::volume::VolumeMode;

const POOLS: u64 = 8;

/// Pools of 1 to about 1,000 GiB in odd sizes, every second one with enforced directories.
fn cluster(nodes: u64) -> Vec<PoolView> {
    let pool = |n: u64| {
        // Knuth's multiplicative hash: sizes that are spread out and the same in every run.
        let size = Bytes::gib(1).get() + n.wrapping_mul(2_654_435_761) % (1 << 40);
        serde_json::from_value(serde_json::json!({
            "node": format!("worker-{:05}.storage.example.com", n / POOLS),
            "nodeLabels": { "topology.kubernetes.io/zone": format!("zone-{}", n % 3) },
            "name": format!("disk-{}", n % POOLS),
            "path": format!("/srv/disk-{}", n % POOLS),
            "device": format!("0f7b3f0c-9a0f-4d5c-8f53-{n:012}"),
            "media": "nvme",
            "enforcement": if n.is_multiple_of(2) { "ProjectQuota" } else { "None" },
            "total": 2 * size, "free": size, "allocatable": size,
        }))
    };
    (0..nodes * POOLS).map(pool).collect::<Result<_, _>>().expect("the description is valid")
}

/// The same pools in no order, as a list of other making could have them; the same in every run.
fn shuffled(mut pools: Vec<PoolView>) -> Vec<PoolView> {
    let mut state = 88_172_645_463_325_252_u64;
    for last in (1..pools.len()).rev() {
        // Marsaglia's xorshift64, shifts 13, 7, 17.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let other = usize::try_from(state % (u64::try_from(last).unwrap_or(u64::MAX) + 1)).unwrap_or(0);
        pools.swap(last, other);
    }
    pools
}

fn planner(criterion: &mut Criterion) {
    for (strategy, placement) in [
        (Strategy::Fewest, Placement::Any),
        (Strategy::Fewest, Placement::PreferLocal),
        (Strategy::Fewest, Placement::Local),
        (Strategy::Balanced, Placement::Any),
        (Strategy::Spread, Placement::Any),
    ] {
        let mut group = criterion.benchmark_group(format!("{strategy:?} {placement:?}"));
        for nodes in [100, 1_000, 10_000] {
            let pools = cluster(nodes);
            // Several times the largest disk, so that branches are needed; on one node that may be refused.
            let size = if placement == Placement::Local { Bytes::gib(1500) } else { Bytes::gib(8 << 10) };
            let request = Request {
                size,
                limit: None,
                mode: VolumeMode::Filesystem,
                consumer: (placement == Placement::PreferLocal).then(|| pools[0].node.clone()),
                topology: Vec::new(),
                reach: Reach::AnyNode,
                sharing: Sharing::Exclusive,
            };
            let policy = Policy { strategy, placement, ..Policy::default() };
            assert!(plan(&request, &policy, &pools).is_ok(), "a refusal is another measurement");
            group.throughput(Throughput::Elements(nodes * POOLS));
            group.bench_with_input(BenchmarkId::from_parameter(nodes), &pools, |bencher, pools| {
                bencher.iter(|| plan(&request, &policy, pools));
            });
            let network = able(&pools);
            group.bench_with_input(BenchmarkId::new("in a network", nodes), &pools, |bencher, pools| {
                bencher.iter(|| plan_within(&request, &policy, pools, &network));
            });
            if nodes == 10_000 {
                let pools = shuffled(pools);
                group.bench_with_input(BenchmarkId::new("in no order", nodes), &pools, |bencher, pools| {
                    bencher.iter(|| plan(&request, &policy, pools));
                });
            }
        }
        group.finish();
    }
}

/// A network in which all nodes of these pools carry everything.
fn able(pools: &[PoolView]) -> Network {
    let nodes: std::collections::BTreeSet<_> = pools.iter().map(|view| view.node.clone()).collect();
    Network::able(nodes)
}

/// What the capacity of all nodes costs: once for all, and for a node of its own kind.
fn offers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("capacity");
    for nodes in [100, 1_000, 10_000] {
        let pools = cluster(nodes);
        let network = able(&pools);
        let (policy, mode) = (Policy::default(), VolumeMode::Filesystem);
        let node = pools[0].node.clone();
        let attaches = network.node(&node).expect("a node").attaches();
        group.bench_with_input(BenchmarkId::new("offer", nodes), &pools, |bencher, pools| {
            bencher.iter(|| Offer::new(attaches, mode, &policy, pools, &network));
        });
        let offer = Offer::new(attaches, mode, &policy, &pools, &network);
        // It can attach and not export, so that its own pools count for it alone.
        let mut other = network.clone();
        let mut reach = network.node(&node).expect("a node").clone();
        reach.addresses.clear();
        other.put(reach);
        let own: Vec<PoolView> = pools.iter().filter(|view| view.node == node).cloned().collect();
        group.bench_with_input(BenchmarkId::new("node", nodes), &own, |bencher, own| {
            bencher.iter(|| offer.on(&node, &policy, own, &other));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = planner, offers
}
criterion_main!(benches);
