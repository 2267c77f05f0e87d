//! How much room there is for a class of volumes.

use super::{ControllerError, ControllerService};
use crate::csi::{parse, proto, signed};
use crate::domain::policy::Policy;
use crate::domain::split::{self, Reach, Request};
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};
use crate::store::Selector;
use crate::store::view::pool_views;

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
        self.room(&policy, mode, node).await
    }

    async fn room(
        &self,
        policy: &Policy,
        mode: VolumeMode,
        node: Option<NodeName>,
    ) -> Result<proto::GetCapacityResponse, ControllerError> {
        let (nodes, splits, branches) = futures::try_join!(
            self.store.nodes().list(&Selector::All),
            self.store.splits().list(&Selector::All),
            self.store.branches().list(&Selector::All),
        )?;
        let pools = pool_views(&nodes, &splits, &branches);
        let room = match &node {
            Some(node) => split::capacity_on(node, mode, policy, &pools),
            None => {
                let (limit, consumer, topology) = (None, None, Vec::new());
                // The size does not matter to the question.
                let size = Bytes::ZERO;
                let request = Request { size, limit, mode, consumer, topology, reach: Reach::default() };
                split::capacity(&request, policy, &pools)
            }
        };
        Ok(proto::GetCapacityResponse {
            available_capacity: signed(room.total.get()),
            maximum_volume_size: Some(signed(room.maximum_volume_size.get())),
            minimum_volume_size: Some(signed(room.minimum_volume_size.get())),
        })
    }
}
