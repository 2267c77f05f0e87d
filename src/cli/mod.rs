//! The command line: what was typed, what it means, run it.
//!
//! One file a command. Commands that show something ask the agent's HTTP API and never read its files; `volume` talks to
//! the agent's CSI socket as an orchestrator would. Exit codes: 0 done, 1 failed, 2 wrongly asked or configured, 3 asked
//! for a volume that does not fit.

mod agent;
mod check_config;
mod client;
mod crds;
mod discover;
mod doctor;
mod draw;
mod forget_node;
mod merge;
mod orphans;
mod output;
mod place;
mod plan;
mod pools;
mod socket;
mod status;
mod volume;
mod volumes;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};
use snafu::Snafu;

use crate::config::Faults;
use output::Out;

/// Done as asked.
const DONE: u8 = 0;
/// Something failed.
const FAILED: u8 = 1;
/// Wrongly asked or configured; clap's own code for it.
const USAGE: u8 = 2;
/// Asked for a volume that does not fit.
const INFEASIBLE: u8 = 3;

/// One large volume from the free space of many disks.
#[derive(Debug, Parser)]
#[command(
    name = "union-csi",
    version,
    about = "One large volume from the free space of many disks: a CSI driver that merges branches with MergerFS",
    arg_required_else_help = true,
    max_term_width = 100,
    subcommand_required = true,
    propagate_version = true,
    after_help = "A link named kubectl-union makes every command available as `kubectl union`."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent of this node.
    Agent(Box<agent::Args>),
    /// Show this node's disks and all volumes.
    Status(status::Args),
    /// List all volumes, or show one with its branches.
    Volumes(volumes::Args),
    /// Tell which split a volume would get now, or every reason why there is none.
    Plan(plan::Args),
    /// List the pools of all nodes, or propose some for this machine.
    Pools(pools::Args),
    /// Create, mount, unmount and delete volumes on a machine without an orchestrator.
    Volume(volume::Args),
    /// Show one volume from its pods to its disks, and what is wrong with it.
    Doctor(doctor::Args),
    /// Merge directories by hand with one MergerFS, on the same code as volumes.
    Merge(merge::Args),
    /// Check a configuration file: show what it means, or all its faults.
    CheckConfig(check_config::Args),
    /// Print the CustomResourceDefinitions for a Kubernetes cluster.
    Crds(crds::Args),
    /// Give up a node of a cluster that is gone for good, and the files on it.
    ForgetNode(forget_node::Args),
    /// List what no claim needs any more in a cluster, with the command that removes it.
    Orphans(orphans::Args),
}

