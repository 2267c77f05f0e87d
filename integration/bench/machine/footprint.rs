//! `bench footprint`: what the agent costs. `bench restart`: how quickly a new agent takes over what runs.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use super::agent::{Agent, Csi, Wanted};
use super::process::{cpu_seconds, resident_kib, unions as union_processes};
use super::report::Report;
use super::{disks, number, program, scratch};

/// Small volumes of two sparse image branches each, staged and published.
async fn mount_many(csi: &mut Csi, count: u64) {
    for i in 0..count {
        let parameters = [
            ("minBranches", "2"),
            ("maxBranches", "2"),
            ("strategy", "balanced"),
            ("splitQuantum", "16Mi"),
            ("branchFormat", "image"),
        ];
        let wanted = Wanted::new(&format!("many-{i}"), 48 << 20, &parameters);
        let id = csi.create(&wanted).await.expect("CreateVolume").volume_id;
        csi.stage(&id, Mode::SingleNodeWriter).await.expect("NodeStageVolume");
        csi.publish(&id, Mode::SingleNodeWriter).await.expect("NodePublishVolume");
        if i % 50 == 49 {
            eprintln!("{} of {count} volumes mounted", i + 1);
        }
    }
}

async fn unmount_many(csi: &mut Csi, count: u64) {
    for i in 0..count {
        let id = format!("many-{i}");
        csi.unpublish(&id).await.expect("NodeUnpublishVolume");
        csi.unstage(&id).await.expect("NodeUnstageVolume");
        csi.delete(&id).await.expect("DeleteVolume");
    }
}

#[allow(clippy::cast_precision_loss, reason = "KiB and seconds")]
pub async fn run() -> Report {
    let volumes = number("BENCH_VOLUMES", 200);
    let seconds = number("BENCH_SECONDS", 60);
    let scratch = scratch();
    let disks = disks(&scratch, 2, 16 << 10, false);
    let agent = Agent::start(&program(), scratch.path(), &disks, "");
    let mut report = Report::new(&["agent MiB", "agent % of a core", "MergerFS processes", "MiB each"]);
    let measure = async |report: &mut Report, name: &str| {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let before = cpu_seconds(agent.pid());
        let begun = Instant::now();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let share = 100.0 * (cpu_seconds(agent.pid()) - before) / begun.elapsed().as_secs_f64();
        let resident = resident_kib(agent.pid()) as f64 / 1024.0;
        let unions = union_processes(&scratch.path().display().to_string());
        let each =
            unions.iter().map(|p| resident_kib(*p)).sum::<u64>() as f64 / 1024.0 / unions.len().max(1) as f64;
        report.row(
            name,
            vec![format!("{resident:.1}"), format!("{share:.2}"), unions.len().to_string(), format!("{each:.1}")],
            json!({ "resident_mib": resident, "cpu_percent": share, "unions": unions.len(), "union_mib": each }),
        );
    };
    measure(&mut report, "idle, no volume").await;
    let mut csi = agent.csi().await;
    mount_many(&mut csi, volumes).await;
    measure(&mut report, &format!("idle, {volumes} mounted volumes of 2 branches")).await;
    unmount_many(&mut csi, volumes).await;
    report.note(format!("Processor share over {seconds} s; pools are measured every 5 s."));
    report
}

pub async fn restart() -> Report {
    let volumes = number("BENCH_VOLUMES", 300);
    let scratch = scratch();
    let disks = disks(&scratch, 2, 24 << 10, false);
    let mut agent = Agent::start(&program(), scratch.path(), &disks, "");
    let mut csi = agent.csi().await;
    mount_many(&mut csi, volumes).await;

    let before = union_processes(&scratch.path().display().to_string());
    let fio = Command::new("fio")
        .args([
            "--name=w",
            "--rw=randrw",
            "--bs=4k",
            "--size=8m",
            "--time_based",
            "--runtime=30",
            "--fsync=16",
        ])
        .args(["--verify=crc32c", "--verify_state_save=0", "--output-format=json"])
        .arg(format!("--directory={}", csi.target("many-0").display()))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("fio");
    tokio::time::sleep(Duration::from_secs(5)).await;
    agent.kill();
    let begun = Instant::now();
    agent.restart();
    let ready = begun.elapsed().as_secs_f64();
    let healthy = loop {
        let all: Value =
            serde_json::from_str(&agent.get("/v1/volumes").unwrap_or_default()).unwrap_or_default();
        let adopted = all.as_array().map_or(0, |list| {
            list.iter().filter(|v| v.pointer("/local/health/abnormal") == Some(&Value::Bool(false))).count()
        });
        if adopted as u64 == volumes {
            break begun.elapsed().as_secs_f64();
        }
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "only {adopted} of {volumes} volumes are adopted"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let after = union_processes(&scratch.path().display().to_string());
    let out = fio.wait_with_output().expect("fio");
    let result: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
    let errors = result.pointer("/jobs/0/error").cloned().unwrap_or(Value::Null);
    let mut report =
        Report::new(&["volumes", "agent ready s", "all adopted s", "same processes", "fio error"]);
    report.row(
        "killed and started again",
        vec![
            volumes.to_string(),
            format!("{ready:.2}"),
            format!("{healthy:.2}"),
            (before == after).to_string(),
            errors.to_string(),
        ],
        json!({ "ready_s": ready, "adopted_s": healthy, "same_processes": before == after, "fio_error": errors }),
    );
    let mut csi = agent.csi().await;
    unmount_many(&mut csi, volumes).await;
    report
}
