//! What is asked of a volume on this node, and what is told about it.

use std::path::PathBuf;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::reach::Transport;
use crate::domain::union::UnionKind;
use crate::domain::volume::AccessMode;
use crate::domain::{BranchId, Bytes, NodeName, VolumeId};

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
    /// How it is reached, where it lies on another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<RemoteBranch>,
}

/// How a branch of another node is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RemoteBranch {
    /// The node that it lies on.
    pub node: NodeName,
    /// By what it is reached; absent while it is not attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Which of its generations is attached: its node raises it when it cannot vouch for what was written before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// How the connection stands.
    pub link: LinkState,
    /// Since when it has stood so, as far as the agent has seen; absent before its first look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub since: Option<Timestamp>,
}

/// How the connection to a branch of another node stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LinkState {
    /// The node answers.
    Live,
    /// The node does not answer: what uses the branch waits, for `branchTimeout` at most.
    Away,
    /// There is none: it was given up or taken away, or was not made yet.
    Gone,
    /// The kernel did not tell.
    #[default]
    Unknown,
}

impl LinkState {
    /// In a word or two, for people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Live => "answers",
            Self::Away => "does not answer",
            Self::Gone => "not connected",
            Self::Unknown => "not known",
        }
    }
}
