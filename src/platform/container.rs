//! From a container to the host that runs it.
//!
//! A storage agent acts on its host: what it mounts must be seen by the kubelet and by every container, and must be there
//! when its own container is not. So an agent in a container opens what it needs of the container, while it is still one
//! thread, and then enters the namespaces of process 1: from there on every path is the host's. What it opened before is
//! reached by `/proc/self/fd`; files that are replaced in a kept directory are seen, so a rotated token is.
//!
//! Mount namespace and control group namespace are entered, as setns(2) has it. The process namespace cannot be: the
//! container has to share the host's (`hostPID`), also because the unions that it starts are to outlive it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use snafu::{ResultExt, Snafu};

use super::{Host, HostError};

/// Process 1's mount namespace.
const HOST_MOUNTS: &str = "/proc/1/ns/mnt";
/// Process 1's control group namespace.
const HOST_CGROUPS: &str = "/proc/1/ns/cgroup";
/// Process 1's root directory, which need not be that of its mount namespace.
const HOST_ROOT: &str = "/proc/1/root";

/// Whether to enter the host's namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Entry {
    /// Where this is a container: another mount namespace than process 1's, with another root directory.
    #[default]
    Auto,
    /// In any case; not to be able to is an error.
    Always,
    /// In no case.
    Never,
}

/// The host's namespaces cannot be entered.
#[derive(Debug, Snafu)]
pub enum EntryError {
    /// Process 1 is in the same mount namespace.
    #[snafu(display(
        "the agent is to act on its host, and sees no process of it: set hostPID: true in the pod's spec (or leave \
         --host-namespace out where there is no container)"
    ))]
    NoHostProcesses,
    /// The kernel forbids it.
    #[snafu(display(
        "the agent is to act on its host, and may not {action} {subject} ({source}): set securityContext.privileged: true in \
         the container and hostPID: true in the pod's spec, and leave hostUsers: false out"
    ))]
    Forbidden {
        /// What was to be done.
        action: &'static str,
        /// On what.
        subject: String,
        /// The errno.
        source: io::Error,
    },
    /// It failed otherwise.
    #[snafu(display("the agent is to act on its host, and cannot {action} {subject}: {source}"))]
    Failed {
        /// What was to be done.
        action: &'static str,
        /// On what.
        subject: String,
        /// The errno.
        source: io::Error,
    },
}

fn failed(action: &'static str, subject: impl AsRef<Path>) -> impl FnOnce(Errno) -> EntryError {
    move |errno| {
        let (subject, source) = (subject.as_ref().display().to_string(), io::Error::from(errno));
        match errno {
            Errno::PERM | Errno::ACCESS => EntryError::Forbidden { action, subject, source },
            _ => EntryError::Failed { action, subject, source },
        }
    }
}

/// Where the program acts, and what it kept of where it was started.
#[derive(Debug, Default)]
pub struct Surroundings {
    entered: bool,
    /// The working directory at the start, which relative paths were meant from.
    started_in: PathBuf,
    kept: Vec<(PathBuf, OwnedFd)>,
}

impl Surroundings {
    /// Whether it was a container, and the host was entered.
    #[must_use]
    pub const fn entered(&self) -> bool {
        self.entered
    }

    /// The path by which a file of the container is reached, where it, or a directory above it, was kept. Valid as long as
    /// this lives; the last component of a kept file's path is a symlink.
    #[must_use]
    pub fn kept(&self, original: &Path) -> Option<PathBuf> {
        let original = self.started_in.join(original);
        self.kept.iter().find_map(|(kept, fd)| {
            let below = original.strip_prefix(kept).ok()?;
            let path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
            Some(if below.as_os_str().is_empty() { path } else { path.join(below) })
        })
    }

    /// The same, or the path as it is: on a host, and for what only the host has.
    #[must_use]
    pub fn path(&self, original: &Path) -> PathBuf {
        self.kept(original).unwrap_or_else(|| original.to_owned())
    }
}

/// Enters the host's namespaces, as `entry` says, and keeps those files and directories of `keep` that exist. The working
/// directory is `/` afterwards, that of the host. To be called while the process has one thread.
///
/// # Errors
/// See [`EntryError`]. Nothing was entered then, or the process must end.
pub fn enter_host(entry: Entry, keep: &[PathBuf]) -> Result<Surroundings, EntryError> {
    let enter = match entry {
        Entry::Never => false,
        Entry::Auto => in_container(),
        Entry::Always if shares_mounts()? => return Err(EntryError::NoHostProcesses),
        Entry::Always => true,
    };
    if !enter {
        return Ok(Surroundings::default());
    }
    let started_in = std::env::current_dir()
        .context(FailedSnafu { action: "find", subject: "the working directory".to_owned() })?;
    let mut kept = Vec::new();
    for path in keep {
        let path = started_in.join(path);
        match rustix::fs::open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
            Ok(fd) => kept.push((path, fd)),
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed("open", &path)(errno)),
        }
    }
    let namespace = |path: &str| {
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed("open", path))
    };
    let (mounts, cgroups) = (namespace(HOST_MOUNTS)?, namespace(HOST_CGROUPS)?);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(HOST_ROOT, flags, Mode::empty()).map_err(failed("open", HOST_ROOT))?;
    let enter = |fd: &OwnedFd, kind, subject: &str| {
        setns(fd, kind).map_err(|errno| failed("enter", subject)(Errno::from_raw_os_error(errno as i32)))
    };
    // First the one without which the mounts of control groups show as parts of something (cgroup_namespaces(7)).
    enter(&cgroups, CloneFlags::CLONE_NEWCGROUP, HOST_CGROUPS)?;
    enter(&mounts, CloneFlags::CLONE_NEWNS, HOST_MOUNTS)?;
    // setns(2) leads to the namespace's own root, which is not what process 1 sees where it was started by chroot.
    rustix::process::fchdir(&root).map_err(failed("go to", HOST_ROOT))?;
    rustix::process::chroot(".").map_err(failed("change the root to", HOST_ROOT))?;
    Ok(Surroundings { entered: true, started_in, kept })
}

