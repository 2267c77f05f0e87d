//! VolumeAttachments on a real API server, without kube-controller-manager: the tests make and delete them.

#![allow(clippy::unwrap_used, reason = "a test ends where its ground is not as it must be")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::client::Body;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard};
use tokio_util::sync::CancellationToken;
use union_csi::controllers::attacher::Attacher;
use union_csi::controllers::cluster::{Cluster, DRIVER};
use union_csi::controllers::lease::Claim;
use union_csi::domain::volume::AccessMode;
use union_csi::store::Store;
use union_csi::store::local::LocalStore;
use union_csi::store::object::VolumeSplit;

use crate::provisioner::bench::ATTACHED;
use crate::support;

const FINALIZER: &str = "external-attacher/union-csi-union-io";

/// An attacher looks after every VolumeAttachment of the cluster, so one is there at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

struct Rig {
    client: Client,
    store: Arc<dyn Store>,
    stop: CancellationToken,
    /// Volumes and attachments are the cluster's: each test has its own names.
    id: String,
    _dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Rig {
    /// A store with node `n1` and one volume on it, and a PersistentVolume for that; no attacher yet.
    async fn new() -> Self {
        let alone = ALONE.lock().await;
        let dir = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&dir.path().join("store.redb")).unwrap());
        let id = format!("pvc-{}", uuid::Uuid::new_v4());
        let rig = Self {
            client: support::client().await,
            store,
            stop: CancellationToken::new(),
            id,
            _dir: dir,
            _alone: alone,
        };
        rig.add_node("n1").await;
        let branch =
            json!({"index": 0, "node": "n1", "pool": "p", "size": 1, "usable": 1, "format": "directory"});
        let split = json!({
            "meta": {"name": rig.id, "finalizers": ["union.io/data"]},
            "spec": {"volume": rig.id, "requestName": rig.id, "capacity": 1, "branches": [branch],
                     "accessModes": ["SingleNodeMultiWriter"]}
        });
        rig.store.splits().create(serde_json::from_value(split).unwrap()).await.unwrap();
        rig.make_volume().await;
        rig
    }

    /// An attacher that leads as long as `claim` says.
    fn start(&self, claim: Claim) -> CancellationToken {
        self.start_on(self.client.clone(), claim)
    }

    /// The same, by another way to the API server.
    fn start_on(&self, client: Client, claim: Claim) -> CancellationToken {
        let cluster = Cluster { client, namespace: "union".to_owned(), claim };
        let stop = self.stop.child_token();
        tokio::spawn(Attacher::new(cluster, self.store.clone(), Timestamp::now).run(stop.clone()));
        stop
    }

    async fn add_node(&self, name: &str) {
        let node = json!({"meta": {"name": name}, "spec": {"node": name}});
        self.store.nodes().create(serde_json::from_value(node).unwrap()).await.unwrap();
    }

    async fn make_volume(&self) {
        let volume: PersistentVolume = serde_json::from_value(json!({
            "metadata": {"name": self.id},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": ATTACHED,
                     "persistentVolumeReclaimPolicy": "Delete",
                     "csi": {"driver": DRIVER, "volumeHandle": self.id}}
        }))
        .unwrap();
        self.volumes().create(&PostParams::default(), &volume).await.unwrap();
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.client.clone())
    }

    fn attachments(&self) -> Api<VolumeAttachment> {
        Api::all(self.client.clone())
    }

    /// Asks for the volume on a node, as kube-controller-manager does; returns the VolumeAttachment's name.
    async fn ask(&self, node: &str) -> String {
        let name = format!("csi-{}-{node}", self.id);
        let attachment: VolumeAttachment = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": self.id}}
        }))
        .unwrap();
        self.attachments().create(&PostParams::default(), &attachment).await.unwrap();
        name
    }

    async fn split(&self) -> VolumeSplit {
        self.store.splits().get(&self.id).await.unwrap().unwrap()
    }

    /// The nodes that the volume is attached to, by its object.
    async fn nodes(&self) -> Vec<String> {
        self.split().await.spec.attached.iter().map(|a| a.node.to_string()).collect()
    }

    async fn attachment(&self, name: &str) -> Option<VolumeAttachment> {
        self.attachments().get_opt(name).await.unwrap()
    }

    async fn is_attached(&self, name: &str) -> bool {
        let status = self.attachment(name).await.and_then(|a| a.status);
        status.is_some_and(|s| s.attached && s.attach_error.is_none())
    }

    /// Waits until it is attached; where it does not come to this, the objects tell why.
    async fn becomes_attached(&self, name: &str) {
        for _ in 0..600 {
            if self.is_attached(name).await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let volume = self.volumes().get_opt(&self.id).await;
        panic!("not attached: {:#?}\n{volume:#?}\n{:#?}", self.attachment(name).await, self.split().await);
    }

    async fn attach_error(&self, name: &str) -> Option<String> {
        self.attachment(name).await?.status?.attach_error?.message
    }

    async fn patch(&self, name: &str, patch: Value) {
        self.attachments().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    }
}

