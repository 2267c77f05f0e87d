//! Size limits of directories: XFS and ext4 project quotas, btrfs qgroups.

use std::path::Path;

use super::{Host, Result};
use crate::domain::pool::Enforcement;

/// What a limited directory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaUsage {
    /// Limit in bytes; zero for none.
    pub limit: u64,
    /// Bytes used.
    pub used: u64,
}

impl Host {
    /// How sizes of directories on the filesystem at `path` can be enforced now, and where not, why and what would help.
    ///
    /// # Errors
    /// The filesystem does not answer.
    pub fn enforcement(&self, path: &Path) -> Result<(Enforcement, String)> {
        let _ = path;
        unimplemented!()
    }

    /// Project quota: gives the empty directory `path` the project `id`, inherited by all below (`FS_IOC_FSSETXATTR`,
    /// `FS_XFLAG_PROJINHERIT`), and limits the project to `limit` bytes (quotactl_fd(2)).
    ///
    /// # Errors
    /// What the calls tell.
    pub fn project_quota_set(&self, path: &Path, id: u32, limit: u64) -> Result<()> {
        let _ = (path, id, limit);
        unimplemented!()
    }

    /// Project quota: usage and limit of project `id` on the filesystem of `path`.
    ///
    /// # Errors
    /// What quotactl_fd(2) tells.
    pub fn project_quota_usage(&self, path: &Path, id: u32) -> Result<QuotaUsage> {
        let _ = (path, id);
        unimplemented!()
    }

    /// btrfs: makes `path` a subvolume (it must not exist, its parent must) limited to `limit` bytes; where it is a
    /// subvolume already, sets the limit.
    ///
    /// # Errors
    /// What the ioctls tell (ioctl-btrfs: `BTRFS_IOC_SUBVOL_CREATE`, `BTRFS_IOC_QGROUP_LIMIT`).
    pub fn subvolume_ensure(&self, path: &Path, limit: u64) -> Result<()> {
        let _ = (path, limit);
        unimplemented!()
    }

    /// btrfs: usage and limit of the subvolume `path`.
    ///
    /// # Errors
    /// What the ioctls tell.
    pub fn subvolume_usage(&self, path: &Path) -> Result<QuotaUsage> {
        let _ = path;
        unimplemented!()
    }

    /// btrfs: removes the subvolume `path` with all its files; false where it does not exist.
    ///
    /// # Errors
    /// What `BTRFS_IOC_SNAP_DESTROY` tells.
    pub fn subvolume_remove(&self, path: &Path) -> Result<bool> {
        let _ = path;
        unimplemented!()
    }
}
