//! The contract of the store on a real API server, and what a cluster adds to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, Config};
use serde_json::{Value, json};
use union_csi::domain::Bytes;
use union_csi::store::contract::branch;
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{Branch, BranchPhase, Object, StorageNode, VolumeSplit, set_condition};
use union_csi::store::{Event, Selector, Store, StoreError};

use crate::support;

const MANAGER: &str = "union-csi";

async fn fresh() -> Arc<dyn Store> {
    Arc::new(Bench::new().await.store)
}

mod contract {
    union_csi::store::contract::suite!(super::fresh);
}

/// A store in a namespace of its own, and the API server behind it.
struct Bench {
    client: Client,
    namespace: String,
    store: KubernetesStore,
}

impl Bench {
    async fn new() -> Self {
        let client = support::client().await;
        support::definitions(&client).await;
        let namespace = support::namespace(&client).await;
        let store = KubernetesStore::new(client.clone(), &namespace, MANAGER);
        Self { client, namespace, store }
    }

    /// The objects of a kind, as anyone with `kubectl` has them.
    fn by_hand<T: Object>(&self, plural: &str) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("union.io", "v1alpha1", T::KIND);
        Api::namespaced_with(
            self.client.clone(),
            &self.namespace,
            &ApiResource::from_gvk_with_plural(&kind, plural),
        )
    }

    async fn edit<T: Object>(
        &self,
        plural: &str,
        name: &str,
        edit: Value,
    ) -> Result<DynamicObject, kube::Error> {
        let api = self.by_hand::<T>(plural);
        api.patch(name, &PatchParams::default(), &Patch::Merge(edit)).await
    }

    /// A volume of two branches that is complete.
    async fn complete_volume(&self) -> VolumeSplit {
        let planned = |index: u32| {
            json!({"index": index, "node": "n", "pool": "p", "size": 1_u64 << 30, "usable": 1_u64 << 30,
                   "format": "directory"})
        };
        let split: VolumeSplit = serde_json::from_value(json!({
            "meta": {"name": "v"},
            "spec": {"volume": "v", "requestName": "v", "capacity": 2_u64 << 30, "accessModes": ["SingleNodeWriter"],
                     "parameters": {"strategy": "fewest"}, "branches": [planned(0), planned(1)], "nextIndex": 2}
        }))
        .expect("a volume");
        let mut split = self.store.splits().create(split).await.expect("made");
        let now = jiff::Timestamp::UNIX_EPOCH;
        set_condition(&mut split.status.conditions, now, "Pending", false, "Bound", "all branches were made");
        set_condition(&mut split.status.conditions, now, "Ready", true, "Bound", "all branches exist");
        (split.status.replicas, split.status.bound_replicas) = (2, 2);
        self.store.splits().update_status(split).await.expect("reported")
    }
}

type Events<T> = BoxStream<'static, Result<Event<T>, StoreError>>;

async fn next<T: Object>(events: &mut Events<T>) -> Event<T> {
    let event = tokio::time::timeout(std::time::Duration::from_secs(30), events.next()).await;
    event.expect("an event in time").expect("the watch goes on").expect("no error")
}

/// What is told until the next `Ready`: names with `+` for applied and `-` for deleted.
async fn until_ready<T: Object>(events: &mut Events<T>) -> Vec<String> {
    let mut told = Vec::new();
    loop {
        match next(events).await {
            Event::Applied(object) => told.push(format!("+{}", object.meta().name)),
            Event::Deleted(object) => told.push(format!("-{}", object.meta().name)),
            Event::Ready => return told,
        }
    }
}

