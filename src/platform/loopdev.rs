//! Loop devices (loop(4)).

use std::path::{Path, PathBuf};

use super::{Host, Result};

/// How a file is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopOptions {
    /// `LO_FLAGS_READ_ONLY`.
    pub read_only: bool,
    /// `LO_FLAGS_DIRECT_IO`: the page cache holds the data once and fsync means what it says.
    pub direct_io: bool,
}

/// An attached loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    /// Major and minor number.
    pub device: (u32, u32),
    /// Whether it really does direct I/O (sysfs `loop/dio`).
    pub direct_io: bool,
}

impl Host {
    /// Attaches `file` to a free loop device (`LOOP_CTL_GET_FREE`, `LOOP_CONFIGURE`; EBUSY races are retried), or answers
    /// with the device that already has it with the same read-only flag. Block size 512 where direct I/O allows, else the
    /// backing filesystem's. `/dev/loopN` is made with mknod where devtmpfs does not.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn loop_attach(&self, file: &Path, options: LoopOptions) -> Result<LoopDevice> {
        let _ = (file, options);
        unimplemented!()
    }

    /// Devices that `file` is attached to, found by inode and device (`LOOP_GET_STATUS64`), not by name.
    ///
    /// # Errors
    /// sysfs or the devices cannot be read.
    pub fn loop_devices_of(&self, file: &Path) -> Result<Vec<LoopDevice>> {
        let _ = file;
        unimplemented!()
    }

    /// Detaches (`LOOP_CLR_FD`); a device that is still mounted goes when it is unmounted. False when it was not attached.
    ///
    /// # Errors
    /// The errno of the ioctl.
    pub fn loop_detach(&self, device: &Path) -> Result<bool> {
        let _ = device;
        unimplemented!()
    }

    /// Makes the device see its file's new size (`LOOP_SET_CAPACITY`).
    ///
    /// # Errors
    /// The errno of the ioctl.
    pub fn loop_resize(&self, device: &Path) -> Result<()> {
        let _ = device;
        unimplemented!()
    }
}
