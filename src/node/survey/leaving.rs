//! The ends of a node that takes no part in the storage network any more: what it lent and borrowed before is served on and can be
//! taken back, and nothing is begun.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::domain::reach::Transport;
use crate::domain::{BranchId, Bytes, Secret};
use crate::node::transport::{
    Attached, Consumer, Endpoint, Ends, ExportId, Exported, Owner, Patience, Peer, Right, Source,
    TransportError,
};

const OFF: &str = "this node takes no part in the storage network (network.interface); what was lent before is served on and \
                   can be taken back";

/// The same ends, that begin nothing.
pub(super) fn leaving(ends: BTreeMap<Transport, Ends>) -> BTreeMap<Transport, Ends> {
    let one = |ends: Ends| Ends {
        owner: ends.owner.map(|owner| Arc::new(LeavingOwner(owner)) as _),
        consumer: ends.consumer.map(|consumer| Arc::new(LeavingConsumer(consumer)) as _),
    };
    ends.into_iter().map(|(transport, ends)| (transport, one(ends))).collect()
}

fn off<T>(action: &'static str) -> Result<T, TransportError> {
    Err(TransportError::Unable { action, reason: OFF.to_owned() })
}

struct LeavingOwner(Arc<dyn Owner>);

impl Owner for LeavingOwner {
    fn export(&self, _: &ExportId, _: &Source) -> Result<Endpoint, TransportError> {
        off("export a branch")
    }

    fn allow(&self, _: &ExportId, _: &Peer, _: Right, _: Option<&Secret>) -> Result<(), TransportError> {
        off("let a node use a branch")
    }

    fn fence(&self, id: &ExportId, peer: &Peer) -> Result<(), TransportError> {
        self.0.fence(id, peer)
    }

    fn unexport(&self, branch: &BranchId) -> Result<(), TransportError> {
        self.0.unexport(branch)
    }

    fn hear(&self, id: &ExportId, source: &Source, peer: &Peer) -> Result<(), TransportError> {
        self.0.hear(id, source, peer)
    }

    fn tend(&self) -> Result<(), TransportError> {
        self.0.tend()
    }

    fn withdraw(&self) -> Result<(), TransportError> {
        self.0.withdraw()
    }

    fn grown(&self, id: &ExportId) -> Result<Bytes, TransportError> {
        self.0.grown(id)
    }

    fn durable(&self, source: &Source) -> Result<bool, TransportError> {
        self.0.durable(source)
    }

    fn exports(&self) -> Result<Vec<Exported>, TransportError> {
        self.0.exports()
    }
}

struct LeavingConsumer(Arc<dyn Consumer>);

impl Consumer for LeavingConsumer {
    fn identity(&self) -> Result<String, TransportError> {
        self.0.identity()
    }

    fn attach(
        &self,
        _: &ExportId,
        _: &Endpoint,
        _: Option<&Secret>,
        _: Patience,
    ) -> Result<Attached, TransportError> {
        off("attach a branch of another node")
    }

    fn set_patience(&self, id: &ExportId, patience: Patience) -> Result<(), TransportError> {
        self.0.set_patience(id, patience)
    }

    fn detach(&self, id: &ExportId) -> Result<(), TransportError> {
        self.0.detach(id)
    }

    fn force_detach(&self, id: &ExportId) -> Result<(), TransportError> {
        self.0.force_detach(id)
    }

    fn attachments(&self) -> Result<Vec<Attached>, TransportError> {
        self.0.attachments()
    }
}
