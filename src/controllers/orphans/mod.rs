//! Finds what no claim needs any more, and tells of it; deletes nothing.
//!
//! The leader looks once an hour ([`OrphanScan`]): one list of each kind, the large ones in pages, and a second look at what
//! is new, so that nothing is told that was just going in the ordinary way. What it found ([`Scan`]) is kept in memory for
//! the API and the metrics ([`Findings`]). `union-csi orphans` does the same once ([`look`]), with its user's rights.

pub mod forget;
pub mod read;
pub mod scan;

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use crate::store::Store;
use read::{ScanError, confirmed};
use scan::{Orphan, OrphanKind, counts, orphans, unnamed};

/// Between two scans: an orphan is old by nature, and an idle cluster is to be left alone.
pub const INTERVAL: Duration = Duration::from_secs(60 * 60);

/// From the beginning of a term to its first scan: others need the API server more then.
const SETTLE: Duration = Duration::from_secs(60);

/// After a scan that failed.
const AGAIN: Duration = Duration::from_secs(5 * 60);

/// Orphans that are kept by name; others are only counted. More are no list for people.
const KEPT: usize = 1000;

/// What a scan found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// When it began.
    pub at: Timestamp,
    /// How many orphans there are of each kind.
    pub counts: BTreeMap<OrphanKind, u64>,
    /// The first of them, by kind and name: all, where there are not more than a thousand.
    pub orphans: Vec<Orphan>,
}

/// What is known of this instance's scans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The last that was done; `None`: there was none since this instance began to lead.
    pub last: Option<Arc<Scan>>,
    /// When the next is due; `None`: this instance does not scan.
    pub next: Option<Timestamp>,
    /// Why the last attempt failed, where it did.
    pub problem: Option<String>,
}

/// Reads what the scans of this instance found; stays valid when it leads no more. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Findings(watch::Sender<Known>);

impl Findings {
    /// What is known now.
    #[must_use]
    pub fn read(&self) -> Known {
        self.0.borrow().clone()
    }

    /// No scan runs: what was found is no longer known to be so.
    pub fn rest(&self) {
        self.0.send_replace(Known::default());
    }
}

/// What was found at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// All that have a name, by kind and name.
    pub orphans: Vec<Orphan>,
    /// Branches on disks that their nodes count without naming them, because there are so many.
    pub unnamed: u64,
}

/// Looks once. `told` are those that were found before, and when first.
///
/// # Errors
/// [`ScanError`].
pub async fn look(
    client: &Client,
    store: &dyn Store,
    namespace: &str,
    told: &HashMap<(OrphanKind, String), Timestamp>,
    now: Timestamp,
) -> Result<Look, ScanError> {
    let (found, unnamed) = {
        let seen = read::read(client, store, namespace).await?;
        (orphans(&seen, now), unnamed(&seen))
    };
    let found = confirmed(client, store, found, told).await?;
    let since = |orphan: Orphan| match told.get(&orphan.key()) {
        Some(first) => orphan.since(*first, now),
        None => orphan,
    };
    Ok(Look { orphans: found.into_iter().map(since).collect(), unnamed })
}

/// The leader's own scans; see the module.
pub struct OrphanScan {
    cluster: Cluster,
    store: Arc<dyn Store>,
    clock: fn() -> Timestamp,
    findings: Findings,
    /// All that were found, by kind and name, and when first.
    told: HashMap<(OrphanKind, String), Timestamp>,
}

impl OrphanScan {
    /// A controller; it does nothing until [`OrphanScan::run`]. `clock` dates what is found ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self { cluster, store, clock, findings: Findings::default(), told: HashMap::new() }
    }

    /// The same, telling `findings` what it finds.
    #[must_use]
    pub fn telling(self, findings: Findings) -> Self {
        Self { findings, ..self }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut wait = varied(SETTLE, RandomState::new().hash_one(0));
        loop {
            self.due_in(wait);
            if shutdown.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                return;
            }
            let length = match shutdown.run_until_cancelled(self.scan()).await {
                None => return,
                Some(Ok(_)) => INTERVAL,
                Some(Err(error)) => {
                    tracing::warn!(%error, retry.seconds = AGAIN.as_secs(), "cannot look for orphans");
                    self.findings.0.send_modify(|known| known.problem = Some(error.to_string()));
                    AGAIN
                }
            };
            wait = varied(length, RandomState::new().hash_one(0));
        }
    }

    /// Scans now, and tells what was found.
    ///
    /// # Errors
    /// [`ScanError`]; what was found before stays told.
    pub async fn scan(&mut self) -> Result<Arc<Scan>, ScanError> {
        let at = (self.clock)();
        let Cluster { client, namespace, .. } = &self.cluster;
        let look = look(client, &*self.store, namespace, &self.told, at).await?;
        let mut found = look.orphans;
        let mut counts = counts(&found);
        *counts.entry(OrphanKind::Unclaimed).or_default() += look.unnamed;
        let new = found.iter().filter(|orphan| !self.told.contains_key(&orphan.key())).count();
        if new > 0 {
            tracing::info!(
                orphans.new = new,
                orphans.all = found.len(),
                "objects that nothing needs: `union-csi orphans` lists them with the command that removes each"
            );
        }
        self.told = found.iter().map(|orphan| (orphan.key(), orphan.first_seen)).collect();
        found.truncate(KEPT);
        let scan = Arc::new(Scan { at, counts, orphans: found });
        self.findings.0.send_modify(|known| {
            known.last = Some(scan.clone());
            known.problem = None;
        });
        Ok(scan)
    }

    fn due_in(&self, wait: Duration) {
        let next = SignedDuration::try_from(wait).ok().and_then(|wait| (self.clock)().checked_add(wait).ok());
        self.findings.0.send_modify(|known| known.next = next);
    }
}

/// As long as `length` and up to a tenth more, by `chance`: clusters that were started together do not scan together.
fn varied(length: Duration, chance: u64) -> Duration {
    let share = u32::try_from(chance % 1024).unwrap_or(0);
    length + length / 10 * share / 1024
}

#[cfg(test)]
mod tests;
