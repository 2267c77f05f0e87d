//! The services on the CSI socket.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use snafu::{ResultExt, Snafu};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;

use super::counters::{CountLayer, CsiCounters};
use super::proto::controller_server::ControllerServer;
use super::proto::identity_server::IdentityServer;
use super::proto::node_server::NodeServer;
use super::socket::Socket;
use super::{ControllerService, IdentityService, NodeService};

/// How long calls in flight may go on when the agent ends.
const GRACE: Duration = Duration::from_secs(10);

/// Serving ended.
#[derive(Debug, Snafu)]
pub enum ServeError {
    /// The server failed.
    #[snafu(display("the CSI server failed: {source}"))]
    Transport {
        /// Why.
        source: tonic::transport::Error,
    },
}

/// What this instance serves: identity always, the others by its roles.
pub struct Services {
    /// Who it is.
    pub identity: IdentityService,
    /// The controller role.
    pub controller: Option<ControllerService>,
    /// The node role.
    pub node: Option<NodeService>,
    /// Where calls are counted.
    pub counters: Arc<CsiCounters>,
    /// Work of the node service that outlives its calls; the same that it was made with.
    pub tasks: TaskTracker,
}

/// Serves until `shutdown` is done; then no new call is taken, and those in flight may go on for 10 seconds.
///
/// # Errors
/// The server failed.
pub async fn serve(
    mut socket: Socket,
    services: Services,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), ServeError> {
    let Services { identity, controller, node, counters, tasks } = services;
    let Some(listener) = socket.listener() else {
        return Ok(());
    };
    let (ending, ended) = tokio::sync::oneshot::channel();
    let begin_to_end = {
        let tasks = tasks.clone();
        async move {
            shutdown.await;
            tasks.close();
            // The receiver is gone only when serving has ended already.
            let _gone = ending.send(());
        }
    };
    let server = Server::builder()
        .layer(CountLayer { counters })
        .add_service(IdentityServer::new(identity))
        .add_optional_service(controller.map(ControllerServer::new))
        .add_optional_service(node.map(NodeServer::new))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), begin_to_end);
    let patience = async {
        // Without a shutdown there is no limit.
        if ended.await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        result = server => result.context(TransportSnafu)?,
        () = patience => tracing::warn!("calls in flight were given up"),
    }
    if tokio::time::timeout(GRACE, tasks.wait()).await.is_err() {
        tracing::warn!(tasks = tasks.len(), "work on volumes goes on while the agent ends");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
