//! Gives branches to the nodes that their volumes are used on.
//!
//! A branch that goes to one node at a time is ordered to be given or taken back in `Branch.spec.access`; its owner carries
//! that out and reports (see [`crate::domain::access`], which decides). This controller watches where volumes are attached,
//! what was ordered and what is reported, and writes the next order of each branch, all branches of a volume side by side.
//!
//! Invariants:
//! - an order is written only over the state of the branch that it was decided on, which is read for it;
//! - at most one write of a branch is under way at a time;
//! - a volume that is only ever used where its branches lie costs no write, and nothing but a watch of what is there;
//! - a branch whose volume has no object is left as it is: who uses it is not known;
//! - two nodes that can prove to each other who they are share a key before one is given a branch of the other;
//! - how long an owner does not answer changes what is told of it, never what is ordered.
//!
//! Branches of volumes that several nodes use at once are ordered in `Branch.spec.sharing`
//! ([`crate::domain::access::shared`]); one that goes over from one way to the other is taken from everybody in between.

mod apply;
mod decide;
mod figures;
mod index;
mod keys;
mod telling;
mod waits;

#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered, StreamExt};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use super::events::Notice;
use super::queue::{Queue, until};
use super::watch::{Heard, Told, Watches};
use crate::domain::NodeName;
use crate::store::Store;
use apply::{Ground, WriteError, Written, order};
pub use decide::waiting;
use decide::{Decision, Order, decide, owner_down, sentence};
pub use figures::{AccessCounters, AccessFigures};
use index::{Index, Seen, Wanted};
use telling::Teller;
use waits::{Look, Waits};

/// Orders that may be under way at once: a drained node's worth, far less than what an API server accepts from one client.
const IN_FLIGHT: usize = 32;

/// Events that may be under way at once; they are a courtesy, and what does not fit is left out.
const TELLING: usize = 4;

/// The controller; see the module.
pub struct AccessController {
    store: Arc<dyn Store>,
    heard: Heard,
    clock: fn() -> Timestamp,
    teller: Option<Teller>,
    counters: AccessCounters,
    index: Index,
    queue: Queue,
    /// Branches with a write under way.
    busy: HashMap<Arc<str>, Meanwhile>,
    waits: Waits,
    /// To be told.
    notices: Vec<(Arc<str>, Option<String>, Notice)>,
}

/// What came while a write was under way.
#[derive(Clone, Copy, Debug, Default)]
struct Meanwhile {
    /// It is to be looked at again.
    again: bool,
    /// Its object was told of. That may be what the write left, or what its owner made of it: what the write's answer tells is
    /// not known to be later.
    told: bool,
}

enum Change {
    Volume(Told<Wanted>),
    Branch(Told<Seen>),
    /// When a node published last.
    Node(Told<Option<Timestamp>>),
}

struct Outcome {
    branch: Arc<str>,
    result: Result<Written, WriteError>,
}

impl AccessController {
    /// A controller over `store`; it does nothing until [`AccessController::run`]. `clock` tells who is silent
    /// ([`Timestamp::now`]).
    #[must_use]
    pub fn new(store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self {
            heard: Heard::alone(&store),
            store,
            clock,
            teller: None,
            counters: AccessCounters::default(),
            index: Index::default(),
            queue: Queue::default(),
            busy: HashMap::new(),
            waits: Waits::default(),
            notices: Vec::new(),
        }
    }

    /// The same, hearing of objects by `watches`.
    #[must_use]
    pub fn hearing(self, watches: &mut Watches) -> Self {
        Self { heard: Heard::all(watches), ..self }
    }

    /// The same, telling of waits by events in that cluster.
    #[must_use]
    pub fn telling(self, cluster: Cluster) -> Self {
        Self { teller: Some(Teller::new(cluster, self.clock)), ..self }
    }

