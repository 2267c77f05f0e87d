//! A network that is none: what a node attaches of another is a loop device on the other's image, or a bind of its directory.
//! It stands in for the kernels' parts only as far as the volumes see them, and says nothing of NVMe or NFS.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, Weak};

use union_csi::domain::reach::{Ability, Transport, TransportReport};
use union_csi::node::transport::{
    Attached, Carried, Consumer, Endpoint, Ends, ExportId, Link, Patience, Secret, TransportError, Transports,
};
use union_csi::platform::{Gate, Host};

use crate::support::run;

/// What the other node exports, and what this one has attached; outlives agents.
#[derive(Default)]
pub(super) struct Fabric {
    state: Mutex<State>,
    /// Asked before each call: it may fail.
    gate: Mutex<Option<Arc<dyn Gate>>>,
    /// Of the newest agent.
    agent: Mutex<Weak<Transports>>,
}

#[derive(Debug, Default)]
struct State {
    /// Images and directories that are exported.
    exports: BTreeMap<ExportId, PathBuf>,
    attached: BTreeMap<ExportId, (PathBuf, Endpoint, Link)>,
    /// The other node does not answer.
    away: bool,
    forced: Vec<ExportId>,
}

impl std::fmt::Debug for Fabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fabric").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Fabric {
    /// The transports of an agent on this network.
    pub(super) fn transports(self: &Arc<Self>) -> Arc<Transports> {
        let transports = Arc::new(Transports::none());
        *self.agent.lock().expect("agent") = Arc::downgrade(&transports);
        self.survey(true);
        transports
    }

    /// The agent looks anew at what its kernel can: it answers, or it does not.
    pub(super) fn survey(self: &Arc<Self>, answers: bool) {
        const REASON: &str = "the kernel does not answer";
        let consumer: Result<Arc<dyn Consumer>, String> =
            if answers { Ok(self.clone()) } else { Err(REASON.to_owned()) };
        let ability = |able| Ability { able, reason: REASON.to_owned() };
        let report = |transport| TransportReport {
            transport,
            owner: ability(false),
            consumer: ability(answers),
            authentication: ability(false),
            encryption: ability(false),
            identity: None,
        };
        let both = [Transport::NvmeTcp, Transport::Nfs];
        let ends = Ends { owner: Err("not here".to_owned()), consumer };
        let carried = Carried { transports: both.map(report).into(), network: None };
        let agent = self.agent.lock().expect("agent").upgrade().expect("an agent");
        agent.install(carried, both.map(|transport| (transport, ends.clone())).into());
    }

    /// Has each call ask `gate` first, as the machine's effects do.
    pub(super) fn behind(&self, gate: Arc<dyn Gate>) {
        *self.gate.lock().expect("gate") = Some(gate);
    }

    fn enter(&self, call: &'static str, branch: &str) -> Result<(), TransportError> {
        let gate = self.gate.lock().expect("gate").clone();
        let passed = gate.map_or(Ok(()), |gate| gate.enter(call, branch));
        passed.map_err(|source| TransportError::Kernel { action: format!("{call} {branch}"), source })
    }

    /// Exports in place of what was exported of the branch.
    pub(super) fn export(&self, id: &ExportId, source: PathBuf) {
        let mut state = self.state.lock().expect("state");
        state.exports.retain(|known, _| known.branch != id.branch);
        state.exports.insert(id.clone(), source);
    }

    /// The other node is gone, or back. What is attached waits meanwhile.
    pub(super) fn set_away(&self, away: bool) {
        let mut state = self.state.lock().expect("state");
        state.away = away;
        let exports = state.exports.clone();
        for (id, (_, _, link)) in &mut state.attached {
            if *link != Link::Dead {
                *link = if away || !exports.contains_key(id) { Link::Connecting } else { Link::Live };
            }
        }
    }

    /// The kernel lost what is attached of the branch.
    pub(super) fn kill(&self, id: &ExportId) {
        let device = {
            let mut state = self.state.lock().expect("state");
            let Some((device, _, link)) = state.attached.get_mut(id) else {
                panic!("{id:?} is not attached")
            };
            *link = Link::Dead;
            device.clone()
        };
        fail_filesystem(&device);
    }

    pub(super) fn attached_now(&self) -> Vec<ExportId> {
        self.state.lock().expect("state").attached.keys().cloned().collect()
    }

    /// What was ended by force since this was asked last.
    pub(super) fn forced(&self) -> Vec<ExportId> {
        std::mem::take(&mut self.state.lock().expect("state").forced)
    }
}

