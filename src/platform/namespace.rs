//! Other processes' mount namespaces: swapping a dead mount for a living one inside running containers.
//!
//! A mount can be copied only in the namespace that it is in, and attached only in the one that it is to be in. So a
//! thread of its own goes back and forth: into a namespace to see what is dead there, home to copy what shall replace it,
//! and back to attach the copies. Nothing is ever asked of the dead mount, and nothing in a container's files decides
//! what is attached: paths that users may change are opened without following symlinks, below the living mount.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::MoveMountFlags;

use super::mount::{MountAttr, MountEntry, MountTable, detached_clone_of, is_nfs, parse_table};
use super::{Host, HostError, Result, failed};

/// A swap takes some milliseconds for each namespace; what takes as long as this hangs.
const BOUND: Duration = Duration::from_secs(60);

/// What a swap did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwapReport {
    /// Mount namespaces that had the dead mount.
    pub namespaces: u32,
    /// Mounts swapped.
    pub swapped: u32,
    /// Mounts that could not be, and mounts of other filesystems that went with the dead directory that they were on.
    pub failed: u32,
    /// Dead mounts found where another mount hides them, and left there: no path leads to them.
    pub hidden: u32,
}

impl Host {
    /// Replaces every mount of device `dead` (major:minor), in this namespace and in every other one that has a process,
    /// by the same subtree of the living mount at `living`, with the same per-mount options
    /// (`open_tree`, `mount_setattr`, `setns`, `move_mount` beneath where the kernel can, then detach).
    ///
    /// In other namespaces the directory below is never to be seen meanwhile, so that nothing is taken for missing and nothing
    /// made there: kernels before 6.5, which cannot mount beneath, mount on top, and the dead one stays, hidden, as long as the
    /// namespace. This namespace is the first and has nothing left there; what others have of it by propagation goes and comes
    /// with it, and is not mounted a second time, which would stay there when it is unmounted here.
    ///
    /// Device numbers are used again once nothing has them. So only mounts with the type and source of the living one are
    /// touched: both unions of a volume carry its name as their source. Restrictions of the living mount itself (such as
    /// read-only) stay on what is attached. `living` is the mount point of a whole filesystem, and was found answering.
    /// In a container, this reaches the rest of the machine where the container shares the host's pid namespace.
    ///
    /// # Errors
    /// The living mount cannot be opened, or `/proc` not read, or it took longer than a minute. Single mounts that fail are
    /// counted, logged and left.
    pub fn swap_mounts(&self, dead: (u32, u32), living: &Path) -> Result<SwapReport> {
        let replacement = Replacement::open(&*self.mounts()?, dead, living)?;
        self.swap(replacement, living)
    }

    /// As [`Host::swap_mounts`], of the filesystem that is mounted as `dead`, whatever the living one's source: the caller keeps
    /// it mounted there, so that nothing else has its number.
    ///
    /// # Errors
    /// As [`Host::swap_mounts`].
    pub fn swap_mounts_of(&self, dead: &MountEntry, living: &Path) -> Result<SwapReport> {
        let replacement = Replacement::open(&*self.mounts()?, dead.device, living)?;
        self.swap(Replacement { dead: Dead::of(dead, dead.device), ..replacement }, living)
    }

    /// Replaces every mount of the device node that is mounted at `dead_at`, in this namespace and in every other one that has
    /// a process, by the node `living`. The node is known by its inode: names and numbers of devices are used again. What has
    /// the old device open keeps it.
    ///
    /// # Errors
    /// As [`Host::swap_mounts`]; also where either is not the node of a block device, or both are the same.
    pub fn swap_device_nodes(&self, dead_at: &Path, living: &Path) -> Result<SwapReport> {
        self.swap(Replacement::open_node(dead_at, living)?, living)
    }

    fn swap(&self, replacement: Replacement, living: &Path) -> Result<SwapReport> {
        self.enter("swap mounts", living)?;
        // A thread of its own in any case: its root directory is not to be anyone else's.
        let swap = move || replacement.everywhere();
        self.probes.ask(living, BOUND, swap)?.unwrap_or_else(|| {
            Err(HostError::Timeout {
                action: "swap mounts",
                subject: living.display().to_string(),
                seconds: BOUND.as_secs(),
            })
        })
    }
}

