//! What is to be done for one volume now: pure, from its object, its branches and the room there is.
//!
//! Each answer is one set of writes that may be done in any order or not at all: after each of them, whichever were
//! done, the next decision goes on from there. The order of things lies in the answers: a plan is written alone, before
//! the objects of its branches; a replaced branch's object goes after the plan no longer names it; the finalizer of the
//! volume goes after its last branch.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::index::PoolKey;
use super::planning::{missing, plan_rest};
use super::status::{self, Standing};
use crate::domain::policy::Policy;
use crate::domain::pool::PoolView;
use crate::domain::split::{Infeasible, PlannedBranch};
use crate::store::object::{
    Branch, BranchPhase, BranchSpec, BranchStatus, FINALIZER, LABEL_NODE, LABEL_VOLUME, Meta, Version,
    VolumeSplit, VolumeSplitStatus, condition, pending,
};

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// The planned branches and the next index, in one write of the volume.
    SetPlan { branches: Vec<PlannedBranch>, next_index: u32 },
    /// Makes a branch object, unless there is one.
    CreateBranch(Box<Branch>),
    /// Asks for a branch to go; with a version, only if it is still as it was seen.
    DeleteBranch { name: String, version: Option<Version> },
    /// Writes the volume's status.
    SetStatus(VolumeSplitStatus),
    /// Lets the volume go, after having made sure that no branch of it is left.
    RemoveFinalizer,
}

/// What is to be done, and what came out on the way.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) actions: Vec<Action>,
    /// Whether the planner was asked, and what it said.
    pub(super) planned: Option<bool>,
    /// Pools that refused a branch of the plan that is replaced now.
    pub(super) refused_by: Vec<PoolKey>,
    /// The volume waits for room.
    pub(super) waits: bool,
}

/// Where a volume's branches can go.
pub(super) struct Room<'a> {
    /// All pools, with what can be promised of them.
    pub(super) pools: &'a dyn Fn() -> Vec<PoolView>,
    /// Pools that refused a branch of this volume lately.
    pub(super) excluded: &'a [PoolKey],
}

/// Decides.
pub(super) fn decide(split: &VolumeSplit, branches: &[&Branch], room: &Room<'_>, now: Timestamp) -> Decision {
    if split.meta.deleting.is_some() {
        return Decision { actions: removal(split, branches), ..Decision::default() };
    }
    // Once complete, a volume keeps its plan: files may lie in each of its branches.
    let was_complete =
        condition(&split.status.conditions, "Pending").is_some_and(|c| c.reason == pending::BOUND);
    let objects: BTreeMap<u32, &Branch> = branches.iter().map(|b| (b.spec.index, *b)).collect();
    let is_refused = |b: &PlannedBranch| {
        let object = objects.get(&b.index);
        !was_complete && object.is_some_and(|object| object.status.phase == BranchPhase::Refused)
    };
    let (refused, kept): (Vec<_>, Vec<_>) = split.spec.branches.iter().cloned().partition(is_refused);
    let policy = Policy::parse(&split.spec.parameters);
    let mut decision = Decision::default();
    let mut obstacle = None;
    if !was_complete && (!missing(split, &kept).is_zero() || kept.is_empty()) {
        let refused_by = refused.iter().map(|b| (b.node.clone(), b.pool.clone()));
        decision.refused_by = refused_by.collect();
        match plan(split, &policy, &kept, room, &decision.refused_by) {
            Ok(new) => {
                decision.planned = Some(true);
                let next_index =
                    new.last().map_or(split.spec.next_index, |last| last.index.saturating_add(1));
                let branches = kept.into_iter().chain(new).collect();
                decision.actions.push(Action::SetPlan { branches, next_index });
                return decision;
            }
            Err(infeasible) => {
                decision.planned = Some(false);
                decision.waits = true;
                obstacle = Some(infeasible);
            }
        }
    }
    if !refused.is_empty() {
        // Nothing replaces them, or nothing needs to.
        let next_index = split.spec.next_index;
        decision.actions.push(Action::SetPlan { branches: kept, next_index });
        return decision;
    }
    // A complete volume whose branch object is gone has lost files. A new, empty branch would hide that.
    if let Ok(policy) = &policy
        && !was_complete
    {
        let absent = split.spec.branches.iter().filter(|b| !objects.contains_key(&b.index));
        let made = absent.map(|b| Action::CreateBranch(Box::new(branch_object(split, b, policy))));
        decision.actions.extend(made);
    }
    decision.actions.extend(strays(split, branches));
    let standing = Standing { split, objects: &objects, was_complete, obstacle: obstacle.as_ref() };
    let wanted = status::status(&standing, now);
    if wanted != split.status {
        decision.actions.push(Action::SetStatus(wanted));
    }
    decision
}

