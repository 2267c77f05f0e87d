//! The controller on an embedded store, with owners that do by hand what their part decides, in kernels of the test's own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;
use crate::domain::access::{
    Access, Epoch, Exported, Generation, Mark, Owned, OwnerAction, Peer, owner_step,
};
use crate::domain::reach::Transport;
use crate::domain::volume::AccessMode;
use crate::store::contract::{branch, eventually};
use crate::store::local::LocalStore;
use crate::store::object::{Attachment, Branch, StorageNode, Version, VolumeSplit};
use crate::store::{Collection, Event, Selector, StoreError};

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// A store, and the tasks that work on it, which end with it.
struct Bench {
    store: Arc<dyn Store>,
    tasks: JoinSet<()>,
    /// What was seen that must never be.
    broken: Arc<Mutex<Vec<String>>>,
    _directory: tempfile::TempDir,
}

impl Bench {
    /// With volume `v`, whose branches lie on these nodes.
    async fn new(owners: &[&str]) -> Self {
        let directory = tempfile::Builder::new().prefix("union-csi-access-").tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("store.redb")).unwrap());
        let bench = Self { store, tasks: JoinSet::new(), broken: Arc::default(), _directory: directory };
        let split = serde_json::json!({
            "meta": {"name": "v"}, "spec": {"volume": "v", "requestName": "v", "capacity": 1, "accessModes": []}
        });
        bench.store.splits().create(serde_json::from_value(split).unwrap()).await.unwrap();
        for (index, owner) in (0..).zip(owners) {
            bench.store.branches().create(branch("v", index, owner)).await.unwrap();
            let node = serde_json::json!({"meta": {"name": owner}, "spec": {"node": owner}});
            // Two branches may lie on one node.
            let _ = bench.store.nodes().create(serde_json::from_value(node).unwrap()).await;
        }
        bench
    }

    fn lead(&mut self) -> AccessCounters {
        self.lead_over(self.store.clone())
    }

    fn lead_over(&mut self, store: Arc<dyn Store>) -> AccessCounters {
        let counters = AccessCounters::default();
        let controller = AccessController::new(store, Timestamp::now).counting(counters.clone());
        self.tasks.spawn(controller.run(CancellationToken::new()));
        counters
    }

    /// An owner of all its branches; it acts while the value is true.
    fn own(&mut self, name: &str) -> watch::Sender<bool> {
        let acts = watch::Sender::new(true);
        self.tasks.spawn(own(self.store.clone(), node(name), acts.subscribe()));
        acts
    }

    /// Looks at each state of each branch.
    async fn judge(&mut self) {
        let mut events = self.store.branches().watch(Selector::All).await.unwrap();
        let broken = self.broken.clone();
        self.tasks.spawn(async move {
            let mut last: BTreeMap<String, Access> = BTreeMap::new();
            while let Some(Ok(event)) = events.next().await {
                let Event::Applied(branch) = event else { continue };
                let (Some(access), name) = (branch.spec.access.clone(), branch.meta.name) else { continue };
                let before = last.insert(name.clone(), access.clone()).unwrap_or_default();
                let allowed = branch.status.export.unwrap_or_default().allowed;
                let foreign = allowed.consumer.is_some() && allowed.consumer != access.consumer;
                let say =
                    |what| broken.lock().unwrap().push(format!("{name}: {what}: {access:?}, {allowed:?}"));
                if access.consumer.is_some() && foreign {
                    say("given to one while another has it");
                }
                if access != before && access.epoch <= before.epoch {
                    say("ordered anew at an old epoch");
                }
            }
        });
    }

    async fn attach(&self, nodes: &[&str]) {
        self.attach_as(nodes, AccessMode::SingleNodeWriter).await;
    }

    async fn attach_as(&self, nodes: &[&str], access_mode: AccessMode) {
        let mut split = self.store.splits().get("v").await.unwrap().unwrap();
        let attachment = |name: &&str| Attachment {
            node: node(name),
            access_mode,
            read_only: false,
            volume_attachment: None,
        };
        split.spec.attached = nodes.iter().map(attachment).collect();
        self.store.splits().update(split).await.unwrap();
    }

    /// Waits until the branch is given to `to`, by its owner too; returns the order.
    async fn given(&self, name: &str, to: Option<&str>) -> Access {
        let to = to.map(node);
        let so = |branch: Option<&Branch>| {
            let access = branch.and_then(|b| b.spec.access.as_ref());
            let allowed = branch.and_then(|b| b.status.export.as_ref()).map(|export| &export.allowed);
            access.is_some_and(|access| access.consumer == to) && access == allowed
        };
        eventually(self.store.branches(), name, so).await.unwrap().spec.access.unwrap()
    }

    async fn access(&self, name: &str) -> Option<Access> {
        self.store.branches().get(name).await.unwrap().unwrap().spec.access
    }

    fn assert_sound(&self) {
        assert_eq!(*self.broken.lock().unwrap(), [""; 0]);
    }
}

