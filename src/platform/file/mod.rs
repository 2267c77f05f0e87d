//! Files and directories: atomic writing, reserving space, removal that cannot leave its directory.

mod beneath;
mod remove;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, IFlags, Mode, OFlags, Uid};
use rustix::io::Errno;

pub use self::beneath::fd_path;
use super::{Host, HostError, Result, failed};

/// How the names of unfinished files begin.
const TEMPORARY: &str = ".tmp-";

impl Host {
    /// Writes `content` so that a crash at any point leaves the old file or the new one, whole (temporary file beside it,
    /// fsync, rename, fsync of the directory). Mode 0600. A crash may leave the temporary file: see
    /// [`Host::remove_temporaries`].
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn write_atomic(&self, path: &Path, content: &[u8]) -> Result<()> {
        self.enter("write", path)?;
        let directory = parent(path)?;
        let temporary = directory.join(format!("{TEMPORARY}{}", uuid::Uuid::new_v4().simple()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let written = || -> std::io::Result<()> {
            let mut file: std::fs::File =
                rustix::fs::open(&temporary, flags, Mode::from_raw_mode(0o600))?.into();
            file.write_all(content)?;
            file.sync_all()?;
            rustix::fs::rename(&temporary, path)?;
            Ok(())
        };
        written().map_err(|source| {
            // Best effort: what stays is known by its name.
            let _ = rustix::fs::unlink(&temporary);
            failed("write", path)(source)
        })?;
        sync(directory)
    }

    /// Removes what interrupted [`Host::write_atomic`] calls left in the directory, and tells how many there were; none where
    /// there is no directory. Only for a directory that no one else writes to now.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn remove_temporaries(&self, directory: &Path) -> Result<u32> {
        self.enter("remove temporaries", directory)?;
        let mut removed = 0;
        let entries = match std::fs::read_dir(directory) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            entries => entries.map_err(failed("readdir", directory))?,
        };
        for entry in entries {
            let entry = entry.map_err(failed("readdir", directory))?;
            let is_ours = |rest: &[u8]| rest.len() == 32 && rest.iter().all(u8::is_ascii_hexdigit);
            if entry.file_name().as_bytes().strip_prefix(TEMPORARY.as_bytes()).is_some_and(is_ours) {
                std::fs::remove_file(entry.path()).map_err(failed("unlink", entry.path()))?;
                removed += 1;
            }
        }
        Ok(removed)
    }

