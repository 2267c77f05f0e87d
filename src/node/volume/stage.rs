//! NodeStageVolume and NodeUnstageVolume.

use std::path::Path;
use std::time::{Duration, Instant};

use super::attach::UNMOUNT_BOUND;
use super::bring_up::anchor_path;
use super::error::VolumeError;
use super::parallel::parallel;
use super::paths::Place;
use super::plan::{Here, plan};
use super::record::{Phase, Record, UNION_PREFIX, branch_mount};
use super::remote::{AttachError, Order};
use super::slot::{Hints, Slot};
use super::types::{Access, StageRequest};
use super::view::Found;
use super::{Core, publish};
use crate::domain::access::NotYet;
use crate::domain::union::UnionKind;
use crate::domain::{BranchId, VolumeId};
use crate::node::union::UnionState;
use crate::store::object::{Branch, VolumeSplit};

/// Branches let go at the same time.
const PARALLEL_BRANCHES: usize = 8;

/// Attempts to unmount what is busy, and the time between two: a second in all.
const BUSY_TRIES: u32 = 21;
const BUSY_PAUSE: Duration = Duration::from_millis(50);

/// More mounts than this on one place are not of our making.
const MAX_STACK: usize = 16;

impl Core {
    pub(super) fn stage(
        &self,
        slot: &Slot,
        request: &StageRequest,
        split: &VolumeSplit,
        branches: &[Branch],
    ) -> Result<(), VolumeError> {
        let (volume, begun) = (&request.volume, Instant::now());
        // A refused path changes nothing.
        self.place(&request.staging, true)?;
        let existing = self
            .records
            .load(volume)
            .map_err(|e| VolumeError::host(volume, "read its record", e))?
            .map(|record| self.of_this_boot(record));
        if let Some(mut record) = existing {
            if record.phase == Phase::Staged {
                if let Some(reason) = difference(&record.request, request) {
                    return Err(VolumeError::differs(&record, &record.request.staging, reason));
                }
                self.note_orders(slot, branches);
                return self.repair(slot, &mut record).map(|_| ());
            }
            // Begun and never finished: what an earlier attempt made is taken back, the request may be another now.
            self.take_back(slot, &mut record)?;
        } else {
            self.clear(volume)?;
        }
        let here = Here { node: &self.node, overlay: self.unions.abilities().overlay };
        let plan = plan(request, split, branches, &here)?;
        self.note_orders(slot, branches);
        let mut record = Record::new(&self.boot_id, request, plan);
        // Before anything is made.
        self.refuse_ungranted(slot, &record, branches)?;
        self.save(&record)?;
        let staged = self.bring_up(slot, &mut record).and_then(|took| {
            record.phase = Phase::Staged;
            self.save(&record).map(|()| took)
        });
        if let Ok(took) = &staged {
            if record.has_remote() {
                slot.hints().owners = record.owners(&self.node);
                self.changed.notify_one();
            }
            tracing::info!(
                volume.id = %volume,
                duration.seconds = begun.elapsed().as_secs_f64(),
                branches.seconds = took.branches.as_secs_f64(),
                union.seconds = took.union.as_secs_f64(),
                "the volume is staged"
            );
        }
        if staged.is_err() {
            // Only what this call made is there.
            if let Err(error) = self.take_back(slot, &mut record) {
                tracing::warn!(
                    volume.id = %volume,
                    error = %error,
                    "a failed staging could not be taken back yet; the next call does it"
                );
            }
        }
        staged.map(drop)
    }

    /// Tells which branches are not this node's to use yet.
    fn refuse_ungranted(&self, slot: &Slot, record: &Record, branches: &[Branch]) -> Result<(), VolumeError> {
        let links = self.links_of(record);
        let mut waits = Vec::new();
        for branch in &record.branches {
            let id = &branch.spec.id;
            if branch.spec.node != self.node {
                if let Err(error) = self.aim(slot, branch, &links) {
                    waits.push((branch.spec.index, error));
                }
            // Of a branch that is shared now, the mark beside it knows; who had it for itself alone before says nothing.
            } else if let Some(object) = branches.iter().find(|b| b.spec.id == *id)
                && !Order::of(object).is_shared()
                && let Some(access) = &object.spec.access
                && access.consumer.as_ref() != Some(&self.node)
            {
                let reason = NotYet::Granted { holder: access.consumer.clone() }.to_string();
                waits.push((branch.spec.index, AttachError::NotYet { branch: id.clone(), reason }));
            }
        }
        if waits.is_empty() { Ok(()) } else { Err(VolumeError::incomplete(record.volume(), waits)) }
    }

