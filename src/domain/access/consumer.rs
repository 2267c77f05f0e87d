//! The consumer's part: what to attach, and what it has that is of another time.

use std::fmt;

use super::{Access, Epoch, ExportReport, Generation, Mark};
use crate::domain::NodeName;

/// What a node has attached of a branch on another node, as its kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The generation.
    pub generation: Generation,
    /// Under which order it was attached, as the node wrote down then; `None`: not known.
    pub epoch: Option<Epoch>,
}

/// What a node sees of one branch of a volume that is, or is to be, used on it.
#[derive(Clone, Copy, Debug)]
pub struct Consuming<'a> {
    /// This node.
    pub node: &'a NodeName,
    /// The branch's owner.
    pub owner: &'a NodeName,
    /// A volume that is staged here needs it.
    pub needed: bool,
    /// `Branch.spec.access`, as last read: it may be old.
    pub access: Option<&'a Access>,
    /// `Branch.status.export`, as last read.
    pub report: Option<&'a ExportReport>,
    /// What is attached here of a branch on another node.
    pub held: &'a [Held],
    /// Whether a branch of this node is attached here.
    pub here: bool,
    /// The branch's mark, where this node is its owner.
    pub mark: Option<&'a Mark>,
}

/// What the consumer does next with the branch; it looks anew after each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsumerDecision {
    /// Attach that generation, and write down the epoch.
    Attach {
        /// What to attach.
        generation: Generation,
        /// Under which order.
        epoch: Epoch,
    },
    /// Attach this node's own branch.
    AttachHere,
    /// End an attachment that nothing uses any more.
    Detach(Generation),
    /// The same for this node's own branch.
    DetachHere,
    /// End an attachment that is of another time, now: whatever uses it has lost the branch, and must not write to it again.
    ForceDetach(Generation),
    /// Nothing can be done now.
    Wait(NotYet),
    /// All is as it is wanted.
    Settled,
}

/// Why a branch cannot be attached yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotYet {
    /// The branch was not given to this node.
    Granted {
        /// Who has it.
        holder: Option<NodeName>,
    },
    /// Its owner has not opened it.
    Opened {
        /// The owner.
        owner: NodeName,
    },
    /// The branch is shared, and this node is not among those that it was given to.
    Shared,
}

/// A sentence for people.
impl fmt::Display for NotYet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Granted { holder: Some(holder) } => write!(f, "the branch is given to node {holder}"),
            Self::Granted { holder: None } => f.write_str("the branch is given to nobody yet"),
            Self::Shared => f.write_str("the branch is shared by other nodes, and not given to this one yet"),
            Self::Opened { owner } => {
                write!(f, "node {owner}, which holds the branch, has not opened it to this node yet")
            }
        }
    }
}

/// What the consumer does next.
///
/// For a branch of this node the decision and the deed are under the lock of [`super::owner_step`]: an own branch has no
/// other judge than the mark.
#[must_use]
pub fn consumer_step(consuming: &Consuming<'_>) -> ConsumerDecision {
    if consuming.node == consuming.owner { here(consuming) } else { remote(consuming) }
}

fn here(consuming: &Consuming<'_>) -> ConsumerDecision {
    let Consuming { node, owner, needed, access, here, mark, .. } = *consuming;
    match (here, needed) {
        (true, false) => return ConsumerDecision::DetachHere,
        // What may not stay is ended by the owner's part.
        (true, true) | (false, false) => return ConsumerDecision::Settled,
        (false, true) => {}
    }
    let order = mark.map(|mark| &mark.access);
    let newer = access.filter(|access| order.is_none_or(|order| access.epoch > order.epoch));
    match (newer.or(order).map(|access| access.consumer.as_ref()), newer) {
        // Never governed.
        (None, _) => ConsumerDecision::AttachHere,
        (Some(Some(to)), None) if to == node => ConsumerDecision::AttachHere,
        (Some(Some(to)), Some(_)) if to == node => {
            ConsumerDecision::Wait(NotYet::Opened { owner: owner.clone() })
        }
        (Some(holder), _) => ConsumerDecision::Wait(NotYet::Granted { holder: holder.cloned() }),
    }
}

fn remote(consuming: &Consuming<'_>) -> ConsumerDecision {
    let granted = consuming.access.filter(|access| access.consumer.as_ref() == Some(consuming.node));
    let opened = consuming.report.filter(|report| Some(&report.allowed) == granted);
    if let Some(held) = consuming.held.iter().find(|_| !consuming.needed) {
        return ConsumerDecision::Detach(held.generation);
    }
    let other_time = |held: &&Held| {
        let newer_export = consuming.report.is_some_and(|report| report.generation > held.generation);
        let newer_order = consuming.access.is_some_and(|access| match held.epoch {
            Some(epoch) => access.epoch > epoch,
            None => access.consumer.as_ref() != Some(consuming.node),
        });
        newer_export || newer_order
    };
    if let Some(held) = consuming.held.iter().find(other_time) {
        return ConsumerDecision::ForceDetach(held.generation);
    }
    match (granted, opened) {
        _ if !consuming.needed || !consuming.held.is_empty() => ConsumerDecision::Settled,
        (Some(access), Some(report)) => {
            ConsumerDecision::Attach { generation: report.generation, epoch: access.epoch }
        }
        (Some(_), None) => ConsumerDecision::Wait(NotYet::Opened { owner: consuming.owner.clone() }),
        (None, _) => {
            let holder = consuming.access.and_then(|access| access.consumer.clone());
            ConsumerDecision::Wait(NotYet::Granted { holder })
        }
    }
}
