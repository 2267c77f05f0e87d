//! Running a program to its end.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::platform::{Host, HostError, Result, failed};

/// Where the programs of filesystems are, also when the agent was started with a user's `PATH`.
const SYSTEM_PATHS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// How much of the end of standard error goes into a message.
const STDERR_KEPT: usize = 2048;
/// No program that is run here prints as much; one that does is out of order.
const STDOUT_MAX: usize = 8 << 20;

impl Host {
    /// Runs a program to its end, at most `bound`, standard input empty, in the C locale, and returns its standard output.
    /// What it leaves running in the background is not waited for.
    ///
    /// # Errors
    /// [`HostError::Command`], [`HostError::Timeout`] (it is killed then, with its process group).
    pub fn run(&self, program: &str, args: &[OsString], bound: Duration) -> Result<String> {
        self.enter("run", program)?;
        let problem = |status: String, stderr: &[u8]| HostError::Command {
            program: program.to_owned(),
            args: args.join(OsStr::new(" ")).to_string_lossy().into_owned(),
            status,
            stderr: String::from_utf8_lossy(stderr).trim().to_owned(),
        };
        let mut path = std::env::var_os("PATH").unwrap_or_default();
        if !path.is_empty() {
            path.push(":");
        }
        path.push(SYSTEM_PATHS);
        let mut command = Command::new(program);
        command
            .args(args)
            .env("PATH", path)
            .env("LC_ALL", "C")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let child = spawn(&mut command).map_err(|error| problem(error.to_string(), b""))?;
        let mut running = Running::new(child).map_err(failed("poll", program))?;
        match running.collect(Instant::now() + bound).map_err(failed("poll", program))? {
            None => Err(HostError::Timeout {
                action: "run",
                subject: problem(String::new(), b"").command_line(),
                seconds: bound.as_secs(),
            }),
            Some(_) if running.stdout.len() > STDOUT_MAX => {
                Err(problem(format!("printed more than {STDOUT_MAX} bytes"), &running.stderr))
            }
            Some(status) if status.success() => Ok(String::from_utf8_lossy(&running.stdout).into_owned()),
            Some(status) => Err(problem(status.to_string(), &running.stderr)),
        }
    }
}

/// Starts it. A program that was written a moment ago is busy (ETXTBSY) while a child that another thread was just forking
/// still has the descriptor that it was written by: 20 x 10 ms is long for that.
fn spawn(command: &mut Command) -> std::io::Result<Child> {
    for _ in 0..20 {
        match command.spawn() {
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(10));
            }
            started => return started,
        }
    }
    command.spawn()
}

impl HostError {
    /// The command that failed, as typed.
    fn command_line(&self) -> String {
        match self {
            Self::Command { program, args, .. } => format!("{program} {args}"),
            other => other.to_string(),
        }
    }
}

