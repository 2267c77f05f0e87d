//! From a volume's object to the planner and back.

use jiff::Timestamp;

use super::index::PoolKey;
use super::room::{NodeRoom, Room, is_silent};
use crate::domain::policy::{Placement, Policy};
use crate::domain::pool::PoolView;
use crate::domain::split::{Infeasible, PlannedBranch, Reach, Request, Sharing, plan_within};
use crate::domain::{Bytes, NodeName};
use crate::store::object::VolumeSplit;

/// Silent nodes named in a message.
const MAX_NAMED: usize = 5;

/// What the volume's plan lacks of its capacity, given the branches that stay.
pub(super) fn missing(split: &VolumeSplit, kept: &[PlannedBranch]) -> Bytes {
    split.spec.capacity.saturating_sub(usable(kept))
}

/// Usable bytes of these branches together.
pub(super) fn usable(branches: &[PlannedBranch]) -> Bytes {
    branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.usable))
}

/// Plans what the volume lacks beside the branches that stay, not in `failed` pools; numbered from the volume's next
/// index on.
pub(super) fn plan_rest(
    split: &VolumeSplit,
    policy: &Policy,
    kept: &[PlannedBranch],
    room: &Room<'_>,
    failed: &[PoolKey],
    now: Timestamp,
) -> Result<Vec<PlannedBranch>, Infeasible> {
    let spec = &split.spec;
    let mut policy = policy.clone();
    let mut consumer = spec.consumer.clone();
    let sharing = Sharing::of(&spec.access_modes);
    // A pod's own volume is gone before the pod could run elsewhere. What was begun for several nodes and lacks something is
    // completed where it is, or else planned anew as a whole.
    let on_one_node = spec.ephemeral || (sharing != Sharing::Exclusive && !kept.is_empty());
    let reach = if on_one_node { Reach::OneNode } else { Reach::AnyNode };
    if let Some(first) = kept.first() {
        let count = u32::try_from(kept.len()).unwrap_or(u32::MAX);
        if policy.max_branches <= count {
            return Err(Infeasible {
                requested: spec.capacity,
                largest: usable(kept),
                reason: format!(
                    "a branch was refused and the other {count} are all that maxBranches allows: raise it, or delete \
                     the volume and make it anew"
                ),
                pools: Vec::new(),
            });
        }
        policy.max_branches -= count;
        policy.min_branches = policy.min_branches.saturating_sub(count).max(1);
        // All branches must be in reach of one node at least. The others were in reach of whoever may use the volume.
        consumer.get_or_insert_with(|| first.node.clone());
    }
    let request = Request {
        size: missing(split, kept),
        limit: spec.limit.map(|limit| limit.saturating_sub(usable(kept))),
        mode: spec.volume_mode,
        consumer,
        topology: spec.topology.clone(),
        reach,
        sharing,
    };
    let left_out = LeftOut { room, failed, consumer: spec.consumer.as_ref(), now };
    // Most volumes whose node is known fit there, and go there first. All pools are looked at where they do not, and to tell
    // why nothing fits.
    let alone = reach == Reach::OneNode || policy.placement == Placement::Local;
    let first_there = policy.placement == Placement::PreferLocal && sharing == Sharing::Exclusive;
    if (alone || first_there)
        && let Some(node) = &request.consumer
        && let own = left_out.filter(room.nodes.get_key_value(node))
        && let Ok(planned) = plan_within(&request, &policy, own, room.network)
    {
        return Ok(numbered(spec.next_index, planned.branches));
    }
    match plan_within(&request, &policy, left_out.filter(room.nodes), room.network) {
        Ok(planned) => Ok(numbered(spec.next_index, planned.branches)),
        Err(mut infeasible) => {
            infeasible.reason.push_str(&left_out.told());
            Err(infeasible)
        }
    }
}

fn numbered(next_index: u32, branches: Vec<PlannedBranch>) -> Vec<PlannedBranch> {
    let number = |(branch, offset): (PlannedBranch, u32)| PlannedBranch {
        index: next_index.saturating_add(offset),
        ..branch
    };
    branches.into_iter().zip(0..).map(number).collect()
}

/// Pools that are no place for a branch of a volume now, whatever room they have.
struct LeftOut<'a> {
    room: &'a Room<'a>,
    failed: &'a [PoolKey],
    /// A node that uses the volume is one that lives, whatever its agent says.
    consumer: Option<&'a NodeName>,
    now: Timestamp,
}

impl<'a> LeftOut<'a> {
    /// The pools of these nodes that are not left out.
    fn filter<'v>(
        &'a self,
        nodes: impl IntoIterator<Item = (&'v NodeName, &'v NodeRoom)>,
    ) -> impl Iterator<Item = &'v PoolView> {
        let speaking = nodes.into_iter().filter(|(name, node)| !self.silent(name, node));
        speaking.flat_map(|(_, node)| &node.pools).filter(|view| !self.failed(view))
    }

    fn failed(&self, view: &PoolView) -> bool {
        let is = |(node, pool): &PoolKey| *node == view.node && *pool == view.pool.name;
        self.room.excluded.iter().chain(self.failed).any(is)
    }

    fn silent(&self, name: &NodeName, node: &NodeRoom) -> bool {
        is_silent(node.heartbeat, self.now) && self.consumer != Some(name)
    }

    /// Which they are, as the end of a sentence; empty where there are none.
    fn told(&self) -> String {
        let mut told = String::new();
        let failed: Vec<String> = self
            .room
            .nodes
            .values()
            .flat_map(|node| &node.pools)
            .filter(|view| self.failed(view))
            .map(|v| format!("{}/{}", v.node, v.pool.name))
            .collect();
        if !failed.is_empty() {
            told.push_str(
                "; left out for now, because it refused or failed to make a branch of this volume: ",
            );
            told.push_str(&failed.join(", "));
        }
        let silent = self.room.nodes.iter().filter(|(name, node)| self.silent(name, node));
        let silent: Vec<&str> = silent.map(|(name, _)| name.as_str()).collect();
        if !silent.is_empty() {
            told.push_str("; left out, because its agent does not report: node ");
            told.push_str(&silent.iter().take(MAX_NAMED).copied().collect::<Vec<_>>().join(", "));
            if let Some(more) = silent.len().checked_sub(MAX_NAMED).filter(|more| *more > 0) {
                told.push_str(&format!(" and {more} more"));
            }
        }
        told
    }
}
