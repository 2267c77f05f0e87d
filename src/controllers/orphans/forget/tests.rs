//! What forgetting a node decides, and that it can be interrupted anywhere.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use futures::stream::BoxStream;
use jiff::SignedDuration;

use super::act::{ForgetError, forget, look};
use super::*;
use crate::domain::Secret;
use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::store::contract;
use crate::store::local::LocalStore;
use crate::store::object::{
    FINALIZER, Meta, Object, StorageNodeSpec, StorageNodeStatus, Version, condition, pending, set_condition,
};
use crate::store::{Collection, Event, Keys, NoKeys, Pair, Selector, Store, StoreError};

const NOW: Timestamp = Timestamp::UNIX_EPOCH;

fn now() -> Timestamp {
    NOW
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn storage(name: &str, silent_minutes: i64) -> StorageNode {
    let heartbeat = NOW.checked_sub(SignedDuration::from_mins(silent_minutes)).unwrap();
    StorageNode {
        meta: Meta::new(name),
        spec: StorageNodeSpec { node: node(name) },
        status: StorageNodeStatus { heartbeat: Some(heartbeat), ..StorageNodeStatus::default() },
    }
}

fn branch(volume: &str, index: u32, on: &str) -> Branch {
    let mut branch = contract::branch(volume, index, on);
    branch.meta.finalizers = vec![FINALIZER.to_owned()];
    branch.status.phase = BranchPhase::Bound;
    branch
}

/// A volume with a branch on each of these nodes; one that was complete, unless said otherwise.
fn volume(name: &str, on: &[&str]) -> VolumeSplit {
    let id = VolumeId::from_request_name(name);
    let spec = serde_json::json!({
        "volume": id, "requestName": name, "capacity": 1 << 30, "accessModes": ["SingleNodeWriter"],
        "parameters": {"csi.storage.k8s.io/pvc/name": name, "csi.storage.k8s.io/pvc/namespace": "web"},
    });
    let mut split = VolumeSplit {
        meta: Meta::with_finalizer(id.as_str()),
        spec: serde_json::from_value(spec).unwrap(),
        status: Default::default(),
    };
    let planned = |(index, on): (usize, &&str)| PlannedBranch {
        index: u32::try_from(index).unwrap(),
        node: node(on),
        pool: "pool".parse().unwrap(),
        size: Bytes::gib(1),
        usable: Bytes::gib(1),
        format: BranchFormat::Directory,
        fs_type: None,
    };
    split.spec.branches = on.iter().enumerate().map(planned).collect();
    split.spec.next_index = u32::try_from(on.len()).unwrap();
    set_condition(&mut split.status.conditions, NOW, "Pending", false, pending::BOUND, "");
    split
}

fn unfinished(name: &str, on: &[&str]) -> VolumeSplit {
    VolumeSplit { status: Default::default(), ..volume(name, on) }
}

fn attached(mut split: VolumeSplit, to: &str) -> VolumeSplit {
    let one = serde_json::json!([{"node": to, "accessMode": "SingleNodeWriter"}]);
    split.spec.attached = serde_json::from_value(one).unwrap();
    split
}

fn of(splits: Vec<VolumeSplit>, branches: Vec<Branch>) -> Known {
    Known { splits, branches, ..Known::default() }
}

#[test]
fn a_node_is_alive_that_is_ready_or_has_reported_lately() {
    let known = |ready, silent: Option<i64>| Known {
        storage: silent.map(|minutes| storage("n1", minutes)),
        ready,
        ..Known::default()
    };
    for (ready, silent) in
        [(Some(true), Some(60)), (Some(true), None), (None, Some(14)), (Some(false), Some(0))]
    {
        assert!(alive(&known(ready, silent), NOW).is_some(), "{ready:?} {silent:?}");
    }
    // A clock that runs ahead is no sign of death.
    assert!(alive(&known(None, Some(-60)), NOW).is_some());
    for (ready, silent) in [(Some(false), Some(15)), (None, Some(60)), (None, None), (Some(false), None)] {
        assert_eq!(alive(&known(ready, silent), NOW), None, "{ready:?} {silent:?}");
    }
    let mut never = known(None, Some(60));
    if let Some(storage) = &mut never.storage {
        storage.status.heartbeat = None;
        storage.meta.created = Some(NOW);
    }
    assert!(alive(&never, NOW).is_some(), "an agent that starts has not reported yet");
}

#[test]
fn each_volume_is_told_what_it_loses_and_others_are_left_alone() {
    let mut deleted = volume("deleted", &["n1"]);
    deleted.meta.deleting = Some(NOW);
    let mut own = volume("own", &["n1"]);
    own.spec.ephemeral = true;
    let splits = vec![
        volume("all", &["n1", "n1"]),
        deleted,
        volume("elsewhere", &["n2"]),
        unfinished("new", &["n1"]),
        own,
        volume("some", &["n1", "n2"]),
    ];
    let branches = ["all", "deleted", "new", "nobody", "own", "some"].map(|name| branch(name, 0, "n1"));
    let found =
        forgetting(&node("n1"), &of(splits, [branches.to_vec(), vec![branch("all", 1, "n1")]].concat()));
    let told: Vec<_> =
        found.losses.iter().map(|l| (l.volume.as_str(), l.branches.len(), l.of, l.consequence)).collect();
    let id = |name: &str| VolumeId::from_request_name(name).to_string();
    let mut wanted = [
        (id("all"), 2, 2, Consequence::AllFiles),
        (id("deleted"), 1, 1, Consequence::DeletionGoesOn),
        (id("new"), 1, 1, Consequence::PlannedAnew),
        (id("nobody"), 1, 1, Consequence::NoVolume),
        (id("own"), 1, 1, Consequence::GoesWithPod),
        (id("some"), 1, 2, Consequence::SomeFiles),
    ];
    wanted.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(told, wanted.each_ref().map(|(id, n, of, what)| (id.as_str(), *n, *of, *what)));
    assert!(found.losses.iter().any(|l| l.claim.as_deref() == Some("web/all")));
    let text = format!("{:?}", found.steps);
    assert!(!text.contains("elsewhere"), "{text}");
    assert!(found.steps.contains(&Step::LetGo(VolumeId::from_request_name("new"))));
    assert!(!found.steps.contains(&Step::LetGo(VolumeId::from_request_name("some"))), "it keeps its plan");
    assert!(found.steps.contains(&Step::DeleteVolume(VolumeId::from_request_name("own"))));
}

#[test]
fn a_volume_that_may_hold_files_keeps_its_plan_and_the_record_of_its_use() {
    let on = node("n1");
    assert_eq!(let_go(&volume("v", &["n1"]), &on), None);
    let bare = attached(unfinished("v", &["n1"]), "n1");
    let free = let_go(&bare, &on).unwrap();
    assert!(free.spec.attached.is_empty() && free.spec.used);
    assert_eq!(free.spec.branches, bare.spec.branches, "it was attached: files may lie there");
    let new = let_go(&unfinished("v", &["n1", "n2"]), &on).unwrap();
    assert_eq!(new.spec.branches.iter().map(|b| b.index).collect::<Vec<_>>(), [1]);
    assert_eq!(new.spec.next_index, 2, "no number is used twice");
    assert_eq!(let_go(&attached(volume("v", &["n2"]), "n2"), &on), None);
}

#[test]
fn the_storage_node_goes_before_plans_change_and_branches_go_last() {
    let mut known = of(vec![attached(volume("v", &["n1"]), "n1")], vec![branch("v", 0, "n1")]);
    known.storage = Some(storage("n1", 60));
    let id = VolumeId::from_request_name("v");
    let name = branch("v", 0, "n1").meta.name;
    assert_eq!(
        forgetting(&node("n1"), &known).steps,
        [Step::DeleteStorageNode, Step::LetGo(id), Step::DropBranch(name)]
    );
}

/// A store that fails with every write after so many.
struct Failing {
    splits: Writes<VolumeSplit>,
    branches: Writes<Branch>,
    nodes: Writes<StorageNode>,
    keys: Paired,
    left: Arc<AtomicI64>,
    inner: Arc<LocalStore>,
    _directory: tempfile::TempDir,
}

struct Writes<T> {
    of: fn(&LocalStore) -> &dyn Collection<T>,
    inner: Arc<LocalStore>,
    left: Arc<AtomicI64>,
}

impl Failing {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("union-csi-forget-").tempdir().unwrap();
        let inner = Arc::new(LocalStore::open(&directory.path().join("store.redb")).unwrap());
        let left = Arc::new(AtomicI64::new(i64::MAX));
        Self {
            splits: Writes { of: |store| store.splits(), inner: inner.clone(), left: left.clone() },
            branches: Writes { of: |store| store.branches(), inner: inner.clone(), left: left.clone() },
            nodes: Writes { of: |store| store.nodes(), inner: inner.clone(), left: left.clone() },
            keys: Paired::default(),
            left,
            inner,
            _directory: directory,
        }
    }

    async fn fill(&self, known: Known) {
        if let Some(object) = known.storage {
            let made = self.inner.nodes().create(object.clone()).await.unwrap();
            let status = StorageNode { status: object.status, ..made };
            self.inner.nodes().update_status(status).await.unwrap();
        }
        for object in known.splits {
            let made = self.inner.splits().create(object.clone()).await.unwrap();
            let made = VolumeSplit { status: object.status, ..made };
            self.inner.splits().update_status(made).await.unwrap();
            if object.meta.deleting.is_some() {
                self.inner.splits().delete(&object.meta.name, None).await.unwrap();
            }
        }
        for object in known.branches {
            let made = self.inner.branches().create(object.clone()).await.unwrap();
            self.inner.branches().update_status(Branch { status: object.status, ..made }).await.unwrap();
        }
    }
}

