//! Forgets a node that is gone for good: the one act that gives files up, done by an operator and by nobody else.
//!
//! [`forgetting`] decides from the objects what is lost and which writes follow; [`act`] does them, reads again, and goes on
//! until nothing is left to do. Each write leads to a state from which the next decision goes on, so it does not matter
//! where it is interrupted. The order:
//!
//! 1. The `StorageNode` goes, so that nothing more is planned there or attached there.
//! 2. Volumes let go of the node: it leaves their attachments, and the plans of those that were never complete, which
//!    are then planned anew under new numbers. A complete volume keeps its plan: no branch is made in place of a lost one.
//! 3. A pod's own volume goes: its pod was on that node.
//! 4. Each `Branch` loses its finalizer and is deleted after that. In this order its node, should it run after all, never
//!    sees a branch that it is to remove: files stay on its disks, as branches that nothing tells of.
//! 5. The keys that it shares with other nodes go. There is no asking which there are, so they are no part of the decision.

pub mod act;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::controllers::splitter::{SILENCE, is_silent};
use crate::domain::policy::{CLAIM_NAME_KEY, CLAIM_NAMESPACE_KEY};
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::store::attach::{Detach, detached};
use crate::store::object::{Branch, BranchPhase, StorageNode, VolumeSplit};

/// All that is known of the node.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Its `StorageNode`.
    pub storage: Option<StorageNode>,
    /// Whether its Kubernetes Node is Ready; `None` where there is none.
    pub ready: Option<bool>,
    /// All volumes.
    pub splits: Vec<VolumeSplit>,
    /// The branches on it.
    pub branches: Vec<Branch>,
}

/// One write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Deletes the `StorageNode`.
    DeleteStorageNode,
    /// Takes the node out of the volume's attachments, and out of its plan where it was never complete.
    LetGo(VolumeId),
    /// Deletes a pod's own volume.
    DeleteVolume(VolumeId),
    /// Takes the finalizer from a branch, and deletes it.
    DropBranch(String),
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::DeleteStorageNode => f.write_str("delete its StorageNode"),
            Self::LetGo(volume) => write!(f, "take it out of VolumeSplit {volume}"),
            Self::DeleteVolume(volume) => write!(f, "delete VolumeSplit {volume}, a pod's own volume"),
            Self::DropBranch(name) => write!(f, "take the finalizer from Branch {name} and delete it"),
        }
    }
}

/// What the loss of its branches means for a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Consequence {
    /// All its files are lost.
    AllFiles,
    /// The files on these branches are lost; the others are whole.
    SomeFiles,
    /// It was never complete and holds no files: it is planned anew.
    PlannedAnew,
    /// It is being deleted already: the deletion goes on.
    DeletionGoesOn,
    /// It was a pod's own: it goes with its pod.
    GoesWithPod,
    /// It has no `VolumeSplit`: what lies there belongs to nothing.
    NoVolume,
}

impl Consequence {
    /// A sentence's end.
    #[must_use]
    pub const fn told(self) -> &'static str {
        match self {
            Self::AllFiles => "all its files are lost",
            Self::SomeFiles => "the files on these branches are lost",
            Self::PlannedAnew => "it never held files and is planned anew",
            Self::DeletionGoesOn => "its deletion goes on",
            Self::GoesWithPod => "it goes with its pod",
            Self::NoVolume => "its volume does not exist",
        }
    }
}

/// A branch that is given up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LostBranch {
    /// The branch.
    pub branch: String,
    /// Its pool.
    pub pool: String,
    /// What it takes of the pool.
    pub size: Bytes,
    /// What it occupied when its node last told; zero where it never did.
    pub bytes_used: Bytes,
    /// Where it stood then.
    pub phase: BranchPhase,
}

/// What a volume loses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Loss {
    /// The volume.
    pub volume: VolumeId,
    /// Its claim, as `namespace/name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// The branches on the node.
    pub branches: Vec<LostBranch>,
    /// How many branches the volume has.
    pub of: usize,
    /// What it means.
    pub consequence: Consequence,
}

/// What it takes to forget a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Forgetting {
    /// The node.
    pub node: NodeName,
    /// What is lost, by volume.
    pub losses: Vec<Loss>,
    /// What is to be written, in this order; empty: nothing is known of the node.
    pub steps: Vec<Step>,
}

