//! Putting right what is wrong with a staged volume: look, decide, apply.

use std::time::{Duration, Instant};

use super::diagnose::{Action, UnionSeen, decide, facts, partial_reason, pause};
use super::error::VolumeError;
use super::record::{Phase, Record, branch_mount};
use super::slot::Slot;
use super::tally::Tally;
use super::view::View;
use super::{ANSWER_TIMEOUT, Core};
use crate::domain::VolumeId;
use crate::domain::policy::OnBranchLoss;
use crate::domain::union::UnionKind;
use crate::platform::mount::Liveness;
use crate::platform::process::ProcessId;

/// A repair that held for so long has lasted.
const LASTING: Duration = Duration::from_secs(60);

/// Between two looks at what can only be reported.
const REPORT_PAUSE: Duration = Duration::from_secs(10);

/// Longest pause between two attempts for a volume with branches on other nodes.
const LONGEST_REMOTE_PAUSE: Duration = Duration::from_secs(10);

/// How long a killed daemon may take to be gone: its memory is small, and its requests were aborted before.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// What the healer found or did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing to do.
    Fine,
    /// It was repaired.
    Repaired,
    /// It is not as it should be; to be looked at again after the pause.
    Troubled {
        /// What is wrong; a sentence.
        reason: String,
        /// Until the next look.
        pause: Duration,
    },
    /// It is no longer on record.
    Gone,
}

impl Core {
    /// Repairs a staged volume for a caller who needs it now, and returns the mounts as they are then. An error says why it
    /// cannot be used.
    pub(super) fn repair(&self, slot: &Slot, record: &mut Record) -> Result<View, VolumeError> {
        let view = self.view(record)?;
        let (seen, process) = self.look(slot, record, &view)?;
        match decide(facts(record), &seen) {
            Action::Nothing | Action::Rejoin => Ok(view),
            // A branch that waits makes its own files wait and no others; a hung daemon serves nobody.
            Action::Report(_) if !matches!(seen.union, UnionSeen::Hung(..)) => Ok(view),
            action => {
                self.apply(slot, record, action, process.as_ref())?;
                self.view(record)
            }
        }
    }

    /// Looks at the volume and repairs it where needed and where it is time to try. `view` are the mounts, where they have
    /// just been read.
    pub(super) fn heal(&self, slot: &Slot, volume: &VolumeId, view: Option<&View>) -> Outcome {
        let mut record = match self.records.load(volume) {
            Ok(Some(record)) => record,
            Ok(None) => return Outcome::Gone,
            Err(error) => return self.troubled(slot, volume, &error.to_string()),
        };
        if record.phase != Phase::Staged {
            return self.heal_unfinished(slot, &mut record);
        }
        let over_failed = std::mem::take(&mut slot.hints().over_failed);
        let process = slot.hints().process.clone().filter(|_| record.kind == UnionKind::Mergerfs);
        // A closer look asks owners and disks, which may take seconds: until then it would hide files.
        if let Some(process) = process.filter(|_| over_failed) {
            tracing::warn!(volume.id = %volume, process.id = process.pid, "the union is taken down: one of its branches failed");
            if let Err(error) = self.take_down(slot, &record, Some(&process), &[]) {
                return self.troubled(slot, volume, &error.to_string());
            }
            Tally::count(&self.tally.losses);
        }
        let looked = match view {
            Some(view) => self.look(slot, &record, view),
            None => self.view(&record).and_then(|view| self.look(slot, &record, &view)),
        };
        let (seen, process) = match looked {
            Ok(seen) => seen,
            Err(error) => return self.troubled(slot, volume, &error.to_string()),
        };
        if let Err(error) = self.note_silence(slot, &mut record) {
            tracing::warn!(volume.id = %volume, error = %error, "since when its branches do not answer is not written down");
        }
        let now = Instant::now();
        let action = decide(facts(&record), &seen);
        if matches!(action, Action::Nothing) {
            let mut hints = slot.hints();
            let lasted = hints.repaired.is_none_or(|t| now.duration_since(t) >= LASTING);
            if lasted {
                hints.failures = 0;
                hints.replaced = 0;
                hints.trouble = None;
            }
            return Outcome::Fine;
        }
        if let Action::Report(reason) = action {
            // Whoever asks sees it too, for as long as it lasts.
            slot.hints().trouble = None;
            return Outcome::Troubled { reason, pause: REPORT_PAUSE };
        }
        let waiting = {
            let hints = slot.hints();
            hints.next_attempt.filter(|t| *t > now).map(|t| (t - now, hints.trouble.clone()))
        };
        if let Some((pause, reason)) = waiting {
            // Only the return waits: MergerFS does not run over a failed branch for that long, and what must not be written
            // to any more is not.
            if let Action::Lose(lost) = &action
                && let Err(error) = self.take_down(slot, &record, process.as_ref(), lost)
            {
                return self.troubled(slot, volume, &error.to_string());
            }
            return Outcome::Troubled { reason: reason.unwrap_or_default(), pause };
        }
        if seen.union == UnionSeen::Gone && !over_failed {
            Tally::count(&self.tally.deaths);
        }
        let rejoin = action == Action::Rejoin;
        let result = self.apply(slot, &mut record, action, process.as_ref());
        match result {
            Ok(()) if rejoin && !record.left_out.is_empty() => {
                let reason = partial_reason(&record);
                slot.hints().trouble = Some(reason.clone());
                Outcome::Troubled { reason, pause: REPORT_PAUSE }
            }
            Ok(()) => {
                Tally::count(&self.tally.repairs);
                let mut hints = slot.hints();
                hints.failures += 1;
                // A union that is whole again was not replaced because something was wrong with it.
                hints.replaced += u32::from(!rejoin);
                hints.repaired = Some(Instant::now());
                hints.next_attempt = Some(Instant::now() + pause(volume, hints.failures - 1));
                hints.trouble = if !record.left_out.is_empty() {
                    Some(partial_reason(&record))
                } else if hints.replaced > 1 {
                    Some(format!(
                        "its union was replaced {} times in a row; see the log of its mergerfs in {}",
                        hints.replaced,
                        self.state_dir.display()
                    ))
                } else {
                    None
                };
                Outcome::Repaired
            }
            Err(error) => {
                Tally::count(&self.tally.failures);
                self.troubled(slot, volume, &error.to_string())
            }
        }
    }

