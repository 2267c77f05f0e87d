//! How a claim may be split: the StorageClass parameters, parsed once.
//!
//! [`Policy::parse`] reads a StorageClass's `parameters`; [`parameters`] describes each of them. One table is behind both,
//! so the documents and the command line cannot tell anything else than the parser does.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use snafu::Snafu;

use super::Bytes;
use super::pool::Media;
use super::volume::VolumeMode;

pub mod mergerfs;
mod parameters;

pub use parameters::{Parameter, parameters};

/// The largest `maxBranches`: each branch is an open directory, and mostly a loop device, of one MergerFS process.
pub const MAX_BRANCHES: u32 = 256;

/// The default of `maxBranches`.
pub const DEFAULT_MAX_BRANCHES: u32 = 16;

/// The default of `splitQuantum`.
pub const DEFAULT_QUANTUM: Bytes = Bytes::gib(1);

/// The smallest `splitQuantum`.
pub const MIN_QUANTUM: Bytes = Bytes::mib(1);

/// Sizes of images, and so of quanta, are multiples of it: the largest page and filesystem block size in common use.
pub const GRAIN: Bytes = Bytes::new(4096);

/// The default of `branchTimeout`.
pub const DEFAULT_BRANCH_TIMEOUT: Duration = Duration::from_secs(300);

/// Parameter that names the namespace of the claim that a volume was made for.
pub const CLAIM_NAMESPACE_KEY: &str = "csi.storage.k8s.io/pvc/namespace";

/// Parameter that names the claim that a volume was made for.
pub const CLAIM_NAME_KEY: &str = "csi.storage.k8s.io/pvc/name";

/// What a provisioner adds about the claim when it is told to
/// (<https://kubernetes-csi.github.io/docs/external-provisioner.html>); no volume depends on it.
pub const CLAIM_KEYS: [&str; 3] = [CLAIM_NAME_KEY, CLAIM_NAMESPACE_KEY, "csi.storage.k8s.io/pv/name"];

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

/// `authentication`: whether nodes prove to each other who they are before a branch is used over the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Authentication {
    /// Wherever both can.
    #[default]
    WhenPossible,
    /// Always: a node that cannot neither lends branches nor borrows them.
    Required,
}

/// `encryption`: whether what is written to a branch is readable on the network.
///
/// There is no value between the two: a volume that is encrypted only where both ends can would depend on which node it was
/// placed, and nobody could rely on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Encryption {
    /// It is sent as it is.
    #[default]
    Off,
    /// Always: a node that cannot neither lends branches nor borrows them. Nodes prove who they are, too.
    Required,
}

impl FsType {
    /// Its name, as `mount -t` takes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }
}

impl fmt::Display for FsType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A StorageClass parameter, or several together, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum ParamError {
    /// There is no such parameter.
    #[snafu(display("parameter {key:?} is not known{}", nearest.map(|n| format!("; did you mean {n:?}?")).unwrap_or_default()))]
    Unknown {
        /// The key as given.
        key: String,
        /// The known key that looks most like it.
        nearest: Option<&'static str>,
    },
    /// Its value is not one of those allowed.
    #[snafu(display("parameter {key}: {value:?} is not allowed: use {allowed}"))]
    Value {
        /// The key.
        key: String,
        /// The value as given.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// It exists and must not be set.
    #[snafu(display("parameter {key} cannot be set: {reason}"))]
    Refused {
        /// The key.
        key: String,
        /// Why.
        reason: String,
    },
    /// It cannot stand beside another.
    #[snafu(display("parameters {key} and {other} contradict each other: {reason}"))]
    Conflict {
        /// The key.
        key: String,
        /// The other key.
        other: String,
        /// Why, and what to do.
        reason: String,
    },
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
    /// `writeThrough`: what another node wrote to an image is on the owner's disk when it is told so.
    pub write_through: bool,
    /// `onBranchLoss`.
    pub on_branch_loss: OnBranchLoss,
    /// `branchTimeout`.
    pub branch_timeout: Duration,
    /// `authentication`.
    pub authentication: Authentication,
    /// `encryption`.
    pub encryption: Encryption,
    /// `union`.
    pub union: UnionMode,
    /// `mergerfs.*`, allow-listed, keys without the prefix in the `a-b` style.
    pub mergerfs: BTreeMap<String, String>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            quantum: DEFAULT_QUANTUM,
            min_branches: 1,
            max_branches: DEFAULT_MAX_BRANCHES,
            strategy: Strategy::default(),
            placement: Placement::default(),
            node_selector: BTreeMap::new(),
            pool_selector: BTreeMap::new(),
            media: Vec::new(),
            format: FormatChoice::default(),
            accept_unenforced: false,
            thin: false,
            fs_type: FsType::default(),
            write_through: true,
            on_branch_loss: OnBranchLoss::default(),
            branch_timeout: DEFAULT_BRANCH_TIMEOUT,
            authentication: Authentication::default(),
            encryption: Encryption::default(),
            union: UnionMode::default(),
            mergerfs: BTreeMap::new(),
        }
    }
}

