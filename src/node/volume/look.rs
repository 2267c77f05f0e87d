//! Looking at volumes: what the kernel, the branches and the daemons tell of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::diagnose::{Action, BranchSeen, Seen, UnionSeen, decide, facts, judge};
use super::error::VolumeError;
use super::links::{LinkSeen, VolumeLinks};
use super::parallel::parallel;
use super::record::{Phase, Record, StagedBranch, branch_mount};
use super::remote::outdated;
use super::slot::{CutOff, Glanced, Slot};
use super::view::{Found, View};
use super::{ANSWER_TIMEOUT, Core, DATA};
use crate::domain::VolumeId;
use crate::domain::split::BranchFormat;
use crate::domain::union::UnionKind;
use crate::node::union::UnionState;
use crate::platform::mount::{Liveness, MountEntry};
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};

/// Volumes looked at at the same time.
const PARALLEL_LOOKS: usize = 4;

/// How long one branch may take to say that it is there before it is looked at more closely.
const GLANCE_BOUND: Duration = Duration::from_secs(2);

/// The same where another node answers: a slow network is no fault, and the others wait for this answer.
const DISTANT_GLANCE_BOUND: Duration = Duration::from_secs(1);

/// Branches of other nodes asked at the same time: each question waits for a network.
const PARALLEL_GLANCES: usize = 16;

impl Core {
    /// The volumes that are not as they should be at a first look, and how many volumes there are.
    pub(super) fn suspicious(&self) -> Result<(Vec<VolumeId>, usize), HostError> {
        let volumes = self.records.volumes()?;
        self.slots.forget_unless(|volume| volumes.contains(volume));
        let view = View::new(self.host.mounts()?);
        let suspicious =
            parallel(&volumes, PARALLEL_LOOKS, |volume| self.is_suspicious(volume, &view).unwrap_or(true));
        let count = volumes.len();
        let kept = volumes.into_iter().zip(suspicious).filter(|(_, s)| *s).map(|(v, _)| v);
        Ok((kept.collect(), count))
    }

    /// The volumes of which a branch under a running MergerFS does not answer as it should; a few microseconds a branch, and one
    /// request to its owner where it is a directory of another node.
    pub(super) fn failing(&self) -> Result<Vec<VolumeId>, HostError> {
        let (distant, near): (Vec<_>, Vec<_>) =
            self.slots.branches().into_iter().partition(|(_, glanced)| glanced.distant);
        let mut failing: Vec<(VolumeId, Liveness)> = Vec::new();
        if !near.is_empty() {
            let paths = near.iter().map(|(_, glanced)| glanced.path.clone()).collect();
            let found = self.host.not_alive(paths, GLANCE_BOUND)?;
            failing.extend(found.into_iter().filter_map(|(n, how)| Some((near.get(n)?.0.clone(), how))));
        }
        // One that only waits does so with its owner, which the closer look judges by its link.
        let asked = parallel(&distant, PARALLEL_GLANCES, |(volume, glanced)| {
            let answer = self.host.inode_alive(&glanced.path, DISTANT_GLANCE_BOUND);
            answer.ok().map(|how| (volume.clone(), how))
        });
        failing.extend(asked.into_iter().flatten().filter(|(_, how)| matches!(how, Liveness::Dead(_))));
        for (volume, how) in &failing {
            if matches!(how, Liveness::Dead(_)) {
                self.slots.of(volume).hints().over_failed = true;
            }
        }
        let mut failing: Vec<_> = failing.into_iter().map(|(volume, _)| volume).collect();
        failing.sort();
        failing.dedup();
        Ok(failing)
    }

    /// Notes what a running MergerFS runs over, for [`Core::failing`].
    pub(super) fn note_branches(&self, slot: &Slot, record: &Record) {
        let directory = self.records.directory(record.volume());
        let glanced = |b: &StagedBranch| Glanced {
            index: b.spec.index,
            path: branch_mount(&directory, b.spec.index).join(DATA),
            distant: b.spec.node != self.node && b.spec.format == BranchFormat::Directory,
        };
        let branches: Vec<_> = record.serving().map(glanced).collect();
        if slot.hints().branches == branches {
            return;
        }
        for glanced in branches.iter().filter(|glanced| !glanced.distant) {
            let Some(errors) = self.errors.clone() else { break };
            let (path, point) = (&glanced.path, glanced.path.clone());
            let mark = move |host: &Host| host.watch_fs_errors(&errors, &point);
            if let Err(error) = self.host.within("watching", path, ANSWER_TIMEOUT, mark) {
                tracing::debug!(volume.id = %record.volume(), error = %error, "errors of a branch's filesystem are not told");
            }
        }
        let cut_off = self.cut_off_of(record);
        let mut hints = slot.hints();
        hints.cut_off = cut_off;
        hints.branches = branches;
    }

