//! The kernel's NVMe initiator: connecting by one write to `/dev/nvme-fabrics`, everything after that by sysfs.
//!
//! Block devices are found by the subsystem and the uuid that sysfs tells, never by the number in their names.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Nvme, attribute, write_once};
use crate::platform::{HostError, Result, failed};

/// How long connecting may take: an address that drops packets costs the kernel 3 s, one that accepts and then says nothing
/// more, and one whose disk is slow to open. While one connects, all others on this machine wait (one lock in the kernel).
const CONNECT_BOUND: Duration = Duration::from_secs(25);

/// A connection's state, as sysfs spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControllerState {
    /// `live`.
    Live,
    /// `new`, `resetting`, `connecting`: the kernel tries, requests wait.
    Trying,
    /// `deleting`, `deleting (no IO)`, `dead`, or unknown: it goes.
    Going,
}

impl ControllerState {
    fn parse(text: &str) -> Self {
        match text {
            "live" => Self::Live,
            "new" | "resetting" | "connecting" | "reconnecting" => Self::Trying,
            _ => Self::Going,
        }
    }
}

/// A connection by TCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its name in sysfs, `nvmeN`; good as long as it exists.
    pub name: String,
    /// The subsystem that it is connected to.
    pub nqn: String,
    /// The host NQN that it was made with; `None` where this kernel does not tell.
    pub host: Option<String>,
    /// How it stands.
    pub state: ControllerState,
    /// Where to; only told of live ones, because reading it while the connection is being made anew crashed old kernels.
    pub address: Option<SocketAddr>,
}

/// A block device of a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeDevice {
    /// Its name in sysfs.
    pub name: String,
    /// Its subsystem.
    pub nqn: String,
    /// Its node.
    pub path: PathBuf,
    /// Its uuid; empty where the owner gave none.
    pub uuid: String,
    /// Major and minor number.
    pub device: (u32, u32),
    /// One of several paths to the device, which cannot be opened.
    pub hidden: bool,
}

impl Nvme {
    fn fabrics(&self) -> PathBuf {
        self.files.dev.join("nvme-fabrics")
    }

