//! Mounts, files and processes of the real kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use union_csi::platform::Host;
use union_csi::platform::file::fd_path;
use union_csi::platform::mount::MountAttr;
use union_csi::platform::process::{DetachedCommand, ProcessId};

use crate::support::{Scratch, disk, run};

const LONG: Duration = Duration::from_secs(30);

fn directory(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.join(name);
    fs::create_dir_all(&path).expect("directory");
    path
}

#[test]
fn platform_a_bind_has_its_attributes_and_its_source_keeps_its_own() {
    let scratch = Scratch::new();
    let host = Host::new();
    let source = disk(&scratch, "source", "ext4", 16);
    fs::create_dir(source.join("data")).expect("data");
    fs::write(source.join("data/file"), "x").expect("file");
    let target = directory(&scratch, "target");
    let attr = MountAttr { read_only: true, nosuid: true, nodev: true, noexec: true, noatime: true };
    host.bind(&source.join("data"), &target, attr).expect("bind");
    let table = host.mounts().expect("mounts");
    let entry = table.at(&target).expect("the bind");
    assert_eq!(entry.root, Path::new("/data"));
    for option in ["ro", "nosuid", "nodev", "noexec", "noatime"] {
        assert!(entry.options.iter().any(|o| o == option), "{option} in {:?}", entry.options);
    }
    assert_eq!(fs::write(target.join("file"), "y").expect_err("read-only").raw_os_error(), Some(libc::EROFS));
    fs::write(source.join("data/file"), "y").expect("the source stays writable");
    assert!(host.unmount(&target, false).expect("unmount"));
    assert!(!host.unmount(&target, false).expect("a second unmount finds nothing"));
    assert!(!host.unmount(&scratch.join("missing"), false).expect("a missing path has no mount"));
}

#[test]
fn platform_a_bind_of_a_read_only_mount_stays_read_only() {
    let scratch = Scratch::new();
    let host = Host::new();
    let source = disk(&scratch, "source", "ext4", 16);
    let (first, second) = (directory(&scratch, "first"), directory(&scratch, "second"));
    host.bind(&source, &first, MountAttr { read_only: true, ..MountAttr::default() }).expect("bind");
    host.bind(&first, &second, MountAttr::default()).expect("bind of the bind");
    assert!(host.mounts().expect("mounts").at(&second).expect("the bind").read_only());
}

#[test]
fn platform_a_file_is_bound_on_a_file_through_checked_descriptors() {
    let scratch = Scratch::new();
    let host = Host::new();
    fs::write(scratch.join("device"), "content").expect("source");
    let target = host.ensure_file_beneath(scratch.path(), "pods/1/device".as_ref()).expect("target");
    host.bind(&scratch.join("device"), &fd_path(&target), MountAttr::default()).expect("bind");
    drop(target);
    assert_eq!(fs::read_to_string(scratch.join("pods/1/device")).expect("read"), "content");
    host.ensure_file_beneath(scratch.path(), "pods/1/device".as_ref()).expect("a bound file is found again");
    assert!(host.unmount(&scratch.join("pods/1/device"), false).expect("unmount"));
}

#[test]
fn platform_a_symlink_is_not_unmounted_through() {
    let scratch = Scratch::new();
    let host = Host::new();
    let mounted = disk(&scratch, "mounted", "ext4", 16);
    std::os::unix::fs::symlink(&mounted, scratch.join("link")).expect("symlink");
    assert!(!host.unmount(&scratch.join("link"), false).expect("unmount of a symlink"));
    assert!(host.mounts().expect("mounts").at(&mounted).is_some());
}

#[test]
fn platform_a_busy_mount_goes_lazily_only() {
    let scratch = Scratch::new();
    let host = Host::new();
    let mounted = disk(&scratch, "mounted", "ext4", 16);
    let open = fs::File::create(mounted.join("file")).expect("file");
    assert_eq!(host.unmount(&mounted, false).expect_err("busy").errno(), Some(libc::EBUSY));
    assert!(host.unmount(&mounted, true).expect("lazily"));
    drop(open);
}

