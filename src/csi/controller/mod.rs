//! The controller service: what is asked of a volume becomes an object in the store, and what the store then says
//! becomes the answer. No call reaches another role.

mod attach;
mod capacity;
mod describe;

pub(super) use describe::topology;

use std::sync::Arc;

use snafu::Snafu;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::guard::{Guards, InFlight};
use super::parse::{self, InvalidRequest};
use super::proto::controller_server::Controller;
use super::proto::controller_service_capability::{Rpc, Type, rpc};
use super::provision::{ProvisionError, Provisioner};
use super::status::reply;
use super::{Settings, proto};
use crate::domain::reach::Network;
use crate::domain::{InvalidId, NodeName, VolumeId};
use crate::store::attach::{AttachRefused, Detach};
use crate::store::object::{Attachment, VolumeSplit};
use crate::store::reach::network_of;
use crate::store::view::owners;
use crate::store::{Store, StoreError};

/// A call to the controller service was refused or failed.
#[derive(Debug, Snafu)]
pub enum ControllerError {
    /// A field of the request is wrong.
    #[snafu(display("{source}"), context(false))]
    Invalid {
        /// Which, and why.
        source: InvalidRequest,
    },
    /// The volume has a call in flight.
    #[snafu(display("{source}"), context(false))]
    InFlight {
        /// Which.
        source: InFlight,
    },
    /// It was not made, or not removed.
    #[snafu(display("{source}"), context(false))]
    Provision {
        /// Why.
        source: ProvisionError,
    },
    /// The store did not answer, or refused.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why.
        source: StoreError,
    },
    /// No such volume.
    #[snafu(display("volume {volume} does not exist"))]
    UnknownVolume {
        /// As the caller named it.
        volume: String,
    },
    /// No such node.
    #[snafu(display("node {node} does not run union-csi: no StorageNode has that name"))]
    UnknownNode {
        /// As the caller named it.
        node: String,
    },
    /// The volume cannot be attached so.
    #[snafu(display("{source}"), context(false))]
    Attach {
        /// Why.
        source: AttachRefused,
    },
    /// The node has as many volumes as it may.
    #[snafu(display(
        "node {node} has {limit} volumes attached, which is its limit (maxVolumes): detach one first"
    ))]
    NodeFull {
        /// The node.
        node: NodeName,
        /// Its limit.
        limit: u32,
    },
    /// A page of a list does not exist.
    #[snafu(display("starting_token {token:?} is none that this program gave: list from the beginning"))]
    Token {
        /// The token.
        token: String,
    },
}

/// The controller service.
pub struct ControllerService {
    store: Arc<dyn Store>,
    provisioner: Provisioner,
    settings: Settings,
    guards: Guards,
}

impl ControllerService {
    /// A service on `store`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, settings: Settings) -> Self {
        Self { provisioner: Provisioner::new(store.clone()), store, settings, guards: Guards::default() }
    }

    /// When a call that waits for other roles must answer.
    fn deadline<T>(&self, request: &Request<T>) -> Instant {
        self.settings.deadline(parse::patience(request.metadata()))
    }

    async fn create(
        &self,
        request: &proto::CreateVolumeRequest,
        deadline: Instant,
    ) -> Result<proto::CreateVolumeResponse, ControllerError> {
        let wanted = parse::create_volume(request)?;
        let _guard = self.guards.enter(&wanted.volume)?;
        let split = self.provisioner.create(&wanted, deadline).await?;
        let network = self.network_of(&split).await?;
        Ok(proto::CreateVolumeResponse { volume: Some(describe::volume(&split, &network)) })
    }

    async fn delete(
        &self,
        request: &proto::DeleteVolumeRequest,
        deadline: Instant,
    ) -> Result<proto::DeleteVolumeResponse, ControllerError> {
        if let Some(volume) = parse::volume_id(&request.volume_id)? {
            let _guard = self.guards.enter(&volume)?;
            self.provisioner.delete(&volume, deadline).await?;
        }
        Ok(proto::DeleteVolumeResponse {})
    }

    async fn publish(
        &self,
        request: &proto::ControllerPublishVolumeRequest,
    ) -> Result<proto::ControllerPublishVolumeResponse, ControllerError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let node = parse::required("node_id", &request.node_id)?;
        let capability = parse::capability(request.volume_capability.as_ref())?;
        let volume = known(volume, &request.volume_id)?;
        let _guard = self.guards.enter(&volume)?;
        let unknown_node = |_: InvalidId| ControllerError::UnknownNode { node: node.to_owned() };
        let wanted = Attachment {
            node: node.parse().map_err(unknown_node)?,
            access_mode: capability.mode,
            read_only: request.readonly,
            volume_attachment: None,
        };
        self.attach(&volume, &wanted, capability.volume_mode()).await?;
        Ok(proto::ControllerPublishVolumeResponse::default())
    }

    async fn unpublish(
        &self,
        request: &proto::ControllerUnpublishVolumeRequest,
    ) -> Result<proto::ControllerUnpublishVolumeResponse, ControllerError> {
        let node = match request.node_id.as_str() {
            "" => Detach::AllNodes,
            name => name.parse().map_or(Detach::Nowhere, Detach::Node),
        };
        if let Some(volume) = parse::volume_id(&request.volume_id)? {
            let _guard = self.guards.enter(&volume)?;
            self.detach(&volume, &node).await?;
        }
        Ok(proto::ControllerUnpublishVolumeResponse {})
    }

    async fn validate(
        &self,
        request: &proto::ValidateVolumeCapabilitiesRequest,
    ) -> Result<proto::ValidateVolumeCapabilitiesResponse, ControllerError> {
        let volume = parse::volume_id(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(InvalidRequest::new("volume_capabilities", "at least one is required").into());
        }
        let split = self.existing(volume, &request.volume_id).await?;
        Ok(describe::validated(&split, request))
    }

    async fn get(
        &self,
        request: &proto::ControllerGetVolumeRequest,
    ) -> Result<proto::ControllerGetVolumeResponse, ControllerError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let split = self.existing(volume, &request.volume_id).await?;
        let network = self.network_of(&split).await?;
        Ok(proto::ControllerGetVolumeResponse {
            volume: Some(describe::volume(&split, &network)),
            status: Some(proto::controller_get_volume_response::VolumeStatus {
                published_node_ids: describe::published_nodes(&split),
                volume_condition: Some(describe::condition(&split)),
            }),
        })
    }

    /// What the nodes that hold the volume can carry.
    async fn network_of(&self, split: &VolumeSplit) -> Result<Network, StoreError> {
        network_of(&*self.store, owners(split)).await
    }

    async fn existing(&self, volume: Option<VolumeId>, named: &str) -> Result<VolumeSplit, ControllerError> {
        let volume = known(volume, named)?;
        let split = self.provisioner.get(&volume).await?;
        split.ok_or_else(|| ControllerError::UnknownVolume { volume: named.to_owned() })
    }
}

