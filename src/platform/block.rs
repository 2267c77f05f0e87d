//! What lies under a filesystem: its UUID, the kind of disk.

#![allow(unsafe_code, reason = "ioctl(2)")]

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, HostError, Result};
use crate::domain::pool::Media;

/// `FS_IOC_GETFSUUID`, `_IOR(0x15, 0, struct fsuuid2)` of `linux/fs.h` (kernel 6.9).
const FS_IOC_GETFSUUID: libc::c_ulong = 0x8011_1500;

/// `BTRFS_IOC_FS_INFO`, `_IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)` of `linux/btrfs.h`.
const BTRFS_IOC_FS_INFO: libc::c_ulong = 0x8400_941F;

/// `BTRFS_SUPER_MAGIC` of `linux/magic.h`.
pub(super) const BTRFS_MAGIC: i64 = 0x9123_683E;

/// blkid reads a few sectors; a disk that needs longer is not well.
const BLKID_BOUND: Duration = Duration::from_secs(5);

/// Depth of stacked devices (partition on md on dm on loop on …) beyond which sysfs is taken to be circular.
const MAX_DEPTH: u32 = 12;

impl Host {
    /// UUID of the filesystem at `path` (`FS_IOC_GETFSUUID`, else read from its device by `blkid -p`); `None` where it has
    /// none (tmpfs, overlay).
    ///
    /// # Errors
    /// The path does not answer.
    pub fn filesystem_uuid(&self, path: &Path) -> Result<Option<String>> {
        self.enter("filesystem_uuid", path)?;
        let fail = |call, source| HostError::Syscall { call, subject: path.display().to_string(), source };
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| fail("open", e))?;
        if let Some(uuid) = uuid_by_ioctl(&file).map_err(|e| fail("FS_IOC_GETFSUUID", e))? {
            return Ok(Some(uuid));
        }
        let stat = nix::sys::statfs::fstatfs(&file).map_err(|e| fail("fstatfs", e.into()))?;
        if i128::from(stat.filesystem_type().0) == i128::from(BTRFS_MAGIC) {
            return btrfs_uuid(&file).map(Some).map_err(|e| fail("BTRFS_IOC_FS_INFO", e));
        }
        let device = file.metadata().map_err(|e| fail("fstat", e))?.dev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        // Device numbers with major 0 belong to no block device: nothing to read a UUID from.
        if major == 0 {
            return Ok(None);
        }
        Ok(self.probe_device(&block_node(major, minor))?.map(|(uuid, _)| uuid))
    }

    /// UUID and type of what is on the device or in the file, by `blkid -p`; `None` where it finds nothing.
    pub(super) fn probe_device(&self, device: &Path) -> Result<Option<(String, String)>> {
        let args: Vec<OsString> = ["-p", "-o", "export", "-u", "filesystem"]
            .into_iter()
            .map(OsString::from)
            .chain([device.as_os_str().to_owned()])
            .collect();
        let text = match self.run("blkid", &args, BLKID_BOUND) {
            Ok(text) => text,
            // blkid(8): 2 means that nothing was found.
            Err(HostError::Command { status, .. }) if status.ends_with(": 2") || status == "2" => {
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        let value =
            |key: &str| text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix('=')).map(str::to_owned);
        Ok(value("UUID").zip(value("TYPE")))
    }

    /// Kind of disk under device major:minor, from sysfs (`queue/rotational`, name, through device-mapper, partitions, md
    /// and loop devices to the disks below; the slowest counts).
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn media(&self, device: (u32, u32)) -> Result<Media> {
        self.enter("media", format!("{}:{}", device.0, device.1))?;
        media_below(device, 0)
    }

    /// This boot's id (`/proc/sys/kernel/random/boot_id`).
    ///
    /// # Errors
    /// It cannot be read.
    pub fn boot_id(&self) -> Result<String> {
        let path = "/proc/sys/kernel/random/boot_id";
        std::fs::read_to_string(path).map(|s| s.trim().to_owned()).map_err(|source| HostError::Syscall {
            call: "read",
            subject: path.to_owned(),
            source,
        })
    }

    /// For how long this machine has run since its boot (`CLOCK_MONOTONIC`): the same for every agent of this boot, and not
    /// changed by whoever sets the clock.
    #[must_use]
    pub fn running_for(&self) -> Duration {
        // The kernel refuses only clocks that it does not have.
        nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
    }

    /// Kernel release (`uname -r`), and its first two numbers.
    ///
    /// # Errors
    /// It is not understood.
    pub fn kernel(&self) -> Result<(String, (u32, u32))> {
        let uname = nix::sys::utsname::uname().map_err(|e| HostError::Syscall {
            call: "uname",
            subject: "the kernel".to_owned(),
            source: e.into(),
        })?;
        let release = uname.release().to_string_lossy().into_owned();
        match kernel_numbers(&release) {
            Some(numbers) => Ok((release, numbers)),
            None => Err(HostError::Unexpected {
                subject: "the kernel release".to_owned(),
                reason: format!("{release:?} does not begin with two numbers"),
            }),
        }
    }

    /// Filesystem types that the kernel can mount now or by loading a module (`/proc/filesystems`, modules.alias).
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn kernel_filesystems(&self) -> Result<Vec<String>> {
        let path = "/proc/filesystems";
        let table = std::fs::read_to_string(path).map_err(|source| HostError::Syscall {
            call: "read",
            subject: path.to_owned(),
            source,
        })?;
        let mut found: Vec<String> =
            table.lines().filter_map(|l| l.split_whitespace().last()).map(str::to_owned).collect();
        // A host without modules has no such file, and one that cannot be read adds nothing.
        let (release, _) = self.kernel()?;
        for directory in ["/lib/modules", "/usr/lib/modules"] {
            if let Ok(aliases) = std::fs::read_to_string(format!("{directory}/{release}/modules.alias")) {
                found.extend(filesystem_aliases(&aliases));
            }
        }
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }
}

