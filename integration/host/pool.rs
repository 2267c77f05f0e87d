//! Pools on real disks.

use std::path::Path;

use union_csi::domain::policy::FsType;
use union_csi::domain::pool::{PoolReport, PoolState, Reserve};
use union_csi::domain::{Bytes, PoolName};
use union_csi::node::branch::BranchError;
use union_csi::node::pool::discover::discover;
use union_csi::node::pool::marker::MARKER;
use union_csi::platform::{Host, HostError};
use union_csi::store::object::BranchSpec;

use crate::branch::{directory, image, names};
use crate::support::{Node, Scratch, disk, node, node_with, pool_settings, run};

fn only(node: &Node) -> PoolReport {
    let mut reports = node.pools.measure();
    assert_eq!(reports.len(), 1);
    reports.remove(0)
}

fn absent(node: &Node, word: &str) {
    let report = only(node);
    assert_eq!(report.state, PoolState::Absent, "{report:?}");
    assert!(report.message.contains(word), "{:?} names {word}", report.message);
    assert_eq!((report.allocatable(), report.total), (Bytes::ZERO, Bytes::ZERO));
    let refused = node.branches.ensure_present(&directory(report.name.as_str(), 16), false);
    assert!(matches!(refused, Err(BranchError::Pool { .. })), "{refused:?}");
}

/// Unmounts; a thread that asks for the free space, or a child of another test before its exec, may hold it for a moment.
fn unmount(path: &Path) {
    let path = path.to_str().expect("path");
    for _ in 0..100 {
        if std::process::Command::new("umount").args(["-q", path]).status().is_ok_and(|s| s.success()) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    run("umount", &[path]);
}

fn mount(scratch: &Scratch, name: &str, at: &Path) {
    run(
        "mount",
        &[
            "-o",
            "loop",
            scratch.join(&format!("{name}.disk")).to_str().expect("path"),
            at.to_str().expect("path"),
        ],
    );
}

#[test]
fn a_pool_is_measured_as_df_sees_it() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let report = only(&node);
    assert_eq!((report.state, report.message.as_str()), (PoolState::Ready, ""));
    assert_eq!(report.filesystem, "ext4");
    let path = disk.to_str().expect("path");
    let df: Vec<u64> = run("df", &["-B1", "--output=size,avail", path])
        .lines()
        .last()
        .expect("a line")
        .split_whitespace()
        .map(|n| n.parse().expect("a number"))
        .collect();
    assert_eq!((report.total.get(), report.free.get()), (df[0], df[1]));
    let image_file = scratch.join("one.disk");
    let uuid = run("blkid", &["-p", "-s", "UUID", "-o", "value", image_file.to_str().expect("path")]);
    assert_eq!(report.device, uuid);
    assert!(report.image_filesystems.contains(&FsType::Ext4));
    let spec = image("one", 100, Some(FsType::Ext4));
    node.branches.ensure_present(&spec, false).expect("made");
    let after = only(&node);
    assert_eq!((after.promised, after.occupied), (spec.size, spec.size));
    let lost = report.allocatable().get() - after.allocatable().get();
    assert!((spec.size.get()..spec.size.get() + (2 << 20)).contains(&lost), "{lost} less for {}", spec.size);
    // A new agent finds the branches on the disk.
    let again = crate::support::node(&scratch, &Host::new(), &[&disk]);
    assert_eq!(only(&again), after);
}

#[test]
fn the_reserve_is_kept_free() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    for (reserve, share) in
        [(Reserve::Percent(10), None), (Reserve::Bytes(Bytes::mib(50)), Some(Bytes::mib(50)))]
    {
        let settings = union_csi::node::pool::PoolSettings { reserve, ..pool_settings(&disk) };
        let node = node_with(&scratch, &Host::new(), vec![settings]);
        let report = only(&node);
        let reserve = share.unwrap_or_else(|| Bytes::new(report.total.get().div_ceil(10)));
        assert_eq!(report.reserve, reserve);
        assert_eq!(report.allocatable(), report.free.min(report.total).saturating_sub(reserve));
        let too_much =
            BranchSpec { size: Bytes::new(report.free.get() / 4096 * 4096), ..image("one", 0, None) };
        let refused = node.branches.ensure_present(&too_much, false);
        assert!(matches!(refused, Err(BranchError::NoRoom { .. })), "{refused:?}");
    }
}