    /// The names of the options that this kernel's initiator knows; `None` where the device does not exist.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn connect_options(&self) -> Result<Option<BTreeSet<String>>> {
        let path = self.fabrics();
        self.host.enter("read", &path)?;
        let text = match read_some(&path) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
                return Ok(None);
            }
            text => text.map_err(failed("read", &path))?,
        };
        Ok(Some(parse_options(&text)))
    }

    /// Connects with these options, those without a value being empty, and answers with the connection's name.
    ///
    /// # Errors
    /// The errno of the write: EALREADY connected; EIO not allowed, or no such subsystem there; ECONNREFUSED no listener;
    /// ETIMEDOUT no answer; ENOKEY a key is wanted; EINVAL an option is not known, or the host id is in use with another host
    /// NQN. [`HostError::Timeout`]; a connection that is made after that is ended at once.
    pub fn connect(&self, nqn: &str, options: &[(&str, String)]) -> Result<String> {
        let path = self.fabrics();
        self.host.enter("connect", &path)?;
        let spelled = |(name, value): &(&str, String)| match value.as_str() {
            "" => (*name).to_owned(),
            value => format!("{name}={value}"),
        };
        let line = options.iter().map(spelled).collect::<Vec<_>>().join(",");
        // What the one who waits and the one who connects must agree on: whether anybody waits, and what was connected.
        let agreed: Arc<Mutex<(bool, Option<String>)>> = Arc::default();
        let (told, device, class) = (agreed.clone(), path.clone(), self.files.sys.join("class/nvme"));
        let work = move || -> io::Result<String> {
            let name = connect_once(&device, &line)?;
            let mut agreed = told.lock().unwrap_or_else(PoisonError::into_inner);
            if agreed.0 {
                let _ = write_once(&class.join(&name).join("delete_controller"), "1");
            } else {
                agreed.1 = Some(name.clone());
            }
            Ok(name)
        };
        // One that hangs must hold up only those who want the same subsystem.
        if let Some(done) = self.host.probes.ask(&path.join(nqn), CONNECT_BOUND, work)? {
            return done.map_err(failed("connect", &path));
        }
        let mut agreed = agreed.lock().unwrap_or_else(PoisonError::into_inner);
        agreed.0 = true;
        agreed.1.take().ok_or_else(|| HostError::Timeout {
            action: "connecting",
            subject: nqn.to_owned(),
            seconds: CONNECT_BOUND.as_secs(),
        })
    }

    /// All connections by TCP.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn controllers(&self) -> Result<Vec<Controller>> {
        let class = self.files.sys.join("class/nvme");
        self.host.enter("read controllers", &class)?;
        let mut found = Vec::new();
        for name in self.names(&class)? {
            found.extend(self.controller(&name)?);
        }
        Ok(found)
    }

    /// The state of one connection; `None` when it is gone.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn controller_state(&self, name: &str) -> Result<Option<ControllerState>> {
        let state = attribute(&self.files.sys.join("class/nvme").join(name).join("state"))?;
        Ok(state.map(|s| ControllerState::parse(&s)))
    }

    /// After how long without an answer the connection is given up, in seconds; -1 for never. The kernel counts attempts, see
    /// `reconnect_delay`. False where the connection is gone.
    ///
    /// # Errors
    /// The errno of the write.
    pub fn set_loss_timeout(&self, name: &str, seconds: i64) -> Result<bool> {
        let path = self.files.sys.join("class/nvme").join(name).join("ctrl_loss_tmo");
        present(self.write(&path, &seconds.to_string()))
    }

    /// Ends the connection; its block device goes, whoever uses it gets errors. False where it is gone already.
    ///
    /// # Errors
    /// The errno of the write; [`HostError::Timeout`] while requests of a peer that does not answer are waited for: the kernel
    /// goes on by itself.
    pub fn disconnect(&self, name: &str) -> Result<bool> {
        let path = self.files.sys.join("class/nvme").join(name).join("delete_controller");
        present(self.write(&path, "1"))
    }

    /// As [`Nvme::disconnect`], but returns after `bound` at the latest: false when the kernel is still at it.
    ///
    /// # Errors
    /// The errno of the write.
    pub fn disconnect_within(&self, name: &str, bound: Duration) -> Result<bool> {
        let path = self.files.sys.join("class/nvme").join(name).join("delete_controller");
        self.host.enter("write", &path)?;
        let file = path.clone();
        match self.host.probes.ask(&path, bound, move || write_once(&file, "1"))? {
            Some(done) => present(done.map_err(failed("write", &path))).map(|_| true),
            None => Ok(false),
        }
    }

    /// The connections by TCP to one subsystem: of the others nothing but their subsystem is read.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn controllers_of(&self, nqn: &str) -> Result<Vec<Controller>> {
        let class = self.files.sys.join("class/nvme");
        self.host.enter("read controllers", &class)?;
        let mut found = Vec::new();
        for name in self.names(&class)? {
            if attribute(&class.join(&name).join("subsysnqn"))?.as_deref() == Some(nqn) {
                found.extend(self.controller(&name)?);
            }
        }
        Ok(found)
    }

    /// One connection by TCP; `None` where it is gone, or is none.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn controller(&self, name: &str) -> Result<Option<Controller>> {
        let at = self.files.sys.join("class/nvme").join(name);
        if attribute(&at.join("transport"))?.as_deref() != Some("tcp") {
            return Ok(None);
        }
        let Some(nqn) = attribute(&at.join("subsysnqn"))? else { return Ok(None) };
        let Some(state) = attribute(&at.join("state"))? else { return Ok(None) };
        let state = ControllerState::parse(&state);
        let address = match state {
            ControllerState::Live => attribute(&at.join("address"))?.and_then(|a| parse_address(&a)),
            ControllerState::Trying | ControllerState::Going => None,
        };
        let host = attribute(&at.join("hostnqn"))?;
        Ok(Some(Controller { name: name.to_owned(), nqn, host, state, address }))
    }

    /// The block devices of all subsystems, hidden ones too.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn devices(&self) -> Result<Vec<NvmeDevice>> {
        self.devices_if(|_| true)
    }

    /// The block devices of a subsystem, hidden ones too.
    ///
    /// # Errors
    /// sysfs cannot be read.
    pub fn subsystem_devices(&self, nqn: &str) -> Result<Vec<NvmeDevice>> {
        self.devices_if(|found| found == nqn)
    }

    fn devices_if(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<NvmeDevice>> {
        let block = self.files.sys.join("block");
        self.host.enter("read devices", &block)?;
        let mut found = Vec::new();
        for name in self.names(&block)?.into_iter().filter(|n| n.starts_with("nvme")) {
            found.extend(self.device(&name, &wanted)?);
        }
        Ok(found)
    }

    /// A block device, if it is of a subsystem that is wanted.
    fn device(&self, name: &str, wanted: impl Fn(&str) -> bool) -> Result<Option<NvmeDevice>> {
        let at = self.files.sys.join("block").join(name);
        // The device above is the subsystem where the kernel joins paths, else the controller; both have the attribute.
        let nqn = attribute(&at.join("device/subsysnqn"))?;
        let Some(nqn) = nqn.filter(|nqn| wanted(nqn)) else { return Ok(None) };
        let uuid = attribute(&at.join("uuid"))?.unwrap_or_default();
        let hidden = attribute(&at.join("hidden"))?.as_deref() == Some("1");
        let node = attribute(&at.join("uevent"))?
            .and_then(|e| e.lines().find_map(|l| l.strip_prefix("DEVNAME=").map(str::to_owned)));
        let path = self.files.dev.join(node.unwrap_or_else(|| name.to_owned()));
        let device = attribute(&at.join("dev"))?.and_then(|d| numbers(&d)).unwrap_or_default();
        Ok(Some(NvmeDevice { name: name.to_owned(), nqn, path, uuid, device, hidden }))
    }

    /// Limits the size of one request to these devices, where they take larger ones.
    ///
    /// # Errors
    /// The errno of the write.
    pub fn limit_requests(&self, devices: &[NvmeDevice], kib: u32) -> Result<()> {
        for device in devices {
            let path = self.files.sys.join("block").join(&device.name).join("queue/max_sectors_kb");
            let now = attribute(&path)?.and_then(|v| v.parse::<u32>().ok());
            if now.is_some_and(|now| now > kib) {
                present(self.write(&path, &kib.to_string()))?;
            }
        }
        Ok(())
    }

    /// Hides from everybody but root what a connection proves to have: the kernel shows it to all (`dhchap_secret`, mode 0644), and
    /// sysfs is seen in containers. chmod(2); what this kernel does not have, or is gone, is hidden already.
    ///
    /// # Errors
    /// The errno of the call.
    pub fn hide_keys(&self, controller: &str) -> Result<()> {
        let at = self.files.sys.join("class/nvme").join(controller);
        for name in ["dhchap_secret", "dhchap_ctrl_secret"] {
            let path = at.join(name);
            self.host.enter("chmod", &path)?;
            present(
                rustix::fs::chmod(&path, rustix::fs::Mode::from_raw_mode(0o600))
                    .map_err(failed("chmod", &path)),
            )?;
        }
        Ok(())
    }

    /// Something has the device open for itself: a mount, an array (open(2) with `O_EXCL`). Only for a device that answers.
    ///
    /// # Errors
    /// The errno of the open(2), or no answer.
    pub fn device_busy(&self, device: &Path) -> Result<bool> {
        let open = |path: &Path| -> io::Result<bool> {
            let flags = rustix::fs::OFlags::RDONLY
                | rustix::fs::OFlags::EXCL
                | rustix::fs::OFlags::NONBLOCK
                | rustix::fs::OFlags::CLOEXEC;
            match rustix::fs::open(path, flags, rustix::fs::Mode::empty()) {
                Ok(_) => Ok(false),
                Err(rustix::io::Errno::BUSY) => Ok(true),
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NXIO | rustix::io::Errno::NODEV) => {
                    Ok(false)
                }
                Err(errno) => Err(errno.into()),
            }
        };
        self.effect("open", device, open)
    }
}

