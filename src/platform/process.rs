//! Processes that outlive the agent.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Host, Result};

/// What to start.
#[derive(Clone, Debug)]
pub struct DetachedCommand {
    /// Program, an absolute path.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
    /// Where its standard output and error go (appended, made where missing).
    pub log: PathBuf,
    /// Name of its own cgroup, beside the agent's; none where cgroups are not writable.
    pub cgroup: String,
    /// Soft and hard limit of open files, as far as the hard limit allows.
    pub open_files: u64,
}

/// A process by what stays true when its pid is reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    /// Pid, in the host's namespace.
    pub pid: i32,
    /// Start time in clock ticks since boot (proc_pid_stat(5) field 22).
    pub start_time: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot it belongs to.
    pub boot_id: String,
}

impl Host {
    /// Starts a process in its own session and cgroup, child of init (or of the nearest subreaper) rather than of the
    /// agent, signals at their defaults, standard input `/dev/null`, no descriptors inherited. It lives on when the agent
    /// dies, whatever signal ends the agent or its session.
    ///
    /// # Errors
    /// It could not be started.
    pub fn spawn_detached(&self, command: &DetachedCommand) -> Result<ProcessId> {
        let _ = command;
        unimplemented!()
    }

    /// A pidfd of the process (readable when it ends), or `None` where it is gone.
    ///
    /// # Errors
    /// What pidfd_open(2) tells.
    pub fn process_open(&self, id: &ProcessId) -> Result<Option<OwnedFd>> {
        let _ = id;
        unimplemented!()
    }

    /// Sends a signal to the process, and to no other that has its pid now; false where it is gone.
    ///
    /// # Errors
    /// What pidfd_send_signal(2) tells.
    pub fn process_signal(&self, id: &ProcessId, signal: i32) -> Result<bool> {
        let _ = (id, signal);
        unimplemented!()
    }

    /// Waits until the process is gone; false when it is still there after `bound`.
    ///
    /// # Errors
    /// What poll(2) tells.
    pub fn process_wait(&self, id: &ProcessId, bound: Duration) -> Result<bool> {
        let _ = (id, bound);
        unimplemented!()
    }

    /// Resident memory of the process, in bytes, or `None` where it is gone.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn process_memory(&self, id: &ProcessId) -> Result<Option<u64>> {
        let _ = id;
        unimplemented!()
    }

    /// Removes the cgroup made for a process that is gone.
    ///
    /// # Errors
    /// What rmdir(2) tells.
    pub fn remove_cgroup(&self, name: &str) -> Result<()> {
        let _ = name;
        unimplemented!()
    }

    /// Runs a program to its end, at most `bound`, standard input empty, and returns its standard output.
    ///
    /// # Errors
    /// [`super::HostError::Command`], [`super::HostError::Timeout`] (it is killed then).
    pub fn run(&self, program: &str, args: &[OsString], bound: Duration) -> Result<String> {
        let _ = (program, args, bound);
        unimplemented!()
    }
}
