//! Other processes' mount namespaces: swapping a dead mount for a living one inside running containers.

use std::path::Path;

use super::{Host, Result};

/// What a swap did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapReport {
    /// Mount namespaces that had the dead mount.
    pub namespaces: u32,
    /// Mounts swapped.
    pub swapped: u32,
    /// Mounts that could not be.
    pub failed: u32,
}

impl Host {
    /// Replaces every mount of device `dead` (major:minor), in this namespace and in every other one on the machine, by
    /// the same subtree of the living mount at `living`, with the same per-mount options
    /// (`open_tree`, `mount_setattr`, `setns`, `move_mount` beneath where the kernel can, then detach).
    ///
    /// # Errors
    /// The living mount cannot be opened, or `/proc` not read. Single mounts that fail are counted, logged and left.
    pub fn swap_mounts(&self, dead: (u32, u32), living: &Path) -> Result<SwapReport> {
        let _ = (dead, living);
        unimplemented!()
    }
}
