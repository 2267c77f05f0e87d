//! Publishing this node's `StorageNode`.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::fresh::Fresh;
use super::queue::backoff;
use super::{NodeFacts, REWATCH};
use crate::domain::pool::{PoolReport, PoolState};
use crate::domain::{Bytes, NodeName};
use crate::store::object::{Meta, StorageNode, StorageNodeSpec, StorageNodeStatus, set_condition};
use crate::store::{Event, Selector, Store, StoreError};

/// Figures that moved by less than this share of the pool are not news; nor are less than [`STEP`] bytes.
const SHARE: u64 = 100;
/// See [`SHARE`].
const STEP: Bytes = Bytes::mib(64);

/// Even small news are published this often, and that there are none: others take a node that is silent for several times
/// this for one whose agent does not run.
const HEARTBEAT: Duration = Duration::from_secs(300);

/// Writes attempted against others' before a pause.
const ATTEMPTS: u32 = 4;

/// The longest pause between attempts while the store cannot be written to.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A measurement to be published.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// What [`Fresh::begin`] told when it began.
    pub(super) begun: u64,
    pub(super) reports: Vec<PoolReport>,
}

/// Keeps this node's object as the measurements say, apart from their making: a store that does not answer holds up none.
pub(super) struct Publisher {
    pub(super) store: Arc<dyn Store>,
    pub(super) node: NodeName,
    pub(super) facts: NodeFacts,
    pub(super) fresh: Arc<Fresh>,
    /// Whether the object is in the store, as far as this node has heard.
    pub(super) known: watch::Sender<bool>,
    pub(super) published: Published,
}

/// What was published last.
#[derive(Debug, Default)]
pub(super) struct Published {
    /// As it was written; `None`: unknown, to be written anew.
    object: Option<StorageNode>,
    at: Option<Instant>,
    /// Up to which change.
    begun: u64,
    failures: u32,
    not_before: Option<Instant>,
}

type Events = BoxStream<'static, Result<Event<StorageNode>, StoreError>>;

impl Publisher {
    /// Publishes each measurement that is news, until `shutdown`. The object is watched: one that is deleted or edited by
    /// hand is put right at once, and one that is not costs nothing.
    pub(super) async fn run(
        mut self,
        mut measured: watch::Receiver<Option<Measured>>,
        shutdown: CancellationToken,
    ) {
        let mut events: Option<Events> = None;
        let mut rewatch = Instant::now();
        loop {
            if events.is_none() && rewatch <= Instant::now() {
                rewatch = Instant::now() + REWATCH;
                let selector = Selector::Node(self.node.clone());
                let begun = shutdown.run_until_cancelled(self.store.nodes().watch(selector)).await;
                match begun {
                    None => return,
                    Some(Ok(begun)) => events = Some(begun),
                    Some(Err(error)) => {
                        warn!(%error, retry_after = ?REWATCH, "cannot watch this node's object")
                    }
                }
            }
            let again =
                self.published.not_before.into_iter().chain(events.is_none().then_some(rewatch)).min();
            tokio::select! {
                () = shutdown.cancelled() => return,
                Ok(()) = measured.changed() => {}
                Ok(()) = self.facts.cluster_labels.changed() => {}
                event = next(&mut events) => match event {
                    Some(Ok(event)) => self.note(event),
                    Some(Err(error)) => {
                        warn!(%error, "the watch of this node's object broke");
                        events = None;
                    }
                    None => events = None,
                },
                () = sleep_until(again) => {}
            }
            let latest = measured.borrow_and_update().clone();
            // Before the first measurement there is nothing to tell.
            if let Some(latest) = latest {
                let publish = self.publish(latest);
                if shutdown.run_until_cancelled(publish).await.is_none() {
                    return;
                }
            }
        }
    }

    /// Somebody, perhaps this node, wrote the object.
    fn note(&mut self, event: Event<StorageNode>) {
        let ours = |object: &StorageNode| {
            self.published
                .object
                .as_ref()
                .is_some_and(|last| last.meta.version == object.meta.version || last.status == object.status)
        };
        match event {
            Event::Applied(object) if ours(&object) => {
                self.published.object = Some(object);
            }
            Event::Applied(_) => self.published.object = None,
            Event::Deleted(_) => {
                if self.published.object.take().is_some() {
                    info!(node.name = %self.node, "this node's object was deleted and is made again");
                }
            }
            Event::Ready => {}
        }
    }

