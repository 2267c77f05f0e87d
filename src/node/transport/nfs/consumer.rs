//! The consumer's end: exports are mounted by the kernel's NFS client.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{IDENTITY, IDENTITY_LIMIT, Identity, kernel, name};
use crate::node::transport::{
    Attached, Consumer, Endpoint, ExportId, Link, Patience, Secret, TransportError,
};
use crate::platform::mount::{Liveness, MountEntry};
use crate::platform::nfs::{NfsAnswer, NfsRoots, NfsTarget};
use crate::platform::{Host, HostError};

/// How long an owner may take for each of two short answers before it counts as not answering.
const ANSWER: Duration = Duration::from_secs(3);
/// Owners asked at the same time.
const ASKED_TOGETHER: usize = 32;
/// How long a mount may take, at an owner that has just answered. It makes some dozen requests; an owner that came back a
/// moment ago keeps clients waiting for a lease's time.
const MOUNT: Duration = Duration::from_secs(45);
/// How long the last writes may take while an attachment ends.
const UNMOUNT: Duration = Duration::from_secs(60);
/// How long the kernel may take to take a mount away without the owner.
const ABANDON: Duration = Duration::from_secs(5);

/// Directory, beside that of the mounts, of what was taken away without its owner: a file for each, with the owner's address.
const RELEASED: &str = "nfs-released";
/// How long owners are told so, again and again: one that was not there learns it when it is.
const TOLD: Duration = Duration::from_hours(1);
/// How long one may take to hear it first.
const MOMENT: Duration = Duration::from_millis(300);
/// The longest address.
const ADDRESS_LIMIT: usize = 64;

/// Attaches exports of [`NfsOwner`](super::NfsOwner). See the module's documentation.
///
/// The kernel's client always waits ([`Patience::Wait`]). It could be told to give up by itself only at the mount, and then it
/// would drop writes that were waiting. Who wants to give up after a while asks [`Consumer::attachments`] how an attachment
/// stands, and ends it by [`Consumer::force_detach`].
#[derive(Debug)]
pub struct NfsConsumer {
    host: Host,
    roots: NfsRoots,
    directory: PathBuf,
    address: IpAddr,
    /// Something of each mount that answers.
    held: Mutex<BTreeMap<ExportId, OwnedFd>>,
}

