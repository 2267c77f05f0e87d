//! Puts the store's objects and the machine's figures together into the API's values. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;

use super::api::{BranchView, HealthState, NodeView, VolumeCounts, VolumeView};
use crate::controllers::access::waiting;
use crate::domain::pool::{PoolReport, PoolView};
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::node::transport::Carried;
use crate::node::volume::VolumeSnapshot;
use crate::store::object::{Branch, BranchPhase, StorageNode, VolumeSplit, condition};

/// All volumes, ordered by id: those of the store, and those that only this machine knows of (the store may be away).
pub(super) fn volumes(
    splits: &[VolumeSplit],
    branches: &[Branch],
    nodes: &[StorageNode],
    local: &[VolumeSnapshot],
    now: Timestamp,
) -> Vec<VolumeView> {
    let mut of: BTreeMap<&VolumeId, Vec<&Branch>> = BTreeMap::new();
    for branch in branches {
        of.entry(&branch.spec.volume).or_default().push(branch);
    }
    let here: BTreeMap<&VolumeId, &VolumeSnapshot> = local.iter().map(|s| (&s.volume, s)).collect();
    let nodes: BTreeMap<&NodeName, &StorageNode> = nodes.iter().map(|n| (&n.spec.node, n)).collect();
    let known: BTreeSet<&VolumeId> = splits.iter().map(|s| &s.spec.volume).collect();

    let stored = splits.iter().map(|split| {
        let id = &split.spec.volume;
        let branches = of.get(id).map_or(&[][..], Vec::as_slice);
        let waits = branches
            .iter()
            .find_map(|branch| waiting(split, branch, nodes.get(&branch.spec.node).copied(), now));
        volume(split, branches, waits, here.get(id).copied())
    });
    let foreign = local.iter().filter(|s| !known.contains(&s.volume)).map(unknown);
    let mut all: Vec<VolumeView> = stored.chain(foreign).collect();
    all.sort_by(|a, b| a.id.cmp(&b.id));
    all
}

/// One volume of the store.
/// `waits`: why one of its branches cannot be used where the volume is attached.
fn volume(
    split: &VolumeSplit,
    branches: &[&Branch],
    waits: Option<String>,
    local: Option<&VolumeSnapshot>,
) -> VolumeView {
    let views = branch_views(split, branches);
    let (state, message) = health(split, &views, waits, local);
    VolumeView {
        id: split.spec.volume.clone(),
        request_name: split.spec.request_name.clone(),
        requested: split.spec.capacity,
        capacity: split.spec.branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.usable)),
        used: local.and_then(|s| s.space).map(|space| Bytes::new(space.used)),
        state,
        message,
        access_modes: split.spec.access_modes.clone(),
        volume_mode: split.spec.volume_mode,
        ephemeral: split.spec.ephemeral,
        parameters: split.spec.parameters.clone(),
        attached: split.spec.attached.clone(),
        created: split.meta.created,
        conditions: split.status.conditions.clone(),
        branches: views,
        local: local.cloned(),
        pods: local.map(pods).unwrap_or_default(),
    }
}

/// A volume that is mounted here and that the store does not tell of.
fn unknown(local: &VolumeSnapshot) -> VolumeView {
    let space = local.space;
    VolumeView {
        id: local.volume.clone(),
        request_name: String::new(),
        requested: Bytes::ZERO,
        capacity: space.map_or(Bytes::ZERO, |s| Bytes::new(s.total)),
        used: space.map(|s| Bytes::new(s.used)),
        state: if local.health.abnormal { HealthState::Abnormal } else { HealthState::Healthy },
        message: local.health.message.clone(),
        access_modes: Vec::new(),
        volume_mode: VolumeMode::Filesystem,
        ephemeral: false,
        parameters: BTreeMap::new(),
        attached: Vec::new(),
        created: None,
        conditions: Vec::new(),
        branches: Vec::new(),
        local: Some(local.clone()),
        pods: pods(local),
    }
}

/// The planned branches, each with what its node tells of it.
fn branch_views(split: &VolumeSplit, branches: &[&Branch]) -> Vec<BranchView> {
    split
        .spec
        .branches
        .iter()
        .map(|planned| {
            let id = split.spec.volume.branch(planned.index);
            let status = branches.iter().find(|b| b.spec.id == id).map(|b| b.status.clone());
            let status = status.unwrap_or_default();
            BranchView {
                id,
                index: planned.index,
                node: planned.node.clone(),
                pool: planned.pool.clone(),
                size: planned.size,
                usable: planned.usable,
                format: planned.format,
                fs_type: planned.fs_type,
                phase: status.phase,
                reason: status.reason,
                bytes_used: status.bytes_used,
                enforcement: status.enforcement,
                conditions: status.conditions,
            }
        })
        .collect()
}

