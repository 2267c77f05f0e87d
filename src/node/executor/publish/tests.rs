use std::collections::BTreeMap;

use super::*;

fn report() -> PoolReport {
    serde_json::from_str(
        r#"{"name":"p","device":"d","filesystem":"ext4","total":107374182400,"free":53687091200}"#,
    )
    .unwrap()
}

fn soon(old: &PoolReport, new: &PoolReport) -> Haste {
    haste(std::slice::from_ref(old), std::slice::from_ref(new), &Changed::default())
}

#[test]
fn what_others_go_by_is_told_at_once_figures_soon_and_hardly_a_difference_never() {
    let old = report();
    let less = |bytes: u64| PoolReport { free: old.free.saturating_sub(Bytes::new(bytes)), ..old.clone() };
    assert_eq!(soon(&old, &less(1 << 20)), Haste::Never);
    assert_eq!(soon(&old, &less(2 << 30)), Haste::Soon);
    let absent = PoolReport { state: PoolState::Absent, ..old.clone() };
    assert_eq!(soon(&old, &absent), Haste::Now);
    let promised = PoolReport { promised: Bytes::new(1), ..old.clone() };
    assert_eq!(soon(&old, &promised), Haste::Soon);
    assert_eq!(haste(std::slice::from_ref(&old), &[], &Changed::default()), Haste::Now);
    let full = PoolReport { free: Bytes::ZERO, ..old.clone() };
    let nearly = PoolReport { free: Bytes::new(4096), ..old };
    assert_eq!(soon(&nearly, &full), Haste::Now);
}

#[test]
fn a_change_here_is_told_soon_and_at_once_where_somebody_waits_for_it() {
    let old = [report()];
    let new = [PoolReport { free: old[0].free.saturating_sub(Bytes::new(4096)), ..old[0].clone() }];
    let changed = |here, awaited| Changed { here, awaited };
    assert_eq!(haste(&old, &new, &changed(false, false)), Haste::Never);
    assert_eq!(haste(&old, &new, &changed(true, false)), Haste::Soon);
    assert_eq!(haste(&old, &new, &changed(true, true)), Haste::Now);
    assert_eq!(haste(&old, &old, &changed(true, true)), Haste::Never, "there is nothing to tell");
}

#[test]
fn figures_that_move_all_the_time_are_written_once_in_a_while() {
    let start = Instant::now();
    let (mut last, mut writes) = (Some(start), 0);
    for tenth in 0..600 {
        let now = start + Duration::from_millis(100 * tenth);
        if due(Haste::Soon, last).is_none_or(|at| at <= now) {
            (last, writes) = (Some(now), writes + 1);
        }
    }
    assert_eq!(writes, 11, "in a minute");
    assert_eq!(due(Haste::Now, last), None);
    assert_eq!(due(Haste::Soon, None), None, "the first write waits for nothing");
}

#[test]
fn the_late_event_of_an_own_write_is_no_edit_and_anothers_write_is() {
    let stored = |version: &str| StorageNode {
        meta: Meta { version: Version(version.to_owned()), ..Meta::new("n") },
        spec: StorageNodeSpec { node: "n".parse().unwrap() },
        status: StorageNodeStatus { heartbeat: Some(Timestamp::now()), ..StorageNodeStatus::default() },
    };
    let mut published = Published::default();
    published.wrote(stored("1"), Instant::now());
    published.wrote(stored("2"), Instant::now());
    // Each of these, taken for an edit, would lead to a write, whose event would come as late.
    published.note(stored("1"));
    published.note(stored("2"));
    assert!(!published.edited);
    assert_eq!(published.object.as_ref().unwrap().meta.version.0, "2");
    published.note(stored("3"));
    assert!(published.edited);
    published.wrote(stored("4"), Instant::now());
    assert!(!published.edited);
}

