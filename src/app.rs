//! Wires everything and owns every task.
//!
//! One function, [`run`]: it takes the machine's state directory for itself, opens the store, finds out what the host can
//! do, takes over the volumes that an earlier agent left mounted, and serves until it is told to stop. Unions and mounts
//! stay when it ends: running workloads must not notice.
//!
//! An instance plays the node role (`node`), or leads while it is its turn (`lead`), or both. An API server that does
//! not answer stops neither the start nor anything that runs.

mod cluster;
mod error;
mod labels;
mod lead;
mod machine;
mod node;
mod tasks;
mod traffic;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use snafu::{ResultExt, ensure};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::controllers::access::AccessCounters;
use crate::controllers::lease::Leadership;
use crate::controllers::orphans::Findings;
use crate::controllers::splitter::SplitterCounters;
use crate::csi::counters::CsiCounters;
use crate::csi::registration::{self, RegistrationSettings, RegistrationState};
use crate::csi::{self, ControllerService, IdentityService, NodeService};
use crate::http::{self, View};
use crate::platform::{Host, memory};
use crate::store::kubernetes::KubernetesStore;
use crate::store::local::LocalStore;
use crate::store::{Asked, Health, Store};
use error::{HostSnafu, NoKubeletSnafu, ProcessSnafu};
use lead::Controllers;
use machine::LocalMachine;
use node::{Node, ephemeral_dir};
use tasks::Tasks;
use traffic::Traffic;

pub use cluster::{ClusterError, operator};
pub use error::AppError;

/// Threads for asynchronous work: an agent waits far more than it computes, and each thread costs memory.
const WORKERS: usize = 2;

/// Threads for blocking work (mounts, mkfs, statfs) at most; further work waits for one.
const BLOCKING: usize = 64;

/// An idle blocking thread ends after this time, so that a burst does not stay in memory.
const BLOCKING_IDLE: Duration = Duration::from_secs(10);

/// How often memory that was freed is given back to the system.
const GIVE_BACK: Duration = Duration::from_secs(60);

/// Directories of the state directory that hold files which are written atomically.
const RECORDS: [&str; 2] = ["unions", "pools"];

/// Field manager of the store's objects; the same for every instance.
pub const FIELD_MANAGER: &str = "union-csi";

