//! Making and checking filesystems, by the programs of e2fsprogs, xfsprogs and btrfs-progs.
//!
//! Every option that changes how much room a filesystem takes for itself is given explicitly, so that no configuration
//! file (`/etc/mke2fs.conf`) and no new default of a program can break [`crate::domain::overhead`], which states the
//! bounds. The programs work on the image file itself, not on a loop device: there they zero by `fallocate`, so inode
//! tables and journals of any size are written in milliseconds, nothing is left for the kernel to initialise later
//! (`lazy_itable_init=0`), and the root directory is filled without a mount.
//!
//! Choices:
//! - ext4: 4 KiB blocks, one inode per 16 KiB, no blocks for root, journal of 1/64 of the size between 4 and 256 MiB,
//!   `resize_inode` so that an image can grow while mounted. Features are those that every kernel since 4.5 mounts.
//! - XFS: sectors of 4096 bytes, so that the image can be attached with 512- or 4096-byte blocks; reflink on (it costs
//!   0.6 % of the size), reverse mapping off (it would cost 2 % and serves online scrub only).
//! - btrfs: metadata twice, data once, the safe default of its authors for one disk: a flipped bit in metadata is repaired
//!   from the other copy. It costs 10 % of a 2 GiB image and less than 1 % of a large one.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, HostError, Result, failed};
use crate::domain::overhead;
use crate::domain::policy::FsType;

/// A filesystem of 16 TiB on a slow disk takes seconds; a program that needs longer than this waits for a disk that does
/// not answer.
const MKFS_BOUND: Duration = Duration::from_secs(120);

/// Where the programs are looked up besides `PATH`: services and containers often have no `sbin` in it.
const SBIN: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/local/sbin"];

impl Host {
    /// True where the program that makes this filesystem is installed.
    #[must_use]
    pub fn can_make(&self, fs: FsType) -> bool {
        find_program(program(fs)).is_some()
    }

    /// Makes a filesystem with the given UUID and label on the image `file`, for a branch, as the module describes. Its
    /// root holds one empty directory `data`, root:root 0755. `scratch` is an existing directory for what the programs
    /// want to read; what is made in it is the caller's to remove.
    ///
    /// # Errors
    /// The program is missing or fails.
    pub fn make_filesystem(
        &self,
        file: &Path,
        fs: FsType,
        uuid: &str,
        label: &str,
        scratch: &Path,
    ) -> Result<()> {
        self.enter("mkfs", file)?;
        let name = program(fs);
        let Some(path) = find_program(name) else {
            return Err(HostError::Unsupported { facility: name.to_owned(), remedy: remedy(fs).to_owned() });
        };
        let size = std::fs::metadata(file).map_err(failed("stat", file))?.size();
        let args = match fs {
            FsType::Ext4 => ext4_args(file, size, uuid, label, &root_template(scratch)?),
            FsType::Xfs => xfs_args(file, size, uuid, label, &xfs_protofile(scratch)?),
            FsType::Btrfs => btrfs_args(file, uuid, label, &root_template(scratch)?),
        };
        self.run(&path.to_string_lossy(), &args, MKFS_BOUND)?;
        // Not every version of these programs flushes what it wrote to a file.
        File::open(file).and_then(|f| f.sync_all()).map_err(failed("fsync", file))
    }

    /// UUID and type of the filesystem in `file`, read from its superblock; `None` where it is none of ext4, XFS and
    /// btrfs.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn probe_filesystem(&self, file: &Path) -> Result<Option<(String, String)>> {
        self.enter("probe_filesystem", file)?;
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(file)
            .map_err(failed("open", file))?;
        superblock(|offset, bytes| match opened.read_exact_at(bytes, offset) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) => Err(e),
        })
        .map_err(failed("read", file))
    }
}

/// Where a superblock keeps its magic number and its UUID.
struct Layout {
    name: &'static str,
    magic_at: u64,
    magic: &'static [u8],
    uuid_at: u64,
}

/// From the kernel's `Documentation/filesystems/ext4/super.rst`, `fs/xfs/libxfs/xfs_format.h`,
/// `include/uapi/linux/btrfs_tree.h`.
const LAYOUTS: [Layout; 3] = [
    Layout { name: "ext4", magic_at: 1024 + 0x38, magic: &[0x53, 0xEF], uuid_at: 1024 + 0x68 },
    Layout { name: "xfs", magic_at: 0, magic: b"XFSB", uuid_at: 32 },
    Layout { name: "btrfs", magic_at: 65536 + 64, magic: b"_BHRfS_M", uuid_at: 65536 + 32 },
];

/// UUID and type, by a function that reads at an offset and tells whether there was that much.
fn superblock(
    mut read: impl FnMut(u64, &mut [u8]) -> io::Result<bool>,
) -> io::Result<Option<(String, String)>> {
    for layout in &LAYOUTS {
        let mut magic = [0; 8];
        let magic = &mut magic[..layout.magic.len()];
        let mut uuid = [0; 16];
        if read(layout.magic_at, magic)? && magic == layout.magic && read(layout.uuid_at, &mut uuid)? {
            return Ok(Some((uuid::Uuid::from_bytes(uuid).hyphenated().to_string(), layout.name.to_owned())));
        }
    }
    Ok(None)
}

