//! The split: which branches make up a volume.
//!
//! [`plan`] takes the pools that pass the filters of [`super::placement`], one per filesystem of a node, and chooses
//! among them by the policy's strategy. Rules that hold for every plan:
//!
//! - Branch sizes are multiples of the quantum, except that of one branch, which takes the rest and may use its pool to the
//!   last byte. The others are at least one quantum.
//! - The volume's capacity is what was asked for, to the byte. It is more only where the branch that takes the rest cannot
//!   be made as small as the rest, and nothing else works; never more than the limit. Images are multiples of 4 KiB.
//! - A volume is in a filesystem at most once: a second branch on the same disk buys nothing.
//! - All strategies accept the same requests; they differ in what they choose.
//! - How many nodes a volume may be on together is [`Reach`], and [`plan_within`] says which of them reach each other. A
//!   volume on one node goes to the consumer's, where that is known; else to the node where it takes the fewest branches and
//!   that keeps the most room, so that volumes spread.
//! - How many nodes may use it at once is [`Sharing`].
//!
//! The time grows with the number of pools, the branches' number aside: filters look at each pool once, and only the best
//! `maxBranches` pools of each format are sorted.

mod candidates;
mod fewest;
mod fill;
mod offer;
mod planner;
mod refusal;
mod shaped;
mod space;
mod within;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::policy::{FsType, Policy};
use super::pool::PoolView;
use super::reach::Network;
use super::volume::{AccessMode, VolumeMode};
use super::{Bytes, NodeName, PoolName};
pub use offer::Offer;
use planner::Planner;
use space::Real;
use within::Within;

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

/// Which nodes the branches of one volume may be on together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reach {
    /// All on one node: the consumer's, where it is known.
    OneNode,
    /// Any, as far as they reach each other.
    #[default]
    AnyNode,
}

/// How many nodes may use one volume at once, the fewest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Sharing {
    /// One.
    #[default]
    Exclusive,
    /// Several, all reading.
    ManyReaders,
    /// Several, of which some write.
    ManyWriters,
}

impl Sharing {
    /// What a volume must bear that is made for these modes.
    #[must_use]
    pub fn of(modes: &[AccessMode]) -> Self {
        let of = |mode: &AccessMode| match (mode.multi_node(), mode.reader_only()) {
            (false, _) => Self::Exclusive,
            (true, true) => Self::ManyReaders,
            (true, false) => Self::ManyWriters,
        };
        modes.iter().map(of).max().unwrap_or_default()
    }
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
    /// Which nodes its branches may be on together.
    pub reach: Reach,
    /// How many nodes may use it at once.
    pub sharing: Sharing,
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

/// What `GetCapacity` and CSIStorageCapacity tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// Usable bytes that all qualifying pools could give together, to several volumes.
    pub total: Bytes,
    /// Usable bytes of the largest volume that would work now; zero where none would.
    pub maximum_volume_size: Bytes,
    /// Usable bytes of the smallest volume that would get exactly what it asked for; zero where none would work.
    pub minimum_volume_size: Bytes,
}

/// Splits `request` over `pools` under `policy`; all nodes are taken to reach each other.
///
/// # Errors
/// [`Infeasible`] where no plan exists under the policy.
pub fn plan<'a>(
    request: &'a Request,
    policy: &'a Policy,
    pools: impl IntoIterator<Item = &'a PoolView>,
) -> Result<Plan, Infeasible> {
    Planner::new(&Real, request, policy, pools).plan()
}

/// Splits `request` over `pools` under `policy`, each branch where the node that will use the volume can reach it; while
/// that is not known, where a node that may become it can.
///
/// # Errors
/// [`Infeasible`] where no plan exists under the policy.
pub fn plan_within<'a>(
    request: &'a Request,
    policy: &'a Policy,
    pools: impl IntoIterator<Item = &'a PoolView>,
    network: &'a Network,
) -> Result<Plan, Infeasible> {
    let network = network.under(policy);
    Within::new(&Real, request, policy, pools.into_iter().collect(), &network).plan()
}

/// What there is for volumes like `request`, whatever its size, as [`plan_within`] plans them.
#[must_use]
pub fn capacity_within<'a>(
    request: &'a Request,
    policy: &'a Policy,
    pools: impl IntoIterator<Item = &'a PoolView>,
    network: &'a Network,
) -> Capacity {
    let network = network.under(policy);
    Within::new(&Real, request, policy, pools.into_iter().collect(), &network).capacity()
}

/// Usable bytes of the largest volume that [`plan`] would accept in place of `request.size`; zero where there is none.
#[must_use]
pub fn largest<'a>(
    request: &'a Request,
    policy: &'a Policy,
    pools: impl IntoIterator<Item = &'a PoolView>,
) -> Bytes {
    Planner::new(&Real, request, policy, pools).largest()
}

/// What there is for volumes like `request`, whatever its size; all nodes are taken to reach each other.
#[must_use]
pub fn capacity<'a>(
    request: &'a Request,
    policy: &'a Policy,
    pools: impl IntoIterator<Item = &'a PoolView>,
) -> Capacity {
    Planner::new(&Real, request, policy, pools).capacity()
}

#[cfg(test)]
mod tests;
