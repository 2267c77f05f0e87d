//! Staging and publishing volumes on this node: what the CSI node service calls.
//!
//! ```text
//! pools -> branches attached at <state>/volumes/<volume>/branches/<index>
//!       -> union mounted at     <state>/volumes/<volume>/union-<generation>
//!       -> its data/ bound at   the staging path, and from there at each target
//! ```
//!
//! What flows in: requests of the CSI service, volumes and branches of the store. What flows out: mounts, and one record
//! a volume that says what is intended. Invariants:
//!
//! - the record is written before the effects, so that whoever comes after a crash can finish or take back;
//! - what is mounted is read from the kernel each time; a dead mount is never called "already mounted";
//! - a path of a caller is used only below an allowed directory and never through a symlink there;
//! - a branch is let go by a real unmount only: when unstaging succeeds its data is on the disk.
//!
//! The work is done by `Core`, which blocks; [`Volumes`] runs it on blocking threads, one call a volume at a time.

mod attach;
mod bring_up;
mod diagnose;
mod end_use;
mod error;
mod flags;
mod following;
mod holders;
mod keys;
mod links;
mod look;
mod parallel;
mod paths;
mod plan;
mod publish;
mod record;
mod recover;
mod remote;
mod repair;
mod slot;
mod stage;
mod stats;
mod sweep;
mod tally;
mod types;
mod view;
mod waiting;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub use self::error::VolumeError;
pub(in crate::node) use self::following::{Followed, News, to_follow};
use self::links::Links;
use self::paths::Places;
use self::record::Records;
pub use self::repair::Outcome;
use self::slot::{Slot, Slots};
use self::tally::Tally;
pub use self::tally::TallyCounts;
pub use self::types::{
    Access, AttachedBranch, Health, LinkState, PublishRequest, RemoteBranch, StageRequest, Usage,
    VolumeSnapshot, VolumeStats,
};
use self::waiting::{BranchNews, GRANT_BOUND};
use crate::domain::{NodeName, VolumeId};
use crate::node::access::LocalUse;
use crate::node::branch::Branches;
use crate::node::keys::KeyFiles;
use crate::node::transport::{Carried, Transports};
use crate::node::union::Unions;
use crate::platform::fserror::FsErrors;
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};
use crate::store::object::BranchSpec;
use crate::store::{Selector, Store};

/// The directory of a branch that holds the user's files; what a workload gets is a bind of it, never of the root of a
/// union, whose control file would let it out (see `docs/SEMANTICS.md`).
const DATA: &str = "data";

/// How long a call waits for another one of the same volume, or for its repair: less than the two minutes after which the
/// kubelet gives up a call.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a branch or a filesystem may take to answer a question that a caller waits for.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Volumes on this node, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSettings {
    /// The agent's state directory.
    pub state_dir: PathBuf,
    /// Directories below which staging and target paths may lie.
    pub allowed_targets: Vec<PathBuf>,
}

/// Volumes on this node. All calls are idempotent; two calls for one volume follow one another.
#[derive(Clone)]
pub struct Volumes {
    core: Arc<Core>,
    store: Arc<dyn Store>,
}

impl std::fmt::Debug for Volumes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volumes").field("core", &self.core).finish_non_exhaustive()
    }
}

/// The blocking part: everything but the store.
#[derive(Debug)]
struct Core {
    host: Host,
    node: NodeName,
    branches: Arc<Branches>,
    unions: Arc<Unions>,
    transports: Arc<Transports>,
    keys: KeyFiles,
    links: Links,
    state_dir: PathBuf,
    records: Records,
    places: Places,
    boot_id: String,
    /// Where filesystems tell of errors, if this kernel can.
    errors: Option<Arc<FsErrors>>,
    slots: Slots,
    tally: Tally,
    /// Told when a process is to be watched or no longer.
    changed: tokio::sync::Notify,
}

impl Volumes {
    /// Volumes on `node`. Changes nothing: see [`Volumes::recover`].
    ///
    /// # Errors
    /// The state directory cannot be made, or the boot id not read.
    pub fn new(
        host: Host,
        store: Arc<dyn Store>,
        node: NodeName,
        branches: Arc<Branches>,
        unions: Arc<Unions>,
        transports: Arc<Transports>,
        settings: VolumeSettings,
    ) -> Result<Self, HostError> {
        let records = Records::new(host.clone(), &settings.state_dir);
        host.ensure_directory(records.root(), 0o700)?;
        let boot_id = host.boot_id()?;
        let errors = host.fs_errors().map(Arc::new);
        let core = Core {
            keys: KeyFiles::new(&host, &settings.state_dir),
            errors,
            places: Places::new(host.clone(), settings.allowed_targets),
            state_dir: settings.state_dir,
            slots: Slots::default(),
            tally: Tally::default(),
            changed: tokio::sync::Notify::new(),
            host,
            node,
            branches,
            unions,
            transports,
            links: Links::default(),
            records,
            boot_id,
        };
        Ok(Self { core: Arc::new(core), store })
    }