#[test]
fn platform_layers_with_any_names_are_merged_read_only() {
    let scratch = Scratch::new();
    let host = Host::new();
    let names = ["plain", "co:lon", "com,ma", "back\\slash", "bl ank"];
    let mut layers: Vec<PathBuf> = names.iter().map(|n| directory(&scratch, n)).collect();
    for (layer, name) in layers.iter().zip(names) {
        fs::write(layer.join(name), name).expect("file");
        fs::write(layer.join("same"), name).expect("file");
    }
    let target = directory(&scratch, "target");
    host.mount_overlay(&layers, &target, MountAttr::default()).expect("overlay");
    for name in names {
        assert_eq!(fs::read_to_string(target.join(name)).expect(name), name);
    }
    assert_eq!(fs::read_to_string(target.join("same")).expect("same"), "plain", "the first is on top");
    assert_eq!(fs::write(target.join("x"), "").expect_err("read-only").raw_os_error(), Some(libc::EROFS));
    assert!(host.unmount(&target, false).expect("unmount"));

    // More than a page of options.
    layers = (0..40).map(|n| directory(&scratch, &format!("{n}-{}", "x".repeat(200)))).collect();
    fs::write(layers[39].join("last"), "").expect("file");
    host.mount_overlay(&layers, &target, MountAttr::default()).expect("overlay of many layers");
    assert!(target.join("last").exists());
}

#[test]
fn platform_removal_stops_at_a_mount_point() {
    let scratch = Scratch::new();
    let host = Host::new();
    directory(&scratch, "victim/below");
    let inside = disk(&scratch, "victim/below/mounted", "ext4", 16);
    fs::write(inside.join("keep"), "").expect("file");
    let error = host.remove_tree(scratch.path(), "victim").expect_err("a mount is in the way");
    assert_eq!(error.errno(), Some(libc::EXDEV), "{error}");
    assert!(inside.join("keep").exists());
    // The same filesystem bound into itself is a mount point too, though the device is the same.
    host.unmount(&inside, false).expect("unmount");
    let outside = directory(&scratch, "outside");
    fs::write(outside.join("keep"), "").expect("file");
    let bound = directory(&scratch, "victim/bound");
    host.bind(&outside, &bound, MountAttr::default()).expect("bind");
    let error = host.remove_tree(scratch.path(), "victim").expect_err("a bind is in the way");
    assert_eq!(error.errno(), Some(libc::EXDEV), "{error}");
    host.unmount(&bound, false).expect("unmount");
    // What was `below` may be gone already: the order in which a directory is read is the filesystem's.
    let file = scratch.join("victim/file");
    fs::write(&file, "").expect("file");
    host.bind(&outside.join("keep"), &file, MountAttr::default()).expect("bind of a file");
    let error = host.remove_tree(scratch.path(), "victim").expect_err("a bound file is in the way");
    assert_eq!(error.errno(), Some(libc::EXDEV), "{error}");
    host.unmount(&file, false).expect("unmount");
    assert!(host.remove_tree(scratch.path(), "victim").expect("removal"));
    assert!(outside.join("keep").exists());
}

#[test]
fn platform_immutable_files_and_directories_are_removed() {
    let scratch = Scratch::new();
    let host = Host::new();
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let disk = disk(&scratch, fs_type, fs_type, if fs_type == "xfs" { 320 } else { 128 });
        fs::create_dir_all(disk.join("victim/a/b")).expect("tree");
        fs::write(disk.join("victim/a/b/file"), "").expect("file");
        fs::write(disk.join("victim/a/log"), "").expect("file");
        run("chattr", &["+a", disk.join("victim/a/log").to_str().expect("path")]);
        for path in ["victim/a/b/file", "victim/a/b", "victim/a", "victim"] {
            assert!(host.set_immutable(&disk.join(path), true).expect("chattr"), "{fs_type} {path}");
        }
        assert_eq!(
            fs::write(disk.join("victim/a/new"), "").expect_err("immutable").raw_os_error(),
            Some(libc::EPERM)
        );
        assert!(host.remove_tree(&disk, "victim").expect(fs_type));
        assert!(!disk.join("victim").exists());
    }
}

#[test]
fn platform_flags_are_absent_where_the_filesystem_has_none() {
    let scratch = Scratch::new();
    let host = Host::new();
    let point = directory(&scratch, "ram");
    host.mount_filesystem("ram".as_ref(), &point, "ramfs", MountAttr::default(), "").expect("mount");
    fs::write(point.join("file"), "").expect("file");
    assert!(!host.set_immutable(&point.join("file"), true).expect("chattr"));
}

