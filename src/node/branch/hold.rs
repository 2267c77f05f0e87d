//! A branch whose turn a caller has, for what is decided and done in one: who may use it.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use super::record::{self, BranchRecord};
use super::{BranchError, Branches, Result, Turn, branch_error, place};
use crate::domain::access::shared::{SharedConsuming, SharedMark, governs, shared_consumer_step};
use crate::domain::access::{ConsumerDecision, Consuming, Mark, consumer_step};
use crate::domain::split::BranchFormat;
use crate::domain::{BranchId, NodeName};
use crate::node::access::Held;
use crate::node::access::mark::{self, Kept};
use crate::node::pool::{BRANCHES, OpenPool};
use crate::node::transport::Source;
use crate::platform::loopdev::LoopDevice;
use crate::platform::mount::MountEntry;
use crate::platform::{Host, HostError};
use crate::store::object::BranchSpec;

/// A branch that is there, and that nobody else attaches, exports or removes meanwhile.
#[derive(Debug)]
pub(in crate::node) struct HeldBranch<'a> {
    host: &'a Host,
    _turn: Turn<'a>,
    pool: OpenPool,
    place: PathBuf,
    branch: BranchId,
    format: BranchFormat,
    write_through: bool,
    encrypted: bool,
}

/// While it lives, this node attaches the branch for nobody.
#[derive(Debug)]
pub(in crate::node) struct Closed<'a> {
    branches: &'a Branches,
    branch: BranchId,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.branches.closed.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.branch);
    }
}

impl Branches {
    /// Takes the turn with the branch. Its content is not looked at: who used it must be fenced from a damaged one, too.
    ///
    /// # Errors
    /// [`BranchError`]; [`BranchError::Missing`] where nothing lies at its place.
    pub(in crate::node) fn hold(&self, spec: &BranchSpec) -> Result<HeldBranch<'_>> {
        let turn = self.turn(&spec.id)?;
        let pool = self.open(spec)?;
        let place = place(&pool, &spec.id);
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        if self.host.identity(&place).map_err(host("look at its place"))?.is_none() {
            return branch_error::MissingSnafu { branch: spec.id.clone(), path: place }.fail();
        }
        let record = record::read_or_why(&self.host, &place).map_err(host("read its identity"))?;
        let record = record.and_then(|record| record.differs(spec).map_or(Ok(record), Err));
        let record = record.or_else(|reason| {
            branch_error::ForeignSnafu { branch: spec.id.clone(), path: place.clone(), reason }.fail()
        })?;
        let (branch, format) = (spec.id.clone(), spec.format);
        // As it was made, also where an object of a newer program says otherwise: what was written through stays so.
        let write_through = record.write_through;
        // Whoever says that nobody may read it is right.
        let encrypted = record.encrypted || spec.encrypted;
        Ok(HeldBranch {
            host: &self.host,
            _turn: turn,
            pool,
            place,
            branch,
            format,
            write_through,
            encrypted,
        })
    }

    /// Closes the branch to attaching on this node.
    pub(in crate::node) fn close(&self, branch: &BranchId) -> Closed<'_> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).insert(branch.clone());
        Closed { branches: self, branch: branch.clone() }
    }

    /// Whether this node has the branch attached, in whatever mount namespace.
    ///
    /// # Errors
    /// It cannot be told.
    pub(in crate::node) fn attached_here(&self, spec: &BranchSpec) -> Result<bool> {
        self.hold(spec)?.here()
    }

    /// The devices that have the branch's image, of which there is one at most.
    ///
    /// # Errors
    /// They cannot be told.
    pub(in crate::node) fn devices(&self, spec: &BranchSpec) -> Result<Vec<LoopDevice>> {
        let held = self.hold(spec)?;
        let devices = self.host.loop_devices_of(&held.place.join(record::IMAGE));
        devices.map_err(held.failed("look for its loop devices"))
    }

    /// This boot.
    pub(in crate::node) fn boot_id(&self, branch: &BranchId) -> Result<String> {
        let failed = |source| BranchError::Host { branch: branch.clone(), action: "tell this boot", source };
        self.host.boot_id().map_err(failed)
    }

    /// The branches of which `which` holds, in the pools that can be used now, as their identities tell them. Copies of
    /// branches of other places are none.
    pub(in crate::node) fn specs(
        &self,
        node: &NodeName,
        which: impl Fn(&Host, &Path) -> bool,
    ) -> Vec<BranchSpec> {
        let mut found = Vec::new();
        for pool in self.open_pools() {
            let names = self.host.directory_names(&pool.branches()).ok().flatten().unwrap_or_default();
            for branch in names.iter().filter_map(|n| n.to_str()?.parse::<BranchId>().ok()) {
                let path = place(&pool, &branch);
                if let Ok(Ok(record)) = record::read_or_why(&self.host, &path)
                    && record.branch == branch
                    && record.elsewhere(node, &pool.name).is_none()
                    && which(&self.host, &path)
                {
                    found.push(record.spec(node, &pool.name));
                }
            }
        }
        found
    }

    /// Whether a volume of this node may attach the branch at `path` now. An own branch has no other judge than the mark, which
    /// the caller's turn keeps as it is.
    pub(super) fn permit(&self, spec: &BranchSpec, path: &Path) -> Result<()> {
        let elsewhere =
            |reason: String| branch_error::ElsewhereSnafu { branch: spec.id.clone(), reason }.fail();
        if self.closed.lock().unwrap_or_else(PoisonError::into_inner).contains(&spec.id) {
            return elsewhere("its use on this node is being ended".to_owned());
        }
        let read =
            |source| BranchError::Host { branch: spec.id.clone(), action: "read who may use it", source };
        let mark: Option<Mark> = known(spec, mark::read(&self.host, path).map_err(read)?)?;
        let shared: Option<SharedMark> = match spec.format {
            BranchFormat::Directory => known(spec, mark::read(&self.host, path).map_err(read)?)?,
            BranchFormat::Image => None,
        };
        // What is attached already is asked about in the same way: it may be dead, and would be attached anew.
        let decision = if governs(spec.sharing.as_ref(), shared.as_ref(), false) {
            shared_consumer_step(&SharedConsuming {
                node: &spec.node,
                owner: &spec.node,
                needed: true,
                sharing: spec.sharing.as_ref(),
                report: None,
                held: &[],
                here: false,
                mark: shared.as_ref(),
            })
        } else {
            consumer_step(&Consuming {
                node: &spec.node,
                owner: &spec.node,
                needed: true,
                access: spec.access.as_ref(),
                report: None,
                held: &[],
                here: false,
                mark: mark.as_ref(),
            })
        };
        match decision {
            ConsumerDecision::AttachHere => Ok(()),
            ConsumerDecision::Wait(reason) => elsewhere(reason.to_string()),
            ConsumerDecision::Attach { .. }
            | ConsumerDecision::Detach(_)
            | ConsumerDecision::DetachHere
            | ConsumerDecision::ForceDetach(_)
            | ConsumerDecision::Settled => elsewhere("it is not this node's to attach".to_owned()),
        }
    }
}