    /// Attaches the volume's branches, starts its union, and binds it at the staging path. Where branches are to be given to
    /// this node or opened to it first, that is waited for, a minute at most.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn stage(&self, request: &StageRequest) -> Result<(), VolumeError> {
        let volume = &request.volume;
        let failed = |source| VolumeError::Store { volume: volume.clone(), source };
        let split = self.store.splits().get(volume.as_str()).await.map_err(failed)?;
        let Some(split) = split else { return Err(VolumeError::Unknown { volume: volume.clone() }) };
        let mut branches =
            self.store.branches().list(&Selector::Volume(volume.clone())).await.map_err(failed)?;
        let split = Arc::new(split);
        let deadline = tokio::time::Instant::now() + GRANT_BOUND;
        let mut news: Option<BranchNews> = None;
        loop {
            self.take_keys(&split, &branches).await?;
            let (request, split, seen) = (request.clone(), split.clone(), branches.clone());
            let outcome = self.run(volume, move |core, slot| core.stage(slot, &request, &split, &seen)).await;
            let Err(VolumeError::NotYet { .. }) = &outcome else { return outcome };
            // Nothing is held meanwhile: whoever wants the volume otherwise need not wait for this.
            let changed = async {
                let news = match &mut news {
                    Some(news) => news,
                    None => news.insert(BranchNews::begin(self.store.as_ref(), volume, &branches).await?),
                };
                news.changed().await
            };
            match tokio::time::timeout_at(deadline, changed).await {
                Ok(now) => branches = now.map_err(failed)?,
                Err(_) => return outcome,
            }
        }
    }

    /// Takes back what [`Volumes::stage`] did; also for a volume that no longer exists.
    ///
    /// # Errors
    /// [`VolumeError::Busy`] while it is published.
    pub async fn unstage(&self, volume: &VolumeId, staging: &Path) -> Result<(), VolumeError> {
        let (id, staging) = (volume.clone(), staging.to_owned());
        self.run(volume, move |core, slot| core.unstage(slot, &id, &staging)).await
    }

    /// Binds the staged volume at the target.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn publish(&self, request: &PublishRequest) -> Result<(), VolumeError> {
        let request = request.clone();
        let volume = request.volume.clone();
        self.run(&volume, move |core, slot| core.publish(slot, &request)).await
    }

    /// Takes back what [`Volumes::publish`] did, and removes the target.
    ///
    /// # Errors
    /// See [`VolumeError`].
    pub async fn unpublish(&self, volume: &VolumeId, target: &Path) -> Result<(), VolumeError> {
        let (id, target) = (volume.clone(), target.to_owned());
        self.run(volume, move |core, _| core.unpublish(&id, &target)).await
    }

    /// Space and health of the volume at `path`, where it is staged or published. Never waits for a branch longer than a
    /// few seconds.
    ///
    /// # Errors
    /// [`VolumeError::Unknown`] where the volume is not at that path.
    pub async fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats, VolumeError> {
        let (id, path) = (volume.clone(), path.to_owned());
        let core = self.core.clone();
        blocking(volume, move || core.stats(&id, &path)).await
    }

    /// All volumes on this node.
    pub async fn snapshot(&self) -> Vec<VolumeSnapshot> {
        let core = self.core.clone();
        tokio::task::spawn_blocking(move || core.snapshot()).await.unwrap_or_default()
    }

    /// Whether this node can serve volumes now; the reason where it cannot. For Probe and `/readyz`.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub async fn ready(&self) -> Result<(), String> {
        let core = self.core.clone();
        tokio::task::spawn_blocking(move || core.ready())
            .await
            .unwrap_or_else(|_| Err("the agent is shutting down".to_owned()))
    }

    /// What the healing of unions came to since the agent started.
    #[must_use]
    pub fn tally(&self) -> TallyCounts {
        self.core.tally.counts()
    }

    /// Goes on where an earlier agent stopped: adopts what runs, repairs what died meanwhile; after a reboot stages and
    /// publishes again what is marked so, and forgets the rest, which the orchestrator will ask for again. Call it once,
    /// before requests are served. What fails is logged, reported as the volume's health, and tried again by the healer.
    pub async fn recover(&self) {
        let core = self.core.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || core.recover()).await {
            tracing::error!(error = %error, "adopting volumes ended early");
        }
    }

    /// Ends what is attached of other nodes' branches and is on no volume's record.
    pub async fn sweep(&self) {
        let core = self.core.clone();
        if let Err(error) = tokio::task::spawn_blocking(move || core.sweep()).await {
            tracing::error!(%error, "looking for attachments that nobody needs ended early");
        }
    }

    /// What this node can carry, and each change of it.
    pub(in crate::node) fn carried(&self) -> watch::Receiver<Carried> {
        self.core.transports.watch()
    }

    /// Looks at the volume and repairs it where needed. `None` where someone else is at it just now.
    pub(in crate::node) async fn heal(&self, volume: &VolumeId) -> Option<Outcome> {
        let slot = self.core.slots.of(volume);
        let guard = slot.lock.clone().try_lock_owned().ok()?;
        let (core, volume) = (self.core.clone(), volume.clone());
        tokio::task::spawn_blocking(move || {
            let _guard = guard;
            core.heal(&slot, &volume, None)
        })
        .await
        .ok()
    }

    /// The volumes that are not as they should be at a first look: one reading of the mounts for all, one question to each
    /// branch and daemon. And how many volumes there are.
    pub(in crate::node) async fn suspicious(&self) -> (Vec<VolumeId>, usize) {
        let core = self.core.clone();
        match tokio::task::spawn_blocking(move || core.suspicious()).await {
            Ok(Ok(seen)) => seen,
            Ok(Err(error)) => {
                tracing::error!(error = %error, "volumes cannot be looked at");
                (Vec::new(), 0)
            }
            Err(_) => (Vec::new(), 0),
        }
    }

    /// The volumes of which a branch under a running MergerFS has failed: a question to each inode, cheap enough for several
    /// times a second.
    pub(in crate::node) async fn failing(&self) -> Vec<VolumeId> {
        let core = self.core.clone();
        match tokio::task::spawn_blocking(move || core.failing()).await {
            Ok(Ok(failing)) => failing,
            Ok(Err(error)) => {
                tracing::error!(error = %error, "branches cannot be asked");
                Vec::new()
            }
            Err(_) => Vec::new(),
        }
    }

    /// A descriptor that becomes readable when the filesystem of a branch under a MergerFS tells of an error; emptied with
    /// [`FsErrors::take`].
    pub(in crate::node) fn fs_errors(&self) -> Option<std::os::fd::OwnedFd> {
        self.core.errors.as_ref()?.descriptor().ok()
    }

    /// Cuts the unions off, at once, that run over a filesystem on this device, as the kernel names it. The volumes.
    pub(in crate::node) fn cut_off(&self, device: &str) -> Vec<VolumeId> {
        self.core.cut_off(device)
    }

    /// The MergerFS processes to be watched.
    pub(in crate::node) fn processes(&self) -> Vec<(VolumeId, ProcessId)> {
        self.core.slots.processes()
    }

    /// Returns when [`Volumes::processes`] has changed.
    pub(in crate::node) async fn changed(&self) {
        self.core.changed.notified().await;
    }

    /// The machine, for watching processes.
    pub(in crate::node) fn host(&self) -> &Host {
        &self.core.host
    }

    /// Runs `work` while no one else changes the volume. It runs to its end also when the caller goes away.
    async fn run<T: Send + 'static>(
        &self,
        volume: &VolumeId,
        work: impl FnOnce(&Core, &Slot) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let slot = self.core.slots.of(volume);
        let guard =
            tokio::time::timeout(LOCK_TIMEOUT, slot.lock.clone().lock_owned()).await.map_err(|_| {
                VolumeError::Busy {
                    volume: volume.clone(),
                    reason: "another call or its repair is still under way; try again".to_owned(),
                }
            })?;
        let core = self.core.clone();
        blocking(volume, move || {
            let _guard = guard;
            work(&core, &slot)
        })
        .await
    }
}

impl LocalUse for Volumes {
    fn end(&self, branch: &BranchSpec) -> Result<(), String> {
        self.core.end_use(branch)
    }
}

async fn blocking<T: Send + 'static>(
    volume: &VolumeId,
    work: impl FnOnce() -> Result<T, VolumeError> + Send + 'static,
) -> Result<T, VolumeError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(VolumeError::Busy {
            volume: volume.clone(),
            reason: "the agent is shutting down; try again".to_owned(),
        }),
    }
}
