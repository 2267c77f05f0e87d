//! The consumer's part: what to attach, and what it has that is of another time.

use super::{SharedMark, Sharing, SharingReport};
use crate::domain::NodeName;
use crate::domain::access::{ConsumerDecision, Held, NotYet};

/// What a node sees of one shared branch of a volume that is, or is to be, used on it.
#[derive(Clone, Copy, Debug)]
pub struct SharedConsuming<'a> {
    /// This node.
    pub node: &'a NodeName,
    /// The branch's owner.
    pub owner: &'a NodeName,
    /// A volume that is staged here needs it.
    pub needed: bool,
    /// `Branch.spec.sharing`, as last read: it may be old.
    pub sharing: Option<&'a Sharing>,
    /// `Branch.status.sharing`, as last read.
    pub report: Option<&'a SharingReport>,
    /// What is attached here of a branch on another node; the epoch is that of the report by which it was attached.
    pub held: &'a [Held],
    /// Whether a branch of this node is attached here.
    pub here: bool,
    /// The branch's mark, where this node is its owner.
    pub mark: Option<&'a SharedMark>,
}

/// What the consumer does next with a branch that [is shared](super::governs).
///
/// For a branch of this node the decision and the deed are under the lock of [`super::shared_owner_step`]: an own branch has no
/// other judge than the mark.
#[must_use]
pub fn shared_consumer_step(consuming: &SharedConsuming<'_>) -> ConsumerDecision {
    if consuming.node == consuming.owner { here(consuming) } else { remote(consuming) }
}

fn here(consuming: &SharedConsuming<'_>) -> ConsumerDecision {
    match (consuming.here, consuming.needed) {
        (true, false) => return ConsumerDecision::DetachHere,
        // What may not stay is ended by the owner's part.
        (true, true) | (false, false) => return ConsumerDecision::Settled,
        (false, true) => {}
    }
    let acted = consuming.mark.cloned().unwrap_or_default();
    let newer = consuming.sharing.filter(|sharing| sharing.epoch > acted.epoch);
    let named = acted.consumers.iter().any(|sharer| sharer.node == *consuming.node);
    match newer.map(|sharing| sharing.consumers.contains(consuming.node)) {
        None if named => ConsumerDecision::AttachHere,
        // Named before and by what comes: it stays so.
        Some(true) if named => ConsumerDecision::AttachHere,
        Some(true) => ConsumerDecision::Wait(NotYet::Opened { owner: consuming.owner.clone() }),
        None | Some(false) => ConsumerDecision::Wait(NotYet::Shared),
    }
}

fn remote(consuming: &SharedConsuming<'_>) -> ConsumerDecision {
    let Consuming { ordered, opened } = Consuming::of(consuming);
    if let Some(held) = consuming.held.iter().find(|_| !consuming.needed) {
        return ConsumerDecision::Detach(held.generation);
    }
    let other_time = |held: &&Held| {
        let newer_export = consuming.report.is_some_and(|report| report.generation > held.generation);
        // Fenced since, whether or not it is let again.
        let fenced = match held.epoch {
            Some(epoch) => {
                opened.is_some_and(|(_, since)| since > epoch)
                    || (!ordered && consuming.sharing.is_some_and(|sharing| sharing.epoch > epoch))
            }
            None => !ordered,
        };
        newer_export || fenced
    };
    if let Some(held) = consuming.held.iter().find(other_time) {
        return ConsumerDecision::ForceDetach(held.generation);
    }
    match opened {
        _ if !consuming.needed || !consuming.held.is_empty() => ConsumerDecision::Settled,
        Some((report, _)) if ordered => {
            ConsumerDecision::Attach { generation: report.generation, epoch: report.epoch }
        }
        _ if ordered => ConsumerDecision::Wait(NotYet::Opened { owner: consuming.owner.clone() }),
        _ => ConsumerDecision::Wait(NotYet::Shared),
    }
}

/// What spec and report say of this node.
struct Consuming<'a> {
    /// The order names it.
    ordered: bool,
    /// The report names it, since that epoch.
    opened: Option<(&'a SharingReport, crate::domain::access::Epoch)>,
}

impl<'a> Consuming<'a> {
    fn of(consuming: &SharedConsuming<'a>) -> Self {
        let ordered = consuming.sharing.is_some_and(|sharing| sharing.consumers.contains(consuming.node));
        let opened = consuming.report.and_then(|report| {
            let sharer = report.consumers.iter().find(|sharer| sharer.node == *consuming.node)?;
            Some((report, sharer.since))
        });
        Self { ordered, opened }
    }
}
