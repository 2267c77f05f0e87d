//! What a user of a cluster would measure: `scripts/bench kube` makes one of three nodes, installs the release build as a user
//! does, prints a table and writes `target/bench/kube.json`. Nothing here asserts a time.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a benchmark prints its table, and ends where it cannot measure"
)]

#[path = "../../kube/tests/install.rs"]
mod install;
#[path = "../machine/report.rs"]
mod report;
mod scale;
#[path = "../../kube/tests/support.rs"]
mod support;

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams};
use report::{Report, median, percentile};
use serde_json::json;
use support::{PodOf, World, is_bound, is_ready, nodes, on_node, try_kubectl};

/// A number set in the environment, to shorten or lengthen a run.
pub fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn main() {
    if !std::env::args().any(|a| a == "--bench") && std::env::var_os("UNION_KUBE_DIR").is_none() {
        // `cargo test --benches` has no cluster.
        return;
    }
    let mut report = Report::new(&["p50", "p99", "what"]);
    let world = World::alone();
    idle(&world, &mut report);
    claims(&world, &mut report);
    pods(&world, &mut report);
    hundred(&world, &mut report);
    scale::run(&world, &mut report);
    report.note("The control plane, three nodes and the measuring share one machine.");
    report.finish("kube");
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// Waits without the pauses of tests: what is measured is shorter than they are.
fn until(mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !done() {
        assert!(Instant::now() < end, "it does not come to an end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Requests that our service account made so far, by the API server's audit log.
fn requests() -> usize {
    let path = std::path::PathBuf::from(std::env::var_os("UNION_KUBE_DIR").unwrap()).join("log/audit.log");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter(|l| {
            l.contains("system:serviceaccount:union:union-csi")
                && l.contains("\"stage\":\"ResponseComplete\"")
        })
        .count()
}

fn idle(world: &World, report: &mut Report) {
    let seconds = number("BENCH_SECONDS", 120);
    // What begins with the agents' start has ended by then.
    std::thread::sleep(Duration::from_secs(30));
    let before = requests();
    std::thread::sleep(Duration::from_secs(u64::try_from(seconds).unwrap()));
    let all = requests() - before;
    let each = all as f64 * 60.0 / seconds as f64 / nodes().len() as f64;
    report.row(
        "idle, API requests per minute and node",
        vec![format!("{each:.1}"), String::new(), format!("{all} in {seconds} s on {} nodes", nodes().len())],
        json!({"perMinuteAndNode": each}),
    );
    drop(world.agent_on(&nodes()[0]));
}

fn bound(world: &World, name: &str) -> bool {
    world.get::<PersistentVolumeClaim>(name).as_ref().is_some_and(is_bound)
}

fn claims(world: &World, report: &mut Report) {
    let class = world.class("claims", "Immediate", json!({"splitQuantum": "1Mi", "maxBranches": "1"}));
    let count = number("BENCH_VOLUMES", 50);
    let before = requests();
    let times: Vec<f64> = (0..count)
        .map(|n| {
            let name = format!("claim-{n}");
            let begun = Instant::now();
            world.claim(&name, &class, "16Mi");
            until(|| bound(world, &name));
            milliseconds(begun)
        })
        .collect();
    let made = requests() - before;
    latencies(report, "claim created to bound", &times, &format!("{count} one after the other"));
    let each = made as f64 / count as f64;
    report.row(
        "API requests for a volume made",
        vec![format!("{each:.1}"), String::new(), String::new()],
        json!({"each": each}),
    );
    remove_claims(world);
}

fn latencies(report: &mut Report, name: &str, times: &[f64], what: &str) {
    let (p50, p99) = (median(times), percentile(times, 0.99));
    report.row(
        name,
        vec![format!("{p50:.0} ms"), format!("{p99:.0} ms"), what.to_owned()],
        json!({"p50": p50, "p99": p99}),
    );
}

fn remove_claims(world: &World) {
    let all = world.api::<PersistentVolumeClaim>();
    let _ = world.block_on(all.delete_collection(&DeleteParams::default(), &ListParams::default())).unwrap();
    until(|| world.splits().is_empty());
}

fn pods(world: &World, report: &mut Report) {
    let class = world.class("pods", "Immediate", json!({"splitQuantum": "1Mi", "maxBranches": "1"}));
    let union = world.class("unions", "Immediate", json!({"splitQuantum": "16Mi", "minBranches": "2"}));
    let count = number("BENCH_PODS", 20);
    let node = nodes()[0].clone();
    let run = |name: &str, pod: PodOf| {
        let begun = Instant::now();
        world.run(pod);
        until(|| world.get::<Pod>(name).as_ref().is_some_and(is_ready));
        let took = milliseconds(begun);
        world.stop(name);
        took
    };
    let (mut empty, mut plain, mut merged) = (Vec::new(), Vec::new(), Vec::new());
    // In turn, so that what else the machine does falls on all alike.
    for n in 0..count {
        let name = format!("empty-{n}");
        let pod = PodOf::new(&name).with_volume("data", json!({"emptyDir": {}}), json!({}));
        empty.push(run(&name, pod.on(&node)));
        for (class, times) in [(&class, &mut plain), (&union, &mut merged)] {
            let name = format!("claim-{}-{n}", times.len());
            world.claim(&name, class, "48Mi");
            until(|| bound(world, &name));
            times.push(run(&name, PodOf::new(&name).with_claim(&name)));
            world.delete::<PersistentVolumeClaim>(&name);
            until(|| world.get::<PersistentVolumeClaim>(&name).is_none());
        }
    }
    latencies(report, "pod created to ready, emptyDir", &empty, &format!("{count} pods"));
    latencies(report, "pod created to ready, a volume of one branch", &plain, "its claim was bound before");
    latencies(
        report,
        "pod created to ready, a volume of two branches",
        &merged,
        "its claim was bound before",
    );
    until(|| world.splits().is_empty());
}

fn hundred(world: &World, report: &mut Report) {
    let class = world.class("hundred", "Immediate", json!({"splitQuantum": "1Mi", "maxBranches": "1"}));
    let claims: Vec<String> = (0..100)
        .map(|n| {
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": format!("data-{n:03}"), "namespace": world.namespace},
                "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
                         "resources": {"requests": {"storage": "16Mi"}}},
            })
            .to_string()
        })
        .collect();
    let begun = Instant::now();
    try_kubectl(&["create", "-f", "-"], Some(&claims.join("\n---\n"))).unwrap();
    until(|| world.list::<PersistentVolumeClaim>().iter().filter(|c| is_bound(c)).count() == 100);
    let took = milliseconds(begun);
    report.row(
        "100 claims at once, to the last bound",
        vec![format!("{took:.0} ms"), String::new(), "kubectl included".to_owned()],
        json!({"ms": took}),
    );
    remove_claims(world);
}

/// Resident memory in MiB and processor time in seconds of a node's agent.
pub fn weight(node: &str) -> (f64, f64) {
    let text = on_node(
        node,
        "p=$(pgrep -x union-csi); grep VmRSS /proc/$p/status | tr -dc 0-9; echo; cut -d' ' -f14,15 /proc/$p/stat",
    );
    let numbers: Vec<f64> = text.split_whitespace().filter_map(|n| n.parse().ok()).collect();
    // Clock ticks are hundredths on every Linux that there is.
    (numbers[0] / 1024.0, (numbers[1] + numbers[2]) / 100.0)
}