#[tokio::test]
async fn an_object_that_is_not_understood_stops_neither_a_watch_nor_another_object() {
    let bench = Bench::new().await;
    let branches = bench.store.branches();
    branches.create(branch("odd", 0, "n")).await.expect("made");
    branches.create(branch("good", 0, "n")).await.expect("made");
    let mut before = branches.watch(Selector::All).await.expect("watched");
    assert_eq!(until_ready(&mut before).await, ["+good-0", "+odd-0"]);
    // The API server takes this for a time, and no program can count so far.
    let time = "9999-12-31T23:59:59Z";
    let condition =
        json!({"type": "A", "status": "True", "reason": "A", "message": "", "lastTransitionTime": time});
    let api = bench.by_hand::<Branch>("branches");
    let odd = json!({"status": {"conditions": [condition]}});
    api.patch_status("odd-0", &PatchParams::default(), &Patch::Merge(odd)).await.expect("taken");
    branches.create(branch("later", 0, "n")).await.expect("made");
    assert!(matches!(next(&mut before).await, Event::Applied(b) if b.meta.name == "later-0"));
    let mut after = branches.watch(Selector::All).await.expect("watched");
    assert_eq!(until_ready(&mut after).await, ["+good-0", "+later-0"]);
    let listed = branches.list(&Selector::All).await.expect("listed");
    assert_eq!(listed.iter().map(|b| b.meta.name.as_str()).collect::<Vec<_>>(), ["good-0", "later-0"]);
    let read = branches.get("odd-0").await;
    assert!(
        matches!(&read, Err(StoreError::Malformed { name, reason, .. })
            if name == "odd-0" && reason.contains("timestamp")),
        "{read:?}"
    );
    assert_eq!(bench.store.figures().malformed, 1, "one version of one object, told of once");
    branches.delete("odd-0", None).await.expect("deleted");
    assert!(
        matches!(next(&mut before).await, Event::Deleted(b) if b.meta.name == "odd-0"),
        "who was told of it before is told that it is gone"
    );
    branches.create(branch("last", 0, "n")).await.expect("made");
    assert!(
        matches!(next(&mut after).await, Event::Applied(b) if b.meta.name == "last-0"),
        "who was never told of it is not told that it is gone"
    );
}

#[tokio::test]
async fn what_went_while_the_api_server_forgot_is_told_as_deleted_and_nothing_is_told_twice() {
    let bench = Bench::new().await;
    let branches = bench.store.branches();
    for name in ["a", "b", "c"] {
        branches.create(branch(name, 0, "n")).await.expect("made");
    }
    // The first watch is opened from a version that the API server has forgotten.
    let (forget, client) = (Arc::new(AtomicBool::new(true)), bench.client.clone());
    let forgetful = tower::service_fn(move |mut request: http::Request<kube::client::Body>| {
        let (forget, client) = (forget.clone(), client.clone());
        async move {
            let uri = request.uri().to_string();
            if uri.contains("watch=true") && forget.swap(false, Ordering::SeqCst) {
                let (before, _) = uri.split_once("resourceVersion=").expect("a version");
                *request.uri_mut() = format!("{before}resourceVersion=1").parse().expect("a uri");
            }
            client.send(request).await
        }
    });
    let store = KubernetesStore::new(Client::new(forgetful, "default"), &bench.namespace, MANAGER);
    let mut events = store.branches().watch(Selector::All).await.expect("watched");
    assert_eq!(until_ready(&mut events).await, ["+a-0", "+b-0", "+c-0"]);
    branches.delete("b-0", None).await.expect("deleted");
    branches.delete("c-0", None).await.expect("deleted");
    let second = branches.create(branch("c", 0, "n")).await.expect("made anew");
    branches.create(branch("d", 0, "n")).await.expect("made");
    assert_eq!(until_ready(&mut events).await, ["-c-0", "+c-0", "+d-0", "-b-0"]);
    branches.delete("c-0", None).await.expect("deleted");
    assert!(matches!(next(&mut events).await, Event::Deleted(c) if c.meta.uid == second.meta.uid));
}

#[tokio::test]
async fn a_missing_permission_is_named_with_its_verb_and_resource() {
    let bench = Bench::new().await;
    let mut config = Config::infer().await.expect("a configuration");
    config.auth_info.impersonate = Some(format!("system:serviceaccount:{}:nobody", bench.namespace));
    let client = Client::try_from(config).expect("a client");
    let store = KubernetesStore::new(client, &bench.namespace, MANAGER);
    let mut stored = bench.store.branches().create(branch("v", 0, "n")).await.expect("made");
    stored.status.phase = BranchPhase::Bound;
    let refusals = [
        ("create", "branches", store.branches().create(branch("w", 0, "n")).await.map(drop)),
        ("get", "branches", store.branches().get("v-0").await.map(drop)),
        ("list", "branches", store.branches().list(&Selector::All).await.map(drop)),
        ("patch", "branches", store.branches().update(stored.clone()).await.map(drop)),
        ("patch", "branches/status", store.branches().update_status(stored).await.map(drop)),
        ("delete", "branches", store.branches().delete("v-0", None).await.map(drop)),
        ("list", "storagenodes", store.nodes().list(&Selector::All).await.map(drop)),
    ];
    for (verb, resource, result) in refusals {
        let message = result.expect_err("it is refused").to_string();
        for word in
            [format!("{verb:?}"), format!("{resource:?}"), "\"union.io\"".to_owned(), "deploy/".to_owned()]
        {
            assert!(message.contains(&word), "{word} is not in: {message}");
        }
    }
}