    /// The file's content, or `None` where it does not exist. At most `limit` bytes; a longer file is an error. Does not
    /// follow a symlink at `path`.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn read_file(&self, path: &Path, limit: usize) -> Result<Option<Vec<u8>>> {
        self.enter("read", path)?;
        // Not blocking: a FIFO put there must not hold the agent up.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened.map_err(failed("open", path))?,
        };
        require_regular(&fd, path)?;
        let mut content = Vec::new();
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        std::fs::File::from(fd).take(most).read_to_end(&mut content).map_err(failed("read", path))?;
        if content.len() > limit {
            return Err(unexpected(path, format!("it is longer than {limit} bytes")));
        }
        Ok(Some(content))
    }

    /// Makes the directory and its missing parents; true when it was made. Fails with ENOTDIR where something else or a
    /// symlink is at `path` itself.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn ensure_directory(&self, path: &Path, mode: u32) -> Result<bool> {
        self.enter("mkdir", path)?;
        let mut missing: Vec<&Path> = Vec::new();
        let mut lowest = path;
        loop {
            match rustix::fs::mkdir(lowest, Mode::from_raw_mode(mode)) {
                Ok(()) => break,
                Err(Errno::EXIST) if missing.is_empty() => {
                    let stat = rustix::fs::lstat(path).map_err(failed("lstat", path))?;
                    let found = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
                    return if found { Ok(false) } else { Err(failed("mkdir", path)(Errno::NOTDIR)) };
                }
                // Made by someone else meanwhile.
                Err(Errno::EXIST) => break,
                Err(Errno::NOENT) => {
                    missing.push(lowest);
                    lowest = parent(lowest)?;
                }
                Err(errno) => return Err(failed("mkdir", lowest)(errno)),
            }
        }
        for directory in missing.into_iter().rev() {
            match rustix::fs::mkdir(directory, Mode::from_raw_mode(mode)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(failed("mkdir", directory)(errno)),
            }
        }
        // The umask may have taken bits away.
        rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(failed("chmod", path))?;
        Ok(true)
    }

    /// Flushes the directory's entries (fsync).
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn sync_directory(&self, path: &Path) -> Result<()> {
        self.enter("fsync", path)?;
        sync(path)
    }

    /// Makes `path` a file of exactly `size` bytes: reserved with fallocate(2), or sparse where `thin`. Existing content
    /// stays. Flushed. When it fails, a file that is shorter or not wholly reserved may stay, and a further call goes on.
    ///
    /// # Errors
    /// [`HostError::Unexpected`] where the file is longer already;
    /// ENOSPC where the filesystem has no room; EOPNOTSUPP where it cannot reserve.
    pub fn ensure_allocated(&self, path: &Path, size: u64, thin: bool) -> Result<()> {
        self.enter("fallocate", path)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(failed("open", path))?;
        require_regular(&fd, path)?;
        let length = length_of(&fd, path)?;
        if length > size {
            return Err(unexpected(path, format!("it has {length} bytes already, more than {size}")));
        }
        if thin {
            rustix::fs::ftruncate(&fd, size).map_err(failed("ftruncate", path))?;
        } else if size > 0 {
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, size))
                .map_err(failed("fallocate", path))?;
        }
        rustix::fs::fsync(&fd).map_err(failed("fsync", path))?;
        sync(parent(path)?)
    }

    /// Renames within one filesystem and flushes both directories.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.enter("rename", to)?;
        rustix::fs::rename(from, to).map_err(failed("rename", to))?;
        [parent(from)?, parent(to)?].into_iter().collect::<BTreeSet<_>>().into_iter().try_for_each(sync)
    }

    /// Removes one empty directory; false when it did not exist.
    ///
    /// # Errors
    /// ENOTEMPTY, EBUSY where it is a mount point, or what rmdir(2) tells.
    pub fn remove_directory(&self, path: &Path) -> Result<bool> {
        self.enter("rmdir", path)?;
        match rustix::fs::rmdir(path) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed("rmdir", path)(errno)),
        }
    }

    /// Removes one file (not a directory); false when it did not exist.
    ///
    /// # Errors
    /// What unlink(2) tells.
    pub fn remove_file(&self, path: &Path) -> Result<bool> {
        self.enter("unlink", path)?;
        match rustix::fs::unlink(path) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed("unlink", path)(errno)),
        }
    }

    /// Bytes that the file really occupies (`st_blocks`), and its length.
    ///
    /// # Errors
    /// What stat(2) tells.
    pub fn occupied(&self, path: &Path) -> Result<(u64, u64)> {
        self.enter("stat", path)?;
        let stat = rustix::fs::lstat(path).map_err(failed("lstat", path))?;
        let figure = |value: i64| {
            u64::try_from(value).map_err(|_| unexpected(path, format!("its inode tells a size of {value}")))
        };
        // st_blocks counts 512 bytes, whatever the filesystem's block size is (stat(3type)).
        Ok((figure(stat.st_blocks)?.saturating_mul(512), figure(stat.st_size)?))
    }

    /// Sets or clears `FS_IMMUTABLE_FL` (chattr +i); false where the filesystem has no such flag.
    ///
    /// # Errors
    /// What ioctl_iflags(2) tells.
    pub fn set_immutable(&self, path: &Path, immutable: bool) -> Result<bool> {
        self.enter("set immutable", path)?;
        set_flag(path, IFlags::IMMUTABLE, immutable)
    }

    /// Sets or clears `FS_SYNC_FL` (chattr +S): each write to the file, also one that others have sent, is on the disk with
    /// everything that is needed to find it again before it completes. False where the filesystem has no such flag.
    ///
    /// # Errors
    /// What ioctl_iflags(2) tells.
    pub fn set_synchronous(&self, path: &Path, synchronous: bool) -> Result<bool> {
        self.enter("set synchronous", path)?;
        set_flag(path, IFlags::SYNC, synchronous)
    }

    /// Whether the file has `FS_SYNC_FL` (chattr +S); false where there is no such file or no such flag.
    ///
    /// # Errors
    /// What open(2) and ioctl_iflags(2) tell.
    pub fn synchronous(&self, path: &Path) -> Result<bool> {
        let file = match std::fs::File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            opened => opened.map_err(failed("open", path))?,
        };
        match rustix::fs::ioctl_getflags(&file) {
            Ok(flags) => Ok(flags.contains(IFlags::SYNC)),
            Err(Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            Err(errno) => Err(failed("FS_IOC_GETFLAGS", path)(errno)),
        }
    }

    /// Sets group and mode of one file or directory, not below it.
    ///
    /// # Errors
    /// What chown(2), chmod(2) tell.
    pub fn set_owner_mode(
        &self,
        path: &Path,
        uid: Option<u32>,
        gid: Option<u32>,
        mode: Option<u32>,
    ) -> Result<()> {
        self.enter("chown", path)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open", path))?;
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat", path))?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
            return Err(failed("chown", path)(Errno::LOOP));
        }
        if uid.is_some() || gid.is_some() {
            let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
            rustix::fs::chownat(&fd, c"", uid, gid, AtFlags::EMPTY_PATH).map_err(failed("chown", path))?;
        }
        // After chown(2), which takes set-id bits away.
        if let Some(mode) = mode {
            rustix::fs::chmod(fd_path(&fd), Mode::from_raw_mode(mode)).map_err(failed("chmod", path))?;
        }
        Ok(())
    }

    /// Takes an exclusive lock (flock(2)) on the file, made where missing; `None` while another process holds it. Held
    /// until the descriptor is closed.
    ///
    /// # Errors
    /// What open(2), flock(2) tell.
    pub fn try_lock(&self, path: &Path) -> Result<Option<OwnedFd>> {
        self.enter("flock", path)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600)).map_err(failed("open", path))?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(fd)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(failed("flock", path)(errno)),
        }
    }
}

