//! From a volume's object to the planner and back.

use crate::domain::Bytes;
use crate::domain::policy::{Placement, Policy};
use crate::domain::pool::PoolView;
use crate::domain::split::{Infeasible, PlannedBranch, Request, plan};
use crate::store::object::VolumeSplit;

/// What the volume's plan lacks of its capacity, given the branches that stay.
pub(super) fn missing(split: &VolumeSplit, kept: &[PlannedBranch]) -> Bytes {
    split.spec.capacity.saturating_sub(usable(kept))
}

/// Usable bytes of these branches together.
pub(super) fn usable(branches: &[PlannedBranch]) -> Bytes {
    branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.usable))
}

/// Plans what the volume lacks beside the branches that stay; numbered from the volume's next index on.
pub(super) fn plan_rest(
    split: &VolumeSplit,
    policy: &Policy,
    kept: &[PlannedBranch],
    pools: &[PoolView],
) -> Result<Vec<PlannedBranch>, Infeasible> {
    let spec = &split.spec;
    let mut policy = policy.clone();
    let mut consumer = spec.consumer.clone();
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
        if policy.placement == Placement::Local {
            consumer.get_or_insert_with(|| first.node.clone());
        }
    }
    let request = Request {
        size: missing(split, kept),
        limit: spec.limit.map(|limit| limit.saturating_sub(usable(kept))),
        mode: spec.volume_mode,
        consumer,
        topology: spec.topology.clone(),
    };
    let planned = plan(&request, &policy, pools)?;
    let number = |(branch, offset): (PlannedBranch, u32)| PlannedBranch {
        index: spec.next_index.saturating_add(offset),
        ..branch
    };
    Ok(planned.branches.into_iter().zip(0..).map(number).collect())
}
