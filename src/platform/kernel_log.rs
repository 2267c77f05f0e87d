//! What the kernel's log tells of filesystems as it happens (`Documentation/ABI/testing/dev-kmsg`).
//!
//! XFS shuts down after an error and tells nobody but the log (up to at least 6.12; ext4 tells by `super::fserror`). From then
//! on MergerFS takes what is on it for what does not exist, so that every millisecond counts.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;

use super::Host;

const LOG: &str = "/dev/kmsg";

/// One record with all its parts takes at most that (`PRINTK_MESSAGE_MAX`); a shorter buffer is refused.
const RECORD_BYTES: usize = 8192;

/// The kernel's log from a moment on. Its descriptor is readable when there is something new.
#[derive(Debug)]
pub struct KernelLog(File);

impl KernelLog {
    /// Takes what was told until now: whether a filesystem has shut down, or is about to; which, is to be seen by asking it.
    ///
    /// # Errors
    /// What read(2) tells.
    pub fn take(&self) -> io::Result<bool> {
        let mut buffer = [0_u8; RECORD_BYTES];
        let mut shut_down = false;
        loop {
            match (&self.0).read(&mut buffer) {
                Ok(0) => return Ok(shut_down),
                Ok(length) => shut_down |= tells_of_shutdown(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(shut_down),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Some were overwritten before they were read: what they told is not known.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => shut_down = true,
                Err(error) => return Err(error),
            }
        }
    }
}

impl AsRawFd for KernelLog {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
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

/// XFS's own words differ by the cause and by version: "Filesystem has been shut down", "Shutting down filesystem", "User initiated
/// shutdown received".
fn tells_of_shutdown(record: &[u8]) -> bool {
    let text = String::from_utf8_lossy(record);
    // The parts before the text: priority, number, time, flags.
    let Some((_, message)) = text.split_once(';') else { return false };
    let message = message.lines().next().unwrap_or_default();
    message.starts_with("XFS (")
        && (message.contains("hut down") || message.contains("hutdown") || message.contains("hutting"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filesystem_that_shuts_down_is_heard_in_each_of_its_words() {
        for message in [
            "XFS (loop3): User initiated shutdown received.",
            "XFS (dm-0): Metadata I/O Error (0x1) detected at xfs_trans_read_buf_map+0x1/0x2 [xfs]. Shutting down filesystem.",
            "XFS (nvme0n1): Filesystem has been shut down due to log error (0x2).",
        ] {
            let record = format!("1,1234,5678,-;{message}\n SUBSYSTEM=block\n");
            assert!(tells_of_shutdown(record.as_bytes()), "{message}");
        }
        for message in [
            "XFS (loop3): Mounting V5 Filesystem",
            "XFS (loop3): Unmounting Filesystem",
            "nvme nvme0: Shutting down controller",
            "init: XFS (loop3): shutdown",
        ] {
            assert!(!tells_of_shutdown(format!("6,1,2,-;{message}\n").as_bytes()), "{message}");
        }
        assert!(!tells_of_shutdown(b"XFS (loop3): shutdown"), "no record");
    }

    #[test]
    fn what_was_told_before_is_not_told_again() {
        // Not everywhere may it be read.
        if let Some(log) = Host::new().kernel_log() {
            log.take().unwrap();
            assert!(!log.take().unwrap());
        }
    }
}
