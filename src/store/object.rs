//! The objects of API group `union.io/v1alpha1`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use crate::domain::access::shared::{Sharing, SharingReport};
use crate::domain::access::{Access, ExportReport};
use crate::domain::id::MAX_NAME;
use crate::domain::policy::FsType;
use crate::domain::pool::{Enforcement, PoolReport};
use crate::domain::reach::{StorageNetwork, Transport, TransportReport};
use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::domain::unclaimed::Unclaimed;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{BranchId, Bytes, NodeName, PoolName, VolumeId};

/// Keeps a `VolumeSplit` until its branches are gone, and a `Branch` until its files are.
pub const FINALIZER: &str = "union.io/data";

/// Label of a `Branch`: the node that holds it.
pub const LABEL_NODE: &str = "union.io/node";

/// Label of a `Branch`: the volume it belongs to.
pub const LABEL_VOLUME: &str = "union.io/volume";

/// Label of a `Branch`: `true` where its volume lives and dies with one pod.
pub const LABEL_EPHEMERAL: &str = "union.io/ephemeral";

/// The value of a label that names `name`: the name itself where it fits, else its beginning and a digest. A label is for
/// people and their selectors; the program selects by the spec, so that neither two names with one label nor a label that
/// was edited do harm.
#[must_use]
pub fn label_value(name: &str) -> String {
    if name.len() <= MAX_NAME {
        return name.to_owned();
    }
    let digest: String = Sha256::digest(name.as_bytes()).iter().take(8).map(|b| format!("{b:02x}")).collect();
    // The names that are this long are of ASCII letters, digits, '-' and '.', and the digest ends in none of the latter.
    let beginning: String = name.chars().take(MAX_NAME - digest.len() - 1).collect();
    format!("{beginning}.{digest}")
}

/// Opaque version of an object; equal versions mean equal objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Version(pub String);

/// What every object carries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Meta {
    /// Unique in the collection.
    pub name: String,
    /// Unique in time and space; set by the store.
    #[serde(default)]
    pub uid: String,
    /// Set by the store.
    #[serde(default)]
    pub version: Version,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Who must act before the object may go.
    #[serde(default)]
    pub finalizers: Vec<String>,
    /// Time of creation; set by the store.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub created: Option<Timestamp>,
    /// When the object was asked to go.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub deleting: Option<Timestamp>,
}

impl Meta {
    /// The metadata of a new object.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// The metadata of a new object that is kept until its data is gone.
    #[must_use]
    pub fn with_finalizer(name: impl Into<String>) -> Self {
        Self { name: name.into(), finalizers: vec![FINALIZER.to_owned()], ..Self::default() }
    }
}

/// A kind of object.
pub trait Object:
    Clone + std::fmt::Debug + PartialEq + Serialize + DeserializeOwned + Send + Sync + 'static
{
    /// Its kind, as in the API.
    const KIND: &'static str;
    /// Its metadata.
    fn meta(&self) -> &Meta;
    /// Its metadata, to be changed.
    fn meta_mut(&mut self) -> &mut Meta;
    /// Takes the status of `other`.
    fn set_status_of(&mut self, other: &Self);
    /// Takes the status of an object that nobody has reported on.
    fn clear_status(&mut self);
    /// The node it lies on, for [`super::Selector::Node`].
    fn node(&self) -> Option<&NodeName> {
        None
    }
    /// The volume it belongs to, for [`super::Selector::Volume`].
    fn volume(&self) -> Option<&VolumeId> {
        None
    }
}

/// One fact about an object, as in Kubernetes' API conventions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// `Ready`, `Pending`, `ReplicaProgressing`, `ReplicaFailure`, `Degraded`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether it holds.
    #[serde(with = "condition_status")]
    #[schemars(with = "String", extend("enum" = ["True", "False"]))]
    pub status: bool,
    /// One word in CamelCase, for programs.
    pub reason: String,
    /// A sentence, for people.
    pub message: String,
    /// When `status` last changed.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub last_transition_time: Timestamp,
}

