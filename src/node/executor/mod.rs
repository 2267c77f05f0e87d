//! Brings this node's branches to what the store wants, and tells the store what is.
//!
//! Four loops. One measures the pools, on a timer and after each change, and keeps the figures for whoever asks
//! ([`Executor::latest`]). One publishes them as this node's `StorageNode`. The third watches this node's `Branch` objects
//! and makes, checks or removes what each of them names, several at a time and never two for one branch; what failed is
//! tried again, later each time; who may use a branch is part of what its object wants (`orders`). The fourth brings back what
//! was exported before a reboot (`exports`), from what lies beside the branches alone. Nothing is polled on the way from a planned branch to a bound one.

mod exports;
mod fresh;
mod orders;
mod publish;
mod queue;
mod strays;
mod work;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::domain::pool::{PoolReport, PoolState};
use crate::domain::{BranchId, NodeName, PoolName};
use crate::node::access::{ExportCounts, Exporter, LocalUse};
use crate::node::branch::Branches;
use crate::node::keys::KeyFiles;
use crate::node::pool::Pools;
use crate::node::transport::Transports;
use crate::store::object::{Branch, Object};
use crate::store::{Event, Selector, Store};

use fresh::Fresh;
use publish::{Measured, Published, Publisher};
use queue::Queue;
use strays::{Strays, Warned};
use work::{Done, Worker};

/// Branches that are worked on at the same time: enough to keep several disks busy, few enough that a burst of volumes
/// does not start hundreds of mkfs.
const PARALLEL: usize = 8;

/// Pause before a broken watch is begun anew.
const REWATCH: Duration = Duration::from_secs(2);

/// How often bound branches are looked at again although nothing was heard of them: finds files that were removed by hand,
/// and refreshes how much of each is used.
const RECHECK: Duration = Duration::from_secs(300);

/// How long work that has begun may take to end when the agent stops.
const STOP_BOUND: Duration = Duration::from_secs(20);

/// Labels that a cluster gives this node; `None` while they are not known.
pub type ClusterLabels = Option<BTreeMap<String, String>>;

/// What is published of this node besides its pools.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// Labels from the configuration, for `nodeSelector`.
    pub labels: BTreeMap<String, String>,
    /// Labels from elsewhere; the configuration's win. While they are not known, those that were published last stay.
    pub cluster_labels: watch::Receiver<ClusterLabels>,
    /// Version of this program.
    pub agent_version: String,
    /// Version of its mergerfs; `None` when it has none that works.
    pub mergerfs_version: Option<String>,
    /// Kernel release.
    pub kernel: String,
    /// How often pools are measured.
    pub measure_interval: Duration,
    /// Where each ephemeral volume that a pod here has has a directory of its name.
    pub ephemeral_dir: PathBuf,
}

/// How branches of this node reach other nodes.
#[derive(Clone)]
pub struct Exporting {
    /// What this node can carry.
    pub transports: Arc<Transports>,
    /// What its own volumes do with its branches.
    pub uses: Arc<dyn LocalUse>,
    /// Keys that it shares with other nodes.
    pub keys: KeyFiles,
}

/// Works for one node.
pub struct Executor {
    store: Arc<dyn Store>,
    node: NodeName,
    facts: NodeFacts,
    pools: Arc<Pools>,
    branches: Arc<Branches>,
    transports: Arc<Transports>,
    exporter: Arc<Exporter>,
    /// The exports that the marks on the disks tell of were brought back once.
    restored: watch::Sender<bool>,
    /// Those that were not, then.
    missing: Mutex<BTreeMap<BranchId, String>>,
    latest: watch::Sender<Arc<Vec<PoolReport>>>,
    fresh: Arc<Fresh>,
    published: watch::Sender<bool>,
    /// `None`: not looked for yet.
    strays: watch::Sender<Option<Arc<Strays>>>,
}

