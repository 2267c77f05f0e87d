//! Cgroups for processes that outlive the agent.
//!
//! Whoever runs the agent ends it by its cgroup: systemd a unit's, the kubelet a pod's. A process that is to live on has
//! to be in another one, outside of those. It is made at the top of the hierarchy: anything beside the agent's own cgroup
//! would, in a pod, still be inside the pod's. On hosts with version 1 that is done in the hierarchies by which processes
//! are tracked and ended (`name=systemd`, `pids`); limits that someone put on the agent in the others stay in force.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::platform::mount::MountTable;
use crate::platform::{Host, HostError, Result, failed};

/// Directory of all cgroups that are made here.
const PARENT: &str = "union-csi-unions";

/// Hierarchies of version 1 by which processes are tracked.
const TRACKING: [&str; 2] = ["name=systemd", "pids"];

/// Tops of the hierarchies where cgroups are to be made.
fn hierarchies(mounts: &MountTable) -> Vec<PathBuf> {
    mounts
        .entries
        .iter()
        .filter(|entry| entry.root == Path::new("/"))
        .filter(|entry| match entry.fs_type.as_str() {
            "cgroup2" => true,
            "cgroup" => entry.super_options.iter().any(|option| TRACKING.contains(&option.as_str())),
            _ => false,
        })
        .map(|entry| entry.mount_point.clone())
        .collect()
}

/// Whether the mount shows the hierarchy's real top, and not what a cgroup namespace shows as such: only cgroups below
/// the top have `cgroup.events` (version 2), and only the top of a hierarchy of version 1 has `release_agent`.
fn is_top(hierarchy: &Path) -> bool {
    let version_1 = !hierarchy.join("cgroup.controllers").exists();
    if version_1 {
        hierarchy.join("release_agent").exists()
    } else {
        !hierarchy.join("cgroup.events").exists()
    }
}

/// Makes the cgroup in each hierarchy and opens its `cgroup.procs`.
///
/// # Errors
/// Why there is none, in words.
pub(super) fn make(mounts: &MountTable, name: &str) -> Result<Vec<OwnedFd>, String> {
    let found = hierarchies(mounts);
    if found.is_empty() {
        return Err("no cgroup hierarchy is mounted".to_owned());
    }
    found
        .iter()
        .map(|hierarchy| {
            if !is_top(hierarchy) {
                return Err(format!("{} is the agent's own cgroup namespace", hierarchy.display()));
            }
            let directory = hierarchy.join(PARENT).join(name);
            std::fs::create_dir_all(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
            let procs = directory.join("cgroup.procs");
            rustix::fs::open(&procs, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                .map_err(|e| format!("{}: {e}", procs.display()))
        })
        .collect()
}

/// Whether `name` can name a cgroup of ours.
pub(super) fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= 255 && !name.starts_with('.') && name.bytes().all(plain)
}

impl Host {
    /// Removes the cgroup made for a process that is gone. One that does not exist is removed already.
    ///
    /// # Errors
    /// What rmdir(2) tells: EBUSY while a process is in it.
    pub fn remove_cgroup(&self, name: &str) -> Result<()> {
        self.enter("remove cgroup", name)?;
        if !is_name(name) {
            return Err(HostError::Unexpected {
                subject: format!("cgroup name {name:?}"),
                reason: "it is not one plain name".to_owned(),
            });
        }
        for hierarchy in hierarchies(&self.mounts()?).iter().filter(|hierarchy| is_top(hierarchy)) {
            let parent = hierarchy.join(PARENT);
            remove(&parent.join(name))?;
            // The last one takes the parent along; others are in the way, or it is gone.
            let _ = rustix::fs::rmdir(&parent);
        }
        Ok(())
    }
}

fn remove(directory: &Path) -> Result<()> {
    // A process leaves its cgroup a moment after its end is told: 20 x 10 ms is long for that.
    for _ in 0..20 {
        match rustix::fs::rmdir(directory) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(Errno::BUSY) => std::thread::sleep(Duration::from_millis(10)),
            Err(errno) => return Err(failed("rmdir", directory)(errno)),
        }
    }
    Err(failed("rmdir", directory)(Errno::BUSY))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::mount::MountEntry;

    fn mounted(fs_type: &str, root: &str, at: &str, options: &[&str]) -> MountEntry {
        MountEntry {
            id: 1,
            parent: 0,
            device: (0, 1),
            root: root.into(),
            mount_point: at.into(),
            options: vec![],
            fs_type: fs_type.to_owned(),
            source: fs_type.to_owned(),
            super_options: options.iter().map(|o| (*o).to_owned()).collect(),
        }
    }

    #[test]
    fn hierarchies_that_track_processes_are_found_on_every_kind_of_host() {
        let pure = MountTable { entries: vec![mounted("cgroup2", "/", "/sys/fs/cgroup", &["rw"])] };
        assert_eq!(hierarchies(&pure), [PathBuf::from("/sys/fs/cgroup")]);
        let hybrid = MountTable {
            entries: vec![
                mounted("cgroup2", "/", "/sys/fs/cgroup/unified", &["rw"]),
                mounted("cgroup", "/", "/sys/fs/cgroup/systemd", &["rw", "xattr", "name=systemd"]),
                mounted("cgroup", "/", "/sys/fs/cgroup/pids", &["rw", "pids"]),
                mounted("cgroup", "/", "/sys/fs/cgroup/memory", &["rw", "memory"]),
            ],
        };
        assert_eq!(hierarchies(&hybrid).len(), 3);
        let part = MountTable { entries: vec![mounted("cgroup2", "/../..", "/sys/fs/cgroup", &["rw"])] };
        assert!(hierarchies(&part).is_empty());
    }

    #[test]
    fn a_cgroup_name_is_one_plain_name() {
        for good in ["pvc-0123", "a.b_c"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a b", ".hidden", "ü"] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
