use std::collections::BTreeMap;

use super::*;

fn report() -> PoolReport {
    serde_json::from_str(
        r#"{"name":"p","device":"d","filesystem":"ext4","total":107374182400,"free":53687091200}"#,
    )
    .unwrap()
}

#[test]
fn small_movements_of_figures_are_no_news_and_all_else_is() {
    let old = report();
    let less = |bytes: u64| PoolReport { free: old.free.saturating_sub(Bytes::new(bytes)), ..old.clone() };
    assert!(!is_news(std::slice::from_ref(&old), &[less(1 << 20)]));
    assert!(is_news(std::slice::from_ref(&old), &[less(2 << 30)]));
    let absent = PoolReport { state: PoolState::Absent, ..old.clone() };
    assert!(is_news(std::slice::from_ref(&old), &[absent]));
    let promised = PoolReport { promised: Bytes::new(1), ..old.clone() };
    assert!(is_news(std::slice::from_ref(&old), &[promised]));
    assert!(is_news(std::slice::from_ref(&old), &[]));
    let full = PoolReport { free: Bytes::ZERO, ..old.clone() };
    let nearly = PoolReport { free: Bytes::new(4096), ..old };
    assert!(is_news(&[nearly], &[full]));
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[tokio::test]
async fn the_clusters_labels_are_published_when_they_come_and_the_configurations_win() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> =
        Arc::new(crate::store::local::LocalStore::open(&directory.path().join("s")).unwrap());
    let node: NodeName = "n".parse().unwrap();
    let mut earlier = StorageNode {
        meta: Meta::new("n"),
        spec: StorageNodeSpec { node: node.clone() },
        status: StorageNodeStatus::default(),
    };
    earlier.status.labels = labels(&[("zone", "old"), ("disk", "old")]);
    let status = earlier.status.clone();
    let created = store.nodes().create(earlier).await.unwrap();
    store.nodes().update_status(StorageNode { status, ..created }).await.unwrap();

    let cluster = watch::Sender::new(None);
    let facts = NodeFacts {
        labels: labels(&[("disk", "fast")]),
        cluster_labels: cluster.subscribe(),
        agent_version: String::new(),
        mergerfs_version: None,
        kernel: String::new(),
        measure_interval: Duration::from_secs(10),
    };
    let publisher = Publisher {
        store: store.clone(),
        node,
        facts,
        fresh: Arc::new(Fresh::new()),
        known: watch::Sender::new(false),
        published: Published::default(),
    };
    let (tell, measured) = watch::channel(None);
    let stop = CancellationToken::new();
    let running = tokio::spawn(publisher.run(measured, stop.clone()));
    tell.send_replace(Some(Measured { begun: 0, reports: Vec::new() }));
    let published = |wanted: BTreeMap<String, String>| {
        let store = store.clone();
        async move {
            let look = async {
                loop {
                    let object = store.nodes().get("n").await.unwrap().unwrap();
                    if object.status.labels == wanted {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), look).await.expect("the labels are published");
        }
    };
    published(labels(&[("zone", "old"), ("disk", "fast")])).await;
    cluster.send_replace(Some(labels(&[("zone", "a"), ("disk", "slow")])));
    published(labels(&[("zone", "a"), ("disk", "fast")])).await;
    cluster.send_replace(Some(labels(&[])));
    published(labels(&[("disk", "fast")])).await;
    stop.cancel();
    running.await.unwrap();
}

mod kept {
    //! What is kept of this node in a real store.

    use super::*;
    use crate::store::local::LocalStore;

    struct Bench {
        store: Arc<dyn Store>,
        tell: watch::Sender<Option<Measured>>,
        known: watch::Receiver<bool>,
        shutdown: CancellationToken,
        _directory: tempfile::TempDir,
    }

    impl Drop for Bench {
        fn drop(&mut self) {
            self.shutdown.cancel();
        }
    }

    fn bench() -> Bench {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
        let (tell, measured) = watch::channel(None);
        let known = watch::Sender::new(false);
        let facts = NodeFacts {
            labels: Default::default(),
            cluster_labels: watch::Sender::new(None).subscribe(),
            agent_version: "1".into(),
            mergerfs_version: None,
            kernel: "6".into(),
            measure_interval: Duration::from_secs(5),
        };
        let publisher = Publisher {
            store: store.clone(),
            node: "n".parse().unwrap(),
            facts,
            fresh: Arc::new(Fresh::new()),
            known: known.clone(),
            published: Published::default(),
        };
        let shutdown = CancellationToken::new();
        tokio::spawn(publisher.run(measured, shutdown.clone()));
        Bench { store, tell, known: known.subscribe(), shutdown, _directory: directory }
    }

    impl Bench {
        fn measure(&self) {
            self.tell.send_replace(Some(Measured { begun: 0, reports: vec![report()] }));
        }

        async fn until(&self, what: &str, holds: impl Fn(Option<&StorageNode>) -> bool) {
            let wait = async {
                while !holds(self.store.nodes().get("n").await.unwrap().as_ref()) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), wait).await.unwrap_or_else(|_| panic!("{what}"));
        }
    }

    #[tokio::test]
    async fn a_node_that_is_deleted_by_hand_is_made_again_and_one_that_is_edited_is_put_right() {
        let bench = bench();
        assert!(!*bench.known.borrow());
        bench.measure();
        bench.until("it is published", |n| n.is_some_and(|n| n.status.pools == [report()])).await;
        assert!(bench.known.clone().wait_for(|known| *known).await.is_ok());

        bench.store.nodes().delete("n", None).await.unwrap();
        bench.until("it is there again", |n| n.is_some_and(|n| n.status.pools == [report()])).await;

        let mut edited = bench.store.nodes().get("n").await.unwrap().unwrap();
        edited.status.pools.clear();
        bench.store.nodes().update_status(edited).await.unwrap();
        bench.until("it is put right", |n| n.is_some_and(|n| n.status.pools == [report()])).await;
    }

    #[tokio::test]
    async fn what_is_no_news_is_not_written() {
        let bench = bench();
        bench.measure();
        bench.until("it is published", |n| n.is_some_and(|n| !n.status.pools.is_empty())).await;
        let before = bench.store.nodes().get("n").await.unwrap();
        for _ in 0..10 {
            bench.measure();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(bench.store.nodes().get("n").await.unwrap(), before);
    }
}
