//! Size limits of directories: XFS and ext4 project quotas, btrfs qgroups.
//!
//! Both mechanisms are only used where the administrator has switched them on; this program never does, because that
//! changes how a whole filesystem works. A limit counts what the filesystem counts: for btrfs and XFS a directory's share
//! of the metadata as well.

mod project;
mod subvolume;

use std::path::Path;

use super::{Host, Result, failed};
use crate::domain::pool::Enforcement;

/// `XFS_SUPER_MAGIC`, `EXT4_SUPER_MAGIC` and `BTRFS_SUPER_MAGIC` of `linux/magic.h`.
const XFS_MAGIC: i128 = 0x5846_5342;
const EXT4_MAGIC: i128 = 0xEF53;
const BTRFS_MAGIC: i128 = 0x9123_683E;

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
        self.enter("enforcement", path)?;
        let place = path.display();
        let none = |why: String| Ok((Enforcement::None, why));
        match magic(path)? {
            BTRFS_MAGIC => {
                let state = match self.filesystem_uuid(path)? {
                    Some(uuid) => subvolume::qgroups(&uuid),
                    None => subvolume::Qgroups::Off,
                };
                match state {
                    subvolume::Qgroups::On => Ok((Enforcement::Qgroup, String::new())),
                    subvolume::Qgroups::Off => none(format!("quotas are off: `btrfs quota enable {place}`")),
                    subvolume::Qgroups::Inconsistent => none(format!(
                        "its quota figures are not consistent: `btrfs quota rescan {place}`, and wait for its end"
                    )),
                }
            }
            kind @ (XFS_MAGIC | EXT4_MAGIC) => {
                let remedy = if kind == XFS_MAGIC {
                    "unmount it and mount it with the option `prjquota`"
                } else {
                    "unmount it, `tune2fs -O project,quota -Q prjquota DEVICE`, and mount it with the option `prjquota`"
                };
                match project::state(path).map_err(failed("quotactl", path))? {
                    project::State::Enforcing => Ok((Enforcement::ProjectQuota, String::new())),
                    project::State::Accounting => none(format!("project quotas are counted only: {remedy}")),
                    project::State::Off => none(format!("project quotas are off: {remedy}")),
                    project::State::Unknown => {
                        none(format!("this kernel has no project quotas for it; with one that has: {remedy}"))
                    }
                }
            }
            _ => none("its filesystem has no limits for directories: ext4, XFS and btrfs have".to_owned()),
        }
    }

    /// Project quota: gives the directory `path` the project `id`, inherited by all that is made in it from now on
    /// (`FS_IOC_FSSETXATTR`, `FS_XFLAG_PROJINHERIT`), and limits the project to `limit` bytes (quotactl_fd(2)).
    ///
    /// # Errors
    /// What the calls tell.
    pub fn project_quota_set(&self, path: &Path, id: u32, limit: u64) -> Result<()> {
        self.enter("project_quota_set", path)?;
        // The limit first: no file is ever in a project without one.
        project::limit(path, id, limit).map_err(failed("quotactl", path))?;
        project::assign(path, id).map_err(failed("FS_IOC_FSSETXATTR", path))
    }

    /// Project quota: takes the limit of project `id` back, so that the id can be given again.
    ///
    /// # Errors
    /// What quotactl_fd(2) tells.
    pub fn project_quota_clear(&self, path: &Path, id: u32) -> Result<()> {
        self.enter("project_quota_clear", path)?;
        project::limit(path, id, 0).map_err(failed("quotactl", path))
    }

    /// Project quota: usage and limit of project `id` on the filesystem of `path`.
    ///
    /// # Errors
    /// What quotactl_fd(2) tells.
    pub fn project_quota_usage(&self, path: &Path, id: u32) -> Result<QuotaUsage> {
        project::usage(path, id).map_err(failed("quotactl", path))
    }

    /// btrfs: makes `path` a subvolume (it must not exist, its parent must) limited to `limit` bytes; where it is a
    /// subvolume already, sets the limit.
    ///
    /// # Errors
    /// What the ioctls tell (ioctl-btrfs: `BTRFS_IOC_SUBVOL_CREATE`, `BTRFS_IOC_QGROUP_LIMIT`).
    pub fn subvolume_ensure(&self, path: &Path, limit: u64) -> Result<()> {
        self.enter("subvolume_ensure", path)?;
        if !subvolume::exists(path).map_err(failed("stat", path))? {
            subvolume::create(path).map_err(failed("BTRFS_IOC_SUBVOL_CREATE", path))?;
        }
        subvolume::limit(path, limit).map_err(failed("BTRFS_IOC_QGROUP_LIMIT", path))
    }

    /// btrfs: usage and limit of the subvolume `path`, as of the last transaction (at most 30 s ago).
    ///
    /// # Errors
    /// What the ioctls tell.
    pub fn subvolume_usage(&self, path: &Path) -> Result<QuotaUsage> {
        let uuid = self.filesystem_uuid(path)?.unwrap_or_default();
        subvolume::usage(path, &uuid).map_err(failed("qgroup", path))
    }

    /// btrfs: removes the subvolume `path` with all its files; false where it does not exist or is no subvolume.
    ///
    /// # Errors
    /// What `BTRFS_IOC_SNAP_DESTROY` tells: ENOTEMPTY where it holds other subvolumes.
    pub fn subvolume_remove(&self, path: &Path) -> Result<bool> {
        self.enter("subvolume_remove", path)?;
        if !subvolume::exists(path).map_err(failed("stat", path))? {
            return Ok(false);
        }
        subvolume::remove(path).map_err(failed("BTRFS_IOC_SNAP_DESTROY", path))?;
        Ok(true)
    }
}

/// The filesystem's magic number.
fn magic(path: &Path) -> Result<i128> {
    let stat = nix::sys::statfs::statfs(path).map_err(failed("statfs", path))?;
    Ok(i128::from(stat.filesystem_type().0))
}
