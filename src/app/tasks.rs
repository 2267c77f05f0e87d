//! The tasks of the process, all of which must run until it is told to stop.

use std::time::Duration;

use snafu::ResultExt;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::AppError;
use super::error::ProcessSnafu;

/// How long tasks may take to end when the agent stops.
const STOP_BOUND: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct Tasks {
    set: JoinSet<Result<(), AppError>>,
    stop: CancellationToken,
}

impl Tasks {
    pub(super) fn new() -> Self {
        Self { set: JoinSet::new(), stop: CancellationToken::new() }
    }

    /// Starts a task whose end, before the agent is told to stop, is a fault.
    pub(super) fn spawn<F>(&mut self, task: &'static str, run: impl FnOnce(CancellationToken) -> F)
    where
        F: Future<Output = Result<(), AppError>> + Send + 'static,
    {
        let (stop, work) = (self.stop.clone(), run(self.stop.clone()));
        self.set.spawn(async move {
            match work.await {
                Ok(()) if !stop.is_cancelled() => Err(AppError::Task { task }),
                result => result,
            }
        });
    }

    /// Waits for SIGTERM, SIGINT, or the first task that fails; then stops all.
    pub(super) async fn run(mut self) -> Result<(), AppError> {
        let result = self.until_told_or_failed().await;
        self.stop.cancel();
        let ended = async { while self.set.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP_BOUND, ended).await.is_err() {
            tracing::warn!(seconds = STOP_BOUND.as_secs(), "some work did not end in time and is left");
        }
        result
    }

    async fn until_told_or_failed(&mut self) -> Result<(), AppError> {
        let listen = |kind| signal(kind).context(ProcessSnafu { action: "listen for signals" });
        let (mut terminate, mut interrupt) =
            (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
        tokio::select! {
            _ = terminate.recv() => { tracing::info!("told to stop (SIGTERM)"); Ok(()) }
            _ = interrupt.recv() => { tracing::info!("told to stop (SIGINT)"); Ok(()) }
            ended = self.set.join_next() => match ended {
                Some(Ok(result)) => result,
                Some(Err(panic)) => {
                    tracing::error!(%panic, "a task panicked");
                    Err(AppError::Task { task: "a task" })
                }
                None => Ok(()),
            },
        }
    }
}
