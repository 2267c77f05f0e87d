//! Finding what is wrong with a staged volume, and putting it right.
//!
//! Observe, decide, apply. The rule that comes before all others: MergerFS never runs over a branch that failed or is not
//! mounted, as it would answer ENOENT for that branch's files and let them be made anew elsewhere.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::bring_up::parallel;
use super::error::VolumeError;
use super::record::{Phase, Record, branch_mount};
use super::slot::Slot;
use super::view::{Found, View};
use super::{ANSWER_TIMEOUT, Core, DATA};
use crate::domain::VolumeId;
use crate::domain::policy::OnBranchLoss;
use crate::domain::union::UnionKind;
use crate::node::union::UnionState;
use crate::platform::HostError;
use crate::platform::mount::{Liveness, MountEntry};
use crate::platform::process::ProcessId;

/// A daemon that has not answered for so long, in so many probes, while its branches do, is replaced. Longer than any
/// pause that a busy disk was seen to cause, shorter than the kubelet's two minutes.
const HUNG_FOR: Duration = Duration::from_secs(30);
const HUNG_PROBES: u32 = 3;

/// A repair that held for so long has lasted.
const LASTING: Duration = Duration::from_secs(60);

/// First pause between repairs that do not last; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between repairs that do not last.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Volumes looked at at the same time.
const PARALLEL_LOOKS: usize = 4;

/// Between two looks at what can only be reported.
const REPORT_PAUSE: Duration = Duration::from_secs(10);

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

/// What the healing of unions came to.
#[derive(Debug, Default)]
pub struct Tally {
    deaths: AtomicU64,
    hangs: AtomicU64,
    losses: AtomicU64,
    repairs: AtomicU64,
    failures: AtomicU64,
}

/// A reading of the tally since the agent started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TallyCounts {
    /// Unions whose process was found dead.
    pub deaths: u64,
    /// Unions whose process was killed because it hung.
    pub hangs: u64,
    /// Times that a volume lost a branch.
    pub losses: u64,
    /// Repairs that succeeded.
    pub repairs: u64,
    /// Repairs that failed and will be tried again.
    pub failures: u64,
}

impl Tally {
    /// The counts now.
    #[must_use]
    pub fn counts(&self) -> TallyCounts {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        TallyCounts {
            deaths: read(&self.deaths),
            hangs: read(&self.hangs),
            losses: read(&self.losses),
            repairs: read(&self.repairs),
            failures: read(&self.failures),
        }
    }

    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// How a branch stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BranchSeen {
    /// It answers.
    Alive,
    /// It answers, and can only be read.
    ReadOnly,
    /// It failed or is not mounted.
    Failed(String),
    /// It has not answered for so long.
    Silent(Duration),
}

/// How the volume's union stands.
#[derive(Clone, Debug, PartialEq, Eq)]
enum UnionSeen {
    /// It needs none.
    Unneeded,
    Running,
    Gone,
    /// For so long, in so many probes.
    Hung(Duration, u32),
}

/// How a volume stands.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    union: UnionSeen,
    branches: Vec<(u32, BranchSeen)>,
    /// A mount at the staging path is missing, or one there or at a target is dead.
    binds: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    /// Nothing.
    Nothing,
    /// Nothing can be done, or not yet.
    Report(String),
    /// Bring it to what the record says.
    BringUp,
    /// End its daemon and start another.
    Restart,
    /// It lost these branches.
    Lose(Vec<(u32, String)>),
    /// It runs without some branches: see whether they are back.
    Rejoin,
}

/// What a decision needs of the record.
#[derive(Clone, Copy, Debug)]
struct Facts {
    kind: UnionKind,
    branch_timeout: Duration,
    partial: bool,
    restoring: bool,
}

