//! Which branches the pools hold: in memory, read from the disks when a pool appears.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{OpenPool, Pools, Reservation, lock};
use crate::domain::pool::{Enforcement, PoolReport, PoolState, allocatable};
use crate::domain::split::BranchFormat;
use crate::domain::unclaimed::UnclaimedBranch;
use crate::domain::{BranchId, Bytes, PoolName};
use crate::node::branch::record::{self, BranchRecord};
use crate::platform::{Host, Result};

/// What must be known of a branch to count it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::node) struct Known {
    /// What it takes of the pool.
    pub(in crate::node) size: Bytes,
    /// What it is.
    pub(in crate::node) format: BranchFormat,
    /// How its size is enforced.
    pub(in crate::node) enforcement: Enforcement,
    /// Its project, where that enforces its size.
    pub(in crate::node) project: Option<u32>,
    /// It is being made, and lies under its unfinished name.
    pub(in crate::node) pending: bool,
}

impl From<&BranchRecord> for Known {
    fn from(record: &BranchRecord) -> Self {
        Self {
            size: record.size,
            format: record.format,
            enforcement: record.enforcement.unwrap_or(Enforcement::None),
            project: record.project,
            pending: false,
        }
    }
}

/// The branches of one pool.
#[derive(Clone, Debug)]
pub(super) struct Inventory {
    /// The filesystem that they were read from.
    pub(super) device: String,
    pub(super) number: (u32, u32),
    pub(super) branches_dir: std::path::PathBuf,
    pub(super) branches: BTreeMap<BranchId, Known>,
    /// What else lies among them, and why it is not understood. It cannot be counted.
    pub(super) odd: BTreeMap<String, String>,
}

/// A branch was not admitted.
#[derive(Debug)]
pub(in crate::node) enum Refused<E> {
    /// Only so much could be had.
    NoRoom(Bytes),
    /// Taking the room failed.
    Failed(E),
}

/// Figures of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) promised: Bytes,
    pub(super) occupied: Bytes,
}

impl Pools {
    /// Reads the pool's branches where that was not done since it appeared.
    pub(super) fn load(&self, pool: &OpenPool) -> Result<()> {
        let known = |all: &std::collections::HashMap<PoolName, Inventory>| {
            all.get(&pool.name).is_some_and(|i| i.device == pool.device && i.number == pool.number)
        };
        if known(&lock(&self.inventories)) {
            return Ok(());
        }
        let (mut branches, mut odd) = (BTreeMap::new(), BTreeMap::new());
        for name in self.host.directory_names(&pool.branches())?.unwrap_or_default() {
            let place = pool.branches().join(&name);
            let name = name.to_string_lossy().into_owned();
            if record::leftover(&name).is_some() {
                continue;
            }
            let Ok(id) = name.parse::<BranchId>() else {
                odd.insert(name, "a branch cannot have this name".to_owned());
                continue;
            };
            // What cannot be read is found again, and reported, when it is used.
            match record::read_or_why(&self.host, &place) {
                Ok(Ok(record)) => {
                    branches.insert(id, Known::from(&record));
                }
                Ok(Err(why)) => {
                    odd.insert(name, why);
                }
                Err(e) => {
                    odd.insert(name, e.to_string());
                }
            }
        }
        let mut all = lock(&self.inventories);
        if !known(&all) {
            let inventory = Inventory {
                device: pool.device.clone(),
                number: pool.number,
                branches_dir: pool.branches(),
                branches,
                odd,
            };
            all.insert(pool.name.clone(), inventory);
        }
        Ok(())
    }

