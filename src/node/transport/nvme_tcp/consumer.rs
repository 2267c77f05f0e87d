//! The consumer's end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::tls::Tls;
use super::{HostIdentity, abilities, kernel, names};
use crate::node::transport::{
    Attached, Consumer, Endpoint, ExportId, Link, Patience, Secret, TransportError,
};
use crate::platform::keyring::KeySerial;
use crate::platform::nvme::Nvme;
use crate::platform::nvme::initiator::{Controller, ControllerState, NvmeDevice};
use crate::platform::{Host, HostError};

/// Seconds between two attempts to reach an owner that went away: with the kernel's default, 10 s, writers wait that much
/// longer than the owner did.
const RECONNECT_DELAY: u64 = 2;
/// Seconds after which a silent owner is noticed at the latest, twice.
const KEEP_ALIVE: u64 = 5;
/// Seconds that one attempt takes while nothing answers (measured).
const ATTEMPT: u64 = 3;
/// Connections for requests, each with a socket and a kernel thread's work at both ends. The kernel's default is one for each
/// processor, which a node with hundreds of branches and a hundred processors cannot carry.
const IO_QUEUES: u32 = 4;
/// KiB. Targets in the field fail requests of several MiB, and the kernel's target announces no limit.
const REQUEST_MAX: u32 = 1024;

/// How long an owner may take to take a connection: three times what a lost packet costs.
const LISTEN_BOUND: Duration = Duration::from_secs(3);
/// How long a connection that exists may take to be live, and a device to appear on one that is.
const APPEAR_BOUND: Duration = Duration::from_secs(15);
/// How long a connection may take to go after it was told to.
const GO_BOUND: Duration = Duration::from_secs(30);
/// How long [`Consumer::force_detach`] waits; the kernel goes on by itself after that.
const FORCE_BOUND: Duration = Duration::from_secs(5);
/// Until sysfs is read again meanwhile: what is waited for takes milliseconds as a rule. Doubled each time, up to the longest.
const FIRST_STEP: Duration = Duration::from_millis(1);
const LONGEST_STEP: Duration = Duration::from_millis(50);

/// Attaches images of other nodes.
#[derive(Clone, Debug)]
pub struct NvmeConsumer {
    host: Host,
    nvme: Nvme,
    identity: HostIdentity,
    /// What encrypted connections need; `None`: there are none here.
    tls: Option<Tls>,
}

impl NvmeConsumer {
    /// Attaches in the name of `identity`.
    #[must_use]
    pub fn new(host: &Host, nvme: Nvme, identity: HostIdentity) -> Self {
        Self { host: host.clone(), nvme, identity, tls: None }
    }

