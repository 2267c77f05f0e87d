//! Making a branch.
//!
//! Order: room is admitted and taken; the filesystem or the quota is made; the identity is written; all of it is flushed;
//! the directory gets its name. A crash before the last step leaves only the unfinished name, and the next attempt begins
//! by removing that.

use super::record::{self, BranchRecord};
use super::{BranchError, Branches, Result, branch_error, place};
use crate::domain::pool::Enforcement;
use crate::domain::split::BranchFormat;
use crate::domain::{Bytes, overhead};
use crate::node::pool::{Known, OpenPool, Refused, fs_name};
use crate::platform::HostError;
use crate::store::object::BranchSpec;

/// The first project id that is given to a branch: far from the small numbers that people use in `/etc/projects`.
const FIRST_PROJECT: u32 = 0x5543_0000;

impl Branches {
    /// Makes the branch, of which nothing is at its place.
    pub(super) fn make(&self, pool: &OpenPool, spec: &BranchSpec) -> Result<BranchRecord> {
        if pool.read_only {
            return branch_error::PoolSnafu {
                branch: spec.id.clone(),
                pool: spec.pool.clone(),
                reason: format!("{} takes no writes", pool.path.display()),
            }
            .fail();
        }
        let enforcement = self.enforcement_for(pool, spec)?;
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        self.host
            .ensure_directory(&pool.branches(), 0o700)
            .map_err(host("make the directory of branches"))?;
        self.clear(pool, &spec.id)?;
        let known = Known {
            size: spec.size,
            format: spec.format,
            enforcement: enforcement.unwrap_or(Enforcement::None),
            project: None,
            pending: true,
        };
        let mut record = BranchRecord { enforcement, ..BranchRecord::new(spec) };
        let made = self.make_unfinished(pool, spec, known, &mut record);
        match made {
            Ok(reservation) => {
                reservation.keep(Known::from(&record));
                Ok(record)
            }
            Err(error) => {
                // Nothing of a branch that was refused stays. What cannot be removed now is removed by the next attempt.
                let _ = self.clear(pool, &spec.id);
                Err(error)
            }
        }
    }

