//! `union-csi agent`: the agent of one node.

use std::path::PathBuf;

use super::CliError;
use super::place::PlaceArgs;
use crate::config::{self, ApiServer, Overrides};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi agent\n  \
    union-csi agent --config ./agent.yaml\n  \
    union-csi agent --kubeconfig /etc/union-csi/kubeconfig --node-name worker-1\n  \
    union-csi agent --pool disk1=/mnt/disk1 --pool disk2=/mnt/disk2 --state-dir /tmp/union\n\n\
A flag wins over its environment variable, that over the file, the file over the default.")]
pub(super) struct Args {
    /// Configuration file [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// CSI socket, as unix:///run/union-csi/csi.sock
    #[arg(long, env = "UNION_CSI_ENDPOINT", value_name = "URL")]
    endpoint: Option<String>,
    /// Roles of this instance [default: all]
    #[arg(long, env = "UNION_CSI_MODE", value_name = "MODE", value_parser = ["all", "controller", "node"])]
    mode: Option<String>,
    /// Kubernetes configuration file; in a pod its service account is used unless this is given
    #[arg(long, env = "UNION_CSI_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<String>,
    /// Directory of the agent's own state
    #[arg(long, env = "UNION_CSI_STATE_DIR", value_name = "DIR")]
    state_dir: Option<String>,
    /// Address and port of the HTTP API and page, or "off"
    #[arg(long, env = "UNION_CSI_HTTP_LISTEN", value_name = "ADDRESS:PORT")]
    http_listen: Option<String>,
    /// Name of this node
    #[arg(long, env = "UNION_CSI_NODE_NAME", value_name = "NAME")]
    node_name: Option<String>,
    /// A pool besides those of the file; may be repeated
    #[arg(long = "pool", value_name = "NAME=PATH")]
    pools: Vec<String>,
    /// The MergerFS program
    #[arg(long, env = "UNION_CSI_MERGERFS_PATH", value_name = "PROGRAM")]
    mergerfs_path: Option<String>,
    /// What is logged: error, warn, info, debug, trace, or directives
    #[arg(long, env = "UNION_CSI_LOG", value_name = "FILTER")]
    log: Option<String>,
    /// "text" or "json"
    #[arg(long, env = "UNION_CSI_LOG_FORMAT", value_name = "FORMAT")]
    log_format: Option<String>,
    #[command(flatten)]
    place: PlaceArgs,
}

impl Args {
    /// The settings that were given beside the file.
    pub(super) fn overrides(&self) -> Overrides {
        Overrides {
            node_name: self.node_name.clone(),
            state_dir: self.state_dir.clone(),
            endpoint: self.endpoint.clone(),
            http_listen: self.http_listen.clone(),
            log_filter: self.log.clone(),
            log_format: self.log_format.clone(),
            mergerfs_path: self.mergerfs_path.clone(),
            pools: self.pools.clone(),
            mode: self.mode.clone(),
            kubeconfig: self.kubeconfig.clone(),
            api_server: ApiServer::of_environment(),
        }
    }
}

pub(super) fn run(args: Args) -> Result<u8, CliError> {
    // Before anything else, while there is one thread; and kept until the end, for what it keeps of the container.
    let kubeconfig = args.kubeconfig.as_ref().map(PathBuf::from);
    let surroundings = args.place.enter(args.config.as_deref(), kubeconfig.as_deref())?;
    let config = config::load_at(&surroundings, args.config.as_deref(), &args.overrides())?;
    crate::telemetry::init(&config.log_filter, config.log_json);
    if surroundings.entered() {
        tracing::info!("left the container: the agent acts on its host");
    }
    crate::app::run(config)?;
    Ok(super::DONE)
}