    /// How the volume's MergerFS can be cut off when a filesystem under it fails; `None` where that is not known.
    fn cut_off_of(&self, record: &Record) -> Option<CutOff> {
        let directory = self.records.directory(record.volume());
        let view = self.view(record).ok()?;
        let union = view.union_at(&record.union_mount(&directory), record.volume())?;
        let connection = self.host.fuse_connection(union.device.1);
        if let Err(error) = &connection {
            tracing::debug!(volume.id = %record.volume(), error = %error, "its connection is not kept open");
        }
        let mut devices = BTreeSet::new();
        for branch in record.serving() {
            let Some(entry) = view.at(&branch_mount(&directory, branch.spec.index)) else { continue };
            devices.extend(self.host.block_name(entry.device));
            // An image reads what its pool's filesystem gives it.
            let behind = self.host.loop_backing(entry.device).ok().flatten();
            let pool = behind.and_then(|file| view.table().containing(&file).map(|entry| entry.device));
            devices.extend(pool.and_then(|device| self.host.block_name(device)));
        }
        Some(CutOff { devices, connection: Arc::new(connection.ok()??) })
    }

    /// Cuts the unions off that run over a filesystem on this device: until they are taken down they would say of its files that
    /// they do not exist. The volumes; each is to be repaired now.
    pub(super) fn cut_off(&self, device: &str) -> Vec<VolumeId> {
        let cut = self.slots.cut_off(device);
        for (volume, outcome) in &cut {
            match outcome {
                Ok(()) => {
                    tracing::warn!(volume.id = %volume, device, "the union is cut off: a filesystem under it shuts down")
                }
                Err(error) => {
                    tracing::warn!(volume.id = %volume, device, error = %error, "the union cannot be cut off at once")
                }
            }
        }
        cut.into_iter().map(|(volume, _)| volume).collect()
    }

    fn is_suspicious(&self, volume: &VolumeId, view: &View) -> Result<bool, VolumeError> {
        let slot = self.slots.of(volume);
        // Whoever holds it is changing it: the view is old.
        let Ok(_guard) = slot.lock.try_lock() else { return Ok(false) };
        let record =
            self.records.load(volume).map_err(|e| VolumeError::host(volume, "read its record", e))?;
        let Some(record) = record else { return Ok(false) };
        if record.phase != Phase::Staged {
            // What holds up its end is given up in time, also when nobody asks for it any more.
            return Ok(record.boot_id == self.boot_id && self.is_silent(&record));
        }
        slot.hints().owners = record.owners(&self.node);
        let branches = self.look_at_branches(&slot, &record, view);
        let union = match record.kind {
            UnionKind::Bind | UnionKind::Block => UnionSeen::Unneeded,
            UnionKind::Overlay => match view.origin(&record, &self.records.directory(volume)) {
                Some(_) => UnionSeen::Running,
                None => UnionSeen::Gone,
            },
            // Its death is told by its pidfd; here it is asked whether it answers.
            UnionKind::Mergerfs => {
                let point = record.union_mount(&self.records.directory(volume));
                let known = slot.hints().process.is_some() && view.at(&point).is_some();
                match known && self.unions.answers(&point) {
                    true => {
                        self.note_branches(&slot, &record);
                        UnionSeen::Running
                    }
                    false => UnionSeen::Gone,
                }
            }
        };
        let seen = Seen { union, branches, binds: self.binds_broken(&record, view)? };
        let action = decide(facts(&record), &seen);
        let troubled = slot.hints().trouble.is_some();
        Ok(troubled || action != Action::Nothing)
    }

    /// How the volume stands, and its process.
    pub(super) fn look(
        &self,
        slot: &Slot,
        record: &Record,
        view: &View,
    ) -> Result<(Seen, Option<ProcessId>), VolumeError> {
        let volume = record.volume();
        let now = Instant::now();
        slot.hints().owners = record.owners(&self.node);
        let branches = self.look_at_branches(slot, record, view);
        let (union, process) = match record.kind {
            UnionKind::Bind | UnionKind::Block => (UnionSeen::Unneeded, None),
            UnionKind::Overlay | UnionKind::Mergerfs => {
                // An overlay of an earlier number stands over a layer that was lost.
                let outdated = record.kind == UnionKind::Overlay
                    && view.origin(record, &self.records.directory(volume)).is_none();
                let observed = self.unions.observe_in(volume, view.table());
                match observed.map_err(|e| VolumeError::union(volume, e))? {
                    UnionState::Running { .. } if outdated => (UnionSeen::Gone, None),
                    UnionState::Running { process, .. } => {
                        if record.kind == UnionKind::Mergerfs {
                            self.note_branches(slot, record);
                        }
                        let mut hints = slot.hints();
                        hints.hung = None;
                        if hints.process != process {
                            hints.process.clone_from(&process);
                            self.changed.notify_one();
                        }
                        (UnionSeen::Running, process)
                    }
                    UnionState::Hung { process, .. } => {
                        let mut hints = slot.hints();
                        let (since, probes) = hints.hung.map_or((now, 1), |(t, n)| (t, n.saturating_add(1)));
                        hints.hung = Some((since, probes));
                        (UnionSeen::Hung(now.duration_since(since), probes), Some(process))
                    }
                    UnionState::Dead { .. } | UnionState::Absent => (UnionSeen::Gone, None),
                }
            }
        };
        Ok((Seen { union, branches, binds: self.binds_broken(record, view)? }, process))
    }

