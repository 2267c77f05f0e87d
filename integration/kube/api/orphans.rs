//! Forgetting a node, and the orphan scan, on a real API server with the real controller manager.

use std::process::{Command, Output};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::task::AbortHandle;
use union_csi::controllers::cluster::{Cluster, DRIVER};
use union_csi::controllers::lease::Claim;
use union_csi::controllers::orphans::scan::{Orphan, OrphanKind};
use union_csi::controllers::orphans::{Findings, OrphanScan};
use union_csi::domain::unclaimed::{Unclaimed, UnclaimedBranch};
use union_csi::store::object::{LABEL_EPHEMERAL, StorageNode, VolumeSplit, condition};
use union_csi::store::{Selector, StoreError, contract};

use crate::provisioner::bench::Bench;

/// A bench whose volumes all lie on `n2`, and that node's agent.
async fn lossy() -> (Bench, AbortHandle) {
    let mut bench = Bench::with_class(0, json!({})).await;
    let agent = bench.node("n2", &[("a", 20)]).await;
    (bench, agent)
}

/// The program with these words.
async fn union_csi(words: Vec<String>) -> Output {
    let run = move || Command::new(env!("CARGO_BIN_EXE_union-csi")).args(words).output();
    tokio::task::spawn_blocking(run).await.expect("ended").expect("started")
}

async fn forget(bench: &Bench, node: &str, more: &[&str]) -> (Option<i32>, String) {
    let mut words = ["forget-node", node, "--namespace", &bench.namespace].map(str::to_owned).to_vec();
    words.extend(more.iter().map(|word| (*word).to_owned()));
    let output = union_csi(words).await;
    let text = [output.stdout, output.stderr].map(|out| String::from_utf8_lossy(&out).into_owned()).concat();
    (output.status.code(), text)
}

/// The node's last report is an hour old.
async fn silence(bench: &Bench, node: &str) {
    let there = bench.store.nodes().get(node).await.expect("an answer").expect("it is there");
    let mut status = there.status.clone();
    status.heartbeat = Some(Timestamp::now().checked_sub(SignedDuration::from_hours(1)).expect("a time"));
    bench.store.nodes().update_status(StorageNode { status, ..there }).await.expect("written");
}

fn has_lost(split: Option<&VolumeSplit>) -> bool {
    split.is_some_and(|split| condition(&split.status.conditions, "Degraded").is_some_and(|c| c.status))
}

