//! Reading and writing an image of another node as the driver exports, attaches and mounts it, against the same image exported,
//! attached and mounted without the driver.
//!
//! Both ends are those of the driver (`inside transport`), called as agents call them, and the mount is bound once as for a pod. No
//! agent runs: none has a part in reading and writing. Both images are attached to the same machine at the same time.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;

use crate::bare::Bare;
use crate::number;
use crate::report::{Report, median};
use crate::support::{Network, Options, Result};
use crate::transport::{End, at, id};

const BOUND: Duration = Duration::from_secs(300);

/// What is worked on.
const WAYS: [(&str, &str); 2] = [("bare", "/mnt/bare-x"), ("Union CSI", "/mnt/pod")];

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
    let net = Network::boot_with(&Options::new(2))?;
    let (a, b) = (net.machine("a"), net.machine("b"));
    let image = "/pool/branches/x/disk.img";
    a.run_within(
        BOUND,
        format!(
            "mkfs.ext4 -q -F /disk/data; mkdir -p /pool; mount /disk/data /pool; mkdir -p $(dirname {image})
             fallocate -l 160MiB {image}
             mkfs.ext4 -q -F -b 4096 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 {image}"
        ),
    )?;
    let bare = Bare::copies(&net, "b", &[("a".to_owned(), "x".to_owned())])?;
    bare.attach("one-by-one")?;
    let (owner, consumer) = (End { machine: a, kind: "nvme" }, End { machine: b, kind: "nvme" });
    let endpoint = owner.must(&format!("export {} source={image}", id(0)))?;
    owner.must(&format!("allow {} peer={}", id(0), consumer.identity()?))?;
    let attached = consumer.must(&format!("attach {} {}", id(0), at(&endpoint)))?;
    let device = attached["at"].as_str().expect("a device");
    let seen = b.run_within(
        BOUND,
        format!(
            "mkdir -p /mnt/branch /mnt/pod
             mount -o errors=remount-ro {device} /mnt/branch
             mount --bind /mnt/branch /mnt/pod
             mount -o remount,bind,nosuid,nodev /mnt/pod
             grep /mnt/ /proc/mounts; grep . /sys/block/nvme*n*/queue/{{max_sectors_kb,scheduler,read_ahead_kb}}"
        ),
    )?;
    let flags = a.run("lsattr /pool/bare-x /pool/branches/x/disk.img; filefrag /pool/bare-x /pool/branches/x/disk.img || true")?;
    eprintln!("{seen}\n{flags}");
    let mut figures: BTreeMap<(usize, usize), Vec<Figure>> = BTreeMap::new();
    // The first round makes what later ones find, and does not count.
    for round in 0..=rounds {
        for (work, (_, kind, amount, _)) in WORK.iter().enumerate() {
            // Each goes first in turn.
            for turn in 0..WAYS.len() {
                let way = (turn + round as usize) % WAYS.len();
                let command = format!("sync; inside load {kind} {} {amount}; sync", WAYS[way].1);
                let before = sent(&net);
                let rate: f64 = b.run_within(BOUND, command)?.trim().parse().unwrap_or(f64::NAN);
                // Random work goes on for a time, the rest until it is done.
                let done = if kind.starts_with("random") { rate } else { 1.0 };
                if round > 0 {
                    figures
                        .entry((work, way))
                        .or_default()
                        .push(Figure { rate, sent: (sent(&net) - before) / done });
                }
            }
        }
    }
    Ok(table(&figures, rounds))
}

/// One kind of work, one way, once.
#[derive(Clone, Copy, Debug)]
struct Figure {
    rate: f64,
    /// Bytes on the network for the same work.
    sent: f64,
}

/// Bytes between the two machines until now, both ways together.
#[allow(clippy::cast_precision_loss, reason = "far fewer than 2^52")]
fn sent(net: &Network) -> f64 {
    (net.passed("a", "b") + net.passed("b", "a")) as f64
}

fn table(figures: &BTreeMap<(usize, usize), Vec<Figure>>, rounds: u32) -> Report {
    let mut report = Report::new(&["bare", "Union CSI, of it", "least", "most", "sent, of bare"]);
    for (work, (name, _, _, unit)) in WORK.iter().enumerate() {
        let of = |way: usize, what: fn(&Figure) -> f64| {
            figures[&(work, way)].iter().map(what).collect::<Vec<f64>>()
        };
        // Of each round with itself: what else the machine does changes from round to round.
        let ratios = |what: fn(&Figure) -> f64| -> Vec<f64> {
            of(1, what).iter().zip(of(0, what)).map(|(ours, base)| ours / base).collect()
        };
        let (rates, sent) = (ratios(|f| f.rate), ratios(|f| f.sent));
        let (least, most) = rates.iter().fold((f64::MAX, f64::MIN), |(l, m), r| (l.min(*r), m.max(*r)));
        let base = of(0, |f| f.rate);
        let cells = vec![
            format!("{:.1} {unit}", median(&base)),
            format!("{:.2}", median(&rates)),
            format!("{least:.2}"),
            format!("{most:.2}"),
            format!("{:.3}", median(&sent)),
        ];
        report.row(
            name,
            cells,
            json!({ "bare": base, "ours": of(1, |f| f.rate), "ratios": rates, "sent": sent }),
        );
    }
    report.note(format!(
        "Ratios to the bare image in the same round: the median of {rounds} rounds, and the least and the largest; sent: of the bytes \
         on the network for the same work. Machines emulated in software."
    ));
    report
}
