//! One look at a branch, and what follows from it.

use std::time::Instant;

use tracing::info;

use super::AccessError;
use super::exporter::{Asked, Key, Settled};
use super::mark::Kept;
use super::tally::Tally;
use crate::domain::access::shared::SharedMark;
use crate::domain::access::{
    ExportReport, Exported, Generation, Mark, Owned, OwnerAction, Peer, Right, owner_step,
};
use crate::domain::reach::Transport;
use crate::domain::{NodeName, Secret};
use crate::node::branch::BranchError;
use crate::node::keys::KeyFiles;
use crate::node::transport::{self, Endpoint, ExportId, Owner, Source, TransportError};
use crate::store::Pair;

/// A branch whose turn the caller has.
pub(in crate::node) trait Held {
    /// What is kept beside it.
    fn kept(&self) -> Result<Kept, BranchError>;
    /// Keeps that, down to the disk.
    fn remember(&self, mark: &Mark) -> Result<(), BranchError>;
    /// What is kept of those who share it.
    fn kept_shared(&self) -> Result<Kept<SharedMark>, BranchError>;
    /// Keeps that, down to the disk.
    fn remember_shared(&self, mark: &SharedMark) -> Result<(), BranchError>;
    /// Whether this node has it attached.
    fn here(&self) -> Result<bool, BranchError>;
    /// What would be exported.
    fn source(&self) -> Source;
}

/// What comes after a look.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Something was done: look again.
    Again,
    /// This node's own use is to be ended, without the branch's turn; then look again.
    EndHere,
    /// Nothing is left to be done.
    Settled(Settled),
}

/// The owner's part for one branch, for as long as its turn is held.
pub(super) struct Pass<'a, H: Held> {
    pub(super) asked: &'a Asked<'a>,
    pub(super) held: &'a H,
    pub(super) node: &'a NodeName,
    pub(super) boot_id: &'a str,
    pub(super) transport: Transport,
    /// The end that exports; in place of it, why there is none.
    pub(super) owner: Result<&'a dyn Owner, &'a TransportError>,
    pub(super) keys: &'a KeyFiles,
    pub(super) tally: &'a Tally,
}

