//! The controller role: what runs while this instance leads.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::AppError;
use crate::config::KubernetesSettings;
use crate::controllers::Watches;
use crate::controllers::access::{AccessController, AccessCounters};
use crate::controllers::attacher::Attacher;
use crate::controllers::capacity::CapacityPublisher;
use crate::controllers::cluster::Cluster;
use crate::controllers::lease::{Claim, Elector, Guarded, Leadership, identity};
use crate::controllers::orphans::{Findings, OrphanScan};
use crate::controllers::provisioner::Provisioner;
use crate::controllers::splitter::{Rooms, Splitter, SplitterCounters};
use crate::domain::NodeName;
use crate::store::Store;

/// How long controllers may take to end with a term; then they are cut off, at whatever they wait for.
const END_BOUND: Duration = Duration::from_secs(5);

/// What a term is made of.
pub(super) struct Controllers {
    pub(super) store: Arc<dyn Store>,
    /// The cluster and the namespace of the program's objects; `None`: the embedded store.
    pub(super) cluster: Option<(Client, String)>,
    pub(super) splits: SplitterCounters,
    pub(super) orphans: Findings,
    pub(super) access: AccessCounters,
}

/// A controller ended; its name.
type Ended = &'static str;

impl Controllers {
    /// Starts all of them; each write asks `claim`.
    fn start(&self, claim: &Claim, stop: &CancellationToken) -> JoinSet<Ended> {
        let store: Arc<dyn Store> = Arc::new(Guarded::new(&self.store, claim));
        let mut tasks = JoinSet::new();
        let mut watches = Watches::new(store.clone());
        let splitter = Splitter::new(store.clone(), Timestamp::now).counting(self.splits.clone());
        let splitter = splitter.hearing(&mut watches);
        let access = AccessController::new(store.clone(), Timestamp::now).counting(self.access.clone());
        let access = access.hearing(&mut watches);
        let Some((client, namespace)) = &self.cluster else {
            spawn(&mut tasks, "the watches", watches.run(stop.clone()));
            spawn(&mut tasks, "the access controller", access.run(stop.clone()));
            spawn(&mut tasks, "the splitter", splitter.run(stop.clone()));
            return tasks;
        };
        let rooms = Rooms::default();
        spawn(&mut tasks, "the splitter", splitter.telling(rooms.clone()).run(stop.clone()));
        let cluster = Cluster { client: client.clone(), namespace: namespace.clone(), claim: claim.clone() };
        spawn(&mut tasks, "the access controller", access.telling(cluster.clone()).run(stop.clone()));
        let provisioner = Provisioner::new(cluster.clone(), store.clone(), Timestamp::now);
        let provisioner = provisioner.hearing(&mut watches);
        spawn(&mut tasks, "the provisioner", provisioner.run(stop.clone()));
        let attacher = Attacher::new(cluster.clone(), store.clone(), Timestamp::now).hearing(&mut watches);
        spawn(&mut tasks, "the attacher", attacher.run(stop.clone()));
        spawn(&mut tasks, "the watches", watches.run(stop.clone()));
        let capacity = CapacityPublisher::new(cluster.clone(), rooms, Timestamp::now);
        spawn(&mut tasks, "the capacity publisher", capacity.run(stop.clone()));
        let orphans = OrphanScan::new(cluster, store, Timestamp::now).telling(self.orphans.clone());
        spawn(&mut tasks, "the orphan scan", orphans.run(stop.clone()));
        tasks
    }
}

fn spawn(tasks: &mut JoinSet<Ended>, name: Ended, run: impl Future<Output = ()> + Send + 'static) {
    tasks.spawn(async move {
        run.await;
        name
    });
}

/// An elector for this instance. Its clock is for people who read the lease.
pub(super) fn elector(client: Client, settings: &KubernetesSettings, node: &NodeName) -> Elector {
    let me = identity(node.as_str());
    Elector::new(client, &settings.namespace, me, settings.lease_duration, Timestamp::now)
}

/// Who leads where there is nobody else.
pub(super) fn alone() -> watch::Sender<Leadership> {
    watch::Sender::new(Leadership { claim: Some(Claim::always()), terms: 1, ..Leadership::default() })
}

/// Leads whenever it is this instance's turn, until `stop`. When it returns no controller runs.
///
/// # Errors
/// A controller ended by itself.
pub(super) async fn lead(
    controllers: Controllers,
    mut leadership: watch::Receiver<Leadership>,
    stop: CancellationToken,
) -> Result<(), AppError> {
    loop {
        let term = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            led = leadership.wait_for(|now| now.claim.is_some()) => match led {
                Ok(now) => now.claim.clone().map(|claim| (claim, now.terms)),
                Err(_) => return Ok(()),
            },
        };
        let Some((claim, number)) = term else { continue };
        let end = stop.child_token();
        let mut tasks = controllers.start(&claim, &end);
        let ended = tokio::select! {
            // First, because the controllers end with it.
            biased;
            () = stop.cancelled() => None,
            // Without an elector nothing is ever lost.
            Ok(_) = leadership.wait_for(|now| now.claim.is_none() || now.terms != number) => None,
            Some(ended) = tasks.join_next() => Some(ended),
        };
        end.cancel();
        finish(&mut tasks).await;
        controllers.splits.rest();
        controllers.orphans.rest();
        controllers.access.rest();
        match ended {
            None => {}
            Some(Ok(task)) => return Err(AppError::Task { task }),
            Some(Err(panic)) => {
                tracing::error!(%panic, "a controller panicked");
                return Err(AppError::Task { task: "a controller" });
            }
        }
    }
}

/// Waits for the controllers to end, and cuts off those that do not.
async fn finish(tasks: &mut JoinSet<Ended>) {
    let all = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(END_BOUND, all).await.is_err() {
        tracing::warn!(controllers = tasks.len(), "controllers did not end with the term and are cut off");
        tasks.shutdown().await;
    }
}

#[cfg(test)]
mod tests;
