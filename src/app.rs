//! Wires everything and owns every task.
//!
//! One function, [`run`]: it takes the machine's state directory for itself, opens the store, finds out what the host can
//! do, takes over the volumes that an earlier agent left mounted, and serves until it is told to stop. Unions and mounts
//! stay when it ends: running workloads must not notice.

mod machine;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use snafu::{ResultExt, Snafu};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::controllers::splitter::Splitter;
use crate::csi::{self, ControllerService, IdentityService, NodeService};
use crate::http::{self, View};
use crate::node::branch::Branches;
use crate::node::executor::{Executor, NodeFacts};
use crate::node::heal::Healer;
use crate::node::pool::Pools;
use crate::node::union::Unions;
use crate::node::volume::{VolumeSettings, Volumes};
use crate::platform::{Host, HostError};
use crate::store::Store;
use crate::store::local::{LocalStore, OpenError};
use machine::LocalMachine;

/// Threads for asynchronous work: an agent waits far more than it computes, and each thread costs memory.
const WORKERS: usize = 2;

/// Threads for blocking work (mounts, mkfs, statfs) at most; further work waits for one.
const BLOCKING: usize = 64;

/// An idle blocking thread ends after this time, so that a burst does not stay in memory.
const BLOCKING_IDLE: Duration = Duration::from_secs(10);

/// Directories of the state directory that hold files which are written atomically.
const RECORDS: [&str; 2] = ["unions", "pools"];

/// How long tasks may take to end when the agent stops.
const STOP_BOUND: Duration = Duration::from_secs(30);

/// The agent could not run.
#[derive(Debug, Snafu)]
pub enum AppError {
    /// Another agent has the state directory.
    #[snafu(display(
        "another agent runs on the state directory {}: stop it, or set another stateDir",
        path.display()
    ))]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The machine refused something that the agent cannot be without.
    #[snafu(display("cannot {action}: {source}"))]
    Host {
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
    /// The store cannot be opened.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why, and what to do.
        source: OpenError,
    },
    /// The CSI socket cannot be had.
    #[snafu(display("{source}"), context(false))]
    CsiSocket {
        /// Why, and what to do.
        source: csi::BindError,
    },
    /// The CSI socket is no longer served.
    #[snafu(display("{source}"), context(false))]
    CsiServe {
        /// Why.
        source: csi::ServeError,
    },
    /// The HTTP API cannot be served.
    #[snafu(display("{source}"), context(false))]
    Http {
        /// Why, and what to do.
        source: http::HttpError,
    },
    /// The process could not be set up.
    #[snafu(display("cannot {action}: {source}"))]
    Process {
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A task that must run ended.
    #[snafu(display("{task} ended unexpectedly; the log says why"))]
    Task {
        /// Which.
        task: &'static str,
    },
}

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// See [`AppError`].
pub fn run(config: Config) -> Result<(), AppError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(BLOCKING)
        .thread_keep_alive(BLOCKING_IDLE)
        .enable_all()
        .build()
        .context(ProcessSnafu { action: "start the runtime" })?;
    let result = runtime.block_on(serve(config));
    // A blocking call that hangs (a statfs on a dead disk) must not keep the process from ending.
    runtime.shutdown_timeout(Duration::from_secs(2));
    result
}

