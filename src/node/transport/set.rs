//! The transports of this node: what its kernel can carry now, and the ends to do it with.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::watch;

use super::{Consumer, Owner, TransportError};
use crate::domain::reach::{StorageNetwork, Transport, TransportReport};

/// What this node can carry between itself and others, and where they reach it: what its `StorageNode` tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// By transport.
    pub transports: Vec<TransportReport>,
    /// Its place on the storage network; `None`: not known.
    pub network: Option<StorageNetwork>,
}

impl Carried {
    /// By what this node can attach branches of others.
    #[must_use]
    pub fn attachable(&self) -> Vec<Transport> {
        let able = self.transports.iter().filter(|report| report.consumer.able);
        able.map(|report| report.transport).collect()
    }
}

/// Both ends of one transport on this node; in place of one that its kernel cannot be, the reason.
#[derive(Clone)]
pub struct Ends {
    /// Exports branches of this node.
    pub owner: Result<Arc<dyn Owner>, String>,
    /// Attaches branches of other nodes.
    pub consumer: Result<Arc<dyn Consumer>, String>,
}

/// The transports of this node. They change while the agent runs: a module is loaded, an address comes.
pub struct Transports {
    /// `None`: not looked at yet.
    ends: RwLock<Option<BTreeMap<Transport, Ends>>>,
    carried: watch::Sender<Carried>,
}

impl fmt::Debug for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transports").field("carried", &*self.carried.borrow()).finish_non_exhaustive()
    }
}

impl Transports {
    /// A node that reaches nobody: without a storage network, or before it was looked at.
    #[must_use]
    pub fn none() -> Self {
        Self { ends: RwLock::default(), carried: watch::Sender::default() }
    }

    /// Takes what was found in place of what was known.
    pub fn install(&self, carried: Carried, ends: BTreeMap<Transport, Ends>) {
        let first = self.ends.write().unwrap_or_else(PoisonError::into_inner).replace(ends).is_none();
        self.carried.send_if_modified(|known| {
            let news = first || *known != carried;
            *known = carried;
            news
        });
    }

    /// Tells of what was found, and leaves the ends as they are.
    pub fn tell(&self, carried: Carried) {
        self.carried.send_if_modified(|known| {
            let news = *known != carried;
            *known = carried;
            news
        });
    }

    /// Whether it was looked at what this node can carry.
    #[must_use]
    pub fn surveyed(&self) -> bool {
        self.ends.read().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// What this node can carry: the first finding, and each later change of it.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Carried> {
        self.carried.subscribe()
    }

    /// The end that exports.
    ///
    /// # Errors
    /// [`TransportError::Unable`] with the reason where this node cannot.
    pub fn owner(&self, transport: Transport) -> Result<Arc<dyn Owner>, TransportError> {
        self.end(transport, "export branches", |ends| ends.owner.clone())
    }

    /// Whether a kernel's server has forgotten something; see [`Owner::forgotten`].
    #[must_use]
    pub fn forgotten(&self) -> bool {
        let ends = self.ends.read().unwrap_or_else(PoisonError::into_inner);
        let mut owners = ends.iter().flatten().filter_map(|(_, ends)| ends.owner.as_ref().ok());
        owners.any(|owner| owner.forgotten().unwrap_or(false))
    }

    /// Looks after what was taken from other nodes; see [`Owner::tend`].
    pub fn tend(&self) {
        let ends = self.ends.read().unwrap_or_else(PoisonError::into_inner).clone();
        for (transport, ends) in ends.iter().flatten() {
            if let Some(error) = ends.owner.as_ref().ok().and_then(|owner| owner.tend().err()) {
                tracing::warn!(%transport, %error, "what was taken from other nodes is not looked after");
            }
        }
    }

    /// Lets nobody reach what this node exports any more, because the machine is about to stop; see [`Owner::withdraw`].
    pub fn withdraw(&self) {
        let ends = self.ends.read().unwrap_or_else(PoisonError::into_inner);
        for (transport, ends) in ends.iter().flatten() {
            let Ok(owner) = &ends.owner else { continue };
            match owner.withdraw() {
                Ok(()) => {
                    tracing::info!(%transport, "the machine stops: exports are withdrawn until it is back")
                }
                Err(error) => tracing::warn!(%transport, %error, "exports are not withdrawn"),
            }
        }
    }

    /// The end that attaches.
    ///
    /// # Errors
    /// [`TransportError::Unable`] with the reason where this node cannot.
    pub fn consumer(&self, transport: Transport) -> Result<Arc<dyn Consumer>, TransportError> {
        self.end(transport, "attach branches of other nodes", |ends| ends.consumer.clone())
    }

    fn end<T>(
        &self,
        transport: Transport,
        action: &'static str,
        of: impl FnOnce(&Ends) -> Result<T, String>,
    ) -> Result<T, TransportError> {
        let ends = self.ends.read().unwrap_or_else(PoisonError::into_inner);
        let end = match ends.as_ref().and_then(|ends| ends.get(&transport)) {
            Some(ends) => of(ends),
            None => Err(format!("{transport} was not found to work here")),
        };
        end.map_err(|reason| TransportError::Unable { action, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_reaches_nobody_says_so_and_one_end_may_lack_alone() {
        let transports = Transports::none();
        let error = transports.owner(Transport::Nfs).err().map(|e| e.to_string());
        assert_eq!(
            error.as_deref(),
            Some("this node cannot export branches: nfs was not found to work here")
        );

        let mut seen = transports.watch();
        let ends = Ends { owner: Err("no nfsd".to_owned()), consumer: Err("no nfs".to_owned()) };
        let network = StorageNetwork { interface: "eth1".to_owned(), ..StorageNetwork::default() };
        let carried = Carried { network: Some(network), ..Carried::default() };
        transports.install(carried.clone(), [(Transport::Nfs, ends.clone())].into());
        assert!(seen.has_changed().unwrap());
        assert_eq!(*seen.borrow_and_update(), carried);
        let error = transports.consumer(Transport::Nfs).err().map(|e| e.to_string());
        assert_eq!(error.as_deref(), Some("this node cannot attach branches of other nodes: no nfs"));
        transports.install(carried, [(Transport::Nfs, ends)].into());
        assert!(!seen.has_changed().unwrap(), "the same again is no news");
    }
}
