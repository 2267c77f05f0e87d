//! Calls that must be refused: with a clear error, and nothing changed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use union_csi::domain::volume::{AccessMode, VolumeMode};
use union_csi::node::volume::{Access, PublishRequest, StageRequest, VolumeError};
use union_csi::store::Store;
use union_csi::store::object::BranchPhase;

use super::rig::{DIRECTORY, IMAGE, Rig, refused};
use crate::support::run;

#[tokio::test(flavor = "multi_thread")]
async fn volume_calls_in_the_wrong_order_say_so() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    assert!(matches!(refused(rig.volumes.publish(&vol.publish()).await), VolumeError::NotStaged { .. }));
    rig.volumes.unpublish(&vol.id, &vol.target).await.expect("nothing to unpublish");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("nothing to unstage");
    rig.assert_nothing_left();
    rig.up(&vol).await;
    let busy = refused(rig.volumes.unstage(&vol.id, &vol.staging).await);
    assert!(matches!(&busy, VolumeError::Busy { .. }) && busy.to_string().contains("-target"), "{busy}");
    fs::write(vol.target.join("file"), "x").expect("it still works");
    let elsewhere = PublishRequest { staging: rig.mnt.join("other"), ..vol.publish() };
    assert!(matches!(refused(rig.volumes.publish(&elsewhere).await), VolumeError::NotStaged { .. }));
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_does_not_exist_or_is_not_complete_is_not_staged() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    let unknown = StageRequest { volume: "unknown".parse().expect("id"), ..vol.stage() };
    assert!(matches!(refused(rig.volumes.stage(&unknown).await), VolumeError::Unknown { .. }));
    rig.volumes.unstage(&unknown.volume, &vol.staging).await.expect("nothing to unstage");

    let name = vol.branch(1).to_string();
    let mut branch = rig.store.branches().get(&name).await.expect("get").expect("a branch");
    branch.status.phase = BranchPhase::Lost;
    branch.status.reason = "its pool is absent".to_owned();
    rig.store.branches().update_status(branch).await.expect("update");
    let incomplete = refused(rig.volumes.stage(&vol.stage()).await);
    assert!(matches!(incomplete, VolumeError::Incomplete { .. }));
    assert!(incomplete.to_string().contains("its pool is absent"), "{incomplete}");
    rig.store.branches().delete(&name, None).await.expect("delete");
    assert!(matches!(refused(rig.volumes.stage(&vol.stage()).await), VolumeError::Incomplete { .. }));
    let _ = fs::remove_dir(&vol.staging);
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_with_a_foreign_or_missing_branch_is_not_staged_and_nothing_stays_attached() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, DIRECTORY)]).await;
    let hidden = rig.scratch.join("hidden");
    let place = rig.scratch.join("b/branches").join(vol.branch(1).as_str());
    let moved = rig.scratch.join("b/moved");
    fs::rename(&place, &moved).expect("the branch goes");
    let missing = refused(rig.volumes.stage(&vol.stage()).await);
    assert!(matches!(missing, VolumeError::Incomplete { .. }), "{missing}");
    rig.assert_nothing_left();
    assert!(!place.exists(), "it is not made anew");
    fs::rename(&moved, &place).expect("it returns");
    fs::write(&hidden, "").expect("hidden");
    rig.up(&vol).await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_staged_or_published_in_another_way_is_left_as_it_is() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await.group(7);
    rig.up(&vol).await;
    let mounts = rig.mounts();
    let others = [
        vol.clone().flags(&["ro"]).stage(),
        vol.clone().group(8).stage(),
        StageRequest { staging: rig.mnt.join("other"), ..vol.stage() },
        StageRequest { access_mode: AccessMode::MultiNodeReaderOnly, ..vol.stage() },
    ];
    for other in others {
        let error = refused(rig.volumes.stage(&other).await);
        assert!(matches!(error, VolumeError::Differs { .. }), "{error}");
    }
    let others = [
        PublishRequest { read_only: true, ..vol.publish() },
        vol.clone().flags(&["noexec"]).publish(),
        PublishRequest { target: rig.mnt.join("third"), ..vol.clone().group(8).publish() },
        PublishRequest { target: rig.mnt.join("third"), access: Access::Block, ..vol.publish() },
    ];
    for other in others {
        let error = refused(rig.volumes.publish(&other).await);
        assert!(matches!(error, VolumeError::Differs { .. }), "{error}");
    }
    assert_eq!(rig.mounts(), mounts, "nothing was changed");
    let _ = fs::remove_dir(rig.mnt.join("other"));
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_for_a_single_writer_is_published_once() {
    let rig = Rig::new(&["a"]);
    let mut vol = rig.volume(&[("a", 24, IMAGE)]).await;
    vol.mode = AccessMode::SingleNodeSingleWriter;
    rig.up(&vol).await;
    rig.volumes.publish(&vol.publish()).await.expect("the same again");
    let second = PublishRequest { target: rig.mnt.join("second"), ..vol.publish() };
    assert!(matches!(refused(rig.volumes.publish(&second).await), VolumeError::Busy { .. }));
    rig.volumes.unpublish(&vol.id, &vol.target).await.expect("unpublish");
    rig.volumes.publish(&second).await.expect("the other one is gone");
    rig.volumes.unpublish(&vol.id, &second.target).await.expect("unpublish");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_mode_and_flags_that_do_not_fit_are_refused_before_anything_is_done() {
    let rig = Rig::new(&["a"]);
    let files = rig.volume(&[("a", 24, IMAGE)]).await;
    let block = rig.volume_of(&[("a", 24, IMAGE)], &[], VolumeMode::Block).await;
    let requests = [
        StageRequest { access: Access::Block, ..files.stage() },
        StageRequest { access: Access::Mount { flags: vec![], group: None }, ..block.stage() },
        files.clone().flags(&["suid"]).stage(),
        files.clone().flags(&["data=journal"]).stage(),
        files.clone().flags(&["ro,noatime"]).stage(),
    ];
    for request in requests {
        let error = refused(rig.volumes.stage(&request).await);
        assert!(matches!(error, VolumeError::Request { .. }), "{error}");
    }
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_paths_outside_the_allowed_directories_are_refused() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 24, IMAGE)]).await;
    let outside = rig.scratch.join("outside");
    fs::create_dir(&outside).expect("outside");
    let bad: Vec<PathBuf> = vec![
        outside.join("x"),
        rig.mnt.clone(),
        "relative".into(),
        rig.mnt.join("../outside/x"),
        rig.mnt.join("x".repeat(300)),
        rig.mnt.join("x/".repeat(2500)),
    ];
    for path in &bad {
        let error = refused(rig.volumes.stage(&StageRequest { staging: path.clone(), ..vol.stage() }).await);
        assert!(matches!(error, VolumeError::Path { .. }), "{}: {error}", path.display());
    }
    rig.up(&vol).await;
    for path in &bad {
        let request = PublishRequest { target: path.clone(), ..vol.publish() };
        let error = refused(rig.volumes.publish(&request).await);
        assert!(matches!(error, VolumeError::Path { .. }), "{}: {error}", path.display());
    }
    assert_eq!(fs::read_dir(&outside).expect("list").count(), 0);
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_is_never_mounted_through_a_symlink() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 24, IMAGE)]).await;
    rig.volumes.stage(&vol.stage()).await.expect("stage");
    let victim = rig.scratch.join("victim");
    fs::create_dir_all(victim.join("sub")).expect("victim");
    symlink(&victim, rig.mnt.join("way")).expect("a symlink on the way");
    symlink(&victim, rig.mnt.join("end")).expect("a symlink at the end");
    for path in ["way/target", "way/sub", "end"] {
        let request = PublishRequest { target: rig.mnt.join(path), ..vol.publish() };
        let error = refused(rig.volumes.publish(&request).await);
        assert!(matches!(error, VolumeError::Path { .. }), "{path}: {error}");
        let stage = StageRequest { staging: rig.mnt.join(path), ..vol.stage() };
        assert!(rig.volumes.stage(&stage).await.is_err(), "{path}");
        let _ = rig.volumes.unpublish(&vol.id, &request.target).await;
    }
    assert!(victim.join("sub").exists() && fs::read_dir(&victim).expect("list").count() == 1);
    assert!(rig.mnt.join("end").is_symlink(), "the symlink itself stays");
    fs::remove_file(rig.mnt.join("way")).expect("remove");
    fs::remove_file(rig.mnt.join("end")).expect("remove");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_does_not_cover_files_and_unpublishing_never_removes_them() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 24, IMAGE)]).await;
    rig.volumes.stage(&vol.stage()).await.expect("stage");
    fs::create_dir(&vol.target).expect("target");
    fs::write(vol.target.join("mine"), "x").expect("a file");
    let error = refused(rig.volumes.publish(&vol.publish()).await);
    assert!(matches!(error, VolumeError::Path { .. }), "{error}");
    assert!(rig.volumes.unpublish(&vol.id, &vol.target).await.is_err());
    assert!(vol.target.join("mine").exists());
    fs::remove_dir_all(&vol.target).expect("remove");
    fs::write(&vol.target, "a file").expect("a file");
    assert!(matches!(refused(rig.volumes.publish(&vol.publish()).await), VolumeError::Path { .. }));
    assert!(rig.volumes.unpublish(&vol.id, &vol.target).await.is_err());
    assert_eq!(fs::read_to_string(&vol.target).expect("read"), "a file");
    fs::remove_file(&vol.target).expect("remove");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_calls_leave_mounts_of_others_alone() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 24, IMAGE)]).await;
    for place in [&vol.staging, &vol.target] {
        fs::create_dir(place).expect("place");
        run("mount", &["-t", "tmpfs", "foreign", place.to_str().expect("utf-8")]);
    }
    assert!(matches!(refused(rig.volumes.stage(&vol.stage()).await), VolumeError::Path { .. }));
    assert!(rig.volumes.unpublish(&vol.id, &vol.target).await.is_err());
    run("umount", &[vol.staging.to_str().expect("utf-8")]);
    rig.volumes.stage(&vol.stage()).await.expect("stage");
    assert!(matches!(refused(rig.volumes.publish(&vol.publish()).await), VolumeError::Path { .. }));
    run("umount", &[vol.target.to_str().expect("utf-8")]);
    rig.up(&vol).await;
    run("mount", &["-t", "tmpfs", "foreign", vol.target.to_str().expect("utf-8")]);
    assert!(rig.volumes.unpublish(&vol.id, &vol.target).await.is_err(), "something lies over it");
    run("umount", &[vol.target.to_str().expect("utf-8")]);
    rig.down(&vol).await;
    fs::remove_dir(&vol.staging).expect("the staging directory was there before");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_with_open_files_is_not_unpublished_until_they_are_closed() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.up(&vol).await;
    let file = fs::File::create(vol.target.join("file")).expect("open");
    let busy = refused(rig.volumes.unpublish(&vol.id, &vol.target).await);
    assert!(matches!(busy, VolumeError::Busy { .. }), "{busy}");
    drop(file);
    rig.down(&vol).await;
    rig.assert_nothing_left();
}
