//! What controllers are told of objects: a watch as a stream of changes that never ends, begun again when it fails.

mod shared;

use std::collections::HashSet;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use super::queue::backoff;
use crate::store::object::{Branch, Object, StorageNode, VolumeSplit};
use crate::store::{Event, Selector, Store, StoreError};

pub(super) use shared::Heard;
pub use shared::Watches;

/// What happened to an object of one kind.
#[derive(Clone, Debug)]
pub(super) enum Told<T> {
    /// It is, or has become, this.
    Here(String, T),
    /// It is gone.
    Gone(String),
    /// All were reported; no others than these exist.
    Only(HashSet<String>),
    /// All were reported for the first time.
    FirstRead,
}

impl<T> Told<T> {
    /// The same of what `read` makes of the object.
    pub(super) fn map<U>(self, read: impl FnOnce(T) -> U) -> Told<U> {
        match self {
            Self::Here(name, object) => Told::Here(name, read(object)),
            Self::Gone(name) => Told::Gone(name),
            Self::Only(names) => Told::Only(names),
            Self::FirstRead => Told::FirstRead,
        }
    }
}

type Events<T> = BoxStream<'static, Result<Event<T>, StoreError>>;

/// A kind of object in the store.
pub(super) trait Stored: Object {
    /// Watches all of them.
    fn watch(store: Arc<dyn Store>) -> BoxFuture<'static, Result<Events<Self>, StoreError>>;
}

macro_rules! stored {
    ($type:ident, $collection:ident) => {
        impl Stored for $type {
            fn watch(store: Arc<dyn Store>) -> BoxFuture<'static, Result<Events<Self>, StoreError>> {
                Box::pin(async move { store.$collection().watch(Selector::All).await })
            }
        }
    };
}

stored!(VolumeSplit, splits);
stored!(Branch, branches);
stored!(StorageNode, nodes);

/// All changes of one kind of object in the store, beginning with all objects.
pub(super) fn stored<T: Stored>(store: &Arc<dyn Store>) -> BoxStream<'static, Told<T>> {
    let feed =
        Feed::<T> { store: store.clone(), events: None, seen: None, read: false, failures: 0, next: None };
    stream::unfold(feed, |mut feed| async move {
        let told = feed.next().await;
        Some((told, feed))
    })
    .boxed()
}

struct Feed<T> {
    store: Arc<dyn Store>,
    events: Option<Events<T>>,
    /// Names reported since the watch began; `None` once it is ready.
    seen: Option<HashSet<String>>,
    /// It was ready once.
    read: bool,
    failures: u32,
    /// To be told next.
    next: Option<Told<T>>,
}

impl<T: Stored> Feed<T> {
    async fn next(&mut self) -> Told<T> {
        loop {
            if let Some(told) = self.next.take() {
                return told;
            }
            let failure = match &mut self.events {
                None => match T::watch(self.store.clone()).await {
                    Ok(events) => {
                        self.events = Some(events);
                        self.seen = Some(HashSet::new());
                        continue;
                    }
                    Err(e) => e.to_string(),
                },
                Some(events) => match events.next().await {
                    Some(Ok(Event::Applied(object))) => {
                        let name = object.meta().name.clone();
                        if let Some(seen) = &mut self.seen {
                            seen.insert(name.clone());
                        }
                        return Told::Here(name, object);
                    }
                    Some(Ok(Event::Deleted(object))) => {
                        if let Some(seen) = &mut self.seen {
                            seen.remove(&object.meta().name);
                        }
                        return Told::Gone(object.meta().name.clone());
                    }
                    Some(Ok(Event::Ready)) => {
                        self.failures = 0;
                        // Later ones, of a watch that began anew by itself, tell nothing: it reported what went.
                        let Some(seen) = self.seen.take() else { continue };
                        let first = !std::mem::replace(&mut self.read, true);
                        self.next = first.then_some(Told::FirstRead);
                        return Told::Only(seen);
                    }
                    Some(Err(e)) => e.to_string(),
                    None => "the store ended it".to_owned(),
                },
            };
            self.events = None;
            self.failures = self.failures.saturating_add(1);
            let wait = backoff(T::KIND, self.failures);
            tracing::warn!(kind = T::KIND, error = failure, retry.ms = wait.as_millis(), "watch failed");
            tokio::time::sleep(wait).await;
        }
    }
}

/// All changes of one of Kubernetes' own kinds, beginning with all objects. What `read` makes of an object is kept and
/// nothing else of it; where that is nothing, the object counts as gone.
pub(super) fn watched<K, T, F>(
    api: Api<K>,
    resource: &'static str,
    name: fn(&K) -> String,
    read: F,
) -> BoxStream<'static, Told<T>>
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
    T: Send + 'static,
    F: Fn(K) -> Option<T> + Send + 'static,
{
    let mut listing = HashSet::new();
    let mut first = true;
    watcher(api, watcher::Config::default())
        .default_backoff()
        .map(move |event| match event {
            Ok(watcher::Event::Init) => {
                listing.clear();
                Vec::new()
            }
            Ok(watcher::Event::InitApply(object)) => {
                let name = name(&object);
                match read(object) {
                    Some(kept) => {
                        listing.insert(name.clone());
                        vec![Told::Here(name, kept)]
                    }
                    None => Vec::new(),
                }
            }
            Ok(watcher::Event::InitDone) => {
                let all = Told::Only(std::mem::take(&mut listing));
                if std::mem::take(&mut first) { vec![all, Told::FirstRead] } else { vec![all] }
            }
            Ok(watcher::Event::Apply(object)) => {
                let name = name(&object);
                match read(object) {
                    Some(kept) => vec![Told::Here(name, kept)],
                    None => vec![Told::Gone(name)],
                }
            }
            Ok(watcher::Event::Delete(object)) => vec![Told::Gone(name(&object))],
            Err(error) => {
                tracing::warn!(
                    resource,
                    error = %reason(&error),
                    "cannot list or watch; tried again: where it is forbidden, grant list and watch on this resource"
                );
                Vec::new()
            }
        })
        .flat_map(stream::iter)
        .boxed()
}

/// Why a watch failed, in the server's words where it said anything.
fn reason(error: &watcher::Error) -> String {
    match error {
        watcher::Error::InitialListFailed(e)
        | watcher::Error::WatchStartFailed(e)
        | watcher::Error::WatchFailed(e) => super::cluster::said(e),
        other => other.to_string(),
    }
}
