//! What the embedded store has beyond the contract: a file.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;

use futures::StreamExt;

use super::{LocalStore, OpenError};
use crate::domain::Bytes;
use crate::store::contract::branch;
use crate::store::object::{Branch, StorageNode, VolumeSplit};
use crate::store::{Collection, Event, Selector, Store, StoreError};

/// Keeps the file's directory for as long as the store.
struct Kept {
    store: LocalStore,
    _directory: tempfile::TempDir,
}

impl Store for Kept {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        self.store.splits()
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        self.store.branches()
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        self.store.nodes()
    }
}

fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("union-csi-store-").tempdir().unwrap()
}

async fn fresh() -> Arc<dyn Store> {
    let directory = scratch();
    let store = LocalStore::open(&directory.path().join("store.redb")).unwrap();
    Arc::new(Kept { store, _directory: directory })
}

mod contract {
    crate::store::contract::suite!(super::fresh);
}

/// Not in the contract: a cluster refuses to move a branch, and nothing else leaves a selection.
#[tokio::test]
async fn an_object_that_is_no_longer_selected_is_deleted_for_its_watch() {
    let directory = scratch();
    let store = LocalStore::open(&path_in(&directory)).unwrap();
    let made = store.branches().create(branch("v", 0, "n1")).await.unwrap();
    let mut watch = store.branches().watch(Selector::Node("n1".parse().unwrap())).await.unwrap();
    let mut next = async || watch.next().await.unwrap().unwrap();
    assert!(matches!(next().await, Event::Applied(b) if b == made));
    assert!(matches!(next().await, Event::Ready));
    let mut moved = made.clone();
    moved.spec.node = "n2".parse().unwrap();
    let moved = store.branches().update(moved).await.unwrap();
    assert!(matches!(next().await, Event::Deleted(b) if b.meta.uid == made.meta.uid));
    let back = store.branches().update(Branch { spec: made.spec.clone(), ..moved }).await.unwrap();
    assert!(matches!(next().await, Event::Applied(b) if b == back));
}

fn path_in(directory: &tempfile::TempDir) -> std::path::PathBuf {
    directory.path().join("store.redb")
}

/// A closed store of `count` objects.
async fn filled(path: &Path, count: u32) -> Vec<Branch> {
    let store = LocalStore::open(path).unwrap();
    let mut made = Vec::new();
    for index in 0..count {
        made.push(store.branches().create(branch("v", 100 + index, "n")).await.unwrap());
    }
    made
}

#[tokio::test]
async fn what_was_written_is_there_when_the_file_is_opened_again() {
    let directory = scratch();
    let path = path_in(&directory);
    let made = filled(&path, 3).await;
    let store = LocalStore::open(&path).unwrap();
    assert_eq!(store.branches().list(&Selector::All).await.unwrap(), made);
    let next = store.branches().create(branch("w", 0, "n")).await.unwrap();
    let number = |b: &Branch| b.meta.version.0.parse::<u64>().unwrap();
    assert!(number(&next) > number(&made[2]), "versions go on where they were");
    drop(store);
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["store.redb"], "nothing else is left in the directory");
}

#[tokio::test]
async fn a_second_opener_is_refused_and_the_first_goes_on() {
    let directory = scratch();
    let path = path_in(&directory);
    let store = LocalStore::open(&path).unwrap();
    let second = LocalStore::open(&path);
    assert!(matches!(second, Err(OpenError::InUse { .. })), "{second:?}");
    store.branches().create(branch("v", 0, "n")).await.unwrap();
    drop(store);
    assert_eq!(LocalStore::open(&path).unwrap().branches().list(&Selector::All).await.unwrap().len(), 1);
}

#[tokio::test]
async fn watches_end_with_the_store() {
    let directory = scratch();
    let store = LocalStore::open(&path_in(&directory)).unwrap();
    let watch = store.branches().watch(Selector::All).await.unwrap();
    drop(store);
    let told = watch.collect::<Vec<_>>().await;
    assert_eq!(told.len(), 1, "Ready, and the end: {told:?}");
}

