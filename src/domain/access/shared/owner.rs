//! The owner's part: whom its kernel is to let, and what it may report.

use std::collections::BTreeMap;

use super::{SharedMark, Sharer, Sharing, SharingReport};
use crate::domain::NodeName;
use crate::domain::access::{Epoch, Exported, Generation, Peer, Right};

/// What the owner sees of one branch.
#[derive(Clone, Copy, Debug)]
pub struct SharedOwned<'a> {
    /// The owner.
    pub node: &'a NodeName,
    /// `Branch.spec.sharing`, as last read: it may be old.
    pub wanted: Option<&'a Sharing>,
    /// The branch is to go: nobody may use it, whatever the spec says.
    pub deleting: bool,
    /// What is kept beside the branch; `None`: nothing yet, or it was lost.
    pub mark: Option<&'a SharedMark>,
    /// The newest generation of the branch from when it went to one node at a time.
    pub floor: Generation,
    /// This boot.
    pub boot_id: &'a str,
    /// The export in the kernel.
    pub export: Option<&'a Exported>,
    /// Whether this node has the branch attached for a volume of its own.
    pub here: bool,
    /// What other nodes call themselves to the transport, as far as they have published it.
    pub identities: &'a BTreeMap<NodeName, String>,
    /// `Branch.status.sharing`, as last read.
    pub reported: Option<&'a SharingReport>,
}

/// One thing to do. They are done in their order; where one fails, the rest is left and the branch looked at anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SharedOwnerAction {
    /// Take the right from the peer and end its live connections; for [`Peer::Here`]: end the attachment, by force if need be.
    Fence(Peer),
    /// End the export.
    Unexport,
    /// Write this beside the branch, down to the disk.
    Remember(SharedMark),
    /// Export this generation; nobody is allowed.
    Export(Generation),
    /// Let the peer use the export so.
    Allow(String, Right),
    /// Write this into the status, unless the object changed since it was read.
    Report(SharingReport),
}

/// What the owner does next; `None`: the branch is not shared, and [`super::super::owner_step`] decides about it. It is looked
/// at anew after each list of actions, and a report is only ever alone in one: it tells what was seen with nothing left to do.
///
/// Local attachments are made and ended under the lock under which this is decided and done.
#[must_use]
pub fn shared_owner_step(owned: &SharedOwned<'_>) -> Option<Vec<SharedOwnerAction>> {
    let order = Order::newest(owned);
    if order.epoch == Epoch::default() {
        return None;
    }
    let actions = if order.target.is_empty() { order.close(owned) } else { order.open(owned) };
    if !actions.is_empty() {
        return Some(actions);
    }
    let report = order.report(owned);
    let news = owned.reported != Some(&report);
    match (news, order.target.is_empty()) {
        // What the kernel has now is of those who have the branch alone.
        (false, true) => None,
        (true, _) => Some(vec![SharedOwnerAction::Report(report)]),
        (false, false) => Some(Vec::new()),
    }
}

/// The order to be carried out.
struct Order {
    /// Whom it lets do what.
    target: BTreeMap<NodeName, Right>,
    epoch: Epoch,
    /// What the branch's mark says, or would say.
    known: SharedMark,
    /// Nothing was done for it yet.
    new: bool,
}

impl Order {
    /// The newest order known, by the store or by the mark.
    fn newest(owned: &SharedOwned<'_>) -> Self {
        let known = owned.mark.cloned().unwrap_or_else(|| {
            // A mark that was lost: what was reported is the least that was done.
            owned.reported.map_or_else(SharedMark::default, |reported| SharedMark {
                generation: reported.generation,
                epoch: reported.epoch,
                consumers: reported.consumers.clone(),
                leaving: Vec::new(),
            })
        });
        let before: BTreeMap<NodeName, Right> =
            known.consumers.iter().map(|sharer| (sharer.node.clone(), sharer.right())).collect();
        let wanted = owned.wanted.map(|w| {
            let named = w.consumers.iter().filter_map(|node| Some((node.clone(), w.right(node)?)));
            (named.collect::<BTreeMap<_, _>>(), w.epoch)
        });
        let (mut target, epoch) = match wanted {
            Some((wanted, epoch)) if epoch > known.epoch => (wanted, epoch),
            // Two orders of one epoch: the store was restored from a backup, and its leader came to an epoch that was carried
            // out before. Only who is in both keeps the branch; the leader is told of a later epoch, and orders anew.
            Some((wanted, epoch)) if epoch == known.epoch && wanted != before && !owned.deleting => {
                let both = wanted.into_iter().filter(|(node, right)| before.get(node) == Some(right));
                (both.collect(), epoch.next().unwrap_or(epoch))
            }
            _ => (before, known.epoch),
        };
        if owned.deleting {
            target.clear();
        }
        let new = epoch > known.epoch;
        Self { target, epoch, known, new }
    }