#[tokio::test]
async fn a_node_that_is_gone_for_good_is_forgotten_and_its_volumes_can_be_deleted() {
    let (mut bench, agent) = lossy().await;
    let node = bench.node_name("n2");
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    agent.abort();

    let (code, told) = forget(&bench, &node, &["--accept-data-loss"]).await;
    assert_eq!(code, Some(1), "its report is fresh: {told}");
    assert!(told.contains("is alive"), "{told}");
    silence(&bench, &node).await;
    for (more, wanted) in [(&[] as &[&str], 2), (&["--accept-data-loss", "--dry-run"], 0)] {
        let (code, told) = forget(&bench, &node, more).await;
        assert_eq!(code, Some(wanted), "{told}");
        assert!(told.contains("1 of 1") && told.contains("data"), "{told}");
        assert!(
            !bench.store.branches().list(&Selector::Node(node.parse().unwrap())).await.unwrap().is_empty()
        );
        assert!(bench.store.nodes().get(&node).await.unwrap().is_some());
    }

    let (code, told) = forget(&bench, &node, &["--accept-data-loss"]).await;
    assert_eq!(code, Some(0), "{told}");
    assert!(bench.store.nodes().get(&node).await.unwrap().is_none());
    let split = bench.split_is(&name, has_lost).await.unwrap();
    let ready = condition(&split.status.conditions, "Ready").unwrap();
    assert_eq!((ready.status, ready.reason.as_str()), (false, "BranchLost"));
    let (code, told) = forget(&bench, &node, &["--accept-data-loss"]).await;
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("nothing to forget"), "{told}");

    // It comes back after all: nothing asks it to make or to remove anything.
    bench.node("n2", &[("a", 20)]).await;
    bench.claim("other", "5Gi").await;
    bench.bound("other").await;
    let volume = name.parse().unwrap();
    assert!(bench.store.branches().list(&Selector::Volume(volume)).await.unwrap().is_empty());
    assert!(has_lost(bench.split(&name).await.as_ref()));

    bench.delete_claim("data").await;
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_volume_whose_deletion_waits_for_a_node_goes_when_the_node_is_forgotten() {
    let (bench, agent) = lossy().await;
    let node = bench.node_name("n2");
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    agent.abort();
    bench.delete_claim("data").await;
    bench.split_is(&name, |split| split.is_some_and(|s| s.meta.deleting.is_some())).await;
    silence(&bench, &node).await;
    let (code, told) = forget(&bench, &node, &["--accept-data-loss"]).await;
    assert_eq!(code, Some(0), "{told}");
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_kubernetes_node_that_is_deleted_leaves_all_data_and_objects_alone() {
    let (bench, agent) = lossy().await;
    let node = bench.node_name("n2");
    let nodes: Api<Node> = Api::all(bench.client.clone());
    let new: Node = serde_json::from_value(json!({"metadata": {"name": node}})).unwrap();
    nodes.create(&PostParams::default(), &new).await.unwrap();
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    let before = (bench.split(&name).await, bench.store.branches().list(&Selector::All).await.unwrap());
    nodes.delete(&node, &DeleteParams::default()).await.unwrap();
    // Another volume is made and removed afterwards, so this one had its time.
    let other = bench.claim("other", "5Gi").await;
    bench.bound("other").await;
    bench.delete_claim("other").await;
    bench.gone(&other).await;
    agent.abort();
    assert_eq!(
        (bench.split(&name).await, bench.store.branches().list(&Selector::All).await.unwrap()),
        before
    );
    assert!(bench.store.nodes().get(&node).await.unwrap().is_some());
    assert!(bench.volumes().get(&name).await.is_ok());
}

#[tokio::test]
async fn a_volume_that_is_retained_without_its_persistent_volume_is_told_with_the_command_that_removes_it() {
    let bench = Bench::with_class(20, json!({"reclaimPolicy": "Retain"})).await;
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    let list = || union_csi(["orphans", "-n", &bench.namespace, "-o", "json"].map(str::to_owned).to_vec());
    let told = |output: Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let before = told(list().await);
    assert!(!before.contains(&name), "it is in use: {before}");
    bench.delete_claim("data").await;
    bench.volumes().delete(&name, &DeleteParams::default()).await.unwrap();
    bench.volume_is(&name, |volume| volume.is_none()).await;
    let output = list().await;
    assert!(output.status.success());
    let found = told(output);
    let remedy = format!("kubectl -n {} delete volumesplit {name}", bench.namespace);
    assert!(found.contains(&remedy) && found.contains("\"retained\""), "{found}");
    assert!(bench.split(&name).await.is_some(), "nothing is deleted");
}

/// Later than everything that the tests make is young for.
fn in_two_hours() -> Timestamp {
    Timestamp::now().checked_add(SignedDuration::from_hours(2)).expect("a time")
}

/// A scanner as the leader has it.
fn scanner(bench: &Bench) -> (OrphanScan, Findings) {
    let cluster =
        Cluster { client: bench.client.clone(), namespace: bench.namespace.clone(), claim: Claim::always() };
    let findings = Findings::default();
    (OrphanScan::new(cluster, bench.store.clone(), in_two_hours).telling(findings.clone()), findings)
}

/// What of a scan lies in this test's own objects: PersistentVolumes and nodes are of the whole cluster.
fn own<'o>(orphans: &'o [Orphan], names: &[&str]) -> Vec<&'o Orphan> {
    orphans.iter().filter(|orphan| names.contains(&orphan.name.as_str())).collect()
}

fn a_split(name: &str, claim: &str) -> VolumeSplit {
    let split = json!({
        "meta": {"name": name, "labels": {"union.io/claim": claim}},
        "spec": {"volume": name, "requestName": name, "capacity": 1 << 30, "accessModes": ["SingleNodeWriter"]},
    });
    serde_json::from_value(split).expect("a volume")
}

async fn a_volume(bench: &Bench, name: &str, handle: &str) {
    let volume = json!({
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "5Gi"}, "storageClassName": "none",
            "persistentVolumeReclaimPolicy": "Retain", "csi": {"driver": DRIVER, "volumeHandle": handle},
        },
    });
    let volume = serde_json::from_value(volume).expect("a volume");
    bench.volumes().create(&PostParams::default(), &volume).await.expect("a volume");
}

