//! The splitter on an embedded store, with nodes that admit branches as real ones do: by what they have.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::task::JoinSet;

use super::*;
use crate::domain::pool::{Enforcement, Media, PoolReport, PoolState};
use crate::domain::reach::{Network, StorageNetwork};
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, VolumeId};
use crate::store::contract::eventually;
use crate::store::local::LocalStore;
use crate::store::object::{
    Branch, BranchPhase, FINALIZER, Meta, Object, StorageNode, StorageNodeSpec, StorageNodeStatus, Version,
    VolumeSplit, VolumeSplitSpec, VolumeSplitStatus, condition, pending,
};
use crate::store::{Collection, Event, Selector};

/// A store, and the tasks that work on it, which end with it.
struct Bench {
    store: Arc<dyn Store>,
    tasks: JoinSet<()>,
    _directory: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("union-csi-splitter-").tempdir().unwrap();
        let store = Arc::new(LocalStore::open(&directory.path().join("store.redb")).unwrap());
        Self { store, tasks: JoinSet::new(), _directory: directory }
    }

    fn start_splitter(&mut self) -> SplitterCounters {
        let splitter = Splitter::new(self.store.clone(), Timestamp::now);
        let counters = splitter.counters();
        self.tasks.spawn(splitter.run(CancellationToken::new()));
        counters
    }

    /// A node with pools of these GiB. Its agent admits what `admitted` GiB hold, which may be less than it reports.
    async fn start_node(&mut self, name: &str, pools: &[(&str, u64, u64)]) {
        report(&*self.store, name, pools).await;
        let room =
            pools.iter().map(|(pool, _, admitted)| ((*pool).to_owned(), Bytes::gib(*admitted))).collect();
        self.tasks.spawn(agent(self.store.clone(), name.to_owned(), room));
    }

    async fn ask(&self, name: &str, gib: u64) {
        self.store.splits().create(split(name, gib)).await.unwrap();
    }

    async fn ready(&self, name: &str) -> VolumeSplit {
        eventually(self.store.splits(), name, |s| holds(s, "Ready")).await.unwrap()
    }

    async fn infeasible(&self, name: &str) -> VolumeSplit {
        let wanted = |s: Option<&VolumeSplit>| pending_reason(s) == Some(pending::INFEASIBLE);
        eventually(self.store.splits(), name, wanted).await.unwrap()
    }

    async fn delete(&self, name: &str) {
        assert!(self.store.splits().delete(name, None).await.unwrap());
    }

    async fn gone(&self, name: &str) {
        eventually(self.store.splits(), name, |s| s.is_none()).await;
    }

    /// All branches by volume, and that each volume has those of its plan and no others. What its node was asked to remove,
    /// as a refused branch is beside a volume that is ready already, may take its time.
    async fn assert_consistent(&self) -> Vec<Branch> {
        for branch in self.store.branches().list(&Selector::All).await.unwrap() {
            if branch.meta.deleting.is_some() {
                eventually(self.store.branches(), &branch.meta.name, |b| b.is_none()).await;
            }
        }
        let branches = self.store.branches().list(&Selector::All).await.unwrap();
        let mut there: Vec<_> = branches.iter().map(|b| b.meta.name.clone()).collect();
        let splits = self.store.splits().list(&Selector::All).await.unwrap();
        let mut planned: Vec<_> = splits
            .iter()
            .flat_map(|s| s.spec.branches.iter().map(|b| s.spec.volume.branch(b.index).to_string()))
            .collect();
        there.sort();
        planned.sort();
        assert_eq!(there, planned, "branch objects are those that are planned");
        branches
    }
}

fn holds(split: Option<&VolumeSplit>, kind: &str) -> bool {
    split.and_then(|s| condition(&s.status.conditions, kind)).is_some_and(|c| c.status)
}

fn pending_reason(split: Option<&VolumeSplit>) -> Option<&str> {
    split.and_then(|s| condition(&s.status.conditions, "Pending")).map(|c| c.reason.as_str())
}

