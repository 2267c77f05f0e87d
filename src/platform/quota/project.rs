//! Project quotas, by the calls that XFS defined and the kernel offers for ext4 as well (quotactl(2), `Q_X…`).
//!
//! Structures and numbers are those of `linux/dqblk_xfs.h`, `linux/quota.h` and `linux/fs.h`.

#![allow(unsafe_code, reason = "quotactl(2), ioctl(2)")]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::QuotaUsage;
use crate::platform::block;

const Q_XGETQUOTA: u32 = 0x5803;
const Q_XSETQLIM: u32 = 0x5804;
const Q_XGETQSTATV: u32 = 0x5808;
const PRJQUOTA: u32 = 2;

/// `FS_PROJ_QUOTA`.
const PROJECT: i8 = 2;
/// `FS_DQUOT_VERSION`, `FS_QSTATV_VERSION1`.
const VERSION: i8 = 1;
/// `FS_DQ_BSOFT | FS_DQ_BHARD`.
const BLOCK_LIMITS: u16 = 1 << 2 | 1 << 3;
/// `FS_QUOTA_PDQ_ACCT`, `FS_QUOTA_PDQ_ENFD`.
const ACCOUNTING: u16 = 1 << 4;
const ENFORCING: u16 = 1 << 5;
/// Limits and counts are in units of this ("basic blocks").
const UNIT: u64 = 512;

const FS_IOC_FSGETXATTR: libc::c_ulong = 0x801C_581F;
const FS_IOC_FSSETXATTR: libc::c_ulong = 0x401C_5820;
const FS_XFLAG_PROJINHERIT: u32 = 0x200;

/// `struct fs_disk_quota`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct DiskQuota {
    version: i8,
    flags: i8,
    fieldmask: u16,
    id: u32,
    block_hard: u64,
    block_soft: u64,
    inode_hard: u64,
    inode_soft: u64,
    blocks: u64,
    inodes: u64,
    timers: [i32; 2],
    warnings: [u16; 2],
    timers_high: [i8; 4],
    realtime: [u64; 3],
    realtime_timer: i32,
    realtime_warnings: u16,
    pad: i16,
    pad_end: [u8; 8],
}

/// `struct fs_quota_statv`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct QuotaStat {
    version: i8,
    pad: u8,
    flags: u16,
    in_core: u32,
    files: [[u64; 3]; 3],
    timers: [i32; 3],
    warnings: [u16; 4],
    pad_middle: u32,
    pad_end: [u64; 7],
}

/// `struct fsxattr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    project: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

const _: () = {
    assert!(size_of::<DiskQuota>() == 112);
    assert!(size_of::<QuotaStat>() == 160);
    assert!(size_of::<FsXattr>() == 28);
};

/// How project quotas stand on a filesystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Enforcing,
    Accounting,
    Off,
    /// The kernel does not know them for this filesystem.
    Unknown,
}

pub(super) fn state(path: &Path) -> io::Result<State> {
    let mut stat = QuotaStat { version: VERSION, ..QuotaStat::default() };
    match quotactl(path, Q_XGETQSTATV, 0, &mut stat) {
        Ok(()) if stat.flags & ENFORCING != 0 => Ok(State::Enforcing),
        Ok(()) if stat.flags & ACCOUNTING != 0 => Ok(State::Accounting),
        Ok(()) => Ok(State::Off),
        Err(e) => match e.raw_os_error() {
            Some(libc::ENOSYS | libc::EINVAL | libc::EOPNOTSUPP | libc::ENODEV) => Ok(State::Unknown),
            Some(libc::ESRCH) => Ok(State::Off),
            _ => Err(e),
        },
    }
}

pub(super) fn limit(path: &Path, id: u32, bytes: u64) -> io::Result<()> {
    let blocks = bytes / UNIT;
    let mut quota = DiskQuota {
        version: VERSION,
        flags: PROJECT,
        fieldmask: BLOCK_LIMITS,
        id,
        block_hard: blocks,
        block_soft: blocks,
        ..DiskQuota::default()
    };
    quotactl(path, Q_XSETQLIM, id, &mut quota)
}

pub(super) fn usage(path: &Path, id: u32) -> io::Result<QuotaUsage> {
    let mut quota = DiskQuota::default();
    match quotactl(path, Q_XGETQUOTA, id, &mut quota) {
        Ok(()) => Ok(QuotaUsage {
            limit: quota.block_hard.saturating_mul(UNIT),
            used: quota.blocks.saturating_mul(UNIT),
        }),
        // Nothing was ever in this project.
        Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(QuotaUsage { limit: 0, used: 0 }),
        Err(e) => Err(e),
    }
}

/// Puts the directory, and whatever will be made in it, into the project.
pub(super) fn assign(path: &Path, id: u32) -> io::Result<()> {
    let directory = open(path)?;
    let mut attributes = FsXattr::default();
    // SAFETY: `attributes` is a valid `struct fsxattr` that outlives the call; the kernel fills it.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), FS_IOC_FSGETXATTR as _, &raw mut attributes) })?;
    attributes.project = id;
    attributes.xflags |= FS_XFLAG_PROJINHERIT;
    // SAFETY: as above; the kernel reads it.
    check(unsafe { libc::ioctl(directory.as_raw_fd(), FS_IOC_FSSETXATTR as _, &raw const attributes) })
}

/// quotactl_fd(2) (kernel 5.14); before it quotactl(2) with the device's node. `data` is the structure that `command`
/// reads or fills.
fn quotactl<T>(path: &Path, command: u32, id: u32, data: &mut T) -> io::Result<()> {
    let directory = open(path)?;
    let command = command << 8 | PRJQUOTA;
    // SAFETY: `data` is the structure of `command` (each caller passes the one that linux/dqblk_xfs.h names for it) and
    // outlives the call.
    let rc = unsafe {
        libc::syscall(libc::SYS_quotactl_fd, directory.as_raw_fd(), command, id, std::ptr::from_mut(data))
    };
    if rc == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    let device = directory.metadata()?.dev();
    if error.raw_os_error() != Some(libc::ENOSYS) || libc::major(device) == 0 {
        return Err(error);
    }
    let node = block::block_node(libc::major(device), libc::minor(device));
    let node = CString::new(node.as_os_str().as_bytes())?;
    let (command, id) = (command.cast_signed(), id.cast_signed());
    // SAFETY: `node` is a string that outlives the call; `data` as above.
    check(unsafe { libc::quotactl(command, node.as_ptr(), id, std::ptr::from_mut(data).cast()) })
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_CLOEXEC | libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

fn check(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
