//! What the administrator set: `agent.yaml`, flags, environment.
//!
//! A flag wins over the environment, the environment over the file, the file over the default. Unknown keys are faults.
//! All faults are reported at once, each with file, line and remedy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::NodeName;
use crate::node::pool::PoolSettings;
use crate::node::union::MergerfsSettings;

/// The checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// This node. Default: the host name.
    pub node: NodeName,
    /// Labels of this node, for `nodeSelector`.
    pub node_labels: BTreeMap<String, String>,
    /// Where state lives. Default `/var/lib/union-csi`.
    pub state_dir: PathBuf,
    /// CSI socket. Default `<state_dir>/csi.sock`.
    pub csi_socket: PathBuf,
    /// Directories below which staging and target paths may lie. Default `/var/lib/kubelet`, `/mnt`, `/media`, `/srv`.
    pub allowed_targets: Vec<PathBuf>,
    /// HTTP listener; `None`: off. Default `127.0.0.1:9830`.
    pub http_listen: Option<SocketAddr>,
    /// Pools of this node.
    pub pools: Vec<PoolSettings>,
    /// How often pools are measured. Default 5 s.
    pub measure_interval: Duration,
    /// MergerFS.
    pub mergerfs: MergerfsSettings,
    /// How long CreateVolume waits for branches before it answers with `DEADLINE_EXCEEDED`. Default 60 s.
    pub create_timeout: Duration,
    /// Log filter in the syntax of tracing's `EnvFilter`. Default `info`.
    pub log_filter: String,
    /// Logs as JSON lines instead of text.
    pub log_json: bool,
}