/// What an owner's kernel and disk have of a branch.
#[derive(Default)]
struct Kernel {
    mark: Option<Mark>,
    export: Option<Exported>,
}

async fn own(store: Arc<dyn Store>, me: NodeName, mut acts: watch::Receiver<bool>) {
    let identities: BTreeMap<NodeName, String> =
        ["a", "b", "c", "o", "p"].map(|n| (node(n), format!("nqn-{n}"))).into();
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut events = store.branches().watch(Selector::Node(me.clone())).await.unwrap();
    while let Some(Ok(event)) = events.next().await {
        let Event::Applied(branch) = event else { continue };
        if acts.wait_for(|acts| *acts).await.is_err() {
            return;
        }
        let kernel = kernels.entry(branch.meta.name.clone()).or_default();
        loop {
            let actions = owner_step(&Owned {
                node: &me,
                wanted: branch.spec.access.as_ref(),
                deleting: false,
                mark: kernel.mark.as_ref(),
                boot_id: "1",
                durable: false,
                export: kernel.export.as_ref(),
                here: false,
                identities: &identities,
                reported: branch.status.export.as_ref(),
            });
            if let [OwnerAction::Report(report)] = &actions[..] {
                let mut branch = branch.clone();
                branch.status.export = Some(report.clone());
                // Where the object changed since, its event is the next.
                let _ = store.branches().update_status(branch).await;
                break;
            }
            if actions.is_empty() {
                break;
            }
            actions.into_iter().for_each(|action| act(kernel, action));
        }
    }
}

fn act(kernel: &mut Kernel, action: OwnerAction) {
    let export = |generation: Generation| Exported {
        generation,
        address: "127.0.0.1:4420".to_owned(),
        name: generation.to_string(),
        transport: Transport::NvmeTcp,
        allowed: Vec::new(),
        readers: Vec::new(),
    };
    match action {
        OwnerAction::Fence(Peer::Remote(peer)) => {
            kernel.export.iter_mut().for_each(|export| export.allowed.retain(|allowed| *allowed != peer));
        }
        OwnerAction::Fence(Peer::Here) => {}
        OwnerAction::Unexport => kernel.export = None,
        OwnerAction::Remember(mark) => kernel.mark = Some(mark),
        OwnerAction::Export(generation) => kernel.export = Some(export(generation)),
        OwnerAction::Allow(peer) => {
            kernel.export.iter_mut().for_each(|export| export.allowed.push(peer.clone()))
        }
        OwnerAction::Report(_) => unreachable!("a report is alone"),
    }
}

#[tokio::test]
async fn a_move_is_taken_back_reported_and_given_on_all_branches() {
    let mut bench = Bench::new(&["o", "p"]).await;
    bench.judge().await;
    bench.own("o");
    bench.own("p");
    let counters = bench.lead();
    for (to, epoch) in [("a", 2), ("b", 4), ("a", 6)] {
        bench.attach(&[to]).await;
        for name in ["v-0", "v-1"] {
            assert_eq!(bench.given(name, Some(to)).await.epoch, Epoch(epoch), "{name} to {to}");
        }
    }
    bench.attach(&[]).await;
    assert_eq!(bench.given("v-0", None).await.epoch, Epoch(7));
    assert_eq!(bench.given("v-1", None).await.epoch, Epoch(7));
    bench.assert_sound();
    let AccessFigures { grants, revocations, waiting } = counters.read();
    assert_eq!((grants, revocations, waiting), (6, 8, 0));
}

