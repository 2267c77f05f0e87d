//! The node role: what gives and mounts this machine's storage.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use snafu::ResultExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::AppError;
use super::error::HostSnafu;
use super::tasks::Tasks;
use crate::config::Config;
use crate::node::branch::Branches;
use crate::node::executor::{ClusterLabels, Executor, Exporting, NodeFacts};
use crate::node::handshake::Answering;
use crate::node::heal::Healer;
use crate::node::keys::KeyFiles;
use crate::node::pool::Pools;
use crate::node::survey::Survey;
use crate::node::transport::nvme_tcp::tls::has_keys;
use crate::node::transport::{Carried, Transports};
use crate::node::union::Unions;
use crate::node::volume::{VolumeSettings, Volumes};
use crate::platform::Host;
use crate::store::Store;

/// How long the end of what is exported may take, when the machine stops.
const LEAVE_BOUND: Duration = Duration::from_secs(10);

/// The parts of the role.
pub(super) struct Node {
    pub(super) unions: Arc<Unions>,
    pub(super) volumes: Arc<Volumes>,
    pub(super) executor: Arc<Executor>,
    /// What it can carry between itself and others.
    pub(super) transports: Arc<Transports>,
    /// Finds that out, or only lets go of what is left where this node takes no part.
    survey: Arc<Survey>,
    /// The kernel's requests for TLS.
    answering: Arc<Answering>,
    host: Host,
}

impl Node {
    /// Finds out what the host can do. Asks nothing of the store.
    pub(super) async fn new(
        host: &Host,
        config: &Config,
        store: Arc<dyn Store>,
        cluster_labels: watch::Receiver<ClusterLabels>,
    ) -> Result<Self, AppError> {
        let pools =
            Pools::new(host.clone(), config.node.clone(), config.pools.clone(), config.state_dir.clone());
        let pools = Arc::new(pools.with_under(config.pools_under.clone()));
        let branches = Arc::new(Branches::new(host.clone(), pools.clone()));
        let transports = Arc::new(Transports::none());
        let (settings, state) = (config.network.clone(), &config.state_dir);
        let answering = Arc::new(Answering::default());
        let survey = Survey::new(host, &config.node, settings, state, transports.clone(), answering.clone());
        let takes_part = config.network.wanted(config.kubernetes.is_some());
        let survey = Arc::new(if takes_part { survey } else { survey.leaving() });
        for lack in host.missing_devices() {
            tracing::warn!(%lack, "some volumes cannot be served here");
        }
        let unions = {
            let (host, state) = (host.clone(), config.state_dir.clone());
            let (mut settings, bundled) = (config.mergerfs.clone(), config.bundled_mergerfs.clone());
            let probe = tokio::task::spawn_blocking(move || {
                settings.prefer_bundled(&host, bundled.as_deref(), &state);
                Unions::probe(&host, &settings, &state)
            });
            Arc::new(probe.await.map_err(|_| AppError::Task { task: "the test of mergerfs" })?)
        };
        let abilities = unions.abilities();
        let (kernel, _) = host.kernel().context(HostSnafu { action: "read the kernel's version" })?;
        let facts = NodeFacts {
            labels: config.node_labels.clone(),
            cluster_labels,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            mergerfs_version: abilities.mergerfs_version.clone(),
            kernel,
            measure_interval: config.measure_interval,
            ephemeral_dir: ephemeral_dir(&config.state_dir),
        };
        // Ephemeral volumes and the like are staged in the state directory.
        let mut allowed_targets = config.target_roots();
        allowed_targets.push(ephemeral_dir(&config.state_dir));
        let settings = VolumeSettings { state_dir: config.state_dir.clone(), allowed_targets };
        let node = config.node.clone();
        let volumes = Volumes::new(
            host.clone(),
            store.clone(),
            node.clone(),
            branches.clone(),
            unions.clone(),
            transports.clone(),
            settings,
        );
        let volumes = Arc::new(volumes.context(HostSnafu { action: "read this boot's id" })?);
        let exporting = Exporting {
            transports: transports.clone(),
            uses: volumes.clone(),
            keys: KeyFiles::new(host, &config.state_dir),
        };
        let executor = Arc::new(Executor::new(store, node, facts, pools, branches, exporting));
        let host = host.clone();
        Ok(Self { unions, volumes, executor, transports, survey, answering, host })
    }

    /// Finds out what this node can carry, exports again what other nodes used before a reboot, and takes over the volumes that
    /// an earlier agent left mounted.
    pub(super) async fn recover(&self) {
        self.survey.look().await;
        let begun = std::time::Instant::now();
        // At the same time: a volume here may wait for a node that waits for this one.
        tokio::join!(self.executor.restore_exports(), self.volumes.recover());
        tracing::info!(seconds = begun.elapsed().as_secs_f64(), "volumes of the earlier agent taken over");
    }

    /// After everything else has ended: where the machine is about to stop, what it exports is withdrawn.
    pub(super) async fn leave(&self) {
        let (host, transports) = (self.host.clone(), self.transports.clone());
        let withdrawn = tokio::task::spawn_blocking(move || {
            if host.is_stopping() {
                tracing::info!("the machine is being switched off or rebooted");
                transports.withdraw();
            }
        });
        if tokio::time::timeout(LEAVE_BOUND, withdrawn).await.is_err() {
            tracing::warn!(seconds = LEAVE_BOUND.as_secs(), "exports are not withdrawn in time");
        }
    }

    /// Answers the kernel's requests for TLS, which it makes for connections of an earlier agent too, and for those of the
    /// recovery.
    pub(super) fn answer(&self, tasks: &mut Tasks) {
        let (host, answering) = (self.host.clone(), self.answering.clone());
        tasks.spawn("the answering of the kernel's requests for TLS", |stop| async move {
            let answered = tokio::task::spawn_blocking(move || {
                if has_keys(&host) {
                    answering.want();
                }
                answering.serve(&host, &|| stop.is_cancelled());
            });
            // It ends when it is told to.
            answered
                .await
                .map_err(|_| AppError::Task { task: "the answering of the kernel's requests for TLS" })
        });
    }

    /// What it can carry between itself and other nodes.
    pub(super) fn carried(&self) -> Carried {
        self.transports.watch().borrow().clone()
    }

    /// Starts what works on the machine until the tasks are told to stop.
    pub(super) fn start(&self, tasks: &mut Tasks) {
        let executor = self.executor.clone();
        tasks.spawn("the executor", |stop: CancellationToken| async move {
            executor.run(stop).await;
            Ok(())
        });
        let survey = self.survey.clone();
        tasks.spawn("the survey of the network", |stop| async move {
            survey.run(stop).await;
            Ok(())
        });
        let volumes = (*self.volumes).clone();
        tasks.spawn("the healer", |stop| async move {
            Healer::new(volumes).run(stop).await;
            Ok(())
        });
    }
}

/// Where ephemeral volumes are staged.
pub(super) fn ephemeral_dir(state: &Path) -> PathBuf {
    state.join("ephemeral")
}
