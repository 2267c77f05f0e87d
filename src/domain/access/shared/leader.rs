//! The leader's part: who is to share the branch.

use std::fmt;

use super::{Sharing, SharingReport, exclusive_is_over};
use crate::domain::NodeName;
use crate::domain::access::{Access, Claimant, ExportReport};

/// What the leader sees of one branch.
#[derive(Clone, Copy, Debug)]
pub struct SharedLed<'a> {
    /// Where the volume is attached; nobody counts unless the volume [is shared](super::is_shared).
    pub claimants: &'a [Claimant],
    /// Whether the volume is shared as it is attached now.
    pub shared: bool,
    /// `Branch.spec.access`.
    pub access: Option<&'a Access>,
    /// `Branch.status.export`.
    pub export: Option<&'a ExportReport>,
    /// The branch's owner.
    pub owner: &'a NodeName,
    /// Why the owner is not expected to act now; `None` where it is.
    pub owner_down: Option<&'a str>,
    /// `Branch.spec.sharing`.
    pub sharing: Option<&'a Sharing>,
    /// `Branch.status.sharing`.
    pub report: Option<&'a SharingReport>,
}

/// What the leader writes, if anything: into `Branch.spec.sharing`, and only over the version of the object that it was
/// decided on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedLeaderDecision {
    /// Let these nodes have the branch, and nobody else.
    Write(Sharing),
    /// One node has it alone: [`super::super::leader_step`] has to revoke that first, with no claimants.
    RevokeFirst,
    /// Nothing can be written now.
    Wait(SharedWaiting),
    /// All is as it is wanted. Where the volume is not shared, nobody shares the branch any more, and
    /// [`super::super::leader_step`] decides about it.
    Settled,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedWaiting {
    /// The owner has not reported that these nodes are let.
    Opened {
        /// The owner.
        owner: NodeName,
        /// Who is to be.
        consumers: Vec<NodeName>,
        /// Why it may take long.
        owner_down: Option<String>,
    },
    /// The owner has not reported that these nodes are fenced.
    Fenced {
        /// The owner.
        owner: NodeName,
        /// Who was let by its last report; nobody where there is none.
        holders: Vec<NodeName>,
        /// Why it may take long.
        owner_down: Option<String>,
    },
    /// There is no further epoch: somebody wrote the object by hand.
    Exhausted,
}

/// A sentence for people.
impl fmt::Display for SharedWaiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |nodes: &[NodeName]| nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
        let down = match self {
            Self::Opened { owner, consumers, owner_down } => {
                write!(
                    f,
                    "node {owner}, which holds the branch, has not opened it to {} yet",
                    list(consumers)
                )?;
                owner_down
            }
            Self::Fenced { owner, holders, owner_down } => {
                if holders.is_empty() {
                    f.write_str("it is not known yet that nobody shares the branch: ")?;
                } else {
                    write!(f, "{} may still write to the branch: ", list(holders))?;
                }
                write!(f, "node {owner}, which holds it, has not reported that it took all access back")?;
                owner_down
            }
            Self::Exhausted => {
                return f
                    .write_str("the branch's epoch is the last there is: spec.sharing was written by hand");
            }
        };
        match down {
            Some(reason) => write!(f, "; it does not answer ({reason}), and only it can"),
            None => Ok(()),
        }
    }
}

/// What the leader does next.
///
/// A volume that only its branches' owner ever wanted costs no order: the owner needs none to use its own directory.
#[must_use]
pub fn shared_leader_step(led: &SharedLed<'_>) -> SharedLeaderDecision {
    let claimants = || led.claimants.iter().filter(|claimant| led.shared && !claimant.out_of_service);
    let mut wanted: Vec<NodeName> = claimants().map(|claimant| claimant.node.clone()).collect();
    wanted.sort_unstable();
    wanted.dedup();
    let reads = |node: &NodeName| {
        claimants().filter(|claimant| claimant.node == *node).all(|claimant| claimant.reads)
    };
    let readers: Vec<NodeName> = wanted.iter().filter(|node| reads(node)).cloned().collect();

    let current = led.sharing.cloned().unwrap_or_default();
    let reported = led.report.cloned().unwrap_or_default();
    let never = current == Sharing::default() && reported == SharingReport::default();
    if never && (wanted.is_empty() || led.access.is_none() && wanted.iter().all(|node| node == led.owner)) {
        return SharedLeaderDecision::Settled;
    }
    let Some(next) = current.epoch.max(reported.epoch).next() else {
        return SharedLeaderDecision::Wait(SharedWaiting::Exhausted);
    };
    let let_in = |node: &NodeName| reported.consumers.iter().any(|sharer| sharer.node == *node);
    // The owner acted on an order that the spec does not hold: the store was restored from a backup, or lost a write. Only a
    // newer order is obeyed.
    let other = reported.epoch == current.epoch
        && reported.consumers.iter().any(|sharer| !current.consumers.contains(&sharer.node));
    let news = wanted != current.consumers || readers != current.readers;
    if news || reported.epoch > current.epoch || other {
        if !wanted.is_empty() && !exclusive_is_over(led.access, led.export) {
            return SharedLeaderDecision::RevokeFirst;
        }
        return SharedLeaderDecision::Write(Sharing { consumers: wanted, readers, epoch: next });
    }
    let (owner, owner_down) = (led.owner.clone(), led.owner_down.map(str::to_owned));
    let missing: Vec<NodeName> = wanted.iter().filter(|node| !let_in(node)).cloned().collect();
    if reported.epoch == current.epoch && missing.is_empty() {
        SharedLeaderDecision::Settled
    } else if missing.is_empty() {
        let holders = reported.consumers.into_iter().map(|sharer| sharer.node);
        let holders = holders.filter(|node| !wanted.contains(node)).collect();
        SharedLeaderDecision::Wait(SharedWaiting::Fenced { owner, holders, owner_down })
    } else {
        SharedLeaderDecision::Wait(SharedWaiting::Opened { owner, consumers: missing, owner_down })
    }
}
