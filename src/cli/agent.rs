//! `union-csi agent`: the agent of one node.

use std::path::PathBuf;

use clap::ValueEnum;

use super::{CliError, cli_error};
use crate::config::{self, Config, Overrides};

/// Which services are answered on the CSI socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// Identity, controller and node.
    #[default]
    All,
    /// Identity and controller.
    Controller,
    /// Identity and node.
    Node,
}

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi agent\n  \
    union-csi agent --config ./agent.yaml\n  \
    union-csi agent --pool disk1=/mnt/disk1 --pool disk2=/mnt/disk2 --state-dir /tmp/union\n\n\
A flag wins over its environment variable, that over the file, the file over the default.")]
pub(super) struct Args {
    /// Configuration file [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// CSI socket, as unix:///run/union-csi/csi.sock
    #[arg(long, env = "UNION_CSI_ENDPOINT", value_name = "URL")]
    endpoint: Option<String>,
    /// Services to answer
    #[arg(long, env = "UNION_CSI_MODE", value_enum, default_value_t)]
    mode: Mode,
    /// Kubernetes configuration file; for the cluster version of the agent
    #[arg(long, env = "UNION_CSI_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
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
        }
    }

    /// Everything together, checked.
    fn config(&self) -> Result<Config, CliError> {
        if let Some(path) = &self.kubeconfig {
            return cli_error::UsageSnafu {
                problem: format!("--kubeconfig {}: this version runs without Kubernetes", path.display()),
                remedy: "leave the flag (or UNION_CSI_KUBECONFIG) out; the agent keeps its state in --state-dir",
            }
            .fail();
        }
        Ok(config::load(self.config.as_deref(), &self.overrides())?)
    }
}

pub(super) fn run(args: Args) -> Result<u8, CliError> {
    let config = args.config()?;
    if args.mode != Mode::All {
        return cli_error::UsageSnafu {
            problem: "--mode: without Kubernetes one agent plays both roles, for it alone has the store",
            remedy: "leave the flag (or UNION_CSI_MODE) out",
        }
        .fail();
    }
    crate::telemetry::init(&config.log_filter, config.log_json);
    crate::app::run(config)?;
    Ok(super::DONE)
}
