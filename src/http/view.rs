//! What the API reads from.

use std::sync::Arc;

use async_trait::async_trait;

use super::Hosts;
use super::api::Standing;
use crate::controllers::orphans::Known;
use crate::domain::NodeName;
use crate::domain::pool::PoolReport;
use crate::node::transport::Carried;
use crate::node::union::UnionAbilities;
use crate::node::volume::VolumeSnapshot;
use crate::store::Store;
use crate::telemetry::Counters;

/// What this machine tells about itself, from memory or from the kernel, without the store.
#[async_trait]
pub trait Machine: Send + Sync {
    /// The pools as last measured.
    fn pools(&self) -> Vec<PoolReport>;
    /// The volumes that are staged or published here.
    async fn volumes(&self) -> Vec<VolumeSnapshot>;
    /// What unions it can make.
    fn abilities(&self) -> UnionAbilities;
    /// What it can carry between itself and other nodes.
    fn carried(&self) -> Carried;
    /// Whether it can serve volumes now; every reason where it cannot.
    async fn ready(&self) -> Result<(), Vec<String>>;
    /// What was counted since the agent started.
    fn counters(&self) -> Counters;
    /// What the orphan scans of this instance found, while it leads.
    fn orphans(&self) -> Known;
    /// Resident memory of a MergerFS process in bytes, where it lives.
    fn process_memory(&self, pid: i32) -> Option<u64>;
    /// Where it stands among the others.
    fn standing(&self) -> Standing;
}

/// Everything that the API reads.
pub struct View {
    /// This node.
    pub node: NodeName,
    /// Its labels from the configuration.
    pub node_labels: std::collections::BTreeMap<String, String>,
    /// The objects.
    pub store: Arc<dyn Store>,
    /// The machine.
    pub machine: Arc<dyn Machine>,
    /// By which names the API may be asked for.
    pub hosts: Hosts,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("View").field("node", &self.node).finish_non_exhaustive()
    }
}
