//! Cgroups for processes that outlive the agent.
//!
//! Whoever runs the agent ends it by its cgroup: systemd a unit's, a container's runtime and the kubelet a container's. A
//! process that is to live on has to be in another one, outside of those. It is made at the top of the hierarchy that can
//! be seen: anything beside the agent's own cgroup would, in a pod, still be inside the pod's.
//!
//! Version 2 has one hierarchy. Of version 1, a cgroup is made in those by which processes are tracked (`name=systemd`,
//! `pids`). systemd looks at no other, but a runtime ends whatever is in a container's cgroup of any hierarchy (runc:
//! `devices`, the kubelet: all), and puts a container into cgroups of the same path everywhere. So what is in a cgroup of
//! the path that it has in a tracking hierarchy goes to the top of the other ones too. Limits that somebody put on the
//! agent by another path stay in force.
//!
//! An agent in a container has entered the host's cgroup namespace before (see [`crate::platform::container`]).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::platform::mount::{MountEntry, MountTable};
use crate::platform::{Host, HostError, Result, failed};

/// Directory of all cgroups that are made here.
const PARENT: &str = "union-csi-unions";

/// Hierarchies of version 1 by which processes are tracked.
const TRACKING: [&str; 2] = ["name=systemd", "pids"];

/// Where this process is: /proc/self/cgroup, as cgroups(7) describes it.
const OWN: &str = "/proc/self/cgroup";

/// What is to be done in one hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct Hierarchy {
    /// Where it is mounted.
    top: PathBuf,
    version_2: bool,
    /// The agent's own cgroup there, `/` at the top that it can see.
    own: PathBuf,
    /// Whether a cgroup is made; else the process goes to the top.
    made: bool,
}

/// The hierarchies that a process has to leave the agent's cgroup of. `own` is the text of `/proc/self/cgroup`.
fn hierarchies(mounts: &MountTable, own: &str) -> Vec<Hierarchy> {
    let places: Vec<(Vec<&str>, &Path)> = own
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let controllers = controllers.split(',').filter(|c| !c.is_empty()).collect();
            Some((controllers, Path::new(path)))
        })
        .collect();
    let tracked: Vec<&Path> = places
        .iter()
        .filter(|(controllers, path)| {
            path.parent().is_some() && controllers.iter().any(|c| TRACKING.contains(c))
        })
        .map(|(_, path)| *path)
        .collect();
    let of = |entry: &MountEntry| -> Option<Hierarchy> {
        let version_2 = entry.fs_type == "cgroup2";
        let has = |controller: &str| entry.super_options.iter().any(|option| option == controller);
        let mounted_here = |controllers: &[&str]| match version_2 {
            true => controllers.is_empty(),
            false => !controllers.is_empty() && controllers.iter().all(|c| has(c)),
        };
        let own = places.iter().find(|(controllers, _)| mounted_here(controllers)).map(|(_, path)| *path);
        // A hierarchy that the process is not told to be in cannot be judged: then as at its top.
        let own = own.unwrap_or_else(|| Path::new("/"));
        let made = version_2 || TRACKING.iter().any(|c| has(c));
        (made || tracked.contains(&own)).then(|| Hierarchy {
            top: entry.mount_point.clone(),
            version_2,
            own: own.to_owned(),
            made,
        })
    };
    mounts
        .entries
        .iter()
        .filter(|entry| {
            entry.root == Path::new("/") && matches!(entry.fs_type.as_str(), "cgroup" | "cgroup2")
        })
        .filter_map(of)
        .collect()
}

impl Hierarchy {
    /// Whether what is made at its top is outside the agent's own cgroup. The top that can be seen need not be the real
    /// one, which alone has no `cgroup.events` (version 2) or has `release_agent` (version 1): in a cgroup namespace, as
    /// nodes that are containers themselves have it, the agent must be somewhere below.
    fn leads_outside(&self) -> bool {
        let real_top = match self.version_2 {
            true => !self.top.join("cgroup.events").exists(),
            false => self.top.join("release_agent").exists(),
        };
        real_top || self.own.parent().is_some()
    }

    /// The file to enter by.
    fn procs(&self, name: &str) -> Result<PathBuf, String> {
        if !self.leads_outside() {
            return Err(format!("{} is the agent's own cgroup namespace", self.top.display()));
        }
        let directory = match self.made {
            true => self.top.join(PARENT).join(name),
            false => self.top.clone(),
        };
        if self.made {
            std::fs::create_dir_all(&directory).map_err(|e| format!("{}: {e}", directory.display()))?;
        }
        Ok(directory.join("cgroup.procs"))
    }
}