/// What a device that went away means to the filesystem on it: it fails at once, and stays mounted as long as it is used.
fn fail_filesystem(device: &Path) {
    let table = Host::new().mounts().expect("mounts");
    let mounted = table.entries.iter().find(|e| Path::new(&e.source) == device);
    if let Some(entry) = mounted {
        run("xfs_io", &["-x", "-c", "shutdown", entry.mount_point.to_str().expect("utf-8")]);
    }
}

fn unreachable(endpoint: &Endpoint) -> TransportError {
    let endpoint = endpoint.address.to_string();
    TransportError::Unreachable { endpoint, reason: "it is away".to_owned() }
}

impl Consumer for Fabric {
    fn identity(&self) -> Result<String, TransportError> {
        Ok("node-a".to_owned())
    }

    fn attach(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        _secret: Option<&Secret>,
        _patience: Patience,
    ) -> Result<Attached, TransportError> {
        self.enter("attach", id.branch.as_str())?;
        let mut state = self.state.lock().expect("state");
        if state.away {
            return Err(unreachable(endpoint));
        }
        let Some(source) = state.exports.get(id).cloned() else {
            let endpoint = endpoint.address.to_string();
            return Err(TransportError::Refused { endpoint, reason: format!("it has no {id:?}") });
        };
        let known =
            state.attached.get(id).filter(|(_, _, link)| *link == Link::Live).map(|(at, _, _)| at.clone());
        let at = known.unwrap_or_else(|| {
            if source.is_dir() {
                return source.clone();
            }
            let file = source.to_str().expect("utf-8");
            PathBuf::from(run("losetup", &["--find", "--show", file]))
        });
        state.attached.insert(id.clone(), (at.clone(), endpoint.clone(), Link::Live));
        Ok(Attached { id: id.clone(), endpoint: Some(endpoint.clone()), at: Some(at), link: Link::Live })
    }

    fn set_patience(&self, _id: &ExportId, _patience: Patience) -> Result<(), TransportError> {
        Ok(())
    }

    fn detach(&self, id: &ExportId) -> Result<(), TransportError> {
        self.enter("detach", id.branch.as_str())?;
        let mut state = self.state.lock().expect("state");
        let Some((at, endpoint, link)) = state.attached.get(id).cloned() else { return Ok(()) };
        let table = Host::new().mounts().expect("mounts");
        if table.entries.iter().any(|e| Path::new(&e.source) == at) {
            let device = at.display().to_string();
            return Err(TransportError::InUse { branch: id.branch.clone(), device });
        }
        if link == Link::Connecting {
            return Err(unreachable(&endpoint));
        }
        release(&at);
        state.attached.remove(id);
        Ok(())
    }

    fn force_detach(&self, id: &ExportId) -> Result<(), TransportError> {
        self.enter("detach by force", id.branch.as_str())?;
        let taken = {
            let mut state = self.state.lock().expect("state");
            let taken = state.attached.remove(id);
            if taken.is_some() {
                state.forced.push(id.clone());
            }
            taken
        };
        if let Some((at, _, _)) = taken {
            fail_filesystem(&at);
            release(&at);
        }
        Ok(())
    }

    fn attachments(&self) -> Result<Vec<Attached>, TransportError> {
        self.enter("list attachments", "all")?;
        let state = self.state.lock().expect("state");
        let attached = state.attached.iter().map(|(id, (at, endpoint, link))| Attached {
            id: id.clone(),
            endpoint: Some(endpoint.clone()),
            at: Some(at.clone()),
            link: *link,
        });
        Ok(attached.collect())
    }
}

/// Lets the device go, with its last mount where it has one.
fn release(at: &Path) {
    if !at.is_dir() {
        let _ = Command::new("losetup").arg("-d").arg(at).status();
    }
}
