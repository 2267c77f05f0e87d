//! How a claim may be split: the StorageClass parameters, parsed once.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Bytes;
use super::pool::Media;

/// Filesystem inside an image branch.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum FsType {
    /// ext4.
    #[default]
    Ext4,
    /// XFS.
    Xfs,
    /// btrfs.
    Btrfs,
}

/// `strategy`: how many branches, how large.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Strategy {
    /// As few branches as fit, the last one best-fit.
    #[default]
    Fewest,
    /// In proportion to free space.
    Balanced,
    /// Over as many nodes as possible.
    Spread,
}

/// `placement`: which nodes may hold branches, seen from the consumer's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Placement {
    /// The consumer's node only; one node for all branches where the consumer is not known yet.
    Local,
    /// The consumer's node first.
    #[default]
    PreferLocal,
    /// Any node.
    Any,
}

/// `branchFormat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FormatChoice {
    /// `directory` where the pool can enforce the size and every consumer can reach it, else `image`.
    #[default]
    Auto,
    /// A file with its own filesystem.
    Image,
    /// A plain directory.
    Directory,
}

/// `union`: when a union is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum UnionMode {
    /// Only for volumes of more than one branch.
    #[default]
    WhenNeeded,
    /// Always.
    Always,
}

/// `onBranchLoss`: what becomes of a union that lost a branch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnBranchLoss {
    /// The whole union goes and returns by itself when it is complete.
    #[default]
    Fail,
    /// The rest is served read-only.
    ReadOnly,
    /// The rest is served, writable.
    ServePartial,
}

/// The parsed StorageClass parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// `splitQuantum`: branch sizes are multiples of it, except the last.
    pub quantum: Bytes,
    /// `minBranches`, at least 1.
    pub min_branches: u32,
    /// `maxBranches`, at least `min_branches`.
    pub max_branches: u32,
    /// `strategy`.
    pub strategy: Strategy,
    /// `placement`.
    pub placement: Placement,
    /// `nodeSelector`: `key=value,…`; all must hold.
    pub node_selector: BTreeMap<String, String>,
    /// `poolSelector`: `key=value,…`; all must hold.
    pub pool_selector: BTreeMap<String, String>,
    /// `media`: allowed kinds of disk; empty allows all.
    pub media: Vec<Media>,
    /// `branchFormat`.
    pub format: FormatChoice,
    /// `enforcement: none` accepts directory branches whose size cannot be enforced.
    pub accept_unenforced: bool,
    /// `provisioning: thin` makes images sparse.
    pub thin: bool,
    /// `fsType` (or Kubernetes' `csi.storage.k8s.io/fstype`): the filesystem in image branches.
    pub fs_type: FsType,
    /// `onBranchLoss`.
    pub on_branch_loss: OnBranchLoss,
    /// `branchTimeout`.
    pub branch_timeout: Duration,
    /// `union`.
    pub union: UnionMode,
    /// `mergerfs.*`, allow-listed, keys without the prefix in the `a-b` style.
    pub mergerfs: BTreeMap<String, String>,
}
