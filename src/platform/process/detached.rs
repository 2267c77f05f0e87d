//! Starting a process that is nobody's child.
//!
//! The kernel ends a process with its parent's session, cgroup or container, and leaves a zombie to its parent. So the
//! program is started by a child of a child: the one between ends at once, and init adopts the rest. Everything that
//! could fail or allocate is prepared before the first fork; between fork and exec only system calls are made, since
//! other threads may have held any lock at that moment (signal-safety(7)).

#![allow(unsafe_code)] // fork(2) and what is done between it and exec.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::PipeFlags;

use super::{DetachedCommand, ProcessId, cgroup, identity_of};
use crate::platform::{Host, HostError, Result, failed};

/// What the program finds its own helpers by; the agent's `PATH` may be anything.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How much of the end of the log goes into a message.
const LOG_KEPT: u64 = 2048;

impl Host {
    /// Starts a process in its own session and cgroup, child of init (or of the nearest subreaper) rather than of the
    /// agent, signals at their defaults, standard input `/dev/null`, no descriptors inherited, in `/`, umask 0022, without
    /// core dumps. It lives on when the agent dies, whatever signal ends the agent or its session. Where no cgroup could be made or entered it starts in the agent's, and a warning tells why.
    ///
    /// # Errors
    /// It could not be started, or ended at once; the end of its log is in the message then.
    pub fn spawn_detached(&self, command: &DetachedCommand) -> Result<ProcessId> {
        self.enter("spawn", &command.program)?;
        let (mut told, tells) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(failed("pipe2", &command.program))?;
        let prepared = Prepared {
            tells: tells.as_raw_fd(),
            oom_score_adj: command.oom_score_adj.map(|score| format!("{score}\n").into_bytes()),
            cgroups: self.cgroups(&command.cgroup)?,
            open_files: command.open_files,
            keeps_capabilities: command.keeps_capabilities,
        };
        let log = open_log(&command.log)?;
        let error_log = log.try_clone().map_err(failed("dup", &command.log))?;
        let mut start = Command::new(&command.program);
        start
            .args(&command.args)
            .env_clear()
            .env("PATH", PATH)
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(error_log);
        // SAFETY: the closure makes system calls only (see `Prepared::become_detached`): it does not allocate, take locks or
        // unwind, and what it uses was made before the fork.
        unsafe {
            start.pre_exec(move || prepared.become_detached());
        }
        let problem = |status: String| HostError::Command {
            program: command.program.display().to_string(),
            args: command.args.join(std::ffi::OsStr::new(" ")).to_string_lossy().into_owned(),
            status,
            stderr: end_of(&command.log),
        };
        // Returns when the program runs, or when the one that was to become it has told why not.
        let mut between = start.spawn().map_err(|error| problem(error.to_string()))?;
        between.wait().map_err(failed("waitpid", &command.program))?;
        drop((start, tells));
        let told = told_by(&mut told).map_err(failed("read", &command.program))?;
        if told.cgroup_errno != 0 {
            let reason = io::Error::from_raw_os_error(told.cgroup_errno).to_string();
            warn_of_cgroup(&command.cgroup, &reason);
        }
        if told.oom_errno != 0 {
            let error = io::Error::from_raw_os_error(told.oom_errno);
            tracing::debug!(process.pid = told.pid, %error, "a detached process keeps the agent's OOM score");
        }
        identity_of(told.pid)?.ok_or_else(|| problem("ended at once".to_owned()))
    }

    /// Descriptors of the files to enter the process's cgroups by; none, and a warning, where there can be none.
    fn cgroups(&self, name: &str) -> Result<Vec<OwnedFd>> {
        if !cgroup::is_name(name) {
            return Err(HostError::Unexpected {
                subject: format!("cgroup name {name:?}"),
                reason: "it is not one plain name".to_owned(),
            });
        }
        Ok(cgroup::make(&*self.mounts()?, name).unwrap_or_else(|reason| {
            warn_of_cgroup(name, &reason);
            Vec::new()
        }))
    }
}

fn warn_of_cgroup(name: &str, reason: &str) {
    tracing::warn!(
        cgroup.name = name,
        reason,
        "no cgroup of its own for a detached process: it may be ended together with the agent"
    );
}

/// Lets its holder write past disk quotas (capabilities(7); ext4 asks, XFS does not). A union writes for its users and
/// must not have it, else the size of a directory branch would bind nobody.
const CAP_SYS_RESOURCE: libc::c_ulong = 24;

/// What the new process needs before it becomes the program.
struct Prepared {
    /// Where it tells its pid. The parent keeps it open until after the fork.
    tells: RawFd,
    /// As text for the kernel's file.
    oom_score_adj: Option<Vec<u8>>,
    cgroups: Vec<OwnedFd>,
    open_files: u64,
    keeps_capabilities: bool,
}

