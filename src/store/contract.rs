//! The suite that every [`super::Store`] passes: one function a rule, each on a store of its own.
//!
//! It is not `cfg(test)`, so that the tests of a store that needs a server can use it from outside the crate:
//! [`suite!`] makes one test of each rule.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;

use super::object::{
    Branch, BranchPhase, BranchSpec, BranchStatus, FINALIZER, LABEL_NODE, LABEL_VOLUME, Meta, Object,
    StorageNode, StorageNodeSpec, StorageNodeStatus, Version, VolumeSplit, VolumeSplitSpec,
    VolumeSplitStatus,
};
use super::{Collection, Event, Selector, Store, StoreError};
use crate::domain::split::BranchFormat;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, NodeName, VolumeId};

/// Bounds each wait for an event, so that a store that loses one fails the test instead of hanging it.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes one `#[tokio::test]` of each rule; `$make` is an async function from nothing to `Arc<dyn Store>`, empty and
/// used by nobody else.
#[macro_export]
macro_rules! store_contract {
    ($make:path) => {
        $crate::store::contract::suite! { $make:
            a_new_object_gets_uid_version_and_time_and_no_status
            a_name_is_given_once
            every_change_raises_the_version_and_no_change_does_not
            an_update_of_a_stale_version_is_a_conflict
            of_many_writers_of_one_version_exactly_one_wins
            spec_and_status_are_written_apart
            what_does_not_exist_cannot_be_updated_and_is_deleted_already
            an_object_without_finalizers_goes_at_once
            an_object_with_finalizers_goes_with_the_last_of_them
            a_delete_of_a_stale_version_is_a_conflict
            lists_are_ordered_by_name_and_selected
            a_watch_begins_with_what_is_there_and_is_then_ready
            a_watch_sees_every_later_change_and_deletion
            an_object_made_anew_under_its_name_was_gone_in_between
            a_slow_watch_gets_the_latest_state
            a_watch_misses_nothing_under_concurrent_writers
            a_thousand_objects_are_nothing_special
        }
    };
    ($make:path: $($rule:ident)*) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $rule() {
            $crate::store::contract::$rule($make().await).await;
        })*
    };
}

#[doc(inline)]
pub use store_contract as suite;

fn volume(name: &str) -> VolumeId {
    VolumeId::from_request_name(name)
}

fn node_name(name: &str) -> NodeName {
    name.parse().expect("a node name")
}

/// A branch object as the splitter makes them, without finalizer.
#[must_use]
pub fn branch(volume_name: &str, index: u32, node: &str) -> Branch {
    let volume = volume(volume_name);
    let id = volume.branch(index);
    let labels = [(LABEL_NODE, node), (LABEL_VOLUME, volume.as_str())];
    let labels: BTreeMap<_, _> = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    Branch {
        meta: Meta { labels, ..Meta::new(id.to_string()) },
        spec: BranchSpec {
            id,
            volume,
            index,
            node: node_name(node),
            pool: "pool".parse().expect("a pool name"),
            size: Bytes::gib(1),
            usable: Bytes::gib(1),
            format: BranchFormat::Directory,
            fs_type: None,
            thin: false,
            accept_unenforced: false,
            write_through: true,
            encrypted: false,
            access: None,
            sharing: None,
        },
        status: BranchStatus::default(),
    }
}

fn storage_node(name: &str) -> StorageNode {
    StorageNode {
        meta: Meta::new(name),
        spec: StorageNodeSpec { node: node_name(name) },
        status: StorageNodeStatus::default(),
    }
}

/// A volume's object as a request makes them, without finalizer. What rules change of a spec they change here: the spec
/// of a branch is final.
fn split(name: &str) -> VolumeSplit {
    VolumeSplit {
        meta: Meta::new(volume(name).as_str()),
        spec: VolumeSplitSpec {
            volume: volume(name),
            request_name: name.to_owned(),
            capacity: Bytes::gib(1),
            limit: None,
            access_modes: vec![AccessMode::SingleNodeWriter],
            volume_mode: VolumeMode::Filesystem,
            parameters: BTreeMap::new(),
            consumer: None,
            topology: Vec::new(),
            ephemeral: false,
            branches: Vec::new(),
            next_index: 0,
            attached: Vec::new(),
            used: false,
        },
        status: VolumeSplitStatus::default(),
    }
}

async fn create_split(store: &dyn Store, name: &str) -> VolumeSplit {
    store.splits().create(split(name)).await.expect("the object is made")
}

async fn create(store: &dyn Store, object: Branch) -> Branch {
    store.branches().create(object).await.expect("the object is made")
}

