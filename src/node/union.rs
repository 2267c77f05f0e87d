//! Joining attached branches into one tree.
//!
//! MergerFS runs as a process of its own that outlives the agent; what is needed to find it again is on disk. The kernel
//! and the process itself are asked how it stands, never memory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use snafu::Snafu;

use crate::domain::union::UnionKind;
use crate::domain::{Bytes, VolumeId};
use crate::platform::HostError;
use crate::platform::process::ProcessId;

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

/// The unions of this node. Functions block.
#[derive(Debug)]
pub struct Unions {}

impl Unions {
    /// What this host can do.
    #[must_use]
    pub fn abilities(&self) -> &UnionAbilities {
        unimplemented!()
    }

    /// Makes the union run at `spec.mount_point`, or finds that it does (also one that an earlier agent started). On
    /// return it has answered and its options were read back.
    ///
    /// # Errors
    /// See [`UnionError`]; nothing stays mounted then.
    pub fn ensure(&self, spec: &UnionSpec) -> Result<UnionState, UnionError> {
        let _ = spec;
        unimplemented!()
    }

    /// Starts a second union of the same spec at `spec.mount_point`, beside a dead or hung one that is mounted elsewhere,
    /// and makes it the volume's union on record. For healing.
    ///
    /// # Errors
    /// See [`UnionError`].
    pub fn replace(&self, spec: &UnionSpec) -> Result<UnionState, UnionError> {
        let _ = spec;
        unimplemented!()
    }

    /// How the volume's union stands; touches no branch, comes back within 2 seconds.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn observe(&self, volume: &VolumeId) -> Result<UnionState, UnionError> {
        let _ = volume;
        unimplemented!()
    }

    /// The options that the running process has, read back from it; empty for overlayfs.
    ///
    /// # Errors
    /// It does not answer.
    pub fn options(&self, volume: &VolumeId) -> Result<BTreeMap<String, String>, UnionError> {
        let _ = volume;
        unimplemented!()
    }

    /// Unmounts the volume's union, ends its process, removes its records. Nothing to do is success.
    ///
    /// # Errors
    /// EBUSY where files are open in it and `force` is false. With `force`: lazy unmount, abort, kill.
    pub fn stop(&self, volume: &VolumeId, force: bool) -> Result<(), UnionError> {
        let _ = (volume, force);
        unimplemented!()
    }
}
