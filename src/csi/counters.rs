//! How often each call was answered with which code, and how long it took.
//!
//! Counted by a layer around all services, so that no call can be forgotten. The label sets are closed: the methods of
//! the protocol (any other is `other`) and the codes of gRPC.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::Code;
use tonic::codegen::http;
use tower::{Layer, Service};

/// The methods of the protocol, as `service/method`; the last stands for all that are none of them.
const METHODS: [&str; 27] = [
    "Identity/GetPluginInfo",
    "Identity/GetPluginCapabilities",
    "Identity/Probe",
    "Controller/CreateVolume",
    "Controller/DeleteVolume",
    "Controller/ControllerPublishVolume",
    "Controller/ControllerUnpublishVolume",
    "Controller/ValidateVolumeCapabilities",
    "Controller/ListVolumes",
    "Controller/GetCapacity",
    "Controller/ControllerGetCapabilities",
    "Controller/CreateSnapshot",
    "Controller/DeleteSnapshot",
    "Controller/ListSnapshots",
    "Controller/GetSnapshot",
    "Controller/ControllerExpandVolume",
    "Controller/ControllerGetVolume",
    "Controller/ControllerModifyVolume",
    "Node/NodeStageVolume",
    "Node/NodeUnstageVolume",
    "Node/NodePublishVolume",
    "Node/NodeUnpublishVolume",
    "Node/NodeGetVolumeStats",
    "Node/NodeExpandVolume",
    "Node/NodeGetCapabilities",
    "Node/NodeGetInfo",
    "other",
];

const OTHER: usize = METHODS.len() - 1;

/// The codes of gRPC, by number (<https://grpc.github.io/grpc/core/md_doc_statuscodes.html>).
const CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// Upper bounds of the histogram's buckets, in seconds; slower answers are in none. From a publish on an idle
/// machine (5 ms) to the longest wait of a CreateVolume (60 s by default).
pub const BUCKETS: [f64; 12] = [0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0, 60.0];

/// Counts of all calls since the start.
#[derive(Debug, Default)]
pub struct CsiCounters {
    methods: [Counts; METHODS.len()],
}

#[derive(Debug, Default)]
struct Counts {
    codes: [AtomicU64; CODES.len()],
    buckets: [AtomicU64; BUCKETS.len() + 1],
    nanoseconds: AtomicU64,
}

/// Counts of one method.
#[derive(Clone, Debug, PartialEq)]
pub struct MethodSnapshot {
    /// Its name, without the service's, or `other`.
    pub method: &'static str,
    /// Answers by code; only codes that occurred.
    pub codes: BTreeMap<&'static str, u64>,
    /// Answers that took at most so many seconds, by bound of [`BUCKETS`], each with those of the lower ones.
    pub buckets: Vec<(f64, u64)>,
    /// Seconds that all of them took.
    pub seconds: f64,
}

impl CsiCounters {
    /// The counts of all methods that were called.
    #[must_use]
    pub fn snapshot(&self) -> Vec<MethodSnapshot> {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let all = METHODS.iter().zip(&self.methods).map(|(method, counts)| MethodSnapshot {
            method: method.rsplit('/').next().unwrap_or(method),
            codes: CODES
                .iter()
                .zip(&counts.codes)
                .map(|(code, n)| (*code, read(n)))
                .filter(|(_, n)| *n > 0)
                .collect(),
            buckets: BUCKETS
                .iter()
                .zip(&counts.buckets)
                .scan(0, |below, (bound, n)| {
                    *below += read(n);
                    Some((*bound, *below))
                })
                .collect(),
            seconds: Duration::from_nanos(read(&counts.nanoseconds)).as_secs_f64(),
        });
        all.filter(|m| !m.codes.is_empty()).collect()
    }

