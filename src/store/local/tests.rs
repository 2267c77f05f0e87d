//! What the embedded store has beyond the contract: a file.

use std::path::Path;
use std::sync::Arc;

use super::{LocalStore, OpenError};
use crate::store::contract::branch;
use crate::store::{Selector, Store};

/// Keeps the file's directory for as long as the store.
struct Kept {
    store: LocalStore,
    _directory: tempfile::TempDir,
}

impl Store for Kept {
    fn splits(&self) -> &dyn crate::store::Collection<crate::store::object::VolumeSplit> {
        self.store.splits()
    }
    fn branches(&self) -> &dyn crate::store::Collection<crate::store::object::Branch> {
        self.store.branches()
    }
    fn nodes(&self) -> &dyn crate::store::Collection<crate::store::object::StorageNode> {
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
    crate::store_contract!(super::fresh);
}

fn path_in(directory: &tempfile::TempDir) -> std::path::PathBuf {
    directory.path().join("store.redb")
}

/// A closed store of `count` objects.
async fn filled(path: &Path, count: u32) -> Vec<crate::store::object::Branch> {
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
    let number = |b: &crate::store::object::Branch| b.meta.version.0.parse::<u64>().unwrap();
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
    use futures::StreamExt;
    let directory = scratch();
    let store = LocalStore::open(&path_in(&directory)).unwrap();
    let watch = store.branches().watch(Selector::All).await.unwrap();
    drop(store);
    let told = watch.collect::<Vec<_>>().await;
    assert_eq!(told.len(), 1, "Ready, and the end: {told:?}");
}
