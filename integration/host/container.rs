//! The agent in a container: it acts on its host, and what it made there outlives it.
//!
//! The host is a process namespace and a mount namespace whose process 1 sleeps. A container on it has mounts, a root
//! directory and control groups of its own, and ends as container runtimes end one: every process that is found in its
//! control groups, of whatever hierarchy, is killed, and its root directory removed.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use union_csi::csi::proto::volume_capability::access_mode::Mode;

use crate::agent::{Agent, Wanted};
use crate::support::{Scratch, disk, run};

const PROGRAM: &str = env!("CARGO_BIN_EXE_union-csi");
const WRITER: Mode = Mode::SingleNodeWriter;

/// Nothing here takes as long, unless it never comes.
const BOUND: Duration = Duration::from_secs(30);

/// A host: process 1 of its own process namespace, in its own mount namespace.
struct HostMachine {
    unshare: Child,
    init: String,
}

impl HostMachine {
    /// A host that has the mounts below `own`, and not those of tests that run beside this one.
    fn new(own: &Path) -> Self {
        let script = format!(
            "cut -d' ' -f5 /proc/self/mountinfo | grep /union-csi-test- | grep -v '^{}' | tac |
             while read -r point; do umount -l \"$point\"; done
             exec sleep infinity",
            own.display()
        );
        let unshare = Command::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"])
            .args(["sh", "-c", &script])
            .stderr(Stdio::null())
            .spawn()
            .expect("unshare");
        let children = format!("/proc/{0}/task/{0}/children", unshare.id());
        let init = eventually("process 1 of the host", || {
            let child = fs::read_to_string(&children).ok()?.split_whitespace().next()?.to_owned();
            let named = fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
            (named.trim() == "sleep").then_some(child)
        });
        Self { unshare, init }
    }

    /// A path as processes of the host see it.
    fn path(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.init, path.display()))
    }

    fn mounts(&self) -> String {
        fs::read_to_string(format!("/proc/{}/mountinfo", self.init)).expect("the host's mounts")
    }
}

