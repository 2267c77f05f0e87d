//! Finds what no claim needs any more, and tells of it; deletes nothing.

pub mod forget;
pub mod scan;

use std::sync::Arc;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use crate::store::Store;

/// The orphan scan; see the module.
pub struct OrphanScan {
    _cluster: Cluster,
    _store: Arc<dyn Store>,
    _clock: fn() -> Timestamp,
}

impl OrphanScan {
    /// A controller; it does nothing until [`OrphanScan::run`]. `clock` dates what it writes ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self { _cluster: cluster, _store: store, _clock: clock }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too.
    pub async fn run(self, shutdown: CancellationToken) {
        shutdown.cancelled().await;
    }
}
