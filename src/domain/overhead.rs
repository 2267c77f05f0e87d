//! What a filesystem inside an image takes for itself.
//!
//! The planner asks for usable bytes and must reserve more on the disk. These bounds hold for filesystems made with the
//! options of [`crate::platform::mkfs`]: a fresh one shows at least `usable(size)` bytes as available in `df`
//! (statvfs(3) `f_bavail`). They are derived from how the programs lay a filesystem out and what the kernel keeps back,
//! and compared with real ones by `integration/host/overhead.rs`. All sums are in bytes.

use super::Bytes;
use super::policy::FsType;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Block size of all three filesystems as they are made here; sizes of images are multiples of it.
pub const BLOCK: u64 = 4096;

/// Blocks in an ext4 block group: as many as one bitmap block has bits.
const EXT4_GROUP: u64 = 8 * BLOCK;

/// Bytes for one inode (`-i 16384`) and of one inode (`-I 256`): inode tables take 1/64 of the size.
const EXT4_INODE_SHARE: u64 = 16384 / 256;

/// Group descriptors (64 bytes each) in a block.
const EXT4_DESCRIPTORS: u64 = BLOCK / 64;

/// Bytes that files can use, at least, in an image of `size` bytes; `None` for `fs`: a directory or a raw device, all of
/// it. Never decreasing in `size`; zero below [`minimum`].
#[must_use]
pub fn usable(size: Bytes, fs: Option<FsType>) -> Bytes {
    if size < minimum(fs) {
        return Bytes::ZERO;
    }
    // In steps: each of the sums below has parts that jump by a block or more, and a step is larger than all of them
    // together, so that a larger image never has less.
    let whole = |step: u64| size.get() / step * step;
    Bytes::new(match fs {
        None => size.get(),
        Some(FsType::Ext4) => ext4_usable(whole(16 * BLOCK)),
        Some(FsType::Xfs) => xfs_usable(whole(MIB)),
        Some(FsType::Btrfs) => btrfs_usable(whole(BLOCK)),
    })
}

