//! What lies under a filesystem: its UUID, the kind of disk.

use std::path::Path;

use super::{Host, Result};
use crate::domain::pool::Media;

impl Host {
    /// UUID of the filesystem at `path` (`FS_IOC_GETFSUUID`, else read from its device by `blkid -p`); `None` where it has
    /// none (tmpfs, overlay).
    ///
    /// # Errors
    /// The path does not answer.
    pub fn filesystem_uuid(&self, path: &Path) -> Result<Option<String>> {
        let _ = path;
        unimplemented!()
    }

    /// Kind of disk under device major:minor, from sysfs (`queue/rotational`, name, through device-mapper, partitions and
    /// md to the disks below; the slowest counts).
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn media(&self, device: (u32, u32)) -> Result<Media> {
        let _ = device;
        unimplemented!()
    }

    /// This boot's id (`/proc/sys/kernel/random/boot_id`).
    ///
    /// # Errors
    /// It cannot be read.
    pub fn boot_id(&self) -> Result<String> {
        unimplemented!()
    }

    /// Kernel release (`uname -r`), and its first two numbers.
    ///
    /// # Errors
    /// It is not understood.
    pub fn kernel(&self) -> Result<(String, (u32, u32))> {
        unimplemented!()
    }

    /// Filesystem types that the kernel can mount now or by loading a module (`/proc/filesystems`, modules.alias).
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn kernel_filesystems(&self) -> Result<Vec<String>> {
        unimplemented!()
    }
}