/// Decides what is to be done with a staged volume.
fn decide(facts: Facts, seen: &Seen) -> Action {
    let mut lost = Vec::new();
    let mut reports = Vec::new();
    let mut silent = false;
    for (index, branch) in &seen.branches {
        match branch {
            BranchSeen::Alive => {}
            BranchSeen::ReadOnly => reports.push(format!(
                "branch {index} became read-only after an error of its disk: writes to it fail; check the disk"
            )),
            BranchSeen::Failed(reason) => lost.push((*index, reason.clone())),
            BranchSeen::Silent(time) if *time >= facts.branch_timeout => {
                lost.push((*index, format!("it has not answered for {} s", time.as_secs())));
            }
            BranchSeen::Silent(time) => {
                silent = true;
                reports.push(format!(
                    "branch {index} has not answered for {} s; its files wait, up to {} s",
                    time.as_secs(),
                    facts.branch_timeout.as_secs()
                ));
            }
        }
    }
    let merged = facts.kind == UnionKind::Mergerfs;
    let repair = seen.binds || seen.union == UnionSeen::Gone || facts.restoring;
    match &seen.union {
        _ if merged && !lost.is_empty() => Action::Lose(lost),
        // Without a daemon between, workloads see what the branch answers; nothing can be put under them.
        _ if !lost.is_empty() && !repair => Action::Report(
            lost.iter().map(|(i, r)| format!("branch {i} failed: {r}")).collect::<Vec<_>>().join("; "),
        ),
        UnionSeen::Hung(time, probes) if *time >= HUNG_FOR && *probes >= HUNG_PROBES && !silent => {
            Action::Restart
        }
        UnionSeen::Hung(time, _) if !silent => Action::Report(format!(
            "its mergerfs has not answered for {} s; it is replaced after {} s",
            time.as_secs(),
            HUNG_FOR.as_secs()
        )),
        _ if repair => Action::BringUp,
        _ if facts.partial => Action::Rejoin,
        _ if !reports.is_empty() => Action::Report(reports.join("; ")),
        _ => Action::Nothing,
    }
}

/// How long to wait before the next attempt after so many in a row that failed or did not last.
fn pause(volume: &VolumeId, failures: u32) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    let full = FIRST_PAUSE.saturating_mul(2u32.saturating_pow(doublings)).min(LONGEST_PAUSE);
    // Volumes on one disk fail together: an eighth of the pause, by the volume's name, keeps them apart.
    let mut hasher = DefaultHasher::new();
    (volume, failures).hash(&mut hasher);
    let share = u32::try_from(hasher.finish() % 128).unwrap_or(0);
    full + full * share / 1024
}

impl Core {
    /// Repairs a staged volume for a caller who needs it now. An error says why it cannot be used.
    pub(super) fn repair(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        let (seen, process) = self.look(slot, record)?;
        match decide(facts(record), &seen) {
            Action::Nothing | Action::Rejoin => Ok(()),
            // A branch that waits makes its own files wait and no others; a hung daemon serves nobody.
            Action::Report(_) if !matches!(seen.union, UnionSeen::Hung(..)) => Ok(()),
            action => self.apply(slot, record, action, process.as_ref()),
        }
    }

