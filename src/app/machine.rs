//! What this machine tells about itself to those who look from outside.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

use super::node::Node;
use super::traffic::Traffic;
use crate::config::Mode;
use crate::controllers::access::AccessCounters;
use crate::controllers::lease::Leadership;
use crate::controllers::orphans::{Findings, Known};
use crate::controllers::splitter::SplitterCounters;
use crate::csi::counters::CsiCounters;
use crate::csi::registration::RegistrationState;
use crate::domain::pool::PoolReport;
use crate::http::Machine;
use crate::http::api::Standing;
use crate::node::transport::Carried;
use crate::node::union::UnionAbilities;
use crate::node::volume::VolumeSnapshot;
use crate::store::{Health, Store};
use crate::telemetry::Counters;

/// The parts that know something of this machine.
pub(super) struct LocalMachine {
    /// `None`: it does not play the node role.
    pub(super) node: Option<Arc<Node>>,
    pub(super) csi: Arc<CsiCounters>,
    pub(super) splits: SplitterCounters,
    pub(super) orphans: Findings,
    pub(super) access: AccessCounters,
    pub(super) store: Arc<dyn Store>,
    pub(super) health: Arc<dyn Health>,
    pub(super) traffic: Option<Arc<Traffic>>,
    pub(super) leadership: watch::Receiver<Leadership>,
    pub(super) registered: watch::Receiver<RegistrationState>,
    pub(super) mode: Mode,
    pub(super) has_pools: bool,
}

#[async_trait]
impl Machine for LocalMachine {
    fn pools(&self) -> Vec<PoolReport> {
        self.node.as_ref().map(|node| node.executor.latest().to_vec()).unwrap_or_default()
    }

    async fn volumes(&self) -> Vec<VolumeSnapshot> {
        match &self.node {
            Some(node) => node.volumes.snapshot().await,
            None => Vec::new(),
        }
    }

    fn abilities(&self) -> UnionAbilities {
        self.node.as_ref().map(|node| node.unions.abilities()).unwrap_or_default()
    }

    fn carried(&self) -> Carried {
        self.node.as_ref().map(|node| node.carried()).unwrap_or_default()
    }

    /// Asks nothing of an API server: probes come every few seconds, from every node.
    async fn ready(&self) -> Result<(), Vec<String>> {
        let mut problems: Vec<String> = self.health.check().await.err().into_iter().collect();
        if let Some(node) = &self.node {
            problems.extend(node.volumes.ready().await.err());
            if !node.executor.published() {
                problems.push("this node is not in the store yet".to_owned());
            } else if self.has_pools && node.executor.latest().is_empty() {
                problems.push("the pools are not measured yet".to_owned());
            }
            if !node.executor.exports_restored() {
                problems.push("the exports of this node are not back yet".to_owned());
            }
        }
        problems.extend(self.leadership.borrow().problem.clone());
        if let RegistrationState::Failed { reason } = &*self.registered.borrow() {
            problems.push(reason.clone());
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    fn counters(&self) -> Counters {
        let leadership = self.leadership.borrow();
        Counters {
            csi: self.csi.snapshot(),
            splitter: self.splits.read(),
            access: self.access.read(),
            exports: self.node.as_ref().map(|node| node.executor.exports()).unwrap_or_default(),
            orphans: self.orphans.read().last.map(|scan| scan.counts.clone()),
            store: self.store.figures(),
            kubernetes: self.traffic.as_ref().map(|traffic| traffic.figures()),
            leads: leads(&leadership),
            terms: leadership.terms,
        }
    }

    fn orphans(&self) -> Known {
        self.orphans.read()
    }

    fn process_memory(&self, pid: i32) -> Option<u64> {
        crate::telemetry::resident(&pid.to_string())
    }

    fn standing(&self) -> Standing {
        let leadership = self.leadership.borrow();
        Standing {
            mode: self.mode.as_str().to_owned(),
            store: if self.traffic.is_some() { "kubernetes" } else { "local" }.to_owned(),
            leads: leads(&leadership),
            // A node's name has no underscore; what follows the last one tells processes apart.
            leader: leadership.holder.as_ref().map(|holder| match holder.rsplit_once('_') {
                Some((node, _)) => node.to_owned(),
                None => holder.clone(),
            }),
        }
    }
}

fn leads(leadership: &Leadership) -> bool {
    leadership.claim.as_ref().is_some_and(|claim| claim.held().is_ok())
}
