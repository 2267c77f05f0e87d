//! What the splitter has done, for metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the splitter has done since it started; for metrics. Counters only rise, the others are as of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitterFigures {
    /// Decisions made.
    pub reconciles: u64,
    /// Writes that failed, conflicts included.
    pub errors: u64,
    /// Plans made.
    pub plans: u64,
    /// Plans that were not possible.
    pub infeasible: u64,
    /// Plans made anew because a node refused a branch.
    pub replans: u64,
    /// Branches now whose volume does not exist.
    pub orphans: u64,
    /// Volumes now that wait for room.
    pub waiting: u64,
}

/// Reads what the splitter has done; stays valid when it has ended.
#[derive(Clone, Debug, Default)]
pub struct SplitterCounters(pub(super) Arc<Counters>);

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reconciles: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) plans: AtomicU64,
    pub(super) infeasible: AtomicU64,
    pub(super) replans: AtomicU64,
    pub(super) orphans: AtomicU64,
    pub(super) waiting: AtomicU64,
}

impl SplitterCounters {
    /// No splitter runs: what it told of the moment is no longer known. What it counted stays.
    pub fn rest(&self) {
        self.0.orphans.store(0, Ordering::Relaxed);
        self.0.waiting.store(0, Ordering::Relaxed);
    }

    /// The figures now.
    #[must_use]
    pub fn read(&self) -> SplitterFigures {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SplitterFigures {
            reconciles: of(&self.0.reconciles),
            errors: of(&self.0.errors),
            plans: of(&self.0.plans),
            infeasible: of(&self.0.infeasible),
            replans: of(&self.0.replans),
            orphans: of(&self.0.orphans),
            waiting: of(&self.0.waiting),
        }
    }
}

pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