async fn next<T: Object>(watch: &mut BoxStream<'static, Result<Event<T>, StoreError>>) -> Event<T> {
    tokio::time::timeout(PATIENCE, watch.next())
        .await
        .expect("the watch tells something in time")
        .expect("the watch goes on")
        .expect("the watch does not fail")
}

async fn applied<T: Object>(watch: &mut BoxStream<'static, Result<Event<T>, StoreError>>) -> T {
    match next(watch).await {
        Event::Applied(object) => object,
        other => panic!("expected an applied object, got {other:?}"),
    }
}

async fn deleted<T: Object>(watch: &mut BoxStream<'static, Result<Event<T>, StoreError>>) -> T {
    match next(watch).await {
        Event::Deleted(object) => object,
        other => panic!("expected a deleted object, got {other:?}"),
    }
}

async fn ready<T: Object>(watch: &mut BoxStream<'static, Result<Event<T>, StoreError>>) {
    match next(watch).await {
        Event::Ready => {}
        other => panic!("expected Ready, got {other:?}"),
    }
}

/// Rule.
pub async fn a_new_object_gets_uid_version_and_time_and_no_status(store: Arc<dyn Store>) {
    let mut given = branch("v", 0, "n");
    given.status.phase = BranchPhase::Bound;
    given.meta.deleting = Some(jiff::Timestamp::UNIX_EPOCH);
    let made = create(&*store, given.clone()).await;
    assert!(!made.meta.uid.is_empty(), "a uid");
    assert_ne!(made.meta.version, Version::default(), "a version");
    assert!(made.meta.created.is_some(), "a time of creation");
    assert_eq!(made.meta.deleting, None, "nobody asked it to go");
    assert_eq!(made.status, BranchStatus::default(), "status is written by update_status only");
    assert_eq!((&made.spec, &made.meta.labels), (&given.spec, &given.meta.labels));
    assert_eq!(store.branches().get(&made.meta.name).await.expect("readable"), Some(made.clone()));
    let other = create(&*store, branch("v", 1, "n")).await;
    assert_ne!(made.meta.uid, other.meta.uid);
}

/// Rule.
pub async fn a_name_is_given_once(store: Arc<dyn Store>) {
    let mut object = branch("v", 0, "n");
    object.meta.finalizers = vec![FINALIZER.to_owned()];
    create(&*store, object.clone()).await;
    let taken = store.branches().create(object.clone()).await;
    assert!(matches!(taken, Err(StoreError::Exists { .. })), "{taken:?}");
    assert!(store.branches().delete(&object.meta.name, None).await.expect("deleted"));
    let taken = store.branches().create(object).await;
    assert!(
        matches!(taken, Err(StoreError::Exists { .. })),
        "an object on its way out has its name: {taken:?}"
    );
}

/// Rule.
pub async fn every_change_raises_the_version_and_no_change_does_not(store: Arc<dyn Store>) {
    let made = create_split(&*store, "v").await;
    let mut changed = made.clone();
    changed.spec.next_index = 2;
    let changed = store.splits().update(changed).await.expect("updated");
    assert_ne!(changed.meta.version, made.meta.version);
    assert_eq!((&changed.meta.uid, changed.meta.created), (&made.meta.uid, made.meta.created));
    let same = store.splits().update(changed.clone()).await.expect("updated");
    assert_eq!(same, changed, "writing what is stored changes nothing");
    let mut reported = changed.clone();
    reported.status.bound_replicas = 7;
    let reported = store.splits().update_status(reported).await.expect("updated");
    assert_ne!(reported.meta.version, changed.meta.version);
    let same = store.splits().update_status(reported.clone()).await.expect("updated");
    assert_eq!(same, reported);
    assert_eq!(store.splits().get(&made.meta.name).await.expect("readable"), Some(reported));
}

/// Rule.
pub async fn an_update_of_a_stale_version_is_a_conflict(store: Arc<dyn Store>) {
    let old = create_split(&*store, "v").await;
    let mut new = old.clone();
    new.spec.next_index = 2;
    let new = store.splits().update(new).await.expect("updated");
    let spec = store.splits().update(old.clone()).await;
    assert!(matches!(spec, Err(StoreError::Conflict { .. })), "{spec:?}");
    let status = store.splits().update_status(old).await;
    assert!(matches!(status, Err(StoreError::Conflict { .. })), "{status:?}");
    assert_eq!(store.splits().get(&new.meta.name).await.expect("readable"), Some(new));
}

