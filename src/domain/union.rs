//! Which mechanism joins the branches of a volume.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::policy::UnionMode;
use super::volume::{AccessMode, VolumeMode};

/// What serves a volume's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnionKind {
    /// One branch, bound directly: no union.
    Bind,
    /// The kernel's overlayfs over read-only layers.
    Overlay,
    /// A MergerFS process.
    Mergerfs,
    /// One image branch given as a block device.
    Block,
}

/// Chooses what serves a volume of `branches` branches.
///
/// - A block volume is its one image: [`UnionKind::Block`].
/// - One branch with `union: whenNeeded` is bound: native speed for everything, nothing that can die.
/// - Where no access mode lets anybody write, and this kernel's overlayfs can join read-only layers (`overlay_available`,
///   found out by trying), [`UnionKind::Overlay`]: 20 to 30 times faster on small files than a FUSE union, and without
///   a process. Its layers must not change underneath, so one writing mode among several rules it out, and so does an
///   empty list, which says nothing. `overlayfs` needs two lower layers where it has no upper one, so that one branch
///   under `union: always` stays with MergerFS.
/// - Everything else is [`UnionKind::Mergerfs`].
#[must_use]
pub fn choose(
    access_modes: &[AccessMode],
    branches: usize,
    volume: VolumeMode,
    mode: UnionMode,
    overlay_available: bool,
) -> UnionKind {
    let only_read = !access_modes.is_empty() && access_modes.iter().all(|mode| mode.reader_only());
    match (volume, mode) {
        (VolumeMode::Block, _) => UnionKind::Block,
        (VolumeMode::Filesystem, UnionMode::WhenNeeded) if branches <= 1 => UnionKind::Bind,
        (VolumeMode::Filesystem, _) if only_read && overlay_available && branches > 1 => UnionKind::Overlay,
        (VolumeMode::Filesystem, _) => UnionKind::Mergerfs,
    }
}

#[cfg(test)]
mod tests {
    use AccessMode::{MultiNodeReaderOnly, SingleNodeReaderOnly, SingleNodeWriter};
    use UnionMode::{Always, WhenNeeded};

    use super::*;

    fn files(modes: &[AccessMode], branches: usize, mode: UnionMode, overlay: bool) -> UnionKind {
        choose(modes, branches, VolumeMode::Filesystem, mode, overlay)
    }

    #[test]
    fn one_branch_is_bound_unless_a_union_is_always_wanted() {
        for overlay in [true, false] {
            assert_eq!(files(&[SingleNodeWriter], 1, WhenNeeded, overlay), UnionKind::Bind);
            assert_eq!(files(&[SingleNodeReaderOnly], 1, WhenNeeded, overlay), UnionKind::Bind);
            assert_eq!(files(&[SingleNodeWriter], 1, Always, overlay), UnionKind::Mergerfs);
            assert_eq!(files(&[SingleNodeReaderOnly], 1, Always, overlay), UnionKind::Mergerfs);
        }
    }

    #[test]
    fn several_branches_that_nobody_writes_are_joined_by_overlayfs_where_it_works() {
        for mode in [WhenNeeded, Always] {
            let readers = [SingleNodeReaderOnly, MultiNodeReaderOnly];
            assert_eq!(files(&readers, 2, mode, true), UnionKind::Overlay);
            assert_eq!(files(&readers, 2, mode, false), UnionKind::Mergerfs);
        }
    }

    #[test]
    fn layers_that_somebody_may_write_are_never_joined_by_overlayfs() {
        assert_eq!(
            files(&[SingleNodeReaderOnly, SingleNodeWriter], 2, WhenNeeded, true),
            UnionKind::Mergerfs
        );
        assert_eq!(files(&[], 2, WhenNeeded, true), UnionKind::Mergerfs);
    }

    #[test]
    fn a_block_volume_is_its_image() {
        for mode in [WhenNeeded, Always] {
            assert_eq!(choose(&[SingleNodeReaderOnly], 1, VolumeMode::Block, mode, true), UnionKind::Block);
        }
    }
}
