//! The splitter: gives each volume its branches, and tells how it stands.
//!
//! One task watches volumes, branches and nodes, keeps a picture of them (`index`), and decides for one volume after
//! another (`decide`) what is to be written next. Plans are made one after the other in this task, each counting the
//! ones before it, so that promises add up; the writes they lead to run side by side, so that many volumes share the
//! store's fsyncs. Invariants:
//!
//! - a plan is on record before any branch object exists, and a branch's number is never used twice;
//! - a crash between any two writes is made good by deciding again;
//! - at most one write set of a volume is under way at a time;
//! - nothing that may hold files is deleted, except by deleting the volume.

mod apply;
mod decide;
mod feed;
mod figures;
mod index;
mod kept;
mod planning;
mod room;
mod rooms;
mod status;

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::queue::{Queue, backoff, until};
use super::watch::{Heard, Watches};
use crate::store::{Store, StoreError};
use apply::{Applied, Written, apply};
use decide::{Action, Decision, decide};
use feed::{Change, feed};
use figures::count;
pub use figures::{SplitterCounters, SplitterFigures};
use index::{Index, PoolKey};
use room::Room;
pub(super) use room::{NodeRoom, SILENCE, is_silent, silent_from};
pub use rooms::Rooms;

/// Volumes whose writes may be under way at once: a few of the embedded store's batches, and far less than what an API
/// server accepts from one client.
const IN_FLIGHT: usize = 64;

/// Volumes that wait for room are all asked again when there is more, but they may not take more than one part in so many
/// of the time: in a large and full cluster there is always a little more somewhere.
const WAITING_SHARE: u32 = 10;

/// The splitter; see the module.
pub struct Splitter {
    store: Arc<dyn Store>,
    heard: Heard,
    clock: fn() -> Timestamp,
    counters: SplitterCounters,
    index: Index,
    queue: Queue,
    /// Volumes whose writes are under way.
    busy: HashMap<String, Meanwhile>,
    /// Volumes that wait for room.
    waiting: BTreeSet<String>,
    /// There is more room than when they were last asked.
    more_room: bool,
    /// When they may be asked next.
    ask_waiting: Instant,
    /// Volume to the pools that refused a branch of it: how often, and until when they are left out.
    refusals: HashMap<String, HashMap<PoolKey, (u32, Instant)>>,
    /// Orphans that were reported.
    orphans: HashSet<String>,
    /// Who is told of the room of nodes.
    rooms: Option<Rooms>,
}

/// What happened to a volume while its writes were under way.
#[derive(Debug, Default)]
struct Meanwhile {
    /// Something did.
    dirty: bool,
    /// Branches that went.
    gone: HashSet<String>,
}

impl Splitter {
    /// A splitter over `store`; `clock` dates conditions ([`Timestamp::now`]).
    #[must_use]
    pub fn new(store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self {
            heard: Heard::alone(&store),
            store,
            clock,
            counters: SplitterCounters::default(),
            index: Index::default(),
            queue: Queue::default(),
            busy: HashMap::new(),
            waiting: BTreeSet::new(),
            more_room: false,
            ask_waiting: Instant::now(),
            refusals: HashMap::new(),
            orphans: HashSet::new(),
            rooms: None,
        }
    }

    /// The same, telling `rooms` what can still be promised of each node.
    #[must_use]
    pub fn telling(self, rooms: Rooms) -> Self {
        Self { rooms: Some(rooms), ..self }
    }

    /// The same, hearing of objects by `watches`.
    #[must_use]
    pub fn hearing(self, watches: &mut Watches) -> Self {
        Self { heard: Heard::all(watches), ..self }
    }

    /// The same, counting on in `counters`, which then also tell of earlier splitters.
    #[must_use]
    pub fn counting(self, counters: SplitterCounters) -> Self {
        Self { counters, ..self }
    }

    /// What it has done; to be taken before [`Splitter::run`].
    #[must_use]
    pub fn counters(&self) -> SplitterCounters {
        self.counters.clone()
    }