    /// Attaches encrypted what has a key for that.
    #[must_use]
    pub fn encrypting(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// The kernel's number of the key by which the connection is to be encrypted; `None` where it is not to be.
    fn tls_key(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
    ) -> Result<Option<KeySerial>, TransportError> {
        let Some(secret) = secret.filter(|secret| secret.tls().is_some()) else { return Ok(None) };
        let tls = self.tls.as_ref().ok_or_else(|| TransportError::Readable {
            branch: id.branch.clone(),
            reason: "this node encrypts nothing".to_owned(),
        })?;
        tls.ready(&id.branch)?;
        tls.keep(&id.branch, &self.identity.nqn, &endpoint.name, Some(secret)).map(Some)
    }

    /// Takes out the key of a connection that is ended.
    fn forget_key(&self, nqn: &str) {
        if let Some(tls) = &self.tls
            && let Err(error) = tls.forget(nqn)
        {
            tracing::warn!(%error, nqn, "a key that is no longer used stays in the kernel's keyring");
        }
    }

    fn controllers(&self, nqn: &str) -> Result<Vec<Controller>, TransportError> {
        self.nvme.controllers_of(nqn).map_err(kernel("read the NVMe connections"))
    }

    fn devices(&self, nqn: &str) -> Result<Vec<NvmeDevice>, TransportError> {
        let all = self.nvme.subsystem_devices(nqn).map_err(kernel("read the NVMe devices"))?;
        Ok(all.into_iter().filter(|d| !d.hidden).collect())
    }

    /// The connection that was just made, or all there are where another call made it.
    fn made(&self, nqn: &str, made: Option<&str>) -> Result<Vec<Controller>, TransportError> {
        let Some(name) = made else { return self.controllers(nqn) };
        let one = self.nvme.controller(name).map_err(kernel("read the NVMe connections"))?;
        Ok(one.into_iter().filter(|c| c.nqn == nqn).collect())
    }

    /// Connects, and answers with the connection's name; `None` where another call was faster.
    fn connect(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
        patience: Patience,
    ) -> Result<Option<String>, TransportError> {
        const ACTION: &str = "attach branches over NVMe/TCP";
        let key = self.tls_key(id, endpoint, secret)?;
        let options = connect_options(&self.identity, endpoint, secret, key, patience);
        let known =
            self.nvme.connect_options().map_err(kernel("read /dev/nvme-fabrics"))?.unwrap_or_default();
        if let Some((lacking, _)) = options.iter().find(|(name, _)| !known.contains(*name)) {
            let reason =
                format!("this kernel's initiator does not know the option {lacking}: use Linux 6.1 or later");
            return Err(TransportError::Unable { action: ACTION, reason });
        }
        // While the kernel connects to one owner, nobody on this machine connects to any: not to those that are away.
        self.host
            .tcp_listens(endpoint.address, LISTEN_BOUND)
            .map_err(|error| refusal(id, endpoint, secret.is_some(), error))?;
        match self.nvme.connect(&endpoint.name, &options) {
            Ok(name) => Ok(Some(name)),
            Err(error) if error.errno() == Some(Errno::ALREADY.raw_os_error()) => Ok(None),
            Err(error) => Err(refusal(id, endpoint, secret.is_some(), error)),
        }
    }

    /// Nobody but root sees what is proven to the owner. What stays seen is no reason to go without the branch.
    fn hide_keys(&self, controllers: &[Controller]) {
        for controller in controllers {
            if let Err(error) = self.nvme.hide_keys(&controller.name) {
                tracing::warn!(%error, controller = controller.name, "everybody on this node can read a key from sysfs");
            }
        }
    }

    /// Waits for the connection to be live and its device to be there, and for the right one.
    fn appear(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        made: Option<&str>,
    ) -> Result<Attached, TransportError> {
        let deadline = Instant::now() + APPEAR_BOUND;
        let mut steps = steps();
        let uuid = names::uuid(id);
        loop {
            let controllers = self.made(&endpoint.name, made)?;
            let unreachable = |reason: &str| TransportError::Unreachable {
                endpoint: endpoint.address.to_string(),
                reason: reason.to_owned(),
            };
            let live = controllers.iter().any(|c| c.state == ControllerState::Live);
            if controllers.iter().all(|c| c.state == ControllerState::Going) {
                return Err(unreachable("it ended the connection"));
            }
            let devices = self.devices(&endpoint.name)?;
            if let Some(other) = devices.iter().find(|d| d.uuid != uuid).filter(|_| live) {
                return Err(TransportError::Foreign {
                    endpoint: endpoint.address.to_string(),
                    branch: id.branch.clone(),
                    reason: format!("its device has uuid {:?} instead of {uuid}", other.uuid),
                });
            }
            if let Some(device) = devices.into_iter().find(|d| d.path.exists()).filter(|_| live) {
                let limited = self.nvme.limit_requests(std::slice::from_ref(&device), REQUEST_MAX);
                limited.map_err(kernel("limit the size of requests"))?;
                let endpoint = Some(endpoint.clone());
                return Ok(Attached { id: id.clone(), endpoint, at: Some(device.path), link: Link::Live });
            }
            if Instant::now() > deadline {
                return Err(unreachable(if live {
                    "it shows no device"
                } else {
                    "the connection does not become live"
                }));
            }
            std::thread::sleep(steps.next().unwrap_or(LONGEST_STEP));
        }
    }

    fn wait_gone(&self, id: &ExportId, names: &[String]) -> Result<(), TransportError> {
        let deadline = Instant::now() + GO_BOUND;
        let mut steps = steps();
        for name in names {
            while self.nvme.controller_state(name).map_err(kernel("read the NVMe connections"))?.is_some() {
                // The number may be another connection's by now.
                let nqn = names::subsystem(id)?;
                if !self.made(&nqn, Some(name))?.iter().any(|c| c.state == ControllerState::Going) {
                    break;
                }
                if Instant::now() > deadline {
                    let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
                    return Err(TransportError::Kernel { action: format!("wait for {name} to go"), source });
                }
                std::thread::sleep(steps.next().unwrap_or(LONGEST_STEP));
            }
        }
        Ok(())
    }

    /// The kernel knows whether the owner of a live connection is there.
    fn ensure_noticed(&self, controller: &Controller) -> Result<(), TransportError> {
        if controller.state == ControllerState::Live
            && !self.nvme.ping(&controller.name).map_err(kernel("ask an owner whether it is there"))?
        {
            tracing::debug!(controller = %controller.name, "the owner of a branch that is detached does not answer");
        }
        Ok(())
    }

    /// A mount or another user has the device.
    fn in_use(&self, device: &NvmeDevice, live: bool) -> Result<bool, TransportError> {
        let mounts = self.host.mounts().map_err(kernel("read the mounts"))?;
        if mounts.entries.iter().any(|m| m.device == device.device) {
            return Ok(true);
        }
        // Opening asks the device, so only one that answers.
        if live {
            self.nvme.device_busy(&device.path).map_err(kernel("look who uses the device"))
        } else {
            Ok(false)
        }
    }
}

/// How long to wait before each further look.
fn steps() -> impl Iterator<Item = Duration> {
    std::iter::successors(Some(FIRST_STEP), |step| Some((*step * 2).min(LONGEST_STEP)))
}

/// The options of a connection, in the kernel's words.
fn connect_options(
    identity: &HostIdentity,
    endpoint: &Endpoint,
    secret: Option<&Secret>,
    tls: Option<KeySerial>,
    patience: Patience,
) -> Vec<(&'static str, String)> {
    let mut options = vec![
        ("transport", "tcp".to_owned()),
        ("traddr", endpoint.address.ip().to_string()),
        ("trsvcid", endpoint.address.port().to_string()),
        ("nqn", endpoint.name.clone()),
        ("hostnqn", identity.nqn.clone()),
        ("hostid", identity.id.clone()),
        ("reconnect_delay", RECONNECT_DELAY.to_string()),
        ("ctrl_loss_tmo", loss_timeout(patience).to_string()),
        ("keep_alive_tmo", KEEP_ALIVE.to_string()),
        ("nr_io_queues", IO_QUEUES.to_string()),
    ];
    if let Some(secret) = secret {
        options.push(("dhchap_secret", secret.chap().to_owned()));
        options.push(("dhchap_ctrl_secret", secret.chap_of_owner()));
    }
    if let Some(key) = tls {
        options.push(("tls", String::new()));
        options.push(("tls_key", key.to_string()));
    }
    options
}

/// What to write to `ctrl_loss_tmo`: the kernel divides it by the delay between attempts and counts those, but an attempt takes
/// its own time too.
fn loss_timeout(patience: Patience) -> i64 {
    match patience {
        Patience::Wait => -1,
        Patience::GiveUpAfter(time) => {
            let attempts = time.as_secs().div_ceil(RECONNECT_DELAY + ATTEMPT).max(1);
            i64::try_from(attempts.saturating_mul(RECONNECT_DELAY))
                .unwrap_or(i64::from(i32::MAX))
                .min(i64::from(i32::MAX))
        }
    }
}

/// What the kernel means by not connecting.
fn refusal(id: &ExportId, endpoint: &Endpoint, keyed: bool, error: HostError) -> TransportError {
    let at = endpoint.address.to_string();
    let refused = |reason: &str| TransportError::Refused { endpoint: at.clone(), reason: reason.to_owned() };
    let unreachable = |reason: String| TransportError::Unreachable { endpoint: at.clone(), reason };
    let errno = match &error {
        HostError::Syscall { source, .. } => Errno::from_io_error(source),
        // Where the owner closes the connection before this kernel reads its refusal, it waits for a minute (6.12).
        HostError::Timeout { .. } if keyed => {
            return unreachable(format!("{error}; a key that is not the owner's looks the same"));
        }
        HostError::Timeout { .. } => return unreachable(error.to_string()),
        _ => None,
    };
    match errno {
        Some(Errno::IO) => refused(&format!(
            "it does not let this node have branch {} in generation {}, or does not export it",
            id.branch, id.generation
        )),
        Some(Errno::NOKEY) => refused("it wants a key, and none was given"),
        Some(Errno::KEYREJECTED | Errno::ACCESS | Errno::PERM) => refused("the key was not accepted"),
        Some(
            errno @ (Errno::CONNREFUSED
            | Errno::TIMEDOUT
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::HOSTDOWN
            | Errno::NETDOWN
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::NOTCONN
            | Errno::PIPE),
        ) => unreachable(std::io::Error::from(errno).to_string()),
        Some(Errno::INVAL) => {
            let action = "connect: an option is refused, or another program of this machine uses its host id with another NQN";
            kernel(action)(error)
        }
        _ => kernel(format!("connect to {at}"))(error),
    }
}

impl Consumer for NvmeConsumer {
    fn identity(&self) -> Result<String, TransportError> {
        Ok(self.identity.nqn.clone())
    }

