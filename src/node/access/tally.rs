//! What the owner's part has done since the agent started.

use std::sync::atomic::{AtomicU64, Ordering};

/// How often what was done, and how many exports stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCounts {
    /// Branches that were open to another node when they were last looked at.
    pub open: u64,
    /// Rights given to another node.
    pub grants: u64,
    /// Rights taken from another node, with its live connections.
    pub fences: u64,
    /// Uses of this node that were ended for another.
    pub ended: u64,
    /// Orders that were not carried out at the first attempt, each further attempt counted.
    pub failures: u64,
}

/// The counters behind [`ExportCounts`].
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) grants: AtomicU64,
    pub(super) fences: AtomicU64,
    pub(super) ended: AtomicU64,
    pub(super) failures: AtomicU64,
}

impl Tally {
    pub(super) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn counts(&self, open: u64) -> ExportCounts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ExportCounts {
            open,
            grants: read(&self.grants),
            fences: read(&self.fences),
            ended: read(&self.ended),
            failures: read(&self.failures),
        }
    }
}