#[test]
fn a_disk_that_did_not_mount_is_absent_and_nothing_is_written_in_its_place() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = directory("one", 16);
    node.branches.ensure_present(&spec, false).expect("made");
    assert_eq!(only(&node).promised, spec.size);
    unmount(&disk);
    absent(&node, "not mounted");
    for outcome in [
        node.branches.ensure_present(&spec, true).map(drop),
        node.branches.ensure_absent(&spec),
        node.branches.ensure_attached(&spec, &scratch.join("at"), false).map(drop),
    ] {
        assert!(matches!(outcome, Err(BranchError::Pool { .. })), "{outcome:?}");
    }
    assert_eq!(names(&disk), Vec::<String>::new(), "the empty directory stayed empty");
    mount(&scratch, "one", &disk);
    let back = only(&node);
    assert_eq!((back.state, back.promised), (PoolState::Ready, spec.size));
    node.branches.ensure_present(&spec, true).expect("it is there again");

    unmount(&disk);
    std::fs::remove_dir(&disk).expect("remove");
    absent(&node, "does not exist");
    assert!(!disk.exists());
    std::fs::write(&disk, "").expect("a file");
    absent(&node, "Not a directory");
}

#[test]
fn another_disk_in_its_place_is_not_the_pool() {
    let scratch = Scratch::new();
    let one = disk(&scratch, "one", "ext4", 200);
    let two = disk(&scratch, "two", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&one]);
    assert_eq!(only(&node).state, PoolState::Ready);
    unmount(&one);
    unmount(&two);
    mount(&scratch, "two", &one);
    absent(&node, "its disk is not mounted");
    assert_eq!(names(&one), ["lost+found"], "nothing was written to it");
    unmount(&one);

    // A copy of the disk, even with the marker on it, is another disk.
    mount(&scratch, "one", &one);
    std::fs::create_dir_all(&two).expect("mount point");
    mount(&scratch, "two", &two);
    std::fs::copy(one.join(MARKER), two.join(MARKER)).expect("copy");
    unmount(&one);
    unmount(&two);
    mount(&scratch, "two", &one);
    absent(&node, "its disk is not mounted");
    std::fs::remove_file(scratch.join("state/pools/one.json")).expect("the record");
    absent(&node, "was copied");
}

#[test]
fn the_configured_uuid_is_demanded() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let settings = union_csi::node::pool::PoolSettings {
        uuid: Some("00000000-0000-4000-8000-000000000000".to_owned()),
        ..pool_settings(&disk)
    };
    let wrong = node_with(&scratch, &Host::new(), vec![settings.clone()]);
    absent(&wrong, "00000000-0000-4000-8000-000000000000");
    assert_eq!(names(&disk), ["lost+found"]);
    let uuid = Host::new().filesystem_uuid(&disk).expect("uuid").expect("ext4 has one");
    let settings = union_csi::node::pool::PoolSettings { uuid: Some(uuid.to_uppercase()), ..settings };
    assert_eq!(only(&node_with(&scratch, &Host::new(), vec![settings])).state, PoolState::Ready);
}

#[test]
fn a_marker_that_is_gone_foreign_or_broken_makes_a_pool_absent() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    assert_eq!(only(&node).state, PoolState::Ready);
    let marker = disk.join(MARKER);
    let original = std::fs::read_to_string(&marker).expect("marker");
    std::fs::remove_file(&marker).expect("remove");
    absent(&node, "is gone");
    std::fs::write(&marker, original.replace("node-1", "node-2")).expect("write");
    absent(&node, "node-2");
    std::fs::write(&marker, original.replace("\"one\"", "\"other\"")).expect("write");
    absent(&node, "pool other");
    std::fs::write(&marker, "{").expect("write");
    absent(&node, "cannot be understood");
    assert_eq!(std::fs::read_to_string(&marker).expect("marker"), "{", "it was left as it was");
    std::fs::write(&marker, &original).expect("write");
    assert_eq!(only(&node).state, PoolState::Ready);
    // A state directory that was lost is written anew from the marker.
    std::fs::remove_dir_all(scratch.join("state/pools")).expect("state");
    assert_eq!(only(&node).state, PoolState::Ready);
    assert!(scratch.join("state/pools/one.json").exists());
}

#[test]
fn branches_of_another_installation_are_not_taken_over() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    std::fs::create_dir_all(disk.join("branches/vol-0")).expect("directory");
    absent(&node(&scratch, &Host::new(), &[&disk]), "another installation");
    assert!(!disk.join(MARKER).exists());
}

