//! The end of a process, told at once.

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::UnionError;
use super::launch::host;
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};

/// Returns when the process is gone; at once where it is gone already. Waits on its pidfd, without polling.
///
/// # Errors
/// The process cannot be watched (pidfd_open(2)).
pub async fn watch_exit(host_: &Host, process: &ProcessId) -> Result<(), UnionError> {
    let Some(pidfd) = host_.process_open(process).map_err(host("watch mergerfs"))? else { return Ok(()) };
    let watching = |source| {
        let subject = format!("process {}", process.pid);
        UnionError::Host {
            action: "watch mergerfs",
            source: HostError::Syscall { call: "poll", subject, source },
        }
    };
    #[expect(
        deprecated,
        reason = "its successor is unsafe for types that may change their descriptor; this one does not"
    )]
    let watched = AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(watching)?;
    watched.readable().await.map(|_| ()).map_err(watching)
}
