//! `union-csi pools`: the pools of all nodes.

use super::client::AgentArgs;
use super::output::Out;
use super::{CliError, DONE, Format, discover, status};
use crate::domain::pool::PoolView;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi pools\n  \
    union-csi pools discover > agent.yaml\n  \
    union-csi pools --output json > cluster.json\n  \
    union-csi plan --size 4Ti --pools cluster.json")]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    agent: AgentArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Propose a configuration for this machine's disks, to be reviewed; nothing is taken.
    Discover(discover::Args),
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    if let Some(Action::Discover(args)) = &args.action {
        return discover::run(args, out);
    }
    let pools: Vec<PoolView> = args.agent.get("/v1/pools")?;
    match args.output {
        Format::Text if pools.is_empty() => {
            out.print("No pools. `union-csi pools discover` proposes some.\n")?
        }
        Format::Text => out.print(&status::pools(out.look, &pools))?,
        Format::Json => out.json(&pools)?,
    }
    Ok(DONE)
}