#[test]
fn two_pools_on_one_disk_share_its_space() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "disk", "ext4", 400);
    let (one, two) = (disk.join("one"), disk.join("two"));
    std::fs::create_dir(&one).expect("one");
    std::fs::create_dir(&two).expect("two");
    let node = node(&scratch, &Host::new(), &[&one, &two]);
    let spec = image("one", 150, Some(FsType::Ext4));
    node.branches.ensure_present(&spec, false).expect("made");
    let reports = node.pools.measure();
    assert_eq!(reports[0].device, reports[1].device);
    for report in &reports {
        assert_eq!((report.promised, report.occupied), (spec.size, spec.size), "{}", report.name);
    }
    assert_eq!(reports[0].allocatable(), reports[1].allocatable());
    let other: PoolName = "two".parse().expect("pool");
    let id = "vol-1".parse().expect("id");
    let second = BranchSpec { id, index: 1, pool: other, size: Bytes::mib(300), ..spec.clone() };
    let refused = node.branches.ensure_present(&second, false);
    assert!(matches!(refused, Err(BranchError::NoRoom { .. })), "{refused:?}");
    node.branches.ensure_absent(&spec).expect("removed");
    node.branches.ensure_present(&second, false).expect("now it fits");
}

#[test]
fn a_read_only_pool_gives_what_it_has_and_takes_nothing() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let node = node(&scratch, &Host::new(), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    node.branches.ensure_present(&spec, false).expect("made");
    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    std::fs::write(at.join("data/file"), "content").expect("write");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    run("mount", &["-o", "remount,ro", disk.to_str().expect("path")]);
    let report = only(&node);
    assert_eq!((report.state, report.allocatable()), (PoolState::ReadOnly, Bytes::ZERO));
    assert!(report.message.contains("takes no writes"));
    node.branches.ensure_present(&spec, true).expect("it is there");
    let second = BranchSpec { id: "vol-1".parse().expect("id"), index: 1, ..spec.clone() };
    for refused in [
        node.branches.ensure_present(&second, false).map(drop),
        node.branches.ensure_absent(&spec),
        node.branches.ensure_attached(&spec, &at, false).map(drop),
    ] {
        assert!(matches!(refused, Err(BranchError::Pool { .. })), "{refused:?}");
    }
    node.branches.ensure_attached(&spec, &at, true).expect("attached read-only");
    assert_eq!(std::fs::read_to_string(at.join("data/file")).expect("read"), "content");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");

    let new = crate::support::disk(&scratch, "new", "ext4", 200);
    run("mount", &["-o", "remount,ro", new.to_str().expect("path")]);
    absent(&crate::support::node(&scratch, &Host::new(), &[&new]), "never used");
}

#[test]
fn every_filesystem_tells_its_uuid() {
    let scratch = Scratch::new();
    for (name, fs, mib) in [("e", "ext4", 64), ("x", "xfs", 300), ("b", "btrfs", 128)] {
        let disk = disk(&scratch, name, fs, mib);
        let image_file = scratch.join(&format!("{name}.disk"));
        let image_path = image_file.to_str().expect("path");
        let blkid = run("blkid", &["-p", "-s", "UUID", "-o", "value", image_path]);
        assert_eq!(Host::new().filesystem_uuid(&disk).expect(fs), Some(blkid.clone()), "{fs}");
        let probed = Host::new().probe_filesystem(&image_file).expect(fs);
        assert_eq!(probed, Some((blkid, fs.to_owned())));
    }
    let plain = scratch.join("plain");
    std::fs::create_dir(&plain).expect("plain");
    run("mount", &["-t", "tmpfs", "tmpfs", plain.to_str().expect("path")]);
    // A tmpfs may be given a UUID by the kernel, which then is another after each mount.
    Host::new().filesystem_uuid(&plain).expect("an answer");
}

