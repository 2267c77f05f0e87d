//! The contract of the store on a real API server, and what a cluster adds to it.

use std::sync::Arc;

use kube::Client;
use union_csi::store::Store;
use union_csi::store::kubernetes::KubernetesStore;

use crate::support;

async fn fresh() -> Arc<dyn Store> {
    let client = support::client().await;
    support::definitions(&client).await;
    Arc::new(store(&client).await)
}

async fn store(client: &Client) -> KubernetesStore {
    KubernetesStore::new(client.clone(), &support::namespace(client).await, "union-csi")
}

mod contract {
    union_csi::store::contract::suite!(super::fresh);
}
