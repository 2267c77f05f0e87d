//! The one thread that writes: decide, commit together, publish, answer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use jiff::Timestamp;
use redb::{Database, ReadableTable, WriteTransaction};
use snafu::{ResultExt, Snafu};
use tokio::sync::{mpsc, oneshot};

use super::file::{FIGURES, KEY_REVISION};
use super::shelf::{Change, Shelf, Staged, table};
use super::{OpenError, open_error};
use crate::store::StoreError;
use crate::store::object::{Object, Version};

/// Writes that are committed together at most: enough that the fsync is a small part of the cost of each, few enough
/// that the first of them does not wait noticeably for the last (some 10 ms of work).
const BATCH: usize = 256;

/// The writer thread is gone, because it failed or the store is being closed.
#[derive(Debug, Snafu)]
#[snafu(display(
    "the store has stopped writing; the log says why, and restarting the agent opens the file anew"
))]
pub(super) struct WriterEnded;

/// The transaction failed.
#[derive(Debug, Snafu)]
#[snafu(display(
    "writing to {} failed: {reason}; whether the change is on the disk is known when the agent has been restarted",
    path.display()
))]
struct CommitFailed {
    path: PathBuf,
    reason: String,
}

/// A write.
#[derive(Debug)]
pub(super) enum Operation<T> {
    Create(T),
    Update(T),
    UpdateStatus(T),
    Delete(String, Option<Version>),
}

impl<T: Object> Operation<T> {
    /// What is to be done, for messages.
    pub(super) fn action(&self) -> String {
        let (verb, name) = match self {
            Self::Create(object) => ("create", &object.meta().name),
            Self::Update(object) | Self::UpdateStatus(object) => ("update", &object.meta().name),
            Self::Delete(name, _) => ("delete", name),
        };
        format!("{verb} {} {name}", T::KIND)
    }
}

/// What a write answers.
#[derive(Debug)]
pub(super) enum Outcome<T> {
    Object(Arc<T>),
    /// Nothing had to be written for a delete.
    Existed(bool),
}

/// A write on its way, of any kind of object.
pub(super) trait Job: Send {
    /// Decides, and writes what follows into the transaction. An error is the transaction's.
    fn stage(&mut self, transaction: &mut Transaction<'_>) -> Result<(), redb::Error>;
    /// Answers; `failed` where the transaction did.
    fn settle(self: Box<Self>, failed: Option<(&Path, &str)>);
}

/// The running transaction.
pub(super) struct Transaction<'a> {
    transaction: &'a WriteTransaction,
    revision: u64,
    wrote: bool,
}

impl Transaction<'_> {
    fn next_version(&self) -> Version {
        Version((self.revision + 1).to_string())
    }

    fn put<T: Object>(&mut self, object: &T) -> Result<(), redb::Error> {
        let json = serde_json::to_vec(object).map_err(std::io::Error::from)?;
        self.transaction.open_table(table::<T>())?.insert(object.meta().name.as_str(), json.as_slice())?;
        self.count();
        Ok(())
    }

    fn remove<T: Object>(&mut self, name: &str) -> Result<(), redb::Error> {
        self.transaction.open_table(table::<T>())?.remove(name)?;
        self.count();
        Ok(())
    }

    fn count(&mut self) {
        self.revision += 1;
        self.wrote = true;
    }
}

/// A write on its way.
pub(super) struct Write<T: Object> {
    shelf: Arc<Shelf<T>>,
    operation: Option<Operation<T>>,
    action: String,
    outcome: Option<Result<Outcome<T>, StoreError>>,
    reply: oneshot::Sender<Result<Outcome<T>, StoreError>>,
}

impl<T: Object> Write<T> {
    pub(super) fn new(
        shelf: Arc<Shelf<T>>,
        operation: Operation<T>,
        reply: oneshot::Sender<Result<Outcome<T>, StoreError>>,
    ) -> Self {
        let action = operation.action();
        Self { shelf, operation: Some(operation), action, outcome: None, reply }
    }
}

/// What an operation comes to, given the newest state of its object.
enum Decision<T> {
    Answer(Outcome<T>),
    Put(T),
    Remove(Arc<T>),
}

fn decide<T: Object>(
    operation: Operation<T>,
    newest: Option<Arc<T>>,
    version: Version,
    now: Timestamp,
) -> Result<Decision<T>, StoreError> {
    let kind = T::KIND;
    let current = |object: &T| {
        let name = object.meta().name.clone();
        match newest.clone() {
            None => Err(StoreError::Missing { kind, name }),
            Some(stored) if stored.meta().version != object.meta().version => {
                Err(StoreError::Conflict { kind, name })
            }
            Some(stored) => Ok(stored),
        }
    };
    let put = |stored: Arc<T>, mut object: T| {
        if object == *stored {
            return Decision::Answer(Outcome::Object(stored));
        }
        object.meta_mut().version = version.clone();
        if object.meta().deleting.is_some() && object.meta().finalizers.is_empty() {
            Decision::Remove(Arc::new(object))
        } else {
            Decision::Put(object)
        }
    };
    match operation {
        Operation::Create(mut object) => {
            if newest.is_some() {
                return Err(StoreError::Exists { kind, name: object.meta().name.clone() });
            }
            object.clear_status();
            let meta = object.meta_mut();
            meta.uid = uuid::Uuid::new_v4().to_string();
            meta.version = version;
            meta.created = Some(now);
            meta.deleting = None;
            Ok(Decision::Put(object))
        }
        Operation::Update(mut object) => {
            let stored = current(&object)?;
            object.set_status_of(&stored);
            let given = std::mem::replace(object.meta_mut(), stored.meta().clone());
            object.meta_mut().labels = given.labels;
            object.meta_mut().finalizers = given.finalizers;
            Ok(put(stored, object))
        }
        Operation::UpdateStatus(object) => {
            let stored = current(&object)?;
            let mut new = T::clone(&stored);
            new.set_status_of(&object);
            Ok(put(stored, new))
        }
        Operation::Delete(name, wanted) => match newest {
            None => Ok(Decision::Answer(Outcome::Existed(false))),
            Some(stored) if wanted.is_some_and(|wanted| wanted != stored.meta().version) => {
                Err(StoreError::Conflict { kind, name })
            }
            Some(stored) if stored.meta().finalizers.is_empty() => Ok(Decision::Remove(stored)),
            Some(stored) if stored.meta().deleting.is_some() => Ok(Decision::Answer(Outcome::Existed(true))),
            Some(stored) => {
                let mut object = T::clone(&stored);
                object.meta_mut().deleting = Some(now);
                object.meta_mut().version = version;
                Ok(Decision::Put(object))
            }
        },
    }
}