    /// A volume that is neither staged nor gone is its caller's to finish. Only what waits for a node that does not answer is
    /// ended in time here, so that nothing waits for ever when nobody calls again.
    fn heal_unfinished(&self, slot: &Slot, record: &mut Record) -> Outcome {
        if record.boot_id != self.boot_id || !record.has_remote() {
            return Outcome::Fine;
        }
        let given_up = self.give_up_silent(slot, record);
        match self.note_silence(slot, record).and(given_up) {
            Ok(()) => Outcome::Fine,
            Err(error) => Outcome::Troubled { reason: error.to_string(), pause: REPORT_PAUSE },
        }
    }

    fn troubled(&self, slot: &Slot, volume: &VolumeId, reason: &str) -> Outcome {
        let mut hints = slot.hints();
        hints.failures += 1;
        // Whoever is away may be back any moment, and it costs little to ask.
        let longest = if hints.owners.is_empty() { Duration::MAX } else { LONGEST_REMOTE_PAUSE };
        let pause = pause(volume, hints.failures).min(longest);
        hints.next_attempt = Some(Instant::now() + pause);
        let reason = format!("{reason}; tried again in {} s", pause.as_secs());
        if hints.trouble.as_deref() != Some(&reason) {
            tracing::warn!(volume.id = %volume, reason = %reason, retry.seconds = pause.as_secs(), "volume cannot be repaired yet");
        }
        hints.trouble = Some(reason.clone());
        Outcome::Troubled { reason, pause }
    }

    fn apply(
        &self,
        slot: &Slot,
        record: &mut Record,
        action: Action,
        process: Option<&ProcessId>,
    ) -> Result<(), VolumeError> {
        match action {
            Action::Nothing => Ok(()),
            Action::Report(reason) => {
                Err(VolumeError::Incomplete { volume: record.volume().clone(), reason })
            }
            Action::BringUp => self.rebuild(slot, record),
            Action::Restart => {
                Tally::count(&self.tally.hangs);
                tracing::warn!(volume.id = %record.volume(), process.id = process.map(|p| p.pid), "mergerfs hangs and is replaced");
                self.take_down(slot, record, process, &[])?;
                self.rebuild(slot, record)
            }
            Action::Lose(lost) => {
                if process.is_some() {
                    Tally::count(&self.tally.losses);
                    for (index, reason) in &lost {
                        tracing::error!(volume.id = %record.volume(), branch.index = index, reason = %reason, "branch lost: its union is taken down");
                    }
                }
                self.retire_overlay(record)?;
                self.take_down(slot, record, process, &lost)?;
                self.release(record, &lost);
                self.rebuild(slot, record)
            }
            Action::Rejoin => {
                if self.attach(slot, record, true).is_empty() {
                    self.take_down(slot, record, process, &[])?;
                    self.rebuild(slot, record)?;
                    tracing::info!(volume.id = %record.volume(), "all branches are back");
                }
                Ok(())
            }
        }
    }