/// What is to be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Dead {
    /// All mounts of a filesystem, which begins at `root`.
    Filesystem { device: (u32, u32), fs_type: String, source: String, root: PathBuf },
    /// All mounts of one node of a filesystem of nodes.
    Node { device: (u32, u32), inode: u64 },
}

impl Dead {
    /// All mounts of the filesystem that has this number and is otherwise like `whole`.
    fn of(whole: &MountEntry, device: (u32, u32)) -> Self {
        let (fs_type, source, root) = (whole.fs_type.clone(), whole.source.clone(), whole.root.clone());
        Self::Filesystem { device, fs_type, source, root }
    }

    /// Whether it is what the current namespace has mounted there.
    fn is(&self, entry: &MountEntry) -> bool {
        match self {
            Self::Filesystem { device, fs_type, source, root } => {
                // What is bound of an NFS mount has its own path in the source.
                let same =
                    if is_nfs(fs_type) { entry.root.starts_with(root) } else { entry.source == *source };
                entry.device == *device && entry.fs_type == *fs_type && same
            }
            Self::Node { device, inode } => {
                entry.device == *device
                    && entry.root != Path::new("/")
                    && node_at(&entry.mount_point).is_ok_and(|(_, found)| found == *inode)
            }
        }
    }
}

/// What replaces what, and all that is needed to find the way home.
struct Replacement {
    dead: Dead,
    living: OwnedFd,
    home: OwnedFd,
    proc: OwnedFd,
}

impl Replacement {
    fn open(mounts: &MountTable, dead: (u32, u32), living: &Path) -> Result<Self> {
        let wrong = |reason: &str| HostError::Unexpected {
            subject: living.display().to_string(),
            reason: reason.to_owned(),
        };
        let entry = mounts.at(living).ok_or_else(|| wrong("nothing is mounted there"))?;
        if entry.root != Path::new("/") && !is_nfs(&entry.fs_type) {
            return Err(wrong("only a part of its filesystem is mounted there"));
        }
        if entry.device == dead {
            return Err(wrong("it is the dead mount itself"));
        }
        Self::of(Dead::of(entry, dead), living, OFlags::DIRECTORY)
    }

    fn open_node(dead_at: &Path, living: &Path) -> Result<Self> {
        let (dead, known) = (node_at(dead_at)?, node_at(living)?);
        if dead == known {
            return Err(HostError::Unexpected {
                subject: living.display().to_string(),
                reason: "it is the dead device itself".to_owned(),
            });
        }
        let (device, inode) = dead;
        Self::of(Dead::Node { device, inode }, living, OFlags::NOFOLLOW)
    }

    fn of(dead: Dead, living: &Path, how: OFlags) -> Result<Self> {
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        let open =
            |path: &Path, flags| rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open", path));
        Ok(Self {
            dead,
            living: open(living, path_only | how)?,
            home: open(Path::new("/proc/self/ns/mnt"), OFlags::RDONLY | OFlags::CLOEXEC)?,
            proc: open(Path::new("/proc"), path_only | OFlags::DIRECTORY)?,
        })
    }

    /// Runs in a thread that ends with it.
    fn everywhere(&self) -> Result<SwapReport> {
        // setns(2) refuses a thread that shares its root and working directory with others.
        unshare(CloneFlags::CLONE_FS).map_err(failed("unshare", "the swapping thread"))?;
        let mut report = SwapReport::default();
        for (name, namespace, whose) in namespaces()? {
            let swapped = self.within(&namespace, whose, &mut report);
            enter(&self.home)?;
            if let Err(error) = swapped {
                tracing::warn!(namespace = %name.display(), %error, "a mount namespace could not be healed");
                report.failed += 1;
            }
        }
        Ok(report)
    }

