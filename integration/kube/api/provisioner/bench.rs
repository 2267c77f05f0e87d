//! A cluster's worth of roles around one provisioner: the splitter, nodes that admit branches by what they have, and the
//! real controller manager. One at a time, because provisioners of one driver would serve each other's claims.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::{AbortHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use union_csi::controllers::cluster::{Cluster, DRIVER};
use union_csi::controllers::lease::Claim;
use union_csi::controllers::provisioner::Provisioner;
use union_csi::controllers::splitter::Splitter;
use union_csi::domain::Bytes;
use union_csi::domain::pool::PoolReport;
use union_csi::domain::reach::{Network, StorageNetwork};
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{
    BranchPhase, Meta, StorageNode, StorageNodeSpec, StorageNodeStatus, VolumeSplit,
};
use union_csi::store::{self, Selector, Store, StoreError};

use crate::support;

/// How long anything may take on a machine that others use, too.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is looked at until it is as wanted is looked at this often.
const LOOK: Duration = Duration::from_millis(50);

/// Class of the volumes that the attacher's tests make; no test here touches them.
pub const ATTACHED: &str = "attached";

static ALONE: Mutex<()> = Mutex::const_new(());

/// See the module.
pub struct Bench {
    pub client: Client,
    pub store: Arc<dyn Store>,
    /// Namespace of claims, and of the program's objects.
    pub namespace: String,
    /// Name of the class that [`Bench::class`] made, and label of the nodes that it may use.
    pub class: String,
    tasks: JoinSet<()>,
    _alone: MutexGuard<'static, ()>,
}

impl Bench {
    /// The roles but the provisioner, with a node `n1` that has one pool of so many GiB.
    pub async fn new(gib: u64) -> Self {
        let alone = ALONE.lock().await;
        let client = support::client().await;
        support::definitions(&client).await;
        let namespace = support::namespace(&client).await;
        let store: Arc<dyn Store> = Arc::new(KubernetesStore::new(client.clone(), &namespace, "union-csi"));
        let mut bench =
            Self { client, store, class: namespace.clone(), namespace, tasks: JoinSet::new(), _alone: alone };
        bench.sweep().await;
        bench.tasks.spawn(Splitter::new(bench.store.clone(), Timestamp::now).run(CancellationToken::new()));
        bench.node("n1", &[("a", gib)]).await;
        bench
    }

    /// The same with a provisioner and a class.
    pub async fn with_class(gib: u64, class: Value) -> Self {
        let mut bench = Self::new(gib).await;
        bench.class(class).await;
        bench.provisioner();
        bench
    }

    /// What an earlier test left is no business of this one.
    async fn sweep(&self) {
        let claims: Api<PersistentVolumeClaim> = Api::all(self.client.clone());
        for claim in claims.list(&ListParams::default()).await.expect("claims") {
            let api: Api<PersistentVolumeClaim> =
                Api::namespaced(self.client.clone(), &claim.namespace().expect("a namespace"));
            let _gone = api.delete(&claim.name_any(), &DeleteParams::default()).await;
        }
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        for volume in volumes.list(&ListParams::default()).await.expect("volumes") {
            // The attacher's tests run beside these.
            if volume.spec.as_ref().and_then(|s| s.storage_class_name.as_deref()) == Some(ATTACHED) {
                continue;
            }
            let none = json!({"metadata": {"finalizers": null}});
            let _gone = volumes.delete(&volume.name_any(), &DeleteParams::default()).await;
            let _free = volumes.patch(&volume.name_any(), &PatchParams::default(), &Patch::Merge(none)).await;
        }
    }

    /// A provisioner, which is killed when the handle says so.
    pub fn provisioner(&mut self) -> AbortHandle {
        self.provisioner_as(self.client.clone())
    }

    /// A provisioner that acts with the rights of this client.
    pub fn provisioner_as(&mut self, client: Client) -> AbortHandle {
        let cluster = Cluster { client, namespace: self.namespace.clone(), claim: Claim::always() };
        let provisioner = Provisioner::new(cluster, self.store.clone(), Timestamp::now);
        self.tasks.spawn(provisioner.run(CancellationToken::new()))
    }