/// Runs the agent until SIGTERM or SIGINT.
///
/// # Errors
/// See [`AppError`].
pub fn run(config: Config) -> Result<(), AppError> {
    memory::bound_arenas();
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
    let _lock = take_state_directory(&host, &config)?;
    make_plugin_directory(&host, &config)?;
    // What others may hold is taken first, so that a second agent fails before it has done anything.
    let socket = csi::bind(csi::Purpose::Csi, &config.csi_socket)?;
    let listener = match config.http_listen {
        Some(at) => Some(http::bind(at).await?),
        None => None,
    };

    let ground = Ground::open(&config).await?;
    // Without a cluster there are none to wait for.
    let cluster_labels = watch::Sender::new(ground.client.is_none().then(BTreeMap::new));
    let node = match config.mode.is_node() {
        true => {
            Some(Arc::new(Node::new(&host, &config, ground.store.clone(), cluster_labels.subscribe()).await?))
        }
        false => None,
    };
    let mut tasks = Tasks::new();
    let counters = Arc::new(CsiCounters::default());
    let splits = SplitterCounters::default();
    let orphans = Findings::default();
    let access = AccessCounters::default();
    let (leadership, leading) = Leading::prepare(&config, &ground, |store, cluster| Controllers {
        store,
        cluster,
        splits: splits.clone(),
        orphans: orphans.clone(),
        access: access.clone(),
    });
    let registered = watch::Sender::new(RegistrationState::default());
    let machine = Arc::new(LocalMachine {
        node: node.clone(),
        csi: counters.clone(),
        splits,
        orphans,
        access,
        store: ground.store.clone(),
        health: ground.health.clone(),
        traffic: ground.traffic.clone(),
        leadership,
        registered: registered.subscribe(),
        mode: config.mode,
        has_pools: !config.pools.is_empty(),
    });
    if let Some(listener) = listener {
        let at = listener.local_addr().context(ProcessSnafu { action: "read the HTTP address" })?;
        let view = Arc::new(View {
            node: config.node.clone(),
            node_labels: config.node_labels.clone(),
            store: ground.store.clone(),
            machine,
            hosts: http::Hosts::new(config.node.as_str(), config.http_host_names.clone()),
        });
        tasks.spawn("the HTTP API", |stop| async move { Ok(http::serve(listener, view, stop).await?) });
        tracing::info!(http.listen = %at, "HTTP API and status page");
    }

    // The volumes that run are taken over before anyone can ask for changes to them.
    if let Some(node) = &node {
        node.answer(&mut tasks);
        node.recover().await;
        node.start(&mut tasks);
        if let Some(client) = ground.client.clone() {
            let name = config.node.clone();
            tasks.spawn("the reading of the node's labels", |stop| async move {
                labels::follow(client, name, cluster_labels, stop).await;
                Ok(())
            });
        }
    }
    if let Some(leading) = leading {
        tasks.spawn("the controller role", |stop| leading.run(stop));
    }
    let services = services(&config, node.as_deref(), &ground, counters);
    tasks.spawn("the CSI server", |stop| async move {
        Ok(csi::serve(socket, services, stop.cancelled_owned()).await?)
    });
    if let (Some(cluster), Some(node)) = (&config.kubernetes, &node) {
        let carried = node.transports.watch();
        let settings = RegistrationSettings {
            kubelet_dir: cluster.kubelet_dir.clone(),
            csi_socket: config.csi_socket.clone(),
        };
        tasks.spawn("the registration with the kubelet", |stop| async move {
            registration::serve(settings, registered, carried, stop).await;
            Ok(())
        });
    }
    tracing::info!(
        node = %config.node, mode = config.mode.as_str(), store = ground.kind(),
        csi.socket = %config.csi_socket.display(), pools = config.pools.len(),
        version = env!("CARGO_PKG_VERSION"), "the agent serves"
    );

    tasks.spawn("the return of freed memory", |stop| async move {
        while stop.run_until_cancelled(tokio::time::sleep(GIVE_BACK)).await.is_some() {
            // One that did not run is made up for by the next.
            let _ = tokio::task::spawn_blocking(memory::give_back).await;
        }
        Ok(())
    });

    let result = tasks.run().await;
    if let Some(node) = &node {
        node.leave().await;
    }
    tracing::info!("the agent has ended; mounted volumes stay mounted");
    result
}

/// What all roles stand on.
struct Ground {
    store: Arc<dyn Store>,
    health: Arc<dyn Health>,
    /// With Kubernetes.
    client: Option<Client>,
    traffic: Option<Arc<Traffic>>,
}

impl Ground {
    /// Opens the store; one of a cluster is asked nothing yet.
    async fn open(config: &Config) -> Result<Self, AppError> {
        let Some(settings) = &config.kubernetes else {
            let file = config.state_dir.join("store.redb");
            let opened = tokio::task::spawn_blocking(move || LocalStore::open(&file)).await;
            let store: Arc<dyn Store> =
                Arc::new(opened.map_err(|_| AppError::Task { task: "opening the store" })??);
            return Ok(Self { health: Arc::new(Asked(store.clone())), store, client: None, traffic: None });
        };
        let (client, traffic) = cluster::connect(settings).await?;
        let store = KubernetesStore::new(client.clone(), &settings.namespace, FIELD_MANAGER);
        Ok(Self {
            store: Arc::new(store),
            health: traffic.clone(),
            client: Some(client),
            traffic: Some(traffic),
        })
    }

    const fn kind(&self) -> &'static str {
        if self.client.is_some() { "kubernetes" } else { "local" }
    }
}

