//! What a volume is good for.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use union_csi::domain::union::UnionKind;
use union_csi::domain::volume::{AccessMode, VolumeMode};
use union_csi::node::volume::{PublishRequest, VolumeError};

use super::rig::{DIRECTORY, IMAGE, Rig, options, refused};

#[tokio::test(flavor = "multi_thread")]
async fn volume_lives_its_whole_life_and_leaves_nothing_behind() {
    let rig = Rig::new(&["a", "b", "c"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE), ("c", 64, DIRECTORY)]).await;
    rig.up(&vol).await;
    for n in 0..60 {
        fs::write(vol.target.join(format!("file-{n}")), format!("content {n}")).expect("write");
    }
    for n in 0..60 {
        let name = format!("file-{n}");
        let holders: Vec<_> =
            (0..3).filter(|&i| rig.branch_mount(&vol, i).join("data").join(&name).exists()).collect();
        assert_eq!(holders.len(), 1, "{name} lies whole on one branch: {holders:?}");
        let plain = rig.branch_mount(&vol, holders[0]).join("data").join(&name);
        assert_eq!(fs::read_to_string(plain).expect("read"), format!("content {n}"));
    }
    let snapshot = rig.snapshot(&vol).await;
    assert_eq!(snapshot.union, UnionKind::Mergerfs);
    assert_eq!((snapshot.staging, snapshot.targets), (Some(vol.staging.clone()), vec![vol.target.clone()]));
    assert!(!snapshot.health.abnormal, "{}", snapshot.health.message);
    assert!(snapshot.options.len() > 3, "options are read back: {:?}", snapshot.options);
    rig.down(&vol).await;
    rig.assert_nothing_left();
    rig.up(&vol).await;
    assert_eq!(fs::read_to_string(vol.target.join("file-7")).expect("read"), "content 7");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_one_branch_is_bound_without_a_union() {
    let rig = Rig::new(&["a"]);
    for format in [IMAGE, DIRECTORY] {
        let vol = rig.volume(&[("a", 64, format)]).await;
        rig.up(&vol).await;
        fs::write(vol.target.join("file"), "x").expect("write");
        let snapshot = rig.snapshot(&vol).await;
        assert_eq!((snapshot.union, snapshot.pid), (UnionKind::Bind, None));
        assert!(!vol.target.join("lost+found").exists(), "only data/ is given away");
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_is_only_read_is_merged_by_overlayfs() {
    let rig = Rig::new(&["a", "b"]);
    let mut vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    for n in 0..20 {
        fs::write(vol.target.join(format!("file-{n}")), "x").expect("write");
    }
    rig.down(&vol).await;
    vol.mode = AccessMode::SingleNodeReaderOnly;
    rig.up(&vol).await;
    let expected = if rig.unions.abilities().overlay { UnionKind::Overlay } else { UnionKind::Mergerfs };
    assert_eq!(rig.snapshot(&vol).await.union, expected);
    assert_eq!(fs::read_dir(&vol.target).expect("list").count(), 20);
    let denied = fs::write(vol.target.join("file-1"), "y").expect_err("read-only");
    assert_eq!(denied.raw_os_error(), Some(libc::EROFS));
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_block_mode_is_given_as_a_device() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume_of(&[("a", 32, IMAGE)], &[], VolumeMode::Block).await;
    rig.up(&vol).await;
    fs::write(&vol.target, vec![7u8; 4096]).expect("write to the device");
    let size = crate::support::run("blockdev", &["--getsize64", vol.target.to_str().expect("utf-8")]);
    assert_eq!(size, (32u64 << 20).to_string());
    let stats = rig.volumes.stats(&vol.id, &vol.target).await.expect("stats");
    assert_eq!((stats.bytes.total, stats.inodes), (32 << 20, None));
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_calls_repeated_change_nothing() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, DIRECTORY)]).await;
    rig.up(&vol).await;
    let pid = rig.pid(&vol).await;
    let mounts = rig.mounts();
    rig.up(&vol).await;
    assert_eq!(rig.pid(&vol).await, pid);
    assert_eq!(rig.mounts(), mounts);
    rig.volumes.unpublish(&vol.id, &vol.target).await.expect("unpublish");
    rig.volumes.unpublish(&vol.id, &vol.target).await.expect("unpublish again");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    rig.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage again");
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_can_be_taken_down_when_its_objects_are_gone() {
    use union_csi::store::Store;
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    rig.store.splits().delete(vol.id.as_str(), None).await.expect("delete");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_served_at_the_same_time() {
    let rig = Rig::new(&["a", "b"]);
    let mut vols = Vec::new();
    for _ in 0..6 {
        vols.push(rig.volume(&[("a", 24, IMAGE), ("b", 24, DIRECTORY)]).await);
    }
    futures::future::join_all(vols.iter().map(|vol| rig.up(vol))).await;
    for vol in &vols {
        fs::write(vol.target.join("file"), vol.id.as_str()).expect("write");
    }
    for vol in &vols {
        assert_eq!(fs::read_to_string(vol.target.join("file")).expect("read"), vol.id.as_str());
    }
    futures::future::join_all(vols.iter().map(|vol| rig.down(vol))).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_is_published_at_many_targets_each_in_its_way() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    let second = PublishRequest { target: rig.mnt.join("second"), read_only: true, ..vol.publish() };
    rig.volumes.publish(&second).await.expect("a read-only target");
    fs::write(vol.target.join("file"), "x").expect("write");
    assert_eq!(fs::read_to_string(second.target.join("file")).expect("read"), "x");
    let denied = fs::write(second.target.join("file"), "y").expect_err("read-only");
    assert_eq!(denied.raw_os_error(), Some(libc::EROFS));
    assert!(matches!(refused(rig.volumes.unstage(&vol.id, &vol.staging).await), VolumeError::Busy { .. }));
    rig.volumes.unpublish(&vol.id, &second.target).await.expect("unpublish");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_mounts_have_the_flags_that_were_asked_for() {
    let rig = Rig::new(&["a", "b"]);
    for pieces in [vec![("a", 24, IMAGE)], vec![("a", 24, IMAGE), ("b", 24, DIRECTORY)]] {
        let vol = rig.volume(&pieces).await.flags(&["noatime", "noexec"]);
        rig.up(&vol).await;
        for path in [&vol.staging, &vol.target] {
            let options = options(path);
            for option in ["nosuid", "nodev", "noexec", "noatime", "rw"] {
                assert!(options.iter().any(|o| o == option), "{option} in {options:?}");
            }
        }
        rig.down(&vol).await;
    }
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_can_be_written_by_its_group_and_what_is_below_its_root_is_left_alone() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await.group(4711);
    rig.up(&vol).await;
    let root = fs::metadata(&vol.target).expect("root");
    assert_eq!((root.gid(), root.permissions().mode() & 0o7070), (4711, 0o2070));
    let written = Command::new("setpriv")
        .args(["--reuid=1234", "--regid=1234", "--groups=4711", "touch"])
        .arg(vol.target.join("file"))
        .status();
    assert!(written.expect("setpriv").success(), "a member of the group writes");
    assert_eq!(fs::metadata(vol.target.join("file")).expect("file").gid(), 4711);
    std::os::unix::fs::chown(vol.target.join("file"), Some(0), Some(0)).expect("chown");
    rig.down(&vol).await;
    rig.up(&vol).await;
    assert_eq!(fs::metadata(vol.target.join("file")).expect("file").gid(), 0, "never a recursive chown");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_has_no_way_out_to_the_host_for_root_without_capabilities() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 24, IMAGE), ("b", 24, IMAGE)]).await;
    rig.up(&vol).await;
    assert!(!vol.target.join(".mergerfs").exists(), "the control file is out of reach");
    let escape = "for place in .mergerfs ../.mergerfs data/../../.mergerfs; do
            setfattr -n user.mergerfs.branches -v '+>/etc' \"$1/$place\" 2>/dev/null && exit 1
            python3 -c 'import os,sys; os.setxattr(sys.argv[1], \"user.mergerfs.branches\", b\"+>/etc\")' \\
                \"$1/$place\" 2>/dev/null && exit 1
        done; test ! -e \"$1/passwd\"";
    for user in [["--reuid=0", "--regid=0"], ["--reuid=1234", "--regid=0"]] {
        let tried = Command::new("setpriv")
            .args(user)
            .args(["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "sh", "-c", escape, "sh"])
            .arg(&vol.target)
            .status();
        assert!(tried.expect("setpriv").success(), "{user:?} reached the control file");
    }
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_tells_its_space_and_health_where_it_is_and_nowhere_else() {
    let rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    for path in [&vol.staging, &vol.target] {
        let stats = rig.volumes.stats(&vol.id, path).await.expect("stats");
        assert!(stats.bytes.total > 80 << 20 && stats.bytes.total < 128 << 20, "{:?}", stats.bytes);
        assert!(stats.bytes.available > 64 << 20);
        assert!(stats.inodes.expect("inodes").total > 1000);
        assert!(!stats.health.abnormal, "{}", stats.health.message);
    }
    let elsewhere = rig.volumes.stats(&vol.id, &rig.mnt.join("elsewhere")).await;
    assert!(matches!(refused(elsewhere), VolumeError::Unknown { .. }));
    let other = rig.volumes.stats(&"other".parse().expect("id"), &vol.target).await;
    assert!(matches!(refused(other), VolumeError::Unknown { .. }));
    rig.down(&vol).await;
    assert!(matches!(refused(rig.volumes.stats(&vol.id, &vol.target).await), VolumeError::Unknown { .. }));
    rig.volumes.ready().await.expect("ready");
}