/// The id, where the text is one: no other names a volume.
fn known(volume: Option<VolumeId>, named: &str) -> Result<VolumeId, ControllerError> {
    volume.ok_or_else(|| ControllerError::UnknownVolume { volume: named.to_owned() })
}

/// What [`Controller::controller_get_capabilities`] tells.
const CAPABILITIES: [rpc::Type; 9] = [
    rpc::Type::CreateDeleteVolume,
    rpc::Type::PublishUnpublishVolume,
    rpc::Type::ListVolumes,
    rpc::Type::GetCapacity,
    rpc::Type::PublishReadonly,
    rpc::Type::ListVolumesPublishedNodes,
    rpc::Type::VolumeCondition,
    rpc::Type::GetVolume,
    rpc::Type::SingleNodeMultiWriter,
];

#[tonic::async_trait]
impl Controller for ControllerService {
    async fn create_volume(
        &self,
        request: Request<proto::CreateVolumeRequest>,
    ) -> Result<Response<proto::CreateVolumeResponse>, Status> {
        let deadline = self.deadline(&request);
        let request = request.into_inner();
        reply("CreateVolume", &request.name, self.create(&request, deadline).await)
    }

    async fn delete_volume(
        &self,
        request: Request<proto::DeleteVolumeRequest>,
    ) -> Result<Response<proto::DeleteVolumeResponse>, Status> {
        let deadline = self.deadline(&request);
        let request = request.into_inner();
        reply("DeleteVolume", &request.volume_id, self.delete(&request, deadline).await)
    }

    async fn controller_publish_volume(
        &self,
        request: Request<proto::ControllerPublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerPublishVolumeResponse>, Status> {
        let request = request.into_inner();
        reply("ControllerPublishVolume", &request.volume_id, self.publish(&request).await)
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<proto::ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<proto::ControllerUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        reply("ControllerUnpublishVolume", &request.volume_id, self.unpublish(&request).await)
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<proto::ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<proto::ValidateVolumeCapabilitiesResponse>, Status> {
        let request = request.into_inner();
        reply("ValidateVolumeCapabilities", &request.volume_id, self.validate(&request).await)
    }

    async fn list_volumes(
        &self,
        request: Request<proto::ListVolumesRequest>,
    ) -> Result<Response<proto::ListVolumesResponse>, Status> {
        reply("ListVolumes", "", self.list(request.get_ref()).await)
    }

    async fn get_capacity(
        &self,
        request: Request<proto::GetCapacityRequest>,
    ) -> Result<Response<proto::GetCapacityResponse>, Status> {
        reply("GetCapacity", "", self.capacity(request.get_ref()).await)
    }

    async fn controller_get_volume(
        &self,
        request: Request<proto::ControllerGetVolumeRequest>,
    ) -> Result<Response<proto::ControllerGetVolumeResponse>, Status> {
        let request = request.into_inner();
        reply("ControllerGetVolume", &request.volume_id, self.get(&request).await)
    }

    async fn controller_get_capabilities(
        &self,
        _request: Request<proto::ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<proto::ControllerGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| proto::ControllerServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = CAPABILITIES.map(capability).to_vec();
        Ok(Response::new(proto::ControllerGetCapabilitiesResponse { capabilities }))
    }
}

#[cfg(test)]
mod tests;