impl<T: Object> Job for Write<T> {
    fn stage(&mut self, transaction: &mut Transaction<'_>) -> Result<(), redb::Error> {
        let Some(operation) = self.operation.take() else { return Ok(()) };
        let name = match &operation {
            Operation::Create(o) | Operation::Update(o) | Operation::UpdateStatus(o) => o.meta().name.clone(),
            Operation::Delete(name, _) => name.clone(),
        };
        let creates = matches!(operation, Operation::Create(_));
        let decision = match self.shelf.newest(&name) {
            // The name is taken, whatever has it.
            Err(StoreError::Malformed { kind, name, .. }) if creates => {
                Err(StoreError::Exists { kind, name })
            }
            Err(e) => Err(e),
            Ok(newest) => decide(operation, newest, transaction.next_version(), Timestamp::now()),
        };
        let (object, change) = match decision {
            Err(e) => {
                self.outcome = Some(Err(e));
                return Ok(());
            }
            Ok(Decision::Answer(outcome)) => {
                self.outcome = Some(Ok(outcome));
                return Ok(());
            }
            Ok(Decision::Put(object)) => {
                transaction.put(&object)?;
                let object = Arc::new(object);
                (object.clone(), Change::Present(object))
            }
            Ok(Decision::Remove(object)) => {
                transaction.remove::<T>(&name)?;
                (object.clone(), Change::Gone(object))
            }
        };
        self.shelf.stage(name, change);
        self.outcome = Some(Ok(Outcome::Object(object)));
        Ok(())
    }

    fn settle(self: Box<Self>, failed: Option<(&Path, &str)>) {
        let Self { action, outcome, reply, .. } = *self;
        let answer = match (failed, outcome) {
            // Also what was refused: it may have been decided on a state that did not come to be.
            (Some((path, reason)), _) => {
                let source = Box::new(CommitFailed { path: path.into(), reason: reason.into() });
                Err(StoreError::Backend { action, source })
            }
            (None, Some(outcome)) => outcome,
            (None, None) => return,
        };
        // Who asked may have gone.
        drop(reply.send(answer));
    }
}

/// The writer thread; dropping it waits for its end, which comes when all senders of its queue are gone.
#[derive(Debug)]
pub(super) struct Writer(Option<JoinHandle<()>>);

impl Writer {
    pub(super) fn start(
        path: &Path,
        database: Database,
        jobs: mpsc::Receiver<Box<dyn Job>>,
        shelves: Vec<Arc<dyn Staged>>,
    ) -> Result<Self, OpenError> {
        let own_path = path.to_owned();
        std::thread::Builder::new()
            .name("store-writer".to_owned())
            .spawn(move || run(&own_path, &database, jobs, &shelves))
            .map(|thread| Self(Some(thread)))
            .context(open_error::ThreadSnafu { path })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.0.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the store's writer had failed");
        }
    }
}

fn run(
    path: &Path,
    database: &Database,
    mut jobs: mpsc::Receiver<Box<dyn Job>>,
    shelves: &[Arc<dyn Staged>],
) {
    // After one failure redb refuses all that follows without saying why: the reason is that of the first.
    let mut broken: Option<String> = None;
    while let Some(first) = jobs.blocking_recv() {
        let mut batch = vec![first];
        while batch.len() < BATCH
            && let Ok(next) = jobs.try_recv()
        {
            batch.push(next);
        }
        match commit(database, &mut batch) {
            Ok(()) => {
                shelves.iter().for_each(|shelf| shelf.publish());
                batch.into_iter().for_each(|job| job.settle(None));
            }
            Err(e) => {
                let reason = match (&e, &broken) {
                    (redb::Error::PreviousIo, Some(first)) => first.clone(),
                    _ => broken.insert(e.to_string()).clone(),
                };
                tracing::error!(file = %path.display(), reason, "writing the store failed");
                shelves.iter().for_each(|shelf| shelf.discard());
                batch.into_iter().for_each(|job| job.settle(Some((path, &reason))));
            }
        }
    }
}

fn commit(database: &Database, batch: &mut [Box<dyn Job>]) -> Result<(), redb::Error> {
    let mut transaction = database.begin_write()?;
    // Without the second phase, redb takes a damaged newest commit for one that a crash cut short and silently goes
    // back to the one before: an acknowledged write would be lost.
    transaction.set_two_phase_commit(true);
    let revision = transaction.open_table(FIGURES)?.get(KEY_REVISION)?.map_or(0, |found| found.value());
    let mut running = Transaction { transaction: &transaction, revision, wrote: false };
    for job in batch {
        job.stage(&mut running)?;
    }
    if !running.wrote {
        return Ok(transaction.abort()?);
    }
    let revision = running.revision;
    transaction.open_table(FIGURES)?.insert(KEY_REVISION, revision)?;
    transaction.commit()?;
    Ok(())
}
