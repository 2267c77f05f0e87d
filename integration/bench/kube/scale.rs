//! An agent and the leader among 10,000 volumes and 1,000 nodes, which are objects only.

use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::json;
use union_csi::store::object::{Branch, Object, StorageNode, VolumeSplit};
use union_csi::store::{Collection, Store};

use crate::report::Report;
use crate::support::{World, nodes, try_kubectl};
use crate::{number, weight};

/// Writes under way at once: what makes the API server busy and no client wait for long.
const AT_ONCE: usize = 32;

pub fn run(world: &World, report: &mut Report) {
    let leader = leader();
    let agent = nodes().into_iter().find(|n| *n != leader).unwrap();
    told(report, "without volumes", &leader, &agent);
    let (volumes, count) = (number("BENCH_OBJECTS", 10_000), number("BENCH_NODES", 1000));
    let store = world.store();
    let begun = Instant::now();
    world.block_on(async {
        all((0..count).map(|n| put(store.nodes(), node(n)))).await;
        all((0..volumes).map(|n| put(store.branches(), branch(n, count)))).await;
        all((0..volumes).map(|n| put(store.splits(), split(n, count)))).await;
    });
    println!("{volumes} volumes and {count} nodes made in {:?}", begun.elapsed());
    std::thread::sleep(Duration::from_secs(20));
    told(report, &format!("{volumes} volumes, {count} nodes"), &leader, &agent);
}

fn told(report: &mut Report, name: &str, leader: &str, agent: &str) {
    const SECONDS: u64 = 60;
    let before = [weight(leader), weight(agent)];
    std::thread::sleep(Duration::from_secs(SECONDS));
    for ((role, node), before) in [("leader", leader), ("agent", agent)].into_iter().zip(before) {
        let (mib, seconds) = weight(node);
        let share = (seconds - before.1) / SECONDS as f64 * 100.0;
        report.row(
            &format!("{role}, {name}"),
            vec![format!("{mib:.0} MiB"), format!("{share:.1} % of a core"), "at rest".to_owned()],
            json!({"mib": mib, "percent": share}),
        );
    }
}

fn leader() -> String {
    let holder = try_kubectl(
        &["get", "lease", "-n", "union", "union-csi", "-o", "jsonpath={.spec.holderIdentity}"],
        None,
    )
    .unwrap();
    holder.rsplit_once('_').unwrap().0.to_owned()
}

async fn all(writes: impl Iterator<Item = impl Future<Output = ()>>) {
    futures::stream::iter(writes).buffer_unordered(AT_ONCE).collect::<()>().await;
}

/// Makes it and its status.
async fn put<T: Object>(collection: &dyn Collection<T>, object: T) {
    let mut made = collection.create(object.clone()).await.unwrap();
    made.set_status_of(&object);
    // The leader may have written first.
    let _ = collection.update_status(made).await;
}

fn node(n: usize) -> StorageNode {
    let pools: Vec<_> = (0..8)
        .map(|p| {
            json!({"name": format!("disk-{p}"), "path": format!("/srv/union/disk-{p}"), "device": format!("{n:08x}-{p:04x}"),
                   "filesystem": "xfs", "media": "nvme", "total": 1_u64 << 40, "free": 1_u64 << 39})
        })
        .collect();
    let name = format!("worker-{n:04}");
    serde_json::from_value(json!({"meta": {"name": name}, "spec": {"node": name}, "status": {"pools": pools, "agentVersion": "0.1.0", "kernel": "6.12.0"}}))
        .unwrap()
}

fn place(n: usize, nodes: usize) -> serde_json::Value {
    json!({"index": 0, "node": format!("worker-{:04}", n % nodes), "pool": format!("disk-{}", n % 8), "size": 10_u64 << 30,
           "usable": 10_u64 << 30, "format": "image", "fsType": "ext4"})
}

fn volume(n: usize) -> String {
    format!("pvc-0b1c7d2e-5a61-4c0e-8f0d-{n:012}")
}

fn branch(n: usize, nodes: usize) -> Branch {
    let (volume, mut spec) = (volume(n), place(n, nodes));
    let id = format!("{volume}-0");
    spec["id"] = json!(id);
    spec["volume"] = json!(volume);
    let labels = json!({"union.io/node": spec["node"], "union.io/volume": volume});
    serde_json::from_value(
        json!({"meta": {"name": id, "labels": labels}, "spec": spec, "status": {"phase": "Bound"}}),
    )
    .unwrap()
}

fn split(n: usize, nodes: usize) -> VolumeSplit {
    let volume = volume(n);
    serde_json::from_value(json!({
        "meta": {"name": volume},
        "spec": {"volume": volume, "requestName": volume, "capacity": 10_u64 << 30, "accessModes": ["SingleNodeMultiWriter"],
                 "parameters": {"strategy": "fewest"}, "branches": [place(n, nodes)], "nextIndex": 1},
    }))
    .unwrap()
}
