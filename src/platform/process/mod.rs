//! Processes: some that outlive the agent, and are known again by the next one, and some that are run to their end.

mod cgroup;
mod detached;
mod run;

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use super::{Host, HostError, Result, failed};

/// What to start.
#[derive(Clone, Debug)]
pub struct DetachedCommand {
    /// Program, an absolute path.
    pub program: PathBuf,
    /// Arguments.
    pub args: Vec<OsString>,
    /// Where its standard output and error go (appended, made where missing).
    pub log: PathBuf,
    /// Name of its own cgroup, outside the agent's; none where cgroups are not writable. One plain name.
    pub cgroup: String,
    /// Soft and hard limit of open files, as far as the hard limit allows.
    pub open_files: u64,
    /// Whether it keeps its capabilities while it acts as another user, as a file server does behind a kernel that has
    /// checked the user's permissions already (`SECBIT_NO_SETUID_FIXUP`, capabilities(7)). Needs `CAP_SETPCAP`.
    pub keeps_capabilities: bool,
    /// How readily the kernel ends it when memory is short (proc_pid_oom_score_adj(5), -1000 to 1000); lower than the
    /// agent's own takes `CAP_SYS_RESOURCE`, and without that it has the agent's. `None`: the agent's.
    pub oom_score_adj: Option<i16>,
}

/// A process by what stays true when its pid is reused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    /// Pid, as the agent's `/proc` counts.
    pub pid: i32,
    /// Start time in clock ticks since boot (proc_pid_stat(5) field 22).
    pub start_time: u64,
    /// `/proc/sys/kernel/random/boot_id` of the boot it belongs to.
    pub boot_id: String,
}

impl Host {
    /// Lets the calling thread run before all ordinary others (nice value -20, setpriority(2)); what it starts does so too.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_NICE`.
    pub fn hurry_this_thread(&self) -> Result<()> {
        rustix::process::setpriority_process(None, -20).map_err(failed("setpriority", "this thread"))
    }

    /// A pidfd of the process (readable when it ends), or `None` where it is gone.
    ///
    /// # Errors
    /// What pidfd_open(2) tells.
    pub fn process_open(&self, id: &ProcessId) -> Result<Option<OwnedFd>> {
        self.enter("pidfd_open", id.subject())?;
        if boot_id()? != id.boot_id {
            return Ok(None);
        }
        let Some(pid) = Pid::from_raw(id.pid) else { return Ok(None) };
        let pidfd = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            // EINVAL, ENOENT: a thread that is no process has the number.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => return Ok(None),
            opened => opened.map_err(failed("pidfd_open", id.subject()))?,
        };
        // Asked after opening: the process that has this start time had the pid all the while.
        Ok((stat_of(id.pid)? == Some(id.start_time)).then_some(pidfd))
    }

    /// Sends a signal to the process, and to no other that has its pid now; false where it is gone.
    ///
    /// # Errors
    /// What pidfd_send_signal(2) tells.
    pub fn process_signal(&self, id: &ProcessId, signal: i32) -> Result<bool> {
        self.enter("pidfd_send_signal", id.subject())?;
        let Some(pidfd) = self.process_open(id)? else { return Ok(false) };
        let signal = Signal::from_named_raw(signal)
            .ok_or(Errno::INVAL)
            .map_err(failed("pidfd_send_signal", id.subject()))?;
        match rustix::process::pidfd_send_signal(&pidfd, signal) {
            Ok(()) => Ok(true),
            Err(Errno::SRCH) => Ok(false),
            Err(errno) => Err(failed("pidfd_send_signal", id.subject())(errno)),
        }
    }

    /// Stops the process (SIGSTOP) and waits until it stands still: its threads stop one after the other, and work on until
    /// then. False where it is gone, or not all of them stand still after `bound`.
    ///
    /// # Errors
    /// What pidfd_send_signal(2) tells, or `/proc` cannot be read.
    pub fn process_pause(&self, id: &ProcessId, bound: Duration) -> Result<bool> {
        if !self.process_signal(id, libc::SIGSTOP)? {
            return Ok(false);
        }
        let deadline = Instant::now() + bound;
        loop {
            match stands_still(id.pid) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) if is_gone(&error) => return Ok(false),
                Err(error) => return Err(failed("read the threads of", id.subject())(error)),
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the process at once (SIGKILL), as [`Host::process_signal`].
    ///
    /// # Errors
    /// What pidfd_send_signal(2) tells.
    pub fn process_kill(&self, id: &ProcessId) -> Result<bool> {
        self.process_signal(id, libc::SIGKILL)
    }

    /// Waits until the process is gone; false when it is still there after `bound`.
    ///
    /// # Errors
    /// What poll(2) tells.
    pub fn process_wait(&self, id: &ProcessId, bound: Duration) -> Result<bool> {
        let Some(pidfd) = self.process_open(id)? else { return Ok(true) };
        let deadline = Instant::now() + bound;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
                Ok(0) if left.is_zero() => return Ok(false),
                Ok(0) | Err(nix::Error::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(failed("poll", id.subject())(errno)),
            }
        }
    }

    /// Resident memory of the process, in bytes, or `None` where it is gone.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn process_memory(&self, id: &ProcessId) -> Result<Option<u64>> {
        self.enter("read statm", id.subject())?;
        let file = PathBuf::from(format!("/proc/{}/statm", id.pid));
        let text = match std::fs::read_to_string(&file) {
            Err(error) if is_gone(&error) => return Ok(None),
            read => read.map_err(failed("read", &file))?,
        };
        // Asked after reading: what was read is the memory of the process that is meant.
        if boot_id()? != id.boot_id || stat_of(id.pid)? != Some(id.start_time) {
            return Ok(None);
        }
        // proc_pid_statm(5): size, resident, ..., in pages.
        let pages: Option<u64> = text.split_ascii_whitespace().nth(1).and_then(|field| field.parse().ok());
        let pages = pages.ok_or_else(|| HostError::Unexpected {
            subject: file.display().to_string(),
            reason: format!("no resident size in {text:?}"),
        })?;
        let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
        Ok(Some(pages.saturating_mul(page)))
    }
}

