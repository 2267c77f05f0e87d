//! Loop devices (loop(4)).
//!
//! A device that will be mounted is attached with `LO_FLAGS_AUTOCLEAR`: it goes by itself when its last user goes. The
//! one who attaches holds it open until the mount holds it ([`LoopAttachment::hold`]), so a crash at any point between,
//! or a lazy unmount later, leaves no device behind. Only raw block volumes, which nothing mounts, live without the flag
//! and are detached by hand.
//!
//! **A file is attached once.** Two devices on one file are two filesystems that do not know of each other, and destroy
//! it. Nothing in the kernel forbids it, so the file is locked (flock(2)) before it is attached: the device keeps the open
//! file description, and with it the lock, for as long as it is attached. That holds for agents that died, for other
//! agents, and for a device that lives on because something in another mount namespace still has it mounted.
//!
//! Constants and structures are those of `linux/loop.h` (kernel user-space API, stable).

#![allow(unsafe_code, reason = "ioctl(2)")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, Result, failed};

/// How a file is attached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoopOptions {
    /// `LO_FLAGS_READ_ONLY`.
    pub read_only: bool,
    /// `LO_FLAGS_DIRECT_IO`: the page cache holds the data once and fsync means what it says.
    pub direct_io: bool,
    /// `LO_FLAGS_AUTOCLEAR`: the device detaches itself when nothing uses it any more.
    pub autoclear: bool,
    /// Kept with the device (`lo_file_name`, cut to 63 bytes) and needed to find it again by
    /// [`Host::loop_devices_tagged`]; empty for none.
    pub tag: String,
}

/// An attached loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopDevice {
    /// `/dev/loopN`.
    pub path: PathBuf,
    /// Major and minor number.
    pub device: (u32, u32),
    /// Whether it really does direct I/O (`LOOP_GET_STATUS64`).
    pub direct_io: bool,
    /// Whether it is read-only.
    pub read_only: bool,
}

/// A loop device that is held open.
#[derive(Debug)]
pub struct LoopAttachment {
    /// The device.
    pub device: LoopDevice,
    /// Keeps a device with `autoclear` attached until something else uses it.
    pub hold: OwnedFd,
}

const LOOP_CLR_FD: libc::c_ulong = 0x4C01;
const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_SET_CAPACITY: libc::c_ulong = 0x4C07;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// Major number of loop devices (`linux/major.h`).
const LOOP_MAJOR: u32 = 7;

/// Tries to get a free device: others may take it between `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE`. With 8 tasks making
/// branches at once, and other programs, a handful of collisions in a row is possible, 64 is not.
const ATTEMPTS: u32 = 64;

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo64 {
    lo_device: u64,
    lo_inode: u64,
    lo_rdevice: u64,
    lo_offset: u64,
    lo_sizelimit: u64,
    lo_number: u32,
    lo_encrypt_type: u32,
    lo_encrypt_key_size: u32,
    lo_flags: u32,
    lo_file_name: [u8; 64],
    lo_crypt_name: [u8; 64],
    lo_encrypt_key: [u8; 32],
    lo_init: [u64; 2],
}

impl LoopInfo64 {
    const fn zeroed() -> Self {
        Self {
            lo_device: 0,
            lo_inode: 0,
            lo_rdevice: 0,
            lo_offset: 0,
            lo_sizelimit: 0,
            lo_number: 0,
            lo_encrypt_type: 0,
            lo_encrypt_key_size: 0,
            lo_flags: 0,
            lo_file_name: [0; 64],
            lo_crypt_name: [0; 64],
            lo_encrypt_key: [0; 32],
            lo_init: [0; 2],
        }
    }
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo64,
    reserved: [u64; 8],
}

