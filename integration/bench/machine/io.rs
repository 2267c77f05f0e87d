//! `bench io`: a plain directory against published volumes on the same disks, alternating.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use super::agent::{Agent, Csi, Wanted};
use super::report::{Report, median};
use super::support::run as command;
use super::{disk_of, disks, number, program, scratch};

/// One place to measure, and how it is called in the table.
struct Place {
    name: &'static str,
    dir: PathBuf,
    read_only: bool,
}

/// fio jobs: name in the table, options. The file is laid out before.
const JOBS: [(&str, &[&str]); 7] = [
    ("4 KiB random read, direct, QD1", &["--rw=randread", "--bs=4k", "--direct=1"]),
    ("4 KiB random write, direct, QD1", &["--rw=randwrite", "--bs=4k", "--direct=1"]),
    ("4 KiB random read, direct, 4 jobs", &["--rw=randread", "--bs=4k", "--direct=1", "--numjobs=4"]),
    ("4 KiB random write, direct, 4 jobs", &["--rw=randwrite", "--bs=4k", "--direct=1", "--numjobs=4"]),
    ("4 KiB write + fdatasync", &["--rw=randwrite", "--bs=4k", "--fdatasync=1"]),
    ("1 MiB sequential read, buffered", &["--rw=read", "--bs=1m"]),
    ("1 MiB sequential write, buffered", &["--rw=write", "--bs=1m", "--end_fsync=1"]),
];

/// Size of the file that fio works on.
const FILE_MIB: u32 = 256;

/// What is measured of small files, in this order.
const FILE_ROWS: [&str; 4] = ["create", "stat", "open + read + close", "remove"];

/// Operations or bytes a second of one fio job, or why it failed.
pub fn fio(dir: &Path, options: &[&str], seconds: u64) -> Result<f64, String> {
    let out = Command::new("fio")
        .args(["--name=j", "--filename_format=bench.fio", "--ioengine=psync", "--randrepeat=0"])
        .arg(format!("--size={FILE_MIB}m"))
        .args(["--time_based", "--group_reporting", "--output-format=json", &format!("--runtime={seconds}")])
        .arg(format!("--directory={}", dir.display()))
        .args(options)
        .output()
        .expect("fio");
    let text = String::from_utf8_lossy(&out.stdout);
    let json: Value =
        text.find('{').and_then(|at| serde_json::from_str(&text[at..]).ok()).unwrap_or_default();
    let job = json.pointer("/jobs/0").cloned().unwrap_or_default();
    let errno = job.get("error").and_then(Value::as_i64).unwrap_or(-1);
    if !out.status.success() || errno != 0 {
        let errno = i32::try_from(errno).unwrap_or(-1);
        return Err(if errno == 22 { "EINVAL".to_owned() } else { format!("error {errno}") });
    }
    let rate = |way: &str| job.pointer(&format!("/{way}/bw_bytes")).and_then(Value::as_f64).unwrap_or(0.0);
    Ok(rate("read") + rate("write"))
}

/// Files a second for create, stat, open + read, remove of `count` files of 4 KiB in 100 directories.
#[allow(clippy::cast_precision_loss, reason = "a count of files")]
pub fn small_files(dir: &Path, count: usize, read_only: bool) -> [Option<f64>; 4] {
    let root = dir.join("small");
    let path = |i: usize| root.join(format!("d{}", i % 100)).join(format!("f{i}"));
    let timed = |work: &mut dyn FnMut(usize)| {
        let begun = Instant::now();
        (0..count).for_each(work);
        Some(count as f64 / begun.elapsed().as_secs_f64())
    };
    let content = [7_u8; 4096];
    let create = if read_only {
        None
    } else {
        (0..100).for_each(|d| fs::create_dir_all(root.join(format!("d{d}"))).expect("a directory"));
        timed(&mut |i| fs::write(path(i), content).expect("a new file"))
    };
    let stat = timed(&mut |i| assert!(fs::metadata(path(i)).expect("a file").len() == 4096));
    let mut buffer = Vec::with_capacity(4096);
    let read = timed(&mut |i| {
        buffer.clear();
        fs::File::open(path(i)).and_then(|mut f| f.read_to_end(&mut buffer)).expect("a file");
        assert!(buffer == content, "a file has other content");
    });
    let remove = if read_only {
        None
    } else {
        let rate = timed(&mut |i| fs::remove_file(path(i)).expect("a file"));
        fs::remove_dir_all(&root).expect("empty directories");
        rate
    };
    [create, stat, read, remove]
}

