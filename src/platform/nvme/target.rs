//! The kernel's NVMe target, by its tree in configfs (`nvmet/`).
//!
//! The whole tree is read as one value; it is changed by single [`Step`]s, each of which may be repeated. Which steps, and in
//! which order, is decided elsewhere. Whoever reads to change takes [`Nvme::lock_target`] first: the steps of two writers
//! would mix.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::{Nvme, attribute};
use crate::platform::{HostError, Result, failed};

/// How long another writer may keep the lock: some writes that wait for a slow disk.
const LOCK_BOUND: Duration = Duration::from_secs(60);
/// How often the lock is tried meanwhile.
const LOCK_STEP: Duration = Duration::from_millis(20);

/// What this machine's target has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetView {
    /// By NQN.
    pub subsystems: BTreeMap<String, Subsystem>,
    /// By NQN: who may be allowed.
    pub hosts: BTreeMap<String, HostEntry>,
    /// Listeners, by number.
    pub ports: BTreeMap<u16, Port>,
}

/// One subsystem: what a host connects to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subsystem {
    /// Everybody may connect.
    pub allow_any_host: bool,
    /// Serial number.
    pub serial: String,
    /// Model; empty where this kernel has no such attribute.
    pub model: String,
    /// NQNs of the hosts that may connect.
    pub allowed: BTreeSet<String>,
    /// By number.
    pub namespaces: BTreeMap<u32, Namespace>,
}

/// One block device of a subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Namespace {
    /// File or device behind it; empty where none was set.
    pub path: String,
    /// What tells it from all others.
    pub uuid: String,
    /// Through the page cache.
    pub buffered: bool,
    /// It takes requests.
    pub enabled: bool,
}

/// A host that may be allowed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct HostEntry {
    /// This kernel can ask hosts for a key.
    pub authenticates: bool,
    /// The key that the host must have; empty for none.
    pub key: String,
    /// The key that this machine must have; empty for none.
    pub controller_key: String,
}

impl fmt::Debug for HostEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = !self.key.is_empty();
        f.debug_struct("HostEntry")
            .field("authenticates", &self.authenticates)
            .field("has_key", &keys)
            .finish()
    }
}

/// A listener; it listens while a subsystem is linked to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Port {
    /// `addr_trtype`.
    pub transport: String,
    /// `addr_adrfam`.
    pub family: String,
    /// `addr_traddr`.
    pub address: String,
    /// `addr_trsvcid`.
    pub service: String,
    /// It takes connections with TLS, and no others (`addr_tsas`, `addr_treq`).
    pub encrypts: bool,
    /// NQNs of the subsystems that are reached there.
    pub linked: BTreeSet<String>,
}

impl Port {
    /// Where it listens, if by TCP.
    #[must_use]
    pub fn listens(&self) -> Option<SocketAddr> {
        let address: IpAddr = self.address.parse().ok()?;
        let service = self.service.parse().ok()?;
        (self.transport == "tcp").then_some(SocketAddr::new(address, service))
    }
}

/// What a namespace has behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backing {
    /// A regular file, not a block device.
    pub is_file: bool,
    /// Size in bytes.
    pub size: u64,
}

/// How much of a subsystem is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Who may connect, and nothing else.
    Allowed,
    /// It is left out.
    Nothing,
}

/// One change; paths are below `nvmet/`.
#[derive(Clone, PartialEq, Eq)]
pub enum Step {
    /// mkdir(2); what exists stays.
    Make(PathBuf),
    /// Writes an attribute.
    Write(PathBuf, String),
    /// Makes `.0` a symlink to `.1`; what exists stays.
    Link(PathBuf, PathBuf),
    /// Removes a symlink; what is missing is removed already.
    Unlink(PathBuf),
    /// rmdir(2), with everything that the kernel keeps below; what is missing is removed already.
    Remove(PathBuf),
}