    pub(super) fn unstage(&self, slot: &Slot, volume: &VolumeId, staging: &Path) -> Result<(), VolumeError> {
        let record =
            self.records.load(volume).map_err(|e| VolumeError::host(volume, "read its record", e))?;
        let Some(record) = record else { return self.clear(volume) };
        if record.request.staging != staging {
            tracing::info!(volume.id = %volume, path = %staging.display(), "not staged there: nothing to unstage");
            return Ok(());
        }
        let mut record = self.of_this_boot(record);
        self.refuse_while_published(&record)?;
        self.take_back(slot, &mut record)
    }

    /// A record of an earlier boot: none of its mounts is there any more.
    pub(super) fn of_this_boot(&self, mut record: Record) -> Record {
        if record.boot_id != self.boot_id {
            record.boot_id.clone_from(&self.boot_id);
            record.origin = None;
            record.left_out.clear();
            record.publishes.retain(|p| p.at_boot);
            for branch in &mut record.branches {
                branch.device = None;
                branch.silent_since = None;
            }
        }
        record
    }

    fn refuse_while_published(&self, record: &Record) -> Result<(), VolumeError> {
        let directory = self.records.directory(record.volume());
        let view = self.view(record)?;
        let anchor = self.places.open(&anchor_path(record), false)?.map(|p| p.real);
        let mut users = Vec::new();
        for origin in [view.origin(record, &directory), record.origin.clone()].into_iter().flatten() {
            let known: Vec<_> = anchor.iter().map(std::path::PathBuf::as_path).collect();
            users.extend(view.elsewhere(&origin, &self.state_dir, &known).into_iter().map(Path::to_owned));
        }
        users.sort();
        users.dedup();
        if users.is_empty() {
            return Ok(());
        }
        let list = users.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        Err(VolumeError::Busy {
            volume: record.volume().clone(),
            reason: format!("it is published at {list}: unpublish it first"),
        })
    }

    /// Takes back everything that staging made, in the reverse order, by real unmounts only.
    pub(super) fn take_back(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        let answer = self.give_up_silent(slot, record);
        self.note_silence(slot, record)?;
        answer?;
        if record.phase != Phase::Unstaging {
            record.phase = Phase::Unstaging;
            self.save(record)?;
        }
        self.unbind(record)?;
        // Nothing shows it any more, and what is unmounted from now on may give its number to another volume.
        if record.origin.take().is_some() {
            self.save(record)?;
        }
        self.stop_union(slot, record)?;
        self.drop_lost(record.volume())?;
        let (remote, own): (Vec<_>, Vec<_>) = record.branches.iter().partition(|b| b.spec.node != self.node);
        let indexes: Vec<_> = own.iter().map(|b| b.spec.index).collect();
        self.let_go(record.volume(), &indexes)?;
        let results =
            parallel(&remote, PARALLEL_BRANCHES, |branch| patiently(|| self.let_go_remote(record, branch)));
        results.into_iter().collect::<Result<(), _>>()?;
        self.records
            .remove(record.volume())
            .map_err(|e| VolumeError::host(record.volume(), "remove its state directory", e))?;
        *slot.hints() = Hints::default();
        self.changed.notify_one();
        Ok(())
    }