/// Rule.
pub async fn of_many_writers_of_one_version_exactly_one_wins(store: Arc<dyn Store>) {
    let made = create_split(&*store, "v").await;
    let writers: Vec<_> = (2..10)
        .map(|next| {
            let (store, mut mine) = (store.clone(), made.clone());
            mine.spec.next_index = next;
            tokio::spawn(async move { store.splits().update(mine).await })
        })
        .collect();
    let mut winners = Vec::new();
    for writer in writers {
        match writer.await.expect("the writer ends") {
            Ok(object) => winners.push(object),
            Err(e) => assert!(matches!(e, StoreError::Conflict { .. }), "{e}"),
        }
    }
    assert_eq!(winners.len(), 1, "one winner: {winners:?}");
    assert_eq!(store.splits().get(&made.meta.name).await.expect("readable"), winners.pop());
}

/// Rule.
pub async fn spec_and_status_are_written_apart(store: Arc<dyn Store>) {
    let made = create_split(&*store, "v").await;
    let mut both = made.clone();
    both.spec.next_index = 2;
    both.meta.labels.insert("extra".into(), "1".into());
    both.meta.uid = "forged".into();
    both.status.bound_replicas = 7;
    let spec = store.splits().update(both.clone()).await.expect("updated");
    assert_eq!(spec.status, made.status, "update leaves the status");
    assert_eq!(spec.spec.next_index, 2);
    assert_eq!(spec.meta.labels.get("extra").map(String::as_str), Some("1"));
    assert_eq!(spec.meta.uid, made.meta.uid, "the uid is the store's");
    both.meta = spec.meta.clone();
    both.meta.labels.clear();
    both.meta.finalizers.push(FINALIZER.to_owned());
    both.spec.next_index = 3;
    let status = store.splits().update_status(both).await.expect("updated");
    assert_eq!(status.spec, spec.spec, "update_status leaves the spec");
    assert_eq!(status.meta.labels, spec.meta.labels);
    assert_eq!(status.meta.finalizers, spec.meta.finalizers);
    assert_eq!(status.status.bound_replicas, 7);
}

/// Rule.
pub async fn what_does_not_exist_cannot_be_updated_and_is_deleted_already(store: Arc<dyn Store>) {
    let absent = branch("v", 0, "n");
    assert_eq!(store.branches().get(&absent.meta.name).await.expect("readable"), None);
    for result in
        [store.branches().update(absent.clone()).await, store.branches().update_status(absent.clone()).await]
    {
        assert!(matches!(result, Err(StoreError::Missing { .. })), "{result:?}");
    }
    assert!(!store.branches().delete(&absent.meta.name, None).await.expect("no error"));
}

/// Rule.
pub async fn an_object_without_finalizers_goes_at_once(store: Arc<dyn Store>) {
    let made = create(&*store, branch("v", 0, "n")).await;
    assert!(store.branches().delete(&made.meta.name, None).await.expect("deleted"));
    assert_eq!(store.branches().get(&made.meta.name).await.expect("readable"), None);
    assert!(!store.branches().delete(&made.meta.name, None).await.expect("no error"));
    let again = create(&*store, branch("v", 0, "n")).await;
    assert_ne!(again.meta.uid, made.meta.uid, "a new object, not the old one");
}

/// Rule.
pub async fn an_object_with_finalizers_goes_with_the_last_of_them(store: Arc<dyn Store>) {
    let mut given = branch("v", 0, "n");
    given.meta.finalizers = vec!["a/b".to_owned(), FINALIZER.to_owned()];
    let made = create(&*store, given).await;
    assert!(store.branches().delete(&made.meta.name, None).await.expect("deleted"));
    let marked = store.branches().get(&made.meta.name).await.expect("readable").expect("kept");
    assert!(marked.meta.deleting.is_some());
    assert_ne!(marked.meta.version, made.meta.version);
    assert!(store.branches().delete(&made.meta.name, None).await.expect("a second time"));
    let still = store.branches().get(&made.meta.name).await.expect("readable");
    assert_eq!(still.as_ref(), Some(&marked), "a second request changes nothing");
    let mut one = marked.clone();
    one.status.reason = "going".into();
    let mut one = store.branches().update_status(one).await.expect("status can still be written");
    one.meta.finalizers.remove(0);
    let mut last = store.branches().update(one).await.expect("updated");
    assert!(store.branches().get(&made.meta.name).await.expect("readable").is_some());
    last.meta.finalizers.clear();
    store.branches().update(last).await.expect("updated");
    assert_eq!(store.branches().get(&made.meta.name).await.expect("readable"), None);
}

