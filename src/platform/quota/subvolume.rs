//! btrfs subvolumes and their qgroups (`linux/btrfs.h`, `linux/btrfs_tree.h`; figures by sysfs, kernel 5.9).

#![allow(unsafe_code, reason = "ioctl(2)")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{BTRFS_MAGIC, QuotaUsage, magic};

/// `_IOW(0x94, 14, struct btrfs_ioctl_vol_args)`.
const SUBVOL_CREATE: libc::c_ulong = 0x5000_940E;
/// `_IOW(0x94, 15, struct btrfs_ioctl_vol_args)`.
const SNAP_DESTROY: libc::c_ulong = 0x5000_940F;
/// `_IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)`.
const INO_LOOKUP: libc::c_ulong = 0xD000_9412;
/// `_IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)`.
const QGROUP_CREATE: libc::c_ulong = 0x4010_942A;
/// `_IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)`.
const QGROUP_LIMIT: libc::c_ulong = 0x8030_942B;
/// `BTRFS_QGROUP_LIMIT_MAX_RFER`.
const LIMIT_REFERENCED: u64 = 1;
/// `BTRFS_FIRST_FREE_OBJECTID`: the inode of a subvolume's root.
const ROOT_INODE: u64 = 256;

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_ino_lookup_args`.
#[repr(C)]
struct InoLookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `struct btrfs_ioctl_qgroup_limit_args`.
#[repr(C)]
struct QgroupLimit {
    qgroup: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved: [u64; 2],
}

/// `struct btrfs_ioctl_qgroup_create_args`.
#[repr(C)]
struct QgroupCreate {
    create: u64,
    qgroup: u64,
}

const _: () = {
    assert!(size_of::<VolArgs>() == 4096);
    assert!(size_of::<InoLookup>() == 4096);
    assert!(size_of::<QgroupLimit>() == 48);
    assert!(size_of::<QgroupCreate>() == 16);
};

/// How quotas stand on a btrfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Qgroups {
    On,
    Off,
    Inconsistent,
}

pub(super) fn qgroups(uuid: &str) -> Qgroups {
    let directory = sysfs(uuid);
    let says = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
    if !directory.is_dir() || says("enabled").trim() == "0" {
        Qgroups::Off
    } else if says("inconsistent").trim() == "1" {
        Qgroups::Inconsistent
    } else {
        Qgroups::On
    }
}

/// Whether `path` is a subvolume.
pub(super) fn exists(path: &Path) -> io::Result<bool> {
    match std::fs::symlink_metadata(path) {
        Ok(meta) => {
            Ok(meta.is_dir() && meta.ino() == ROOT_INODE && magic(path).is_ok_and(|m| m == BTRFS_MAGIC))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

pub(super) fn create(path: &Path) -> io::Result<()> {
    in_parent(path, SUBVOL_CREATE)
}

pub(super) fn remove(path: &Path) -> io::Result<()> {
    let id = id(path)?;
    let parent = open(path.parent().unwrap_or(path))?;
    in_parent(path, SNAP_DESTROY)?;
    // Kernels before 6.11 keep the qgroup of a subvolume that is gone; while the subvolume is still being cleaned they
    // answer EBUSY. What stays is empty and limits nothing.
    let args = QgroupCreate { create: 0, qgroup: id };
    // SAFETY: `args` is a valid `struct btrfs_ioctl_qgroup_create_args` that outlives the call; the kernel only reads it.
    let _ = unsafe { libc::ioctl(parent.as_raw_fd(), QGROUP_CREATE as _, &raw const args) };
    Ok(())
}

pub(super) fn limit(path: &Path, bytes: u64) -> io::Result<()> {
    let directory = open(path)?;
    let args = QgroupLimit {
        // Zero: the qgroup of the subvolume that the descriptor is in.
        qgroup: 0,
        flags: LIMIT_REFERENCED,
        max_referenced: bytes,
        max_exclusive: 0,
        reserved: [0; 2],
    };
    // SAFETY: `args` is a valid `struct btrfs_ioctl_qgroup_limit_args` that outlives the call; the kernel only reads it.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), QGROUP_LIMIT as _, &raw const args) })
}

pub(super) fn usage(path: &Path, uuid: &str) -> io::Result<QuotaUsage> {
    let directory = sysfs(uuid).join(format!("0_{}", id(path)?));
    let figure = |name: &str| -> io::Result<u64> {
        let text = std::fs::read_to_string(directory.join(name))?;
        text.trim().parse().map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
    };
    let limited = figure("limit_flags")? & LIMIT_REFERENCED != 0;
    Ok(QuotaUsage { limit: if limited { figure("max_referenced")? } else { 0 }, used: figure("referenced")? })
}

fn sysfs(uuid: &str) -> PathBuf {
    Path::new("/sys/fs/btrfs").join(uuid).join("qgroups")
}

/// The subvolume's id, which is that of its qgroup as well (level 0).
fn id(path: &Path) -> io::Result<u64> {
    let directory = open(path)?;
    let mut args = InoLookup { tree: 0, object: ROOT_INODE, name: [0; 4080] };
    // SAFETY: `args` is a valid `struct btrfs_ioctl_ino_lookup_args` that outlives the call; the kernel fills it.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), INO_LOOKUP as _, &raw mut args) })?;
    Ok(args.tree)
}

/// A request that names an entry of a directory.
fn in_parent(path: &Path, request: libc::c_ulong) -> io::Result<()> {
    let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(invalid()) };
    let directory = open(parent)?;
    let mut args = VolArgs { fd: 0, name: [0; 4088] };
    let name = name.as_bytes();
    // The last byte stays zero.
    let room = args.name.len() - 1;
    args.name[..room].get_mut(..name.len()).ok_or_else(invalid)?.copy_from_slice(name);
    // SAFETY: `args` is a valid `struct btrfs_ioctl_vol_args` that outlives the call; the kernel only reads it.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), request as _, &raw const args) })
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_CLOEXEC | libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