pub(super) fn split(name: &str, gib: u64) -> VolumeSplit {
    let volume = VolumeId::from_request_name(name);
    VolumeSplit {
        meta: Meta::with_finalizer(volume.to_string()),
        spec: VolumeSplitSpec {
            volume,
            request_name: name.to_owned(),
            capacity: Bytes::gib(gib),
            limit: None,
            access_modes: vec![AccessMode::SingleNodeWriter],
            volume_mode: VolumeMode::Filesystem,
            parameters: parameters(),
            consumer: None,
            topology: Vec::new(),
            ephemeral: false,
            branches: Vec::new(),
            next_index: 0,
            attached: Vec::new(),
            used: false,
        },
        status: VolumeSplitStatus::default(),
    }
}

/// Directory branches, whose size is what files can use: figures stay round.
fn parameters() -> BTreeMap<String, String> {
    [("branchFormat".to_owned(), "directory".to_owned())].into()
}

pub(super) fn pool(name: &str, gib: u64) -> PoolReport {
    PoolReport {
        name: name.parse().unwrap(),
        path: format!("/pools/{name}"),
        state: PoolState::Ready,
        message: String::new(),
        labels: BTreeMap::new(),
        media: Media::Unknown,
        device: String::new(),
        filesystem: "xfs".to_owned(),
        enforcement: Enforcement::ProjectQuota,
        enforcement_message: String::new(),
        image_filesystems: Vec::new(),
        total: Bytes::gib(gib),
        free: Bytes::gib(gib),
        reserve: Bytes::ZERO,
        promised: Bytes::ZERO,
        occupied: Bytes::ZERO,
        allocatable: None,
    }
}

async fn report(store: &dyn Store, name: &str, pools: &[(&str, u64, u64)]) {
    let status = StorageNodeStatus {
        pools: pools.iter().map(|(name, gib, _)| pool(name, *gib)).collect(),
        ..StorageNodeStatus::default()
    };
    let node = match store.nodes().get(name).await.unwrap() {
        Some(node) => node,
        None => {
            let spec = StorageNodeSpec { node: name.parse().unwrap() };
            let node = StorageNode { meta: Meta::new(name), spec, status: StorageNodeStatus::default() };
            store.nodes().create(node).await.unwrap()
        }
    };
    store.nodes().update_status(StorageNode { status, ..node }).await.unwrap();
}