/// Why a node is taken to be alive; a sentence without end, for the operator.
#[must_use]
pub fn alive(known: &Known, now: Timestamp) -> Option<String> {
    if known.ready == Some(true) {
        return Some("its Kubernetes Node is Ready".to_owned());
    }
    let storage = known.storage.as_ref()?;
    // One that never reported has at least been made by its agent.
    let last = storage.status.heartbeat.or(storage.meta.created)?;
    if is_silent(Some(last), now) {
        return None;
    }
    let age = Duration::try_from(now.duration_since(last)).unwrap_or_default().as_secs();
    Some(format!(
        "its agent reported {age} s ago, and counts as silent after {} minutes without a report",
        SILENCE.as_secs() / 60
    ))
}

/// Decides what is lost and what is to be written.
#[must_use]
pub fn forgetting(node: &NodeName, known: &Known) -> Forgetting {
    let mut steps = Vec::new();
    if known.storage.is_some() {
        steps.push(Step::DeleteStorageNode);
    }
    let changed = known.splits.iter().filter(|split| let_go(split, node).is_some());
    steps.extend(changed.map(|split| Step::LetGo(split.spec.volume.clone())));
    let own = known.splits.iter().filter(|split| split.meta.deleting.is_none() && is_own(split, node));
    steps.extend(own.map(|split| Step::DeleteVolume(split.spec.volume.clone())));
    let branches: Vec<&Branch> = known.branches.iter().filter(|b| b.spec.node == *node).collect();
    steps.extend(branches.iter().map(|b| Step::DropBranch(b.meta.name.clone())));
    Forgetting { node: node.clone(), losses: losses(node, &known.splits, &branches), steps }
}

/// The volume without the node; `None` where nothing changes.
pub(super) fn let_go(split: &VolumeSplit, node: &NodeName) -> Option<VolumeSplit> {
    let holds = split.may_hold_files();
    let mut changed = split.clone();
    if let Some(free) = detached(split, &Detach::Node(node.clone())) {
        changed = free;
        // That it was attached tells that it may hold files; this must not go with the attachment.
        changed.spec.used = true;
    }
    if !holds && split.meta.deleting.is_none() {
        changed.spec.branches.retain(|b| b.node != *node);
    }
    (changed.spec != split.spec).then_some(changed)
}

/// Whether it is the volume of one pod, which was on that node.
fn is_own(split: &VolumeSplit, node: &NodeName) -> bool {
    let plan = &split.spec.branches;
    let all_there = !plan.is_empty() && plan.iter().all(|b| b.node == *node);
    split.spec.ephemeral && (split.spec.consumer.as_ref() == Some(node) || all_there)
}

fn losses(node: &NodeName, splits: &[VolumeSplit], branches: &[&Branch]) -> Vec<Loss> {
    let splits: BTreeMap<&VolumeId, &VolumeSplit> = splits.iter().map(|s| (&s.spec.volume, s)).collect();
    let mut by_volume: BTreeMap<&VolumeId, Vec<&Branch>> = BTreeMap::new();
    for branch in branches {
        by_volume.entry(&branch.spec.volume).or_default().push(branch);
    }
    let loss = |(volume, branches): (&VolumeId, Vec<&Branch>)| {
        let split = splits.get(volume).copied();
        let planned = split.into_iter().flat_map(|s| &s.spec.branches).map(|b| b.index);
        let all: BTreeSet<u32> = planned.chain(branches.iter().map(|b| b.spec.index)).collect();
        Loss {
            volume: volume.clone(),
            claim: split.and_then(claim),
            of: all.len(),
            consequence: consequence(node, split),
            branches: branches.into_iter().map(lost).collect(),
        }
    };
    by_volume.into_iter().map(loss).collect()
}

fn consequence(node: &NodeName, split: Option<&VolumeSplit>) -> Consequence {
    let Some(split) = split else { return Consequence::NoVolume };
    if split.meta.deleting.is_some() {
        Consequence::DeletionGoesOn
    } else if is_own(split, node) {
        Consequence::GoesWithPod
    } else if !split.may_hold_files() {
        Consequence::PlannedAnew
    } else if split.spec.branches.iter().all(|b| b.node == *node) {
        Consequence::AllFiles
    } else {
        Consequence::SomeFiles
    }
}

fn lost(branch: &Branch) -> LostBranch {
    LostBranch {
        branch: branch.meta.name.clone(),
        pool: branch.spec.pool.to_string(),
        size: branch.spec.size,
        bytes_used: branch.status.bytes_used,
        phase: branch.status.phase,
    }
}

/// The claim that the volume was made for, as its parameters name it.
pub(super) fn claim(split: &VolumeSplit) -> Option<String> {
    let parameter = |key: &str| split.spec.parameters.get(key);
    Some(format!("{}/{}", parameter(CLAIM_NAMESPACE_KEY)?, parameter(CLAIM_NAME_KEY)?))
}
