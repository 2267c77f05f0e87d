//! From a claim and its class to the volume that shall exist.

use std::collections::BTreeSet;

use super::objects::{Ask, Claim, Class, volume_name};
use crate::controllers::cluster::TOPOLOGY_KEY;
use crate::domain::policy::{CLAIM_KEYS, CLAIM_NAME_KEY, CLAIM_NAMESPACE_KEY, Policy};
use crate::domain::volume::{AccessMode, VolumeMode, mount_flags};
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::store::object::VolumeSplitSpec;

/// What Kubernetes keeps for itself among a class's parameters
/// (<https://kubernetes-csi.github.io/docs/external-provisioner.html>).
const RESERVED: &str = "csi.storage.k8s.io/";

/// The one reserved parameter of a class that means something to this driver.
const FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// What shall exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The volume.
    pub(super) spec: VolumeSplitSpec,
    /// What the PersistentVolume says of its filesystem; nothing for block volumes.
    pub(super) fs_type: Option<String>,
}

/// Reads the claim and its class.
///
/// # Errors
/// Why no volume can be made of them, for people, with the field or parameter that is the reason. It stays so until the
/// claim or the class changes.
pub(super) fn wanted(claim: &Claim, class: &Class) -> Result<Wanted, String> {
    let nothing = Ask::default();
    let ask = claim.ask.as_deref().unwrap_or(&nothing);
    if let Some(field) = ask.unserved.first() {
        return Err(match *field {
            "dataSource" => "dataSource: snapshots and clones are not supported by this version".to_owned(),
            "selector" => {
                "selector: a claim for a new volume cannot choose among volumes; remove it".to_owned()
            }
            other => format!("{other}: not supported by this version; remove it"),
        });
    }
    let (policy, mut parameters) = parameters(class)?;
    parameters.insert(CLAIM_NAMESPACE_KEY.to_owned(), claim.at.namespace.clone());
    parameters.insert(CLAIM_NAME_KEY.to_owned(), claim.at.name.clone());
    let volume_mode = match ask.volume_mode.as_deref() {
        None | Some("" | "Filesystem") => VolumeMode::Filesystem,
        Some("Block") => VolumeMode::Block,
        Some(other) => return Err(format!("volumeMode {other} is not known: use Filesystem or Block")),
    };
    if let Some(reason) = policy.block_refusal().filter(|_| volume_mode == VolumeMode::Block) {
        return Err(format!("volumeMode Block: {reason}"));
    }
    if volume_mode == VolumeMode::Filesystem {
        // Told now, and not when the first pod cannot start.
        mount_flags(&class.mount_options)
            .map_err(|reason| format!("StorageClass {}: mountOptions: {reason}", class.name))?;
    }
    let (capacity, limit) = sizes(ask)?;
    let request_name = volume_name(&claim.at.uid);
    let topology = topology(class)?;
    let consumer = match &claim.selected_node {
        Some(node) if class.delayed => {
            let node: NodeName = node.parse().map_err(|e| format!("the selected node: {e}"))?;
            if !topology.is_empty() && !topology.contains(&node) {
                return Err(format!(
                    "the scheduler selected node {node}, and allowedTopologies of the class allow only {}",
                    topology.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ")
                ));
            }
            Some(node)
        }
        _ => None,
    };
    Ok(Wanted {
        fs_type: (volume_mode == VolumeMode::Filesystem).then(|| policy.fs_type.to_string()),
        spec: VolumeSplitSpec {
            volume: VolumeId::from_request_name(&request_name),
            request_name,
            capacity,
            limit,
            access_modes: access_modes(ask)?,
            volume_mode,
            parameters,
            consumer,
            topology,
            ephemeral: false,
            branches: Vec::new(),
            next_index: 0,
            attached: Vec::new(),
            used: false,
        },
    })
}

fn parameters(class: &Class) -> Result<(Policy, std::collections::BTreeMap<String, String>), String> {
    let name = &class.name;
    let mut kept = class.parameters.clone();
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

fn sizes(ask: &Ask) -> Result<(Bytes, Option<Bytes>), String> {
    const REQUEST: &str = "resources.requests.storage";
    const LIMIT: &str = "resources.limits.storage";
    let read = |field: &str, text: &String| text.parse::<Bytes>().map_err(|e| format!("{field}: {e}"));
    let capacity = match &ask.size {
        Some(text) => read(REQUEST, text)?,
        None => return Err(format!("{REQUEST} is required")),
    };
    if capacity.is_zero() {
        return Err(format!("{REQUEST} must be more than zero"));
    }
    let limit =
        ask.limit.as_ref().map(|text| read(LIMIT, text)).transpose()?.filter(|limit| !limit.is_zero());
    match limit {
        Some(limit) if limit < capacity => {
            Err(format!("{LIMIT} {} is less than {REQUEST} {}", limit.shown(), capacity.shown()))
        }
        limit => Ok((capacity, limit)),
    }
}

/// The modes of the claim as the driver knows them: `ReadWriteOnce` is many writers on one node, since the driver tells
/// `SINGLE_NODE_MULTI_WRITER` (CSI 1.5 and later).
fn access_modes(ask: &Ask) -> Result<Vec<AccessMode>, String> {
    let mut modes = Vec::new();
    for name in &ask.access_modes {
        let mode = match name.as_str() {
            "ReadWriteOnce" => AccessMode::SingleNodeMultiWriter,
            "ReadWriteOncePod" => AccessMode::SingleNodeSingleWriter,
            "ReadOnlyMany" => AccessMode::MultiNodeReaderOnly,
            "ReadWriteMany" => AccessMode::MultiNodeMultiWriter,
            other => return Err(format!("accessModes: {other} is not known")),
        };
        if let Some(reason) = mode.refusal() {
            return Err(format!("accessModes: {name} is not supported: {reason}"));
        }
        modes.push(mode);
    }
    if modes.is_empty() {
        return Err("accessModes is required".to_owned());
    }
    modes.sort_unstable();
    modes.dedup();
    Ok(modes)
}

/// The nodes that `allowedTopologies` name; none: any. One term must hold, all of its expressions together.
fn topology(class: &Class) -> Result<Vec<NodeName>, String> {
    let name = &class.name;
    let mut allowed = BTreeSet::new();
    for term in &class.topologies {
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
    if allowed.is_empty() && !class.topologies.is_empty() {
        return Err(format!("StorageClass {name}: allowedTopologies allow no node at all"));
    }
    Ok(allowed.into_iter().collect())
}
