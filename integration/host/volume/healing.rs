//! What dies comes back, under workloads that go on.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use union_csi::node::volume::PublishRequest;
use union_csi::platform::Host;

use super::rig::{DIRECTORY, IMAGE, Rig, Vol, errno, eventually, until};
use crate::support::{run, signal};

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_mergerfs_is_killed_under_a_writer_heals_everywhere() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, DIRECTORY)]).await;
    rig.up(&vol).await;
    let second = PublishRequest { target: rig.mnt.join("second"), read_only: true, ..vol.publish() };
    rig.volumes.publish(&second).await.expect("publish");
    fs::create_dir(vol.target.join("sub")).expect("sub");
    fs::write(vol.target.join("sub/before"), "before").expect("write");
    let sub_path = rig.mnt.join("sub-path");
    fs::create_dir(&sub_path).expect("sub path");
    run(
        "mount",
        &["--bind", vol.target.join("sub").to_str().expect("utf-8"), sub_path.to_str().expect("utf-8")],
    );
    let container = rig.container("exec sleep 600");
    rig.heal();
    for round in 0..3 {
        let pid = rig.pid(&vol).await;
        let mut open = fs::File::create(vol.target.join("open")).expect("open");
        signal(pid, Signal::SIGKILL);
        for path in [&vol.target, &vol.staging, &second.target] {
            let file = path.join("sub/before");
            let content = eventually("a healed path", || fs::read_to_string(&file).ok()).await;
            assert_eq!(content, "before", "round {round}");
        }
        let inside = container.path(&vol.target.join("sub/before"));
        assert_eq!(eventually("the container", || fs::read_to_string(&inside).ok()).await, "before");
        let part = sub_path.join("before");
        assert_eq!(eventually("the sub-path", || fs::read_to_string(&part).ok()).await, "before");
        assert_eq!(errno(open.write_all(b"x")), Some(libc::ENOTCONN), "what was open ends");
        let new = container.path(&vol.target.join(format!("after-{round}")));
        fs::write(&new, "after").expect("the container writes");
        assert!(vol.target.join(format!("after-{round}")).exists());
        assert_eq!(errno(fs::write(second.target.join("x"), "")), Some(libc::EROFS), "still read-only");
        // What is left of the old union is cleared away after the swap.
        until("the end of the repair", async || {
            (rig.volumes.tally().repairs == round + 1 && rig.snapshot(&vol).await.heals == round + 1)
                .then_some(())
        })
        .await;
    }
    rig.stop_healing().await;
    run("umount", &[sub_path.to_str().expect("utf-8")]);
    fs::remove_dir(&sub_path).expect("remove");
    rig.volumes.unpublish(&vol.id, &second.target).await.expect("unpublish");
    drop(container);
    rig.end_containers();
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_is_dead_is_repaired_by_the_next_call_and_never_called_staged() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.up(&vol).await;
    fs::write(vol.target.join("file"), "x").expect("write");
    for publish in [false, true] {
        signal(rig.pid(&vol).await, Signal::SIGKILL);
        eventually("its death", || (errno(fs::read_dir(&vol.target)) == Some(libc::ENOTCONN)).then_some(()))
            .await;
        let stats = rig.volumes.stats(&vol.id, &vol.target).await.expect("stats of a dead volume");
        assert!(stats.health.abnormal, "{}", stats.health.message);
        if publish {
            rig.volumes.publish(&vol.publish()).await.expect("publish");
        } else {
            rig.volumes.stage(&vol.stage()).await.expect("stage");
        }
        assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), "x");
    }
    signal(rig.pid(&vol).await, Signal::SIGKILL);
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