/// How a command answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// A command was not done.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub(crate) enum CliError {
    /// The configuration is not valid.
    #[snafu(display("{source}"), context(false))]
    Config {
        /// All that is wrong.
        source: Faults,
    },
    /// The agent could not run.
    #[snafu(display("{source}"), context(false))]
    Agent {
        /// Why, and what to do.
        source: crate::app::AppError,
    },
    /// No cluster is known.
    #[snafu(display("{source}"), context(false))]
    Cluster {
        /// Why, and what to do.
        source: crate::app::ClusterError,
    },
    /// What there is cannot be read.
    #[snafu(display("{source}"), context(false))]
    Scan {
        /// Why.
        source: crate::controllers::orphans::read::ScanError,
    },
    /// The node was not forgotten.
    #[snafu(display("{source}"), context(false))]
    Forget {
        /// Why, and what to do.
        source: crate::controllers::orphans::forget::act::ForgetError,
    },
    /// The host of this container cannot be entered.
    #[snafu(display("{source}"), context(false))]
    Place {
        /// Why, and what to do.
        source: crate::platform::container::EntryError,
    },
    /// The arguments cannot be followed.
    #[snafu(display("{problem}; {remedy}"))]
    Usage {
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
    },
    /// Nobody answers.
    #[snafu(display(
        "no agent answers at {url} ({reason}); is it running there (systemctl status union-csi), and does http.listen in \
         its agent.yaml say so? Name another with --agent URL or UNION_CSI_AGENT"
    ))]
    NoAgent {
        /// Whom was asked.
        url: String,
        /// Why.
        reason: String,
    },
    /// The agent answered what is not understood.
    #[snafu(display(
        "{url} answers, and not as an agent of this version does: {reason}; compare the versions of both"
    ))]
    Answer {
        /// Whom was asked.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// The agent refused to answer.
    #[snafu(display("the agent refused ({status}): {error}{}", listed(reasons)))]
    Refused {
        /// HTTP status.
        status: u16,
        /// In one sentence.
        error: String,
        /// Each single reason.
        reasons: Vec<String>,
    },
    /// The machine does not tell.
    #[snafu(display("cannot look at this machine's disks: {source}"))]
    Host {
        /// Why.
        source: crate::platform::HostError,
    },
    /// The union was not made, or did not stay.
    #[snafu(display("{source}"))]
    Union {
        /// Why.
        source: crate::node::union::UnionError,
    },
    /// Nobody serves the socket.
    #[snafu(display(
        "no agent serves {}: {reason}; start it (systemctl start union-csi), run this as root, or name another socket \
         with --endpoint", socket.display()
    ))]
    NoSocket {
        /// The socket.
        socket: std::path::PathBuf,
        /// Why.
        reason: String,
    },
    /// The agent did not do what was asked over its socket.
    #[snafu(display("cannot {action}: {message} ({code})"))]
    Call {
        /// What was to be done.
        action: String,
        /// The gRPC code.
        code: &'static str,
        /// Whether there is no room.
        full: bool,
        /// Why.
        message: String,
    },
    /// The question for a plan is none.
    #[snafu(display("this does not describe a volume:{}", listed(reasons)))]
    Question {
        /// Each single reason.
        reasons: Vec<String>,
    },
    /// Standard output cannot be written.
    #[snafu(display("cannot write the answer: {source}"))]
    Output {
        /// Why.
        source: std::io::Error,
    },
}

impl CliError {
    const fn code(&self) -> u8 {
        match self {
            Self::Config { .. } | Self::Usage { .. } | Self::Question { .. } => USAGE,
            Self::Call { full: true, .. } => INFEASIBLE,
            Self::Agent { .. }
            | Self::Cluster { .. }
            | Self::Forget { .. }
            | Self::Scan { .. }
            | Self::Host { .. }
            | Self::Place { .. }
            | Self::Union { .. }
            | Self::NoSocket { .. }
            | Self::Call { .. }
            | Self::NoAgent { .. }
            | Self::Answer { .. }
            | Self::Refused { .. }
            | Self::Output { .. } => FAILED,
        }
    }
}

/// Reasons on lines of their own.
fn listed(reasons: &[String]) -> String {
    reasons.iter().map(|reason| format!("\n  {reason}")).collect()
}

/// `KEY=VALUE` pairs.
fn parameters(typed: &[String]) -> Result<Vec<(String, String)>, CliError> {
    typed
        .iter()
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
            _ => cli_error::UsageSnafu {
                problem: format!("--param {pair:?} is not KEY=VALUE"),
                remedy: "write for example --param strategy=balanced",
            }
            .fail(),
        })
        .collect()
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let mut out = Out::stdout();
    match run(cli, &mut out) {
        Ok(code) => ExitCode::from(code),
        // Whoever read our output has enough of it: `union-csi volumes | head`.
        Err(CliError::Output { source }) if source.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::from(DONE)
        }
        Err(error) => {
            output::complain(&error);
            ExitCode::from(error.code())
        }
    }
}

fn run(cli: Cli, out: &mut Out) -> Result<u8, CliError> {
    match cli.command {
        Command::Agent(args) => agent::run(*args),
        Command::Status(args) => status::run(&args, out),
        Command::Volumes(args) => volumes::run(&args, out),
        Command::Plan(args) => plan::run(&args, out),
        Command::Pools(args) => pools::run(&args, out),
        Command::Merge(args) => merge::run(&args, out),
        Command::Volume(args) => volume::run(args, out),
        Command::Doctor(args) => doctor::run(&args, out),
        Command::CheckConfig(args) => check_config::run(&args, out),
        Command::Crds(args) => crds::run(&args, out),
        Command::ForgetNode(args) => forget_node::run(&args, out),
        Command::Orphans(args) => orphans::run(&args, out),
    }
}

#[cfg(test)]
mod tests;
