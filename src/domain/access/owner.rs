//! The owner's part: what its kernel is to be told, in which order, and what it may report.

use std::collections::BTreeMap;

use super::{Access, ExportReport, Generation, Mark, Right};
use crate::domain::NodeName;
use crate::domain::reach::Transport;

/// Who uses a branch at its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// The owner node itself, without an export.
    Here,
    /// Another node, by what it calls itself to the transport.
    Remote(String),
}

/// An export as the owner's kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// Its generation.
    pub generation: Generation,
    /// Where it is reached.
    pub address: String,
    /// What it is called there.
    pub name: String,
    /// By which transport.
    pub transport: Transport,
    /// Who is allowed, by what they call themselves.
    pub allowed: Vec<String>,
    /// Those of them that may only read.
    pub readers: Vec<String>,
}

impl Exported {
    /// What the peer may do; `None`: nothing.
    #[must_use]
    pub fn right(&self, peer: &String) -> Option<Right> {
        let right = if self.readers.contains(peer) { Right::Read } else { Right::Write };
        self.allowed.contains(peer).then_some(right)
    }
}

/// What the owner sees of one branch.
#[derive(Clone, Copy, Debug)]
pub struct Owned<'a> {
    /// The owner.
    pub node: &'a NodeName,
    /// `Branch.spec.access`, as last read: it may be old.
    pub wanted: Option<&'a Access>,
    /// The branch is to go: nobody may use it, whatever the spec says.
    pub deleting: bool,
    /// What is kept beside the branch; `None`: nothing yet, or it was lost.
    pub mark: Option<&'a Mark>,
    /// This boot.
    pub boot_id: &'a str,
    /// What is completed on the export survives a crash of this node: the branch is written through, or its clients send again
    /// what was not committed. It is what holds of the branch as it lies on the disk, not what is configured; it may become
    /// true at any time, after all that was completed until then was flushed, and false only while there is no export.
    pub durable: bool,
    /// The export in the kernel.
    pub export: Option<&'a Exported>,
    /// Whether this node has the branch attached for a volume of its own.
    pub here: bool,
    /// What other nodes call themselves to the transport, as far as they have published it.
    pub identities: &'a BTreeMap<NodeName, String>,
    /// `Branch.status.export`, as last read.
    pub reported: Option<&'a ExportReport>,
}

/// One thing to do. They are done in their order; where one fails, the rest is left and the branch looked at anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerAction {
    /// Take the right from the peer and end its live connections; for [`Peer::Here`]: end the attachment, by force if need be.
    Fence(Peer),
    /// End the export.
    Unexport,
    /// Write this beside the branch, down to the disk.
    Remember(Mark),
    /// Export this generation; nobody is allowed. An export of another is ended first.
    Export(Generation),
    /// Let the peer use the export.
    Allow(String),
    /// Write this into the status, unless the object changed since it was read.
    Report(ExportReport),
}

/// What the owner does next. It is looked at anew after each list of actions, and a report is only ever alone in one: it
/// tells what was seen with nothing left to do.
///
/// Local attachments are made and ended under the lock under which this is decided and done.
#[must_use]
pub fn owner_step(owned: &Owned<'_>) -> Vec<OwnerAction> {
    let Some(order) = Order::newest(owned) else {
        // Never governed. An export is of no order, and so of nobody.
        let mut actions = owned.fences(false);
        actions.extend(owned.export.map(|_| OwnerAction::Unexport));
        return actions;
    };
    let actions = match &order.target.consumer {
        Some(node) if node == owned.node => order.close(owned, true),
        Some(node) => order.open(owned, node),
        None => order.close(owned, false),
    };
    if actions.is_empty() { order.report(owned) } else { actions }
}

impl Owned<'_> {
    /// Fences everybody whom the kernel allows, and this node's own use where that is to end.
    fn fences(&self, here: bool) -> Vec<OwnerAction> {
        let remote =
            self.export.into_iter().flat_map(|export| export.allowed.iter().cloned().map(Peer::Remote));
        let here = (here && self.here).then_some(Peer::Here);
        remote.chain(here).map(OwnerAction::Fence).collect()
    }
}

/// The order to be carried out.
struct Order {
    /// Whom it allows.
    target: Access,
    /// What the branch's mark says, or would say.
    known: Mark,
    /// Nothing was done for it yet.
    new: bool,
    /// Completed writes may have been lost since the last export.
    unclean: bool,
    /// The mark is of another boot, or of a stopped export.
    restarted: bool,
}

