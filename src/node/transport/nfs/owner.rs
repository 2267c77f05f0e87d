//! The owner's end: exports are directories that are bound where the kernel's server looks.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::marks::{Answer, Marks, Taken};
use super::{IDENTITY, IDENTITY_LIMIT, Identity, kernel, name};
use crate::domain::{BranchId, Bytes};
use crate::node::transport::{
    Endpoint, ExportId, Exported, Owner, Peer, Right, Secret, Source, TransportError,
};
use crate::platform::mount::{MountAttr, MountEntry, MountTable};
use crate::platform::nfs::cache::{self, Cache, HandleKey};
use crate::platform::nfs::{NfsClient, NfsRoots, NfsServing};
use crate::platform::{Host, HostError};

/// Source of the tmpfs that holds the mount points; it tells that the server is ours.
const TMPFS: &str = "union-csi-nfs";
/// Some thousand empty directories.
const TMPFS_OPTIONS: &str = "size=16m,mode=0755";

/// How long requests that are being worked on may take to end by themselves: a busy disk.
const DRAIN: Duration = Duration::from_secs(2);
/// How long they may take after all that the peer has open was taken, and how long that taking may last.
const EXPIRE: Duration = Duration::from_secs(20);
/// Between two looks whether they have ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Why this machine's NFS server cannot serve for this driver: it serves for someone else, and a kernel has one only. `None`
/// where it can, or does. Loads and starts nothing; `recovery` is where it would note its clients.
///
/// # Errors
/// [`TransportError::Kernel`]: what the server does cannot be read.
pub fn occupied(host: &Host, roots: &NfsRoots, recovery: &Path) -> Result<Option<String>, TransportError> {
    let exports = host.nfs_exports(roots).map_err(kernel("read what is exported by NFS"))?;
    if let Some(entry) = exports.iter().find(|e| e.granted && !name::is_ours(&e.domain)) {
        return Ok(Some(format!(
            "this machine's NFS server exports {} to {} already, and the kernel has one server only: stop that \
             (nfs-server.service), or use image branches here",
            entry.path.display(),
            entry.domain
        )));
    }
    let state = host.nfs_server_state(roots).map_err(kernel("ask the kernel's NFS server"))?;
    Ok(match state.recovery {
        Some(other) if state.threads > 0 && other != recovery => Some(format!(
            "this machine's NFS server runs for someone else (it notes its clients in {}): stop it \
             (nfs-server.service), or use image branches here",
            other.display()
        )),
        _ => None,
    })
}

/// Exports directories by the kernel's NFS server. See the module's documentation.
#[derive(Debug)]
pub struct NfsOwner {
    host: Host,
    roots: NfsRoots,
    serving: NfsServing,
    root: PathBuf,
    marks: Marks,
    /// The kernel's files are written by one at a time.
    turn: Mutex<()>,
}

