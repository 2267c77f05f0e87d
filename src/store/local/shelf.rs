//! The objects of one kind in memory, and those who watch them.
//!
//! `state` is what is committed, `staged` what the writer's running transaction will make of it. A watcher holds only
//! the newest state of each object that its reader has not seen yet, so a slow reader costs no more memory than the
//! objects themselves do.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::stream::{self, BoxStream, StreamExt};
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition, TableError};
use tokio::sync::Notify;

use super::Malformed;
use crate::store::object::Object;
use crate::store::{Event, Selector, StoreError};

/// Name to JSON.
pub(super) fn table<T: Object>() -> TableDefinition<'static, &'static str, &'static [u8]> {
    TableDefinition::new(T::KIND)
}

/// No invariant spans a panic in here: each critical section leaves the maps whole.
fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
pub(super) struct Shelf<T> {
    state: Mutex<State<T>>,
    /// Touched by the writer thread only. `None`: removed.
    staged: Mutex<BTreeMap<String, Change<T>>>,
}

#[derive(Debug)]
struct State<T> {
    objects: BTreeMap<String, Arc<T>>,
    /// Name to reason.
    malformed: BTreeMap<String, String>,
    watchers: Vec<Weak<Watcher<T>>>,
}

/// What became of an object.
#[derive(Clone, Debug)]
pub(super) enum Change<T> {
    Present(Arc<T>),
    /// With its last state.
    Gone(Arc<T>),
}

/// What the writer does with every shelf once its transaction has ended.
pub(super) trait Staged: Send + Sync {
    /// Makes the staged changes visible and tells the watchers.
    fn publish(&self);
    /// Forgets them.
    fn discard(&self);
}

impl<T: Object> Shelf<T> {
    pub(super) fn load(database: &Database) -> Result<Self, redb::Error> {
        let mut objects = BTreeMap::new();
        let mut malformed = BTreeMap::new();
        match database.begin_read()?.open_table(table::<T>()) {
            Ok(table) => {
                for row in table.iter()? {
                    let (name, json) = row?;
                    let name = name.value().to_owned();
                    match serde_json::from_slice::<T>(json.value()) {
                        Ok(object) if object.meta().name == name => {
                            objects.insert(name, Arc::new(object));
                        }
                        Ok(object) => {
                            let reason = format!(
                                "it is stored under this name and calls itself {:?}",
                                object.meta().name
                            );
                            malformed.insert(name, reason);
                        }
                        Err(e) => {
                            malformed.insert(name, e.to_string());
                        }
                    }
                }
            }
            Err(TableError::TableDoesNotExist(_)) => {}
            Err(e) => return Err(e.into()),
        }
        let state = State { objects, malformed, watchers: Vec::new() };
        Ok(Self { state: Mutex::new(state), staged: Mutex::default() })
    }

    pub(super) fn malformed(&self) -> Vec<Malformed> {
        let state = lock(&self.state);
        let one = |(name, reason): (&String, &String)| Malformed {
            kind: T::KIND,
            name: name.clone(),
            reason: reason.clone(),
        };
        state.malformed.iter().map(one).collect()
    }

    pub(super) fn get(&self, name: &str) -> Result<Option<Arc<T>>, StoreError> {
        let state = lock(&self.state);
        match state.malformed.get(name) {
            Some(reason) => {
                Err(StoreError::Malformed { kind: T::KIND, name: name.into(), reason: reason.clone() })
            }
            None => Ok(state.objects.get(name).cloned()),
        }
    }

    pub(super) fn list(&self, selector: &Selector) -> Vec<Arc<T>> {
        let state = lock(&self.state);
        match selector {
            Selector::Name(name) => state.objects.get(name).cloned().into_iter().collect(),
            _ => state.objects.values().filter(|object| selector.selects(&***object)).cloned().collect(),
        }
    }

    /// The newest state, as the running transaction will leave it.
    pub(super) fn newest(&self, name: &str) -> Result<Option<Arc<T>>, StoreError> {
        match lock(&self.staged).get(name) {
            Some(Change::Present(object)) => Ok(Some(object.clone())),
            Some(Change::Gone(_)) => Ok(None),
            None => self.get(name),
        }
    }

    pub(super) fn stage(&self, name: String, change: Change<T>) {
        lock(&self.staged).insert(name, change);
    }