    /// The same, counting on in `counters`, which then also tell of earlier controllers.
    #[must_use]
    pub fn counting(self, counters: AccessCounters) -> Self {
        Self { counters, ..self }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too. Writes that are under way then are not
    /// waited for: each is whole or not there.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = changes(&mut self.heard);
        let mut writes: FuturesUnordered<BoxFuture<'static, Outcome>> = FuturesUnordered::new();
        let mut tells: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        // Nothing is decided on half a picture.
        let mut unread = 3;
        loop {
            let due = self.queue.next_due().filter(|_| unread == 0 && writes.len() < IN_FLIGHT);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                Some(outcome) = writes.next() => self.settle(outcome),
                Some(()) = tells.next() => {}
                Some(change) = changes.next() => {
                    let first = matches!(
                        change,
                        Change::Volume(Told::FirstRead)
                            | Change::Branch(Told::FirstRead)
                            | Change::Node(Told::FirstRead)
                    );
                    self.note(change, unread == 0);
                    if first {
                        unread -= 1;
                        if unread == 0 {
                            self.begin();
                        }
                    }
                }
                () = until(due) => {}
            }
            while unread == 0
                && writes.len() < IN_FLIGHT
                && let Some(branch) = self.queue.pop(Instant::now())
            {
                writes.extend(self.reconcile(&branch.into()));
            }
            self.counters.set_waiting(self.waits.late());
            for (volume, asked_by, notice) in self.notices.drain(..) {
                if let Some(teller) = self.teller.clone().filter(|_| tells.len() < TELLING) {
                    tells.push(Box::pin(async move {
                        teller.tell(&volume, asked_by.as_deref(), &notice).await;
                    }));
                }
            }
        }
    }

    fn begin(&mut self) {
        let now = Instant::now();
        // Of tens of thousands nearly none has anything to be done about it.
        let at_rest = |branch: &&Arc<str>| matches!(self.decide(branch), Some((Decision::Settled, _)));
        let due: Vec<Arc<str>> = self.index.branches().filter(|b| !at_rest(b)).cloned().collect();
        for branch in due {
            self.queue.add(&branch, now);
        }
    }

    /// Takes a change into the picture; `look`: has what it concerns looked at.
    fn note(&mut self, change: Change, look: bool) {
        let mut concerned: BTreeSet<Arc<str>> = BTreeSet::new();
        match change {
            Change::Volume(Told::Here(name, wanted)) => {
                concerned.extend(self.index.put_volume(&name, Some(wanted)));
            }
            Change::Volume(Told::Gone(name)) => concerned.extend(self.index.put_volume(&name, None)),
            Change::Volume(Told::Only(names)) => {
                for name in self.index.volumes_beside(&names) {
                    concerned.extend(self.index.put_volume(&name, None));
                }
            }
            Change::Branch(Told::Here(name, seen)) => {
                if self.index.put_branch(&name, seen) {
                    self.told(&name);
                    concerned.insert(name.into());
                }
            }
            Change::Branch(Told::Gone(name)) => {
                self.index.remove_branch(&name);
                self.told(&name);
                concerned.insert(name.into());
            }
            Change::Branch(Told::Only(names)) => {
                for name in self.index.branches_beside(&names) {
                    self.index.remove_branch(&name);
                    self.told(&name);
                    concerned.insert(name);
                }
            }
            // That an owner is silent, or is back, is told when what waits for it is looked at.
            Change::Node(Told::Here(name, heartbeat)) => {
                if let Ok(node) = name.parse::<NodeName>() {
                    self.index.put_node(&node, heartbeat);
                }
            }
            Change::Node(Told::Gone(name)) => self.index.remove_node(&name),
            Change::Node(Told::Only(names)) => self.index.only_nodes(&names),
            Change::Volume(Told::FirstRead)
            | Change::Branch(Told::FirstRead)
            | Change::Node(Told::FirstRead) => {}
        }
        let now = Instant::now();
        for branch in concerned.iter().filter(|_| look) {
            self.queue.add(branch, now);
        }
    }

    fn told(&mut self, branch: &str) {
        if let Some(meanwhile) = self.busy.get_mut(branch) {
            meanwhile.told = true;
        }
    }

    /// Decides about a branch; what is to be written is returned as a future.
    fn reconcile(&mut self, branch: &Arc<str>) -> Option<BoxFuture<'static, Outcome>> {
        if let Some(meanwhile) = self.busy.get_mut(branch) {
            meanwhile.again = true;
            return None;
        }
        let Some((decision, ground)) = self.decide(branch) else {
            self.at_rest(branch);
            return None;
        };
        match decision {
            Decision::Order(_) => {
                self.busy.insert(branch.clone(), Meanwhile::default());
                let (store, branch) = (self.store.clone(), branch.clone());
                Some(Box::pin(async move {
                    let result = order(store, branch.clone(), ground).await;
                    Outcome { branch, result }
                }))
            }
            Decision::Wait(awaited) => {
                self.queue.succeeded(branch);
                // Nobody waits for what nobody wants.
                match ground.claims.nodes.first() {
                    Some(wants) => self.wait(branch, sentence(branch, wants, &awaited)),
                    None => self.at_rest(branch),
                }
                None
            }
            Decision::Settled => {
                self.at_rest(branch);
                None
            }
        }
    }

    /// What is to be done about a branch as it is known, and on what ground; `None` where it is gone, or its volume is.
    fn decide(&self, branch: &str) -> Option<(Decision, Ground)> {
        let (seen, wanted) = self.index.branch(branch)?;
        let ground = Ground {
            claims: wanted.claims.clone(),
            owner_down: owner_down(self.index.heartbeat(&seen.owner), (self.clock)()),
        };
        let decision = decide(&ground.case(&seen));
        Some((decision, ground))
    }

    fn wait(&mut self, branch: &Arc<str>, why: String) {
        let Some((Seen { volume, .. }, wanted)) = self.index.branch(branch) else { return };
        let asked_by = wanted.asked_by.clone();
        let Look { tell, again } = self.waits.waits(branch, &volume, &why, Instant::now());
        self.queue.add(branch, again);
        if tell {
            tracing::warn!(
                volume.id = &*volume,
                branch.id = &**branch,
                reason = why,
                "a branch waits for its owner"
            );
            self.notices.push((volume, asked_by, Notice::warning("BranchNotGranted", why)));
        }
    }

    fn at_rest(&mut self, branch: &str) {
        self.queue.succeeded(branch);
        if self.waits.over(branch) {
            tracing::info!(branch.id = branch, "a branch waits for its owner no more");
        }
    }

    /// Takes the outcome of a write into the picture.
    fn settle(&mut self, outcome: Outcome) {
        let Outcome { branch, result } = outcome;
        let Meanwhile { again, told } = self.busy.remove(&branch).unwrap_or_default();
        let now = Instant::now();
        match result {
            Ok(written) => {
                self.queue.succeeded(&branch);
                let seen = match written {
                    Written::Ordered { order, seen } => {
                        let (nodes, epoch) = match &order {
                            Order::Access(access) => (access.consumer.as_slice(), access.epoch),
                            Order::Sharing(sharing) => (&*sharing.consumers, sharing.epoch),
                        };
                        self.counters.ordered(!nodes.is_empty());
                        let given = nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
                        let given = if nodes.is_empty() { "nobody" } else { &given };
                        tracing::info!(
                            branch.id = &*branch,
                            given.to = given,
                            epoch = epoch.0,
                            "branch ordered"
                        );
                        Some(seen)
                    }
                    Written::Needless(seen) => Some(seen),
                    Written::Gone => None,
                };
                // Where an event came first, the next ones tell the rest: of what is gone, too.
                if let Some(seen) = seen.filter(|_| !told && self.index.branch(&branch).is_some()) {
                    self.index.put_branch(&branch, seen);
                }
                self.queue.add(&branch, now);
            }
            Err(error) => {
                let wait = self.queue.add_failed(&branch, now);
                if again {
                    self.queue.add(&branch, now);
                }
                let (id, retry) = (&*branch, wait.as_millis());
                if error.is_conflict() {
                    tracing::debug!(branch.id = id, retry.ms = retry, "branch changed meanwhile");
                } else {
                    tracing::warn!(branch.id = id, %error, retry.ms = retry, "branch could not be ordered");
                }
            }
        }
    }
}

/// All changes, beginning with all objects.
fn changes(heard: &mut Heard) -> BoxStream<'static, Change> {
    let volumes = heard.splits().map(|told| Change::Volume(told.map(|split| Wanted::of(&split))));
    let branches = heard.branches().map(|told| Change::Branch(told.map(|branch| Seen::of(&branch))));
    let nodes = heard.nodes().map(|told| Change::Node(told.map(|node| node.status.heartbeat)));
    futures::stream::select_all([volumes.boxed(), branches.boxed(), nodes.boxed()]).boxed()
}