impl NfsConsumer {
    /// Mounts exports below `directory`; `address` is this node's on the storage network, which owners allow.
    #[must_use]
    pub fn new(host: Host, roots: NfsRoots, directory: PathBuf, address: IpAddr) -> Self {
        Self { host, roots, directory, address, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<ExportId, OwnedFd>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps hold of a mount that answers, for the time when it does not.
    fn hold(&self, id: &ExportId) {
        if self.held().contains_key(id) {
            return;
        }
        // Without it the mount is taken away all the same.
        if let Ok(hold) = self.host.nfs_hold(&self.point(id), ANSWER) {
            self.held().insert(id.clone(), hold);
        }
    }

    fn point(&self, id: &ExportId) -> PathBuf {
        self.directory.join(name::export(id))
    }

    fn mounted(&self, id: &ExportId) -> Result<Option<MountEntry>, TransportError> {
        let mounts = self.host.mounts().map_err(kernel("read the table of mounts"))?;
        Ok(mounts.at(&self.point(id)).filter(|e| is_nfs(e)).cloned())
    }

    /// Asks the owner whether it serves this node.
    fn require_answer(&self, endpoint: &Endpoint) -> Result<(), TransportError> {
        let answer = self.host.nfs_ask(endpoint.address, ANSWER).map_err(kernel("ask an NFS server"))?;
        match answer {
            NfsAnswer::Serves(own) | NfsAnswer::Denies(own) if own.to_canonical() != self.address => {
                Err(TransportError::Unable {
                    action: "attach by NFS",
                    reason: format!(
                        "the way to {} leads from address {own}, but this node's on the storage network is {}",
                        endpoint.address, self.address
                    ),
                })
            }
            NfsAnswer::Serves(_) => Ok(()),
            NfsAnswer::Denies(own) => Err(TransportError::Refused {
                endpoint: told(endpoint),
                reason: format!("it serves nothing to {own}"),
            }),
            NfsAnswer::Silent(reason) => {
                Err(TransportError::Unreachable { endpoint: told(endpoint), reason })
            }
        }
    }

    /// Mounts the export, looks at what it is, and puts it at its place.
    fn mount(&self, id: &ExportId, endpoint: &Endpoint) -> Result<(), TransportError> {
        let target = NfsTarget { server: endpoint.address, path: endpoint.name.clone() };
        let opened = self.host.nfs_open(&target, IDENTITY, IDENTITY_LIMIT, MOUNT);
        let (tree, identity) = opened.map_err(|error| unmountable(endpoint, error))?;
        if let Some(reason) = Identity::differs(identity.as_deref(), id) {
            return Err(TransportError::Foreign {
                endpoint: told(endpoint),
                branch: id.branch.clone(),
                reason,
            });
        }
        let point = self.point(id);
        let place = || format!("mount an NFS export at {}", point.display());
        self.host.ensure_directory(&point, 0o700).map_err(kernel(place()))?;
        // What is written while nothing is mounted here would be hidden later. Not every filesystem has the flag.
        let _ = self.host.set_immutable(&point, true);
        self.host.nfs_place(&tree, &point).map_err(kernel(place()))?;
        self.held().insert(id.clone(), tree);
        Ok(())
    }

    fn remove_point(&self, id: &ExportId) -> Result<(), TransportError> {
        let point = self.point(id);
        if self.host.identity(&point).map_err(kernel("look at a mount point"))?.is_some() {
            let _ = self.host.set_immutable(&point, false);
            self.host.remove_directory(&point).map_err(kernel("remove a mount point"))?;
        }
        Ok(())
    }

    fn released_directory(&self) -> PathBuf {
        self.directory.with_file_name(RELEASED)
    }

    fn released_file(&self, id: &ExportId) -> PathBuf {
        self.released_directory().join(name::export(id))
    }

    /// Notes what is about to be taken away, and whose it is.
    fn note_released(&self, id: &ExportId, owner: SocketAddr) {
        let noted = self
            .host
            .ensure_directory(&self.released_directory(), 0o700)
            .and_then(|_| self.host.write_atomic(&self.released_file(id), owner.to_string().as_bytes()));
        // It is taken away all the same, and its owner is told once.
        if let Err(error) = noted {
            tracing::warn!(branch.id = %id.branch, %error, "what is taken away is not noted");
        }
    }

    /// It is used again.
    fn keep(&self, id: &ExportId) -> Result<(), TransportError> {
        self.host.remove_file(&self.released_file(id)).map(drop).map_err(kernel("note what is attached"))
    }

    /// What was taken away in the last hour and is not mounted again, and whose it was.
    fn released(&self, here: &BTreeSet<&ExportId>) -> Result<Vec<(ExportId, SocketAddr)>, TransportError> {
        let failed = || kernel("look at what was taken away");
        let names = self.host.directory_names(&self.released_directory()).map_err(failed())?;
        let mut released = Vec::new();
        for id in names.unwrap_or_default().iter().filter_map(|file| name::parse(file)) {
            let file = self.released_file(&id);
            let old = self.host.age(&file).map_err(failed())?.is_none_or(|age| age > TOLD);
            let content = self.host.read_file(&file, ADDRESS_LIMIT).map_err(failed())?.unwrap_or_default();
            match std::str::from_utf8(&content).ok().and_then(|text| text.parse().ok()) {
                Some(_) if here.contains(&id) => {}
                Some(owner) if !old => released.push((id, owner)),
                _ => drop(self.host.remove_file(&file).map_err(failed())?),
            }
        }
        Ok(released)
    }

    /// Tells the owner that nothing here uses the export any more: who was fenced gets no answer from it until then. Waits for a
    /// moment only; it is told again by [`Consumer::attachments`].
    fn tell_released(&self, id: &ExportId, owner: SocketAddr) {
        let name = name::released(id);
        let tell = move |host: &Host| host.nfs_tell(owner, &name, ANSWER);
        let _ = self.host.within("telling an owner of", &self.released_file(id), MOMENT, tell);
    }

    /// Asks each owner once, however many of its branches are here, and several at a time: those that are away are waited for
    /// together.
    fn ask_all(
        &self,
        owners: BTreeSet<SocketAddr>,
    ) -> Result<BTreeMap<SocketAddr, NfsAnswer>, TransportError> {
        let owners: Vec<_> = owners.into_iter().collect();
        let mut answers = BTreeMap::new();
        for some in owners.chunks(ASKED_TOGETHER) {
            let asked: Vec<_> = std::thread::scope(|scope| {
                let ask = |owner| scope.spawn(move || self.host.nfs_ask(owner, ANSWER));
                let threads: Vec<_> = some.iter().map(|owner| (*owner, ask(*owner))).collect();
                threads.into_iter().map(|(owner, thread)| (owner, thread.join())).collect()
            });
            for (owner, answer) in asked {
                let answer = answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                answers.insert(owner, answer.map_err(kernel("ask an NFS server"))?);
            }
        }
        Ok(answers)
    }

    /// How what is mounted of the export stands, when its owner answered so.
    fn link(&self, id: &ExportId, owner: &NfsAnswer) -> Result<Link, TransportError> {
        if matches!(owner, NfsAnswer::Silent(_)) {
            return Ok(Link::Connecting);
        }
        match self.host.liveness(&self.point(id), ANSWER).map_err(kernel("look at an NFS mount"))? {
            Liveness::Alive => {
                self.hold(id);
                Ok(Link::Live)
            }
            Liveness::Dead(_) => Ok(Link::Dead),
            Liveness::Hung => Ok(Link::Connecting),
        }
    }

    fn attached(&self, id: &ExportId, endpoint: Endpoint, link: Link) -> Attached {
        Attached { id: id.clone(), endpoint: Some(endpoint), at: Some(self.point(id)), link }
    }
}

impl Consumer for NfsConsumer {
    fn identity(&self) -> Result<String, TransportError> {
        Ok(self.address.to_string())
    }

    fn attach(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
        patience: Patience,
    ) -> Result<Attached, TransportError> {
        if secret.is_some() {
            return Err(TransportError::Unable {
                action: "authenticate by NFS",
                reason: "owners know this node by its address only".to_owned(),
            });
        }
        require_waiting(patience)?;
        self.require_answer(endpoint)?;
        if let Some(entry) = self.mounted(id)? {
            let here = NfsTarget::parse(&entry.source, &entry.super_options);
            let same = here.is_some_and(|t| t.server == endpoint.address && t.path == endpoint.name);
            let link = self.link(id, &NfsAnswer::Serves(self.address))?;
            match link {
                Link::Live if same => {
                    self.keep(id)?;
                    return Ok(self.attached(id, endpoint.clone(), link));
                }
                Link::Live | Link::Connecting => {
                    return Err(TransportError::InUse {
                        branch: id.branch.clone(),
                        device: self.point(id).display().to_string(),
                    });
                }
                Link::Dead => self.force_detach(id)?,
            }
        }
        self.mount(id, endpoint)?;
        self.keep(id)?;
        Ok(self.attached(id, endpoint.clone(), Link::Live))
    }

    fn set_patience(&self, id: &ExportId, patience: Patience) -> Result<(), TransportError> {
        match self.mounted(id)? {
            Some(_) => require_waiting(patience),
            None => Err(TransportError::Absent { branch: id.branch.clone(), what: "attached" }),
        }
    }

    fn detach(&self, id: &ExportId) -> Result<(), TransportError> {
        let point = self.point(id);
        self.held().remove(id);
        if let Some(entry) = self.mounted(id)? {
            let unmounted = self.host.nfs_unmount(&point, UNMOUNT).map_err(|error| {
                if error.is_busy() {
                    let device = point.display().to_string();
                    return TransportError::InUse { branch: id.branch.clone(), device };
                }
                kernel(format!("unmount {}", point.display()))(error)
            })?;
            if !unmounted {
                return Err(TransportError::Unreachable {
                    endpoint: entry.source,
                    reason: "what was written last is not taken".to_owned(),
                });
            }
        }
        self.remove_point(id)
    }

    fn force_detach(&self, id: &ExportId) -> Result<(), TransportError> {
        let point = self.point(id);
        let hold = self.held().remove(id);
        if let Some(entry) = self.mounted(id)? {
            let action = format!("take {} away", point.display());
            let target = NfsTarget::parse(&entry.source, &entry.super_options);
            if let Some(target) = &target {
                self.note_released(id, target.server);
            }
            self.host.nfs_abandon(&self.roots, &point, hold, ABANDON).map_err(kernel(action))?;
            if let Some(target) = target {
                self.tell_released(id, target.server);
            }
        }
        self.remove_point(id)
    }

    fn attachments(&self) -> Result<Vec<Attached>, TransportError> {
        let mounts = self.host.mounts().map_err(kernel("read the table of mounts"))?;
        let ours = mounts.below(&self.directory).filter(|e| is_nfs(e)).filter_map(|entry| {
            let here = entry.mount_point.parent() == Some(&self.directory);
            let id = entry.mount_point.file_name().filter(|_| here).and_then(name::parse)?;
            Some((id, NfsTarget::parse(&entry.source, &entry.super_options)?))
        });
        let ours: Vec<_> = ours.collect();
        // What someone else unmounted is not kept alive.
        let here: BTreeSet<&ExportId> = ours.iter().map(|(id, _)| id).collect();
        self.held().retain(|held, _| here.contains(held));
        let released = self.released(&here)?;
        let owners = ours.iter().map(|(_, target)| target.server);
        let answers = self.ask_all(owners.chain(released.iter().map(|(_, owner)| *owner)).collect())?;
        for (id, owner) in released {
            if matches!(answers.get(&owner), Some(NfsAnswer::Serves(_))) {
                self.tell_released(&id, owner);
            }
        }
        let mut found = Vec::new();
        for (id, target) in ours {
            let Some(answer) = answers.get(&target.server) else { continue };
            let link = self.link(&id, answer)?;
            let endpoint = Endpoint { address: target.server, name: target.path };
            found.push(self.attached(&id, endpoint, link));
        }
        found.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(found)
    }
}

fn is_nfs(entry: &MountEntry) -> bool {
    entry.fs_type == "nfs4"
}

fn require_waiting(patience: Patience) -> Result<(), TransportError> {
    match patience {
        Patience::Wait => Ok(()),
        Patience::GiveUpAfter(_) => Err(TransportError::Unable {
            action: "make an NFS attachment give up by itself",
            reason: "the kernel's client would drop writes that wait; end the attachment by force when it has waited \
                     long enough"
                .to_owned(),
        }),
    }
}

fn told(endpoint: &Endpoint) -> String {
    format!("{}{}", endpoint.address, endpoint.name)
}

fn unmountable(endpoint: &Endpoint, error: HostError) -> TransportError {
    let reason = error.to_string();
    let endpoint = told(endpoint);
    if error.is_unanswered() {
        TransportError::Unreachable { endpoint, reason }
    } else if error.is_withheld() {
        let reason = format!("it exports no such branch to this node ({reason})");
        TransportError::Refused { endpoint, reason }
    } else if error.is_lacking() {
        let reason = "this kernel has no NFS client (nfsv4)".to_owned();
        TransportError::Unable { action: "attach by NFS", reason }
    } else {
        kernel(format!("mount {endpoint}"))(error)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn consumer(directory: &Path) -> NfsConsumer {
        let address = "127.0.0.1".parse().unwrap();
        NfsConsumer::new(Host::new(), NfsRoots::default(), directory.to_owned(), address)
    }

    fn id() -> ExportId {
        ExportId { branch: "v-0".parse().unwrap(), generation: crate::node::transport::Generation(1) }
    }

    #[test]
    fn an_owner_that_is_not_there_is_unreachable_and_nothing_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoint = Endpoint { address: closed, name: "/v-0@1".to_owned() };
        let outcome = consumer(directory.path()).attach(&id(), &endpoint, None, Patience::Wait);
        assert!(matches!(outcome, Err(TransportError::Unreachable { .. })), "{outcome:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn giving_up_by_itself_and_secrets_are_refused_before_anything_is_asked() {
        let directory = tempfile::tempdir().unwrap();
        let consumer = consumer(directory.path());
        let endpoint = Endpoint { address: "127.0.0.1:1".parse().unwrap(), name: "/v-0@1".to_owned() };
        let impatient = Patience::GiveUpAfter(Duration::from_secs(1));
        let outcome = consumer.attach(&id(), &endpoint, None, impatient);
        assert!(matches!(outcome, Err(TransportError::Unable { .. })), "{outcome:?}");
        let secret = Secret::of(b"x");
        let outcome = consumer.attach(&id(), &endpoint, Some(&secret), Patience::Wait);
        assert!(matches!(outcome, Err(TransportError::Unable { .. })), "{outcome:?}");
        let outcome = consumer.set_patience(&id(), Patience::Wait);
        assert!(matches!(outcome, Err(TransportError::Absent { .. })), "{outcome:?}");
    }

    #[test]
    fn what_is_not_attached_is_ended_already() {
        let directory = tempfile::tempdir().unwrap();
        let consumer = consumer(directory.path());
        consumer.detach(&id()).unwrap();
        consumer.force_detach(&id()).unwrap();
        assert_eq!(consumer.attachments().unwrap(), []);
    }

    #[test]
    fn what_was_taken_away_is_told_until_it_is_attached_again() {
        let directory = tempfile::tempdir().unwrap();
        let consumer = consumer(&directory.path().join("attached"));
        let owner = "10.0.0.1:2049".parse().unwrap();
        let (nothing, mounted) = (BTreeSet::new(), id());
        assert_eq!(consumer.released(&nothing).unwrap(), []);
        consumer.note_released(&id(), owner);
        assert_eq!(consumer.released(&nothing).unwrap(), [(id(), owner)]);
        assert_eq!(consumer.released(&[&mounted].into()).unwrap(), [], "it is still there");
        consumer.keep(&id()).unwrap();
        assert_eq!(consumer.released(&nothing).unwrap(), []);
        std::fs::write(consumer.released_file(&id()), "nowhere").unwrap();
        assert_eq!(consumer.released(&nothing).unwrap(), []);
        assert!(!consumer.released_file(&id()).exists(), "it cannot be told to anybody");
    }

    #[test]
    fn what_the_kernel_answers_to_a_mount_is_told_in_the_words_of_the_contract() {
        let endpoint = Endpoint { address: "10.0.0.1:2049".parse().unwrap(), name: "/v-0@1".to_owned() };
        let of = |errno| {
            let source = std::io::Error::from_raw_os_error(errno);
            unmountable(&endpoint, HostError::Syscall { call: "mount", subject: "x".to_owned(), source })
        };
        assert!(matches!(of(libc::ENOENT), TransportError::Refused { .. }));
        assert!(matches!(of(libc::EACCES), TransportError::Refused { .. }));
        assert!(matches!(of(libc::ETIMEDOUT), TransportError::Unreachable { .. }));
        assert!(matches!(of(libc::ENODEV), TransportError::Unable { .. }));
        assert!(matches!(of(libc::ENOMEM), TransportError::Kernel { .. }));
    }
}
