//! The machine's mounted disks, by sysinfo.

use std::path::PathBuf;

use sysinfo::{DiskRefreshKind, Disks};

use super::{Host, HostError, Result};

/// A filesystem on a local disk, as mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountedDisk {
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Size of the filesystem.
    pub total: u64,
    /// Free for everyone.
    pub available: u64,
    /// It can be taken out, such as a USB stick.
    pub removable: bool,
}

impl Host {
    /// Filesystems on local disks; network and virtual filesystems are left out as far as sysinfo knows them.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn mounted_disks(&self) -> Result<Vec<MountedDisk>> {
        self.enter("mounted_disks", "/proc/mounts")?;
        let refresh = DiskRefreshKind::nothing().with_storage();
        let disks = Disks::new_with_refreshed_list_specifics(refresh).map_err(|e| HostError::Unexpected {
            subject: "the list of disks".to_owned(),
            reason: e.to_string(),
        })?;
        let disk = |d: &sysinfo::Disk| MountedDisk {
            mount_point: d.mount_point().to_owned(),
            total: d.total_space(),
            available: d.available_space(),
            removable: d.is_removable(),
        };
        Ok(disks.iter().map(disk).collect())
    }
}
