//! Mounts: the table in `/proc/self/mountinfo`, and changing it.

#![allow(unsafe_code)] // mount_setattr(2) has no wrapper in nix, rustix or libc.

mod readings;
mod table;

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags};
use nix::sys::statvfs::FsFlags;
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

pub(super) use self::readings::Readings;
pub(super) use self::table::{is_nfs, parse_table, table_of};
use super::file::fd_path;
use super::{Host, Result, failed};

/// mount(2) takes its options in one page.
const DATA_MAX: usize = 4095;

/// One line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)), unescaped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// Mount ID.
    pub id: u64,
    /// ID of the parent mount.
    pub parent: u64,
    /// Device of the files: major, minor.
    pub device: (u32, u32),
    /// Root of the mount within its filesystem; for NFS within its server.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Per-mount options.
    pub options: Vec<String>,
    /// Filesystem type.
    pub fs_type: String,
    /// Source.
    pub source: String,
    /// Per-superblock options.
    pub super_options: Vec<String>,
}

impl MountEntry {
    /// True where the mount or its filesystem is read-only.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.options.iter().chain(&self.super_options).any(|o| o == "ro")
    }
}

/// All mounts of a mount namespace, in the kernel's order (later ones cover earlier ones).
#[derive(Clone, Debug, Default)]
pub struct MountTable {
    /// The lines.
    pub entries: Vec<MountEntry>,
}

impl MountTable {
    /// The mount that is seen at exactly `path`: the topmost one, and not one that is hidden by a mount above it.
    #[must_use]
    pub fn at(&self, path: &Path) -> Option<&MountEntry> {
        self.containing(path).filter(|e| e.mount_point == path)
    }

    /// The mount that holds `path`, found as the kernel walks a path: from mount to the mount on it.
    #[must_use]
    pub fn containing(&self, path: &Path) -> Option<&MountEntry> {
        let depth = |e: &&MountEntry| e.mount_point.components().count();
        let holding: Vec<_> = self.entries.iter().filter(|e| path.starts_with(&e.mount_point)).collect();
        let is_top = |e: &&MountEntry| holding.iter().all(|p| p.id != e.parent || p.id == e.id);
        let mut current = holding.iter().copied().filter(is_top).max_by_key(depth)?;
        // Each step goes to another line, so there are no more steps than lines.
        for _ in 0..holding.len() {
            let children = holding.iter().copied().filter(|e| e.parent == current.id && e.id != current.id);
            let next = children.min_by_key(depth);
            let Some(next) = next else { break };
            current = next;
        }
        Some(current)
    }

    /// All mounts at or below `path`.
    pub fn below<'a>(&'a self, path: &'a Path) -> impl Iterator<Item = &'a MountEntry> {
        self.entries.iter().filter(move |e| e.mount_point.starts_with(path))
    }
}

/// Per-mount attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MountAttr {
    /// `MS_RDONLY`.
    pub read_only: bool,
    /// `MS_NOSUID`.
    pub nosuid: bool,
    /// `MS_NODEV`.
    pub nodev: bool,
    /// `MS_NOEXEC`.
    pub noexec: bool,
    /// `MS_NOATIME`.
    pub noatime: bool,
}

/// Whether what lies at a path answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It answered.
    Alive,
    /// It failed with this errno (ENOTCONN: the FUSE daemon is gone; EIO: its filesystem shut down).
    Dead(i32),
    /// It did not answer within the bound.
    Hung,
}

impl MountAttr {
    /// The attributes among a mount's per-mount options.
    pub(super) fn of(options: &[String]) -> Self {
        let has = |name: &str| options.iter().any(|option| option == name);
        Self {
            read_only: has("ro"),
            nosuid: has("nosuid"),
            nodev: has("nodev"),
            noexec: has("noexec"),
            noatime: has("noatime"),
        }
    }

    fn set(self) -> u64 {
        let bits = [
            (self.read_only, MOUNT_ATTR_RDONLY),
            (self.nosuid, MOUNT_ATTR_NOSUID),
            (self.nodev, MOUNT_ATTR_NODEV),
            (self.noexec, MOUNT_ATTR_NOEXEC),
            (self.noatime, MOUNT_ATTR_NOATIME),
        ];
        bits.into_iter().filter(|(on, _)| *on).map(|(_, bit)| bit).sum()
    }