    fn attach(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
        patience: Patience,
    ) -> Result<Attached, TransportError> {
        let nqn = names::subsystem(id)?;
        if endpoint.name != nqn {
            return Err(TransportError::Foreign {
                endpoint: endpoint.address.to_string(),
                branch: id.branch.clone(),
                reason: format!("the endpoint is of {} instead of {nqn}", endpoint.name),
            });
        }
        abilities::prepare_consumer(&self.nvme)?;
        let old = self.controllers(&nqn)?;
        let going: Vec<String> =
            old.iter().filter(|c| c.state == ControllerState::Going).map(|c| c.name.clone()).collect();
        self.wait_gone(id, &going)?;
        let mut made = None;
        if old.is_empty() || (!going.is_empty() && self.controllers(&nqn)?.is_empty()) {
            made = self.connect(id, endpoint, secret, patience)?;
        } else {
            self.set_patience(id, patience)?;
        }
        if secret.is_some() {
            self.hide_keys(&self.made(&nqn, made.as_deref())?);
        }
        let attached = self.appear(id, endpoint, made.as_deref());
        if let (Err(_), Some(name)) = (&attached, made)
            && let Err(error) = self.nvme.disconnect_within(&name, FORCE_BOUND)
        {
            tracing::warn!(%error, branch.id = %id.branch, "a connection that was no use could not be ended");
        }
        attached
    }