    /// Notes, before a layer of the overlay goes, that another is to be put in its place: nobody sees of an overlay itself whether
    /// its layers live. The old one stays under workloads until then, and gives errors for what it lost.
    fn retire_overlay(&self, record: &mut Record) -> Result<(), VolumeError> {
        if record.kind == UnionKind::Overlay && self.overlay_is_current(record)? {
            record.generation += 1;
            self.save(record)?;
        }
        Ok(())
    }

    /// Brings the volume up with all branches, or, where its class says so, knowingly without those that are lost.
    fn rebuild(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        if record.kind == UnionKind::Mergerfs {
            record.left_out.clear();
            let failures = self.attach(slot, record, false);
            if !failures.is_empty() {
                let all = failures.len() == record.branches.len();
                if record.on_branch_loss == OnBranchLoss::Fail || all {
                    return Err(VolumeError::incomplete(record.volume(), failures));
                }
                record.left_out = failures.iter().map(|(index, _)| *index).collect();
                tracing::warn!(
                    volume.id = %record.volume(),
                    branches.missing = ?record.left_out,
                    policy = ?record.on_branch_loss,
                    "union is rebuilt without lost branches"
                );
            }
        }
        self.bring_up(slot, record).map(drop)
    }

    /// Ends the daemon, and the attachments of the branches of other nodes among those that are lost: every access fails with
    /// ENOTCONN from then on, until another daemon is put in its place. In this order: a MergerFS that is not told to end would
    /// take the files of a branch that gives errors for missing; one that waits for such a branch ends when it gives errors.
    pub(super) fn take_down(
        &self,
        slot: &Slot,
        record: &Record,
        process: Option<&ProcessId>,
        lost: &[(u32, String)],
    ) -> Result<(), VolumeError> {
        let lost: Vec<u32> = lost.iter().map(|(index, _)| *index).collect();
        let Some(process) = process else { return self.sever(record, &lost) };
        let failed = |e| VolumeError::host(record.volume(), "end its mergerfs", e);
        // By what is mounted there now: the number on record may be another filesystem's after a crash in between.
        let point = record.union_mount(&self.records.directory(record.volume()));
        let device = self.view(record)?.union_at(&point, record.volume()).map(|e| e.device);
        if let Some((_, minor)) = device
            && let Err(error) = self.host.fuse_abort(minor)
        {
            tracing::warn!(volume.id = %record.volume(), error = %error, "its connection is not aborted; its process is killed");
        }
        self.host.process_kill(process).map_err(failed)?;
        self.sever(record, &lost)?;
        let gone = self.host.process_wait(process, KILL_TIMEOUT).map_err(failed)?;
        let mut hints = slot.hints();
        hints.hung = None;
        hints.process = None;
        hints.branches.clear();
        hints.cut_off = None;
        if !gone {
            // Stuck in a disk that does not answer: its connection is aborted, it serves nobody any more.
            tracing::warn!(volume.id = %record.volume(), process.id = process.pid, "a killed mergerfs is still there");
        }
        Ok(())
    }

    /// Unmounts branches that failed, so that they can be attached anew; what hangs is left alone.
    fn release(&self, record: &Record, lost: &[(u32, String)]) {
        let directory = self.records.directory(record.volume());
        for (index, _) in lost {
            let point = branch_mount(&directory, *index);
            if let Some(branch) =
                record.branches.iter().find(|b| b.spec.index == *index && b.remote.is_some())
            {
                self.release_remote(record, branch);
                continue;
            }
            if matches!(self.host.liveness(&point, ANSWER_TIMEOUT), Ok(Liveness::Hung)) {
                continue;
            }
            let id = record.volume().branch(*index);
            if let Err(error) = self.branches.ensure_detached(&id, &point, false) {
                tracing::warn!(branch.id = %id, error = %error, "a failed branch cannot be let go yet");
            }
        }
    }
}
