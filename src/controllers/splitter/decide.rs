//! What is to be done for one volume now: pure, from its object, its branches and the room there is.
//!
//! Each answer is one set of writes that may be done in any order or not at all: after each of them, whichever were
//! done, the next decision goes on from there. The order of things lies in the answers: a plan is written alone, before
//! the objects of its branches; a replaced branch's object goes after the plan no longer names it; the finalizer of the
//! volume goes after its last branch.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use super::index::PoolKey;
use super::planning::{missing, plan_rest};
use super::room::{PATIENCE, Room, after};
use super::status::{self, Standing};
use crate::domain::NodeName;
use crate::domain::policy::{ParamError, Policy};
use crate::domain::split::{BranchFormat, Infeasible, PlannedBranch};
use crate::store::object::{
    Branch, BranchPhase, BranchSpec, BranchStatus, FINALIZER, LABEL_EPHEMERAL, LABEL_NODE, LABEL_VOLUME,
    Meta, Version, VolumeSplit, VolumeSplitStatus, condition, label_value, pending,
};

/// What takes no longer than this needs no status on the way: several times what making branches takes.
const PASSING: Duration = Duration::from_secs(2);

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
    /// Pools that refused, or failed to make, a branch of the plan that is replaced now.
    pub(super) refused_by: Vec<PoolKey>,
    /// The volume waits for room.
    pub(super) waits: bool,
    /// When to decide again although nothing happened.
    pub(super) again: Option<Timestamp>,
}

/// Decides.
pub(super) fn decide(split: &VolumeSplit, branches: &[&Branch], room: &Room<'_>, now: Timestamp) -> Decision {
    if split.meta.deleting.is_some() {
        return Decision { actions: removal(split, branches), ..Decision::default() };
    }
    // Once complete, a volume keeps its plan.
    let was_complete = split.may_hold_files();
    let objects: BTreeMap<u32, &Branch> = branches.iter().map(|b| (b.spec.index, *b)).collect();
    let policy = Policy::parse(&split.spec.parameters);
    let mut decision = Decision::default();
    let mut obstacle = None;
    if !was_complete {
        let sorted = Sorted::new(split, &objects, room, now);
        decision.again = sorted.overdue_from;
        match sorted.replan(split, &policy, room, now) {
            Replan::Keep { waits } => decision.waits = waits,
            Replan::Write { branches, next_index, refused_by } => {
                decision.planned = (next_index != split.spec.next_index).then_some(true);
                decision.refused_by = refused_by;
                decision.actions.push(Action::SetPlan { branches, next_index });
                return decision;
            }
            Replan::Infeasible { infeasible, kept, refused_by } => {
                decision.planned = Some(false);
                decision.waits = true;
                decision.refused_by = refused_by;
                if kept.len() < split.spec.branches.len() {
                    // Nothing replaces what was refused.
                    let next_index = split.spec.next_index;
                    decision.actions.push(Action::SetPlan { branches: kept, next_index });
                    return decision;
                }
                obstacle = Some(infeasible);
            }
        }
    }
    // A complete volume whose branch object is gone has lost files. A new, empty branch would hide that.
    if let Ok(policy) = &policy
        && !was_complete
    {
        let absent = split.spec.branches.iter().filter(|b| !objects.contains_key(&b.index));
        let made = absent.map(|b| Action::CreateBranch(Box::new(branch_object(split, b, policy))));
        decision.actions.extend(made);
    }
    decision.actions.extend(strays(split, branches, was_complete));
    let silent = |node: &NodeName| room.is_silent(node, now);
    let standing =
        Standing { split, objects: &objects, was_complete, obstacle: obstacle.as_ref(), silent: &silent };
    let wanted = status::status(&standing, now);
    if wanted != split.status {
        match passing_until(split, &wanted, now) {
            Some(end) => decision.again = Some(decision.again.map_or(end, |again| again.min(end))),
            None => decision.actions.push(Action::SetStatus(wanted)),
        }
    }
    decision
}