#[tokio::test]
async fn a_missing_namespace_is_named() {
    let bench = Bench::new().await;
    let store = KubernetesStore::new(bench.client.clone(), "not-there", MANAGER);
    let message = store.branches().create(branch("v", 0, "n")).await.expect_err("refused").to_string();
    assert!(message.contains("namespace not-there does not exist"), "{message}");
}

#[tokio::test]
async fn hand_edits_that_would_lose_data_are_refused() {
    let bench = Bench::new().await;
    let split = bench.complete_volume().await;
    let planned = |changes: &dyn Fn(&mut Vec<Value>)| {
        let mut branches: Vec<Value> = serde_json::from_value(json!(split.spec.branches)).expect("branches");
        changes(&mut branches);
        json!({"spec": {"branches": branches}})
    };
    let of_split = [
        ("another volume", json!({"spec": {"volume": "w"}})),
        ("another request", json!({"spec": {"requestName": "w"}})),
        ("other parameters", json!({"spec": {"parameters": {"strategy": "spread"}}})),
        ("no parameters", json!({"spec": {"parameters": null}})),
        ("a limit put in", json!({"spec": {"limit": 1}})),
        ("another mode", json!({"spec": {"volumeMode": "Block"}})),
        ("less capacity", json!({"spec": {"capacity": 1}})),
        ("a number used twice", json!({"spec": {"nextIndex": 0}})),
        ("no plan", json!({"spec": {"branches": null}})),
        ("a branch less", planned(&|b| drop(b.pop()))),
        ("a branch on another node", planned(&|b| b[0]["node"] = json!("m"))),
        ("a larger branch", planned(&|b| b[0]["size"] = json!(3_u64 << 30))),
        ("a branch in place of another", planned(&|b| b[0]["index"] = json!(7))),
        ("one number twice", planned(&|b| b[0]["index"] = json!(1))),
        ("a negative size", planned(&|b| b[0]["size"] = json!(-1))),
        ("a name that leaves its directory", planned(&|b| b[0]["pool"] = json!("../etc"))),
        ("no spec", json!({"spec": null})),
    ];
    for (what, edit) in of_split {
        let edited = bench.edit::<VolumeSplit>("volumesplits", "v", edit).await;
        assert!(matches!(&edited, Err(kube::Error::Api(s)) if s.code == 422), "{what}: {edited:?}");
    }
    bench.store.branches().create(branch("v", 0, "n")).await.expect("made");
    let of_branch = [
        ("id", json!("v-1")),
        ("volume", json!("w")),
        ("index", json!(1)),
        ("node", json!("m")),
        ("pool", json!("q")),
        ("size", json!(1)),
        ("usable", json!(1)),
        ("format", json!("image")),
        ("fsType", json!("xfs")),
        ("thin", json!(true)),
        ("acceptUnenforced", json!(true)),
        ("writeThrough", json!(false)),
    ];
    for (field, value) in of_branch {
        let edited = bench.edit::<Branch>("branches", "v-0", json!({"spec": {field: value}})).await;
        assert!(matches!(&edited, Err(kube::Error::Api(s)) if s.code == 422), "{field}: {edited:?}");
    }
    let stored = bench.store.splits().get("v").await.expect("readable");
    assert_eq!(stored, Some(split), "nothing of it was taken over");
}

#[tokio::test]
async fn what_was_used_once_keeps_its_plan_even_if_its_status_is_emptied() {
    let bench = Bench::new().await;
    let mut split = bench.complete_volume().await;
    split.spec.used = true;
    let mut split = bench.store.splits().update(split).await.expect("updated");
    split.status = Default::default();
    bench.store.splits().update_status(split).await.expect("updated");
    for edit in
        [json!({"spec": {"branches": []}}), json!({"spec": {"used": false}}), json!({"spec": {"used": null}})]
    {
        let edited = bench.edit::<VolumeSplit>("volumesplits", "v", edit).await;
        assert!(matches!(&edited, Err(kube::Error::Api(s)) if s.code == 422), "{edited:?}");
    }
}

#[tokio::test]
async fn an_object_whose_name_is_not_that_of_its_spec_is_refused() {
    let bench = Bench::new().await;
    let mut foreign = branch("v", 0, "n");
    foreign.meta.name = "w-0".to_owned();
    let message = bench.store.branches().create(foreign).await.expect_err("refused").to_string();
    assert!(message.contains("metadata.name must be spec.id"), "{message}");
}