#[test]
fn what_an_older_definition_of_the_object_leaves_out_is_not_written_for_ever() {
    let carried = Carried { network: Some(Default::default()), ..Carried::default() };
    let stored = StorageNode {
        meta: Meta::new("n"),
        spec: StorageNodeSpec { node: "n".parse().unwrap() },
        status: StorageNodeStatus::default(),
    };
    let mut published = Published::default();
    assert!(published.carries_other(&stored, &carried));
    published.wrote(stored.clone(), Instant::now());
    published.carried = Some(carried.clone());
    assert!(!published.carries_other(&stored, &carried), "it was told, though it is not there");
    assert!(published.carries_other(&stored, &Carried::default()));
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
        ephemeral_dir: "/nowhere".into(),
    };
    let publisher = Publisher {
        store: store.clone(),
        node,
        facts,
        fresh: Arc::new(Fresh::new()),
        known: watch::Sender::new(false),
        published: Published::default(),
        carried: watch::Sender::default().subscribe(),
        strays: watch::Sender::new(None).subscribe(),
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
        carried: watch::Sender<Carried>,
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
        let (known, carried) = (watch::Sender::new(false), watch::Sender::default());
        let facts = NodeFacts {
            labels: Default::default(),
            cluster_labels: watch::Sender::new(None).subscribe(),
            agent_version: "1".into(),
            mergerfs_version: None,
            kernel: "6".into(),
            measure_interval: Duration::from_secs(5),
            ephemeral_dir: "/nowhere".into(),
        };
        let publisher = Publisher {
            store: store.clone(),
            node: "n".parse().unwrap(),
            facts,
            fresh: Arc::new(Fresh::new()),
            known: known.clone(),
            published: Published::default(),
            carried: carried.subscribe(),
            strays: watch::Sender::new(None).subscribe(),
        };
        let shutdown = CancellationToken::new();
        tokio::spawn(publisher.run(measured, shutdown.clone()));
        Bench { store, tell, carried, known: known.subscribe(), shutdown, _directory: directory }
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

    #[tokio::test]
    async fn what_the_node_can_carry_is_told_at_once_with_what_is_wrong_and_once() {
        use crate::domain::reach::{Ability, StorageNetwork, Transport, TransportReport};

        let bench = bench();
        bench.measure();
        bench.until("it is published", |n| n.is_some_and(|n| !n.status.pools.is_empty())).await;
        let able = || Ability { able: true, reason: "loaded".into() };
        let nvme = TransportReport {
            transport: Transport::NvmeTcp,
            owner: able(),
            consumer: able(),
            authentication: able(),
            encryption: able(),
            identity: Some("nqn".into()),
        };
        let network = StorageNetwork {
            interface: "eth1".into(),
            addresses: vec!["10.0.0.1".into()],
            ..StorageNetwork::default()
        };
        let well = Carried { transports: vec![nvme.clone()], network: Some(network.clone()) };
        bench.carried.send_replace(well.clone());
        let condition = |n: &StorageNode| {
            n.status
                .conditions
                .iter()
                .find(|c| c.kind == STORAGE_NETWORK)
                .map(|c| (c.status, c.message.clone()))
        };
        bench
            .until("it is told", |n| {
                n.is_some_and(|n| {
                    n.status.transports == [nvme.clone()]
                        && n.status.network == Some(network.clone())
                        && condition(n) == Some((true, String::new()))
                })
            })
            .await;

        let before = bench.store.nodes().get("n").await.unwrap();
        for _ in 0..10 {
            bench.carried.send_replace(well.clone());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(bench.store.nodes().get("n").await.unwrap(), before, "the same again is no news");

        let bad = StorageNetwork { problem: "eth1 is down".into(), ..network };
        bench.carried.send_replace(Carried { network: Some(bad), ..well });
        let message = "eth1 is down".to_owned();
        bench.until("the problem is told", |n| n.and_then(condition) == Some((false, message.clone()))).await;
        bench.carried.send_replace(Carried::default());
        bench
            .until("nothing is left of it", |n| {
                n.is_some_and(|n| {
                    condition(n).is_none() && n.status.network.is_none() && n.status.transports.is_empty()
                })
            })
            .await;
    }
}