/// Makes, stages and publishes a volume; answers with its target.
async fn volume(csi: &mut Csi, name: &str, mib: u64, parameters: &[(&str, &str)]) -> PathBuf {
    let mut wanted = Wanted::new(name, mib << 20, parameters);
    wanted.modes = vec![Mode::SingleNodeWriter, Mode::SingleNodeReaderOnly];
    let id = csi.create(&wanted).await.expect("CreateVolume").volume_id;
    csi.stage(&id, Mode::SingleNodeWriter).await.expect("NodeStageVolume");
    csi.publish(&id, Mode::SingleNodeWriter).await.expect("NodePublishVolume")
}

async fn remove(csi: &mut Csi, name: &str) {
    csi.unpublish(name).await.expect("NodeUnpublishVolume");
    csi.unstage(name).await.expect("NodeUnstageVolume");
    csi.delete(name).await.expect("DeleteVolume");
}

pub async fn run() -> Report {
    let rounds = number("BENCH_ROUNDS", 5);
    let seconds = number("BENCH_SECONDS", 2);
    let files = usize::try_from(number("BENCH_FILES", 20_000)).unwrap_or(20_000);
    let scratch = scratch();
    let disks = disks(&scratch, 3, 3072, true);
    let agent = Agent::start(&program(), scratch.path(), &disks, "");
    let mut csi = agent.csi().await;

    let plain = disk_of(&disks[0].1).join("plain");
    fs::create_dir(&plain).expect("the plain directory");
    let bare = {
        // The same image and options that a branch has, without anything of ours: what a filesystem in a file costs.
        let image = disk_of(&disks[0].1).join("bare.img").display().to_string();
        let point = scratch.join("bare");
        fs::create_dir(&point).expect("mount point");
        command("fallocate", &["-l", "640MiB", &image]);
        command("mkfs.ext4", &["-q", "-m", "0", "-E", "nodiscard,lazy_itable_init=0", &image]);
        let device = command("losetup", &["--find", "--show", "--direct-io=on", &image]);
        command("mount", &[&device, &point.display().to_string()]);
        command("losetup", &["-d", &device]);
        point
    };
    let directory = [("branchFormat", "directory"), ("enforcement", "none"), ("splitQuantum", "16Mi")];
    let image = [("branchFormat", "image"), ("splitQuantum", "16Mi")];
    let three = [("minBranches", "3"), ("strategy", "balanced")];
    let with = |a: &[(&'static str, &'static str)], b: &[(&'static str, &'static str)]| [a, b].concat();
    let mut places = vec![
        Place {
            name: "directory, 1 branch",
            dir: volume(&mut csi, "dir1", 512, &directory).await,
            read_only: false,
        },
        Place {
            name: "directory, 3 branches",
            dir: volume(&mut csi, "dir3", 1200, &with(&directory, &three)).await,
            read_only: false,
        },
        Place { name: "bare loop", dir: bare, read_only: false },
        Place { name: "image, 1 branch", dir: volume(&mut csi, "img1", 512, &image).await, read_only: false },
        Place {
            name: "image, 3 branches",
            dir: volume(&mut csi, "img3", 1200, &with(&image, &three)).await,
            read_only: false,
        },
    ];
    // A volume that only readers use: filled first, then staged again for reading.
    let filled = volume(&mut csi, "ro3", 600, &with(&directory, &three)).await;
    small_files_fill(&filled, files);
    csi.unpublish("ro3").await.expect("NodeUnpublishVolume");
    csi.unstage("ro3").await.expect("NodeUnstageVolume");
    csi.stage("ro3", Mode::SingleNodeReaderOnly).await.expect("NodeStageVolume for reading");
    let dir = csi.publish("ro3", Mode::SingleNodeReaderOnly).await.expect("NodePublishVolume for reading");
    places.push(Place { name: "directory, 3 branches, readers only", dir, read_only: true });

    let mut figures: BTreeMap<(usize, usize), Vec<Result<f64, String>>> = BTreeMap::new();
    let writable: Vec<&Path> = std::iter::once(plain.as_path())
        .chain(places.iter().filter(|p| !p.read_only).map(|p| p.dir.as_path()))
        .collect();
    for dir in &writable {
        lay_out(dir);
    }
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        let all = std::iter::once((0, plain.as_path(), false))
            .chain(places.iter().enumerate().map(|(i, p)| (i + 1, p.dir.as_path(), p.read_only)));
        let all: Vec<_> = all.collect();
        for (job, (_, options)) in JOBS.iter().enumerate() {
            for (place, dir, read_only) in &all {
                if !read_only {
                    figures.entry((job, *place)).or_default().push(fio(dir, options, seconds));
                }
            }
        }
        for (place, dir, read_only) in &all {
            for (row, rate) in small_files(dir, files, *read_only).into_iter().enumerate() {
                if let Some(rate) = rate {
                    figures.entry((JOBS.len() + row, *place)).or_default().push(Ok(rate));
                }
            }
        }
    }

    let mut columns = vec!["plain"];
    columns.extend(places.iter().map(|p| p.name));
    let mut report = Report::new(&columns);
    let names =
        JOBS.iter().map(|j| j.0.to_owned()).chain(FILE_ROWS.iter().map(|r| format!("{files} x 4 KiB: {r}")));
    for (row, name) in names.enumerate() {
        let middle = |place: usize| -> Result<f64, String> {
            let all = figures.get(&(row, place)).ok_or_else(|| "-".to_owned())?;
            let good: Vec<f64> = all.iter().filter_map(|r| r.as_ref().ok().copied()).collect();
            match all.iter().find_map(|r| r.as_ref().err()) {
                Some(error) => Err(error.clone()),
                None => Ok(median(&good)),
            }
        };
        let base = middle(0).expect("the plain directory can do everything");
        let unit = if row < JOBS.len() { format!("{:.1} MB/s", base / 1e6) } else { format!("{base:.0}/s") };
        let mut cells = vec![unit];
        let mut values = BTreeMap::from([("plain".to_owned(), json!(base))]);
        for (i, place) in places.iter().enumerate() {
            let cell = match middle(i + 1) {
                Ok(value) => {
                    values.insert(place.name.to_owned(), json!({ "value": value, "ratio": value / base }));
                    format!("{:.2}", value / base)
                }
                Err(why) => {
                    values.insert(place.name.to_owned(), json!({ "failed": why }));
                    why
                }
            };
            cells.push(cell);
        }
        report.row(&name, cells, json!(values));
    }
    report.note(format!(
        "Ratios to a plain directory on the same disk, medians of {rounds} alternating rounds, {seconds} s a job. \
         Differences under 0.15 mean nothing on a shared machine."
    ));
    if let Some(status) = agent.get("/v1/status") {
        let status: Value = serde_json::from_str(&status).unwrap_or_default();
        report.note(format!("Unions here: {}", status.get("abilities").cloned().unwrap_or_default()));
    }
    for name in ["dir1", "dir3", "img1", "img3", "ro3"] {
        remove(&mut csi, name).await;
    }
    report
}

/// Writes the file that [`fio`] reads, all of it: what was never written would be read without the disk.
pub fn lay_out(dir: &Path) {
    let file = fs::File::create(dir.join("bench.fio")).expect("the file for fio");
    let block = vec![0x5A_u8; 1 << 20];
    (0..FILE_MIB).for_each(|_| (&file).write_all(&block).expect("room for the file"));
    file.sync_all().expect("the file for fio");
}

/// Files as [`small_files`] reads them.
fn small_files_fill(dir: &Path, count: usize) {
    let root = dir.join("small");
    (0..100).for_each(|d| fs::create_dir_all(root.join(format!("d{d}"))).expect("a directory"));
    (0..count).for_each(|i| {
        fs::write(root.join(format!("d{}", i % 100)).join(format!("f{i}")), [7_u8; 4096])
            .expect("a new file");
    });
}