    /// How the branches stand that the record's union runs with.
    pub(super) fn look_at_branches(
        &self,
        slot: &Slot,
        record: &Record,
        view: &View,
    ) -> Vec<(u32, BranchSeen)> {
        let directory = self.records.directory(record.volume());
        let now = self.host.running_for();
        let links = self.links_of(record);
        // A branch that the union runs without is waited for no more; it would keep the others from being asked.
        let serves = |index: &u32| record.serving().any(|branch| branch.spec.index == *index);
        slot.hints().hung_branches.retain(|index, _| serves(index));
        record
            .serving()
            .map(|branch| {
                let index = branch.spec.index;
                let seen = self.judge_link(slot, branch, &links).unwrap_or_else(|| match record.kind {
                    UnionKind::Block => BranchSeen::Alive,
                    _ => {
                        let point = branch_mount(&directory, index);
                        let asked = || self.host.liveness(&point.join(DATA), ANSWER_TIMEOUT);
                        let refuses = |entry: &MountEntry| match entry.fs_type.as_str() {
                            "ext4" => self.host.ext4_refuses_writes(entry.device, &point, ANSWER_TIMEOUT),
                            // A server's disk is known to its own node alone.
                            _ => {
                                Ok(slot.hints().orders.get(&index).is_some_and(|order| order.refuses_writes))
                            }
                        };
                        let seen = judge(view.at(&point), record.reader_only(), asked, refuses);
                        self.mendable(branch, seen)
                    }
                });
                let mut hints = slot.hints();
                let mut since = || now.saturating_sub(*hints.hung_branches.entry(index).or_insert(now));
                match seen {
                    BranchSeen::Silent(_) => (index, BranchSeen::Silent(since())),
                    BranchSeen::Away(node, _) => (index, BranchSeen::Away(node, since())),
                    seen => {
                        hints.hung_branches.remove(&index);
                        (index, seen)
                    }
                }
            })
            .collect()
    }

    /// An image of another node whose filesystem refuses writes takes them again when it is mounted anew, once its disk is
    /// sound: it is lost until then. Of a directory that is up to its own node.
    fn mendable(&self, branch: &StagedBranch, seen: BranchSeen) -> BranchSeen {
        match seen {
            BranchSeen::ReadOnly
                if branch.spec.node != self.node && branch.spec.format == BranchFormat::Image =>
            {
                BranchSeen::Failed("it became read-only after an error of its disk".to_owned())
            }
            seen => seen,
        }
    }

    /// How a branch of another node stands by its link alone; `None` where that says nothing against it. What a link does not
    /// carry is not asked: the question would wait as its files do.
    fn judge_link(&self, slot: &Slot, branch: &StagedBranch, links: &VolumeLinks) -> Option<BranchSeen> {
        let spec = &branch.spec;
        if spec.node == self.node {
            return None;
        }
        let Some(remote) = &branch.remote else {
            return Some(BranchSeen::Failed("it is not attached".to_owned()));
        };
        let link = links.seen(&spec.id, remote);
        {
            let mut hints = slot.hints();
            let now = self.host.running_for();
            let since = *hints.hung_branches.get(&spec.index).unwrap_or(&now);
            let known = hints.links.entry(spec.index).or_insert((link, since));
            if known.0 != link {
                *known = (link, now);
            }
        }
        let order = slot.hints().orders.get(&spec.index).cloned();
        if let Some(reason) = outdated(&self.node, spec, order.as_ref(), remote, link == LinkSeen::Live) {
            return Some(BranchSeen::Failed(reason));
        }
        match link {
            LinkSeen::Live | LinkSeen::Unknown => None,
            LinkSeen::Connecting => Some(BranchSeen::Away(spec.node.clone(), Duration::ZERO)),
            LinkSeen::Gone => {
                Some(BranchSeen::Failed(format!("the connection to node {} is gone", spec.node)))
            }
        }
    }

    fn binds_broken(&self, record: &Record, view: &View) -> Result<bool, VolumeError> {
        let directory = self.records.directory(record.volume());
        let now = view.origin(record, &directory);
        let find = |path: &Path| view.find(path, record.volume(), now.as_ref(), record.origin.as_ref());
        let anchor = self.places.open(&super::bring_up::anchor_path(record), false)?;
        let staged = anchor.is_some_and(|place| matches!(find(&place.real), Found::Ours(_)));
        if !staged {
            return Ok(true);
        }
        for publish in &record.publishes {
            // A target that someone unmounted is not put back: whoever wants it publishes again.
            if let Some(place) = self.places.open(&publish.target, false)?
                && matches!(find(&place.real), Found::Stale(_))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
