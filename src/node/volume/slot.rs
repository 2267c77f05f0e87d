//! One volume at a time: locks, and what the healer remembers between two looks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::links::LinkSeen;
use super::remote::Order;
use crate::domain::{NodeName, VolumeId};
use crate::platform::process::ProcessId;

/// A volume's lock and hints. Hints are never the truth about mounts; losing them costs a later look.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Held by whoever changes the volume.
    pub(super) lock: Arc<tokio::sync::Mutex<()>>,
    hints: Mutex<Hints>,
}

/// What was last seen of a volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints {
    /// Its MergerFS process, to be watched.
    pub(super) process: Option<ProcessId>,
    /// What is wrong with it; a sentence.
    pub(super) trouble: Option<String>,
    /// Attempts to repair it that failed, or repairs that did not last, in a row.
    pub(super) failures: u32,
    /// Repairs that succeeded and did not last, in a row. Waiting for a branch to come back is none.
    pub(super) replaced: u32,
    /// When it was last repaired.
    pub(super) repaired: Option<Instant>,
    /// Not to be repaired before.
    pub(super) next_attempt: Option<Instant>,
    /// Since when its process has not answered, and how often it was asked.
    pub(super) hung: Option<(Instant, u32)>,
    /// The `data` directories of the branches that its MergerFS runs over.
    pub(super) branches: Vec<PathBuf>,
    /// Since when branches have not answered, by number, in the time that this machine has run.
    pub(super) hung_branches: BTreeMap<u32, Duration>,
    /// How the connections to its branches of other nodes stand, by number, and since when.
    pub(super) links: BTreeMap<u32, (LinkSeen, Duration)>,
    /// The other nodes that branches of it lie on, so that the store's news of them matter.
    pub(super) owners: BTreeSet<NodeName>,
    /// How often the store told of its branches.
    pub(super) told: u64,
    /// What the store said last of its branches, by number.
    pub(super) orders: BTreeMap<u32, Order>,
}

impl Slot {
    /// The hints, for a moment.
    pub(super) fn hints(&self) -> MutexGuard<'_, Hints> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All slots.
#[derive(Debug, Default)]
pub(super) struct Slots {
    by_volume: Mutex<HashMap<VolumeId, Arc<Slot>>>,
}

impl Slots {
    /// The volume's slot.
    pub(super) fn of(&self, volume: &VolumeId) -> Arc<Slot> {
        self.map().entry(volume.clone()).or_default().clone()
    }

    /// The processes to be watched.
    pub(super) fn processes(&self) -> Vec<(VolumeId, ProcessId)> {
        let map = self.map();
        map.iter().filter_map(|(v, s)| s.hints().process.clone().map(|p| (v.clone(), p))).collect()
    }

    /// The `data` directories of all branches under a MergerFS, but for the volumes of which one does not answer.
    pub(super) fn branches(&self) -> Vec<(VolumeId, PathBuf)> {
        let map = self.map();
        let of = |(volume, slot): (&VolumeId, &Arc<Slot>)| {
            let hints = slot.hints();
            let asked = if hints.hung_branches.is_empty() { hints.branches.clone() } else { Vec::new() };
            asked.into_iter().map(|path| (volume.clone(), path)).collect::<Vec<_>>()
        };
        map.iter().flat_map(of).collect()
    }

    /// The volumes some of whose branches lie on other nodes, and on which.
    pub(super) fn remote(&self) -> BTreeMap<VolumeId, BTreeSet<NodeName>> {
        let map = self.map();
        let owners = map.iter().map(|(volume, slot)| (volume.clone(), slot.hints().owners.clone()));
        owners.filter(|(_, owners)| !owners.is_empty()).collect()
    }

    /// The slot of a volume that there is one of.
    pub(super) fn known(&self, volume: &VolumeId) -> Option<Arc<Slot>> {
        self.map().get(volume).cloned()
    }

    /// Forgets volumes that nobody uses and that have nothing to remember.
    pub(super) fn forget_unless(&self, keep: impl Fn(&VolumeId) -> bool) {
        self.map().retain(|volume, slot| Arc::strong_count(slot) > 1 || keep(volume));
    }

    fn map(&self) -> MutexGuard<'_, HashMap<VolumeId, Arc<Slot>>> {
        self.by_volume.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