/// How a volume does; the worst that anyone tells of it.
fn health(
    split: &VolumeSplit,
    branches: &[BranchView],
    waits: Option<String>,
    local: Option<&VolumeSnapshot>,
) -> (HealthState, String) {
    if let Some(since) = split.meta.deleting {
        return (HealthState::Deleting, format!("being removed since {since:.0}"));
    }
    if let Some(lost) = branches.iter().find(|b| b.phase == BranchPhase::Lost) {
        return (HealthState::Abnormal, format!("branch {} is lost: {}", lost.id, lost.reason));
    }
    if let Some(local) = local.filter(|s| s.health.abnormal) {
        return (HealthState::Abnormal, local.health.message.clone());
    }
    for kind in ["Degraded", "ReplicaFailure"] {
        if let Some(wrong) = condition(&split.status.conditions, kind).filter(|c| c.status) {
            return (HealthState::Abnormal, wrong.message.clone());
        }
    }
    if let Some(bad) =
        branches.iter().find(|b| matches!(b.phase, BranchPhase::Refused | BranchPhase::Failing))
    {
        return (HealthState::Pending, format!("branch {}: {}", bad.id, bad.reason));
    }
    let bound = branches.iter().filter(|b| b.phase == BranchPhase::Bound).count();
    if branches.is_empty() || bound < branches.len() {
        let told = condition(&split.status.conditions, "Pending").filter(|c| c.status);
        let message = told.map_or_else(
            || match branches.len() {
                0 => "not planned yet".to_owned(),
                n => format!("{bound} of {n} branches exist"),
            },
            |c| c.message.clone(),
        );
        return (HealthState::Pending, message);
    }
    if let Some(waits) = waits {
        return (HealthState::Pending, waits);
    }
    let message = local.map_or("all branches exist; not mounted here", |s| s.health.message.as_str());
    (HealthState::Healthy, if message.is_empty() { "well".to_owned() } else { message.to_owned() })
}

/// Uids of the pods whose directories the volume is published in: `…/pods/<uid>/volumes/…` is the kubelet's layout.
fn pods(local: &VolumeSnapshot) -> Vec<String> {
    let uid = |path: &Path| {
        let mut parts = path.iter();
        parts.find(|part| *part == "pods")?;
        parts.next().map(|uid| uid.to_string_lossy().into_owned())
    };
    let found: BTreeSet<String> = local.targets.iter().filter_map(|t| uid(t)).collect();
    found.into_iter().collect()
}

/// Volumes by how they do.
pub(super) fn counts(volumes: &[VolumeView]) -> VolumeCounts {
    let mut counts = VolumeCounts { total: volumes.len(), ..VolumeCounts::default() };
    for volume in volumes {
        match volume.state {
            HealthState::Healthy => counts.healthy += 1,
            HealthState::Pending => counts.pending += 1,
            HealthState::Abnormal => counts.abnormal += 1,
            HealthState::Deleting => counts.deleting += 1,
        }
        counts.mounted_here += usize::from(volume.local.is_some());
        counts.capacity = counts.capacity.saturating_add(volume.capacity);
    }
    counts
}

/// All nodes by name; this one with its fresh figures, also where the store does not tell of it.
pub(super) fn nodes(
    stored: &[StorageNode],
    me: &NodeName,
    labels: &BTreeMap<String, String>,
    pools: Vec<PoolReport>,
    mergerfs: Option<String>,
    carried: Carried,
) -> Vec<NodeView> {
    let own = stored.iter().find(|n| n.spec.node == *me);
    let mut views: Vec<NodeView> = stored
        .iter()
        .filter(|n| n.spec.node != *me)
        .map(|n| NodeView {
            name: n.spec.node.clone(),
            local: false,
            labels: n.status.labels.clone(),
            pools: n.status.pools.clone(),
            agent_version: n.status.agent_version.clone(),
            mergerfs_version: n.status.mergerfs_version.clone(),
            kernel: n.status.kernel.clone(),
            unclaimed: n.status.unclaimed.clone(),
            transports: n.status.transports.clone(),
            network: n.status.network.clone(),
            conditions: n.status.conditions.clone(),
        })
        .collect();
    views.push(NodeView {
        name: me.clone(),
        local: true,
        labels: {
            // What was published of it, the cluster's labels with it.
            let mut all = own.map(|n| n.status.labels.clone()).unwrap_or_default();
            all.extend(labels.clone());
            all
        },
        pools,
        agent_version: env!("CARGO_PKG_VERSION").to_owned(),
        mergerfs_version: mergerfs,
        kernel: own.map(|n| n.status.kernel.clone()).unwrap_or_default(),
        unclaimed: own.map(|n| n.status.unclaimed.clone()).unwrap_or_default(),
        transports: carried.transports,
        network: carried.network,
        conditions: own.map(|n| n.status.conditions.clone()).unwrap_or_default(),
    });
    views.sort_by(|a, b| a.name.cmp(&b.name));
    views
}

/// The pools of all nodes, ordered by node and name: the planner's input.
pub(super) fn pools(nodes: &[NodeView]) -> Vec<PoolView> {
    nodes
        .iter()
        .flat_map(|node| {
            let labels = Arc::new(node.labels.clone());
            node.pools.iter().map(move |pool| PoolView {
                node: node.name.clone(),
                node_labels: labels.clone(),
                pool: pool.clone(),
            })
        })
        .collect()
}
