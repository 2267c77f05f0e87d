//! What this machine tells the HTTP API.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::controllers::splitter::SplitterCounters;
use crate::csi::counters::CsiCounters;
use crate::domain::NodeName;
use crate::domain::pool::PoolReport;
use crate::http::Machine;
use crate::node::executor::Executor;
use crate::node::union::{UnionAbilities, Unions};
use crate::node::volume::{VolumeSnapshot, Volumes};
use crate::store::Store;
use crate::telemetry::Counters;

/// How long the store may take to answer before the agent is not ready.
const STORE_BOUND: Duration = Duration::from_secs(2);

/// The parts that know something of this machine.
pub(super) struct LocalMachine {
    pub(super) executor: Arc<Executor>,
    pub(super) volumes: Arc<Volumes>,
    pub(super) unions: Arc<Unions>,
    pub(super) csi: Arc<CsiCounters>,
    pub(super) splits: SplitterCounters,
    pub(super) store: Arc<dyn Store>,
    pub(super) node: NodeName,
    pub(super) has_pools: bool,
}

#[async_trait]
impl Machine for LocalMachine {
    fn pools(&self) -> Vec<PoolReport> {
        self.executor.latest().to_vec()
    }

    async fn volumes(&self) -> Vec<VolumeSnapshot> {
        self.volumes.snapshot().await
    }

    fn abilities(&self) -> UnionAbilities {
        self.unions.abilities().clone()
    }

    async fn ready(&self) -> Result<(), Vec<String>> {
        let mut problems: Vec<String> = self.volumes.ready().await.err().into_iter().collect();
        match tokio::time::timeout(STORE_BOUND, self.store.nodes().get(self.node.as_str())).await {
            Err(_) => problems.push(format!("the store does not answer within {} s", STORE_BOUND.as_secs())),
            Ok(Err(error)) => problems.push(error.to_string()),
            Ok(Ok(None)) => problems.push("this node is not in the store yet".to_owned()),
            Ok(Ok(Some(node))) if self.has_pools && node.status.pools.is_empty() => {
                problems.push("the pools are not measured yet".to_owned());
            }
            Ok(Ok(Some(_))) => {}
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    fn counters(&self) -> Counters {
        Counters { csi: self.csi.snapshot(), splitter: self.splits.read(), store: self.store.figures() }
    }

    fn process_memory(&self, pid: i32) -> Option<u64> {
        crate::telemetry::resident(&pid.to_string())
    }
}