    /// Lets nobody.
    fn close(&self, owned: &SharedOwned<'_>) -> Vec<SharedOwnerAction> {
        let mut actions = Vec::new();
        // Where nobody shared it, what is in the kernel is of those who have the branch alone.
        if !self.known.consumers.is_empty() || !self.known.leaving.is_empty() {
            actions.extend(self.leave(&[]));
            actions.extend(fences(owned, |_| false));
            actions.extend(owned.here.then_some(SharedOwnerAction::Fence(Peer::Here)));
            actions.extend(owned.export.map(|_| SharedOwnerAction::Unexport));
        } else if !self.new {
            return actions;
        }
        actions.push(SharedOwnerAction::Remember(self.mark(self.known.generation, Vec::new())));
        actions
    }

    /// Lets those whom the order names, and fences everybody else.
    fn open(&self, owned: &SharedOwned<'_>) -> Vec<SharedOwnerAction> {
        let exported = owned.export.map(|export| export.generation);
        // A new time of sharing: whatever anybody still has of the branch is of another, and never fits again.
        let generation = if self.known.consumers.is_empty() {
            self.known.generation.max(owned.floor).max(exported.unwrap_or_default()).next()
        } else {
            self.known.generation
        };
        let sharers = self.sharers(owned);
        let remote: BTreeMap<&String, Right> =
            sharers.iter().filter_map(|sharer| Some((sharer.identity.as_ref()?, sharer.right()))).collect();
        let export = owned.export.filter(|export| export.generation == generation);
        let has = |peer: &String, right: Right| export.and_then(|export| export.right(peer)) == Some(right);
        let stands = exported == Some(generation);

        let mut actions: Vec<_> = self.leave(&sharers).into_iter().collect();
        actions.extend(fences(owned, |peer| remote.get(peer).is_some_and(|right| has(peer, *right))));
        if owned.here && !self.target.contains_key(owned.node) {
            actions.push(SharedOwnerAction::Fence(Peer::Here));
        }
        if exported.is_some() && !stands {
            actions.push(SharedOwnerAction::Unexport);
        }
        if self.new || self.known != self.mark(generation, sharers.clone()) {
            actions.push(SharedOwnerAction::Remember(self.mark(generation, sharers.clone())));
        }
        if !stands && !remote.is_empty() {
            actions.push(SharedOwnerAction::Export(generation));
        }
        let missing = remote.into_iter().filter(|(peer, right)| !has(peer, *right));
        actions.extend(missing.map(|(peer, right)| SharedOwnerAction::Allow(peer.clone(), right)));
        actions
    }

    /// Whom the order names, as far as it is known what they call themselves.
    fn sharers(&self, owned: &SharedOwned<'_>) -> Vec<Sharer> {
        let sharer = |(node, right): (&NodeName, &Right)| {
            let known = self.known.consumers.iter().find(|sharer| sharer.node == *node);
            let identity = if node == owned.node {
                None
            } else {
                owned.identities.get(node).or(known.and_then(|sharer| sharer.identity.as_ref())).cloned()
            };
            // Under another name it is another peer: the kernel that was let before is fenced. So is one that may do other things.
            let same = known.filter(|known| {
                known.right() == *right && (known.identity.is_none() || known.identity == identity)
            });
            let since = same.map_or(self.epoch, |known| known.since);
            Sharer { node: node.clone(), identity, read_only: *right == Right::Read, since }
        };
        self.target.iter().map(sharer).collect()
    }

    fn mark(&self, generation: Generation, consumers: Vec<Sharer>) -> SharedMark {
        SharedMark { generation, epoch: self.epoch, consumers, leaving: Vec::new() }
    }

    /// Notes who is about to be fenced, where somebody is: an agent that crashes before it noted the order must not let them
    /// again as if nothing had been.
    fn leave(&self, stay: &[Sharer]) -> Option<SharedOwnerAction> {
        let (consumers, mut leaving): (Vec<_>, Vec<_>) =
            self.known.consumers.iter().cloned().partition(|sharer| {
                let stays = |s: &Sharer| s.node == sharer.node && s.since == sharer.since;
                stay.iter().any(stays)
            });
        if leaving.is_empty() {
            return None;
        }
        leaving.extend(self.known.leaving.iter().cloned());
        Some(SharedOwnerAction::Remember(SharedMark { consumers, leaving, ..self.known.clone() }))
    }

    /// What is seen.
    fn report(&self, owned: &SharedOwned<'_>) -> SharingReport {
        let export = owned.export.filter(|_| !self.target.is_empty());
        let seen = |sharer: &&Sharer| match &sharer.identity {
            Some(identity) => export.and_then(|export| export.right(identity)) == Some(sharer.right()),
            None => sharer.node == *owned.node,
        };
        SharingReport {
            generation: self.known.generation,
            address: export.map(|export| export.address.clone()),
            name: export.map(|export| export.name.clone()),
            consumers: self.known.consumers.iter().filter(seen).cloned().collect(),
            epoch: self.epoch,
            boot_id: owned.boot_id.to_owned(),
        }
    }
}

/// Fences every remote peer that is not to stay.
fn fences(owned: &SharedOwned<'_>, stays: impl Fn(&String) -> bool) -> Vec<SharedOwnerAction> {
    let allowed = owned.export.into_iter().flat_map(|export| &export.allowed);
    let gone = allowed.filter(|peer| !stays(peer)).cloned();
    gone.map(|peer| SharedOwnerAction::Fence(Peer::Remote(peer))).collect()
}
