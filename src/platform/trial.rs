//! Trying what a filesystem really does, where its word is not enough.
//!
//! These calls write to the filesystem: they are for scratch ones.

#![allow(unsafe_code, reason = "the credentials of one thread; each block states why it is sound")]

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::process::ProcessId;
use super::{Host, HostError, Result, failed};

/// Aligned for direct I/O on every device: logical blocks are at most a page.
#[repr(align(4096))]
struct Page([u8; 4096]);

impl Page {
    fn filled(byte: u8) -> Box<Self> {
        Box::new(Self([byte; 4096]))
    }
}

/// What a file could do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoTrial {
    /// `O_DIRECT` writes work.
    pub direct_write: bool,
    /// `O_DIRECT` reads work.
    pub direct_read: bool,
}

impl Host {
    /// Makes the file `path`, writes and reads it in the ordinary way and by `O_DIRECT`, and removes it, within `bound`.
    /// That direct I/O is refused (EINVAL) is a result.
    ///
    /// # Errors
    /// Ordinary I/O fails or gives back something else, direct I/O fails otherwise, or a timeout.
    pub fn try_io(&self, path: &Path, bound: Duration) -> Result<IoTrial> {
        self.enter("try I/O", path)?;
        let file = path.to_owned();
        match self.probes.ask(path, bound, move || try_io(&file))? {
            Some(result) => result.map_err(failed("read and write", path)),
            None => Err(late("I/O", path, bound)),
        }
    }

    /// Appends 64 KiB `blocks` times to the file at `path`, made where missing, and reads it all again: whether everything
    /// is there and in its place. False as well where the filesystem is full.
    ///
    /// # Errors
    /// I/O fails otherwise, or a timeout.
    pub fn try_append(&self, path: &Path, blocks: u8, bound: Duration) -> Result<bool> {
        self.enter("try appending", path)?;
        let file = path.to_owned();
        match self.probes.ask(path, bound, move || try_append(&file, blocks))? {
            Some(Err(error)) if error.kind() == ErrorKind::StorageFull => Ok(false),
            Some(result) => result.map_err(failed("append and read", path)),
            None => Err(late("I/O", path, bound)),
        }
    }

    /// Tries in the directory `path` what users other than root get: a member of a group writes in a directory of that
    /// group, as `fsGroup` promises, and nobody reads a file that only root may. What it makes stays.
    ///
    /// # Errors
    /// EACCES or ENOENT where a member of the group is turned away, EEXIST where root's file could be read, or a timeout.
    pub fn try_users(&self, path: &Path, bound: Duration) -> Result<()> {
        self.enter("try users", path)?;
        let directory = path.to_owned();
        match self.probes.ask(path, bound, move || try_users(&directory))? {
            Some(result) => result.map_err(failed("let a user other than root work", path)),
            None => Err(late("I/O as another user", path, bound)),
        }
    }

    /// Whether the file at `path` (made and removed here) can be read and written while the process that serves it is
    /// stopped: only I/O passthrough does that. The process runs on afterwards. Waits at most `bound` for each step.
    ///
    /// # Errors
    /// The file cannot be made or opened, or the process not be signalled.
    pub fn try_passthrough(&self, path: &Path, server: &ProcessId, bound: Duration) -> Result<bool> {
        self.enter("try passthrough", path)?;
        let name = path.to_owned();
        let opened = self.probes.ask(path, bound, move || {
            std::fs::write(&name, &Page::filled(1).0)?;
            OpenOptions::new().read(true).write(true).open(&name)
        })?;
        let file = opened.ok_or_else(|| late("open", path, bound))?.map_err(failed("open", path))?;
        let paused = self.process_pause(server, bound);
        let answered = self.probes.ask(path, bound, move || {
            let outcome = overwrite(&file);
            // Closing asks the process again: not while it is stopped.
            (outcome, file)
        });
        self.process_signal(server, libc::SIGCONT)?;
        let passed = paused? && matches!(&answered, Ok(Some((Ok(()), _))));
        drop(answered?);
        let name = path.to_owned();
        // Right after a timeout the abandoned question still holds the path: the directory is removed with all in it.
        self.probes.ask(path, bound, move || std::fs::remove_file(name))?;
        Ok(passed)
    }
}