    fn flags(self) -> MsFlags {
        let bits = [
            (self.read_only, MsFlags::MS_RDONLY),
            (self.nosuid, MsFlags::MS_NOSUID),
            (self.nodev, MsFlags::MS_NODEV),
            (self.noexec, MsFlags::MS_NOEXEC),
            (self.noatime, MsFlags::MS_NOATIME),
        ];
        bits.into_iter().filter(|(on, _)| *on).map(|(_, bit)| bit).collect()
    }
}

// From linux/mount.h.
const MOUNT_ATTR_RDONLY: u64 = 0x01;
const MOUNT_ATTR_NOSUID: u64 = 0x02;
const MOUNT_ATTR_NODEV: u64 = 0x04;
const MOUNT_ATTR_NOEXEC: u64 = 0x08;
const MOUNT_ATTR_NOATIME: u64 = 0x10;
const MOUNT_ATTR_ATIME_MASK: u64 = 0x70;

/// `struct mount_attr` of linux/mount.h, first version.
#[repr(C)]
struct RawMountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// A detached private copy of the mount at `source`, or of the part of it below `source`, restricted by `attr`; attached
/// nowhere until [`attach`]ed, gone when dropped. What restricts the source restricts the copy too.
pub(super) fn detached_clone(source: &Path, attr: MountAttr) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = rustix::mount::open_tree(CWD, source, flags).map_err(failed("open_tree", source))?;
    set_attributes(&tree, attr).map_err(failed("mount_setattr", source))?;
    Ok(tree)
}

/// As [`detached_clone`], of what the descriptor has open.
pub(super) fn detached_clone_of(source: &OwnedFd, attr: MountAttr) -> Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let subject = fd_path(source);
    let tree = rustix::mount::open_tree(source, c"", flags).map_err(failed("open_tree", &subject))?;
    set_attributes(&tree, attr).map_err(failed("mount_setattr", &subject))?;
    Ok(tree)
}

fn set_attributes(tree: &OwnedFd, attr: MountAttr) -> io::Result<()> {
    let raw = RawMountAttr {
        attr_set: attr.set(),
        attr_clr: if attr.noatime { MOUNT_ATTR_ATIME_MASK } else { 0 },
        propagation: libc::MS_PRIVATE,
        userns_fd: 0,
    };
    // SAFETY: mount_setattr(2) reads an empty path and one `struct mount_attr` of the given size; both live through the
    // call, and the descriptor is open.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            c_long::from(tree.as_raw_fd()),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const raw,
            size_of::<RawMountAttr>(),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Attaches a detached mount on top of what is at `target`; a magic link of `/proc/self/fd` is followed.
pub(super) fn attach(tree: &OwnedFd, target: &Path) -> Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_SYMLINKS;
    rustix::mount::move_mount(tree.as_fd(), c"", CWD, target, flags).map_err(failed("move_mount", target))
}

impl Host {
    /// The mounts of this process's namespace, as they are at some time after the call began; shared with others who ask now.
    ///
    /// # Errors
    /// `/proc/self/mountinfo` cannot be read or understood.
    pub fn mounts(&self) -> Result<Arc<MountTable>> {
        let file = Path::new("/proc/self/mountinfo");
        self.enter("read mounts", file)?;
        self.readings.next(|| table_of(file))
    }

    /// Mounts `source` of type `fs_type` at the existing directory `target` (mount(2)).
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn mount_filesystem(
        &self,
        source: &Path,
        target: &Path,
        fs_type: &str,
        attr: MountAttr,
        data: &str,
    ) -> Result<()> {
        self.enter("mount", target)?;
        let data = (!data.is_empty()).then_some(data);
        nix::mount::mount(Some(source), target, Some(fs_type), attr.flags(), data)
            .map_err(failed("mount", target))
    }

    /// Binds `source` (directory or file) onto the existing `target` with `attr`, in one step: at no time is the target
    /// visible with other attributes (open_tree(2), mount_setattr(2), move_mount(2); on kernels before 5.12 a moment
    /// passes between bind and remount). Mounts below `source` are not bound. `attr` adds restrictions; those that the
    /// source's mount has already stay. Propagation: the bind leaves the source's peer group; where the target's parent
    /// is shared, the bind is passed on and shared too.
    ///
    /// Symlinks are followed on both sides, so that `/proc/self/fd/N` can be given: paths that others may change go
    /// through [`Host::open_beneath`] first.
    ///
    /// # Errors
    /// The errno of the call that failed.
    pub fn bind(&self, source: &Path, target: &Path, attr: MountAttr) -> Result<()> {
        self.enter("bind", target)?;
        bind_clone(detached_clone(source, attr), source, target, attr)
    }