impl NfsOwner {
    /// Serves as `serving` tells, with mount points below `root` (a directory that is gone after a restart of the machine,
    /// such as one below `/run`, and is in the mount namespace that the machine's own programs are in). What was taken from
    /// peers is noted in `fences`, a directory that outlives restarts. Nothing is done yet.
    #[must_use]
    pub fn new(host: Host, roots: NfsRoots, serving: NfsServing, root: PathBuf, fences: PathBuf) -> Self {
        let marks = Marks::new(host.clone(), fences);
        Self { host, roots, serving, root, marks, turn: Mutex::default() }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mounts(&self) -> Result<Arc<MountTable>, TransportError> {
        self.host.mounts().map_err(kernel("read the table of mounts"))
    }

    fn export_point(&self, id: &ExportId) -> PathBuf {
        self.root.join("exports").join(name::export(id))
    }

    fn peer_root(&self, peer: IpAddr) -> PathBuf {
        self.root.join("peers").join(peer.to_string())
    }

    fn peer_point(&self, peer: IpAddr, id: &ExportId) -> PathBuf {
        self.peer_root(peer).join(name::export(id))
    }

    fn endpoint(&self, id: &ExportId) -> Endpoint {
        Endpoint { address: self.serving.address, name: format!("/{}", name::export(id)) }
    }

    /// The exports that stand.
    fn standing(&self, mounts: &MountTable) -> BTreeSet<ExportId> {
        let directory = self.root.join("exports");
        let below = mounts.below(&directory).filter(|e| e.mount_point.parent() == Some(&directory));
        below.filter_map(|e| name::parse(e.mount_point.file_name()?)).collect()
    }

    /// Who may use what.
    fn rights(&self, mounts: &MountTable) -> BTreeSet<(IpAddr, ExportId)> {
        let directory = self.root.join("peers");
        let right = |point: &Path| {
            let peer = point.strip_prefix(&directory).ok()?.parent()?.to_str()?.parse().ok()?;
            Some((peer, name::parse(point.file_name()?)?))
        };
        mounts.below(&directory).filter_map(|e| right(&e.mount_point)).collect()
    }

    /// Those of the rights that the server has in mind.
    fn told(
        &self,
        rights: &BTreeSet<(IpAddr, ExportId)>,
    ) -> Result<BTreeSet<(IpAddr, ExportId)>, TransportError> {
        if rights.is_empty() {
            return Ok(BTreeSet::new());
        }
        let known = self.host.nfs_exports(&self.roots).map_err(kernel("read what is exported by NFS"))?;
        let known: BTreeSet<(String, PathBuf)> =
            known.into_iter().filter(|e| e.granted).map(|e| (e.domain, e.path)).collect();
        let peers = self.host.nfs_addresses(&self.roots).map_err(kernel("read whom NFS serves"))?;
        let told = |(peer, id): &&(IpAddr, ExportId)| {
            let domain = name::domain(*peer);
            peers.get(peer) == Some(&domain) && known.contains(&(domain, self.peer_point(*peer, id)))
        };
        Ok(rights.iter().filter(told).cloned().collect())
    }

    /// What peers tell that they have let go of ([`Owner::tend`]), with the number of the client that tells it.
    fn released(&self) -> Result<Vec<(u32, IpAddr, ExportId)>, TransportError> {
        let clients = self.host.nfs_clients(&self.roots).map_err(kernel("list the NFS clients"))?;
        let told =
            |client: NfsClient| Some((client.number, client.address?, name::parse_released(&client.name)?));
        Ok(clients.into_iter().filter_map(told).collect())
    }

    /// Has the server forget that a peer told something.
    fn heard(&self, client: u32) -> Result<(), TransportError> {
        let action = "end what a peer told";
        self.host.nfs_client_expire(&self.roots, client, EXPIRE).map_err(kernel(action))
    }

    /// Makes the server run, as ours, with a place for its mount points; tells one that had been stopped what it served.
    fn ensure_ready(&self) -> Result<(), TransportError> {
        let started = self.ensure_serving()?;
        self.ensure_root()?;
        // Those who lost something wait for an answer, also of a server that never gave them anything.
        let waiting = self.marks.peers()?;
        if !started && self.knows(&waiting)? {
            return Ok(());
        }
        waiting.iter().try_for_each(|peer| self.ensure_peer_root(*peer).map(drop))?;
        self.renew(&BTreeSet::new(), &BTreeSet::new())
    }

    /// Whether the server has all these peers in mind.
    fn knows(&self, peers: &BTreeSet<IpAddr>) -> Result<bool, TransportError> {
        if peers.is_empty() {
            return Ok(true);
        }
        let known = self.host.nfs_addresses(&self.roots).map_err(kernel("read whom NFS serves"))?;
        Ok(peers.iter().all(|peer| known.get(peer) == Some(&name::domain(*peer))))
    }

    /// Makes the server run, as ours; true where it did not before.
    fn ensure_serving(&self) -> Result<bool, TransportError> {
        let unable = |reason: String| TransportError::Unable { action: "export by NFS", reason };
        self.host.nfs_server_ready(&self.roots).map_err(|error| {
            if error.is_lacking() {
                unable("this kernel has no NFS server (nfsd)".to_owned())
            } else {
                kernel("make the kernel's NFS server available")(error)
            }
        })?;
        if let Some(reason) = occupied(&self.host, &self.roots, &self.serving.recovery)? {
            return Err(unable(reason));
        }
        let state = self.host.nfs_server_state(&self.roots).map_err(kernel("ask the kernel's NFS server"))?;
        if state.threads > 0 {
            return Ok(false);
        }
        // Peers that only a server before this one knew would wait for it to tell them of their root.
        let forget = "make the NFS server forget who it knew";
        self.host.nfs_cache_flush(&self.roots, Cache::Addresses).map_err(kernel(forget))?;
        let start = format!("start the NFS server at {}", self.serving.address);
        self.host.nfs_server_start(&self.roots, &self.serving).map_err(kernel(start))?;
        Ok(true)
    }

    /// Makes the tmpfs that holds the mount points.
    fn ensure_root(&self) -> Result<(), TransportError> {
        let make = "make the directory of NFS exports";
        if self.mounts()?.at(&self.root).is_none_or(|e| e.source != TMPFS) {
            self.host.ensure_directory(&self.root, 0o755).map_err(kernel(make))?;
            let attr = MountAttr { nosuid: true, nodev: true, noexec: true, ..MountAttr::default() };
            let source = Path::new(TMPFS);
            self.host
                .mount_filesystem(source, &self.root, "tmpfs", attr, TMPFS_OPTIONS)
                .and_then(|()| self.host.make_private(&self.root))
                .map_err(kernel("mount the directory of NFS exports"))?;
        }
        for name in ["exports", "peers"] {
            self.host.ensure_directory(&self.root.join(name), 0o755).map_err(kernel(make))?;
        }
        Ok(())
    }

    /// Binds `from` at `to`, unless it is there. What may only be read is bound so: no request can write by that mount.
    fn ensure_bound(&self, from: &Path, to: &Path, right: Right) -> Result<(), TransportError> {
        if self.mounts()?.at(to).is_some() {
            return Ok(());
        }
        let action = format!("bind {} to export it", from.display());
        let attr = MountAttr { read_only: right == Right::Read, ..MountAttr::default() };
        self.host
            .ensure_directory(to, 0o755)
            .and_then(|_| self.host.bind(from, to, attr))
            .map_err(kernel(action))
    }

    fn write(&self, cache: Cache, line: &str) -> Result<(), TransportError> {
        let action = format!("tell the NFS server what it exports ({})", cache.name());
        self.host.nfs_cache_write(&self.roots, cache, line).map_err(kernel(action))
    }

    /// The inode that an export's handles name.
    fn inode(&self, point: &Path) -> Result<u64, TransportError> {
        let found = self.host.identity(point).map_err(kernel("look at an export"))?;
        Ok(found.map_or(0, |f| f.inode))
    }

    /// Tells the server of a peer, and of the root that it sees. Without, it could not even tell that it let go of what it had.
    fn admit(&self, peer: IpAddr) -> Result<(), TransportError> {
        let root = self.ensure_peer_root(peer)?;
        self.know(peer)?;
        self.write(Cache::Exports, &cache::root(&name::domain(peer), &root))?;
        self.tell_root(peer)
    }

    fn ensure_peer_root(&self, peer: IpAddr) -> Result<PathBuf, TransportError> {
        let root = self.peer_root(peer);
        self.host.ensure_directory(&root, 0o755).map_err(kernel("make a peer's directory"))?;
        Ok(root)
    }

    /// Tells the server whose address it is: until then the peer waits with all that it asks.
    fn know(&self, peer: IpAddr) -> Result<(), TransportError> {
        self.write(Cache::Addresses, &cache::address(peer, &name::domain(peer)))
    }

    fn tell_root(&self, peer: IpAddr) -> Result<(), TransportError> {
        let line = cache::handle(&name::domain(peer), HandleKey::Root, Some(&self.peer_root(peer)));
        self.write(Cache::Handles, &line)
    }

    /// Those who were ever admitted.
    fn peers(&self) -> Result<BTreeSet<IpAddr>, TransportError> {
        let names = self.host.directory_names(&self.root.join("peers")).map_err(kernel("list peers"))?;
        Ok(names.unwrap_or_default().iter().filter_map(|n| n.to_str()?.parse().ok()).collect())
    }

    /// Has these peers wait with all that they ask, until the server knows them again.
    fn close(&self, closed: &BTreeSet<IpAddr>) -> Result<(), TransportError> {
        // The kernel keeps in mind who they are for as long as something is exported to them.
        closed.iter().try_for_each(|peer| self.admit(*peer))?;
        let action = "have the NFS server wait with a peer";
        self.host.nfs_cache_flush(&self.roots, Cache::Addresses).map_err(kernel(action))?;
        self.peers()?.difference(closed).try_for_each(|peer| self.know(*peer))?;
        // For those that were let in just before.
        sleep(PAUSE);
        Ok(())
    }

    /// What the directory that is bound for a peer lets it do; `None`: none is bound.
    fn bound_right(&self, mounts: &MountTable, peer: IpAddr, id: &ExportId) -> Option<Right> {
        // Of the mount itself: a filesystem that is read-only for now gives no other right.
        let reads = |entry: &MountEntry| entry.options.iter().any(|option| option == "ro");
        let entry = mounts.at(&self.peer_point(peer, id))?;
        Some(if reads(entry) { Right::Read } else { Right::Write })
    }

    /// Tells the server of a right for which a directory is bound.
    fn grant(&self, peer: IpAddr, id: &ExportId, right: Right) -> Result<(), TransportError> {
        self.tell_export(peer, id, right)?;
        self.tell_handles(peer, id)
    }

    fn tell_export(&self, peer: IpAddr, id: &ExportId, right: Right) -> Result<(), TransportError> {
        let (domain, point) = (name::domain(peer), self.peer_point(peer, id));
        let reads = right == Right::Read;
        self.write(Cache::Exports, &cache::granted(&domain, &point, name::uuid(id), reads))
    }

    fn tell_handles(&self, peer: IpAddr, id: &ExportId) -> Result<(), TransportError> {
        let point = self.peer_point(peer, id);
        for key in keys(id, self.inode(&point)?) {
            self.write(Cache::Handles, &cache::handle(&name::domain(peer), key, Some(&point)))?;
        }
        Ok(())
    }

    /// Tells the server that what a peer may still hold of an export is stale.
    fn refuse(&self, taken: &Taken) -> Result<(), TransportError> {
        for key in keys(&taken.id, taken.inode) {
            self.write(Cache::Handles, &cache::handle(&name::domain(taken.peer), key, None))?;
        }
        Ok(())
    }

    /// Refuses a peer what it let go of: its kernel, which claims all that it had open one after the other, goes on to the rest.
    fn refuse_released(&self, peer: IpAddr, id: &ExportId) -> Result<(), TransportError> {
        let silent = self.marks.all(Answer::Silence)?;
        // After a restart of this node it may be of a generation that nobody noted: of the same directory all the same.
        let of_it = |taken: &&Taken| taken.peer == peer && taken.id.branch == id.branch;
        let inodes: BTreeSet<u64> = silent.iter().filter(of_it).map(|taken| taken.inode).collect();
        let refused = self.marks.all(Answer::Refusal)?;
        for inode in inodes {
            let taken = Taken { peer, id: id.clone(), inode };
            self.marks.refuse(&taken)?;
            self.refuse(&taken)?;
            // It goes on to tell it, in case nobody heard.
            if !refused.contains(&taken) {
                tracing::info!(
                    branch.id = %id.branch, branch.generation = %id.generation, %peer,
                    "a fenced node let go of the branch by force: what it still asks is refused"
                );
            }
        }
        Ok(())
    }

    /// Notes that a peer waits. A full disk keeps nobody's access from being taken.
    fn note(&self, taken: &Taken) {
        if let Err(error) = self.marks.silence(taken) {
            tracing::error!(
                branch.id = %taken.id.branch, branch.generation = %taken.id.generation, peer = %taken.peer, %error,
                "the fence of a node cannot be noted: programs there that use the branch may wait until they are ended"
            );
        }
    }

    /// Takes rights away, and returns when nothing of them is used any more.
    fn revoke(&self, gone: &BTreeSet<(IpAddr, ExportId)>) -> Result<(), TransportError> {
        if gone.is_empty() {
            return Ok(());
        }
        // What it told before is of an earlier time.
        for (client, ..) in self.released()?.into_iter().filter(|(_, p, e)| gone.contains(&(*p, e.clone()))) {
            self.heard(client)?;
        }
        // What is not told again is not answered: every later request waits, and so does whoever made it. An error would have the
        // peer's union take files for missing before its agent could end it.
        for (peer, id) in gone {
            let inode = self.inode(&self.peer_point(*peer, id))?;
            self.note(&Taken { peer: *peer, id: id.clone(), inode });
        }
        self.renew(gone, &BTreeSet::new())?;
        let mut left = self.release(gone, DRAIN)?;
        if !left.is_empty() {
            // Meanwhile nothing at all of these peers is answered. A client that asks while it is being expired begins to claim what
            // it had open before it has made itself known again; it never says then that it has done, and the server lets it open
            // nothing (Linux 6.1: NFS4ERR_GRACE for as long as it lives).
            let peers: BTreeSet<IpAddr> = left.iter().map(|(peer, _)| *peer).collect();
            let taken = self.close(&peers).and_then(|()| {
                self.expire(&peers)?;
                // The server keeps files open for a while that no one has open any more; emptying the cache closes them.
                self.renew(gone, &peers)?;
                self.release(&left, EXPIRE)
            });
            peers.iter().try_for_each(|peer| self.know(*peer))?;
            left = taken?;
        }
        match left.first() {
            None => Ok(()),
            Some((peer, id)) => Err(TransportError::Kernel {
                action: format!("fence {peer} from branch {}: requests of it are still worked on", id.branch),
                source: std::io::ErrorKind::ResourceBusy.into(),
            }),
        }
    }

    /// Makes the server let go of all that it remembers of exports, and tells it again of what stays, but not whose the addresses of
    /// `closed` are. In between clients wait; should this process end in between, they wait until the rights are given again.
    fn renew(
        &self,
        gone: &BTreeSet<(IpAddr, ExportId)>,
        closed: &BTreeSet<IpAddr>,
    ) -> Result<(), TransportError> {
        let flush = |cache| {
            let action = "make the NFS server let go of exports";
            self.host.nfs_cache_flush(&self.roots, cache).map_err(kernel(action))
        };
        let peers = self.peers()?;
        peers.difference(closed).try_for_each(|peer| self.know(*peer))?;
        let mounts = self.mounts()?;
        let rights = self.rights(&mounts);
        // One after the other: whom nothing refers to any more, neither handle nor export nor address, the kernel does not know.
        flush(Cache::Handles)?;
        for taken in self.marks.all(Answer::Refusal)? {
            self.refuse(&taken)?;
        }
        peers.iter().try_for_each(|peer| self.tell_root(*peer))?;
        rights.difference(gone).try_for_each(|(peer, id)| self.tell_handles(*peer, id))?;
        flush(Cache::Exports)?;
        for peer in peers {
            self.write(Cache::Exports, &cache::root(&name::domain(peer), &self.peer_root(peer)))?;
        }
        for (peer, id) in rights.difference(gone) {
            self.tell_export(*peer, id, self.bound_right(&mounts, *peer, id).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Unmounts what was bound for rights, without force, for at most `bound`; tells which the kernel still uses.
    fn release(
        &self,
        rights: &BTreeSet<(IpAddr, ExportId)>,
        bound: Duration,
    ) -> Result<BTreeSet<(IpAddr, ExportId)>, TransportError> {
        let deadline = Instant::now() + bound;
        let mut left = BTreeSet::new();
        for (peer, id) in rights {
            let point = self.peer_point(*peer, id);
            loop {
                match self.host.unmount(&point, false) {
                    Ok(_) => {
                        self.host.remove_directory(&point).map_err(kernel("remove a mount point"))?;
                        break;
                    }
                    Err(error) if error.is_busy() && Instant::now() < deadline => sleep(PAUSE),
                    Err(error) if error.is_busy() => {
                        left.insert((*peer, id.clone()));
                        break;
                    }
                    Err(error) => return Err(kernel("unmount an export")(error)),
                }
            }
        }
        Ok(left)
    }

    /// Takes all that the peers have open here.
    fn expire(&self, peers: &BTreeSet<IpAddr>) -> Result<(), TransportError> {
        let clients = self.host.nfs_clients(&self.roots).map_err(kernel("list the NFS clients"))?;
        for client in clients.iter().filter(|c| c.address.is_some_and(|a| peers.contains(&a))) {
            let action = "end what a fenced NFS client has open";
            self.host.nfs_client_expire(&self.roots, client.number, EXPIRE).map_err(kernel(action))?;
        }
        Ok(())
    }

    /// Ends an export and every right on it.
    fn end(&self, id: &ExportId) -> Result<(), TransportError> {
        let rights = self.rights(&*self.mounts()?);
        let gone: BTreeSet<_> = rights.into_iter().filter(|(_, of)| of == id).collect();
        self.revoke(&gone)?;
        let point = self.export_point(id);
        // Nothing uses it; but whoever lists mounts at this moment may hold it.
        self.host
            .unmount(&point, true)
            .and_then(|_| self.host.remove_directory(&point))
            .map_err(kernel("unmount an export"))?;
        Ok(())
    }

    fn write_identity(&self, directory: &Path, id: &ExportId) -> Result<(), TransportError> {
        let path = directory.join(IDENTITY);
        let text = Identity::of(id).text();
        let found =
            self.host.read_file(&path, IDENTITY_LIMIT).map_err(kernel("read an export's identity"))?;
        if found.as_deref() == Some(&text) {
            return Ok(());
        }
        self.host.write_atomic(&path, &text).map_err(kernel("write an export's identity"))
    }

    /// The filesystem that holds the directory must be able to find a file by its handle.
    fn require_exportable(&self, directory: &Path) -> Result<(), TransportError> {
        let mounts = self.mounts()?;
        match mounts.containing(directory) {
            Some(entry) if entry.fs_type == "overlay" || entry.fs_type.starts_with("fuse") => {
                Err(TransportError::Unable {
                    action: "export by NFS",
                    reason: format!(
                        "{} lies on {}, which cannot be exported: put the pool on ext4, XFS or btrfs",
                        directory.display(),
                        entry.fs_type
                    ),
                })
            }
            _ => Ok(()),
        }
    }
}

/// How handles of an export begin: both ways, because it may be the root of its filesystem.
fn keys(id: &ExportId, inode: u64) -> [HandleKey; 2] {
    let uuid = name::uuid(id);
    [HandleKey::Uuid(uuid), HandleKey::InodeUuid(inode, uuid)]
}

impl Owner for NfsOwner {
    fn export(&self, id: &ExportId, source: &Source) -> Result<Endpoint, TransportError> {
        let Source::Directory(directory) = source else {
            return Err(TransportError::Unable {
                action: "export an image by NFS",
                reason: "NFS carries directories; images go over NVMe/TCP".to_owned(),
            });
        };
        let _turn = self.turn();
        let look = || kernel(format!("look at {}", directory.display()));
        let wanted = self.host.identity(directory).map_err(look())?.filter(|f| f.directory);
        let Some(wanted) = wanted else {
            return Err(look()(HostError::Syscall {
                call: "opendir",
                subject: directory.display().to_string(),
                source: std::io::ErrorKind::NotADirectory.into(),
            }));
        };
        self.require_exportable(directory)?;
        for other in self.standing(&*self.mounts()?).into_iter().filter(|e| e.branch == id.branch) {
            if other.generation > id.generation {
                return Err(TransportError::Outdated {
                    branch: id.branch.clone(),
                    asked: id.generation,
                    current: other.generation,
                });
            }
            // The same directory; after its disk went and came back, another filesystem.
            let bound = self.host.identity(&self.export_point(&other)).ok().flatten();
            if other.generation < id.generation || bound != Some(wanted) {
                self.end(&other)?;
            }
        }
        self.ensure_ready()?;
        self.write_identity(directory, id)?;
        self.ensure_bound(directory, &self.export_point(id), Right::Write)?;
        Ok(self.endpoint(id))
    }

    fn allow(
        &self,
        id: &ExportId,
        peer: &Peer,
        right: Right,
        secret: Option<&Secret>,
    ) -> Result<(), TransportError> {
        if secret.is_some() {
            return Err(TransportError::Unable {
                action: "authenticate a peer by NFS",
                reason: "it knows peers by their address only".to_owned(),
            });
        }
        let peer = name::address(peer)?;
        let _turn = self.turn();
        let mounts = self.mounts()?;
        let standing = self.standing(&mounts);
        if !standing.contains(id) {
            let later = standing.iter().find(|e| e.branch == id.branch && e.generation > id.generation);
            return Err(match later {
                Some(later) => TransportError::Outdated {
                    branch: id.branch.clone(),
                    asked: id.generation,
                    current: later.generation,
                },
                None => TransportError::Absent { branch: id.branch.clone(), what: "exported" },
            });
        }
        self.ensure_ready()?;
        if self.bound_right(&mounts, peer, id).is_some_and(|bound| bound != right) {
            self.revoke(&[(peer, id.clone())].into())?;
        }
        self.marks.forget(peer, id)?;
        self.ensure_bound(&self.export_point(id), &self.peer_point(peer, id), right)?;
        self.admit(peer)?;
        self.grant(peer, id, right)
    }

    fn fence(&self, id: &ExportId, peer: &Peer) -> Result<(), TransportError> {
        let peer = name::address(peer)?;
        let _turn = self.turn();
        let mounts = self.mounts()?;
        let rights = self.rights(&mounts);
        let gone: BTreeSet<_> =
            rights.into_iter().filter(|(p, e)| *p == peer && e.branch == id.branch).collect();
        self.revoke(&gone)?;
        // Who was fenced while this node was down may wait for it: it is to be heard when it lets go.
        for other in self.standing(&mounts).into_iter().filter(|e| e.branch == id.branch) {
            let inode = self.inode(&self.export_point(&other))?;
            self.note(&Taken { peer, id: other, inode });
        }
        Ok(())
    }

    fn hear(&self, id: &ExportId, source: &Source, peer: &Peer) -> Result<(), TransportError> {
        let Source::Directory(directory) = source else { return Ok(()) };
        let peer = name::address(peer)?;
        let _turn = self.turn();
        self.marks.silence(&Taken { peer, id: id.clone(), inode: self.inode(directory)? })
    }

    fn tend(&self) -> Result<(), TransportError> {
        let _turn = self.turn();
        self.marks.tidy(|| Ok(self.standing(&*self.mounts()?)))?;
        let marked = self.marks.each()?;
        if marked.is_empty() {
            return Ok(());
        }
        self.ensure_ready()?;
        if marked.iter().all(|(answer, _)| *answer == Answer::Refusal) {
            return Ok(());
        }
        let rights = self.rights(&*self.mounts()?);
        for (client, peer, id) in self.released()? {
            // What it may use it only attaches anew.
            if !rights.contains(&(peer, id.clone())) {
                self.refuse_released(peer, &id)?;
            }
            self.heard(client)?;
        }
        Ok(())
    }

    fn withdraw(&self) -> Result<(), TransportError> {
        let _turn = self.turn();
        let state = self.host.nfs_server_state(&self.roots).map_err(kernel("ask the kernel's NFS server"))?;
        // One that somebody else runs ends by their hand.
        if state.threads == 0 || self.standing(&*self.mounts()?).is_empty() {
            return Ok(());
        }
        self.host.nfs_server_stop(&self.roots).map_err(kernel("stop the NFS server"))
    }

    fn unexport(&self, branch: &BranchId) -> Result<(), TransportError> {
        let _turn = self.turn();
        let mounts = self.mounts()?;
        // Also what is left of an end that was cut short.
        let rights = self.rights(&mounts).into_iter().map(|(_, id)| id);
        let all: BTreeSet<ExportId> = self.standing(&mounts).into_iter().chain(rights).collect();
        all.iter().filter(|id| id.branch == *branch).try_for_each(|id| self.end(id))
    }

    fn grown(&self, id: &ExportId) -> Result<Bytes, TransportError> {
        if !self.standing(&*self.mounts()?).contains(id) {
            return Err(TransportError::Absent { branch: id.branch.clone(), what: "exported" });
        }
        Err(TransportError::Unable {
            action: "grow an export by NFS",
            reason: format!("branch {} is a directory: its consumers see its room at once", id.branch),
        })
    }

    fn durable(&self, _: &Source) -> Result<bool, TransportError> {
        Ok(true)
    }

    fn forgotten(&self) -> Result<bool, TransportError> {
        let _turn = self.turn();
        let bound = self.rights(&*self.mounts()?);
        Ok(self.told(&bound)?.len() < bound.len())
    }

    fn exports(&self) -> Result<Vec<Exported>, TransportError> {
        let mut mounts = self.mounts()?;
        let mut bound = self.rights(&mounts);
        // A right that the server was made to forget (`exportfs -f`) is to be given again.
        let mut rights = self.told(&bound)?;
        if rights.len() < bound.len() {
            // Unless that was ourselves, on the way to something else.
            let _turn = self.turn();
            mounts = self.mounts()?;
            bound = self.rights(&mounts);
            rights = self.told(&bound)?;
        }
        let standing = self.standing(&mounts);
        let all: BTreeSet<&ExportId> = standing.iter().chain(rights.iter().map(|(_, id)| id)).collect();
        let reads = |peer: IpAddr, id: &ExportId| self.bound_right(&mounts, peer, id) == Some(Right::Read);
        let tell = |id: &ExportId| {
            let peers = || rights.iter().filter(|(_, of)| of == id).map(|(peer, _)| *peer);
            Exported {
                id: id.clone(),
                endpoint: standing.contains(id).then(|| self.endpoint(id)),
                allowed: peers().map(|peer| peer.to_string()).collect(),
                readers: peers().filter(|peer| reads(*peer, id)).map(|peer| peer.to_string()).collect(),
            }
        };
        Ok(all.into_iter().map(tell).collect())
    }
}
