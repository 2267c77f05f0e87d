//! Bringing back what was exported before a reboot.
//!
//! Other nodes wait for it: their workloads stand still until their branches answer again. So it is done first, from the marks
//! beside the branches alone, whether or not an API server answers; and again for the pools that come later, for as long as
//! something is missing.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::Executor;
use super::work::blocking;
use crate::domain::pool::PoolState;
use crate::domain::{BranchId, PoolName};
use crate::store::object::BranchSpec;

/// How long the survey of what this node can carry may take before it is tried without: modules are loaded, and an address may
/// come late.
const SURVEY: Duration = Duration::from_secs(20);

/// Between two attempts at what is missing, and between two looks at the kernel's servers: what was taken from other nodes is
/// looked after, and it is seen whether another program made one forget what it exports (`exportfs -f`); consumers wait until
/// it is told again.
const AGAIN: Duration = Duration::from_secs(5);

/// The branches whose exports are not back, and why.
type Missing = BTreeMap<BranchId, String>;

impl Executor {
    /// Brings back what was exported before a reboot, once, as far as it can be now. Call it when it is known what this node can
    /// carry, and before anything that takes longer; what is missing is tried again while [`Executor::run`] runs.
    pub async fn restore_exports(&self) {
        let missing = self.restore_once(&Missing::new()).await;
        *self.missing.lock().unwrap_or_else(PoisonError::into_inner) = missing;
    }

    /// Tries again what is missing, and looks at the pools that come later.
    pub(super) async fn restore_loop(&self, shutdown: &CancellationToken) {
        let mut pools = self.latest.subscribe();
        let mut carried = self.transports.watch();
        let mut ready = self.ready_pools();
        if !self.exports_restored() {
            if !self.look_for_given().await.is_empty() && !self.transports.surveyed() {
                let surveyed = tokio::time::timeout(SURVEY, carried.changed());
                if shutdown.run_until_cancelled(surveyed).await.is_none() {
                    return;
                }
            }
            carried.mark_unchanged();
            self.restore_exports().await;
        }
        let mut missing = self.missing.lock().unwrap_or_else(PoisonError::into_inner).clone();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                Ok(()) = carried.changed() => {}
                Ok(()) = pools.changed() => {
                    let before = std::mem::replace(&mut ready, self.ready_pools());
                    if ready.iter().all(|pool| before.contains(pool)) {
                        continue;
                    }
                }
                () = tokio::time::sleep(AGAIN) => {
                    let transports = self.transports.clone();
                    let forgotten = blocking(move || {
                        transports.tend();
                        transports.forgotten()
                    });
                    if forgotten.await {
                        warn!("what a kernel's server was told of exports was taken from it by another program: it is told again");
                    } else if missing.is_empty() {
                        continue;
                    }
                }
            }
            missing = self.restore_once(&missing).await;
        }
    }

    async fn restore_once(&self, told: &Missing) -> Missing {
        let begun = Instant::now();
        let given = self.look_for_given().await;
        let count = given.len();
        let exporter = self.exporter.clone();
        let missed =
            if given.is_empty() { Vec::new() } else { blocking(move || exporter.restore(&given)).await };
        let missing: Missing = missed.into_iter().map(|m| (m.branch, m.error.to_string())).collect();
        if count > 0 && !self.exports_restored() {
            info!(
                exports = count - missing.len(),
                missing = missing.len(),
                duration.seconds = begun.elapsed().as_secs_f64(),
                "branches that other nodes use are exported"
            );
        }
        for (branch, reason) in missing.iter().filter(|(branch, reason)| told.get(branch) != Some(reason)) {
            error!(
                branch.id = %branch, error = reason, retry_after = ?AGAIN,
                "a branch that another node uses is not exported"
            );
        }
        self.restored.send_replace(true);
        missing
    }

    fn ready_pools(&self) -> Vec<PoolName> {
        let latest = self.latest();
        latest.iter().filter(|pool| pool.state == PoolState::Ready).map(|pool| pool.name.clone()).collect()
    }

    async fn look_for_given(&self) -> Vec<BranchSpec> {
        let exporter = self.exporter.clone();
        blocking(move || exporter.given()).await
    }
}