    /// Lifts the read-only attribute of the mount at `target`, with nosuid, nodev and relatime as its other attributes. A
    /// filesystem that is read-only itself stays so; what is bound from the mount later can be written when the
    /// filesystem can.
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn lift_read_only(&self, target: &Path) -> Result<()> {
        self.enter("remount", target)?;
        let none: Option<&str> = None;
        let flags = MsFlags::MS_BIND
            | MsFlags::MS_REMOUNT
            | MsFlags::MS_NOSUID
            | MsFlags::MS_NODEV
            | MsFlags::MS_RELATIME;
        nix::mount::mount(none, target, none, flags, none).map_err(failed("mount", target))
    }

    /// Merges `layers` read-only by overlayfs, first on top, at `target`. At least two layers. Redirects and metadata-only
    /// files that someone may have planted in a layer are not followed.
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn mount_overlay(&self, layers: &[PathBuf], target: &Path, attr: MountAttr) -> Result<()> {
        self.enter("mount overlay", target)?;
        let attr = MountAttr { read_only: true, ..attr };
        let mut data = overlay_data(layers);
        let mut opened = Vec::new();
        if data.len() > DATA_MAX {
            // Many layers with long paths: named by descriptor they always fit.
            for layer in layers {
                opened.push(open_layer(layer)?);
            }
            data = overlay_data(&opened.iter().map(fd_path).collect::<Vec<_>>());
        }
        nix::mount::mount(
            Some("overlay"),
            target,
            Some("overlay"),
            attr.flags(),
            Some(std::ffi::OsStr::from_bytes(&data)),
        )
        .map_err(failed("mount", target))
    }

    /// What is mounted below `target` from now on is seen in no other mount namespace, and the other way round.
    ///
    /// # Errors
    /// The errno of mount(2).
    pub fn make_private(&self, target: &Path) -> Result<()> {
        self.enter("make private", target)?;
        let none: Option<&str> = None;
        nix::mount::mount(none, target, none, MsFlags::MS_PRIVATE, none).map_err(failed("mount", target))
    }

    /// Unmounts the topmost mount at `target`; false when none was there. `lazy` is `MNT_DETACH`. Does not follow a
    /// symlink at `target` (`UMOUNT_NOFOLLOW`).
    ///
    /// # Errors
    /// The errno of umount2(2): EBUSY while files are open and `lazy` is false.
    pub fn unmount(&self, target: &Path, lazy: bool) -> Result<bool> {
        self.enter("umount", target)?;
        let mut flags = MntFlags::UMOUNT_NOFOLLOW;
        flags.set(MntFlags::MNT_DETACH, lazy);
        match nix::mount::umount2(target, flags) {
            Ok(()) => Ok(true),
            // EINVAL: nothing is mounted there.
            Err(nix::Error::EINVAL | nix::Error::ENOENT) => Ok(false),
            Err(errno) => Err(failed("umount2", target)(errno)),
        }
    }