const fn program(fs: FsType) -> &'static str {
    match fs {
        FsType::Ext4 => "mkfs.ext4",
        FsType::Xfs => "mkfs.xfs",
        FsType::Btrfs => "mkfs.btrfs",
    }
}

const fn remedy(fs: FsType) -> &'static str {
    match fs {
        FsType::Ext4 => "install the package e2fsprogs",
        FsType::Xfs => "install the package xfsprogs",
        FsType::Btrfs => "install the package btrfs-progs",
    }
}

/// The program in `PATH`, or in the system directories.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SBIN.iter().map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|file| {
            std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        })
}

/// A directory as the new filesystem's root shall be. mke2fs and mkfs.btrfs copy owners and modes from it.
fn root_template(scratch: &Path) -> Result<PathBuf> {
    let root = scratch.join("root");
    for path in [root.clone(), root.join("data")] {
        match DirBuilder::new().mode(0o755).create(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(failed("mkdir", &path))?,
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .map_err(failed("chmod", &path))?;
    }
    Ok(root)
}

/// The same for mkfs.xfs, in its own notation (mkfs.xfs(8), option `-p`).
fn xfs_protofile(scratch: &Path) -> Result<PathBuf> {
    let path = scratch.join("proto");
    std::fs::write(&path, "/\n0 0\nd--755 0 0\ndata d--755 0 0\n$\n$\n").map_err(failed("write", &path))?;
    Ok(path)
}

/// The label, cut to what the filesystem can hold.
fn cut(label: &str, most: usize) -> String {
    label.chars().filter(char::is_ascii).take(most).collect()
}

fn args<'a>(list: impl IntoIterator<Item = &'a str>) -> Vec<OsString> {
    list.into_iter().map(OsString::from).collect()
}

fn ext4_args(file: &Path, size: u64, uuid: &str, label: &str, root: &Path) -> Vec<OsString> {
    let journal = format!("size={}", overhead::ext4_journal_mib(size));
    let label = cut(label, 16);
    let mut list = args([
        "-q",
        "-F",
        "-t",
        "ext4",
        "-b",
        "4096",
        "-I",
        "256",
        "-i",
        "16384",
        "-g",
        "32768",
        "-m",
        "0",
        "-O",
        // `none` first: what mke2fs.conf adds is not wanted.
        "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
         huge_file,dir_nlink,extra_isize,metadata_csum",
        "-G",
        "16",
        "-J",
        &journal,
        "-E",
        "nodiscard,lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0",
        "-U",
        uuid,
        "-L",
        &label,
        "-d",
    ]);
    list.extend([root.as_os_str(), file.as_os_str()].map(OsStr::to_owned));
    list
}

fn xfs_args(file: &Path, size: u64, uuid: &str, label: &str, proto: &Path) -> Vec<OsString> {
    let data = format!("agcount={}", overhead::xfs_groups(size));
    let log = format!("size={}", overhead::xfs_log(size));
    let meta = format!("crc=1,finobt=1,rmapbt=0,reflink=1,uuid={uuid}");
    let label = cut(label, 12);
    let mut list = args([
        "-q",
        "-f",
        "-K",
        "-b",
        "size=4096",
        "-s",
        "size=4096",
        "-i",
        "size=512",
        "-d",
        &data,
        "-l",
        &log,
        "-m",
        &meta,
        "-L",
        &label,
        "-p",
    ]);
    list.extend([proto.as_os_str(), file.as_os_str()].map(OsStr::to_owned));
    list
}

fn btrfs_args(file: &Path, uuid: &str, label: &str, root: &Path) -> Vec<OsString> {
    let label = cut(label, 255);
    let mut list = args([
        "-q", "-f", "-K", "-d", "single", "-m", "dup", "-s", "4096", "-n", "16384", "-U", uuid, "-L", &label,
        "-r",
    ]);
    list.extend([root.as_os_str(), file.as_os_str()].map(OsStr::to_owned));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_superblock_gives_type_and_uuid() {
        for layout in &LAYOUTS {
            let mut image = vec![0_u8; 70_000];
            let at = |offset: u64| usize::try_from(offset).unwrap();
            image[at(layout.magic_at)..][..layout.magic.len()].copy_from_slice(layout.magic);
            image[at(layout.uuid_at)..][..16].copy_from_slice(&[0xAB; 16]);
            let found = superblock(|offset, bytes| {
                bytes.copy_from_slice(&image[at(offset)..][..bytes.len()]);
                Ok(true)
            });
            let (uuid, name) = found.unwrap().unwrap();
            assert_eq!((uuid.as_str(), name.as_str()), ("abababab-abab-abab-abab-abababababab", layout.name));
        }
    }

    #[test]
    fn an_empty_or_short_file_has_no_filesystem() {
        assert_eq!(superblock(|_, _| Ok(false)).unwrap(), None);
        assert_eq!(superblock(|_, _| Ok(true)).unwrap(), None, "all zeroes");
    }

    #[test]
    fn a_label_is_cut_to_what_the_filesystem_holds() {
        assert_eq!(cut("pvc-0123456789abcdef", 12), "pvc-01234567");
        assert_eq!(cut("größe", 12), "gre");
    }
}