/// `"True"` and `"False"`, as Kubernetes writes them.
mod condition_status {
    use serde::{Deserialize, Deserializer, Serializer};

    #[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
    pub(super) fn serialize<S: Serializer>(status: &bool, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(if *status { "True" } else { "False" })
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<bool, D::Error> {
        Ok(String::deserialize(d)? == "True")
    }
}

/// Sets a condition; the time changes only when the status does. Returns true when anything changed.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    now: Timestamp,
    kind: &str,
    status: bool,
    reason: &str,
    message: &str,
) -> bool {
    let new = Condition {
        kind: kind.to_owned(),
        status,
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: now,
    };
    match conditions.iter_mut().find(|c| c.kind == kind) {
        Some(old) => {
            let since = if old.status == status { old.last_transition_time } else { now };
            let new = Condition { last_transition_time: since, ..new };
            let changed = *old != new;
            *old = new;
            changed
        }
        None => {
            conditions.push(new);
            true
        }
    }
}

/// The condition of a branch that other nodes are to use: whether they can.
pub const EXPORTED: &str = "Exported";

/// The condition of that kind.
#[must_use]
pub fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.kind == kind)
}

/// A volume: what was asked for, how it is split, how it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumeSplit {
    /// Metadata; the name is the [`VolumeId`].
    pub meta: Meta,
    /// What is wanted.
    pub spec: VolumeSplitSpec,
    /// What is.
    #[serde(default)]
    pub status: VolumeSplitStatus,
}

/// What is wanted of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSplitSpec {
    /// The volume's id (the object's name).
    pub volume: VolumeId,
    /// The name it was asked for under (CSI `CreateVolumeRequest.name`).
    pub request_name: String,
    /// Usable bytes asked for.
    pub capacity: Bytes,
    /// Usable bytes allowed at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<Bytes>,
    /// Access modes asked for.
    pub access_modes: Vec<AccessMode>,
    /// Files or block.
    #[serde(default)]
    pub volume_mode: VolumeMode,
    /// StorageClass parameters as given; valid when the object was made.
    #[serde(default)]
    pub parameters: BTreeMap<String, String>,
    /// Node that will use it first, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumer: Option<NodeName>,
    /// Nodes that may use it; empty: any.
    #[serde(default)]
    pub topology: Vec<NodeName>,
    /// Lives and dies with one pod (ephemeral inline volume).
    #[serde(default)]
    pub ephemeral: bool,
    /// The split, written at once before any branch is made; empty until planned.
    #[serde(default)]
    pub branches: Vec<PlannedBranch>,
    /// The next branch number to be given.
    #[serde(default)]
    pub next_index: u32,
    /// Nodes that the volume is attached to (ControllerPublishVolume).
    #[serde(default)]
    pub attached: Vec<Attachment>,
    /// It was attached once: its branches may hold files, whatever became of its status. Never taken back.
    #[serde(default)]
    pub used: bool,
}

/// A node that a volume is attached to, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The node.
    pub node: NodeName,
    /// The mode of use.
    pub access_mode: AccessMode,
    /// Whether it was attached read-only.
    #[serde(default)]
    pub read_only: bool,
    /// The VolumeAttachment that asked for it, which it goes with; absent: it was asked for over the CSI socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_attachment: Option<String>,
}

/// How a volume stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VolumeSplitStatus {
    /// Usable bytes of the bound branches.
    #[serde(default)]
    pub capacity: Bytes,
    /// Branches planned.
    #[serde(default)]
    pub replicas: u32,
    /// Branches that exist.
    #[serde(default)]
    pub bound_replicas: u32,
    /// Access modes granted.
    #[serde(default)]
    pub access_modes: Vec<AccessMode>,
    /// `Ready`, `Pending`, `ReplicaProgressing`, `ReplicaFailure`, `Degraded`.
    #[serde(default)]
    pub conditions: Vec<Condition>,
    /// Where no plan exists: usable bytes of the largest volume that would work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest: Option<Bytes>,
}