impl Policy {
    /// Reads the parameters of a StorageClass. Keys under `csi.storage.k8s.io/` that Kubernetes adds are left aside, except
    /// the filesystem type.
    ///
    /// # Errors
    /// Every fault there is, in the order of the keys.
    pub fn parse(given: &BTreeMap<String, String>) -> Result<Self, Vec<ParamError>> {
        parameters::parse(given)
    }

    /// Whether a branch is used over the network only where both ends prove to each other who they are: a connection that
    /// nobody can read is worth nothing where nobody knows whose it is.
    #[must_use]
    pub fn requires_authentication(&self) -> bool {
        self.authentication == Authentication::Required || self.requires_encryption()
    }

    /// Whether a branch is used over the network only where nobody can read what is sent.
    #[must_use]
    pub fn requires_encryption(&self) -> bool {
        self.encryption == Encryption::Required
    }

    /// Why no block volume can be made under this policy; `None` where one can: a block volume is one image, because
    /// there is no way yet to join several into one device.
    #[must_use]
    pub fn block_refusal(&self) -> Option<String> {
        if self.min_branches > 1 {
            return Some(format!(
                "block access needs a volume of one branch, and minBranches is {}: use a class with minBranches 1",
                self.min_branches
            ));
        }
        (self.format == FormatChoice::Directory).then(|| {
            "block access needs an image, and branchFormat is directory: use a class with branchFormat image".to_owned()
        })
    }

    /// Why no volume that several nodes write can be made under this policy; `None` where one can: such a volume is one
    /// directory that all of them reach by NFS. A class that keeps volumes on one node makes them for the pods of that node,
    /// however many, in whatever form.
    #[must_use]
    pub fn writers_refusal(&self, mode: VolumeMode) -> Option<String> {
        let remedy = "use ReadWriteOnce";
        if self.placement == Placement::Local {
            None
        } else if mode == VolumeMode::Block {
            Some(format!(
                "several nodes cannot write one block device: use volumeMode Filesystem, or {remedy}"
            ))
        } else if self.format == FormatChoice::Image {
            Some(format!(
                "several nodes write a directory, and branchFormat is image, which goes to one node at a time: use a class \
                 with branchFormat directory or auto, or {remedy}"
            ))
        } else if self.min_branches > 1 {
            Some(format!(
                "a volume that several nodes write has one branch, because in several their files could hide each other, and \
                 minBranches is {}: use a class with minBranches 1, or {remedy}",
                self.min_branches
            ))
        } else if self.requires_encryption() {
            Some(format!(
                "several nodes write by NFS, which is not encrypted here, and encryption is required: use a class without, or \
                 {remedy}"
            ))
        } else if self.authentication == Authentication::Required {
            Some(format!(
                "several nodes write by NFS, which cannot prove who they are, and authentication is required: use a class \
                 without, or {remedy}"
            ))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests;
