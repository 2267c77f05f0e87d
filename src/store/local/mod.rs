//! The embedded store: one redb file, for a machine without Kubernetes.
//!
//! All objects are in memory; the file makes them last. Reads and watches are served from memory and show only what is
//! on the disk already. Writes go through one bounded queue to one thread (`writer`), which decides each of them
//! against the newest state, commits as many as are waiting in one transaction (one fsync for all), publishes them and
//! only then answers. A busy moment, such as 300 volumes made at once, therefore costs few fsyncs, and a lone write one
//! transaction.
//!
//! The file is checked completely before it is opened for writing ([`file`]): one that is damaged, empty, foreign or of
//! a newer format is refused and stays as it is, byte for byte.

mod file;
mod shelf;
mod writer;

#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use snafu::Snafu;
use tokio::sync::{mpsc, oneshot};

use super::object::{Branch, Object, StorageNode, Version, VolumeSplit};
use super::{Collection, Event, Figures, Selector, Store, StoreError};
use shelf::Shelf;
use writer::{Job, Operation, Outcome, Write, Writer};

/// Writes that may wait for the writer thread; more make their callers wait. A create of an 8-branch volume makes about
/// 20, so this holds 50 such volumes at the same moment.
const QUEUE: usize = 1024;

/// The version of what is in the file; raised when an older program could misread it.
const FORMAT: u64 = 1;

/// The store file cannot be used. It was not changed.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)), module)]
pub enum OpenError {
    /// It cannot be read, written or made.
    #[snafu(display(
        "the store file {} cannot be opened: {source}; see that its directory exists and that the agent may write there",
        path.display()
    ))]
    Access {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something else than a regular file has its name.
    #[snafu(display("the store file {} is not a regular file: move it away or set another state directory", path.display()))]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Another process has it open.
    #[snafu(display(
        "the store file {} is in use: another agent runs on this state directory; stop it or set another one",
        path.display()
    ))]
    InUse {
        /// The file.
        path: PathBuf,
    },
    /// It is there and has no content: what was in it may have been lost.
    #[snafu(display(
        "the store file {} is empty, so its content may have been lost; it was not touched. Put a backup of it in its \
         place, or move it away to begin anew. Branches in the pools stay as they are: each names its volume in its \
         branch.json and can be adopted again",
        path.display()
    ))]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Its content is damaged, or no store at all.
    #[snafu(display(
        "the store file {} is damaged or is no store ({reason}); it was not touched. Put a backup of it in its place, \
         or move it away to begin anew. Branches in the pools stay as they are: each names its volume in its \
         branch.json and can be adopted again",
        path.display()
    ))]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A newer program wrote it.
    #[snafu(display(
        "the store file {} has format {found}, and this program knows formats up to {known}: run the newer program \
         again, or put a backup from before the upgrade in its place",
        path.display()
    ))]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
        /// The newest that is known here.
        known: u64,
    },
    /// The operating system gave no thread.
    #[snafu(display("no thread can be started for the store file {}: {source}", path.display()))]
    Thread {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A stored object that this version does not understand. It is kept as it is and left out of lists and watches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// Kind of the object.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
    /// What is wrong with it.
    pub reason: String,
}

/// The embedded store. Dropping it waits for the write that is being committed and ends its watches.
#[derive(Debug)]
pub struct LocalStore {
    splits: Handle<VolumeSplit>,
    branches: Handle<Branch>,
    nodes: Handle<StorageNode>,
    /// Declared last: it waits for its thread when dropped, and the thread ends when the handles above are gone.
    _writer: Writer,
}

impl LocalStore {
    /// Opens the store at `path`, or makes it where nothing has that name. Blocks (reads the whole file).
    ///
    /// # Errors
    /// See [`OpenError`]; an existing file is then unchanged. A file that the last agent did not close (crash, power
    /// loss) is no error: every acknowledged write is in it.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let database = file::open(path)?;
        let corrupt =
            |reason: redb::Error| OpenError::Corrupt { path: path.into(), reason: reason.to_string() };
        let splits = Arc::new(Shelf::<VolumeSplit>::load(&database).map_err(corrupt)?);
        let branches = Arc::new(Shelf::<Branch>::load(&database).map_err(corrupt)?);
        let nodes = Arc::new(Shelf::<StorageNode>::load(&database).map_err(corrupt)?);
        let (queue, jobs) = mpsc::channel(QUEUE);
        let writer =
            Writer::start(path, database, jobs, vec![splits.clone(), branches.clone(), nodes.clone()])?;
        let store = Self {
            splits: Handle { shelf: splits, queue: queue.clone() },
            branches: Handle { shelf: branches, queue: queue.clone() },
            nodes: Handle { shelf: nodes, queue },
            _writer: writer,
        };
        for Malformed { kind, name, reason } in store.malformed() {
            tracing::error!(
                object.kind = kind,
                object.name = name,
                reason,
                "stored object left out: not understood"
            );
        }
        Ok(store)
    }

    /// The stored objects that this version does not understand, by kind and name.
    #[must_use]
    pub fn malformed(&self) -> Vec<Malformed> {
        let mut all = self.splits.shelf.malformed();
        all.extend(self.branches.shelf.malformed());
        all.extend(self.nodes.shelf.malformed());
        all
    }
}

impl Store for LocalStore {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }

    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }

    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }

    fn figures(&self) -> Figures {
        Figures { requests: 0, malformed: u64::try_from(self.malformed().len()).unwrap_or(u64::MAX) }
    }
}

/// One kind of object: its memory, and the way to the writer.
#[derive(Debug)]
struct Handle<T: Object> {
    shelf: Arc<Shelf<T>>,
    queue: mpsc::Sender<Box<dyn Job>>,
}

impl<T: Object> Drop for Handle<T> {
    fn drop(&mut self) {
        self.shelf.close();
    }
}

impl<T: Object> Handle<T> {
    async fn write(&self, operation: Operation<T>) -> Result<Outcome<T>, StoreError> {
        let ended = |action: String| StoreError::Backend { action, source: Box::new(writer::WriterEnded) };
        let action = operation.action();
        let (reply, answer) = oneshot::channel();
        let write = Write::new(self.shelf.clone(), operation, reply);
        if self.queue.send(Box::new(write)).await.is_err() {
            return Err(ended(action));
        }
        answer.await.unwrap_or_else(|_| Err(ended(action)))
    }

    async fn written(&self, operation: Operation<T>) -> Result<T, StoreError> {
        match self.write(operation).await? {
            Outcome::Object(object) => Ok(T::clone(&object)),
            Outcome::Existed(_) => unreachable!("only a delete answers so"),
        }
    }
}

#[async_trait]
impl<T: Object> Collection<T> for Handle<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.shelf.get(name).map(|found| found.map(|object| T::clone(&object)))
    }

    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        Ok(self.shelf.list(selector).iter().map(|object| T::clone(object)).collect())
    }

    async fn create(&self, object: T) -> Result<T, StoreError> {
        self.written(Operation::Create(object)).await
    }

    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.written(Operation::Update(object)).await
    }

    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.written(Operation::UpdateStatus(object)).await
    }

    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        match self.write(Operation::Delete(name.to_owned(), version)).await? {
            Outcome::Existed(existed) => Ok(existed),
            Outcome::Object(_) => Ok(true),
        }
    }

    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        Ok(self.shelf.watch(selector))
    }
}
