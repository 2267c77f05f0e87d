//! Branches on disk: making, finding, attaching, removing.
//!
//! A branch is `<pool>/branches/<id>/`: its identity `branch.json`, and `disk.img` or `data/` (`record`). It is made
//! under an unfinished name and renamed when all of it is flushed (`make`), and renamed away before anything of it is
//! removed (`remove`): whatever has the branch's name is whole, at each moment, and after a crash. Leftovers are known by
//! their names and swept. The identity is checked before each use; what is not the branch is never touched.

pub(super) mod record;

mod attach;
mod hold;
mod make;
mod remove;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use snafu::Snafu;

use crate::domain::{BranchId, Bytes, PoolName};
use crate::node::pool::{OpenPool, Pools};
use crate::platform::{Host, HostError};
use crate::store::object::{BranchPhase, BranchSpec, BranchStatus};

pub(in crate::node) use hold::is_export;
use record::BranchRecord;

/// A branch that is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Where it is mounted; its files are in `data` below. For a raw image: the loop device itself.
    pub mount: PathBuf,
    /// Where it lies in its pool.
    pub backing: PathBuf,
    /// Loop device, for images.
    pub device: Option<PathBuf>,
}

/// A branch found on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundBranch {
    /// The pool.
    pub pool: PoolName,
    /// Its directory.
    pub path: PathBuf,
    /// Its name.
    pub branch: BranchId,
    /// Its size, or why it cannot be understood.
    pub size: Result<Bytes, String>,
}

/// Something is wrong with a branch.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum BranchError {
    /// This node has no such pool, or it cannot be used now.
    #[snafu(display("branch {branch}: pool {pool} cannot be used: {reason}"))]
    Pool {
        /// The branch.
        branch: BranchId,
        /// The pool.
        pool: PoolName,
        /// Why, and what to do.
        reason: String,
    },
    /// The pool has no room for it; nothing was made.
    #[snafu(display(
        "branch {branch} of {wanted} does not fit into pool {pool}: {allocatable} can be promised"
    ))]
    NoRoom {
        /// The branch.
        branch: BranchId,
        /// The pool.
        pool: PoolName,
        /// What it needs.
        wanted: Bytes,
        /// What could be had.
        allocatable: Bytes,
    },
    /// The pool cannot hold a branch like this.
    #[snafu(display("branch {branch}: pool {pool} cannot hold it: {reason}"))]
    Unfit {
        /// The branch.
        branch: BranchId,
        /// The pool.
        pool: PoolName,
        /// Why.
        reason: String,
    },
    /// What lies at its place is not this branch. Nothing was changed.
    #[snafu(display("branch {branch}: {} is not this branch: {reason}", path.display()))]
    Foreign {
        /// The branch.
        branch: BranchId,
        /// Its place.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
    /// It existed and is gone. Nothing was made anew.
    #[snafu(display("branch {branch}: its files are missing at {}", path.display()))]
    Missing {
        /// The branch.
        branch: BranchId,
        /// Its place.
        path: PathBuf,
    },
    /// It is still mounted or attached. Nothing was removed.
    #[snafu(display("branch {branch} is in use: {user}; it goes when that is unmounted"))]
    InUse {
        /// The branch.
        branch: BranchId,
        /// By what.
        user: String,
    },
    /// This node may not use it now: it goes to one node at a time.
    #[snafu(display("branch {branch} cannot be used on this node now: {reason}"))]
    Elsewhere {
        /// The branch.
        branch: BranchId,
        /// Who may, or what is waited for; a sentence.
        reason: String,
    },
    /// What says who may use it cannot be relied on. Nothing was changed.
    #[snafu(display("branch {branch}: {reason}"))]
    Mark {
        /// The branch.
        branch: BranchId,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The machine refused something.
    #[snafu(display("branch {branch}: cannot {action}: {source}"))]
    Host {
        /// The branch.
        branch: BranchId,
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
}

type Result<T, E = BranchError> = std::result::Result<T, E>;

/// The branches in this node's pools. Functions block; two for one branch wait for each other.
#[derive(Debug)]
pub struct Branches {
    host: Host,
    pools: Arc<Pools>,
    busy: Mutex<HashSet<BranchId>>,
    freed: Condvar,
    /// Not to be attached here for now.
    closed: Mutex<HashSet<BranchId>>,
}

/// How long a call waits for another one of the same branch. One that waits for a disk that does not answer may never
/// end, and must not take every thread with it; the longest ordinary one, mkfs of a large image, takes seconds.
const TURN_BOUND: Duration = Duration::from_secs(30);

/// One caller's turn with one branch.
#[derive(Debug)]
struct Turn<'a> {
    branches: &'a Branches,
    branch: BranchId,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut busy = self.branches.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.remove(&self.branch);
        self.branches.freed.notify_all();
    }
}

