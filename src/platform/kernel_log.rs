//! What the kernel's log tells of filesystems as it happens (`Documentation/ABI/testing/dev-kmsg`).
//!
//! XFS shuts down after an error and tells nobody but the log (up to at least 6.12; ext4 tells by `super::fserror`). From then
//! on MergerFS takes what is on it for what does not exist, so that every millisecond counts.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Host;

const LOG: &str = "/dev/kmsg";

/// One record with all its parts takes at most that (`PRINTK_MESSAGE_MAX`); a shorter buffer is refused.
const RECORD_BYTES: usize = 8192;

/// The kernel's log from a moment on.
#[derive(Debug)]
pub struct KernelLog(File);

/// What it told of filesystems that have shut down, or are about to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShutDown {
    /// Their devices, as the kernel names them (`loop3`).
    pub devices: Vec<String>,
    /// Some records were overwritten before they were read: there may have been more.
    pub missed: bool,
}

impl ShutDown {
    /// Whether nothing was told.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.devices.is_empty() && !self.missed
    }
}

impl KernelLog {
    /// Waits until there is something to be taken; false where the other end of `end`, a pipe, was closed before.
    ///
    /// # Errors
    /// What poll(2) tells.
    pub fn wait(&self, end: BorrowedFd<'_>) -> io::Result<bool> {
        loop {
            let of = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
            let mut both = [of(self.0.as_fd()), of(end)];
            match poll(&mut both, PollTimeout::NONE) {
                Ok(_) => return Ok(!both[1].any().unwrap_or(true)),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Takes what was told until now.
    ///
    /// # Errors
    /// What read(2) tells.
    pub fn take(&self) -> io::Result<ShutDown> {
        let mut buffer = [0_u8; RECORD_BYTES];
        let mut told = ShutDown::default();
        loop {
            match (&self.0).read(&mut buffer) {
                Ok(0) => return Ok(told),
                Ok(length) => told.devices.extend(that_shuts_down(&buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(told),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => told.missed = true,
                Err(error) => return Err(error),
            }
        }
    }
}

impl Host {
    /// The kernel's log from now on; `None` where it is not there or not ours to read (`kernel.dmesg_restrict` wants
    /// `CAP_SYSLOG`).
    #[must_use]
    pub fn kernel_log(&self) -> Option<KernelLog> {
        let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
        let mut log = File::options().read(true).custom_flags(flags).open(LOG).ok()?;
        log.seek(SeekFrom::End(0)).ok()?;
        Some(KernelLog(log))
    }
}

/// The device whose filesystem shuts down by this record. XFS's own words differ by the cause and by version: "Filesystem has been
/// shut down", "Shutting down filesystem", "User initiated shutdown received".
fn that_shuts_down(record: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(record);
    // The parts before the text: priority, number, time, flags.
    let (head, message) = text.split_once(';')?;
    // What programs write there has another facility than the kernel's, which is 0.
    head.split(',').next()?.parse::<u32>().ok().filter(|priority| *priority < 8)?;
    let (device, words) = message.lines().next()?.strip_prefix("XFS (")?.split_once("):")?;
    let shuts = words.contains("hut down") || words.contains("hutdown") || words.contains("hutting");
    shuts.then(|| device.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_that_shuts_down_is_heard_in_each_of_its_words() {
        for (device, words) in [
            ("loop3", "User initiated shutdown received."),
            (
                "dm-0",
                "Metadata I/O Error (0x1) detected at xfs_trans_read_buf_map+0x1/0x2 [xfs]. Shutting down filesystem.",
            ),
            ("nvme0n1", "Filesystem has been shut down due to log error (0x2)."),
        ] {
            let record = format!("1,1234,5678,-;XFS ({device}): {words}\n SUBSYSTEM=block\n");
            assert_eq!(that_shuts_down(record.as_bytes()).as_deref(), Some(device), "{words}");
        }
        for message in [
            "XFS (loop3): Mounting V5 Filesystem",
            "XFS (loop3): Unmounting Filesystem",
            "nvme nvme0: Shutting down controller",
            "init: XFS (loop3): shutdown",
        ] {
            assert_eq!(that_shuts_down(format!("6,1,2,-;{message}\n").as_bytes()), None, "{message}");
        }
        assert_eq!(that_shuts_down(b"XFS (loop3): shutdown"), None, "no record");
        assert_eq!(that_shuts_down(b"12,1,2,-;XFS (loop3): shutdown\n"), None, "a program's words");
    }

    #[test]
    fn who_waits_is_told_to_end() {
        if let Some(log) = Host::new().kernel_log() {
            let (end, other) = rustix::pipe::pipe().unwrap();
            drop(other);
            assert!(!log.wait(end.as_fd()).unwrap());
        }
    }

    #[test]
    fn what_was_told_before_is_not_told_again() {
        // Not everywhere may it be read.
        if let Some(log) = Host::new().kernel_log() {
            log.take().unwrap();
            assert!(log.take().unwrap().is_empty());
        }
    }
}
