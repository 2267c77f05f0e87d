//! The executor with a real store and real disks.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use union_csi::domain::policy::FsType;
use union_csi::domain::pool::PoolState;
use union_csi::node::access::LocalUse;
use union_csi::node::executor::{Executor, Exporting, NodeFacts};
use union_csi::node::transport::Transports;
use union_csi::platform::Host;
use union_csi::store::local::LocalStore;
use union_csi::store::object::{
    Branch, BranchPhase, BranchSpec, BranchStatus, LABEL_EPHEMERAL, Meta, StorageNode,
};
use union_csi::store::{Selector, Store};

use crate::branch::{image, names};
use crate::support::{Scratch, disk, node, run};

/// No step of these tests takes a second; a machine that is this slow has stopped.
pub const BOUND: Duration = Duration::from_secs(60);

pub struct Running {
    pub store: Arc<dyn Store>,
    pub executor: Arc<Executor>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

/// Nothing here is used.
struct Unused;

impl LocalUse for Unused {
    fn end(&self, _branch: &BranchSpec) -> Result<(), String> {
        Ok(())
    }
}

impl Running {
    pub fn start(scratch: &Scratch, store: &Arc<dyn Store>, disks: &[&Path]) -> Self {
        let node = node(scratch, &Host::new(), disks);
        let facts = NodeFacts {
            labels: [("zone".to_owned(), "a".to_owned())].into(),
            cluster_labels: tokio::sync::watch::Sender::new(Some(Default::default())).subscribe(),
            agent_version: "1".to_owned(),
            mergerfs_version: None,
            kernel: "6".to_owned(),
            // Long: what follows a change must not wait for it; tests that need it change the disk and wait.
            measure_interval: Duration::from_millis(200),
            ephemeral_dir: scratch.join("ephemeral"),
        };
        let name = "node-1".parse().expect("node");
        let exporting = Exporting {
            transports: Arc::new(Transports::none()),
            uses: Arc::new(Unused),
            keys: union_csi::node::keys::KeyFiles::new(&Host::new(), scratch.path()),
        };
        let executor = Arc::new(Executor::new(
            store.clone(),
            name,
            facts,
            node.pools,
            Arc::new(node.branches),
            exporting,
        ));
        let shutdown = CancellationToken::new();
        let (worker, token) = (executor.clone(), shutdown.clone());
        let task = tokio::spawn(async move { worker.run(token).await });
        Self { store: store.clone(), executor, shutdown, task }
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(BOUND, self.task).await.expect("it stops").expect("no panic");
    }

    async fn create(&self, spec: &BranchSpec) {
        let branch = Branch {
            meta: Meta::with_finalizer(spec.id.as_str()),
            spec: spec.clone(),
            status: BranchStatus::default(),
        };
        self.store.branches().create(branch).await.expect("created");
    }

