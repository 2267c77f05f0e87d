//! Space of filesystems (statvfs(3), statfs(2)).

use std::path::Path;
use std::time::Duration;

use super::{Host, Result};

/// What a filesystem has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Size in bytes (`f_blocks * f_frsize`).
    pub total: u64,
    /// Free for everyone (`f_bavail * f_frsize`).
    pub available: u64,
    /// Free including what is reserved for root (`f_bfree * f_frsize`).
    pub free: u64,
    /// Inodes, zero where the filesystem has no fixed number.
    pub inodes: u64,
    /// Free inodes.
    pub inodes_free: u64,
    /// `ST_RDONLY`.
    pub read_only: bool,
}

impl Host {
    /// The space at `path`, within `bound`.
    ///
    /// # Errors
    /// The errno of statfs(2), or a timeout.
    pub fn space(&self, path: &Path, bound: Duration) -> Result<Space> {
        let _ = (path, bound);
        unimplemented!()
    }
}
