use std::collections::HashMap;
use std::sync::Mutex;

use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::json;

use super::*;
use crate::controllers::lease::Claim;
use crate::http::fixture::FakeStore;

/// How often each resource was asked for.
type Asked = Arc<Mutex<HashMap<String, u32>>>;

/// An API server on which PersistentVolumes and claims are listed in two pages each; refuses while `down`.
fn server(asked: &Asked, down: &watch::Receiver<bool>) -> Client {
    let (asked, down) = (asked.clone(), down.clone());
    let service = tower::service_fn(move |request: Request<Body>| {
        let resource = request.uri().path().rsplit('/').next().unwrap().to_owned();
        let query = request.uri().query().unwrap_or_default().to_owned();
        *asked.lock().unwrap().entry(resource.clone()).or_default() += 1;
        let down = *down.borrow();
        async move {
            let page = |number: u32| -> serde_json::Value {
                json!([{
                    "metadata": {"name": format!("{resource}-{number}"), "uid": format!("uid-{number}")},
                    "spec": {"csi": {"driver": crate::controllers::cluster::DRIVER, "volumeHandle": format!("h{number}")}}
                }])
            };
            let body = match (down, query.contains("continue=more")) {
                (true, _) => {
                    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                                    "message": "may not list", "reason": "Forbidden", "code": 403})
                }
                // One that is looked at by itself.
                _ if !query.contains("limit=500") => page(1)[0].clone(),
                (_, false) => json!({"metadata": {"continue": "more"}, "items": page(1)}),
                (_, true) => json!({"metadata": {}, "items": page(2)}),
            };
            let status = if down { StatusCode::FORBIDDEN } else { StatusCode::OK };
            let body = Body::from(serde_json::to_vec(&body).unwrap());
            Ok::<_, std::convert::Infallible>(Response::builder().status(status).body(body).unwrap())
        }
    });
    Client::new(service, "union")
}

fn scanner(asked: &Asked, down: &watch::Receiver<bool>) -> (OrphanScan, Findings) {
    let cluster = Cluster { client: server(asked, down), namespace: "union".into(), claim: Claim::always() };
    let findings = Findings::default();
    let scan = OrphanScan::new(cluster, Arc::new(FakeStore::new(false)), || Timestamp::UNIX_EPOCH);
    (scan.telling(findings.clone()), findings)
}

#[tokio::test(start_paused = true)]
async fn the_leader_looks_soon_and_then_once_an_hour_and_reads_each_kind_once() {
    let asked = Asked::default();
    let up = watch::Sender::new(false);
    let (scan, findings) = scanner(&asked, &up.subscribe());
    let stop = CancellationToken::new();
    let task = tokio::spawn(scan.run(stop.clone()));
    tokio::time::sleep(SETTLE / 2).await;
    assert_eq!(asked.lock().unwrap().len(), 0, "a new leader has better to do");
    assert_eq!(findings.read().last, None);
    assert!(findings.read().next.is_some(), "when it looks is told");

    tokio::time::sleep(SETTLE).await;
    let first = findings.read().last.unwrap();
    assert_eq!(first.counts[&OrphanKind::PersistentVolume], 2, "both pages were read: {first:?}");
    assert_eq!(first.orphans[0].name, "persistentvolumes-1");
    let count = |name: &str| asked.lock().unwrap().get(name).copied().unwrap_or_default();
    assert_eq!((count("persistentvolumes"), count("persistentvolumeclaims")), (2, 2), "two pages each, once");
    assert_eq!(count("persistentvolumes-1"), 1, "what is new is looked at by itself");

    tokio::time::sleep(INTERVAL * 10).await;
    let scans = count("persistentvolumes") / 2 - 1;
    assert!((9..=10).contains(&scans), "{scans} in ten hours");
    assert_eq!(count("persistentvolumeclaims"), count("persistentvolumes"));
    assert_eq!(count("persistentvolumes-1"), 1, "what is known is not looked at again");
    stop.cancel();
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_scan_that_fails_is_told_with_its_reason_and_done_again_soon() {
    let asked = Asked::default();
    let down = watch::Sender::new(true);
    let (scan, findings) = scanner(&asked, &down.subscribe());
    let stop = CancellationToken::new();
    let task = tokio::spawn(scan.run(stop.clone()));
    tokio::time::sleep(SETTLE * 2).await;
    let known = findings.read();
    assert!(
        known.problem.as_ref().is_some_and(|p| p.contains("persistentvolumes: may not list")),
        "{known:?}"
    );
    assert_eq!(known.last, None);
    down.send_replace(false);
    tokio::time::sleep(AGAIN * 2).await;
    let known = findings.read();
    assert!(known.problem.is_none() && known.last.is_some(), "{known:?}");
    stop.cancel();
    task.await.unwrap();
}

#[test]
fn no_two_scans_are_closer_than_the_interval_and_none_is_much_later() {
    for chance in [0, 1, 511, 1023, 1024, u64::MAX] {
        let wait = varied(INTERVAL, chance);
        assert!(wait >= INTERVAL && wait <= INTERVAL + INTERVAL / 10, "{wait:?}");
    }
    assert_ne!(varied(INTERVAL, 0), varied(INTERVAL, 1023));
}

#[test]
fn nothing_is_known_after_the_end_of_a_term() {
    let findings = Findings::default();
    let scan = Scan { at: Timestamp::UNIX_EPOCH, counts: counts(&[]), orphans: Vec::new() };
    findings.0.send_modify(|known| known.last = Some(Arc::new(scan)));
    assert!(findings.read().last.is_some());
    findings.rest();
    assert_eq!(findings.read(), Known::default());
}