async fn serve(config: Config) -> Result<(), AppError> {
    let host = Host::new();
    let state = config.state_dir.clone();
    let _lock = take_state_directory(&host, &config)?;
    // What others may hold is taken first, so that a second agent fails before it has done anything.
    let socket = csi::bind(csi::Purpose::Csi, &config.csi_socket)?;
    let listener = match config.http_listen {
        Some(at) => Some(http::bind(at).await?),
        None => None,
    };

    let store = open_store(&state).await?;
    let parts = Parts::new(&host, &config, store.clone()).await?;
    let stop = CancellationToken::new();
    let counters = Arc::new(csi::counters::CsiCounters::default());
    let mut tasks: JoinSet<Result<(), AppError>> = JoinSet::new();

    let splitter = Splitter::new(store.clone(), Timestamp::now);
    let machine = Arc::new(LocalMachine {
        executor: parts.executor.clone(),
        volumes: parts.volumes.clone(),
        unions: parts.unions.clone(),
        csi: counters.clone(),
        splits: splitter.counters(),
        store: store.clone(),
        node: config.node.clone(),
        has_pools: !config.pools.is_empty(),
    });
    if let Some(listener) = listener {
        let at = listener.local_addr().context(ProcessSnafu { action: "read the HTTP address" })?;
        let view = Arc::new(View {
            node: config.node.clone(),
            node_labels: config.node_labels.clone(),
            store: store.clone(),
            machine,
            hosts: http::Hosts::new(config.node.as_str(), config.http_host_names.clone()),
        });
        tasks.spawn(critical("the HTTP API", stop.clone(), {
            let stop = stop.clone();
            async move { Ok(http::serve(listener, view, stop).await?) }
        }));
        tracing::info!(http.listen = %at, "HTTP API and status page");
    }

    // The volumes that run are taken over before anyone can ask for changes to them.
    let begun = std::time::Instant::now();
    parts.volumes.recover().await;
    tracing::info!(seconds = begun.elapsed().as_secs_f64(), "volumes of the earlier agent taken over");

    let task = |run: futures::future::BoxFuture<'static, ()>, name| {
        critical(name, stop.clone(), async move {
            run.await;
            Ok(())
        })
    };
    let executor = parts.executor.clone();
    let (for_executor, for_splitter, for_healer) = (stop.clone(), stop.clone(), stop.clone());
    tasks.spawn(task(Box::pin(async move { executor.run(for_executor).await }), "the executor"));
    tasks.spawn(task(Box::pin(splitter.run(for_splitter)), "the splitter"));
    let volumes = (*parts.volumes).clone();
    tasks.spawn(task(Box::pin(async move { Healer::new(volumes).run(for_healer).await }), "the healer"));

    let services = services(&config, &parts, store, counters);
    tasks.spawn(critical("the CSI server", stop.clone(), {
        let stop = stop.clone();
        async move { Ok(csi::serve(socket, services, stop.cancelled_owned()).await?) }
    }));
    tracing::info!(
        node = %config.node, csi.socket = %config.csi_socket.display(), pools = config.pools.len(),
        version = env!("CARGO_PKG_VERSION"), "the agent serves"
    );

    let result = until_told_or_failed(&mut tasks).await;
    stop.cancel();
    let ended = tokio::time::timeout(STOP_BOUND, async { while tasks.join_next().await.is_some() {} }).await;
    if ended.is_err() {
        tracing::warn!(seconds = STOP_BOUND.as_secs(), "some work did not end in time and is left");
    }
    tracing::info!("the agent has ended; mounted volumes stay mounted");
    result
}

/// The parts of the node role.
struct Parts {
    unions: Arc<Unions>,
    volumes: Arc<Volumes>,
    executor: Arc<Executor>,
}

impl Parts {
    async fn new(host: &Host, config: &Config, store: Arc<dyn Store>) -> Result<Self, AppError> {
        let (node, state) = (config.node.clone(), config.state_dir.clone());
        let pools = Pools::new(host.clone(), node, config.pools.clone(), state);
        let pools = Arc::new(pools.with_under(config.pools_under.clone()));
        let branches = Arc::new(Branches::new(host.clone(), pools.clone()));
        let unions = {
            let (host, settings, state) = (host.clone(), config.mergerfs.clone(), config.state_dir.clone());
            let probe = tokio::task::spawn_blocking(move || Unions::probe(&host, &settings, &state));
            Arc::new(probe.await.map_err(|_| AppError::Task { task: "the test of mergerfs" })?)
        };
        let abilities = unions.abilities();
        let (kernel, _) = host.kernel().context(HostSnafu { action: "read the kernel's version" })?;
        let facts = NodeFacts {
            labels: config.node_labels.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            mergerfs_version: abilities.mergerfs_version.clone(),
            kernel,
            measure_interval: config.measure_interval,
        };
        let executor =
            Arc::new(Executor::new(store.clone(), config.node.clone(), facts, pools, branches.clone()));
        // Ephemeral volumes and the like are staged in the state directory.
        let mut allowed_targets = config.target_roots();
        allowed_targets.push(ephemeral_dir(&config.state_dir));
        let settings = VolumeSettings { state_dir: config.state_dir.clone(), allowed_targets };
        let volumes =
            Volumes::new(host.clone(), store, config.node.clone(), branches, unions.clone(), settings)
                .context(HostSnafu { action: "read this boot's id" })?;
        Ok(Self { unions, volumes: Arc::new(volumes), executor })
    }
}

