//! The owner's end.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::plan::{self, Keys, Refusal, Wanted};
use super::tls::Tls;
use super::{NAMESPACE, abilities, kernel, names};
use crate::domain::{BranchId, Bytes};
use crate::node::transport::{
    Endpoint, ExportId, Exported, Owner, Peer, Right, Secret, Source, TransportError,
};
use crate::platform::nvme::Nvme;
use crate::platform::nvme::target::{Part, Step, TargetView};
use crate::platform::{Host, HostError};

/// What `nvme list` shows as the model.
const MODEL: &str = "Union CSI branch";

/// Exports images of this node.
#[derive(Clone, Debug)]
pub struct NvmeOwner {
    host: Host,
    nvme: Nvme,
    listeners: Vec<SocketAddr>,
    /// What encrypted exports need; `None`: there are none here.
    encrypted: Option<(Vec<SocketAddr>, Tls)>,
    /// Branches whose exports nobody is to reach yet.
    held: Arc<Mutex<BTreeMap<BranchId, Held>>>,
}

/// What is not done yet so that nobody reaches a branch's exports.
#[derive(Debug, Default)]
struct Held {
    /// How often it was asked for.
    times: usize,
    /// The exports that are to be reached, by what links them to listeners.
    links: BTreeMap<PathBuf, (String, Step)>,
}

impl NvmeOwner {
    /// Exports at all of `listeners`, the node's addresses on the storage network; the first one is what endpoints tell.
    #[must_use]
    pub fn new(host: &Host, nvme: Nvme, listeners: Vec<SocketAddr>) -> Self {
        Self { host: host.clone(), nvme, listeners, encrypted: None, held: Arc::default() }
    }

    /// Exports at those what is to be encrypted.
    #[must_use]
    pub fn encrypting(self, listeners: Vec<SocketAddr>, tls: Tls) -> Self {
        Self { encrypted: Some((listeners, tls)), ..self }
    }

    fn listeners(&self, encrypted: bool) -> &[SocketAddr] {
        match &self.encrypted {
            Some((listeners, _)) if encrypted => listeners,
            None if encrypted => &[],
            _ => &self.listeners,
        }
    }

    /// What connections of the branch are encrypted with.
    fn tls(&self, id: &ExportId) -> Result<&Tls, TransportError> {
        let none = || TransportError::Readable {
            branch: id.branch.clone(),
            reason: "this node encrypts nothing".to_owned(),
        };
        self.encrypted.as_ref().map(|(_, tls)| tls).ok_or_else(none)
    }

    /// Takes out the keys of connections that no more can be made.
    fn forget_keys(&self, nqn: &str) {
        if let Some((_, tls)) = &self.encrypted
            && let Err(error) = tls.forget(nqn)
        {
            tracing::warn!(%error, nqn, "a key that is no longer used stays in the kernel's keyring");
        }
    }

    fn view(&self) -> Result<TargetView, TransportError> {
        let view = self.nvme.target().map_err(kernel("read the NVMe target's tree"))?;
        Ok(view.unwrap_or_default())
    }

    /// The branch's exports whole, and of the others `rest`.
    fn view_of(&self, branch: &BranchId, rest: Part) -> Result<TargetView, TransportError> {
        Ok(self.present(branch, rest)?.unwrap_or_default())
    }

    /// The same; `None` where the kernel has no target.
    fn present(&self, branch: &BranchId, rest: Part) -> Result<Option<TargetView>, TransportError> {
        let of = |nqn: &str| names::parse(nqn).is_some_and(|id| id.branch == *branch);
        let view = self.nvme.target_of(|nqn| if of(nqn) { Part::Whole } else { rest });
        view.map_err(kernel("read the NVMe target's tree"))
    }

    /// Ends one of the branch's exports.
    fn end(&self, what: &str, branch: &BranchId, nqn: &str) -> Result<(), TransportError> {
        // Who is allowed elsewhere keeps its key.
        self.apply(what, &plan::end(&self.view_of(branch, Part::Allowed)?, nqn))?;
        if let Some(held) = self.held().get_mut(branch) {
            held.links.retain(|_, (linked, _)| linked != nqn);
        }
        self.forget_keys(nqn);
        Ok(())
    }