impl Store for Failing {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }
    fn keys(&self) -> &dyn Keys {
        &self.keys
    }
}

/// Pairs that have a key.
#[derive(Default)]
struct Paired(Mutex<BTreeSet<Pair>>);

#[async_trait]
impl Keys for Paired {
    async fn get(&self, pair: &Pair) -> Result<Option<Secret>, StoreError> {
        NoKeys.get(pair).await
    }
    async fn ensure(&self, pair: &Pair, _: &StorageNode) -> Result<bool, StoreError> {
        self.0.lock().unwrap().insert(pair.clone());
        Ok(true)
    }
    async fn remove(&self, pair: &Pair) -> Result<bool, StoreError> {
        Ok(self.0.lock().unwrap().remove(pair))
    }
}

#[tokio::test(start_paused = true)]
async fn the_keys_of_a_node_go_with_it_and_no_others() {
    let store = Failing::new();
    store.fill(Known { storage: Some(storage("n1", 60)), ..Known::default() }).await;
    for name in ["n2", "n3"] {
        store.inner.nodes().create(storage(name, 0)).await.unwrap();
    }
    let pair = |owner: &str, consumer: &str| Pair { owner: node(owner), consumer: node(consumer) };
    for (owner, consumer) in [("n1", "n2"), ("n2", "n1"), ("n3", "n1"), ("n2", "n3")] {
        store.keys.0.lock().unwrap().insert(pair(owner, consumer));
    }
    forget(&store, &node("n1"), None, now).await.unwrap();
    assert_eq!(*store.keys.0.lock().unwrap(), BTreeSet::from([pair("n2", "n3")]));
}