#[test]
fn platform_reserving_more_than_there_is_tells_so() {
    let scratch = Scratch::new();
    let host = Host::new();
    let disk = disk(&scratch, "disk", "ext4", 32);
    let error = host.ensure_allocated(&disk.join("disk.img"), 64 << 20, false).expect_err("too much");
    assert_eq!(error.errno(), Some(libc::ENOSPC), "{error}");
    host.ensure_allocated(&disk.join("thin.img"), 64 << 20, true).expect("a thin file of any size");
}

/// Ends what a test started, also when the test fails.
struct Detached(ProcessId, &'static str);

impl Drop for Detached {
    fn drop(&mut self) {
        let host = Host::new();
        let _ = host.process_signal(&self.0, libc::SIGKILL);
        let _ = host.process_wait(&self.0, LONG);
        let _ = host.remove_cgroup(self.1);
    }
}

fn sleeping(scratch: &Scratch, cgroup: &str, script: &str) -> DetachedCommand {
    DetachedCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        log: scratch.join("log"),
        cgroup: cgroup.to_owned(),
        open_files: 1 << 30,
        keeps_capabilities: false,
        oom_score_adj: Some(900),
    }
}

fn field(pid: i32, file: &str, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).expect(file);
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line[name.len()..].trim().to_owned()
}

#[test]
fn platform_a_detached_process_has_nothing_of_its_starter() {
    let scratch = Scratch::new();
    let host = Host::new();
    let name = "platform-test-nothing";
    let leaked = fs::File::open("/dev/null").expect("file");
    // What a careless library may leave: open across exec.
    rustix_like_clear_cloexec(&leaked);
    let command = sleeping(&scratch, name, "echo started; exec sleep 600");
    let child = Detached(host.spawn_detached(&command).expect("start"), name);
    let pid = child.0.pid;
    let exec_done = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "sleep\n")
    });
    assert!(exec_done);
    assert_ne!(field(pid, "status", "PPid:"), std::process::id().to_string());
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    assert_eq!(stat.split(' ').nth(5), Some(pid.to_string().as_str()), "its own session");
    let fds: Vec<String> = fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("fd")
        .map(|e| e.expect("fd").file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(fds.len(), 3, "{fds:?}");
    assert_eq!(fs::read_link(format!("/proc/{pid}/fd/0")).expect("fd 0"), Path::new("/dev/null"));
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).expect("cwd"), Path::new("/"));
    for mask in ["SigBlk:", "SigIgn:"] {
        assert_eq!(u64::from_str_radix(&field(pid, "status", mask), 16).expect(mask), 0, "{mask}");
    }
    assert_eq!(field(pid, "status", "Umask:"), "0022");
    assert!(field(pid, "limits", "Max core file size").starts_with('0'));
    assert_eq!(fs::read_to_string(scratch.join("log")).expect("log"), "started\n");
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("score").trim(), "900");
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("cgroup");
    let unified = cgroups.lines().find(|line| line.starts_with("0::")).expect("unified hierarchy");
    assert_eq!(unified, format!("0::/union-csi-unions/{name}"));
    drop(child);
    let reaped = (0..1000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        !PathBuf::from(format!("/proc/{pid}")).exists()
    });
    assert!(reaped, "init takes its end, nobody here has to");
    let left = &host.mounts().expect("mounts").entries;
    for mount in left.iter().filter(|e| e.fs_type.starts_with("cgroup")) {
        assert!(!mount.mount_point.join("union-csi-unions").join(name).exists());
    }
}

fn rustix_like_clear_cloexec(file: &fs::File) {
    use nix::fcntl::{FcntlArg, FdFlag, fcntl};
    fcntl(file, FcntlArg::F_SETFD(FdFlag::empty())).expect("fcntl");
}

#[test]
fn platform_a_program_that_cannot_start_or_ends_at_once_is_told() {
    let scratch = Scratch::new();
    let host = Host::new();
    let name = "platform-test-fails";
    let missing = DetachedCommand { program: "/no/such/program".into(), ..sleeping(&scratch, name, "") };
    let error = host.spawn_detached(&missing).expect_err("missing").to_string();
    assert!(error.contains("No such file"), "{error}");
    host.remove_cgroup(name).expect("its cgroup is empty");
    host.remove_cgroup(name).expect("and may be removed twice");
}

