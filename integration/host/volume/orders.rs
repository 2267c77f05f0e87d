//! Who may use a branch, carried out on real mounts: the owner's part with this node's own volumes. The kernel's exports are a
//! double; the real ones need a network (`integration/net`).

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use union_csi::domain::access::{Access, Epoch, Generation};
use union_csi::domain::reach::{StorageNetwork, Transport};
use union_csi::domain::{BranchId, Bytes};
use union_csi::node::branch::BranchError;
use union_csi::node::executor::{Executor, Exporting, NodeFacts};
use union_csi::node::pool::Pools;
use union_csi::node::transport::{
    Carried, Endpoint, Ends, ExportId, Exported, Owner, Peer, Right, Secret, Source, TransportError,
    Transports,
};
use union_csi::platform::Host;
use union_csi::store::Store;
use union_csi::store::object::{
    Branch, BranchSpec, Meta, StorageNode, StorageNodeSpec, StorageNodeStatus, condition,
};

use super::rig::{DIRECTORY, IMAGE, Rig, Vol, until};
use crate::support::run;

/// Exports of one node, in memory.
#[derive(Default)]
struct Kernel(Mutex<BTreeMap<ExportId, (Source, Vec<String>)>>);

impl Kernel {
    fn open(&self) -> Vec<(u64, String)> {
        let all = self.0.lock().expect("exports");
        all.iter().flat_map(|(id, (_, to))| to.iter().map(|to| (id.generation.0, to.clone()))).collect()
    }
}

impl Owner for Kernel {
    fn export(&self, id: &ExportId, source: &Source) -> Result<Endpoint, TransportError> {
        let Source::Image { path: image, .. } = source else { panic!("a directory") };
        assert!(image.exists(), "{}", image.display());
        self.0.lock().expect("exports").entry(id.clone()).or_insert((source.clone(), Vec::new()));
        Ok(endpoint(id))
    }
    fn allow(&self, id: &ExportId, peer: &Peer, _: Right, _: Option<&Secret>) -> Result<(), TransportError> {
        let mut all = self.0.lock().expect("exports");
        let (_, allowed) = all.get_mut(id).expect("it is exported");
        assert_eq!(*allowed, Vec::<String>::new());
        allowed.push(peer.identity.clone());
        Ok(())
    }
    fn fence(&self, _: &ExportId, peer: &Peer) -> Result<(), TransportError> {
        let mut all = self.0.lock().expect("exports");
        all.values_mut().for_each(|(_, allowed)| allowed.retain(|a| *a != peer.identity));
        Ok(())
    }
    fn unexport(&self, branch: &BranchId) -> Result<(), TransportError> {
        self.0.lock().expect("exports").retain(|id, _| id.branch != *branch);
        Ok(())
    }
    fn grown(&self, _: &ExportId) -> Result<Bytes, TransportError> {
        Ok(Bytes::ZERO)
    }
    fn durable(&self, _: &Source) -> Result<bool, TransportError> {
        Ok(true)
    }
    fn exports(&self) -> Result<Vec<Exported>, TransportError> {
        let all = self.0.lock().expect("exports");
        let tell = |(id, (_, allowed)): (&ExportId, &(Source, Vec<String>))| Exported {
            id: id.clone(),
            endpoint: Some(endpoint(id)),
            allowed: allowed.clone(),
            readers: Vec::new(),
        };
        Ok(all.iter().map(tell).collect())
    }
}

fn endpoint(id: &ExportId) -> Endpoint {
    Endpoint { address: "10.0.0.1:4420".parse().expect("an address"), name: format!("nqn.{}", id.branch) }
}

