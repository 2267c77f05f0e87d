//! What the provisioner keeps of the objects it watches: as little as its decisions need, since there are many.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume, PersistentVolumeClaim};

use super::words;
use crate::controllers::class::DELETE;
use crate::controllers::cluster::DRIVER;
use crate::domain::{Bytes, NodeName};
use crate::store::object::{Meta, Version, VolumeSplit, VolumeSplitSpec, condition, pending};
use crate::store::view::{capacity, is_ready};

/// Who is to provision a claim; set by the controller manager when there is something to do.
pub(super) const PROVISIONER: &str = "volume.kubernetes.io/storage-provisioner";

/// The same before Kubernetes 1.23; both are set.
pub(super) const PROVISIONER_BETA: &str = "volume.beta.kubernetes.io/storage-provisioner";

/// The node that the scheduler chose for the claim's first pod.
pub(super) const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// A claim's class before `storageClassName`.
const CLASS_BETA: &str = "volume.beta.kubernetes.io/storage-class";

/// Who provisioned a PersistentVolume; the controller manager leaves its deletion to that one.
pub(super) const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// Keeps a PersistentVolume until its volume is gone; the name is that of the official provisioner, so that either finds
/// what the other made.
pub(super) const PROTECTION: &str = "external-provisioner.volume.kubernetes.io/finalizer";

/// Label of a `VolumeSplit`: the UID of the claim it was made for.
pub(in crate::controllers) const LABEL_CLAIM: &str = "union.io/claim";

/// Label of a `VolumeSplit` whose PersistentVolume may go without it: it stays then.
pub(in crate::controllers) const LABEL_RETAINED: &str = "union.io/retained";

/// The volume's name for a claim: of its PersistentVolume and its `VolumeSplit`.
pub(super) fn volume_name(uid: &str) -> String {
    format!("pvc-{uid}")
}

/// A claim, as an event or a PersistentVolume names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct ClaimRef {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

impl ClaimRef {
    /// As Kubernetes writes it.
    pub(super) fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolumeClaim".to_owned()),
            namespace: Some(self.namespace.clone()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

/// A claim that this driver is to provision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) at: ClaimRef,
    /// Its class.
    pub(super) class: String,
    /// It is on its way out.
    pub(super) deleting: bool,
    /// The PersistentVolume that it is or will be bound to; empty: none.
    pub(super) volume: String,
    /// The node of its first pod.
    pub(super) selected_node: Option<String>,
    /// What it asks for; nothing once it has a volume.
    pub(super) ask: Option<Box<Ask>>,
}

/// What a claim asks for, as written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) size: Option<String>,
    pub(super) limit: Option<String>,
    pub(super) access_modes: Vec<String>,
    pub(super) volume_mode: Option<String>,
    /// Fields that nothing here can serve.
    pub(super) unserved: Vec<&'static str>,
}

impl Claim {
    /// What is kept of a claim; nothing of one that is not this driver's.
    pub(super) fn read(claim: PersistentVolumeClaim) -> Option<Self> {
        let annotations = claim.metadata.annotations.unwrap_or_default();
        let provisioner = annotations.get(PROVISIONER).or_else(|| annotations.get(PROVISIONER_BETA))?;
        if provisioner != DRIVER {
            return None;
        }
        let spec = claim.spec.unwrap_or_default();
        let volume = spec.volume_name.unwrap_or_default();
        let ask = volume.is_empty().then(|| {
            let quantity = |map: &Option<BTreeMap<String, _>>| {
                let quantity = map.as_ref()?.get("storage");
                quantity.map(|q: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| q.0.clone())
            };
            let resources = spec.resources.unwrap_or_default();
            let mut unserved = Vec::new();
            if spec.selector.is_some() {
                unserved.push("selector");
            }
            if spec.data_source.is_some() || spec.data_source_ref.is_some() {
                unserved.push("dataSource");
            }
            if spec.volume_attributes_class_name.is_some_and(|name| !name.is_empty()) {
                unserved.push("volumeAttributesClassName");
            }
            Box::new(Ask {
                size: quantity(&resources.requests),
                limit: quantity(&resources.limits),
                access_modes: spec.access_modes.unwrap_or_default(),
                volume_mode: spec.volume_mode,
                unserved,
            })
        });
        Some(Self {
            at: ClaimRef {
                namespace: claim.metadata.namespace.unwrap_or_default(),
                name: claim.metadata.name.unwrap_or_default(),
                uid: claim.metadata.uid.unwrap_or_default(),
            },
            class: annotations.get(CLASS_BETA).cloned().or(spec.storage_class_name).unwrap_or_default(),
            deleting: claim.metadata.deletion_timestamp.is_some(),
            volume,
            selected_node: annotations.get(SELECTED_NODE).filter(|node| !node.is_empty()).cloned(),
            ask,
        })
    }
}

/// Where a PersistentVolume is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nobody has said.
    New,
    /// For any claim that fits.
    Available,
    /// A claim has it.
    Bound,
    /// Its claim is gone.
    Released,
    /// The controller manager could not reclaim it.
    Failed,
}

