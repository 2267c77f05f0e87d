//! What is wrong with a staged volume, and what is to be done about it: decided from what was seen, without any effect.
//!
//! The rule that comes before all others: MergerFS never runs over a branch that failed or is not mounted, as it would
//! answer ENOENT for that branch's files and let them be made anew elsewhere.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::record::Record;
use crate::domain::policy::OnBranchLoss;
use crate::domain::union::UnionKind;
use crate::domain::{NodeName, VolumeId};
use crate::platform::mount::{Liveness, MountEntry};

/// A daemon that has not answered for so long, in so many probes, while its branches do, is replaced. Longer than any
/// pause that a busy disk was seen to cause, shorter than the kubelet's two minutes.
const HUNG_FOR: Duration = Duration::from_secs(30);
const HUNG_PROBES: u32 = 3;

/// First pause between repairs that do not last; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between repairs that do not last.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

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
    /// The node that it lies on has not answered for so long.
    Away(NodeName, Duration),
}

/// How the volume's union stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum UnionSeen {
    /// It needs none.
    Unneeded,
    /// It answers.
    Running,
    /// Its process or its mount is gone.
    Gone,
    /// For so long, in so many probes.
    Hung(Duration, u32),
}

/// How a volume stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Its union.
    pub(super) union: UnionSeen,
    /// Its branches, by number.
    pub(super) branches: Vec<(u32, BranchSeen)>,
    /// A mount at the staging path is missing, or one there or at a target is dead.
    pub(super) binds: bool,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
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
pub(super) struct Facts {
    /// What serves it.
    pub(super) kind: UnionKind,
    /// Some of its branches lie on other nodes.
    pub(super) remote: bool,
    /// `branchTimeout`.
    pub(super) branch_timeout: Duration,
    /// It runs without some branches, knowingly.
    pub(super) partial: bool,
    /// Its mounts are to be made again after a reboot.
    pub(super) restoring: bool,
}