/// Opening must refuse the file with advice, and leave every byte as it is.
fn assert_refused(path: &Path, what: &str) -> OpenError {
    let before = std::fs::read(path).unwrap();
    let error = match LocalStore::open(path) {
        Err(error) => error,
        Ok(_) => panic!("{what}: the file was opened"),
    };
    assert!(std::fs::read(path).unwrap() == before, "{what}: the file was changed");
    let message = error.to_string();
    assert!(message.contains(path.to_str().unwrap()), "{what}: the message names the file: {message}");
    assert!(
        message.contains("backup") || message.contains("newer program"),
        "{what}: it says what to do: {message}"
    );
    let directory = path.parent().unwrap();
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), 1, "{what}: nothing is left beside it");
    error
}

#[tokio::test]
async fn an_empty_file_is_refused_as_one_that_lost_its_content() {
    let directory = scratch();
    let path = path_in(&directory);
    std::fs::write(&path, b"").unwrap();
    assert!(matches!(assert_refused(&path, "empty"), OpenError::Empty { .. }));
}

#[tokio::test]
async fn a_file_of_something_else_is_refused() {
    let directory = scratch();
    let path = path_in(&directory);
    let noise: Vec<u8> = (0..50_000u32).map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
    let zeros = vec![0; 100_000];
    let mut headed = b"redb\x1A\x0A\xA9\x0D\x0A".to_vec();
    headed.extend(&noise);
    for (what, content) in [
        ("text", b"hello".as_slice()),
        ("noise", noise.as_slice()),
        ("zeros", zeros.as_slice()),
        ("a redb header and noise", headed.as_slice()),
    ] {
        std::fs::write(&path, content).unwrap();
        assert!(matches!(assert_refused(&path, what), OpenError::Corrupt { .. }), "{what}");
    }
}