#[tokio::test]
async fn a_volume_that_stays_with_its_branches_costs_no_write_until_it_moves() {
    let mut bench = Bench::new(&["o", "o"]).await;
    bench.own("o");
    let counters = bench.lead();
    bench.attach(&["o"]).await;
    bench.attach(&[]).await;
    bench.attach(&["o"]).await;
    // Another volume's order shows that all this was looked at.
    bench.store.branches().create(branch("w", 0, "o")).await.unwrap();
    let mut other: VolumeSplit = bench.store.splits().get("v").await.unwrap().unwrap();
    other.meta = crate::store::object::Meta::new("w");
    other.spec.volume = "w".parse().unwrap();
    other.spec.attached[0].node = node("a");
    bench.store.splits().create(other).await.unwrap();
    bench.given("w-0", Some("a")).await;
    assert_eq!(bench.access("v-0").await, None);
    assert_eq!(counters.read().grants, 1);
    bench.attach(&["a"]).await;
    assert_eq!(bench.given("v-0", Some("a")).await.epoch, Epoch(2), "its owner ends its own use first");
    bench.attach(&["o"]).await;
    assert_eq!(bench.given("v-0", Some("o")).await.epoch, Epoch(4), "and comes back by an order");
}

#[tokio::test]
async fn nothing_is_given_while_the_owner_does_not_answer_and_all_is_when_it_is_back() {
    let mut bench = Bench::new(&["o"]).await;
    bench.judge().await;
    let owner = bench.own("o");
    bench.lead();
    bench.attach(&["a"]).await;
    bench.given("v-0", Some("a")).await;
    owner.send_replace(false);
    bench.attach(&["b"]).await;
    let revoked = |branch: Option<&Branch>| {
        branch.and_then(|b| b.spec.access.as_ref()).is_some_and(|access| access.epoch == Epoch(3))
    };
    eventually(bench.store.branches(), "v-0", revoked).await;
    // Whatever comes and goes meanwhile, and whoever leads then.
    bench.attach(&["c"]).await;
    bench.attach(&["b"]).await;
    bench.lead();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bench.access("v-0").await, Some(Access { consumer: None, epoch: Epoch(3) }));
    owner.send_replace(true);
    assert_eq!(bench.given("v-0", Some("b")).await.epoch, Epoch(4));
    bench.assert_sound();
}

#[tokio::test]
async fn two_leaders_at_once_give_every_epoch_once() {
    let mut bench = Bench::new(&["o", "p", "o"]).await;
    bench.judge().await;
    bench.own("o");
    bench.own("p");
    let leaders = [bench.lead(), bench.lead()];
    let mut last = BTreeSet::new();
    for to in ["a", "b", "c", "o", "p", "a", "b"] {
        bench.attach(&[to]).await;
        for name in ["v-0", "v-1", "v-2"] {
            let access = bench.given(name, Some(to)).await;
            last.insert((to, name, access.epoch.0));
        }
    }
    let mut epochs = 0;
    for name in ["v-0", "v-1", "v-2"] {
        epochs += bench.access(name).await.unwrap().epoch.0;
    }
    let written: u64 = leaders.iter().map(AccessCounters::read).map(|f| f.grants + f.revocations).sum();
    assert_eq!(written, epochs, "each write has an epoch of its own: {last:?}");
    bench.assert_sound();
}

#[tokio::test]
async fn what_several_nodes_use_at_once_is_given_to_none_of_them_by_order() {
    let mut bench = Bench::new(&["o"]).await;
    bench.own("o");
    bench.lead();
    bench.attach(&["a"]).await;
    bench.given("v-0", Some("a")).await;
    bench.attach_as(&["a", "b"], AccessMode::MultiNodeMultiWriter).await;
    assert_eq!(bench.given("v-0", None).await.epoch, Epoch(3), "the one order that it had is taken back");
}

