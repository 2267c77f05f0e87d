//! Paths whose components others may change: opened so that they cannot lead elsewhere.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::platform::{Host, Result, failed};

/// Mode of directories that are made on the way.
const DIRECTORY_MODE: Mode = Mode::from_raw_mode(0o750);
/// Mode of a file that is made as a mount target.
const FILE_MODE: Mode = Mode::from_raw_mode(0o640);

/// A path that names what the descriptor has open, whatever becomes of the name it was opened by. Good for this process
/// alone, as long as the descriptor is open.
#[must_use]
pub fn fd_path(fd: &impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

impl Host {
    /// Opens the directory at `path` for use as a mount target or source, refusing symlinks in every component of the
    /// part below `root` (openat2(2), `RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH`). [`fd_path`] of it names what was checked.
    /// Where `create`, missing components are made with mode 0750. `path` begins with `root` or is relative to it.
    ///
    /// # Errors
    /// ELOOP at a symlink, EXDEV where the path leaves `root`, ENOTDIR at anything else, or what openat2(2) tells.
    pub fn open_beneath(&self, root: &Path, path: &Path, create: bool) -> Result<OwnedFd> {
        self.enter("open beneath", path)?;
        directory(root, path, create).map_err(failed("openat2", path))
    }

    /// Opens the file at `path` for use as a mount target, with the same care as [`Host::open_beneath`]. Where nothing is
    /// there, an empty file is made (mode 0640). What is there is not opened for reading or writing: a device that is
    /// bound there already is not touched.
    ///
    /// # Errors
    /// As [`Host::open_beneath`]; EISDIR where a directory is.
    pub fn ensure_file_beneath(&self, root: &Path, path: &Path) -> Result<OwnedFd> {
        self.enter("create beneath", path)?;
        file(root, path).map_err(failed("openat2", path))
    }
}

fn directory(root: &Path, path: &Path, create: bool) -> Result<OwnedFd, Errno> {
    let names = names(root, path)?;
    let mut current = open_root(root)?;
    for name in names {
        current = match step(&current, name) {
            Err(Errno::NOENT) if create => {
                match rustix::fs::mkdirat(&current, name, DIRECTORY_MODE) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
                step(&current, name)?
            }
            opened => opened?,
        };
    }
    Ok(current)
}

fn file(root: &Path, path: &Path) -> Result<OwnedFd, Errno> {
    let names = names(root, path)?;
    let (name, parents) = names.split_last().ok_or(Errno::ISDIR)?;
    let parent = directory(root, &parents.iter().collect::<PathBuf>(), true)?;
    let look = || {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat2(&parent, *name, flags, Mode::empty(), RESOLVE)
    };
    let found = match look() {
        Err(Errno::NOENT) => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match rustix::fs::openat(&parent, *name, flags, FILE_MODE) {
                Ok(_) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            look()?
        }
        found => found?,
    };
    match FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) {
        FileType::Directory => Err(Errno::ISDIR),
        FileType::Symlink => Err(Errno::LOOP),
        _ => Ok(found),
    }
}

const RESOLVE: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

fn open_root(root: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(CWD, root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn step(directory: &OwnedFd, name: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat2(directory, name, flags, Mode::empty(), RESOLVE)
}

/// The components of `path` below `root`.
fn names<'a>(root: &Path, path: &'a Path) -> Result<Vec<&'a Path>, Errno> {
    let relative = if path.is_absolute() { path.strip_prefix(root).map_err(|_| Errno::XDEV)? } else { path };
    relative
        .components()
        .filter(|component| *component != Component::CurDir)
        .map(|component| match component {
            Component::Normal(name) => Ok(Path::new(name)),
            _ => Err(Errno::XDEV),
        })
        .collect()
}