    /// What was written last may not have reached a branch whose owner does not answer: that is waited for as long as
    /// `branchTimeout` says, and given up then. Staging that did not succeed has written nothing.
    pub(super) fn give_up_silent(&self, slot: &Slot, record: &Record) -> Result<(), VolumeError> {
        let silent = self.silent(slot, record);
        if silent.is_empty() {
            return Ok(());
        }
        let patience = record.branch_timeout();
        let node = |index: u32| {
            record.branches.iter().find(|b| b.spec.index == index).map_or("", |b| b.spec.node.as_str())
        };
        if record.phase != Phase::Staging
            && let Some((index, time)) = silent.iter().find(|(_, time)| *time < patience)
        {
            return Err(VolumeError::Busy {
                volume: record.volume().clone(),
                reason: format!(
                    "node {} has not answered for {} s, and what was written last to branch {} may not be on its disk; it \
                     is given up after {} s",
                    node(*index),
                    time.as_secs(),
                    record.volume().branch(*index),
                    patience.as_secs()
                ),
            });
        }
        let mut lost = Vec::new();
        for (index, time) in silent {
            let reason = format!("node {} has not answered for {} s", node(index), time.as_secs());
            if record.phase != Phase::Staging {
                tracing::error!(
                    volume.id = %record.volume(),
                    branch.index = index,
                    reason = %reason,
                    "a branch is detached by force: what was written last to it is lost"
                );
            }
            lost.push((index, reason));
        }
        let process = match self.unions.observe(record.volume()) {
            Ok(UnionState::Running { process, .. }) => process,
            Ok(UnionState::Hung { process, .. }) => Some(process),
            Ok(UnionState::Dead { .. } | UnionState::Absent) | Err(_) => None,
        };
        self.take_down(slot, record, process.as_ref(), &lost)
    }

    /// Unmounts the volume at its staging path and removes what was made there.
    fn unbind(&self, record: &Record) -> Result<(), VolumeError> {
        let volume = record.volume();
        let Some(anchor) = self.places.open(&anchor_path(record), false)? else { return Ok(()) };
        let directory = self.records.directory(volume);
        for _ in 0..MAX_STACK {
            let view = self.view(record)?;
            let now = view.origin(record, &directory);
            match view.find(&anchor.real, volume, now.as_ref(), record.origin.as_ref()) {
                Found::Nothing => break,
                Found::Ours(_) => self.unmount(volume, &anchor, false)?,
                Found::Stale(_) => self.unmount(volume, &anchor, true)?,
                Found::Foreign(entry) => return Err(VolumeError::foreign(&anchor.real, entry)),
            }
        }
        if record.kind == UnionKind::Block {
            self.remove_place(volume, UnionKind::Block, &anchor)?;
        }
        if record.made_staging
            && let Some(staging) = self.places.open(&record.request.staging, false)?
        {
            self.remove_place(volume, UnionKind::Bind, &staging)?;
        }
        Ok(())
    }

    pub(super) fn unmount(&self, volume: &VolumeId, place: &Place, lazy: bool) -> Result<(), VolumeError> {
        patiently(|| {
            self.host
                .unmount_within(UNMOUNT_BOUND, &place.handle(), lazy)
                .map(|_| ())
                .map_err(|e| VolumeError::host(volume, "unmount it", e))
        })
    }

    fn stop_union(&self, slot: &Slot, record: &Record) -> Result<(), VolumeError> {
        let volume = record.volume();
        if matches!(record.kind, UnionKind::Overlay | UnionKind::Mergerfs) {
            let failed = |e| VolumeError::union(volume, e);
            // One that is gone or does not answer has nothing to flush: what it had is in the branches already.
            let force = matches!(
                self.unions.observe(volume).map_err(failed)?,
                UnionState::Dead { .. } | UnionState::Hung { .. }
            );
            slot.hints().process = None;
            patiently(|| self.unions.stop(volume, force).map_err(failed))?;
        }
        self.unmount_unions(volume)
    }

