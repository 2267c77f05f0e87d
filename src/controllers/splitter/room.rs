//! Where branches can go: the pools, and the nodes that can be expected to act.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::index::PoolKey;
use crate::domain::NodeName;
use crate::domain::pool::PoolView;
use crate::domain::reach::{Network, NodeReach};

/// A node that published nothing for this long has no agent that runs: three of its heartbeats, and far more than clocks
/// of a cluster differ by.
pub(in crate::controllers) const SILENCE: Duration = Duration::from_secs(15 * 60);

/// A branch that was not bound for this long after it was asked for, because its node fails to make it or is silent, is
/// planned anew where another place exists: far more than the slowest disk takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(5 * 60);

/// A node with its pools, and what can still be promised of each.
#[derive(Clone, Debug, Default)]
pub(in crate::controllers) struct NodeRoom {
    /// As the node lists them.
    pub(in crate::controllers) pools: Vec<PoolView>,
    /// When the node published last; `None` where that is not known.
    pub(in crate::controllers) heartbeat: Option<Timestamp>,
    /// What it can carry between itself and others; `None`: nothing.
    pub(in crate::controllers) reach: Option<NodeReach>,
}

/// All nodes, by name: the order in which the planner is fastest.
pub(super) type Nodes = BTreeMap<NodeName, NodeRoom>;

/// Where a volume's branches can go.
pub(super) struct Room<'a> {
    /// All nodes.
    pub(super) nodes: &'a Nodes,
    /// What they can carry between each other.
    pub(super) network: &'a Network,
    /// Pools that failed to hold a branch of this volume lately.
    pub(super) excluded: &'a [PoolKey],
}

impl Room<'_> {
    /// Whether the node published nothing for so long that its agent cannot run.
    pub(in crate::controllers) fn is_silent(&self, node: &NodeName, now: Timestamp) -> bool {
        is_silent(self.heartbeat(node), now)
    }

    /// When the node will be taken for silent, if it publishes nothing more.
    pub(super) fn silent_from(&self, node: &NodeName) -> Option<Timestamp> {
        silent_from(self.heartbeat(node))
    }

    fn heartbeat(&self, node: &NodeName) -> Option<Timestamp> {
        self.nodes.get(node)?.heartbeat
    }
}

/// When a node that published last at `heartbeat` will be taken for silent, if it publishes nothing more.
pub(in crate::controllers) fn silent_from(heartbeat: Option<Timestamp>) -> Option<Timestamp> {
    after(heartbeat?, SILENCE)
}

/// Whether a node that published last at `heartbeat` has been silent for too long. One whose heartbeat is not known is
/// not.
pub(in crate::controllers) fn is_silent(heartbeat: Option<Timestamp>, now: Timestamp) -> bool {
    silent_from(heartbeat).is_some_and(|end| end <= now)
}

/// `at` and `wait` later; `None` beyond the end of time.
pub(super) fn after(at: Timestamp, wait: Duration) -> Option<Timestamp> {
    at.checked_add(SignedDuration::try_from(wait).ok()?).ok()
}
