//! What is to be known of each kind of object to find it in the API.

use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::summary::{self, Summary};
use crate::domain::{BranchId, NodeName, VolumeId};
use crate::store::Selector;
use crate::store::object::{
    Branch, BranchSpec, BranchStatus, Meta, Object, StorageNode, StorageNodeSpec, StorageNodeStatus,
    VolumeSplit, VolumeSplitSpec, VolumeSplitStatus,
};

/// A kind of object that is a custom resource.
pub(super) trait Resource: Object {
    /// What is wanted.
    type Spec: Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static;
    /// What is.
    type Status: Serialize + DeserializeOwned + JsonSchema + Default + PartialEq + Send + Sync + 'static;

    /// Its name in addresses and rules of access.
    const PLURAL: &'static str;
    /// Whether it lies in a namespace.
    const NAMESPACED: bool;
    /// Fields of the spec that a watch does not keep for the case that the object goes unseen: what is large, and has a
    /// default.
    const FORGOTTEN: &'static [&'static str];

    /// The object of these parts.
    fn assemble(meta: Meta, spec: Self::Spec, status: Self::Status) -> Self;
    /// What is wanted.
    fn spec(&self) -> &Self::Spec;
    /// What is.
    fn status(&self) -> &Self::Status;
    /// The name that its spec gives it; an object of another name is foreign.
    fn id(spec: &Self::Spec) -> &str;
    /// The field selector; `None` for all.
    fn fields(selector: &Selector) -> Option<String>;
    /// What `kubectl get` shows of it, written into the status beside it.
    fn summary(&self) -> Summary;
}

fn named(name: &str) -> Option<String> {
    Some(format!("metadata.name={name}"))
}

impl Resource for VolumeSplit {
    type Spec = VolumeSplitSpec;
    type Status = VolumeSplitStatus;
    const PLURAL: &'static str = "volumesplits";
    const NAMESPACED: bool = true;
    const FORGOTTEN: &'static [&'static str] = &["parameters", "topology", "branches", "attached"];

    fn assemble(meta: Meta, spec: Self::Spec, status: Self::Status) -> Self {
        Self { meta, spec, status }
    }
    fn spec(&self) -> &Self::Spec {
        &self.spec
    }
    fn status(&self) -> &Self::Status {
        &self.status
    }
    fn id(spec: &Self::Spec) -> &str {
        VolumeId::as_str(&spec.volume)
    }
    fn summary(&self) -> Summary {
        summary::split(self)
    }
    fn fields(selector: &Selector) -> Option<String> {
        match selector {
            Selector::Name(name) => named(name),
            Selector::Volume(volume) => named(volume.as_str()),
            // No split lies on a node: what comes is filtered here.
            Selector::All | Selector::Node(_) => None,
        }
    }
}

impl Resource for Branch {
    type Spec = BranchSpec;
    type Status = BranchStatus;
    const PLURAL: &'static str = "branches";
    const NAMESPACED: bool = true;
    const FORGOTTEN: &'static [&'static str] = &[];

    fn assemble(meta: Meta, spec: Self::Spec, status: Self::Status) -> Self {
        Self { meta, spec, status }
    }
    fn spec(&self) -> &Self::Spec {
        &self.spec
    }
    fn status(&self) -> &Self::Status {
        &self.status
    }
    fn id(spec: &Self::Spec) -> &str {
        BranchId::as_str(&spec.id)
    }
    fn summary(&self) -> Summary {
        summary::branch(self)
    }
    fn fields(selector: &Selector) -> Option<String> {
        match selector {
            Selector::Name(name) => named(name),
            Selector::Node(node) => Some(format!("spec.node={node}")),
            Selector::Volume(volume) => Some(format!("spec.volume={volume}")),
            Selector::All => None,
        }
    }
}

impl Resource for StorageNode {
    type Spec = StorageNodeSpec;
    type Status = StorageNodeStatus;
    const PLURAL: &'static str = "storagenodes";
    const NAMESPACED: bool = false;
    const FORGOTTEN: &'static [&'static str] = &[];

    fn assemble(meta: Meta, spec: Self::Spec, status: Self::Status) -> Self {
        Self { meta, spec, status }
    }
    fn spec(&self) -> &Self::Spec {
        &self.spec
    }
    fn status(&self) -> &Self::Status {
        &self.status
    }
    fn id(spec: &Self::Spec) -> &str {
        NodeName::as_str(&spec.node)
    }
    fn summary(&self) -> Summary {
        summary::node(self)
    }
    fn fields(selector: &Selector) -> Option<String> {
        match selector {
            Selector::Name(name) => named(name),
            Selector::Node(node) => named(node.as_str()),
            // No node belongs to a volume: what comes is filtered here.
            Selector::All | Selector::Volume(_) => None,
        }
    }
}