impl NodeFacts {
    /// All labels, where `stored` are those that were published last.
    fn all_labels(&self, stored: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut all = self.cluster_labels.borrow().clone().unwrap_or_else(|| stored.clone());
        all.extend(self.labels.clone());
        all
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Executor {
    /// An executor; it does nothing until [`Executor::run`].
    #[must_use]
    pub fn new(
        store: Arc<dyn Store>,
        node: NodeName,
        facts: NodeFacts,
        pools: Arc<Pools>,
        branches: Arc<Branches>,
        exporting: Exporting,
    ) -> Self {
        let latest = watch::Sender::new(Arc::new(Vec::new()));
        let (published, restored) = (watch::Sender::new(false), watch::Sender::new(false));
        let (fresh, strays) = (Arc::new(Fresh::new()), watch::Sender::new(None));
        let Exporting { transports, uses, keys } = exporting;
        let exporter = Exporter::new(node.clone(), branches.clone(), transports.clone(), uses, keys);
        let exporter = Arc::new(exporter);
        Self {
            store,
            node,
            facts,
            pools,
            branches,
            transports,
            exporter,
            restored,
            missing: Mutex::default(),
            latest,
            fresh,
            published,
            strays,
        }
    }

    /// The pools as last measured; empty before the first measurement.
    #[must_use]
    pub fn latest(&self) -> Arc<Vec<PoolReport>> {
        self.latest.borrow().clone()
    }

    /// The pools as last measured, and each later measurement.
    #[must_use]
    pub fn watch_pools(&self) -> watch::Receiver<Arc<Vec<PoolReport>>> {
        self.latest.subscribe()
    }

    /// Whether this node has been in the store since the agent started.
    #[must_use]
    pub fn published(&self) -> bool {
        *self.published.borrow()
    }

    /// Whether the exports of before a reboot were brought back, as far as they could be, since the agent started.
    #[must_use]
    pub fn exports_restored(&self) -> bool {
        *self.restored.borrow()
    }

    /// What was done for other nodes' use of this node's branches.
    #[must_use]
    pub fn exports(&self) -> ExportCounts {
        self.exporter.counts()
    }

    /// Works until `shutdown`. Errors are logged, published where they concern an object, and tried again.
    pub async fn run(&self, shutdown: CancellationToken) {
        let branches = self.branches.clone();
        match tokio::task::spawn_blocking(move || branches.sweep()).await {
            Ok((swept, errors)) => {
                if swept > 0 {
                    info!(leftovers = swept, "removed what an interrupted run left half done");
                }
                for e in errors {
                    error!(error = %e, "cannot remove what an interrupted run left half done");
                }
            }
            Err(e) => error!(error = %e, "the search for leftovers ended"),
        }
        let (tell, measured) = watch::channel(None);
        let publisher = Publisher {
            store: self.store.clone(),
            node: self.node.clone(),
            facts: self.facts.clone(),
            fresh: self.fresh.clone(),
            known: self.published.clone(),
            strays: self.strays.subscribe(),
            carried: self.transports.watch(),
            published: Published::default(),
        };
        tokio::join!(
            self.measure_loop(tell, &shutdown),
            publisher.run(measured, shutdown.clone()),
            self.restore_loop(&shutdown),
            async {
                // Orders are obeyed after what was promised before is back.
                let mut restored = self.restored.subscribe();
                let back = async { drop(restored.wait_for(|restored| *restored).await) };
                if shutdown.run_until_cancelled(back).await.is_some() {
                    self.branch_loop(&shutdown).await;
                }
            }
        );
    }

    async fn measure_loop(&self, tell: watch::Sender<Option<Measured>>, shutdown: &CancellationToken) {
        loop {
            let begun = self.fresh.begin();
            let (pools, strays) = (self.pools.clone(), self.strays.borrow().clone());
            let measure = move || {
                let reports = pools.measure();
                if let Some(strays) = strays {
                    pools.forget_removed(&strays.on_disks, &reports);
                }
                reports
            };
            match tokio::task::spawn_blocking(measure).await {
                Ok(reports) => {
                    log_states(&self.latest(), &reports);
                    self.latest.send_replace(Arc::new(reports.clone()));
                    tell.send_replace(Some(Measured { begun, reports }));
                }
                Err(e) => error!(error = %e, "the measurement of the pools ended"),
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.fresh.asked() => {}
                () = tokio::time::sleep(self.facts.measure_interval) => {}
            }
        }
    }

    async fn branch_loop(&self, shutdown: &CancellationToken) {
        let mut state = State::default();
        let mut running = JoinSet::new();
        let mut pools = self.latest.subscribe();
        // As the first work on a branch may find them; what changes from now on is seen.
        let known = pools.borrow().clone();
        state.pools_measured(&known);
        let mut recheck = tokio::time::interval(RECHECK);
        let worker = Worker {
            store: self.store.clone(),
            branches: self.branches.clone(),
            exporter: self.exporter.clone(),
            fresh: self.fresh.clone(),
        };
        while !shutdown.is_cancelled() {
            let watched = self.store.branches().watch(Selector::Node(self.node.clone())).await;
            let mut events = match watched {
                Ok(events) => events,
                Err(e) => {
                    error!(error = %e, retry_after = ?REWATCH, "cannot watch this node's branches");
                    tokio::select! {
                        () = shutdown.cancelled() => break,
                        () = tokio::time::sleep(REWATCH) => continue,
                    }
                }
            };
            state.seen.clear();
            loop {
                while running.len() < PARALLEL
                    && let Some(name) = state.queue.next(Instant::now())
                {
                    let Some(branch) = state.wanted.get(&name).cloned() else {
                        state.queue.finished(&name);
                        continue;
                    };
                    let (worker, attempt) = (worker.clone(), state.queue.attempt(&name));
                    running.spawn(async move { worker.act(branch, attempt).await });
                }
                let due = state.queue.due().unwrap_or_else(|| Instant::now() + RECHECK);
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    event = events.next() => match event {
                        Some(Ok(event)) => state.note(event),
                        Some(Err(e)) => {
                            warn!(error = %e, "the watch of this node's branches broke");
                            break;
                        }
                        None => break,
                    },
                    Some(done) = running.join_next(), if !running.is_empty() => match done {
                        Ok(done) => {
                            if done.changed {
                                self.fresh.ask();
                            }
                            state.finish(done);
                        }
                        Err(e) => error!(error = %e, "work on a branch ended"),
                    },
                    Ok(()) = pools.changed() => {
                        let reports = pools.borrow_and_update().clone();
                        state.pools_measured(&reports);
                        self.look_for_strays(&mut state).await;
                    }
                    _ = recheck.tick() => state.check_all(),
                    () = tokio::time::sleep_until(due), if running.len() < PARALLEL => {}
                }
            }
            if !shutdown.is_cancelled() {
                tokio::time::sleep(REWATCH).await;
            }
        }
        let stopped = async { while running.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP_BOUND, stopped).await.is_err() {
            warn!(
                branches = running.len(),
                "stopped while work on branches was under way; it is resumed at the next start"
            );
        }
    }
}

/// What the branch loop knows.
#[derive(Default)]
struct State {
    /// The objects as last heard of.
    wanted: BTreeMap<String, Branch>,
    /// Names heard of since the watch began.
    seen: HashSet<String>,
    /// Versions of specs that were found to be as they should, and have not to be looked at again for each event.
    settled: HashMap<String, Branch>,
    pools: HashMap<PoolName, PoolState>,
    queue: Queue,
    /// All objects were heard of once.
    read: bool,
    /// Branches on the disks that no object tells of.
    warned: Warned,
}

impl State {
    fn note(&mut self, event: Event<Branch>) {
        match event {
            Event::Applied(branch) => {
                let name = branch.meta().name.clone();
                self.seen.insert(name.clone());
                let settled = self.settled.get(&name).is_some_and(|s| {
                    s.spec == branch.spec
                        && s.status.phase == branch.status.phase
                        && branch.meta.deleting.is_none()
                });
                if !settled {
                    self.settled.remove(&name);
                    self.queue.object_changed(&name);
                }
                self.wanted.insert(name, branch);
            }
            Event::Deleted(branch) => self.forget(&branch.meta().name),
            Event::Ready => {
                self.read = true;
                let gone: Vec<String> =
                    self.wanted.keys().filter(|n| !self.seen.contains(*n)).cloned().collect();
                for name in gone {
                    self.forget(&name);
                }
            }
        }
    }