impl VolumeSplit {
    /// Whether files may lie in each of its branches: it was complete. That it was is in its status, and, should that be
    /// lost, in its spec from when it was first attached.
    #[must_use]
    pub fn may_hold_files(&self) -> bool {
        self.spec.used
            || !self.spec.attached.is_empty()
            || condition(&self.status.conditions, "Pending").is_some_and(|c| c.reason == pending::BOUND)
    }

    /// Whether the files of its branch of that number must stay.
    #[must_use]
    pub fn needs(&self, index: u32) -> bool {
        let stays = self.meta.deleting.is_none() || !self.spec.attached.is_empty();
        stays && self.may_hold_files() && self.spec.branches.iter().any(|b| b.index == index)
    }
}

/// Reasons in the `Pending` condition of a `VolumeSplit`.
pub mod pending {
    /// No split fits now; the message says why, `status.largest` what would.
    pub const INFEASIBLE: &str = "Infeasible";
    /// Branches are being made.
    pub const BINDING: &str = "Binding";
    /// All branches exist.
    pub const BOUND: &str = "Bound";
}

impl Object for VolumeSplit {
    const KIND: &'static str = "VolumeSplit";
    fn meta(&self) -> &Meta {
        &self.meta
    }
    fn meta_mut(&mut self) -> &mut Meta {
        &mut self.meta
    }
    fn set_status_of(&mut self, other: &Self) {
        self.status = other.status.clone();
    }
    fn clear_status(&mut self) {
        self.status = Default::default();
    }
    fn volume(&self) -> Option<&VolumeId> {
        Some(&self.spec.volume)
    }
}

/// One branch of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Branch {
    /// Metadata; the name is the [`BranchId`].
    pub meta: Meta,
    /// What is wanted.
    pub spec: BranchSpec,
    /// What is.
    #[serde(default)]
    pub status: BranchStatus,
}

/// What is wanted of a branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchSpec {
    /// The branch's id (the object's name).
    pub id: BranchId,
    /// The volume.
    pub volume: VolumeId,
    /// Its number in the volume.
    pub index: u32,
    /// Owner node.
    pub node: NodeName,
    /// Pool of that node.
    pub pool: PoolName,
    /// What it takes of the pool.
    pub size: Bytes,
    /// What files can use at least.
    pub usable: Bytes,
    /// What it is on the disk.
    pub format: BranchFormat,
    /// Filesystem of an image; absent for directories and block volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_type: Option<FsType>,
    /// Image: sparse instead of reserved.
    #[serde(default)]
    pub thin: bool,
    /// Directory: may exist where its size cannot be enforced.
    #[serde(default)]
    pub accept_unenforced: bool,
    /// Image: what another node wrote and was told to be completed survives a crash of the owner. Only `false` is ever written:
    /// the field cannot be changed, and objects from before it lack it.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub write_through: bool,
    /// Image: other nodes reach it by connections that are encrypted, and by no others. Only `true` is ever written: the field
    /// cannot be changed, and objects from before it lack it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub encrypted: bool,
    /// Who may use it, for a branch that goes to one node at a time; absent: it was never given to anybody but its owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<Access>,
    /// Who may use it, for a directory that several nodes use at once; absent: it was never given to several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
}

const fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_yes(value: &bool) -> bool {
    *value
}

/// Where a branch stands in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum BranchPhase {
    /// Its node has not acted yet.
    #[default]
    Pending,
    /// It exists and may be used.
    Bound,
    /// Its node refused it (no room, pool absent); nothing exists; the split must be planned anew.
    Refused,
    /// Making or removing it failed for now; the node tries again.
    Failing,
    /// It existed, and its pool or its files are missing or foreign.
    Lost,
}

