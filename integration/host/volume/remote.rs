//! Volumes with branches on another node, over a network that is a stand-in: see `fabric`. The real one is tested in virtual
//! machines (`integration/net`).

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use union_csi::domain::union::UnionKind;
use union_csi::domain::volume::{AccessMode, VolumeMode};
use union_csi::node::transport::{Consumer, Endpoint, ExportId, Generation, Patience};
use union_csi::node::volume::{LinkState, VolumeError};
use union_csi::platform::Host;
use union_csi::store::Store;

use super::rig::{DIRECTORY, IMAGE, Rig, Vol, errno, eventually, refused, until};
use crate::support::run;

#[tokio::test(flavor = "multi_thread")]
async fn volume_with_one_branch_elsewhere_is_mounted_without_a_union() {
    for fs_type in ["ext4", "xfs"] {
        let rig = Rig::with(&[("far", "ext4", 400)]);
        let vol = rig.volume_with(&[("far", 320, IMAGE)], &[("fsType", fs_type)]).await;
        rig.grant(&vol, 1, 1).await;
        rig.up(&vol).await;
        fs::write(vol.target.join("file"), "x").expect("write");
        let snapshot = rig.snapshot(&vol).await;
        assert_eq!(snapshot.union, UnionKind::Bind);
        assert!(!snapshot.health.abnormal, "{}", snapshot.health.message);
        rig.volumes.stage(&vol.stage()).await.expect("again");
        rig.down(&vol).await;
        assert_eq!(rig.fabric.attached_now(), []);
        assert_eq!(rig.fabric.forced(), [], "what answers is detached in order");
        rig.assert_nothing_left();
        rig.up(&vol).await;
        assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), "x");
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_over_two_nodes_is_joined_with_its_own_branches_first() {
    const FILES: u32 = 600;
    let rig = Rig::new(&["a", "far", "far2"]);
    let pieces = [("far", 48, IMAGE), ("a", 48, IMAGE), ("far2", 48, DIRECTORY), ("a", 48, DIRECTORY)];
    let vol = rig.volume(&pieces).await;
    rig.grant(&vol, 1, 1).await;
    rig.up(&vol).await;
    let snapshot = rig.snapshot(&vol).await;
    assert_eq!(snapshot.union, UnionKind::Mergerfs);
    let order: Vec<_> = snapshot.branches.iter().map(|b| b.id.clone()).collect();
    assert_eq!(order, [1, 3, 0, 2].map(|index| vol.branch(index)));
    assert!(
        ["threads", "process-thread-count"]
            .iter()
            .any(|o| snapshot.options.get(*o).is_some_and(|v| v == "32")),
        "{:?}",
        snapshot.options
    );
    // By chance, weighted by free space: a directory's is that of its whole disk, several times an image's.
    for n in 0..FILES {
        fs::write(vol.target.join(format!("file-{n}")), format!("{n}")).expect("write");
    }
    for index in 0..4 {
        let held = fs::read_dir(rig.branch_mount(&vol, index).join("data")).expect("data").count();
        assert!(held > 0, "branch {index} got no file");
    }
    rig.down(&vol).await;
    rig.assert_nothing_left();
    rig.up(&vol).await;
    for n in 0..FILES {
        let content = fs::read_to_string(vol.target.join(format!("file-{n}"))).expect("read");
        assert_eq!(content, format!("{n}"));
    }
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_waits_until_its_branches_are_given_and_opened() {
    let rig = Rig::new(&["a", "far"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("far", 24, IMAGE)]).await;
    // An own branch that another node has is waited for as well.
    rig.give(&vol, 0, Some("node-b"), 1).await;
    let staging = {
        let (volumes, request) = (rig.volumes.clone(), vol.stage());
        tokio::spawn(async move { volumes.stage(&request).await })
    };
    let volumes = rig.volumes.clone();
    let pause = || tokio::time::sleep(Duration::from_millis(50));
    pause().await;
    rig.give(&vol, 1, Some("node-a"), 1).await;
    pause().await;
    rig.open(&vol, 1, 1).await;
    pause().await;
    assert!(!staging.is_finished(), "its own branch is not here to be used");
    assert_eq!(rig.fabric.attached_now(), [], "nothing is done before all of it can be");
    // Others are not kept waiting meanwhile.
    let unstaged =
        tokio::time::timeout(Duration::from_secs(20), volumes.unstage(&vol.id, &vol.staging)).await;
    unstaged.expect("in time").expect("nothing is staged");
    rig.give(&vol, 0, Some("node-a"), 2).await;
    pause().await;
    assert!(!staging.is_finished(), "this node's own part has not noted the order");
    let order = r#"{"version":1,"mark":{"access":{"consumer":"node-a","epoch":2}}}"#;
    fs::write(rig.scratch.join("a/branches").join(vol.branch(0).as_str()).join("access.json"), order)
        .expect("a mark");
    // As its report does, which comes after the mark.
    rig.touch(&vol, 0).await;
    staging.await.expect("a task").expect("staged");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_branch_is_damaged_is_refused_with_the_way_out() {
    let rig = Rig::with(&[("far", "ext4", 400)]);
    for (fs_type, remedy) in [("ext4", "e2fsck"), ("xfs", "xfs_repair")] {
        let vol = rig.volume_with(&[("far", 320, IMAGE)], &[("fsType", fs_type)]).await;
        let image = rig.scratch.join("far/branches").join(vol.branch(0).as_str()).join("disk.img");
        let image = image.to_str().expect("utf-8");
        if fs_type == "ext4" {
            run("debugfs", &["-w", "-R", "ssv state 2", image]);
        } else {
            run("xfs_db", &["-x", "-c", "sb 0", "-c", "write features_incompat 0x1b", image]);
        }
        rig.grant(&vol, 1, 1).await;
        let error = refused(rig.volumes.stage(&vol.stage()).await);
        assert!(matches!(error, VolumeError::Incomplete { .. }), "{error}");
        assert!(error.to_string().contains(remedy), "{error}");
        assert_eq!(rig.fabric.attached_now(), [], "its owner can repair it");
        rig.assert_nothing_left();
        let removed =
            rig.store.branches().get(vol.branch(0).as_str()).await.expect("store").expect("a branch");
        rig.far.ensure_absent(&removed.spec).expect("removed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_branch_is_another_filesystem_is_refused() {
    let rig = Rig::with(&[("far", "ext4", 400)]);
    let vol = rig.volume(&[("far", 64, IMAGE)]).await;
    let image = rig.scratch.join("far/branches").join(vol.branch(0).as_str()).join("disk.img");
    run("tune2fs", &["-f", "-U", "12345678-1234-1234-1234-123456789abc", image.to_str().expect("utf-8")]);
    rig.grant(&vol, 1, 1).await;
    let error = refused(rig.volumes.stage(&vol.stage()).await).to_string();
    assert!(error.contains("12345678-1234-1234-1234-123456789abc"), "{error}");
    rig.assert_nothing_left();
}

/// Two branches elsewhere and one here, with files on each, and which file lies where.
async fn spread(rig: &Rig, parameters: &[(&str, &str)]) -> (Vol, Vec<Vec<u32>>) {
    let pieces = [("a", 320, IMAGE), ("far", 320, IMAGE), ("far2", 320, IMAGE)];
    let vol = rig.volume_with(&pieces, parameters).await;
    rig.grant(&vol, 1, 1).await;
    rig.up(&vol).await;
    for n in 0..60 {
        fs::write(vol.target.join(format!("file-{n}")), format!("{n}")).expect("write");
    }
    let mut held = Vec::new();
    for index in 0..3 {
        let data = rig.branch_mount(&vol, index).join("data");
        run("sync", &["-f", data.to_str().expect("utf-8")]);
        held.push((0..60).filter(|n| data.join(format!("file-{n}")).exists()).collect());
    }
    (vol, held)
}

fn disks() -> [(&'static str, &'static str, u64); 3] {
    [("a", "ext4", 400), ("far", "ext4", 400), ("far2", "ext4", 400)]
}

fn complete(vol: &Vol) -> Option<()> {
    (0..60)
        .all(|n| fs::read_to_string(vol.target.join(format!("file-{n}"))).ok() == Some(n.to_string()))
        .then_some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_waits_for_a_branch_whose_node_is_away_and_says_so() {
    let mut rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[("branchTimeout", "300s")]).await;
    let pid = rig.pid(&vol).await;
    rig.heal();
    rig.fabric.set_away(true);
    until("the reason", async || {
        let stats = rig.volumes.stats(&vol.id, &vol.target).await.expect("stats");
        (stats.health.abnormal && stats.health.message.contains("node node-b")).then_some(())
    })
    .await;
    let record = rig.record_file(&vol);
    let healer_looked = || fs::read_to_string(&record).ok()?.contains("silentSince").then_some(());
    eventually("the healer's look", healer_looked).await;
    rig.fabric.set_away(false);
    until("its connections", async || {
        let branches = rig.snapshot(&vol).await.branches;
        let mut links = branches.iter().filter_map(|b| b.remote.as_ref());
        links.all(|r| r.link == LinkState::Live).then_some(())
    })
    .await;
    let health = rig.snapshot(&vol).await.health;
    assert!(!health.abnormal, "what is over is told no more: {}", health.message);
    rig.fabric.set_away(true);
    until("the reason again", async || rig.snapshot(&vol).await.health.abnormal.then_some(())).await;
    let snapshot = rig.snapshot(&vol).await;
    assert_eq!(snapshot.pid, Some(pid), "nothing is taken down");
    let told: Vec<_> =
        snapshot.branches.iter().map(|b| b.remote.as_ref().map(|r| (r.link, r.generation))).collect();
    let away = Some((LinkState::Away, Some(1)));
    assert_eq!(told, [None, away, away]);
    assert!(snapshot.branches[1].remote.as_ref().is_some_and(|r| r.since.is_some()));
    assert_eq!(complete(&vol), Some(()));
    let busy = rig.volumes.unpublish(&vol.id, &vol.target).await;
    busy.expect("unpublish");
    let refused = refused(rig.volumes.unstage(&vol.id, &vol.staging).await).to_string();
    assert!(refused.contains("node-b") && refused.contains("300 s"), "{refused}");
    rig.fabric.set_away(false);
    until("its health", async || (!rig.snapshot(&vol).await.health.abnormal).then_some(())).await;
    assert_eq!(rig.snapshot(&vol).await.heals, 0);
    assert_eq!(rig.fabric.forced(), []);
    rig.stop_healing().await;
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_loses_a_branch_elsewhere_goes_as_a_whole_and_returns_with_the_new_generation() {
    let mut rig = Rig::with(&disks());
    let (vol, held) = spread(&rig, &[("onBranchLoss", "fail")]).await;
    let container = rig.container("exec sleep 600");
    let inside = container.path(&vol.target);
    rig.heal();
    let lost = format!("file-{}", held[1][0]);
    // Taken from this node, and opened to it again only later.
    rig.give(&vol, 1, None, 2).await;
    // Opened: what the kernel remembers of a file's attributes it tells for a minute without asking.
    let gone = || (errno(fs::read(vol.target.join(&lost))) == Some(libc::ENOTCONN)).then_some(());
    eventually("the union's end", gone).await;
    let forced = || rig.fabric.forced().into_iter().next();
    assert_eq!(eventually("the end of the attachment", forced).await.branch, vol.branch(1));
    assert_eq!(errno(fs::write(vol.target.join(&lost), "anew")), Some(libc::ENOTCONN), "it stays down");
    until("the reason", async || rig.snapshot(&vol).await.health.message.contains("nobody").then_some(()))
        .await;
    rig.give(&vol, 1, Some("node-a"), 3).await;
    rig.open(&vol, 1, 2).await;
    eventually("its return", || complete(&vol)).await;
    eventually("the container", || fs::read_to_string(inside.join(&lost)).ok()).await;
    assert!(rig.fabric.attached_now().iter().any(|id| id.branch == vol.branch(1) && id.generation.0 == 2));
    rig.stop_healing().await;
    rig.end_containers();
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_may_serve_the_rest_does_so_while_a_node_is_away() {
    for (policy, writable) in [("servePartial", true), ("readOnly", false)] {
        let mut rig = Rig::with(&disks());
        let (vol, held) = spread(&rig, &[("onBranchLoss", policy), ("branchTimeout", "1s")]).await;
        rig.heal();
        rig.fabric.set_away(true);
        let (here, away) = (format!("file-{}", held[0][0]), format!("file-{}", held[1][0]));
        let partial = || {
            let lost = errno(fs::metadata(vol.target.join(&away))) == Some(libc::ENOENT);
            (lost && fs::metadata(vol.target.join(&here)).is_ok()).then_some(())
        };
        until("the reason", async || {
            rig.snapshot(&vol).await.health.message.contains("runs without").then_some(())
        })
        .await;
        eventually("the rest", partial).await;
        let wrote = || errno(fs::write(vol.target.join("new"), "x"));
        let expected = if writable { None } else { Some(libc::EROFS) };
        eventually(policy, || (wrote() == expected).then_some(())).await;
        rig.fabric.set_away(false);
        eventually("the whole", || complete(&vol)).await;
        eventually("writing", || fs::write(vol.target.join("again"), "x").ok()).await;
        rig.stop_healing().await;
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_one_branch_elsewhere_is_exchanged_under_workloads() {
    for fs_type in ["ext4", "xfs"] {
        let mut rig = Rig::with(&[("far", "ext4", 400)]);
        let vol = rig.volume_with(&[("far", 320, IMAGE)], &[("fsType", fs_type)]).await;
        rig.grant(&vol, 1, 1).await;
        rig.up(&vol).await;
        fs::create_dir(vol.target.join("sub")).expect("sub");
        fs::write(vol.target.join("sub/file"), "x").expect("write");
        run("sync", &["-f", vol.target.to_str().expect("utf-8")]);
        let container = rig.container("exec sleep 600");
        let inside = container.path(&vol.target).join("sub/file");
        let open = fs::File::open(vol.target.join("sub/file")).expect("open");
        rig.heal();
        for round in 1..3 {
            rig.open(&vol, 0, round + 1).await;
            until("the new generation", async || (rig.snapshot(&vol).await.heals == round).then_some(()))
                .await;
            assert_eq!(fs::read_to_string(vol.target.join("sub/file")).expect("read"), "x");
            fs::write(&inside, "x").expect("the container writes");
            let forced: Vec<_> = rig.fabric.forced().into_iter().map(|id| id.generation.0).collect();
            assert_eq!(forced, [round]);
        }
        drop(open);
        rig.stop_healing().await;
        rig.end_containers();
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_that_are_more_than_their_owners_each_hear_of_their_own_branch() {
    let mut rig = Rig::with(&[("far", "ext4", 400)]);
    let mut all = Vec::new();
    for number in 0..4 {
        let vol = rig.volume_with(&[("far", 64, IMAGE)], &[]).await;
        rig.grant(&vol, 1, 1).await;
        rig.up(&vol).await;
        fs::write(vol.target.join("file"), number.to_string()).expect("write");
        run("sync", &["-f", vol.target.to_str().expect("utf-8")]);
        all.push(vol);
        // One alone is followed by itself, several by their owner, and the last comes when that is under way.
        if number == 2 {
            rig.heal();
        }
    }
    for (number, vol) in all.iter().enumerate() {
        rig.open(vol, 0, 2).await;
        until("the new generation", async || (rig.snapshot(vol).await.heals == 1).then_some(())).await;
        assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), number.to_string());
        for later in &all[number + 1..] {
            assert_eq!(rig.snapshot(later).await.heals, 0, "another volume's news are not its own");
        }
    }
    rig.stop_healing().await;
    for vol in &all {
        rig.down(vol).await;
    }
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_owner_stays_away_is_unstaged_by_force_in_the_end() {
    let rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[("branchTimeout", "1s")]).await;
    rig.volumes.unpublish(&vol.id, &vol.target).await.expect("unpublish");
    rig.fabric.set_away(true);
    let first = refused(rig.volumes.unstage(&vol.id, &vol.staging).await);
    assert!(matches!(first, VolumeError::Busy { .. }), "{first}");
    assert!(first.to_string().contains("node-b"), "{first}");
    until("unstaging", async || rig.volumes.unstage(&vol.id, &vol.staging).await.ok()).await;
    assert_eq!(rig.fabric.forced().len(), 2);
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_with_branches_elsewhere_is_adopted_by_a_new_agent() {
    let mut rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[]).await;
    let (pid, mounts) = (rig.pid(&vol).await, rig.mounts());
    rig.restart(&Host::new()).await;
    rig.volumes.recover().await;
    assert_eq!((rig.pid(&vol).await, rig.mounts()), (pid, mounts));
    assert!(!rig.snapshot(&vol).await.health.abnormal);
    let id = rig.fabric.attached_now().into_iter().find(|id| id.branch == vol.branch(2)).expect("attached");
    rig.fabric.kill(&id);
    rig.heal();
    eventually("its return", || complete(&vol)).await;
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_is_only_read_is_whole_again_under_workloads_when_a_branch_elsewhere_returns() {
    let mut rig = Rig::with(&disks());
    let (mut vol, held) = spread(&rig, &[("branchTimeout", "1s")]).await;
    rig.down(&vol).await;
    vol.mode = AccessMode::SingleNodeReaderOnly;
    rig.up(&vol).await;
    assert_eq!(rig.snapshot(&vol).await.union, UnionKind::Overlay);
    let container = rig.container("exec sleep 600");
    let inside = container.path(&vol.target);
    let lost = format!("file-{}", held[1][0]);
    let kept = fs::File::open(vol.target.join(format!("file-{}", held[0][0]))).expect("open");
    rig.heal();
    for round in 1..3 {
        rig.open(&vol, 1, round + 1).await;
        until("the new generation", async || (rig.snapshot(&vol).await.heals == round).then_some(())).await;
        assert_eq!(complete(&vol), Some(()));
        assert_eq!(fs::read_to_string(inside.join(&lost)).expect("the container"), held[1][0].to_string());
    }
    let mut text = String::new();
    (&kept).read_to_string(&mut text).expect("what was open and not lost goes on");
    assert_eq!(text, held[0][0].to_string());
    // Both at once, and for longer than they are waited for.
    rig.fabric.set_away(true);
    until("errors", async || fs::read_to_string(inside.join(&lost)).is_err().then_some(())).await;
    rig.fabric.set_away(false);
    eventually("its return", || complete(&vol)).await;
    eventually("the container", || fs::read_to_string(inside.join(&lost)).ok()).await;
    drop(kept);
    rig.stop_healing().await;
    rig.end_containers();
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_is_a_block_device_elsewhere_is_the_new_device_for_who_opens_it_again() {
    let mut rig = Rig::with(&[("far", "ext4", 256)]);
    let vol = rig.volume_of(&[("far", 64, IMAGE)], &[], VolumeMode::Block).await;
    rig.grant(&vol, 1, 1).await;
    rig.up(&vol).await;
    let mut device = fs::OpenOptions::new().write(true).open(&vol.target).expect("open");
    device.write_all(&[7; 4096]).and_then(|()| device.sync_all()).expect("write");
    let container = rig.container("exec sleep 600");
    let inside = container.path(&vol.target);
    rig.heal();
    let mut numbers = vec![device.metadata().expect("its number").rdev()];
    let mut open = vec![device];
    for round in 1..3 {
        rig.open(&vol, 0, round + 1).await;
        until("the new device", async || (rig.snapshot(&vol).await.heals == round).then_some(())).await;
        for path in [&vol.target, &inside, &vol.staging.join("device")] {
            let mut again = fs::File::open(path).expect("open");
            let number = again.metadata().expect("its number").rdev();
            assert!(!numbers.contains(&number), "{} is a device of before", path.display());
            let mut read = [0; 4096];
            again.read_exact(&mut read).expect("read");
            assert_eq!(read, [7; 4096]);
        }
        // As long as it is open its number is no other's.
        let now = fs::File::open(&vol.target).expect("open");
        numbers.push(now.metadata().expect("its number").rdev());
        open.push(now);
    }
    drop(open);
    rig.stop_healing().await;
    rig.end_containers();
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_owner_is_away_waits_no_longer_because_the_agent_was_started_anew() {
    let mut rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[("branchTimeout", "10s"), ("onBranchLoss", "fail")]).await;
    rig.heal();
    rig.fabric.set_away(true);
    let file = rig.record_file(&vol);
    let noted = || {
        let record: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).ok()?).ok()?;
        let branches = record["branches"].as_array()?;
        let since: Vec<_> = branches.iter().filter_map(|b| b["silentSince"].as_u64()).collect();
        (since.len() == 2).then_some(since)
    };
    let since = eventually("the record", noted).await;
    rig.stop_healing().await;
    rig.restart(&Host::new()).await;
    rig.volumes.recover().await;
    assert_eq!(noted(), Some(since), "the next agent counts on");
    rig.heal();
    let mut forced = Vec::new();
    let patience_ended = || {
        forced.extend(rig.fabric.forced());
        (forced.len() == 2).then_some(())
    };
    eventually("the end of patience", patience_ended).await;
    rig.fabric.set_away(false);
    eventually("its return", || complete(&vol)).await;
    until("a clean record", async || {
        (!fs::read_to_string(&file).ok()?.contains("silentSince")).then_some(())
    })
    .await;
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_which_a_branch_is_attached_that_no_record_has_loses_that_attachment_and_no_other() {
    let rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[]).await;
    let stray = rig.volume(&[("far", 24, IMAGE)]).await;
    let attach = async |generation: u64| {
        rig.give(&stray, 0, Some("node-a"), 1).await;
        rig.open(&stray, 0, generation).await;
        let id = ExportId { branch: stray.branch(0), generation: Generation(generation) };
        let endpoint =
            Endpoint { address: "127.0.0.1:4420".parse().expect("an address"), name: String::new() };
        rig.fabric.attach(&id, &endpoint, None, Patience::Wait).expect("attached");
    };
    let needed = || {
        let now = rig.fabric.attached_now();
        (now.len() == 2 && now.iter().all(|id| id.branch != stray.branch(0))).then_some(())
    };
    attach(1).await;
    assert_eq!(needed(), None);
    rig.volumes.sweep().await;
    assert_eq!(needed(), Some(()));
    assert_eq!(rig.fabric.forced(), [], "its owner answers");
    attach(2).await;
    rig.fabric.set_away(true);
    rig.volumes.sweep().await;
    assert_eq!(needed(), Some(()));
    assert_eq!(rig.fabric.forced().len(), 1, "nobody waits for its owner");
    rig.fabric.set_away(false);
    assert_eq!(complete(&vol), Some(()));
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_was_let_go_while_the_kernel_did_not_answer_is_detached_as_soon_as_it_does() {
    let mut rig = Rig::with(&disks());
    let (vol, _) = spread(&rig, &[]).await;
    rig.heal();
    rig.fabric.survey(false);
    rig.down(&vol).await;
    assert_eq!(rig.fabric.attached_now().len(), 2, "nothing can be detached");
    rig.fabric.survey(true);
    eventually("both are detached", || rig.fabric.attached_now().is_empty().then_some(())).await;
    rig.stop_healing().await;
    rig.assert_nothing_left();
}