impl Step {
    /// What it changes.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Make(path)
            | Self::Write(path, _)
            | Self::Link(path, _)
            | Self::Unlink(path)
            | Self::Remove(path) => path,
        }
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path().display();
        match self {
            Self::Make(_) => write!(f, "mkdir {path}"),
            Self::Write(_, _) if self.path().to_string_lossy().contains("dhchap_") => {
                write!(f, "write {path} (secret)")
            }
            Self::Write(_, value) => write!(f, "write {path} {value}"),
            Self::Link(_, to) => write!(f, "link {path} {}", to.display()),
            Self::Unlink(_) => write!(f, "unlink {path}"),
            Self::Remove(_) => write!(f, "rmdir {path}"),
        }
    }
}

impl Nvme {
    fn target_root(&self) -> PathBuf {
        self.files.configfs.join("nvmet")
    }

    /// What the target has; `None` where the kernel has no target (configfs not mounted, or `nvmet` not loaded). What goes
    /// away while it is read is left out.
    ///
    /// # Errors
    /// The tree cannot be read.
    pub fn target(&self) -> Result<Option<TargetView>> {
        self.target_of(|_| Part::Whole)
    }

    /// The same with no more of each subsystem than is wanted: a whole one is a dozen files, and a node may export a thousand.
    ///
    /// # Errors
    /// The tree cannot be read.
    pub fn target_of(&self, wanted: impl Fn(&str) -> Part) -> Result<Option<TargetView>> {
        let root = self.target_root();
        self.host.enter("read target", &root)?;
        if !root.join("subsystems").is_dir() {
            return Ok(None);
        }
        let mut view = TargetView::default();
        for nqn in self.names(&root.join("subsystems"))? {
            let at = root.join("subsystems").join(&nqn);
            let subsystem = match wanted(&nqn) {
                Part::Whole => self.subsystem(&at)?,
                Part::Allowed => Subsystem { allowed: self.allowed(&at)?, ..Subsystem::default() },
                Part::Nothing => continue,
            };
            view.subsystems.insert(nqn, subsystem);
        }
        for nqn in self.names(&root.join("hosts"))? {
            let host = host_entry(&root.join("hosts").join(&nqn))?;
            view.hosts.insert(nqn, host);
        }
        for name in self.names(&root.join("ports"))? {
            let Ok(number) = name.parse() else { continue };
            view.ports.insert(number, self.port(&root.join("ports").join(&name))?);
        }
        Ok(Some(view))
    }

    fn subsystem(&self, at: &Path) -> Result<Subsystem> {
        let text = |name: &str| attribute(&at.join(name)).map(Option::unwrap_or_default);
        let mut subsystem = Subsystem {
            allow_any_host: text("attr_allow_any_host")? == "1",
            serial: text("attr_serial")?,
            model: text("attr_model")?,
            allowed: self.allowed(at)?,
            namespaces: BTreeMap::new(),
        };
        for name in self.names(&at.join("namespaces"))? {
            let Ok(number) = name.parse() else { continue };
            let at = at.join("namespaces").join(&name);
            let text = |name: &str| attribute(&at.join(name)).map(Option::unwrap_or_default);
            let namespace = Namespace {
                path: text("device_path")?,
                uuid: text("device_uuid")?,
                buffered: text("buffered_io")? == "1",
                enabled: text("enable")? == "1",
            };
            subsystem.namespaces.insert(number, namespace);
        }
        Ok(subsystem)
    }

    fn allowed(&self, at: &Path) -> Result<BTreeSet<String>> {
        Ok(self.names(&at.join("allowed_hosts"))?.into_iter().collect())
    }

    fn port(&self, at: &Path) -> Result<Port> {
        let text = |name: &str| attribute(&at.join(name)).map(Option::unwrap_or_default);
        Ok(Port {
            transport: text("addr_trtype")?,
            family: text("addr_adrfam")?,
            address: text("addr_traddr")?,
            service: text("addr_trsvcid")?,
            encrypts: text("addr_tsas")? == "tls1.3" && text("addr_treq")? == "required",
            linked: self.names(&at.join("subsystems"))?.into_iter().collect(),
        })
    }

