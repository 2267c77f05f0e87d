//! The values that the API answers with: its contract, described by `/openapi.json`.
//!
//! Amounts are bytes. Fields are only ever added.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::controllers::orphans::scan::{Orphan, OrphanKind};
use crate::domain::policy::FsType;
use crate::domain::pool::{Enforcement, PoolReport, PoolView};
use crate::domain::reach::{StorageNetwork, TransportReport};
use crate::domain::split::{BranchFormat, Infeasible, Plan};
use crate::domain::unclaimed::Unclaimed;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{BranchId, Bytes, NodeName, PoolName, VolumeId};
use crate::node::union::UnionAbilities;
use crate::node::volume::VolumeSnapshot;
use crate::store::object::{Attachment, BranchPhase, Condition};

/// `GET /v1/status`: this node in short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// This node.
    pub node: NodeName,
    /// Version of the agent.
    pub version: String,
    /// Whether this node can serve volumes now.
    pub ready: bool,
    /// What is wrong, a sentence each: why it is not ready, what could not be read for this answer.
    pub problems: Vec<String>,
    /// What unions it can make.
    pub abilities: UnionAbilities,
    /// Its pools as last measured.
    pub pools: Vec<PoolView>,
    /// All volumes, counted.
    pub volumes: VolumeCounts,
    /// Conditions of this node.
    pub conditions: Vec<Condition>,
    /// What it can carry between itself and other nodes, by transport; empty where it looks for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transports: Vec<TransportReport>,
    /// Its place on the network between nodes; absent where it looks for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<StorageNetwork>,
    /// Where it stands among the others.
    #[serde(default)]
    pub standing: Standing,
}

/// Where an instance stands among the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Standing {
    /// Its roles: `all`, `controller` or `node`.
    pub mode: String,
    /// Where volumes are written down: `kubernetes` or `local`.
    pub store: String,
    /// Whether it leads: plans, provisions and attaches for all nodes.
    pub leads: bool,
    /// Node of the instance that leads; absent where none does, or this one does not look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
}

/// Volumes by how they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeCounts {
    /// All.
    pub total: usize,
    /// Those that are complete and well.
    pub healthy: usize,
    /// Those being made.
    pub pending: usize,
    /// Those with something wrong.
    pub abnormal: usize,
    /// Those being removed.
    pub deleting: usize,
    /// Those mounted on this node.
    pub mounted_here: usize,
    /// Sum of their usable bytes.
    pub capacity: Bytes,
}

/// An element of `GET /v1/nodes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The node.
    pub name: NodeName,
    /// Whether it is the one that answers.
    pub local: bool,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its pools as last measured.
    pub pools: Vec<PoolReport>,
    /// Version of its agent.
    pub agent_version: String,
    /// Version of its mergerfs; absent where none works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mergerfs_version: Option<String>,
    /// Kernel release.
    pub kernel: String,
    /// What lies among the branches on its disks and no volume has.
    #[serde(default, skip_serializing_if = "Unclaimed::is_empty")]
    pub unclaimed: Unclaimed,
    /// What it can carry between itself and other nodes, by transport; empty where it looks for none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transports: Vec<TransportReport>,
    /// Its place on the network between nodes; absent where it looks for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<StorageNetwork>,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// How a volume does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HealthState {
    /// Complete and well.
    Healthy,
    /// Being made.
    Pending,
    /// Something is wrong.
    Abnormal,
    /// Being removed.
    Deleting,
}

/// An element of `GET /v1/volumes`, and `GET /v1/volumes/{id}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeView {
    /// The volume.
    pub id: VolumeId,
    /// The name it was asked for under; empty where the store could not be read.
    pub request_name: String,
    /// Usable bytes that were asked for.
    pub requested: Bytes,
    /// Usable bytes of its branches.
    pub capacity: Bytes,
    /// Space in it as `df` tells; absent where it is not mounted here.
    pub used: Option<Bytes>,
    /// How it does.
    pub state: HealthState,
    /// Why it does so; a sentence.
    pub message: String,
    /// How it may be used.
    pub access_modes: Vec<AccessMode>,
    /// Files or block.
    pub volume_mode: VolumeMode,
    /// Lives and dies with one pod.
    pub ephemeral: bool,
    /// StorageClass parameters as given.
    pub parameters: BTreeMap<String, String>,
    /// Nodes that it is attached to.
    pub attached: Vec<Attachment>,
    /// When it was made.
    #[schemars(with = "Option<String>")]
    pub created: Option<Timestamp>,
    /// Conditions.
    pub conditions: Vec<Condition>,
    /// Its branches, in the order of the plan.
    pub branches: Vec<BranchView>,
    /// How it is mounted on the node that answers; absent where it is not.
    pub local: Option<VolumeSnapshot>,
    /// Kubernetes pods that use it on the node that answers (uid of each, from its mount's path).
    pub pods: Vec<String>,
}

/// One branch of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchView {
    /// The branch.
    pub id: BranchId,
    /// Its number in the volume.
    pub index: u32,
    /// Node that holds it.
    pub node: NodeName,
    /// Pool of that node.
    pub pool: PoolName,
    /// What it takes of the pool.
    pub size: Bytes,
    /// What of it files can use.
    pub usable: Bytes,
    /// What it is on the disk.
    pub format: BranchFormat,
    /// Filesystem of an image.
    pub fs_type: Option<FsType>,
    /// Where it stands.
    pub phase: BranchPhase,
    /// Why; empty where the phase needs no reason.
    pub reason: String,
    /// What it occupies on the disk.
    pub bytes_used: Bytes,
    /// How its size is enforced, for directories.
    pub enforcement: Option<Enforcement>,
    /// Conditions.
    pub conditions: Vec<Condition>,
}

/// `GET /v1/plan`: a split that would be made now, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlanAnswer {
    /// Whether the volume fits.
    pub feasible: bool,
    /// The split, where it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<Plan>,
    /// Every reason, where it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Infeasible>,
}

/// `GET /v1/orphans`: what no claim needs any more, as the leader last found it. Nothing is deleted by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OrphansAnswer {
    /// When the leader looked.
    #[schemars(with = "String")]
    pub scanned: Timestamp,
    /// When it looks again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub next: Option<Timestamp>,
    /// Why a later attempt failed; absent where none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// How many there are of each kind.
    pub counts: BTreeMap<OrphanKind, u64>,
    /// The first thousand of them, by kind and name.
    pub orphans: Vec<Orphan>,
}

/// What every answer with a status of 400 and above carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// What is wrong, in one sentence.
    pub error: String,
    /// Each single thing that is wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
}

/// `GET /readyz`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Readiness {
    /// Whether this node can serve volumes now.
    pub ready: bool,
    /// Why not.
    pub reasons: Vec<String>,
}
