//! Removal that cannot leave its directory.
//!
//! What is below a branch was written by users: names, symlinks and depth are theirs to choose, and they may still be
//! changing it. So the walk goes by descriptors, refuses symlinks and mount points in the kernel (openat2(2)), needs
//! neither stack nor descriptors in proportion to the depth, and checks when it climbs back that it is where it was.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, IFlags, Mode, OFlags, RawDir, ResolveFlags, SeekFrom};
use rustix::io::Errno;

use crate::platform::{Host, Result, failed};

/// Directories of the walk that are held open; those above are opened again by `..` when they are needed.
const OPEN_MAX: usize = 32;
/// Subdirectories noted in one pass over a directory, so that a wide one does not fill the memory.
const BATCH: usize = 4096;
/// Bytes of directory entries read at once, as the C library does.
const BUFFER_BYTES: usize = 32 * 1024;

impl Host {
    /// Removes the entry `name` of the directory `parent` and all below it. Opens every step with `O_NOFOLLOW` relative to
    /// the step above, never follows a symlink, and stops with EXDEV at a mount point. Clears immutable and append-only
    /// flags on the way. True when the entry existed. Not flushed: see [`Host::sync_directory`].
    ///
    /// # Errors
    /// The errno of the call that failed; what was removed until then stays removed. ENOTEMPTY when others add entries
    /// meanwhile.
    pub fn remove_tree(&self, parent: &Path, name: &str) -> Result<bool> {
        let subject = parent.join(name);
        self.enter("remove tree", &subject)?;
        remove(parent, name).map_err(failed("unlinkat", subject))
    }
}

fn remove(parent: &Path, name: &str) -> Result<bool, Errno> {
    if matches!(name, "" | "." | "..") || name.contains('/') {
        return Err(Errno::INVAL);
    }
    let name = CString::new(name).map_err(|_| Errno::INVAL)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(false),
        opened => opened?,
    };
    match unlink(top.as_fd(), &name) {
        Ok(Unlinked::Done) => return Ok(true),
        Ok(Unlinked::IsDirectory) => {}
        Err(Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(errno),
    }
    let mut walk = vec![Level::open(top.as_fd(), name)?];
    while let Some(level) = walk.last_mut() {
        let fd = level.fd.as_ref().ok_or(Errno::BADF)?;
        let Some(subdirectory) = level.subdirectories.pop() else {
            level.subdirectories = empty(fd)?;
            if level.subdirectories.is_empty() {
                ascend(&mut walk, &top)?;
            }
            continue;
        };
        match Level::open(fd.as_fd(), subdirectory) {
            Ok(below) => walk.push(below),
            // Gone or replaced meanwhile: the next pass over this directory sees what is there now.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            Err(errno) => return Err(errno),
        }
        if walk.len() > OPEN_MAX {
            let far = walk.len() - OPEN_MAX - 1;
            walk[far].fd = None;
        }
    }
    Ok(true)
}

/// A directory on the way down.
struct Level {
    name: CString,
    identity: (u64, u64),
    fd: Option<OwnedFd>,
    subdirectories: Vec<CString>,
}

impl Level {
    fn open(parent: BorrowedFd<'_>, name: CString) -> Result<Self, Errno> {
        let fd = open_directory(parent, &name)?;
        Ok(Self { name, identity: identity(&fd)?, fd: Some(fd), subdirectories: Vec::new() })
    }
}

/// Leaves the lowest directory of the walk, which is empty, and removes it.
fn ascend(walk: &mut Vec<Level>, top: &OwnedFd) -> Result<(), Errno> {
    let Some(done) = walk.pop() else { return Ok(()) };
    let Some(above) = walk.last_mut() else { return remove_directory(top.as_fd(), &done.name) };
    if above.fd.is_none() {
        let from = done.fd.as_ref().ok_or(Errno::BADF)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat2(from, c"..", flags, Mode::empty(), ResolveFlags::NO_XDEV)?;
        // Somebody moved the directory that was being emptied: what is above it now is none of ours.
        if identity(&fd)? != above.identity {
            return Err(Errno::STALE);
        }
        above.fd = Some(fd);
    }
    let above = above.fd.as_ref().ok_or(Errno::BADF)?;
    remove_directory(above.as_fd(), &done.name)
}

/// Unlinks what is no directory; the directories that it met, at most [`BATCH`].
fn empty(directory: &OwnedFd) -> Result<Vec<CString>, Errno> {
    rustix::fs::seek(directory, SeekFrom::Start(0))?;
    let mut subdirectories = Vec::new();
    let mut buffer = vec![MaybeUninit::uninit(); BUFFER_BYTES];
    let mut entries = RawDir::new(directory, &mut buffer);
    while subdirectories.len() < BATCH {
        let Some(entry) = entries.next() else { break };
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            subdirectories.push(name.to_owned());
            continue;
        }
        match unlink(directory.as_fd(), name) {
            Ok(Unlinked::Done) | Err(Errno::NOENT) => {}
            Ok(Unlinked::IsDirectory) => subdirectories.push(name.to_owned()),
            Err(errno) => return Err(errno),
        }
    }
    Ok(subdirectories)
}

enum Unlinked {
    Done,
    IsDirectory,
}

fn unlink(directory: BorrowedFd<'_>, name: &CStr) -> Result<Unlinked, Errno> {
    let attempt = || match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => Ok(Unlinked::Done),
        Err(Errno::ISDIR) => Ok(Unlinked::IsDirectory),
        // A file that something is bound on.
        Err(Errno::BUSY) => Err(Errno::XDEV),
        Err(errno) => Err(errno),
    };
    match attempt() {
        Err(Errno::PERM) => {
            clear_flags(directory);
            let kind = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
            let kind = FileType::from_raw_mode(kind.st_mode);
            // Of an immutable directory the kernel tells EPERM before it tells what it is.
            if kind == FileType::Directory {
                return Ok(Unlinked::IsDirectory);
            }
            // Opening anything else could wake a device; only files and directories have flags.
            if kind == FileType::RegularFile {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = rustix::fs::openat2(directory, name, flags, Mode::empty(), RESOLVE)?;
                clear_flags(file.as_fd());
            }
            attempt()
        }
        result => result,
    }
}

fn remove_directory(parent: BorrowedFd<'_>, name: &CStr) -> Result<(), Errno> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => Err(Errno::XDEV),
        Err(Errno::PERM) => {
            clear_flags(parent);
            clear_flags(open_directory(parent, name)?.as_fd());
            rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
        }
        result => result,
    }
}

/// Takes `chattr +i` and `+a` away where they are; whether that was enough shows when the removal is tried again.
fn clear_flags(fd: BorrowedFd<'_>) {
    let hindering = IFlags::IMMUTABLE | IFlags::APPEND;
    if let Ok(flags) = rustix::fs::ioctl_getflags(fd)
        && flags.intersects(hindering)
    {
        let _ = rustix::fs::ioctl_setflags(fd, flags - hindering);
    }
}

const RESOLVE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

fn open_directory(parent: BorrowedFd<'_>, name: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), RESOLVE)
}

fn identity(fd: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests;
