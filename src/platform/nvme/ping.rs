//! Asking the other end of a connection whether it is there.
//!
//! Structure and number are those of `linux/nvme_ioctl.h` (kernel user-space API, stable).

#![allow(unsafe_code, reason = "ioctl(2)")]

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::Nvme;
use crate::platform::Result;

/// `NVME_IOCTL_ADMIN_CMD`.
const ADMIN_COMMAND: libc::c_ulong = 0xC048_4E41;
/// Get Features, and the number of queues: every controller answers, and nothing is transferred.
const GET_FEATURES: u8 = 0x0A;
const NUMBER_OF_QUEUES: u32 = 0x07;

/// How long the other end may take for an answer without any work.
const ANSWER_MS: u32 = 1000;
/// After which the kernel has noticed that there was none: its clock for requests ticks in seconds.
const PING_BOUND: Duration = Duration::from_secs(4);

/// `struct nvme_admin_cmd`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

impl Nvme {
    /// Sends a question to the other end of a live connection. When there is no answer, the kernel takes the connection for
    /// lost at once, instead of after the timeouts of requests and keep-alives; ending it is quick after that, where it would
    /// take the kernel up to 90 s (`io_timeout`, then `admin_timeout`) otherwise. True when there was an answer.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn ping(&self, name: &str) -> Result<bool> {
        let path = self.files.dev.join(name);
        self.host.enter("ping", &path)?;
        let device = path.clone();
        let answered = self.host.probes.ask(&path, PING_BOUND, move || -> io::Result<()> {
            let file = std::fs::File::open(&device)?;
            let mut command = AdminCommand {
                opcode: GET_FEATURES,
                cdw10: NUMBER_OF_QUEUES,
                timeout_ms: ANSWER_MS,
                ..AdminCommand::default()
            };
            // SAFETY: the descriptor is open, and the structure is the one of this ioctl and lives until it returns; the kernel
            // reads and writes nothing else, as the command has no data.
            let status = unsafe { libc::ioctl(file.as_raw_fd(), ADMIN_COMMAND, &raw mut command) };
            // A status of the device is positive, and an answer too.
            if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        })?;
        Ok(matches!(answered, Some(Ok(()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Host;
    use crate::platform::nvme::KernelFiles;

    #[test]
    fn the_structure_has_the_size_that_the_kernel_expects() {
        // The size is part of the ioctl's number.
        let size = libc::c_ulong::try_from(size_of::<AdminCommand>()).unwrap();
        assert_eq!(ADMIN_COMMAND >> 16 & 0x3FFF, size);
    }

    #[test]
    fn a_connection_that_is_gone_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
        assert!(!nvme.ping("nvme0").unwrap());
    }
}