/// Decides what is to be done with a staged volume.
pub(super) fn decide(facts: Facts, seen: &Seen) -> Action {
    let merged = facts.kind == UnionKind::Mergerfs;
    let mut lost = Vec::new();
    let mut reports = Vec::new();
    let mut silent = false;
    for (index, branch) in &seen.branches {
        match branch {
            BranchSeen::Alive => {}
            // After an error ext4 can be read as far as its disk can, and MergerFS takes what cannot be read for what does
            // not exist.
            BranchSeen::ReadOnly if merged => {
                lost.push((*index, "it became read-only after an error of its disk".to_owned()));
            }
            BranchSeen::ReadOnly => reports.push(format!(
                "branch {index} became read-only after an error of its disk: writes to it fail; check the disk"
            )),
            BranchSeen::Failed(reason) => lost.push((*index, reason.clone())),
            BranchSeen::Silent(time) if *time >= facts.branch_timeout => {
                lost.push((*index, format!("it has not answered for {} s", time.as_secs())));
            }
            BranchSeen::Away(node, time) if *time >= facts.branch_timeout => {
                lost.push((*index, format!("node {node} has not answered for {} s", time.as_secs())));
            }
            BranchSeen::Away(node, time) => {
                silent = true;
                reports.push(format!(
                    "node {node}, which holds branch {index}, has not answered for {} s; the branch's files wait, up to {} s",
                    time.as_secs(),
                    facts.branch_timeout.as_secs()
                ));
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
    let repair = seen.binds || seen.union == UnionSeen::Gone || facts.restoring;
    match &seen.union {
        // What was attached of another node can be attached anew and put under workloads also without a daemon between.
        _ if (merged || facts.remote) && !lost.is_empty() => Action::Lose(lost),
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
pub(super) fn pause(volume: &VolumeId, failures: u32) -> Duration {
    let Some(doublings) = failures.checked_sub(1) else { return Duration::ZERO };
    let full = FIRST_PAUSE.saturating_mul(2u32.saturating_pow(doublings)).min(LONGEST_PAUSE);
    // Volumes on one disk fail together: an eighth of the pause, by the volume's name, keeps them apart.
    let mut hasher = DefaultHasher::new();
    (volume, failures).hash(&mut hasher);
    let share = u32::try_from(hasher.finish() % 128).unwrap_or(0);
    full + full * share / 1024
}

/// Judges one branch by its mount, its answer, and whether it refuses writes though its mount says nothing of that.
pub(super) fn judge(
    entry: Option<&MountEntry>,
    reader_only: bool,
    ask: impl FnOnce() -> crate::platform::Result<Liveness>,
    refuses: impl FnOnce(&MountEntry) -> crate::platform::Result<bool>,
) -> BranchSeen {
    let Some(entry) = entry else { return BranchSeen::Failed("it is not mounted".to_owned()) };
    let says = |option: &str| entry.super_options.iter().any(|o| o == option);
    if says("shutdown") {
        return BranchSeen::Failed("its filesystem shut down after an error of its disk".to_owned());
    }
    match ask() {
        Ok(Liveness::Alive) if !reader_only && (says("ro") || says("emergency_ro")) => BranchSeen::ReadOnly,
        Ok(Liveness::Alive) if !reader_only && matches!(&*entry.fs_type, "ext4" | "nfs4") => {
            match refuses(entry) {
                Ok(true) => BranchSeen::ReadOnly,
                // Who does not answer in time is asked again, and then is silent.
                Ok(false) | Err(_) => BranchSeen::Alive,
            }
        }
        Ok(Liveness::Alive) => BranchSeen::Alive,
        Ok(Liveness::Dead(errno)) => BranchSeen::Failed(std::io::Error::from_raw_os_error(errno).to_string()),
        Ok(Liveness::Hung) => BranchSeen::Silent(Duration::ZERO),
        // No thread could be started: that says nothing about the branch.
        Err(_) => BranchSeen::Alive,
    }
}

pub(super) const fn facts(record: &Record) -> Facts {
    Facts {
        kind: record.kind,
        remote: record.has_remote(),
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
        Facts { kind, remote: false, branch_timeout: TIMEOUT, partial: false, restoring: false }
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
    fn a_union_does_not_stay_over_a_branch_that_can_only_be_read_and_a_bind_does() {
        let branches = [BranchSeen::ReadOnly];
        let merged = decide(facts(UnionKind::Mergerfs), &seen(UnionSeen::Running, &branches));
        assert!(matches!(merged, Action::Lose(_)), "{merged:?}");
        let bound = decide(facts(UnionKind::Bind), &seen(UnionSeen::Unneeded, &branches));
        assert!(matches!(bound, Action::Report(_)), "{bound:?}");
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
    fn a_branch_whose_node_is_away_is_waited_for_and_then_lost_whatever_serves_it() {
        let node: NodeName = "node-b".parse().unwrap();
        for kind in [UnionKind::Bind, UnionKind::Overlay, UnionKind::Mergerfs, UnionKind::Block] {
            let facts = Facts { remote: true, ..facts(kind) };
            let after = |seconds| {
                let away = BranchSeen::Away(node.clone(), Duration::from_secs(seconds));
                decide(facts, &seen(UnionSeen::Running, &[away]))
            };
            assert!(matches!(after(299), Action::Report(r) if r.contains("node-b")), "{kind:?}");
            assert!(matches!(after(300), Action::Lose(l) if l[0].1.contains("node-b")), "{kind:?}");
            assert!(matches!(decide(facts, &seen(UnionSeen::Running, &[failed()])), Action::Lose(_)));
        }
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

    fn entry(fs_type: &str, options: &[&str]) -> MountEntry {
        MountEntry {
            id: 1,
            parent: 0,
            device: (7, 0),
            root: "/".into(),
            mount_point: "/b".into(),
            options: vec![],
            fs_type: fs_type.into(),
            source: "/dev/loop0".into(),
            super_options: options.iter().map(|&o| o.to_owned()).collect(),
        }
    }

    #[test]
    fn a_branch_is_judged_by_its_mount_before_it_is_asked() {
        let entry = |options: &[&str]| entry("ext4", options);
        let alive = || Ok(Liveness::Alive);
        let judge =
            |entry: Option<&MountEntry>, reader_only, ask: fn() -> crate::platform::Result<Liveness>| {
                judge(entry, reader_only, ask, |_| Ok(false))
            };
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

    #[test]
    fn a_branch_that_refuses_writes_is_read_only_whatever_its_mount_says_and_who_only_reads_does_not_care() {
        let seen = |fs_type: &str, reader_only| {
            judge(Some(&entry(fs_type, &["rw"])), reader_only, || Ok(Liveness::Alive), |_| Ok(true))
        };
        assert_eq!(seen("ext4", false), BranchSeen::ReadOnly);
        assert_eq!(seen("nfs4", false), BranchSeen::ReadOnly);
        assert_eq!(seen("ext4", true), BranchSeen::Alive);
        assert_eq!(seen("xfs", false), BranchSeen::Alive, "XFS shuts down, which is seen");
    }
}
