//! The socket, and the services on it.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use snafu::{ResultExt, Snafu, ensure};
use tokio::net::{UnixListener, UnixSocket};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;

use super::counters::{CountLayer, CsiCounters};
use super::proto::controller_server::ControllerServer;
use super::proto::identity_server::IdentityServer;
use super::proto::node_server::NodeServer;
use super::{ControllerService, IdentityService, NodeService};

/// The longest path of a socket, in bytes: `sun_path` less its closing zero (unix(7)).
const MAX_PATH: usize = 107;

/// Connections that may wait to be accepted. A kubelet has one, the official sidecars one each.
const BACKLOG: u32 = 64;

/// How long calls in flight may go on when the agent ends.
const GRACE: Duration = Duration::from_secs(10);

/// The socket cannot be had. Nothing was removed that is in use.
#[derive(Debug, Snafu)]
pub enum BindError {
    /// The kernel has no room for such a path.
    #[snafu(display(
        "the path of the CSI socket has {length} bytes, {MAX_PATH} are possible: {}; set a shorter csi.endpoint",
        path.display()
    ))]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Somebody serves it.
    #[snafu(display(
        "another program serves the CSI socket {}: is another agent running? stop it, or set another csi.endpoint",
        path.display()
    ))]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something else lies there.
    #[snafu(display(
        "{} is not a socket and is left alone: remove it, or set another csi.endpoint",
        path.display()
    ))]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The machine refused.
    #[snafu(display("cannot {action} the CSI socket {}: {source}", path.display()))]
    Socket {
        /// What was to be done.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

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

/// A bound socket; its file is removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: Option<UnixListener>,
    path: PathBuf,
    /// Device and inode of the file, to recognise it by.
    file: (u64, u64),
}

impl Drop for Socket {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.file);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the CSI socket cannot be removed");
        }
    }
}

/// Binds the socket at `path` with mode 0600. A socket that an agent left there when it died is replaced.
///
/// # Errors
/// See [`BindError`].
pub fn bind(path: &Path) -> Result<Socket, BindError> {
    let length = path.as_os_str().len();
    ensure!(length <= MAX_PATH, TooLongSnafu { path, length });
    remove_stale(path)?;
    let failed = |action| SocketSnafu { action, path };
    let socket = UnixSocket::new_stream().context(failed("make"))?;
    // The mode of the socket itself becomes the file's (less the umask), so that there is no moment at which others can
    // connect: unix_bind() in Linux' net/unix/af_unix.c.
    let descriptor = socket.as_fd().try_clone_to_owned().context(failed("make"))?;
    let owner_only = std::fs::Permissions::from_mode(0o600);
    std::fs::File::from(descriptor).set_permissions(owner_only.clone()).context(failed("protect"))?;
    socket.bind(path).context(failed("bind"))?;
    let metadata = std::fs::symlink_metadata(path).context(failed("find"))?;
    let mut bound = Socket { listener: None, path: path.to_owned(), file: (metadata.dev(), metadata.ino()) };
    std::fs::set_permissions(path, owner_only).context(failed("protect"))?;
    bound.listener = Some(socket.listen(BACKLOG).context(failed("listen on"))?);
    Ok(bound)
}

/// Removes a socket that nobody listens on.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let failed = |action| SocketSnafu { action, path };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).context(failed("look for")),
    };
    ensure!(metadata.file_type().is_socket(), NotASocketSnafu { path });
    match std::os::unix::net::UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).context(failed("remove the stale"))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        // EAGAIN: its backlog is full, so somebody serves it.
        Ok(_) => InUseSnafu { path }.fail(),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => InUseSnafu { path }.fail(),
        Err(e) => Err(e).context(failed("probe")),
    }
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
    let Some(listener) = socket.listener.take() else {
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