impl Branches {
    /// The branches in these pools.
    #[must_use]
    pub fn new(host: Host, pools: Arc<Pools>) -> Self {
        Self { host, pools, busy: Mutex::default(), freed: Condvar::new(), closed: Mutex::default() }
    }

    /// Makes the branch, or finds it as it should be. Where `bound` is true it must exist already (a branch that was bound
    /// once is never made anew). Resumes what a crash left half done.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_present(&self, spec: &BranchSpec, bound: bool) -> Result<BranchStatus> {
        let _turn = self.turn(&spec.id)?;
        let pool = self.open(spec)?;
        let record = match self.find(&pool, spec)? {
            Some(record) => record,
            None if bound => {
                return branch_error::MissingSnafu { branch: spec.id.clone(), path: place(&pool, &spec.id) }
                    .fail();
            }
            None => self.make(&pool, spec)?,
        };
        Ok(BranchStatus {
            phase: BranchPhase::Bound,
            reason: if pool.read_only {
                format!("pool {} takes no writes", pool.name)
            } else {
                String::new()
            },
            bytes_used: self.occupied_by(&pool, &record),
            enforcement: record.enforcement,
            fs_uuid: record.fs_uuid,
            export: None,
            sharing: None,
            conditions: Vec::new(),
        })
    }

    /// Removes the branch and all its files. Nothing to remove is success; a pool that is absent is not.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_absent(&self, spec: &BranchSpec) -> Result<()> {
        let _turn = self.turn(&spec.id)?;
        let pool = self.open(spec)?;
        self.remove(&pool, spec)
    }

    /// Checks the branch's identity and that this node may use it, and mounts it at `at` (made where missing, immutable beneath the mount), so that its
    /// files are in `<at>/data`. Already attached there and answering is success. A raw image gets only its loop device.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_attached(&self, spec: &BranchSpec, at: &Path, read_only: bool) -> Result<Attached> {
        let _turn = self.turn(&spec.id)?;
        self.attach(spec, at, read_only)
    }

    /// Takes back what [`Branches::ensure_attached`] did at `at`; needs neither the spec nor the pool. `force`: lazily.
    ///
    /// # Errors
    /// EBUSY where files are open and `force` is false.
    pub fn ensure_detached(&self, branch: &BranchId, at: &Path, force: bool) -> Result<()> {
        let _turn = self.turn(branch)?;
        self.detach(branch, at, force)
    }

    /// What the branch occupies on its disk.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn occupied(&self, spec: &BranchSpec) -> Result<Bytes> {
        let pool = self.open(spec)?;
        match self.find(&pool, spec)? {
            Some(record) => Ok(self.occupied_by(&pool, &record)),
            None => {
                branch_error::MissingSnafu { branch: spec.id.clone(), path: place(&pool, &spec.id) }.fail()
            }
        }
    }

    /// All branches on this node's disks, for finding those that no one knows any more. Pools that cannot be used now are
    /// left out.
    #[must_use]
    pub fn scan(&self) -> Vec<FoundBranch> {
        let mut found = Vec::new();
        for pool in self.open_pools() {
            let names = self.host.directory_names(&pool.branches()).ok().flatten().unwrap_or_default();
            for branch in names.iter().filter_map(|n| n.to_str()?.parse::<BranchId>().ok()) {
                let path = place(&pool, &branch);
                let size = match record::read_or_why(&self.host, &path) {
                    Ok(record) => record.map(|r| r.size),
                    Err(e) => Err(e.to_string()),
                };
                found.push(FoundBranch { pool: pool.name.clone(), path, branch, size });
            }
        }
        found.sort_by(|a, b| (&a.pool, &a.branch).cmp(&(&b.pool, &b.branch)));
        found
    }

    /// Removes what crashes left half made or half removed, in the pools that can be used now, and tells how much and what
    /// could not be removed.
    #[must_use]
    pub fn sweep(&self) -> (usize, Vec<BranchError>) {
        let (mut swept, mut errors) = (0, Vec::new());
        for pool in self.open_pools() {
            let names = self.host.directory_names(&pool.branches()).ok().flatten().unwrap_or_default();
            for branch in names.iter().filter_map(|n| record::leftover(n.to_str()?)) {
                let cleared = self.turn(&branch).and_then(|_turn| self.clear(&pool, &branch));
                match cleared {
                    Ok(()) => swept += 1,
                    Err(e) => errors.push(e),
                }
            }
        }
        (swept, errors)
    }

    fn open_pools(&self) -> impl Iterator<Item = OpenPool> {
        self.pools.names().unwrap_or_default().into_iter().filter_map(|name| self.pools.open(&name).ok())
    }

    fn open(&self, spec: &BranchSpec) -> Result<OpenPool> {
        self.pools.open(&spec.pool).map_err(|reason| BranchError::Pool {
            branch: spec.id.clone(),
            pool: spec.pool.clone(),
            reason,
        })
    }

    /// The branch's identity, checked; `None` where nothing is at its place.
    fn find(&self, pool: &OpenPool, spec: &BranchSpec) -> Result<Option<BranchRecord>> {
        let path = place(pool, &spec.id);
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let foreign = |reason: String| {
            branch_error::ForeignSnafu { branch: spec.id.clone(), path: path.clone(), reason }.fail()
        };
        match self.host.identity(&path).map_err(host("look at its place"))? {
            None => return Ok(None),
            Some(found) if !found.directory => return foreign("it is no directory".to_owned()),
            Some(_) => {}
        }
        let record = match record::read_or_why(&self.host, &path).map_err(host("read its identity"))? {
            Ok(record) => record,
            Err(reason) => return foreign(reason),
        };
        if let Some(reason) = record.differs(spec) {
            return foreign(reason);
        }
        match self.content_differs(&path, &record).map_err(host("examine it"))? {
            Some(reason) => foreign(reason),
            None => Ok(Some(record)),
        }
    }

    /// What of the branch's content is not as its identity says.
    fn content_differs(&self, place: &Path, record: &BranchRecord) -> Result<Option<String>, HostError> {
        use crate::domain::split::BranchFormat;
        if record.format == BranchFormat::Directory {
            let data = place.join(record::DATA);
            return Ok(match self.host.identity(&data)? {
                Some(found) if found.directory => None,
                Some(_) => Some(format!("its {} is no directory", record::DATA)),
                None => Some(format!("its {} is gone", record::DATA)),
            });
        }
        let image = place.join(record::IMAGE);
        match self.host.identity(&image)? {
            None => return Ok(Some(format!("its {} is gone", record::IMAGE))),
            Some(found) if found.directory => {
                return Ok(Some(format!("its {} is a directory", record::IMAGE)));
            }
            Some(_) => {}
        }
        let (_, length) = self.host.occupied(&image)?;
        if length != record.size.get() {
            return Ok(Some(format!(
                "its {} has {length} bytes, expected {}",
                record::IMAGE,
                record.size.get()
            )));
        }
        let Some(wanted) = &record.fs_uuid else { return Ok(None) };
        Ok(match self.host.probe_filesystem(&image)? {
            Some((uuid, _)) if uuid == *wanted => None,
            Some((uuid, kind)) => Some(format!("its image holds {kind} {uuid}, expected {wanted}")),
            None => Some(format!("its image holds no filesystem, expected {wanted}")),
        })
    }

    fn occupied_by(&self, pool: &OpenPool, record: &BranchRecord) -> Bytes {
        let known = crate::node::pool::Known::from(record);
        crate::node::pool::occupied(&self.host, &place(pool, &record.branch), &known)
    }

    /// Waits for this caller's turn with the branch, within [`TURN_BOUND`].
    fn turn(&self, branch: &BranchId) -> Result<Turn<'_>> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = Instant::now() + TURN_BOUND;
        while busy.contains(branch) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(BranchError::Host {
                    branch: branch.clone(),
                    action: "use it",
                    source: HostError::Timeout {
                        action: "an earlier call",
                        subject: branch.to_string(),
                        seconds: TURN_BOUND.as_secs(),
                    },
                });
            }
            busy = self.freed.wait_timeout(busy, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        busy.insert(branch.clone());
        Ok(Turn { branches: self, branch: branch.clone() })
    }
}

/// Where a branch lies in its pool.
fn place(pool: &OpenPool, branch: &BranchId) -> PathBuf {
    pool.branches().join(branch)
}