    fn within(&self, namespace: &OwnedFd, whose: Whose, report: &mut SwapReport) -> Result<()> {
        enter(namespace)?;
        let table = self.table()?;
        let plan = plan(&table, |entry| self.dead.is(entry));
        report.hidden += plan.hidden;
        if plan.steps.is_empty() {
            return Ok(());
        }
        report.namespaces += 1;
        enter(&self.home)?;
        let copies: Vec<_> = plan.steps.iter().map(|step| self.copy_for(step.entry)).collect();
        enter(namespace)?;
        for (step, copy) in plan.steps.iter().zip(copies) {
            let point = step.entry.mount_point.as_path();
            let done = copy.and_then(|tree| {
                if step.carried { attach(&tree, point) } else { swap(&tree, step.entry, whose) }
            });
            match done {
                Ok(()) => {
                    tracing::debug!(mount.point = %point.display(), "a dead mount was swapped");
                    report.swapped += 1;
                }
                Err(error) => {
                    tracing::warn!(mount.point = %point.display(), %error, "a dead mount could not be swapped");
                    report.failed += 1;
                }
            }
        }
        for entry in plan.lost {
            tracing::warn!(
                mount.point = %entry.mount_point.display(),
                mount.source = entry.source,
                "a mount on a directory of the dead mount went with it"
            );
            report.failed += 1;
        }
        Ok(())
    }

    /// The mounts as this thread sees them now, by the `/proc` of its home: the namespace may have none of its own.
    fn table(&self) -> Result<MountTable> {
        let subject = "/proc/thread-self/mountinfo";
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.proc, "thread-self/mountinfo", flags, Mode::empty())
            .map_err(failed("open", subject))?;
        let mut text = Vec::new();
        std::fs::File::from(fd).read_to_end(&mut text).map_err(failed("read", subject))?;
        parse_table(subject, &text)
    }

    /// A detached copy of what is to be where the dead `entry` is. Its root was chosen by a user (a subPath), who may
    /// since have put a symlink in its place.
    fn copy_for(&self, entry: &MountEntry) -> Result<OwnedFd> {
        let Dead::Filesystem { root, .. } = &self.dead else {
            return detached_clone_of(&self.living, MountAttr::of(&entry.options));
        };
        let below = entry.root.strip_prefix(root).unwrap_or(&entry.root);
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let source = rustix::fs::openat2(&self.living, below, flags, Mode::empty(), resolve)
            .map_err(failed("openat2", &entry.root))?;
        detached_clone_of(&source, MountAttr::of(&entry.options))
    }
}

/// Filesystem and inode of the node of a block device. Does not open the device.
fn node_at(path: &Path) -> Result<((u32, u32), u64)> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(CWD, path, flags, StatxFlags::TYPE | StatxFlags::INO)
        .map_err(failed("statx", path))?;
    if FileType::from_raw_mode(found.stx_mode.into()) != FileType::BlockDevice {
        let (subject, reason) = (path.display().to_string(), "it is not a block device".to_owned());
        return Err(HostError::Unexpected { subject, reason });
    }
    Ok(((found.stx_dev_major, found.stx_dev_minor), found.stx_ino))
}

fn enter(namespace: &OwnedFd) -> Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNS).map_err(failed("setns", "a mount namespace"))
}

/// Whose mounts they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    /// The host's, by which it is told what is mounted.
    Ours,
    /// Of a container, or of whatever else has a namespace of its own.
    Others,
}

/// One descriptor for each mount namespace that a process is in, this one first.
fn namespaces() -> Result<Vec<(PathBuf, OwnedFd, Whose)>> {
    let proc = Path::new("/proc");
    let mut pids = vec![(OsString::from("self"), Whose::Ours)];
    for entry in std::fs::read_dir(proc).map_err(failed("readdir", proc))? {
        let name = entry.map_err(failed("readdir", proc))?.file_name();
        if name.to_str().is_some_and(|name| name.bytes().all(|b| b.is_ascii_digit())) {
            pids.push((name, Whose::Others));
        }
    }
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for (pid, whose) in pids {
        let link = proc.join(pid).join("ns/mnt");
        // What has ended meanwhile, and what may not be looked at, has nothing that could be done for it.
        let Ok(name) = std::fs::read_link(&link) else { continue };
        if seen.contains(&name) {
            continue;
        }
        if let Ok(fd) = rustix::fs::open(&link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            seen.insert(name.clone());
            found.push((name, fd, whose));
        }
    }
    Ok(found)
}