/// A node's agent: admits what fits, refuses what does not, lets go what is deleted.
async fn agent(store: Arc<dyn Store>, node: String, room: BTreeMap<String, Bytes>) {
    let mut held: BTreeMap<String, (String, Bytes)> = BTreeMap::new();
    let mut watch = store.branches().watch(Selector::Node(node.parse().unwrap())).await.unwrap();
    while let Some(Ok(event)) = watch.next().await {
        let Event::Applied(branch) = event else { continue };
        let name = branch.meta.name.clone();
        let pool = branch.spec.pool.to_string();
        let written = if branch.meta.deleting.is_some() {
            held.remove(&name);
            let mut branch = branch;
            branch.meta.finalizers.clear();
            store.branches().update(branch).await.map(drop)
        } else if branch.status.phase == BranchPhase::Pending {
            let used = held.values().filter(|(p, _)| *p == pool).fold(0, |sum, (_, size)| sum + size.get());
            let mut branch = branch;
            branch.status.phase = if used + branch.spec.size.get() <= room[&pool].get() {
                held.insert(name, (pool, branch.spec.size));
                BranchPhase::Bound
            } else {
                branch.status.reason = "no room".to_owned();
                BranchPhase::Refused
            };
            store.branches().update_status(branch).await.map(drop)
        } else {
            continue;
        };
        match written {
            // A newer state is on its way here.
            Ok(()) | Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

#[tokio::test]
async fn a_volume_is_split_and_becomes_ready_and_goes_with_its_branches() {
    let mut bench = Bench::new();
    let counters = bench.start_splitter();
    bench.start_node("n1", &[("a", 10, 10), ("b", 10, 10)]).await;
    bench.ask("v", 15).await;
    let split = bench.ready("v").await;
    assert!(split.status.capacity >= Bytes::gib(15));
    assert_eq!((split.status.replicas, split.status.bound_replicas), (2, 2));
    assert_eq!(split.status.access_modes, split.spec.access_modes);
    assert_eq!(pending_reason(Some(&split)), Some(pending::BOUND));
    for kind in ["Pending", "ReplicaProgressing", "ReplicaFailure", "Degraded"] {
        assert!(!holds(Some(&split), kind), "{kind}: {:#?}", split.status.conditions);
    }
    let branches = bench.assert_consistent().await;
    assert_eq!(branches.len(), 2);
    assert!(branches.iter().all(|b| b.meta.finalizers == [FINALIZER]));
    bench.delete("v").await;
    bench.gone("v").await;
    assert!(bench.store.branches().list(&Selector::All).await.unwrap().is_empty());
    assert_eq!(counters.read().plans, 1);
    assert_eq!(counters.read().replans, 0);
}

#[tokio::test]
async fn a_volume_that_does_not_fit_says_what_would_and_binds_when_there_is_room() {
    let mut bench = Bench::new();
    let counters = bench.start_splitter();
    bench.start_node("n1", &[("a", 10, 11)]).await;
    bench.ask("v", 15).await;
    let split = bench.infeasible("v").await;
    assert_eq!(split.status.largest, Some(Bytes::gib(10)));
    assert!(split.spec.branches.is_empty());
    let since = condition(&split.status.conditions, "Pending").unwrap().last_transition_time;
    report(&*bench.store, "n1", &[("a", 11, 0)]).await;
    let wanted = |s: Option<&VolumeSplit>| s.is_some_and(|s| s.status.largest == Some(Bytes::gib(11)));
    let split = eventually(bench.store.splits(), "v", wanted).await.unwrap();
    let still = condition(&split.status.conditions, "Pending").unwrap();
    assert_eq!(still.last_transition_time, since, "it has been pending all the time");
    bench.start_node("n2", &[("b", 10, 10)]).await;
    let wanted = |s: Option<&VolumeSplit>| {
        s.and_then(|s| condition(&s.status.conditions, "Pending"))
            .is_some_and(|c| c.message.contains("nodes cannot reach each other"))
    };
    eventually(bench.store.splits(), "v", wanted).await.unwrap();
    bench.start_node("n3", &[("a", 10, 10), ("b", 10, 10)]).await;
    let split = bench.ready("v").await;
    assert!(split.spec.branches.iter().all(|b| b.node.as_str() == "n3"), "{:?}", split.spec.branches);
    assert_eq!(split.status.largest, None);
    assert!(counters.read().infeasible >= 2);
    assert_eq!(counters.read().waiting, 0);
}

/// The nodes' agents tell that they carry everything.
async fn carry(store: &dyn Store, names: &[&str]) {
    for name in names {
        let mut node = store.nodes().get(name).await.unwrap().unwrap();
        let able = Network::able([node.spec.node.clone()]);
        let able = able.node(&node.spec.node).unwrap().clone();
        node.status.transports = able.transports;
        let network = StorageNetwork { addresses: able.addresses, ..StorageNetwork::default() };
        node.status.network = Some(network);
        store.nodes().update_status(node).await.unwrap();
    }
}

#[tokio::test]
async fn a_volume_larger_than_each_node_binds_as_soon_as_nodes_reach_each_other_and_a_pods_own_does_not() {
    let mut bench = Bench::new();
    let _counters = bench.start_splitter();
    bench.start_node("n1", &[("a", 10, 10)]).await;
    bench.start_node("n2", &[("b", 10, 10)]).await;
    let ephemeral = |mut split: VolumeSplit| {
        split.spec.ephemeral = true;
        split.spec.consumer = Some("n1".parse().unwrap());
        split
    };
    bench.store.splits().create(ephemeral(split("own", 11))).await.unwrap();
    bench.ask("v", 15).await;
    bench.infeasible("v").await;
    carry(&*bench.store, &["n1", "n2"]).await;
    let planned = bench.ready("v").await;
    let nodes: BTreeSet<&str> = planned.spec.branches.iter().map(|b| b.node.as_str()).collect();
    assert_eq!(nodes, ["n1", "n2"].into());
    let own = bench.infeasible("own").await;
    assert_eq!(own.spec.branches, []);
    bench.assert_consistent().await;
}

#[tokio::test]
async fn what_replaces_a_refused_branch_is_in_reach_of_the_node_of_those_that_stay() {
    let mut bench = Bench::new();
    // "b" reports room that it does not have; n3 reaches nobody.
    bench.start_node("n1", &[("a", 10, 10)]).await;
    bench.start_node("n2", &[("b", 20, 0)]).await;
    bench.start_node("n3", &[("c", 15, 15)]).await;
    bench.start_node("n4", &[("d", 8, 8)]).await;
    carry(&*bench.store, &["n1", "n2", "n4"]).await;
    let mut wanted = split("v", 16);
    wanted.spec.parameters.insert("minBranches".to_owned(), "2".to_owned());
    bench.store.splits().create(wanted).await.unwrap();
    let _counters = bench.start_splitter();
    let planned = bench.ready("v").await;
    let nodes: BTreeSet<&str> = planned.spec.branches.iter().map(|b| b.node.as_str()).collect();
    assert_eq!(nodes, ["n1", "n4"].into(), "{:?}", planned.spec.branches);
    bench.assert_consistent().await;
}

#[tokio::test]
async fn a_refused_branch_is_planned_elsewhere_under_a_new_number_and_bound_ones_stay() {
    let mut bench = Bench::new();
    // "a" reports room that it does not have.
    bench.start_node("n1", &[("a", 60, 0)]).await;
    bench.start_node("n2", &[("b", 20, 20), ("c", 30, 30)]).await;
    let counters = bench.start_splitter();
    bench.ask("v", 50).await;
    let split = bench.ready("v").await;
    assert!(split.spec.branches.iter().all(|b| b.node.as_str() == "n2"), "{:?}", split.spec.branches);
    assert!(counters.read().replans >= 1);
    bench.assert_consistent().await;
    let mut numbers: Vec<_> = split.spec.branches.iter().map(|b| b.index).collect();
    numbers.dedup();
    assert_eq!(numbers.len(), split.spec.branches.len());
    assert!(split.spec.next_index > numbers[numbers.len() - 1]);
}

#[tokio::test]
async fn a_volume_refused_everywhere_is_pending_and_takes_nothing() {
    let mut bench = Bench::new();
    bench.start_node("n1", &[("a", 40, 0)]).await;
    bench.start_splitter();
    bench.ask("v", 30).await;
    let split = bench.infeasible("v").await;
    let message = &condition(&split.status.conditions, "Pending").unwrap().message;
    assert!(message.contains("n1/a"), "it names the pool that was left out: {message}");
    bench.delete("v").await;
    bench.gone("v").await;
    assert!(bench.store.branches().list(&Selector::All).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_volume_is_kept_while_it_is_attached() {
    let mut bench = Bench::new();
    bench.start_node("n1", &[("a", 10, 10)]).await;
    bench.start_splitter();
    bench.ask("v", 1).await;
    let mut split = bench.ready("v").await;
    split.spec.attached = vec![crate::store::object::Attachment {
        node: "n1".parse().unwrap(),
        access_mode: AccessMode::SingleNodeWriter,
        read_only: false,
        volume_attachment: None,
    }];
    bench.store.splits().update(split).await.unwrap();
    bench.delete("v").await;
    // What comes later has been decided after it.
    bench.ask("w", 1).await;
    bench.ready("w").await;
    let branches = bench.store.branches().list(&Selector::All).await.unwrap();
    assert!(branches.iter().all(|b| b.meta.deleting.is_none()));
    let mut split = bench.store.splits().get("v").await.unwrap().unwrap();
    split.spec.attached.clear();
    bench.store.splits().update(split).await.unwrap();
    bench.gone("v").await;
}

#[tokio::test]
async fn a_lost_branch_degrades_its_volume_and_is_never_made_anew() {
    let mut bench = Bench::new();
    bench.start_node("n1", &[("a", 10, 10), ("b", 10, 10)]).await;
    bench.start_splitter();
    bench.ask("v", 15).await;
    let before = bench.ready("v").await;
    let mut branch = bench.store.branches().get("v-0").await.unwrap().unwrap();
    branch.status.phase = BranchPhase::Lost;
    branch.status.reason = "pool a is absent".to_owned();
    let mut branch = bench.store.branches().update_status(branch).await.unwrap();
    let split = eventually(bench.store.splits(), "v", |s| holds(s, "Degraded")).await.unwrap();
    assert!(!holds(Some(&split), "Ready"));
    assert!(condition(&split.status.conditions, "Degraded").unwrap().message.contains("pool a is absent"));
    assert_eq!(split.spec.branches, before.spec.branches);
    branch.status.phase = BranchPhase::Bound;
    bench.store.branches().update_status(branch).await.unwrap();
    bench.ready("v").await;
    // Someone deletes the object by hand.
    bench.store.branches().delete("v-0", None).await.unwrap();
    eventually(bench.store.branches(), "v-0", |b| b.is_none()).await;
    let wanted = |s: Option<&VolumeSplit>| {
        s.and_then(|s| condition(&s.status.conditions, "Degraded"))
            .is_some_and(|c| c.message.contains("was deleted"))
    };
    let split = eventually(bench.store.splits(), "v", wanted).await.unwrap();
    assert_eq!(split.spec.branches, before.spec.branches);
    assert_eq!(bench.store.branches().get("v-0").await.unwrap(), None);
    bench.delete("v").await;
    bench.gone("v").await;
}

#[tokio::test]
async fn a_branch_without_a_volume_is_counted_and_kept() {
    let mut bench = Bench::new();
    bench.store.branches().create(crate::store::contract::branch("nobodys", 0, "n1")).await.unwrap();
    let counters = bench.start_splitter();
    bench.start_node("n1", &[("a", 10, 10), ("pool", 10, 10)]).await;
    bench.ask("v", 1).await;
    bench.ready("v").await;
    assert_eq!(counters.read().orphans, 1);
    assert!(bench.store.branches().get("nobodys-0").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_hundred_volumes_at_once_exactly_those_that_fit_become_ready() {
    let mut bench = Bench::new();
    bench.start_splitter();
    for node in ["n1", "n2", "n3"] {
        bench.start_node(node, &[("a", 10, 10), ("b", 10, 10)]).await;
    }
    let names: Vec<_> = (0..100).map(|n| format!("v{n:03}")).collect();
    futures::future::join_all(names.iter().map(|name| bench.ask(name, 1))).await;
    let (mut fit, mut rest) = (Vec::new(), Vec::new());
    for name in &names {
        let settled =
            |s: Option<&VolumeSplit>| holds(s, "Ready") || pending_reason(s) == Some(pending::INFEASIBLE);
        let split = eventually(bench.store.splits(), name, settled).await;
        if holds(split.as_ref(), "Ready") { fit.push(name) } else { rest.push(name) }
    }
    assert_eq!((fit.len(), rest.len()), (60, 40));
    assert_eq!(bench.assert_consistent().await.len(), 60);
    for name in &fit[..10] {
        bench.delete(name).await;
    }
    // Their room goes to ten of those that wait, by itself.
    let mut watch = bench.store.splits().watch(Selector::All).await.unwrap();
    let mut ready = std::collections::BTreeSet::new();
    while ready.len() < 60 {
        let next =
            tokio::time::timeout(Duration::from_secs(30), watch.next()).await.expect("progress").unwrap();
        match next.unwrap() {
            Event::Applied(s) if holds(Some(&s), "Ready") && s.meta.deleting.is_none() => {
                ready.insert(s.meta.name);
            }
            Event::Applied(s) | Event::Deleted(s) => drop(ready.remove(&s.meta.name)),
            Event::Ready => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_splitters_at_once_never_promise_too_much() {
    let mut bench = Bench::new();
    bench.start_node("n1", &[("a", 10, 10), ("b", 10, 10)]).await;
    bench.start_splitter();
    bench.start_splitter();
    let names: Vec<_> = (0..20).map(|n| format!("v{n:03}")).collect();
    futures::future::join_all(names.iter().map(|name| bench.ask(name, 1))).await;
    for name in &names {
        bench.ready(name).await;
    }
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for branch in bench.assert_consistent().await {
        assert_eq!(branch.status.phase, BranchPhase::Bound);
        *sums.entry(branch.spec.pool.to_string()).or_default() += branch.spec.size.get();
    }
    assert!(sums.values().all(|sum| *sum <= Bytes::gib(10).get()), "{sums:?}");
}

/// A store whose writes end with number `left`: that one fails before or after it took effect, later ones before.
struct Failing {
    inner: Arc<dyn Store>,
    left: Arc<AtomicI64>,
    splits: FailingCollection<VolumeSplit>,
    branches: FailingCollection<Branch>,
}

struct FailingCollection<T: Object> {
    inner: Arc<dyn Store>,
    of: fn(&dyn Store) -> &dyn Collection<T>,
    left: Arc<AtomicI64>,
    effective: bool,
}

impl Failing {
    fn new(inner: &Arc<dyn Store>, writes: i64, effective: bool) -> Self {
        let left = Arc::new(AtomicI64::new(writes));
        Self {
            inner: inner.clone(),
            left: left.clone(),
            splits: FailingCollection {
                inner: inner.clone(),
                of: |s| s.splits(),
                left: left.clone(),
                effective,
            },
            branches: FailingCollection { inner: inner.clone(), of: |s| s.branches(), left, effective },
        }
    }
}

impl<T: Object> FailingCollection<T> {
    async fn write<V>(&self, write: impl Future<Output = Result<V, StoreError>>) -> Result<V, StoreError> {
        let failed =
            || StoreError::Backend { action: "write".into(), source: "the test pulled the plug".into() };
        match self.left.fetch_sub(1, Ordering::SeqCst) {
            1.. => write.await,
            0 if self.effective => write.await.and_then(|_| Err(failed())),
            _ => Err(failed()),
        }
    }

    fn inner(&self) -> &dyn Collection<T> {
        (self.of)(&*self.inner)
    }
}

#[async_trait]
impl<T: Object> Collection<T> for FailingCollection<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.inner().get(name).await
    }
    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        self.inner().list(selector).await
    }
    async fn create(&self, object: T) -> Result<T, StoreError> {
        self.write(self.inner().create(object)).await
    }
    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.write(self.inner().update(object)).await
    }
    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.write(self.inner().update_status(object)).await
    }
    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        self.write(self.inner().delete(name, version)).await
    }
    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        self.inner().watch(selector).await
    }
}

impl Store for Failing {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        self.inner.nodes()
    }
}

/// Runs splitters that each die at write `n` until one had nothing more to die of.
async fn with_crashes_at(bench: &Bench, n: i64, effective: bool, done: impl AsyncFn()) {
    let mut crashes = 0;
    tokio::pin! {
        let end = done();
    }
    loop {
        let store = Arc::new(Failing::new(&bench.store, n, effective));
        let left = store.left.clone();
        let shutdown = CancellationToken::new();
        let mut splitter = tokio::spawn(Splitter::new(store, Timestamp::now).run(shutdown.clone()));
        let crashed = async {
            while left.load(Ordering::SeqCst) >= 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let ended = tokio::select! {
            () = &mut end => true,
            () = crashed => false,
        };
        shutdown.cancel();
        (&mut splitter).await.unwrap();
        if ended {
            break;
        }
        crashes += 1;
        assert!(crashes < 200, "no progress with crashes at write {n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_splitter_that_dies_at_any_write_is_gone_on_from() {
    for effective in [false, true] {
        for n in i64::from(!effective)..8 {
            let mut bench = Bench::new();
            // The first plan is refused by "a" and replaced, so that all kinds of write take part.
            bench.start_node("n1", &[("a", 12, 0), ("b", 8, 8), ("c", 10, 10)]).await;
            bench.ask("v", 15).await;
            let what = format!("a crash at write {n}, effective: {effective}");
            with_crashes_at(&bench, n, effective, async || drop(bench.ready("v").await)).await;
            // A splitter that lives cleans up what is left of earlier plans.
            let shutdown = CancellationToken::new();
            let splitter =
                tokio::spawn(Splitter::new(bench.store.clone(), Timestamp::now).run(shutdown.clone()));
            let planned = bench.ready("v").await.spec.branches;
            for index in 0..20 {
                if planned.iter().all(|b| b.index != index) {
                    eventually(bench.store.branches(), &format!("v-{index}"), |b| b.is_none()).await;
                }
            }
            shutdown.cancel();
            splitter.await.unwrap();
            let branches = bench.assert_consistent().await;
            let usable = branches.iter().fold(0, |sum, b| sum + b.spec.usable.get());
            assert!(usable >= Bytes::gib(15).get(), "{what}");
            bench.delete("v").await;
            with_crashes_at(&bench, n, effective, async || bench.gone("v").await).await;
            assert!(
                bench.store.branches().list(&Selector::All).await.unwrap().is_empty(),
                "{what}: nothing leaks"
            );
        }
    }
}