    /// A pool that is absent has no inventory: it is read anew when the pool returns, whatever was done to it meanwhile.
    pub(super) fn unload_all_but<'a>(&self, present: impl Iterator<Item = &'a PoolName>) {
        let present: BTreeSet<&PoolName> = present.collect();
        lock(&self.inventories).retain(|pool, _| present.contains(pool));
    }

    /// The branch exists.
    pub(in crate::node) fn remember(&self, pool: &PoolName, branch: &BranchId, known: Known) {
        if let Some(inventory) = lock(&self.inventories).get_mut(pool) {
            inventory.branches.insert(branch.clone(), known);
            inventory.odd.remove(branch.as_str());
        }
    }

    /// The branch does not exist any more.
    pub(in crate::node) fn forget(&self, pool: &PoolName, branch: &BranchId) {
        if let Some(inventory) = lock(&self.inventories).get_mut(pool) {
            inventory.branches.remove(branch);
        }
    }

    /// Admits a branch of `known.size` and takes its room by `take`, one at a time on each device: while room is taken,
    /// what is free and what is promised do not belong to one moment.
    ///
    /// # Errors
    /// [`Refused::NoRoom`] with what could be had, [`Refused::Failed`] with the error of `take`.
    pub(in crate::node) fn admit<E>(
        &self,
        pool: &OpenPool,
        branch: &BranchId,
        known: Known,
        take: impl FnOnce() -> std::result::Result<(), E>,
    ) -> std::result::Result<Reservation<'_>, Refused<E>> {
        let admission = self.admission(&pool.device);
        let _one_at_a_time = lock(&admission);
        let load = self.load_of(&pool.device);
        // Read anew: others on this device may have taken of it since the pool was opened.
        let free =
            self.host.space(&pool.path, super::ANSWER_BOUND).map_or(Bytes::ZERO, |s| Bytes::new(s.available));
        let total = Bytes::new(pool.space.total);
        let room = allocatable(
            total,
            free,
            Self::reserve_of(pool).saturating_sub(super::upkeep(total)),
            load.promised,
            load.occupied,
        );
        if known.size > room {
            return Err(Refused::NoRoom(room));
        }
        self.remember(&pool.name, branch, Known { pending: true, ..known });
        let reservation =
            Reservation { pools: self, pool: pool.name.clone(), branch: branch.clone(), kept: false };
        take().map_err(Refused::Failed)?;
        Ok(reservation)
    }

    /// The branch's project, where it has one.
    pub(in crate::node) fn project_of(&self, pool: &PoolName, branch: &BranchId) -> Option<u32> {
        lock(&self.inventories).get(pool)?.branches.get(branch)?.project
    }

    /// What lies among the branches of all pools and is not `claimed` by name; not what is just being made.
    pub(in crate::node) fn unclaimed(&self, claimed: impl Fn(&str) -> bool) -> Vec<UnclaimedBranch> {
        let all = lock(&self.inventories);
        let mut found = Vec::new();
        for (pool, inventory) in all.iter() {
            let one = |name: &str, size: Option<Bytes>, problem: &str| UnclaimedBranch {
                pool: pool.clone(),
                name: name.to_owned(),
                path: inventory.branches_dir.join(name).display().to_string(),
                size,
                problem: problem.to_owned(),
            };
            let whole = inventory.branches.iter().filter(|(_, known)| !known.pending);
            found.extend(
                whole
                    .filter(|(id, _)| !claimed(id.as_str()))
                    .map(|(id, known)| one(id.as_str(), Some(known.size), "")),
            );
            let odd = inventory.odd.iter().filter(|(name, _)| !claimed(name));
            found.extend(odd.map(|(name, why)| one(name, None, why)));
        }
        found.sort();
        found
    }

    /// Forgets those of these that were removed by hand, so that their room is given again. Only pools that have just
    /// answered are asked.
    pub(in crate::node) fn forget_removed(&self, unclaimed: &[UnclaimedBranch], reports: &[PoolReport]) {
        let answers =
            |pool: &PoolName| reports.iter().any(|r| r.name == *pool && r.state != PoolState::Absent);
        for one in unclaimed.iter().filter(|one| answers(&one.pool)) {
            if !matches!(self.host.identity(Path::new(&one.path)), Ok(None)) {
                continue;
            }
            if let Some(inventory) = lock(&self.inventories).get_mut(&one.pool) {
                inventory.odd.remove(&one.name);
                if let Ok(id) = one.name.parse::<BranchId>()
                    && inventory.branches.get(&id).is_some_and(|known| !known.pending)
                {
                    inventory.branches.remove(&id);
                }
            }
        }
    }

    /// Projects in use on the device, as far as our branches are concerned.
    pub(in crate::node) fn projects(&self, device: &str) -> Vec<u32> {
        let all = lock(&self.inventories);
        all.values()
            .filter(|i| i.device == device)
            .flat_map(|i| i.branches.values())
            .filter_map(|k| k.project)
            .collect()
    }

    /// What is promised and occupied on the device, over all pools on it.
    pub(super) fn load_of(&self, device: &str) -> Load {
        let on_device: Vec<Inventory> =
            lock(&self.inventories).values().filter(|i| i.device == device).cloned().collect();
        let mut load = Load::default();
        for inventory in &on_device {
            for (id, known) in &inventory.branches {
                // In the order in which it is renamed, so that a rename between two looks does not hide it.
                let names = [record::unfinished(id), id.as_str().to_owned(), record::doomed(id)];
                let occupied = names
                    .iter()
                    .skip(usize::from(!known.pending))
                    .find_map(|name| occupied_at(&self.host, &inventory.branches_dir.join(name), known))
                    .unwrap_or_default();
                load.promised = load.promised.saturating_add(known.size);
                load.occupied = load.occupied.saturating_add(occupied.min(known.size));
            }
        }
        load
    }
}

/// What the branch in `place` occupies; nothing where that cannot be told, which is the careful answer: what is not known
/// to be written counts as still to come.
pub(in crate::node) fn occupied(host: &Host, place: &Path, known: &Known) -> Bytes {
    occupied_at(host, place, known).unwrap_or_default()
}

fn occupied_at(host: &Host, place: &Path, known: &Known) -> Option<Bytes> {
    let bytes = match (known.format, known.enforcement, known.project) {
        (BranchFormat::Image, ..) => host.occupied(&place.join(record::IMAGE)).map(|(blocks, _)| blocks),
        (BranchFormat::Directory, Enforcement::ProjectQuota, Some(project)) => {
            host.project_quota_usage(place, project).map(|u| u.used)
        }
        (BranchFormat::Directory, Enforcement::Qgroup, _) => {
            host.subvolume_usage(&place.join(record::DATA)).map(|u| u.used)
        }
        (BranchFormat::Directory, ..) => Ok(0),
    };
    bytes.ok().map(Bytes::new)
}
