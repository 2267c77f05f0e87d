use super::*;
use crate::store::local::LocalStore;
use crate::store::object::VolumeSplit;

/// A volume that no node can hold: the splitter's answer to it shows that there is a splitter.
fn volume(name: &str) -> VolumeSplit {
    serde_json::from_value(serde_json::json!({
        "meta": {"name": name},
        "spec": {"volume": name, "requestName": name, "capacity": 1_u64 << 40, "accessModes": []}
    }))
    .unwrap()
}

async fn answered(store: &Arc<dyn Store>, name: &str) -> bool {
    let answered = async {
        while store.splits().get(name).await.unwrap().unwrap().status.conditions.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(1), answered).await.is_ok()
}

#[tokio::test]
async fn controllers_run_while_this_instance_leads_and_at_no_other_time() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
    let splits = SplitterCounters::default();
    let controllers = Controllers {
        store: store.clone(),
        cluster: None,
        splits: splits.clone(),
        orphans: Findings::default(),
        access: AccessCounters::default(),
    };
    let led = watch::Sender::new(Leadership::default());
    let stop = CancellationToken::new();
    let task = tokio::spawn(lead(controllers, led.subscribe(), stop.clone()));

    store.splits().create(volume("a")).await.unwrap();
    assert!(!answered(&store, "a").await, "nobody leads");

    for (term, name) in [(1, "a"), (2, "b")] {
        let (held, claim) = watch::channel(Some(tokio::time::Instant::now() + Duration::from_secs(3600)));
        led.send_modify(|now| {
            now.claim = Some(Claim::until(claim));
            now.terms = term;
        });
        if name == "b" {
            store.splits().create(volume("b")).await.unwrap();
        }
        assert!(answered(&store, name).await, "term {term}");
        assert!(splits.read().infeasible >= term, "it goes on counting");
        held.send_replace(None);
        led.send_modify(|now| now.claim = None);
    }

    store.splits().create(volume("c")).await.unwrap();
    assert!(!answered(&store, "c").await, "the term is over");
    stop.cancel();
    task.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_term_that_followed_another_at_once_is_led_under_its_own_claim() {
    let directory = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
    let controllers = Controllers {
        store: store.clone(),
        cluster: None,
        splits: SplitterCounters::default(),
        orphans: Findings::default(),
        access: AccessCounters::default(),
    };
    let lost = watch::channel(None);
    let led = watch::Sender::new(Leadership {
        claim: Some(Claim::until(lost.1)),
        terms: 1,
        ..Leadership::default()
    });
    let stop = CancellationToken::new();
    let task = tokio::spawn(lead(controllers, led.subscribe(), stop.clone()));
    store.splits().create(volume("a")).await.unwrap();
    assert!(!answered(&store, "a").await, "its claim is not held: what it decides is not written");
    led.send_modify(|now| {
        now.claim = Some(Claim::always());
        now.terms = 2;
    });
    assert!(answered(&store, "a").await);
    stop.cancel();
    task.await.unwrap().unwrap();
}
