//! PersistentVolumeClaims become volumes and PersistentVolumes, and go again.
//!
//! What users know from the official external-provisioner, in the process. Watches of claims, classes, PersistentVolumes
//! and volumes keep a picture (`index`); for one volume after another, `decide` says which one write comes next;
//! `apply` does it. A claim becomes a `VolumeSplit` of the same name as its PersistentVolume (`pvc-<uid>`), the splitter
//! plans it, nodes make its branches, and when they have, the PersistentVolume is made. Invariants:
//!
//! - names follow from the claim's UID, so nothing is made twice, whoever makes it;
//! - nothing is decided on half a picture, and what deletes looks once more before it does;
//! - at most one write of a volume is under way at a time;
//! - what others made is left alone, and said so.

mod apply;
mod decide;
mod feed;
mod index;
mod objects;
mod persistent_volume;
mod telling;
mod wanted;
mod words;

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use super::events::{Notice, Recorder};
use super::queue::{Queue, backoff, until};
use super::watch::{Heard, Told, Watches};
use crate::store::Store;
use apply::{WriteError, Writer, Written};
use decide::{About, Action, Decision, decide};
use feed::{Change, KINDS, feed};
use index::Index;
use telling::{Now, Telling};

/// Volumes whose writes may be under way at once: what an API server takes from one client without queueing it.
const IN_FLIGHT: usize = 32;

/// The longest that one write may take with what is read before it: longer than an API server that is busy lets wait
/// (a minute by its default, for what it then answers with an error), so that what hangs is the connection.
const LONGEST_WRITE: Duration = Duration::from_secs(90);

/// How often a claim is given back to the scheduler without a pause: as often, other nodes are tried at once.
const FREE_ATTEMPTS: u32 = 3;

/// Doublings of the queue's first wait that make it seconds: what a scheduler takes for another attempt.
const HEAD_START: u32 = 4;

/// Failures after which an ordinary error is told people, too: three waits come to a third of a second.
const TELL_AFTER: u32 = 6;

pub(super) use objects::{LABEL_CLAIM, LABEL_RETAINED};

/// The provisioner; see the module.
pub struct Provisioner {
    heard: Heard,
    writer: Writer,
    recorder: Recorder,
    index: Index,
    queue: Queue,
    telling: Telling,
    /// Volumes whose write is under way, and whether something happened to them meanwhile.
    busy: HashMap<String, bool>,
    failures: HashMap<String, u32>,
    /// What goes wrong with the writes of a volume and does not pass.
    complaints: HashMap<String, String>,
    /// Claims that were given back to the scheduler: how often, and until when they wait.
    given_back: HashMap<String, (u32, Instant)>,
}

/// What came of a volume's write.
struct Settled {
    name: String,
    result: Result<Option<Done>, WriteError>,
}

/// What a write that was done means here.
enum Done {
    GivenBack,
    Provisioned,
    Unprotected,
}