    /// A node that reports pools of these GiB and admits branches, until it is killed by the handle.
    pub async fn node(&mut self, name: &str, pools: &[(&str, u64)]) -> AbortHandle {
        let name = self.node_name(name);
        self.report(&name, pools).await;
        self.tasks.spawn(admit(self.store.clone(), name))
    }

    /// Nodes are of the whole cluster: each test has its own.
    pub fn node_name(&self, short: &str) -> String {
        format!("{short}-{}", self.namespace)
    }

    /// What a node has.
    pub async fn report(&self, node: &str, pools: &[(&str, u64)]) {
        let pool = |(name, gib): &(&str, u64)| -> PoolReport {
            let bytes = Bytes::gib(*gib).get();
            let report = json!({
                "name": name, "path": format!("/pools/{name}"), "state": "Ready", "total": bytes, "free": bytes,
                "device": format!("{node}-{name}"), "enforcement": "ProjectQuota", "imageFilesystems": ["ext4"],
            });
            serde_json::from_value(report).expect("a report")
        };
        let status = StorageNodeStatus {
            labels: BTreeMap::from([("test".to_owned(), self.namespace.clone())]),
            pools: pools.iter().map(pool).collect(),
            heartbeat: Some(Timestamp::now()),
            ..StorageNodeStatus::default()
        };
        let there = match self.store.nodes().get(node).await.expect("an answer") {
            Some(there) => there,
            None => {
                let spec = StorageNodeSpec { node: node.parse().expect("a name") };
                let new = StorageNode { meta: Meta::new(node), spec, status: StorageNodeStatus::default() };
                self.store.nodes().create(new).await.expect("made")
            }
        };
        self.store.nodes().update_status(StorageNode { status, ..there }).await.expect("written");
    }

    /// These nodes' agents tell that they carry everything between each other.
    pub async fn carry(&self, nodes: &[&str]) {
        for short in nodes {
            let name = self.node_name(short);
            let mut node = self.store.nodes().get(&name).await.expect("an answer").expect("a node");
            let able = Network::able([node.spec.node.clone()]);
            let able = able.node(&node.spec.node).expect("it").clone();
            node.status.transports = able.transports;
            let network = StorageNetwork { addresses: able.addresses, ..StorageNetwork::default() };
            node.status.network = Some(network);
            self.store.nodes().update_status(node).await.expect("written");
        }
    }

    /// The test's class; branches are directories, so that figures stay round.
    pub async fn class(&self, more: Value) {
        let mut class = json!({
            "metadata": {"name": self.class}, "provisioner": DRIVER, "volumeBindingMode": "Immediate",
            "reclaimPolicy": "Delete",
            "parameters": {"branchFormat": "directory", "nodeSelector": format!("test={}", self.namespace)},
        });
        merge(&mut class, more);
        let class: StorageClass = serde_json::from_value(class).expect("a class");
        Api::all(self.client.clone()).create(&PostParams::default(), &class).await.expect("a class");
    }

