//! What can go wrong with machines.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use snafu::Snafu;

use super::machine::Output;

/// Why a machine, or what runs in it, is not as the test wants it.
#[derive(Snafu)]
#[snafu(visibility(pub(super)))]
pub enum Trouble {
    /// The environment of `integration/net/run` is missing.
    #[snafu(display("{variable} is not set: run these tests by integration/net/run"))]
    NotPrepared {
        /// The variable that is missing.
        variable: &'static str,
    },
    /// Something on the host.
    #[snafu(display("cannot {what} {}", path.display()))]
    Host {
        /// As a verb.
        what: &'static str,
        /// Of what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// More machines than a test may have.
    #[snafu(display("{wanted} machines are more than the {most} that may run at the same time"))]
    TooMany {
        /// How many were asked for, with those that run.
        wanted: usize,
        /// How many there may be.
        most: usize,
    },
    /// The machine did not come up.
    #[snafu(display("machine {machine} did not come up within {bound:?}; QEMU said {said:?}"))]
    NotUp {
        /// Its name.
        machine: String,
        /// How long was waited.
        bound: Duration,
        /// What QEMU wrote to its standard error.
        said: String,
    },
    /// The machine is off, or went off while a command ran.
    #[snafu(display("machine {machine} is off: {script:?} cannot be run"))]
    Off {
        /// Its name.
        machine: String,
        /// What was to be run.
        script: String,
    },
    /// The machine does not answer.
    #[snafu(display("machine {machine} does not answer; last asked: {script:?}"))]
    Silent {
        /// Its name.
        machine: String,
        /// What was to be run.
        script: String,
    },
    /// A command failed.
    #[snafu(display("on {machine}, {script:?} failed: {output}"))]
    Failed {
        /// Where.
        machine: String,
        /// The command.
        script: String,
        /// How it ended, and what it said.
        output: Box<Output>,
    },
    /// A command never succeeded.
    #[snafu(display("on {machine}, {script:?} did not succeed within {bound:?}: {output}"))]
    Never {
        /// Where.
        machine: String,
        /// The command.
        script: String,
        /// How long it was tried.
        bound: Duration,
        /// How it ended the last time.
        output: Box<Output>,
    },
    /// The machine did not switch itself off.
    #[snafu(display("machine {machine} did not switch itself off within {bound:?}"))]
    StaysOn {
        /// Its name.
        machine: String,
        /// How long was waited.
        bound: Duration,
    },
}

/// As tests print it: the message with its causes.
impl fmt::Debug for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}