impl ProcessId {
    fn subject(&self) -> String {
        format!("process {}", self.pid)
    }
}

/// The running process that has this pid now, or `None` where there is none.
fn identity_of(pid: i32) -> Result<Option<ProcessId>> {
    let boot_id = boot_id()?;
    Ok(stat_of(pid)?.map(|start_time| ProcessId { pid, start_time, boot_id }))
}

fn boot_id() -> Result<String> {
    let file = Path::new("/proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(file).map_err(failed("read", file))?;
    Ok(text.trim().to_owned())
}

/// Start time of the process that has this pid now; `None` where there is none, or a zombie.
fn stat_of(pid: i32) -> Result<Option<u64>> {
    let file = PathBuf::from(format!("/proc/{pid}/stat"));
    let text = match std::fs::read(&file) {
        Err(error) if is_gone(&error) => return Ok(None),
        read => read.map_err(failed("read", &file))?,
    };
    parse_stat(&String::from_utf8_lossy(&text)).ok_or_else(|| HostError::Unexpected {
        subject: file.display().to_string(),
        reason: format!("no start time in {:?}", String::from_utf8_lossy(&text)),
    })
}

/// Whether all threads of a process are stopped, or have ended.
fn stands_still(pid: i32) -> std::io::Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        match std::fs::read(thread?.path().join("stat")) {
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
            Ok(stat) if fields_of(&String::from_utf8_lossy(&stat)).next() == Some("T") => {}
            Ok(_) => return Ok(false),
        }
    }
    Ok(true)
}

/// ESRCH is what reading a file of `/proc/PID` gives that was opened just before the process ended.
fn is_gone(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// The fields of proc_pid_stat(5) from the third on. The second, the program's name, may hold blanks and parentheses.
fn fields_of(line: &str) -> impl Iterator<Item = &str> {
    line.rsplit_once(')').map_or("", |(_, rest)| rest).split_ascii_whitespace()
}

/// Fields 3 (state) and 22 (start time) of proc_pid_stat(5); the outer `None` is a line that is not understood, the inner
/// one a process that has ended.
fn parse_stat(line: &str) -> Option<Option<u64>> {
    let mut fields = fields_of(line);
    let state = fields.next()?;
    let start_time = fields.nth(18)?.parse().ok()?;
    Some((!matches!(state, "Z" | "X" | "x")).then_some(start_time))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: &str = "1 2 3 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 100 200";

    #[test]
    fn the_start_time_is_found_whatever_the_program_is_called() {
        for name in ["sleep", "a b", "a) S 1", ") Z (", ""] {
            assert_eq!(parse_stat(&format!("77 ({name}) S {REST}")), Some(Some(4711)), "{name:?}");
        }
    }

    #[test]
    fn a_zombie_is_gone() {
        assert_eq!(parse_stat(&format!("77 (sleep) Z {REST}")), Some(None));
    }

    #[test]
    fn what_is_no_stat_line_is_not_understood() {
        for line in
            ["", "77 sleep S 1", "77 (sleep) S 1 2", "77 (sleep) S 1 2 3 0 -1 1 1 0 0 0 0 0 0 0 20 0 1 0 x 1"]
        {
            assert_eq!(parse_stat(line), None, "{line:?}");
        }
    }

    #[test]
    fn a_process_is_found_by_its_whole_identity_only() {
        let host = Host::new();
        let me = identity_of(i32::try_from(std::process::id()).unwrap()).unwrap().unwrap();
        assert!(host.process_open(&me).unwrap().is_some());
        assert!(host.process_memory(&me).unwrap().unwrap() > 100_000);
        assert!(!host.process_wait(&me, Duration::ZERO).unwrap());
        assert!(host.process_signal(&me, libc::SIGCONT).unwrap());
        for other in [
            ProcessId { start_time: me.start_time + 1, ..me.clone() },
            ProcessId { boot_id: "another".to_owned(), ..me.clone() },
            ProcessId { pid: i32::MAX, ..me.clone() },
            ProcessId { pid: 0, ..me.clone() },
        ] {
            assert!(host.process_open(&other).unwrap().is_none());
            assert_eq!(host.process_memory(&other).unwrap(), None);
            assert!(host.process_wait(&other, Duration::from_secs(60)).unwrap());
            assert!(!host.process_signal(&other, libc::SIGKILL).unwrap());
        }
    }
}