    /// Unmounts what is still mounted at the volume's unions' mount points.
    fn unmount_unions(&self, volume: &VolumeId) -> Result<(), VolumeError> {
        let directory = self.records.directory(volume);
        let failed = |e| VolumeError::host(volume, "unmount its union", e);
        let names = self.host.directory_names(&directory).map_err(failed)?.unwrap_or_default();
        for name in names.iter().filter(|n| n.to_str().is_some_and(|n| n.starts_with(UNION_PREFIX))) {
            let point = directory.join(name);
            for _ in 0..MAX_STACK {
                if !self.host.unmount_within(UNMOUNT_BOUND, &point, false).map_err(failed)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Detaches branches, all of them also when one cannot be.
    fn let_go(&self, volume: &VolumeId, indexes: &[u32]) -> Result<(), VolumeError> {
        let directory = self.records.directory(volume);
        let branches: Vec<(BranchId, u32)> = indexes.iter().map(|&i| (volume.branch(i), i)).collect();
        let results = parallel(&branches, PARALLEL_BRANCHES, |(id, index)| {
            patiently(|| {
                self.branches
                    .ensure_detached(id, &branch_mount(&directory, *index), false)
                    .map_err(|e| VolumeError::branch(volume, e))
            })
        });
        results.into_iter().collect()
    }

    /// Takes back what lies in the directory of a volume without a record.
    pub(super) fn clear(&self, volume: &VolumeId) -> Result<(), VolumeError> {
        let directory = self.records.directory(volume);
        let failed = |e| VolumeError::host(volume, "look at its state directory", e);
        if self.host.entry(&directory).map_err(failed)?.is_none() {
            return Ok(());
        }
        self.unions.stop(volume, false).map_err(|e| VolumeError::union(volume, e))?;
        self.unmount_unions(volume)?;
        let names =
            self.host.directory_names(&directory.join("branches")).map_err(failed)?.unwrap_or_default();
        let indexes: Vec<u32> = names.iter().filter_map(|n| n.to_str()?.parse().ok()).collect();
        // Without a record it is not known which of them lie on other nodes and may wait for these.
        let results = parallel(&indexes, PARALLEL_BRANCHES, |index| {
            let at = branch_mount(&directory, *index);
            patiently(|| {
                let unmounted = self.host.unmount_within(UNMOUNT_BOUND, &at, false);
                unmounted.map(drop).map_err(|e| VolumeError::host(volume, "unmount its branch", e))
            })
        });
        results.into_iter().collect::<Result<(), _>>()?;
        self.let_go(volume, &indexes)?;
        self.records.remove(volume).map_err(|e| VolumeError::host(volume, "remove its state directory", e))
    }
}

/// Does `work` again while files are open, for a moment: whoever asks a mount for its space, or starts a process, keeps it
/// busy for milliseconds. What is open longer is told to the caller, who tries again later.
fn patiently<T>(mut work: impl FnMut() -> Result<T, VolumeError>) -> Result<T, VolumeError> {
    for _ in 1..BUSY_TRIES {
        match work() {
            Err(VolumeError::Busy { .. }) => std::thread::sleep(BUSY_PAUSE),
            done => return done,
        }
    }
    work()
}

/// What `asked` asks for otherwise than `staged`; `None` where nothing.
fn difference(staged: &StageRequest, asked: &StageRequest) -> Option<String> {
    if staged.staging != asked.staging {
        return Some(format!(
            "{} is asked for; a node has one staging path a volume",
            asked.staging.display()
        ));
    }
    if staged.access_mode != asked.access_mode {
        return Some(format!(
            "it is staged with access mode {:?} and {:?} is asked for",
            staged.access_mode, asked.access_mode
        ));
    }
    publish::access_difference(&staged.access, &asked.access).or_else(|| {
        let group = |access: &Access| match access {
            Access::Mount { group, .. } => *group,
            Access::Block => None,
        };
        let (was, is) = (group(&staged.access), group(&asked.access));
        (was != is).then(|| format!("it is staged for group {was:?} and group {is:?} is asked for"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::volume::AccessMode;

    fn request(staging: &str, flags: &[&str], group: Option<u32>) -> StageRequest {
        StageRequest {
            volume: "vol".parse().unwrap(),
            staging: staging.into(),
            access_mode: AccessMode::SingleNodeWriter,
            access: Access::Mount { flags: flags.iter().map(|&f| f.to_owned()).collect(), group },
        }
    }

    #[test]
    fn the_same_request_differs_in_nothing() {
        let one = request("/mnt/s", &["noatime", "nodev"], Some(7));
        assert_eq!(difference(&one, &one), None);
        let reordered = request("/mnt/s", &["nodev", "noatime"], Some(7));
        assert_eq!(difference(&one, &reordered), None, "flags mean the same in another order");
    }

    #[test]
    fn another_path_mode_flag_group_or_access_is_told() {
        let one = request("/mnt/s", &[], None);
        assert!(difference(&one, &request("/mnt/t", &[], None)).unwrap().contains("/mnt/t"));
        assert!(difference(&one, &request("/mnt/s", &["ro"], None)).unwrap().contains("ro is asked for"));
        assert!(difference(&one, &request("/mnt/s", &[], Some(5))).unwrap().contains("group"));
        let reader = StageRequest { access_mode: AccessMode::MultiNodeReaderOnly, ..one.clone() };
        assert!(difference(&one, &reader).unwrap().contains("MultiNodeReaderOnly"));
        let block = StageRequest { access: Access::Block, ..one.clone() };
        assert!(difference(&one, &block).unwrap().contains("block"));
    }
}
