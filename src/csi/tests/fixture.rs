//! A store with stand-ins for the other roles, for the tests of the services.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::csi::Settings;
use crate::csi::node::VolumesOnNode;
use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::node::volume::{PublishRequest, StageRequest, Usage, VolumeError, VolumeStats};
use crate::store::local::LocalStore;
use crate::store::object::{StorageNode, VolumeSplit, pending, set_condition};
use crate::store::{Event, Selector, Store, StoreError};

/// The node of the tests, with a pool of [`ROOM`].
pub(in crate::csi) const NODE: &str = "here";

/// The largest volume that fits.
pub(in crate::csi) const ROOM: Bytes = Bytes::gib(8);

pub(in crate::csi) fn settings(dir: &Path) -> Settings {
    Settings {
        node: node(NODE),
        create_timeout: Duration::from_secs(20),
        max_volumes: None,
        ephemeral_dir: dir.join("ephemeral"),
    }
}

pub(in crate::csi) fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// A store, and the directory that it goes with.
pub(in crate::csi) struct Cluster {
    pub(in crate::csi) store: Arc<dyn Store>,
    pub(in crate::csi) dir: tempfile::TempDir,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Cluster {
    /// A store with one node, and nobody who acts.
    pub(in crate::csi) async fn idle() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store.redb");
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&path).unwrap());
        let cluster = Self { store, dir, tasks: Vec::new() };
        cluster.add_node(NODE).await;
        cluster
    }

    /// A store with one node, and a splitter that plans, binds and removes at once.
    pub(in crate::csi) async fn busy() -> Self {
        let mut cluster = Self::idle().await;
        cluster.start_splitter();
        cluster
    }

    pub(in crate::csi) fn start_splitter(&mut self) {
        let store = self.store.clone();
        self.tasks.push(tokio::spawn(async move { split_all(&*store).await }));
    }

    pub(in crate::csi) async fn add_node(&self, name: &str) {
        let node: StorageNode = serde_json::from_value(json!({
            "meta": {"name": name},
            "spec": {"node": name},
            "status": {"pools": [{"name": "a", "total": ROOM, "free": ROOM, "imageFilesystems": ["ext4"]}]}
        }))
        .unwrap();
        let made = self.store.nodes().create(node.clone()).await.unwrap();
        self.store.nodes().update_status(StorageNode { meta: made.meta, ..node }).await.unwrap();
    }

    pub(in crate::csi) async fn split(&self, name: &str) -> Option<VolumeSplit> {
        self.store.splits().get(name).await.unwrap()
    }

    /// Changes the volume as another role would.
    pub(in crate::csi) async fn change(&self, name: &str, change: impl Fn(&mut VolumeSplit)) {
        loop {
            let mut split = self.split(name).await.unwrap();
            change(&mut split);
            match self.store.splits().update(split).await {
                Ok(_) => return,
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    pub(in crate::csi) async fn change_status(&self, name: &str, change: impl Fn(&mut VolumeSplit)) {
        loop {
            let mut split = self.split(name).await.unwrap();
            change(&mut split);
            match self.store.splits().update_status(split).await {
                Ok(_) => return,
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

async fn split_all(store: &dyn Store) {
    let mut events = store.splits().watch(Selector::All).await.unwrap();
    while let Some(event) = events.next().await {
        if let Event::Applied(split) = event.unwrap() {
            // Another writer came first: its event comes too.
            match advance(store, split).await {
                Ok(()) | Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// One step of the volume's life.
async fn advance(store: &dyn Store, mut split: VolumeSplit) -> Result<(), StoreError> {
    let now = Timestamp::UNIX_EPOCH;
    if split.meta.deleting.is_some() {
        split.meta.finalizers.clear();
        store.splits().update(split).await?;
    } else if split.spec.branches.is_empty() && split.spec.capacity > ROOM {
        split.status.largest = Some(ROOM);
        let message = "pool here/a has 8Gi";
        set_condition(&mut split.status.conditions, now, "Pending", true, pending::INFEASIBLE, message);
        store.splits().update_status(split).await?;
    } else if split.spec.branches.is_empty() {
        plan(&mut split);
        store.splits().update(split).await?;
    } else if split.status.conditions.is_empty() {
        bind(&mut split);
        store.splits().update_status(split).await?;
    }
    Ok(())
}

pub(in crate::csi) fn plan(split: &mut VolumeSplit) {
    plan_on(split, NODE);
}

pub(in crate::csi) fn plan_on(split: &mut VolumeSplit, name: &str) {
    split.spec.branches = vec![PlannedBranch {
        index: 0,
        node: node(name),
        pool: "a".parse().unwrap(),
        size: split.spec.capacity,
        usable: split.spec.capacity,
        format: BranchFormat::Directory,
        fs_type: None,
    }];
}

pub(in crate::csi) fn bind(split: &mut VolumeSplit) {
    split.status.capacity = split.spec.capacity;
    set_condition(&mut split.status.conditions, Timestamp::UNIX_EPOCH, "Ready", true, "Bound", "");
}

/// Volumes on a node that remember what was called, and fail when they are told to.
#[derive(Default)]
pub(in crate::csi) struct FakeVolumes {
    pub(in crate::csi) calls: Mutex<Vec<String>>,
    pub(in crate::csi) fail: Mutex<Option<&'static str>>,
    /// A call waits for it, where there is one.
    pub(in crate::csi) gate: Option<Arc<tokio::sync::Semaphore>>,
    pub(in crate::csi) ready: Mutex<Option<String>>,
}

impl FakeVolumes {
    async fn called(&self, call: String) -> Result<(), VolumeError> {
        let name = call.split(' ').next().unwrap_or_default().to_owned();
        self.calls.lock().unwrap().push(call);
        if let Some(gate) = &self.gate {
            gate.acquire().await.unwrap().forget();
        }
        match *self.fail.lock().unwrap() {
            Some(failing) if failing == name => {
                let volume = "x".parse().unwrap();
                Err(VolumeError::Union { volume, reason: "mergerfs is missing".to_owned() })
            }
            _ => Ok(()),
        }
    }

    pub(in crate::csi) fn taken(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

#[async_trait::async_trait]
impl VolumesOnNode for FakeVolumes {
    async fn stage(&self, request: &StageRequest) -> Result<(), VolumeError> {
        self.called(format!("stage {} {}", request.volume, request.staging.display())).await
    }

    async fn unstage(&self, volume: &VolumeId, staging: &Path) -> Result<(), VolumeError> {
        self.called(format!("unstage {volume} {}", staging.display())).await
    }

    async fn publish(&self, request: &PublishRequest) -> Result<(), VolumeError> {
        let boot = if request.at_boot { " at-boot" } else { "" };
        let from = request.staging.display();
        self.called(format!("publish {} {from} {}{boot}", request.volume, request.target.display())).await
    }

    async fn unpublish(&self, volume: &VolumeId, target: &Path) -> Result<(), VolumeError> {
        self.called(format!("unpublish {volume} {}", target.display())).await
    }

    async fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats, VolumeError> {
        if path != Path::new("/t") {
            return Err(VolumeError::Unknown { volume: volume.clone() });
        }
        let bytes = Usage { total: 10, used: 4, available: 6 };
        let health = crate::node::volume::Health { abnormal: true, message: "a branch is slow".to_owned() };
        Ok(VolumeStats { bytes, inodes: Some(Usage { total: 3, used: 1, available: 2 }), health })
    }

    async fn ready(&self) -> Result<(), String> {
        self.ready.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}