/// Whether process 1 is in this mount namespace.
fn shares_mounts() -> Result<bool, EntryError> {
    let read = |path: &str| rustix::fs::readlink(path, Vec::new()).map_err(failed("read", path));
    Ok(read(HOST_MOUNTS)? == read("/proc/self/ns/mnt")?)
}

/// Whether this looks like a container that sees its host. A service with mounts of its own has the host's root, and an
/// ordinary user may not look.
fn in_container() -> bool {
    let root = |path: &str| std::fs::metadata(path).map(|m| (m.dev(), m.ino()));
    let same_root = || match (root("/"), root(HOST_ROOT)) {
        (Ok(own), Ok(host)) => own == host,
        _ => true,
    };
    !shares_mounts().unwrap_or(true) && !same_root()
}

/// Devices without which some volumes cannot be served: path, what for, kernel module.
const DEVICES: [(&str, &str, &str); 2] = [
    ("/dev/fuse", "volumes of several branches", "fuse"),
    ("/dev/loop-control", "branches with a filesystem of their own", "loop"),
];

impl Host {
    /// Devices that this machine lacks or does not let the program open; each error says what for and what to do.
    #[must_use]
    pub fn missing_devices(&self) -> Vec<HostError> {
        DEVICES.iter().filter_map(|(path, purpose, module)| missing(path, purpose, module)).collect()
    }
}

fn missing(path: &str, purpose: &str, module: &str) -> Option<HostError> {
    let remedy = match rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => return None,
        Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => format!("modprobe {module} on the host"),
        Err(Errno::PERM | Errno::ACCESS) => {
            "the program may not open it: run it as root, in a container with securityContext.privileged: true".to_owned()
        }
        Err(errno) => format!("it cannot be opened: {errno}"),
    };
    Some(HostError::Unsupported { facility: format!("{path}, needed for {purpose}"), remedy })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_a_host_nothing_is_entered_and_paths_are_as_they_are() {
        for entry in [Entry::Auto, Entry::Never] {
            let here = enter_host(entry, &[PathBuf::from("/etc")]).unwrap();
            assert!(!here.entered(), "{entry:?}");
            assert_eq!(here.kept(Path::new("/etc/hosts")), None);
            assert_eq!(here.path(Path::new("agent.yaml")), Path::new("agent.yaml"));
        }
    }

    #[test]
    fn what_was_kept_is_reached_also_after_it_was_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let fd = rustix::fs::open(dir.path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let kept = vec![(dir.path().to_owned(), fd)];
        let surroundings = Surroundings { entered: true, started_in: dir.path().to_owned(), kept };
        let token = surroundings.kept(&dir.path().join("token")).unwrap();
        assert!(token.starts_with("/proc/self/fd"), "{}", token.display());
        // As the kubelet does it: a directory with the files, and a symlink to it that is replaced.
        for content in ["one", "two"] {
            std::fs::create_dir(dir.path().join(content)).unwrap();
            std::fs::write(dir.path().join(content).join("token"), content).unwrap();
            std::os::unix::fs::symlink(content, dir.path().join("..new")).unwrap();
            std::fs::rename(dir.path().join("..new"), dir.path().join("..data")).unwrap();
            let _ = std::os::unix::fs::symlink("..data/token", dir.path().join("token"));
            assert_eq!(std::fs::read_to_string(&token).unwrap(), content);
        }
        assert_eq!(surroundings.kept(Path::new("token")).unwrap(), token, "relative to where it was started");
        assert_eq!(surroundings.path(Path::new("/elsewhere")), Path::new("/elsewhere"));
        assert_eq!(surroundings.kept(dir.path()).unwrap().components().count(), 5);
    }

    #[test]
    fn what_may_not_be_entered_names_the_fields_of_the_manifest() {
        let told = failed("enter", HOST_MOUNTS)(Errno::PERM).to_string();
        assert!(
            told.contains("securityContext.privileged: true") && told.contains("hostPID: true"),
            "{told}"
        );
        assert!(EntryError::NoHostProcesses.to_string().contains("hostPID: true"));
    }

    #[test]
    fn a_missing_device_is_told_with_what_it_is_for_and_the_module() {
        assert!(missing("/dev/null", "nothing", "null").is_none());
        let told = missing("/dev/no-such-device", "volumes of several branches", "fuse").unwrap().to_string();
        assert!(told.contains("volumes of several branches") && told.contains("modprobe fuse"), "{told}");
    }
}