    fn set_patience(&self, id: &ExportId, patience: Patience) -> Result<(), TransportError> {
        let absent = || TransportError::Absent { branch: id.branch.clone(), what: "attached" };
        let controllers = self.controllers(&names::subsystem(id)?)?;
        let mut set = false;
        for controller in controllers {
            let done = self.nvme.set_loss_timeout(&controller.name, loss_timeout(patience));
            set |= done.map_err(kernel("set how long an owner is waited for"))?;
        }
        if set { Ok(()) } else { Err(absent()) }
    }

    fn detach(&self, id: &ExportId) -> Result<(), TransportError> {
        let nqn = names::subsystem(id)?;
        let controllers = self.controllers(&nqn)?;
        let live = controllers.iter().any(|c| c.state == ControllerState::Live);
        for device in self.devices(&nqn)? {
            if self.in_use(&device, live)? {
                let device = device.path.display().to_string();
                return Err(TransportError::InUse { branch: id.branch.clone(), device });
            }
        }
        for controller in &controllers {
            self.ensure_noticed(controller)?;
            self.nvme.disconnect(&controller.name).map_err(kernel("detach a branch"))?;
        }
        let names: Vec<String> = controllers.into_iter().map(|c| c.name).collect();
        self.wait_gone(id, &names)?;
        self.forget_key(&nqn);
        Ok(())
    }

