//! Cuts unions off a filesystem that shuts down, as soon as the kernel's log tells of it.
//!
//! Until then MergerFS says of the files there that they do not exist, and lets them be made anew on another branch. So this is a
//! thread of its own, before all others of the machine in the queue for a processor, and it does only what is needed to end that:
//! it writes to a file that is open already. What else there is to do is the healer's.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokio::sync::mpsc;

use super::volume::Volumes;
use crate::domain::VolumeId;
use crate::platform::kernel_log::KernelLog;

/// The thread that listens; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Alarm {
    told: mpsc::UnboundedReceiver<Vec<VolumeId>>,
    _end: OwnedFd,
}

impl Alarm {
    /// Listens from now on; `None` where the log may not be read, or no thread be made.
    pub(super) fn start(volumes: &Volumes) -> Option<Self> {
        let log = volumes.host().kernel_log()?;
        let (end, other_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).ok()?;
        let (tell, told) = mpsc::unbounded_channel();
        let volumes = volumes.clone();
        let listen = move || listen(&log, &volumes, end.as_fd(), &tell);
        std::thread::Builder::new().name("kernel-log".to_owned()).spawn(listen).ok()?;
        Some(Self { told, _end: other_end })
    }

    /// Returns when a filesystem was told to shut down, with the volumes that were cut off it. Where that is nobody's, or
    /// something was missed, there are none; the branches are to be asked anyway.
    pub(super) async fn heard(of: Option<&mut Self>) -> Vec<VolumeId> {
        match of {
            Some(alarm) => match alarm.told.recv().await {
                Some(volumes) => volumes,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

fn listen(
    log: &KernelLog,
    volumes: &Volumes,
    end: BorrowedFd<'_>,
    tell: &mpsc::UnboundedSender<Vec<VolumeId>>,
) {
    if let Err(error) = volumes.host().hurry_this_thread() {
        tracing::debug!(error = %error, "the thread that listens to the kernel's log waits for processors as others do");
    }
    loop {
        let told = match log.wait(end).and_then(|goes_on| goes_on.then(|| log.take()).transpose()) {
            Ok(Some(told)) => told,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(error = %error, "the kernel's log cannot be read");
                return;
            }
        };
        if told.is_empty() {
            continue;
        }
        let mut cut: Vec<_> = told.devices.iter().flat_map(|device| volumes.cut_off(device)).collect();
        cut.sort();
        cut.dedup();
        if tell.send(cut).is_err() {
            return;
        }
    }
}
