//! The agent ends at any moment; the machine ends; the state directory is full.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tonic::{Code, Status};
use union_csi::csi::proto;

use super::ground::{
    Ground, PATIENCE, WRITER, content, processes_of, readable, record_path, split, until, write_record,
};
use crate::agent::{Csi, Wanted, mounted};
use crate::support::{Scratch, disk, run, signal};

/// Numbers that are the same for the same seed (xorshift64*).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % limit
    }
}

#[derive(Clone, Copy, Debug)]
enum Call {
    Create,
    Stage,
    Publish,
    Unpublish,
    Unstage,
    Delete,
}

async fn call(csi: &mut Csi, which: Call, wanted: &Wanted, id: &str) -> Result<(), Status> {
    match which {
        Call::Create => csi.create(wanted).await.map(drop),
        Call::Stage => csi.stage(id, WRITER).await,
        Call::Publish => csi.publish(id, WRITER).await.map(drop),
        Call::Unpublish => csi.unpublish(id).await,
        Call::Unstage => csi.unstage(id).await,
        Call::Delete => csi.delete(id).await,
    }
}

/// Makes the call, as the kubelet does: again until it succeeds. The agent is killed during the first attempt, or not.
async fn insist(ground: &mut Ground, dice: &mut Dice, kills: &mut u32, which: Call, wanted: &Wanted) {
    let id = wanted.name.clone();
    let begun = Instant::now();
    let mut csi = ground.agent.csi().await;
    let killer = (dice.below(3) > 0).then(|| {
        let (pid, after) = (ground.agent.pid(), Duration::from_millis(dice.below(120)));
        std::thread::spawn(move || {
            std::thread::sleep(after);
            signal(pid, Signal::SIGKILL);
        })
    });
    let mut result = call(&mut csi, which, wanted, &id).await;
    if let Some(killer) = killer {
        killer.join().expect("the killer");
        ground.agent.kill();
        ground.agent.restart();
        *kills += 1;
        // Whether it succeeded or not: the answer may have been lost.
        result = call(&mut ground.agent.csi().await, which, wanted, &id).await;
    }
    while let Err(error) = result {
        assert!(begun.elapsed() < PATIENCE, "{which:?} of {id}: {error:?}\n{}", ground.agent.log_end());
        tokio::time::sleep(Duration::from_millis(50)).await;
        result = call(&mut ground.agent.csi().await, which, wanted, &id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_killed_at_any_moment_of_any_call_ends_well_and_leaves_nothing() {
    let seed = std::env::var("UNION_CSI_TEST_SEED").ok().and_then(|s| s.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
        u64::from(now.subsec_nanos()) << 20 | 1
    });
    println!("UNION_CSI_TEST_SEED={seed}");
    let mut dice = Dice(seed);
    let mut kills = 0;
    let mut ground = Ground::new(3, 256);
    for round in 0..6 {
        let branches = if round % 2 == 0 { 3 } else { 1 };
        let wanted = split(&format!("crash{round}"), 48, branches, &[]);
        let id = wanted.name.clone();
        for which in [Call::Create, Call::Stage, Call::Publish] {
            insist(&mut ground, &mut dice, &mut kills, which, &wanted).await;
        }
        let target = ground.scratch.join("targets").join(&id);
        for number in 0..5 {
            write_record(&target, number).expect("a record");
        }
        // Repeated calls change nothing.
        for which in [Call::Create, Call::Stage, Call::Publish] {
            insist(&mut ground, &mut dice, &mut kills, which, &wanted).await;
            (0..5).try_for_each(|n| readable(&target, n)).expect("the records");
        }
        for which in [Call::Unpublish, Call::Unstage, Call::Stage, Call::Publish] {
            insist(&mut ground, &mut dice, &mut kills, which, &wanted).await;
        }
        (0..5).try_for_each(|n| readable(&target, n)).expect("the records, staged again");
        for which in [Call::Unpublish, Call::Unstage, Call::Delete] {
            insist(&mut ground, &mut dice, &mut kills, which, &wanted).await;
        }
        assert_eq!(ground.left(), [""; 0], "after round {round}, seed {seed}");
    }
    println!("{kills} kills");
    assert!(kills > 10, "the agent was killed {kills} times only");
    ground.assert_nothing_left().await;
    for entry in fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten() {
        let parent = entry.path().join("union-csi-unions");
        let ours = format!("-{}", std::process::id());
        for cgroup in fs::read_dir(&parent).into_iter().flatten().flatten() {
            let name = cgroup.file_name().to_string_lossy().into_owned();
            assert!(!(name.contains("crash") && name.ends_with(&ours)), "a cgroup is left: {name}");
        }
    }
}

/// What a reboot leaves: no process, no mount, and records of another boot.
fn reboot(ground: &mut Ground) {
    ground.agent.kill();
    for (pid, _) in processes_of(&ground.scratch) {
        signal(pid, Signal::SIGKILL);
    }
    let root = ground.scratch.path().to_owned();
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    let points: Vec<_> = table.lines().filter_map(|l| l.split(' ').nth(4)).map(Path::new).collect();
    for point in points.iter().rev().filter(|p| p.starts_with(&root)) {
        if !ground.disks.iter().any(|d| d == point) {
            run("umount", &["-l", point.to_str().expect("utf-8")]);
        }
    }
    let own = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot id");
    let files =
        run("grep", &["-rlF", own.trim(), root.join("state").to_str().expect("utf-8"), "--include=*.json"]);
    for file in files.lines() {
        let text = fs::read_to_string(file).expect("a record");
        fs::write(file, text.replace(own.trim(), "00000000-0000-4000-8000-000000000000")).expect("a record");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_reboot_volumes_marked_so_return_and_the_others_are_clean() {
    let mut ground = Ground::new(3, 256);
    let mut csi = ground.agent.csi().await;
    let mut ids = Vec::new();
    for (name, branches, at_boot) in [("kept", 3, "true"), ("single", 1, "true"), ("other", 2, "false")] {
        let id = csi.create(&split(name, 48, branches, &[])).await.expect("CreateVolume").volume_id;
        csi.stage(&id, WRITER).await.expect("NodeStageVolume");
        let target = csi.target(&id);
        fs::create_dir_all(target.parent().expect("a parent")).expect("targets");
        let request = proto::NodePublishVolumeRequest {
            volume_id: id.clone(),
            staging_target_path: csi.staging(&id).display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(mounted(WRITER)),
            volume_context: HashMap::from([("union.io/mount-at-boot".to_owned(), at_boot.to_owned())]),
            ..Default::default()
        };
        csi.node.node_publish_volume(request).await.expect("NodePublishVolume");
        (0..5).try_for_each(|n| write_record(&target, n)).expect("records");
        ids.push(id);
    }
    reboot(&mut ground);
    ground.agent.restart();
    for id in &ids[..2] {
        let target = ground.scratch.join("targets").join(id);
        until("its return", || (0..5).try_for_each(|n| readable(&target, n))).await;
        assert_eq!(ground.told(id)["state"], "healthy", "{}", ground.told(id));
    }
    let other = ground.scratch.join("targets").join(&ids[2]);
    assert!(!record_path(&other, 0).exists(), "a volume that nobody asked for was mounted");
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    assert!(!table.contains(&format!("/volumes/{}/", ids[2])), "its branches are attached");
    let mut csi = ground.agent.csi().await;
    // The kubelet cleans up first, then a new pod comes.
    csi.unpublish(&ids[2]).await.expect("NodeUnpublishVolume");
    csi.unstage(&ids[2]).await.expect("NodeUnstageVolume");
    csi.stage(&ids[2], WRITER).await.expect("NodeStageVolume");
    csi.publish(&ids[2], WRITER).await.expect("NodePublishVolume");
    (0..5).try_for_each(|n| readable(&other, n)).expect("its records");
    for id in &ids {
        ground.down(id).await;
    }
    ground.assert_nothing_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_state_directory_is_told_damages_nothing_and_is_recovered_from() {
    let scratch = Scratch::new();
    let state = disk(&scratch, "state", "ext4", 24);
    let mut ground = Ground::with(scratch, 3, 256, "createTimeout: 3s");
    let (id, target) = ground.up(&split("before", 48, 3, &[])).await;
    (0..5).try_for_each(|n| write_record(&target, n)).expect("records");
    let filler = state.join("filler");
    let mut file = fs::File::create(&filler).expect("the filler");
    while file.write_all(&[7; 4096]).is_ok() {}
    let _ = file.sync_all();
    drop(file);

    let mut csi = ground.agent.csi().await;
    let mut refused = Vec::new();
    for number in 0..40 {
        let wanted = split(&format!("full{number}"), 24, 1, &[]);
        match csi.create(&wanted).await {
            Ok(volume) => {
                if let Err(error) = csi.stage(&volume.volume_id, WRITER).await {
                    refused.push(error);
                }
                csi.unstage(&volume.volume_id).await.ok();
                csi.delete(&volume.volume_id).await.ok();
            }
            // The volume was written down and its plan was not: the next one hears why.
            Err(error) if error.code() == Code::DeadlineExceeded => {}
            Err(error) => refused.push(error),
        }
        if !refused.is_empty() {
            break;
        }
    }
    let error = refused.first().expect("a full state directory was never noticed");
    println!("{error:?}");
    assert_ne!(error.code(), Code::Unknown);
    assert!(
        error.message().to_lowercase().contains("space"),
        "it does not say that there is no space: {:?}",
        error.message()
    );
    write_record(&target, 5).expect("a running volume does not care");
    (0..6).try_for_each(|n| readable(&target, n)).expect("the records");
    // An agent that ends now comes back when there is room.
    ground.agent.kill();
    fs::remove_file(&filler).expect("the filler");
    ground.agent.restart();
    (0..6).try_for_each(|n| readable(&target, n)).expect("the records");
    let (more, more_target) = ground.up(&split("after", 48, 3, &[])).await;
    write_record(&more_target, 0).expect("a record");
    ground.down(&more).await;
    let mut csi = ground.agent.csi().await;
    for number in 0..40 {
        let id = format!("full{number}-{}", std::process::id());
        csi.unpublish(&id).await.expect("NodeUnpublishVolume");
        csi.unstage(&id).await.expect("NodeUnstageVolume");
        csi.delete(&id).await.expect("DeleteVolume");
    }
    assert_eq!(fs::read_to_string(record_path(&target, 0)).expect("a record"), content(0));
    ground.down(&id).await;
    ground.assert_nothing_left().await;
}