    fn force_detach(&self, id: &ExportId) -> Result<(), TransportError> {
        let nqn = names::subsystem(id)?;
        for controller in self.controllers(&nqn)? {
            // Whatever the kernel is waiting for: no attempt after the present one.
            let _ = self.nvme.set_loss_timeout(&controller.name, 0);
            self.ensure_noticed(&controller)?;
            let done = self.nvme.disconnect_within(&controller.name, FORCE_BOUND);
            if done.map_err(kernel("detach a branch by force"))? {
                continue;
            }
            let state =
                self.nvme.controller_state(&controller.name).map_err(kernel("read the NVMe connections"))?;
            if state.is_some_and(|s| s != ControllerState::Going) {
                let source = std::io::Error::from(std::io::ErrorKind::TimedOut);
                return Err(TransportError::Kernel {
                    action: format!("end connection {}", controller.name),
                    source,
                });
            }
        }
        self.forget_key(&nqn);
        Ok(())
    }

    fn attachments(&self) -> Result<Vec<Attached>, TransportError> {
        let mut found: Vec<Attached> = Vec::new();
        let mut known: BTreeMap<ExportId, usize> = BTreeMap::new();
        let controllers = self.nvme.controllers().map_err(kernel("read the NVMe connections"))?;
        if controllers.iter().all(|c| names::parse(&c.nqn).is_none()) {
            return Ok(found);
        }
        // One reading for all: a node may have more than a thousand.
        let mut devices: BTreeMap<String, Vec<NvmeDevice>> = BTreeMap::new();
        for device in self.nvme.devices().map_err(kernel("read the NVMe devices"))? {
            if !device.hidden {
                devices.entry(device.nqn.clone()).or_default().push(device);
            }
        }
        for controller in controllers {
            let Some(id) = names::parse(&controller.nqn) else { continue };
            // Another installation's on this machine are not ours to judge.
            if controller.host.as_ref().is_some_and(|host| *host != self.identity.nqn) {
                continue;
            }
            let uuid = names::uuid(&id);
            let ours = devices.get(&controller.nqn).into_iter().flatten();
            let at = ours.into_iter().find(|d| d.uuid == uuid).map(|d| d.path.clone());
            let link = match controller.state {
                ControllerState::Live => Link::Live,
                ControllerState::Trying => Link::Connecting,
                ControllerState::Going => Link::Dead,
            };
            let name = controller.nqn;
            let endpoint = controller.address.map(|address| Endpoint { address, name });
            let attached = Attached { id, endpoint, at, link };
            // Several ways to one branch are one attachment, as good as the best of them.
            match known.get(&attached.id).and_then(|&at| found.get_mut(at)) {
                Some(known) if known.link != Link::Live && attached.link == Link::Live => *known = attached,
                Some(_) => {}
                None => {
                    known.insert(attached.id.clone(), found.len());
                    found.push(attached);
                }
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
#[path = "consumer/tests.rs"]
mod tests;
