//! What stands before every route: bounds in time, size and number, and who may ask.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;

use super::routes::problem;

/// Longer than any answer takes on a machine that is well; shorter than a scraper's or a probe's patience (10 s).
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Longest path with query, in bytes: a plan with every parameter stays far below.
const URI_LIMIT: usize = 8 * 1024;
/// Requests answered at the same time: more than people and scrapers need, few enough to cost the node nothing.
const AT_ONCE: usize = 32;

/// By which names the API may be asked for.
///
/// A page of another site that its owner points at 127.0.0.1 (DNS rebinding) would reach us under that site's name; it is
/// turned away. Addresses cannot be rebound, so they are always allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    names: BTreeSet<String>,
}

impl Hosts {
    /// `localhost`, this node's name, and the configured names, beside addresses.
    pub fn new(node: &str, configured: impl IntoIterator<Item = String>) -> Self {
        let mut names: BTreeSet<String> = configured.into_iter().map(|n| n.to_ascii_lowercase()).collect();
        names.extend(["localhost".to_owned(), node.to_ascii_lowercase()]);
        Self { names }
    }

    /// Whether a request with this `Host` header may be answered.
    #[must_use]
    pub fn allow(&self, host: &str) -> bool {
        if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
            return true;
        }
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        if bracketed.is_some_and(|h| h.parse::<IpAddr>().is_ok()) {
            return true;
        }
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            Some(_) => return false,
            None => host,
        };
        self.names.contains(&name.trim_end_matches('.').to_ascii_lowercase())
    }
}

/// The guard's state.
#[derive(Clone, Debug)]
pub(super) struct Guard {
    hosts: Hosts,
    slots: Arc<Semaphore>,
}

impl Guard {
    pub(super) fn new(hosts: Hosts) -> Self {
        Self { hosts, slots: Arc::new(Semaphore::new(AT_ONCE)) }
    }
}

/// Lets a request through, or answers it.
pub(super) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let mut response = admit(&guard, request, next).await;
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers
        .entry(header::CONTENT_SECURITY_POLICY)
        .or_insert(HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"));
    response
}

async fn admit(guard: &Guard, request: Request, next: Next) -> Response {
    let uri = request.uri();
    if uri.path_and_query().is_some_and(|p| p.as_str().len() > URI_LIMIT) {
        let told = format!("the path and query have more than {URI_LIMIT} bytes");
        return problem(StatusCode::URI_TOO_LONG, told, Vec::new());
    }
    let host = request.headers().get(header::HOST).and_then(|h| h.to_str().ok()).unwrap_or_default();
    if !guard.hosts.allow(host) {
        let told = format!(
            "this API is not served under the name {host:?}: ask for it by address or as localhost, or add the name to \
             http.hostNames in agent.yaml"
        );
        return problem(StatusCode::MISDIRECTED_REQUEST, told, Vec::new());
    }
    let Ok(_slot) = guard.slots.try_acquire() else {
        let told = format!("{AT_ONCE} requests are being answered already; try again");
        let mut busy = problem(StatusCode::SERVICE_UNAVAILABLE, told, Vec::new());
        busy.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return busy;
    };
    match tokio::time::timeout(TIME_LIMIT, next.run(request)).await {
        Ok(response) => response.into_response(),
        Err(_) => {
            let told = format!("no answer within {} s", TIME_LIMIT.as_secs());
            problem(StatusCode::GATEWAY_TIMEOUT, told, Vec::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_known_names_are_served() {
        let hosts = Hosts::new("nas", ["Box.Example.org".to_owned()]);
        for good in [
            "127.0.0.1:9830",
            "127.0.0.1",
            "[::1]:9830",
            "[::1]",
            "localhost",
            "LOCALHOST:9830",
            "nas:9830",
            "box.example.org:80",
            "box.example.org.",
        ] {
            assert!(hosts.allow(good), "{good} was refused");
        }
        for bad in
            ["", "evil.example:9830", "localhost.evil.example", "127.0.0.1.evil.example", "x:y", "nas:evil"]
        {
            assert!(!hosts.allow(bad), "{bad} was served");
        }
    }
}
