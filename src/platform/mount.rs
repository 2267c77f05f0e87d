//! Mounts: the table in `/proc/self/mountinfo`, and changing it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, Result};

/// One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), unescaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount ID.
    pub id: u64,
    /// ID of the parent mount.
    pub parent: u64,
    /// Device of the files: major, minor.
    pub device: (u32, u32),
    /// Root of the mount within its filesystem.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Per-mount options.
    pub options: Vec<String>,
    /// Filesystem type.
    pub fs_type: String,
    /// Source.
    pub source: String,
    /// Per-superblock options.
    pub super_options: Vec<String>,
}

impl MountEntry {
    /// True where the mount or its filesystem is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.options.iter().chain(&self.super_options).any(|o| o == "ro")
    }
}

/// All mounts of a mount namespace, in the kernel's order (later ones cover earlier ones).
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    /// The lines.
    pub entries: Vec<MountEntry>,
}

impl MountTable {
    /// The topmost mount exactly at `path`.
    #[must_use]
    pub fn at(&self, path: &Path) -> Option<&MountEntry> {
        self.entries.iter().rev().find(|e| e.mount_point == path)
    }

    /// The mount that holds `path`.
    #[must_use]
    pub fn containing(&self, path: &Path) -> Option<&MountEntry> {
        self.entries
            .iter()
            .rev()
            .filter(|e| path.starts_with(&e.mount_point))
            .max_by_key(|e| e.mount_point.components().count())
    }

    /// All mounts at or below `path`.
    pub fn below<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = &'a MountEntry> {
        self.entries.iter().filter(move |e| e.mount_point.starts_with(path))
    }
}

/// Per-mount attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountAttr {
    /// `MS_RDONLY`.
    pub read_only: bool,
    /// `MS_NOSUID`.
    pub nosuid: bool,
    /// `MS_NODEV`.
    pub nodev: bool,
    /// `MS_NOEXEC`.
    pub noexec: bool,
    /// `MS_NOATIME`.
    pub noatime: bool,
}

/// Whether what lies at a path answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It answered.
    Alive,
    /// It failed with this errno (ENOTCONN: the FUSE daemon is gone; EIO: its filesystem shut down).
    Dead(i32),
    /// It did not answer within the bound.
    Hung,
}

impl Host {
    /// The mounts of this process's namespace.
    ///
    /// # Errors
    /// `/proc/self/mountinfo` cannot be read or understood.
    pub fn mounts(&self) -> Result<MountTable> {
        unimplemented!()
    }

    /// Mounts `source` of type `fs_type` at the existing directory `target` (mount(2)).
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn mount_filesystem(
        &self,
        source: &Path,
        target: &Path,
        fs_type: &str,
        attr: MountAttr,
        data: &str,
    ) -> Result<()> {
        let _ = (source, target, fs_type, attr, data);
        unimplemented!()
    }

    /// Binds `source` (directory or file) onto the existing `target` with `attr`, in one step: at no time is the target
    /// visible with other attributes (open_tree(2), mount_setattr(2), move_mount(2)). Propagation: private source clone;
    /// target's parent decides.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn bind(&self, source: &Path, target: &Path, attr: MountAttr) -> Result<()> {
        let _ = (source, target, attr);
        unimplemented!()
    }

    /// Merges `layers` read-only by overlayfs, first on top, at `target`.
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn mount_overlay(&self, layers: &[PathBuf], target: &Path, attr: MountAttr) -> Result<()> {
        let _ = (layers, target, attr);
        unimplemented!()
    }

    /// Unmounts the topmost mount at `target`; false when none was there. `lazy` is `MNT_DETACH`. Does not follow a
    /// symlink at `target` (`UMOUNT_NOFOLLOW`).
    ///
    /// # Errors
    /// The errno of umount2(2): EBUSY while files are open and `lazy` is false.
    pub fn unmount(&self, target: &Path, lazy: bool) -> Result<bool> {
        let _ = (target, lazy);
        unimplemented!()
    }

    /// Asks what lies at `path` for its statfs, in a thread that is abandoned when it does not come back in time.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn liveness(&self, path: &Path, bound: Duration) -> Result<Liveness> {
        let _ = (path, bound);
        unimplemented!()
    }
}
