//! Files and directories: atomic writing, reserving space, removal that cannot leave its directory.

use std::os::fd::OwnedFd;
use std::path::Path;

use super::{Host, Result};

impl Host {
    /// Writes `content` so that a crash at any point leaves the old file or the new one, whole (temporary file beside it,
    /// fsync, rename, fsync of the directory). Mode 0600.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn write_atomic(&self, path: &Path, content: &[u8]) -> Result<()> {
        let _ = (path, content);
        unimplemented!()
    }

    /// The file's content, or `None` where it does not exist. At most `limit` bytes; a longer file is an error. Does not
    /// follow a symlink at `path`.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn read_file(&self, path: &Path, limit: usize) -> Result<Option<Vec<u8>>> {
        let _ = (path, limit);
        unimplemented!()
    }

    /// Makes the directory and its missing parents; true when it was made. Fails with ENOTDIR where something else or a
    /// symlink is at `path` itself.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn ensure_directory(&self, path: &Path, mode: u32) -> Result<bool> {
        let _ = (path, mode);
        unimplemented!()
    }

    /// Flushes the directory's entries (fsync).
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn sync_directory(&self, path: &Path) -> Result<()> {
        let _ = path;
        unimplemented!()
    }

    /// Makes `path` a file of exactly `size` bytes: reserved with fallocate(2), or sparse where `thin`. Existing content
    /// within the size stays. Flushed.
    ///
    /// # Errors
    /// ENOSPC where the filesystem has no room; EOPNOTSUPP where it cannot reserve.
    pub fn ensure_allocated(&self, path: &Path, size: u64, thin: bool) -> Result<()> {
        let _ = (path, size, thin);
        unimplemented!()
    }

    /// Renames within one filesystem and flushes both directories.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let _ = (from, to);
        unimplemented!()
    }

    /// Removes the entry `name` of the directory `parent` and all below it. Opens every step with `O_NOFOLLOW` relative to
    /// the step above, never follows a symlink, and stops with EXDEV at a mount point. Clears immutable flags on the way.
    /// True when the entry existed.
    ///
    /// # Errors
    /// The errno of the call that failed; what was removed until then stays removed.
    pub fn remove_tree(&self, parent: &Path, name: &str) -> Result<bool> {
        let _ = (parent, name);
        unimplemented!()
    }

    /// Removes one empty directory; false when it did not exist.
    ///
    /// # Errors
    /// ENOTEMPTY, EBUSY where it is a mount point, or what rmdir(2) tells.
    pub fn remove_directory(&self, path: &Path) -> Result<bool> {
        let _ = path;
        unimplemented!()
    }

    /// Removes one file (not a directory); false when it did not exist.
    ///
    /// # Errors
    /// What unlink(2) tells.
    pub fn remove_file(&self, path: &Path) -> Result<bool> {
        let _ = path;
        unimplemented!()
    }

    /// Bytes that the file really occupies (`st_blocks`), and its length.
    ///
    /// # Errors
    /// What stat(2) tells.
    pub fn occupied(&self, path: &Path) -> Result<(u64, u64)> {
        let _ = path;
        unimplemented!()
    }

    /// Sets or clears `FS_IMMUTABLE_FL` (chattr +i); false where the filesystem has no such flag.
    ///
    /// # Errors
    /// What ioctl_iflags(2) tells.
    pub fn set_immutable(&self, path: &Path, immutable: bool) -> Result<bool> {
        let _ = (path, immutable);
        unimplemented!()
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
        let _ = (path, uid, gid, mode);
        unimplemented!()
    }

    /// Opens the directory at `path` for use as a mount target or source, refusing symlinks in every component of the
    /// part below `root` (openat2(2), `RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH`). `/proc/self/fd/N` of it names what was
    /// checked. Where `create`, missing components are made with mode 0750.
    ///
    /// # Errors
    /// ELOOP at a symlink, EXDEV where the path leaves `root`, or what openat2(2) tells.
    pub fn open_beneath(&self, root: &Path, path: &Path, create: bool) -> Result<OwnedFd> {
        let _ = (root, path, create);
        unimplemented!()
    }

    /// Takes an exclusive lock (flock(2)) on the file, made where missing; `None` while another process holds it. Held
    /// until the descriptor is closed.
    ///
    /// # Errors
    /// What open(2), flock(2) tell.
    pub fn try_lock(&self, path: &Path) -> Result<Option<OwnedFd>> {
        let _ = path;
        unimplemented!()
    }
}