impl<H: Held> Pass<'_, H> {
    /// Looks at the branch and does what is to be done.
    pub(super) fn run(&self) -> Result<Next, AccessError> {
        let (mark, shared) = (self.mark()?, self.shared_mark()?);
        let export = match self.export(mark.as_ref(), shared.as_ref())? {
            Ok(export) => export,
            Err(Untidy) => return Ok(Next::Again),
        };
        if let Some(next) = self.share(mark.as_ref(), shared.as_ref(), export.as_ref())? {
            return Ok(next);
        }
        let mark = self.above(mark, shared.as_ref());
        let asked = self.asked;
        // Of a branch that no order ever named nothing else is asked.
        let governed = mark.is_some() || asked.wanted.is_some() || asked.reported.is_some();
        let durable = match &self.owner {
            Ok(owner) if governed => owner
                .durable(&self.held.source())
                .map_err(|e| self.failed("look whether it is written through", e))?,
            _ => false,
        };
        let owned = Owned {
            node: self.node,
            wanted: asked.wanted,
            deleting: asked.deleting,
            mark: mark.as_ref(),
            boot_id: self.boot_id,
            durable,
            export: export.as_ref(),
            here: governed && self.held.here()?,
            identities: asked.identities,
            reported: asked.reported,
        };
        let actions = owner_step(&owned);
        let mut current = mark;
        for action in &actions {
            match action {
                OwnerAction::Report(report) => {
                    return Ok(Next::Settled(self.settled(current, export.as_ref(), Some(report.clone()))));
                }
                OwnerAction::Fence(Peer::Here) => return Ok(Next::EndHere),
                other => self.act(other, &mut current)?,
            }
        }
        match actions.is_empty() {
            true => Ok(Next::Settled(self.settled(current, export.as_ref(), None))),
            false => Ok(Next::Again),
        }
    }

    fn mark(&self) -> Result<Option<Mark>, AccessError> {
        self.known(self.held.kept()?)
    }

    /// What is kept, if it can be understood.
    pub(super) fn known<M>(&self, kept: Kept<M>) -> Result<Option<M>, AccessError> {
        let id = &self.asked.spec.id;
        match kept {
            Kept::Nothing => Ok(None),
            Kept::Mark(mark) => Ok(Some(mark)),
            Kept::Lost(reason) => {
                tracing::error!(
                    branch.id = %id, reason,
                    "who may use a branch was forgotten on its disk: it is taken from what was reported last, and every right is \
                     given anew"
                );
                Ok(None)
            }
            Kept::Newer(reason) => Err(BranchError::Mark { branch: id.clone(), reason }.into()),
        }
    }

    /// The branch's export in the kernel. What is half made, or there twice, is ended whole: nobody had a use of it.
    fn export(
        &self,
        mark: Option<&Mark>,
        shared: Option<&SharedMark>,
    ) -> Result<Result<Option<Exported>, Untidy>, AccessError> {
        let branch = &self.asked.spec.id;
        let owner = match &self.owner {
            Ok(owner) => *owner,
            Err(source) => {
                let stands = self.may_stand(mark) || self.may_be_shared(shared);
                let Some(source) = stands.then(|| again(source)) else { return Ok(Ok(None)) };
                return Err(AccessError::Unseen {
                    branch: branch.clone(),
                    transport: self.transport,
                    source,
                });
            }
        };
        let exports = owner.exports_of(branch).map_err(|e| self.failed("look at what is exported", e))?;
        let mut found = exports.into_iter();
        let Some(first) = found.next() else { return Ok(Ok(None)) };
        match (first.endpoint, found.next()) {
            (Some(endpoint), None) => Ok(Ok(Some(Exported {
                generation: first.id.generation,
                address: endpoint.address.to_string(),
                name: endpoint.name,
                transport: self.transport,
                allowed: first.allowed,
                readers: first.readers,
            }))),
            _ => {
                owner.unexport(branch).map_err(|e| self.failed("end what is half exported", e))?;
                info!(branch.id = %branch, "what was left half exported of a branch is ended");
                Ok(Err(Untidy))
            }
        }
    }

    /// Whether the kernel may have an export of the branch although it cannot be asked. An export is of the boot that its mark
    /// names, which is written before it is made.
    fn may_stand(&self, mark: Option<&Mark>) -> bool {
        let others = |consumer: &Option<NodeName>| consumer.as_ref().is_some_and(|node| node != self.node);
        match mark {
            Some(mark) => mark.boot_id == self.boot_id && !mark.clean && others(&mark.access.consumer),
            None => {
                self.asked.reported.is_some_and(|r| r.boot_id == self.boot_id && others(&r.allowed.consumer))
            }
        }
    }

    fn act(&self, action: &OwnerAction, mark: &mut Option<Mark>) -> Result<(), AccessError> {
        let (branch, begun) = (&self.asked.spec.id, Instant::now());
        let generation = mark.as_ref().map_or(Generation::default(), |mark| mark.generation);
        let id = ExportId { branch: branch.clone(), generation };
        let epoch = mark.as_ref().map(|mark| mark.access.epoch.0);
        let seconds = || begun.elapsed().as_secs_f64();
        match action {
            OwnerAction::Fence(Peer::Remote(identity)) => {
                let peer = self.peer(identity, mark.as_ref());
                self.fence(&id, &peer)?;
                info!(branch.id = %branch, peer = identity, epoch, duration.seconds = seconds(), "a node is fenced from the branch");
            }
            OwnerAction::Unexport => {
                self.unexport()?;
            }
            OwnerAction::Remember(new) => {
                self.hear_last(mark.as_ref(), new);
                self.held.remember(new)?;
                info!(
                    branch.id = %branch, consumer = new.access.consumer.as_ref().map(NodeName::as_str),
                    epoch = new.access.epoch.0, generation = new.generation.0, "an order is noted beside the branch"
                );
                *mark = Some(new.clone());
            }
            OwnerAction::Export(generation) => {
                let endpoint = self.export_as(*generation)?;
                info!(
                    branch.id = %branch, epoch, generation = generation.0, address = %endpoint.address, name = endpoint.name,
                    duration.seconds = seconds(), "the branch is exported"
                );
            }
            OwnerAction::Allow(identity) => {
                let peer = self.peer(identity, mark.as_ref());
                let key = self.key(&peer.node)?;
                let encrypted = matches!(self.held.source(), Source::Image { encrypted: true, .. });
                let key = if encrypted { Some(self.encrypting(key)?) } else { key.map(Secret::without_tls) };
                self.allow(&id, &peer, Right::Write, key.as_ref())?;
                info!(
                    branch.id = %branch, peer.node = %peer.node, peer = identity, epoch, generation = generation.0,
                    authenticated = key.is_some(), encrypted, duration.seconds = seconds(),
                    "the branch is open to a node"
                );
            }
            OwnerAction::Fence(Peer::Here) | OwnerAction::Report(_) => {}
        }
        Ok(())
    }

    /// The key, if it has a part to encrypt with.
    fn encrypting(&self, key: Option<Secret>) -> Result<Secret, AccessError> {
        key.filter(|key| key.tls().is_some()).ok_or_else(|| {
            let branch = self.asked.spec.id.clone();
            let reason = "the two nodes have no key for that".to_owned();
            self.failed("let a node use it", TransportError::Readable { branch, reason })
        })
    }

    /// The key that the node is to prove to have, kept before the kernel is told.
    fn key(&self, consumer: &NodeName) -> Result<Option<Secret>, AccessError> {
        if self.transport != Transport::NvmeTcp {
            return Ok(None);
        }
        let pair = Pair { owner: self.node.clone(), consumer: consumer.clone() };
        match &self.asked.key {
            Key::Kept => Ok(self.keys.kept(&pair)?),
            Key::Stored(key) => {
                self.keys.keep(&pair, key.as_ref())?;
                Ok(key.clone())
            }
        }
    }

    /// Takes the right from a node in the kernel.
    pub(super) fn fence(&self, id: &ExportId, peer: &transport::Peer) -> Result<(), AccessError> {
        self.owner()?.fence(id, peer).map_err(|e| self.failed("fence a node", e))?;
        Tally::count(&self.tally.fences);
        Ok(())
    }

    /// Has the node heard that had the branch before this machine restarted, unless it has it again.
    fn hear_last(&self, old: Option<&Mark>, new: &Mark) {
        let Some(old) = old.filter(|old| old.boot_id != new.boot_id && old.peer != new.peer) else { return };
        if let Some(identity) = &old.peer {
            self.hear(&self.peer(identity, Some(old)), old.generation);
        }
    }

    /// Has a node heard that lost the branch while this machine was off. It has no right that could be taken from it, and waits all
    /// the same. Where that cannot be, the order is carried out nevertheless: nobody's data depends on it.
    pub(super) fn hear(&self, peer: &transport::Peer, generation: Generation) {
        let branch = &self.asked.spec.id;
        let id = ExportId { branch: branch.clone(), generation };
        let heard = self.owner.as_ref().map_or(Ok(()), |owner| owner.hear(&id, &self.held.source(), peer));
        if let Err(error) = heard {
            tracing::warn!(
                branch.id = %branch, peer.node = %peer.node, peer = peer.identity, %error,
                "a node that lost the branch while this machine was off cannot be heard: programs on it may wait for it"
            );
        }
    }

    /// Ends the export in the kernel.
    pub(super) fn unexport(&self) -> Result<(), AccessError> {
        let (branch, begun) = (&self.asked.spec.id, Instant::now());
        self.owner()?.unexport(branch).map_err(|e| self.failed("end its export", e))?;
        let seconds = begun.elapsed().as_secs_f64();
        info!(branch.id = %branch, duration.seconds = seconds, "the branch is no longer exported");
        Ok(())
    }

    /// Has the kernel export the branch as that generation; nobody is allowed.
    pub(super) fn export_as(&self, generation: Generation) -> Result<Endpoint, AccessError> {
        let id = ExportId { branch: self.asked.spec.id.clone(), generation };
        let source = self.held.source();
        self.owner()?.export(&id, &source).map_err(|e| self.failed("export it", e))
    }

    /// Lets a node use the export in the kernel.
    pub(super) fn allow(
        &self,
        id: &ExportId,
        peer: &transport::Peer,
        right: Right,
        key: Option<&Secret>,
    ) -> Result<(), AccessError> {
        self.owner()?.allow(id, peer, right, key).map_err(|e| self.failed("let a node use it", e))?;
        Tally::count(&self.tally.grants);
        Ok(())
    }

    fn owner(&self) -> Result<&dyn Owner, AccessError> {
        self.owner.as_ref().copied().map_err(|e| self.failed("export it", again(e)))
    }

    /// The node that calls itself so. A transport knows it by that alone: who cannot be named any more is fenced all the same.
    fn peer(&self, identity: &str, mark: Option<&Mark>) -> transport::Peer {
        let marked = mark.filter(|mark| mark.peer.as_deref() == Some(identity));
        let known =
            || self.asked.identities.iter().find(|(_, i)| *i == identity).map(|(node, _)| node.clone());
        let node = marked.and_then(|mark| mark.access.consumer.clone()).or_else(known);
        transport::Peer { node: node.unwrap_or_else(|| self.node.clone()), identity: identity.to_owned() }
    }

    fn settled(
        &self,
        mark: Option<Mark>,
        export: Option<&Exported>,
        report: Option<ExportReport>,
    ) -> Settled {
        let consumer = mark.as_ref().and_then(|mark| mark.access.consumer.clone());
        let other = consumer.filter(|node| node != self.node && !self.asked.deleting);
        let open = export.is_some_and(|export| !export.allowed.is_empty());
        let (open_to, waits_for) = if open { (other, None) } else { (None, other) };
        let open_to = open_to.into_iter().collect();
        Settled { report, shared: None, open_to, waits_for, transport: self.transport }
    }

    fn failed(&self, action: &'static str, source: TransportError) -> AccessError {
        AccessError::Transport { branch: self.asked.spec.id.clone(), action, source }
    }
}

/// What the kernel had was no whole export, and is ended.
struct Untidy;

/// The same error once more: why an end is missing is told for each thing that needs it.
fn again(error: &TransportError) -> TransportError {
    match error {
        TransportError::Unable { action, reason } => {
            TransportError::Unable { action, reason: reason.clone() }
        }
        other => TransportError::Unable { action: "export branches", reason: other.to_string() },
    }
}
