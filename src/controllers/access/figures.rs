//! What was ordered, and what waits, for metrics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What was ordered since this instance started, and what waits now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessFigures {
    /// Branches that were given to a node.
    pub grants: u64,
    /// Branches that were taken back.
    pub revocations: u64,
    /// Branches now that an attached volume needs and that their owner has not made over for a while.
    pub waiting: u64,
}

/// Reads what the controller did; stays valid when it has ended. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct AccessCounters(Arc<Counters>);

#[derive(Debug, Default)]
struct Counters {
    grants: AtomicU64,
    revocations: AtomicU64,
    waiting: AtomicU64,
}

impl AccessCounters {
    /// No controller runs: what it told of the moment is no longer known. What it counted stays.
    pub fn rest(&self) {
        self.set_waiting(0);
    }

    /// The figures now.
    #[must_use]
    pub fn read(&self) -> AccessFigures {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        AccessFigures {
            grants: of(&self.0.grants),
            revocations: of(&self.0.revocations),
            waiting: of(&self.0.waiting),
        }
    }

    pub(super) fn ordered(&self, grant: bool) {
        let counter = if grant { &self.0.grants } else { &self.0.revocations };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_waiting(&self, branches: u64) {
        self.0.waiting.store(branches, Ordering::Relaxed);
    }
}
