//! Publishing this node's `StorageNode`.

use std::collections::VecDeque;
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
use super::strays::Strays;
use super::{NodeFacts, REWATCH};
use crate::domain::pool::{PoolReport, PoolState};
use crate::domain::{Bytes, NodeName};
use crate::node::transport::Carried;
use crate::store::object::{Meta, StorageNode, StorageNodeSpec, StorageNodeStatus, Version, set_condition};
use crate::store::{Event, Selector, Store, StoreError};

/// Figures that moved by less than this share of the pool are not news; nor are less than [`STEP`] bytes.
const SHARE: u64 = 100;
/// See [`SHARE`].
const STEP: Bytes = Bytes::mib(64);

/// Even small news are published this often, and that there are none: others take a node that is silent for several times
/// this for one whose agent does not run.
const HEARTBEAT: Duration = Duration::from_secs(300);

/// Figures that moved are published this long after the last write, all at once: whoever plans counts what was promised
/// since by itself.
const SETTLE: Duration = Duration::from_secs(5);

/// Own writes whose events may be outstanding: two, of a node that is made, and a few more for events that are late.
const WRITTEN: usize = 8;

/// The condition that tells whether other nodes can reach this one; absent where none are to.
const STORAGE_NETWORK: &str = "StorageNetwork";

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
    /// What it can carry between itself and others.
    pub(super) carried: watch::Receiver<Carried>,
    /// What of this node is nobody's; `None`: not looked for yet, what was published stays.
    pub(super) strays: watch::Receiver<Option<Arc<Strays>>>,
}

/// What was published last.
#[derive(Debug, Default)]
pub(super) struct Published {
    /// As it is stored; `None`: unknown, to be written anew.
    object: Option<StorageNode>,
    /// Versions that own writes made: their events may come after a later write, and tell nothing.
    written: VecDeque<Version>,
    /// Somebody else wrote it.
    edited: bool,
    at: Option<Instant>,
    /// Up to which change.
    begun: u64,
    /// When what is known and not published is due.
    due: Option<Instant>,
    /// With these, which an older definition of the object may have left out.
    strays: Option<Arc<Strays>>,
    /// And this.
    carried: Option<Carried>,
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
            // While the store cannot be written to, nothing is due before the next attempt.
            let write = self.published.not_before.or(self.published.due);
            let again = write.into_iter().chain(events.is_none().then_some(rewatch)).min();
            tokio::select! {
                () = shutdown.cancelled() => return,
                Ok(()) = measured.changed() => {}
                Ok(()) = self.facts.cluster_labels.changed() => {}
                Ok(()) = self.strays.changed() => {}
                Ok(()) = self.carried.changed() => {}
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
        match event {
            Event::Applied(object) => self.published.note(object),
            Event::Deleted(_) => {
                if self.published.object.take().is_some() {
                    info!(node.name = %self.node, "this node's object was deleted and is made again");
                }
            }
            Event::Ready => {}
        }
    }