    fn apply(&self, what: &str, steps: &[Step]) -> Result<(), TransportError> {
        for step in steps {
            tracing::debug!(?step, "nvme target");
            self.nvme
                .take(step)
                // The kernel asks for the module by an alias, which not every system has.
                .or_else(|error| {
                    match lacks_transport(step, &error) && self.nvme.load(&["nvmet-tcp"]).is_ok() {
                        true => self.nvme.take(step),
                        false => Err(error),
                    }
                })
                .map_err(|error| self.explain(what, step, error))?;
        }
        Ok(())
    }

    /// What an errno of a step means.
    fn explain(&self, what: &str, step: &Step, error: HostError) -> TransportError {
        let kind = match &error {
            HostError::Syscall { source, .. } => source.kind(),
            _ => return kernel(what)(error),
        };
        let path = step.path();
        let reason = match step {
            Step::Link(_, _) if path.starts_with("ports") => {
                let at = self.listener_of(path).map_or_else(|| "the address".to_owned(), |l| l.to_string());
                match kind {
                    ErrorKind::AddrInUse => format!(
                        "{at} is taken by another program or another user of the NVMe target: end that, or configure \
                         another port"
                    ),
                    ErrorKind::AddrNotAvailable => format!("{at} is not an address of this node"),
                    ErrorKind::InvalidInput => "the kernel cannot load nvmet-tcp".to_owned(),
                    _ => return kernel(what)(error),
                }
            }
            Step::Write(_, value) if path.ends_with("enable") && value == "1" => match kind {
                ErrorKind::NotFound => "its image is missing".to_owned(),
                ErrorKind::InvalidInput => "the filesystem below its image knows no direct I/O".to_owned(),
                _ => return kernel(what)(error),
            },
            Step::Write(_, _) if path.starts_with("hosts") && kind == ErrorKind::NotFound => {
                "this kernel's NVMe target was built without CONFIG_NVME_TARGET_AUTH".to_owned()
            }
            _ => return kernel(what)(error),
        };
        TransportError::Unable { action: "export a branch over NVMe/TCP", reason }
    }

    fn listener_of(&self, path: &Path) -> Option<SocketAddr> {
        let number = path.components().nth(1)?.as_os_str().to_str()?.parse().ok()?;
        self.view().ok()?.ports.get(&number)?.listens()
    }

    /// Makes the image's file synchronous (chattr +S), so that a write that completed survives a crash of this node.
    fn ensure_written_through(&self, image: &Path) -> Result<(), TransportError> {
        let backing = self.nvme.backing(image).map_err(kernel("look at the image"))?;
        if !backing.is_file {
            return Ok(());
        }
        let set = self.host.set_synchronous(image, true).map_err(kernel("make the image synchronous"))?;
        if !set {
            let reason = format!(
                "the filesystem of {} has no synchronous files (chattr +S), so a crash could lose completed writes: put the \
                 pool on ext4, XFS or Btrfs, or accept that by a class with writeThrough: never",
                image.display()
            );
            return Err(TransportError::Unable { action: "export a branch safely", reason });
        }
        Ok(())
    }

    fn wanted(&self, id: &ExportId, path: &str, encrypted: bool) -> Result<Wanted, TransportError> {
        Ok(Wanted {
            nqn: names::subsystem(id)?,
            serial: names::serial(id, encrypted),
            model: MODEL,
            path: path.to_owned(),
            uuid: names::uuid(id),
            listeners: self.listeners(encrypted).to_vec(),
            encrypted,
        })
    }

