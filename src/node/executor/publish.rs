//! Publishing this node's `StorageNode`.

use jiff::Timestamp;
use tokio::time::Instant;
use tracing::error;

use super::NodeFacts;
use crate::domain::pool::{PoolReport, PoolState};
use crate::domain::{Bytes, NodeName};
use crate::store::object::{Meta, StorageNode, StorageNodeSpec, StorageNodeStatus, set_condition};
use crate::store::{Store, StoreError};

/// Figures that moved by less than this share of the pool are not news; nor are less than [`STEP`] bytes.
const SHARE: u64 = 100;
/// See [`SHARE`].
const STEP: Bytes = Bytes::mib(64);

/// Even small news are published this often, and that there are none: others take a node that is silent for several times
/// this for one whose agent does not run.
const HEARTBEAT: std::time::Duration = std::time::Duration::from_secs(300);

/// Writes attempted against others' before the next measurement takes over.
const ATTEMPTS: u32 = 4;

/// What was published last.
#[derive(Debug, Default)]
pub(super) struct Published {
    status: Option<StorageNodeStatus>,
    at: Option<Instant>,
}

impl Published {
    /// Publishes the reports where they are news. After a change made here every difference is.
    pub(super) async fn publish(
        &mut self,
        store: &dyn Store,
        node: &NodeName,
        facts: &NodeFacts,
        pools: Vec<PoolReport>,
        after_change: bool,
    ) {
        let due = self.at.is_none_or(|at| at.elapsed() >= HEARTBEAT);
        let news = match &self.status {
            None => true,
            Some(_) if due => true,
            Some(old) if after_change => old.pools != pools,
            Some(old) => is_news(&old.pools, &pools),
        };
        if !news {
            return;
        }
        for attempt in 1..=ATTEMPTS {
            match write(store, node, facts, &pools).await {
                Ok(status) => {
                    self.status = Some(status);
                    self.at = Some(Instant::now());
                    return;
                }
                Err(StoreError::Conflict { .. } | StoreError::Exists { .. }) if attempt < ATTEMPTS => {}
                Err(e) => {
                    // The next measurement tries again.
                    error!(node.name = %node, error = %e, "cannot publish this node's pools");
                    self.status = None;
                    return;
                }
            }
        }
    }
}

async fn write(
    store: &dyn Store,
    node: &NodeName,
    facts: &NodeFacts,
    pools: &[PoolReport],
) -> Result<StorageNodeStatus, StoreError> {
    let nodes = store.nodes();
    let mut object = match nodes.get(node.as_str()).await? {
        Some(object) => object,
        None => {
            let spec = StorageNodeSpec { node: node.clone() };
            let meta = Meta::new(node.as_str());
            nodes.create(StorageNode { meta, spec, status: StorageNodeStatus::default() }).await?
        }
    };
    let conditions = std::mem::take(&mut object.status.conditions);
    object.status = StorageNodeStatus {
        labels: facts.labels.clone(),
        pools: pools.to_vec(),
        agent_version: facts.agent_version.clone(),
        mergerfs_version: facts.mergerfs_version.clone(),
        kernel: facts.kernel.clone(),
        heartbeat: Some(Timestamp::now()),
        conditions,
    };
    let bad: Vec<&PoolReport> = pools.iter().filter(|p| p.state != PoolState::Ready).collect();
    let (ready, reason, message) = match bad.first() {
        None => (true, "PoolsReady", String::new()),
        Some(_) => {
            let all: Vec<String> = bad.iter().map(|p| format!("{}: {}", p.name, p.message)).collect();
            (false, "PoolsUnavailable", all.join("; "))
        }
    };
    set_condition(&mut object.status.conditions, Timestamp::now(), "Ready", ready, reason, &message);
    Ok(nodes.update_status(object).await?.status)
}

/// Whether others would decide otherwise: anything but a figure changed, or a figure moved by a step.
fn is_news(old: &[PoolReport], new: &[PoolReport]) -> bool {
    old.len() != new.len()
        || old.iter().zip(new).any(|(old, new)| {
            let step = STEP.max(Bytes::new(old.total.get() / SHARE));
            let without_figures = |report: &PoolReport| PoolReport {
                free: Bytes::ZERO,
                occupied: Bytes::ZERO,
                allocatable: None,
                ..report.clone()
            };
            let moved = |a: Bytes, b: Bytes| Bytes::new(a.get().abs_diff(b.get())) >= step;
            without_figures(old) != without_figures(new)
                || moved(old.free, new.free)
                || moved(old.occupied, new.occupied)
                || moved(old.allocatable(), new.allocatable())
                // A pool that fills up is news before it is a step away from full.
                || old.allocatable().is_zero() != new.allocatable().is_zero()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> PoolReport {
        serde_json::from_str(
            r#"{"name":"p","device":"d","filesystem":"ext4","total":107374182400,"free":53687091200}"#,
        )
        .unwrap()
    }

    #[test]
    fn small_movements_of_figures_are_no_news_and_all_else_is() {
        let old = report();
        let less =
            |bytes: u64| PoolReport { free: old.free.saturating_sub(Bytes::new(bytes)), ..old.clone() };
        assert!(!is_news(std::slice::from_ref(&old), &[less(1 << 20)]));
        assert!(is_news(std::slice::from_ref(&old), &[less(2 << 30)]));
        let absent = PoolReport { state: PoolState::Absent, ..old.clone() };
        assert!(is_news(std::slice::from_ref(&old), &[absent]));
        let promised = PoolReport { promised: Bytes::new(1), ..old.clone() };
        assert!(is_news(std::slice::from_ref(&old), &[promised]));
        assert!(is_news(std::slice::from_ref(&old), &[]));
        let full = PoolReport { free: Bytes::ZERO, ..old.clone() };
        let nearly = PoolReport { free: Bytes::new(4096), ..old };
        assert!(is_news(&[nearly], &[full]));
    }
}
