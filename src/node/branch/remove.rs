//! Removing a branch, and what crashes left of branches.

use std::path::Path;

use super::attach::PAUSES;
use super::record;
use super::{BranchError, Branches, Result, branch_error, place};
use crate::domain::BranchId;
use crate::domain::pool::Enforcement;
use crate::domain::split::BranchFormat;
use crate::node::pool::OpenPool;
use crate::store::object::BranchSpec;

impl Branches {
    /// Removes the branch: renamed away first, so that it is gone at one moment, whole.
    pub(super) fn remove(&self, pool: &OpenPool, spec: &BranchSpec) -> Result<()> {
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let path = place(pool, &spec.id);
        let project = self.pools.project_of(&pool.name, &spec.id);
        if self.host.identity(&path).map_err(host("look at its place"))?.is_some() {
            self.check_removable(pool, spec, &path)?;
            // What an earlier removal left under the name that is needed now.
            self.clear(pool, &spec.id)?;
            self.host
                .rename(&path, &pool.branches().join(record::doomed(&spec.id)))
                .map_err(host("take it out of its place"))?;
        }
        self.clear(pool, &spec.id)?;
        if let Some(project) = project {
            // A limit that stays keeps the project from being given again, and limits nothing.
            let _ = self.host.project_quota_clear(&pool.path, project);
        }
        self.pools.forget(&pool.name, &spec.id);
        Ok(())
    }

    /// What belongs to others, or is in use, is not removed. A branch of ours whose content was damaged is.
    fn check_removable(&self, pool: &OpenPool, spec: &BranchSpec, path: &Path) -> Result<()> {
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        if pool.read_only {
            return branch_error::PoolSnafu {
                branch: spec.id.clone(),
                pool: spec.pool.clone(),
                reason: format!("{} takes no writes", pool.path.display()),
            }
            .fail();
        }
        let reason = match record::read_or_why(&self.host, path).map_err(host("read its identity"))? {
            Ok(record) => record.differs(spec),
            Err(reason) => Some(reason),
        };
        if let Some(reason) = reason {
            return branch_error::ForeignSnafu { branch: spec.id.clone(), path, reason }.fail();
        }
        let in_use = |user: String| branch_error::InUseSnafu { branch: spec.id.clone(), user }.fail();
        match spec.format {
            BranchFormat::Image => {
                let image = path.join(record::IMAGE);
                // A device that goes with its mount goes a moment later where a child process has a copy of one of the
                // mount's descriptors until its exec.
                let mut pauses = PAUSES.iter();
                loop {
                    let devices =
                        self.host.loop_devices_of(&image).map_err(host("look for its loop devices"))?;
                    let Some(device) = devices.first() else { break };
                    match pauses.next() {
                        Some(pause) => std::thread::sleep(*pause),
                        None => {
                            return in_use(format!("its image is attached to {}", device.path.display()));
                        }
                    }
                }
            }
            BranchFormat::Directory => {
                let mounts = self.host.mounts().map_err(host("read the mount table"))?;
                let inside = pool.within.join(super::super::pool::BRANCHES).join(&spec.id);
                if let Some(entry) =
                    mounts.entries.iter().find(|e| e.device == pool.mounted && e.root.starts_with(&inside))
                {
                    return in_use(format!("it is mounted at {}", entry.mount_point.display()));
                }
            }
        }
        Ok(())
    }

    /// Removes what of the branch is half made or half removed; nothing is success.
    pub(super) fn clear(&self, pool: &OpenPool, branch: &BranchId) -> Result<()> {
        let host = |action| move |source| BranchError::Host { branch: branch.clone(), action, source };
        let branches = pool.branches();
        let mut removed = false;
        for name in [record::unfinished(branch), record::doomed(branch)] {
            let path = branches.join(&name);
            if self.host.identity(&path).map_err(host("look for leftovers"))?.is_none() {
                continue;
            }
            if pool.enforcement == Enforcement::Qgroup {
                // Gone at once, however many files it holds. One that holds subvolumes of its own, and a plain directory,
                // is emptied file by file below.
                let _ = self.host.subvolume_remove(&path.join(record::DATA));
            }
            self.host.remove_tree(&branches, &name).map_err(host("remove its files"))?;
            removed = true;
        }
        if removed {
            self.host.sync_directory(&branches).map_err(host("flush the directory of branches"))?;
        }
        Ok(())
    }
}
