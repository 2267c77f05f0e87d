//! What it costs that images are written through at their owner.

use std::collections::BTreeMap;

use serde_json::json;

use crate::number;
use crate::report::{Report, median};
use crate::support::{Network, Options, Result};
use crate::transport::{BRANCH, End, at, id};

const IMAGE: &str = "/mnt/image";

/// How an image is kept: its name in the table, whether it is written through, whether it was written out in full before.
const WAYS: [(&str, bool, bool); 3] =
    [("back", false, false), ("through", true, false), ("through, written out before", true, true)];

/// Work in this order: its name in the table, what `inside load` calls it, how much, what is counted.
const WORK: [(&str, &str, u32, &str); 6] = [
    ("sequential write, 1 MiB, first time", "write", 96, "MiB/s"),
    ("sequential write, 1 MiB, again", "write", 96, "MiB/s"),
    ("4 KiB random write + fdatasync", "random-write", 0, "/s"),
    ("sequential read", "read", 0, "MiB/s"),
    ("4 KiB files: create", "create", 800, "/s"),
    ("4 KiB files: remove", "remove", 800, "/s"),
];

pub fn run() -> Result<Report> {
    let rounds = number("BENCH_ROUNDS", 3);
    let net = Network::boot_with(&Options::new(2))?;
    let mut figures: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    let mut flushes: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    net.machine("a").run("mkfs.ext4 -q -F /disk/data; mkdir -p /mnt; mount /disk/data /mnt")?;
    for _ in 0..rounds {
        for (way, (_, through, written)) in WAYS.iter().enumerate() {
            for (work, (rate, flushed)) in once(&net, *through, *written)?.into_iter().enumerate() {
                figures.entry((work, way)).or_default().push(rate);
                flushes.entry((work, way)).or_default().push(flushed);
            }
        }
    }
    let columns: Vec<&str> = WAYS.iter().map(|(name, ..)| *name).collect();
    let mut report = Report::new(&columns);
    for (work, (name, _, _, unit)) in WORK.iter().enumerate() {
        let middle = |way: usize| median(&figures[&(work, way)]);
        let flushed = |way: usize| median(&flushes[&(work, way)]);
        let base = middle(0);
        let cells = (0..WAYS.len()).map(|way| match way {
            0 => format!("{base:.1} {unit}, {:.0} flushes", flushed(0)),
            way => format!("{:.2}, {:.0} flushes", middle(way) / base, flushed(way)),
        });
        let data: Vec<_> =
            (0..WAYS.len()).map(|way| json!({ "rate": middle(way), "flushes": flushed(way) })).collect();
        report.row(name, cells.collect(), json!(data));
    }
    report.note(format!(
        "Ratios to writing back, medians of {rounds} alternating rounds; flushes are those of the owner's disk in the whole \
         work. Machines emulated in software."
    ));
    Ok(report)
}

/// All work on a new image: rates, and flushes of the owner's disk.
fn once(net: &Network, through: bool, written: bool) -> Result<Vec<(f64, f64)>> {
    let (owner, consumer) =
        (End { machine: net.machine("a"), kind: "nvme" }, End { machine: net.machine("b"), kind: "nvme" });
    let make =
        if written { "dd if=/dev/zero bs=1M count=256 conv=fsync of=" } else { "fallocate -l 256MiB " };
    owner.machine.run(format!("{make}{IMAGE} 2>/dev/null; sync"))?;
    let way = if through { "write-through=yes" } else { "write-through=no" };
    let endpoint = owner.must(&format!("export {} source={IMAGE} {way}", id(0)))?;
    owner.must(&format!("allow {} peer={} {way}", id(0), consumer.identity()?))?;
    let attached = consumer.must(&format!("attach {} {}", id(0), at(&endpoint)))?;
    let device = attached["at"].as_str().expect("a device");
    // As branches are formatted, but with everything written that would be written in the background.
    let format = format!(
        "mkfs.ext4 -q -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 {device}; mkdir -p /mnt; mount {device} /mnt"
    );
    consumer.machine.run(format)?;
    let flushes = || -> Result<f64> {
        let text =
            owner.machine.run("awk '{print $16}' /sys/block/$(basename $(readlink /disk/data))/stat")?;
        Ok(text.trim().parse().unwrap_or(f64::NAN))
    };
    let mut found = Vec::new();
    for (_, work, amount, _) in WORK {
        let before = flushes()?;
        let rate = consumer.machine.run(format!("inside load {work} /mnt {amount}"))?;
        found.push((rate.trim().parse().unwrap_or(f64::NAN), flushes()? - before));
    }
    consumer.machine.run("umount /mnt")?;
    consumer.must(&format!("detach {}", id(0)))?;
    owner.must(&format!("unexport branch={BRANCH}"))?;
    owner.machine.run(format!("rm {IMAGE}"))?;
    Ok(found)
}
