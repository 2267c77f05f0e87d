//! The store of a cluster: custom resources of the Kubernetes API.
//!
//! The program's objects ([`super::object`]) have the same spec and status in the API; their metadata is mapped
//! (`wire`). How each is written:
//!
//! - made: POST, the only verb that never changes what exists;
//! - spec, labels, finalizers: one JSON patch that carries the version it was made from, which makes it a
//!   compare-and-swap. Fields that this version of the program does not know stay as they are;
//! - status: server-side apply on the status subresource, with the version as well. All instances apply under one name of
//!   a field manager, so that a field that one of them wrote can be taken away by another;
//! - deleted: with the version as precondition where one is given.
//!
//! Keys that pairs of nodes share are Secrets (`keys`).
//!
//! What is selected by node or volume is selected by the API server on the spec itself (`selectableFields`), not by labels,
//! which hold 63 bytes and can be edited by anyone.
//!
//! Invariants: each request and each wait for one is bounded; a stored object that is not understood is reported once a
//! version, left out, and stops nothing else.

mod collection;
pub mod crd;
mod endpoint;
mod fault;
mod keys;
mod malformed;
mod resource;
mod summary;
mod watch;
mod wire;

use std::sync::Arc;

use kube::Client;

use super::object::{Branch, StorageNode, VolumeSplit};
use super::{Collection, Figures, Keys, Store};
use collection::Resources;
use endpoint::Server;
use keys::KeySecrets;

pub use crd::crds;
pub use fault::ApiFault;

/// API group of the objects.
pub const GROUP: &str = "union.io";

/// Version of the objects.
pub const VERSION: &str = "v1alpha1";

/// The objects of one cluster.
pub struct KubernetesStore {
    server: Arc<Server>,
    splits: Resources<VolumeSplit>,
    branches: Resources<Branch>,
    nodes: Resources<StorageNode>,
    keys: KeySecrets,
}

impl std::fmt::Debug for KubernetesStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesStore").finish_non_exhaustive()
    }
}

impl KubernetesStore {
    /// The store behind `client`; volumes and branches are in `namespace`. `field_manager` must be the same for every
    /// instance of the program: it owns the fields of each status. Makes no request.
    #[must_use]
    pub fn new(client: Client, namespace: &str, field_manager: &str) -> Self {
        let server = Arc::new(Server::new(client, namespace, field_manager));
        Self {
            splits: Resources::new(&server),
            branches: Resources::new(&server),
            nodes: Resources::new(&server),
            keys: KeySecrets::new(&server),
            server,
        }
    }
}

impl Store for KubernetesStore {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }

    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }

    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }

    fn keys(&self) -> &dyn Keys {
        &self.keys
    }

    fn figures(&self) -> Figures {
        let malformed = [self.splits.malformed(), self.branches.malformed(), self.nodes.malformed()];
        Figures { requests: self.server.requests(), malformed: malformed.iter().sum() }
    }
}

#[cfg(test)]
mod tests;