impl Provisioner {
    /// A controller; it does nothing until [`Provisioner::run`]. `clock` dates what it writes ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self {
            heard: Heard::alone(&store),
            recorder: Recorder::new(cluster.clone(), clock),
            writer: Writer { cluster, store },
            index: Index::default(),
            queue: Queue::default(),
            telling: Telling::default(),
            busy: HashMap::new(),
            failures: HashMap::new(),
            complaints: HashMap::new(),
            given_back: HashMap::new(),
        }
    }

    /// The same, hearing of volumes by `watches`.
    #[must_use]
    pub fn hearing(self, watches: &mut Watches) -> Self {
        Self { heard: Heard::volumes(watches), ..self }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too. Writes that are under way then are not
    /// waited for: the next leader goes on from what is there.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut changes = feed(&self.writer.cluster, &mut self.heard);
        let mut writes: FuturesUnordered<BoxFuture<'static, Settled>> = FuturesUnordered::new();
        let mut unread = KINDS;
        loop {
            let due = self.queue.next_due().filter(|_| unread == 0 && writes.len() < IN_FLIGHT);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                Some(settled) = writes.next() => self.settle(settled),
                Some(change) = changes.next() => {
                    let first = change.is_first_read();
                    self.note(change);
                    if first {
                        unread = unread.saturating_sub(1);
                        if unread == 0 {
                            let now = Instant::now();
                            self.index.names().iter().for_each(|name| self.queue.add(name, now));
                        }
                    }
                }
                () = until(due) => {}
            }
            while unread == 0
                && writes.len() < IN_FLIGHT
                && let Some(name) = self.queue.pop(Instant::now())
            {
                writes.extend(self.reconcile(&name));
            }
        }
    }

    /// Takes a change into the picture, and has the volumes that it concerns looked at.
    fn note(&mut self, change: Change) {
        let concerned = match change {
            Change::Claim(told) => match told {
                Told::Here(name, claim) => {
                    self.index.put_claim(name.clone(), claim);
                    vec![name]
                }
                Told::Gone(name) => self.without_claim(name),
                Told::Only(names) => others(self.index.claim_names(), &names)
                    .into_iter()
                    .flat_map(|n| self.without_claim(n))
                    .collect(),
                Told::FirstRead => Vec::new(),
            },
            Change::Class(told) => match told {
                Told::Here(name, class) => self.index.put_class(name, class),
                Told::Gone(name) => self.index.remove_class(&name),
                Told::Only(names) => others(self.index.class_names(), &names)
                    .iter()
                    .flat_map(|n| self.index.remove_class(n))
                    .collect(),
                Told::FirstRead => Vec::new(),
            },
            Change::Volume(told) => match told {
                Told::Here(_, volume) => self.index.put_volume(volume),
                Told::Gone(name) => self.without_volume(name),
                Told::Only(names) => others(self.index.volume_names(), &names)
                    .into_iter()
                    .flat_map(|n| self.without_volume(n))
                    .collect(),
                Told::FirstRead => Vec::new(),
            },
            Change::Split(told) => match told {
                Told::Here(name, split) => self.index.put_split(name, split),
                Told::Gone(name) => self.index.remove_split(&name),
                Told::Only(names) => others(self.index.split_names(), &names)
                    .iter()
                    .flat_map(|n| self.index.remove_split(n))
                    .collect(),
                Told::FirstRead => Vec::new(),
            },
        };
        let now = Instant::now();
        concerned.iter().for_each(|name| self.queue.add(name, now));
    }

    fn without_claim(&mut self, name: String) -> Vec<String> {
        self.index.remove_claim(&name);
        self.given_back.remove(&name);
        self.telling.forget(&name);
        vec![name]
    }

    fn without_volume(&mut self, name: String) -> Vec<String> {
        let mut concerned = self.index.remove_volume(&name);
        self.telling.forget(&name);
        concerned.push(name);
        concerned
    }

    /// Decides for a volume; what is to be written and told is returned as a future.
    fn reconcile(&mut self, name: &str) -> Option<BoxFuture<'static, Settled>> {
        if let Some(dirty) = self.busy.get_mut(name) {
            *dirty = true;
            return None;
        }
        let now = Instant::now();
        let held_until = self.given_back.get(name).map(|(_, until)| *until).filter(|until| *until > now);
        let seen = self.index.seen(name, held_until.is_some());
        let Decision { action, told, done } = decide(&seen);
        let told = match self.complaints.get(name).filter(|_| action.is_some()) {
            Some(complaint) => Some(complaint_about(seen.volume.is_some(), complaint)),
            None => told,
        };
        let claim = seen.claim.map(|claim| claim.at.reference());
        let volume = seen.volume.map(objects::Volume::reference);
        let about = |about: About| match about {
            About::Claim => claim.clone(),
            About::Volume => volume.clone(),
        };
        let telling = match &told {
            Some(told) => match self.telling.weigh(name, told, now) {
                Now::Tell => about(told.about).map(|whom| (whom, told.notice.clone())),
                Now::Later(at) => {
                    self.queue.add(name, at);
                    None
                }
            },
            None => {
                self.telling.at_rest(name);
                None
            }
        };
        let done = done.and_then(|told| about(told.about).map(|whom| (whom, told.notice)));
        if let Some(until) = held_until {
            self.queue.add(name, until);
        }
        if action.is_none() && telling.is_none() {
            self.failures.remove(name);
            self.complaints.remove(name);
            return None;
        }
        self.busy.insert(name.to_owned(), false);
        let version = self.index.version(name);
        Some(Box::pin(work(
            self.writer.clone(),
            self.recorder.clone(),
            name.to_owned(),
            version,
            action,
            telling,
            done,
        )))
    }

    /// Takes the outcome of a volume's write into the picture. What it made is told by the watches.
    fn settle(&mut self, settled: Settled) {
        let Settled { name, result } = settled;
        let dirty = self.busy.remove(&name).unwrap_or_default();
        let now = Instant::now();
        if dirty {
            self.queue.add(&name, now);
        }
        match result {
            Ok(done) => {
                self.failures.remove(&name);
                self.complaints.remove(&name);
                self.queue.succeeded(&name);
                match done {
                    Some(Done::GivenBack) => {
                        let (times, until) = self.given_back.entry(name.clone()).or_insert((0, now));
                        *times = times.saturating_add(1);
                        if let Some(paused) = times.checked_sub(FREE_ATTEMPTS).filter(|paused| *paused > 0) {
                            *until = now + backoff(&name, HEAD_START + paused);
                        }
                    }
                    Some(Done::Provisioned) => {
                        self.given_back.remove(&name);
                        self.telling.forget(&name);
                    }
                    Some(Done::Unprotected) => self.index.unprotect(&name),
                    None => {}
                }
            }
            Err(error) => self.failed(&name, &error, now),
        }
    }

    fn failed(&mut self, name: &str, error: &WriteError, now: Instant) {
        let wait: Duration = self.queue.add_failed(name, now);
        let failures = self.failures.entry(name.to_owned()).or_default();
        *failures = failures.saturating_add(1);
        if error.is_lasting() || *failures >= TELL_AFTER {
            // Told with the next attempt.
            self.complaints.insert(name.to_owned(), error.to_string());
        }
        if error.is_ordinary() {
            tracing::debug!(volume.id = name, error = %error, retry.ms = wait.as_millis(), "volume changed meanwhile");
            return;
        }
        tracing::warn!(volume.id = name, error = %error, retry.ms = wait.as_millis(), "volume not provisioned or removed");
    }
}