    /// What the image at `path` is.
    ///
    /// # Errors
    /// It is neither file nor block device, or cannot be looked at.
    pub fn backing(&self, path: &Path) -> Result<Backing> {
        self.host.enter("stat", path)?;
        let meta = std::fs::metadata(path).map_err(failed("stat", path))?;
        if meta.is_file() {
            return Ok(Backing { is_file: true, size: meta.len() });
        }
        let unexpected = |reason: &str| HostError::Unexpected {
            subject: path.display().to_string(),
            reason: reason.to_owned(),
        };
        if !meta.file_type().is_block_device() {
            return Err(unexpected("it is neither a file nor a block device"));
        }
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let sectors = attribute(&self.files.sys.join(format!("dev/block/{major}:{minor}/size")))?;
        let sectors: u64 =
            sectors.and_then(|s| s.parse().ok()).ok_or_else(|| unexpected("sysfs tells no size"))?;
        // The kernel counts sectors of 512 bytes, whatever the device's are.
        Ok(Backing { is_file: false, size: sectors.saturating_mul(512) })
    }

    /// Takes the lock of those who change the target on this machine (flock(2) on the tree's directory, which every agent
    /// has, whatever its own directories are), waiting at most `LOCK_BOUND`. Held until the descriptor is closed.
    ///
    /// # Errors
    /// The tree does not exist, or another writer keeps the lock.
    pub fn lock_target(&self) -> Result<OwnedFd> {
        let root = self.target_root();
        self.host.enter("flock", &root)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&root, flags, Mode::empty()).map_err(failed("open", &root))?;
        let deadline = Instant::now() + LOCK_BOUND;
        loop {
            match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(fd),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_STEP)
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {
                    return Err(HostError::Timeout {
                        action: "waiting for another writer",
                        subject: root.display().to_string(),
                        seconds: LOCK_BOUND.as_secs(),
                    });
                }
                Err(errno) => return Err(failed("flock", &root)(errno)),
            }
        }
    }

    /// Takes one step.
    ///
    /// # Errors
    /// The errno of the call; EADDRINUSE, EADDRNOTAVAIL, EINVAL where linking a subsystem to a port has to begin listening.
    pub fn take(&self, step: &Step) -> Result<()> {
        let root = self.target_root();
        let path = root.join(step.path());
        let lenient = |done: io::Result<()>, errno: i32| match done {
            Err(error) if error.raw_os_error() == Some(errno) => Ok(()),
            done => done,
        };
        match step {
            Step::Make(_) => {
                self.effect("mkdir", &path, move |p| lenient(std::fs::create_dir(p), libc::EEXIST))
            }
            Step::Write(_, value) => self.write(&path, value),
            Step::Link(_, to) => {
                let to = root.join(to);
                self.effect("symlink", &path, move |p| {
                    lenient(std::os::unix::fs::symlink(&to, p), libc::EEXIST)
                })
            }
            Step::Unlink(_) => {
                self.effect("unlink", &path, move |p| lenient(std::fs::remove_file(p), libc::ENOENT))
            }
            Step::Remove(_) => {
                self.effect("rmdir", &path, move |p| lenient(std::fs::remove_dir(p), libc::ENOENT))
            }
        }
    }
}

