//! How much room there is for a class of volumes.

use super::{ControllerError, ControllerService};
use crate::csi::{parse, proto, signed};
use crate::domain::policy::Policy;
use crate::domain::split::{Reach, Request, Sharing, capacity_within};
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};
use crate::store::Selector;
use crate::store::view::{network, pool_views};

impl ControllerService {
    pub(super) async fn capacity(
        &self,
        request: &proto::GetCapacityRequest,
    ) -> Result<proto::GetCapacityResponse, ControllerError> {
        let capabilities = match request.volume_capabilities.as_slice() {
            [] => Vec::new(),
            given => parse::capabilities(given)?,
        };
        let policy = parse::policy(&request.parameters, &capabilities)?;
        let node = match &request.accessible_topology {
            None => None,
            Some(topology) => Some(parse::node_of_topology("accessible_topology", topology)?),
        };
        let mode = capabilities.first().map(parse::Capability::volume_mode).unwrap_or_default();
        let modes: Vec<_> = capabilities.iter().map(|capability| capability.mode).collect();
        self.room(&policy, mode, Sharing::of(&modes), node).await
    }

    async fn room(
        &self,
        policy: &Policy,
        mode: VolumeMode,
        sharing: Sharing,
        node: Option<NodeName>,
    ) -> Result<proto::GetCapacityResponse, ControllerError> {
        let (nodes, splits, branches) = futures::try_join!(
            self.store.nodes().list(&Selector::All),
            self.store.splits().list(&Selector::All),
            self.store.branches().list(&Selector::All),
        )?;
        let pools = pool_views(&nodes, &splits, &branches);
        let request = Request {
            // The size does not matter to the question.
            size: Bytes::ZERO,
            limit: None,
            mode,
            topology: node.iter().cloned().collect(),
            consumer: node,
            reach: Reach::AnyNode,
            sharing,
        };
        let room = capacity_within(&request, policy, &pools, &network(&nodes));
        Ok(proto::GetCapacityResponse {
            available_capacity: signed(room.total.get()),
            maximum_volume_size: Some(signed(room.maximum_volume_size.get())),
            minimum_volume_size: Some(signed(room.minimum_volume_size.get())),
        })
    }
}