    pub fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    /// Makes a claim; its volume's name is returned.
    pub async fn claim(&self, name: &str, size: &str) -> String {
        let claim = json!({
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": self.class,
                "resources": {"requests": {"storage": size}},
            },
        });
        let claim: PersistentVolumeClaim = serde_json::from_value(claim).expect("a claim");
        let made = self.claims().create(&PostParams::default(), &claim).await.expect("a claim");
        format!("pvc-{}", made.uid().expect("a uid"))
    }

    pub async fn delete_claim(&self, name: &str) {
        self.claims().delete(name, &DeleteParams::default()).await.expect("deleted");
    }

    pub async fn select(&self, claim: &str, node: &str) {
        let patch = json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": node}}});
        self.claims().patch(claim, &PatchParams::default(), &Patch::Merge(patch)).await.expect("selected");
    }

    /// Waits until the claim is bound; its PersistentVolume is returned.
    pub async fn bound(&self, claim: &str) -> PersistentVolume {
        let phase = |claim: &PersistentVolumeClaim| {
            claim.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default()
        };
        let bound = self.claim_is(claim, |claim| phase(claim) == "Bound").await;
        let volume = bound.spec.and_then(|spec| spec.volume_name).expect("a volume");
        self.volumes().get(&volume).await.expect("the volume")
    }

    pub async fn claim_is(
        &self,
        claim: &str,
        wanted: impl Fn(&PersistentVolumeClaim) -> bool,
    ) -> PersistentVolumeClaim {
        let api = self.claims();
        let found = until(
            || async { api.get_opt(claim).await.expect("an answer") },
            |c| c.as_ref().is_some_and(&wanted),
        );
        found.await.expect("it is there")
    }

    pub async fn volume_is(
        &self,
        name: &str,
        wanted: impl Fn(Option<&PersistentVolume>) -> bool,
    ) -> Option<PersistentVolume> {
        let api = self.volumes();
        until(|| async { api.get_opt(name).await.expect("an answer") }, |v| wanted(v.as_ref())).await
    }

    pub async fn split(&self, name: &str) -> Option<VolumeSplit> {
        self.store.splits().get(name).await.expect("an answer")
    }

    pub async fn split_is(
        &self,
        name: &str,
        wanted: impl Fn(Option<&VolumeSplit>) -> bool,
    ) -> Option<VolumeSplit> {
        until(|| self.split(name), |split| wanted(split.as_ref())).await
    }

    /// Waits until nothing of the volume is left.
    pub async fn gone(&self, name: &str) {
        self.volume_is(name, |volume| volume.is_none()).await;
        self.split_is(name, |split| split.is_none()).await;
        let volume = name.parse().expect("a name");
        let branches = self.store.branches().list(&Selector::Volume(volume)).await.expect("an answer");
        assert!(branches.is_empty(), "{branches:?}");
    }

    /// Waits until an event of this reason about the object has the text in its message; the message is returned.
    pub async fn told(&self, object: &str, reason: &str, text: &str) -> String {
        let found = |events: &Vec<Event>| {
            let wanted = |event: &&Event| {
                event.reason.as_deref() == Some(reason)
                    && event.message.as_ref().is_some_and(|message| message.contains(text))
            };
            events.iter().find(wanted).and_then(|event| event.message.clone())
        };
        let events = until(|| self.events(object), |events| found(events).is_some()).await;
        found(&events).expect("found before")
    }

    /// Events about the object, by this program.
    pub async fn events(&self, object: &str) -> Vec<Event> {
        let api: Api<Event> = Api::all(self.client.clone());
        let about = ListParams::default().fields(&format!("involvedObject.name={object}"));
        let mut events = api.list(&about).await.expect("events").items;
        let place = [Some(self.namespace.as_str()), Some("default")];
        events.retain(|event| {
            event.reporting_component.as_deref() == Some(DRIVER)
                && place.contains(&event.metadata.namespace.as_deref())
        });
        events
    }
}

/// Admits each branch that is planned on the node, and lets go what is deleted.
async fn admit(store: Arc<dyn Store>, node: String) {
    let node = node.parse().expect("a name");
    let mut watch = store.branches().watch(Selector::Node(node)).await.expect("watched");
    while let Some(event) = watch.next().await {
        let Ok(store::Event::Applied(mut branch)) = event else { continue };
        let written = if branch.meta.deleting.is_some() {
            branch.meta.finalizers.clear();
            store.branches().update(branch).await
        } else if branch.status.phase == BranchPhase::Pending {
            branch.status.phase = BranchPhase::Bound;
            store.branches().update_status(branch).await
        } else {
            continue;
        };
        match written {
            // A newer state is on its way here.
            Ok(_) | Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Looks until it is as wanted.
///
/// # Panics
/// Where it does not come to that.
pub async fn until<T: Debug, F: Future<Output = T>>(look: impl Fn() -> F, wanted: impl Fn(&T) -> bool) -> T {
    let end = tokio::time::Instant::now() + PATIENCE;
    loop {
        let now = look().await;
        if wanted(&now) {
            return now;
        }
        assert!(tokio::time::Instant::now() < end, "it stays {now:#?}");
        tokio::time::sleep(LOOK).await;
    }
}

fn merge(into: &mut Value, more: Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}
