//! Leaders that are killed or two at a time, names that others took, rights that are missing.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;
use kube::api::PostParams;
use kube::{Api, Client, Config};
use serde_json::json;
use union_csi::domain::Bytes;
use union_csi::store::Selector;
use union_csi::store::object::{Meta, VolumeSplit};

use super::bench::{Bench, until};

/// Volumes and PersistentVolumes by name, each without those of other tests.
async fn everything(bench: &Bench) -> (Vec<String>, Vec<String>) {
    let splits = bench.store.splits().list(&Selector::All).await.expect("an answer");
    let mut splits: Vec<_> = splits.into_iter().map(|split| split.meta.name).collect();
    let volumes = bench.volumes().list(&Default::default()).await.expect("an answer");
    let mine = |v: &PersistentVolume| {
        v.spec.as_ref().and_then(|spec| spec.storage_class_name.as_ref()) == Some(&bench.class)
    };
    let mut volumes: Vec<_> =
        volumes.into_iter().filter(mine).filter_map(|volume| volume.metadata.name).collect();
    splits.sort();
    volumes.sort();
    (splits, volumes)
}

async fn bound(bench: &Bench) -> usize {
    let claims = bench.claims().list(&Default::default()).await.expect("an answer");
    claims.iter().filter(|c| c.status.as_ref().is_some_and(|s| s.phase.as_deref() == Some("Bound"))).count()
}

#[tokio::test]
async fn leaders_that_are_killed_in_the_middle_of_fifty_claims_leave_no_double_and_no_orphan() {
    let mut bench = Bench::new(100).await;
    bench.class(json!({})).await;
    let mut names = Vec::new();
    for n in 0..50 {
        names.push(bench.claim(&format!("data-{n}"), "1Gi").await);
    }
    // Each is killed after a little more time than the one before, so at another place.
    for round in 0..20 {
        let leader = bench.provisioner();
        tokio::time::sleep(Duration::from_millis(20 + 15 * round)).await;
        leader.abort();
    }
    let leader = bench.provisioner();
    until(|| bound(&bench), |n| *n == 50).await;
    names.sort();
    assert_eq!(everything(&bench).await, (names.clone(), names));

    leader.abort();
    for n in 0..50 {
        bench.delete_claim(&format!("data-{n}")).await;
    }
    for round in 0..20 {
        let leader = bench.provisioner();
        tokio::time::sleep(Duration::from_millis(20 + 15 * round)).await;
        leader.abort();
    }
    bench.provisioner();
    until(|| everything(&bench), |(splits, volumes)| splits.is_empty() && volumes.is_empty()).await;
}

#[tokio::test]
async fn two_that_both_believe_they_lead_make_each_volume_once() {
    let mut bench = Bench::with_class(100, json!({})).await;
    bench.provisioner();
    let mut names = Vec::new();
    for n in 0..30 {
        names.push(bench.claim(&format!("data-{n}"), "1Gi").await);
    }
    until(|| bound(&bench), |n| *n == 30).await;
    names.sort();
    assert_eq!(everything(&bench).await, (names.clone(), names));
    for n in 0..30 {
        bench.delete_claim(&format!("data-{n}")).await;
    }
    until(|| everything(&bench), |(splits, volumes)| splits.is_empty() && volumes.is_empty()).await;
}

#[tokio::test]
async fn a_persistent_volume_of_another_driver_with_our_name_is_left_alone_and_said_so() {
    let mut bench = Bench::new(20).await;
    bench.provisioner();
    let name = bench.claim("data", "5Gi").await;
    let foreign = json!({
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "1Gi"}, "storageClassName": "other",
            "csi": {"driver": "other.example.com", "volumeHandle": "x"},
            "persistentVolumeReclaimPolicy": "Retain",
        },
    });
    let foreign: PersistentVolume = serde_json::from_value(foreign).unwrap();
    let before = bench.volumes().create(&PostParams::default(), &foreign).await.unwrap();
    bench.class(json!({})).await;
    bench.told("data", "ProvisioningFailed", "was not made for this claim").await;
    assert_eq!(bench.volumes().get(&name).await.unwrap().spec, before.spec);
    bench.volumes().delete(&name, &Default::default()).await.unwrap();
    bench.bound("data").await;
}

#[tokio::test]
async fn a_volume_with_our_name_that_another_made_is_left_alone_and_said_so() {
    let mut bench = Bench::new(20).await;
    bench.provisioner();
    let name = bench.claim("data", "5Gi").await;
    let spec = json!({
        "volume": name, "requestName": name, "capacity": Bytes::gib(1).get(), "accessModes": ["SingleNodeWriter"],
        "parameters": {"nodeSelector": format!("test={}", bench.namespace), "branchFormat": "directory"},
    });
    let split = VolumeSplit {
        meta: Meta::with_finalizer(name.as_str()),
        spec: serde_json::from_value(spec).unwrap(),
        status: Default::default(),
    };
    bench.store.splits().create(split).await.unwrap();
    bench.class(json!({})).await;
    bench.told("data", "ProvisioningFailed", "was not made for this claim").await;
    bench.delete_claim("data").await;
    // Another claim is made and removed afterwards, so this one had its time.
    let other = bench.claim("other", "5Gi").await;
    bench.bound("other").await;
    bench.delete_claim("other").await;
    bench.gone(&other).await;
    assert!(bench.split(&name).await.is_some_and(|split| split.meta.deleting.is_none()));
}

/// A client that may do what this role says and nothing else.
async fn limited(bench: &Bench, rules: serde_json::Value) -> Client {
    let user = format!("limited-{}", bench.namespace);
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": user}, "rules": rules,
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}],
    });
    let roles: Api<k8s_openapi::api::rbac::v1::ClusterRole> = Api::all(bench.client.clone());
    roles.create(&PostParams::default(), &serde_json::from_value(role).expect("made")).await.expect("made");
    let bindings: Api<k8s_openapi::api::rbac::v1::ClusterRoleBinding> = Api::all(bench.client.clone());
    bindings
        .create(&PostParams::default(), &serde_json::from_value(binding).expect("made"))
        .await
        .expect("made");
    let mut config = Config::infer().await.expect("made");
    config.auth_info.impersonate = Some(user);
    Client::try_from(config).expect("made")
}

#[tokio::test]
async fn a_right_that_is_missing_is_named_and_all_goes_on_when_it_is_given() {
    let mut bench = Bench::new(20).await;
    bench.class(json!({})).await;
    let read = json!(["get", "list", "watch"]);
    let rules = json!([
        {"apiGroups": [""], "resources": ["persistentvolumes", "persistentvolumeclaims"], "verbs": read},
        {"apiGroups": ["storage.k8s.io"], "resources": ["storageclasses"], "verbs": read},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "get", "patch"]},
    ]);
    let client = limited(&bench, rules).await;
    bench.provisioner_as(client);
    bench.claim("data", "5Gi").await;
    let told = bench.told("data", "ProvisioningFailed", "forbidden").await;
    assert!(told.contains("grant the verb create on persistentvolumes"), "{told}");

    let roles: Api<k8s_openapi::api::rbac::v1::ClusterRole> = Api::all(bench.client.clone());
    let more = json!([{"op": "add", "path": "/rules/-", "value":
        {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["create", "patch", "delete"]}}]);
    let patch = kube::api::Patch::Json::<()>(serde_json::from_value(more).unwrap());
    roles.patch(&format!("limited-{}", bench.namespace), &Default::default(), &patch).await.unwrap();
    bench.bound("data").await;
}