/// The first status of a volume whose branches are being made says nothing that its next one does not say better, a moment
/// later: until when it is not written.
fn passing_until(split: &VolumeSplit, wanted: &VolumeSplitStatus, now: Timestamp) -> Option<Timestamp> {
    let binding =
        |kind: &str, reason: &str| condition(&wanted.conditions, kind).is_some_and(|c| c.reason == reason);
    if split.status != VolumeSplitStatus::default()
        || !binding("Pending", pending::BINDING)
        || !binding("ReplicaFailure", "None")
        || !binding("Degraded", "None")
    {
        return None;
    }
    // Where the API server's clock is ahead of this one, it is written at once.
    let created = split.meta.created.filter(|created| *created <= now)?;
    after(created, PASSING).filter(|end| now < *end)
}

/// The planned branches of a volume that never was complete, by how they are doing.
struct Sorted {
    /// Their nodes refused them.
    refused: Vec<PlannedBranch>,
    /// Their nodes fail to make them, or do not answer, for longer than one waits.
    overdue: Vec<PlannedBranch>,
    /// All others.
    others: Vec<PlannedBranch>,
    /// When the next of the others may become overdue.
    overdue_from: Option<Timestamp>,
}

/// What becomes of a plan.
enum Replan {
    /// It stays. It may wait for room all the same: for branches in place of some that do not come.
    Keep { waits: bool },
    /// This one takes its place.
    Write { branches: Vec<PlannedBranch>, next_index: u32, refused_by: Vec<PoolKey> },
    /// It lacks something, and nothing fits beside the branches that are kept.
    Infeasible { infeasible: Infeasible, kept: Vec<PlannedBranch>, refused_by: Vec<PoolKey> },
}

impl Sorted {
    fn new(split: &VolumeSplit, objects: &BTreeMap<u32, &Branch>, room: &Room<'_>, now: Timestamp) -> Self {
        let mut sorted =
            Self { refused: Vec::new(), overdue: Vec::new(), others: Vec::new(), overdue_from: None };
        for planned in &split.spec.branches {
            let group = match objects.get(&planned.index).copied() {
                Some(object) if object.status.phase == BranchPhase::Refused => &mut sorted.refused,
                Some(object) => match overdue_from(object, room) {
                    Some(at) if at <= now => &mut sorted.overdue,
                    Some(at) => {
                        sorted.overdue_from = Some(sorted.overdue_from.map_or(at, |first| first.min(at)));
                        &mut sorted.others
                    }
                    None => &mut sorted.others,
                },
                None => &mut sorted.others,
            };
            group.push(planned.clone());
        }
        sorted
    }

    /// The best that can be done: what does not come is replaced, on the same node where the volume may lie on one only;
    /// else all of it is planned anew; else what is overdue is waited for.
    fn replan(
        &self,
        split: &VolumeSplit,
        policy: &Result<Policy, Vec<ParamError>>,
        room: &Room<'_>,
        now: Timestamp,
    ) -> Replan {
        let next_index = split.spec.next_index;
        let places = |branches: &[PlannedBranch]| -> Vec<PoolKey> {
            branches.iter().map(|b| (b.node.clone(), b.pool.clone())).collect()
        };
        let in_order = |parts: [&[PlannedBranch]; 2]| {
            let mut branches = parts.concat();
            branches.sort_by_key(|b| b.index);
            branches
        };
        let lacks = |kept: &[PlannedBranch]| !missing(split, kept).is_zero() || kept.is_empty();
        let failed = places(&in_order([&self.refused, &self.overdue]));
        if !lacks(&self.others) {
            // Nothing needs to replace what was refused.
            return if self.refused.is_empty() {
                Replan::Keep { waits: false }
            } else {
                let branches = in_order([&self.others, &self.overdue]);
                Replan::Write { branches, next_index, refused_by: Vec::new() }
            };
        }
        let attempt = |kept: &[PlannedBranch], failed: &[PoolKey]| {
            plan(split, policy, kept, room, failed, now).map(|new| {
                let next_index = new.last().map_or(next_index, |last| last.index.saturating_add(1));
                let branches = kept.iter().cloned().chain(new).collect();
                Replan::Write { branches, next_index, refused_by: failed.to_vec() }
            })
        };
        let first = match attempt(&self.others, &failed) {
            Ok(write) => return write,
            Err(infeasible) => infeasible,
        };
        if !self.others.is_empty()
            && let Ok(write) = attempt(&[], &failed)
        {
            return write;
        }
        if self.overdue.is_empty() {
            return Replan::Infeasible { infeasible: first, kept: self.others.clone(), refused_by: failed };
        }
        let kept = in_order([&self.others, &self.overdue]);
        if self.refused.is_empty() && !lacks(&kept) {
            return Replan::Keep { waits: true };
        }
        let failed = places(&self.refused);
        match attempt(&kept, &failed) {
            Ok(write) => write,
            Err(infeasible) => Replan::Infeasible { infeasible, kept, refused_by: failed },
        }
    }
}

