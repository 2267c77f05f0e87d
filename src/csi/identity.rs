//! The identity service: who answers, and whether it is well.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use super::node::VolumesOnNode;
use super::proto::identity_server::Identity;
use super::proto::plugin_capability::{Service, Type, service};
use super::{DRIVER, SPECIFICATION, proto};
use crate::store::Health;

/// How long the node may take to answer a probe.
const PROBE: Duration = Duration::from_secs(2);

/// The identity service.
pub struct IdentityService {
    store: Arc<dyn Health>,
    volumes: Option<Arc<dyn VolumesOnNode>>,
}

impl IdentityService {
    /// A service; `volumes` where the instance plays the node role.
    #[must_use]
    pub fn new(store: Arc<dyn Health>, volumes: Option<Arc<dyn VolumesOnNode>>) -> Self {
        Self { store, volumes }
    }

    /// Whether calls can be served now: the store answers, and the node can mount.
    async fn well(&self) -> Result<(), String> {
        self.store.check().await?;
        let Some(volumes) = &self.volumes else {
            return Ok(());
        };
        match tokio::time::timeout(PROBE, volumes.ready()).await {
            Err(_) => Err(format!("the node does not answer within {} s", PROBE.as_secs())),
            Ok(ready) => ready.map_err(|reason| format!("this node cannot serve volumes: {reason}")),
        }
    }
}

#[tonic::async_trait]
impl Identity for IdentityService {
    async fn get_plugin_info(
        &self,
        _request: Request<proto::GetPluginInfoRequest>,
    ) -> Result<Response<proto::GetPluginInfoResponse>, Status> {
        let manifest = [("specification", SPECIFICATION), ("url", env!("CARGO_PKG_REPOSITORY"))];
        Ok(Response::new(proto::GetPluginInfoResponse {
            name: DRIVER.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: manifest
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .collect::<HashMap<_, _>>(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _request: Request<proto::GetPluginCapabilitiesRequest>,
    ) -> Result<Response<proto::GetPluginCapabilitiesResponse>, Status> {
        let served = [service::Type::ControllerService, service::Type::VolumeAccessibilityConstraints];
        let capability = |kind: service::Type| proto::PluginCapability {
            r#type: Some(Type::Service(Service { r#type: kind.into() })),
        };
        let capabilities = served.map(capability).to_vec();
        Ok(Response::new(proto::GetPluginCapabilitiesResponse { capabilities }))
    }

    /// `FAILED_PRECONDITION` with the reason where calls cannot be served: the only answer that carries one.
    async fn probe(
        &self,
        _request: Request<proto::ProbeRequest>,
    ) -> Result<Response<proto::ProbeResponse>, Status> {
        match self.well().await {
            Ok(()) => Ok(Response::new(proto::ProbeResponse { ready: Some(true) })),
            Err(reason) => {
                tracing::warn!(reason, "probe failed");
                Err(Status::failed_precondition(reason))
            }
        }
    }
}