fn host_entry(at: &Path) -> Result<HostEntry> {
    let key = attribute(&at.join("dhchap_key"))?;
    let controller_key = attribute(&at.join("dhchap_ctrl_key"))?;
    Ok(HostEntry {
        authenticates: at.join("dhchap_key").exists(),
        key: key.unwrap_or_default(),
        controller_key: controller_key.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Host;
    use crate::platform::nvme::KernelFiles;

    fn put(root: &Path, name: &str, value: &str) {
        let path = root.join("config/nvmet").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, value).unwrap();
    }

    #[test]
    fn a_kernel_without_a_target_is_told_from_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
        assert_eq!(nvme.target().unwrap(), None);
        assert!(nvme.lock_target().unwrap_err().is_missing());
        for name in ["subsystems", "hosts", "ports"] {
            std::fs::create_dir_all(dir.path().join("config/nvmet").join(name)).unwrap();
        }
        assert_eq!(nvme.target().unwrap(), Some(TargetView::default()));
    }

    #[test]
    fn the_tree_is_read_as_it_is_and_keys_are_never_printed() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        put(root, "subsystems/nqn.a/attr_allow_any_host", "0\n");
        put(root, "subsystems/nqn.a/attr_serial", "abc\n");
        put(root, "subsystems/nqn.a/namespaces/1/device_path", "(null)\n");
        put(root, "subsystems/nqn.a/namespaces/1/enable", "1\n");
        put(root, "subsystems/nqn.a/allowed_hosts/nqn.h", "");
        put(root, "hosts/nqn.h/dhchap_key", "DHHC-1:00:secret:\n");
        put(root, "ports/7/addr_trtype", "tcp\n");
        put(root, "ports/7/addr_traddr", "fd00::1\n");
        put(root, "ports/7/addr_trsvcid", "4420\n");
        put(root, "ports/7/subsystems/nqn.a", "");
        for (port, required) in [(8, "required"), (9, "not required")] {
            put(root, &format!("ports/{port}/addr_tsas"), "tls1.3\n");
            put(root, &format!("ports/{port}/addr_treq"), &format!("{required}\n"));
        }
        let view = Nvme::at(&Host::new(), KernelFiles::below(root)).target().unwrap().unwrap();
        let subsystem = &view.subsystems["nqn.a"];
        assert!(!subsystem.allow_any_host && subsystem.allowed.contains("nqn.h"));
        assert_eq!((subsystem.namespaces[&1].path.as_str(), subsystem.namespaces[&1].enabled), ("", true));
        assert_eq!(view.ports[&7].listens(), Some("[fd00::1]:4420".parse().unwrap()));
        let encrypt: Vec<_> = view.ports.iter().filter(|(_, port)| port.encrypts).map(|(n, _)| *n).collect();
        assert_eq!(encrypt, [8], "one that takes both does not");
        assert!(view.hosts["nqn.h"].authenticates);
        assert!(!format!("{view:?}").contains("secret"));
        assert!(
            !format!("{:?}", Step::Write("hosts/nqn.h/dhchap_key".into(), "secret!".into()))
                .contains("secret!")
        );
    }

    #[test]
    fn of_subsystems_no_more_is_read_than_is_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for nqn in ["nqn.a", "nqn.b", "nqn.c"] {
            put(root, &format!("subsystems/{nqn}/attr_serial"), "abc\n");
            put(root, &format!("subsystems/{nqn}/allowed_hosts/nqn.h"), "");
            put(root, &format!("ports/7/subsystems/{nqn}"), "");
        }
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
        let part = |nqn: &str| match nqn {
            "nqn.a" => Part::Whole,
            "nqn.b" => Part::Allowed,
            _ => Part::Nothing,
        };
        let view = nvme.target_of(part).unwrap().unwrap();
        assert_eq!(view.subsystems.keys().collect::<Vec<_>>(), ["nqn.a", "nqn.b"]);
        assert_eq!(view.subsystems["nqn.a"].serial, "abc");
        let b = &view.subsystems["nqn.b"];
        assert!(b.serial.is_empty() && b.allowed.contains("nqn.h"));
        assert_eq!(view.ports[&7].linked.len(), 3, "listeners are told whole");
    }

    #[test]
    fn steps_can_be_repeated_and_never_make_an_attribute() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        put(root, "hosts/h/attribute", "");
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
        for _ in 0..2 {
            nvme.take(&Step::Make("subsystems".into())).unwrap();
            nvme.take(&Step::Link("subsystems/h".into(), "hosts/h".into())).unwrap();
            nvme.take(&Step::Write("subsystems/h/attribute".into(), "x".into())).unwrap();
        }
        assert_eq!(std::fs::read_to_string(root.join("config/nvmet/hosts/h/attribute")).unwrap(), "x");
        assert!(nvme.take(&Step::Write("hosts/h/other".into(), "x".into())).unwrap_err().is_missing());
        for _ in 0..2 {
            nvme.take(&Step::Unlink("subsystems/h".into())).unwrap();
            nvme.take(&Step::Remove("subsystems".into())).unwrap();
        }
    }

    #[test]
    fn one_writer_waits_for_another() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("config/nvmet")).unwrap();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
        let held = nvme.lock_target().unwrap();
        let (entered, seen) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lock = nvme.lock_target().unwrap();
                entered.send(()).unwrap();
                drop(lock);
            });
            assert!(seen.recv_timeout(Duration::from_millis(100)).is_err());
            drop(held);
            seen.recv_timeout(Duration::from_secs(30)).unwrap();
        });
    }
}
