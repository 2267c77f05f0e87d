//! CSIStorageCapacity on a real API server.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use union_csi::controllers::capacity::CapacityPublisher;
use union_csi::controllers::cluster::{Cluster, DRIVER, TOPOLOGY_KEY};
use union_csi::controllers::lease::Claim;
use union_csi::controllers::splitter::{Rooms, Splitter};
use union_csi::domain::Bytes;
use union_csi::store::object::{FINALIZER, VolumeSplit};

use crate::provisioner::bench::{Bench, until};

/// A publisher with its own splitter; both end with the handle.
fn publisher(bench: &Bench) -> JoinSet<()> {
    let rooms = Rooms::default();
    let mut tasks = JoinSet::new();
    let splitter = Splitter::new(bench.store.clone(), Timestamp::now).telling(rooms.clone());
    tasks.spawn(splitter.run(CancellationToken::new()));
    let cluster =
        Cluster { client: bench.client.clone(), namespace: bench.namespace.clone(), claim: Claim::always() };
    tasks.spawn(CapacityPublisher::new(cluster, rooms, Timestamp::now).run(CancellationToken::new()));
    tasks
}

fn api(bench: &Bench) -> Api<CSIStorageCapacity> {
    Api::namespaced(bench.client.clone(), &bench.namespace)
}

/// What is published for the test's class and nodes: node to object.
async fn published(bench: &Bench) -> BTreeMap<String, CSIStorageCapacity> {
    let mut all = BTreeMap::new();
    for object in api(bench).list(&ListParams::default()).await.expect("an answer") {
        let node = object.node_topology.clone().and_then(|t| t.match_labels?.remove(TOPOLOGY_KEY));
        if let Some(node) = node
            && object.storage_class_name == bench.class
            && let Some(short) = node.strip_suffix(&format!("-{}", bench.namespace))
        {
            assert!(all.insert(short.to_owned(), object).is_none(), "one for each class and node");
        }
    }
    all
}

fn maximum(object: &CSIStorageCapacity) -> &str {
    &object.maximum_volume_size.as_ref().expect("a size").0
}

async fn maxima(bench: &Bench) -> BTreeMap<String, String> {
    published(bench).await.into_iter().map(|(node, object)| (node, maximum(&object).to_owned())).collect()
}

/// Waits until exactly this is published.
async fn is_published(bench: &Bench, wanted: &[(&str, &str)]) {
    let wanted = wanted.iter().map(|(node, size)| ((*node).to_owned(), (*size).to_owned())).collect();
    until(|| maxima(bench), |all| *all == wanted).await;
}

#[tokio::test]
async fn each_node_with_pools_is_told_of_for_each_class_and_what_goes_is_told_of_no_more() {
    let mut bench = Bench::new(2).await;
    let _tasks = publisher(&bench);
    bench.node("n2", &[("a", 20), ("b", 10)]).await;
    bench.node("n3", &[]).await;
    // A class that is made later is published promptly.
    bench.class(json!({})).await;
    is_published(&bench, &[("n1", "2Gi"), ("n2", "30Gi")]).await;
    let one = &published(&bench).await["n2"];
    assert_eq!(one.capacity.as_ref().unwrap().0, "30Gi");
    assert_eq!(one.labels()["csi.storage.k8s.io/drivername"], DRIVER);
    assert_eq!(one.labels()["csi.storage.k8s.io/managed-by"], "union-csi");

    bench.store.nodes().delete(&bench.node_name("n1"), None).await.unwrap();
    is_published(&bench, &[("n2", "30Gi")]).await;
    let classes: Api<k8s_openapi::api::storage::v1::StorageClass> = Api::all(bench.client.clone());
    classes.delete(&bench.class, &DeleteParams::default()).await.unwrap();
    is_published(&bench, &[]).await;
}

#[tokio::test]
async fn nodes_that_reach_each_other_have_the_room_of_all_also_one_without_pools() {
    let mut bench = Bench::new(2).await;
    let _tasks = publisher(&bench);
    bench.node("n2", &[("a", 20), ("b", 10)]).await;
    bench.node("n3", &[]).await;
    bench.node("n4", &[("a", 5)]).await;
    bench.class(json!({})).await;
    is_published(&bench, &[("n1", "2Gi"), ("n2", "30Gi"), ("n4", "5Gi")]).await;
    bench.carry(&["n1", "n2", "n3"]).await;
    is_published(&bench, &[("n1", "32Gi"), ("n2", "32Gi"), ("n3", "32Gi"), ("n4", "5Gi")]).await;
    // What is told works, to the byte.
    let split = |name: &str, bytes: Bytes| -> VolumeSplit {
        serde_json::from_value(json!({
            "meta": {"name": name, "finalizers": [FINALIZER]},
            "spec": {
                "volume": name, "requestName": name, "capacity": bytes.get(), "accessModes": ["SingleNodeWriter"],
                "consumer": bench.node_name("n3"),
                "parameters": {"branchFormat": "directory", "nodeSelector": format!("test={}", bench.namespace)},
            },
        }))
        .unwrap()
    };
    let more = Bytes::new(Bytes::gib(32).get() + 1);
    bench.store.splits().create(split("more", more)).await.unwrap();
    until(
        || bench.split("more"),
        |split| split.as_ref().is_some_and(|split| split.status.largest == Some(Bytes::gib(32))),
    )
    .await;
    bench.store.splits().create(split("all", Bytes::gib(32))).await.unwrap();
    is_published(&bench, &[("n1", "0"), ("n2", "0"), ("n3", "0"), ("n4", "5Gi")]).await;
    for name in ["more", "all"] {
        bench.store.splits().delete(name, None).await.unwrap();
    }
    is_published(&bench, &[("n1", "32Gi"), ("n2", "32Gi"), ("n3", "32Gi"), ("n4", "5Gi")]).await;
}

