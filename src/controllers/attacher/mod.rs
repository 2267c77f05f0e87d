//! VolumeAttachments become attachments of volumes, and go again.
//!
//! kube-controller-manager makes a VolumeAttachment when a pod with a volume of this driver is to run on a node, and
//! deletes it when the volume is no longer used there; also, after a while, when the node does not answer (force detach)
//! or was tainted `node.kubernetes.io/out-of-service`. The attacher writes the attachment into the volume's object
//! (`VolumeSplit.spec.attached`), under the rules of [`crate::store::attach`], and tells of it in the status. As long as
//! branches can be reached on their own node only, detaching a volume from a node that is gone lets it be deleted, and
//! attaching it elsewhere is refused with that reason.
//!
//! Invariants:
//! - a VolumeAttachment carries the finalizer from before its volume is attached until after it is detached, so that no
//!   attachment is forgotten; a PersistentVolume carries it until no VolumeAttachment names it;
//! - an attachment in a volume's object names the VolumeAttachment that asked for it, and goes with that one only:
//!   whoever attaches over the CSI socket, outside Kubernetes, is left alone;
//! - at most one set of writes for a VolumeAttachment is under way at a time.
//!
//! Of all volumes no more is kept than for whom they are attached, so that what a crash, an edit by hand or a finalizer
//! that was taken away left is found; one that is to be written is read before.

mod apply;
mod decide;
mod index;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::{Api, ResourceExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::cluster::Cluster;
use super::queue::{Queue, until};
use super::watch::{Heard, Told, Watches, watched};
use crate::domain::VolumeId;
use crate::store::Store;
use apply::{ApplyError, Subject, Writer, Written};
use decide::{decide, release, stray};
use index::{Index, Volume, Wish, attached_for};

/// VolumeAttachments whose writes may be under way at once: a drained node's worth, far less than what an API server
/// accepts from one client.
const IN_FLIGHT: usize = 32;

/// The attacher; see the module.
pub struct Attacher {
    heard: Heard,
    writer: Writer,
    index: Index,
    queue: Queue,
    /// What has writes under way, and whether it is to be looked at again after them.
    busy: HashMap<Key, bool>,
}

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Wish(String),
    Volume(String),
}

/// No object's name holds a slash.
const WISH: &str = "volumeattachment/";
const VOLUME: &str = "persistentvolume/";

impl Key {
    fn text(&self) -> String {
        match self {
            Self::Wish(name) => format!("{WISH}{name}"),
            Self::Volume(name) => format!("{VOLUME}{name}"),
        }
    }

    fn read(text: &str) -> Option<Self> {
        let wish = text.strip_prefix(WISH).map(|name| Self::Wish(name.to_owned()));
        wish.or_else(|| text.strip_prefix(VOLUME).map(|name| Self::Volume(name.to_owned())))
    }
}

enum Change {
    Wish(Told<Wish>),
    Volume(Told<Volume>),
    /// For whom a volume is attached.
    Attached(Told<BTreeSet<String>>),
}

struct Outcome {
    key: Key,
    written: Vec<Written>,
    result: Result<(), ApplyError>,
}

impl Attacher {
    /// A controller; it does nothing until [`Attacher::run`]. `clock` dates what it writes ([`Timestamp::now`]).
    #[must_use]
    pub fn new(cluster: Cluster, store: Arc<dyn Store>, clock: fn() -> Timestamp) -> Self {
        Self {
            heard: Heard::alone(&store),
            writer: Writer { cluster, store, clock },
            index: Index::default(),
            queue: Queue::default(),
            busy: HashMap::new(),
        }
    }

    /// The same, hearing of volumes by `watches`.
    #[must_use]
    pub fn hearing(self, watches: &mut Watches) -> Self {
        Self { heard: Heard::volumes(watches), ..self }
    }

