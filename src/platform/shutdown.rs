//! Shutting a filesystem down, whoever uses it (`FS_IOC_SHUTDOWN`: ext4 and XFS; Btrfs in kernels of 2026).
//!
//! From then on every access fails with EIO, in whatever mount namespace and through whatever file was open before, and nothing
//! that the filesystem still had in memory is written. What it was before can only be had back by mounting it anew, which the
//! kernel allows when the last user is gone.

#![allow(unsafe_code, reason = "ioctl(2)")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::mount::table_of;
use super::mounted::processes;
use super::{Host, HostError, Result, failed};

/// `_IOR('X', 125, __u32)`: `EXT4_IOC_SHUTDOWN`, `XFS_IOC_GOINGDOWN` and `FS_IOC_SHUTDOWN` are one number.
const FS_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587D;

/// Writes the journal out first and nothing else: what was completed with fsync(2) stays, as after a crash, and the call waits
/// for no file's contents. Freezing first (0) would wait for all of them, and for a disk that has stopped to answer for ever;
/// without the journal (2) completed operations would be lost.
const LOGFLUSH: u32 = 1;

/// How long what was written and not flushed may take to be: a courtesy to those who did not ask for it.
const SYNC_BOUND: Duration = Duration::from_secs(5);

/// How long writing the journal out may take.
const SHUTDOWN_BOUND: Duration = Duration::from_secs(20);

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Nothing can be written any more.
    Done,
    /// This kind of filesystem knows no such thing; nothing was changed.
    Unknown,
    /// No mount of any namespace shows it; nothing was changed.
    Unseen,
}

impl Host {
    /// Shuts the filesystem on the block device down (major:minor), wherever it is mounted. What was written until then is
    /// flushed if the disk takes it within a few seconds. Done twice is done once.
    ///
    /// # Errors
    /// The errno of ioctl(2); [`HostError::Timeout`] where it does not end.
    pub fn shut_down(&self, device: (u32, u32)) -> Result<Shutdown> {
        let subject = PathBuf::from(format!("/dev/block/{}:{}", device.0, device.1));
        self.enter("shut down", &subject)?;
        let Some(file) = self.bounded(&subject, SHUTDOWN_BOUND, move || open_within(device))?? else {
            return Ok(Shutdown::Unseen);
        };
        let again = file.try_clone().map_err(failed("dup", &subject))?;
        // One that hangs is left alone; the shutdown makes it fail.
        let synced = subject.join("sync");
        let _ = self.probes.ask(&synced, SYNC_BOUND, move || rustix::fs::syncfs(&again));
        let shut = self.bounded(&subject, SHUTDOWN_BOUND, move || {
            let how = LOGFLUSH;
            // SAFETY: the ioctl reads one u32 through the pointer, which outlives the call.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_SHUTDOWN, &raw const how) };
            if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        })?;
        match shut {
            Ok(()) => Ok(Shutdown::Done),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::EOPNOTSUPP)) => {
                Ok(Shutdown::Unknown)
            }
            Err(e) => Err(failed("FS_IOC_SHUTDOWN", &subject)(e)),
        }
    }

    fn bounded<T: Send + 'static>(
        &self,
        subject: &Path,
        bound: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        self.probes.ask(subject, bound, work)?.ok_or_else(|| HostError::Timeout {
            action: "shut down",
            subject: subject.display().to_string(),
            seconds: bound.as_secs(),
        })
    }
}

/// Something of the filesystem on `device`, opened through a mount of whatever namespace.
fn open_within(device: (u32, u32)) -> Result<Option<File>> {
    for process in processes()? {
        let Ok(table) = table_of(&process.join("mountinfo")) else { continue };
        for entry in table.entries.iter().filter(|e| e.device == device) {
            let point = entry.mount_point.strip_prefix("/").unwrap_or(&entry.mount_point);
            // What is bound may be a file; a device or a pipe must not be waited for.
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
            let path = process.join("root").join(point);
            let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(&path) else { continue };
            // Who lives in the namespace may have put something else in the way.
            if file.metadata().is_ok_and(|found| number(found.dev()) == device) {
                return Ok(Some(file));
            }
        }
    }
    Ok(None)
}

fn number(device: u64) -> (u32, u32) {
    (rustix::fs::major(device), rustix::fs::minor(device))
}