/// Rule.
pub async fn a_delete_of_a_stale_version_is_a_conflict(store: Arc<dyn Store>) {
    let old = create_split(&*store, "v").await;
    let mut new = old.clone();
    new.spec.next_index = 2;
    let new = store.splits().update(new).await.expect("updated");
    let stale = store.splits().delete(&old.meta.name, Some(old.meta.version)).await;
    assert!(matches!(stale, Err(StoreError::Conflict { .. })), "{stale:?}");
    assert_eq!(store.splits().get(&new.meta.name).await.expect("readable").as_ref(), Some(&new));
    assert!(store.splits().delete(&new.meta.name, Some(new.meta.version)).await.expect("deleted"));
}

/// Rule.
pub async fn lists_are_ordered_by_name_and_selected(store: Arc<dyn Store>) {
    for (volume, index, node) in [("b", 1, "n2"), ("a", 10, "n1"), ("b", 0, "n1"), ("a", 2, "n2")] {
        create(&*store, branch(volume, index, node)).await;
    }
    store.nodes().create(storage_node("n1")).await.expect("the node is made");
    let names = async |selector: Selector| -> Vec<String> {
        let listed = store.branches().list(&selector).await.expect("listed");
        listed.into_iter().map(|b| b.meta.name).collect()
    };
    assert_eq!(names(Selector::All).await, ["a-10", "a-2", "b-0", "b-1"]);
    assert_eq!(names(Selector::Node(node_name("n1"))).await, ["a-10", "b-0"]);
    assert_eq!(names(Selector::Volume(volume("b"))).await, ["b-0", "b-1"]);
    assert_eq!(names(Selector::Name("a-2".into())).await, ["a-2"]);
    assert!(names(Selector::Name("absent".into())).await.is_empty());
    let nodes = store.nodes().list(&Selector::Node(node_name("n1"))).await.expect("listed");
    assert_eq!(nodes.len(), 1, "a node lies on itself");
}

/// Rule.
pub async fn a_watch_begins_with_what_is_there_and_is_then_ready(store: Arc<dyn Store>) {
    let mut empty = store.branches().watch(Selector::All).await.expect("watched");
    ready(&mut empty).await;
    let one = create(&*store, branch("v", 0, "n")).await;
    create(&*store, branch("w", 0, "n")).await;
    let mut watch = store.branches().watch(Selector::Volume(volume("v"))).await.expect("watched");
    assert_eq!(applied(&mut watch).await, one);
    ready(&mut watch).await;
}

/// Rule.
pub async fn a_watch_sees_every_later_change_and_deletion(store: Arc<dyn Store>) {
    let mut watch = store.branches().watch(Selector::Node(node_name("n"))).await.expect("watched");
    ready(&mut watch).await;
    create(&*store, branch("w", 0, "elsewhere")).await;
    let made = create(&*store, branch("v", 0, "n")).await;
    assert_eq!(applied(&mut watch).await, made);
    let mut changed = made.clone();
    changed.status.phase = BranchPhase::Bound;
    let changed = store.branches().update_status(changed).await.expect("updated");
    assert_eq!(applied(&mut watch).await, changed);
    store.branches().delete(&made.meta.name, None).await.expect("deleted");
    let last = deleted(&mut watch).await;
    assert_eq!((&last.meta.uid, &last.status), (&made.meta.uid, &changed.status));
}

/// Rule.
pub async fn an_object_made_anew_under_its_name_was_gone_in_between(store: Arc<dyn Store>) {
    let first = create(&*store, branch("v", 0, "n")).await;
    let mut watch = store.branches().watch(Selector::All).await.expect("watched");
    assert_eq!(applied(&mut watch).await, first);
    ready(&mut watch).await;
    store.branches().delete(&first.meta.name, None).await.expect("deleted");
    let second = create(&*store, branch("v", 0, "n")).await;
    assert_eq!(deleted(&mut watch).await.meta.uid, first.meta.uid);
    assert_eq!(applied(&mut watch).await, second);
}

/// Rule.
pub async fn a_slow_watch_gets_the_latest_state(store: Arc<dyn Store>) {
    let mut watch = store.branches().watch(Selector::All).await.expect("watched");
    ready(&mut watch).await;
    let mut object = create(&*store, branch("v", 0, "n")).await;
    for used in 1..=200 {
        object.status.bytes_used = Bytes::new(used);
        object = store.branches().update_status(object).await.expect("updated");
    }
    let mut before = 0;
    loop {
        let used = applied(&mut watch).await.status.bytes_used.get();
        assert!(used >= before, "states come in order: {used} after {before}");
        if used == 200 {
            break;
        }
        before = used;
    }
    let end = create(&*store, branch("w", 0, "n")).await;
    assert_eq!(applied(&mut watch).await, end, "nothing older comes after the latest state");
}

