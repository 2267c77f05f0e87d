//! The three watches as one stream of changes, begun again when one of them fails.

use std::collections::HashSet;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};

use crate::controllers::queue::backoff;
use crate::store::object::{Branch, Object, StorageNode, VolumeSplit};
use crate::store::{Event, Selector, Store, StoreError};

/// What happened to the objects.
pub(super) enum Change {
    Split(Box<VolumeSplit>),
    NoSplit(String),
    /// No others than these exist: a watch was begun again.
    OnlySplits(HashSet<String>),
    Branch(Box<Branch>),
    NoBranch(String),
    OnlyBranches(HashSet<String>),
    Node(Box<StorageNode>),
    NoNode(String),
    OnlyNodes(HashSet<String>),
    /// All objects of one kind have been reported for the first time.
    FirstRead,
}

/// A kind of object that the splitter watches.
trait Watched: Object {
    fn watch(store: Arc<dyn Store>) -> BoxFuture<'static, Result<Events<Self>, StoreError>>;
    fn here(self) -> Change;
    fn gone(name: String) -> Change;
    fn only(names: HashSet<String>) -> Change;
}

type Events<T> = BoxStream<'static, Result<Event<T>, StoreError>>;

macro_rules! watched {
    ($type:ident, $collection:ident, $here:ident, $gone:ident, $only:ident) => {
        impl Watched for $type {
            fn watch(store: Arc<dyn Store>) -> BoxFuture<'static, Result<Events<Self>, StoreError>> {
                Box::pin(async move { store.$collection().watch(Selector::All).await })
            }
            fn here(self) -> Change {
                Change::$here(Box::new(self))
            }
            fn gone(name: String) -> Change {
                Change::$gone(name)
            }
            fn only(names: HashSet<String>) -> Change {
                Change::$only(names)
            }
        }
    };
}

watched!(VolumeSplit, splits, Split, NoSplit, OnlySplits);
watched!(Branch, branches, Branch, NoBranch, OnlyBranches);
watched!(StorageNode, nodes, Node, NoNode, OnlyNodes);

/// All changes, beginning with all objects.
pub(super) fn feed(store: &Arc<dyn Store>) -> BoxStream<'static, Change> {
    stream::select_all([of::<VolumeSplit>(store), of::<Branch>(store), of::<StorageNode>(store)]).boxed()
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
    next: Option<Change>,
}

fn of<T: Watched>(store: &Arc<dyn Store>) -> BoxStream<'static, Change> {
    let feed =
        Feed::<T> { store: store.clone(), events: None, seen: None, read: false, failures: 0, next: None };
    stream::unfold(feed, |mut feed| async move {
        let change = feed.next().await;
        Some((change, feed))
    })
    .boxed()
}

impl<T: Watched> Feed<T> {
    async fn next(&mut self) -> Change {
        loop {
            if let Some(change) = self.next.take() {
                return change;
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
                        if let Some(seen) = &mut self.seen {
                            seen.insert(object.meta().name.clone());
                        }
                        return object.here();
                    }
                    Some(Ok(Event::Deleted(object))) => {
                        if let Some(seen) = &mut self.seen {
                            seen.remove(&object.meta().name);
                        }
                        return T::gone(object.meta().name.clone());
                    }
                    Some(Ok(Event::Ready)) => {
                        self.failures = 0;
                        // Later ones, of a watch that began anew by itself, tell nothing: it reported what went.
                        let Some(seen) = self.seen.take() else { continue };
                        let first = !std::mem::replace(&mut self.read, true);
                        self.next = first.then_some(Change::FirstRead);
                        return T::only(seen);
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
