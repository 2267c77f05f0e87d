//! The PersistentVolume of a volume that is ready.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    CSIPersistentVolumeSource, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolume,
    PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::objects::{Claim, PROTECTION, PROVISIONED_BY};
use super::wanted::Wanted;
use crate::controllers::class::Class;
use crate::controllers::cluster::{DRIVER, TOPOLOGY_KEY};
use crate::domain::Bytes;
use crate::domain::volume::VolumeMode;
use crate::store::view::{Accessible, label_of};

/// The PersistentVolume for `claim`: bound to it by UID from the first moment, so that no other claim takes it, and kept by
/// a finalizer from the first moment, so that its volume is not forgotten. Where it can be used is not in it yet:
/// [`affinity`].
pub(super) fn persistent_volume(
    claim: &Claim,
    class: &Class,
    wanted: &Wanted,
    capacity: Bytes,
) -> PersistentVolume {
    let spec = &wanted.spec;
    let ask = claim.ask.as_deref();
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(spec.request_name.clone()),
            annotations: Some(BTreeMap::from([(PROVISIONED_BY.to_owned(), DRIVER.to_owned())])),
            finalizers: Some(vec![PROTECTION.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            access_modes: ask.map(|ask| ask.access_modes.clone()),
            capacity: Some(BTreeMap::from([("storage".to_owned(), Quantity(capacity.to_string()))])),
            claim_ref: Some(claim.at.reference()),
            csi: Some(CSIPersistentVolumeSource {
                driver: DRIVER.to_owned(),
                volume_handle: spec.volume.to_string(),
                fs_type: wanted.fs_type.clone(),
                ..CSIPersistentVolumeSource::default()
            }),
            mount_options: Some(class.mount_options.clone()).filter(|options| !options.is_empty()),
            persistent_volume_reclaim_policy: Some(class.reclaim_policy.clone()),
            storage_class_name: Some(class.name.clone()),
            volume_mode: Some(
                match spec.volume_mode {
                    VolumeMode::Filesystem => "Filesystem",
                    VolumeMode::Block => "Block",
                }
                .to_owned(),
            ),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

/// That pods that use it run where it can be used: where its branches are, or where they can be attached.
pub(super) fn affinity(accessible: &Accessible) -> VolumeNodeAffinity {
    let is = |key: &str, values: Vec<String>| NodeSelectorRequirement {
        key: key.to_owned(),
        operator: "In".to_owned(),
        values: Some(values),
    };
    let term = |all: Vec<NodeSelectorRequirement>| NodeSelectorTerm {
        match_expressions: Some(all),
        ..NodeSelectorTerm::default()
    };
    let mut terms = Vec::new();
    if !accessible.nodes.is_empty() {
        let nodes = accessible.nodes.iter().map(ToString::to_string).collect();
        terms.push(term(vec![is(TOPOLOGY_KEY, nodes)]));
    }
    if !accessible.transports.is_empty() {
        let labels = accessible.transports.iter().copied().filter_map(label_of);
        terms.push(term(labels.map(|label| is(label, vec!["true".to_owned()])).collect()));
    }
    VolumeNodeAffinity { required: Some(NodeSelector { node_selector_terms: terms }) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::reach::Transport;

    #[test]
    fn pods_run_on_the_nodes_of_the_branches_or_on_those_that_can_attach_them_all() {
        let accessible = Accessible {
            nodes: vec!["a".parse().unwrap()],
            transports: [Transport::NvmeTcp, Transport::Nfs].into(),
        };
        let is = |key: &str, value: &str| json!({"key": key, "operator": "In", "values": [value]});
        let terms = json!([
            {"matchExpressions": [is(TOPOLOGY_KEY, "a")]},
            {"matchExpressions": [is("union.csi.union.io/nvme-tcp", "true"), is("union.csi.union.io/nfs", "true")]},
        ]);
        let wanted = json!({"required": {"nodeSelectorTerms": terms}});
        assert_eq!(serde_json::to_value(affinity(&accessible)).unwrap(), wanted);
        let one = Accessible { transports: [].into(), ..accessible };
        let terms = affinity(&one).required.unwrap().node_selector_terms;
        assert_eq!(terms.len(), 1);
    }
}