/// Rule.
pub async fn a_watch_misses_nothing_under_concurrent_writers(store: Arc<dyn Store>) {
    const WRITERS: u32 = 8;
    const ROUNDS: u64 = 25;
    // Each writer makes, changes, removes and makes again one object; watches begin in the middle of it.
    let writers: Vec<_> = (0..WRITERS)
        .map(|index| {
            let store = store.clone();
            tokio::spawn(async move {
                for round in 0..ROUNDS {
                    let mut object = create(&*store, branch("v", index, "n")).await;
                    object.status.bytes_used = Bytes::new(round);
                    let object = store.branches().update_status(object).await.expect("updated");
                    // The last round of every second writer leaves its object.
                    if round + 1 < ROUNDS || index % 2 == 0 {
                        store.branches().delete(&object.meta.name, None).await.expect("deleted");
                    }
                }
            })
        })
        .collect();
    let mut watchers = Vec::new();
    for _ in 0..4 {
        let watch = store.branches().watch(Selector::All).await.expect("watched");
        watchers.push(tokio::spawn(follow(watch)));
        tokio::task::yield_now().await;
    }
    for writer in writers {
        writer.await.expect("the writer ends");
    }
    create(&*store, branch("z-end", 0, "n")).await;
    let there = store.branches().list(&Selector::All).await.expect("listed");
    let there: BTreeMap<_, _> = there.into_iter().map(|b| (b.meta.name.clone(), b)).collect();
    assert_eq!(there.len(), 1 + WRITERS as usize / 2);
    for watcher in watchers {
        assert_eq!(watcher.await.expect("the watcher ends"), there, "the picture is the store's");
    }
}

/// Builds the picture that a watch gives until the object `z-end-0` has come, checking its order on the way.
async fn follow(
    mut watch: BoxStream<'static, Result<Event<Branch>, StoreError>>,
) -> BTreeMap<String, Branch> {
    let mut picture: BTreeMap<String, Branch> = BTreeMap::new();
    let (mut is_ready, mut ended) = (false, false);
    while !(is_ready && ended) {
        match next(&mut watch).await {
            Event::Ready => is_ready = true,
            Event::Applied(new) => {
                ended |= new.meta.name == "z-end-0";
                if let Some(old) = picture.get(&new.meta.name) {
                    assert_eq!(old.meta.uid, new.meta.uid, "an object is gone before another has its name");
                    assert!(new.status.bytes_used >= old.status.bytes_used, "states never go back");
                }
                picture.insert(new.meta.name.clone(), new);
            }
            Event::Deleted(old) => {
                let known = picture.remove(&old.meta.name);
                assert_eq!(known.map(|k| k.meta.uid), Some(old.meta.uid), "what goes was there");
            }
        }
    }
    picture
}

/// Rule.
pub async fn a_thousand_objects_are_nothing_special(store: Arc<dyn Store>) {
    let mut watch = store.branches().watch(Selector::All).await.expect("watched");
    ready(&mut watch).await;
    let objects = (0..1000).map(|n| create(&*store, branch("v", n, "n")));
    let made = futures::future::join_all(objects).await;
    let mut seen = BTreeMap::new();
    while seen.len() < made.len() {
        let object = applied(&mut watch).await;
        seen.insert(object.meta.name.clone(), object);
    }
    let listed = store.branches().list(&Selector::All).await.expect("listed");
    assert_eq!(listed, seen.into_values().collect::<Vec<_>>());
}

/// Waits until the collection's object `name` is as `wanted`; for tests of what acts through a store.
///
/// # Panics
/// When it does not come to that in half a minute.
pub async fn eventually<T: Object>(
    collection: &dyn Collection<T>,
    name: &str,
    wanted: impl Fn(Option<&T>) -> bool,
) -> Option<T> {
    let mut watch = collection.watch(Selector::Name(name.to_owned())).await.expect("watched");
    let mut state = None;
    let mut is_ready = false;
    loop {
        if is_ready && wanted(state.as_ref()) {
            return state;
        }
        let event = tokio::time::timeout(PATIENCE, watch.next()).await;
        match event.unwrap_or_else(|_| panic!("{name} stays {state:#?}")) {
            Some(Ok(Event::Applied(object))) => state = Some(object),
            Some(Ok(Event::Deleted(_))) => state = None,
            Some(Ok(Event::Ready)) => is_ready = true,
            other => panic!("the watch of {name} ended: {other:?}"),
        }
    }
}
