//! The node service: staging and publishing on this node, and inline volumes that come and go with their pod.
//!
//! What touches mounts runs as a task of its own that owns the volume's guard. A caller that gives up does not stop it
//! half-way, and a second call cannot start beside it.

mod calls;
mod ephemeral;

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use snafu::Snafu;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

use super::guard::{Guards, InFlight};
use super::parse::{self, InvalidRequest};
use super::proto::node_server::Node;
use super::proto::node_service_capability::{Rpc, Type, rpc};
use super::provision::{ProvisionError, Provisioner};
use super::status::reply;
use super::{Settings, proto};
use crate::domain::VolumeId;
use crate::node::transport::Carried;
use crate::node::volume::{PublishRequest, StageRequest, VolumeError, VolumeStats, Volumes};
use crate::store::Store;

/// What the service needs of the volumes on this node; see [`Volumes`] for each.
#[async_trait]
#[allow(missing_docs, reason = "documented where they are implemented")]
pub trait VolumesOnNode: Send + Sync {
    async fn stage(&self, request: &StageRequest) -> Result<(), VolumeError>;
    async fn unstage(&self, volume: &VolumeId, staging: &Path) -> Result<(), VolumeError>;
    async fn publish(&self, request: &PublishRequest) -> Result<(), VolumeError>;
    async fn unpublish(&self, volume: &VolumeId, target: &Path) -> Result<(), VolumeError>;
    async fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats, VolumeError>;
    async fn ready(&self) -> Result<(), String>;
}

#[async_trait]
impl VolumesOnNode for Volumes {
    async fn stage(&self, request: &StageRequest) -> Result<(), VolumeError> {
        Self::stage(self, request).await
    }
    async fn unstage(&self, volume: &VolumeId, staging: &Path) -> Result<(), VolumeError> {
        Self::unstage(self, volume, staging).await
    }
    async fn publish(&self, request: &PublishRequest) -> Result<(), VolumeError> {
        Self::publish(self, request).await
    }
    async fn unpublish(&self, volume: &VolumeId, target: &Path) -> Result<(), VolumeError> {
        Self::unpublish(self, volume, target).await
    }
    async fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats, VolumeError> {
        Self::stats(self, volume, path).await
    }
    async fn ready(&self) -> Result<(), String> {
        Self::ready(self).await
    }
}

/// A call to the node service was refused or failed.
#[derive(Debug, Snafu)]
pub enum NodeError {
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
    /// An ephemeral volume was not made, or not removed.
    #[snafu(display("{source}"), context(false))]
    Provision {
        /// Why.
        source: ProvisionError,
    },
    /// The node could not do it.
    #[snafu(display("{source}"), context(false))]
    Volume {
        /// Why.
        source: VolumeError,
    },
    /// The node could not mount an ephemeral volume that exists by now, at least in part.
    #[snafu(display("{source}; the ephemeral volume stays until it is unpublished"))]
    Ephemeral {
        /// Why.
        source: VolumeError,
    },
    /// No such volume.
    #[snafu(display("volume {volume} does not exist"))]
    UnknownVolume {
        /// As the caller named it.
        volume: String,
    },
    /// The caller did not say where the volume is staged.
    #[snafu(display("staging_target_path: is required for volume {volume}: call NodeStageVolume first"))]
    StagingPathMissing {
        /// The volume.
        volume: String,
    },
    /// The directory of an ephemeral volume cannot be made or removed.
    #[snafu(display("volume {volume}: cannot {action} {}: {source}", path.display()))]
    Directory {
        /// The volume.
        volume: VolumeId,
        /// `make` or `remove`.
        action: &'static str,
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The work ended without a result: a bug.
    #[snafu(display("volume {volume}: the work on it died ({source}): please report this with the log"))]
    Died {
        /// The volume.
        volume: String,
        /// How.
        source: tokio::task::JoinError,
    },
    /// The agent ends.
    #[snafu(display("volume {volume}: the agent is stopping: try again when it runs"))]
    Stopping {
        /// The volume.
        volume: String,
    },
}

/// The node service; cheap to clone.
#[derive(Clone)]
pub struct NodeService {
    volumes: Arc<dyn VolumesOnNode>,
    provisioner: Provisioner,
    settings: Arc<Settings>,
    carried: watch::Receiver<Carried>,
    guards: Guards,
    tasks: TaskTracker,
}

impl NodeService {
    /// A service on this node's volumes; `carried`: what the node can attach, for its topology. Work that outlives its call is tracked in `tasks`, which the owner waits for when
    /// it ends.
    #[must_use]
    pub fn new(
        volumes: Arc<dyn VolumesOnNode>,
        store: Arc<dyn Store>,
        settings: Settings,
        carried: watch::Receiver<Carried>,
        tasks: TaskTracker,
    ) -> Self {
        Self {
            volumes,
            provisioner: Provisioner::new(store),
            settings: Arc::new(settings),
            carried,
            guards: Guards::default(),
            tasks,
        }
    }

