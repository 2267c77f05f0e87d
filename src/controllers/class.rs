//! StorageClasses of this driver, and what they say.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::TopologySelectorTerm;
use k8s_openapi::api::storage::v1::StorageClass;

use super::cluster::{DRIVER, TOPOLOGY_KEY};
use crate::domain::NodeName;
use crate::domain::policy::{CLAIM_KEYS, Policy};

/// What Kubernetes keeps for itself among a class's parameters
/// (<https://kubernetes-csi.github.io/docs/external-provisioner.html>).
const RESERVED: &str = "csi.storage.k8s.io/";

/// The one reserved parameter of a class that means something to this driver.
const FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// The reclaim policy under which a volume goes with its claim.
pub(super) const DELETE: &str = "Delete";

/// A StorageClass of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) name: String,
    pub(super) parameters: BTreeMap<String, String>,
    pub(super) reclaim_policy: String,
    pub(super) mount_options: Vec<String>,
    /// WaitForFirstConsumer.
    pub(super) delayed: bool,
    pub(super) topologies: Vec<Vec<(String, Vec<String>)>>,
}

impl Class {
    /// What is kept of a class; nothing of one that is not this driver's.
    pub(super) fn read(class: StorageClass) -> Option<Self> {
        (class.provisioner == DRIVER).then(|| Self {
            name: class.metadata.name.unwrap_or_default(),
            parameters: class.parameters.unwrap_or_default(),
            reclaim_policy: class.reclaim_policy.unwrap_or_else(|| DELETE.to_owned()),
            mount_options: class.mount_options.unwrap_or_default(),
            delayed: class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer"),
            topologies: class.allowed_topologies.unwrap_or_default().into_iter().map(term).collect(),
        })
    }

    /// The policy that the parameters make, and those that a volume keeps.
    ///
    /// # Errors
    /// Which parameters are wrong, for people.
    pub(super) fn policy(&self) -> Result<(Policy, BTreeMap<String, String>), String> {
        let name = &self.name;
        let mut kept = self.parameters.clone();
        kept.retain(|key, _| !CLAIM_KEYS.contains(&key.as_str()));
        let mut faults: Vec<String> = kept
            .keys()
            .filter(|key| key.starts_with(RESERVED) && key.as_str() != FS_TYPE)
            .map(|key| {
                if key.contains("-secret-") {
                    format!("parameter {key}: this driver uses no secrets, remove it")
                } else {
                    format!("parameter {key} is not known: what begins with {RESERVED} is Kubernetes' own")
                }
            })
            .collect();
        match Policy::parse(&kept) {
            Ok(policy) if faults.is_empty() => Ok((policy, kept)),
            parsed => {
                faults.extend(parsed.err().into_iter().flatten().map(|fault| fault.to_string()));
                Err(format!(
                    "StorageClass {name}: {}; a class cannot be changed, delete it and make it anew",
                    faults.join("; ")
                ))
            }
        }
    }

    /// The nodes that `allowedTopologies` name; none: any. One term must hold, all of its expressions together.
    ///
    /// # Errors
    /// What is wrong with them, for people.
    pub(super) fn nodes(&self) -> Result<Vec<NodeName>, String> {
        let name = &self.name;
        let mut allowed = BTreeSet::new();
        for term in &self.topologies {
            let mut of_term: Option<BTreeSet<&String>> = None;
            for (key, values) in term {
                if key != TOPOLOGY_KEY {
                    return Err(format!(
                        "StorageClass {name}: allowedTopologies: key {key} is not one of this driver, whose volumes are tied to \
                         nodes: use {TOPOLOGY_KEY} with names of nodes, or the parameter nodeSelector with labels"
                    ));
                }
                let values: BTreeSet<&String> = values.iter().collect();
                of_term = Some(match of_term {
                    None => values,
                    Some(before) => before.intersection(&values).copied().collect(),
                });
            }
            for node in of_term.unwrap_or_default() {
                let node: NodeName =
                    node.parse().map_err(|e| format!("StorageClass {name}: allowedTopologies: {e}"))?;
                allowed.insert(node);
            }
        }
        if allowed.is_empty() && !self.topologies.is_empty() {
            return Err(format!("StorageClass {name}: allowedTopologies allow no node at all"));
        }
        Ok(allowed.into_iter().collect())
    }
}

fn term(term: TopologySelectorTerm) -> Vec<(String, Vec<String>)> {
    term.match_label_expressions.unwrap_or_default().into_iter().map(|e| (e.key, e.values)).collect()
}
