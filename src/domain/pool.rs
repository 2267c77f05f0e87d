//! Pools: directories on mounted filesystems that the administrator gave to Union CSI.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::policy::FsType;
use super::{Bytes, NodeName, PoolName};

/// The kind of disk under a pool.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Media {
    /// NVMe solid-state disk.
    Nvme,
    /// Other solid-state disk.
    Ssd,
    /// Rotating disk.
    Hdd,
    /// Not known.
    #[default]
    Unknown,
}

/// Whether a pool can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum PoolState {
    /// Mounted, recognised and writable.
    Ready,
    /// Its filesystem is not mounted, or is another than the recorded one. Never written to.
    Absent,
    /// It takes no writes, as mounted or after an error of its disk: its branches can be read, none can be made.
    ReadOnly,
}

/// How a pool can enforce the size of a `directory` branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Enforcement {
    /// XFS or ext4 project quota, accounting and enforcing (mount option `prjquota`).
    ProjectQuota,
    /// btrfs qgroup limit.
    Qgroup,
    /// It cannot: a directory branch could outgrow its size.
    None,
}

/// What one pool is and has; measured by its node, published in the status of its `StorageNode`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolReport {
    /// Unique on its node.
    pub name: PoolName,
    /// Directory on the host.
    #[serde(default)]
    pub path: String,
    /// Whether it can be used.
    #[serde(default = "ready")]
    pub state: PoolState,
    /// Why it is not `Ready`, and what to do; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Labels from the configuration, for `poolSelector`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Kind of disk.
    #[serde(default)]
    pub media: Media,
    /// Names the filesystem that holds the pool (its UUID, else major:minor). Pools of one node with the same device
    /// share its space, which is counted once. Empty: shares with none.
    #[serde(default)]
    pub device: String,
    /// Filesystem type of the pool, as in `/proc/mounts`.
    #[serde(default)]
    pub filesystem: String,
    /// How a directory branch's size can be enforced here.
    #[serde(default = "no_enforcement")]
    pub enforcement: Enforcement,
    /// Why `enforcement` is `None` and what would change it; empty otherwise.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub enforcement_message: String,
    /// Filesystems that image branches can have here (their mkfs exists and the kernel can mount them). Empty: this pool
    /// cannot hold image branches.
    #[serde(default = "default_image_filesystems")]
    pub image_filesystems: Vec<FsType>,
    /// Size of the filesystem (statvfs `f_blocks`).
    pub total: Bytes,
    /// What is free for writing (statvfs `f_bavail`).
    pub free: Bytes,
    /// What is kept free: what the administrator says, at least what the pool's own directories need (1/256 of the
    /// filesystem, at most 16 MiB).
    #[serde(default)]
    pub reserve: Bytes,
    /// Sum of the sizes of the branches on this device.
    #[serde(default)]
    pub promised: Bytes,
    /// Sum over the branches on this device of what they already occupy, none counted with more than its size. `free` and
    /// this figure belong to one moment.
    #[serde(default)]
    pub occupied: Bytes,
    /// What a new branch could have: see [`allocatable`]. Absent in a described cluster: computed from the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocatable: Option<Bytes>,
}

const fn ready() -> PoolState {
    PoolState::Ready
}

const fn no_enforcement() -> Enforcement {
    Enforcement::None
}

fn default_image_filesystems() -> Vec<FsType> {
    vec![FsType::Ext4]
}

impl PoolReport {
    /// What a new branch could have here: the published figure, else computed from the others.
    #[must_use]
    pub fn allocatable(&self) -> Bytes {
        self.allocatable
            .unwrap_or_else(|| allocatable(self.total, self.free, self.reserve, self.promised, self.occupied))
    }
}

/// A pool with the node it is on: an element of `GET /v1/pools`, and the planner's input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolView {
    /// The node.
    pub node: NodeName,
    /// The node's labels, for `nodeSelector`; one copy for all its pools.
    #[serde(default)]
    pub node_labels: Arc<BTreeMap<String, String>>,
    /// The pool.
    #[serde(flatten)]
    pub pool: PoolReport,
}

impl PoolReport {
    /// True where both pools, of one node, have the same space: they are on one filesystem, or, where that is not told, are
    /// one pool.
    #[must_use]
    pub fn shares_space_with(&self, other: &Self) -> bool {
        if self.device.is_empty() || other.device.is_empty() {
            self.name == other.name
        } else {
            self.device == other.device
        }
    }
}

impl PoolView {
    /// Names the space that the pool is in, in the whole cluster: node and device, or node and pool where it shares with
    /// none. Pools with the same key are counted once.
    #[must_use]
    pub fn space(&self) -> (&NodeName, &str) {
        let pool = &self.pool;
        (&self.node, if pool.device.is_empty() { pool.name.as_str() } else { &pool.device })
    }
}

/// The one formula for what can still be promised:
/// `min(total - reserve - promised, free - reserve - (promised - occupied))`, never below zero.
///
/// The first term bounds by the size of the disk, the second by what others left free on it. `promised - occupied` is
/// what existing branches may still come to write.
#[must_use]
pub fn allocatable(total: Bytes, free: Bytes, reserve: Bytes, promised: Bytes, occupied: Bytes) -> Bytes {
    let by_size = total.saturating_sub(reserve).saturating_sub(promised);
    let by_free = free.saturating_sub(reserve).saturating_sub(promised.saturating_sub(occupied));
    by_size.min(by_free)
}

/// What to keep out of our reach on a pool's filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// An amount.
    Bytes(Bytes),
    /// A share of the filesystem's size, in percent, 0 to 100.
    Percent(u8),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_others_left_free_and_what_is_promised_both_bound_the_pool() {
        let gib = Bytes::gib;
        // An empty disk, a disk that others filled, a promise half written, a promise beyond what is left.
        assert_eq!(allocatable(gib(100), gib(90), gib(5), gib(0), gib(0)), gib(85));
        assert_eq!(allocatable(gib(100), gib(20), gib(5), gib(0), gib(0)), gib(15));
        assert_eq!(allocatable(gib(100), gib(70), gib(5), gib(40), gib(20)), gib(45));
        assert_eq!(allocatable(gib(100), gib(10), gib(5), gib(40), gib(0)), gib(0));
    }

    proptest! {
        #[test]
        fn promises_kept_in_full_never_reach_into_the_reserve(
            total in 0_u64..1000, free in 0_u64..1000, reserve in 0_u64..200, promised in 0_u64..500, occupied in 0_u64..500,
        ) {
            let [total, free, reserve, promised, occupied] = [total, free, reserve, promised, occupied].map(Bytes::new);
            let new = allocatable(total, free, reserve, promised, occupied);
            if new.is_zero() {
                return Ok(());
            }
            let yet_to_come = promised.saturating_sub(occupied).saturating_add(new);
            prop_assert!(free.saturating_sub(yet_to_come) >= reserve);
            prop_assert!(total.saturating_sub(promised).saturating_sub(new) >= reserve);
        }
    }
}
