//! What some nodes can carry between each other, read from their objects.

use futures::future::try_join_all;

use super::view::network;
use super::{Store, StoreError};
use crate::domain::NodeName;
use crate::domain::reach::Network;

/// What these nodes can carry: a read each, because a cluster has many more than hold one volume. One without an object
/// carries nothing.
///
/// # Errors
/// What the store answers.
pub async fn network_of(
    store: &dyn Store,
    nodes: impl IntoIterator<Item = &NodeName>,
) -> Result<Network, StoreError> {
    let all = store.nodes();
    let read = try_join_all(nodes.into_iter().map(|node| all.get(node.as_str()))).await?;
    Ok(network(read.iter().flatten()))
}