fn ephemeral_dir(state: &Path) -> PathBuf {
    state.join("ephemeral")
}

fn services(
    config: &Config,
    parts: &Parts,
    store: Arc<dyn Store>,
    counters: Arc<csi::counters::CsiCounters>,
) -> csi::Services {
    let settings = csi::Settings {
        node: config.node.clone(),
        create_timeout: config.create_timeout,
        max_volumes: config.max_volumes,
        ephemeral_dir: ephemeral_dir(&config.state_dir),
    };
    let tasks = TaskTracker::new();
    csi::Services {
        identity: IdentityService::new(config.node.clone(), store.clone(), Some(parts.volumes.clone())),
        controller: Some(ControllerService::new(store.clone(), settings.clone())),
        node: Some(NodeService::new(parts.volumes.clone(), store, settings, tasks.clone())),
        counters,
        tasks,
    }
}

/// Makes the state directory where it is missing, and holds it against a second agent until the lock is dropped.
fn take_state_directory(host: &Host, config: &Config) -> Result<std::os::fd::OwnedFd, AppError> {
    let path = config.state_dir.as_path();
    host.ensure_directory(path, 0o700).context(HostSnafu { action: "make the state directory" })?;
    for directory in [ephemeral_dir(path), config.staging_dir()] {
        host.ensure_directory(&directory, 0o700).context(HostSnafu { action: "make the state directory" })?;
    }
    let lock = host.try_lock(&path.join("lock")).context(HostSnafu { action: "lock the state directory" })?;
    let lock = lock.ok_or_else(|| AppError::Locked { path: path.to_owned() })?;
    for directory in RECORDS {
        // What stays does no harm.
        if let Err(error) = host.remove_temporaries(&path.join(directory)) {
            tracing::warn!(%error, "what an earlier agent was just writing is not removed");
        }
    }
    Ok(lock)
}

async fn open_store(state: &Path) -> Result<Arc<dyn Store>, AppError> {
    let file = state.join("store.redb");
    let opened = tokio::task::spawn_blocking(move || LocalStore::open(&file)).await;
    Ok(Arc::new(opened.map_err(|_| AppError::Task { task: "opening the store" })??))
}

/// A task whose end, before the agent is told to stop, is a fault.
async fn critical(
    task: &'static str,
    stop: CancellationToken,
    run: impl Future<Output = Result<(), AppError>>,
) -> Result<(), AppError> {
    let result = run.await;
    match result {
        Ok(()) if !stop.is_cancelled() => Err(AppError::Task { task }),
        result => result,
    }
}

/// Waits for SIGTERM, SIGINT, or the first task that fails.
async fn until_told_or_failed(tasks: &mut JoinSet<Result<(), AppError>>) -> Result<(), AppError> {
    let listen = |kind| signal(kind).context(ProcessSnafu { action: "listen for signals" });
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    tokio::select! {
        _ = terminate.recv() => { tracing::info!("told to stop (SIGTERM)"); Ok(()) }
        _ = interrupt.recv() => { tracing::info!("told to stop (SIGINT)"); Ok(()) }
        ended = tasks.join_next() => match ended {
            Some(Ok(result)) => result,
            Some(Err(panic)) => { tracing::error!(%panic, "a task panicked"); Err(AppError::Task { task: "a task" }) }
            None => Ok(()),
        },
    }
}