    /// Asks each of `paths` in turn whether its inode can be used, in one thread for all of them: a hundred take as long as
    /// one [`Host::liveness`]. Told are the numbers of those that cannot, and of the first that has not answered within
    /// `bound`, with which the thread is left alone; those after it were not asked.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn not_alive(&self, paths: Vec<PathBuf>, bound: Duration) -> Result<Vec<(usize, Liveness)>> {
        self.enter("stat", paths.first().map_or(Path::new(""), PathBuf::as_path))?;
        let count = paths.len();
        let (tell, told) = std::sync::mpsc::sync_channel(count.max(1));
        std::thread::Builder::new()
            .name("bounded".to_owned())
            .spawn(move || {
                for path in paths {
                    // Nobody may be listening any more.
                    if tell.send(ask_inode(&path)).is_err() {
                        break;
                    }
                }
            })
            .map_err(failed("clone", "a thread"))?;
        let mut found = Vec::new();
        for number in 0..count {
            match told.recv_timeout(bound) {
                Ok(Ok(())) => {}
                Ok(Err(errno)) => found.push((number, Liveness::Dead(errno.raw_os_error()))),
                Err(_) => {
                    found.push((number, Liveness::Hung));
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Asks what lies at `path` for its statfs and its inode, in a thread that is abandoned when it does not come back in time.
    /// While an abandoned question about the path is still open and nothing else was mounted there, further ones are
    /// answered [`Liveness::Hung`] at once.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn liveness(&self, path: &Path, bound: Duration) -> Result<Liveness> {
        self.enter("statfs", path)?;
        let asked = path.to_owned();
        let ask = move || rustix::fs::statfs(&asked).and_then(|_| ask_inode(&asked));
        Ok(told(self.probes.ask(path, bound, ask)?))
    }

    /// As [`Host::liveness`], for the inode alone: one request where another machine is asked.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn inode_alive(&self, path: &Path, bound: Duration) -> Result<Liveness> {
        self.enter("stat", path)?;
        let asked = path.to_owned();
        Ok(told(self.probes.ask(path, bound, move || ask_inode(&asked))?))
    }
}

/// Mounts what was cloned of `source`. Kernels before 5.12 cannot clone so: they bind and restrict in two steps.
pub(super) fn bind_clone(
    cloned: Result<OwnedFd>,
    source: &Path,
    target: &Path,
    attr: MountAttr,
) -> Result<()> {
    match cloned {
        Ok(tree) => attach(&tree, target),
        Err(error) if error.errno() == Some(libc::ENOSYS) => bind_and_remount(source, target, attr),
        Err(error) => Err(error),
    }
}

fn told(answer: Option<std::result::Result<(), Errno>>) -> Liveness {
    match answer {
        None => Liveness::Hung,
        Some(Ok(())) => Liveness::Alive,
        Some(Err(errno)) => Liveness::Dead(errno.raw_os_error()),
    }
}

/// Whether the inode at `path` can be used. XFS tells its space after it shut down, and stat(2) tells that it did; ext4
/// tells both from memory, and getxattr(2) tells that it did. An attribute that is not there is an answer.
fn ask_inode(path: &Path) -> std::result::Result<(), Errno> {
    rustix::fs::stat(path)?;
    match rustix::fs::getxattr(path, c"user.union-csi", &mut [0_u8; 0]) {
        Err(
            errno @ (Errno::IO
            | Errno::NODEV
            | Errno::NXIO
            | Errno::NOTCONN
            | Errno::SHUTDOWN
            | Errno::STALE
            | Errno::UCLEAN),
        ) => Err(errno),
        _ => Ok(()),
    }
}

fn open_layer(layer: &Path) -> Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(layer, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(failed("open", layer))
}

/// Options of an overlay that is only read. Overlayfs takes a backslash before what would end a path.
fn overlay_data(layers: &[PathBuf]) -> Vec<u8> {
    let mut data = b"redirect_dir=nofollow,metacopy=off,lowerdir=".to_vec();
    for (index, layer) in layers.iter().enumerate() {
        if index > 0 {
            data.push(b':');
        }
        for &byte in layer.as_os_str().as_bytes() {
            if matches!(byte, b'\\' | b':' | b',') {
                data.push(b'\\');
            }
            data.push(byte);
        }
    }
    data
}

/// For kernels without mount_setattr(2). A remount sets all flags, so those of the source are given again.
fn bind_and_remount(source: &Path, target: &Path, attr: MountAttr) -> Result<()> {
    let none: Option<&str> = None;
    nix::mount::mount(Some(source), target, none, MsFlags::MS_BIND, none).map_err(failed("mount", target))?;
    let restrict = || -> nix::Result<()> {
        let inherited = flags_of(nix::sys::statvfs::statvfs(target)?.flags());
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | inherited | attr.flags();
        nix::mount::mount(none, target, none, flags, none)
    };
    restrict().map_err(|errno| {
        if let Err(left) = nix::mount::umount2(target, MntFlags::MNT_DETACH) {
            tracing::warn!(mount.point = %target.display(), error = %left, "an unfinished bind stays mounted");
        }
        failed("mount", target)(errno)
    })
}

fn flags_of(flags: FsFlags) -> MsFlags {
    let bits = [
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    bits.into_iter().filter(|(have, _)| flags.contains(*have)).map(|(_, flag)| flag).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_cannot_end_its_path_early() {
        let layers = [PathBuf::from("/a:b"), PathBuf::from("/c,d"), PathBuf::from(r"/e\f")];
        let data = String::from_utf8(overlay_data(&layers)).unwrap();
        assert!(data.ends_with(r"lowerdir=/a\:b:/c\,d:/e\\f"), "{data}");
    }
}
