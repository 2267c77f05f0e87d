//! Forgetting a node, and the orphan scan, on a real API server with the real controller manager.

use std::process::{Command, Output};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::json;
use tokio::task::AbortHandle;
use union_csi::store::Selector;
use union_csi::store::object::{StorageNode, VolumeSplit, condition};

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