/// What a branch is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BranchStatus {
    /// Where it stands.
    #[serde(default)]
    pub phase: BranchPhase,
    /// Why, where the phase needs a reason; a sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What it occupies on the disk.
    #[serde(default)]
    pub bytes_used: Bytes,
    /// How its size is enforced, for directories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcement: Option<Enforcement>,
    /// UUID of its filesystem, for images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs_uuid: Option<String>,
    /// How other nodes reach it and who is let; absent where there never was anything to report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<ExportReport>,
    /// The same for several nodes at once; absent where it was never shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<SharingReport>,
    /// Conditions.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

impl Object for Branch {
    const KIND: &'static str = "Branch";
    fn meta(&self) -> &Meta {
        &self.meta
    }
    fn meta_mut(&mut self) -> &mut Meta {
        &mut self.meta
    }
    fn set_status_of(&mut self, other: &Self) {
        self.status = other.status.clone();
    }
    fn clear_status(&mut self) {
        self.status = Default::default();
    }
    fn node(&self) -> Option<&NodeName> {
        Some(&self.spec.node)
    }
    fn volume(&self) -> Option<&VolumeId> {
        Some(&self.spec.volume)
    }
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StorageNode {
    /// Metadata; the name is the node's.
    pub meta: Meta,
    /// What is wanted.
    pub spec: StorageNodeSpec,
    /// What is.
    #[serde(default)]
    pub status: StorageNodeStatus,
}

/// What is wanted of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StorageNodeSpec {
    /// The node's name (the object's name).
    pub node: NodeName,
}

/// What a node is and has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StorageNodeStatus {
    /// Labels, for `nodeSelector`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Pools as last measured.
    #[serde(default)]
    pub pools: Vec<PoolReport>,
    /// Version of the agent.
    #[serde(default)]
    pub agent_version: String,
    /// Version of its mergerfs; absent when it has none that works.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mergerfs_version: Option<String>,
    /// Kernel release.
    #[serde(default)]
    pub kernel: String,
    /// What it can carry between itself and other nodes; empty: not probed. Transports of a later version are left out.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "known_transports")]
    pub transports: Vec<TransportReport>,
    /// Where it is reached by other nodes; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<StorageNetwork>,
    /// What lies among its branches and no `Branch` object tells of. Its room is counted as promised.
    #[serde(default, skip_serializing_if = "Unclaimed::is_empty")]
    pub unclaimed: Unclaimed,
    /// Ephemeral volumes that lie here and that no pod here has: the first 32 of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub abandoned: Vec<VolumeId>,
    /// When its agent last published it, by the node's clock: at least every five minutes while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub heartbeat: Option<Timestamp>,
    /// Conditions.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// What a later version's agent carries besides is nothing that this one could use, and no reason to leave its node out.
fn known_transports<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<TransportReport>, D::Error> {
    let known = |report: &serde_json::Value| {
        report.get("transport").is_none_or(|name| Transport::deserialize(name).is_ok())
    };
    let all = Vec::<serde_json::Value>::deserialize(from)?;
    all.into_iter()
        .filter(known)
        .map(|report| serde_json::from_value(report).map_err(D::Error::custom))
        .collect()
}