/// The smallest size, a multiple of [`BLOCK`], whose [`usable`] is at least `wanted`; `None` where it would overflow.
#[must_use]
pub fn size_for(wanted: Bytes, fs: Option<FsType>) -> Option<Bytes> {
    let enough = |size: u64| usable(Bytes::new(size), fs) >= wanted;
    let align = |size: u64| size.checked_next_multiple_of(BLOCK);
    let mut high = align(wanted.max(minimum(fs)).get())?;
    let mut low = 0;
    // From below by what is missing: the overhead is a small share, so a few steps reach a size that is enough.
    while !enough(high) {
        low = high;
        let missing = wanted.get().saturating_sub(usable(Bytes::new(high), fs).get());
        high = align(high.checked_add(missing.max(BLOCK))?)?;
    }
    if low == 0 {
        return Some(Bytes::new(high));
    }
    // Between a size that is too small and one that is enough lies the smallest.
    while high - low > BLOCK {
        let middle = low + (high - low) / BLOCK / 2 * BLOCK;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some(Bytes::new(high))
}

/// The smallest image that this filesystem can be made in and is of use.
#[must_use]
pub fn minimum(fs: Option<FsType>) -> Bytes {
    match fs {
        None => Bytes::new(BLOCK),
        // Smaller ones work, and are mostly overhead.
        Some(FsType::Ext4) => Bytes::mib(16),
        // mkfs.xfs since 5.19 refuses less.
        Some(FsType::Xfs) => Bytes::mib(300),
        // mkfs.btrfs with metadata twice refuses less than 109 MiB.
        Some(FsType::Btrfs) => Bytes::mib(128),
    }
}

/// Size of an ext4 journal in MiB, as mke2fs takes it: 1/64 of the filesystem, at least 4 (1024 blocks, the smallest that
/// mke2fs accepts), at most 256 (more helps only disks that are faster than one journal thread).
#[must_use]
pub fn ext4_journal_mib(size: u64) -> u64 {
    (size / MIB / 64).clamp(4, 256)
}

/// Number of XFS allocation groups: 4 as mkfs.xfs has it for one disk, more where they would exceed 512 GiB (a group
/// must stay below 1 TiB).
#[must_use]
pub fn xfs_groups(size: u64) -> u64 {
    size.div_ceil(512 * GIB).max(4)
}

/// Size of the XFS log in bytes: 1/2048 of the filesystem as mkfs.xfs has it, at least 64 MiB (mkfs.xfs since 5.19
/// refuses less), at most just under 2 GiB (the format's limit).
#[must_use]
pub fn xfs_log(size: u64) -> u64 {
    (size / 2048 / BLOCK * BLOCK).clamp(64 * MIB, 2038 * MIB)
}

/// Block groups in which ext4 keeps a copy of superblock and descriptors (`sparse_super`): 0, 1 and the powers of 3, 5
/// and 7; sorted, up to the largest group number of a 16 EiB filesystem that fits 32 bits.
const EXT4_COPIES: [u64; 43] = ext4_copies();

const fn ext4_copies() -> [u64; 43] {
    let mut all = [0_u64; 43];
    let mut next = [3_u64, 5, 7];
    let step = [3_u64, 5, 7];
    all[1] = 1;
    let mut n = 2;
    while n < 43 {
        // The smallest of the three next powers.
        let mut least = 0;
        if next[1] < next[least] {
            least = 1;
        }
        if next[2] < next[least] {
            least = 2;
        }
        all[n] = next[least];
        next[least] *= step[least];
        n += 1;
    }
    all
}

fn ext4_usable(size: u64) -> u64 {
    let blocks = size / BLOCK;
    let copies = |groups: u64| EXT4_COPIES.partition_point(|&c| c < groups) as u64;
    // Superblock, descriptors, and room for the descriptors of a filesystem 1024 times as large, but not more than 1024
    // blocks of it: all as mke2fs does by default.
    let copy_of = |groups: u64| {
        let descriptors = groups.div_ceil(EXT4_DESCRIPTORS);
        1 + descriptors + (groups.saturating_mul(1024).div_ceil(EXT4_DESCRIPTORS)).min(1024)
    };
    let mut groups = blocks.div_ceil(EXT4_GROUP).max(1);
    let mut used = blocks;
    let rest = blocks % EXT4_GROUP;
    // mke2fs drops a last group that would hold little more than its own tables. Its threshold is at most this one.
    let threshold = EXT4_GROUP / EXT4_INODE_SHARE + 64 + copy_of(groups);
    if groups > 1 && rest != 0 && rest < threshold {
        groups -= 1;
        used -= rest;
    }
    let inodes = used.div_ceil(EXT4_INODE_SHARE);
    // Two bitmaps, and inode tables rounded up to whole blocks.
    let per_group = 4 * groups;
    // Taken without its rounding to MiB, and with the 1/64 of a group that was dropped (fewer than 4096
    // blocks), so that no step of it shows.
    let journal = (used.div_ceil(64) + 64).clamp(4 * MIB / BLOCK, 256 * MIB / BLOCK);
    // The kernel keeps 2 % but at most 4096 clusters for what it has promised already (`s_resv_clusters`).
    let kept = (used / 50).min(4096);
    // Root, `lost+found`, `data`, block maps of the journal and of the resize inode.
    let fixed = 32;
    let overhead = inodes + per_group + copies(groups) * copy_of(groups) + journal + kept + fixed;
    used.saturating_sub(overhead).saturating_mul(BLOCK)
}

fn xfs_usable(size: u64) -> u64 {
    // The kernel keeps 5 % but at most 8192 blocks for itself (`xfs_default_resblks`).
    let kept = (size / 20).min(8192 * BLOCK);
    // Reference-count and inode trees are reserved in full: 0.70 % measured from 300 MiB to 8 TiB, 0.78 % taken.
    let trees = size / 128;
    // Headers and roots of the trees in each group; rounding of group sizes.
    let groups = xfs_groups(size) * 64 * BLOCK;
    // 128 KiB: the first inode chunks.
    size.saturating_sub(xfs_log(size) + kept + trees + groups + 128 * 1024)
}

fn btrfs_usable(size: u64) -> u64 {
    // mkfs.btrfs gives metadata two chunks of 5 %, at least 32 MiB, at most 128 MiB each; from 2.5 GiB on of 256 MiB;
    // above 50 GiB of 1 GiB. System chunks take two times 8 MiB, and 1 MiB at the front stays empty.
    let fixed = 18 * MIB;
    let (medium, large) = (2560 * MIB, 50 * GIB);
    let (medium_usable, large_usable) = (medium - 512 * MIB - fixed, large - 2048 * MIB - fixed);
    // A smaller image must not count for more than a larger one: its figure is capped by that of the next step.
    if size < medium {
        (size.saturating_sub((size.div_ceil(10)).max(64 * MIB))).saturating_sub(fixed).min(medium_usable)
    } else if size <= large {
        (size - 512 * MIB - fixed).min(large_usable)
    } else {
        size - 2048 * MIB - fixed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const ALL: [Option<FsType>; 4] = [None, Some(FsType::Ext4), Some(FsType::Xfs), Some(FsType::Btrfs)];

    fn kind() -> impl Strategy<Value = Option<FsType>> {
        prop_oneof![Just(None), Just(Some(FsType::Ext4)), Just(Some(FsType::Xfs)), Just(Some(FsType::Btrfs))]
    }

    /// Sizes up to 64 TiB, small and large ones equally often.
    fn size() -> impl Strategy<Value = u64> {
        (12_u32..46, any::<u64>()).prop_map(|(bits, n)| n & ((1 << bits) - 1))
    }

    proptest! {
        #[test]
        fn a_larger_image_never_has_less_room(fs in kind(), a in size(), step in size()) {
            let more = usable(Bytes::new(a + step), fs);
            prop_assert!(usable(Bytes::new(a), fs) <= more);
            prop_assert!(usable(Bytes::new(a), fs) <= usable(Bytes::new(a + BLOCK), fs));
        }

        #[test]
        fn what_is_reserved_is_enough_and_no_block_more(fs in kind(), wanted in size()) {
            let size = size_for(Bytes::new(wanted), fs).unwrap();
            prop_assert!(usable(size, fs).get() >= wanted);
            prop_assert_eq!(size.get() % BLOCK, 0);
            let less = Bytes::new(size.get() - BLOCK);
            prop_assert!(less < minimum(fs) || usable(less, fs).get() < wanted, "{} would do", less);
        }
    }

    #[test]
    fn no_size_decreases_where_a_group_begins() {
        for group in 1..20_000_u64 {
            let edge = group * EXT4_GROUP * BLOCK;
            let mut last = usable(Bytes::new(edge - BLOCK), Some(FsType::Ext4));
            for blocks in [0, 1, 100, 575, 576, 577, 600, 1000, 1600, 1700, 1800, 2000, 4000] {
                let now = usable(Bytes::new(edge + blocks * BLOCK), Some(FsType::Ext4));
                assert!(now >= last, "at group {group} + {blocks} blocks");
                last = now;
            }
        }
    }

    #[test]
    fn no_size_decreases_where_a_figure_jumps() {
        for fs in ALL {
            for edge in [
                64 * MIB,
                128 * MIB,
                256 * MIB,
                640 * MIB,
                2560 * MIB,
                16 * GIB,
                50 * GIB,
                2048 * GIB,
                2560 * GIB,
            ] {
                let first = edge / BLOCK - 5000;
                let all: Vec<_> =
                    (first..first + 10_000).map(|b| usable(Bytes::new(b * BLOCK), fs)).collect();
                assert!(all.is_sorted(), "{fs:?} around {edge}");
            }
        }
    }

    #[test]
    fn no_size_overflows_and_none_gives_more_than_it_has() {
        for fs in ALL {
            for size in [0, 1, BLOCK, 16 * MIB, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
                assert!(usable(Bytes::new(size), fs).get() <= size);
            }
            assert_eq!(size_for(Bytes::MAX, fs), None);
            assert_eq!(size_for(Bytes::ZERO, fs), Some(minimum(fs)));
        }
    }

    #[test]
    fn a_large_ext4_loses_little_more_than_its_inodes() {
        let size = Bytes::gib(1024);
        let share = usable(size, Some(FsType::Ext4)).get() * 1000 / size.get();
        assert!(share >= 982, "{share} per mille of a TiB are usable");
    }
}
