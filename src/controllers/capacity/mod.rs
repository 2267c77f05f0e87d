//! Tells the scheduler how much room each node has for each StorageClass (`CSIStorageCapacity`).
//!
//! The scheduler sends a pod whose claim waits for its first consumer only to nodes for which an object of the claim's class
//! says that a volume of that size fits. There is one object for each class of this driver and node that has pools or
//! can attach those of others, in the program's namespace: it tells what a volume that is used there can get of the whole
//! cluster. Its figures come from the same planner and the same picture ([`Rooms`]) as volumes' plans:
//! what was planned a moment ago is counted.
//!
//! Invariants:
//! - what a node's own pools change is told of it at once, and of others within a second or so;
//! - what shrinks is told at once, and again after a few seconds; what rises after a few seconds, what hardly differs after
//!   minutes; that a node is full within a second; all together at a limited pace;
//! - a node whose agent does not report has nothing to have, since no volume would come to be there; a node that is gone,
//!   or neither has pools nor reaches any, and a class that is gone, wrong, or does not allow the node, have no object. Whether the Node object
//!   is there is not asked: without it there is no place to schedule to;
//! - objects without our labels are never touched, even under our names.

mod apply;
mod decide;
mod index;
mod object;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::storage::v1::{CSIStorageCapacity, StorageClass};
use kube::{Api, ResourceExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::class::Class;
use super::cluster::Cluster;
use super::queue::{Queue, backoff, until};
use super::splitter::{Rooms, silent_from};
use super::watch::{Told, watched};
use crate::domain::NodeName;
use apply::{Write, WriteError, apply};
use decide::{Pace, Step, Urgency, due};
use index::Index;
use object::Found;

/// How often what nodes get from each other is computed anew at most: each time looks at all pools.
const OFFERS: Duration = Duration::from_secs(1);

/// And they may not take more than one part in so many of the time.
const OFFERS_SHARE: u32 = 10;

/// Writes that may be under way at once: enough for the pace, few for an API server.
const IN_FLIGHT: usize = 16;

/// The capacity publisher; see the module.
pub struct CapacityPublisher {
    cluster: Cluster,
    rooms: Rooms,
    clock: fn() -> Timestamp,
    index: Index,
    /// Objects that differ.
    queue: Queue,
    /// Nodes, at the time from which they are silent.
    silences: Queue,
    /// Objects that differ, since when.
    since: HashMap<String, Instant>,
    /// When objects were written last.
    last: HashMap<String, Instant>,
    /// Objects that have a write under way.
    busy: HashSet<String>,
    /// Foreign objects that were reported.
    foreign: HashSet<String>,
    pace: Pace,
    /// When what nodes get from each other may be computed next.
    offers: Instant,
    /// Writes that failed since the last that did not; nothing is written until then.
    failed: (u32, Instant),
}

enum Change {
    Class(Told<Class>),
    Object(Told<Found>),
}

struct Outcome {
    name: String,
    result: Result<Option<Found>, WriteError>,
}

impl CapacityPublisher {
    /// A controller; it does nothing until [`CapacityPublisher::run`]. `rooms` is what the splitter of this instance tells
    /// ([`super::splitter::Splitter::telling`]); `clock` tells who is silent ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, rooms: Rooms, clock: fn() -> Timestamp) -> Self {
        let now = Instant::now();
        Self {
            cluster,
            rooms,
            clock,
            index: Index::default(),
            queue: Queue::default(),
            silences: Queue::default(),
            since: HashMap::new(),
            last: HashMap::new(),
            busy: HashSet::new(),
            foreign: HashSet::new(),
            pace: Pace::new(now),
            offers: now,
            failed: (0, now),
        }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too. Writes that are under way then are not
    /// waited for: each is whole or not there.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let client = self.cluster.client.clone();
        let classes = watched(
            Api::<StorageClass>::all(client.clone()),
            "storageclasses",
            StorageClass::name_any,
            Class::read,
        );
        let objects = watched(
            Api::<CSIStorageCapacity>::namespaced(client, &self.cluster.namespace),
            "csistoragecapacities",
            CSIStorageCapacity::name_any,
            |object| Some(Found::read(object)),
        );
        let mut changes =
            futures::stream::select(classes.map(Change::Class), objects.map(Change::Object)).boxed();
        let mut writes: FuturesUnordered<BoxFuture<'static, Outcome>> = FuturesUnordered::new();
        let rooms = self.rooms.clone();
        // Nothing is decided on half a picture.
        let (mut unread, mut rooms_read) = (2, false);
        loop {
            let ready = unread == 0 && rooms_read;
            let next = self.next_write().filter(|_| ready && writes.len() < IN_FLIGHT);
            let offers = (rooms_read && self.index.is_stale()).then_some(self.offers);
            let due = next.into_iter().chain(self.silences.next_due()).chain(offers).min();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                Some(outcome) = writes.next() => self.settle(outcome),
                Some(change) = changes.next() => {
                    let first = matches!(change, Change::Class(Told::FirstRead) | Change::Object(Told::FirstRead));
                    unread -= u32::from(first);
                    self.note(change);
                }
                changed = rooms.changed() => {
                    rooms_read = true;
                    for (node, room) in changed {
                        let names = self.index.put_node(&node, room, (self.clock)());
                        self.look_at(names);
                        self.mind_silence(&node);
                    }
                }
                () = until(due) => {}
            }
            let now = Instant::now();
            while let Some(node) = self.silences.pop(now) {
                if let Ok(node) = node.parse() {
                    let names = self.index.refresh_node(&node, (self.clock)());
                    self.look_at(names);
                    self.mind_silence(&node);
                }
            }
            if rooms_read && self.index.is_stale() && self.offers <= now {
                let names = self.index.refresh_offers((self.clock)());
                self.look_at(names);
                self.offers = now + OFFERS.max(now.elapsed() * OFFERS_SHARE);
            }
            if !ready && unread == 0 && rooms_read {
                let all = self.index.names();
                self.look_at(all);
            }
            while unread == 0
                && rooms_read
                && writes.len() < IN_FLIGHT
                && self.next_write().is_some_and(|at| at <= now)
                && let Some(name) = self.queue.pop(now)
            {
                writes.extend(self.reconcile(name, now));
            }
        }
    }

    /// When the next object may be written.
    fn next_write(&self) -> Option<Instant> {
        Some(self.queue.next_due()?.max(self.pace.allowed()).max(self.failed.1))
    }

    /// Has a node looked at when it will have been silent for too long.
    fn mind_silence(&mut self, node: &NodeName) {
        let now = (self.clock)();
        let from = silent_from(self.index.heartbeat(node)).filter(|from| *from > now);
        if let Some(wait) = from.and_then(|from| Duration::try_from(from.duration_since(now)).ok()) {
            self.silences.add(node.as_str(), Instant::now() + wait);
        }
    }

    /// Takes a change into the picture, and has what it concerns looked at.
    fn note(&mut self, change: Change) {
        let now = (self.clock)();
        match change {
            Change::Class(Told::Here(_, class)) => {
                let names = self.index.put_class(class, now);
                self.look_at(names);
            }
            Change::Class(Told::Gone(class)) => {
                let names = self.index.remove_class(&class, now);
                self.look_at(names);
            }
            Change::Class(Told::Only(these)) => {
                let known = self.index.class_names().filter(|name| !these.contains(*name));
                for gone in known.map(str::to_owned).collect::<Vec<_>>() {
                    self.note(Change::Class(Told::Gone(gone)));
                }
            }
            Change::Object(Told::Here(name, found)) => {
                if self.index.put_found(&name, found) {
                    self.look_at([name]);
                }
            }
            Change::Object(Told::Gone(name)) => {
                self.index.remove_found(&name);
                self.look_at([name]);
            }
            Change::Object(Told::Only(these)) => {
                let known = self.index.found_names().filter(|name| !these.contains(*name));
                for gone in known.cloned().collect::<Vec<_>>() {
                    self.note(Change::Object(Told::Gone(gone)));
                }
            }
            Change::Class(Told::FirstRead) | Change::Object(Told::FirstRead) => {}
        }
    }

    /// Has objects looked at when what differs of them is due.
    fn look_at(&mut self, names: impl IntoIterator<Item = String>) {
        for name in names {
            if let Some(at) = self.due(&name) {
                self.queue.add(&name, at);
            }
        }
    }

    /// When the object is to be written; nothing where it is as it should be.
    fn due(&mut self, name: &str) -> Option<Instant> {
        let step = self.index.step(name);
        if step == Step::Foreign {
            if self.foreign.insert(name.to_owned()) {
                tracing::warn!(
                    object = name,
                    namespace = self.cluster.namespace,
                    "a CSIStorageCapacity of another has the name of one of ours and is left alone: the scheduler is told \
                     nothing of that node and class until it is deleted"
                );
            }
        } else {
            self.foreign.remove(name);
        }
        let urgency = match step {
            Step::Nothing | Step::Foreign => {
                self.since.remove(name);
                return None;
            }
            Step::Delete => Urgency::Now,
            Step::Write(urgency) => urgency,
        };
        let since = match self.since.get(name) {
            Some(since) => *since,
            None => {
                let now = Instant::now();
                self.since.insert(name.to_owned(), now);
                now
            }
        };
        Some(due(urgency, since, self.last.get(name).copied()))
    }

    /// What is to be written is returned as a future.
    fn reconcile(&mut self, name: String, now: Instant) -> Option<BoxFuture<'static, Outcome>> {
        if self.busy.contains(&name) {
            // Looked at again when the write is done.
            return None;
        }
        let at = self.due(&name)?;
        if at > now {
            self.queue.add(&name, at);
            return None;
        }
        let write = match (self.index.step(&name), self.index.wanted(&name), self.index.found(&name)) {
            (Step::Write(_), Some(wanted), _) => Write::Apply(wanted.clone()),
            (Step::Delete, _, Some(Found::Own(published))) => Write::Delete(published.clone()),
            _ => return None,
        };
        self.pace.took(now);
        self.since.remove(&name);
        self.last.insert(name.clone(), now);
        self.busy.insert(name.clone());
        let cluster = self.cluster.clone();
        Some(Box::pin(async move {
            let result = apply(cluster, &name, write).await;
            Outcome { name, result }
        }))
    }

    /// Takes the outcome of a write into the picture.
    fn settle(&mut self, outcome: Outcome) {
        let Outcome { name, result } = outcome;
        let now = Instant::now();
        self.busy.remove(&name);
        match result {
            Ok(found) => {
                self.failed = (0, now);
                self.queue.succeeded(&name);
                match found {
                    Some(found) => {
                        self.index.put_found(&name, found);
                    }
                    None => {
                        self.index.remove_found(&name);
                        if self.index.wanted(&name).is_none() {
                            self.last.remove(&name);
                        }
                    }
                }
                self.look_at([name]);
            }
            Err(error) => {
                self.queue.add_failed(&name, now);
                // One that was under way with another that failed fails for the same reason.
                let told = self.failed.1 > now;
                if !told {
                    let failures = self.failed.0.saturating_add(1);
                    self.failed = (failures, now + backoff("csistoragecapacities", failures));
                }
                let retry = self.failed.1.saturating_duration_since(now).as_millis();
                if told || error.is_ordinary() {
                    tracing::debug!(object = name, %error, retry.ms = retry, "capacity not published");
                } else {
                    tracing::warn!(object = name, %error, retry.ms = retry, "capacity not published");
                }
            }
        }
    }
}