#[tokio::test]
async fn a_branch_whose_volume_has_no_object_is_left_as_it_is() {
    let mut bench = Bench::new(&["o"]).await;
    bench.own("o");
    bench.lead();
    bench.attach(&["a"]).await;
    let given = bench.given("v-0", Some("a")).await;
    bench.store.splits().delete("v", None).await.unwrap();
    bench.lead();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(bench.access("v-0").await, Some(given));
}

#[tokio::test]
async fn a_write_that_fails_at_any_place_done_or_not_is_made_good() {
    for effective in [false, true] {
        for left in 0..4 {
            let mut bench = Bench::new(&["o"]).await;
            bench.judge().await;
            bench.own("o");
            let fault = Fault::Fails { left: AtomicI64::new(left), effective };
            let store = Faulty { inner: bench.store.clone(), fault };
            bench.lead_over(Arc::new(store));
            bench.attach(&["a"]).await;
            bench.given("v-0", Some("a")).await;
            bench.attach(&["b"]).await;
            assert_eq!(bench.given("v-0", Some("b")).await.epoch, Epoch(4), "{effective} {left}");
            bench.assert_sound();
        }
    }
}

#[tokio::test]
async fn an_answer_that_comes_after_the_owner_has_acted_on_the_order_takes_nothing_back() {
    let mut bench = Bench::new(&["o"]).await;
    bench.judge().await;
    bench.own("o");
    bench.lead_over(Arc::new(Faulty { inner: bench.store.clone(), fault: Fault::AnswersLate }));
    for (to, epoch) in [("a", 2), ("b", 4), ("a", 6)] {
        bench.attach(&[to]).await;
        assert_eq!(bench.given("v-0", Some(to)).await.epoch, Epoch(epoch), "to {to}");
    }
    bench.assert_sound();
}

enum Fault {
    /// Write of a branch number `left` fails: with `effective` after it was done.
    Fails { left: AtomicI64, effective: bool },
    /// Writes of branches are answered when their owner has acted on them, and that was told.
    AnswersLate,
}

/// A store with a fault.
struct Faulty {
    inner: Arc<dyn Store>,
    fault: Fault,
}

impl Store for Faulty {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        self.inner.splits()
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        self
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        self.inner.nodes()
    }
}

#[async_trait]
impl Collection<Branch> for Faulty {
    async fn get(&self, name: &str) -> Result<Option<Branch>, StoreError> {
        self.inner.branches().get(name).await
    }
    async fn list(&self, selector: &Selector) -> Result<Vec<Branch>, StoreError> {
        self.inner.branches().list(selector).await
    }
    async fn create(&self, object: Branch) -> Result<Branch, StoreError> {
        self.inner.branches().create(object).await
    }
    async fn update(&self, object: Branch) -> Result<Branch, StoreError> {
        let failed =
            || StoreError::Backend { action: "write".into(), source: "the test pulled the plug".into() };
        let branches = self.inner.branches();
        match &self.fault {
            Fault::Fails { left, effective } => match left.fetch_sub(1, Ordering::SeqCst) {
                0 if *effective => branches.update(object).await.and_then(|_| Err(failed())),
                0 => Err(failed()),
                _ => branches.update(object).await,
            },
            Fault::AnswersLate => {
                let answer = branches.update(object).await?;
                let acted = |branch: Option<&Branch>| {
                    let report = branch.and_then(|b| b.status.export.as_ref());
                    report.map(|export| &export.allowed) == answer.spec.access.as_ref()
                };
                eventually(branches, &answer.meta.name, acted).await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                Ok(answer)
            }
        }
    }
    async fn update_status(&self, object: Branch) -> Result<Branch, StoreError> {
        self.inner.branches().update_status(object).await
    }
    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        self.inner.branches().delete(name, version).await
    }
    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<Branch>, StoreError>>, StoreError> {
        self.inner.branches().watch(selector).await
    }
}
