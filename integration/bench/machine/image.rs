//! `bench image`: how close an image can come to the directory that it lies in. One change to the way images are made and
//! attached at a time, each against a plain directory on the same disk, alternating.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::io::{fio, lay_out, small_files};
use super::report::{Report, median};
use super::support::{Scratch, run as command};
use super::{disk_of, disks, number, scratch};

/// One way to make, attach and mount an image.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    mkfs: &'static [&'static str],
    mount: &'static str,
    losetup: &'static [&'static str],
    /// Whether zeroes are written to all of it before, instead of leaving reserved extents unwritten.
    written: bool,
    scheduler: &'static str,
}

/// What branches have: see `platform/mkfs.rs` and `node/branch/attach.rs`.
const BRANCH: Way = Way {
    name: "as a branch has it (ext4)",
    mkfs: &["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0", "-J", "size=16"],
    mount: "errors=remount-ro",
    losetup: &["--direct-io=on"],
    written: false,
    scheduler: "",
};

const WAYS: [Way; 12] = [
    BRANCH,
    Way { name: "written out before", written: true, ..BRANCH },
    Way { name: "lazytime", mount: "errors=remount-ro,lazytime", ..BRANCH },
    Way { name: "noatime", mount: "errors=remount-ro,noatime", ..BRANCH },
    Way {
        name: "data=writeback, journal_async_commit (not safe: old data in new files)",
        mount: "errors=remount-ro,data=writeback,journal_async_commit",
        ..BRANCH
    },
    Way {
        name: "journal of 64 MiB",
        mkfs: &["mkfs.ext4", "-q", "-F", "-m", "0", "-E", "nodiscard,lazy_itable_init=0", "-J", "size=64"],
        ..BRANCH
    },
    Way {
        name: "fast_commit",
        mkfs: &[
            "mkfs.ext4",
            "-q",
            "-F",
            "-m",
            "0",
            "-O",
            "fast_commit",
            "-E",
            "nodiscard,lazy_itable_init=0",
        ],
        ..BRANCH
    },
    Way {
        name: "no journal (not safe: the bound of what ext4 can reach)",
        mkfs: &["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "nodiscard"],
        ..BRANCH
    },
    Way { name: "blocks of 4096", losetup: &["--direct-io=on", "--sector-size=4096"], ..BRANCH },
    Way { name: "scheduler none", scheduler: "none", ..BRANCH },
    Way { name: "XFS", mkfs: &["mkfs.xfs", "-q", "-f", "-K", "-s", "size=4096"], mount: "", ..BRANCH },
    Way {
        name: "through the page cache (not safe: holds data twice)",
        losetup: &["--direct-io=off"],
        ..BRANCH
    },
];

/// What is compared; small files follow.
const JOBS: [(&str, &[&str]); 4] = [
    ("random read, direct", &["--rw=randread", "--bs=4k", "--direct=1"]),
    ("random write, direct", &["--rw=randwrite", "--bs=4k", "--direct=1"]),
    ("write + fdatasync", &["--rw=randwrite", "--bs=4k", "--fdatasync=1"]),
    ("sequential write", &["--rw=write", "--bs=1m", "--end_fsync=1"]),
];

/// MiB of each image.
const SIZE: u64 = 640;

fn make(scratch: &Scratch, disk: &Path, number: usize, way: Way) -> PathBuf {
    let image = disk.join(format!("way{number}.img")).display().to_string();
    let point = scratch.join(&format!("way{number}"));
    fs::create_dir(&point).expect("mount point");
    command("fallocate", &["-l", &format!("{SIZE}MiB"), &image]);
    if way.written {
        let (of, count) = (format!("of={image}"), format!("count={SIZE}"));
        command("dd", &["if=/dev/zero", &of, "bs=1M", &count, "conv=notrunc,fsync", "status=none"]);
    }
    command(way.mkfs[0], &[&way.mkfs[1..], &[image.as_str()]].concat());
    let device = command("losetup", &[way.losetup, &["--find", "--show", &image]].concat());
    if !way.scheduler.is_empty() {
        let name = device.trim_start_matches("/dev/");
        fs::write(format!("/sys/block/{name}/queue/scheduler"), way.scheduler).expect("scheduler");
    }
    let options = if way.mount.is_empty() { "rw" } else { way.mount };
    command("mount", &["-o", options, &device, &point.display().to_string()]);
    command("losetup", &["-d", &device]);
    point
}

pub fn run() -> Report {
    let rounds = number("BENCH_ROUNDS", 5);
    let seconds = number("BENCH_SECONDS", 2);
    let files = usize::try_from(number("BENCH_FILES", 5_000)).unwrap_or(5_000);
    let scratch = scratch();
    let count = u64::try_from(WAYS.len()).unwrap_or(1);
    let disks = disks(&scratch, 1, (count + 2) * SIZE, true);
    let disk = disk_of(&disks[0].1);
    let plain = disk.join("plain");
    fs::create_dir(&plain).expect("the plain directory");
    let mut places = vec![plain];
    places.extend(WAYS.iter().enumerate().map(|(i, way)| make(&scratch, disk, i, *way)));
    for place in &places {
        lay_out(place);
    }
    let mut figures: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for (job, (name, options)) in JOBS.iter().enumerate() {
            for (i, dir) in places.iter().enumerate() {
                let rate = fio(dir, options, seconds).unwrap_or_else(|e| panic!("{name}: {e}"));
                figures.entry((i, job)).or_default().push(rate);
            }
        }
        for (i, dir) in places.iter().enumerate() {
            let [create, _, _, remove] = small_files(dir, files, false);
            for (row, rate) in [create, remove].into_iter().flatten().enumerate() {
                figures.entry((i, JOBS.len() + row)).or_default().push(rate);
            }
        }
    }
    let columns: Vec<&str> = JOBS.iter().map(|j| j.0).chain(["create files", "remove files"]).collect();
    let mut report = Report::new(&columns);
    let middle = |place: usize, column: usize| median(&figures[&(place, column)]);
    let cell = |column: usize| match column < JOBS.len() {
        true => format!("{:.1} MB/s", middle(0, column) / 1e6),
        false => format!("{:.0}/s", middle(0, column)),
    };
    report.row("plain directory", (0..columns.len()).map(cell).collect(), Value::Null);
    for (i, way) in WAYS.iter().enumerate() {
        let ratios: Vec<f64> = (0..columns.len()).map(|c| middle(i + 1, c) / middle(0, c)).collect();
        report.row(way.name, ratios.iter().map(|r| format!("{r:.2}")).collect(), json!(ratios));
    }
    report.note(format!(
        "Ratios to a plain directory on the same disk, medians of {rounds} alternating rounds, {seconds} s a job, queue \
         depth 1, {files} files of 4 KiB. Each line changes one thing of the first."
    ));
    report
}