    fn deadline<T>(&self, request: &Request<T>) -> Instant {
        self.settings.deadline(parse::patience(request.metadata()))
    }

    /// Does the work under the volume's guard, to its end, also when nobody waits for it any more.
    async fn guarded<F>(&self, volume: &str, work: F) -> Result<(), NodeError>
    where
        F: Future<Output = Result<(), NodeError>> + Send + 'static,
    {
        if self.tasks.is_closed() {
            return StoppingSnafu { volume }.fail();
        }
        let guard = self.guards.enter(&volume)?;
        let work = async move {
            let result = work.await;
            drop(guard);
            result
        };
        match self.tasks.spawn(work).await {
            Ok(result) => result,
            Err(source) => Err(NodeError::Died { volume: volume.to_owned(), source }),
        }
    }
}

/// What [`Node::node_get_capabilities`] tells.
const CAPABILITIES: [rpc::Type; 5] = [
    rpc::Type::StageUnstageVolume,
    rpc::Type::GetVolumeStats,
    rpc::Type::VolumeCondition,
    rpc::Type::SingleNodeMultiWriter,
    rpc::Type::VolumeMountGroup,
];

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<proto::NodeStageVolumeRequest>,
    ) -> Result<Response<proto::NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let done = self.stage(&request).await.map(|()| proto::NodeStageVolumeResponse {});
        reply("NodeStageVolume", &request.volume_id, done)
    }

    async fn node_unstage_volume(
        &self,
        request: Request<proto::NodeUnstageVolumeRequest>,
    ) -> Result<Response<proto::NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let done = self.unstage(&request).await.map(|()| proto::NodeUnstageVolumeResponse {});
        reply("NodeUnstageVolume", &request.volume_id, done)
    }

    async fn node_publish_volume(
        &self,
        request: Request<proto::NodePublishVolumeRequest>,
    ) -> Result<Response<proto::NodePublishVolumeResponse>, Status> {
        let deadline = self.deadline(&request);
        let request = request.into_inner();
        let done = self.publish(&request, deadline).await.map(|()| proto::NodePublishVolumeResponse {});
        reply("NodePublishVolume", &request.volume_id, done)
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<proto::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<proto::NodeUnpublishVolumeResponse>, Status> {
        let deadline = self.deadline(&request);
        let request = request.into_inner();
        let done = self.unpublish(&request, deadline).await.map(|()| proto::NodeUnpublishVolumeResponse {});
        reply("NodeUnpublishVolume", &request.volume_id, done)
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<proto::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<proto::NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        reply("NodeGetVolumeStats", &request.volume_id, self.stats(&request).await)
    }

    async fn node_get_capabilities(
        &self,
        _request: Request<proto::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<proto::NodeGetCapabilitiesResponse>, Status> {
        let capability = |kind: rpc::Type| proto::NodeServiceCapability {
            r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
        };
        let capabilities = CAPABILITIES.map(capability).to_vec();
        Ok(Response::new(proto::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(
        &self,
        _request: Request<proto::NodeGetInfoRequest>,
    ) -> Result<Response<proto::NodeGetInfoResponse>, Status> {
        let transports = self.carried.borrow().attachable();
        Ok(Response::new(proto::NodeGetInfoResponse {
            node_id: self.settings.node.to_string(),
            // Zero is "no limit" in the protocol.
            max_volumes_per_node: self.settings.max_volumes.unwrap_or_default().into(),
            accessible_topology: Some(super::controller::topology(&self.settings.node, transports)),
        }))
    }
}

#[cfg(test)]
mod tests;
