//! The operating system, one file per kernel facility.
//!
//! Everything the program does to the machine goes through [`Host`]: system calls, ioctls, files under `/proc` and
//! `/sys`, external commands. Functions block; callers on the async side run them on blocking threads. They decide
//! nothing: what is to be done is decided in [`crate::node`].
//!
//! A [`Gate`] is asked before each effect. Production has none; tests use one that fails effect number N, so that every
//! place where the machine can fail is tried in turn against the real kernel.

pub mod block;
mod bounded;
pub mod container;
pub mod directory;
pub mod disks;
pub mod distant;
pub mod entry;
pub mod file;
pub mod fserror;
pub mod fuse;
pub mod holders;
pub mod kernel_log;
pub mod keyring;
pub mod loopdev;
pub mod memory;
pub mod mkfs;
pub mod mount;
mod mounted;
pub mod namespace;
pub mod net;
pub mod nfs;
pub mod nvme;
pub mod process;
pub mod quota;
pub mod refusal;
pub mod shutdown;
pub mod space;
mod system;
pub mod tls;
pub mod trial;
pub mod xattr;

use std::io;
use std::sync::Arc;

use snafu::Snafu;

/// An effect on the machine failed.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum HostError {
    /// A system call failed.
    #[snafu(display("{call} on {subject} failed: {source}"))]
    Syscall {
        /// Name of the call, as in section 2 of the manual.
        call: &'static str,
        /// What it was made on.
        subject: String,
        /// The errno.
        source: io::Error,
    },
    /// A program could not be run or reported failure.
    #[snafu(display("{program} {args} failed ({status}): {stderr}"))]
    Command {
        /// Program.
        program: String,
        /// Its arguments, joined.
        args: String,
        /// Exit status, or why it did not start.
        status: String,
        /// The end of what it printed on standard error.
        stderr: String,
    },
    /// Something did not answer in time.
    #[snafu(display("{action} on {subject} did not finish within {seconds} s"))]
    Timeout {
        /// What was done.
        action: &'static str,
        /// On what.
        subject: String,
        /// The bound, in seconds.
        seconds: u64,
    },
    /// The kernel or a program told something that is not understood.
    #[snafu(display("{subject} cannot be understood: {reason}"))]
    Unexpected {
        /// What was read.
        subject: String,
        /// What is wrong with it.
        reason: String,
    },
    /// This host lacks a facility.
    #[snafu(display("this host lacks {facility}: {remedy}"))]
    Unsupported {
        /// What is missing.
        facility: String,
        /// What to do.
        remedy: String,
    },
}

impl HostError {
    /// The errno, where a system call failed.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Syscall { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// Nothing is there (ENOENT).
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.errno() == Some(libc::ENOENT)
    }

    /// True where the kernel forbids it (EPERM): an immutable directory, among other reasons.
    #[must_use]
    pub fn is_not_permitted(&self) -> bool {
        self.errno() == Some(libc::EPERM)
    }

    /// True where the kernel lacks it (ENODEV): a kind of filesystem, a device.
    #[must_use]
    pub fn is_lacking(&self) -> bool {
        self.errno() == Some(libc::ENODEV)
    }

    /// True where the other end of a network does not answer (ECONNREFUSED, ETIMEDOUT, EHOSTUNREACH, ENETUNREACH), or
    /// something did not in time.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        let silent = [libc::ECONNREFUSED, libc::ETIMEDOUT, libc::EHOSTUNREACH, libc::ENETUNREACH];
        matches!(self, Self::Timeout { .. }) || self.errno().is_some_and(|errno| silent.contains(&errno))
    }

    /// True where the other end of a network does not give it to us (EACCES, EPERM), has no such thing (ENOENT), or has it
    /// no more (ESTALE).
    #[must_use]
    pub fn is_withheld(&self) -> bool {
        matches!(self.errno(), Some(libc::EACCES | libc::EPERM | libc::ENOENT | libc::ESTALE))
    }

    /// True where something still uses it (EBUSY).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.errno() == Some(libc::EBUSY)
    }

    /// True where a directory holds something (ENOTEMPTY).
    #[must_use]
    pub fn is_not_empty(&self) -> bool {
        self.errno() == Some(libc::ENOTEMPTY)
    }

    /// True where a symlink or something of the wrong kind is in the way of a path (ELOOP, ENOTDIR, EISDIR).
    #[must_use]
    pub fn is_wrong_kind(&self) -> bool {
        matches!(self.errno(), Some(libc::ELOOP | libc::ENOTDIR | libc::EISDIR))
    }

    /// True where the daemon of a FUSE mount is gone, or its connection was aborted (ENOTCONN, ECONNABORTED).
    #[must_use]
    pub fn is_disconnected(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOTCONN | libc::ECONNABORTED))
    }

    /// The filesystem or a quota has no room (ENOSPC, EDQUOT).
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        matches!(self.errno(), Some(libc::ENOSPC | libc::EDQUOT))
    }

    /// The filesystem cannot do it at all (EOPNOTSUPP), or not at this size (EFBIG).
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        matches!(self.errno(), Some(libc::EOPNOTSUPP | libc::EFBIG))
    }
}

/// Names the call and what it was made on; for `map_err`.
pub(crate) fn failed<E: Into<io::Error>>(
    call: &'static str,
    subject: impl AsRef<std::path::Path>,
) -> impl FnOnce(E) -> HostError {
    move |source| HostError::Syscall {
        call,
        subject: subject.as_ref().display().to_string(),
        source: source.into(),
    }
}

/// Result of an effect.
pub type Result<T, E = HostError> = std::result::Result<T, E>;

/// Asked before each effect; an error is what the effect then fails with.
pub trait Gate: Send + Sync {
    /// `effect` is about to happen on `subject`.
    fn enter(&self, effect: &'static str, subject: &str) -> io::Result<()>;
}

/// The machine.
#[derive(Clone, Default)]
pub struct Host {
    gate: Option<Arc<dyn Gate>>,
    /// Questions that may never be answered, shared by all clones.
    probes: bounded::Probes,
    /// Of the table of mounts, shared likewise.
    readings: Arc<mount::Readings>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").finish_non_exhaustive()
    }
}

impl Host {
    /// The machine as it is.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The machine behind a gate, for tests.
    #[must_use]
    pub fn behind(gate: Arc<dyn Gate>) -> Self {
        Self { gate: Some(gate), ..Self::default() }
    }

    /// Passes the gate.
    pub(crate) fn enter(&self, effect: &'static str, subject: impl AsRef<std::path::Path>) -> Result<()> {
        let Some(gate) = &self.gate else { return Ok(()) };
        let subject = subject.as_ref().to_string_lossy();
        gate.enter(effect, &subject).map_err(|source| HostError::Syscall {
            call: effect,
            subject: subject.into_owned(),
            source,
        })
    }
}
