//! The owner's part for a branch that several nodes share.

use std::time::Instant;

use tracing::info;

use super::AccessError;
use super::carry::{Held, Next, Pass};
use super::exporter::Settled;
use crate::domain::NodeName;
use crate::domain::access::shared::{
    SharedMark, SharedOwned, SharedOwnerAction, SharingReport, shared_owner_step,
};
use crate::domain::access::{Exported, Generation, Mark, Peer, Right};
use crate::domain::split::BranchFormat;
use crate::node::transport::{self, ExportId};

impl<H: Held> Pass<'_, H> {
    /// What is kept of those who share the branch.
    pub(super) fn shared_mark(&self) -> Result<Option<SharedMark>, AccessError> {
        match self.asked.spec.format {
            BranchFormat::Directory => self.known(self.held.kept_shared()?),
            BranchFormat::Image => Ok(None),
        }
    }

    /// Whether the kernel may have an export for others to share although it cannot be asked.
    pub(super) fn may_be_shared(&self, mark: Option<&SharedMark>) -> bool {
        let others = |mark: &SharedMark| mark.consumers.iter().any(|sharer| sharer.node != *self.node);
        let this_boot = self.asked.shared.is_none_or(|report| report.boot_id == self.boot_id);
        this_boot && mark.is_some_and(others)
    }

    /// The mark of the branch for one node alone, no older than what was shared: a generation never comes again.
    pub(super) fn above(&self, mark: Option<Mark>, shared: Option<&SharedMark>) -> Option<Mark> {
        let Some(shared) = shared else { return mark };
        let mut mark = mark.unwrap_or_else(|| {
            // As for a mark that was lost.
            self.asked.reported.map_or_else(Mark::default, |reported| Mark {
                generation: reported.generation,
                access: reported.allowed.clone(),
                ..Mark::default()
            })
        });
        mark.generation = mark.generation.max(shared.generation);
        Some(mark)
    }

    /// Looks at the branch and does what is to be done, where it is shared; `None` where it is not.
    pub(super) fn share(
        &self,
        alone: Option<&Mark>,
        mark: Option<&SharedMark>,
        export: Option<&Exported>,
    ) -> Result<Option<Next>, AccessError> {
        let asked = self.asked;
        let named = asked.sharing.is_some() || asked.shared.is_some() || mark.is_some();
        if asked.spec.format != BranchFormat::Directory || !named {
            return Ok(None);
        }
        let actions = shared_owner_step(&SharedOwned {
            node: self.node,
            wanted: asked.sharing,
            deleting: asked.deleting,
            mark,
            floor: alone.map_or(Generation::default(), |alone| alone.generation),
            boot_id: self.boot_id,
            export,
            here: self.held.here()?,
            identities: asked.identities,
            reported: asked.shared,
        });
        let Some(actions) = actions else { return Ok(None) };
        let mut current = mark.cloned();
        for action in &actions {
            match action {
                SharedOwnerAction::Report(report) => {
                    let settled = self.shared_settled(current.as_ref(), export, Some(report.clone()));
                    // Nobody shares it any more: the rest is decided as for one node alone, with this told.
                    return Ok(Some(Next::Settled(settled)));
                }
                SharedOwnerAction::Fence(Peer::Here) => return Ok(Some(Next::EndHere)),
                SharedOwnerAction::Remember(new) => {
                    self.hear_leaving(new, export);
                    self.do_shared(action, &mut current)?;
                }
                other => self.do_shared(other, &mut current)?,
            }
        }
        Ok(Some(match actions.is_empty() {
            true => Next::Settled(self.shared_settled(current.as_ref(), export, None)),
            false => Next::Again,
        }))
    }

    fn do_shared(
        &self,
        action: &SharedOwnerAction,
        mark: &mut Option<SharedMark>,
    ) -> Result<(), AccessError> {
        let (branch, begun) = (&self.asked.spec.id, Instant::now());
        let generation = mark.as_ref().map_or(Generation::default(), |mark| mark.generation);
        let id = ExportId { branch: branch.clone(), generation };
        let epoch = mark.as_ref().map(|mark| mark.epoch.0);
        let seconds = || begun.elapsed().as_secs_f64();
        match action {
            SharedOwnerAction::Fence(Peer::Remote(identity)) => {
                let peer = self.sharer(identity, mark.as_ref());
                self.fence(&id, &peer)?;
                info!(
                    branch.id = %branch, peer.node = %peer.node, peer = identity, epoch, duration.seconds = seconds(),
                    "a node is fenced from the shared branch"
                );
            }
            SharedOwnerAction::Unexport => {
                self.unexport()?;
            }
            SharedOwnerAction::Remember(new) => {
                self.held.remember_shared(new)?;
                let nodes: Vec<&str> = new.consumers.iter().map(|sharer| sharer.node.as_str()).collect();
                info!(
                    branch.id = %branch, consumers = nodes.join(", "), epoch = new.epoch.0, generation = new.generation.0,
                    "who shares the branch is noted beside it"
                );
                *mark = Some(new.clone());
            }
            SharedOwnerAction::Export(generation) => {
                let endpoint = self.export_as(*generation)?;
                info!(
                    branch.id = %branch, epoch, generation = generation.0, address = %endpoint.address, name = endpoint.name,
                    duration.seconds = seconds(), "the branch is exported to be shared"
                );
            }
            SharedOwnerAction::Allow(identity, right) => {
                let peer = self.sharer(identity, mark.as_ref());
                self.allow(&id, &peer, *right, None)?;
                info!(
                    branch.id = %branch, peer.node = %peer.node, peer = identity, epoch, generation = generation.0,
                    read_only = *right == Right::Read, duration.seconds = seconds(), "the shared branch is open to a node"
                );
            }
            SharedOwnerAction::Fence(Peer::Here) | SharedOwnerAction::Report(_) => {}
        }
        Ok(())
    }

    /// Has those heard who are to leave and have no right in the kernel that could be taken from them: they lost it while this machine
    /// was off.
    fn hear_leaving(&self, mark: &SharedMark, export: Option<&Exported>) {
        let allowed = export.map_or(&[][..], |export| &export.allowed);
        for sharer in &mark.leaving {
            if let Some(identity) = sharer.identity.as_ref().filter(|identity| !allowed.contains(identity)) {
                let peer = transport::Peer { node: sharer.node.clone(), identity: identity.clone() };
                self.hear(&peer, mark.generation);
            }
        }
    }

    /// The node that calls itself so; a transport knows it by that alone.
    fn sharer(&self, identity: &str, mark: Option<&SharedMark>) -> transport::Peer {
        let mut marked = mark.into_iter().flat_map(|mark| &mark.consumers);
        let node = marked.find(|sharer| sharer.identity.as_deref() == Some(identity));
        let node = node.map_or_else(|| self.node.clone(), |sharer| sharer.node.clone());
        transport::Peer { node, identity: identity.to_owned() }
    }

    fn shared_settled(
        &self,
        mark: Option<&SharedMark>,
        export: Option<&Exported>,
        report: Option<SharingReport>,
    ) -> Settled {
        let allowed = export.map_or(&[][..], |export| &export.allowed);
        let others = || {
            let all = mark.into_iter().flat_map(|mark| &mark.consumers);
            all.filter(|sharer| sharer.node != *self.node)
        };
        let open_to: Vec<NodeName> = others()
            .filter(|sharer| sharer.identity.as_ref().is_some_and(|identity| allowed.contains(identity)))
            .map(|sharer| sharer.node.clone())
            .collect();
        let waits_for = others().find(|sharer| sharer.identity.is_none()).map(|sharer| sharer.node.clone());
        Settled { report: None, shared: report.map(Box::new), open_to, waits_for, transport: self.transport }
    }
}
