//! What every controller that works on Kubernetes' own objects is given.

use kube::Client;

use super::lease::Claim;

/// Name of the CSI driver: of the `CSIDriver` object, and of the provisioner in a StorageClass.
pub const DRIVER: &str = "union.csi.union.io";

/// Key of the topology segment that names a node, as CSI `NodeGetInfo` tells it and PersistentVolumes require it.
pub const TOPOLOGY_KEY: &str = "topology.union.csi.union.io/node";

/// Field manager of everything that the leader writes to Kubernetes' own objects.
pub const FIELD_MANAGER: &str = "union-csi-controller";

/// The cluster, as a controller reaches it.
#[derive(Clone)]
pub struct Cluster {
    /// The API server.
    pub client: Client,
    /// Namespace of the program's own objects.
    pub namespace: String,
    /// The right to write: asked before each write.
    pub claim: Claim,
}

/// Why a request failed, for people: the server's words where it said anything, else all causes.
#[must_use]
pub fn said(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        other => {
            let mut text = other.to_string();
            let mut cause = std::error::Error::source(other);
            while let Some(source) = cause {
                let more = source.to_string();
                if !text.contains(&more) {
                    text = format!("{text}: {more}");
                }
                cause = source.source();
            }
            text
        }
    }
}