    /// Publishes the reports when they are news, at the time at which they are.
    async fn publish(&mut self, measured: Measured) {
        let now = Instant::now();
        if self.published.not_before.is_some_and(|at| now < at) {
            return;
        }
        let Measured { begun, reports } = measured;
        let strays = self.strays.borrow_and_update().clone();
        let carried = self.carried.borrow_and_update().clone();
        let relabelled = |old: &StorageNode| self.facts.all_labels(&old.status.labels) != old.status.labels;
        let haste = match &self.published.object {
            None => Haste::Now,
            Some(_) if self.published.edited => Haste::Now,
            Some(old) if relabelled(old) => Haste::Now,
            Some(old) if self.published.carries_other(old, &carried) => Haste::Now,
            Some(old) => {
                let changed = Changed {
                    here: begun > self.published.begun,
                    awaited: self.fresh.awaited() > self.published.begun,
                };
                match haste(&old.status.pools, &reports, &changed) {
                    Haste::Never if self.published.lacks(old, strays.as_deref()) => Haste::Soon,
                    haste => haste,
                }
            }
        };
        let due = due(haste, self.published.at);
        self.published.due = due.filter(|at| now < *at && haste != Haste::Never);
        if due.is_some_and(|at| now < at) {
            if haste == Haste::Never {
                self.done(begun);
            }
            return;
        }
        for attempt in 1..=ATTEMPTS {
            let base = self.published.object.take();
            let told = Told { pools: &reports, strays: strays.as_deref(), carried: &carried };
            match write(&*self.store, &self.node, &self.facts, told, base).await {
                Ok(object) => {
                    self.published.wrote(object, now);
                    self.published.strays = strays;
                    self.published.carried = Some(carried);
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

impl Published {
    /// Whether these strays are yet to be told. `old` is the object as it is stored.
    fn lacks(&self, old: &StorageNode, strays: Option<&Strays>) -> bool {
        let Some(strays) = strays else { return false };
        let told = match &self.strays {
            Some(told) => (&told.unclaimed, &told.abandoned),
            None => (&old.status.unclaimed, &old.status.abandoned),
        };
        told != (&strays.unclaimed, &strays.abandoned)
    }

    /// Whether this is yet to be told. `old` is the object as it is stored.
    fn carries_other(&self, old: &StorageNode, carried: &Carried) -> bool {
        match &self.carried {
            Some(told) => told != carried,
            None => (&old.status.transports, &old.status.network) != (&carried.transports, &carried.network),
        }
    }

    /// Takes what an event told, unless it is of an own write.
    fn note(&mut self, object: StorageNode) {
        if self.written.contains(&object.meta.version) {
            return;
        }
        // Where an own write came after it, the next finds that out, and reads what is there.
        self.edited = true;
        self.object = Some(object);
    }

    /// An own write made this.
    fn wrote(&mut self, object: StorageNode, at: Instant) {
        let mut written = std::mem::take(&mut self.written);
        written.push_back(object.meta.version.clone());
        if written.len() > WRITTEN {
            written.pop_front();
        }
        *self = Self { object: Some(object), written, at: Some(at), ..Self::default() };
    }
}

/// What is to be published.
struct Told<'a> {
    pools: &'a [PoolReport],
    strays: Option<&'a Strays>,
    carried: &'a Carried,
}

/// How soon something is to be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Haste {
    /// At once: others would decide otherwise.
    Now,
    /// Together with what comes in the next moment.
    Soon,
    /// With the next heartbeat.
    Never,
}

/// What happened on this node since the last write.
#[derive(Debug, Default)]
struct Changed {
    /// Branches came or went.
    here: bool,
    /// Something does not go on before it is published.
    awaited: bool,
}

/// When what has this haste is due, where the last write was made at `last`; `None`: now.
fn due(haste: Haste, last: Option<Instant>) -> Option<Instant> {
    let wait = match haste {
        Haste::Now => return None,
        Haste::Soon => SETTLE,
        Haste::Never => HEARTBEAT,
    };
    Some(last? + wait)
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
    Told { pools, strays, carried }: Told<'_>,
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
    let mut before = std::mem::take(&mut object.status);
    if let Some(strays) = strays {
        before.unclaimed = strays.unclaimed.clone();
        before.abandoned.clone_from(&strays.abandoned);
    }
    object.status = StorageNodeStatus {
        labels: facts.all_labels(&before.labels),
        pools: pools.to_vec(),
        agent_version: facts.agent_version.clone(),
        mergerfs_version: facts.mergerfs_version.clone(),
        kernel: facts.kernel.clone(),
        heartbeat: Some(Timestamp::now()),
        transports: carried.transports.clone(),
        network: carried.network.clone(),
        ..before
    };
    let bad: Vec<&PoolReport> = pools.iter().filter(|p| p.state != PoolState::Ready).collect();
    let (ready, reason, message) = match bad.first() {
        None => (true, "PoolsReady", String::new()),
        Some(_) => {
            let all: Vec<String> = bad.iter().map(|p| format!("{}: {}", p.name, p.message)).collect();
            (false, "PoolsUnavailable", all.join("; "))
        }
    };
    let conditions = &mut object.status.conditions;
    set_condition(conditions, Timestamp::now(), "Ready", ready, reason, &message);
    match &carried.network {
        Some(network) => {
            let well = network.problem.is_empty();
            let reason = if well { "AddressFound" } else { "NetworkProblem" };
            set_condition(conditions, Timestamp::now(), STORAGE_NETWORK, well, reason, &network.problem);
        }
        None => conditions.retain(|condition| condition.kind != STORAGE_NETWORK),
    }
    nodes.update_status(object).await
}

/// How soon these reports are to be published after those.
fn haste(old: &[PoolReport], new: &[PoolReport], changed: &Changed) -> Haste {
    let without_figures = |report: &PoolReport| PoolReport {
        free: Bytes::ZERO,
        occupied: Bytes::ZERO,
        promised: Bytes::ZERO,
        allocatable: None,
        ..report.clone()
    };
    let pairs = || old.iter().zip(new);
    let moved = |(old, new): (&PoolReport, &PoolReport)| {
        let step = STEP.max(Bytes::new(old.total.get() / SHARE));
        let far = |a: Bytes, b: Bytes| Bytes::new(a.get().abs_diff(b.get())) >= step;
        old.promised != new.promised
            || far(old.free, new.free)
            || far(old.occupied, new.occupied)
            || far(old.allocatable(), new.allocatable())
    };
    if old.len() != new.len()
        || pairs().any(|(old, new)| without_figures(old) != without_figures(new))
        // A pool that fills up is news before it is a step away from full.
        || pairs().any(|(old, new)| old.allocatable().is_zero() != new.allocatable().is_zero())
        || changed.awaited && old != new
    {
        Haste::Now
    } else if pairs().any(moved) || changed.here && old != new {
        Haste::Soon
    } else {
        Haste::Never
    }
}

#[cfg(test)]
mod tests;