fn late(action: &'static str, path: &Path, bound: Duration) -> HostError {
    HostError::Timeout { action, subject: path.display().to_string(), seconds: bound.as_secs() }
}

/// A user and a group that own nothing of the host: `nobody`, and a number below it.
const NOBODY: u32 = 65_534;
const GROUP: u32 = 65_533;

/// Runs in a thread of its own, which is the other user from the middle on and ends so.
fn try_users(directory: &Path) -> io::Result<()> {
    let shared = directory.join("shared");
    let secret = directory.join("secret");
    std::fs::create_dir(&shared)?;
    std::os::unix::fs::chown(&shared, None, Some(GROUP))?;
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o2770))?;
    std::fs::write(&secret, b"root's")?;
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600))?;
    // A workload is given the directory, not the way to it, which only root may go.
    let given = File::open(directory)?;
    become_nobody(GROUP)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let own: File = rustix::fs::openat(&given, "shared/own", flags, Mode::from_raw_mode(0o600))?.into();
    own.write_all_at(b"mine", 0)?;
    let mut found = [0; 4];
    own.read_exact_at(&mut found, 0)?;
    if found != *b"mine" {
        return Err(ErrorKind::InvalidData.into());
    }
    match rustix::fs::openat(&given, "secret", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::ACCESS) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(ErrorKind::AlreadyExists.into()),
    }
}

/// Makes this thread, and no other, `nobody` in the given group where files are concerned (setfsuid(2), setfsgid(2)). The
/// kernel takes the capabilities that concern files with it (capabilities(7)).
fn become_nobody(group: libc::gid_t) -> io::Result<()> {
    // SAFETY: the pointer is to one group, as the length says. The system call is made directly because the C library's
    // function would change every thread of the process.
    let set = unsafe { libc::syscall(libc::SYS_setgroups, 1_usize, &raw const group) };
    if set < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: no pointers; both concern the calling thread only, and tell the former id.
    unsafe {
        libc::setfsgid(NOBODY);
        libc::setfsuid(NOBODY);
    }
    Ok(())
}

fn overwrite(file: &File) -> io::Result<()> {
    let mut found = Page::filled(0);
    // A write always reaches the server of a proxied file, or waits for a page of it that is not cached.
    file.write_all_at(&Page::filled(2).0, 0)?;
    file.read_exact_at(&mut found.0, 0)?;
    if found.0 == Page::filled(2).0 { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
}

fn try_io(path: &Path) -> io::Result<IoTrial> {
    let mut found = Page::filled(0);
    let mut trial = IoTrial::default();
    {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.write_all_at(&Page::filled(1).0, 0)?;
        file.sync_all()?;
        file.read_exact_at(&mut found.0, 0)?;
        if found.0 != Page::filled(1).0 {
            return Err(ErrorKind::InvalidData.into());
        }
    }
    let direct = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path);
    if let Some(file) = accepted(direct)? {
        trial.direct_read = accepted(file.read_exact_at(&mut found.0, 0))?.is_some();
        if trial.direct_read && found.0 != Page::filled(1).0 {
            return Err(ErrorKind::InvalidData.into());
        }
        trial.direct_write = accepted(file.write_all_at(&Page::filled(2).0, 0))?.is_some();
    }
    if trial.direct_write {
        let file = File::open(path)?;
        file.read_exact_at(&mut found.0, 0)?;
        if found.0 != Page::filled(2).0 {
            return Err(ErrorKind::InvalidData.into());
        }
    }
    std::fs::remove_file(path)?;
    Ok(trial)
}

fn try_append(path: &Path, blocks: u8) -> io::Result<bool> {
    let mut wanted = Vec::new();
    {
        let mut file = OpenOptions::new().append(true).create(true).open(path)?;
        for block in 1..=blocks {
            let content = [block; 64 * 1024];
            file.write_all(&content)?;
            wanted.extend_from_slice(&content);
        }
    }
    Ok(std::fs::read(path)? == wanted)
}

/// Direct I/O that the filesystem does not do is no failure.
fn accepted<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(None),
        Err(error) => Err(error),
    }
}
