//! A branch or a pool fails under a running union. MergerFS would answer ENOENT for the files of a failed branch and let
//! them be made anew on another; these tests measure for how long, and hold that nothing is lost or shadowed afterwards.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::ground::{
    Ground, PATIENCE, Records, assert_records, is_down, readable, record_path, shut_down, split, until,
    write_record,
};
use crate::support::run;

const RECORDS: u64 = 60;

/// What a user of a volume sees between a branch's failure and the end of its union.
#[derive(Debug, Default)]
struct Exposure {
    /// From the failure to the last record that was said not to exist.
    hidden: Option<Duration>,
    /// From the failure to the first record that was said not to exist, or was made anew.
    first: Option<Duration>,
    /// From the failure to the last record that could be made anew elsewhere.
    shadowed: Option<Duration>,
    /// Records that were made anew.
    made_anew: Vec<u64>,
    /// From the failure to the first answer that the union is gone.
    down: Option<Duration>,
}

impl std::fmt::Display for Exposure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hidden, first, shadowed, made_anew, down } = self;
        let until = (*hidden).max(*shadowed);
        match first.zip(until) {
            None => write!(f, "no record was hidden or made anew")?,
            Some((first, last)) => write!(
                f,
                "records were hidden from {first:?} to {last:?} after the failure ({:?} long), {} were made anew",
                last.saturating_sub(first),
                made_anew.len()
            )?,
        }
        write!(f, "; the union was gone after {down:?}")
    }
}

/// Asks for each record in turn, and tries to make it anew, until the union is gone.
fn watch_exposure(directory: &Path, since: Instant, numbers: &[u64]) -> Exposure {
    let mut seen = Exposure::default();
    for &number in numbers.iter().cycle() {
        if since.elapsed() > PATIENCE {
            break;
        }
        match fs::symlink_metadata(record_path(directory, number)) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                seen.hidden = Some(since.elapsed());
                seen.first = seen.first.or(seen.hidden);
            }
            Err(e) if is_down(&e) => {
                seen.down = Some(since.elapsed());
                break;
            }
            Ok(_) | Err(_) => {}
        }
        match fs::OpenOptions::new().write(true).create_new(true).open(record_path(directory, number)) {
            Ok(_) => {
                seen.shadowed = Some(since.elapsed());
                seen.first = seen.first.or(seen.shadowed);
                seen.made_anew.push(number);
            }
            Err(e) if is_down(&e) => {
                seen.down = Some(since.elapsed());
                break;
            }
            Err(_) => {}
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    seen
}

/// A volume of two branches with records on both; which of them lie on branch 0.
async fn with_records(ground: &Ground, fs_type: &str) -> (String, PathBuf, Vec<u64>) {
    let mib = if fs_type == "xfs" { 660 } else { 120 };
    let (id, target) = ground.up(&split("loss", mib, 2, &[("fsType", fs_type)])).await;
    let directory = target.join("records");
    fs::create_dir(&directory).expect("a directory");
    for number in 0..RECORDS {
        write_record(&directory, number).expect("a record");
    }
    let on_first = ground.branch_mount(&id, 0).join("data/records");
    let numbers: Vec<_> = (0..RECORDS).filter(|n| record_path(&on_first, *n).exists()).collect();
    assert!(!numbers.is_empty() && (numbers.len() as u64) < RECORDS, "records lie on both branches");
    (id, directory, numbers)
}