/// From when on a branch counts as not coming; `None` while nothing is wrong with it.
fn overdue_from(branch: &Branch, room: &Room<'_>) -> Option<Timestamp> {
    let patient_until = after(branch.meta.created?, PATIENCE)?;
    match branch.status.phase {
        BranchPhase::Failing => Some(patient_until),
        BranchPhase::Pending => Some(patient_until.max(room.silent_from(&branch.spec.node)?)),
        BranchPhase::Bound | BranchPhase::Refused | BranchPhase::Lost => None,
    }
}

fn plan(
    split: &VolumeSplit,
    policy: &Result<Policy, Vec<ParamError>>,
    kept: &[PlannedBranch],
    room: &Room<'_>,
    failed: &[PoolKey],
    now: Timestamp,
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
    plan_rest(split, policy, kept, room, failed, now)
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

/// Branches that the plan does not name, and that never held a file: left from an earlier plan. A branch of a volume that
/// never was complete holds none. Others are kept: a branch with files goes with its volume only.
fn strays(split: &VolumeSplit, branches: &[&Branch], was_complete: bool) -> Vec<Action> {
    let planned = |b: &Branch| split.spec.branches.iter().any(|p| p.index == b.spec.index);
    let empty = |b: &Branch| match b.status.phase {
        BranchPhase::Pending | BranchPhase::Refused => true,
        BranchPhase::Bound | BranchPhase::Failing => !was_complete,
        BranchPhase::Lost => false,
    };
    branches
        .iter()
        .filter(|b| empty(b) && b.meta.deleting.is_none() && !planned(b))
        .map(|b| Action::DeleteBranch { name: b.meta.name.clone(), version: Some(b.meta.version.clone()) })
        .collect()
}

fn branch_object(split: &VolumeSplit, planned: &PlannedBranch, policy: &Policy) -> Branch {
    let id = split.spec.volume.branch(planned.index);
    let mut meta = Meta::with_finalizer(id.to_string());
    meta.labels.insert(LABEL_NODE.to_owned(), label_value(planned.node.as_str()));
    meta.labels.insert(LABEL_VOLUME.to_owned(), split.spec.volume.to_string());
    if split.spec.ephemeral {
        meta.labels.insert(LABEL_EPHEMERAL.to_owned(), "true".to_owned());
    }
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
            write_through: policy.write_through,
            encrypted: policy.requires_encryption() && planned.format == BranchFormat::Image,
            access: None,
            sharing: None,
        },
        status: BranchStatus::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::room::{NodeRoom, Nodes};
    use super::super::tests::{pool, split};
    use super::*;
    use crate::domain::Bytes;
    use crate::domain::pool::PoolView;
    use crate::domain::reach::Network;
    use crate::store::object::{condition, pending};

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    /// Nodes with their pools, and when each reported last.
    #[derive(Default)]
    struct Cluster(Nodes);

    impl Cluster {
        fn with(mut self, node: &str, pools: &[(&str, u64)], heartbeat: Option<Timestamp>) -> Self {
            let node: NodeName = node.parse().unwrap();
            let view = |(name, gib): &(&str, u64)| PoolView {
                node: node.clone(),
                node_labels: Default::default(),
                pool: pool(name, *gib),
            };
            let pools = pools.iter().map(view).collect();
            self.0.insert(node.clone(), NodeRoom { pools, heartbeat, reach: None });
            self
        }
    }

    fn views() -> Cluster {
        Cluster::default().with("n1", &[("a", 10), ("b", 10), ("c", 10)], None)
    }

    fn decided_in(cluster: &Cluster, split: &VolumeSplit, branches: &[Branch], now: Timestamp) -> Decision {
        let refs: Vec<_> = branches.iter().collect();
        decide(split, &refs, &Room { nodes: &cluster.0, network: &Network::default(), excluded: &[] }, now)
    }

    fn minutes(n: i64) -> Timestamp {
        Timestamp::from_second(n * 60).unwrap()
    }

    /// The volume and its branches once planned in `cluster`, the branches made at the beginning of time.
    fn planned_in(cluster: &Cluster, mut split: VolumeSplit) -> (VolumeSplit, Vec<Branch>) {
        let mut branches = Vec::new();
        for _ in 0..2 {
            for action in decided_in(cluster, &split, &branches, NOW).actions {
                match action {
                    Action::SetPlan { branches, next_index } => {
                        (split.spec.branches, split.spec.next_index) = (branches, next_index);
                    }
                    Action::CreateBranch(mut branch) => {
                        branch.meta.created = Some(NOW);
                        branches.push(*branch);
                    }
                    _ => {}
                }
            }
        }
        (split, branches)
    }

    fn new_plan(decision: &Decision) -> Option<&[PlannedBranch]> {
        decision.actions.iter().find_map(|action| match action {
            Action::SetPlan { branches, .. } => Some(branches.as_slice()),
            _ => None,
        })
    }

    #[test]
    fn what_a_node_fails_to_make_for_minutes_is_planned_elsewhere_and_kept_where_there_is_no_elsewhere() {
        let cluster = Cluster::default().with("n1", &[("a", 10)], None).with("n2", &[("b", 8)], None);
        let (split, mut branches) = planned_in(&cluster, split("v", 5));
        assert_eq!(branches[0].spec.node.as_str(), "n1", "the most room");
        branches[0].status.phase = BranchPhase::Failing;
        let early = decided_in(&cluster, &split, &branches, minutes(4));
        assert_eq!((new_plan(&early), early.again), (None, Some(minutes(5))), "its node may yet succeed");
        let late = decided_in(&cluster, &split, &branches, minutes(5));
        assert_eq!(late.refused_by, [("n1".parse().unwrap(), "a".parse().unwrap())]);
        let plan = new_plan(&late).unwrap();
        assert_eq!((plan.len(), plan[0].index, plan[0].node.as_str()), (1, 1, "n2"));
        let alone = Cluster::default().with("n1", &[("a", 10)], None);
        let nowhere = decided_in(&alone, &split, &branches, minutes(60));
        assert_eq!((new_plan(&nowhere), nowhere.waits), (None, true), "and room elsewhere is news");
    }

    #[test]
    fn what_waits_for_a_silent_node_is_planned_elsewhere() {
        let reported = |at| {
            Cluster::default().with("n1", &[("a", 10)], Some(minutes(at))).with(
                "n2",
                &[("b", 8)],
                Some(minutes(100)),
            )
        };
        let (split, branches) = planned_in(&reported(0), split("v", 5));
        assert_eq!(branches[0].spec.node.as_str(), "n1");
        let patient = decided_in(&reported(0), &split, &branches, minutes(14));
        assert_eq!((new_plan(&patient), patient.again), (None, Some(minutes(15))));
        let replanned = decided_in(&reported(0), &split, &branches, minutes(15));
        assert_eq!(new_plan(&replanned).unwrap()[0].node.as_str(), "n2");
        let busy = decided_in(&reported(14), &split, &branches, minutes(16));
        assert_eq!(new_plan(&busy), None, "a node that reports is at work");
        let mut bound = branches.clone();
        bound[0].status.phase = BranchPhase::Bound;
        assert_eq!(new_plan(&decided_in(&reported(0), &split, &bound, minutes(99))), None);
    }

    #[test]
    fn a_volume_goes_to_no_silent_node_unless_that_one_uses_it() {
        let cluster =
            Cluster::default().with("n1", &[("a", 10)], Some(NOW)).with("n2", &[("b", 8)], Some(minutes(20)));
        let decision = decided_in(&cluster, &split("v", 5), &[], minutes(20));
        assert_eq!(new_plan(&decision).unwrap()[0].node.as_str(), "n2");
        let mut used = split("v", 5);
        used.spec.consumer = Some("n1".parse().unwrap());
        let decision = decided_in(&cluster, &used, &[], minutes(20));
        assert_eq!(new_plan(&decision).unwrap()[0].node.as_str(), "n1");
        let large = decided_in(&cluster, &split("v", 9), &[], minutes(20));
        let Some(Action::SetStatus(status)) = large.actions.last() else { panic!("{large:?}") };
        let told = &condition(&status.conditions, "Pending").unwrap().message;
        assert!(told.contains("its agent does not report: node n1"), "{told}");
    }

    #[test]
    fn a_volume_whose_rest_fits_on_its_node_no_more_moves_as_a_whole() {
        let cluster = Cluster::default().with("n1", &[("a", 10), ("b", 10)], None).with(
            "n2",
            &[("c", 8), ("d", 8)],
            None,
        );
        let (mut split, mut branches) = planned_in(&cluster, split("v", 15));
        assert!(branches.iter().all(|b| b.spec.node.as_str() == "n1"));
        branches[0].status.phase = BranchPhase::Bound;
        branches[1].status.phase = BranchPhase::Refused;
        let cluster = cluster.with("n1", &[("a", 0), ("b", 10)], None);
        let decision = decided_in(&cluster, &split, &branches, NOW);
        let plan = new_plan(&decision).unwrap().to_vec();
        assert!(plan.iter().all(|b| b.node.as_str() == "n2" && b.index >= 2), "{plan:?}");
        split.spec.branches = plan;
        let deleted = |split: &VolumeSplit| -> Vec<String> {
            let actions = decided_in(&cluster, split, &branches, NOW).actions;
            let name = |action| match action {
                Action::DeleteBranch { name, version: Some(_) } => Some(name),
                _ => None,
            };
            actions.into_iter().filter_map(name).collect()
        };
        assert_eq!(deleted(&split), ["v-0", "v-1"], "the bound one held no file");
        split.spec.used = true;
        assert_eq!(deleted(&split), ["v-1"], "now it may");
    }

    #[test]
    fn a_volume_that_was_used_keeps_its_plan_though_its_status_was_lost() {
        let cluster = Cluster::default().with("n1", &[("a", 10)], None).with("n2", &[("b", 8)], None);
        let (mut split, mut branches) = planned_in(&cluster, split("v", 5));
        split.spec.used = true;
        for phase in [BranchPhase::Refused, BranchPhase::Failing, BranchPhase::Pending] {
            branches[0].status.phase = phase;
            assert_eq!(new_plan(&decided_in(&cluster, &split, &branches, minutes(60))), None, "{phase:?}");
        }
    }

    fn decided(split: &VolumeSplit, branches: &[&Branch]) -> Vec<Action> {
        decide(split, branches, &Room { nodes: &views().0, network: &Network::default(), excluded: &[] }, NOW)
            .actions
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
    fn that_branches_are_being_made_is_no_status_for_the_first_moment_unless_something_is_wrong() {
        let cluster = views();
        let (mut split, mut branches) = planned_in(&cluster, split("v", 15));
        let seconds = |n| Timestamp::from_second(n).unwrap();
        split.meta.created = Some(seconds(10));
        let early = decided_in(&cluster, &split, &branches, seconds(11));
        assert_eq!((early.actions.as_slice(), early.again), (&[][..], Some(seconds(12))));
        let writes = |decision: Decision| matches!(decision.actions.last(), Some(Action::SetStatus(_)));
        assert!(writes(decided_in(&cluster, &split, &branches, seconds(12))), "it takes longer");
        assert!(writes(decided_in(&cluster, &split, &branches, seconds(9))), "clocks differ");
        branches[0].status.phase = BranchPhase::Failing;
        assert!(writes(decided_in(&cluster, &split, &branches, seconds(11))));
        branches.iter_mut().for_each(|b| b.status.phase = BranchPhase::Bound);
        assert!(writes(decided_in(&cluster, &split, &branches, seconds(11))));
        let large = super::super::tests::split("w", 99);
        assert!(writes(decided_in(&cluster, &large, &[], seconds(11))), "it does not fit");
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
        let room = Room { nodes: &views().0, network: &Network::default(), excluded: &[] };
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
        let decision = decide(
            &split,
            &refs,
            &Room { nodes: &views().0, network: &Network::default(), excluded: &[] },
            NOW,
        );
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