#[test]
fn mounted_disks_are_proposed_and_pools_and_branches_are_not() {
    let scratch = Scratch::new();
    let used = disk(&scratch, "used", "ext4", 1200);
    let free = disk(&scratch, "free", "xfs", 1200);
    let node = node(&scratch, &Host::new(), &[&used]);
    let spec = image("used", 64, Some(FsType::Ext4));
    node.branches.ensure_present(&spec, false).expect("made");
    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    // Another test may have a mount that hangs on purpose, for half a minute: that is told, and no proposal is made then.
    let found = (0..6)
        .find_map(|_| match discover(&Host::new(), node.pools.settings()) {
            Err(HostError::Timeout { .. }) => None,
            found => Some(found.expect("discovered")),
        })
        .expect("mounted filesystems that answer");
    let proposed: Vec<_> = found.proposed.iter().filter(|p| p.path.starts_with(scratch.path())).collect();
    assert_eq!(proposed.len(), 1, "{proposed:?}");
    assert_eq!((proposed[0].path.as_path(), proposed[0].filesystem.as_str()), (free.as_path(), "xfs"));
    assert_eq!(proposed[0].name.as_str(), "free");
    assert_eq!(proposed[0].uuid, Host::new().filesystem_uuid(&free).expect("uuid"));
    let why = |path: &Path| found.skipped.iter().find(|(p, _)| p == path).map(|(_, why)| why.as_str());
    assert!(why(&used).is_some_and(|w| w.contains("already")), "{:?}", found.skipped);
    assert!(why(&at).is_some_and(|w| w.contains("branch")), "{:?}", found.skipped);
    assert!(!free.join(MARKER).exists(), "nothing was taken");
    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
}

/// Pools below `<scratch>`, as a fresh install has them; the state directory lies there too.
fn under(scratch: &Scratch) -> Node {
    use union_csi::domain::NodeName;
    use union_csi::node::branch::Branches;
    use union_csi::node::pool::{Pools, PoolsUnder};
    let name: NodeName = "node-1".parse().expect("a node name");
    let state = scratch.join("state");
    std::fs::create_dir_all(&state).expect("state directory");
    let settings = PoolsUnder {
        path: scratch.join("pools"),
        labels: [("tier".to_owned(), "found".to_owned())].into(),
        reserve: Reserve::Bytes(Bytes::ZERO),
    };
    let pools = Pools::new(Host::new(), name, Vec::new(), state).with_under(vec![settings]);
    let pools = std::sync::Arc::new(pools);
    Node { branches: Branches::new(Host::new(), pools.clone()), pools }
}

fn states(node: &Node) -> Vec<(String, PoolState)> {
    node.pools.measure().into_iter().map(|r| (r.name.to_string(), r.state)).collect()
}

#[test]
fn a_disk_that_is_mounted_below_the_directory_becomes_a_pool_by_itself() {
    let scratch = Scratch::new();
    let node = under(&scratch);
    assert!(node.pools.measure().is_empty(), "the directory does not exist yet");
    let place = scratch.join("pools/one");
    std::fs::create_dir_all(&place).expect("mount point");
    assert_eq!(states(&node), [("one".to_owned(), PoolState::Absent)]);
    absent(&node, "no filesystem is mounted");
    assert!(!place.join(MARKER).exists(), "nothing is written to the empty mount point");

    disk(&scratch, "one", "ext4", 200);
    unmount(&scratch.join("one"));
    mount(&scratch, "one", &place);
    let report = only(&node);
    assert_eq!((report.state, report.labels["tier"].as_str()), (PoolState::Ready, "found"));
    let spec = directory("one", 16);
    node.branches.ensure_present(&spec, false).expect("made");

    unmount(&place);
    absent(&node, "not mounted");
    assert!(!place.join(MARKER).exists(), "nothing is written to the empty mount point");
    mount(&scratch, "one", &place);
    assert_eq!(only(&node).promised, Bytes::mib(16), "the branch is counted again");
}

#[test]
fn a_link_below_the_directory_is_a_pool_and_what_else_lies_there_is_none() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "big", "ext4", 200);
    let place = scratch.join("pools");
    std::fs::create_dir_all(place.join("lost+found")).expect("directory");
    std::fs::create_dir_all(place.join(".hidden")).expect("directory");
    std::fs::create_dir_all(place.join("Not_A_Name")).expect("directory");
    std::fs::write(place.join("file"), "x").expect("file");
    std::os::unix::fs::symlink(&disk, place.join("linked")).expect("link");
    std::os::unix::fs::symlink(scratch.join("nowhere"), place.join("loose")).expect("link");
    let node = under(&scratch);
    let expected = [("linked".to_owned(), PoolState::Ready), ("loose".to_owned(), PoolState::Absent)];
    assert_eq!(states(&node), expected);
    std::fs::remove_file(place.join("linked")).expect("removed");
    assert_eq!(states(&node), expected[1..], "what is taken away is no pool of this node any more");
}
