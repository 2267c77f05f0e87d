//! The file: made whole or not at all, checked completely before it may be written to.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use redb::backends::InMemoryBackend;
use redb::{Builder, Database, ReadableDatabase, StorageBackend, TableDefinition, TableError};
use snafu::{IntoError, ResultExt};

use super::{FORMAT, OpenError, open_error};

/// Figures of the store itself: [`KEY_FORMAT`], [`KEY_REVISION`].
pub(super) const FIGURES: TableDefinition<&str, u64> = TableDefinition::new("store");
/// The format version.
const KEY_FORMAT: &str = "format";
/// The number of the last write.
pub(super) const KEY_REVISION: &str = "revision";

/// Page cache of redb. Objects are served from memory, so it only has to hold the tree's inner pages.
const CACHE: usize = 4 << 20;

fn builder() -> Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE);
    builder
}

/// Opens the file, or makes it where nothing has that name.
pub(super) fn open(path: &Path) -> Result<Database, OpenError> {
    let access = || open_error::AccessSnafu { path };
    match std::fs::symlink_metadata(path) {
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => create(path)?,
        Err(e) => return Err(access().into_error(e)),
    }
    // Before the open, which would wait for ever on a FIFO.
    if !std::fs::metadata(path).context(access())?.is_file() {
        return open_error::NotAFileSnafu { path }.fail();
    }
    let mut file = OpenOptions::new().read(true).write(true).open(path).context(access())?;
    // redb locks the same open file description again, so nobody gets between the check and the opening.
    lock(path, &file)?;
    let mut content = Vec::new();
    file.read_to_end(&mut content).context(access())?;
    if content.is_empty() {
        return open_error::EmptySnafu { path }.fail();
    }
    check(path, content)?;
    builder().create_file(file).map_err(|e| refusal(path, e))
}

/// How long another holder of the lock is waited for. A killed agent is gone in this time, and a process that it was
/// just starting, which holds what its parent has open until it executes its own program.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
/// How often the lock is tried meanwhile.
const LOCK_STEP: Duration = Duration::from_millis(10);

fn lock(path: &Path, file: &File) -> Result<(), OpenError> {
    let end = Instant::now() + LOCK_PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < end => std::thread::sleep(LOCK_STEP),
            Err(TryLockError::WouldBlock) => return open_error::InUseSnafu { path }.fail(),
            Err(TryLockError::Error(source)) => {
                return Err(open_error::AccessSnafu { path }.into_error(source));
            }
        }
    }
}

fn refusal(path: &Path, error: redb::DatabaseError) -> OpenError {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => OpenError::InUse { path: path.into() },
        redb::DatabaseError::Storage(redb::StorageError::Io(source)) => {
            OpenError::Access { path: path.into(), source }
        }
        other => OpenError::Corrupt { path: path.into(), reason: other.to_string() },
    }
}

/// Opens a copy in memory, repairs it as redb would the file after a crash, and verifies every page of it. redb itself
/// checks pages only when it repairs, and repairs in place.
fn check(path: &Path, content: Vec<u8>) -> Result<(), OpenError> {
    let corrupt = |reason: String| OpenError::Corrupt { path: path.to_owned(), reason };
    // A damaged page can lead redb into an assertion.
    let verdict = catch_unwind(AssertUnwindSafe(|| verify(content)));
    match verdict {
        Ok(Ok(FORMAT)) => Ok(()),
        Ok(Ok(found)) if found > FORMAT => open_error::NewerSnafu { path, found, known: FORMAT }.fail(),
        Ok(Ok(found)) => Err(corrupt(format!("it says that it has format {found}"))),
        Ok(Err(e)) => Err(corrupt(e.to_string())),
        Err(_) => Err(corrupt("its pages contradict each other".to_owned())),
    }
}

/// The format of the store in `content`.
fn verify(content: Vec<u8>) -> Result<u64, redb::Error> {
    let copy = InMemoryBackend::new();
    let length = u64::try_from(content.len()).unwrap_or(u64::MAX);
    copy.set_len(length)?;
    copy.write(0, &content)?;
    drop(content);
    let mut database = builder().create_with_backend(copy)?;
    if !database.check_integrity()? {
        return Err(redb::Error::Corrupted("a checksum does not match".to_owned()));
    }
    let format = match database.begin_read()?.open_table(FIGURES) {
        Ok(table) => table.get(KEY_FORMAT)?.map(|found| found.value()),
        Err(TableError::TableDoesNotExist(_)) => None,
        Err(e) => return Err(e.into()),
    };
    format.ok_or_else(|| redb::Error::Corrupted("it is a database of another program".to_owned()))
}

/// Makes a new store beside its place and then gives it its name, so that a crash leaves no half-made file there.
fn create(path: &Path) -> Result<(), OpenError> {
    let access = || open_error::AccessSnafu { path };
    let name = path.file_name().ok_or_else(|| access().into_error(io::ErrorKind::InvalidInput.into()))?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut new = name.to_owned();
    new.push(format!(".{}.new", uuid::Uuid::new_v4()));
    let new = Unfinished(directory.join(new));
    make(&new.0).map_err(|e| match e {
        redb::Error::Io(source) => access().into_error(source),
        other => access().into_error(io::Error::other(other)),
    })?;
    // It names volumes and says where they are mounted: that is for root, whatever the directory's mode is.
    std::fs::set_permissions(&new.0, Permissions::from_mode(0o600)).context(access())?;
    // A hard link, unlike a rename, never replaces what another agent made meanwhile.
    match std::fs::hard_link(&new.0, path) {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(access().into_error(e)),
    }
    drop(new);
    File::open(directory).and_then(|d| d.sync_all()).context(access())
}

fn make(path: &Path) -> Result<(), redb::Error> {
    let database = builder().create(path)?;
    let transaction = database.begin_write()?;
    {
        let mut figures = transaction.open_table(FIGURES)?;
        figures.insert(KEY_FORMAT, FORMAT)?;
        figures.insert(KEY_REVISION, 0)?;
    }
    transaction.commit()?;
    Ok(())
}

/// A file that goes when it was not given its final name, and its working name in any case.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        // Nothing depends on it; a name that stays is never read.
        drop(std::fs::remove_file(&self.0));
    }
}
