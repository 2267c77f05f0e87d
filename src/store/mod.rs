//! Desired and observed state: where the roles of the program meet.
//!
//! Roles never call each other. A request becomes a desired object; the node that it concerns sees it, acts, and writes
//! what it observed; whoever asked sees that. [`Store`] has one implementation for a cluster (Kubernetes) and one for a
//! single machine ([`local`]); [`contract`] is the suite that each of them passes.
//!
//! The rules, which are those of Kubernetes' API objects:
//! - every write raises the object's [`Version`]; an update names the version it was made from and is refused with
//!   [`StoreError::Conflict`] when another came first;
//! - `spec` and labels are written by [`Collection::update`], `status` by [`Collection::update_status`]; neither touches
//!   what is the other's;
//! - [`Collection::delete`] removes an object that has no finalizers at once; one that has them is only marked
//!   (`meta.deleting`) and goes with the update that removes the last finalizer;
//! - a watch begins with the objects as they are, then reports every later state at least once in order, deletions
//!   included; fast changes of one object may be reported as its latest state only.

pub mod attach;
#[doc(hidden)]
pub mod contract;
mod health;
pub mod keys;
pub mod kubernetes;
pub mod local;
pub mod object;
pub mod reach;
pub mod view;

use async_trait::async_trait;
use futures::stream::BoxStream;
use snafu::Snafu;

use crate::domain::{NodeName, VolumeId};
use object::{Branch, Object, StorageNode, Version, VolumeSplit};

pub use health::{Asked, Health};
pub use keys::{Keys, NoKeys, Pair};

/// Which objects of a collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// All.
    All,
    /// The one with this name.
    Name(String),
    /// Those that lie on this node (branches, the storage node itself).
    Node(NodeName),
    /// Those that belong to this volume (branches, the volume itself).
    Volume(VolumeId),
}

impl Selector {
    /// Whether it selects that object.
    #[must_use]
    pub fn selects<T: Object>(&self, object: &T) -> bool {
        match self {
            Self::All => true,
            Self::Name(name) => object.meta().name == *name,
            Self::Node(node) => object.node() == Some(node),
            Self::Volume(volume) => object.volume() == Some(volume),
        }
    }
}

/// What a watch tells.
#[derive(Clone, Debug)]
pub enum Event<T> {
    /// The object was made or changed, or was there when the watch began.
    Applied(T),
    /// The object is gone, or is no longer one of the selected; its last state that the store can tell.
    Deleted(T),
    /// All objects that were there when the watch began (or began anew) have been reported; when it began anew, also
    /// those that went in between, as deleted.
    Ready,
}

/// A read or write was not done.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum StoreError {
    /// An object of that name exists.
    #[snafu(display("{kind} {name} exists already"))]
    Exists {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// No object of that name exists.
    #[snafu(display("{kind} {name} does not exist"))]
    Missing {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// Another write came first: read again and decide again.
    #[snafu(display("{kind} {name} was changed by another writer meanwhile"))]
    Conflict {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// A stored object is not one that this version understands.
    #[snafu(display("{kind} {name} cannot be read: {reason}"))]
    Malformed {
        /// Kind of the object.
        kind: &'static str,
        /// Its name.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store itself failed.
    #[snafu(display("cannot {action}: {source}"))]
    Backend {
        /// What was to be done.
        action: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// The objects of one kind.
#[async_trait]
pub trait Collection<T: Object>: Send + Sync {
    /// The object of that name, if there is one.
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError>;
    /// The selected objects, ordered by name.
    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError>;
    /// Makes an object; what is returned carries its uid, version and time of creation. Its status begins empty, whatever
    /// `object` has there: status is written by [`Collection::update_status`] only.
    ///
    /// # Errors
    /// [`StoreError::Exists`] where the name is taken, also by an object that is being deleted.
    async fn create(&self, object: T) -> Result<T, StoreError>;
    /// Writes labels, finalizers and spec, if `object.meta().version` is still the stored one. Writing what is stored
    /// already changes nothing, the version included.
    ///
    /// # Errors
    /// [`StoreError::Conflict`], [`StoreError::Missing`].
    async fn update(&self, object: T) -> Result<T, StoreError>;
    /// Writes the status, if `object.meta().version` is still the stored one; else as [`Collection::update`].
    ///
    /// # Errors
    /// [`StoreError::Conflict`], [`StoreError::Missing`].
    async fn update_status(&self, object: T) -> Result<T, StoreError>;
    /// Asks for the object to go; true when an object of that name (and version, where given) existed.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] where a version was given and is not the stored one.
    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError>;
    /// Reports the selected objects, now and from now on.
    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError>;
}

/// All objects.
pub trait Store: Send + Sync {
    /// Volumes.
    fn splits(&self) -> &dyn Collection<VolumeSplit>;
    /// Branches.
    fn branches(&self) -> &dyn Collection<Branch>;
    /// Nodes.
    fn nodes(&self) -> &dyn Collection<StorageNode>;
    /// Keys that pairs of nodes share; none where nodes do not meet.
    fn keys(&self) -> &dyn Keys {
        &NoKeys
    }
    /// What was counted since the store was opened.
    fn figures(&self) -> Figures {
        Figures::default()
    }
}

/// What a store counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Requests to the API server, the opening of watches included; zero where there is none.
    pub requests: u64,
    /// Versions of stored objects that were not understood and left out.
    pub malformed: u64,
}
