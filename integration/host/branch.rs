//! Branches on real disks.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use union_csi::domain::policy::FsType;
use union_csi::domain::pool::Enforcement;
use union_csi::domain::split::BranchFormat;
use union_csi::domain::{Bytes, overhead};
use union_csi::node::branch::BranchError;
use union_csi::platform::{Gate, Host};
use union_csi::store::object::{BranchPhase, BranchSpec};

use crate::support::{Node, Scratch, disk, node, run};

fn image(pool: &str, mib: u64, fs: Option<FsType>) -> BranchSpec {
    let size = Bytes::mib(mib);
    BranchSpec {
        id: "vol-0".parse().expect("branch"),
        volume: "vol".parse().expect("volume"),
        index: 0,
        node: "node-1".parse().expect("node"),
        pool: pool.parse().expect("pool"),
        size,
        usable: overhead::usable(size, fs),
        format: BranchFormat::Image,
        fs_type: fs,
        thin: false,
        accept_unenforced: false,
    }
}

fn directory(pool: &str, mib: u64) -> BranchSpec {
    BranchSpec {
        format: BranchFormat::Directory,
        fs_type: None,
        accept_unenforced: true,
        ..image(pool, mib, None)
    }
}

fn place(disk: &Path) -> PathBuf {
    disk.join("branches/vol-0")
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .map(|entries| entries.map(|e| e.expect("entry").file_name().into_string().expect("name")).collect())
        .unwrap_or_default();
    names.sort();
    names
}

fn mounted(at: &Path) -> bool {
    Host::new().mounts().expect("mounts").at(at).is_some()
}

fn loops_below(scratch: &Scratch) -> String {
    let all = run("losetup", &["-n", "-l", "-O", "NAME,BACK-FILE"]);
    let root = scratch.path().display().to_string();
    all.lines().filter(|l| l.contains(&root) && !l.contains(".disk")).collect()
}

fn make(node: &Node, spec: &BranchSpec) {
    let status = node.branches.ensure_present(spec, false).expect("the branch is made");
    assert_eq!(status.phase, BranchPhase::Bound);
}

#[test]
fn an_image_branch_lives_and_leaves_nothing_behind() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 1200);
    let node = node(&scratch, &Host::new(), &[&disk]);
    for fs in [FsType::Ext4, FsType::Xfs, FsType::Btrfs] {
        let spec = image("one", 400, Some(fs));
        make(&node, &spec);
        assert_eq!(names(&place(&disk)), ["branch.json", "disk.img"]);
        assert_eq!(names(&disk.join("branches")), ["vol-0"]);
        let at = scratch.join("at");
        let attached = node.branches.ensure_attached(&spec, &at, false).expect("attached");
        assert_eq!(attached.mount, at);
        assert_eq!(node.branches.ensure_attached(&spec, &at, false).expect("attached again"), attached);
        std::fs::write(at.join("data/file"), "content").expect("write");
        let space = Host::new().space(&at, std::time::Duration::from_secs(5)).expect("space");
        assert!(space.available + (1 << 20) >= spec.usable.get(), "{fs:?}: df shows {}", space.available);
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached again");
        assert!(!at.exists());
        assert_eq!(loops_below(&scratch), "", "{fs:?}: the loop device went with the mount");

        node.branches.ensure_attached(&spec, &at, true).expect("attached read-only");
        assert_eq!(std::fs::read_to_string(at.join("data/file")).expect("read"), "content");
        assert!(std::fs::write(at.join("data/other"), "").is_err());
        node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
        node.branches.ensure_absent(&spec).expect("removed");
        node.branches.ensure_absent(&spec).expect("removed again");
        assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
        let again = node.branches.ensure_present(&spec, true);
        assert!(
            matches!(again, Err(BranchError::Missing { .. })),
            "a bound branch is not made anew: {again:?}"
        );
    }
}
