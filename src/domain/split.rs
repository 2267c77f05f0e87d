//! The split: which branches make up a volume.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::policy::{FsType, Policy};
use super::pool::PoolView;
use super::volume::VolumeMode;
use super::{Bytes, NodeName, PoolName};

/// What a branch is on its pool's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum BranchFormat {
    /// A file with its own filesystem (or raw, for block volumes), attached by a loop device.
    Image,
    /// A plain directory.
    Directory,
}

/// One branch of a plan, and of a `VolumeSplit`'s spec.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannedBranch {
    /// Number of the branch in its volume; never used twice.
    pub index: u32,
    /// Node that holds it.
    pub node: NodeName,
    /// Pool of that node.
    pub pool: PoolName,
    /// What it takes of the pool.
    pub size: Bytes,
    /// What of it files can use: `size` less its filesystem's own needs.
    pub usable: Bytes,
    /// What it is on the disk.
    pub format: BranchFormat,
    /// Filesystem of an image; absent for directories and block volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_type: Option<FsType>,
}

/// What is to be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Usable bytes that the volume must have at least.
    pub size: Bytes,
    /// Usable bytes that it may have at most.
    pub limit: Option<Bytes>,
    /// Files or block.
    pub mode: VolumeMode,
    /// Node that will use it, where known.
    pub consumer: Option<NodeName>,
    /// Nodes that may use it (accessible topology); empty: any.
    pub topology: Vec<NodeName>,
}

/// A feasible split.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Usable bytes: the sum of the branches' `usable`, at least the requested size.
    pub capacity: Bytes,
    /// The branches, numbered from zero in the order the union has them.
    pub branches: Vec<PlannedBranch>,
}

/// Why a pool does not take part, or what it could give.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolVerdict {
    /// The node.
    pub node: NodeName,
    /// The pool.
    pub pool: PoolName,
    /// What it has.
    pub allocatable: Bytes,
    /// Usable bytes that it could give to this volume; zero where it does not qualify.
    pub usable: Bytes,
    /// Why it gives nothing, or not all; a sentence for people.
    pub reason: String,
}

/// No split fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Infeasible {
    /// Usable bytes that were asked for.
    pub requested: Bytes,
    /// Usable bytes of the largest volume that would work now under the same policy.
    pub largest: Bytes,
    /// What stands in the way, in one sentence.
    pub reason: String,
    /// Every pool, in a stable order.
    pub pools: Vec<PoolVerdict>,
}

/// Splits `request` over `pools` under `policy`.
///
/// # Errors
/// [`Infeasible`] where no plan exists under the policy.
pub fn plan(request: &Request, policy: &Policy, pools: &[PoolView]) -> Result<Plan, Infeasible> {
    let _ = (request, policy, pools);
    Err(Infeasible {
        requested: request.size,
        largest: Bytes::ZERO,
        reason: String::new(),
        pools: Vec::new(),
    })
}