/// What is to be done in one namespace.
#[derive(Debug, Default, PartialEq, Eq)]
struct Plan<'a> {
    /// In this order: a mount before what is on its directories.
    steps: Vec<Step<'a>>,
    hidden: u32,
    /// Mounts of other filesystems on directories of dead ones: no path leads to them, and they go with these.
    lost: Vec<&'a MountEntry>,
}

#[derive(Debug, PartialEq, Eq)]
struct Step<'a> {
    entry: &'a MountEntry,
    /// It is on a directory of another dead mount and goes with it: there is nothing left to take away then.
    carried: bool,
}

fn plan(table: &MountTable, is_dead: impl Fn(&MountEntry) -> bool) -> Plan<'_> {
    let visible = |entry: &MountEntry| table.at(&entry.mount_point).is_some_and(|top| top.id == entry.id);
    let by_id: BTreeMap<u64, &MountEntry> = table.entries.iter().map(|e| (e.id, e)).collect();
    let swapped: BTreeSet<u64> =
        table.entries.iter().filter(|e| is_dead(e) && visible(e)).map(|e| e.id).collect();
    let carried = |entry: &MountEntry| {
        let mut at = entry;
        // No more steps up than there are mounts, whatever the table says.
        for _ in 0..table.entries.len() {
            let Some(parent) = by_id.get(&at.parent).filter(|parent| parent.id != at.id) else { break };
            if swapped.contains(&parent.id) {
                return true;
            }
            at = parent;
        }
        false
    };
    let mut plan = Plan::default();
    for entry in &table.entries {
        if swapped.contains(&entry.id) {
            plan.steps.push(Step { entry, carried: carried(entry) });
        } else if is_dead(entry) {
            plan.hidden += 1;
        } else if carried(entry) && visible(entry) {
            plan.lost.push(entry);
        }
    }
    plan.steps.sort_by_key(|step| step.entry.mount_point.components().count());
    plan
}

/// Puts the copy in the place of the dead mount that is at its mount point in the current namespace.
fn swap(tree: &OwnedFd, dead: &MountEntry, whose: Whose) -> Result<()> {
    let point = dead.mount_point.as_path();
    let target = open_point(point)?;
    if known(&target).is_some_and(|target| target.mount != dead.id) {
        return Err(failed("openat2", point)(Errno::STALE));
    }
    // Found out before anything is taken away: a file cannot be attached to a directory, nor the other way round.
    if let (Some(tree), Some(target)) = (known(tree), known(&target))
        && tree.is_directory != target.is_directory
    {
        return Err(failed("move_mount", point)(Errno::NOTDIR));
    }
    let detach = || umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
    // At no time is the directory below to be seen: what a workload makes there would be lost to it. Kernels before 6.5 cannot
    // mount beneath, and where propagation forbids it none can.
    match move_onto(tree, &target, MoveMountFlags::MOVE_MOUNT_BENEATH) {
        Ok(()) => return detach().map_err(failed("umount2", point)),
        // The dead one stays, covered.
        Err(Errno::INVAL) if whose == Whose::Others => return attach(tree, point),
        Err(Errno::INVAL) => {}
        Err(errno) => return Err(failed("move_mount", point)(errno)),
    }
    match detach() {
        // EINVAL: locked by a user namespace. It stays, covered.
        Ok(()) | Err(nix::Error::EINVAL) => attach(tree, point),
        Err(errno) => Err(failed("umount2", point)(errno)),
    }
}

fn attach(tree: &OwnedFd, point: &Path) -> Result<()> {
    move_onto(tree, &open_point(point)?, MoveMountFlags::empty()).map_err(failed("move_mount", point))
}

