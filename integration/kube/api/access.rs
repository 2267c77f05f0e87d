//! Orders about branches on a real API server: its versions, its rules, its events. Owners are played by the tests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event as Notice, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use union_csi::controllers::access::{AccessController, AccessCounters};
use union_csi::controllers::cluster::{Cluster, DRIVER};
use union_csi::controllers::lease::Claim;
use union_csi::domain::NodeName;
use union_csi::domain::access::{Access, Epoch, ExportReport, Generation};
use union_csi::store::contract::branch;
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{Branch, VolumeSplit};
use union_csi::store::{Event, Selector, Store, StoreError};

use crate::provisioner::bench::ATTACHED;
use crate::support;

struct Rig {
    client: Client,
    namespace: String,
    /// The volume: each test has its own.
    id: String,
    store: Arc<dyn Store>,
    tasks: JoinSet<()>,
}

fn node(name: &str) -> NodeName {
    name.parse().expect("a node name")
}

fn access(consumer: Option<&str>, epoch: u64) -> Access {
    Access { consumer: consumer.map(node), epoch: Epoch(epoch) }
}

impl Rig {
    /// A volume whose branches lie on these nodes.
    async fn new(owners: &[&str]) -> Self {
        let client = support::client().await;
        support::definitions(&client).await;
        let namespace = support::namespace(&client).await;
        let id = format!("pvc-{}", uuid::Uuid::new_v4());
        let store = Arc::new(KubernetesStore::new(client.clone(), &namespace, "union-csi"));
        let rig = Self { client, namespace, id, store, tasks: JoinSet::new() };
        let split = json!({
            "meta": {"name": rig.id},
            "spec": {"volume": rig.id, "requestName": rig.id, "capacity": 1, "accessModes": ["SingleNodeWriter"]}
        });
        let split = serde_json::from_value(split).expect("a volume");
        rig.store.splits().create(split).await.expect("made");
        for (index, owner) in (0..).zip(owners) {
            rig.store.branches().create(branch(&rig.id, index, owner)).await.expect("made");
        }
        rig
    }

    fn name(&self, index: u32) -> String {
        format!("{}-{index}", self.id)
    }

    fn lead(&mut self) -> AccessCounters {
        let counters = AccessCounters::default();
        let cluster = Cluster {
            client: self.client.clone(),
            namespace: self.namespace.clone(),
            claim: Claim::always(),
        };
        let controller = AccessController::new(self.store.clone(), Timestamp::now);
        let controller = controller.telling(cluster).counting(counters.clone());
        self.tasks.spawn(controller.run(CancellationToken::new()));
        counters
    }

    /// Owners that obey each order as soon as they hear of it.
    async fn obey(&mut self) {
        let store = self.store.clone();
        let mut events = store.branches().watch(Selector::All).await.expect("watched");
        self.tasks.spawn(async move {
            while let Some(event) = events.next().await {
                let Ok(Event::Applied(branch)) = event else { continue };
                let allowed = branch.status.export.as_ref().map(|export| &export.allowed);
                if branch.spec.access.as_ref().is_some_and(|access| Some(access) != allowed) {
                    // Where it changed since, its event is the next.
                    let _ = report(&*store, branch).await;
                }
            }
        });
    }

    async fn attach(&self, to: Option<&str>, attachment: Option<&str>) {
        let splits = self.store.splits();
        let mut split: VolumeSplit = splits.get(&self.id).await.expect("readable").expect("there");
        let attached = to.map(
            |node| json!({"node": node, "accessMode": "SingleNodeWriter", "volumeAttachment": attachment}),
        );
        split.spec.attached = attached
            .map(|attached| serde_json::from_value(attached).expect("an attachment"))
            .into_iter()
            .collect();
        splits.update(split).await.expect("written");
    }

    async fn branch(&self, index: u32) -> Branch {
        self.store.branches().get(&self.name(index)).await.expect("readable").expect("there")
    }

