//! Counts for the metrics.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the healing of unions came to.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) deaths: AtomicU64,
    pub(super) hangs: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) repairs: AtomicU64,
    pub(super) failures: AtomicU64,
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
    pub(super) fn counts(&self) -> TallyCounts {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        TallyCounts {
            deaths: read(&self.deaths),
            hangs: read(&self.hangs),
            losses: read(&self.losses),
            repairs: read(&self.repairs),
            failures: read(&self.failures),
        }
    }

    /// Counts one more.
    pub(super) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
