//! What the administrator set: `agent.yaml`, flags, environment.
//!
//! A flag wins over the environment, the environment over the file, the file over the default. Unknown keys are faults.
//! All faults are reported at once, each with file, line and remedy. What flows out is a [`Config`] that needs no
//! further checks; the machine itself (does the directory exist, is the port free) is asked later by who uses it.

pub mod fault;
pub mod keys;
mod kubernetes;
mod read;
mod render;
mod scalar;
mod section;
mod yaml;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::domain::NodeName;
use crate::node::pool::{PoolSettings, PoolsUnder};
use crate::node::survey::NetworkSettings;
use crate::node::union::MergerfsSettings;
use crate::platform::container::Surroundings;

pub use fault::{Fault, Faults, Origin};
pub use kubernetes::{Access, ApiServer, KubernetesSettings, Mode, SERVICE_ACCOUNT_DIR};
pub use render::{json, yaml_text};

/// Where the configuration is looked for when none is named; may be missing.
pub const DEFAULT_FILE: &str = "/etc/union-csi/agent.yaml";

/// Where state lives unless told otherwise. The thesis's place, kept.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/union-csi";

/// Where the program's image has MergerFS.
pub const BUNDLED_MERGERFS: &str = "/usr/local/bin/mergerfs";

/// Where the HTTP API listens unless told otherwise.
pub const DEFAULT_LISTEN: &str = "127.0.0.1:9830";

/// The longest path of a Unix socket, in bytes: `sun_path` less its closing zero (unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;

/// The checked configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which roles this instance plays. Default: all.
    pub mode: Mode,
    /// The cluster whose objects are the store; `None`: the embedded store.
    pub kubernetes: Option<KubernetesSettings>,
    /// This node. Default: the host name.
    pub node: NodeName,
    /// Labels of this node, for `nodeSelector`.
    pub node_labels: BTreeMap<String, String>,
    /// Where state lives. Default [`DEFAULT_STATE_DIR`].
    pub state_dir: PathBuf,
    /// CSI socket. Default `<state_dir>/csi.sock`; with Kubernetes, where volumes are mounted,
    /// `<kubelet_dir>/plugins/union.csi.union.io/csi.sock`.
    pub csi_socket: PathBuf,
    /// Directories below which staging and target paths may lie. Default: the kubelet's, `/mnt`, `/media`, `/srv`.
    pub allowed_targets: Vec<PathBuf>,
    /// HTTP listener; `None`: off. Default [`DEFAULT_LISTEN`].
    pub http_listen: Option<SocketAddr>,
    /// Names by which the HTTP API may be asked for besides its addresses and `localhost`.
    pub http_host_names: Vec<String>,
    /// Pools of this node.
    pub pools: Vec<PoolSettings>,
    /// Directories whose mounted disks are pools as well.
    pub pools_under: Vec<PoolsUnder>,
    /// How often pools are measured. Default 5 s.
    pub measure_interval: Duration,
    /// MergerFS.
    pub mergerfs: MergerfsSettings,
    /// The MergerFS of the image, in a container whose host was entered; used where `mergerfs.path` says nothing else.
    pub bundled_mergerfs: Option<PathBuf>,
    /// How long CreateVolume waits for branches before it answers with `DEADLINE_EXCEEDED`. Default 60 s.
    pub create_timeout: Duration,
    /// The network that branches of other nodes are reached over.
    pub network: NetworkSettings,
    /// How many volumes this node takes (CSI `NodeGetInfoResponse.max_volumes_per_node`); `None`: no limit.
    pub max_volumes: Option<u32>,
    /// Log filter in the syntax of tracing's `EnvFilter`. Default `info`.
    pub log_filter: String,
    /// Logs as JSON lines instead of text.
    pub log_json: bool,
}

impl Config {
    /// Where the command line stages volumes on a machine without an orchestrator.
    #[must_use]
    pub fn staging_dir(&self) -> PathBuf {
        self.state_dir.join("staging")
    }

    /// Every directory below which staging and target paths may lie: the configured ones, [`Config::staging_dir`], and with
    /// Kubernetes the kubelet's, without which nothing could be mounted.
    #[must_use]
    pub fn target_roots(&self) -> Vec<PathBuf> {
        let kubelet = self.kubernetes.as_ref().map(|cluster| cluster.kubelet_dir.clone());
        self.allowed_targets.iter().cloned().chain([self.staging_dir()]).chain(kubelet).collect()
    }
}

/// What was given beside the file, as typed; each wins over the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// `--node-name`, `UNION_CSI_NODE_NAME`.
    pub node_name: Option<String>,
    /// `--state-dir`, `UNION_CSI_STATE_DIR`.
    pub state_dir: Option<String>,
    /// `--endpoint`, `UNION_CSI_ENDPOINT`.
    pub endpoint: Option<String>,
    /// `--http-listen`, `UNION_CSI_HTTP_LISTEN`.
    pub http_listen: Option<String>,
    /// `--log`, `UNION_CSI_LOG`.
    pub log_filter: Option<String>,
    /// `--log-format`, `UNION_CSI_LOG_FORMAT`.
    pub log_format: Option<String>,
    /// `--mergerfs-path`, `UNION_CSI_MERGERFS_PATH`.
    pub mergerfs_path: Option<String>,
    /// `--pool NAME=PATH`, each as typed; added to those of the file.
    pub pools: Vec<String>,
    /// `--mode`, `UNION_CSI_MODE`.
    pub mode: Option<String>,
    /// `--kubeconfig`, `UNION_CSI_KUBECONFIG`.
    pub kubeconfig: Option<String>,
    /// What Kubernetes tells a container of its API server.
    pub api_server: Option<ApiServer>,
}

/// Reads and checks everything. `file`: the file named by the user; `None` takes [`DEFAULT_FILE`] if it is there.
///
/// # Errors
/// [`Faults`]: all that is wrong, at once.
pub fn load(file: Option<&Path>, overrides: &Overrides) -> Result<Config, Faults> {
    load_at(&Surroundings::default(), file, overrides)
}

/// The same, where a container may have been left for its host: its files come first, and are named as they were there.
///
/// # Errors
/// As [`load`].
pub fn load_at(
    surroundings: &Surroundings,
    file: Option<&Path>,
    overrides: &Overrides,
) -> Result<Config, Faults> {
    let (path, must_exist) = file.map_or((Path::new(DEFAULT_FILE), false), |path| (path, true));
    let text = match std::fs::read_to_string(surroundings.path(path)) {
        Ok(text) => Some(text),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must_exist => None,
        Err(e) => return Err(Faults::unreadable(path, &e)),
    };
    let mut config = parse(path, text.as_deref().unwrap_or_default(), overrides, &host_name())?;
    if let Some(cluster) = &mut config.kubernetes {
        match &mut cluster.access {
            Access::Kubeconfig(path) => *path = surroundings.path(path),
            Access::InCluster { service_account, .. } => {
                *service_account = surroundings.path(service_account)
            }
        }
    }
    config.bundled_mergerfs = surroundings.kept(Path::new(BUNDLED_MERGERFS));
    Ok(config)
}

/// Checks the text of a configuration file, which `path` names in faults, together with the overrides. `host_name` is the
/// node's name where none is set.
///
/// # Errors
/// [`Faults`]: all that is wrong, at once.
pub fn parse(path: &Path, text: &str, overrides: &Overrides, host_name: &str) -> Result<Config, Faults> {
    read::config(path, text, overrides, host_name)
}

/// The kernel's name of this host; empty where it tells none, which then is a fault of `nodeName`.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests;