    /// Works until `shutdown`. Writes that are under way then are not waited for: each is whole or not there, and the
    /// next splitter goes on from what is there.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = feed(&mut self.heard);
        let mut writes: FuturesUnordered<BoxFuture<'static, Applied>> = FuturesUnordered::new();
        // Nothing is decided on half a picture.
        let mut unread = 3;
        loop {
            let asks = (self.more_room && !self.waiting.is_empty()).then_some(self.ask_waiting);
            let due = self.queue.next_due().into_iter().chain(asks).min();
            let due = due.filter(|_| unread == 0 && writes.len() < IN_FLIGHT);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                Some(applied) = writes.next() => self.settle(applied),
                Some(change) = changes.next() => {
                    let first = matches!(change, Change::FirstRead);
                    self.note(change);
                    if first {
                        unread -= 1;
                        if unread == 0 {
                            self.begin();
                        }
                    }
                }
                () = until(due) => {}
            }
            if unread > 0 {
                continue;
            }
            self.more_room |= self.index.take_grew();
            let now = Instant::now();
            if self.more_room && self.ask_waiting <= now {
                self.more_room = false;
                for volume in std::mem::take(&mut self.waiting) {
                    self.queue.add(&volume, now);
                }
            }
            while writes.len() < IN_FLIGHT
                && let Some(volume) = self.queue.pop(Instant::now())
            {
                writes.extend(self.reconcile(&volume));
            }
            if let Some(rooms) = &self.rooms {
                rooms.tell(self.index.take_changed());
            }
            self.counters.0.waiting.store(self.waiting.len() as u64, Ordering::Relaxed);
        }
    }

    fn begin(&mut self) {
        let now = Instant::now();
        for volume in self.index.split_names() {
            self.queue.add(volume, now);
        }
        self.note_orphans();
    }

    /// Takes a change into the picture, and has the volume that it concerns looked at.
    fn note(&mut self, change: Change) {
        let now = Instant::now();
        match change {
            Change::Split(split) => {
                self.queue.add(&split.meta.name, now);
                self.index.put_split(*split);
            }
            Change::NoSplit(name) => {
                self.index.remove_split(&name);
                self.refusals.remove(&name);
                self.waiting.remove(&name);
                self.queue.add(&name, now);
            }
            Change::Branch(branch) => {
                self.queue.add(branch.spec.volume.as_str(), now);
                self.index.put_branch(*branch);
            }
            Change::NoBranch(name) => {
                if let Some(volume) = self.index.volume_of(&name) {
                    self.queue.add(&volume, now);
                }
                for meanwhile in self.busy.values_mut() {
                    meanwhile.gone.insert(name.clone());
                }
                self.index.remove_branch(&name);
                self.orphans.remove(&name);
            }
            Change::Node(node) => self.index.put_node(*node),
            Change::NoNode(name) => {
                if let Ok(name) = name.parse() {
                    self.index.remove_node(&name);
                }
            }
            Change::OnlySplits(names) => {
                let gone: Vec<_> =
                    self.index.split_names().filter(|n| !names.contains(*n)).cloned().collect();
                gone.into_iter().for_each(|name| self.note(Change::NoSplit(name)));
            }
            Change::OnlyBranches(names) => {
                let gone: Vec<_> =
                    self.index.branch_names().filter(|n| !names.contains(*n)).cloned().collect();
                gone.into_iter().for_each(|name| self.note(Change::NoBranch(name)));
            }
            Change::OnlyNodes(names) => {
                let gone: Vec<_> = self
                    .index
                    .node_names()
                    .filter(|n| !names.contains(n.as_str()))
                    .map(ToString::to_string)
                    .collect();
                gone.into_iter().for_each(|name| self.note(Change::NoNode(name)));
            }
            Change::FirstRead => {}
        }
    }

    fn note_orphans(&mut self) {
        let mut all = 0;
        for branch in self.index.orphans() {
            all += 1;
            if self.orphans.insert(branch.meta.name.clone()) {
                tracing::warn!(
                    branch.id = branch.meta.name,
                    volume.id = %branch.spec.volume,
                    node = %branch.spec.node,
                    pool = %branch.spec.pool,
                    "branch of a volume that does not exist: kept; delete the Branch object if its files are not needed"
                );
            }
        }
        self.counters.0.orphans.store(all, Ordering::Relaxed);
    }

    /// Decides for a volume; what is to be written is returned as a future.
    fn reconcile(&mut self, volume: &str) -> Option<BoxFuture<'static, Applied>> {
        if let Some(meanwhile) = self.busy.get_mut(volume) {
            meanwhile.dirty = true;
            return None;
        }
        let Some(split) = self.index.split(volume) else {
            self.note_orphans();
            return None;
        };
        count(&self.counters.0.reconciles);
        let now = Instant::now();
        let excluded: Vec<PoolKey> = match self.refusals.get(volume) {
            Some(pools) => {
                pools.iter().filter(|(_, (_, end))| *end > now).map(|(pool, _)| pool.clone()).collect()
            }
            None => Vec::new(),
        };
        let room = Room { nodes: self.index.nodes(), network: self.index.network(), excluded: &excluded };
        let clock = (self.clock)();
        let Decision { actions, planned, refused_by, waits, again } =
            decide(&split, &self.index.branches(volume), &room, clock);
        match planned {
            Some(true) if refused_by.is_empty() => count(&self.counters.0.plans),
            Some(true) => {
                count(&self.counters.0.plans);
                count(&self.counters.0.replans);
            }
            Some(false) => count(&self.counters.0.infeasible),
            None => {}
        }
        if let Some(wait) = again.and_then(|at| Duration::try_from(at.duration_since(clock)).ok()) {
            self.queue.add(volume, now + wait);
        }
        let split = split.into_owned();
        for pool in refused_by {
            self.refuse(volume, pool, now);
        }
        if waits {
            self.waiting.insert(volume.to_owned());
            self.ask_waiting = self.ask_waiting.max(now) + now.elapsed() * WAITING_SHARE;
            // The pools that are left out come back by time alone.
            let back = self.refusals.get(volume).into_iter().flatten().map(|(_, (_, end))| *end);
            if let Some(at) = back.filter(|end| *end > now).min() {
                self.queue.add(volume, at);
            }
        } else {
            self.waiting.remove(volume);
        }
        if actions.is_empty() {
            return None;
        }
        for action in &actions {
            if let Action::SetPlan { branches, .. } = action {
                let new: Vec<_> =
                    branches.iter().filter(|b| b.index >= split.spec.next_index).cloned().collect();
                tracing::info!(volume.id = volume, branches.count = branches.len(), "volume planned");
                self.index.reserve(&split, &new);
            }
        }
        self.busy.insert(volume.to_owned(), Meanwhile::default());
        Some(Box::pin(apply(self.store.clone(), split, actions)))
    }

    fn refuse(&mut self, volume: &str, pool: PoolKey, now: Instant) {
        /// Doublings that the queue's waits need to come to seconds: a pool that refused keeps to it for a while.
        const HEAD_START: u32 = 5;
        let (times, end) = self
            .refusals
            .entry(volume.to_owned())
            .or_default()
            .entry(pool.clone())
            .or_insert((HEAD_START, now));
        *times = times.saturating_add(1);
        let wait: Duration = backoff(pool.1.as_str(), *times);
        *end = now + wait;
        tracing::info!(
            volume.id = volume,
            node = %pool.0,
            pool = %pool.1,
            left_out.seconds = wait.as_secs_f32(),
            "branch refused by its node, or not made in time: planned anew"
        );
    }

    /// Takes the outcome of a volume's writes into the picture.
    fn settle(&mut self, applied: Applied) {
        let Applied { volume, base, written, error, read } = applied;
        let Meanwhile { dirty, gone } = self.busy.remove(&volume).unwrap_or_default();
        for one in written {
            match one {
                Written::Split(split) => self.index.put_later_split(&base, *split),
                Written::Branch(branch) if gone.contains(&branch.meta.name) => {}
                Written::Branch(branch) => self.index.put_new_branch(*branch),
                Written::Going(name) => self.index.branch_goes(&name, (self.clock)()),
                Written::Nothing => {}
            }
        }
        let now = Instant::now();
        match error {
            None => {
                self.index.release(&volume);
                self.queue.succeeded(&volume);
                // There may be a next step; where there is none, nothing is written.
                self.queue.add(&volume, now);
            }
            Some(error) => {
                count(&self.counters.0.errors);
                let wait = self.queue.add_failed(&volume, now);
                if dirty {
                    self.queue.add(&volume, now);
                }
                match error {
                    StoreError::Conflict { .. } | StoreError::Missing { .. } => {
                        tracing::debug!(
                            volume.id = volume,
                            retry.ms = wait.as_millis(),
                            "volume changed meanwhile"
                        );
                    }
                    _ => tracing::warn!(volume.id = volume, error = %error, retry.ms = wait.as_millis(),
                        "volume could not be written"),
                }
                // What was reserved is in what was read, or was not written. Where nothing could be read, it stays
                // reserved: the write may have been done.
                if let Some(read) = read {
                    // That it is gone is told by its event.
                    if let Some(split) = read {
                        self.index.put_later_split(&base, split);
                    }
                    self.index.release(&volume);
                }
            }
        }
    }
}