    /// Publishes the reports where they are news. After a change made here every difference is.
    async fn publish(&mut self, measured: Measured) {
        let now = Instant::now();
        if self.published.not_before.is_some_and(|at| now < at) {
            return;
        }
        let Measured { begun, reports } = measured;
        let due = self.published.at.is_none_or(|at| now.duration_since(at) >= HEARTBEAT);
        let news = match &self.published.object {
            None => true,
            Some(_) if due => true,
            Some(old) if self.facts.all_labels(&old.status.labels) != old.status.labels => true,
            Some(old) if begun > self.published.begun => old.status.pools != reports,
            Some(old) => is_news(&old.status.pools, &reports),
        };
        if !news {
            self.done(begun);
            return;
        }
        for attempt in 1..=ATTEMPTS {
            let base = self.published.object.take();
            match write(&*self.store, &self.node, &self.facts, &reports, base).await {
                Ok(object) => {
                    self.published =
                        Published { object: Some(object), at: Some(now), ..Published::default() };
                    self.done(begun);
                    self.known.send_replace(true);
                    return;
                }
                Err(StoreError::Conflict { .. } | StoreError::Exists { .. } | StoreError::Missing { .. })
                    if attempt < ATTEMPTS => {}
                Err(error) => {
                    self.published.failures = self.published.failures.saturating_add(1);
                    let pause = backoff(self.node.as_str(), self.published.failures).min(LONGEST_PAUSE);
                    self.published.not_before = Some(now + pause);
                    error!(node.name = %self.node, %error, retry_after = ?pause, "cannot publish this node's pools");
                    return;
                }
            }
        }
    }

    fn done(&mut self, begun: u64) {
        self.published.begun = begun;
        self.fresh.publish(begun);
    }
}

async fn next(events: &mut Option<Events>) -> Option<Result<Event<StorageNode>, StoreError>> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Writes the status, over `base` where that is known to be what is stored; the object as it is stored now.
async fn write(
    store: &dyn Store,
    node: &NodeName,
    facts: &NodeFacts,
    pools: &[PoolReport],
    base: Option<StorageNode>,
) -> Result<StorageNode, StoreError> {
    let nodes = store.nodes();
    let stored = match base {
        Some(object) => Some(object),
        None => nodes.get(node.as_str()).await?,
    };
    let mut object = match stored {
        Some(object) => object,
        None => {
            let spec = StorageNodeSpec { node: node.clone() };
            let meta = Meta::new(node.as_str());
            nodes.create(StorageNode { meta, spec, status: StorageNodeStatus::default() }).await?
        }
    };
    let conditions = std::mem::take(&mut object.status.conditions);
    object.status = StorageNodeStatus {
        labels: facts.all_labels(&object.status.labels),
        pools: pools.to_vec(),
        agent_version: facts.agent_version.clone(),
        mergerfs_version: facts.mergerfs_version.clone(),
        kernel: facts.kernel.clone(),
        heartbeat: Some(Timestamp::now()),
        conditions,
    };
    let bad: Vec<&PoolReport> = pools.iter().filter(|p| p.state != PoolState::Ready).collect();
    let (ready, reason, message) = match bad.first() {
        None => (true, "PoolsReady", String::new()),
        Some(_) => {
            let all: Vec<String> = bad.iter().map(|p| format!("{}: {}", p.name, p.message)).collect();
            (false, "PoolsUnavailable", all.join("; "))
        }
    };
    set_condition(&mut object.status.conditions, Timestamp::now(), "Ready", ready, reason, &message);
    nodes.update_status(object).await
}

/// Whether others would decide otherwise: anything but a figure changed, or a figure moved by a step.
fn is_news(old: &[PoolReport], new: &[PoolReport]) -> bool {
    old.len() != new.len()
        || old.iter().zip(new).any(|(old, new)| {
            let step = STEP.max(Bytes::new(old.total.get() / SHARE));
            let without_figures = |report: &PoolReport| PoolReport {
                free: Bytes::ZERO,
                occupied: Bytes::ZERO,
                allocatable: None,
                ..report.clone()
            };
            let moved = |a: Bytes, b: Bytes| Bytes::new(a.get().abs_diff(b.get())) >= step;
            without_figures(old) != without_figures(new)
                || moved(old.free, new.free)
                || moved(old.occupied, new.occupied)
                || moved(old.allocatable(), new.allocatable())
                // A pool that fills up is news before it is a step away from full.
                || old.allocatable().is_zero() != new.allocatable().is_zero()
        })
}

#[cfg(test)]
mod tests;
