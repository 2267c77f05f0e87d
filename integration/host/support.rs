//! Disks for the tests, gone when the test ends, however it ends.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Stops a test that would touch the machine's own mount namespace. Init's cannot always be read (a container's init may
/// have more capabilities than root has here), so any ancestor in another one will do. In a PID namespace no ancestor is
/// seen: `scripts/test`, which makes one, tells the mount namespace outside.
pub fn require_private_namespace() {
    let own = std::fs::read_link("/proc/self/ns/mnt").expect("/proc/self/ns/mnt");
    if std::env::var_os("UNION_CSI_TEST_OUTSIDE").is_some_and(|outside| outside != *own.as_os_str()) {
        return;
    }
    let mut pid = std::process::id().to_string();
    while pid != "0" {
        if std::fs::read_link(format!("/proc/{pid}/ns/mnt")).is_ok_and(|namespace| namespace != own) {
            return;
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        pid = parent.unwrap_or("0").trim().to_owned();
    }
    panic!("run this in a private mount namespace, as root: scripts/test host");
}

/// Runs a command to its end and returns what it printed.
pub fn run(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).trim().to_owned()
}

/// Sends a signal to one process. After SIGSTOP it stands still on return: its threads stop one after the other, and may
/// answer until then.
pub fn signal(pid: impl TryInto<i32>, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().ok().expect("a pid"));
    nix::sys::signal::kill(pid, signal).unwrap_or_else(|e| panic!("{signal} to process {pid}: {e}"));
    let asked = Instant::now();
    while signal == Signal::SIGSTOP && !stands_still(pid) {
        assert!(asked.elapsed() < Duration::from_secs(20), "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether all threads of a process have stopped, or ended.
fn stands_still(pid: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    tasks.flatten().all(|task| {
        std::fs::read_to_string(task.path().join("stat")).map_or(true, |stat| stat.contains(") T "))
    })
}

/// A scratch directory; what is mounted below it is unmounted when it goes.
pub struct Scratch {
    dir: tempfile::TempDir,
}

impl Scratch {
    pub fn new() -> Self {
        require_private_namespace();
        let dir =
            tempfile::Builder::new().prefix("union-csi-test-").tempdir().expect("a temporary directory");
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let root = self.dir.path().to_string_lossy().into_owned();
        // Before the mounts: afterwards their files have other names. What is in use goes with its mount.
        let devices = Command::new("losetup").args(["-n", "-O", "NAME,BACK-FILE"]).output();
        for line in
            devices.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default().lines()
        {
            if let Some((device, file)) = line.split_once(' ')
                && file.trim().starts_with(&root)
            {
                let _ = Command::new("losetup").args(["-d", device]).status();
            }
        }
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        for point in table.lines().rev().filter_map(|l| l.split(' ').nth(4)).filter(|p| p.starts_with(&root))
        {
            let _ = Command::new("umount").args(["-l", point]).status();
        }
        let _ = Command::new("chattr").args(["-R", "-i", &root]).output();
    }
}

/// A disk: an image of `mib` MiB with a filesystem, mounted at `<scratch>/<name>`.
pub fn disk(scratch: &Scratch, name: &str, fs: &str, mib: u64) -> PathBuf {
    disk_with(scratch, name, fs, mib, "")
}

/// As [`disk`], with mount options.
pub fn disk_with(scratch: &Scratch, name: &str, fs: &str, mib: u64, options: &str) -> PathBuf {
    let image = scratch.join(&format!("{name}.disk"));
    let point = scratch.join(name);
    std::fs::File::create(&image).expect("image").set_len(mib << 20).expect("image size");
    let image_str = image.to_str().expect("path");
    match fs {
        "xfs" => run("mkfs.xfs", &["-q", image_str]),
        "btrfs" => run("mkfs.btrfs", &["-q", image_str]),
        _ if options.contains("prjquota") => {
            run("mkfs.ext4", &["-q", "-m", "0", "-O", "quota,project", "-E", "quotatype=prjquota", image_str])
        }
        _ => run("mkfs.ext4", &["-q", "-m", "0", image_str]),
    };
    std::fs::create_dir_all(&point).expect("mount point");
    let options = if options.is_empty() { "loop".to_owned() } else { format!("loop,{options}") };
    run("mount", &["-o", &options, image_str, point.to_str().expect("path")]);
    point
}

/// One node's pools and branches over directories, as the agent has them.
pub struct Node {
    pub pools: std::sync::Arc<union_csi::node::pool::Pools>,
    pub branches: union_csi::node::branch::Branches,
}

/// Pools named after their directories, nothing reserved, remembered in `<scratch>/state`.
pub fn node(scratch: &Scratch, host: &union_csi::platform::Host, disks: &[&Path]) -> Node {
    let settings = disks.iter().map(|d| pool_settings(d)).collect();
    node_with(scratch, host, settings)
}

pub fn node_with(
    scratch: &Scratch,
    host: &union_csi::platform::Host,
    settings: Vec<union_csi::node::pool::PoolSettings>,
) -> Node {
    let state = scratch.join("state");
    std::fs::create_dir_all(&state).expect("state directory");
    let name = "node-1".parse().expect("a node name");
    let pools = std::sync::Arc::new(union_csi::node::pool::Pools::new(host.clone(), name, settings, state));
    Node { branches: union_csi::node::branch::Branches::new(host.clone(), pools.clone()), pools }
}

pub fn pool_settings(disk: &Path) -> union_csi::node::pool::PoolSettings {
    union_csi::node::pool::PoolSettings {
        name: disk.file_name().and_then(|n| n.to_str()).expect("a name").parse().expect("a pool name"),
        path: disk.to_owned(),
        labels: std::collections::BTreeMap::new(),
        reserve: union_csi::domain::pool::Reserve::Bytes(union_csi::domain::Bytes::ZERO),
        media: None,
        uuid: None,
    }
}