/// A PersistentVolume of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) uid: String,
    /// The `VolumeSplit`.
    pub(super) handle: String,
    /// This driver made it for a claim.
    pub(super) provisioned: bool,
    /// It goes with its claim, and its volume too.
    pub(super) reclaimed: bool,
    pub(super) phase: Phase,
    pub(super) claim: Option<ClaimRef>,
    /// It is on its way out.
    pub(super) deleting: bool,
    /// Where among its finalizers the one is that protects its volume.
    pub(super) protection: Option<usize>,
}

impl Volume {
    /// What is kept of a PersistentVolume; nothing of one that is not this driver's.
    pub(super) fn read(volume: PersistentVolume) -> Option<Self> {
        let spec = volume.spec.unwrap_or_default();
        let csi = spec.csi.filter(|csi| csi.driver == DRIVER)?;
        let meta = volume.metadata;
        let annotations = meta.annotations.unwrap_or_default();
        let phase = match volume.status.and_then(|status| status.phase).as_deref() {
            Some("Available") => Phase::Available,
            Some("Bound") => Phase::Bound,
            Some("Released") => Phase::Released,
            Some("Failed") => Phase::Failed,
            _ => Phase::New,
        };
        Some(Self {
            name: meta.name.unwrap_or_default(),
            uid: meta.uid.unwrap_or_default(),
            handle: csi.volume_handle,
            provisioned: annotations.get(PROVISIONED_BY).is_some_and(|driver| driver == DRIVER),
            reclaimed: spec.persistent_volume_reclaim_policy.as_deref() == Some(DELETE),
            phase,
            claim: spec.claim_ref.map(|claim| ClaimRef {
                namespace: claim.namespace.unwrap_or_default(),
                name: claim.name.unwrap_or_default(),
                uid: claim.uid.unwrap_or_default(),
            }),
            deleting: meta.deletion_timestamp.is_some(),
            protection: meta.finalizers.unwrap_or_default().iter().position(|f| f == PROTECTION),
        })
    }

    /// Whether its volume is to be deleted: it was provisioned, it is to be reclaimed, and no claim has it.
    ///
    /// One that is on its way out without protection was given up by whoever took the protection away.
    pub(super) fn to_be_reclaimed(&self) -> bool {
        let unclaimed = match self.phase {
            Phase::Released => true,
            // Nobody can claim what is on its way out, so it will never be released.
            Phase::Available | Phase::Failed => self.deleting && self.claim.is_none(),
            Phase::New | Phase::Bound => false,
        };
        self.provisioned && self.reclaimed && unclaimed && (!self.deleting || self.protection.is_some())
    }

    /// As an event names it.
    pub(super) fn reference(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("PersistentVolume".to_owned()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

/// A `VolumeSplit`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) version: Version,
    /// UID of the claim that it was made for.
    pub(super) claim: Option<String>,
    /// The claim as its parameters name it.
    pub(super) claim_name: Option<(String, String)>,
    /// It stays without its PersistentVolume: it is marked so, or it was attached once and may hold files.
    pub(super) kept: bool,
    /// It is on its way out.
    pub(super) deleting: bool,
    /// It is a pod's own.
    pub(super) ephemeral: bool,
    /// Nodes that have it attached.
    pub(super) attached: Vec<NodeName>,
    /// Equal for equal wishes.
    pub(super) wish: u64,
    pub(super) standing: Standing,
}

/// How a volume does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is being made.
    Making(String),
    /// No split fits.
    Infeasible(String),
    /// Making a branch fails; its node tries again.
    Failing(String),
    /// All branches exist.
    Ready {
        /// Usable bytes.
        capacity: Bytes,
        /// Its branches, for people.
        split: String,
    },
}

impl Split {
    /// What is kept of a volume.
    pub(super) fn read(split: &VolumeSplit) -> Self {
        let Meta { labels, version, deleting, .. } = &split.meta;
        let parameter = |key| split.spec.parameters.get(key).cloned();
        Self {
            version: version.clone(),
            claim: labels.get(LABEL_CLAIM).cloned(),
            claim_name: parameter(crate::domain::policy::CLAIM_NAMESPACE_KEY)
                .zip(parameter(crate::domain::policy::CLAIM_NAME_KEY)),
            kept: split.spec.used || labels.contains_key(LABEL_RETAINED),
            deleting: deleting.is_some(),
            ephemeral: split.spec.ephemeral,
            attached: split.spec.attached.iter().map(|a| a.node.clone()).collect(),
            wish: wish(&split.spec),
            standing: standing(split),
        }
    }
}

/// A number that is equal for volumes of which the same is wanted.
pub(super) fn wish(spec: &VolumeSplitSpec) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&spec.request_name, spec.capacity, spec.limit, spec.volume_mode, spec.ephemeral).hash(&mut hasher);
    (&spec.access_modes, &spec.parameters, &spec.consumer, &spec.topology).hash(&mut hasher);
    hasher.finish()
}

fn standing(split: &VolumeSplit) -> Standing {
    if is_ready(split) {
        return Standing::Ready { capacity: capacity(split), split: words::branches(&split.spec.branches) };
    }
    let holds = |kind| condition(&split.status.conditions, kind).filter(|c| c.status);
    match (holds("Pending"), holds("ReplicaFailure")) {
        (Some(told), _) if told.reason == pending::INFEASIBLE => {
            Standing::Infeasible(words::infeasible(split, told))
        }
        (_, Some(told)) => Standing::Failing(told.message.clone()),
        _ => Standing::Making(words::progress(split)),
    }
}
