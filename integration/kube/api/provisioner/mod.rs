//! The provisioner on a real API server with the real controller manager.

pub mod bench;
mod trouble;

use serde_json::json;
use union_csi::controllers::cluster::TOPOLOGY_KEY;
use union_csi::domain::Bytes;

use bench::{Bench, until};

fn delayed() -> serde_json::Value {
    json!({"volumeBindingMode": "WaitForFirstConsumer"})
}

fn retain() -> serde_json::Value {
    json!({"reclaimPolicy": "Retain"})
}

fn phase_is(volume: Option<&k8s_openapi::api::core::v1::PersistentVolume>, phase: &str) -> bool {
    volume.and_then(|v| v.status.as_ref()).and_then(|s| s.phase.as_deref()) == Some(phase)
}

#[tokio::test]
async fn a_claim_is_bound_to_exactly_what_it_asked_for_and_goes_with_all_of_it() {
    let bench = Bench::with_class(20, json!({"mountOptions": ["noatime"]})).await;
    let name = bench.claim("data", "5Gi").await;
    let volume = bench.bound("data").await;
    assert_eq!(volume.metadata.name.as_deref(), Some(name.as_str()));
    let spec = serde_json::to_value(volume.spec).unwrap();
    assert_eq!(spec["capacity"], json!({"storage": "5Gi"}));
    assert_eq!(spec["csi"]["volumeHandle"], json!(name));
    assert_eq!(spec["mountOptions"], json!(["noatime"]));
    let terms = &spec["nodeAffinity"]["required"]["nodeSelectorTerms"];
    assert_eq!(
        *terms,
        json!([{"matchExpressions": [{"key": TOPOLOGY_KEY, "operator": "In", "values": [bench.node_name("n1")]}]}])
    );
    assert_eq!(bench.split(&name).await.unwrap().status.capacity, Bytes::gib(5));
    let told = bench.told("data", "ProvisioningSucceeded", "1 branch on node").await;
    assert!(told.contains("a 5 GiB"), "{told}");
    bench.told("data", "Provisioning", "5Gi").await;

    bench.delete_claim("data").await;
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_delayed_claim_is_made_on_the_node_of_its_pod_and_given_back_where_that_has_no_room() {
    let mut bench = Bench::with_class(2, delayed()).await;
    bench.node("n2", &[("a", 20)]).await;
    let name = bench.claim("data", "5Gi").await;
    let (small, large) = (bench.node_name("n1"), bench.node_name("n2"));
    bench.select("data", &small).await;
    let told = bench.told("data", "ProvisioningFailed", &small).await;
    assert!(told.contains("2Gi"), "the largest size that would work: {told}");
    let selected = |claim: &k8s_openapi::api::core::v1::PersistentVolumeClaim| {
        claim
            .metadata
            .annotations
            .as_ref()
            .is_some_and(|a| a.contains_key("volume.kubernetes.io/selected-node"))
    };
    bench.claim_is("data", |claim| !selected(claim)).await;
    bench.gone(&name).await;
    bench.select("data", &large).await;
    let volume = bench.bound("data").await;
    let affinity = serde_json::to_string(&volume.spec.unwrap().node_affinity).unwrap();
    assert!(affinity.contains(&large), "{affinity}");
}

#[tokio::test]
async fn a_claim_that_is_too_large_is_told_why_and_binds_by_itself_when_a_pool_is_added() {
    let bench = Bench::with_class(3, json!({})).await;
    let name = bench.claim("data", "10Gi").await;
    let told = bench.told("data", "ProvisioningFailed", "the largest volume that fits now is 3Gi").await;
    assert!(told.contains("n1") && told.contains("/a: it could give 3Gi"), "{told}");
    bench.report(&bench.node_name("n1"), &[("a", 3), ("b", 9)]).await;
    bench.bound("data").await;
    bench.told("data", "ProvisioningSucceeded", "2 branches on node").await;
    assert_eq!(bench.split(&name).await.unwrap().status.replicas, 2);
}

#[tokio::test]
async fn a_claim_larger_than_any_node_binds_over_two_nodes_that_reach_each_other() {
    let mut bench = Bench::with_class(6, json!({})).await;
    bench.node("n2", &[("a", 6)]).await;
    let name = bench.claim("data", "10Gi").await;
    let told = bench.told("data", "ProvisioningFailed", "the largest volume that fits").await;
    assert!(told.contains("nodes cannot reach each other's branches"), "{told}");
    bench.carry(&["n1", "n2"]).await;
    let volume = bench.bound("data").await;
    let split = bench.split(&name).await.unwrap();
    let mut owners: Vec<String> = split.spec.branches.iter().map(|b| b.node.to_string()).collect();
    owners.sort();
    assert_eq!(owners, [bench.node_name("n1"), bench.node_name("n2")]);
    let spec = serde_json::to_value(volume.spec).unwrap();
    assert_eq!(
        spec["nodeAffinity"]["required"]["nodeSelectorTerms"],
        json!([
            {"matchExpressions": [{"key": TOPOLOGY_KEY, "operator": "In", "values": owners}]},
            {"matchExpressions": [{"key": "union.csi.union.io/nfs", "operator": "In", "values": ["true"]}]},
        ])
    );
    bench.told("data", "ProvisioningSucceeded", "2 branches on 2 nodes").await;
    bench.delete_claim("data").await;
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_wrong_parameter_is_named_once_and_nothing_is_made() {
    let bench = Bench::with_class(20, json!({"parameters": {"sploitQuantum": "1Gi"}})).await;
    let name = bench.claim("data", "5Gi").await;
    let told = bench.told("data", "ProvisioningFailed", "sploitQuantum").await;
    assert!(told.contains("splitQuantum"), "what was meant: {told}");
    // Another claim is served afterwards, so the first had its time.
    bench.claim("other", "5Gi").await;
    bench.told("other", "ProvisioningFailed", "sploitQuantum").await;
    assert!(bench.split(&name).await.is_none());
    let events = bench.events("data").await;
    assert_eq!(events.len(), 1, "{events:#?}");
    assert_eq!(events[0].count, Some(1));
}

#[tokio::test]
async fn a_retained_volume_outlives_its_claim_and_its_persistent_volume() {
    let bench = Bench::with_class(20, retain()).await;
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    bench
        .split_is(&name, |split| split.is_some_and(|s| s.meta.labels.contains_key("union.io/retained")))
        .await;
    bench.delete_claim("data").await;
    bench.volume_is(&name, |volume| phase_is(volume, "Released")).await;
    bench.volumes().delete(&name, &Default::default()).await.unwrap();
    bench.volume_is(&name, |volume| volume.is_none()).await;
    // Another claim is made and removed afterwards, so this one had its time.
    let other = bench.claim("other", "5Gi").await;
    bench.bound("other").await;
    bench.delete_claim("other").await;
    bench.volume_is(&other, |volume| phase_is(volume, "Released")).await;
    let split = bench.split(&name).await.expect("kept");
    assert_eq!(split.meta.deleting, None);
}

#[tokio::test]
async fn a_claim_that_goes_while_its_volume_is_being_made_leaves_nothing() {
    let bench = Bench::with_class(2, json!({})).await;
    let name = bench.claim("data", "5Gi").await;
    bench.split_is(&name, |split| split.is_some()).await;
    bench.delete_claim("data").await;
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_persistent_volume_deleted_by_hand_goes_after_its_claim_with_its_volume() {
    let bench = Bench::with_class(20, json!({})).await;
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    bench.volumes().delete(&name, &Default::default()).await.unwrap();
    bench.volume_is(&name, |volume| volume.is_some_and(|v| v.metadata.deletion_timestamp.is_some())).await;
    assert!(bench.split(&name).await.is_some_and(|split| split.meta.deleting.is_none()));
    bench.delete_claim("data").await;
    bench.gone(&name).await;
}

#[tokio::test]
async fn an_attached_volume_is_deleted_only_when_it_is_detached() {
    let bench = Bench::with_class(20, json!({})).await;
    let name = bench.claim("data", "5Gi").await;
    bench.bound("data").await;
    let mut split = bench.split(&name).await.unwrap();
    let node = bench.node_name("n1");
    let attachment = json!([{"node": node, "accessMode": "SingleNodeMultiWriter"}]);
    split.spec.attached = serde_json::from_value(attachment).unwrap();
    bench.store.splits().update(split).await.unwrap();
    bench.delete_claim("data").await;
    bench.volume_is(&name, |volume| phase_is(volume, "Released")).await;
    // Another claim is made and removed afterwards, so this one had its time.
    let other = bench.claim("other", "1Gi").await;
    bench.bound("other").await;
    bench.delete_claim("other").await;
    bench.gone(&other).await;
    let mut split = bench.split(&name).await.expect("kept while it is attached");
    assert_eq!(split.meta.deleting, None);
    split.spec.attached.clear();
    bench.store.splits().update(split).await.unwrap();
    bench.gone(&name).await;
}

#[tokio::test]
async fn a_class_that_is_made_after_the_claim_is_enough() {
    let mut bench = Bench::new(20).await;
    bench.provisioner();
    bench.claim("data", "5Gi").await;
    bench.class(json!({})).await;
    bench.bound("data").await;
}

#[tokio::test]
async fn a_hundred_claims_on_room_for_sixty_bind_exactly_sixty_and_the_rest_as_room_comes() {
    let bench = Bench::with_class(60, json!({})).await;
    for n in 0..100 {
        bench.claim(&format!("data-{n}"), "1Gi").await;
    }
    let bound = || async {
        let claims = bench.claims().list(&Default::default()).await.unwrap();
        claims
            .iter()
            .filter(|c| c.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Bound")))
            .count()
    };
    until(bound, |n| *n == 60).await;
    let splits = bench.store.splits().list(&union_csi::store::Selector::All).await.unwrap();
    let planned = splits.iter().flat_map(|s| &s.spec.branches).fold(0, |sum, b| sum + b.size.get());
    assert_eq!(planned, Bytes::gib(60).get(), "not a byte too much");
    let claims = bench.claims().list(&Default::default()).await.unwrap();
    let some =
        claims.iter().filter(|c| c.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Bound")));
    for claim in some.take(40) {
        bench.delete_claim(claim.metadata.name.as_ref().unwrap()).await;
    }
    until(bound, |n| *n == 60).await;
    until(|| async { bench.claims().list(&Default::default()).await.unwrap().items.len() }, |n| *n == 60)
        .await;
}
