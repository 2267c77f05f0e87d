//! The command line: what was typed, what it means, run it.
//!
//! One file a command. Commands that show something ask the agent's HTTP API and never read its files; `volume` talks to
//! the agent's CSI socket as an orchestrator would. Exit codes: 0 done, 1 failed, 2 wrongly asked or configured, 3 asked
//! for a volume that does not fit.

mod agent;
mod check_config;
mod output;

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
    /// Check a configuration file: show what it means, or all its faults.
    CheckConfig(check_config::Args),
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
    /// The arguments cannot be followed.
    #[snafu(display("{problem}; {remedy}"))]
    Usage {
        /// What is wrong.
        problem: String,
        /// What to do.
        remedy: String,
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
            Self::Config { .. } | Self::Usage { .. } => USAGE,
            Self::Output { .. } => FAILED,
        }
    }
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
        Command::CheckConfig(args) => check_config::run(&args, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