fn move_onto(tree: &OwnedFd, target: &OwnedFd, how: MoveMountFlags) -> Result<(), Errno> {
    let by_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(tree.as_fd(), c"", target.as_fd(), c"", by_descriptor | how)
}

/// The mount table names no symlinks, so one that is met now was put there meanwhile.
fn open_point(point: &Path) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::openat2(CWD, point, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
        .map_err(failed("openat2", point))
}

struct Known {
    /// ID of the mount, as mountinfo has it.
    mount: u64,
    is_directory: bool,
}

/// What the kernel knows of the descriptor without asking the filesystem, which may be dead; `None` where it knows
/// nothing, as before Linux 5.8.
fn known(fd: &OwnedFd) -> Option<Known> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(fd, c"", flags, StatxFlags::MNT_ID | StatxFlags::TYPE).ok()?;
    let is_directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
    let is_known = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    is_known.then_some(Known { mount: stat.stx_mnt_id, is_directory })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: (u32, u32) = (0, 66);

    fn table(mounts: &[(u64, u64, u32, &str)]) -> MountTable {
        let entry = |&(id, parent, minor, point): &(u64, u64, u32, &str)| MountEntry {
            id,
            parent,
            device: (0, minor),
            root: "/".into(),
            mount_point: point.into(),
            options: vec![],
            fs_type: "fuse.mergerfs".to_owned(),
            source: "volume".to_owned(),
            super_options: vec![],
        };
        MountTable { entries: mounts.iter().map(entry).collect() }
    }

    fn steps(table: &MountTable) -> (Vec<(u64, bool)>, u32, Vec<u64>) {
        let plan = plan(table, |entry| entry.device == DEAD);
        (
            plan.steps.iter().map(|s| (s.entry.id, s.carried)).collect(),
            plan.hidden,
            plan.lost.iter().map(|e| e.id).collect(),
        )
    }

    #[test]
    fn every_mount_of_the_dead_device_is_swapped_and_no_other() {
        let t = table(&[(1, 0, 1, "/"), (2, 1, 66, "/a"), (3, 1, 7, "/b"), (4, 1, 66, "/c")]);
        assert_eq!(steps(&t), (vec![(2, false), (4, false)], 0, vec![]));
        assert_eq!(steps(&table(&[(1, 0, 1, "/"), (3, 1, 7, "/b")])), (vec![], 0, vec![]));
    }

    #[test]
    fn what_is_on_a_dead_directory_comes_after_it_and_is_only_attached() {
        let t = table(&[(1, 0, 1, "/"), (5, 2, 66, "/a/b"), (2, 1, 66, "/a"), (6, 5, 7, "/a/b/c")]);
        assert_eq!(steps(&t), (vec![(2, false), (5, true)], 0, vec![6]));
    }

    #[test]
    fn a_dead_mount_under_another_mount_is_left() {
        let t = table(&[(1, 0, 1, "/"), (2, 1, 66, "/a"), (3, 2, 7, "/a")]);
        assert_eq!(steps(&t), (vec![], 1, vec![]));
    }

    #[test]
    fn of_two_dead_mounts_on_one_directory_the_upper_is_swapped() {
        let t = table(&[(1, 0, 1, "/"), (2, 1, 66, "/a"), (3, 2, 66, "/a")]);
        assert_eq!(steps(&t), (vec![(3, false)], 1, vec![]));
    }

    #[test]
    fn the_living_mount_must_be_a_whole_filesystem_and_another_one() {
        let t = table(&[(1, 0, 1, "/"), (2, 1, 66, "/a")]);
        let told =
            |living: &str| Replacement::open(&t, DEAD, living.as_ref()).err().expect("an error").to_string();
        assert!(told("/a").contains("dead mount itself"));
        assert!(told("/b").contains("nothing is mounted"));
        let mut part = table(&[(1, 0, 1, "/"), (2, 1, 7, "/a")]);
        part.entries[1].root = "/sub".into();
        let error = Replacement::open(&part, DEAD, "/a".as_ref()).err().expect("an error").to_string();
        assert!(error.contains("only a part"), "{error}");
    }
}
