//! Registration with the kubelet, which otherwise a sidecar (node-driver-registrar) does.
//!
//! The kubelet watches a directory for sockets, asks each who serves it, calls NodeGetInfo on the CSI socket that it is
//! told, and writes a CSINode. So the socket appears there only when the CSI socket answers. What the kubelet makes of it
//! comes in as a notice, and goes out as a [`RegistrationState`].
//!
//! A kubelet that refuses may never ask again for the same socket (before 1.34 or so it does not): the socket is made
//! anew, with a growing pause. One that was removed, alone or with its directory, is made anew too. A kubelet that
//! restarts finds it where it is.
//!
//! The kubelet learns what the node can attach with NodeGetInfo, and labels the Node by it, when it takes the driver up. So when
//! the node can attach by one more transport than before (a module was loaded), the socket is made anew, too. What it can
//! attach no more stays in the labels, which the kubelet never takes away: whoever places by them is refused when the
//! volume is attached, with the reason.
//!
//! **The socket's file stays when the agent ends**, unlike the sidecar's. The kubelet takes its removal for the removal
//! of the driver, and drops the driver from the CSINode: during a rolling update no pod could be provided for, and the
//! scheduler would know nothing of the driver's limits. As it is, a mount that is asked for in that gap is refused by the
//! silent CSI socket, and the kubelet repeats it. The next agent replaces the file; the kubelet then forgets the driver
//! and takes it up again within about a second. Running pods notice none of it. Who removes the driver from a node for
//! good removes the file; docs/OPERATIONS.md says how.

mod relay;
mod service;

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};

use super::DRIVER;
use super::proto::GetPluginInfoRequest;
use super::proto::identity_client::IdentityClient;
use super::socket::{BindError, Purpose, Socket, bind};
use crate::domain::reach::Transport;
use crate::node::transport::Carried;
use proto::registration_server::RegistrationServer;
use service::RegistrationService;

/// The protocol, generated from `registration.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("pluginregistration");
}

/// Versions of the interface between kubelet and CSI driver: the major version of CSI is all that it looks at.
const SUPPORTED_VERSIONS: [&str; 1] = ["1.0.0"];

/// A kubelet that looks at the directory asks within a second or two; what takes as long as this is told in the log.
const UNASKED: Duration = Duration::from_secs(60);

/// Between two questions to the own CSI socket.
const CSI_PAUSE: Duration = Duration::from_millis(200);

/// What is registered, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationSettings {
    /// The kubelet's directory (its `--root-dir`).
    pub kubelet_dir: PathBuf,
    /// The CSI socket, as the kubelet sees it: a path of the host.
    pub csi_socket: PathBuf,
}

impl RegistrationSettings {
    /// The directory that the kubelet looks for plugins in.
    #[must_use]
    pub fn registry(&self) -> PathBuf {
        self.kubelet_dir.join("plugins_registry")
    }

    /// The socket that the kubelet finds the driver by; its name is what node-driver-registrar would give it, so that
    /// either replaces the other.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.registry().join(format!("{DRIVER}-reg.sock"))
    }
}

/// How the registration stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RegistrationState {
    /// The CSI socket does not answer yet.
    #[default]
    Starting,
    /// The registration socket is served and the kubelet has not decided yet.
    Offered,
    /// The kubelet has the driver.
    Registered,
    /// It has not, and why, with what to do; it is tried again.
    Failed {
        /// For the operator.
        reason: String,
    },
}

/// How long what takes; shorter in tests.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// How often it is looked whether the socket is still there: one lstat(2).
    look: Duration,
    /// The first pause between two attempts; each next one is twice as long.
    pause: Duration,
    /// The longest pause: as long as the kubelet's own.
    longest: Duration,
}

const TIMING: Timing =
    Timing { look: Duration::from_secs(5), pause: Duration::from_secs(1), longest: Duration::from_secs(120) };

/// Registers the driver and keeps it registered until `shutdown`; `carried`: what NodeGetInfo tells of. What happens is told to `state`; [`watch::channel`] makes
/// one, with [`RegistrationState::default`].
pub async fn serve(
    settings: RegistrationSettings,
    state: watch::Sender<RegistrationState>,
    carried: watch::Receiver<Carried>,
    shutdown: CancellationToken,
) {
    serve_with(TIMING, settings, state, carried, shutdown).await;
}

async fn serve_with(
    timing: Timing,
    settings: RegistrationSettings,
    state: watch::Sender<RegistrationState>,
    mut carried: watch::Receiver<Carried>,
    shutdown: CancellationToken,
) {
    if shutdown.run_until_cancelled(await_csi(&settings.csi_socket)).await.is_none() {
        return;
    }
    let mut pause = Pause::new(timing);
    while !shutdown.is_cancelled() {
        let ended = match bind(Purpose::Registration, &settings.socket()) {
            Ok(socket) => offer(&settings, socket, &state, &mut carried, &mut pause, &shutdown).await,
            Err(error) => Ended::Failed(unavailable(&settings, &error)),
        };
        match ended {
            Ended::Told => return,
            Ended::Vanished => {
                let path = settings.socket();
                tracing::info!(path = %path.display(), "the registration socket was removed and is made anew");
            }
            Ended::Outdated => tracing::info!(
                "the node can attach by one more transport: the kubelet is told by a registration socket made anew"
            ),
            // The kubelet's refusal was told when it came, and its pause is over.
            Ended::Refused => {}
            Ended::Failed(reason) => {
                let next = pause.next();
                tracing::warn!(reason, retry.seconds = next.as_secs_f64(), "the driver is not registered");
                state.send_replace(RegistrationState::Failed { reason });
                shutdown.run_until_cancelled(tokio::time::sleep(next)).await;
            }
        }
    }
}

