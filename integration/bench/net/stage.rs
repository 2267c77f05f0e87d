//! How long it takes until a volume of branches on three other nodes is staged, against connecting and mounting three such
//! images by hand.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use union_csi::domain::access::Access;
use union_csi::store::object::Branch;

use crate::bare::Bare;
use crate::number;
use crate::report::{Report, percentile};
use crate::support::cluster::{Cluster, Node, Volume};
use crate::support::{Result, Running};

const BOUND: Duration = Duration::from_secs(180);
/// Between two looks at the API server, which is on the host and quick.
const STEP: Duration = Duration::from_millis(5);

/// What is measured, in the order of the table. All but the first three are parts of those.
const ROWS: [(&str, &str); 12] = [
    ("bare", "bare: connect and mount three images, one after the other"),
    ("together", "bare: the same, all three at the same time"),
    ("granted", "NodeStage, branches given to the node before"),
    ("granted-branches", "- of it: connect, check and mount the branches"),
    ("granted-union", "- of it: start MergerFS and ask it for its options"),
    ("granted-rest", "- of it: the rest (objects read, records, binds)"),
    ("whole", "VolumeAttachment made, to NodeStage answered"),
    ("whole-attached", "- of it: until it is attached"),
    ("whole-ordered", "- of it: until the leader has ordered every branch"),
    ("whole-opened", "- of it: until every owner has opened its branch and told so"),
    ("whole-staged", "- from then until NodeStage is answered"),
    ("bare-mount", "bare: of it, mounting alone"),
];

pub fn run() -> Result<Report> {
    let rounds = number("BENCH_ROUNDS", 20);
    let cluster = Cluster::boot_with(4)?;
    let consumer = cluster.node("d");
    cluster.class("three", "Immediate", json!({"strategy": "spread", "minBranches": "3"}));
    let volume = cluster.bound(&cluster.claim("three", "three", "192Mi"));
    let branches: Vec<_> = cluster
        .branches_of(&volume)
        .iter()
        .map(|b| (b.spec.node.to_string(), b.spec.id.to_string()))
        .collect();
    assert_eq!(branches.len(), 3, "three branches");
    let bare = Bare::copies(&cluster.net, "d", &branches)?;
    let mut times: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    // The first round loads programs and modules, and does not count.
    for round in 0..=rounds {
        let mut found = BTreeMap::new();
        for turn in 0..3 {
            match (turn + round) % 3 {
                0 => by_hand(&bare, "one-by-one", "bare", &mut found)?,
                1 => by_hand(&bare, "together", "together", &mut found)?,
                _ => ours(&cluster, consumer, &volume, &mut found)?,
            }
        }
        eprintln!("round {round}: {found:?}");
        if round > 0 {
            for (name, seconds) in found {
                times.entry(name).or_default().push(seconds);
            }
        }
    }
    Ok(table(&times, rounds))
}

type Found = BTreeMap<&'static str, f64>;

fn by_hand(bare: &Bare<'_>, order: &str, name: &'static str, found: &mut Found) -> Result {
    let took = bare.attach(order)?;
    bare.detach()?;
    found.insert(name, took["seconds"].as_f64().unwrap_or(f64::NAN));
    if name == "bare" {
        found.insert("bare-mount", took["mount"].as_f64().unwrap_or(f64::NAN));
    }
    Ok(())
}

fn is_for(access: &Access, node: &str) -> bool {
    access.consumer.as_ref().is_some_and(|consumer| consumer.as_str() == node)
}

/// Whether the branch's owner has opened it to that node, and told so.
pub fn is_open_to(branch: &Branch, node: &str) -> bool {
    branch.status.export.as_ref().is_some_and(|export| is_for(&export.allowed, node))
}

/// What the call told that it took; `None` while it goes on.
fn answered(call: &mut Running) -> Option<f64> {
    let text = call.output_so_far();
    let last: Value = text.lines().last().and_then(|line| serde_json::from_str(line).ok())?;
    last["staged"].as_f64()
}

/// Until `at` it must be over.
fn next_look(at: Instant, call: &Running) {
    assert!(at.elapsed() < BOUND, "staging does not end: {call:?}");
    thread::sleep(STEP);
}

fn ours(cluster: &Cluster, node: Node<'_>, volume: &Volume, found: &mut Found) -> Result {
    let mut call = node.begin_stage(volume)?;
    assert!(call.says("calls", BOUND)?, "the call is made: {call:?}");
    let begun = Instant::now();
    let so_far = |begun: Instant| begun.elapsed().as_secs_f64();
    cluster.ask_to_attach(volume, node.name());
    loop {
        let branches = cluster.branches_of(volume);
        let ordered = |b: &Branch| b.spec.access.as_ref().is_some_and(|access| is_for(access, node.name()));
        if branches.iter().all(ordered) {
            found.entry("whole-ordered").or_insert_with(|| so_far(begun));
        }
        if branches.iter().all(|b| is_open_to(b, node.name())) {
            found.entry("whole-opened").or_insert_with(|| so_far(begun));
        }
        if !found.contains_key("whole-attached") && cluster.attached(volume, node.name()) == Ok(true) {
            found.insert("whole-attached", so_far(begun));
        }
        if answered(&mut call).is_some() {
            let whole = so_far(begun);
            found.insert("whole", whole);
            found.insert("whole-staged", whole - found.get("whole-opened").copied().unwrap_or(f64::NAN));
            break;
        }
        assert!(!call.has_ended() || answered(&mut call).is_some(), "staging is refused: {call:?}");
        next_look(begun, &call);
    }
    node.unstage(volume)?;

    let mut call = node.begin_stage(volume)?;
    let begun = Instant::now();
    let took = loop {
        if let Some(took) = answered(&mut call) {
            break took;
        }
        assert!(!call.has_ended() || answered(&mut call).is_some(), "staging is refused: {call:?}");
        next_look(begun, &call);
    };
    let told = node.last_told("the volume is staged")?;
    let part = |name: &str| -> f64 {
        let value = told.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|v| v.parse().ok()).unwrap_or(f64::NAN)
    };
    let (branches, union) = (part("branches.seconds"), part("union.seconds"));
    found.insert("granted", took);
    found.insert("granted-branches", branches);
    found.insert("granted-union", union);
    found.insert("granted-rest", took - branches - union);
    node.unstage(volume)?;
    cluster.detach(volume, node.name());
    Ok(())
}

fn table(times: &BTreeMap<&str, Vec<f64>>, rounds: u32) -> Report {
    let mut report = Report::new(&["p50", "p99", "p50 to the bare one", "p99 to the bare one"]);
    // The quicker way of doing it by hand.
    let base = |p: f64| percentile(&times["bare"], p).min(percentile(&times["together"], p));
    for (name, title) in ROWS {
        let of = |p: f64| percentile(&times[name], p);
        let cells = vec![
            format!("{:.0} ms", 1e3 * of(0.5)),
            format!("{:.0} ms", 1e3 * of(0.99)),
            format!("{:.2}", of(0.5) / base(0.5)),
            format!("{:.2}", of(0.99) / base(0.99)),
        ];
        report.row(title, cells, json!(times[name]));
    }
    report.note(format!(
        "{rounds} rounds, all ways in each, in turns; a p99 of them is close to the largest. Ratios to the quicker of the two \
         ways by hand. Machines emulated in software: four on the processors of one."
    ));
    report
}