impl Host {
    /// Attaches `file` to a free loop device (`LOOP_CTL_GET_FREE`, `LOOP_CONFIGURE`; EBUSY races are retried), or answers
    /// with the device that already has it with the same read-only flag. Block size 512 where direct I/O allows, else
    /// 4096; where the backing filesystem knows no direct I/O the device works without it and says so. `/dev/loopN` is
    /// made with mknod where devtmpfs does not.
    ///
    /// # Errors
    /// The errno of the call that failed; EBUSY where the file is attached with the other read-only flag or another tag,
    /// EWOULDBLOCK where another program has locked it, or attached it by a name that is not seen here.
    pub fn loop_attach(&self, file: &Path, options: &LoopOptions) -> Result<LoopAttachment> {
        self.enter("loop_attach", file)?;
        for device in self.loop_devices_of(file)? {
            if device.read_only != options.read_only {
                return Err(failed("LOOP_CONFIGURE", file)(io::Error::from_raw_os_error(libc::EBUSY)));
            }
            // With autoclear the device may go between the listing and the open; then it is not this file's any more.
            let hold = match open_device(&device.path, options.read_only) {
                Ok(hold) => hold,
                Err(_) => continue,
            };
            let Some(info) = status(&hold).ok().filter(|i| backs(i, file)) else { continue };
            if info.lo_file_name != name_bytes(&options.tag) {
                return Err(failed("LOOP_CONFIGURE", file)(io::Error::from_raw_os_error(libc::EBUSY)));
            }
            return Ok(LoopAttachment { device, hold: hold.into() });
        }
        let backing = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(file)
            .map_err(failed("open", file))?;
        lock(&backing, file)?;
        for block_size in [512, 4096] {
            let attachment = attach_free(&backing, file, options, block_size)?;
            // The kernel drops direct I/O silently where the block size is below what the backing needs: once more with
            // 4096, which is enough for every disk; a filesystem that has no direct I/O at all keeps that device.
            if !options.direct_io || attachment.device.direct_io || block_size == 4096 {
                return Ok(attachment);
            }
            ioctl_arg(&attachment.hold, LOOP_CLR_FD, 0).map_err(failed("LOOP_CLR_FD", file))?;
        }
        unreachable_block_size(file)
    }

    /// Devices that `file` is attached to, told by inode and device (`LOOP_GET_STATUS64`). Only devices are asked whose
    /// file has the same name in a directory of the same name, wherever that is mounted: a machine may have thousands.
    ///
    /// # Errors
    /// sysfs or the devices cannot be read.
    pub fn loop_devices_of(&self, file: &Path) -> Result<Vec<LoopDevice>> {
        let mut found = Vec::new();
        let components: Vec<_> = file.components().rev().take(2).collect();
        let suffix: PathBuf = components.iter().rev().collect();
        for (number, path) in attached_behind(&suffix)? {
            let Ok(device) = open_device(&path, true) else { continue };
            // ENXIO: detached meanwhile.
            let Ok(info) = status(&device) else { continue };
            if backs(&info, file) {
                found.push(describe(number, path, &info));
            }
        }
        Ok(found)
    }

    /// Detaches (`LOOP_CLR_FD`); a device that is still mounted goes when it is unmounted. False when it was not attached,
    /// or not with this tag any more: the number may be another program's by now.
    ///
    /// # Errors
    /// The errno of the ioctl.
    pub fn loop_detach(&self, device: &Path, tag: &str) -> Result<bool> {
        self.enter("loop_detach", device)?;
        let opened = match open_device(device, true) {
            Ok(opened) => opened,
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => return Ok(false),
            Err(e) => return Err(failed("open", device)(e)),
        };
        // While it is open here nobody else can detach it, only mark it for that: what is true now stays so.
        if !status(&opened).is_ok_and(|info| info.lo_file_name == name_bytes(tag)) {
            return Ok(false);
        }
        match ioctl_arg(&opened, LOOP_CLR_FD, 0) {
            Ok(_) => Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(false),
            Err(e) => Err(failed("LOOP_CLR_FD", device)(e)),
        }
    }

    /// Makes the device see its file's new size (`LOOP_SET_CAPACITY`).
    ///
    /// # Errors
    /// The errno of the ioctl.
    pub fn loop_resize(&self, device: &Path) -> Result<()> {
        self.enter("loop_resize", device)?;
        let opened = open_device(device, false).map_err(failed("open", device))?;
        ioctl_arg(&opened, LOOP_SET_CAPACITY, 0).map_err(failed("LOOP_SET_CAPACITY", device)).map(|_| ())
    }

