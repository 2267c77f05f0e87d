//! `union-csi check-config`: what a configuration means, or all its faults.

use std::path::PathBuf;

use super::output::Out;
use super::{CliError, DONE, Format, USAGE};
use crate::config::{self, ApiServer, Overrides};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi check-config\n  \
    union-csi check-config --config ./agent.yaml --output json\n\n\
Exits with 0 and shows the effective configuration, defaults filled in; or with 2 and shows every fault.")]
pub(super) struct Args {
    /// Configuration file [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let overrides = Overrides { api_server: ApiServer::of_environment(), ..Overrides::default() };
    match (config::load(args.config.as_deref(), &overrides), args.output) {
        (Ok(config), Format::Text) => out.print(&config::yaml_text(&config)).map(|()| DONE),
        (Ok(config), Format::Json) => {
            out.json(&serde_json::json!({ "valid": true, "config": config::json(&config) })).map(|()| DONE)
        }
        (Err(faults), Format::Text) => Err(faults.into()),
        (Err(faults), Format::Json) => {
            out.json(&serde_json::json!({ "valid": false, "faults": faults.0 })).map(|()| USAGE)
        }
    }
}