    /// Looks at the volume and repairs it where needed and where it is time to try.
    pub(super) fn heal(&self, slot: &Slot, volume: &VolumeId) -> Outcome {
        let mut record = match self.records.load(volume) {
            Ok(Some(record)) => record,
            Ok(None) => return Outcome::Gone,
            Err(error) => return self.troubled(slot, volume, &error.to_string()),
        };
        if record.phase != Phase::Staged {
            return Outcome::Fine;
        }
        let (seen, process) = match self.look(slot, &record) {
            Ok(seen) => seen,
            Err(error) => return self.troubled(slot, volume, &error.to_string()),
        };
        let now = Instant::now();
        let action = decide(facts(&record), &seen);
        if matches!(action, Action::Nothing) {
            let mut hints = slot.hints();
            let lasted = hints.repaired.is_none_or(|t| now.duration_since(t) >= LASTING);
            if lasted {
                hints.failures = 0;
                hints.trouble = None;
            }
            return Outcome::Fine;
        }
        if let Action::Report(reason) = action {
            slot.hints().trouble = Some(reason.clone());
            return Outcome::Troubled { reason, pause: REPORT_PAUSE };
        }
        let waiting = {
            let hints = slot.hints();
            hints.next_attempt.filter(|t| *t > now).map(|t| (t - now, hints.trouble.clone()))
        };
        if let Some((pause, reason)) = waiting {
            return Outcome::Troubled { reason: reason.unwrap_or_default(), pause };
        }
        if seen.union == UnionSeen::Gone {
            Tally::count(&self.tally.deaths);
        }
        let rejoin = action == Action::Rejoin;
        let result = self.apply(slot, &mut record, action, process.as_ref());
        match result {
            Ok(()) if rejoin && !record.left_out.is_empty() => {
                let reason = partial_reason(&record);
                slot.hints().trouble = Some(reason.clone());
                Outcome::Troubled { reason, pause: LASTING }
            }
            Ok(()) => {
                Tally::count(&self.tally.repairs);
                let mut hints = slot.hints();
                hints.failures += 1;
                hints.repaired = Some(Instant::now());
                hints.next_attempt = Some(Instant::now() + pause(volume, hints.failures - 1));
                hints.trouble = if !record.left_out.is_empty() {
                    Some(partial_reason(&record))
                } else if hints.failures > 1 {
                    Some(format!(
                        "its union was replaced {} times in a row; see the log of its mergerfs in {}",
                        hints.failures,
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

    fn troubled(&self, slot: &Slot, volume: &VolumeId, reason: &str) -> Outcome {
        let mut hints = slot.hints();
        hints.failures += 1;
        let pause = pause(volume, hints.failures);
        hints.next_attempt = Some(Instant::now() + pause);
        let reason = format!("{reason}; tried again in {} s", pause.as_secs());
        if hints.trouble.as_deref() != Some(&reason) {
            tracing::warn!(volume.id = %volume, reason = %reason, retry.seconds = pause.as_secs(), "volume cannot be repaired yet");
        }
        hints.trouble = Some(reason.clone());
        Outcome::Troubled { reason, pause }
    }

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

    fn is_suspicious(&self, volume: &VolumeId, view: &View) -> Result<bool, VolumeError> {
        let slot = self.slots.of(volume);
        // Whoever holds it is changing it: the view is old.
        let Ok(_guard) = slot.lock.try_lock() else { return Ok(false) };
        let record =
            self.records.load(volume).map_err(|e| VolumeError::host(volume, "read its record", e))?;
        let Some(record) = record.filter(|r| r.phase == Phase::Staged) else { return Ok(false) };
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
                    true => UnionSeen::Running,
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
    fn look(&self, slot: &Slot, record: &Record) -> Result<(Seen, Option<ProcessId>), VolumeError> {
        let volume = record.volume();
        let view = self.view(record)?;
        let now = Instant::now();
        let branches = self.look_at_branches(slot, record, &view);
        let (union, process) = match record.kind {
            UnionKind::Bind | UnionKind::Block => (UnionSeen::Unneeded, None),
            UnionKind::Overlay | UnionKind::Mergerfs => {
                match self.unions.observe(volume).map_err(|e| VolumeError::union(volume, e))? {
                    UnionState::Running { process, .. } => {
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
        Ok((Seen { union, branches, binds: self.binds_broken(record, &view)? }, process))
    }

    /// How the branches stand that the record's union runs with.
    pub(super) fn look_at_branches(
        &self,
        slot: &Slot,
        record: &Record,
        view: &View,
    ) -> Vec<(u32, BranchSeen)> {
        let directory = self.records.directory(record.volume());
        let now = Instant::now();
        let serving: Vec<_> = record.serving().map(|b| b.spec.index).collect();
        serving
            .into_iter()
            .map(|index| {
                let seen = match record.kind {
                    UnionKind::Block => BranchSeen::Alive,
                    _ => {
                        let point = branch_mount(&directory, index);
                        let asked = || self.host.liveness(&point.join(DATA), ANSWER_TIMEOUT);
                        judge(view.at(&point), record.reader_only(), asked)
                    }
                };
                let mut hints = slot.hints();
                if matches!(seen, BranchSeen::Silent(_)) {
                    let since = *hints.hung_branches.entry(index).or_insert(now);
                    (index, BranchSeen::Silent(now.duration_since(since)))
                } else {
                    hints.hung_branches.remove(&index);
                    (index, seen)
                }
            })
            .collect()
    }

    fn binds_broken(&self, record: &Record, view: &View) -> Result<bool, VolumeError> {
        let directory = self.records.directory(record.volume());
        let now = view.origin(record, &directory);
        let find =
            |path: &std::path::Path| view.find(path, record.volume(), now.as_ref(), record.origin.as_ref());
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
                self.take_down(slot, record, process)?;
                self.rebuild(slot, record)
            }
            Action::Lose(lost) => {
                if process.is_some() {
                    Tally::count(&self.tally.losses);
                    for (index, reason) in &lost {
                        tracing::error!(volume.id = %record.volume(), branch.index = index, reason = %reason, "branch lost: its union is taken down");
                    }
                }
                self.take_down(slot, record, process)?;
                self.release(record, &lost);
                self.rebuild(slot, record)
            }
            Action::Rejoin => {
                let mut whole = record.clone();
                whole.left_out.clear();
                if self.attach(&mut whole).is_empty() {
                    self.take_down(slot, record, process)?;
                    *record = whole;
                    self.rebuild(slot, record)?;
                    tracing::info!(volume.id = %record.volume(), "all branches are back");
                }
                Ok(())
            }
        }
    }

    /// Brings the volume up with all branches, or, where its class says so, knowingly without those that are lost.
    fn rebuild(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        if record.kind == UnionKind::Mergerfs {
            record.left_out.clear();
            let failures = self.attach(record);
            if !failures.is_empty() {
                let all = failures.len() == record.branches.len();
                if record.on_branch_loss == OnBranchLoss::Fail || all {
                    return Err(super::bring_up::incomplete(record, failures));
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
        self.bring_up(slot, record)
    }

    /// Ends the daemon: every access fails with ENOTCONN from then on, until another one is put in its place.
    fn take_down(
        &self,
        slot: &Slot,
        record: &Record,
        process: Option<&ProcessId>,
    ) -> Result<(), VolumeError> {
        let Some(process) = process else { return Ok(()) };
        let failed = |e| VolumeError::host(record.volume(), "end its mergerfs", e);
        if let Some(origin) = &record.origin {
            self.host.fuse_abort(origin.device.1).map_err(failed)?;
        }
        self.host.process_signal(process, libc::SIGKILL).map_err(failed)?;
        let gone = self.host.process_wait(process, KILL_TIMEOUT).map_err(failed)?;
        let mut hints = slot.hints();
        hints.hung = None;
        hints.process = None;
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

/// Judges one branch by its mount and its answer.
fn judge(
    entry: Option<&MountEntry>,
    reader_only: bool,
    ask: impl FnOnce() -> crate::platform::Result<Liveness>,
) -> BranchSeen {
    let Some(entry) = entry else { return BranchSeen::Failed("it is not mounted".to_owned()) };
    let says = |option: &str| entry.super_options.iter().any(|o| o == option);
    if says("shutdown") {
        return BranchSeen::Failed("its filesystem shut down after an error of its disk".to_owned());
    }
    match ask() {
        Ok(Liveness::Alive) if !reader_only && (says("ro") || says("emergency_ro")) => BranchSeen::ReadOnly,
        Ok(Liveness::Alive) => BranchSeen::Alive,
        Ok(Liveness::Dead(errno)) => BranchSeen::Failed(std::io::Error::from_raw_os_error(errno).to_string()),
        Ok(Liveness::Hung) => BranchSeen::Silent(Duration::ZERO),
        // No thread could be started: that says nothing about the branch.
        Err(_) => BranchSeen::Alive,
    }
}

const fn facts(record: &Record) -> Facts {
    Facts {
        kind: record.kind,
        branch_timeout: record.branch_timeout(),
        partial: !record.left_out.is_empty(),
        restoring: record.restoring,
    }
}

/// What a volume without some of its branches is told to be.
pub(super) fn partial_reason(record: &Record) -> String {
    let missing = record.left_out.iter().map(|&i| record.volume().branch(i).to_string()).collect::<Vec<_>>();
    let how = match record.on_branch_loss {
        OnBranchLoss::ReadOnly => "the rest is served read-only",
        OnBranchLoss::ServePartial | OnBranchLoss::Fail => "the rest is served",
    };
    format!("it runs without {}; {how} until they are back", missing.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(300);

    fn facts(kind: UnionKind) -> Facts {
        Facts { kind, branch_timeout: TIMEOUT, partial: false, restoring: false }
    }

    fn seen(union: UnionSeen, branches: &[BranchSeen]) -> Seen {
        let branches = (0..).zip(branches.iter().cloned()).collect();
        Seen { union, branches, binds: false }
    }

    fn failed() -> BranchSeen {
        BranchSeen::Failed("EIO".to_owned())
    }

    #[test]
    fn a_volume_that_is_as_it_should_be_is_left_alone() {
        let all = [BranchSeen::Alive, BranchSeen::Alive];
        assert_eq!(decide(facts(UnionKind::Mergerfs), &seen(UnionSeen::Running, &all)), Action::Nothing);
        assert_eq!(decide(facts(UnionKind::Bind), &seen(UnionSeen::Unneeded, &all[..1])), Action::Nothing);
    }

    #[test]
    fn a_dead_union_or_a_broken_bind_is_brought_up() {
        let all = [BranchSeen::Alive];
        assert_eq!(decide(facts(UnionKind::Mergerfs), &seen(UnionSeen::Gone, &all)), Action::BringUp);
        let broken = Seen { binds: true, ..seen(UnionSeen::Running, &all) };
        assert_eq!(decide(facts(UnionKind::Mergerfs), &broken), Action::BringUp);
    }

    #[test]
    fn a_union_never_stays_over_a_failed_branch() {
        for union in [UnionSeen::Running, UnionSeen::Gone, UnionSeen::Hung(Duration::ZERO, 1)] {
            for partial in [false, true] {
                let facts = Facts { partial, ..facts(UnionKind::Mergerfs) };
                let action = decide(facts, &seen(union.clone(), &[BranchSeen::Alive, failed()]));
                assert_eq!(action, Action::Lose(vec![(1, "EIO".to_owned())]), "{union:?}");
            }
        }
    }

    #[test]
    fn a_branch_that_does_not_answer_is_waited_for_and_then_lost() {
        let silent = |seconds| [BranchSeen::Alive, BranchSeen::Silent(Duration::from_secs(seconds))];
        let decide = |seconds, union| decide(facts(UnionKind::Mergerfs), &seen(union, &silent(seconds)));
        assert!(matches!(decide(299, UnionSeen::Running), Action::Report(r) if r.contains("branch 1")));
        assert!(matches!(decide(300, UnionSeen::Running), Action::Lose(l) if l[0].0 == 1));
        let hung = UnionSeen::Hung(Duration::from_secs(200), 50);
        assert!(matches!(decide(200, hung), Action::Report(_)), "the daemon hangs because of its branch");
    }

    #[test]
    fn a_daemon_that_hangs_over_living_branches_is_restarted_after_a_while() {
        let hung = |seconds, probes| {
            let union = UnionSeen::Hung(Duration::from_secs(seconds), probes);
            decide(facts(UnionKind::Mergerfs), &seen(union, &[BranchSeen::Alive]))
        };
        assert_eq!(hung(30, 3), Action::Restart);
        assert!(matches!(hung(30, 2), Action::Report(_)));
        assert!(matches!(hung(29, 9), Action::Report(_)));
    }

    #[test]
    fn a_branch_that_failed_without_a_daemon_is_reported() {
        let action = decide(facts(UnionKind::Bind), &seen(UnionSeen::Unneeded, &[failed()]));
        assert_eq!(action, Action::Report("branch 0 failed: EIO".to_owned()));
    }

    #[test]
    fn a_partial_union_looks_for_its_branches() {
        let facts = Facts { partial: true, ..facts(UnionKind::Mergerfs) };
        assert_eq!(decide(facts, &seen(UnionSeen::Running, &[BranchSeen::Alive])), Action::Rejoin);
    }

    #[test]
    fn pauses_grow_to_a_bound_and_differ_between_volumes() {
        let volume: VolumeId = "vol".parse().unwrap();
        assert_eq!(pause(&volume, 0), Duration::ZERO, "the first repair is at once");
        for failures in 1..40 {
            let (now, next) = (pause(&volume, failures), pause(&volume, failures + 1));
            assert!(now >= FIRST_PAUSE && now <= LONGEST_PAUSE + LONGEST_PAUSE / 8);
            assert!(next > now || now >= LONGEST_PAUSE);
        }
        let others: std::collections::BTreeSet<_> =
            (0..50).map(|i| pause(&format!("vol-{i}").parse().unwrap(), 9)).collect();
        assert!(others.len() > 10);
    }

    #[test]
    fn a_branch_is_judged_by_its_mount_before_it_is_asked() {
        let entry = |options: &[&str]| MountEntry {
            id: 1,
            parent: 0,
            device: (7, 0),
            root: "/".into(),
            mount_point: "/b".into(),
            options: vec![],
            fs_type: "ext4".into(),
            source: "/dev/loop0".into(),
            super_options: options.iter().map(|&o| o.to_owned()).collect(),
        };
        let alive = || Ok(Liveness::Alive);
        assert!(matches!(judge(None, false, alive), BranchSeen::Failed(_)));
        assert!(matches!(judge(Some(&entry(&["rw", "shutdown"])), false, alive), BranchSeen::Failed(_)));
        assert_eq!(judge(Some(&entry(&["ro"])), false, alive), BranchSeen::ReadOnly);
        assert_eq!(judge(Some(&entry(&["ro"])), true, alive), BranchSeen::Alive);
        assert_eq!(
            judge(Some(&entry(&["rw"])), false, || Ok(Liveness::Hung)),
            BranchSeen::Silent(Duration::ZERO)
        );
        assert!(matches!(
            judge(Some(&entry(&["rw"])), false, || Ok(Liveness::Dead(5))),
            BranchSeen::Failed(_)
        ));
    }
}
