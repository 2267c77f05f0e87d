//! Branches on disk: making, finding, attaching, removing.

use std::path::{Path, PathBuf};

use snafu::Snafu;

use crate::domain::{BranchId, Bytes, PoolName};
use crate::platform::HostError;
use crate::store::object::{BranchSpec, BranchStatus};

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

/// The branches in this node's pools. Functions block.
#[derive(Debug)]
pub struct Branches {}

impl Branches {
    /// Makes the branch, or finds it as it should be. Where `bound` is true it must exist already (a branch that was bound
    /// once is never made anew). Resumes what a crash left half done.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_present(&self, spec: &BranchSpec, bound: bool) -> Result<BranchStatus, BranchError> {
        let _ = (spec, bound);
        unimplemented!()
    }

    /// Removes the branch and all its files. Nothing to remove is success; a pool that is absent is not.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_absent(&self, spec: &BranchSpec) -> Result<(), BranchError> {
        let _ = spec;
        unimplemented!()
    }

    /// Checks the branch's identity and mounts it at `at` (made where missing, immutable beneath the mount), so that its
    /// files are in `<at>/data`. Already attached there and answering is success. A raw image gets only its loop device.
    ///
    /// # Errors
    /// See [`BranchError`].
    pub fn ensure_attached(
        &self,
        spec: &BranchSpec,
        at: &Path,
        read_only: bool,
    ) -> Result<Attached, BranchError> {
        let _ = (spec, at, read_only);
        unimplemented!()
    }

    /// Takes back what [`Branches::ensure_attached`] did at `at`; needs neither the spec nor the pool. `force`: lazily.
    ///
    /// # Errors
    /// EBUSY where files are open and `force` is false.
    pub fn ensure_detached(&self, branch: &BranchId, at: &Path, force: bool) -> Result<(), BranchError> {
        let _ = (branch, at, force);
        unimplemented!()
    }
}
