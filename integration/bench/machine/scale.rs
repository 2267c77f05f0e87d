//! `bench scale`: a volume of many branches against one of one branch; many volumes on one machine.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use super::agent::{Agent, Csi, Wanted};
use super::process::{cpu_seconds, descriptors, resident_kib, share_kib, threads, unions};
use super::report::{Report, median, percentile};
use super::{disks, number, program, scratch};

/// Of each disk, which is sparse.
const DISK_MIB: u64 = 320;

/// Of each branch.
const BRANCH_MIB: u64 = 16;

/// What is measured of the files of a volume.
const WORK: [&str; 5] =
    ["create", "list (names)", "stat each, first", "stat each, again", "open + read + close"];

/// How many branches, by a class's parameters.
fn parameters(branches: &str, union: &str) -> [(String, String); 6] {
    [
        ("minBranches", branches),
        ("maxBranches", branches),
        ("strategy", "balanced"),
        ("splitQuantum", "1Mi"),
        ("branchFormat", "image"),
        ("union", union),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
}

fn wanted(name: &str, branches: u64, union: &str) -> Wanted {
    let count = branches.to_string();
    let parameters = parameters(&count, union);
    let parameters: Vec<(&str, &str)> = parameters.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    Wanted::new(name, (branches * BRANCH_MIB) << 20, &parameters)
}

fn milliseconds(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

async fn mount(csi: &mut Csi, id: &str) -> f64 {
    let begun = Instant::now();
    csi.stage(id, Mode::SingleNodeWriter).await.expect("NodeStageVolume");
    let staged = milliseconds(begun);
    csi.publish(id, Mode::SingleNodeWriter).await.expect("NodePublishVolume");
    staged
}

async fn unmount(csi: &mut Csi, id: &str) -> f64 {
    csi.unpublish(id).await.expect("NodeUnpublishVolume");
    let begun = Instant::now();
    csi.unstage(id).await.expect("NodeUnstageVolume");
    milliseconds(begun)
}

/// What many branches cost.
pub async fn branches() -> Report {
    let most = number("BENCH_BRANCHES", 256);
    let (files, rounds) = (number("BENCH_FILES", 2000), number("BENCH_ROUNDS", 3));
    let scratch = scratch();
    let disks = disks(&scratch, usize::try_from(most).expect("a count"), DISK_MIB, false);
    let begun = Instant::now();
    let agent = Agent::start(&program(), scratch.path(), &disks, "");
    let ready = begun.elapsed().as_secs_f64();
    let empty = resident_kib(agent.pid());
    let mut csi = agent.csi().await;
    let mut counts: Vec<(u64, &str)> = vec![(1, "whenNeeded"), (1, "always")];
    counts.extend([4, 16, 64, 256].into_iter().filter(|n| *n < most).map(|n| (n, "always")));
    counts.push((most, "always"));

    let name = |(branches, union): (u64, &str)| match union {
        "whenNeeded" => format!("{branches}, bound"),
        _ => branches.to_string(),
    };
    let columns: Vec<String> = counts.iter().map(|c| name(*c)).collect();
    let columns: Vec<&str> = columns.iter().map(String::as_str).collect();
    let mut report = Report::new(&columns);
    // By column: milliseconds of the calls, figures of the process, milliseconds of the work.
    let mut calls: Vec<[f64; 4]> = Vec::new();
    let mut memory: Vec<[f64; 4]> = Vec::new();
    let mut work: Vec<[f64; WORK.len()]> = Vec::new();
    for (branches, union) in &counts {
        let volume = wanted(&format!("wide-{branches}-{union}"), *branches, union);
        let begun = Instant::now();
        let id = csi.create(&volume).await.expect("CreateVolume").volume_id;
        let created = milliseconds(begun);
        mount(&mut csi, &id).await;
        let mut times: [Vec<f64>; WORK.len()] = Default::default();
        let (mut stages, mut unstages) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let at = csi.target(&id);
            times[0].push(create(&at, files));
            unstages.push(unmount(&mut csi, &id).await);
            stages.push(mount(&mut csi, &id).await);
            times[1].push(list(&at, files));
            times[2].push(stat(&at, files));
            times[3].push(stat(&at, files));
            times[4].push(read(&at, files));
            fs::remove_dir_all(at.join("many")).expect("the files are removed");
        }
        let processes = unions(&scratch.path().display().to_string());
        let sum = |of: fn(u32) -> f64| processes.iter().map(|p| of(*p)).sum::<f64>();
        #[allow(clippy::cast_precision_loss, reason = "KiB and counts")]
        memory.push([
            (resident_kib(agent.pid()).saturating_sub(empty)) as f64 / 1024.0,
            sum(|p| share_kib(p) as f64 / 1024.0),
            sum(|p| threads(p) as f64),
            sum(|p| descriptors(p) as f64),
        ]);
        unmount(&mut csi, &id).await;
        let begun = Instant::now();
        csi.delete(&id).await.expect("DeleteVolume");
        calls.push([created, median(&stages), median(&unstages), milliseconds(begun)]);
        work.push(times.map(|t| median(&t)));
        eprintln!("{branches} branches ({union}): done");
    }
    let mut row = |name: &str, values: Vec<f64>, format: &dyn Fn(f64) -> String| {
        let cells = values.iter().map(|v| format(*v)).collect();
        report.row(name, cells, json!(values));
    };
    for (index, call) in
        ["CreateVolume, ms", "Stage, ms", "Unstage, ms", "DeleteVolume, ms"].iter().enumerate()
    {
        row(call, calls.iter().map(|c| c[index]).collect(), &|v| format!("{v:.0}"));
    }
    let figures = ["agent, MiB more than empty", "MergerFS, MiB", "its threads", "its descriptors"];
    for (index, figure) in figures.iter().enumerate() {
        row(figure, memory.iter().map(|m| m[index]).collect(), &|v| format!("{v:.1}"));
    }
    for (index, what) in WORK.iter().enumerate() {
        row(&format!("{what}, ms"), work.iter().map(|w| w[index]).collect(), &|v| format!("{v:.0}"));
        // Against one branch that is joined too.
        let one = work[1][index];
        row(&format!("{what}, against 1"), work.iter().map(|w| w[index] / one).collect(), &|v| {
            format!("{v:.1}")
        });
    }
    report.note(format!(
        "One volume at a time, {most} disks and pools on one machine; {files} files of 100 bytes in one directory, medians of \
         {rounds} rounds; the first stat follows a mount. The agent was ready after {ready:.2} s with {:.1} MiB.",
        f64::from(u32::try_from(empty).unwrap_or(u32::MAX)) / 1024.0
    ));
    report
}

fn path(at: &Path, i: u64) -> std::path::PathBuf {
    at.join("many").join(format!("file-{i}"))
}

fn create(at: &Path, files: u64) -> f64 {
    fs::create_dir(at.join("many")).expect("a directory");
    let begun = Instant::now();
    for i in 0..files {
        fs::write(path(at, i), [b'x'; 100]).expect("a file");
    }
    milliseconds(begun)
}

fn list(at: &Path, files: u64) -> f64 {
    let begun = Instant::now();
    let found = fs::read_dir(at.join("many")).expect("the directory").count();
    let took = milliseconds(begun);
    assert_eq!(found as u64, files, "the directory is whole");
    took
}

fn stat(at: &Path, files: u64) -> f64 {
    let begun = Instant::now();
    for i in 0..files {
        assert_eq!(fs::metadata(path(at, i)).expect("a file").len(), 100);
    }
    milliseconds(begun)
}

fn read(at: &Path, files: u64) -> f64 {
    let mut content = Vec::with_capacity(128);
    let begun = Instant::now();
    for i in 0..files {
        content.clear();
        fs::File::open(path(at, i)).and_then(|mut f| f.read_to_end(&mut content)).expect("a file");
    }
    milliseconds(begun)
}

/// What many volumes of four branches cost, and how soon a new agent has them.
#[allow(clippy::cast_precision_loss, reason = "KiB and counts")]
pub async fn volumes() -> Report {
    let (most, seconds) = (number("BENCH_VOLUMES", 300), number("BENCH_SECONDS", 60));
    let scratch = scratch();
    let disks = disks(&scratch, 4, 32 << 10, false);
    let mut agent = Agent::start(&program(), scratch.path(), &disks, "");
    let mut csi = agent.csi().await;
    let directory = scratch.path().display().to_string();
    let mut report = Report::new(&[
        "stage p50 ms",
        "p99 ms",
        "publish p50 ms",
        "agent MiB",
        "% of a core",
        "MergerFS MiB each",
        "threads each",
        "descriptors each",
        "adopted after s",
    ]);
    let part = (most / 3).max(1);
    let (mut stages, mut publishes) = (Vec::new(), Vec::new());
    for i in 0..most {
        let id =
            csi.create(&wanted(&format!("many-{i}"), 4, "whenNeeded")).await.expect("CreateVolume").volume_id;
        let begun = Instant::now();
        csi.stage(&id, Mode::SingleNodeWriter).await.expect("NodeStageVolume");
        stages.push(milliseconds(begun));
        let begun = Instant::now();
        csi.publish(&id, Mode::SingleNodeWriter).await.expect("NodePublishVolume");
        publishes.push(milliseconds(begun));
        let count = i + 1;
        if count % part != 0 && count != most {
            continue;
        }
        eprintln!("{count} of {most} volumes mounted");
        tokio::time::sleep(Duration::from_secs(5)).await;
        let (before, begun) = (cpu_seconds(agent.pid()), Instant::now());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let share = 100.0 * (cpu_seconds(agent.pid()) - before) / begun.elapsed().as_secs_f64();
        let resident = resident_kib(agent.pid()) as f64 / 1024.0;
        let processes = unions(&directory);
        let each = |of: fn(u32) -> f64| {
            processes.iter().map(|p| of(*p)).sum::<f64>() / processes.len().max(1) as f64
        };
        let (p50, p99) = (percentile(&stages, 0.5), percentile(&stages, 0.99));
        let publish = percentile(&publishes, 0.5);
        let (mib, threads, open) = (
            each(|p| share_kib(p) as f64 / 1024.0),
            each(|p| threads(p) as f64),
            each(|p| descriptors(p) as f64),
        );
        agent.kill();
        let adopted = adopted(&mut agent, count).await;
        csi = agent.csi().await;
        report.row(
            &format!("{count} volumes, {} branches", count * 4),
            vec![
                format!("{p50:.0}"),
                format!("{p99:.0}"),
                format!("{publish:.1}"),
                format!("{resident:.1}"),
                format!("{share:.2}"),
                format!("{mib:.1}"),
                format!("{threads:.0}"),
                format!("{open:.0}"),
                format!("{adopted:.2}"),
            ],
            json!({
                "volumes": count, "stage_p50_ms": p50, "stage_p99_ms": p99, "publish_p50_ms": publish,
                "resident_mib": resident, "cpu_percent": share, "unions": processes.len(), "union_mib": mib,
                "union_threads": threads, "union_descriptors": open, "adopted_s": adopted,
            }),
        );
        (stages, publishes) = (Vec::new(), Vec::new());
    }
    for i in 0..most {
        let id = format!("many-{i}");
        unmount(&mut csi, &id).await;
        csi.delete(&id).await.expect("DeleteVolume");
    }
    report.note(format!(
        "Staging and publishing are those of the volumes of this row, one after the other; processor share over {seconds} s; \
         adopted: from the start of a new agent after the old one was killed until it shows all volumes healthy."
    ));
    report
}

/// Starts a new agent; after how many seconds it shows all volumes healthy.
async fn adopted(agent: &mut Agent, volumes: u64) -> f64 {
    let begun = Instant::now();
    agent.restart();
    loop {
        let all: Value =
            serde_json::from_str(&agent.get("/v1/volumes").unwrap_or_default()).unwrap_or_default();
        let healthy = all.as_array().map_or(0, |list| {
            list.iter().filter(|v| v.pointer("/local/health/abnormal") == Some(&Value::Bool(false))).count()
        });
        if healthy as u64 == volumes {
            return begun.elapsed().as_secs_f64();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "only {healthy} of {volumes} volumes are adopted"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
