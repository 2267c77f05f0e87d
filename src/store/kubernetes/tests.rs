//! The store against an API server that answers by a script: what a real one cannot be made to do.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::KubernetesStore;
use crate::store::contract::branch;
use crate::store::object::{Branch, Meta, StorageNode, StorageNodeSpec};
use crate::store::{Event, Pair, Selector, Store, StoreError};

/// What the server does with a request.
enum Act {
    Answer(u16, Value),
    /// The lines of a watch, which then ends.
    Lines(Vec<Value>),
    /// A watch that stays open and tells nothing.
    Quiet,
    /// No answer, ever.
    Hang,
    /// No connection.
    Refuse,
}

/// The store, and the requests that were made of its server so far.
fn scripted(script: impl IntoIterator<Item = Act>) -> (KubernetesStore, Arc<Mutex<Vec<String>>>) {
    let script = Arc::new(Mutex::new(script.into_iter().collect::<VecDeque<_>>()));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let heard = asked.clone();
    let service = tower::service_fn(move |request: http::Request<Body>| {
        heard.lock().unwrap().push(format!("{} {}", request.method(), request.uri()));
        let act = script.lock().unwrap().pop_front();
        async move {
            let (code, body) = match act {
                Some(Act::Answer(code, value)) => (code, full(value.to_string())),
                Some(Act::Lines(lines)) => {
                    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
                    (200, full(text))
                }
                Some(Act::Quiet) => (200, Endless.boxed_unsync()),
                Some(Act::Refuse) => return Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)),
                Some(Act::Hang) | None => std::future::pending().await,
            };
            Ok(http::Response::builder().status(code).body(body).unwrap())
        }
    });
    (KubernetesStore::new(Client::new(service, "default"), "union", "tests"), asked)
}

fn full(text: String) -> UnsyncBoxBody<Bytes, Infallible> {
    Full::from(text).boxed_unsync()
}

/// A body that never ends and never has anything.
struct Endless;

impl hyper::body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;
    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        std::task::Poll::Pending
    }
}

fn object(name: &str, version: u32) -> Value {
    let spec = serde_json::to_value(branch(name, 0, "n").spec).unwrap();
    json!({"metadata": {"name": format!("{name}-0"), "uid": name, "resourceVersion": version.to_string()}, "spec": spec})
}

fn page(version: u32, rest: &str, items: &[Value]) -> Act {
    Act::Answer(
        200,
        json!({"metadata": {"resourceVersion": version.to_string(), "continue": rest}, "items": items}),
    )
}