    /// Whether the loop device has `file`, told by inode and device (`LOOP_GET_STATUS64`).
    ///
    /// # Errors
    /// The device cannot be opened.
    pub fn loop_device_has(&self, device: &Path, file: &Path) -> Result<bool> {
        match open_device(device, true) {
            Ok(opened) => Ok(status(&opened).is_ok_and(|info| backs(&info, file))),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => Ok(false),
            Err(e) => Err(failed("open", device)(e)),
        }
    }

    /// Devices that were attached with `tag` and whose file's path ends in the components of `suffix`, also where that
    /// file was removed.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn loop_devices_tagged(&self, suffix: &Path, tag: &str) -> Result<Vec<PathBuf>> {
        let tagged = |path: &PathBuf| {
            let info = open_device(path, true).and_then(|device| status(&device));
            info.is_ok_and(|i| i.lo_file_name == name_bytes(tag))
        };
        Ok(attached_behind(suffix)?.into_iter().map(|(_, path)| path).filter(tagged).collect())
    }

    /// The file behind a loop device as the kernel names it now (sysfs `loop/backing_file`); `None` where `device` is no
    /// attached loop device. A removed file's name ends in ` (deleted)`.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn loop_backing(&self, device: (u32, u32)) -> Result<Option<PathBuf>> {
        if device.0 != LOOP_MAJOR {
            return Ok(None);
        }
        let path = PathBuf::from(format!("/sys/dev/block/{}:{}/loop/backing_file", device.0, device.1));
        match std::fs::read_to_string(&path) {
            Ok(name) => Ok(Some(PathBuf::from(name.trim_end_matches('\n')))),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(None),
            Err(e) => Err(failed("read", &path)(e)),
        }
    }
}

/// Pauses between attempts to lock a file: one that two callers attach at once is locked by the first, a moment before the
/// second finds its device; a device that goes with its mount goes a moment after it.
const LOCK_PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(30),
    Duration::from_millis(100),
];

/// Locks the file for the device that will have it (see the module's description).
fn lock(backing: &File, file: &Path) -> Result<()> {
    let attempt = || rustix::fs::flock(backing, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    for pause in LOCK_PAUSES {
        match attempt() {
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(pause),
            result => return result.map_err(failed("flock", file)),
        }
    }
    attempt().map_err(failed("flock", file))
}

/// Takes a free device for the open file.
fn attach_free(
    backing: &File,
    file: &Path,
    options: &LoopOptions,
    block_size: u32,
) -> Result<LoopAttachment> {
    let control_path = Path::new("/dev/loop-control");
    let control = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(control_path)
        .map_err(failed("open", control_path))?;
    let mut flags = 0;
    for (wanted, flag) in [
        (options.read_only, LO_FLAGS_READ_ONLY),
        (options.direct_io, LO_FLAGS_DIRECT_IO),
        (options.autoclear, LO_FLAGS_AUTOCLEAR),
    ] {
        if wanted {
            flags |= flag;
        }
    }
    let mut last = io::Error::from_raw_os_error(libc::EBUSY);
    for attempt in 0..ATTEMPTS {
        let number =
            ioctl_arg(&control, LOOP_CTL_GET_FREE, 0).map_err(failed("LOOP_CTL_GET_FREE", control_path))?;
        let number = u32::try_from(number).map_err(|_| {
            failed("LOOP_CTL_GET_FREE", control_path)(io::Error::from_raw_os_error(libc::ERANGE))
        })?;
        let path = ensure_node(number)?;
        let device = match open_device(&path, options.read_only) {
            Ok(device) => device,
            // The number was removed again by another program.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO)) => {
                last = e;
                continue;
            }
            Err(e) => return Err(failed("open", &path)(e)),
        };
        let mut info = LoopInfo64::zeroed();
        info.lo_flags = flags;
        info.lo_file_name = name_bytes(&options.tag);
        let fd = u32::try_from(backing.as_raw_fd())
            .map_err(|_| failed("LOOP_CONFIGURE", file)(io::Error::from_raw_os_error(libc::EBADF)))?;
        let config = LoopConfig { fd, block_size, info, reserved: [0; 8] };
        // SAFETY: `config` is a valid `struct loop_config` that outlives the call; the kernel only reads it.
        let rc = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
        if rc == 0 {
            let info = status(&device).map_err(failed("LOOP_GET_STATUS64", &path))?;
            return Ok(LoopAttachment { device: describe(number, path, &info), hold: device.into() });
        }
        last = io::Error::last_os_error();
        if !matches!(last.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN | libc::EINTR)) {
            return Err(failed("LOOP_CONFIGURE", file)(last));
        }
        std::thread::sleep(Duration::from_millis(u64::from(attempt.min(10))));
    }
    Err(failed("LOOP_CONFIGURE", file)(last))
}

