//! From a claim and its class to the volume that shall exist.

use super::objects::{Ask, Claim, volume_name};
use crate::controllers::class::Class;
use crate::domain::policy::{CLAIM_NAME_KEY, CLAIM_NAMESPACE_KEY};
use crate::domain::split::Sharing;
use crate::domain::volume::{AccessMode, VolumeMode, mount_flags};
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::store::object::VolumeSplitSpec;

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
    let (policy, mut parameters) = class.policy()?;
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
    let access_modes = access_modes(ask)?;
    if Sharing::of(&access_modes) == Sharing::ManyWriters
        && let Some(reason) = policy.writers_refusal(volume_mode)
    {
        return Err(format!(
            "accessModes: ReadWriteMany cannot be had of StorageClass {}: {reason}",
            class.name
        ));
    }
    let (capacity, limit) = sizes(ask)?;
    let request_name = volume_name(&claim.at.uid);
    let topology = class.nodes()?;
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
            access_modes,
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