impl<T: Object> Writes<T> {
    fn inner(&self) -> &dyn Collection<T> {
        (self.of)(&self.inner)
    }

    fn one(&self) -> Result<(), StoreError> {
        if self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Ok(());
        }
        Err(StoreError::Backend { action: "write".to_owned(), source: "the process was killed".into() })
    }
}

#[async_trait]
impl<T: Object> Collection<T> for Writes<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.inner().get(name).await
    }
    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        self.inner().list(selector).await
    }
    async fn create(&self, object: T) -> Result<T, StoreError> {
        self.one()?;
        self.inner().create(object).await
    }
    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.one()?;
        self.inner().update(object).await
    }
    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.one()?;
        self.inner().update_status(object).await
    }
    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        self.one()?;
        self.inner().delete(name, version).await
    }
    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        self.inner().watch(selector).await
    }
}

fn full() -> Known {
    let mut deleted = attached(volume("deleted", &["n1"]), "n1");
    deleted.meta.deleting = Some(NOW);
    let branches = ["all", "deleted", "new"].map(|name| branch(name, 0, "n1"));
    Known {
        storage: Some(storage("n1", 60)),
        ready: None,
        splits: vec![volume("all", &["n1"]), deleted, unfinished("new", &["n1"])],
        branches: [branches.to_vec(), vec![branch("other", 0, "n2")]].concat(),
    }
}