#[tokio::test]
async fn the_leader_finds_objects_that_nothing_needs_and_leaves_all_of_them_alone() {
    // Without a provisioner, which would remove some of it.
    let bench = Bench::new(20).await;
    let node = bench.node_name("n1");
    bench.store.splits().create(a_split("left", "a-claim-that-is-gone")).await.unwrap();
    bench.store.splits().create(a_split("served", "a-claim-that-is-gone")).await.unwrap();
    for branch in [contract::branch("gone", 0, &node), contract::branch("far", 0, "no-such-node")] {
        bench.store.branches().create(branch).await.unwrap();
    }
    let empty = format!("empty-{}", bench.namespace);
    let whole = format!("whole-{}", bench.namespace);
    a_volume(&bench, &empty, "nothing").await;
    a_volume(&bench, &whole, "served").await;

    // A volume that this version does not understand is left out of lists: what is its own must not be taken for nobody's.
    bench.store.splits().create(a_split("odd", "a-claim-that-is-gone")).await.unwrap();
    // The splitter may be as quick.
    let made = bench.store.branches().create(contract::branch("odd", 0, &node)).await;
    assert!(matches!(made, Ok(_) | Err(StoreError::Exists { .. })), "{made:?}");
    let split = bench.split_is("odd", |s| s.is_some_and(|s| !s.status.conditions.is_empty())).await.unwrap();
    let mut conditions = serde_json::to_value(&split.status.conditions).unwrap();
    conditions[0]["lastTransitionTime"] = "9999-12-31T23:59:59Z".into();
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("union.io", "v1alpha1", "VolumeSplit"));
    let by_hand: Api<DynamicObject> = Api::namespaced_with(bench.client.clone(), &bench.namespace, &kind);
    let odd = json!({"status": {"conditions": conditions}});
    by_hand.patch_status("odd", &PatchParams::default(), &Patch::Merge(odd)).await.unwrap();

    let names = ["left", "served", "odd", "odd-0", "gone-0", "far-0", &empty, &whole];
    let (mut scan, findings) = scanner(&bench);
    let first = scan.scan().await.unwrap();
    assert_eq!(findings.read().last.as_ref(), Some(&first));
    let found = own(&first.orphans, &names);
    let told: Vec<_> = found.iter().map(|o| (o.kind, o.name.as_str())).collect();
    assert_eq!(
        told,
        [
            (OrphanKind::Branch, "far-0"),
            (OrphanKind::Branch, "gone-0"),
            (OrphanKind::Volume, "left"),
            (OrphanKind::PersistentVolume, empty.as_str()),
        ],
        "{first:?}"
    );
    assert!(found[0].remedy.starts_with("union-csi forget-node no-such-node"), "{found:?}");
    assert_eq!(found[1].remedy, format!("kubectl -n {} delete branch gone-0", bench.namespace));
    assert_eq!(found[3].size.map(|size| size.get()), Some(5 << 30));
    assert_eq!(first.counts[&OrphanKind::Volume], 1);

    // Once more: what was known keeps its time, what was removed is told no more.
    bench.store.splits().delete("left", None).await.unwrap();
    bench.split_is("left", |split| split.is_none()).await;
    let second = scan.scan().await.unwrap();
    let found = own(&second.orphans, &names);
    assert_eq!(
        found.iter().map(|o| o.name.as_str()).collect::<Vec<_>>(),
        ["far-0", "gone-0", empty.as_str()]
    );
    assert!(found.iter().all(|o| o.first_seen == first.at), "{found:?}");

    // Nothing was deleted by it.
    for branch in ["gone-0", "far-0"] {
        assert!(bench.store.branches().get(branch).await.unwrap().is_some());
    }
    for volume in [&empty, &whole] {
        bench.volumes().get(volume).await.unwrap();
    }
}

#[tokio::test]
async fn what_nodes_report_as_nobodys_is_told_with_the_node_and_the_command() {
    let bench = Bench::new(20).await;
    let node = bench.node_name("n1");
    for (name, consumer) in [("podless", node.as_str()), ("in-use", &node), ("nodeless", "no-such-node")] {
        let split = json!({
            "meta": {"name": name},
            "spec": {"volume": name, "requestName": name, "capacity": 1 << 30, "accessModes": ["SingleNodeWriter"],
                     "ephemeral": true, "consumer": consumer, "topology": [consumer],
                     "parameters": {"branchFormat": "directory"}},
        });
        bench.store.splits().create(serde_json::from_value(split).expect("a volume")).await.unwrap();
    }
    let planned = bench
        .split_is("podless", |s| {
            s.is_some_and(|s| !s.status.conditions.is_empty() && s.status.bound_replicas > 0)
        })
        .await
        .unwrap();
    let branch = planned.spec.volume.branch(planned.spec.branches[0].index);
    let branch = bench.store.branches().get(branch.as_str()).await.unwrap().unwrap();
    assert!(branch.meta.labels.contains_key(LABEL_EPHEMERAL), "its node knows it by this: {branch:?}");

    let there = bench.store.nodes().get(&node).await.unwrap().unwrap();
    let stray = |name: &str| UnclaimedBranch {
        pool: "a".parse().unwrap(),
        name: name.into(),
        path: format!("/pools/a/branches/{name}"),
        size: Some(union_csi::domain::Bytes::gib(3)),
        problem: String::new(),
    };
    let mut status = there.status.clone();
    status.abandoned = vec!["podless".parse().unwrap()];
    status.unclaimed = Unclaimed::of(vec![stray("old-0"), stray(&branch.meta.name)]);
    status.unclaimed.count = 7;
    let written =
        bench.store.nodes().update_status(StorageNode { status: status.clone(), ..there }).await.unwrap();
    assert_eq!(written.status, status, "the definition knows the fields");

    let (mut scan, _) = scanner(&bench);
    let scan = scan.scan().await.unwrap();
    let stray = format!("{node}:/pools/a/branches/old-0");
    let found = own(&scan.orphans, &["podless", "in-use", "nodeless", &stray]);
    let told: Vec<_> = found.iter().map(|o| (o.kind, o.name.as_str())).collect();
    assert_eq!(
        told,
        [
            (OrphanKind::Ephemeral, "nodeless"),
            (OrphanKind::Ephemeral, "podless"),
            (OrphanKind::Unclaimed, stray.as_str())
        ]
    );
    assert_eq!(found[2].remedy, format!("on {node}: rm -r /pools/a/branches/old-0"));
    assert!(scan.counts[&OrphanKind::Unclaimed] >= 6, "one, and five that are not named: {:?}", scan.counts);
    bench.store.nodes().delete(&node, None).await.unwrap();
}