/// A child, its pipes, and what came out of them. Killed with its group when dropped before its end was seen.
struct Running {
    child: Child,
    pidfd: OwnedFd,
    ended: bool,
    pipes: [Option<File>; 2],
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Running {
    fn new(mut child: Child) -> std::io::Result<Self> {
        let pipes = [
            child.stdout.take().map(|p| File::from(OwnedFd::from(p))),
            child.stderr.take().map(|p| File::from(OwnedFd::from(p))),
        ];
        let opened = pid_of(&child).and_then(|pid| {
            for pipe in pipes.iter().flatten() {
                fcntl(pipe.as_fd(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
            }
            Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
        });
        match opened {
            Ok(pidfd) => {
                Ok(Self { child, pidfd, ended: false, pipes, stdout: Vec::new(), stderr: Vec::new() })
            }
            Err(error) => {
                kill(&mut child);
                Err(error)
            }
        }
    }

    /// Reads until the child ends; `None` when that is not before `deadline`.
    fn collect(&mut self, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let ended = wait_readable(&self.pidfd, &self.pipes, left)?;
            self.drain()?;
            if ended {
                let status = self.child.wait()?;
                self.ended = true;
                self.drain()?;
                return Ok(Some(status));
            }
            if left.is_zero() || self.stdout.len() > STDOUT_MAX {
                kill(&mut self.child);
                self.ended = true;
                return if left.is_zero() { Ok(None) } else { self.child.wait().map(Some) };
            }
        }
    }

    fn drain(&mut self) -> std::io::Result<()> {
        let mut buffer = [0; 8192];
        for (pipe, kept) in self.pipes.iter_mut().zip([&mut self.stdout, &mut self.stderr]) {
            while let Some(open) = pipe {
                match open.read(&mut buffer) {
                    Ok(0) => *pipe = None,
                    Ok(read) if kept.len() <= STDOUT_MAX => kept.extend_from_slice(&buffer[..read]),
                    Ok(_) => break,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        }
        let excess = self.stderr.len().saturating_sub(STDERR_KEPT);
        self.stderr.drain(..excess);
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            kill(&mut self.child);
        }
    }
}

fn pid_of(child: &Child) -> std::io::Result<Pid> {
    i32::try_from(child.id())
        .ok()
        .and_then(Pid::from_raw)
        .ok_or_else(|| std::io::Error::from_raw_os_error(libc::ESRCH))
}

/// Ends the child and its group and reaps it. Not reaped before, so the group's number cannot be someone else's.
fn kill(child: &mut Child) {
    if let Ok(pid) = pid_of(child) {
        let _ = rustix::process::kill_process_group(pid, Signal::KILL);
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// True when the process has ended.
fn wait_readable(pidfd: &OwnedFd, pipes: &[Option<File>; 2], left: Duration) -> nix::Result<bool> {
    let mut fds = vec![PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    let open: Vec<BorrowedFd<'_>> = pipes.iter().flatten().map(AsFd::as_fd).collect();
    fds.extend(open.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)));
    match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
        Ok(_) => Ok(fds[0].any().unwrap_or(false)),
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn sh(script: &str, bound: Duration) -> Result<String> {
        Host::new().run("sh", &["-c".into(), script.into()], bound)
    }

    #[test]
    fn what_a_program_prints_is_returned() {
        assert_eq!(sh("echo one; echo two", LONG).unwrap(), "one\ntwo\n");
        assert_eq!(sh("echo $LC_ALL; cat", LONG).unwrap(), "C\n", "its input is empty");
        assert_eq!(sh("head -c 300000 /dev/zero | tr '\\0' x", LONG).unwrap().len(), 300_000);
    }

    #[test]
    fn a_failure_tells_status_and_the_end_of_the_complaint() {
        let error =
            sh("head -c 9000 /dev/zero | tr '\\0' x >&2; echo the end >&2; exit 3", LONG).unwrap_err();
        let HostError::Command { status, stderr, .. } = error else { panic!("{error}") };
        assert!(status.contains('3'), "{status}");
        assert!(stderr.ends_with("xthe end") && stderr.len() <= STDERR_KEPT, "{stderr}");
    }

    #[test]
    fn a_program_that_is_missing_is_told() {
        let error = Host::new().run("no-such-program", &[], LONG).unwrap_err();
        assert!(error.to_string().contains("No such file"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_ended_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let pids = dir.path().join("pids");
        let script = format!("sleep 600 & echo $! > {0}; echo $$ >> {0}; wait", pids.display());
        let error = sh(&script, Duration::from_millis(500)).unwrap_err();
        assert!(matches!(error, HostError::Timeout { .. }), "{error}");
        for pid in std::fs::read_to_string(&pids).unwrap().lines() {
            let gone = (0..1000).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
                stat.map_or(true, |s| s.contains(") Z "))
            });
            assert!(gone, "{pid} runs on");
        }
    }

    #[test]
    fn what_a_program_leaves_in_the_background_is_not_waited_for() {
        let text = sh("sleep 600 & echo $!", LONG).unwrap();
        let pid: i32 = text.trim().parse().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    #[test]
    fn a_program_that_never_stops_printing_is_ended() {
        let error = sh("yes", LONG).unwrap_err();
        assert!(error.to_string().contains("printed more than"), "{error}");
    }
}