#[tokio::test(start_paused = true)]
async fn forgetting_that_is_killed_at_any_write_is_finished_by_the_next() {
    let on = node("n1");
    for survived in 0.. {
        let store = Failing::new();
        store.fill(full()).await;
        store.left.store(survived, Ordering::Relaxed);
        let first = forget(&store, &on, None, now).await;
        store.left.store(i64::MAX, Ordering::Relaxed);
        let killed = first.is_err();
        if killed {
            forget(&store, &on, None, now).await.unwrap_or_else(|e| panic!("after {survived}: {e}"));
        }
        assert_eq!(store.nodes().get("n1").await.unwrap(), None);
        let branches = store.branches().list(&Selector::All).await.unwrap();
        assert_eq!(branches.iter().map(|b| b.spec.node.as_str()).collect::<Vec<_>>(), ["n2"]);
        assert_eq!(branches[0].meta.deleting, None);
        for split in store.splits().list(&Selector::All).await.unwrap() {
            assert!(split.spec.attached.is_empty());
            let planned = split.spec.branches.len();
            assert_eq!(planned, usize::from(split.spec.request_name != "new"), "{}", split.spec.request_name);
        }
        assert!(look(&store, &on, None, NOW).await.unwrap().steps.is_empty(), "nothing is left to do");
        if !killed {
            assert!(survived > 6, "each write was the last once");
            return;
        }
    }
}

#[tokio::test]
async fn a_node_that_is_alive_is_refused_and_nothing_is_written() {
    let store = Failing::new();
    store.fill(Known { storage: Some(storage("n1", 1)), ..full() }).await;
    store.left.store(0, Ordering::Relaxed);
    let refused = forget(&store, &node("n1"), None, now).await;
    assert!(matches!(refused, Err(ForgetError::Alive { .. })), "{refused:?}");
    store.fill(Known { storage: Some(storage("n2", 60)), ..Known::default() }).await;
    let refused = forget(&store, &node("n2"), Some(true), now).await.unwrap_err().to_string();
    assert!(refused.contains("Ready") && refused.contains("stop its agent"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn what_a_branch_was_is_still_told_of_its_volume_when_nothing_is_left_of_the_node() {
    let store = Failing::new();
    store.fill(full()).await;
    forget(&store, &node("n1"), None, now).await.unwrap();
    let id = VolumeId::from_request_name("all");
    let split = store.splits().get(id.as_str()).await.unwrap().unwrap();
    assert!(split.may_hold_files(), "no branch is made in place of the lost one");
    assert_eq!(
        condition(&split.status.conditions, "Pending").map(|c| c.reason.as_str()),
        Some(pending::BOUND)
    );
}
