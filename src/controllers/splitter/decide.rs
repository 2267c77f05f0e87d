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

#[cfg(test)]
mod tests {
    use super::super::tests::{pool, split};
    use super::*;
    use crate::domain::Bytes;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn views() -> Vec<PoolView> {
        let view = |name| PoolView {
            node: "n1".parse().unwrap(),
            node_labels: BTreeMap::new(),
            pool: pool(name, 10),
        };
        vec![view("a"), view("b"), view("c")]
    }

    fn decided(split: &VolumeSplit, branches: &[&Branch]) -> Vec<Action> {
        decide(split, branches, &Room { pools: &views, excluded: &[] }, NOW).actions
    }

    /// Does what was decided, as the store would, until nothing is.
    fn settle(split: &mut VolumeSplit, branches: &mut Vec<Branch>) {
        for _ in 0..10 {
            let actions = decided(split, &branches.iter().collect::<Vec<_>>());
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::SetPlan { branches, next_index } => {
                        split.spec.branches = branches;
                        split.spec.next_index = next_index;
                    }
                    Action::CreateBranch(branch) => branches.push(*branch),
                    Action::DeleteBranch { name, .. } => branches.retain(|b| b.meta.name != name),
                    Action::SetStatus(status) => split.status = status,
                    Action::RemoveFinalizer => split.meta.finalizers.clear(),
                }
            }
        }
        panic!("it never comes to rest");
    }

    fn complete() -> (VolumeSplit, Vec<Branch>) {
        let (mut split, mut branches) = (split("v", 15), Vec::new());
        settle(&mut split, &mut branches);
        branches.iter_mut().for_each(|b| b.status.phase = BranchPhase::Bound);
        settle(&mut split, &mut branches);
        (split, branches)
    }

    #[test]
    fn the_plan_is_written_alone_and_before_any_branch() {
        let new = split("v", 15);
        let actions = decided(&new, &[]);
        let [Action::SetPlan { branches, next_index }] = actions.as_slice() else { panic!("{actions:?}") };
        assert_eq!((branches.len(), *next_index), (2, 2));
        assert!(usable_of(branches) >= Bytes::gib(15));
    }

    fn usable_of(branches: &[PlannedBranch]) -> Bytes {
        super::super::planning::usable(branches)
    }

    #[test]
    fn what_is_done_is_not_done_again() {
        let (split, branches) = complete();
        assert!(condition(&split.status.conditions, "Ready").unwrap().status);
        let later = Timestamp::from_second(1_000_000).unwrap();
        let room = Room { pools: &views, excluded: &[] };
        let decision = decide(&split, &branches.iter().collect::<Vec<_>>(), &room, later);
        assert_eq!(decision, Decision::default(), "time alone changes nothing");
    }

    #[test]
    fn a_refused_branch_is_replaced_in_one_write_and_then_goes() {
        let (mut split, mut branches) = (split("v", 15), Vec::new());
        settle(&mut split, &mut branches);
        let before = split.spec.branches.clone();
        branches[0].status.phase = BranchPhase::Refused;
        branches[1].status.phase = BranchPhase::Bound;
        let refs: Vec<_> = branches.iter().collect();
        let decision = decide(&split, &refs, &Room { pools: &views, excluded: &[] }, NOW);
        let [Action::SetPlan { branches: planned, next_index }] = decision.actions.as_slice() else {
            panic!("{decision:?}")
        };
        assert_eq!(decision.refused_by, [(before[0].node.clone(), before[0].pool.clone())]);
        assert_eq!(planned[0], before[1], "the bound one stays");
        assert!(planned[1..].iter().all(|b| b.index >= 2 && b.pool != before[0].pool), "{planned:?}");
        assert!(*next_index > 2);
        assert!(usable_of(planned) >= Bytes::gib(15));
        split.spec.branches = planned.clone();
        split.spec.next_index = *next_index;
        let name = branches[0].meta.name.clone();
        let actions = decided(&split, &branches.iter().collect::<Vec<_>>());
        assert!(
            actions
                .iter()
                .any(|a| matches!(a, Action::DeleteBranch { name: n, version: Some(_) } if *n == name))
        );
    }

    #[test]
    fn a_complete_volume_keeps_its_plan_whatever_its_branches_say() {
        for phase in [BranchPhase::Refused, BranchPhase::Lost, BranchPhase::Failing, BranchPhase::Pending] {
            let (split, mut branches) = complete();
            branches[0].status.phase = phase;
            let actions = decided(&split, &branches.iter().collect::<Vec<_>>());
            let [Action::SetStatus(status)] = actions.as_slice() else { panic!("{phase:?}: {actions:?}") };
            assert!(!condition(&status.conditions, "Ready").unwrap().status);
            assert_eq!(condition(&status.conditions, "Pending").unwrap().reason, pending::BOUND);
        }
        let (split, branches) = complete();
        let actions = decided(&split, &[&branches[0]]);
        assert!(matches!(actions.as_slice(), [Action::SetStatus(_)]), "no empty branch is made: {actions:?}");
    }

    #[test]
    fn a_branch_that_may_hold_files_goes_with_its_volume_only() {
        for phase in [BranchPhase::Bound, BranchPhase::Lost, BranchPhase::Failing] {
            let (split, mut branches) = complete();
            let mut other = branches[0].clone();
            other.spec.index = 77;
            other.meta.name = "v-77".to_owned();
            other.status.phase = phase;
            branches.push(other);
            assert_eq!(decided(&split, &branches.iter().collect::<Vec<_>>()), [], "{phase:?}");
        }
    }

    #[test]
    fn a_volume_goes_after_its_last_branch_and_not_while_attached() {
        let (mut split, branches) = complete();
        split.meta.deleting = Some(NOW);
        let refs: Vec<_> = branches.iter().collect();
        assert_eq!(decided(&split, &refs).len(), 2);
        assert_eq!(decided(&split, &[]), [Action::RemoveFinalizer]);
        let mut going = branches[0].clone();
        going.meta.deleting = Some(NOW);
        assert_eq!(decided(&split, &[&going]), [], "it is waited for");
        split.spec.attached = vec![crate::store::object::Attachment {
            node: "n1".parse().unwrap(),
            access_mode: crate::domain::volume::AccessMode::SingleNodeWriter,
            read_only: false,
            volume_attachment: None,
        }];
        assert_eq!(decided(&split, &refs), []);
        assert_eq!(decided(&split, &[]), []);
    }

    #[test]
    fn parameters_that_are_not_valid_are_said_and_nothing_is_made() {
        let mut odd = split("v", 1);
        odd.spec.parameters.insert("nonsense".to_owned(), "1".to_owned());
        let actions = decided(&odd, &[]);
        let [Action::SetStatus(status)] = actions.as_slice() else { panic!("{actions:?}") };
        let said = condition(&status.conditions, "Pending").unwrap();
        assert_eq!(said.reason, pending::INFEASIBLE);
        assert!(said.message.contains("nonsense"), "{}", said.message);
    }
}