/// An executor over the rig's parts.
struct Executing {
    executor: Arc<Executor>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Executing {
    fn start(rig: &Rig, store: Arc<dyn Store>, kernel: &Arc<Kernel>) -> Self {
        let transports = Arc::new(Transports::none());
        let ends = Ends { owner: Ok(kernel.clone()), consumer: Err("a double has none".to_owned()) };
        let network = Some(StorageNetwork { interface: "lo".to_owned(), ..StorageNetwork::default() });
        transports.install(Carried { network, ..Carried::default() }, [(Transport::NvmeTcp, ends)].into());
        let facts = NodeFacts {
            labels: BTreeMap::new(),
            cluster_labels: tokio::sync::watch::Sender::new(Some(BTreeMap::new())).subscribe(),
            agent_version: "1".to_owned(),
            mergerfs_version: None,
            kernel: "6".to_owned(),
            measure_interval: Duration::from_secs(60),
            ephemeral_dir: rig.state.join("ephemeral"),
        };
        let node: union_csi::domain::NodeName = "node-a".parse().expect("a node");
        // For figures only: branches are found by the rig's own.
        let pools = Pools::new(Host::new(), node.clone(), Vec::new(), rig.state.clone());
        let keys = union_csi::node::keys::KeyFiles::new(&Host::new(), &rig.state);
        let exporting = Exporting { transports, uses: Arc::new(rig.volumes.clone()), keys };
        let executor =
            Arc::new(Executor::new(store, node, facts, Arc::new(pools), rig.branches.clone(), exporting));
        let shutdown = CancellationToken::new();
        let (worker, token) = (executor.clone(), shutdown.clone());
        let task = tokio::spawn(async move { worker.run(token).await });
        Self { executor, shutdown, task }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        self.task.await.expect("the executor ends");
    }
}

async fn order(rig: &Rig, vol: &Vol, index: u32, consumer: Option<&str>, epoch: u64) {
    loop {
        let mut branch = branch(rig, vol, index).await;
        let consumer = consumer.map(|name| name.parse().expect("a node"));
        branch.spec.access = Some(Access { consumer, epoch: Epoch(epoch) });
        match rig.store.branches().update(branch).await {
            Ok(_) => return,
            Err(union_csi::store::StoreError::Conflict { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

async fn branch(rig: &Rig, vol: &Vol, index: u32) -> Branch {
    let name = vol.branch(index).to_string();
    rig.store.branches().get(&name).await.expect("read").expect("the branch")
}

/// Waits until the owner has reported that.
async fn reported(rig: &Rig, vol: &Vol, index: u32, consumer: Option<&str>, epoch: u64) -> Branch {
    until(&format!("the report of {consumer:?} at {epoch}"), async || {
        let branch = branch(rig, vol, index).await;
        let allowed = branch.status.export.as_ref().map(|e| e.allowed.clone()).unwrap_or_default();
        let to = allowed.consumer.as_ref().map(|c| c.as_str().to_owned());
        (allowed.epoch == Epoch(epoch) && to.as_deref() == consumer).then_some(branch)
    })
    .await
}

/// Waits until the order is refused for a reason with these words.
async fn refused_for(rig: &Rig, vol: &Vol, words: &str) {
    until(words, async || {
        let branch = branch(rig, vol, 0).await;
        let condition = condition(&branch.status.conditions, "Exported").cloned();
        condition.filter(|c| !c.status && c.message.contains(words)).map(drop)
    })
    .await;
}

fn errno(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_that_is_ordered_away_loses_its_branches_at_once_and_comes_back_whole_when_it_is_given_back() {
    let mut rig = Rig::new(&["a", "b"]);
    let vol = rig.volume(&[("a", 64, IMAGE), ("b", 64, IMAGE)]).await;
    rig.up(&vol).await;
    fs::write(vol.target.join("kept"), "kept").expect("write");
    let mut held = fs::File::create(vol.target.join("held")).expect("open");
    held.write_all(b"before").and_then(|()| held.sync_all()).expect("write");
    rig.heal();
    let kernel = Arc::new(Kernel::default());
    let executing = Executing::start(&rig, rig.store.clone(), &kernel);
    for index in 0..2 {
        order(&rig, &vol, index, None, 1).await;
    }
    for index in 0..2 {
        reported(&rig, &vol, index, None, 1).await;
        assert!(!rig.branches_attached(&vol, index), "its image is let go");
    }
    assert!(held.write_all(b"after").and_then(|()| held.sync_all()).is_err());
    assert!(fs::read_to_string(vol.target.join("kept")).is_err());
    rig.refuses_to_attach(&vol, 0).await;
    for index in 0..2 {
        order(&rig, &vol, index, Some("node-a"), 2).await;
        reported(&rig, &vol, index, Some("node-a"), 2).await;
    }
    let content = until("the volume", async || fs::read_to_string(vol.target.join("kept")).ok()).await;
    assert_eq!(content, "kept");
    assert_eq!(fs::read_to_string(vol.target.join("held")).expect("read"), "before");
    rig.stop_healing().await;
    executing.stop().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_one_image_that_is_ordered_away_writes_nothing_more_and_is_let_go_with_its_last_user() {
    // The least that mkfs.xfs makes is 300 MiB.
    for (fs_type, size) in [("ext4", 64), ("xfs", 320)] {
        let rig = Rig::with(&[("a", "ext4", 512)]);
        let vol = rig.volume_with(&[("a", size, IMAGE)], &[("fsType", fs_type)]).await;
        rig.up(&vol).await;
        let mut held = fs::File::create(vol.target.join("held")).expect("open");
        held.write_all(b"before").and_then(|()| held.sync_all()).expect("write");
        let executing = Executing::start(&rig, rig.store.clone(), &Arc::default());
        order(&rig, &vol, 0, None, 1).await;
        refused_for(&rig, &vol, "end the pods").await;
        assert_eq!(errno(held.write_all(b"after")), Some(libc::EIO));
        let image = rig.image(&vol, 0).to_str().expect("utf-8").to_owned();
        let copy = rig.scratch.join("copy").to_str().expect("utf-8").to_owned();
        run("cp", &["--sparse=always", &image, &copy]);
        assert!(branch(&rig, &vol, 0).await.status.export.is_none(), "nobody is told that it is free");
        drop(held);
        reported(&rig, &vol, 0, None, 1).await;
        // Nothing was written to the image any more, not even by the last that let go of it.
        run("cmp", &[&image, &copy]);
        order(&rig, &vol, 0, Some("node-a"), 2).await;
        reported(&rig, &vol, 0, Some("node-a"), 2).await;
        rig.volumes.stage(&vol.stage()).await.expect("it is given back");
        assert_eq!(fs::read_to_string(vol.staging.join("held")).expect("read"), "before");
        executing.stop().await;
        rig.down(&vol).await;
        rig.assert_nothing_left();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_a_btrfs_image_is_not_taken_from_who_uses_it_and_they_are_named() {
    let rig = Rig::with(&[("a", "ext4", 512)]);
    let vol = rig.volume_with(&[("a", 256, IMAGE)], &[("fsType", "btrfs")]).await;
    rig.up(&vol).await;
    let held = vol.target.join("held");
    let open = fs::File::create(&held).expect("open");
    let mut user = std::process::Command::new("sleep").arg("300").stdin(open).spawn().expect("a process");
    let executing = Executing::start(&rig, rig.store.clone(), &Arc::default());
    order(&rig, &vol, 0, None, 1).await;
    let words = format!("end the pods that use volume {} here: process {} (", vol.id, user.id());
    refused_for(&rig, &vol, &words).await;
    refused_for(&rig, &vol, &format!("what uses {}", vol.target.display())).await;
    fs::write(&held, "still this node's").expect("it is still this node's");
    assert!(branch(&rig, &vol, 0).await.status.export.is_none(), "nobody is told that it is free");
    user.kill().and_then(|()| user.wait()).expect("its end");
    reported(&rig, &vol, 0, None, 1).await;
    assert!(!rig.branches_attached(&vol, 0), "its image is let go");
    executing.stop().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_of_a_directory_is_not_taken_from_who_uses_it() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 64, DIRECTORY)]).await;
    rig.up(&vol).await;
    let mut held = fs::File::create(vol.target.join("held")).expect("open");
    let executing = Executing::start(&rig, rig.store.clone(), &Arc::default());
    order(&rig, &vol, 0, None, 1).await;
    refused_for(&rig, &vol, "end the pods").await;
    held.write_all(b"still").expect("it is still this node's");
    assert!(branch(&rig, &vol, 0).await.status.export.is_none());
    drop(held);
    reported(&rig, &vol, 0, None, 1).await;
    assert!(!vol.target.join("held").exists(), "it is unmounted");
    rig.refuses_to_attach(&vol, 0).await;
    executing.stop().await;
    rig.down(&vol).await;
    rig.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_given_to_another_node_is_exported_again_by_its_mark_alone_and_goes_with_its_branch() {
    let rig = Rig::new(&["a"]);
    let vol = rig.volume(&[("a", 64, IMAGE)]).await;
    let kernel = Arc::new(Kernel::default());
    let executing = Executing::start(&rig, rig.store.clone(), &kernel);
    order(&rig, &vol, 0, Some("node-b"), 1).await;
    refused_for(&rig, &vol, "node node-b").await;
    assert_eq!(kernel.open(), []);
    publish_identity(&rig, "node-b", "nqn.b").await;
    let branch = reported(&rig, &vol, 0, Some("node-b"), 1).await;
    let report = branch.status.export.expect("a report");
    assert_eq!(report.generation, Generation(1));
    assert_eq!(report.address.as_deref(), Some("10.0.0.1:4420"));
    assert_eq!(report.name, Some(format!("nqn.{}", vol.branch(0))));
    assert_eq!(kernel.open(), [(1, "nqn.b".to_owned())]);
    rig.refuses_to_attach(&vol, 0).await;
    executing.stop().await;
    assert_eq!(kernel.open().len(), 1, "an agent that stops ends nothing");

    // Another agent, with a store that knows nothing, and a kernel that forgot.
    let forgot = Arc::new(Kernel::default());
    let empty = rig.mnt.join("empty.redb");
    let store = Arc::new(union_csi::store::local::LocalStore::open(&empty).expect("a store"));
    let executing = Executing::start(&rig, store, &forgot);
    until("the export", async || executing.executor.exports_restored().then_some(())).await;
    assert_eq!(forgot.open(), [(1, "nqn.b".to_owned())]);
    executing.stop().await;
    drop(fs::remove_file(empty));

    let executing = Executing::start(&rig, rig.store.clone(), &forgot);
    until("the first look", async || executing.executor.exports_restored().then_some(())).await;
    rig.store.splits().delete(vol.id.as_str(), None).await.expect("the volume goes");
    rig.store.branches().delete(vol.branch(0).as_str(), None).await.expect("its branch goes");
    until("the end of the branch", async || {
        rig.store.branches().get(vol.branch(0).as_str()).await.expect("read").is_none().then_some(())
    })
    .await;
    assert_eq!(forgot.open(), []);
    assert!(!rig.image(&vol, 0).exists());
    executing.stop().await;
    rig.assert_nothing_left();
}

/// The object of another node, as its agent publishes it.
async fn publish_identity(rig: &Rig, name: &str, identity: &str) {
    let node: union_csi::domain::NodeName = name.parse().expect("a node");
    let able = serde_json::json!({"able": true});
    let status: StorageNodeStatus = serde_json::from_value(serde_json::json!({
        "transports": [{"transport": "nvme-tcp", "owner": able, "consumer": able, "authentication": able,
            "identity": identity}]
    }))
    .expect("a status");
    let object = StorageNode {
        meta: Meta::new(name),
        spec: StorageNodeSpec { node },
        status: StorageNodeStatus::default(),
    };
    let mut made = rig.store.nodes().create(object).await.expect("a node object");
    made.status = status;
    rig.store.nodes().update_status(made).await.expect("its status");
}

impl Rig {
    /// Whether a loop device has the branch's image.
    fn branches_attached(&self, vol: &Vol, index: u32) -> bool {
        !Host::new().loop_devices_of(&self.image(vol, index)).expect("loop devices").is_empty()
    }

    /// Whatever is known of the object, also what it was before.
    async fn refuses_to_attach(&self, vol: &Vol, index: u32) {
        let now = branch(self, vol, index).await.spec;
        let before = BranchSpec { access: None, ..now.clone() };
        for spec in [now, before] {
            let refusal = self.branches.ensure_attached(&spec, &self.mnt.join("other"), false);
            assert!(matches!(refusal, Err(BranchError::Elsewhere { .. })), "{refusal:?}");
        }
    }

    fn image(&self, vol: &Vol, index: u32) -> std::path::PathBuf {
        let pools = ["a", "b"].map(|pool| self.scratch.join(pool));
        let of = |pool: &std::path::PathBuf| pool.join("branches").join(vol.branch(index)).join("disk.img");
        pools.iter().map(of).find(|image| image.exists()).unwrap_or_else(|| of(&pools[0]))
    }
}
