//! Bringing back what was exported before a reboot.
//!
//! Other nodes wait for it: their workloads stand still until their branches answer again. So it is done first, from the marks
//! beside the branches alone, whether or not an API server answers; and again for the pools that come later, for as long as
//! something is missing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use super::Executor;
use super::work::blocking;
use crate::domain::pool::PoolState;
use crate::domain::{BranchId, PoolName};
use crate::store::object::BranchSpec;

/// How long the survey of what this node can carry may take before it is tried without: modules are loaded, and an address may
/// come late.
const SURVEY: Duration = Duration::from_secs(20);

/// Between two attempts at what is missing.
const AGAIN: Duration = Duration::from_secs(5);

impl Executor {
    pub(super) async fn restore_loop(&self, shutdown: &CancellationToken) {
        let mut pools = self.latest.subscribe();
        let mut carried = self.transports.watch();
        let mut told: BTreeMap<BranchId, String> = BTreeMap::new();
        let mut ready = self.ready_pools();
        if !self.look_for_given().await.is_empty() && !self.transports.surveyed() {
            let surveyed = tokio::time::timeout(SURVEY, carried.changed());
            if shutdown.run_until_cancelled(surveyed).await.is_none() {
                return;
            }
        }
        loop {
            carried.mark_unchanged();
            let begun = Instant::now();
            let given = self.look_for_given().await;
            let exporter = self.exporter.clone();
            let count = given.len();
            let missed = match count {
                0 => Vec::new(),
                _ => blocking(move || exporter.restore(&given)).await,
            };
            if count > 0 && !self.exports_restored() {
                info!(
                    exports = count - missed.len(),
                    missing = missed.len(),
                    duration.seconds = begun.elapsed().as_secs_f64(),
                    "branches that other nodes use are exported"
                );
            }
            self.restored.send_replace(true);
            let now: BTreeMap<BranchId, String> =
                missed.into_iter().map(|m| (m.branch, m.error.to_string())).collect();
            for (branch, reason) in now.iter().filter(|(branch, reason)| told.get(branch) != Some(reason)) {
                error!(branch.id = %branch, error = reason, retry_after = ?AGAIN, "a branch that another node uses is not exported");
            }
            told = now;
            loop {
                tokio::select! {
                    () = shutdown.cancelled() => return,
                    Ok(()) = carried.changed() => break,
                    Ok(()) = pools.changed() => {
                        let before = std::mem::replace(&mut ready, self.ready_pools());
                        if ready.iter().any(|pool| !before.contains(pool)) {
                            break;
                        }
                    }
                    () = tokio::time::sleep(AGAIN), if !told.is_empty() => break,
                }
            }
        }
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
