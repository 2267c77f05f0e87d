//! Reading and writing a branch on another node, against the same image attached without the driver.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::bare::Bare;
use crate::number;
use crate::report::{Report, median};
use crate::support::Result;
use crate::support::cluster::Cluster;

const BOUND: Duration = Duration::from_secs(300);

/// What is worked on.
const WAYS: [&str; 3] = ["bare", "volume of one branch", "volume of three, joined"];

/// Work in this order: its name in the table, what `inside load` calls it, how much, what is counted.
const WORK: [(&str, &str, u32, &str); 8] = [
    ("sequential write, 1 MiB", "write", 64, "MiB/s"),
    ("sequential read, 1 MiB", "read", 0, "MiB/s"),
    ("4 KiB random write + fdatasync", "random-write", 0, "/s"),
    ("4 KiB random read", "random-read", 0, "/s"),
    ("4 KiB files: create", "create", 400, "/s"),
    ("4 KiB files: stat", "stat", 400, "/s"),
    ("4 KiB files: open + read + close", "open", 400, "/s"),
    ("4 KiB files: remove", "remove", 400, "/s"),
];

pub fn run() -> Result<Report> {
    let rounds = number("BENCH_ROUNDS", 5);
    let cluster = Cluster::boot_with(4)?;
    let consumer = cluster.node("d");
    cluster.class(
        "one",
        "Immediate",
        json!({"nodeSelector": "kubernetes.io/hostname=b", "maxBranches": "1"}),
    );
    cluster.class("three", "Immediate", json!({"strategy": "spread", "minBranches": "3"}));
    let one = cluster.bound(&cluster.claim("one", "one", "112Mi"));
    let branches: Vec<_> =
        cluster.branches_of(&one).iter().map(|b| (b.spec.node.to_string(), b.spec.id.to_string())).collect();
    assert_eq!(branches.len(), 1, "one branch");
    let bare = Bare::copies(&cluster, "d", &branches)?;
    let three = cluster.bound(&cluster.claim("three", "three", "336Mi"));
    assert_eq!(cluster.branches_of(&three).len(), 3, "three branches");
    bare.attach("one-by-one")?;
    let mut directories = vec![format!("{}/data", bare.directory())];
    for volume in [&one, &three] {
        cluster.attach(volume, "d");
        directories.push(consumer.mount(volume, "pod")?);
    }
    let mounts =
        consumer.machine.run("grep -E '/mnt/bare|fuse|nvme' /proc/mounts; df -k | grep -E 'nvme|pvc'")?;
    eprintln!("{mounts}");
    let mut figures: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    // The first round makes what later ones find, and does not count.
    for round in 0..=rounds {
        for (work, (_, kind, amount, _)) in WORK.iter().enumerate() {
            // Each goes first in turn.
            for turn in 0..WAYS.len() {
                let way = (turn + round as usize) % WAYS.len();
                let command = format!("sync; inside load {kind} {} {amount}", directories[way]);
                let rate = consumer.machine.run_within(BOUND, command)?;
                if round > 0 {
                    figures.entry((work, way)).or_default().push(rate.trim().parse().unwrap_or(f64::NAN));
                }
            }
        }
    }
    Ok(table(&figures, rounds))
}

fn table(figures: &BTreeMap<(usize, usize), Vec<f64>>, rounds: u32) -> Report {
    let mut report = Report::new(&WAYS);
    for (work, (name, _, _, unit)) in WORK.iter().enumerate() {
        let base = &figures[&(work, 0)];
        let mut cells = vec![format!("{:.1} {unit}", median(base))];
        let mut data = vec![json!({ "rates": base })];
        for way in 1..WAYS.len() {
            // Of each round with itself: what else the machine does changes from round to round.
            let ratios: Vec<f64> =
                figures[&(work, way)].iter().zip(base).map(|(rate, base)| rate / base).collect();
            let (least, most) = ratios.iter().fold((f64::MAX, f64::MIN), |(l, m), r| (l.min(*r), m.max(*r)));
            cells.push(format!("{:.2} ({least:.2} to {most:.2})", median(&ratios)));
            data.push(json!({ "rates": figures[&(work, way)], "ratios": ratios }));
        }
        report.row(name, cells, json!(data));
    }
    report.note(format!(
        "Ratios to the bare image in the same round: the median of {rounds} rounds, and the least and the largest. Machines \
         emulated in software."
    ));
    report
}