/// The volume returns whole: every record is what was acknowledged, wherever someone made one anew meanwhile.
async fn returns_whole(ground: &Ground, id: &str, directory: &Path, since: Instant) {
    until("all records", || {
        (0..RECORDS).try_for_each(|n| readable(directory, n).map_err(|e| format!("record {n}: {e}")))
    })
    .await;
    println!("whole again after {:?}", since.elapsed());
    if ground.told(id)["local"]["heals"] == 1 {
        until("health", || {
            let told = ground.told(id);
            if told["state"] == "healthy" { Ok(()) } else { Err(told["message"].to_string()) }
        })
        .await;
    }
    fs::write(directory.join("after"), "x").expect("it can be written again");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_record_is_hidden_or_shadowed_for_longer_than_a_moment_when_a_branch_shuts_down() {
    for fs_type in ["ext4", "xfs"] {
        let ground = Ground::new(2, 600);
        let (id, directory, numbers) = with_records(&ground, fs_type).await;
        for round in 0..3 {
            let since = Instant::now();
            shut_down(&ground.branch_mount(&id, 0));
            let watched = {
                let (directory, numbers) = (directory.clone(), numbers.clone());
                tokio::task::spawn_blocking(move || watch_exposure(&directory, since, &numbers))
            };
            let seen = watched.await.expect("the watch");
            println!("{fs_type}, round {round}: {seen}");
            assert!(seen.down.is_some(), "the union stays over a failed branch: {}", ground.told(&id));
            returns_whole(&ground, &id, &directory, since).await;
            // XFS tells nobody but the kernel's log.
            if fs_type == "xfs" && fs::File::open("/dev/kmsg").is_ok() {
                assert_eq!(
                    ground.agent.log_count("the union is cut off"),
                    round + 1,
                    "heard of in the kernel's log"
                );
            }
        }
        ground.down(&id).await;
        ground.assert_nothing_left().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_became_read_only_after_an_error_hides_and_shadows_nothing() {
    let ground = Ground::new(2, 600);
    let (id, directory, numbers) = with_records(&ground, "ext4").await;
    let device = ground.told(&id)["local"]["branches"][0]["device"].as_str().expect("a device").to_owned();
    let name = Path::new(&device).file_name().expect("a name").to_owned();
    let since = Instant::now();
    fs::write(Path::new("/sys/fs/ext4").join(name).join("trigger_fs_error"), "an error for a test")
        .expect("an error");
    let watched = tokio::task::spawn_blocking({
        let directory = directory.clone();
        move || watch_exposure(&directory, since, &numbers)
    });
    let seen = watched.await.expect("the watch");
    println!("read-only after an error: {seen}");
    assert_eq!(seen.made_anew, [0; 0], "records were made anew on another branch");
    returns_whole(&ground, &id, &directory, since).await;
    ground.down(&id).await;
    ground.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_unmounted_under_a_volume_takes_nothing_with_it_and_is_never_written_beneath() {
    let ground = Ground::new(2, 600);
    let (id, directory, _) = with_records(&ground, "ext4").await;
    let records = Records::write(&directory.join("more"));
    records.progress().await;
    let point = ground.disks[0].display().to_string();
    run("umount", &["-l", &point]);
    fs::create_dir(ground.disks[0].join("pool")).expect("the empty mount point's directory");
    until("the pool's absence", || {
        let pools = ground.agent.get("/v1/pools").unwrap_or_default();
        if pools.contains("Absent") { Ok(()) } else { Err(pools) }
    })
    .await;
    records.progress().await;
    let (count, errors) = records.end();
    assert!(errors.is_empty(), "{:?}", errors.first_key_value());
    assert_records(&directory.join("more"), count, &errors);
    let mut csi = ground.agent.csi().await;
    csi.unpublish(&id).await.expect("NodeUnpublishVolume without the pool");
    csi.unstage(&id).await.expect("NodeUnstageVolume without the pool");
    csi.stage(&id, super::ground::WRITER).await.expect_err("it was staged without its branch");
    assert_eq!(
        fs::read_dir(ground.disks[0].join("pool")).expect("the directory").count(),
        0,
        "written beneath"
    );
    fs::remove_dir(ground.disks[0].join("pool")).expect("the directory");
    run("mount", &["-o", "loop", &ground.scratch.join("disk0.disk").display().to_string(), &point]);
    until("the pool's return", || {
        let pools = ground.agent.get("/v1/pools").unwrap_or_default();
        if pools.contains("Absent") { Err(pools) } else { Ok(()) }
    })
    .await;
    csi.stage(&id, super::ground::WRITER).await.expect("NodeStageVolume");
    csi.publish(&id, super::ground::WRITER).await.expect("NodePublishVolume");
    assert_records(&directory, RECORDS, &Default::default());
    assert_records(&directory.join("more"), count, &errors);
    ground.down(&id).await;
    ground.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_answers_every_read_with_an_error_hides_and_shadows_nothing_for_long() {
    let mut ground = Ground::new(2, 600);
    let (id, directory, numbers) = with_records(&ground, "ext4").await;
    let disk = ground.scratch.join("disk0.disk");
    // The contents are kept, for the disk's return.
    run("cp", &["--sparse=always", disk.to_str().expect("utf-8"), &format!("{}.kept", disk.display())]);
    run("sync", &[]);
    let since = Instant::now();
    fs::OpenOptions::new().write(true).open(&disk).expect("the disk").set_len(4096).expect("truncate");
    fs::write("/proc/sys/vm/drop_caches", "3").expect("drop_caches");
    let watched = tokio::task::spawn_blocking({
        let (directory, numbers) = (directory.clone(), numbers.clone());
        move || watch_exposure(&directory, since, &numbers)
    });
    let seen = watched.await.expect("the watch");
    println!("dead disk: {seen}");
    assert!(seen.down.is_some(), "the union stays over a dead disk: {}", ground.told(&id));
    // Whoever asks is told, and everything ends when it is taken away.
    let mut csi = ground.agent.csi().await;
    until("a reason", || {
        let told = ground.told(&id);
        if told["state"] == "abnormal" { Ok(()) } else { Err(told.to_string()) }
    })
    .await;
    csi.unpublish(&id).await.expect("NodeUnpublishVolume over a dead disk");
    csi.unstage(&id).await.expect("NodeUnstageVolume over a dead disk");
    ground.agent.kill();
}
