//! One volume at a time: locks, and what the healer remembers between two looks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::links::LinkSeen;
use super::remote::Order;
use crate::domain::{NodeName, VolumeId};
use crate::platform::fuse::FuseConnection;
use crate::platform::process::ProcessId;

/// A volume's lock and hints. Hints are never the truth about mounts; losing them costs a later look.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Held by whoever changes the volume.
    pub(super) lock: Arc<tokio::sync::Mutex<()>>,
    hints: Mutex<Hints>,
}

/// A branch that is asked again and again whether it is well, while a MergerFS runs over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Glanced {
    /// Its number.
    pub(super) index: u32,
    /// Its `data` directory.
    pub(super) path: PathBuf,
    /// Another node answers the question, and whoever asks waits for it.
    pub(super) distant: bool,
}

/// How a running MergerFS is cut off as soon as a filesystem under it is known to have failed.
#[derive(Clone, Debug)]
pub(super) struct CutOff {
    /// The devices of the filesystems that its branches lie on, as the kernel names them.
    pub(super) devices: BTreeSet<String>,
    /// Its connection.
    pub(super) connection: Arc<FuseConnection>,
}

/// What was last seen of a volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Hints {
    /// Its MergerFS process, to be watched.
    pub(super) process: Option<ProcessId>,
    /// What is wrong with it and a look would not tell; a sentence.
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
    /// The branches that its MergerFS runs over.
    pub(super) branches: Vec<Glanced>,
    /// For when one of them is told to have failed.
    pub(super) cut_off: Option<CutOff>,
    /// One of them was just found to have failed: the MergerFS is ended before anything is looked at more closely.
    pub(super) over_failed: bool,
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

    /// All branches under a MergerFS, but for those that do not answer.
    pub(super) fn branches(&self) -> Vec<(VolumeId, Glanced)> {
        let map = self.map();
        let of = |(volume, slot): (&VolumeId, &Arc<Slot>)| {
            let hints = slot.hints();
            let asked =
                hints.branches.iter().filter(|glanced| !hints.hung_branches.contains_key(&glanced.index));
            asked.map(|glanced| (volume.clone(), glanced.clone())).collect::<Vec<_>>()
        };
        map.iter().flat_map(of).collect()
    }

    /// Aborts the connections of all unions over a filesystem on this device; those volumes.
    pub(super) fn cut_off(&self, device: &str) -> Vec<(VolumeId, io::Result<()>)> {
        let cut = |slot: &Slot| {
            let mut hints = slot.hints();
            let cut = hints.cut_off.take_if(|cut| cut.devices.contains(device))?;
            hints.over_failed = true;
            Some(cut.connection.abort())
        };
        let map = self.map();
        map.iter().filter_map(|(volume, slot)| Some((volume.clone(), cut(slot)?))).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_that_does_not_answer_keeps_no_other_from_being_asked() {
        let slots = Slots::default();
        let volume: VolumeId = "vol".parse().unwrap();
        let glanced = |index: u32| Glanced { index, path: format!("/b/{index}").into(), distant: index > 0 };
        let slot = slots.of(&volume);
        slot.hints().branches = (0..3).map(glanced).collect();
        slot.hints().hung_branches.insert(1, Duration::from_secs(1));
        let asked: Vec<_> = slots.branches().into_iter().map(|(_, glanced)| glanced.index).collect();
        assert_eq!(asked, [0, 2]);
    }
}
