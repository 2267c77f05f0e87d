//! The leader's part: whom the branch is to go to, and whether it may be said yet.

use std::fmt;

use super::{Access, Epoch, ExportReport};
use crate::domain::NodeName;

/// A node that the branch's volume is attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// The node.
    pub node: NodeName,
    /// It carries the taint `node.kubernetes.io/out-of-service`: whoever set it says that it is down and stays so, and its
    /// claim counts for nothing.
    pub out_of_service: bool,
    /// It only reads. That counts where several share the branch; who has it alone may write.
    pub reads: bool,
}

/// What the leader sees of one branch.
#[derive(Clone, Copy, Debug)]
pub struct Led<'a> {
    /// Where the volume is attached, the oldest first.
    pub claimants: &'a [Claimant],
    /// The branch's owner.
    pub owner: &'a NodeName,
    /// Why the owner is not expected to act now (its agent is silent, its node is not ready or out of service); `None` where
    /// it is.
    pub owner_down: Option<&'a str>,
    /// `Branch.spec.access`.
    pub access: Option<&'a Access>,
    /// `Branch.status.export`.
    pub report: Option<&'a ExportReport>,
}

/// What the leader writes, if anything: into `Branch.spec.access`, and only over the version of the object that it was
/// decided on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderDecision {
    /// Let the node have the branch.
    Grant(Access),
    /// Let nobody have it.
    Revoke(Access),
    /// Nothing can be written now.
    Wait(Waiting),
    /// All is as it is wanted.
    Settled,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The owner has not reported that nobody is allowed.
    Fenced {
        /// The owner.
        owner: NodeName,
        /// Who was allowed by its last report.
        holder: Option<NodeName>,
        /// Why it may take long.
        owner_down: Option<String>,
    },
    /// The owner has not reported that the node is allowed.
    Allowed {
        /// The owner.
        owner: NodeName,
        /// Who is to be.
        consumer: NodeName,
        /// Why it may take long.
        owner_down: Option<String>,
    },
    /// There is no further epoch: somebody wrote the object by hand.
    Exhausted,
}

/// A sentence for people.
impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let down = match self {
            Self::Fenced { owner, holder, owner_down } => {
                match holder {
                    Some(holder) => write!(f, "node {holder} may still write to the branch: ")?,
                    None => f.write_str("it is not known yet that nobody can write to the branch: ")?,
                }
                write!(f, "node {owner}, which holds it, has not reported that it took all access back")?;
                owner_down
            }
            Self::Allowed { owner, consumer, owner_down } => {
                write!(f, "node {owner}, which holds the branch, has not opened it to node {consumer} yet")?;
                owner_down
            }
            Self::Exhausted => {
                return f
                    .write_str("the branch's epoch is the last there is: spec.access was written by hand");
            }
        };
        match down {
            Some(reason) => write!(
                f,
                "; it does not answer ({reason}), and only it can: the branch is given to nobody else until it returns"
            ),
            None => Ok(()),
        }
    }
}

/// What the leader does next.
#[must_use]
pub fn leader_step(led: &Led<'_>) -> LeaderDecision {
    let holder = led.access.and_then(|access| access.consumer.as_ref());
    let mut claims =
        led.claimants.iter().filter(|claimant| !claimant.out_of_service).map(|claimant| &claimant.node);
    // An exclusive volume has one claim. Where there are more, whoever has the branch keeps it, for as long as it wants it.
    let wanted = claims.clone().find(|node| Some(*node) == holder).or_else(|| claims.next());

    let current = led.access.cloned().unwrap_or_default();
    let reported = led.report.map(|report| report.allowed.clone()).unwrap_or_default();
    let Some(next) = current.epoch.max(reported.epoch).next() else {
        return LeaderDecision::Wait(Waiting::Exhausted);
    };
    let revoke = LeaderDecision::Revoke(Access { consumer: None, epoch: next });

    // The owner acted on an order that the spec does not hold: the store was restored from a backup, or lost a write. Only a
    // newer order is obeyed.
    let other = reported.epoch == current.epoch
        && reported.consumer.is_some()
        && reported.consumer != current.consumer;
    if reported.epoch > current.epoch || other {
        return revoke;
    }
    let owner_down = led.owner_down.map(str::to_owned);
    let owner = led.owner.clone();
    match (holder, wanted) {
        (Some(has), Some(wants)) if has == wants => {
            if reported == current {
                LeaderDecision::Settled
            } else {
                LeaderDecision::Wait(Waiting::Allowed { owner, consumer: has.clone(), owner_down })
            }
        }
        (Some(_), _) => revoke,
        (None, None) if current.epoch == Epoch::default() || reported == current => LeaderDecision::Settled,
        (None, Some(wants)) if current.epoch == Epoch::default() => {
            // Nobody but the owner can have used it, and the owner needs no order to go on.
            if wants == led.owner { LeaderDecision::Settled } else { revoke }
        }
        (None, Some(wants)) if reported == current => {
            LeaderDecision::Grant(Access { consumer: Some(wants.clone()), epoch: next })
        }
        (None, _) => LeaderDecision::Wait(Waiting::Fenced { owner, holder: reported.consumer, owner_down }),
    }
}