/// The hierarchies as they are now.
fn found(mounts: &MountTable) -> Result<Vec<Hierarchy>> {
    let own = std::fs::read_to_string(OWN).map_err(failed("read", OWN))?;
    Ok(hierarchies(mounts, &own))
}

/// Makes the cgroups and opens the files to enter them by.
///
/// # Errors
/// Why there are none, in words.
pub(super) fn make(mounts: &MountTable, name: &str) -> Result<Vec<OwnedFd>, String> {
    let found = found(mounts).map_err(|error| error.to_string())?;
    if found.is_empty() {
        return Err("no cgroup hierarchy is mounted".to_owned());
    }
    found
        .iter()
        .map(|hierarchy| {
            let procs = hierarchy.procs(name)?;
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
        for hierarchy in found(&*self.mounts()?)?.iter().filter(|h| h.made && h.leads_outside()) {
            let parent = hierarchy.top.join(PARENT);
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

    fn tops(mounts: &[MountEntry], own: &str) -> Vec<(PathBuf, PathBuf, bool)> {
        let table = MountTable { entries: mounts.to_vec() };
        hierarchies(&table, own).into_iter().map(|h| (h.top, h.own, h.made)).collect()
    }

    fn hybrid() -> Vec<MountEntry> {
        vec![
            mounted("cgroup2", "/", "/sys/fs/cgroup/unified", &["rw"]),
            mounted("cgroup", "/", "/sys/fs/cgroup/systemd", &["rw", "xattr", "name=systemd"]),
            mounted("cgroup", "/", "/sys/fs/cgroup/pids", &["rw", "pids"]),
            mounted("cgroup", "/", "/sys/fs/cgroup/memory", &["rw", "memory"]),
            mounted("cgroup", "/", "/sys/fs/cgroup/cpu,cpuacct", &["rw", "cpu", "cpuacct"]),
        ]
    }

    #[test]
    fn on_a_host_of_version_2_there_is_one_hierarchy() {
        let mounts = [mounted("cgroup2", "/", "/sys/fs/cgroup", &["rw"])];
        let found = tops(&mounts, "0::/system.slice/union-csi.service\n");
        assert_eq!(found, [("/sys/fs/cgroup".into(), "/system.slice/union-csi.service".into(), true)]);
        let part = [mounted("cgroup2", "/../..", "/sys/fs/cgroup", &["rw"])];
        assert!(tops(&part, "0::/\n").is_empty(), "a container's view of its own cgroup");
    }

    #[test]
    fn on_other_hosts_the_hierarchies_that_track_processes_are_left_and_limits_of_another_path_stay() {
        let own = "5:memory:/limits\n4:cpu,cpuacct:/\n3:pids:/unit\n2:name=systemd:/unit\n0::/unit\n";
        let found: Vec<PathBuf> = tops(&hybrid(), own).into_iter().map(|(top, _, _)| top).collect();
        assert_eq!(found, ["unified", "systemd", "pids"].map(|h| PathBuf::from("/sys/fs/cgroup").join(h)));
    }

    #[test]
    fn a_containers_cgroups_are_left_in_every_hierarchy() {
        let own = "5:memory:/kubepods/pod1/c\n4:cpu,cpuacct:/kubepods/pod1/c\n3:pids:/kubepods/pod1/c\n\
                   2:name=systemd:/kubepods/pod1/c\n0::/\n";
        let found = tops(&hybrid(), own);
        let made: Vec<bool> = found.iter().map(|(_, _, made)| *made).collect();
        assert_eq!(made, [true, true, true, false, false], "{found:?}");
        assert_eq!(found[4].1, Path::new("/kubepods/pod1/c"));
    }

    #[test]
    fn the_top_of_a_cgroup_namespace_leads_outside_only_where_the_agent_is_below_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cgroup.events"), "").unwrap();
        let at = |own: &str| Hierarchy {
            top: dir.path().to_owned(),
            version_2: true,
            own: own.into(),
            made: true,
        };
        assert!(at("/").procs("one").unwrap_err().contains("own cgroup namespace"));
        assert!(at("/kubepods/pod1/c").procs("one").is_ok());
        std::fs::remove_file(dir.path().join("cgroup.events")).unwrap();
        assert!(at("/").procs("one").is_ok(), "the real top");
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