/// What is kept beside the branch; without knowing that, nothing of it is attached.
fn known<M>(spec: &BranchSpec, kept: Kept<M>) -> Result<Option<M>> {
    let reason = match kept {
        Kept::Nothing => return Ok(None),
        Kept::Mark(mark) => return Ok(Some(mark)),
        Kept::Lost(reason) => format!(
            "{reason}: it is written anew from the branch's object; where that names nobody, remove the file if no other node uses \
             the branch"
        ),
        Kept::Newer(reason) => reason,
    };
    branch_error::MarkSnafu { branch: spec.id.clone(), reason }.fail()
}

impl HeldBranch<'_> {
    fn failed(&self, action: &'static str) -> impl Fn(HostError) -> BranchError + '_ {
        move |source| BranchError::Host { branch: self.branch.clone(), action, source }
    }
}

/// Whether the mount is the NFS server's: those are named by branch and generation (`BRANCH@GENERATION`), and who may use them is
/// asked of the transport.
pub(in crate::node) fn is_export(entry: &MountEntry, branch: &BranchId) -> bool {
    let name = entry.mount_point.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.split_once('@')).is_some_and(|(of, generation)| {
        of == branch.as_str() && generation.bytes().all(|b| b.is_ascii_digit())
    })
}

impl Held for HeldBranch<'_> {
    fn kept(&self) -> Result<Kept> {
        mark::read(self.host, &self.place).map_err(self.failed("read who may use it"))
    }

    fn remember(&self, mark: &Mark) -> Result<()> {
        mark::write(self.host, &self.place, mark).map_err(self.failed("note who may use it"))
    }

    fn kept_shared(&self) -> Result<Kept<SharedMark>> {
        mark::read(self.host, &self.place).map_err(self.failed("read who shares it"))
    }

    fn remember_shared(&self, mark: &SharedMark) -> Result<()> {
        mark::write(self.host, &self.place, mark).map_err(self.failed("note who shares it"))
    }

    fn here(&self) -> Result<bool> {
        match self.format {
            // There is one for as long as anything has its filesystem open, in whatever mount namespace.
            BranchFormat::Image => {
                let devices = self.host.loop_devices_of(&self.place.join(record::IMAGE));
                devices.map(|d| !d.is_empty()).map_err(self.failed("look for its loop devices"))
            }
            BranchFormat::Directory => {
                let inside = self.pool.within.join(BRANCHES).join(&self.branch);
                let ours = |entry: &MountEntry| {
                    entry.device == self.pool.mounted
                        && entry.root.starts_with(&inside)
                        && !is_export(entry, &self.branch)
                };
                self.host.mounted_anywhere(ours).map_err(self.failed("look where it is mounted"))
            }
        }
    }

    fn source(&self) -> Source {
        match self.format {
            BranchFormat::Image => Source::Image {
                path: self.place.join(record::IMAGE),
                write_through: self.write_through,
                encrypted: self.encrypted,
            },
            BranchFormat::Directory => Source::Directory(self.place.clone()),
        }
    }
}

impl BranchRecord {
    /// What an object would say of the branch, as far as its node knows.
    pub(in crate::node) fn spec(&self, node: &NodeName, pool: &crate::domain::PoolName) -> BranchSpec {
        BranchSpec {
            id: self.branch.clone(),
            volume: self.volume.clone(),
            index: self.index,
            node: node.clone(),
            pool: pool.clone(),
            size: self.size,
            usable: self.size,
            format: self.format,
            fs_type: self.fs_type,
            thin: self.thin,
            accept_unenforced: true,
            write_through: self.write_through,
            encrypted: self.encrypted,
            access: None,
            sharing: None,
        }
    }
}
