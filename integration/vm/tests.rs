//! Tests that need what the host's kernel may lack; run inside the virtual machine of `integration/vm/run`.

mod nfs;
#[path = "../host/support.rs"]
mod support;

use std::fs;
use std::path::Path;
use std::process::Command;

use union_csi::domain::pool::Enforcement;
use union_csi::domain::split::BranchFormat;
use union_csi::domain::{BranchId, Bytes};
use union_csi::platform::Host;
use union_csi::platform::process::DetachedCommand;
use union_csi::store::object::{BranchPhase, BranchSpec};

use support::{Scratch, disk_with, node, run};

fn directory(index: u32, pool: &str, mib: u64) -> BranchSpec {
    BranchSpec {
        id: format!("vol-{index}").parse::<BranchId>().expect("branch"),
        volume: "vol".parse().expect("volume"),
        index,
        node: "node-1".parse().expect("node"),
        pool: pool.parse().expect("pool"),
        size: Bytes::mib(mib),
        usable: Bytes::mib(mib),
        format: BranchFormat::Directory,
        fs_type: None,
        thin: false,
        accept_unenforced: false,
        write_through: true,
        encrypted: false,
        access: None,
        sharing: None,
    }
}

/// Writes as root until the filesystem refuses; how many bytes went in. Without `CAP_SYS_RESOURCE`, as every container
/// that is not privileged and as our own unions: ext4 lets its holders write past any quota.
fn fill(file: &Path) -> u64 {
    let output = format!("of={}", file.display());
    let dd = ["dd", "if=/dev/zero", "bs=1M", "count=400", "conv=fsync", &output];
    let out = Command::new("setpriv")
        .args(["--bounding-set=-sys_resource", "--inh-caps=-sys_resource"])
        .args(dd)
        .output();
    assert!(!out.expect("setpriv").status.success(), "400 MiB fitted");
    fs::metadata(file).expect("the file").len()
}

fn a_directory_branch_keeps_to_its_size(fs_type: &str) {
    let scratch = Scratch::new();
    let point = disk_with(&scratch, "quota", fs_type, 512, "prjquota");
    let node = node(&scratch, &Host::new(), &[&point]);
    let report = node.pools.measure().remove(0);
    assert_eq!(report.enforcement, Enforcement::ProjectQuota, "{}", report.enforcement_message);

    let spec = directory(0, report.name.as_str(), 64);
    let status = node.branches.ensure_present(&spec, false).expect("the branch is made");
    assert_eq!((status.phase, status.enforcement), (BranchPhase::Bound, Some(Enforcement::ProjectQuota)));
    let other = directory(1, report.name.as_str(), 96);
    node.branches.ensure_present(&other, false).expect("a second branch beside it");

    let at = scratch.join("at");
    node.branches.ensure_attached(&spec, &at, false).expect("attached");
    let shown = |place: &Path| -> u64 {
        let told = run("df", &["-B1", "--output=size", &place.display().to_string()]);
        told.lines().last().unwrap_or("").trim().parse().expect("df")
    };
    assert_eq!(shown(&at.join("data")), 64 << 20, "df shows the branch, not the disk");
    assert_eq!(shown(&at), 64 << 20, "and so does what mergerfs asks");

    fs::create_dir_all(at.join("data/a/b")).expect("directories");
    let written = fill(&at.join("data/a/b/file"));
    assert!((60 << 20..=64 << 20).contains(&written), "{written} bytes went into a branch of 64 MiB");
    let used = node.branches.occupied(&spec).expect("the quota's figure");
    assert!(used.get() >= written, "{used} used, {written} written");
    let report = node.pools.measure().remove(0);
    assert_eq!(report.promised, Bytes::mib(160));
    assert!(report.occupied.get() >= written && report.occupied <= Bytes::mib(160));

    let second = scratch.join("second");
    node.branches.ensure_attached(&other, &second, false).expect("attached");
    let beside = fill(&second.join("data/file"));
    assert!((92 << 20..=96 << 20).contains(&beside), "the other branch has its own limit: {beside}");

    node.branches.ensure_detached(&spec.id, &at, false).expect("detached");
    node.branches.ensure_detached(&other.id, &second, false).expect("detached");
    for spec in [&spec, &other] {
        node.branches.ensure_absent(spec).expect("removed");
    }
    assert_eq!(
        fs::read_dir(point.join("branches")).expect("branches").count(),
        0,
        "something is left on the disk"
    );
    let again = directory(2, report.name.as_str(), 64);
    node.branches.ensure_present(&again, false).expect("a branch after the removed ones");
    node.branches.ensure_attached(&again, &at, false).expect("attached");
    let written = fill(&at.join("data/file"));
    assert!((60 << 20..=64 << 20).contains(&written), "a reused project must not inherit usage: {written}");
    node.branches.ensure_detached(&again.id, &at, false).expect("detached");
}

#[test]
fn a_directory_branch_on_ext4_keeps_to_its_size() {
    a_directory_branch_keeps_to_its_size("ext4");
}

#[test]
fn a_directory_branch_on_xfs_keeps_to_its_size() {
    a_directory_branch_keeps_to_its_size("xfs");
}

#[test]
fn a_pool_without_quota_says_so_and_refuses_directories() {
    let scratch = Scratch::new();
    let point = disk_with(&scratch, "plain", "xfs", 512, "noquota");
    let node = node(&scratch, &Host::new(), &[&point]);
    let report = node.pools.measure().remove(0);
    assert_eq!(report.enforcement, Enforcement::None);
    assert!(report.enforcement_message.contains("prjquota"), "{}", report.enforcement_message);
    let refused = node.branches.ensure_present(&directory(0, report.name.as_str(), 64), false);
    assert!(refused.is_err(), "a directory whose size nobody enforces was made");
    assert!(!point.join("branches/vol-0").exists());
}

#[test]
fn a_detached_process_cannot_write_past_quotas() {
    let scratch = Scratch::new();
    let host = Host::new();
    let own = fs::read_to_string("/proc/self/status").expect("status");
    assert!(capability(&own, "CapEff"), "this machine gives its root no CAP_SYS_RESOURCE: nothing is tested");
    let id = host
        .spawn_detached(&DetachedCommand {
            program: "/bin/sleep".into(),
            args: vec!["60".into()],
            log: scratch.join("log"),
            cgroup: "vm-test".to_owned(),
            open_files: 1024,
            keeps_capabilities: false,
            oom_score_adj: Some(-500),
        })
        .expect("a process");
    let status = fs::read_to_string(format!("/proc/{}/status", id.pid)).expect("status");
    assert!(!capability(&status, "CapEff") && !capability(&status, "CapBnd"), "{status}");
    let score = fs::read_to_string(format!("/proc/{}/oom_score_adj", id.pid)).expect("score");
    assert_eq!(score.trim(), "-500", "lowered before the capability for it went");
    host.process_signal(&id, 9).expect("a signal");
}

/// Whether a line of `/proc/PID/status` has `CAP_SYS_RESOURCE`.
fn capability(status: &str, line: &str) -> bool {
    let bits = status.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':')).expect("capabilities");
    u64::from_str_radix(bits.trim(), 16).expect("hexadecimal") >> 24 & 1 == 1
}