impl Order {
    /// The newest order known, by the store or by the mark; `None` where there never was one.
    fn newest(owned: &Owned<'_>) -> Option<Self> {
        let known = owned.mark.cloned().unwrap_or_else(|| {
            // A mark that was lost: what was reported is the least that was done, and nothing says that it ended clean.
            owned.reported.map_or_else(Mark::default, |reported| Mark {
                generation: reported.generation,
                access: reported.allowed.clone(),
                ..Mark::default()
            })
        });
        let wanted = owned.wanted.filter(|wanted| wanted.epoch > known.access.epoch);
        // Two orders of one epoch: the store was restored from a backup, and its leader came to an epoch that was carried out
        // before. Neither is obeyed; the leader is told of a later epoch, and orders anew.
        let twice = owned
            .wanted
            .filter(|wanted| wanted.epoch == known.access.epoch && wanted.consumer != known.access.consumer);
        let nobody =
            twice.and_then(|wanted| wanted.epoch.next()).map(|epoch| Access { consumer: None, epoch });
        let wanted = wanted.or(nobody.as_ref());
        let new = wanted.is_some();
        let mut target = wanted.unwrap_or(&known.access).clone();
        if target == Access::default() {
            return None;
        }
        if owned.deleting {
            target.consumer = None;
        }
        let restarted = known.boot_id != owned.boot_id || known.clean;
        // That it is durable now says nothing about the boot that crashed.
        let unclean = known.boot_id != owned.boot_id && !known.clean && !(known.durable && owned.durable);
        Some(Self { target, known, new, unclean, restarted })
    }

    /// Ends what other nodes may do; `keep_here`: this node may use the branch.
    fn close(&self, owned: &Owned<'_>, keep_here: bool) -> Vec<OwnerAction> {
        // The first order may find the branch in use here from before there were orders.
        let first = self.known.access == Access::default();
        let mut actions = owned.fences(!(keep_here && (first || !self.new)));
        actions.extend(owned.export.map(|_| OwnerAction::Unexport));
        if self.new || self.restarted {
            let generation = if self.unclean { self.known.generation.next() } else { self.known.generation };
            actions.push(OwnerAction::Remember(self.mark(owned, generation, None)));
        }
        actions
    }

    /// Lets `node` use the branch, and nobody else.
    fn open(&self, owned: &Owned<'_>, node: &NodeName) -> Vec<OwnerAction> {
        let known = &self.known;
        let identity = owned.identities.get(node).or(known.peer.as_ref().filter(|_| !self.new));
        let (exported, allowed) =
            owned.export.map_or((Generation::default(), &[][..]), |e| (e.generation, &e.allowed));
        let others = owned.here || allowed.iter().any(|peer| Some(peer) != identity);
        let renamed = known.peer.is_some() && known.peer.as_ref() != identity;
        if self.new || self.unclean || others || renamed || exported > known.generation {
            let generation = known.generation.max(exported).next();
            let mut actions = owned.fences(true);
            actions.extend(owned.export.map(|_| OwnerAction::Unexport));
            // From here on everything in the kernel is of this order.
            actions.push(OwnerAction::Remember(self.mark(owned, generation, identity)));
            actions.push(OwnerAction::Export(generation));
            actions.extend(identity.cloned().map(OwnerAction::Allow));
            return actions;
        }
        let mut actions = Vec::new();
        if self.restarted || known.peer.as_ref() != identity || known.durable != owned.durable {
            actions.push(OwnerAction::Remember(self.mark(owned, known.generation, identity)));
        }
        if exported != known.generation {
            actions.push(OwnerAction::Export(known.generation));
        }
        if let Some(identity) = identity.filter(|_| exported != known.generation || allowed.is_empty()) {
            actions.push(OwnerAction::Allow(identity.clone()));
        }
        actions
    }

    fn mark(&self, owned: &Owned<'_>, generation: Generation, peer: Option<&String>) -> Mark {
        Mark {
            generation,
            access: self.target.clone(),
            peer: peer.cloned(),
            boot_id: owned.boot_id.to_owned(),
            clean: false,
            durable: owned.durable,
        }
    }

    /// What is seen, where that is news.
    fn report(&self, owned: &Owned<'_>) -> Vec<OwnerAction> {
        let export = owned.export.filter(|export| !export.allowed.is_empty());
        let consumer = self.target.consumer.clone().filter(|node| node == owned.node || export.is_some());
        let remote = consumer.as_ref().is_some_and(|node| node != owned.node);
        let local = consumer.is_some() && !remote;
        let report = ExportReport {
            generation: self.known.generation,
            address: owned.export.map(|export| export.address.clone()),
            name: owned.export.map(|export| export.name.clone()),
            transport: if local { Some(Transport::Local) } else { export.map(|export| export.transport) },
            allowed: Access { consumer, epoch: self.target.epoch },
            boot_id: owned.boot_id.to_owned(),
        };
        if owned.reported == Some(&report) { Vec::new() } else { vec![OwnerAction::Report(report)] }
    }
}
