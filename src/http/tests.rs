use std::sync::Arc;

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tower::ServiceExt;

use super::api::{HealthState, Standing};
use super::fixture::{self, FakeMachine};
use super::routes::ROUTES;
use super::*;
use crate::controllers::orphans::Known;
use crate::domain::access::{Access, Epoch};
use crate::store::object::Branch;
use crate::store::{Selector, Store};

struct Answer {
    status: StatusCode,
    headers: axum::http::HeaderMap,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

async fn ask_as(view: Arc<View>, host: &str, method: &str, path: &str) -> Answer {
    let request =
        Request::builder().method(method).uri(path).header(header::HOST, host).body(Body::empty()).unwrap();
    let response = router(view).oneshot(request).await.unwrap();
    let (status, headers) = (response.status(), response.headers().clone());
    let body = response.into_body().collect().await.unwrap().to_bytes();
    Answer { status, headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

async fn ask(path: &str) -> Answer {
    ask_as(fixture::view(FakeMachine::default(), false), "127.0.0.1:9830", "GET", path).await
}

#[tokio::test]
async fn every_documented_route_answers_and_no_other_does() {
    let document = openapi_document();
    let paths = document["paths"].as_object().unwrap();
    assert_eq!(paths.len(), ROUTES.len());
    for path in paths.keys() {
        let path = path.replace("{id}", "media");
        let answer = ask(&path).await;
        let expected = match path.as_str() {
            "/v1/plan" => StatusCode::BAD_REQUEST,
            "/v1/orphans" => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::OK,
        };
        assert_eq!(answer.status, expected, "{path}: {}", answer.body);
    }
    assert_eq!(ask("/v1/nothing").await.status, StatusCode::NOT_FOUND);
    assert_eq!(ask("/v1/volumes/unknown").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn the_description_resolves_every_reference() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                if let Some(Value::String(to)) = map.get("$ref") {
                    found.push(to.clone());
                }
                map.values().for_each(|v| references(v, found));
            }
            Value::Array(list) => list.iter().for_each(|v| references(v, found)),
            _ => {}
        }
    }
    let document = openapi_document();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(found.len() > 10, "{found:?}");
    for reference in found {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
    assert_eq!(ask("/openapi.json").await.json(), document);
}

#[tokio::test]
async fn nothing_can_be_changed_through_the_api() {
    for route in ROUTES {
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            let view = fixture::view(FakeMachine::default(), false);
            let path = route.path.replace("{id}", "media");
            let answer = ask_as(view, "localhost", method, &path).await;
            assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn a_request_under_a_foreign_name_is_refused() {
    for path in ["/", "/v1/volumes", "/metrics", "/nothing"] {
        let view = fixture::view(FakeMachine::default(), false);
        let answer = ask_as(view, "rebound.example:9830", "GET", path).await;
        assert_eq!(answer.status, StatusCode::MISDIRECTED_REQUEST, "{path}");
        assert!(!answer.body.contains("media"));
    }
}

#[tokio::test]
async fn every_answer_carries_the_headers_that_keep_browsers_out() {
    for path in ["/", "/v1/volumes", "/nothing", "/healthz"] {
        let answer = ask(path).await;
        let has =
            |name: &str| answer.headers.get(name).map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
        assert_eq!(has("x-content-type-options"), "nosniff", "{path}");
        assert_eq!(has("cache-control"), "no-store", "{path}");
        assert!(has("content-security-policy").starts_with("default-src 'none';"), "{path}");
        assert!(answer.headers.get("access-control-allow-origin").is_none(), "{path}");
    }
}

#[tokio::test]
async fn the_page_is_complete_in_itself_and_its_nonce_is_new_each_time() {
    let (one, two) = (ask("/").await, ask("/").await);
    let nonce = |a: &Answer| a.headers["content-security-policy"].to_str().unwrap().to_owned();
    assert_ne!(nonce(&one), nonce(&two));
    assert!(!one.body.contains("{{nonce}}"));
    for foreign in ["http://", "https://", "innerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!one.body.contains(foreign), "the page has {foreign}");
    }
}

#[tokio::test]
async fn a_query_that_is_too_long_is_refused() {
    let answer = ask(&format!("/v1/plan?size={}", "9".repeat(9000))).await;
    assert_eq!(answer.status, StatusCode::URI_TOO_LONG);
}

#[tokio::test(start_paused = true)]
async fn a_machine_that_hangs_is_answered_for_in_time() {
    let machine = FakeMachine { hangs: true, ..FakeMachine::default() };
    let answer = ask_as(fixture::view(machine, false), "localhost", "GET", "/v1/volumes").await;
    assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
    let machine = FakeMachine { hangs: true, ..FakeMachine::default() };
    let answer = ask_as(fixture::view(machine, false), "localhost", "GET", "/healthz").await;
    assert_eq!(answer.status, StatusCode::OK, "liveness asks the process only");
}

#[tokio::test]
async fn readiness_tells_every_reason() {
    let machine =
        FakeMachine { problems: vec!["no mergerfs".into(), "no pool".into()], ..FakeMachine::default() };
    let answer = ask_as(fixture::view(machine, false), "localhost", "GET", "/readyz").await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.json()["reasons"].as_array().unwrap().len(), 2);
    assert_eq!(ask("/readyz").await.status, StatusCode::OK);
}

#[tokio::test]
async fn this_node_answers_for_itself_when_the_store_is_away() {
    let view = fixture::view(FakeMachine::default(), true);
    let status = ask_as(view.clone(), "localhost", "GET", "/v1/status").await.json();
    assert_eq!(status["pools"].as_array().unwrap().len(), 4);
    assert_eq!(status["volumes"]["mountedHere"], 2);
    assert_eq!(status["standing"]["leader"], "attic");
    assert!(status["problems"][0].as_str().unwrap().contains("the store cannot be read"), "{status}");
    let volumes = ask_as(view.clone(), "localhost", "GET", "/v1/volumes").await.json();
    assert_eq!(volumes[1]["id"], "media");
    for path in ["/v1/volumes", "/v1/nodes", "/v1/pools", "/v1/volumes/media", "/v1/plan?size=1Gi"] {
        let answer = ask_as(view.clone(), "localhost", "GET", path).await;
        assert_eq!(answer.status, StatusCode::OK, "{path}");
        let warning =
            answer.headers.get(WARNING).unwrap_or_else(|| panic!("{path} does not say that it is partial"));
        assert!(warning.to_str().unwrap().contains("only what this node knows"), "{warning:?}");
        assert!(ask(path).await.headers.get(WARNING).is_none(), "{path} is whole");
    }
    let gone = ask_as(view, "localhost", "GET", "/v1/volumes/pvc-5d0e").await;
    assert_eq!(gone.status, StatusCode::SERVICE_UNAVAILABLE, "it may exist");
}

#[tokio::test]
async fn the_leader_tells_its_last_orphan_scan_and_others_tell_who_leads() {
    let follows = FakeMachine::default().standing;
    let leads = Standing { leads: true, leader: Some("nas".into()), ..follows.clone() };
    let machine = FakeMachine { standing: leads.clone(), ..FakeMachine::default() };
    let told = ask_as(fixture::view(machine, false), "localhost", "GET", "/v1/orphans").await.json();
    assert_eq!(told["scanned"], "2023-11-14T22:13:20Z");
    assert_eq!((&told["counts"]["branch"], &told["counts"]["retained"]), (&1.into(), &0.into()));
    assert_eq!(told["orphans"][0]["remedy"], "kubectl -n union delete branch old-0");

    let refused = async |standing: Standing, orphans: Known| {
        let machine = FakeMachine { standing, orphans, ..FakeMachine::default() };
        let answer = ask_as(fixture::view(machine, false), "localhost", "GET", "/v1/orphans").await;
        (answer.status, answer.json()["error"].as_str().unwrap().to_owned(), answer.json()["reasons"].clone())
    };
    let not_yet = Known {
        next: Some(jiff::Timestamp::UNIX_EPOCH),
        problem: Some("cannot read persistentvolumes: forbidden".into()),
        ..Known::default()
    };
    let (status, error, reasons) = refused(leads, not_yet).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(error.contains("not looked for orphans yet") && error.contains("1970-01-01"), "{error}");
    assert!(error.contains("`union-csi orphans` looks for them now"), "the remedy: {error}");
    assert_eq!(reasons[0], "cannot read persistentvolumes: forbidden");

    // What it found while it led counts no more.
    let (status, error, _) = refused(follows.clone(), FakeMachine::default().orphans).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(error.contains("the instance on attic"), "{error}");
    let (_, error, _) = refused(Standing { leader: None, ..follows.clone() }, Known::default()).await;
    assert!(error.contains("knows of none"), "{error}");
    let alone = Standing { store: "local".into(), ..follows };
    let (status, error, _) = refused(alone, Known::default()).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{error}");
}

#[tokio::test]
async fn a_volume_is_shown_from_its_pods_to_its_disks() {
    let volume = ask("/v1/volumes/media").await.json();
    assert_eq!(volume["pods"][0], "7f3b5a10-2d5e-4f7b-9a51-0a4c8d1c2e11");
    assert_eq!(volume["local"]["pid"], 4242);
    assert_eq!(volume["branches"].as_array().unwrap().len(), 3);
    assert_eq!(volume["branches"][0]["pool"], "disk1");
    assert_eq!(volume["state"], "healthy");
    let lost = ask("/v1/volumes/pvc-5d0e").await.json();
    assert_eq!(lost["state"], "abnormal");
    assert_eq!(lost["message"], "branch pvc-5d0e-1 is lost: pool usb is absent");
    assert_eq!(ask("/v1/volumes/v-9f2c").await.json()["state"], "pending");
}

#[tokio::test]
async fn a_volume_that_waits_for_a_node_tells_which_and_why() {
    let store = fixture::FakeStore::new(false);
    let mut splits = store.splits().list(&Selector::All).await.unwrap();
    let mut branches = store.branches().list(&Selector::All).await.unwrap();
    splits.retain(|split| split.meta.name == "backups");
    let attached = serde_json::json!({"node": "attic", "accessMode": "SingleNodeWriter"});
    splits[0].spec.attached = vec![serde_json::from_value(attached).unwrap()];
    branches.retain(|branch| branch.spec.volume == splits[0].spec.volume);
    let shown = |branches: &[Branch]| {
        let now = jiff::Timestamp::UNIX_EPOCH;
        assemble::volumes(&splits, branches, &[], &[], now).remove(0)
    };
    assert_eq!(shown(&branches).state, HealthState::Healthy, "it is about to be ordered");
    branches[0].spec.access = Some(Access { consumer: None, epoch: Epoch(1) });
    let waits = shown(&branches);
    assert_eq!(waits.state, HealthState::Pending);
    assert!(
        waits.message.starts_with("branch backups-0 cannot be used on node attic yet"),
        "{}",
        waits.message
    );
    assert!(waits.message.contains("node nas, which holds it"), "{}", waits.message);
}

#[tokio::test]
async fn the_pools_of_all_nodes_are_what_the_planner_reads() {
    let body = ask("/v1/pools").await.body;
    let pools: Vec<crate::domain::pool::PoolView> = serde_json::from_str(&body).unwrap();
    let names: Vec<String> = pools.iter().map(|p| format!("{}/{}", p.node, p.pool.name)).collect();
    assert_eq!(names, ["attic/old", "nas/disk1", "nas/disk2", "nas/flash", "nas/usb"]);
}

#[tokio::test]
async fn a_bad_question_for_a_plan_is_told_every_fault() {
    let answer = ask("/v1/plan?size=-1&limit=x&consumer=A&mode=tape&limit=2").await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    let problem = answer.json();
    let reasons: Vec<&str> =
        problem["reasons"].as_array().unwrap().iter().map(|r| r.as_str().unwrap()).collect();
    for word in ["size:", "limit is given twice", "consumer:", "mode:"] {
        assert!(reasons.iter().any(|r| r.starts_with(word)), "{word} is not in {reasons:?}");
    }
    assert_eq!(ask("/v1/plan").await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_port_in_use_is_told_with_the_remedy() {
    let taken = bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let error = bind(taken.local_addr().unwrap()).await.unwrap_err().to_string();
    assert!(error.contains("cannot listen on 127.0.0.1:") && error.contains("--http-listen"), "{error}");
}

/// Not a test: what `integration/page/run` looks at when it is given no agent.
#[tokio::test]
#[ignore = "serves the made-up machine to a browser until it is ended; see integration/page/run"]
async fn serve_the_fixture_to_a_browser() {
    let at = std::env::var("UNION_CSI_PAGE_LISTEN").unwrap().parse().unwrap();
    let listener = bind(at).await.unwrap();
    let view = fixture::view(FakeMachine::default(), false);
    let stop = CancellationToken::new();
    // A bound, should the one who started this be gone.
    let bound = tokio::time::timeout(std::time::Duration::from_secs(120), serve(listener, view, stop));
    if let Ok(ended) = bound.await {
        ended.unwrap();
    }
}
