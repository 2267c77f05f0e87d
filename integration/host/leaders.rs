//! Two instances that both believe they lead, and one disk: the owner of the disk has the last word.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use union_csi::controllers::splitter::Splitter;
use union_csi::domain::Bytes;
use union_csi::domain::pool::PoolState;
use union_csi::domain::volume::{AccessMode, VolumeMode};
use union_csi::store::object::{
    Branch, BranchPhase, Meta, Object, StorageNode, Version, VolumeSplit, VolumeSplitSpec, VolumeSplitStatus,
};
use union_csi::store::{Collection, Event, Selector, Store, StoreError};

use crate::executor::{BOUND, Running, local};
use crate::support::{Scratch, disk, run};

/// The store as a leader sees it that knows nothing of the other: neither its volumes, nor what became of the disk since.
struct Blind {
    splits: Half<VolumeSplit>,
    branches: Half<Branch>,
    nodes: Half<StorageNode>,
}

struct Half<T> {
    store: Arc<dyn Store>,
    of: fn(&dyn Store) -> &dyn Collection<T>,
    sees: String,
    /// What is seen for ever instead of what changes.
    frozen: Option<Vec<T>>,
}

impl Blind {
    fn new(store: &Arc<dyn Store>, prefix: &str, nodes: Vec<StorageNode>) -> Self {
        fn half<T>(
            store: &Arc<dyn Store>,
            sees: &str,
            of: fn(&dyn Store) -> &dyn Collection<T>,
            frozen: Option<Vec<T>>,
        ) -> Half<T> {
            Half { store: store.clone(), of, sees: sees.to_owned(), frozen }
        }
        Self {
            splits: half(store, prefix, |s| s.splits(), None),
            branches: half(store, prefix, |s| s.branches(), None),
            nodes: half(store, "", |s| s.nodes(), Some(nodes)),
        }
    }
}

impl Store for Blind {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }
}

impl<T: Object> Half<T> {
    fn whole(&self) -> &dyn Collection<T> {
        (self.of)(&*self.store)
    }
}

#[async_trait]
impl<T: Object> Collection<T> for Half<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.whole().get(name).await
    }
    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        let mut all = self.whole().list(selector).await?;
        all.retain(|object| object.meta().name.starts_with(&self.sees));
        Ok(self.frozen.clone().unwrap_or(all))
    }
    async fn create(&self, object: T) -> Result<T, StoreError> {
        self.whole().create(object).await
    }
    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.whole().update(object).await
    }
    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.whole().update_status(object).await
    }
    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        self.whole().delete(name, version).await
    }
    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        if let Some(frozen) = &self.frozen {
            let events: Vec<_> =
                frozen.iter().cloned().map(Event::Applied).chain([Event::Ready]).map(Ok).collect();
            return Ok(futures::stream::iter(events).chain(futures::stream::pending()).boxed());
        }
        let sees = self.sees.clone();
        let events = self.whole().watch(selector).await?.filter(move |event| {
            let seen = match event {
                Ok(Event::Applied(object) | Event::Deleted(object)) => object.meta().name.starts_with(&sees),
                Ok(Event::Ready) | Err(_) => true,
            };
            std::future::ready(seen)
        });
        Ok(events.boxed())
    }
}

/// A volume of this many MiB of files, on one branch that is really reserved.
fn volume(name: &str, mib: u64) -> VolumeSplit {
    let parameters = [("splitQuantum", "16Mi"), ("branchFormat", "image"), ("maxBranches", "1")];
    VolumeSplit {
        meta: Meta::with_finalizer(name),
        spec: VolumeSplitSpec {
            volume: name.parse().expect("id"),
            request_name: name.to_owned(),
            capacity: Bytes::mib(mib),
            limit: None,
            access_modes: vec![AccessMode::SingleNodeWriter],
            volume_mode: VolumeMode::Filesystem,
            parameters: parameters.map(|(k, v)| (k.to_owned(), v.to_owned())).into(),
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

#[tokio::test(flavor = "multi_thread")]
async fn two_who_both_believe_they_lead_cannot_give_a_disk_away_twice() {
    const EACH: usize = 10;
    const SIZE: u64 = 40;
    let scratch = Scratch::new();
    // Room for what is asked of one leader, not of both.
    let disk = disk(&scratch, "one", "ext4", 800);
    let store = local(&scratch);
    let running = Running::start(&scratch, &store, &[&disk]);
    running.pool_state(PoolState::Ready).await;
    let nodes = store.nodes().list(&Selector::All).await.expect("read");
    let room = running.executor.latest()[0].allocatable();

    let shutdown = CancellationToken::new();
    let mut leaders = Vec::new();
    for prefix in ["a", "b"] {
        let blind: Arc<dyn Store> = Arc::new(Blind::new(&store, prefix, nodes.clone()));
        leaders.push(tokio::spawn(Splitter::new(blind, Timestamp::now).run(shutdown.clone())));
    }
    for n in 0..EACH {
        for prefix in ["a", "b"] {
            store.splits().create(volume(&format!("{prefix}{n}"), SIZE)).await.expect("created");
        }
    }

    // Until the disk is full.
    let wait = async {
        loop {
            let mut bound = store.branches().list(&Selector::All).await.expect("read");
            bound.retain(|b| b.status.phase == BranchPhase::Bound);
            let given = bound.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.spec.size));
            assert!(given <= room, "{given:?} of {room:?} given away");
            let size = bound.first().map_or(Bytes::mib(SIZE), |b| b.spec.size);
            if given.saturating_add(size) > room {
                return (bound.len(), size);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let (bound, size) = tokio::time::timeout(BOUND, wait).await.expect("the disk is given away");
    let wanted = size.get() * EACH as u64;
    assert!(wanted <= room.get(), "each leader alone could give what is asked of it, as far as it knows");
    assert!(2 * wanted > room.get() && bound < 2 * EACH, "both together cannot, and did not");
    // What the filesystem says: each byte that was given is really there.
    let images = run("sh", &["-c", &format!("ls {}/branches/*/disk.img | wc -l", disk.display())]);
    assert_eq!(images, bound.to_string());
    let latest = running.executor.latest();
    assert!(latest[0].free >= latest[0].reserve);

    shutdown.cancel();
    for leader in leaders {
        tokio::time::timeout(BOUND, leader).await.expect("it stops").expect("no panic");
    }
    running.stop().await;
}
