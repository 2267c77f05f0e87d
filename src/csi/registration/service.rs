//! What the kubelet calls.

use std::path::PathBuf;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use super::proto::registration_server::Registration;
use super::{DRIVER, RegistrationState, SUPPORTED_VERSIONS, proto};

/// The type by which the kubelet chooses who takes a plugin.
const CSI_PLUGIN: &str = "CSIPlugin";

/// The registration service of one socket.
pub(super) struct RegistrationService {
    csi_socket: PathBuf,
    state: watch::Sender<RegistrationState>,
}

impl RegistrationService {
    pub(super) const fn new(csi_socket: PathBuf, state: watch::Sender<RegistrationState>) -> Self {
        Self { csi_socket, state }
    }
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(
        &self,
        _request: Request<proto::InfoRequest>,
    ) -> Result<Response<proto::PluginInfo>, Status> {
        tracing::debug!("the kubelet asks who serves the registration socket");
        Ok(Response::new(proto::PluginInfo {
            r#type: CSI_PLUGIN.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.csi_socket.to_string_lossy().into_owned(),
            supported_versions: SUPPORTED_VERSIONS.map(str::to_owned).to_vec(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<proto::RegistrationStatus>,
    ) -> Result<Response<proto::RegistrationStatusResponse>, Status> {
        let proto::RegistrationStatus { plugin_registered, error } = request.into_inner();
        self.state.send_replace(if plugin_registered {
            RegistrationState::Registered
        } else {
            RegistrationState::Failed { reason: error }
        });
        Ok(Response::new(proto::RegistrationStatusResponse {}))
    }
}