    pub(super) fn watch(&self, selector: Selector) -> BoxStream<'static, Result<Event<T>, StoreError>> {
        let mut state = lock(&self.state);
        let mut backlog = Backlog::default();
        for (name, object) in &state.objects {
            if selector.selects(&**object) {
                backlog.note(name, Change::Present(object.clone()), &selector);
            }
        }
        backlog.push(Step::Ready);
        let watcher = Arc::new(Watcher { selector, backlog: Mutex::new(backlog), wake: Notify::new() });
        state.watchers.retain(|w| w.strong_count() > 0);
        state.watchers.push(Arc::downgrade(&watcher));
        stream::unfold(watcher, |watcher| async move {
            let event = watcher.next().await?;
            Some((Ok(event), watcher))
        })
        .boxed()
    }

    /// Ends all watches once they have told what they have.
    pub(super) fn close(&self) {
        for watcher in lock(&self.state).watchers.drain(..).filter_map(|w| w.upgrade()) {
            lock(&watcher.backlog).closed = true;
            watcher.wake.notify_one();
        }
    }
}

impl<T: Object> Staged for Shelf<T> {
    fn publish(&self) {
        let changes = std::mem::take(&mut *lock(&self.staged));
        if changes.is_empty() {
            return;
        }
        let mut state = lock(&self.state);
        state.watchers.retain(|w| w.strong_count() > 0);
        for watcher in state.watchers.iter().filter_map(Weak::upgrade) {
            let mut backlog = lock(&watcher.backlog);
            for (name, change) in &changes {
                backlog.note(name, change.clone(), &watcher.selector);
            }
            drop(backlog);
            watcher.wake.notify_one();
        }
        for (name, change) in changes {
            match change {
                Change::Present(object) => state.objects.insert(name, object),
                Change::Gone(_) => state.objects.remove(&name),
            };
        }
    }

    fn discard(&self) {
        lock(&self.staged).clear();
    }
}

#[derive(Debug)]
struct Watcher<T> {
    selector: Selector,
    backlog: Mutex<Backlog<T>>,
    wake: Notify,
}

impl<T: Object> Watcher<T> {
    async fn next(&self) -> Option<Event<T>> {
        loop {
            {
                let mut backlog = lock(&self.backlog);
                if let Some(event) = backlog.pop(&self.selector) {
                    return Some(event);
                }
                if backlog.closed {
                    return None;
                }
            }
            self.wake.notified().await;
        }
    }
}

/// What a reader has not been told yet, in the order in which it began to be news.
#[derive(Debug)]
struct Backlog<T> {
    steps: BTreeMap<u64, Step>,
    last: u64,
    /// By name: its place in `steps`, and its newest state.
    news: HashMap<String, (u64, Change<T>)>,
    /// By name: what the reader was told last.
    told: HashMap<String, Arc<T>>,
    /// To be told before all else.
    first: Option<Event<T>>,
    closed: bool,
}

#[derive(Debug)]
enum Step {
    Object(String),
    Ready,
}

impl<T> Default for Backlog<T> {
    fn default() -> Self {
        Self {
            steps: BTreeMap::new(),
            last: 0,
            news: HashMap::new(),
            told: HashMap::new(),
            first: None,
            closed: false,
        }
    }
}

impl<T: Object> Backlog<T> {
    fn push(&mut self, step: Step) -> u64 {
        self.last += 1;
        self.steps.insert(self.last, step);
        self.last
    }

    fn note(&mut self, name: &str, change: Change<T>, selector: &Selector) {
        let selected = matches!(&change, Change::Present(object) if selector.selects(&**object));
        if !selected && !self.told.contains_key(name) {
            // It came and went unseen.
            if let Some((place, _)) = self.news.remove(name) {
                self.steps.remove(&place);
            }
        } else if let Some((_, newest)) = self.news.get_mut(name) {
            *newest = change;
        } else {
            let place = self.push(Step::Object(name.to_owned()));
            self.news.insert(name.to_owned(), (place, change));
        }
    }

    fn pop(&mut self, selector: &Selector) -> Option<Event<T>> {
        if let Some(event) = self.first.take() {
            return Some(event);
        }
        while let Some((_, step)) = self.steps.pop_first() {
            let Step::Object(name) = step else { return Some(Event::Ready) };
            let told = self.told.remove(&name);
            match (self.news.remove(&name), told) {
                (Some((_, Change::Present(object))), told) if selector.selects(&*object) => {
                    self.told.insert(name, object.clone());
                    let applied = Event::Applied(T::clone(&object));
                    match told {
                        // Another object of the same name: the reader must learn that the first is gone.
                        Some(old) if old.meta().uid != object.meta().uid => {
                            self.first = Some(applied);
                            return Some(Event::Deleted(T::clone(&old)));
                        }
                        _ => return Some(applied),
                    }
                }
                (Some((_, Change::Gone(last))), Some(_)) => return Some(Event::Deleted(T::clone(&last))),
                // No longer selected.
                (Some((_, Change::Present(_))), Some(old)) => return Some(Event::Deleted(T::clone(&old))),
                (_, None) | (None, _) => {}
            }
        }
        None
    }
}
