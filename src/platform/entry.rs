//! What lies at a path: kind, mode, length (lstat(2)); what an open directory is called (proc_pid_fd(5)).

use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::file::fd_path;
use super::{Host, HostError, Result};

/// Kind of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink,
    /// A block device.
    BlockDevice,
    /// Anything else.
    Other,
}

/// A directory entry, not followed where it is a symlink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits with set-id and sticky bits.
    pub mode: u32,
    /// Length in bytes, for files.
    pub length: u64,
}

fn failed(call: &'static str, path: &Path, source: io::Error) -> HostError {
    HostError::Syscall { call, subject: path.display().to_string(), source }
}

impl Host {
    /// What lies at `path`, or `None` where nothing does (ENOENT, ENOTDIR). Must not be asked about a mount that may hang.
    ///
    /// # Errors
    /// What lstat(2) tells; ENOTCONN for a FUSE mount without a daemon.
    pub fn entry(&self, path: &Path) -> Result<Option<Entry>> {
        let meta = match fs::symlink_metadata(path) {
            Ok(meta) => meta,
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(None),
            Err(e) => return Err(failed("lstat", path, e)),
        };
        let kind = match meta.file_type() {
            t if t.is_dir() => EntryKind::Directory,
            t if t.is_file() => EntryKind::File,
            t if t.is_symlink() => EntryKind::Symlink,
            t if t.is_block_device() => EntryKind::BlockDevice,
            _ => EntryKind::Other,
        };
        Ok(Some(Entry { kind, mode: meta.permissions().mode() & 0o7777, length: meta.size() }))
    }

    /// The path of an open directory as the kernel knows it, free of symlinks, as in mountinfo.
    ///
    /// # Errors
    /// What readlink(2) on `/proc/self/fd` tells.
    pub fn path_of(&self, directory: &OwnedFd) -> Result<PathBuf> {
        let link = fd_path(directory);
        fs::read_link(&link).map_err(|e| failed("readlink", &link, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_told_without_following_a_symlink() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::new();
        fs::write(dir.path().join("file"), b"abc").unwrap();
        std::os::unix::fs::symlink("file", dir.path().join("link")).unwrap();
        let kind = |name: &str| host.entry(&dir.path().join(name)).unwrap().map(|e| (e.kind, e.length));
        assert_eq!(kind("file"), Some((EntryKind::File, 3)));
        assert_eq!(kind("link").map(|e| e.0), Some(EntryKind::Symlink));
        assert_eq!(kind("none"), None);
        assert_eq!(kind("file/below"), None);
    }

    #[test]
    fn the_path_of_a_directory_is_free_of_symlinks() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().join("real");
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        let open = OwnedFd::from(fs::File::open(dir.path().join("link")).unwrap());
        assert_eq!(Host::new().path_of(&open).unwrap(), real.canonicalize().unwrap());
    }
}