/// Why one socket is served no longer.
enum Ended {
    /// The agent ends.
    Told,
    /// Somebody removed or replaced the socket.
    Vanished,
    /// The node can attach by more than the kubelet was told.
    Outdated,
    /// The kubelet refused, and has had its time to ask again by itself.
    Refused,
    /// It could not be served.
    Failed(String),
}

/// Serves one socket until something is to be done about it.
async fn offer(
    settings: &RegistrationSettings,
    mut socket: Socket,
    state: &watch::Sender<RegistrationState>,
    carried: &mut watch::Receiver<Carried>,
    pause: &mut Pause,
    shutdown: &CancellationToken,
) -> Ended {
    let Some(listener) = socket.listener() else {
        return Ended::Failed("the registration socket has no listener".to_owned());
    };
    // What is asked for from now on is at least this.
    let told = carried.borrow_and_update().attachable();
    state.send_replace(RegistrationState::Offered);
    let service = RegistrationService::new(settings.csi_socket.clone(), state.clone());
    let (connected, connections) = mpsc::channel(relay::WAITING);
    let server = Server::builder()
        .add_service(RegistrationServer::new(service))
        .serve_with_incoming_shutdown(ReceiverStream::new(connections), shutdown.cancelled());
    let ended = tokio::select! {
        result = server => match result {
            Ok(()) => Ended::Told,
            Err(error) => Ended::Failed(format!("its server failed: {error}")),
        },
        // Never ends by itself: the server goes on with its connections until it is done.
        () = relay::accept(listener, connected) => Ended::Failed("its listener ended".to_owned()),
        ended = supervise(settings, &socket, state.subscribe(), pause) => ended,
        () = outdated(carried, &told) => Ended::Outdated,
    };
    if matches!(ended, Ended::Told) {
        socket.leave();
    }
    ended
}

/// Returns when the node can attach by a transport that is not among those that were told.
async fn outdated(carried: &mut watch::Receiver<Carried>, told: &[Transport]) {
    let more = |now: &Carried| now.attachable().iter().any(|transport| !told.contains(transport));
    if carried.wait_for(more).await.is_err() {
        // Nobody looks any more: the agent ends.
        std::future::pending::<()>().await;
    }
}

/// Looks after a socket that is served.
async fn supervise(
    settings: &RegistrationSettings,
    socket: &Socket,
    mut state: watch::Receiver<RegistrationState>,
    pause: &mut Pause,
) -> Ended {
    let mut look = tokio::time::interval(pause.timing.look);
    let unasked = Instant::now() + UNASKED;
    let mut complained = false;
    let mut give_up = None;
    loop {
        let again = async {
            match give_up {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = look.tick() => {
                if !socket.in_place() {
                    return Ended::Vanished;
                }
                if !complained && Instant::now() >= unasked && *state.borrow() == RegistrationState::Offered {
                    complained = true;
                    tracing::warn!(
                        path = %settings.registry().display(),
                        "no kubelet has asked for the driver: is kubernetes.kubeletDir the kubelet's --root-dir, and does \
                         the agent act on the host?"
                    );
                }
            }
            changed = state.changed() => {
                if changed.is_err() {
                    return Ended::Failed("nobody is told of it".to_owned());
                }
                match state.borrow_and_update().clone() {
                    RegistrationState::Registered => {
                        pause.attempts = 0;
                        give_up = None;
                        tracing::info!(csi.socket = %settings.csi_socket.display(), "registered with the kubelet");
                    }
                    RegistrationState::Failed { reason } => {
                        let next = pause.next();
                        tracing::error!(reason, retry.seconds = next.as_secs_f64(), "the kubelet refused the driver");
                        give_up = Some(Instant::now() + next);
                    }
                    RegistrationState::Starting | RegistrationState::Offered => {}
                }
            }
            () = again => return Ended::Refused,
        }
    }
}

/// Pauses that grow.
#[derive(Debug)]
struct Pause {
    timing: Timing,
    attempts: u32,
}

impl Pause {
    const fn new(timing: Timing) -> Self {
        Self { timing, attempts: 0 }
    }

    fn next(&mut self) -> Duration {
        let Timing { pause, longest, .. } = self.timing;
        let next = pause.saturating_mul(2_u32.saturating_pow(self.attempts)).min(longest);
        self.attempts = self.attempts.saturating_add(1);
        next
    }
}

/// Why the socket cannot be made, with what to do where that is known.
fn unavailable(settings: &RegistrationSettings, error: &BindError) -> String {
    if settings.registry().is_dir() {
        return error.to_string();
    }
    format!(
        "{} does not exist: is the kubelet running, and is kubernetes.kubeletDir its --root-dir? In a container, the agent \
         must be on the host's filesystem (hostPID and privileged)",
        settings.registry().display()
    )
}

/// Returns when the own CSI socket answers: the kubelet calls it as soon as it finds the other one.
async fn await_csi(socket: &Path) {
    loop {
        match greet(socket).await {
            Ok(()) => return,
            Err(error) => tracing::debug!(%error, "the CSI socket does not answer yet"),
        }
        tokio::time::sleep(CSI_PAUSE).await;
    }
}

async fn greet(socket: &Path) -> Result<(), String> {
    let channel = connect(socket).await.map_err(|e| e.to_string())?;
    let greeting = IdentityClient::new(channel).get_plugin_info(GetPluginInfoRequest {}).await;
    greeting.map(drop).map_err(|e| e.to_string())
}

async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = socket.to_owned();
    // The URI only names the authority that HTTP/2 asks for; the connector decides where to.
    Endpoint::from_static("http://localhost")
        .timeout(Duration::from_secs(5))
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
}

#[cfg(test)]
mod tests;
