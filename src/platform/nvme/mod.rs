//! NVMe over TCP, both ends in the kernel, driven by its files alone: the target's tree in configfs, the initiator's device
//! `/dev/nvme-fabrics`, and sysfs.
//!
//! - [`target`]: what this machine exports ([`target::TargetView`]), and single steps that change it.
//! - [`initiator`]: connections to other machines, and their block devices.
//! - [`probe`]: which of it this kernel has, and loading what it has as modules.
//!
//! Each write may hang in the kernel (a dead disk below an export, an owner that stopped answering), so each has a bound. A
//! write that hangs costs one thread however often it is tried, see [`crate::platform`].

pub mod initiator;
mod ping;
pub mod probe;
pub mod target;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Host, HostError, Result, failed};

/// How long one write to a kernel file may take. The slowest that succeeds waits for requests on a slow disk (`enable`), or
/// for the requests of a connection that is torn down (30 s, the block layer's own bound: `nvme_core.io_timeout`).
const WRITE_BOUND: Duration = Duration::from_secs(40);

/// Attributes are a page at most (sysfs, configfs).
const ATTRIBUTE_MAX: usize = 4096;

/// Where the kernel's files are. Tests give a tree of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFiles {
    /// Where configfs is mounted.
    pub configfs: PathBuf,
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// Where device nodes are.
    pub dev: PathBuf,
    /// Where proc is mounted.
    pub proc: PathBuf,
    /// The running kernel's modules: `/lib/modules/<release>`.
    pub modules: PathBuf,
}

impl KernelFiles {
    /// The files of the running kernel, `release` being its `uname -r`.
    #[must_use]
    pub fn running(release: &str) -> Self {
        Self {
            configfs: "/sys/kernel/config".into(),
            sys: "/sys".into(),
            dev: "/dev".into(),
            proc: "/proc".into(),
            modules: Path::new("/lib/modules").join(release),
        }
    }

    /// The same tree below another directory.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            configfs: root.join("config"),
            sys: root.join("sys"),
            dev: root.join("dev"),
            proc: root.join("proc"),
            modules: root.join("modules"),
        }
    }
}

/// The kernel's NVMe over TCP on this machine.
#[derive(Clone, Debug)]
pub struct Nvme {
    host: Host,
    files: KernelFiles,
}

impl Nvme {
    /// On this machine.
    ///
    /// # Errors
    /// The kernel's release is not understood.
    pub fn new(host: &Host) -> Result<Self> {
        let (release, _) = host.kernel()?;
        Ok(Self::at(host, KernelFiles::running(&release)))
    }

    /// With the kernel's files elsewhere.
    #[must_use]
    pub fn at(host: &Host, files: KernelFiles) -> Self {
        Self { host: host.clone(), files }
    }

    /// Runs `work`, which changes what is at `path`, within [`WRITE_BOUND`].
    fn effect<T: Send + 'static>(
        &self,
        call: &'static str,
        path: &Path,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.host.enter(call, path)?;
        let owned = path.to_owned();
        match self.host.probes.ask(path, WRITE_BOUND, move || work(&owned))? {
            Some(done) => done.map_err(failed(call, path)),
            None => Err(HostError::Timeout {
                action: call,
                subject: path.display().to_string(),
                seconds: WRITE_BOUND.as_secs(),
            }),
        }
    }

    /// Writes an attribute that exists, in one write.
    fn write(&self, path: &Path, value: &str) -> Result<()> {
        let value = value.to_owned();
        self.effect("write", path, move |path| write_once(path, &value))
    }

    /// The names in a directory, in order; none where it does not exist.
    fn names(&self, directory: &Path) -> Result<Vec<String>> {
        let names = self.host.directory_names(directory)?.unwrap_or_default();
        let mut names: Vec<String> = names.into_iter().filter_map(|n| n.into_string().ok()).collect();
        names.sort_unstable();
        Ok(names)
    }
}

/// One write(2), as attributes want it; never makes a file.
fn write_once(path: &Path, value: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).open(path)?;
    let written = file.write(value.as_bytes())?;
    if written == value.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// An attribute without its line end; `None` where it does not exist or its object is going away (ENOENT, ENODEV, ENXIO), and
/// for what the kernel writes as `(null)`.
fn attribute(path: &Path) -> Result<Option<String>> {
    let gone = |e: &io::Error| {
        matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO | libc::ENOTDIR))
    };
    let content = match std::fs::read(path) {
        Err(error) if gone(&error) => return Ok(None),
        content => content.map_err(failed("read", path))?,
    };
    if content.len() > ATTRIBUTE_MAX {
        return Err(HostError::Unexpected {
            subject: path.display().to_string(),
            reason: format!("it is longer than {ATTRIBUTE_MAX} bytes"),
        });
    }
    let text = String::from_utf8_lossy(&content).trim_end().to_owned();
    Ok((text != "(null)").then_some(text))
}
