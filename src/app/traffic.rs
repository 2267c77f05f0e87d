//! The requests to the API server: bounded, counted, and what they tell of its health.
//!
//! So whether it can be reached is known without asking it: from what the watches, the lease and the reports went through.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use axum::body::{Bytes, HttpBody};
use axum::http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Either, Full};
use jiff::Timestamp;
use tower::{BoxError, Layer, Service};

use crate::store::Health;
use crate::telemetry::KubernetesFigures;

/// How long a request may take, a watch until it begins. The API server itself gives up after 60 s.
const BOUND: Duration = Duration::from_secs(30);

const VERBS: [&str; 7] = ["get", "list", "watch", "create", "update", "patch", "delete"];

/// What is asked about; the last stands for all else.
const RESOURCES: [&str; 15] = [
    "volumesplits",
    "branches",
    "storagenodes",
    "leases",
    "persistentvolumeclaims",
    "persistentvolumes",
    "storageclasses",
    "volumeattachments",
    "csistoragecapacities",
    "csinodes",
    "csidrivers",
    "nodes",
    "pods",
    "events",
    "other",
];

/// What became of requests that failed.
const FAILURES: [&str; 4] = ["unreachable", "refused", "throttled", "server"];

/// All requests since the start.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    requests: [[AtomicU64; RESOURCES.len()]; VERBS.len()],
    failures: [AtomicU64; FAILURES.len()],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    answered: bool,
    /// What is wrong, and since when.
    problem: Option<(Timestamp, String)>,
}

/// What a request is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind {
    verb: usize,
    resource: usize,
}

impl Kind {
    fn of(method: &Method, uri: &Uri) -> Self {
        let mut parts = uri.path().split('/').filter(|part| !part.is_empty());
        // /api/v1/… and /apis/<group>/<version>/…
        let prefix = if parts.next() == Some("api") { 1 } else { 2 };
        let mut parts = parts.skip(prefix).peekable();
        if parts.peek() == Some(&"namespaces") {
            let mut inner = parts.clone().skip(2);
            if inner.next().is_some() {
                parts.next();
                parts.next();
            }
        }
        let resource = parts.next().unwrap_or_default();
        let named = parts.next().is_some();
        let watch = uri.query().unwrap_or_default().split('&').any(|q| matches!(q, "watch=true" | "watch=1"));
        let verb = match *method {
            Method::GET if watch => "watch",
            Method::GET if named => "get",
            Method::GET => "list",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            _ => "delete",
        };
        let place = |all: &[&str], one: &str| all.iter().position(|x| *x == one).unwrap_or(all.len() - 1);
        Self { verb: place(&VERBS, verb), resource: place(&RESOURCES, resource) }
    }

    fn is_watch(self) -> bool {
        VERBS.get(self.verb) == Some(&"watch")
    }
}

impl Traffic {
    /// The figures now; only what occurred.
    pub(super) fn figures(&self) -> KubernetesFigures {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let requests = VERBS.iter().zip(&self.requests).flat_map(|(verb, resources)| {
            let of_verb = RESOURCES.iter().zip(resources).map(|(resource, n)| (*verb, *resource, read(n)));
            of_verb.filter(|(_, _, n)| *n > 0)
        });
        KubernetesFigures {
            requests: requests.collect(),
            failures: FAILURES.iter().zip(&self.failures).map(|(what, n)| (*what, read(n))).collect(),
        }
    }

