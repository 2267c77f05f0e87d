//! One Lease as an API server keeps it, and links to it that fail on request.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Either, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

#[derive(Clone, Default)]
pub(super) struct Server(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    lease: Option<Value>,
    version: u64,
    requests: usize,
    /// The last change, for watches that begin before it.
    last: Option<(u64, Value)>,
    watchers: Vec<mpsc::UnboundedSender<Value>>,
}

/// How one instance reaches the server.
#[derive(Clone, Default)]
pub(super) struct Link(Arc<Mutex<Weather>>);

#[derive(Clone, Copy, Default)]
struct Weather {
    refuses: bool,
    hangs: bool,
    loses_answers: bool,
    delay: Duration,
}

impl Link {
    pub(super) fn refuse(&self, on: bool) {
        self.0.lock().unwrap().refuses = on;
    }
    pub(super) fn hang(&self, on: bool) {
        self.0.lock().unwrap().hangs = on;
    }
    /// Requests are done, and their answers do not arrive.
    pub(super) fn lose_answers(&self, on: bool) {
        self.0.lock().unwrap().loses_answers = on;
    }
    /// It takes this long to the server, back, and for events.
    pub(super) fn delay(&self, by: Duration) {
        self.0.lock().unwrap().delay = by;
    }
    pub(super) fn heal(&self) {
        *self.0.lock().unwrap() = Weather::default();
    }
    fn now(&self) -> Weather {
        *self.0.lock().unwrap()
    }
    /// Waits for what goes over it to arrive.
    async fn travel(&self) {
        tokio::time::sleep(self.now().delay).await;
        while self.now().hangs {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

type Answer = Response<Either<Full<Bytes>, StreamBody<futures::stream::BoxStream<'static, Chunk>>>>;
type Chunk = Result<Frame<Bytes>, std::io::Error>;

fn refused() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "connection refused")
}

impl Server {
    pub(super) fn client(&self, link: &Link) -> Client {
        let (server, link) = (self.clone(), link.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (server, link) = (server.clone(), link.clone());
            async move {
                if link.now().refuses {
                    return Err(refused());
                }
                link.travel().await;
                let (parts, body) = request.into_parts();
                let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
                let query = parts.uri.query().unwrap_or_default().to_owned();
                let answer = if query.contains("watch=true") {
                    server.watch(&link, &query)
                } else {
                    let (status, value) =
                        server.0.lock().unwrap().answer(&parts.method, parts.uri.path(), &body);
                    let body = Full::new(Bytes::from(value.to_string()));
                    Response::builder().status(status).body(Either::Left(body)).unwrap()
                };
                if link.now().loses_answers {
                    std::future::pending::<()>().await;
                }
                link.travel().await;
                Ok::<Answer, _>(answer)
            }
        });
        Client::new(service, "union")
    }

    fn watch(&self, link: &Link, query: &str) -> Answer {
        let mut state = self.0.lock().unwrap();
        state.requests += 1;
        let from = query.split('&').find_map(|q| q.strip_prefix("resourceVersion=")).unwrap_or("0");
        let from: u64 = from.parse().unwrap();
        let (send, receive) = mpsc::unbounded_channel();
        if let Some((_, event)) = state.last.as_ref().filter(|(version, _)| *version > from) {
            send.send(event.clone()).unwrap();
        }
        state.watchers.push(send);
        let link = link.clone();
        let events = UnboundedReceiverStream::new(receive).then(move |event| {
            let link = link.clone();
            async move {
                link.travel().await;
                if link.now().refuses {
                    return Err(refused());
                }
                Ok(Frame::data(Bytes::from(format!("{event}\n"))))
            }
        });
        Response::new(Either::Right(StreamBody::new(events.boxed())))
    }

    pub(super) fn requests(&self) -> usize {
        self.0.lock().unwrap().requests
    }
    pub(super) fn lease(&self) -> Option<Value> {
        self.0.lock().unwrap().lease.clone()
    }
    pub(super) fn transitions(&self) -> i64 {
        self.lease().unwrap()["spec"]["leaseTransitions"].as_i64().unwrap()
    }
    pub(super) fn holder(&self) -> Option<String> {
        self.lease()?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    }
    pub(super) fn delete(&self) {
        let mut state = self.0.lock().unwrap();
        if let Some(lease) = state.lease.take() {
            state.version += 1;
            state.tell("DELETED", lease);
        }
    }
    /// A lease that somebody else made.
    pub(super) fn put(&self, spec: Value) {
        let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
                           "metadata": {"name": "union-csi", "namespace": "union"}, "spec": spec});
        self.0.lock().unwrap().store("ADDED", lease);
    }
    pub(super) fn annotate(&self, n: usize) {
        let mut state = self.0.lock().unwrap();
        if let Some(mut lease) = state.lease.clone() {
            lease["metadata"]["annotations"] = json!({"note": n.to_string()});
            state.store("MODIFIED", lease);
        }
    }
}

impl State {
    fn store(&mut self, event: &str, mut lease: Value) -> Value {
        self.version += 1;
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(lease.clone());
        self.tell(event, lease.clone());
        lease
    }

    fn tell(&mut self, event: &str, mut lease: Value) {
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({"type": event, "object": lease});
        self.watchers.retain(|watcher| watcher.send(event.clone()).is_ok());
        self.last = Some((self.version, event));
    }

    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> (StatusCode, Value) {
        self.requests += 1;
        let named = path.ends_with("/leases/union-csi");
        let sent = || serde_json::from_slice::<Value>(body).unwrap();
        match (method, named, &self.lease) {
            (&Method::GET, false, lease) => (
                StatusCode::OK,
                json!({"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "items": lease.iter().collect::<Vec<_>>(),
                       "metadata": {"resourceVersion": self.version.to_string()}}),
            ),
            (&Method::GET, true, Some(lease)) => (StatusCode::OK, lease.clone()),
            (&Method::POST, _, None) => (StatusCode::CREATED, self.store("ADDED", sent())),
            (&Method::POST, _, Some(_)) => failure(StatusCode::CONFLICT, "AlreadyExists"),
            (&Method::PUT, _, Some(lease)) => {
                let version = sent()["metadata"]["resourceVersion"].clone();
                assert!(version.is_string(), "never written without a version");
                if version == lease["metadata"]["resourceVersion"] {
                    (StatusCode::OK, self.store("MODIFIED", sent()))
                } else {
                    failure(StatusCode::CONFLICT, "Conflict")
                }
            }
            (&Method::GET | &Method::PUT, _, None) => failure(StatusCode::NOT_FOUND, "NotFound"),
            other => panic!("{other:?}"),
        }
    }
}

fn failure(code: StatusCode, reason: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": reason,
                        "reason": reason, "code": code.as_u16()});
    (code, status)
}