#[tokio::test]
async fn a_database_of_another_program_is_refused() {
    let directory = scratch();
    let path = path_in(&directory);
    let database = redb::Database::create(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(redb::TableDefinition::<u64, u64>::new("theirs")).unwrap().insert(1, 1).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let error = assert_refused(&path, "foreign");
    assert!(error.to_string().contains("another program"), "{error}");
}

#[tokio::test]
async fn a_newer_format_is_refused() {
    let directory = scratch();
    let path = path_in(&directory);
    filled(&path, 1).await;
    let database = redb::Database::open(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(super::file::FIGURES).unwrap().insert("format", super::FORMAT + 1).unwrap();
    transaction.commit().unwrap();
    drop(database);
    assert!(matches!(assert_refused(&path, "newer"), OpenError::Newer { found: 2, known: 1, .. }));
}

#[tokio::test]
async fn what_is_no_regular_file_is_refused_without_waiting_for_it() {
    let directory = scratch();
    let path = path_in(&directory);
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(LocalStore::open(&path), Err(OpenError::NotAFile { .. })));
    std::fs::remove_dir(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(LocalStore::open(&path), Err(OpenError::NotAFile { .. })));
    let missing = directory.path().join("absent/store.redb");
    let error = LocalStore::open(&missing).unwrap_err();
    assert!(error.to_string().contains("directory exists"), "{error}");
}

/// A file as a crash leaves it: copied while the store had it open.
async fn crashed(path: &Path, count: u32) -> Vec<Branch> {
    let live = path.with_extension("live");
    let store = LocalStore::open(&live).unwrap();
    let mut made = Vec::new();
    for index in 0..count {
        made.push(store.branches().create(branch("v", 100 + index, "n")).await.unwrap());
    }
    std::fs::copy(&live, path).unwrap();
    drop(store);
    std::fs::remove_file(&live).unwrap();
    made
}

#[tokio::test]
async fn a_file_that_was_not_closed_has_every_acknowledged_write() {
    let directory = scratch();
    let path = path_in(&directory);
    let made = crashed(&path, 20).await;
    let store = LocalStore::open(&path).unwrap();
    assert_eq!(store.branches().list(&Selector::All).await.unwrap(), made);
}

/// Either the damage is refused, with the file as it was, or it did no harm: all objects are there, and a write lasts.
async fn assert_refused_or_harmless(path: &Path, damaged: &[u8], whole: &[Branch], what: &str) -> bool {
    std::fs::write(path, damaged).unwrap();
    if LocalStore::open(path).map(drop).is_err() {
        assert_refused(path, what);
        return true;
    }
    let store = LocalStore::open(path).unwrap();
    assert_eq!(store.branches().list(&Selector::All).await.unwrap(), whole, "{what}: harmless");
    store.branches().create(branch("w", 0, "n")).await.unwrap();
    drop(store);
    let store = LocalStore::open(path).unwrap();
    assert_eq!(store.branches().list(&Selector::All).await.unwrap().len(), whole.len() + 1, "{what}");
    false
}

#[tokio::test]
async fn a_truncated_file_is_refused() {
    let directory = scratch();
    let path = path_in(&directory);
    for closed in [true, false] {
        let made = if closed { filled(&path, 40).await } else { crashed(&path, 40).await };
        let content = std::fs::read(&path).unwrap();
        let mut refused = 0;
        let mut lengths: Vec<usize> = vec![1, 9, 64, 319, 320, 4095, 4096, 4097, 8192, content.len() - 1];
        lengths.extend((1..8).map(|part| content.len() / 8 * part));
        for &length in &lengths {
            let what = format!("truncated to {length} of {} bytes, closed: {closed}", content.len());
            refused += usize::from(assert_refused_or_harmless(&path, &content[..length], &made, &what).await);
        }
        // What may be harmless to lose is unused space at the end only.
        assert!(refused * 2 > lengths.len(), "{refused} of {} refused", lengths.len());
        std::fs::remove_file(&path).unwrap();
    }
}

#[tokio::test]
async fn flipped_bytes_are_refused_or_harmless() {
    let directory = scratch();
    let path = path_in(&directory);
    for closed in [true, false] {
        let made = if closed { filled(&path, 12).await } else { crashed(&path, 12).await };
        let content = std::fs::read(&path).unwrap();
        // Pages that hold something, the header above all.
        let used: Vec<usize> = (0..content.len()).filter(|&at| content[at] != 0).collect();
        let positions = (0..320).step_by(9).chain(used.iter().copied().step_by(used.len() / 40 + 1));
        let (mut refused, mut all) = (0, 0);
        for at in positions {
            let mut damaged = content.clone();
            damaged[at] ^= 0x55;
            let what = format!("byte {at} flipped, closed: {closed}");
            refused += usize::from(assert_refused_or_harmless(&path, &damaged, &made, &what).await);
            all += 1;
        }
        assert!(refused > 10, "damage is seen: {refused} of {all}");
        std::fs::remove_file(&path).unwrap();
    }
}

#[tokio::test]
async fn an_object_that_is_not_understood_stops_nothing_else() {
    let directory = scratch();
    let path = path_in(&directory);
    let made = filled(&path, 3).await;
    let database = redb::Database::open(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut table = transaction.open_table(super::shelf::table::<Branch>()).unwrap();
        table.insert("v-101", b"{\"meta\":7}".as_slice()).unwrap();
        let other = serde_json::to_vec(&made[2]).unwrap();
        table.insert("v-impostor", other.as_slice()).unwrap();
    }
    transaction.commit().unwrap();
    drop(database);
    let store = LocalStore::open(&path).unwrap();
    let names: Vec<_> = store.malformed().into_iter().map(|m| (m.kind, m.name)).collect();
    assert_eq!(names, [("Branch", "v-101".to_owned()), ("Branch", "v-impostor".to_owned())]);
    assert_eq!(store.branches().list(&Selector::All).await.unwrap(), [made[0].clone(), made[2].clone()]);
    let mut watch = store.branches().watch(Selector::All).await.unwrap();
    for _ in 0..2 {
        assert!(matches!(watch.next().await, Some(Ok(Event::Applied(_)))));
    }
    assert!(matches!(watch.next().await, Some(Ok(Event::Ready))));
    for result in [
        store.branches().get("v-101").await.map(drop),
        store.branches().update(made[1].clone()).await.map(drop),
        store.branches().delete("v-101", None).await.map(drop),
    ] {
        assert!(matches!(result, Err(StoreError::Malformed { .. })), "{result:?}");
    }
    let taken = store.branches().create(branch("v", 101, "n")).await;
    assert!(matches!(taken, Err(StoreError::Exists { .. })), "its name is not free: {taken:?}");
    drop(store);
    assert_eq!(LocalStore::open(&path).unwrap().malformed().len(), 2, "it is kept as it is");
}

/// Set in the child process of the next test: the file that it writes to.
const CHILD: &str = "UNION_CSI_TEST_STORE_CHILD";

/// Makes, changes and removes objects until it is killed, and says what was acknowledged.
async fn write_until_killed(path: &Path) {
    let store = Arc::new(LocalStore::open(path).unwrap());
    let say = |line: String| std::io::stdout().write_all(format!("\n{line}\n").as_bytes()).unwrap();
    let tasks = (0..6).map(|task| {
        let store = store.clone();
        async move {
            for index in 0.. {
                let volume = format!("{}-{task}", std::process::id());
                let mut object = store.branches().create(branch(&volume, index, "n")).await.unwrap();
                say(format!("made {} {}", object.meta.name, object.meta.version.0));
                object.status.bytes_used = Bytes::new(u64::from(index));
                let object = store.branches().update_status(object).await.unwrap();
                say(format!("made {} {}", object.meta.name, object.meta.version.0));
                if index % 3 == 0 {
                    store.branches().delete(&object.meta.name, None).await.unwrap();
                    say(format!("gone {} 0", object.meta.name));
                }
            }
        }
    });
    futures::future::join_all(tasks).await;
}

#[tokio::test]
async fn a_writer_that_is_killed_loses_nothing_that_was_acknowledged() {
    if let Some(path) = std::env::var_os(CHILD) {
        return write_until_killed(Path::new(&path)).await;
    }
    let directory = scratch();
    let path = path_in(&directory);
    let mut acknowledged = std::collections::BTreeMap::new();
    for round in 1..=6 {
        let name = "store::local::tests::a_writer_that_is_killed_loses_nothing_that_was_acknowledged";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, &path)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // The kill comes at another point of a write in each round; the rest of the pipe is what came before it.
        let mut said = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let mut count = 0;
        while let Some(Ok(line)) = said.next() {
            let mut words = line.split(' ');
            if let (Some(verb @ ("made" | "gone")), Some(name), Some(version)) =
                (words.next(), words.next(), words.next())
            {
                let version: u64 = version.parse().unwrap();
                acknowledged.insert(name.to_owned(), (verb == "made").then_some(version));
                count += 1;
                if count == round * 37 {
                    child.kill().unwrap();
                }
            }
        }
        child.wait().unwrap();
        assert!(count >= round * 37, "the child wrote: {count}");

        let store = LocalStore::open(&path).unwrap();
        assert_eq!(store.malformed(), [], "no half object");
        for (name, version) in &acknowledged {
            let found = store.branches().get(name).await.unwrap();
            let found = found.map(|b| b.meta.version.0.parse::<u64>().unwrap());
            let removable = name.rsplit('-').next().unwrap().parse::<u32>().unwrap() % 3 == 0;
            match (version, found) {
                (Some(version), Some(found)) => assert!(found >= *version, "{name} went back"),
                // Its removal was on its way, committed, and not yet acknowledged.
                (Some(_), None) => assert!(removable, "{name} is lost"),
                (None, found) => assert_eq!(found, None, "{name} came back"),
            }
        }
    }
}