/// False where the filesystem does not have the flag.
fn set_flag(path: &Path, flag: IFlags, on: bool) -> Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open", path))?;
    let without = |errno: &Errno| matches!(*errno, Errno::NOTTY | Errno::OPNOTSUPP | Errno::NOSYS);
    let now = match rustix::fs::ioctl_getflags(&fd) {
        Err(errno) if without(&errno) => return Ok(false),
        flags => flags.map_err(failed("FS_IOC_GETFLAGS", path))?,
    };
    let mut wanted = now;
    wanted.set(flag, on);
    if wanted == now {
        return Ok(true);
    }
    match rustix::fs::ioctl_setflags(&fd, wanted) {
        Ok(()) => Ok(true),
        Err(errno) if without(&errno) => Ok(false),
        Err(errno) => Err(failed("FS_IOC_SETFLAGS", path)(errno)),
    }
}

fn parent(path: &Path) -> Result<&Path> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => Err(failed("open", path)(Errno::INVAL)),
    }
}

fn sync(directory: &Path) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, directory, flags, Mode::empty()).map_err(failed("open", directory))?;
    rustix::fs::fsync(&fd).map_err(failed("fsync", directory))
}

fn require_regular(fd: &impl AsFd, path: &Path) -> Result<()> {
    let stat = rustix::fs::fstat(fd).map_err(failed("fstat", path))?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(()),
        other => Err(unexpected(path, format!("it is not a regular file but {other:?}"))),
    }
}

fn length_of(fd: &impl AsFd, path: &Path) -> Result<u64> {
    let stat = rustix::fs::fstat(fd).map_err(failed("fstat", path))?;
    u64::try_from(stat.st_size).map_err(|_| unexpected(path, format!("its length is {}", stat.st_size)))
}

fn unexpected(path: &Path, reason: String) -> HostError {
    HostError::Unexpected { subject: path.display().to_string(), reason }
}

#[cfg(test)]
mod tests;
