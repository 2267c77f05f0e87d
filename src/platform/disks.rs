//! The machine's mounted disks, by sysinfo.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sysinfo::{DiskRefreshKind, Disks};

use super::{Host, HostError, Result};

/// Where the kernel lists what is mounted.
const TABLE: &str = "/proc/mounts";

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
    /// Filesystems on local disks; network and virtual filesystems are left out as far as sysinfo knows them. It asks all
    /// mounted filesystems for their size, FUSE ones included, so one that hangs ends the call after `bound`.
    ///
    /// # Errors
    /// They cannot be listed, or one of them does not answer.
    pub fn mounted_disks(&self, bound: Duration) -> Result<Vec<MountedDisk>> {
        self.enter("mounted_disks", TABLE)?;
        let refresh = DiskRefreshKind::nothing().with_storage();
        let asked = self
            .probes
            .ask(Path::new(TABLE), bound, move || Disks::new_with_refreshed_list_specifics(refresh))?;
        let disks = asked
            .ok_or_else(|| HostError::Timeout {
                action: "asking for their size",
                subject: "the mounted filesystems (df tells which one hangs)".to_owned(),
                seconds: bound.as_secs(),
            })?
            .map_err(|e| HostError::Unexpected {
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
