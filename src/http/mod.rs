//! The view from outside: a read-only HTTP API, the metrics, and one page.
//!
//! In flow the store's objects and what this machine tells ([`Machine`]); out flow JSON, Prometheus text and HTML. The
//! invariants: nothing here changes anything; every request is bounded in time, size and number; what this node knows by
//! itself is answered also when the store is not (an API server that is down); a browser that was lured to another site
//! cannot read any of it (the Host header is checked, no cross-origin access is granted).

pub mod api;
mod assemble;
mod guard;
mod openapi;
mod plan;
mod routes;
mod view;

use std::net::SocketAddr;
use std::sync::Arc;

use snafu::{ResultExt, Snafu};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use guard::Hosts;
pub use openapi::document as openapi_document;
pub use plan::answer as plan_answer;
pub(crate) use routes::WARNING;
pub use routes::router;
pub use view::{Machine, View};

/// The API could not be served.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum HttpError {
    /// The address cannot be had.
    #[snafu(display(
        "cannot listen on {at}: {source}; set another address with http.listen (--http-listen), or \"off\""
    ))]
    Listen {
        /// The address.
        at: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Serving ended.
    #[snafu(display("the HTTP API ended: {source}"))]
    Serve {
        /// Why.
        source: std::io::Error,
    },
}

/// Takes the address.
///
/// # Errors
/// [`HttpError::Listen`]: the port is in use, or the address is not this machine's.
pub async fn bind(at: SocketAddr) -> Result<TcpListener, HttpError> {
    TcpListener::bind(at).await.context(http_error::ListenSnafu { at })
}

/// Serves until `stop`; requests under way are finished then.
///
/// # Errors
/// [`HttpError::Serve`].
pub async fn serve(listener: TcpListener, view: Arc<View>, stop: CancellationToken) -> Result<(), HttpError> {
    axum::serve(listener, router(view))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .context(http_error::ServeSnafu)
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
