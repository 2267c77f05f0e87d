//! Space of filesystems (statvfs(3), statfs(2)).

use std::path::Path;
use std::time::Duration;

use super::{Host, HostError, Result, failed};

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
    /// The space at `path`, within `bound`: asked in a thread that is abandoned when a disk or a FUSE daemon does not
    /// answer.
    ///
    /// # Errors
    /// The errno of statfs(2), or a timeout.
    pub fn space(&self, path: &Path, bound: Duration) -> Result<Space> {
        self.enter("statfs", path)?;
        let question = path.to_owned();
        match self.probes.ask(path, bound, move || statvfs(&question))? {
            Some(space) => space.map_err(failed("statfs", path)),
            None => Err(HostError::Timeout {
                action: "statfs",
                subject: path.display().to_string(),
                seconds: bound.as_secs(),
            }),
        }
    }
}

fn statvfs(path: &Path) -> std::io::Result<Space> {
    let v = nix::sys::statvfs::statvfs(path)?;
    // The types of these fields differ between architectures.
    #[allow(clippy::useless_conversion, reason = "u32 on some targets")]
    let (unit, blocks, bavail, bfree) = (
        u64::from(v.fragment_size()),
        u64::from(v.blocks()),
        u64::from(v.blocks_available()),
        u64::from(v.blocks_free()),
    );
    #[allow(clippy::useless_conversion, reason = "u32 on some targets")]
    let (inodes, inodes_free) = (u64::from(v.files()), u64::from(v.files_free()));
    Ok(Space {
        total: blocks.saturating_mul(unit),
        available: bavail.saturating_mul(unit),
        free: bfree.saturating_mul(unit),
        inodes,
        inodes_free,
        read_only: v.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY),
    })
}