/// A way to the API server on which watches of PersistentVolumes tell nothing before `told`; lists are answered.
#[derive(Clone, Default)]
struct LateWatch {
    told: CancellationToken,
    /// Watches of PersistentVolumes that were asked for.
    watches: Arc<AtomicUsize>,
    /// How often PersistentVolumes were read by name.
    reads: Arc<AtomicUsize>,
}

impl LateWatch {
    fn client(&self, server: &Client) -> Client {
        let (late, server) = (self.clone(), server.clone());
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (late, server) = (late.clone(), server.clone());
            async move {
                let of_volumes = request.uri().path() == "/api/v1/persistentvolumes";
                let query = request.uri().query().unwrap_or_default();
                if of_volumes && query.contains("watch=true") {
                    late.watches.fetch_add(1, Ordering::Relaxed);
                    late.told.cancelled().await;
                } else if of_volumes && query.contains("metadata.name") {
                    late.reads.fetch_add(1, Ordering::Relaxed);
                }
                server.send(request).await
            }
        });
        Client::new(service, "default")
    }
}

/// Waits until it is so.
async fn until(what: &str, mut so: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if so().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("it did not come to this: {what}");
}

fn has_finalizer(finalizers: Option<&Vec<String>>) -> bool {
    finalizers.is_some_and(|all| all.iter().any(|f| f == FINALIZER))
}

#[tokio::test]
async fn a_volume_is_attached_kept_and_detached_again() {
    let rig = Rig::new().await;
    rig.start(Claim::always());
    let name = rig.ask("n1").await;
    until("it is attached", async || rig.is_attached(&name).await).await;
    let split = rig.split().await;
    assert_eq!(split.spec.attached.len(), 1);
    assert_eq!(split.spec.attached[0].volume_attachment.as_ref(), Some(&name));
    let attachment = rig.attachment(&name).await.unwrap();
    assert!(has_finalizer(attachment.metadata.finalizers.as_ref()), "the attachment is kept");
    let volume = rig.volumes().get(&rig.id).await.unwrap();
    assert!(has_finalizer(volume.metadata.finalizers.as_ref()), "the PersistentVolume is kept");

    rig.volumes().delete(&rig.id, &DeleteParams::default()).await.unwrap();
    rig.attachments().delete(&name, &DeleteParams::default()).await.unwrap();
    until("the attachment is gone", async || rig.attachment(&name).await.is_none()).await;
    assert_eq!(rig.nodes().await, [""; 0], "it was detached before its attachment went");
    until("the PersistentVolume is let go", async || {
        let volume = rig.volumes().get_opt(&rig.id).await.unwrap();
        volume.is_none_or(|volume| !has_finalizer(volume.metadata.finalizers.as_ref()))
    })
    .await;
}

