//! Joining attached branches into one tree.
//!
//! MergerFS runs as a process of its own that outlives the agent; what is needed to find it again is on disk. The kernel
//! and the process itself are asked how it stands, never memory.
//!
//! In flow a [`UnionSpec`]; out flows a mount whose `data` directory is the volume. Invariants: a union that was handed
//! out has answered, and has the options that it was asked for; a start that failed leaves no process and no mount; a
//! record is on disk before a process exists. What the host can do is found out by trying, at start (`selftest`).
//!
//! - `bundled`: the image's program; `detect`: which program; `launch`: starting and ending one process; `overlay`: read-only volumes;
//!   `record`: what is on disk; `selftest`: what works here; `supervise`: how a union stands; `watch`: its end.

mod bundled;
mod detect;
mod launch;
pub mod merge;
mod overlay;
mod record;
mod selftest;
mod supervise;
mod watch;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use snafu::Snafu;

use crate::domain::union::UnionKind;
use crate::domain::{Bytes, VolumeId};
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};

pub use detect::Program;
pub use record::{Phase, Record, Retired};
pub use watch::watch_exit;

/// MergerFS on this node, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergerfsSettings {
    /// Program: an absolute path, or a name looked up in `PATH`. Default `mergerfs`.
    pub path: PathBuf,
    /// Options for all unions of this node, allow-listed as in StorageClasses; the class wins.
    pub options: BTreeMap<String, String>,
    /// How long a union may take to answer after its start. Default 10 s.
    pub start_timeout: Duration,
}

/// What is to be joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnionSpec {
    /// The volume; `fsname` of the mount.
    pub volume: VolumeId,
    /// By what: `Overlay` or `Mergerfs` (`Bind` and `Block` need no union).
    pub kind: UnionKind,
    /// Where the branches are mounted, local ones first; each holds `data/`.
    pub branches: Vec<PathBuf>,
    /// Size of the smallest branch, for `minfreespace`.
    pub smallest: Bytes,
    /// Where the union is to be mounted.
    pub mount_point: PathBuf,
    /// Whether nothing may be written.
    pub read_only: bool,
    /// Whether some branch lies on another node.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub remote: bool,
    /// MergerFS options of the node and the class, keys in the `a-b` style without prefix; they win over ours.
    pub options: BTreeMap<String, String>,
}

/// How a union stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnionState {
    /// Mounted and answering.
    Running {
        /// The MergerFS process; `None` for overlayfs.
        process: Option<ProcessId>,
        /// Device of the mount: major, minor.
        device: (u32, u32),
    },
    /// Its process is gone; what is mounted answers ENOTCONN.
    Dead {
        /// Device of what is still mounted, if anything is.
        device: Option<(u32, u32)>,
    },
    /// Its process is there and does not answer.
    Hung {
        /// The process.
        process: ProcessId,
        /// Device of the mount.
        device: (u32, u32),
    },
    /// There is none.
    Absent,
}

/// What unions this host can make; found out at start by trying.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnionAbilities {
    /// Version of the mergerfs that passed the self-test.
    pub mergerfs_version: Option<String>,
    /// Why there is none, and what to do.
    pub mergerfs_problem: Option<String>,
    /// I/O passthrough works (kernel and mergerfs).
    pub passthrough: bool,
    /// `O_DIRECT` reads work through a union.
    pub direct_read: bool,
    /// `O_DIRECT` writes work through a union.
    pub direct_write: bool,
    /// Read-only overlayfs of several layers works.
    pub overlay: bool,
    /// A file that outgrows its branch is moved to another one, whole; where it is not, its writer is told ENOSPC.
    #[serde(default)]
    pub moves_files: bool,
    /// Options, for speed only, that this mergerfs refused in the self-test and that its unions do without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused_options: Vec<String>,
}

