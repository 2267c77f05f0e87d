//! Requests to the API server, each bounded in time and in number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::AsyncBufRead;
use http::Request;
use kube::Client;
use kube::core::request::Request as Requests;
use tokio::sync::Semaphore;

use super::fault::{ApiFault, Ask};
use super::malformed::Malformed;
use super::resource::Resource;
use super::{GROUP, VERSION};
use crate::store::StoreError;

/// An answer that takes longer is no answer; the API server itself ends requests after 60 s. It includes the wait for
/// other requests of this process and for a server that asked for patience.
const ANSWER: Duration = Duration::from_secs(30);

/// Requests under way at once, watches aside. Each has a connection of its own (HTTP/1.1), and the API server's default
/// share for a service account is of this order.
const AT_ONCE: usize = 32;

/// The shortest and longest wait where the API server asked to come again later (429) without or with saying when.
const PATIENCE: (u64, u64) = (1, 10);

/// The API server, and what all kinds of objects share.
pub(super) struct Server {
    client: Client,
    pub(super) namespace: String,
    pub(super) field_manager: String,
    at_once: Semaphore,
    requests: AtomicU64,
}

impl Server {
    pub(super) fn new(client: Client, namespace: &str, field_manager: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            field_manager: field_manager.to_owned(),
            at_once: Semaphore::new(AT_ONCE),
            requests: AtomicU64::new(0),
        }
    }

    /// Requests made so far.
    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The text of the answer.
    pub(super) async fn send(&self, ask: &Ask, request: Request<Vec<u8>>) -> Result<String, StoreError> {
        let silent = |_| ask.backend(ApiFault::Silent { after: ANSWER });
        tokio::time::timeout(ANSWER, self.sent(ask, request)).await.map_err(silent)?
    }

    async fn sent(&self, ask: &Ask, request: Request<Vec<u8>>) -> Result<String, StoreError> {
        // It is closed never: the error does not occur.
        let _turn = self.at_once.acquire().await.ok();
        loop {
            self.requests.fetch_add(1, Ordering::Relaxed);
            match self.client.request_text(request.clone()).await {
                Ok(text) => return Ok(text),
                // Not begun, by the server's word: it may be asked again whatever it is.
                Err(kube::Error::Api(status)) if status.code == 429 => {
                    let told = status.details.as_ref().map_or(0, |d| u64::from(d.retry_after_seconds));
                    tokio::time::sleep(Duration::from_secs(told.clamp(PATIENCE.0, PATIENCE.1))).await;
                }
                Err(e) => return Err(ask.failed(e)),
            }
        }
    }
}

/// The objects of one kind.
pub(super) struct Endpoint<T> {
    pub(super) server: Arc<Server>,
    pub(super) requests: Requests,
    pub(super) malformed: Malformed,
    /// Fields of a spec that this program knows.
    pub(super) properties: Vec<String>,
    kind: std::marker::PhantomData<fn() -> T>,
}

impl<T: Resource> Endpoint<T> {
    pub(super) fn new(server: &Arc<Server>) -> Self {
        let root = format!("/apis/{GROUP}/{VERSION}");
        let path = if T::NAMESPACED {
            format!("{root}/namespaces/{}/{}", server.namespace, T::PLURAL)
        } else {
            format!("{root}/{}", T::PLURAL)
        };
        let schema = schemars::schema_for!(T::Spec);
        let properties = schema.get("properties").and_then(|p| p.as_object());
        Self {
            server: server.clone(),
            requests: Requests::new(path),
            malformed: Malformed::new(T::KIND),
            properties: properties.map(|p| p.keys().cloned().collect()).unwrap_or_default(),
            kind: std::marker::PhantomData,
        }
    }

    pub(super) fn ask(&self, verb: &'static str, name: &str) -> Ask {
        Ask {
            verb,
            kind: T::KIND,
            group: GROUP,
            plural: T::PLURAL,
            subresource: "",
            namespace: T::NAMESPACED.then(|| self.server.namespace.clone()),
            name: name.to_owned(),
        }
    }

    /// The text of the answer.
    pub(super) async fn send(&self, ask: &Ask, request: Request<Vec<u8>>) -> Result<String, StoreError> {
        self.server.send(ask, request).await
    }

    /// The answer of a watch, as it comes.
    pub(super) async fn open(
        &self,
        ask: &Ask,
        request: Request<Vec<u8>>,
    ) -> Result<impl AsyncBufRead + Send + use<T>, StoreError> {
        self.server.requests.fetch_add(1, Ordering::Relaxed);
        let opening = self.server.client.request_stream(request);
        let silent = |_| ask.backend(ApiFault::Silent { after: ANSWER });
        tokio::time::timeout(ANSWER, opening).await.map_err(silent)?.map_err(|e| ask.failed(e))
    }
}