    fn begin(&self, kind: Kind) {
        if let Some(n) = self.requests.get(kind.verb).and_then(|of| of.get(kind.resource)) {
            n.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An answer came, good or bad.
    fn answered(&self, status: StatusCode) {
        let failure = match status {
            StatusCode::UNAUTHORIZED => {
                self.fail(
                    "refused",
                    "it does not know this agent (401 Unauthorized): is its token or certificate valid?",
                );
                return;
            }
            StatusCode::FORBIDDEN => Some("refused"),
            StatusCode::TOO_MANY_REQUESTS => Some("throttled"),
            status if status.is_server_error() => {
                self.fail("server", &format!("it fails ({status})"));
                return;
            }
            _ => None,
        };
        if let Some(failure) = failure {
            self.count(failure);
        }
        let mut state = self.state();
        state.answered = true;
        if let Some((since, _)) = state.problem.take() {
            tracing::info!(since = %since, "the Kubernetes API answers again");
        }
    }

    fn fail(&self, what: &str, problem: &str) {
        self.count(what);
        let mut state = self.state();
        let since = match &state.problem {
            Some((since, _)) => *since,
            None => {
                tracing::warn!(
                    problem,
                    "the Kubernetes API does not answer; mounted volumes are not affected"
                );
                Timestamp::now()
            }
        };
        state.problem = Some((since, problem.to_owned()));
    }

    fn count(&self, what: &str) {
        if let Some((_, n)) = FAILURES.iter().zip(&self.failures).find(|(name, _)| **name == what) {
            n.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // What is in it is whole after each statement.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[async_trait]
impl Health for Traffic {
    async fn check(&self) -> Result<(), String> {
        let state = self.state();
        match &state.problem {
            Some((since, problem)) => {
                Err(format!("the Kubernetes API cannot be used since {since:.0}: {problem}"))
            }
            None if state.answered => Ok(()),
            None => Err("the Kubernetes API has not answered yet".to_owned()),
        }
    }
}

/// Lays [`Traffic`] around a client.
#[derive(Clone, Debug)]
pub(super) struct TrafficLayer {
    pub(super) traffic: Arc<Traffic>,
}

impl<S> Layer<S> for TrafficLayer {
    type Service = Watched<S>;

    fn layer(&self, inner: S) -> Watched<S> {
        Watched { inner, traffic: self.traffic.clone() }
    }
}

/// See [`TrafficLayer`].
#[derive(Clone, Debug)]
pub(super) struct Watched<S> {
    inner: S,
    traffic: Arc<Traffic>,
}

impl<S, Req, Res> Service<Request<Req>> for Watched<S>
where
    S: Service<Request<Req>, Response = Response<Res>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    Res: HttpBody<Data = Bytes> + Send + 'static,
    Res::Error: Into<BoxError>,
{
    type Response = Response<Either<Full<Bytes>, Res>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Req>) -> Self::Future {
        let kind = Kind::of(request.method(), request.uri());
        let traffic = self.traffic.clone();
        traffic.begin(kind);
        let answer = self.inner.call(request);
        Box::pin(async move {
            let whole = async {
                let answer = answer.await.map_err(Into::into)?;
                let status = answer.status();
                if kind.is_watch() && status.is_success() {
                    return Ok((status, answer.map(Either::Right)));
                }
                // It is read to its end in any case; here the wait for that is bounded, too.
                let (parts, body) = answer.into_parts();
                let body = body.collect().await.map_err(Into::into)?.to_bytes();
                Ok((status, Response::from_parts(parts, Either::Left(Full::new(body)))))
            };
            match tokio::time::timeout(BOUND, whole).await {
                Ok(Ok((status, answer))) => {
                    traffic.answered(status);
                    Ok(answer)
                }
                Ok(Err(error)) => {
                    let error: BoxError = error;
                    traffic.fail("unreachable", &chain(&*error));
                    Err(error)
                }
                Err(_) => {
                    let problem = format!("no answer within {} s", BOUND.as_secs());
                    traffic.fail("unreachable", &problem);
                    Err(problem.into())
                }
            }
        })
    }
}

/// An error with what caused it: hyper's own says no more than that a client failed.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(method: Method, uri: &str) -> (&'static str, &'static str) {
        let kind = Kind::of(&method, &uri.parse().unwrap());
        (VERBS[kind.verb], RESOURCES[kind.resource])
    }

    #[test]
    fn requests_are_counted_by_what_they_do_to_what() {
        let base = "/apis/union.io/v1alpha1/namespaces/union/branches";
        assert_eq!(kind(Method::GET, base), ("list", "branches"));
        assert_eq!(kind(Method::GET, &format!("{base}?limit=5&watch=true")), ("watch", "branches"));
        assert_eq!(kind(Method::GET, &format!("{base}/v-0")), ("get", "branches"));
        assert_eq!(kind(Method::PATCH, &format!("{base}/v-0/status")), ("patch", "branches"));
        assert_eq!(kind(Method::POST, "/api/v1/persistentvolumes"), ("create", "persistentvolumes"));
        assert_eq!(kind(Method::GET, "/api/v1/nodes/n"), ("get", "nodes"));
        assert_eq!(
            kind(Method::PUT, "/apis/coordination.k8s.io/v1/namespaces/u/leases/x"),
            ("update", "leases")
        );
        assert_eq!(kind(Method::DELETE, "/apis/a/v1/strange/x"), ("delete", "other"));
        assert_eq!(kind(Method::GET, "/api/v1/namespaces/union"), ("get", "other"));
        assert_eq!(kind(Method::GET, "/version"), ("list", "other"));
    }

    #[tokio::test]
    async fn what_is_wrong_is_known_from_the_requests_that_were_made() {
        let traffic = Traffic::default();
        assert!(traffic.check().await.unwrap_err().contains("not answered yet"));
        traffic.answered(StatusCode::OK);
        assert_eq!(traffic.check().await, Ok(()));
        traffic.answered(StatusCode::FORBIDDEN);
        assert_eq!(traffic.check().await, Ok(()), "one missing right is told by who needs it");
        traffic.fail("unreachable", "connection refused");
        assert!(traffic.check().await.unwrap_err().contains("connection refused"));
        traffic.answered(StatusCode::BAD_GATEWAY);
        assert!(traffic.check().await.unwrap_err().contains("502"));
        traffic.answered(StatusCode::NOT_FOUND);
        assert_eq!(traffic.check().await, Ok(()), "it answers");
        let figures = traffic.figures();
        assert_eq!(figures.failures, [("unreachable", 1), ("refused", 1), ("throttled", 0), ("server", 1)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_hangs_ends_and_a_watch_may_last() {
        use tower::ServiceExt;
        let traffic = Arc::new(Traffic::default());
        let layer = TrafficLayer { traffic: traffic.clone() };
        let request = |uri: &str| Request::builder().uri(uri).body(()).unwrap();

        let silent = tower::service_fn(|_: Request<()>| {
            std::future::pending::<Result<Response<Full<Bytes>>, BoxError>>()
        });
        let answer = layer.layer(silent).oneshot(request("/api/v1/nodes")).await;
        assert!(answer.err().unwrap().to_string().contains("no answer"));

        let endless = tower::service_fn(|_: Request<()>| async {
            let body = http_body_util::StreamBody::new(futures::stream::pending::<
                Result<hyper::body::Frame<Bytes>, BoxError>,
            >());
            Ok::<_, BoxError>(Response::new(body))
        });
        let service = layer.layer(endless);
        assert!(service.clone().oneshot(request("/api/v1/nodes?watch=true")).await.is_ok());
        assert!(service.oneshot(request("/api/v1/nodes")).await.is_err(), "a list whose end never comes");
        assert_eq!(traffic.figures().requests, [("list", "nodes", 2), ("watch", "nodes", 1)]);
    }
}