#[tokio::test]
async fn a_burst_of_volumes_is_counted_to_the_byte_in_a_few_writes() {
    let bench = Bench::new(100).await;
    bench.class(json!({})).await;
    let _tasks = publisher(&bench);
    is_published(&bench, &[("n1", "100Gi")]).await;
    let first = published(&bench).await["n1"].clone();
    let watch = {
        let (api, from) = (api(&bench), first.resource_version().unwrap());
        let name = first.name_any();
        tokio::spawn(async move {
            use futures::StreamExt;
            let only = kube::api::WatchParams::default().fields(&format!("metadata.name={name}"));
            let mut events = api.watch(&only, &from).await.expect("watched").boxed();
            let mut writes = 0;
            while let Some(Ok(kube::api::WatchEvent::Modified(object))) = events.next().await {
                writes += 1;
                if maximum(&object) == "40Gi" {
                    break;
                }
            }
            writes
        })
    };
    let begun = std::time::Instant::now();
    let split = |number: u32| -> VolumeSplit {
        let name = format!("v{number}");
        serde_json::from_value(json!({
            "meta": {"name": name, "finalizers": [FINALIZER]},
            "spec": {
                "volume": name, "requestName": name, "capacity": Bytes::gib(1).get(),
                "accessModes": ["SingleNodeWriter"],
                "parameters": {"branchFormat": "directory", "nodeSelector": format!("test={}", bench.namespace)},
            },
        }))
        .unwrap()
    };
    for made in futures::future::join_all((0..60).map(|n| bench.store.splits().create(split(n)))).await {
        made.expect("made");
    }
    is_published(&bench, &[("n1", "40Gi")]).await;
    let writes = watch.await.unwrap();
    let allowed = begun.elapsed().as_secs() + 2;
    assert!(writes <= allowed, "{writes} writes for 60 volumes, {allowed} allowed");
    assert!(writes < 60);
}

#[tokio::test]
async fn objects_that_are_deleted_edited_or_too_many_are_put_right_and_foreign_ones_stay() {
    let mut bench = Bench::new(5).await;
    let foreign = |name: &str| -> CSIStorageCapacity {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"csi.storage.k8s.io/drivername": DRIVER}},
            "storageClassName": "another", "capacity": "1Gi",
        }))
        .unwrap()
    };
    api(&bench).create(&PostParams::default(), &foreign("union-foreign")).await.unwrap();
    let mut stray = foreign("stray");
    stray.labels_mut().insert("csi.storage.k8s.io/managed-by".to_owned(), "union-csi".to_owned());
    api(&bench).create(&PostParams::default(), &stray).await.unwrap();
    bench.class(json!({})).await;
    let tasks = publisher(&bench);
    is_published(&bench, &[("n1", "5Gi")]).await;
    until(|| async { api(&bench).get_opt("stray").await.unwrap().is_none() }, |gone| *gone).await;

    let name = published(&bench).await["n1"].name_any();
    let edit = json!({"maximumVolumeSize": "900Gi"});
    api(&bench).patch(&name, &PatchParams::default(), &Patch::Merge(edit)).await.unwrap();
    is_published(&bench, &[("n1", "5Gi")]).await;
    api(&bench).delete(&name, &DeleteParams::default()).await.unwrap();
    is_published(&bench, &[("n1", "5Gi")]).await;

    // Another leader goes on with the same object, and removes what went meanwhile.
    let uid = published(&bench).await["n1"].uid();
    drop(tasks);
    bench.report(&bench.node_name("n1"), &[("a", 1)]).await;
    let tasks = publisher(&bench);
    is_published(&bench, &[("n1", "1Gi")]).await;
    assert_eq!(published(&bench).await["n1"].uid(), uid);
    drop(tasks);

    // Our name, taken by another while nobody led.
    api(&bench).delete(&name, &DeleteParams::default()).await.unwrap();
    let taken = api(&bench).create(&PostParams::default(), &foreign(&name)).await.unwrap();
    let _tasks = publisher(&bench);
    // Another node is published after that, so the first had its time.
    bench.node("n2", &[("a", 3)]).await;
    is_published(&bench, &[("n2", "3Gi")]).await;
    let still = api(&bench).get(&name).await.unwrap();
    assert_eq!(still.resource_version(), taken.resource_version());
    assert!(api(&bench).get_opt("union-foreign").await.unwrap().is_some());
}

#[tokio::test]
async fn a_wrong_class_is_told_nothing_of_and_a_rest_writes_nothing() {
    let mut bench = Bench::new(5).await;
    bench.class(json!({"parameters": {"sploitQuantum": "1Gi"}})).await;
    let _tasks = publisher(&bench);
    let right = format!("{}-right", bench.class);
    let wrong = std::mem::replace(&mut bench.class, right);
    bench.class(json!({})).await;
    is_published(&bench, &[("n1", "5Gi")]).await;
    let all = api(&bench).list(&ListParams::default()).await.unwrap();
    assert!(all.iter().all(|object| object.storage_class_name != wrong), "{all:#?}");
    let before = published(&bench).await["n1"].resource_version();
    // Nothing new is told by an agent that reports again, or by hardly a difference.
    bench.report(&bench.node_name("n1"), &[("a", 5)]).await;
    // Another node is published after that, so the first had its time.
    bench.node("n2", &[("a", 1)]).await;
    is_published(&bench, &[("n1", "5Gi"), ("n2", "1Gi")]).await;
    assert_eq!(published(&bench).await["n1"].resource_version(), before);
}