/// Appends to one open file and opens another anew, until it is told to stop; counts rounds and fails on any error.
fn writer(
    vol: &Vol,
    stop: &Arc<AtomicBool>,
    rounds: &Arc<AtomicU64>,
) -> std::thread::JoinHandle<std::io::Result<()>> {
    let (target, stop, rounds) = (vol.target.clone(), stop.clone(), rounds.clone());
    std::thread::spawn(move || {
        let mut open = fs::File::create(target.join("open"))?;
        while !stop.load(Ordering::Relaxed) {
            open.write_all(b"line\n")?;
            open.sync_data()?;
            fs::write(target.join("again"), "x")?;
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_adopted_by_a_new_agent_without_an_error_in_a_running_writer() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let running = writer(&vol, &stop, &rounds);
    let (pid, mounts) = (rig.pid(&vol).await, rig.mounts());
    for _ in 0..3 {
        rig.restart(&Host::new()).await;
        rig.volumes.recover().await;
        assert_eq!(rig.mounts(), mounts, "nothing was mounted anew");
        assert_eq!(rig.pid(&vol).await, pid);
        let seen = rounds.load(Ordering::Relaxed);
        eventually("progress", || (rounds.load(Ordering::Relaxed) > seen + 2).then_some(())).await;
    }
    stop.store(true, Ordering::Relaxed);
    running.join().expect("the writer ends").expect("no error in the writer");
    // What an adopted union is worth: it is watched, and heals.
    rig.heal();
    signal(pid, Signal::SIGKILL);
    eventually("healing", || fs::read_to_string(vol.target.join("again")).ok()).await;
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_died_while_no_agent_ran_is_repaired_by_the_next_one() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.up(&vol).await;
    fs::write(vol.target.join("file"), "x").expect("write");
    signal(rig.pid(&vol).await, Signal::SIGKILL);
    rig.restart(&Host::new()).await;
    rig.volumes.recover().await;
    assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), "x");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

/// What a reboot leaves: records of another boot, and no mounts.
async fn reboot(rig: &mut Rig) {
    rig.stop_healing().await;
    for pid in super::rig::processes_of(rig.scratch.path()) {
        signal(pid, Signal::SIGKILL);
    }
    for place in [&rig.mnt, &rig.state] {
        loop {
            let table = Host::new().mounts().expect("mounts");
            let Some(point) = table.below(place).map(|e| e.mount_point.clone()).last() else { break };
            run("umount", &["-l", point.to_str().expect("utf-8")]);
        }
    }
    let own = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("boot id");
    for directory in ["volumes", "unions"] {
        replace_in_files(&rig.state.join(directory), own.trim(), "00000000-0000-0000-0000-000000000000");
    }
}

fn replace_in_files(directory: &Path, from: &str, to: &str) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            replace_in_files(&path, from, to);
        } else if path.extension().is_some_and(|e| e == "json") {
            let text = fs::read_to_string(&path).expect("a record");
            fs::write(&path, text.replace(from, to)).expect("a record");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_marked_so_return_after_a_reboot_and_the_others_are_forgotten() {
    let mut rig = Rig::new(&["a", "b"]);
    let kept = rig.volume(&[("a", 24, IMAGE), ("b", 24, DIRECTORY)]).await;
    let single = rig.volume(&[("a", 24, IMAGE)]).await;
    let other = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    for vol in [&kept, &single] {
        rig.volumes.stage(&vol.stage()).await.expect("stage");
        rig.volumes.publish(&PublishRequest { at_boot: true, ..vol.publish() }).await.expect("publish");
        fs::write(vol.target.join("file"), vol.id.as_str()).expect("write");
    }
    rig.up(&other).await;
    fs::write(other.target.join("file"), "other").expect("write");
    reboot(&mut rig).await;
    rig.restart(&Host::new()).await;
    rig.volumes.recover().await;
    for vol in [&kept, &single] {
        assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), vol.id.as_str());
        assert!(!rig.snapshot(vol).await.health.abnormal);
    }
    assert_eq!(rig.volumes.snapshot().await.len(), 2, "the other one is not on record any more");
    rig.volumes.unpublish(&other.id, &other.target).await.expect("the kubelet cleans up");
    rig.up(&other).await;
    assert_eq!(fs::read_to_string(other.target.join("file")).expect("read"), "other");
    for vol in [&kept, &single, &other] {
        rig.down(vol).await;
    }
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_marked_so_returns_after_a_reboot_when_its_disk_comes_late() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.volumes.stage(&vol.stage()).await.expect("stage");
    rig.volumes.publish(&PublishRequest { at_boot: true, ..vol.publish() }).await.expect("publish");
    fs::write(vol.target.join("file"), "x").expect("write");
    reboot(&mut rig).await;
    let disk = rig.scratch.join("b");
    run("umount", &[disk.to_str().expect("utf-8")]);
    rig.restart(&Host::new()).await;
    rig.volumes.recover().await;
    assert!(!vol.target.join("file").exists());
    let health = rig.snapshot(&vol).await.health;
    assert!(health.abnormal, "{}", health.message);
    rig.heal();
    run(
        "mount",
        &["-o", "loop", rig.scratch.join("b.disk").to_str().expect("utf-8"), disk.to_str().expect("utf-8")],
    );
    assert_eq!(eventually("its return", || fs::read_to_string(vol.target.join("file")).ok()).await, "x");
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

/// A volume of two XFS images, with a file on each of them, and the index of the branch that `file-0` lies on.
async fn two_of_xfs(rig: &Rig, on_branch_loss: &str) -> (Vol, u32) {
    let pieces = [("a", 320, IMAGE), ("b", 320, IMAGE)];
    let parameters = [("fsType", "xfs"), ("onBranchLoss", on_branch_loss)];
    let vol = rig.volume_with(&pieces, &parameters).await;
    rig.up(&vol).await;
    for n in 0..40 {
        fs::write(vol.target.join(format!("file-{n}")), format!("{n}")).expect("write");
    }
    for index in 0..2 {
        // What was not written out would be lost with the branch, as with any disk.
        run("sync", &["-f", rig.branch_mount(&vol, index).to_str().expect("utf-8")]);
    }
    let holder = (0..2).find(|&i| rig.branch_mount(&vol, i).join("data/file-0").exists()).expect("a holder");
    (vol, holder)
}

fn shut_down(rig: &Rig, vol: &Vol, index: u32) {
    run("xfs_io", &["-x", "-c", "shutdown", rig.branch_mount(vol, index).to_str().expect("utf-8")]);
}

fn big() -> [(&'static str, &'static str, u64); 2] {
    [("a", "ext4", 400), ("b", "ext4", 400)]
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_with_a_failed_branch_goes_as_a_whole_and_returns_complete() {
    let mut rig = Rig::with(&big());
    let (vol, holder) = two_of_xfs(&rig, "fail").await;
    // The image is held away, so that the branch cannot be attached again at once.
    let image = rig
        .scratch
        .join(if holder == 0 { "a" } else { "b" })
        .join("branches")
        .join(vol.branch(holder).as_str());
    let away = image.with_extension("away");
    fs::rename(&image, &away).expect("away");
    shut_down(&rig, &vol, holder);
    rig.heal();
    let gone = || (errno(fs::metadata(vol.target.join("file-0"))) == Some(libc::ENOTCONN)).then_some(());
    eventually("the union's end", gone).await;
    let made = errno(fs::write(vol.target.join("file-0"), "anew"));
    assert_eq!(made, Some(libc::ENOTCONN), "the file cannot be made anew elsewhere");
    until("the reason", async || {
        let stats = rig.volumes.stats(&vol.id, &vol.target).await.expect("stats");
        (stats.health.abnormal && stats.health.message.contains("missing")).then_some(())
    })
    .await;
    assert_eq!(errno(fs::write(vol.target.join("file-0"), "anew")), Some(libc::ENOTCONN), "it stays down");
    assert!(rig.volumes.tally().losses >= 1);
    fs::rename(&away, &image).expect("back");
    let read = || fs::read_to_string(vol.target.join("file-0")).ok();
    assert_eq!(eventually("its return", read).await, "0");
    for n in 0..40 {
        let content = fs::read_to_string(vol.target.join(format!("file-{n}"))).expect("complete");
        assert_eq!(content, format!("{n}"));
    }
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_may_serve_the_rest_does_so_until_the_branch_returns() {
    for (policy, writable) in [("servePartial", true), ("readOnly", false)] {
        let mut rig = Rig::with(&big());
        let (vol, holder) = two_of_xfs(&rig, policy).await;
        let kept = (0..40)
            .find(|n| rig.branch_mount(&vol, 1 - holder).join(format!("data/file-{n}")).exists())
            .expect("a file on the other branch");
        let image = rig
            .scratch
            .join(if holder == 0 { "a" } else { "b" })
            .join("branches")
            .join(vol.branch(holder).as_str());
        let away = image.with_extension("away");
        fs::rename(&image, &away).expect("away");
        shut_down(&rig, &vol, holder);
        rig.heal();
        let partial = || {
            let lost = errno(fs::metadata(vol.target.join("file-0"))) == Some(libc::ENOENT);
            (lost && fs::metadata(vol.target.join(format!("file-{kept}"))).is_ok()).then_some(())
        };
        eventually("the rest", partial).await;
        // MergerFS itself also hides the files of a failed branch: only a rebuilt union says that it is partial.
        until("the reason", async || {
            rig.snapshot(&vol).await.health.message.contains("runs without").then_some(())
        })
        .await;
        let wrote = || errno(fs::write(vol.target.join("new"), "x"));
        let expected = if writable { None } else { Some(libc::EROFS) };
        eventually(policy, || (wrote() == expected).then_some(())).await;
        fs::rename(&away, &image).expect("back");
        let whole = || fs::read_to_string(vol.target.join("file-0")).ok();
        assert_eq!(eventually("the whole", whole).await, "0");
        eventually("writing", || fs::write(vol.target.join("again"), "x").ok()).await;
        rig.stop_healing().await;
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_branch_someone_unmounts_is_made_whole() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    for n in 0..20 {
        fs::write(vol.target.join(format!("file-{n}")), "x").expect("write");
    }
    let pid = rig.pid(&vol).await;
    run("umount", &["-l", rig.branch_mount(&vol, 1).to_str().expect("utf-8")]);
    rig.heal();
    until("another union", async || rig.snapshot(&vol).await.pid.filter(|p| *p != pid)).await;
    for n in 0..20 {
        let file = vol.target.join(format!("file-{n}"));
        eventually("every file", || fs::read_to_string(&file).ok()).await;
    }
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_whose_mergerfs_hangs_is_told_so_at_once_and_heals_after_a_while() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.up(&vol).await;
    fs::write(vol.target.join("file"), "x").expect("write");
    signal(rig.pid(&vol).await, Signal::SIGSTOP);
    let asked = tokio::time::timeout(Duration::from_secs(30), rig.volumes.stats(&vol.id, &vol.target)).await;
    let stats = asked.expect("an answer in time").expect("stats");
    assert!(
        stats.health.abnormal && stats.health.message.contains("does not answer"),
        "{}",
        stats.health.message
    );
    rig.heal();
    // A read would wait in the kernel until the hanging daemon is aborted: it waits in a thread of its own.
    let target = vol.target.clone();
    let read = tokio::task::spawn_blocking(move || {
        (0..600).find_map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            fs::read_to_string(target.join("file")).ok()
        })
    });
    let content = tokio::time::timeout(Duration::from_secs(120), read).await.expect("healed in time");
    assert_eq!(content.expect("the reader").as_deref(), Some("x"));
    assert_eq!(rig.volumes.tally().hangs, 1);
    rig.stop_healing().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}