    async fn until(&self, id: &str, what: &str, holds: impl Fn(Option<&Branch>) -> bool) -> Option<Branch> {
        let wait = async {
            loop {
                let branch = self.store.branches().get(id).await.expect("read");
                if holds(branch.as_ref()) {
                    return branch;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match tokio::time::timeout(BOUND, wait).await {
            Ok(branch) => branch,
            Err(_) => panic!("{id} is not {what}: {:?}", self.store.branches().get(id).await),
        }
    }

    async fn phase(&self, id: &str, phase: BranchPhase) -> Branch {
        let what = format!("{phase:?}");
        self.until(id, &what, |b| b.is_some_and(|b| b.status.phase == phase)).await.expect("a branch")
    }

    async fn reported(&self, what: &str, holds: impl Fn(&StorageNode) -> bool) -> StorageNode {
        let wait = async {
            loop {
                let node = self.store.nodes().get("node-1").await.expect("read");
                if let Some(node) = node.filter(|node| holds(node)) {
                    return node;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        match tokio::time::timeout(BOUND, wait).await {
            Ok(node) => node,
            Err(_) => panic!("the node does not report {what}: {:?}", self.store.nodes().get("node-1").await),
        }
    }

    pub async fn pool_state(&self, state: PoolState) {
        let wait = async {
            loop {
                let published = self.store.nodes().get("node-1").await.expect("read");
                let there = |pools: &[union_csi::domain::pool::PoolReport]| {
                    pools.first().is_some_and(|p| p.state == state)
                };
                if there(&self.executor.latest()) && published.is_some_and(|n| there(&n.status.pools)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(BOUND, wait).await.unwrap_or_else(|_| panic!("the pool is not {state:?}"));
    }
}

pub fn local(scratch: &Scratch) -> Arc<dyn Store> {
    Arc::new(LocalStore::open(&scratch.join("store")).expect("store"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wanted_branch_is_made_published_and_removed() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 600);
    let running = Running::start(&scratch, &local(&scratch), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    running.create(&spec).await;
    let bound = running.phase("vol-0", BranchPhase::Bound).await;
    assert!(bound.status.fs_uuid.is_some() && bound.status.bytes_used >= spec.size);
    let id = "vol-1".parse().expect("id");
    let large = BranchSpec { id, index: 1, size: union_csi::domain::Bytes::gib(4), ..spec.clone() };
    running.create(&large).await;
    let refused = running.phase("vol-1", BranchPhase::Refused).await;
    assert!(refused.status.reason.contains("does not fit"), "{}", refused.status.reason);
    running.until("vol-0", "published", |_| running.executor.latest()[0].promised == spec.size).await;
    for id in ["vol-0", "vol-1"] {
        running.store.branches().delete(id, None).await.expect("delete");
        running.until(id, "gone", |b| b.is_none()).await;
    }
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
    let node = running.store.nodes().get("node-1").await.expect("read").expect("published");
    assert_eq!(node.status.labels["zone"], "a");
    assert!(node.status.conditions.iter().any(|c| c.kind == "Ready" && c.status));
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_is_deleted_by_hand_keeps_its_files_until_its_volume_is_deleted() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 600);
    let running = Running::start(&scratch, &local(&scratch), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    let split = serde_json::json!({
        "meta": {"name": "vol", "finalizers": ["union.io/data"]},
        "spec": {"volume": "vol", "requestName": "vol", "capacity": 1, "accessModes": ["SingleNodeWriter"],
                 "used": true, "nextIndex": 1, "branches": [
            {"index": 0, "node": spec.node, "pool": spec.pool, "size": spec.size, "usable": spec.usable, "format": "image"}
        ]}
    });
    let split = serde_json::from_value(split).expect("a volume");
    running.store.splits().create(split).await.expect("create");
    running.create(&spec).await;
    running.phase("vol-0", BranchPhase::Bound).await;
    running.store.branches().delete("vol-0", None).await.expect("delete");
    let kept = |b: Option<&Branch>| b.is_some_and(|b| b.status.reason.contains("volume vol needs it"));
    let branch = running.until("vol-0", "kept", kept).await.expect("there");
    assert_eq!(branch.status.phase, BranchPhase::Bound, "it can be used");
    assert!(disk.join("branches/vol-0/disk.img").exists());
    running.store.splits().delete("vol", None).await.expect("delete");
    running.until("vol-0", "gone", |b| b.is_none()).await;
    assert!(!disk.join("branches/vol-0").exists());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_branches_at_once_are_all_made_and_all_removed() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 1200);
    let running = Running::start(&scratch, &local(&scratch), &[&disk]);
    let specs: Vec<_> = (0..40)
        .map(|index| {
            let id = format!("vol-{index}").parse().expect("id");
            BranchSpec { id, index, ..image("one", 20, Some(FsType::Ext4)) }
        })
        .collect();
    for spec in &specs {
        running.create(spec).await;
    }
    for spec in &specs {
        running.phase(spec.id.as_str(), BranchPhase::Bound).await;
    }
    for spec in &specs {
        running.store.branches().delete(spec.id.as_str(), None).await.expect("delete");
    }
    for spec in &specs {
        running.until(spec.id.as_str(), "gone", |b| b.is_none()).await;
    }
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_is_lost_while_its_disk_is_away_and_bound_when_it_returns() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 200);
    let store = local(&scratch);
    let running = Running::start(&scratch, &store, &[&disk]);
    running.create(&image("one", 64, Some(FsType::Ext4))).await;
    running.phase("vol-0", BranchPhase::Bound).await;
    // The measurement may be reading the pool just now.
    run("umount", &["-l", disk.to_str().expect("path")]);
    running.pool_state(PoolState::Absent).await;
    let lost = running.phase("vol-0", BranchPhase::Lost).await;
    assert!(lost.status.reason.contains("not mounted"), "{}", lost.status.reason);
    running.stop().await;

    // A new agent finds it lost as well, and does not make it anew.
    let running = Running::start(&scratch, &store, &[&disk]);
    running.pool_state(PoolState::Absent).await;
    running.phase("vol-0", BranchPhase::Lost).await;
    assert_eq!(names(&disk), Vec::<String>::new());
    // Asked to go while its disk is away it stays, and says why.
    running.store.branches().delete("vol-0", None).await.expect("delete");
    let waits = |b: Option<&Branch>| b.is_some_and(|b| b.status.reason.contains("cannot be removed"));
    running.until("vol-0", "waiting for its disk", waits).await;
    run(
        "mount",
        &["-o", "loop", scratch.join("one.disk").to_str().expect("path"), disk.to_str().expect("path")],
    );
    running.until("vol-0", "gone", |b| b.is_none()).await;
    assert_eq!(names(&disk.join("branches")), Vec::<String>::new());
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_agent_finds_its_branches_and_misses_those_that_are_gone() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let store = local(&scratch);
    let running = Running::start(&scratch, &store, &[&disk]);
    let first = image("one", 64, Some(FsType::Ext4));
    let second = BranchSpec { id: "vol-1".parse().expect("id"), index: 1, ..first.clone() };
    for spec in [&first, &second] {
        running.create(spec).await;
        running.phase(spec.id.as_str(), BranchPhase::Bound).await;
    }
    running.stop().await;
    std::fs::remove_dir_all(disk.join("branches/vol-1")).expect("removed by hand");
    std::fs::create_dir_all(disk.join("branches/.gone-vol-2/data")).expect("a leftover");
    let running = Running::start(&scratch, &store, &[&disk]);
    let lost = running.phase("vol-1", BranchPhase::Lost).await;
    assert!(lost.status.reason.contains("missing"), "{}", lost.status.reason);
    running.phase("vol-0", BranchPhase::Bound).await;
    assert_eq!(names(&disk.join("branches")), ["vol-0"]);
    let all = store.branches().list(&Selector::All).await.expect("list");
    assert_eq!(all.len(), 2);
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_lies_on_a_disk_without_an_object_is_reported_until_it_is_removed_and_never_by_the_agent() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let before = Running::start(&scratch, &local(&scratch), &[&disk]);
    let lost = image("one", 64, Some(FsType::Ext4));
    before.create(&lost).await;
    before.phase("vol-0", BranchPhase::Bound).await;
    before.stop().await;
    std::fs::create_dir(disk.join("branches/Odd")).expect("someone's directory");
    std::fs::create_dir(disk.join("branches/vol-9")).expect("a branch without identity");

    // Its store is lost.
    let store: Arc<dyn Store> = Arc::new(LocalStore::open(&scratch.join("new-store")).expect("store"));
    let running = Running::start(&scratch, &store, &[&disk]);
    let kept = BranchSpec { id: "vol-1".parse().expect("id"), index: 1, ..lost.clone() };
    running.create(&kept).await;
    running.phase("vol-1", BranchPhase::Bound).await;
    let node = running.reported("three", |n| n.status.unclaimed.count == 3).await;
    let told: Vec<_> = node
        .status
        .unclaimed
        .branches
        .iter()
        .map(|b| (b.name.as_str(), b.size, b.problem.is_empty()))
        .collect();
    assert_eq!(told, [("Odd", None, false), ("vol-0", Some(lost.size), true), ("vol-9", None, false)]);
    let first = disk.join("branches/vol-0");
    assert_eq!(node.status.unclaimed.branches[1].path, first.to_str().expect("path"));
    running
        .reported("the room of both branches", |n| {
            n.status.pools.first().is_some_and(|p| p.promised.get() == lost.size.get() + kept.size.get())
        })
        .await;

    // What does not change is not written again.
    let settled = store.nodes().get("node-1").await.expect("read").expect("there");
    let mut measured = running.executor.watch_pools();
    for _ in 0..5 {
        measured.changed().await.expect("measured");
    }
    let later = store.nodes().get("node-1").await.expect("read").expect("there");
    assert_eq!(later.meta.version, settled.meta.version);

    std::fs::remove_dir_all(&first).expect("removed by hand");
    std::fs::remove_dir(disk.join("branches/Odd")).expect("removed by hand");
    running
        .reported("one, and the room of what was removed", |n| {
            n.status.unclaimed.count == 1 && n.status.pools.first().is_some_and(|p| p.promised == kept.size)
        })
        .await;
    assert_eq!(names(&disk.join("branches")), ["vol-1", "vol-9"], "the agent removes none of it");
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ephemeral_volume_without_the_directory_of_its_pod_is_reported() {
    let scratch = Scratch::new();
    let disk = disk(&scratch, "one", "ext4", 400);
    let running = Running::start(&scratch, &local(&scratch), &[&disk]);
    let spec = image("one", 64, Some(FsType::Ext4));
    let mut meta = Meta::with_finalizer(spec.id.as_str());
    meta.labels.insert(LABEL_EPHEMERAL.to_owned(), "true".to_owned());
    let branch = Branch { meta, spec, status: BranchStatus::default() };
    running.store.branches().create(branch).await.expect("created");
    let node = running.reported("it", |n| !n.status.abandoned.is_empty()).await;
    assert_eq!(node.status.abandoned[0].as_str(), "vol");
    std::fs::create_dir_all(scratch.join("ephemeral/vol")).expect("its directory");
    running.reported("none", |n| n.status.abandoned.is_empty()).await;
    running.stop().await;
}