/// Does a write and tells what is to be told, side by side.
async fn work(
    writer: Writer,
    recorder: Recorder,
    name: String,
    version: Option<crate::store::object::Version>,
    action: Option<Action>,
    telling: Option<(ObjectReference, Notice)>,
    done: Option<(ObjectReference, Notice)>,
) -> Settled {
    let meaning = match &action {
        Some(Action::Reschedule { .. }) => Some(Done::GivenBack),
        Some(Action::CreateVolume(_)) => Some(Done::Provisioned),
        Some(Action::Unprotect { .. }) => Some(Done::Unprotected),
        _ => None,
    };
    let tell = async {
        if let Some((whom, notice)) = telling {
            recorder.record(whom, &notice).await;
        }
    };
    let write = async {
        match action {
            Some(action) => {
                let written = tokio::time::timeout(LONGEST_WRITE, writer.apply(&name, version, action)).await;
                written.unwrap_or(Err(WriteError::Hangs { wait: LONGEST_WRITE }))
            }
            None => Ok(Written::Before),
        }
    };
    let ((), result) = tokio::join!(tell, write);
    if matches!(result, Ok(Written::Now))
        && let Some((whom, notice)) = done
    {
        recorder.record(whom, &notice).await;
    }
    Settled { name, result: result.map(|_| meaning) }
}

/// What is told of a write that fails and goes on failing.
fn complaint_about(has_volume: bool, complaint: &str) -> decide::Told {
    let (about, reason) = match has_volume {
        true => (About::Volume, "VolumeFailedDelete"),
        false => (About::Claim, "ProvisioningFailed"),
    };
    decide::Told { about, notice: Notice::warning(reason, complaint), after: Duration::ZERO }
}

/// Names that are known and not among these.
fn others<'a>(known: impl Iterator<Item = &'a String>, these: &HashSet<String>) -> Vec<String> {
    known.filter(|name| !these.contains(*name)).cloned().collect()
}