/// Not a test by itself: what the test below runs, and kills.
#[test]
fn platform_helper_agent() {
    let Ok(directory) = std::env::var("PLATFORM_HELPER_AGENT") else { return };
    let command = DetachedCommand {
        program: "/bin/sleep".into(),
        args: vec!["600".into()],
        log: Path::new(&directory).join("log"),
        cgroup: "platform-test-survives".to_owned(),
        open_files: 1024,
        keeps_capabilities: false,
        oom_score_adj: None,
    };
    let host = Host::new();
    let id = host.spawn_detached(&command).expect("start");
    let text = serde_json::to_vec(&id).expect("json");
    host.write_atomic(&Path::new(&directory).join("id"), &text).expect("write");
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn platform_a_detached_process_outlives_its_killed_starter() {
    use std::os::unix::process::CommandExt;
    let scratch = Scratch::new();
    let host = Host::new();
    let mut agent = std::process::Command::new(std::env::current_exe().expect("own path"))
        .args(["--exact", "platform::platform_helper_agent", "--nocapture"])
        .env("PLATFORM_HELPER_AGENT", scratch.path())
        .stdout(std::process::Stdio::null())
        .process_group(0)
        .spawn()
        .expect("the agent");
    let group = nix::unistd::Pid::from_raw(i32::try_from(agent.id()).expect("pid"));
    let written = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        host.read_file(&scratch.join("id"), 4096).expect("read")
    });
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL).expect("kill");
    agent.wait().expect("the agent's end");
    let id: ProcessId = serde_json::from_slice(&written.expect("a started process")).expect("identity");
    let child = Detached(id, "platform-test-survives");
    assert!(!host.process_wait(&child.0, Duration::from_millis(200)).expect("wait"), "it lives on");
    assert!(host.process_memory(&child.0).expect("memory").is_some());
    assert!(host.process_signal(&child.0, libc::SIGTERM).expect("signal"));
    assert!(host.process_wait(&child.0, LONG).expect("wait"));
    assert!(!host.process_signal(&child.0, libc::SIGTERM).expect("signal"), "it is gone");
}

#[test]
fn platform_who_holds_a_filesystem_is_found_by_open_files_and_by_mounts_elsewhere() {
    for (fs_type, mib) in [("ext4", 16), ("btrfs", 128)] {
        let (scratch, host) = (Scratch::new(), Host::new());
        let point = disk(&scratch, "held", fs_type, mib);
        let device = host.loop_devices_of(&scratch.join("held.disk")).expect("loop devices").remove(0);
        let holders = || host.holders(&device).expect("/proc").expect("an answer in time");
        // Containers of the tests beside this one may have been made with a copy of every mount.
        let own = i32::try_from(std::process::id()).expect("a pid");
        assert!(holders().iter().all(|h| h.pid != own), "mounts of one's own are no holders");
        let at_work = |mut command: std::process::Command| command.spawn().expect("a process");
        let mut inside = std::process::Command::new("sleep");
        let mut inside = at_work({
            inside.arg("300").current_dir(&point);
            inside
        });
        let mut elsewhere = std::process::Command::new("unshare");
        let mut elsewhere = at_work({
            elsewhere.args(["--mount", "--propagation", "private", "sleep", "300"]);
            elsewhere
        });
        let until = |what: &str, holds: &dyn Fn(&[union_csi::platform::holders::Holder]) -> bool| {
            let end = std::time::Instant::now() + LONG;
            while !holds(&holders()) {
                assert!(std::time::Instant::now() < end, "{fs_type}: {what}: {:?}", holders());
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let pids = [&inside, &elsewhere].map(|child| i32::try_from(child.id()).expect("a pid"));
        let of =
            |all: &[union_csi::platform::holders::Holder], pid| all.iter().find(|h| h.pid == pid).cloned();
        until("who works in it", &|all| {
            of(all, pids[0]).is_some_and(|h| h.files == 1 && h.program == "sleep")
        });
        until("who has it mounted", &|all| {
            of(all, pids[1]).is_some_and(|h| h.files == 0 && h.mounted.as_ref() == Some(&point))
        });
        for child in [&mut inside, &mut elsewhere] {
            child.kill().and_then(|()| child.wait().map(drop)).expect("its end");
        }
        until("nobody of these", &|all| pids.iter().all(|pid| of(all, *pid).is_none()));
    }
}