fn plan(
    split: &VolumeSplit,
    policy: &Result<Policy, Vec<crate::domain::policy::ParamError>>,
    kept: &[PlannedBranch],
    room: &Room<'_>,
    refused_by: &[PoolKey],
) -> Result<Vec<PlannedBranch>, Infeasible> {
    let policy = policy.as_ref().map_err(|faults| {
        let faults: Vec<_> = faults.iter().map(ToString::to_string).collect();
        Infeasible {
            requested: split.spec.capacity,
            largest: crate::domain::Bytes::ZERO,
            reason: format!("its parameters are not valid: {}", faults.join("; ")),
            pools: Vec::new(),
        }
    })?;
    let left_out = |view: &PoolView| {
        let is = |(node, pool): &PoolKey| *node == view.node && *pool == view.pool.name;
        room.excluded.iter().chain(refused_by).any(is)
    };
    let (out, pools): (Vec<_>, Vec<_>) = (room.pools)().into_iter().partition(left_out);
    plan_rest(split, policy, kept, &pools).map_err(|mut infeasible| {
        if !out.is_empty() {
            let names: Vec<_> = out.iter().map(|v| format!("{}/{}", v.node, v.pool.name)).collect();
            infeasible.reason = format!(
                "{}; left out for now, because it refused a branch of this volume: {}",
                infeasible.reason,
                names.join(", ")
            );
        }
        infeasible
    })
}

/// A volume on its way out: not while it is attached somewhere.
fn removal(split: &VolumeSplit, branches: &[&Branch]) -> Vec<Action> {
    if !split.spec.attached.is_empty() || !split.meta.finalizers.iter().any(|f| f == FINALIZER) {
        return Vec::new();
    }
    if branches.is_empty() {
        return vec![Action::RemoveFinalizer];
    }
    let there = branches.iter().filter(|b| b.meta.deleting.is_none());
    there.map(|b| Action::DeleteBranch { name: b.meta.name.clone(), version: None }).collect()
}

/// Branches that the plan does not name, and that never held a file: left from an earlier plan. Others are kept: a
/// branch with files goes with its volume only.
fn strays(split: &VolumeSplit, branches: &[&Branch]) -> Vec<Action> {
    let planned = |b: &Branch| split.spec.branches.iter().any(|p| p.index == b.spec.index);
    branches
        .iter()
        .filter(|b| matches!(b.status.phase, BranchPhase::Pending | BranchPhase::Refused))
        .filter(|b| b.meta.deleting.is_none() && !planned(b))
        .map(|b| Action::DeleteBranch { name: b.meta.name.clone(), version: Some(b.meta.version.clone()) })
        .collect()
}

fn branch_object(split: &VolumeSplit, planned: &PlannedBranch, policy: &Policy) -> Branch {
    let id = split.spec.volume.branch(planned.index);
    let mut meta = Meta::with_finalizer(id.to_string());
    meta.labels.insert(LABEL_NODE.to_owned(), planned.node.to_string());
    meta.labels.insert(LABEL_VOLUME.to_owned(), split.spec.volume.to_string());
    Branch {
        meta,
        spec: BranchSpec {
            id,
            volume: split.spec.volume.clone(),
            index: planned.index,
            node: planned.node.clone(),
            pool: planned.pool.clone(),
            size: planned.size,
            usable: planned.usable,
            format: planned.format,
            fs_type: planned.fs_type,
            thin: policy.thin,
            accept_unenforced: policy.accept_unenforced,
        },
        status: BranchStatus::default(),
    }
}
