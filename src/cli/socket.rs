//! Talking to the agent's CSI socket, as an orchestrator would.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::{CliError, cli_error};
use crate::config::{self, Overrides};

/// Longer than the agent waits for branches by default (60 s), so that its own answer comes first.
const TIME_LIMIT: Duration = Duration::from_secs(150);

/// Where the agent's socket is.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct SocketArgs {
    /// Configuration file of the agent, which tells its socket [default: /etc/union-csi/agent.yaml, if it is there]
    #[arg(long, env = "UNION_CSI_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The agent's CSI socket
    #[arg(long, env = "UNION_CSI_ENDPOINT", value_name = "URL")]
    endpoint: Option<String>,
    /// The agent's state directory; volumes are staged below it
    #[arg(long, env = "UNION_CSI_STATE_DIR", value_name = "DIR")]
    state_dir: Option<String>,
}

/// An agent's socket.
#[derive(Clone, Debug)]
pub(super) struct Agent {
    socket: PathBuf,
    /// Where volumes are staged.
    pub(super) staging: PathBuf,
    channel: Channel,
}

impl SocketArgs {
    /// Connects.
    pub(super) async fn connect(&self) -> Result<Agent, CliError> {
        let overrides = Overrides {
            endpoint: self.endpoint.clone(),
            state_dir: self.state_dir.clone(),
            ..Overrides::default()
        };
        let config = config::load(self.config.as_deref(), &overrides)?;
        let channel = open(&config.csi_socket).await?;
        Ok(Agent { staging: config.staging_dir(), socket: config.csi_socket, channel })
    }
}

async fn open(socket: &Path) -> Result<Channel, CliError> {
    let path = socket.to_owned();
    // The URI only names the authority that HTTP/2 asks for; the connector decides where to.
    Endpoint::from_static("http://localhost")
        .timeout(TIME_LIMIT)
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|e| CliError::NoSocket { socket: socket.to_owned(), reason: root_cause(&e) })
}

/// The innermost reason: the layers above it only say "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

impl Agent {
    pub(super) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The error of a call that was to do `action`.
    pub(super) fn failed(&self, action: String, status: &Status) -> CliError {
        if status.code() == Code::Unavailable && status.message().is_empty() {
            return CliError::NoSocket { socket: self.socket.clone(), reason: status.to_string() };
        }
        cli_error::CallSnafu {
            action,
            code: name(status.code()),
            full: status.code() == Code::ResourceExhausted,
            message: status.message().to_owned(),
        }
        .build()
    }
}

/// The code as the CSI specification writes it.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_nobody_serves_is_told_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let args = SocketArgs {
            config: None,
            endpoint: Some(format!("unix://{}/csi.sock", dir.path().display())),
            state_dir: None,
        };
        let told = super::super::client::block_on(args.connect()).unwrap().unwrap_err().to_string();
        assert!(told.contains("csi.sock: No such file or directory"), "{told}");
        assert!(told.contains("systemctl start union-csi"), "{told}");
    }
}