/// The loop ends in a return at 4096; this states it to the compiler without a panic.
fn unreachable_block_size(file: &Path) -> Result<LoopAttachment> {
    Err(failed("LOOP_CONFIGURE", file)(io::Error::from_raw_os_error(libc::EINVAL)))
}

/// `/dev/loopN`, made where devtmpfs does not make it (containers with their own `/dev`).
fn ensure_node(number: u32) -> Result<PathBuf> {
    let path = PathBuf::from(format!("/dev/loop{number}"));
    match std::fs::symlink_metadata(&path) {
        Ok(meta) if meta.file_type().is_block_device() => return Ok(path),
        Ok(_) => return Err(failed("mknod", &path)(io::Error::from_raw_os_error(libc::EEXIST))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed("stat", &path)(e)),
    }
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o660);
    let device = nix::sys::stat::makedev(u64::from(LOOP_MAJOR), u64::from(number));
    match nix::sys::stat::mknod(&path, nix::sys::stat::SFlag::S_IFBLK, mode, device) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(path),
        Err(e) => Err(failed("mknod", &path)(e)),
    }
}

/// Numbers and paths of the devices whose file's path, as sysfs tells it, ends in the components of `suffix`.
fn attached_behind(suffix: &Path) -> Result<Vec<(u32, PathBuf)>> {
    let block = Path::new("/sys/block");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(block).map_err(failed("readdir", block))? {
        let entry = entry.map_err(failed("readdir", block))?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(|n| n.strip_prefix("loop")).and_then(|n| n.parse().ok())
        else {
            continue;
        };
        // A device without a file has no such attribute.
        let Ok(file) = std::fs::read_to_string(entry.path().join("loop/backing_file")) else { continue };
        let file = file.trim_end_matches('\n').trim_end_matches(" (deleted)");
        if Path::new(file).ends_with(suffix) {
            found.push((number, ensure_node(number)?));
        }
    }
    Ok(found)
}

/// A tag as the kernel keeps it: cut to 63 bytes, ended by zeroes.
fn name_bytes(tag: &str) -> [u8; 64] {
    let mut name = [0; 64];
    for (place, byte) in name[..63].iter_mut().zip(tag.bytes()) {
        *place = byte;
    }
    name
}

fn open_device(path: &Path, read_only: bool) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(!read_only)
        .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
        .open(path)
}

fn status(device: &File) -> io::Result<LoopInfo64> {
    let mut info = LoopInfo64::zeroed();
    // SAFETY: `info` is a valid `struct loop_info64` that outlives the call; the kernel fills it.
    let rc = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64 as _, &raw mut info) };
    if rc == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

/// Whether the device's file is the one at `file`; false where that does not exist.
fn backs(info: &LoopInfo64, file: &Path) -> bool {
    std::fs::symlink_metadata(file).is_ok_and(|m| m.ino() == info.lo_inode && m.dev() == info.lo_device)
}

fn describe(number: u32, path: PathBuf, info: &LoopInfo64) -> LoopDevice {
    LoopDevice {
        path,
        device: (LOOP_MAJOR, number),
        direct_io: info.lo_flags & LO_FLAGS_DIRECT_IO != 0,
        read_only: info.lo_flags & LO_FLAGS_READ_ONLY != 0,
    }
}

fn ioctl_arg(fd: &impl AsRawFd, request: libc::c_ulong, arg: libc::c_ulong) -> io::Result<i32> {
    // SAFETY: these requests take an integer or nothing; no memory is passed.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, arg) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}