    fn make_unfinished<'a>(
        &'a self,
        pool: &OpenPool,
        spec: &BranchSpec,
        known: Known,
        record: &mut BranchRecord,
    ) -> Result<crate::node::pool::Reservation<'a>> {
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let unfinished = pool.branches().join(record::unfinished(&spec.id));
        let no_room = |allocatable| BranchError::NoRoom {
            branch: spec.id.clone(),
            pool: spec.pool.clone(),
            wanted: spec.size,
            allocatable,
        };
        let take = || {
            self.host.ensure_directory(&unfinished, 0o700)?;
            match spec.format {
                BranchFormat::Image => {
                    self.host.ensure_allocated(&unfinished.join(record::IMAGE), spec.size.get(), spec.thin)
                }
                BranchFormat::Directory => Ok(()),
            }
        };
        let reservation = match self.pools.admit(pool, &spec.id, known.clone(), take) {
            Ok(reservation) => reservation,
            Err(Refused::NoRoom(allocatable)) => return Err(no_room(allocatable)),
            // The filesystem knows best what it has; its own needs for a large file are in no figure.
            Err(Refused::Failed(e)) if e.is_no_room() => {
                return Err(no_room(Bytes::ZERO));
            }
            Err(Refused::Failed(e)) if e.is_unsupported() => {
                return branch_error::UnfitSnafu {
                    branch: spec.id.clone(),
                    pool: spec.pool.clone(),
                    reason: format!(
                        "its filesystem ({}) cannot reserve a file of {}: {e}",
                        pool.filesystem, spec.size
                    ),
                }
                .fail();
            }
            Err(Refused::Failed(e)) => return Err(host("reserve its room")(e)),
        };
        match spec.format {
            BranchFormat::Image => self.fill_image(spec, &unfinished, record)?,
            BranchFormat::Directory => {
                self.make_directory(pool, spec, &unfinished, record).map_err(host("make its directory"))?;
                // Known from now on, so that no other branch is given the same project.
                self.pools.remember(&pool.name, &spec.id, Known { project: record.project, ..known });
            }
        }
        record::write(&self.host, &unfinished, record).map_err(host("write its identity"))?;
        self.host.sync_directory(&unfinished).map_err(host("flush it"))?;
        self.host.rename(&unfinished, &place(pool, &spec.id)).map_err(host("put it into its place"))?;
        Ok(reservation)
    }

    fn fill_image(
        &self,
        spec: &BranchSpec,
        unfinished: &std::path::Path,
        record: &mut BranchRecord,
    ) -> Result<()> {
        let Some(fs) = spec.fs_type else { return Ok(()) };
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let uuid = uuid::Uuid::new_v4().hyphenated().to_string();
        let scratch = "scratch";
        self.host
            .ensure_directory(&unfinished.join(scratch), 0o700)
            .map_err(host("prepare its filesystem"))?;
        self.host
            .make_filesystem(
                &unfinished.join(record::IMAGE),
                fs,
                &uuid,
                spec.volume.as_str(),
                &unfinished.join(scratch),
            )
            .map_err(host("make its filesystem"))?;
        self.host.remove_tree(unfinished, scratch).map_err(host("tidy up after making its filesystem"))?;
        record.fs_uuid = Some(uuid);
        Ok(())
    }

    fn make_directory(
        &self,
        pool: &OpenPool,
        spec: &BranchSpec,
        unfinished: &std::path::Path,
        record: &mut BranchRecord,
    ) -> Result<(), HostError> {
        let data = unfinished.join(record::DATA);
        match record.enforcement {
            Some(Enforcement::Qgroup) => self.host.subvolume_ensure(&data, spec.size.get())?,
            Some(Enforcement::ProjectQuota) => {
                let project = self.free_project(pool)?;
                // The branch's own directory too: that, and not `data`, is what MergerFS asks for the branch's space, and
                // outside of the project the whole disk would answer (statfs(2) of XFS and ext4).
                self.host.project_quota_set(unfinished, project, spec.size.get())?;
                self.host.ensure_directory(&data, 0o755)?;
                self.host.project_quota_set(&data, project, spec.size.get())?;
                record.project = Some(project);
            }
            Some(Enforcement::None) | None => {
                self.host.ensure_directory(&data, 0o755)?;
            }
        }
        self.host.set_owner_mode(&data, Some(0), Some(0), Some(0o755))
    }

    /// A project that no branch on the device has and that the filesystem knows nothing of.
    fn free_project(&self, pool: &OpenPool) -> Result<u32, HostError> {
        let taken = self.pools.projects(&pool.device);
        for id in FIRST_PROJECT.. {
            if taken.contains(&id) {
                continue;
            }
            let usage = self.host.project_quota_usage(&pool.path, id)?;
            if usage.used == 0 && usage.limit == 0 {
                return Ok(id);
            }
        }
        Err(HostError::Unexpected {
            subject: pool.path.display().to_string(),
            reason: "all project ids are in use".to_owned(),
        })
    }

    /// How a directory's size will be enforced; `None` for images.
    fn enforcement_for(&self, pool: &OpenPool, spec: &BranchSpec) -> Result<Option<Enforcement>> {
        let unfit = |reason: String| {
            branch_error::UnfitSnafu { branch: spec.id.clone(), pool: spec.pool.clone(), reason }.fail()
        };
        match spec.format {
            BranchFormat::Image => {
                let least = overhead::minimum(spec.fs_type);
                if spec.size < least || !spec.size.get().is_multiple_of(overhead::BLOCK) {
                    return unfit(format!(
                        "an image must have at least {least} and a multiple of {} bytes, not {}",
                        overhead::BLOCK,
                        spec.size
                    ));
                }
                match spec.fs_type {
                    Some(fs) if !self.pools.can_image(fs) => unfit(format!(
                        "this host cannot make and mount {}: install its programs and kernel module",
                        fs_name(fs)
                    )),
                    _ => Ok(None),
                }
            }
            BranchFormat::Directory if pool.enforcement == Enforcement::None && !spec.accept_unenforced => {
                unfit(format!(
                    "it cannot enforce the size of a directory ({}), and the class does not accept `enforcement: none`",
                    pool.enforcement_message
                ))
            }
            BranchFormat::Directory => Ok(Some(pool.enforcement)),
        }
    }
}