    fn forget(&mut self, name: &str) {
        self.wanted.remove(name);
        self.settled.remove(name);
        self.queue.remove(name);
    }

    fn finish(&mut self, done: Done) {
        if let Some(settled) = &done.settled
            && let Some(wanted) = self.wanted.get_mut(&done.name)
            && wanted.spec == settled.spec
            && wanted.meta.deleting == settled.meta.deleting
        {
            // Where its object changed meanwhile, it was the work's own write.
            self.queue.calm(&done.name);
            wanted.clone_from(settled);
        }
        self.queue.finished(&done.name);
        match done.retry {
            Some(after) => self.queue.after(&done.name, Instant::now() + after),
            None => {
                self.queue.succeeded(&done.name);
                if let Some(branch) = done.settled {
                    self.settled.insert(done.name, branch);
                }
            }
        }
    }

    /// The branches of a pool that came or went are looked at again.
    fn pools_measured(&mut self, reports: &[PoolReport]) {
        for report in reports {
            if self.pools.insert(report.name.clone(), report.state).is_none_or(|old| old == report.state) {
                continue;
            }
            let here = self.wanted.iter().filter(|(_, b)| b.spec.pool == report.name).map(|(n, _)| n.clone());
            for name in here.collect::<Vec<_>>() {
                self.settled.remove(&name);
                self.queue.now(&name);
            }
        }
    }

    fn check_all(&mut self) {
        self.settled.clear();
        for name in self.wanted.keys() {
            self.queue.soon(name);
        }
    }
}

fn log_states(before: &[PoolReport], now: &[PoolReport]) {
    for report in now {
        let old = before.iter().find(|r| r.name == report.name).map(|r| r.state);
        match report.state {
            state if Some(state) == old => {}
            PoolState::Ready => info!(pool.name = %report.name, pool.path = report.path, "the pool is ready"),
            state => {
                warn!(pool.name = %report.name, pool.state = ?state, reason = report.message, "the pool cannot be used")
            }
        }
    }
}

#[cfg(test)]
mod tests;