fn line(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

fn bookmark(version: u32) -> Value {
    line("BOOKMARK", json!({"kind": "Branch", "metadata": {"resourceVersion": version.to_string()}}))
}

fn gone() -> Value {
    json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"})
}

type Events = BoxStream<'static, Result<Event<Branch>, StoreError>>;

async fn watch(store: &KubernetesStore) -> Events {
    store.branches().watch(Selector::All).await.unwrap()
}

/// The next `count` events: `+name`, `-name` or `ready`.
async fn told(events: &mut Events, count: usize) -> Vec<String> {
    let mut told = Vec::new();
    while told.len() < count {
        told.push(match events.next().await.unwrap().unwrap() {
            Event::Applied(b) => format!("+{}", b.meta.name),
            Event::Deleted(b) => format!("-{}", b.meta.name),
            Event::Ready => "ready".to_owned(),
        });
    }
    told
}

/// The last word of each request: its verb and the version or continuation that it went on from.
fn from(asked: &Mutex<Vec<String>>) -> Vec<String> {
    let asked = asked.lock().unwrap();
    let last = |uri: &String| {
        let parameter = |name| uri.split(['?', '&']).find_map(|p| p.strip_prefix(name));
        match (parameter("watch="), parameter("resourceVersion="), parameter("continue=")) {
            (Some(_), version, _) => format!("watch {}", version.unwrap_or_default()),
            (None, _, Some(rest)) => format!("list {rest}"),
            (None, ..) => "list".to_owned(),
        }
    };
    asked.iter().map(last).collect()
}

#[tokio::test(start_paused = true)]
async fn a_list_in_pages_is_one_picture_of_its_first_page() {
    let (store, asked) = scripted([
        page(7, "more", &[object("a", 1)]),
        page(9, "", &[object("b", 2)]),
        Act::Lines(vec![line("ADDED", object("c", 8))]),
    ]);
    assert_eq!(told(&mut watch(&store).await, 4).await, ["+a-0", "+b-0", "ready", "+c-0"]);
    assert_eq!(from(&asked), ["list", "list more", "watch 7"], "what came between the pages is told");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_ends_goes_on_from_the_last_version_it_heard_of() {
    let (store, asked) = scripted([
        page(7, "", &[]),
        Act::Lines(vec![line("ADDED", object("a", 8)), bookmark(20)]),
        Act::Lines(vec![]),
        Act::Refuse,
        Act::Answer(500, json!({"message": "no"})),
        Act::Lines(vec![line("DELETED", object("a", 21))]),
    ]);
    assert_eq!(told(&mut watch(&store).await, 3).await, ["ready", "+a-0", "-a-0"]);
    assert_eq!(from(&asked), ["list", "watch 7", "watch 20", "watch 20", "watch 20", "watch 20"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_whose_version_is_forgotten_reads_all_anew_and_tells_the_difference() {
    for forgotten in [Act::Answer(410, gone()), Act::Lines(vec![line("ERROR", gone())])] {
        let (store, asked) = scripted([
            page(7, "", &[object("a", 1), object("b", 2), object("c", 3)]),
            forgotten,
            page(30, "", &[object("a", 1), object("b", 25)]),
        ]);
        let mut events = watch(&store).await;
        assert_eq!(told(&mut events, 7).await, ["+a-0", "+b-0", "+c-0", "ready", "+b-0", "-c-0", "ready"]);
        assert_eq!(from(&asked), ["list", "watch 7", "list"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_whose_continuation_is_forgotten_begins_anew() {
    let (store, asked) = scripted([
        page(7, "more", &[object("a", 1), object("b", 1)]),
        Act::Answer(410, gone()),
        page(9, "", &[object("b", 1), object("c", 8)]),
    ]);
    assert_eq!(told(&mut watch(&store).await, 5).await, ["+a-0", "+b-0", "+c-0", "-a-0", "ready"]);
    assert_eq!(from(&asked), ["list", "list more", "list"]);
    let (store, asked) = scripted([
        page(7, "more", &[object("a", 1)]),
        Act::Answer(410, gone()),
        page(9, "", &[object("b", 1)]),
    ]);
    let listed = store.branches().list(&Selector::All).await.unwrap();
    assert_eq!(listed.iter().map(|b| b.meta.name.as_str()).collect::<Vec<_>>(), ["b-0"]);
    assert_eq!(from(&asked), ["list", "list more", "list"]);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_went_silent_is_noticed() {
    let (store, asked) =
        scripted([page(7, "", &[]), Act::Quiet, Act::Lines(vec![line("ADDED", object("a", 8))])]);
    let begun = tokio::time::Instant::now();
    assert_eq!(told(&mut watch(&store).await, 2).await, ["ready", "+a-0"]);
    assert!(begun.elapsed() < Duration::from_secs(200));
    assert_eq!(from(&asked), ["list", "watch 7", "watch 7"]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_fails_for_long_is_asked_rarely() {
    let (store, asked) = scripted((0..1000).map(|_| Act::Refuse));
    let mut events = watch(&store).await;
    let nothing = tokio::time::timeout(Duration::from_secs(600), events.next()).await;
    assert!(nothing.is_err(), "a failure is no event: {nothing:?}");
    let times = asked.lock().unwrap().len();
    assert!((40..=100).contains(&times), "{times} times in ten minutes");
}

#[tokio::test(start_paused = true)]
async fn watches_are_not_all_opened_again_at_the_same_moment() {
    let timeouts = async || {
        let (store, asked) = scripted([page(7, "", &[]), Act::Quiet]);
        let mut events = watch(&store).await;
        assert_eq!(told(&mut events, 1).await, ["ready"]);
        let _ = tokio::time::timeout(Duration::from_secs(1), events.next()).await;
        let asked = asked.lock().unwrap();
        let seconds = asked[1].split(['?', '&']).find_map(|p| p.strip_prefix("timeoutSeconds=")).unwrap();
        seconds.parse::<u64>().unwrap()
    };
    let mut all = Vec::new();
    for _ in 0..20 {
        all.push(timeouts().await);
    }
    assert!(all.iter().all(|s| (1500..1800).contains(s)), "{all:?}");
    assert!(all.iter().any(|s| *s != all[0]), "{all:?}");
}

#[tokio::test(start_paused = true)]
async fn an_event_that_makes_no_sense_breaks_the_watch_and_loses_nothing() {
    let (store, asked) = scripted([
        page(7, "", &[]),
        Act::Lines(vec![line("ADDED", object("a", 8)), json!("sense")]),
        Act::Lines(vec![line("SOMETHING", json!({})), line("MODIFIED", object("a", 9))]),
    ]);
    assert_eq!(told(&mut watch(&store).await, 3).await, ["ready", "+a-0", "+a-0"]);
    assert_eq!(from(&asked), ["list", "watch 7", "watch 8"]);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_does_not_answer_or_cannot_be_reached_is_told_as_that() {
    let (store, _) = scripted([Act::Hang, Act::Refuse, Act::Answer(200, json!("sense"))]);
    let message = async || store.branches().list(&Selector::All).await.unwrap_err().to_string();
    let silent = message().await;
    assert!(silent.contains("did not answer within 30 s"), "{silent}");
    let refused = message().await;
    assert!(refused.contains("cannot be reached") && refused.contains("refused"), "{refused}");
    let odd = message().await;
    assert!(odd.contains("not understood"), "{odd}");
}

#[tokio::test(start_paused = true)]
async fn a_busy_api_server_is_asked_again_when_it_says() {
    let busy = json!({"kind": "Status", "code": 429, "message": "busy", "details": {"retryAfterSeconds": 5}});
    let (store, asked) = scripted([Act::Answer(429, busy), Act::Answer(201, object("a", 1))]);
    let begun = tokio::time::Instant::now();
    store.branches().create(branch("a", 0, "n")).await.unwrap();
    assert_eq!(begun.elapsed().as_secs(), 5);
    assert_eq!(asked.lock().unwrap().len(), 2);
    assert_eq!(store.figures().requests, 2);
}

#[tokio::test(start_paused = true)]
async fn definitions_that_are_not_installed_are_named_with_the_remedy() {
    let (store, _) = scripted([Act::Answer(404, json!("404 page not found"))]);
    let message = store.nodes().list(&Selector::All).await.unwrap_err().to_string();
    assert!(message.contains("storagenodes.union.io") && message.contains("union-csi crds"), "{message}");
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_an_address_is_not_asked_for() {
    let (store, asked) = scripted([]);
    for name in ["", "a/b", "..", "a?b", "a%2fb", "/"] {
        assert_eq!(store.branches().get(name).await.unwrap(), None, "{name:?}");
        assert!(!store.branches().delete(name, None).await.unwrap(), "{name:?}");
    }
    assert!(asked.lock().unwrap().is_empty());
}

fn refusal(code: u16, reason: &str, name: &str) -> Act {
    let details = json!({"kind": "secrets", "name": name});
    Act::Answer(
        code,
        json!({"kind": "Status", "code": code, "reason": reason, "message": reason, "details": details}),
    )
}

#[tokio::test(start_paused = true)]
async fn of_two_that_make_a_pairs_key_one_reads_what_the_other_made() {
    let owner = StorageNode {
        meta: Meta::new("a"),
        spec: StorageNodeSpec { node: "a".parse().unwrap() },
        status: Default::default(),
    };
    let pair = Pair { owner: "a".parse().unwrap(), consumer: "b".parse().unwrap() };
    let name = super::keys::name(&pair);
    let made = json!({"type": "Opaque", "metadata": {"name": name}});
    let (store, asked) = scripted([
        refusal(404, "NotFound", &name),
        refusal(409, "AlreadyExists", &name),
        Act::Answer(200, made),
    ]);
    let error = store.keys().ensure(&pair, &owner).await.unwrap_err();
    assert!(matches!(&error, StoreError::Malformed { kind: "Secret", .. }), "what is there is read: {error}");
    let verbs: Vec<String> =
        asked.lock().unwrap().iter().map(|r| r.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(verbs, ["GET", "POST", "GET"]);

    let (store, _) = scripted([refusal(403, "Forbidden", "")]);
    let message = store.keys().get(&pair).await.unwrap_err().to_string();
    for word in ["get", "secrets", "API group \"\""] {
        assert!(message.contains(word), "{message}");
    }
    let (store, _) = scripted([refusal(404, "NotFound", &name), refusal(404, "NotFound", &name)]);
    assert_eq!(store.keys().get(&pair).await.unwrap(), None);
    assert!(!store.keys().remove(&pair).await.unwrap());
}
