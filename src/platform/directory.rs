//! Looking at directories.

use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, HostError, Result};

impl Host {
    /// The directory's path without symlinks (realpath(3)), and the device of its files: major, minor.
    ///
    /// # Errors
    /// ENOTDIR where it is something else, or what the calls tell.
    pub fn resolve_directory(&self, path: &Path) -> Result<(PathBuf, (u32, u32))> {
        let fail =
            |call| move |source| HostError::Syscall { call, subject: path.display().to_string(), source };
        let real = std::fs::canonicalize(path).map_err(fail("realpath"))?;
        let meta = std::fs::symlink_metadata(&real).map_err(fail("stat"))?;
        if !meta.is_dir() {
            return Err(fail("opendir")(io::Error::from_raw_os_error(libc::ENOTDIR)));
        }
        Ok((real, (libc::major(meta.dev()), libc::minor(meta.dev()))))
    }

    /// The names in the directory, unordered; `None` where it does not exist. ENOTDIR where it is something else or a
    /// symlink.
    ///
    /// # Errors
    /// What readdir(3) tells.
    pub fn directory_names(&self, path: &Path) -> Result<Option<Vec<OsString>>> {
        let fail =
            |call| move |source| HostError::Syscall { call, subject: path.display().to_string(), source };
        match std::fs::symlink_metadata(path) {
            Ok(meta) if meta.is_dir() => {}
            Ok(_) => return Err(fail("opendir")(io::Error::from_raw_os_error(libc::ENOTDIR))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail("stat")(e)),
        }
        let entries = std::fs::read_dir(path).map_err(fail("opendir"))?;
        entries
            .map(|e| e.map(|e| e.file_name()))
            .collect::<io::Result<_>>()
            .map(Some)
            .map_err(fail("readdir"))
    }

    /// The names in the directory, unordered, and what each of them is; `None` where it does not exist. No entry is looked at
    /// itself: a mount point whose filesystem hangs is told of like any other.
    ///
    /// # Errors
    /// What readdir(3) tells.
    pub fn directory_entries(&self, path: &Path) -> Result<Option<Vec<(OsString, EntryKind)>>> {
        let fail =
            |call| move |source| HostError::Syscall { call, subject: path.display().to_string(), source };
        let entries = match std::fs::read_dir(path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(fail("opendir")(e)),
        };
        let kind = |entry: &std::fs::DirEntry| match entry.file_type() {
            Ok(t) if t.is_dir() => EntryKind::Directory,
            Ok(t) if t.is_symlink() => EntryKind::Link,
            Ok(_) | Err(_) => EntryKind::Other,
        };
        entries
            .map(|e| e.map(|e| (e.file_name(), kind(&e))))
            .collect::<io::Result<_>>()
            .map(Some)
            .map_err(fail("readdir"))
    }

    /// Device and inode of what is at `path` itself, symlinks not followed, and whether it is a directory; `None` where
    /// nothing is.
    ///
    /// # Errors
    /// What lstat(2) tells.
    pub fn identity(&self, path: &Path) -> Result<Option<FileIdentity>> {
        Ok(attributes(path)?.map(|meta| FileIdentity {
            device: (libc::major(meta.dev()), libc::minor(meta.dev())),
            inode: meta.ino(),
            directory: meta.is_dir(),
        }))
    }

    /// How long ago what is at `path` was changed last, by the machine's clock; `None` where nothing is.
    ///
    /// # Errors
    /// What lstat(2) tells.
    pub fn age(&self, path: &Path) -> Result<Option<Duration>> {
        // One of the future was changed just now, before the clock was set. Linux tells it of every file.
        let age = |meta: Metadata| {
            meta.modified().ok().and_then(|changed| changed.elapsed().ok()).unwrap_or_default()
        };
        Ok(attributes(path)?.map(age))
    }
}

/// What lstat(2) tells; `None` where nothing is.
fn attributes(path: &Path) -> Result<Option<Metadata>> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HostError::Syscall { call: "lstat", subject: path.display().to_string(), source }),
    }
}

/// What an entry of a directory is (`d_type` in readdir(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory, or what is mounted there.
    Directory,
    /// A symbolic link, not followed.
    Link,
    /// Something else.
    Other,
}

/// What tells one file from all others, as long as it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// Device: major, minor.
    pub device: (u32, u32),
    /// Inode number.
    pub inode: u64,
    /// It is a directory.
    pub directory: bool,
}