/// The types in lines such as `alias fs-xfs xfs`.
fn filesystem_aliases(text: &str) -> impl Iterator<Item = String> {
    text.lines().filter_map(|l| l.strip_prefix("alias fs-")?.split_whitespace().next()).map(str::to_owned)
}

fn kernel_numbers(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

/// The text form of a UUID; `None` for all zeroes, which is no UUID.
fn uuid_text(bytes: [u8; 16]) -> Option<String> {
    let uuid = uuid::Uuid::from_bytes(bytes);
    (!uuid.is_nil()).then(|| uuid.hyphenated().to_string())
}

/// `None` where the kernel or the filesystem has no such ioctl.
fn uuid_by_ioctl(file: &File) -> io::Result<Option<String>> {
    /// `struct fsuuid2`.
    #[repr(C)]
    struct FsUuid {
        len: u8,
        uuid: [u8; 16],
    }
    let mut out = FsUuid { len: 0, uuid: [0; 16] };
    // SAFETY: `out` is a valid `struct fsuuid2` that outlives the call; the kernel fills it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_GETFSUUID as _, &raw mut out) };
    if rc != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOTTY | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS) => Ok(None),
            _ => Err(error),
        };
    }
    // A shorter id (FAT has 4 bytes) is not a UUID.
    Ok(if out.len == 16 { uuid_text(out.uuid) } else { None })
}

