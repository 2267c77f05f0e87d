//! Tells the scheduler how much room each node has for each StorageClass (`CSIStorageCapacity`).

use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use crate::store::Store;

/// The capacity publisher; see the module.
pub struct CapacityPublisher {
    _cluster: Cluster,
    _store: Arc<dyn Store>,
    _clock: fn() -> Timestamp,
}

impl CapacityPublisher {
    /// A controller; it does nothing until [`CapacityPublisher::run`]. `clock` dates what it writes ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self { _cluster: cluster, _store: store, _clock: clock }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too.
    pub async fn run(self, shutdown: CancellationToken) {
        shutdown.cancelled().await;
    }
}
