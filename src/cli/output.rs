//! What people and programs see: the only place of the command line that writes.

use std::io::{IsTerminal, Write};

use serde::Serialize;
use snafu::ResultExt;

use super::{CliError, cli_error};

/// Columns where the terminal tells none: what a page of text takes.
const DEFAULT_WIDTH: usize = 100;
/// No narrower, or the tables would have no columns left.
const MIN_WIDTH: usize = 40;
/// No wider: bars would only grow empty.
const MAX_WIDTH: usize = 160;

/// Where answers go.
pub(super) struct Out {
    writer: Box<dyn Write>,
    /// How it looks there.
    pub(super) look: Look,
}

/// What the place that text goes to can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Columns.
    pub(super) width: usize,
    /// Whether colours are shown.
    pub(super) colour: bool,
}

impl Out {
    /// Standard output; colours on a terminal only, and never where `NO_COLOR` is set (<https://no-color.org>).
    pub(super) fn stdout() -> Self {
        let stdout = std::io::stdout();
        let refused = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
        let look = Look { width: width(), colour: stdout.is_terminal() && !refused };
        Self { writer: Box::new(stdout), look }
    }

    /// Writes text, which ends in a line break.
    pub(super) fn print(&mut self, text: &str) -> Result<(), CliError> {
        self.writer
            .write_all(text.as_bytes())
            .and_then(|()| self.writer.flush())
            .context(cli_error::OutputSnafu)
    }

    /// Writes indented JSON.
    pub(super) fn json(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        serde_json::to_writer_pretty(&mut self.writer, value)
            .map_err(std::io::Error::from)
            .context(cli_error::OutputSnafu)?;
        self.print("\n")
    }
}

fn width() -> usize {
    let told = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    let seen = || terminal_size::terminal_size().map(|(terminal_size::Width(w), _)| usize::from(w));
    told.or_else(seen).unwrap_or(DEFAULT_WIDTH).clamp(MIN_WIDTH, MAX_WIDTH)
}

/// Says on standard error why a command was not done.
pub(super) fn complain(error: &CliError) {
    // Nobody is left to be told where standard error is closed.
    let _ = writeln!(std::io::stderr().lock(), "union-csi: {error}");
}

/// Says on standard error what an answer lacks.
pub(super) fn warn(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "union-csi: {text}");
}