/// The fsid of a btrfs, for kernels older than 6.9.
fn btrfs_uuid(file: &File) -> io::Result<String> {
    /// `struct btrfs_ioctl_fs_info_args`: what is before and after the fsid is not needed.
    #[repr(C, align(8))]
    struct FsInfo {
        max_id: u64,
        num_devices: u64,
        fsid: [u8; 16],
        rest: [u8; 992],
    }
    let mut out = FsInfo { max_id: 0, num_devices: 0, fsid: [0; 16], rest: [0; 992] };
    // SAFETY: `out` has the 1024 bytes of `struct btrfs_ioctl_fs_info_args` and outlives the call; the kernel fills it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), BTRFS_IOC_FS_INFO as _, &raw mut out) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    uuid_text(out.fsid).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

impl Host {
    /// The name that the kernel's messages have for a block device (`loop3`); `None` where it is none, or gone.
    #[must_use]
    pub fn block_name(&self, device: (u32, u32)) -> Option<String> {
        let link = std::fs::read_link(format!("/sys/dev/block/{}:{}", device.0, device.1)).ok()?;
        // sysfs cannot have slashes in names.
        Some(link.file_name()?.to_str()?.replace('!', "/"))
    }
}

/// The device node of major:minor: the kernel's own name, else udev's link.
pub(super) fn block_node(major: u32, minor: u32) -> PathBuf {
    let uevent =
        std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent")).unwrap_or_default();
    match uevent.lines().find_map(|l| l.strip_prefix("DEVNAME=")) {
        Some(name) => Path::new("/dev").join(name),
        None => PathBuf::from(format!("/dev/block/{major}:{minor}")),
    }
}

fn media_below(device: (u32, u32), depth: u32) -> Result<Media> {
    let link = PathBuf::from(format!("/sys/dev/block/{}:{}", device.0, device.1));
    let fail = |source| HostError::Syscall { call: "readlink", subject: link.display().to_string(), source };
    // Anonymous devices (tmpfs, btrfs over several disks) are not in sysfs: nothing can be told.
    let directory = match std::fs::canonicalize(&link) {
        Ok(directory) => directory,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Media::Unknown),
        Err(e) => return Err(fail(e)),
    };
    if depth > MAX_DEPTH {
        return Ok(Media::Unknown);
    }
    // A partition has no queue of its own; its disk is the directory above.
    let disk = if directory.join("partition").exists() {
        directory.parent().unwrap_or(&directory).to_owned()
    } else {
        directory
    };
    if let Ok(backing) = std::fs::read_to_string(disk.join("loop/backing_file")) {
        return match std::fs::metadata(backing.trim_end_matches('\n')) {
            Ok(meta) => media_below((libc::major(meta.dev()), libc::minor(meta.dev())), depth + 1),
            Err(_) => Ok(Media::Unknown),
        };
    }
    let mut below = Vec::new();
    if let Ok(slaves) = std::fs::read_dir(disk.join("slaves")) {
        for slave in slaves.flatten() {
            let numbers = std::fs::read_to_string(slave.path().join("dev")).unwrap_or_default();
            if let Some(numbers) =
                numbers.trim().split_once(':').and_then(|(a, b)| a.parse().ok().zip(b.parse().ok()))
            {
                below.push(media_below(numbers, depth + 1)?);
            }
        }
    }
    if let Some(slowest) = slowest(&below) {
        return Ok(slowest);
    }
    let rotational = std::fs::read_to_string(disk.join("queue/rotational")).unwrap_or_default();
    let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(media_of_disk(&name, rotational.trim()))
}

/// The slowest kind of those below; `None` where there are none. One that is not known makes the whole unknown, unless
/// another is known to be the slowest there is.
fn slowest(below: &[Media]) -> Option<Media> {
    let speed = |m: &Media| match m {
        Media::Hdd => 0,
        Media::Unknown => 1,
        Media::Ssd => 2,
        Media::Nvme => 3,
    };
    below.iter().copied().min_by_key(speed)
}

fn media_of_disk(name: &str, rotational: &str) -> Media {
    match rotational {
        "1" => Media::Hdd,
        "0" if name.starts_with("nvme") => Media::Nvme,
        "0" => Media::Ssd,
        _ => Media::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_release_gives_its_first_two_numbers() {
        assert_eq!(kernel_numbers("6.18.44-fc"), Some((6, 18)));
        assert_eq!(kernel_numbers("5.4"), Some((5, 4)));
        assert_eq!(kernel_numbers("6.1-rc1"), Some((6, 1)));
        assert_eq!(kernel_numbers("next"), None);
        assert_eq!(kernel_numbers("6"), None);
    }

    #[test]
    fn the_slowest_disk_below_counts() {
        assert_eq!(slowest(&[Media::Nvme, Media::Hdd]), Some(Media::Hdd));
        assert_eq!(slowest(&[Media::Nvme, Media::Ssd]), Some(Media::Ssd));
        assert_eq!(slowest(&[Media::Nvme, Media::Unknown]), Some(Media::Unknown));
        assert_eq!(slowest(&[]), None);
    }

    #[test]
    fn a_disk_is_told_by_its_queue_and_its_name() {
        assert_eq!(media_of_disk("nvme0n1", "0"), Media::Nvme);
        assert_eq!(media_of_disk("sda", "0"), Media::Ssd);
        assert_eq!(media_of_disk("sda", "1"), Media::Hdd);
        assert_eq!(media_of_disk("sda", ""), Media::Unknown);
    }

    #[test]
    fn filesystems_that_are_modules_are_found_by_their_alias() {
        let text = "alias fs-xfs xfs\nalias fs-ext4 ext4\nalias pci:v0 foo\n";
        assert_eq!(filesystem_aliases(text).collect::<Vec<_>>(), ["xfs", "ext4"]);
    }

    #[test]
    fn this_kernel_is_understood_and_knows_a_filesystem() {
        let host = Host::new();
        assert!(host.kernel().unwrap().1.0 >= 4);
        assert!(host.kernel_filesystems().unwrap().iter().any(|f| f == "tmpfs"));
        assert!(!host.boot_id().unwrap().is_empty());
    }
}