impl Object for StorageNode {
    const KIND: &'static str = "StorageNode";
    fn meta(&self) -> &Meta {
        &self.meta
    }
    fn meta_mut(&mut self) -> &mut Meta {
        &mut self.meta
    }
    fn set_status_of(&mut self, other: &Self) {
        self.status = other.status.clone();
    }
    fn clear_status(&mut self) {
        self.status = Default::default();
    }
    fn node(&self) -> Option<&NodeName> {
        Some(&self.spec.node)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// The object as a later version would write it: with more in each of its parts. Labels are not parts.
    fn of_later(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields
                    .iter_mut()
                    .filter(|(name, _)| *name != "labels")
                    .for_each(|(_, value)| of_later(value));
                fields.insert("ofLater".to_owned(), json!({"version": 9}));
            }
            Value::Array(values) => values.iter_mut().for_each(of_later),
            _ => {}
        }
    }

    fn is_read_from_a_later_version<T: DeserializeOwned + PartialEq + std::fmt::Debug>(value: &Value) {
        let ours: T = serde_json::from_value(value.clone()).unwrap();
        let mut later = value.clone();
        of_later(&mut later);
        assert_eq!(serde_json::from_value::<T>(later).unwrap(), ours);
    }

    fn node() -> Value {
        let able = |transport: &str| {
            let able = json!({"able": true});
            json!({"transport": transport, "owner": able, "consumer": able, "authentication": {"able": false, "reason": "old"}})
        };
        json!({
            "labels": {"zone": "x"},
            "pools": [{"name": "disk", "total": 9, "free": 8}],
            "agentVersion": "9.0.0",
            "transports": [able("nvme-tcp"), able("nfs")],
            "network": {"interface": "eth0", "addresses": ["10.0.0.1"]},
            "conditions": [],
        })
    }

    fn branch() -> Value {
        json!({
            "phase": "Bound",
            "export": {
                "generation": 3, "address": "10.0.0.1:4420", "name": "nqn", "transport": "nvme-tcp",
                "allowed": {"consumer": "a", "epoch": 2}, "bootId": "boot",
            },
            "conditions": [],
        })
    }

    #[test]
    fn what_a_later_version_adds_is_passed_over() {
        is_read_from_a_later_version::<StorageNodeStatus>(&node());
        is_read_from_a_later_version::<BranchStatus>(&branch());
        let attached = json!({"node": "a", "accessMode": "SingleNodeWriter"});
        is_read_from_a_later_version::<Attachment>(&attached);
    }

    #[test]
    fn what_an_earlier_version_did_not_write_is_unknown_and_no_error() {
        let earlier =
            json!({"labels": {}, "pools": [], "agentVersion": "0.1.0", "kernel": "6.1", "conditions": []});
        let status: StorageNodeStatus = serde_json::from_value(earlier).unwrap();
        assert!(status.transports.is_empty() && status.network.is_none(), "it is not used over a network");
        let status: BranchStatus = serde_json::from_value(json!({"phase": "Bound"})).unwrap();
        assert_eq!((status.export, status.sharing), (None, None));
    }

    #[test]
    fn a_transport_of_a_later_version_does_not_hide_its_node() {
        let mut status = node();
        let able = json!({"able": true});
        let later =
            json!({"transport": "carrier-pigeon", "owner": able, "consumer": able, "authentication": able});
        status["transports"].as_array_mut().unwrap().insert(1, later);
        let read: StorageNodeStatus = serde_json::from_value(status.clone()).unwrap();
        let names: Vec<_> = read.transports.iter().map(|report| report.transport.as_str()).collect();
        assert_eq!(names, ["nvme-tcp", "nfs"]);
        status["transports"][0]["owner"] = json!("yes");
        assert!(
            serde_json::from_value::<StorageNodeStatus>(status).is_err(),
            "one that is known must be whole"
        );
    }

    #[test]
    fn a_branch_that_is_written_through_says_nothing_of_it_as_those_from_before_there_was_a_choice() {
        let text = serde_json::json!({
            "id": "v-0", "volume": "v", "index": 0, "node": "n", "pool": "p", "size": 1, "usable": 1, "format": "image"
        });
        let mut spec: BranchSpec = serde_json::from_value(text).unwrap();
        assert!(spec.write_through);
        assert_eq!(serde_json::to_value(&spec).unwrap().get("writeThrough"), None);
        spec.write_through = false;
        assert_eq!(serde_json::to_value(&spec).unwrap()["writeThrough"], false);
        assert!(!spec.encrypted && serde_json::to_value(&spec).unwrap().get("encrypted").is_none());
    }
}