/// A union could not be made, asked or ended.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum UnionError {
    /// mergerfs is missing, too old, or failed the self-test.
    #[snafu(display("no mergerfs that can be used: {reason}"))]
    NoMergerfs {
        /// Why, and what to do.
        reason: String,
    },
    /// The process ended at once or did not answer in time.
    #[snafu(display("mergerfs for volume {volume} did not start: {reason}"))]
    Start {
        /// The volume.
        volume: VolumeId,
        /// What it printed, or that it did not answer.
        reason: String,
    },
    /// An option that was given has another value in the running process.
    #[snafu(display("mergerfs for volume {volume} runs with {option}={found} instead of {wanted}"))]
    Option {
        /// The volume.
        volume: VolumeId,
        /// The option.
        option: String,
        /// What was asked for.
        wanted: String,
        /// What it has.
        found: String,
    },
    /// The union cannot be as it was asked for.
    #[snafu(display("volume {volume} cannot be merged as asked: {reason}"))]
    Request {
        /// The volume.
        volume: VolumeId,
        /// Why, and what to do.
        reason: String,
    },
    /// A running union is of other branches or another kind than wanted.
    #[snafu(display("the union of volume {volume} that runs is another: {reason}"))]
    Differs {
        /// The volume.
        volume: VolumeId,
        /// What differs.
        reason: String,
    },
    /// The machine refused something.
    #[snafu(display("cannot {action}: {source}"))]
    Host {
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
}

/// The unions of this node. Functions block; the caller sees to it that no two run for one volume at a time.
#[derive(Debug)]
pub struct Unions {
    host: Host,
    records: record::Records,
    logs: PathBuf,
    settings: MergerfsSettings,
    state_dir: PathBuf,
    tested: RwLock<Arc<Tested>>,
    /// Held while it is tested again.
    testing: Mutex<()>,
    boot_id: String,
}

/// What was found by trying, and when.
#[derive(Debug)]
struct Tested {
    program: Option<Program>,
    abilities: UnionAbilities,
    at: Instant,
}

/// How long after a test that found no program the next one is, at least, when a union is wanted: a machine that has just booted
/// may be too busy for it, and a program may be installed later.
const TEST_AGAIN: Duration = Duration::from_secs(20);

impl Unions {
    /// Finds out what this host can do, by trying: which mergerfs, whether a real union works, with what. Cleans up what
    /// a self-test left that did not end. State is kept below `state_dir`, which must exist.
    ///
    /// Never fails: a host without a usable mergerfs can still serve volumes of one branch, and says why in
    /// [`UnionAbilities::mergerfs_problem`].
    #[must_use]
    pub fn probe(host: &Host, settings: &MergerfsSettings, state_dir: &Path) -> Self {
        let tested = Self::test(host, settings, state_dir);
        let records = record::Records::new(host.clone(), state_dir);
        let boot_id = records.boot_id().unwrap_or_default();
        Self {
            host: host.clone(),
            records,
            logs: state_dir.join("logs"),
            settings: settings.clone(),
            state_dir: state_dir.to_owned(),
            tested: RwLock::new(tested),
            testing: Mutex::default(),
            boot_id,
        }
    }

    fn test(host: &Host, settings: &MergerfsSettings, state_dir: &Path) -> Arc<Tested> {
        let (program, abilities) = selftest::run(host, settings, state_dir);
        Arc::new(Tested { program, abilities, at: Instant::now() })
    }

    /// What this host can do.
    #[must_use]
    pub fn abilities(&self) -> UnionAbilities {
        self.tested().abilities.clone()
    }

    /// The program that new unions run.
    #[must_use]
    pub fn program(&self) -> Option<Program> {
        self.tested().program.clone()
    }

    fn tested(&self) -> Arc<Tested> {
        self.tested.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What was found, or, where that was no program that can be used, what is found now.
    fn tested_with_program(&self) -> Arc<Tested> {
        let good = |tested: &Tested| tested.program.is_some() || tested.at.elapsed() < TEST_AGAIN;
        let known = self.tested();
        if good(&known) {
            return known;
        }
        let _testing = self.testing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.tested();
        // Another call was faster.
        if good(&known) {
            return known;
        }
        tracing::info!("a union is wanted: mergerfs is tested again");
        let found = Self::test(&self.host, &self.settings, &self.state_dir);
        self.tested.write().unwrap_or_else(PoisonError::into_inner).clone_from(&found);
        found
    }
}