#[tokio::test]
async fn a_volume_is_attached_by_what_it_says_also_where_the_watch_is_late() {
    let rig = Rig::new().await;
    // As one that was attached before: nothing of it is written that would tell of the change.
    let kept = json!({"metadata": {"finalizers": [FINALIZER]}});
    rig.volumes().patch(&rig.id, &PatchParams::default(), &Patch::Merge(&kept)).await.unwrap();
    let late = LateWatch::default();
    rig.start_on(late.client(&rig.client), Claim::always());
    until("the volumes were read", async || late.watches.load(Ordering::Relaxed) > 0).await;
    let patch = json!({"spec": {"accessModes": ["ReadOnlyMany"]}});
    rig.volumes().patch(&rig.id, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    let name = rig.ask("n1").await;
    until("it was decided on", async || {
        late.reads.load(Ordering::Relaxed) > 0 || rig.is_attached(&name).await
    })
    .await;
    late.told.cancel();
    rig.becomes_attached(&name).await;
    assert_eq!(rig.split().await.spec.attached[0].access_mode, AccessMode::MultiNodeReaderOnly);
}

#[tokio::test]
async fn a_node_without_the_program_is_named_and_the_error_goes_when_it_has_come() {
    let rig = Rig::new().await;
    rig.start(Claim::always());
    let name = rig.ask("n2").await;
    until("the error names the node", async || {
        rig.attach_error(&name).await.is_some_and(|e| e.contains("node n2 does not run union-csi"))
    })
    .await;
    rig.add_node("n2").await;
    until("the next reason is told: it cannot reach the branches", async || {
        rig.attach_error(&name).await.is_some_and(|e| e.contains("which lies on n1"))
    })
    .await;
    let mut split = rig.split().await;
    split.spec.branches[0].node = "n2".parse().unwrap();
    rig.store.splits().update(split).await.unwrap();
    until("it is attached, and the error is gone", async || rig.is_attached(&name).await).await;
}

#[tokio::test]
async fn a_volume_whose_object_is_gone_is_refused_and_then_detached_without_a_fault() {
    let rig = Rig::new().await;
    rig.start(Claim::always());
    let name = rig.ask("n1").await;
    until("it is attached", async || rig.is_attached(&name).await).await;
    let mut split = rig.split().await;
    split.meta.finalizers.clear();
    let split = rig.store.splits().update(split).await.unwrap();
    rig.store.splits().delete(&split.meta.name, None).await.unwrap();
    let other = rig.ask("n3").await;
    rig.add_node("n3").await;
    until("a new attachment is told why not", async || {
        rig.attach_error(&other).await.is_some_and(|e| e.contains("its VolumeSplit is gone"))
    })
    .await;
    for name in [&name, &other] {
        rig.attachments().delete(name, &DeleteParams::default()).await.unwrap();
        until("the attachment is gone", async || rig.attachment(name).await.is_none()).await;
    }
}

#[tokio::test]
async fn what_a_crash_left_attached_is_detached_and_what_others_attached_stays() {
    let rig = Rig::new().await;
    let mut split = rig.split().await;
    let entry = |node: &str, by: Option<&str>| {
        serde_json::from_value(
            json!({"node": node, "accessMode": "MultiNodeReaderOnly", "volumeAttachment": by}),
        )
        .unwrap()
    };
    split.spec.attached = vec![entry("n1", Some("csi-gone")), entry("n9", None)];
    rig.store.splits().update(split).await.unwrap();
    rig.start(Claim::always());
    until("the one that nothing asks for is gone", async || rig.nodes().await == ["n9"]).await;
}

#[tokio::test]
async fn attachments_that_were_edited_by_hand_are_put_right() {
    let rig = Rig::new().await;
    rig.start(Claim::always());
    let name = rig.ask("n1").await;
    until("it is attached", async || rig.is_attached(&name).await).await;
    let mut split = rig.split().await;
    split.spec.attached.clear();
    rig.store.splits().update(split).await.unwrap();
    until("it is attached again", async || rig.nodes().await == ["n1"]).await;
    let mut split = rig.split().await;
    split.spec.attached[0].volume_attachment = Some("csi-invented".to_owned());
    rig.store.splits().update(split).await.unwrap();
    until("it is attached for the one that exists", async || {
        let split = rig.split().await;
        split.spec.attached.len() == 1 && split.spec.attached[0].volume_attachment.as_ref() == Some(&name)
    })
    .await;
}

#[tokio::test]
async fn an_attachment_whose_finalizers_were_removed_by_force_leaves_nothing_behind() {
    let rig = Rig::new().await;
    let stop = rig.start(Claim::always());
    let name = rig.ask("n1").await;
    until("it is attached", async || rig.is_attached(&name).await).await;
    // While nobody looks: the next leader finds it.
    stop.cancel();
    rig.attachments().delete(&name, &DeleteParams::default()).await.unwrap();
    rig.patch(&name, json!({"metadata": {"finalizers": null}})).await;
    until("the attachment is gone", async || rig.attachment(&name).await.is_none()).await;
    assert_eq!(rig.nodes().await, ["n1"]);
    rig.start(Claim::always());
    until("the volume is detached", async || rig.nodes().await.is_empty()).await;
    // Under the eyes of the leader.
    let name = rig.ask("n1").await;
    until("it is attached", async || rig.is_attached(&name).await).await;
    rig.patch(&name, json!({"metadata": {"finalizers": null}})).await;
    rig.attachments().delete(&name, &DeleteParams::default()).await.unwrap();
    until("the volume is detached", async || {
        rig.attachment(&name).await.is_none() && rig.nodes().await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn an_instance_that_does_not_lead_writes_nothing() {
    let rig = Rig::new().await;
    let (_held, receive) = tokio::sync::watch::channel(None);
    let stop = rig.start(Claim::until(receive));
    let name = rig.ask("n1").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(rig.nodes().await, [""; 0]);
    let attachment = rig.attachment(&name).await.unwrap();
    assert!(!has_finalizer(attachment.metadata.finalizers.as_ref()));
    stop.cancel();
    rig.start(Claim::always());
    rig.becomes_attached(&name).await;
}