impl Prepared {
    /// Runs in the child of the agent; returns in its child. Only async-signal-safe calls.
    fn become_detached(&self) -> io::Result<()> {
        // SAFETY: no pointers but to locals and constants; each call is async-signal-safe; `_exit` ends the process between
        // without running anything of the agent's.
        unsafe {
            match libc::fork() {
                -1 => return Err(io::Error::last_os_error()),
                0 => {}
                _ => libc::_exit(0),
            }
            checked(libc::setsid())?;
            checked(libc::chdir(c"/".as_ptr()))?;
            let mut cgroup_errno = 0;
            for procs in &self.cgroups {
                // "0" is the writer itself (cgroups(7)).
                if libc::write(procs.as_raw_fd(), c"0".as_ptr().cast(), 1) < 0 {
                    cgroup_errno = errno();
                }
            }
            // While it still has the capability for it.
            let oom_errno = self.oom_score_adj.as_deref().map_or(0, |score| set_oom_score(score));
            let told = Told { pid: libc::getpid(), cgroup_errno, oom_errno }.bytes();
            if libc::write(self.tells, told.as_ptr().cast(), told.len()) < 0 {
                return Err(io::Error::last_os_error());
            }
            reset_signals();
            limit(libc::RLIMIT_NOFILE, self.open_files);
            let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
            // Fails with EINVAL on kernels that do not know the capability, and EPERM where it cannot be dropped: then the
            // process has it, as it would have without this line.
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0);
            libc::umask(0o022);
            if self.keeps_capabilities {
                checked(libc::prctl(libc::PR_SET_SECUREBITS, libc::SECBIT_NO_SETUID_FIXUP))?;
            }
            // Closed by exec rather than here: the standard library still has its own pipe to tell a failed exec by. On
            // kernels before 5.11 this fails, and what the agent opens with O_CLOEXEC, which is all of it, is closed still.
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
        }
        Ok(())
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Default dispositions and an empty mask: ignored and blocked signals would be inherited through exec.
///
/// # Safety
/// Only in a process that is about to become another program.
unsafe fn reset_signals() {
    // SAFETY: the kernel's `sigaction` has a handler, flags, sometimes a restorer, and a mask of 8 bytes, at most 32 bytes in
    // all; zero is SIG_DFL, no flags, empty mask. Numbers that cannot be changed give EINVAL. The C library's function will
    // not do: it refuses the two signals that it keeps for itself, and these can be ignored too.
    unsafe {
        let default = [0_u64; 8];
        for signal in 1..=64_i64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null_mut::<u64>(), 8);
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// Sets both limits to `wanted`, or the soft one as near as the hard one allows. Never fails: less than wanted works too.
///
/// # Safety
/// Only in a process that is about to become another program.
unsafe fn limit(resource: Resource, wanted: u64) {
    // SAFETY: getrlimit(2) and setrlimit(2) fill and read one `rlimit`, a local.
    unsafe {
        let both = libc::rlimit { rlim_cur: wanted, rlim_max: wanted };
        let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        if libc::getrlimit(resource, &raw mut now) != 0 {
            return;
        }
        // Lowering the hard limit is never asked for; raising it takes CAP_SYS_RESOURCE.
        if now.rlim_max < wanted && libc::setrlimit(resource, &raw const both) == 0 {
            return;
        }
        now.rlim_cur = wanted.min(now.rlim_max);
        libc::setrlimit(resource, &raw const now);
    }
}

/// Sets the OOM score of the calling process; returns the errno, or 0.
///
/// # Safety
/// None of its own; it is for a process between fork and exec, and makes system calls only.
unsafe fn set_oom_score(score: &[u8]) -> i32 {
    // SAFETY: a constant path, and a buffer with its length.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file < 0 {
            return errno();
        }
        let written = libc::write(file, score.as_ptr().cast(), score.len());
        let failed = if written < 0 { errno() } else { 0 };
        libc::close(file);
        failed
    }
}

/// What the new process tells before it becomes the program.
struct Told {
    pid: i32,
    cgroup_errno: i32,
    oom_errno: i32,
}

impl Told {
    fn bytes(&self) -> [u8; 12] {
        let [a, b, c, d] = self.pid.to_ne_bytes();
        let [e, f, g, h] = self.cgroup_errno.to_ne_bytes();
        let [i, j, k, l] = self.oom_errno.to_ne_bytes();
        [a, b, c, d, e, f, g, h, i, j, k, l]
    }
}

fn told_by(pipe: &mut OwnedFd) -> io::Result<Told> {
    let mut bytes = [0; 12];
    File::from(pipe.try_clone()?).read_exact(&mut bytes)?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = bytes;
    let number = i32::from_ne_bytes;
    Ok(Told {
        pid: number([a, b, c, d]),
        cgroup_errno: number([e, f, g, h]),
        oom_errno: number([i, j, k, l]),
    })
}

fn open_log(path: &Path) -> Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o640)).map(File::from).map_err(failed("open", path))
}

/// The end of the log, for a message; empty where it cannot be read.
fn end_of(log: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let file = File::open(log)?;
        let length = file.metadata()?.len();
        let mut end = vec![0; usize::try_from(length.min(LOG_KEPT)).unwrap_or(0)];
        file.read_exact_at(&mut end, length.saturating_sub(LOG_KEPT))?;
        Ok(end)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).trim().to_owned()
}