    fn count(&self, method: usize, code: Code, took: Duration) {
        let Some(counts) = self.methods.get(method) else {
            return;
        };
        let seconds = took.as_secs_f64();
        let bucket = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        // A code's number is its place in CODES.
        let code = usize::try_from(i32::from(code)).ok().and_then(|i| counts.codes.get(i));
        for counter in code.into_iter().chain(counts.buckets.get(bucket)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        counts.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

/// The method that an HTTP path names: `/csi.v1.Node/NodeGetInfo`.
fn method_of(path: &str) -> usize {
    let name = path.strip_prefix("/csi.v1.").unwrap_or_default();
    METHODS.iter().take(OTHER).position(|m| *m == name).unwrap_or(OTHER)
}

/// Counts the calls of the services that it is laid around.
#[derive(Clone, Debug)]
pub(super) struct CountLayer {
    pub(super) counters: Arc<CsiCounters>,
}

impl<S> Layer<S> for CountLayer {
    type Service = Count<S>;

    fn layer(&self, inner: S) -> Count<S> {
        Count { inner, counters: self.counters.clone() }
    }
}

/// See [`CountLayer`].
#[derive(Clone, Debug)]
pub(super) struct Count<S> {
    inner: S,
    counters: Arc<CsiCounters>,
}

impl<S, Req, Res> Service<http::Request<Req>> for Count<S>
where
    S: Service<http::Request<Req>, Response = http::Response<Res>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    Res: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Req>) -> Self::Future {
        let call = Call {
            counters: self.counters.clone(),
            method: method_of(request.uri().path()),
            begun: Instant::now(),
            // What remains where the caller gives up and the call is dropped.
            code: Code::Cancelled,
        };
        let answer = self.inner.call(request);
        Box::pin(async move {
            // The whole of it, so that it is counted when this future is dropped.
            let mut call = call;
            let answer = answer.await;
            // A unary call that failed has its code in the headers, one that succeeded in the trailers.
            call.code = match &answer {
                Ok(response) => response
                    .headers()
                    .get("grpc-status")
                    .map_or(Code::Ok, |code| Code::from_bytes(code.as_bytes())),
                Err(_) => Code::Unknown,
            };
            answer
        })
    }
}

struct Call {
    counters: Arc<CsiCounters>,
    method: usize,
    begun: Instant,
    code: Code,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.counters.count(self.method, self.code, self.begun.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_counted_under_its_own_name() {
        let counters = CsiCounters::default();
        for number in 0..17 {
            counters.count(0, Code::from_i32(number), Duration::ZERO);
        }
        let snapshot = counters.snapshot();
        assert_eq!(snapshot.len(), 1);
        assert_eq!(snapshot[0].codes, CODES.map(|code| (code, 1)).into());
        for (number, name) in CODES.iter().enumerate() {
            let ours = name.replace('_', "").to_lowercase();
            let tonics = format!("{:?}", Code::from_i32(i32::try_from(number).unwrap())).to_lowercase();
            assert_eq!(ours, tonics);
        }
    }

    #[test]
    fn every_method_of_the_protocol_has_a_counter() {
        let proto = include_str!("csi.proto");
        let mut service = "";
        let mut found = 0;
        for line in proto.lines().map(str::trim) {
            if let Some(rest) = line.strip_prefix("service ") {
                service = rest.trim_end_matches(" {");
            }
            if let Some(rest) = line.strip_prefix("rpc ") {
                let name = rest.split('(').next().unwrap();
                assert_eq!(
                    METHODS[method_of(&format!("/csi.v1.{service}/{name}"))],
                    format!("{service}/{name}")
                );
                found += 1;
            }
        }
        assert_eq!(found, OTHER, "no counter is for a method that does not exist");
    }

    #[test]
    fn unknown_paths_share_one_counter() {
        for path in ["", "/", "/csi.v1.Node/Nonsense", "/csi.v1.other", "/x"] {
            assert_eq!(method_of(path), OTHER, "{path}");
        }
    }

    #[test]
    fn a_latency_falls_into_the_first_bucket_that_holds_it() {
        let counters = CsiCounters::default();
        for ms in [1, 2, 3, 61_000] {
            counters.count(OTHER, Code::Ok, Duration::from_millis(ms));
        }
        let snapshot = &counters.snapshot()[0];
        assert_eq!(snapshot.buckets[0], (0.002, 2));
        assert_eq!(snapshot.buckets[1], (0.005, 3));
        assert_eq!(
            snapshot.buckets.last(),
            Some(&(60.0, 3)),
            "what took longer is in the sum of the codes only"
        );
        assert_eq!(snapshot.codes, [("OK", 4)].into());
        assert!((snapshot.seconds - 61.006).abs() < 1e-9);
    }
}
