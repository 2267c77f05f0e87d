//! Hung and dead FUSE mounts, and healing them in other mount namespaces, with the real mergerfs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use union_csi::platform::mount::{Liveness, MountAttr, MountEntry};
use union_csi::platform::namespace::SwapReport;
use union_csi::platform::{Host, HostError};

use crate::support::{Scratch, run};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(300);

/// A child that ends with the test.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    fn signal(&self, signal: Signal) {
        crate::support::signal(self.0.id(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Until the condition holds, or the test fails.
fn wait_for(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..1500 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{what}: not within 30 s");
}

struct Fixture {
    scratch: Scratch,
    host: Host,
}

impl Fixture {
    /// Branches `a` and `b` with `data/file` and `data/sub/file`.
    fn new() -> Self {
        let scratch = Scratch::new();
        for (branch, path) in [("a", "data/file"), ("b", "data/sub/file"), ("a", "data/taken/file")] {
            let file = scratch.join(branch).join(path);
            fs::create_dir_all(file.parent().expect("parent")).expect("directory");
            fs::write(file, "content").expect("file");
        }
        Self { scratch, host: Host::new() }
    }

    fn mergerfs(&self, point: &str) -> (Running, MountEntry) {
        let point = self.directory(point);
        let branches = format!("{}:{}", self.scratch.join("a").display(), self.scratch.join("b").display());
        let child = Command::new("mergerfs")
            .args(["-f", "-o", "fsname=volume,allow_other,use_ino", &branches])
            .arg(&point)
            .stdout(Stdio::null())
            .spawn()
            .expect("mergerfs");
        let running = Running(child);
        wait_for("mergerfs is mounted", || {
            self.host.mounts().expect("mounts").at(&point).is_some_and(|e| e.fs_type == "fuse.mergerfs")
        });
        assert_eq!(self.host.liveness(&point, LONG).expect("statfs"), Liveness::Alive);
        let entry = self.host.mounts().expect("mounts").at(&point).expect("the union").clone();
        (running, entry)
    }

    fn directory(&self, name: &str) -> PathBuf {
        let path = self.scratch.join(name);
        fs::create_dir_all(&path).expect("directory");
        path
    }

    fn bind(&self, source: &str, target: &str, read_only: bool) {
        let target = self.directory(target);
        let attr = MountAttr { read_only, nosuid: true, nodev: true, ..MountAttr::default() };
        self.host.bind(&self.scratch.join(source), &target, attr).expect("bind");
    }

    /// A process in a mount namespace of its own, made as `unshare` is told to, after `script` ran in it.
    fn namespace(&self, flags: &[&str], script: &str) -> Running {
        let ready = self.scratch.join(&format!("ready-{}", flags.concat()));
        let _ = fs::remove_file(&ready);
        let script = format!(
            "set -e; cd {}; {script}\n: > {}; exec sleep 600",
            self.scratch.path().display(),
            ready.display()
        );
        let child = Command::new("unshare").args(flags).args(["sh", "-c", &script]).spawn().expect("unshare");
        let running = Running(child);
        wait_for("the namespace is ready", || ready.exists());
        running
    }

    /// The path as that process sees it.
    fn seen_by(&self, process: &Running, path: &str) -> PathBuf {
        let inside = self.scratch.join(path);
        Path::new("/proc")
            .join(process.0.id().to_string())
            .join("root")
            .join(inside.strip_prefix("/").expect("/"))
    }
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn platform_the_control_file_is_read_and_written_within_a_bound() {
    let f = Fixture::new();
    let (mergerfs, union) = f.mergerfs("union");
    let control = union.mount_point.join(".mergerfs");
    let branches =
        f.host.xattr_read(&control, "user.mergerfs.branches", LONG).expect("read").expect("branches");
    assert_eq!(branches.split(':').count(), 2, "{branches}");
    assert_eq!(f.host.xattr_read(&control, "user.mergerfs.nonsense", LONG).expect("read"), None);
    f.host.xattr_write(&control, "user.mergerfs.minfreespace", "4K", LONG).expect("write");
    let read = f.host.xattr_read(&control, "user.mergerfs.minfreespace", LONG).expect("read");
    assert_eq!(read.as_deref(), Some("4096"));

    mergerfs.signal(Signal::SIGSTOP);
    // Twice: the second answer comes while the first question is still open.
    for _ in 0..2 {
        let late = f.host.xattr_read(&control, "user.mergerfs.branches", SHORT);
        assert!(matches!(late, Err(HostError::Timeout { .. })), "{late:?}");
    }
    mergerfs.signal(Signal::SIGCONT);
    wait_for("it answers again", || {
        matches!(f.host.xattr_read(&control, "user.mergerfs.branches", LONG), Ok(Some(_)))
    });
}

#[test]
fn platform_a_hung_union_is_told_from_a_dead_one_and_can_be_aborted() {
    let f = Fixture::new();
    let (mergerfs, union) = f.mergerfs("union");
    let minor = union.device.1;
    assert_eq!(f.host.fuse_waiting(minor).expect("waiting"), Some(0));
    mergerfs.signal(Signal::SIGSTOP);
    for _ in 0..3 {
        assert_eq!(f.host.liveness(&union.mount_point, SHORT).expect("statfs"), Liveness::Hung);
    }
    assert_eq!(f.host.fuse_waiting(minor).expect("waiting"), Some(1), "one question, however often asked");
    assert!(f.host.fuse_abort(minor).expect("abort"));
    wait_for("the hung question ends", || {
        f.host.liveness(&union.mount_point, LONG).expect("statfs") == Liveness::Dead(libc::ENOTCONN)
    });
    mergerfs.signal(Signal::SIGCONT);
    assert!(f.host.unmount(&union.mount_point, true).expect("unmount"));
    drop(mergerfs);
    wait_for("the connection is gone", || f.host.fuse_waiting(minor).expect("waiting").is_none());
    assert!(!f.host.fuse_abort(minor).expect("abort"));
}

#[test]
fn platform_a_path_that_hung_is_asked_anew_when_something_else_is_mounted_there() {
    let f = Fixture::new();
    let (mergerfs, union) = f.mergerfs("union");
    mergerfs.signal(Signal::SIGSTOP);
    assert_eq!(f.host.liveness(&union.mount_point, SHORT).expect("statfs"), Liveness::Hung);
    f.host
        .mount_filesystem("ram".as_ref(), &union.mount_point, "tmpfs", MountAttr::default(), "")
        .expect("mount");
    assert_eq!(f.host.liveness(&union.mount_point, LONG).expect("statfs"), Liveness::Alive);
    mergerfs.signal(Signal::SIGCONT);
}

/// Whether this kernel has `MOVE_MOUNT_BENEATH` (Linux 6.5).
fn mounts_beneath() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's release");
    let numbers: Vec<u32> = release.split(['.', '-']).map_while(|n| n.parse().ok()).take(2).collect();
    numbers >= vec![6, 5]
}

#[test]
fn platform_a_dead_union_is_swapped_in_every_namespace_with_its_options() {
    let f = Fixture::new();
    // As the kubelet's directory is: what is mounted there is passed on.
    let shared = f.scratch.path().to_str().expect("path");
    run("mount", &["--bind", shared, shared]);
    run("mount", &["--make-shared", shared]);
    let (mut first, dead) = f.mergerfs("union-1");
    f.bind("union-1/data", "pod", false);
    f.bind("union-1/data", "pod-ro", true);
    f.bind("union-1/data/sub", "pod-sub", false);
    let own_binds = "mkdir -p own nested; mount --bind union-1/data/sub own; mount -o remount,bind,ro,noexec own; \
                     mount --bind union-1/data nested; mount --bind union-1/data nested/sub";
    let slave = f.namespace(&["--mount", "--propagation", "slave"], "");
    let private = f.namespace(&["--mount", "--propagation", "private"], own_binds);
    let user = f.namespace(&["--user", "--map-root-user", "--mount"], "");
    let everyone = [&slave, &private, &user];

    first.kill();
    assert_eq!(errno(fs::read(f.scratch.join("pod/file"))), Some(libc::ENOTCONN));
    let (_second, living) = f.mergerfs("union-2");
    let report = f.host.swap_mounts(dead.device, &living.mount_point).expect("swap");
    assert_eq!((report.failed, report.hidden), (0, 0), "{report:?}");
    assert!(report.namespaces >= 3 && report.swapped >= 4, "{report:?}");

    for process in everyone {
        for path in ["pod/file", "pod-ro/file", "pod-sub/file", "pod/sub/file", "union-1/data/file"] {
            assert_eq!(fs::read_to_string(f.seen_by(process, path)).expect(path), "content");
        }
        assert_eq!(errno(fs::write(f.seen_by(process, "pod-ro/new"), "")), Some(libc::EROFS));
    }
    for path in ["pod/file", "pod-ro/file", "pod-sub/file"] {
        assert_eq!(fs::read_to_string(f.scratch.join(path)).expect(path), "content");
    }
    assert_eq!(fs::read_to_string(f.seen_by(&private, "own/file")).expect("own"), "content");
    assert_eq!(fs::read_to_string(f.seen_by(&private, "nested/sub/file")).expect("nested"), "content");
    assert_eq!(errno(fs::write(f.seen_by(&private, "own/new"), "")), Some(libc::EROFS));
    fs::write(f.seen_by(&slave, "pod/new"), "written").expect("writable");
    assert_eq!(fs::read_to_string(f.scratch.join("pod/new")).expect("one union"), "written");

    let table = f.host.mounts().expect("mounts");
    assert!(table.entries.iter().all(|e| e.device != dead.device), "nothing dead stays in our namespace");
    let table = fs::read_to_string(format!("/proc/{}/mountinfo", private.0.id())).expect("mountinfo");
    let is_dead = |line: &&str| line.contains(&format!(" {}:{} ", dead.device.0, dead.device.1));
    let field = |line: &str, number: usize| line.split(' ').nth(number).map(str::to_owned);
    let is_covered = |line: &str| {
        table.lines().any(|other| field(other, 1) == field(line, 0) && field(other, 4) == field(line, 4))
    };
    for left in table.lines().filter(is_dead) {
        assert!(!mounts_beneath(), "{left}");
        // It, or what it is mounted on.
        let below = |line: &&str| table.lines().find(|other| field(other, 0) == field(line, 1));
        let hidden = std::iter::successors(Some(left), below).any(is_covered);
        assert!(hidden, "{left} in {table}");
    }
    let own = table.lines().filter(|line| !is_dead(line)).find(|line| line.contains("/own ")).expect("own");
    assert!(own.contains("ro,") && own.contains("noexec"), "{own}");

    let again = f.host.swap_mounts(dead.device, &living.mount_point).expect("a second swap");
    // What a user namespace had locked stays, covered.
    assert_eq!(SwapReport { hidden: 0, ..again }, SwapReport::default());
}

#[test]
fn platform_a_directory_replaced_by_a_symlink_is_not_followed_by_a_swap() {
    let f = Fixture::new();
    let (mut first, dead) = f.mergerfs("union-1");
    f.bind("union-1/data/taken", "pod", false);
    f.bind("union-1/data", "other", false);
    first.kill();
    fs::remove_dir_all(f.scratch.join("a/data/taken")).expect("remove");
    std::os::unix::fs::symlink("/etc", f.scratch.join("a/data/taken")).expect("symlink");
    let (_second, living) = f.mergerfs("union-2");
    let report = f.host.swap_mounts(dead.device, &living.mount_point).expect("swap");
    // Namespaces of tests that run beside this one may have copies of some of the mounts.
    assert!(report.swapped >= 2 && report.failed >= 1, "{report:?}");
    assert_eq!(
        errno(fs::read(f.scratch.join("pod/passwd"))),
        Some(libc::ENOTCONN),
        "dead, and not laid open"
    );
    assert_eq!(fs::read_to_string(f.scratch.join("other/file")).expect("other"), "content");
}

#[test]
fn platform_mounts_of_another_volume_are_not_swapped() {
    let f = Fixture::new();
    let (_union, living) = f.mergerfs("union");
    let point = f.directory("tmpfs");
    f.host.mount_filesystem("other".as_ref(), &point, "tmpfs", MountAttr::default(), "").expect("mount");
    let device = f.host.mounts().expect("mounts").at(&point).expect("tmpfs").device;
    let report = f.host.swap_mounts(device, &living.mount_point).expect("swap");
    assert_eq!(report, SwapReport::default());
    assert_eq!(f.host.mounts().expect("mounts").at(&point).expect("tmpfs").device, device);
}