    /// Waits until this is ordered.
    async fn ordered(&self, index: u32, wanted: &Access) -> Branch {
        let mut branch = self.branch(index).await;
        for _ in 0..600 {
            if branch.spec.access.as_ref() == Some(wanted) {
                return branch;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            branch = self.branch(index).await;
        }
        panic!("{wanted:?} is not ordered: {branch:#?}");
    }

    /// Waits until a branch is with that node, by its owner too.
    async fn with(&self, index: u32, to: &str) -> u64 {
        for _ in 0..600 {
            let branch = self.branch(index).await;
            let allowed = branch.status.export.map(|export| export.allowed);
            if let Some(access) = branch.spec.access
                && access.consumer == Some(node(to))
                && Some(&access) == allowed.as_ref()
            {
                return access.epoch.0;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("branch {index} does not come to {to}: {:#?}", self.branch(index).await);
    }

    async fn edit(&self, access: Value) -> Result<DynamicObject, kube::Error> {
        let kind = GroupVersionKind::gvk("union.io", "v1alpha1", "Branch");
        let resource = ApiResource::from_gvk_with_plural(&kind, "branches");
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let edit = json!({"spec": {"access": access}});
        api.patch(&self.name(0), &PatchParams::default(), &Patch::Merge(edit)).await
    }
}

/// What an owner reports that has done what it is told.
async fn report(store: &dyn Store, mut branch: Branch) -> Result<Branch, StoreError> {
    let last = branch.status.export.take().unwrap_or_default();
    branch.status.export = Some(ExportReport {
        generation: Generation(last.generation.0 + 1),
        allowed: branch.spec.access.clone().unwrap_or_default(),
        ..ExportReport::default()
    });
    store.branches().update_status(branch).await
}

#[tokio::test]
async fn a_branch_moves_by_a_revocation_the_owners_report_and_a_grant() {
    let mut rig = Rig::new(&["o"]).await;
    rig.lead();
    rig.attach(Some("a"), None).await;
    let revoked = rig.ordered(0, &access(None, 1)).await;
    report(&*rig.store, revoked).await.expect("reported");
    let given = rig.ordered(0, &access(Some("a"), 2)).await;
    report(&*rig.store, given).await.expect("reported");
    rig.attach(Some("b"), None).await;
    let revoked = rig.ordered(0, &access(None, 3)).await;
    // Whatever changes meanwhile, as long as the owner has not told.
    rig.attach(None, None).await;
    rig.attach(Some("b"), None).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let waits = rig.branch(0).await;
    assert_eq!(waits.spec.access, revoked.spec.access, "nothing is given before the report");
    report(&*rig.store, waits).await.expect("reported");
    rig.ordered(0, &access(Some("b"), 4)).await;
}

#[tokio::test]
async fn two_leaders_at_once_never_give_one_epoch_twice() {
    let mut rig = Rig::new(&["o", "p", "o"]).await;
    rig.obey().await;
    let mut events = rig.store.branches().watch(Selector::All).await.expect("watched");
    let judge = tokio::spawn(async move {
        let mut last: BTreeMap<String, Access> = BTreeMap::new();
        while let Some(event) = events.next().await {
            let Ok(Event::Applied(branch)) = event else { continue };
            let (Some(access), name) = (branch.spec.access, branch.meta.name) else { continue };
            let before = last.insert(name.clone(), access.clone()).unwrap_or_default();
            let allowed = branch.status.export.unwrap_or_default().allowed.consumer;
            if before != access && before.epoch >= access.epoch {
                return format!("{name}: {before:?} became {access:?}");
            }
            if access.consumer.is_some() && allowed.is_some() && allowed != access.consumer {
                return format!("{name}: {allowed:?} has it, and {access:?} is ordered");
            }
        }
        "the watch ended".to_owned()
    });
    let leaders = [rig.lead(), rig.lead()];
    for to in ["a", "b", "o", "a", "p", "b"] {
        rig.attach(Some(to), None).await;
        for index in 0..3 {
            rig.with(index, to).await;
        }
    }
    let mut epochs = 0;
    for index in 0..3 {
        epochs += rig.branch(index).await.spec.access.expect("ordered").epoch.0;
    }
    // The answer to the last write may still be on its way.
    let written = || leaders.iter().map(|l| l.read().grants + l.read().revocations).sum::<u64>();
    for _ in 0..100 {
        if written() == epochs {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(written(), epochs, "each order that landed has an epoch of its own");
    if judge.is_finished() {
        panic!("{}", judge.await.expect("the judge ends"));
    }
    judge.abort();
}

#[tokio::test]
async fn access_is_changed_with_a_higher_epoch_and_never_taken_away() {
    let rig = Rig::new(&["o"]).await;
    let cases = [
        ("put in", json!({"epoch": 1}), true),
        ("a consumer at the same epoch", json!({"epoch": 1, "consumer": "a"}), false),
        ("a higher epoch", json!({"epoch": 2, "consumer": "a"}), true),
        ("the same again", json!({"epoch": 2, "consumer": "a"}), true),
        ("another consumer at the same epoch", json!({"epoch": 2, "consumer": "b"}), false),
        ("no consumer at the same epoch", json!({"consumer": null}), false),
        ("a lower epoch", json!({"epoch": 1}), false),
        ("a negative epoch", json!({"epoch": -1}), false),
        ("no epoch", json!({"epoch": null}), false),
        ("not a node's name", json!({"epoch": 9, "consumer": "../etc"}), false),
        ("taken away", json!(null), false),
        ("an epoch that leaves some out", json!({"epoch": 7, "consumer": null}), true),
        ("taken away from nobody", json!(null), false),
        ("an epoch as large as there is", json!({"epoch": i64::MAX}), true),
    ];
    for (what, edit, accepted) in cases {
        let edited = rig.edit(edit).await;
        match (&edited, accepted) {
            (Ok(_), true) => {}
            (Err(kube::Error::Api(status)), false) if status.code == 422 => {}
            _ => panic!("{what}: {edited:?}"),
        }
    }
    let stored = rig.branch(0).await.spec.access.expect("there");
    assert_eq!(
        stored,
        access(None, u64::try_from(i64::MAX).expect("positive")),
        "it is read as it was written"
    );
}

#[tokio::test]
async fn the_claim_of_a_volume_that_waits_for_a_silent_owner_tells_why() {
    let mut rig = Rig::new(&["gone"]).await;
    let (client, id) = (rig.client.clone(), rig.id.clone());
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &rig.namespace);
    let claim = json!({
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": format!("static-{id}"), "storageClassName": ATTACHED,
                 "resources": {"requests": {"storage": "1Gi"}}}
    });
    let claim = serde_json::from_value(claim).expect("a claim");
    let claim = claims.create(&PostParams::default(), &claim).await.expect("made");
    // Made by hand: its name is not the volume's. The provisioner's tests leave its class alone.
    let volume = json!({
        "metadata": {"name": format!("static-{id}")},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": ATTACHED,
                 "persistentVolumeReclaimPolicy": "Retain",
                 "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", "namespace": rig.namespace,
                              "name": "data", "uid": claim.uid()},
                 "csi": {"driver": DRIVER, "volumeHandle": id}}
    });
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let volume = serde_json::from_value(volume).expect("a volume");
    volumes.create(&PostParams::default(), &volume).await.expect("made");
    let attachments: Api<VolumeAttachment> = Api::all(client.clone());
    let attachment = json!({
        // No attacher looks at it: it is another's.
        "metadata": {"name": format!("csi-{id}")},
        "spec": {"attacher": "none.example.org", "nodeName": "a", "source": {"persistentVolumeName": format!("static-{id}")}}
    });
    let attachment = serde_json::from_value(attachment).expect("an attachment");
    attachments.create(&PostParams::default(), &attachment).await.expect("made");

    let counters = rig.lead();
    rig.attach(Some("a"), Some(&format!("csi-{id}"))).await;
    let events: Api<Notice> = Api::namespaced(client.clone(), &rig.namespace);
    let mut told = None;
    for _ in 0..600 {
        let list = events.list(&ListParams::default()).await.expect("listed");
        told = list.items.into_iter().find(|e| e.reason.as_deref() == Some("BranchNotGranted"));
        if told.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let told = told.expect("an event");
    assert_eq!(told.involved_object.kind.as_deref(), Some("PersistentVolumeClaim"));
    assert_eq!(told.involved_object.uid, claim.uid());
    let message = told.message.unwrap_or_default();
    assert!(message.contains("cannot be used on node a yet"), "{message}");
    assert!(message.contains("node gone, which holds it"), "{message}");
    assert!(message.contains("there is no StorageNode of that name"), "{message}");
    assert_eq!(counters.read().waiting, 1);

    let branch = rig.branch(0).await;
    report(&*rig.store, branch).await.expect("reported");
    let given = rig.ordered(0, &access(Some("a"), 2)).await;
    report(&*rig.store, given).await.expect("reported");
    for _ in 0..600 {
        if counters.read().waiting == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(counters.read().waiting, 0, "it waits no more");
    // kube-controller-manager deletes attachments that no pod needs, too.
    let _ = attachments.delete(&format!("csi-{id}"), &DeleteParams::default()).await;
    let _ = volumes.delete(&format!("static-{id}"), &DeleteParams::default()).await;
}