    fn build(&self, branch: &BranchId, wanted: &Wanted) -> Result<(), TransportError> {
        let steps = plan::build(&self.view_of(branch, Part::Nothing)?, wanted).ok_or_else(|| {
            TransportError::Unable {
                action: "export a branch over NVMe/TCP",
                reason: "there are too many listeners".to_owned(),
            }
        })?;
        let steps = match self.held().get_mut(branch) {
            Some(held) => {
                let (links, steps): (Vec<_>, Vec<_>) = steps.into_iter().partition(lets_in);
                let named = |link: Step| (link.path().to_owned(), (wanted.nqn.clone(), link));
                held.links.extend(links.into_iter().map(named));
                steps
            }
            None => steps,
        };
        self.apply("export a branch", &steps)
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<BranchId, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The exports of a branch, of all generations.
fn of_branch(view: &TargetView, branch: &BranchId) -> Vec<(ExportId, String)> {
    let ours = view.subsystems.keys().filter_map(|nqn| Some((names::parse(nqn)?, nqn.clone())));
    ours.filter(|(id, _)| id.branch == *branch).collect()
}

impl Owner for NvmeOwner {
    fn hold(&self, branch: &BranchId) {
        self.held().entry(branch.clone()).or_default().times += 1;
    }

    fn open(&self, branches: &[BranchId]) -> Vec<(BranchId, TransportError)> {
        let mut free = Vec::new();
        for branch in branches {
            let mut held = self.held();
            let Some(of_branch) = held.get_mut(branch) else { continue };
            of_branch.times -= 1;
            if of_branch.times == 0 {
                free.extend(held.remove(branch).map(|held| (branch.clone(), held)));
            }
        }
        free.retain(|(_, held)| !held.links.is_empty());
        if free.is_empty() {
            return Vec::new();
        }
        // The first link of a listener has it listen. All are made as fast as can be: who comes to one that is not yet is refused.
        let lock = self.nvme.lock_target().map_err(kernel("lock the NVMe target's tree"));
        let mut failed = Vec::new();
        for (branch, held) in free {
            let steps: Vec<Step> = held.links.into_values().map(|(_, step)| step).collect();
            let reason = lock.as_ref().err().map(ToString::to_string);
            let outcome = match reason {
                Some(reason) => {
                    let source = std::io::Error::other(reason);
                    Err(TransportError::Kernel { action: "export a branch".to_owned(), source })
                }
                None => self.apply("export a branch", &steps),
            };
            failed.extend(outcome.err().map(|error| (branch, error)));
        }
        failed
    }

    fn export(&self, id: &ExportId, source: &Source) -> Result<Endpoint, TransportError> {
        const ACTION: &str = "export a branch over NVMe/TCP";
        let unable = |reason: String| TransportError::Unable { action: ACTION, reason };
        let Source::Image { path: image, write_through, encrypted } = source else {
            return Err(unable("it is a directory, and only images go over NVMe".to_owned()));
        };
        let path = image.to_str().filter(|p| p.starts_with('/') && !p.contains('\n')).ok_or_else(|| {
            unable(format!(
                "{} cannot be given to the kernel: its name must be absolute, UTF-8, one line",
                image.display()
            ))
        })?;
        if *encrypted {
            self.tls(id)?.ready(&id.branch)?;
        }
        let Some(first) = self.listeners(*encrypted).first() else {
            return Err(unable("this node has no address on the storage network".to_owned()));
        };
        let wanted = self.wanted(id, path, *encrypted)?;
        abilities::prepare_owner(&self.nvme)?;
        let _lock = self.nvme.lock_target().map_err(kernel("lock the NVMe target's tree"))?;
        let view = self.view_of(&id.branch, Part::Nothing)?;
        let standing = of_branch(&view, &id.branch);
        if let Some((later, _)) = standing.iter().find(|(other, _)| other.generation > id.generation) {
            let (branch, asked, current) = (id.branch.clone(), id.generation, later.generation);
            return Err(TransportError::Outdated { branch, asked, current });
        }
        // Where it is not asked for, an image that has it keeps it: the next boot must not take for durable what was not.
        if *write_through {
            self.ensure_written_through(image)?;
        }
        for (_, nqn) in &standing {
            if *nqn != wanted.nqn || !plan::sound(&view, &wanted) {
                self.end("end an export", &id.branch, nqn)?;
            }
        }
        self.build(&id.branch, &wanted)?;
        Ok(Endpoint { address: *first, name: wanted.nqn })
    }

    fn allow(
        &self,
        id: &ExportId,
        peer: &Peer,
        right: Right,
        secret: Option<&Secret>,
    ) -> Result<(), TransportError> {
        const ACTION: &str = "let a node use a branch";
        let unable = |reason: &str| TransportError::Unable { action: ACTION, reason: reason.to_owned() };
        if right != Right::Write {
            return Err(unable("an image goes to one node, which may write it"));
        }
        if !names::is_host(&peer.identity) || peer.identity.contains('/') {
            return Err(unable("what it calls itself is no name of a node of this driver"));
        }
        let keys = secret.map(|s| Keys { peer: s.chap().to_owned(), owner: s.chap_of_owner() });
        let nqn = names::subsystem(id)?;
        let absent = || TransportError::Absent { branch: id.branch.clone(), what: "exported" };
        let _lock = self.nvme.lock_target().map_err(|e| match e.is_missing() {
            true => absent(),
            false => kernel("lock the NVMe target's tree")(e),
        })?;
        let mut view = self.view_of(&id.branch, Part::Nothing)?;
        if keys.is_none() && view.hosts.get(&peer.identity).is_some_and(|host| !host.key.is_empty()) {
            view = self.view_of(&id.branch, Part::Allowed)?;
        }
        let standing = view.subsystems.get(&nqn).map(|subsystem| subsystem.serial == names::serial(id, true));
        match standing {
            Some(true) => {
                let tls = self.tls(id)?;
                tls.ready(&id.branch)?;
                tls.keep(&id.branch, &peer.identity, &nqn, secret)?;
            }
            Some(false) if secret.is_some_and(|secret| secret.tls().is_some()) => {
                let reason = "it is exported as it is: detach its volume".to_owned();
                return Err(TransportError::Readable { branch: id.branch.clone(), reason });
            }
            Some(false) | None => {}
        }
        let steps =
            plan::admit(&view, &nqn, &peer.identity, keys.as_ref()).map_err(|refusal| match refusal {
                Refusal::NotExported => absent(),
                Refusal::Held(holder) => TransportError::Held { branch: id.branch.clone(), holder },
                Refusal::KeyedElsewhere => {
                    unable("other branches are open to that node with a key, and this one has none")
                }
            })?;
        self.apply("let a node use a branch", &steps)
    }

    fn fence(&self, id: &ExportId, peer: &Peer) -> Result<(), TransportError> {
        if self.present(&id.branch, Part::Nothing)?.is_none() {
            return Ok(());
        }
        let _lock = self.nvme.lock_target().map_err(kernel("lock the NVMe target's tree"))?;
        let view = self.view_of(&id.branch, Part::Nothing)?;
        for (id, nqn) in of_branch(&view, &id.branch) {
            let subsystem = &view.subsystems[&nqn];
            if !subsystem.allowed.contains(&peer.identity) {
                continue;
            }
            let path = subsystem.namespaces.get(&NAMESPACE).map(|n| n.path.clone()).unwrap_or_default();
            let encrypted = subsystem.serial == names::serial(&id, true);
            let wanted = self.wanted(&id, &path, encrypted)?;
            // What was half made, or not as this driver makes it, is for the next export to make anew.
            let whole = plan::sound(&view, &wanted) && !wanted.listeners.is_empty();
            self.end("fence a node", &id.branch, &nqn)?;
            if whole {
                self.build(&id.branch, &wanted)?;
            }
        }
        let holds = |s: &(ExportId, String), view: &TargetView| {
            view.subsystems[&s.1].allowed.contains(&peer.identity)
        };
        let view = self.view_of(&id.branch, Part::Nothing)?;
        if of_branch(&view, &id.branch).iter().any(|s| holds(s, &view)) {
            let source = std::io::Error::other("it is still allowed: something else changes the NVMe target");
            return Err(TransportError::Kernel { action: "fence a node".to_owned(), source });
        }
        Ok(())
    }

    fn unexport(&self, branch: &BranchId) -> Result<(), TransportError> {
        if self.present(branch, Part::Nothing)?.is_none() {
            return Ok(());
        }
        let _lock = self.nvme.lock_target().map_err(kernel("lock the NVMe target's tree"))?;
        for (_, nqn) in of_branch(&self.view_of(branch, Part::Nothing)?, branch) {
            self.end("end an export", branch, &nqn)?;
        }
        Ok(())
    }

    fn withdraw(&self) -> Result<(), TransportError> {
        // A connection that ends is made anew after two seconds at the earliest: to a listener that is gone by then, not to one that
        // does not know the branch.
        self.apply("withdraw exports", &plan::withdraw(&self.view()?))
    }

    fn grown(&self, id: &ExportId) -> Result<Bytes, TransportError> {
        let nqn = names::subsystem(id)?;
        let view = self.view_of(&id.branch, Part::Nothing)?;
        let namespace =
            view.subsystems.get(&nqn).and_then(|s| s.namespaces.get(&NAMESPACE)).filter(|n| n.enabled);
        let namespace = namespace
            .ok_or_else(|| TransportError::Absent { branch: id.branch.clone(), what: "exported" })?;
        let at = Path::new("subsystems").join(&nqn).join("namespaces").join(NAMESPACE.to_string());
        let step = Step::Write(at.join("revalidate_size"), "1".to_owned());
        self.apply("tell that a branch has grown", &[step])?;
        let backing = self.nvme.backing(Path::new(&namespace.path)).map_err(kernel("look at the image"))?;
        Ok(Bytes::new(backing.size))
    }

    fn durable(&self, source: &Source) -> Result<bool, TransportError> {
        match source {
            Source::Image { path, .. } => {
                self.host.synchronous(path).map_err(kernel("look at the image's flags"))
            }
            Source::Directory(_) => Ok(false),
        }
    }

    fn exports(&self) -> Result<Vec<Exported>, TransportError> {
        Ok(self.tell(&self.view()?))
    }

    fn exports_of(&self, branch: &BranchId) -> Result<Vec<Exported>, TransportError> {
        Ok(self.tell(&self.view_of(branch, Part::Nothing)?))
    }
}

impl NvmeOwner {
    /// The exports of this driver in the tree.
    fn tell(&self, view: &TargetView) -> Vec<Exported> {
        let mut found = Vec::new();
        let held = self.held();
        for (nqn, subsystem) in &view.subsystems {
            let Some(id) = names::parse(nqn) else { continue };
            let to_open = held.get(&id.branch).is_some_and(|h| h.links.values().any(|(of, _)| of == nqn));
            let serves = subsystem.namespaces.get(&NAMESPACE).is_some_and(|n| n.enabled);
            let linked =
                || view.ports.values().filter(|p| p.linked.contains(nqn)).filter_map(|p| p.listens());
            let encrypted = subsystem.serial == names::serial(&id, true);
            let preferred = self.listeners(encrypted).iter().copied().find(|l| linked().any(|p| p == *l));
            let to_come = || self.listeners(encrypted).first().copied().filter(|_| to_open);
            let address = preferred.or_else(|| linked().next()).or_else(to_come).filter(|_| serves);
            let endpoint = address.map(|address| Endpoint { address, name: nqn.clone() });
            found.push(Exported {
                id,
                endpoint,
                allowed: subsystem.allowed.iter().cloned().collect(),
                readers: Vec::new(),
            });
        }
        found
    }
}

/// The step lets peers reach an export.
fn lets_in(step: &Step) -> bool {
    matches!(step, Step::Link(_, _)) && step.path().starts_with("ports")
}

/// Nothing in the kernel takes connections of the port's kind.
fn lacks_transport(step: &Step, error: &HostError) -> bool {
    lets_in(step)
        && matches!(error, HostError::Syscall { source, .. } if source.kind() == ErrorKind::InvalidInput)
}
