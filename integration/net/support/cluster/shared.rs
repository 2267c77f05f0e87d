//! One cluster that tests hand on to each other: a start takes longer than most tests.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, PoisonError};

use super::super::Result;
use super::Cluster;

static SHARED: Mutex<Option<Cluster>> = Mutex::new(None);

/// Runs a test on the cluster that tests share: three nodes `a`, `b`, `c` that are ready, each with one pool, and no volumes. The
/// test deletes what it made; when it succeeds, nothing of it may be left on any node.
///
/// # Panics
/// As the test does, and when something is left.
pub fn on_cluster(test: impl FnOnce(&Cluster) -> Result) {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let cluster = match shared.take().map_or_else(Cluster::boot, Ok) {
        Ok(cluster) => cluster,
        Err(error) => panic!("{error:?}"),
    };
    let ended = catch_unwind(AssertUnwindSafe(|| test(&cluster).and_then(|()| cluster.comes_clean())));
    match ended {
        Ok(Ok(())) => *shared = Some(cluster),
        Ok(Err(error)) => {
            cluster.report();
            panic!("{error:?}");
        }
        Err(panic) => {
            cluster.report();
            drop(cluster);
            resume_unwind(panic);
        }
    }
}

/// Ends the cluster when no test is on it: others need the room.
pub(in super::super) fn end_if_idle() {
    if let Ok(mut shared) = SHARED.try_lock() {
        *shared = None;
    }
}
