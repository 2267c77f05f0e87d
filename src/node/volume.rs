//! Staging and publishing volumes on this node: what the CSI node service calls.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use snafu::Snafu;

use crate::domain::union::UnionKind;
use crate::domain::volume::AccessMode;
use crate::domain::{BranchId, Bytes, VolumeId};
use crate::platform::HostError;
use crate::store::StoreError;

/// How a workload reaches a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// A mounted filesystem.
    #[serde(rename_all = "camelCase")]
    Mount {
        /// Mount flags that the class or the claim asks for (`ro`, `noatime`, `nodev`, `noexec`, `nosuid`, and their
        /// opposites that are the default); others are refused.
        flags: Vec<String>,
        /// Group that shall be able to write at the volume's root (`VOLUME_MOUNT_GROUP`).
        group: Option<u32>,
    },
    /// A block device.
    Block,
}

/// NodeStageVolume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StageRequest {
    /// The volume.
    pub volume: VolumeId,
    /// Where to stage it; checked to lie below an allowed directory.
    pub staging: PathBuf,
    /// Mode of use.
    pub access_mode: AccessMode,
    /// Files or block.
    pub access: Access,
}

/// NodePublishVolume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishRequest {
    /// The volume.
    pub volume: VolumeId,
    /// Where it is staged.
    pub staging: PathBuf,
    /// Where the workload shall find it; made here, checked to lie below an allowed directory.
    pub target: PathBuf,
    /// Read-only for this target.
    pub read_only: bool,
    /// Mode of use.
    pub access_mode: AccessMode,
    /// Files or block.
    pub access: Access,
    /// Staged and published again when the agent starts after a reboot (a machine without an orchestrator).
    pub at_boot: bool,
}

/// Used and total of something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// All of it.
    pub total: u64,
    /// Used.
    pub used: u64,
    /// Available to the workload.
    pub available: u64,
}

/// How a volume does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Health {
    /// True where something is wrong.
    pub abnormal: bool,
    /// What, and what to do; a sentence either way.
    pub message: String,
}

/// NodeGetVolumeStats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStats {
    /// Bytes; for a block volume only `total`.
    pub bytes: Usage,
    /// Inodes; absent for block volumes and filesystems without a fixed number.
    pub inodes: Option<Usage>,
    /// How it does.
    pub health: Health,
}

/// A volume on this node, for the status API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSnapshot {
    /// The volume.
    pub volume: VolumeId,
    /// What serves it.
    pub union: UnionKind,
    /// Pid of its MergerFS process.
    pub pid: Option<i32>,
    /// Options that the process runs with, as read back from it.
    pub options: std::collections::BTreeMap<String, String>,
    /// Where it is staged.
    #[schemars(with = "Option<String>")]
    pub staging: Option<PathBuf>,
    /// Where it is published.
    #[schemars(with = "Vec<String>")]
    pub targets: Vec<PathBuf>,
    /// Space in it, as `df` tells.
    pub space: Option<Usage>,
    /// Its attached branches.
    pub branches: Vec<AttachedBranch>,
    /// How it does.
    pub health: Health,
    /// Times that its union was replaced since the agent first staged it.
    pub heals: u64,
}

/// A branch attached on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttachedBranch {
    /// The branch.
    pub id: BranchId,
    /// Where it is mounted on this node; its files are in `data` below.
    #[schemars(with = "String")]
    pub mount: PathBuf,
    /// Where it lies: the directory or image in its pool.
    #[schemars(with = "String")]
    pub backing: PathBuf,
    /// Loop device, for images.
    #[schemars(with = "Option<String>")]
    pub device: Option<PathBuf>,
    /// Space in it.
    pub space: Option<Usage>,
    /// Its size in the plan.
    pub size: Bytes,
}

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

/// Volumes on this node. All calls are idempotent; the caller sees to it that no two run for one volume at a time.
#[derive(Debug)]
pub struct Volumes {}

impl Volumes {
    /// Attaches the volume's branches, starts its union, and binds it at the staging path.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn stage(&self, request: &StageRequest) -> Result<(), VolumeError> {
        let _ = request;
        unimplemented!()
    }

    /// Takes back what [`Volumes::stage`] did; also for a volume that no longer exists.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] while it is published.
    pub async fn unstage(&self, volume: &VolumeId, staging: &std::path::Path) -> Result<(), VolumeError> {
        let _ = (volume, staging);
        unimplemented!()
    }

    /// Binds the staged volume at the target.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn publish(&self, request: &PublishRequest) -> Result<(), VolumeError> {
        let _ = request;
        unimplemented!()
    }

    /// Takes back what [`Volumes::publish`] did, and removes the target.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn unpublish(&self, volume: &VolumeId, target: &std::path::Path) -> Result<(), VolumeError> {
        let _ = (volume, target);
        unimplemented!()
    }

    /// Space and health of the volume at `path`, where it is staged or published. Never waits for a branch longer than a
    /// few seconds.
    ///
    /// # Errors
    /// [`VolumeError::Unknown`] where the volume is not at that path.
    pub async fn stats(&self, volume: &VolumeId, path: &std::path::Path) -> Result<VolumeStats, VolumeError> {
        let _ = (volume, path);
        unimplemented!()
    }

    /// All volumes on this node.
    pub async fn snapshot(&self) -> Vec<VolumeSnapshot> {
        unimplemented!()
    }

    /// Whether this node can serve volumes now; the reason where it cannot. For Probe and `/readyz`.
    pub async fn ready(&self) -> Result<(), String> {
        unimplemented!()
    }
}
