//! How a volume stands, from its plan and its branches.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::planning::usable;
use crate::domain::NodeName;
use crate::domain::split::{Infeasible, PlannedBranch};
use crate::store::object::{Branch, BranchPhase, VolumeSplit, VolumeSplitStatus, pending, set_condition};

/// What the status follows from.
pub(super) struct Standing<'a> {
    pub(super) split: &'a VolumeSplit,
    /// Branch objects of the volume, by index.
    pub(super) objects: &'a BTreeMap<u32, &'a Branch>,
    /// All its branches were bound once.
    pub(super) was_complete: bool,
    /// Why the plan is not complete.
    pub(super) obstacle: Option<&'a Infeasible>,
    /// Whether a node's agent does not report.
    pub(super) silent: &'a dyn Fn(&NodeName) -> bool,
}

/// A branch of the plan, as it is.
enum Found<'a> {
    Bound,
    Progressing,
    Failed(&'a Branch),
    /// Its files are missing: it says so, or its object is gone from a volume that was complete.
    Lost(Option<&'a Branch>),
}

impl<'a> Standing<'a> {
    fn find(&self, planned: &PlannedBranch) -> Found<'a> {
        let Some(branch) = self.objects.get(&planned.index).copied() else {
            return if self.was_complete { Found::Lost(None) } else { Found::Progressing };
        };
        match branch.status.phase {
            // On its way out: whoever asked for that, it must not be counted on.
            _ if branch.meta.deleting.is_some() && self.was_complete => Found::Lost(Some(branch)),
            _ if branch.meta.deleting.is_some() => Found::Progressing,
            BranchPhase::Bound => Found::Bound,
            BranchPhase::Pending => Found::Progressing,
            BranchPhase::Refused | BranchPhase::Failing => Found::Failed(branch),
            BranchPhase::Lost => Found::Lost(Some(branch)),
        }
    }
}

/// The status that the volume should have; equal to the one it has when nothing changed.
pub(super) fn status(standing: &Standing<'_>, now: Timestamp) -> VolumeSplitStatus {
    let split = standing.split;
    let (mut bound, mut failed, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    let mut silent = BTreeSet::new();
    for planned in &split.spec.branches {
        let id = split.spec.volume.branch(planned.index);
        let place = format!("branch {id} on {}/{}", planned.node, planned.pool);
        match standing.find(planned) {
            Found::Bound => bound.push(planned.clone()),
            Found::Progressing => {
                if (standing.silent)(&planned.node) {
                    silent.insert(&planned.node);
                }
            }
            Found::Failed(branch) => failed.push(format!("{place}: {}", branch.status.reason)),
            Found::Lost(Some(branch)) if branch.meta.deleting.is_none() => {
                lost.push(format!("{place}: {}", branch.status.reason));
            }
            Found::Lost(Some(_)) => lost.push(format!("{place} is being deleted, and not by this volume")),
            Found::Lost(None) => lost.push(format!("{place}: its Branch object was deleted")),
        }
    }
    let all = split.spec.branches.len();
    let complete = standing.obstacle.is_none() && all > 0 && bound.len() == all;
    let was_complete = standing.was_complete || complete;
    let mut progress = format!("{} of {all} branches are bound", bound.len());
    for node in silent {
        progress.push_str(&format!("; node {node} has not reported for long: see whether its agent runs"));
    }

    let mut status = split.status.clone();
    status.capacity = usable(&bound);
    status.replicas = u32::try_from(all).unwrap_or(u32::MAX);
    status.bound_replicas = u32::try_from(bound.len()).unwrap_or(u32::MAX);
    status.access_modes = if was_complete { split.spec.access_modes.clone() } else { Vec::new() };
    status.largest = standing.obstacle.map(|infeasible| infeasible.largest);

    let mut set = |kind: &str, holds: bool, reason: &str, message: &str| {
        set_condition(&mut status.conditions, now, kind, holds, reason, message);
    };
    if complete {
        set("Ready", true, "Bound", &progress);
    } else if !lost.is_empty() {
        set("Ready", false, "BranchLost", &lost.join("; "));
    } else {
        let reason = if standing.obstacle.is_some() { pending::INFEASIBLE } else { pending::BINDING };
        set("Ready", false, reason, &progress);
    }
    match standing.obstacle {
        // A complete volume is not planned any more, so this does not take back that it was.
        Some(infeasible) if !was_complete => set("Pending", true, pending::INFEASIBLE, &explain(infeasible)),
        _ if was_complete => set("Pending", false, pending::BOUND, "all branches were made"),
        _ => set("Pending", true, pending::BINDING, &progress),
    }
    let progressing = !was_complete && standing.obstacle.is_none();
    set("ReplicaProgressing", progressing, if progressing { "Binding" } else { "Settled" }, &progress);
    let failure = !failed.is_empty();
    set("ReplicaFailure", failure, if failure { "BranchFailed" } else { "None" }, &failed.join("; "));
    let degraded = !lost.is_empty();
    set("Degraded", degraded, if degraded { "BranchLost" } else { "None" }, &lost.join("; "));
    status
}

/// The planner's reason, and what each pool had to say, in one sentence an operator can act on.
fn explain(infeasible: &Infeasible) -> String {
    let mut text = infeasible.reason.clone();
    // What could give something is of more use to the reader than what could not.
    let mut verdicts: Vec<_> = infeasible.pools.iter().collect();
    verdicts.sort_by_key(|verdict| verdict.usable.is_zero());
    for verdict in verdicts.into_iter().take(MAX_VERDICTS) {
        text.push_str(&format!("; {}/{}: {}", verdict.node, verdict.pool, verdict.reason));
    }
    if let Some(more) = infeasible.pools.len().checked_sub(MAX_VERDICTS).filter(|more| *more > 0) {
        text.push_str(&format!("; and {more} pools more: ask `union-csi plan` for all"));
    }
    text
}

/// Pools named in a condition's message: an object in Kubernetes holds 1.5 MiB, and a person reads a screen.
const MAX_VERDICTS: usize = 20;
