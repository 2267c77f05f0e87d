//! Unions: real MergerFS over real small disks.

mod escape;
mod fake;
mod merge;
mod real;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use union_csi::domain::union::UnionKind;
use union_csi::domain::{Bytes, VolumeId};
use union_csi::node::union::{MergerfsSettings, UnionSpec, UnionState, Unions};
use union_csi::platform::Host;
use union_csi::platform::process::ProcessId;

use crate::support::{Scratch, disk};

/// A machine of small disks with a state directory; its unions end with it.
struct Machine {
    scratch: Scratch,
    host: Host,
    settings: MergerfsSettings,
    branches: Vec<PathBuf>,
}

impl Machine {
    /// Disks of these sizes in MiB, each with a branch.
    fn with_disks(mib: &[u64]) -> Self {
        let scratch = Scratch::new();
        let branches: Vec<PathBuf> = mib
            .iter()
            .enumerate()
            .map(|(n, mib)| disk(&scratch, &format!("disk{n}"), "ext4", *mib))
            .collect();
        Self::over(scratch, branches)
    }

    /// Branches that are plain directories.
    fn with_directories(count: usize) -> Self {
        let scratch = Scratch::new();
        let branches = (0..count).map(|n| scratch.join(&format!("branch{n}"))).collect();
        Self::over(scratch, branches)
    }

    fn over(scratch: Scratch, branches: Vec<PathBuf>) -> Self {
        for branch in &branches {
            std::fs::create_dir_all(branch.join("data")).expect("data");
        }
        std::fs::create_dir_all(scratch.join("state")).expect("state");
        let settings = MergerfsSettings {
            path: "mergerfs".into(),
            options: BTreeMap::new(),
            start_timeout: Duration::from_secs(10),
        };
        Self { scratch, host: Host::new(), settings, branches }
    }

    fn state(&self) -> PathBuf {
        self.scratch.join("state")
    }

    /// What an agent finds when it starts.
    fn agent(&self) -> Unions {
        Unions::probe(&self.host, &self.settings, &self.state())
    }

    /// An agent with a mergerfs that works.
    fn working_agent(&self) -> Unions {
        let unions = self.agent();
        assert_eq!(unions.abilities().mergerfs_problem, None);
        unions
    }

    fn spec(&self) -> UnionSpec {
        UnionSpec {
            volume: "pvc-1".parse().expect("a name"),
            kind: UnionKind::Mergerfs,
            branches: self.branches.clone(),
            smallest: Bytes::mib(32),
            mount_point: self.scratch.join("mnt/pvc-1/0"),
            read_only: false,
            remote: false,
            options: BTreeMap::new(),
        }
    }

    fn read_only_spec(&self, kind: UnionKind) -> UnionSpec {
        UnionSpec { kind, read_only: true, ..self.spec() }
    }

    fn records(&self) -> Vec<String> {
        names(&self.state().join("unions"))
    }

    /// All mounts below the scratch directory of a type.
    fn mounted(&self, fs_type: &str) -> Vec<PathBuf> {
        let table = self.host.mounts().expect("mounts");
        table
            .below(self.scratch.path())
            .filter(|e| e.fs_type == fs_type)
            .map(|e| e.mount_point.clone())
            .collect()
    }

    /// Nothing of a union is left: no mount, no process, no record, no mount point.
    fn assert_clean(&self) {
        assert_eq!(self.mounted("fuse.mergerfs"), Vec::<PathBuf>::new());
        assert_eq!(self.mounted("overlay"), Vec::<PathBuf>::new());
        assert_eq!(processes_of(self.scratch.path()), Vec::<i32>::new());
        assert_eq!(self.records(), Vec::<String>::new());
        assert!(!self.spec().mount_point.exists(), "the mount point is still there");
        let selftests: Vec<_> =
            names(&self.state()).into_iter().filter(|n| n.starts_with("selftest")).collect();
        assert_eq!(selftests, Vec::<String>::new());
    }
}

impl Drop for Machine {
    /// Ends what serves this machine's directories, also after a failure.
    fn drop(&mut self) {
        for pid in processes_of(self.scratch.path()) {
            let _ =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

fn volume() -> VolumeId {
    "pvc-1".parse().expect("a name")
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Processes whose command line names something below `root`: each test has its own scratch directory.
fn processes_of(root: &Path) -> Vec<i32> {
    let needle = root.to_string_lossy().into_owned();
    names(Path::new("/proc"))
        .iter()
        .filter_map(|n| n.parse::<i32>().ok())
        .filter(|pid| *pid != std::process::id().cast_signed())
        .filter(|pid| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&needle)
        })
        .collect()
}

fn process(state: &UnionState) -> ProcessId {
    match state {
        UnionState::Running { process: Some(process), .. } => process.clone(),
        other => panic!("not running: {other:?}"),
    }
}

fn signal(process: &ProcessId, signal: Signal) {
    crate::support::signal(process.pid, signal);
}

/// Waits for what must come to be; the bound is only for tests that fail.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within 20 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}