/// The controller role of this instance, ready to run.
struct Leading {
    controllers: Controllers,
    leadership: watch::Receiver<Leadership>,
    elector: Option<crate::controllers::lease::Elector>,
    /// Without an elector: who leads, for ever.
    _alone: Option<watch::Sender<Leadership>>,
}

impl Leading {
    /// The role where the instance may play it; and what is known of who does, in any case.
    fn prepare(
        config: &Config,
        ground: &Ground,
        controllers: impl FnOnce(Arc<dyn Store>, Option<(Client, String)>) -> Controllers,
    ) -> (watch::Receiver<Leadership>, Option<Self>) {
        if !config.mode.may_lead() {
            return (watch::Sender::new(Leadership::default()).subscribe(), None);
        }
        let cluster = config.kubernetes.as_ref().zip(ground.client.clone());
        let namespace =
            cluster.as_ref().map(|(settings, client)| (client.clone(), settings.namespace.clone()));
        let controllers = controllers(ground.store.clone(), namespace);
        let (leadership, elector, alone) = match cluster {
            Some((settings, client)) => {
                let elector = lead::elector(client, settings, &config.node);
                (elector.leadership(), Some(elector), None)
            }
            None => {
                let alone = lead::alone();
                (alone.subscribe(), None, Some(alone))
            }
        };
        (leadership.clone(), Some(Self { controllers, leadership, elector, _alone: alone }))
    }

    /// Leads when it is its turn. The lease is released when no controller runs any more.
    async fn run(self, stop: CancellationToken) -> Result<(), AppError> {
        let release = CancellationToken::new();
        let lead = async {
            let result = lead::lead(self.controllers, self.leadership, stop).await;
            release.cancel();
            result
        };
        let elect = async {
            if let Some(elector) = self.elector {
                elector.run(release.clone()).await;
            }
        };
        tokio::join!(lead, elect).0
    }
}

fn services(
    config: &Config,
    node: Option<&Node>,
    ground: &Ground,
    counters: Arc<CsiCounters>,
) -> csi::Services {
    let settings = csi::Settings {
        node: config.node.clone(),
        create_timeout: config.create_timeout,
        max_volumes: config.max_volumes,
        ephemeral_dir: ephemeral_dir(&config.state_dir),
    };
    let tasks = TaskTracker::new();
    let store = ground.store.clone();
    let volumes = node.map(|node| (node.volumes.clone(), node.transports.watch()));
    csi::Services {
        identity: IdentityService::new(ground.health.clone(), volumes.clone().map(|(v, _)| v as _)),
        controller: config.mode.may_lead().then(|| ControllerService::new(store.clone(), settings.clone())),
        node: volumes
            .map(|(volumes, carried)| NodeService::new(volumes, store, settings, carried, tasks.clone())),
        counters,
        tasks,
    }
}

/// Makes the directory of the CSI socket below the kubelet's, which itself must be there: a wrong one would be waited for in
/// vain.
fn make_plugin_directory(host: &Host, config: &Config) -> Result<(), AppError> {
    let kubelet = config.kubernetes.as_ref().map(|cluster| cluster.kubelet_dir.as_path());
    let directory = config.csi_socket.parent();
    let (Some(kubelet), Some(directory)) = (kubelet, directory) else { return Ok(()) };
    if !directory.starts_with(kubelet) {
        return Ok(());
    }
    ensure!(kubelet.is_dir(), NoKubeletSnafu { path: kubelet });
    // The mode that the kubelet gives such directories.
    host.ensure_directory(directory, 0o750)
        .context(HostSnafu { action: "make the directory of the CSI socket" })?;
    Ok(())
}

/// Makes the state directory where it is missing, and holds it against a second agent until the lock is dropped.
fn take_state_directory(host: &Host, config: &Config) -> Result<std::os::fd::OwnedFd, AppError> {
    let path: &Path = &config.state_dir;
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