    /// Works until `shutdown`, which comes when this instance no longer leads, too. Writes that are under way then are not
    /// waited for: each is whole or not there.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let client = self.writer.cluster.client.clone();
        let wishes = watched(
            Api::<VolumeAttachment>::all(client.clone()),
            "volumeattachments.storage.k8s.io",
            VolumeAttachment::name_any,
            Wish::read,
        );
        let volumes = watched(
            Api::<PersistentVolume>::all(client),
            "persistentvolumes",
            PersistentVolume::name_any,
            Volume::read,
        );
        let attached =
            self.heard.splits().map(|told| Change::Attached(told.map(|split| attached_for(&split))));
        let (wishes, volumes) = (wishes.map(Change::Wish), volumes.map(Change::Volume));
        let mut changes = futures::stream::select_all([wishes.boxed(), volumes.boxed(), attached.boxed()]);
        let mut writes: FuturesUnordered<BoxFuture<'static, Outcome>> = FuturesUnordered::new();
        // Nothing is decided on half a picture.
        let mut unread = 3;
        loop {
            let due = self.queue.next_due().filter(|_| unread == 0 && writes.len() < IN_FLIGHT);
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                Some(outcome) = writes.next() => self.settle(outcome),
                Some(change) = changes.next() => {
                    let first = matches!(
                        change,
                        Change::Wish(Told::FirstRead)
                            | Change::Volume(Told::FirstRead)
                            | Change::Attached(Told::FirstRead)
                    );
                    unread -= u32::from(first);
                    self.note(change);
                }
                () = until(due) => {}
            }
            while unread == 0
                && writes.len() < IN_FLIGHT
                && let Some(text) = self.queue.pop(Instant::now())
            {
                writes.extend(Key::read(&text).and_then(|key| self.reconcile(key)));
            }
        }
    }

    /// Takes a change into the picture, and has what it concerns looked at.
    fn note(&mut self, change: Change) {
        let now = Instant::now();
        match change {
            Change::Wish(Told::Here(name, wish)) => {
                if self.index.put_wish(wish) {
                    self.queue.add(&Key::Wish(name).text(), now);
                }
            }
            Change::Wish(Told::Gone(name)) => {
                if let Some(volume) = self.index.remove_wish(&name) {
                    self.queue.add(&Key::Volume(volume).text(), now);
                    self.queue.add(&Key::Wish(name).text(), now);
                }
            }
            Change::Wish(Told::Only(names)) => {
                for name in self.index.wishes_beside(&names) {
                    self.note(Change::Wish(Told::Gone(name)));
                }
            }
            Change::Volume(Told::Here(name, volume)) => {
                if self.index.put_volume(volume) {
                    for wish in self.index.wishes_of(&name).cloned().collect::<Vec<_>>() {
                        self.queue.add(&Key::Wish(wish).text(), now);
                    }
                    self.queue.add(&Key::Volume(name).text(), now);
                }
            }
            Change::Volume(Told::Gone(name)) => self.index.remove_volume(&name),
            Change::Volume(Told::Only(names)) => {
                for name in self.index.volumes_beside(&names) {
                    self.index.remove_volume(&name);
                }
            }
            Change::Attached(Told::Here(name, wishes)) => self.note_attached(&name, wishes),
            Change::Attached(Told::Gone(name)) => self.note_attached(&name, BTreeSet::new()),
            Change::Attached(Told::Only(names)) => {
                for volume in self.index.attached_beside(&names) {
                    self.note_attached(volume.as_str(), BTreeSet::new());
                }
            }
            Change::Wish(Told::FirstRead)
            | Change::Volume(Told::FirstRead)
            | Change::Attached(Told::FirstRead) => {}
        }
    }

    fn note_attached(&mut self, volume: &str, wishes: BTreeSet<String>) {
        let Ok(volume) = volume.parse::<VolumeId>() else { return };
        for wish in self.index.put_attached(&volume, wishes) {
            self.queue.add(&Key::Wish(wish).text(), Instant::now());
        }
    }

    /// Decides; what is to be written is returned as a future.
    fn reconcile(&mut self, key: Key) -> Option<BoxFuture<'static, Outcome>> {
        if let Some(again) = self.busy.get_mut(&key) {
            *again = true;
            return None;
        }
        let (subject, writes) = match &key {
            Key::Wish(name) => {
                let held = self.index.held(name);
                let wish = self.index.wish(name).cloned();
                let volume = wish.as_ref().and_then(|w| w.volume.as_ref());
                let volume = volume.and_then(|volume| self.index.volume(volume)).cloned();
                let writes = match &wish {
                    Some(wish) => decide(wish, volume.as_ref(), held),
                    None => stray(held),
                };
                (Subject { name: name.clone(), wish, volume }, writes)
            }
            Key::Volume(name) => {
                let volume = self.index.volume(name)?.clone();
                let writes = release(&volume, self.index.wishes_of(name).next().is_some());
                (Subject { name: String::new(), wish: None, volume: Some(volume) }, writes)
            }
        };
        if writes.is_empty() {
            self.queue.succeeded(&key.text());
            return None;
        }
        self.busy.insert(key.clone(), false);
        let writer = self.writer.clone();
        Some(Box::pin(async move {
            let (written, result) = writer.apply(subject, writes).await;
            Outcome { key, written, result }
        }))
    }

    /// A volume was detached: whoever else wants it is looked at.
    fn look_at_others(&mut self, wish: &str) {
        let Some(volume) = self.index.wish(wish).and_then(|wish| wish.volume.clone()) else { return };
        for other in self.index.wishes_of(&volume).filter(|other| *other != wish) {
            self.queue.add(&Key::Wish(other.clone()).text(), Instant::now());
        }
    }

    /// Takes the outcome of writes into the picture.
    fn settle(&mut self, outcome: Outcome) {
        let Outcome { key, written, result } = outcome;
        for one in written {
            match one {
                Written::Wish(wish) => {
                    let known = self.index.wish(&wish.identity.name);
                    // What is gone stays gone: its event came before the answer.
                    if known.is_some_and(|known| known.identity.uid == wish.identity.uid) {
                        self.index.put_wish(*wish);
                    }
                }
                Written::Volume(volume) => {
                    let known = self.index.volume(&volume.identity.name);
                    if known.is_some_and(|known| known.identity.uid == volume.identity.uid) {
                        self.index.put_volume(*volume);
                    }
                }
                Written::Held { wish, volume, attached } => {
                    self.index.put_held(&wish, &volume, attached);
                    if !attached {
                        self.look_at_others(&wish);
                    }
                }
            }
        }
        let (now, text) = (Instant::now(), key.text());
        let again = self.busy.remove(&key).unwrap_or_default();
        match result {
            Ok(()) => {
                self.queue.succeeded(&text);
                // There may be a next step; where there is none, nothing is written.
                self.queue.add(&text, now);
            }
            Err(error) => {
                let wait = self.queue.add_failed(&text, now);
                if again {
                    self.queue.add(&text, now);
                }
                let retry = wait.as_millis();
                if error.is_conflict() {
                    tracing::debug!(object = text, %error, retry.ms = retry, "object changed meanwhile");
                } else {
                    tracing::warn!(object = text, %error, retry.ms = retry, "volume not attached or detached");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_written() {
        for key in [Key::Wish("a".to_owned()), Key::Volume("a".to_owned())] {
            assert_eq!(Key::read(&key.text()), Some(key));
        }
        assert_eq!(Key::read("a"), None);
    }
}