#[tokio::test]
async fn a_status_that_was_edited_by_hand_is_the_writers_again_with_its_next_write() {
    let bench = Bench::new().await;
    let mut made = bench.store.branches().create(branch("v", 0, "n")).await.expect("made");
    made.status.phase = BranchPhase::Bound;
    bench.store.branches().update_status(made).await.expect("reported");
    let api = bench.by_hand::<Branch>("branches");
    let edit = json!({"status": {"phase": "Lost", "fsUuid": "mine", "reason": "by hand"}});
    api.patch_status("v-0", &PatchParams::default(), &Patch::Merge(edit)).await.expect("taken");
    let mut seen = bench.store.branches().get("v-0").await.expect("readable").expect("there");
    assert_eq!(seen.status.phase, BranchPhase::Lost);
    seen.status = Default::default();
    seen.status.phase = BranchPhase::Bound;
    let written = bench.store.branches().update_status(seen.clone()).await.expect("reported");
    assert_eq!(written.status, seen.status);
}

#[tokio::test]
async fn a_field_that_is_taken_out_of_a_spec_is_gone_and_labels_of_others_stay() {
    let bench = Bench::new().await;
    let mut split = bench.complete_volume().await;
    split.spec.consumer = Some("n".parse().expect("a node"));
    split.meta.labels.insert("mine".to_owned(), "1".to_owned());
    bench.store.splits().update(split).await.expect("updated");
    let labels = json!({"metadata": {"labels": {"yours": "2"}, "annotations": {"note": "kept"}}});
    bench.edit::<VolumeSplit>("volumesplits", "v", labels).await.expect("taken");
    let mut split = bench.store.splits().get("v").await.expect("readable").expect("there");
    split.spec.consumer = None;
    split.meta.labels.remove("mine");
    let split = bench.store.splits().update(split).await.expect("updated");
    assert_eq!(split.spec.consumer, None);
    let there = bench.by_hand::<VolumeSplit>("volumesplits").get("v").await.expect("there");
    assert_eq!(there.metadata.labels, Some([("yours".to_owned(), "2".to_owned())].into()));
    assert_eq!(there.metadata.annotations, Some([("note".to_owned(), "kept".to_owned())].into()));
}

#[tokio::test]
async fn a_node_with_the_longest_name_has_its_branches() {
    let bench = Bench::new().await;
    let label = ["n".repeat(63), "o".repeat(63), "d".repeat(63), "e".repeat(61)].join(".");
    assert_eq!(label.len(), 253);
    let other = format!("{}x", &label[..252]);
    for (volume, node) in [("a", &label), ("b", &other)] {
        let mut long = branch(volume, 0, node);
        for value in long.meta.labels.values_mut() {
            *value = union_csi::store::object::label_value(value);
        }
        bench.store.branches().create(long).await.expect("made");
    }
    let node: StorageNode =
        serde_json::from_value(json!({"meta": {"name": label}, "spec": {"node": label}})).expect("a node");
    bench.store.nodes().create(node).await.expect("made");
    let selector = Selector::Node(label.parse().expect("a node"));
    let mut events = bench.store.branches().watch(selector.clone()).await.expect("watched");
    assert_eq!(until_ready(&mut events).await, ["+a-0"]);
    assert_eq!(bench.store.nodes().list(&selector).await.expect("listed").len(), 1);
    bench.store.nodes().delete(&label, None).await.expect("deleted");
}

#[tokio::test]
async fn kubectl_get_shows_sizes_for_people() {
    let bench = Bench::new().await;
    bench.complete_volume().await;
    let mut made = bench.store.branches().create(branch("v", 0, "n")).await.expect("made");
    (made.status.phase, made.status.bytes_used) = (BranchPhase::Bound, Bytes::new(3 << 19));
    bench.store.branches().update_status(made).await.expect("reported");
    for (plural, wanted) in [
        ("volumesplits", vec!["v", "2 GiB", "2/2", "n", "", "Ready"]),
        ("branches", vec!["v-0", "v", "n", "pool", "1 GiB", "1.5 MiB", "directory", "Bound"]),
    ] {
        let uri = format!("/apis/union.io/v1alpha1/namespaces/{}/{plural}", bench.namespace);
        let request =
            http::Request::get(uri).header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
        let table: Value =
            bench.client.request(request.body(Vec::new()).expect("a request")).await.expect("a table");
        let cells = table["rows"][0]["cells"].as_array().expect("a row").iter();
        let cells: Vec<&str> = cells.map(|cell| cell.as_str().unwrap_or_default()).collect();
        assert_eq!(cells[..wanted.len()], wanted, "{plural}");
    }
}