/// False where the object of a write is gone.
fn present(done: Result<()>) -> Result<bool> {
    match done {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn connect_once(device: &Path, line: &str) -> io::Result<String> {
    let mut file = OpenOptions::new().read(true).write(true).open(device)?;
    let written = file.write(line.as_bytes())?;
    if written != line.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    let mut answer = [0; 256];
    let read = file.read(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer[..read]);
    parse_instance(&answer)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("answered {answer:?}")))
}

/// The first 16 KiB: the list of options is shorter.
fn read_some(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(16 << 10).read_to_string(&mut text)?;
    Ok(text)
}

/// `transport=%s,traddr=%s,…`: the names. A kernel that does not list them answers with `instance=-1…` at most.
fn parse_options(text: &str) -> BTreeSet<String> {
    text.split([',', '\n'])
        .map(|option| option.split('=').next().unwrap_or_default().trim())
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// `instance=3,cntlid=1` tells of `nvme3`.
fn parse_instance(answer: &str) -> Option<String> {
    let number = answer.trim().split(',').find_map(|part| part.strip_prefix("instance="))?;
    number.parse::<u32>().ok().map(|n| format!("nvme{n}"))
}

/// `traddr=10.0.0.1,trsvcid=4420,src_addr=10.0.0.2`.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let part = |name: &str| text.split(',').find_map(|p| p.trim().strip_prefix(name));
    let address: IpAddr = part("traddr=")?.parse().ok()?;
    Some(SocketAddr::new(address, part("trsvcid=")?.parse().ok()?))
}

/// `259:3`.
fn numbers(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
#[path = "initiator/tests.rs"]
mod tests;
