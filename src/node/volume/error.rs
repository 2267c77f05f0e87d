//! Why a volume could not be staged, published or asked.

use std::path::{Path, PathBuf};

use snafu::Snafu;

use super::record::Record;
use super::remote::AttachError;
use crate::domain::VolumeId;
use crate::node::branch::BranchError;
use crate::node::union::UnionError;
use crate::platform::HostError;
use crate::platform::mount::MountEntry;
use crate::store::StoreError;

/// Staging or publishing failed.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum VolumeError {
    /// No such volume.
    #[snafu(display("volume {volume} does not exist"))]
    Unknown {
        /// The volume.
        volume: VolumeId,
    },
    /// A path that the caller gave is refused.
    #[snafu(display("path {} is refused: {reason}", path.display()))]
    Path {
        /// The path.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// What the caller asks for cannot be done with this volume.
    #[snafu(display("volume {volume}: {reason}"))]
    Request {
        /// The volume.
        volume: VolumeId,
        /// Why, and what to do.
        reason: String,
    },
    /// The volume is staged or published there in another way.
    #[snafu(display("volume {volume} is already at {} in another way: {reason}", path.display()))]
    Differs {
        /// The volume.
        volume: VolumeId,
        /// Where.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// It must be staged first.
    #[snafu(display("volume {volume} is not staged at {}: call NodeStageVolume first", staging.display()))]
    NotStaged {
        /// The volume.
        volume: VolumeId,
        /// Where it was expected.
        staging: PathBuf,
    },
    /// Not all of its branches can be used now; try again.
    #[snafu(display("volume {volume} is not complete: {reason}"))]
    Incomplete {
        /// The volume.
        volume: VolumeId,
        /// Which branches, and why.
        reason: String,
    },
    /// Some of its branches were not given to this node yet, or not opened to it; it happens without the caller.
    #[snafu(display("volume {volume} is not ready on this node: {reason}; try again"))]
    NotYet {
        /// The volume.
        volume: VolumeId,
        /// Which branches, and what they wait for.
        reason: String,
    },
    /// Something still uses it.
    #[snafu(display("volume {volume} is in use: {reason}"))]
    Busy {
        /// The volume.
        volume: VolumeId,
        /// By what.
        reason: String,
    },
    /// No union could be made on this node.
    #[snafu(display("volume {volume} cannot be merged here: {reason}"))]
    Union {
        /// The volume.
        volume: VolumeId,
        /// Why, and what to do.
        reason: String,
    },
    /// The machine refused something.
    #[snafu(display("volume {volume}: cannot {action}: {source}"))]
    Host {
        /// The volume.
        volume: VolumeId,
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
    /// The store did not answer.
    #[snafu(display("volume {volume}: {source}"))]
    Store {
        /// The volume.
        volume: VolumeId,
        /// Why.
        source: StoreError,
    },
}

impl VolumeError {
    /// The machine refused `action` on the volume; open files become [`VolumeError::Busy`].
    pub(super) fn host(volume: &VolumeId, action: &'static str, source: HostError) -> Self {
        if source.is_busy() {
            return Self::Busy { volume: volume.clone(), reason: format!("cannot {action}: {source}") };
        }
        Self::Host { volume: volume.clone(), action, source }
    }

    /// A branch could not be used or let go.
    pub(super) fn branch(volume: &VolumeId, source: BranchError) -> Self {
        let volume = volume.clone();
        match source {
            BranchError::Host { action, source, .. } => Self::host(&volume, action, source),
            BranchError::Elsewhere { .. } => Self::NotYet { volume, reason: source.to_string() },
            BranchError::Pool { .. }
            | BranchError::NoRoom { .. }
            | BranchError::Unfit { .. }
            | BranchError::Foreign { .. }
            | BranchError::InUse { .. }
            | BranchError::Mark { .. }
            | BranchError::Missing { .. } => Self::Incomplete { volume, reason: source.to_string() },
        }
    }

    /// The union could not be made, asked or ended.
    pub(super) fn union(volume: &VolumeId, source: UnionError) -> Self {
        let volume = volume.clone();
        match source {
            UnionError::Host { action, source } => Self::host(&volume, action, source),
            UnionError::Request { reason, .. } => Self::Request { volume, reason },
            UnionError::NoMergerfs { .. }
            | UnionError::Start { .. }
            | UnionError::Option { .. }
            | UnionError::Differs { .. } => Self::Union { volume, reason: source.to_string() },
        }
    }

    /// The volume is there in another way.
    pub(super) fn differs(record: &Record, path: &Path, reason: String) -> Self {
        Self::Differs { volume: record.volume().clone(), path: path.to_owned(), reason }
    }

    /// Something else is mounted there.
    pub(super) fn foreign(path: &Path, entry: &MountEntry) -> Self {
        let reason = format!(
            "something else is mounted there ({} of {}): unmount it, or choose another path",
            entry.fs_type, entry.source
        );
        Self::Path { path: path.to_owned(), reason }
    }

    /// These branches cannot be used, by number.
    pub(super) fn incomplete(volume: &VolumeId, mut failures: Vec<(u32, AttachError)>) -> Self {
        let reason = failures.iter().map(|(_, e)| e.to_string()).collect::<Vec<_>>().join("; ");
        let volume = volume.clone();
        if failures.iter().all(|(_, e)| e.passes()) {
            return Self::NotYet { volume, reason };
        }
        if failures.len() == 1
            && let Some((_, AttachError::Here { source })) = failures.pop()
        {
            return Self::branch(&volume, source);
        }
        Self::Incomplete { volume, reason }
    }
}
