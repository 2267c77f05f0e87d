//! Who keeps a filesystem on a block device from being let go of: open files, and mounts in other mount namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::loopdev::LoopDevice;
use super::mount::{MountEntry, table_of};
use super::{Host, Result, failed};

/// All processes of a machine with some thousands of open files are looked through in less than a second.
const BOUND: Duration = Duration::from_secs(5);

/// A process that uses the filesystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Pid, as the agent's `/proc` counts.
    pub pid: i32,
    /// Name of its program (proc_pid_comm(5)).
    pub program: String,
    /// Its cgroups, as proc_pid_cgroup(5) has them.
    pub cgroup: String,
    /// How many files and directories of it the process has open, its working and root directory among them.
    pub files: usize,
    /// Where it is mounted for this process, which has another mount namespace than the agent.
    pub mounted: Option<PathBuf>,
}

impl Host {
    /// The processes that use the filesystem on the block device, or the device itself. Of those that only share a mount namespace
    /// in which it is mounted, one is told. `None` where the look did not come back in time.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn holders(&self, device: &LoopDevice) -> Result<Option<Vec<Holder>>> {
        let subject = device.path.join("holders");
        self.enter("look for holders", &subject)?;
        let wanted = Wanted { number: device.device, source: device.path.display().to_string() };
        self.probes.ask(&subject, BOUND, move || look(&wanted))?.transpose()
    }
}

/// What is held.
struct Wanted {
    number: (u32, u32),
    /// A Btrfs has numbers of its own, other than its device's: it is known by what it was mounted from.
    source: String,
}

impl Wanted {
    fn is_mounted_as(&self, entry: &MountEntry) -> bool {
        entry.device == self.number || entry.source == self.source
    }

    /// Whether the file is on the device, or through one of the mounts, or is the device.
    fn is_held_by(&self, file: &Path, mounts: &BTreeSet<u64>) -> bool {
        let asked = StatxFlags::TYPE | StatxFlags::MNT_ID;
        // Of a filesystem whose server does not answer, what is known of the file is enough.
        let Ok(found) = statx(CWD, file, AtFlags::STATX_DONT_SYNC, asked) else { return false };
        let is_device = FileType::from_raw_mode(found.stx_mode.into()) == FileType::BlockDevice;
        (found.stx_dev_major, found.stx_dev_minor) == self.number
            || (is_device && (found.stx_rdev_major, found.stx_rdev_minor) == self.number)
            || mounts.contains(&found.stx_mnt_id)
    }
}

fn look(wanted: &Wanted) -> Result<Vec<Holder>> {
    let proc = Path::new("/proc");
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let own = namespace(&proc.join("self"));
    // By namespace: which of its mounts those are, and where one of them is.
    let mut known: BTreeMap<PathBuf, (BTreeSet<u64>, Option<PathBuf>)> = BTreeMap::new();
    let mut told = BTreeSet::new();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(failed("readdir", proc))? {
        let process = entry.map_err(failed("readdir", proc))?.path();
        let pid = process.file_name().and_then(|name| name.to_str()?.parse::<i32>().ok());
        let Some(pid) = pid.filter(|pid| u32::try_from(*pid).is_ok_and(|pid| pid != std::process::id()))
        else {
            continue;
        };
        // A process that ended meanwhile holds nothing any more: whatever of it cannot be read is passed over.
        let Some(namespace) = namespace(&process) else { continue };
        let (mounts, at) = known.entry(namespace.clone()).or_insert_with(|| {
            let table = table_of(&process.join("mountinfo")).unwrap_or_default();
            let of_it: Vec<_> = table.entries.into_iter().filter(|e| wanted.is_mounted_as(e)).collect();
            let at = of_it.first().map(|entry| entry.mount_point.clone());
            (of_it.iter().map(|entry| entry.id).collect(), at)
        });
        let files = open_files(&process).filter(|file| wanted.is_held_by(file, mounts)).count();
        let elsewhere = Some(&namespace) != own.as_ref();
        let mounted = at.clone().filter(|_| elsewhere && (files > 0 || !told.contains(&namespace)));
        if files == 0 && mounted.is_none() {
            continue;
        }
        told.insert(namespace);
        let text = |name: &str| std::fs::read_to_string(process.join(name)).unwrap_or_default();
        let (program, cgroup) = (text("comm").trim().to_owned(), text("cgroup"));
        found.push(Holder { pid, program, cgroup, files, mounted });
    }
    found.sort_by_key(|holder| holder.pid);
    Ok(found)
}

/// The files that the process has open, as links to them.
fn open_files(process: &Path) -> impl Iterator<Item = PathBuf> {
    let open =
        std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten().map(|entry| entry.path());
    open.chain([process.join("cwd"), process.join("root")])
}