impl Drop for HostMachine {
    fn drop(&mut self) {
        // Everything in its process namespace ends with process 1.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// What runs containers: one at a time, from a root directory made by `scripts/image`.
struct Runtime {
    scratch: PathBuf,
    groups: Vec<PathBuf>,
}

impl Runtime {
    fn new(scratch: &Path, host: &HostMachine) -> Self {
        let name = format!("union-csi-test-{}", std::process::id());
        // Of version 1, those by which runtimes track processes; a limit on memory stays as it is.
        let tops = ["pids", "systemd", "devices", "freezer", "unified", ""]
            .map(|h| Path::new("/sys/fs/cgroup").join(h));
        let groups: Vec<PathBuf> = tops
            .iter()
            .filter(|top| top.join("cgroup.procs").exists())
            .map(|top| top.join(&name).join("container"))
            .collect();
        assert!(!groups.is_empty(), "this machine has no control groups");
        let joins: String = groups
            .iter()
            .map(|g| format!("mkdir -p {0} && echo 0 >{0}/cgroup.procs || exit 1\n", g.display()))
            .collect();
        let script = format!(
            r#"#!/bin/sh
exec nsenter --target {init} --pid --mount -- unshare --mount --propagation private /bin/sh -c '
{joins}
exec unshare --cgroup /bin/sh -c "
mount --bind {rootfs} {rootfs} && cd {rootfs} &&
mount -t proc proc proc && mount -t tmpfs none etc/union-csi && mount -t tmpfs none tmp && mkdir tmp/old &&
cp \"$0\" etc/union-csi/agent.yaml && pivot_root . tmp/old && cd / && /busybox umount -l /tmp/old &&
exec /usr/local/bin/union-csi agent" "$0"
' "$3"
"#,
            init = host.init,
            rootfs = scratch.join("rootfs").display(),
        );
        let wrapper = scratch.join("run-container");
        fs::write(&wrapper, script).expect("the wrapper");
        run("chmod", &["755", wrapper.to_str().expect("path")]);
        let runtime = Self { scratch: scratch.to_owned(), groups };
        runtime.unpack();
        runtime
    }

    fn program(&self) -> PathBuf {
        self.scratch.join("run-container")
    }

    fn unpack(&self) {
        let rootfs = self.scratch.join("rootfs");
        run(
            concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/image"),
            &["--program", PROGRAM, rootfs.to_str().expect("path")],
        );
        fs::copy("/usr/bin/busybox", rootfs.join("busybox"))
            .expect("a static busybox (package busybox-static)");
    }

    /// Whether a process is in one of the container's control groups.
    fn tracks(&self, pid: &str) -> bool {
        let procs = |group: &PathBuf| fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        self.groups.iter().any(|group| procs(group).lines().any(|p| p == pid))
    }

    /// Ends the container and removes what it was unpacked to.
    fn end(&self) {
        eventually("the end of the container's processes", || {
            let mut left = false;
            for group in &self.groups {
                for pid in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
                    let _ = Command::new("kill").args(["-9", pid]).stderr(Stdio::null()).status();
                    left = true;
                }
            }
            (!left).then_some(())
        });
        for group in &self.groups {
            let _ = fs::remove_dir(group);
            let _ = fs::remove_dir(group.parent().expect("a parent"));
        }
        fs::remove_dir_all(self.scratch.join("rootfs")).expect("the root directory can be removed");
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if self.scratch.join("rootfs").exists() {
            self.end();
        }
    }
}

fn eventually<T>(what: &str, mut holds: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + BOUND;
    loop {
        if let Some(found) = holds() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {BOUND:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The mergerfs processes that serve something below `root`, by their pids here.
fn unions(root: &Path) -> Vec<String> {
    let needle = root.to_string_lossy().into_owned();
    let entries = fs::read_dir("/proc").expect("/proc").filter_map(Result::ok);
    entries
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|pid| pid.bytes().all(|b| b.is_ascii_digit()))
        .filter(|pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("mergerfs") && line.contains(&needle)
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_union_made_from_a_container_outlives_it_and_the_next_container_takes_it_over() {
    let scratch = Scratch::new();
    let disks = ["a", "b"].map(|name| disk(&scratch, name, "ext4", 128));
    let pools: Vec<_> = disks
        .iter()
        .map(|d| (d.file_name().expect("name").to_string_lossy().into_owned(), d.join("pool")))
        .collect();
    pools.iter().for_each(|(_, pool)| fs::create_dir(pool).expect("a pool"));
    let host = HostMachine::new(scratch.path());
    let runtime = Runtime::new(scratch.path(), &host);
    let mut agent = Agent::start(&runtime.program(), scratch.path(), &pools, "");
    assert!(agent.log_end().contains("left the container"), "{}", agent.log_end());

    let mut csi = agent.csi().await;
    let wanted = Wanted::new("vol", 150 << 20, &[("splitQuantum", "16Mi")]);
    let volume = csi.create(&wanted).await.expect("CreateVolume").volume_id;
    csi.stage(&volume, WRITER).await.expect("NodeStageVolume");
    let target = csi.publish(&volume, WRITER).await.expect("NodePublishVolume");
    assert!(host.mounts().contains(&format!(" {} ", target.display())), "it is mounted on the host");
    let [union] = &unions(scratch.path())[..] else { panic!("one union: {:?}", unions(scratch.path())) };
    assert!(!runtime.tracks(union), "the union is in a control group of the container");
    let program = fs::read_link(format!("/proc/{union}/exe")).expect("its program");
    assert!(
        program.starts_with(scratch.join("state/bin")),
        "it runs a copy on the host: {}",
        program.display()
    );

    // A workload that writes all the while.
    let stop = Arc::new(AtomicBool::new(false));
    let workload = {
        let (stop, path) = (stop.clone(), host.path(&target).join("file"));
        std::thread::spawn(move || -> std::io::Result<u64> {
            let mut file = fs::File::create(path)?;
            let mut written = 0;
            while !stop.load(Ordering::Relaxed) {
                file.write_all(&[7; 512])?;
                file.sync_data()?;
                written += 512;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(written)
        })
    };
    runtime.end();
    agent.kill();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        unions(scratch.path()),
        std::slice::from_ref(union),
        "the container is gone, the union is not"
    );
    runtime.unpack();
    agent.restart();
    stop.store(true, Ordering::Relaxed);
    let written = workload.join().expect("the workload").expect("no error all the while");
    let mut content = Vec::new();
    fs::File::open(host.path(&target).join("file"))
        .expect("the file")
        .read_to_end(&mut content)
        .expect("its content");
    assert_eq!(content.len() as u64, written);
    assert_eq!(unions(scratch.path()), std::slice::from_ref(union), "the next agent has taken it over");

    let mut csi = agent.csi().await;
    csi.unpublish(&volume).await.expect("NodeUnpublishVolume");
    csi.unstage(&volume).await.expect("NodeUnstageVolume");
    csi.delete(&volume).await.expect("DeleteVolume");
    assert_eq!(unions(scratch.path()), Vec::<String>::new());
    runtime.end();
}

#[test]
fn an_agent_that_cannot_see_its_host_names_what_the_pod_lacks() {
    crate::support::require_private_namespace();
    let out = Command::new("unshare")
        .args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            PROGRAM,
            "agent",
            "--host-namespace",
            "enter",
        ])
        .output()
        .expect("unshare");
    let told = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && told.contains("hostPID: true"), "{told}");
}

#[test]
fn an_agent_without_privileges_names_what_the_container_lacks() {
    let scratch = Scratch::new();
    let host = HostMachine::new(scratch.path());
    let out = Command::new("nsenter")
        .args(["--target", &host.init, "--pid", "--mount", "--", "unshare", "--mount"])
        .args(["setpriv", "--bounding-set=-all", "--inh-caps=-all"])
        .args([PROGRAM, "agent", "--host-namespace", "enter"])
        .output()
        .expect("nsenter");
    let told = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && told.contains("securityContext.privileged: true"), "{told}");
}
