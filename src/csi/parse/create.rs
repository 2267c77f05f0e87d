//! CreateVolume.

use std::collections::{BTreeMap, HashMap};

use super::{Capability, InvalidRequest, capabilities, required};
use crate::csi::proto;
use crate::domain::policy::{CLAIM_KEYS, Policy};
use crate::domain::reach::Transport;
use crate::domain::split::Sharing;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::store::object::VolumeSplitSpec;
use crate::store::view::label_of;

/// What a request gets that names no size.
pub(in crate::csi) const DEFAULT_CAPACITY: Bytes = Bytes::gib(1);

/// The longest name that a volume can be asked for under, in bytes (CSI 1.12, "Size Limits").
pub(in crate::csi) const MAX_REQUEST_NAME: usize = 128;

/// The topology segment that names a node.
pub(in crate::csi) const TOPOLOGY_KEY: &str = "topology.union.csi.union.io/node";

/// Parameters that name the filesystem: ours, and the one that Kubernetes reserves for it.
const FS_TYPE: &str = "fsType";
const KUBERNETES_FS_TYPE: &str = "csi.storage.k8s.io/fstype";

/// Reads the request into the volume that shall exist.
pub(in crate::csi) fn create_volume(
    request: &proto::CreateVolumeRequest,
) -> Result<VolumeSplitSpec, InvalidRequest> {
    let name = request_name(&request.name)?;
    let (capacity, limit) = capacity_range(request.capacity_range.as_ref())?;
    let capabilities = capabilities(&request.volume_capabilities)?;
    let (parameters, policy) = parameters(&request.parameters, &capabilities)?;
    if request.volume_content_source.is_some() {
        return Err(InvalidRequest::new(
            "volume_content_source",
            "snapshots and clones are not supported by this version",
        ));
    }
    if !request.mutable_parameters.is_empty() {
        return Err(InvalidRequest::new(
            "mutable_parameters",
            "no parameter of a volume can be changed: give it in the StorageClass",
        ));
    }
    let (consumer, topology) = topology(request.accessibility_requirements.as_ref())?;
    let volume_mode = volume_mode(&capabilities, &policy)?;
    let mut access_modes: Vec<AccessMode> = capabilities.iter().map(|c| c.mode).collect();
    access_modes.sort_unstable();
    access_modes.dedup();
    Ok(VolumeSplitSpec {
        volume: VolumeId::from_request_name(name),
        request_name: name.to_owned(),
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
    })
}

fn request_name(name: &str) -> Result<&str, InvalidRequest> {
    let name = required("name", name)?;
    if name.len() > MAX_REQUEST_NAME {
        let reason = format!("has {} bytes, {MAX_REQUEST_NAME} are allowed", name.len());
        return Err(InvalidRequest::new("name", reason));
    }
    if name.chars().any(char::is_control) {
        return Err(InvalidRequest::new("name", "control characters are not allowed"));
    }
    Ok(name)
}

/// Usable bytes wanted, and the most that is allowed.
fn capacity_range(range: Option<&proto::CapacityRange>) -> Result<(Bytes, Option<Bytes>), InvalidRequest> {
    const REQUIRED: &str = "capacity_range.required_bytes";
    const LIMIT: &str = "capacity_range.limit_bytes";
    let Some(range) = range else {
        return Ok((DEFAULT_CAPACITY, None));
    };
    let bytes = |field, n: i64| {
        u64::try_from(n).map(Bytes::new).map_err(|_| InvalidRequest::new(field, format!("{n} is negative")))
    };
    let wanted = bytes(REQUIRED, range.required_bytes)?;
    let limit = bytes(LIMIT, range.limit_bytes)?;
    match (wanted.is_zero(), limit.is_zero()) {
        (true, true) => {
            Err(InvalidRequest::new("capacity_range", "required_bytes and limit_bytes are both zero"))
        }
        (true, false) => Ok((DEFAULT_CAPACITY.min(limit), Some(limit))),
        (false, true) => Ok((wanted, None)),
        (false, false) if limit < wanted => {
            Err(InvalidRequest::new(LIMIT, format!("{limit} is less than the required {wanted}")))
        }
        (false, false) => Ok((wanted, Some(limit))),
    }
}

/// Reads StorageClass parameters, for the check alone.
pub(in crate::csi) fn policy(
    given: &HashMap<String, String>,
    capabilities: &[Capability],
) -> Result<Policy, InvalidRequest> {
    parameters(given, capabilities).map(|(_, policy)| policy)
}

/// The parameters to be kept, and what they mean. The filesystem that the capabilities ask for becomes a parameter where
/// the class names none (Kubernetes' provisioner moves `csi.storage.k8s.io/fstype` from the one to the other).
pub(super) fn parameters(
    given: &HashMap<String, String>,
    capabilities: &[Capability],
) -> Result<(BTreeMap<String, String>, Policy), InvalidRequest> {
    let mut kept: BTreeMap<String, String> = given
        .iter()
        .filter(|(key, _)| !CLAIM_KEYS.contains(&key.as_str()))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    let named = kept.contains_key(FS_TYPE) || kept.contains_key(KUBERNETES_FS_TYPE);
    let asked = capabilities.iter().find_map(|c| c.fs_type);
    if let (false, Some(fs)) = (named, asked) {
        kept.insert(FS_TYPE.to_owned(), fs.to_string());
    }
    let policy = Policy::parse(&kept).map_err(|faults| {
        let faults: Vec<String> = faults.iter().map(ToString::to_string).collect();
        InvalidRequest::new("parameters", faults.join("; "))
    })?;
    match asked {
        Some(fs) if fs != policy.fs_type => Err(InvalidRequest::new(
            "volume_capability.mount.fs_type",
            format!(
                "{fs} differs from the class's fsType {}: make them equal, or leave it empty",
                policy.fs_type
            ),
        )),
        _ => Ok((kept, policy)),
    }
}

/// A block volume is one image: there is no way yet to join several into one device. What several nodes write is one
/// directory.
fn volume_mode(capabilities: &[Capability], policy: &Policy) -> Result<VolumeMode, InvalidRequest> {
    let mode = capabilities.first().map(Capability::volume_mode).unwrap_or_default();
    let modes: Vec<_> = capabilities.iter().map(|capability| capability.mode).collect();
    let writers = Sharing::of(&modes) == Sharing::ManyWriters;
    let block = policy.block_refusal().filter(|_| mode == VolumeMode::Block);
    match block.or_else(|| policy.writers_refusal(mode).filter(|_| writers)) {
        Some(reason) => Err(InvalidRequest::new("volume_capabilities", reason)),
        None => Ok(mode),
    }
}

/// The node that will use the volume, where that is known, and the nodes that it must be usable on (empty: any).
fn topology(
    requirement: Option<&proto::TopologyRequirement>,
) -> Result<(Option<NodeName>, Vec<NodeName>), InvalidRequest> {
    const FIELD: &str = "accessibility_requirements";
    let Some(requirement) = requirement else {
        return Ok((None, Vec::new()));
    };
    let nodes = |list: &[proto::Topology]| {
        list.iter().map(|t| node_of_topology(FIELD, t)).collect::<Result<Vec<_>, _>>()
    };
    let mut requisite = nodes(&requirement.requisite)?;
    let preferred = nodes(&requirement.preferred)?;
    let only = if requisite.len() == 1 { requisite.first() } else { None };
    let consumer = preferred.first().or(only).cloned();
    requisite.sort_unstable();
    requisite.dedup();
    Ok((consumer, requisite))
}

/// The node that a topology names: the segment that is ours, beside those that say what nodes can attach.
pub(in crate::csi) fn node_of_topology(
    field: &'static str,
    topology: &proto::Topology,
) -> Result<NodeName, InvalidRequest> {
    let carried = [Transport::NvmeTcp, Transport::Nfs].map(label_of);
    let mut others =
        topology.segments.keys().map(String::as_str).filter(|key| !carried.contains(&Some(*key)));
    match (topology.segments.get(TOPOLOGY_KEY), others.next(), others.next()) {
        (Some(node), Some(_), None) => {
            node.parse().map_err(|e| InvalidRequest::new(field, format!("{TOPOLOGY_KEY}: {e}")))
        }
        _ => {
            let mut keys: Vec<&str> = topology.segments.keys().map(String::as_str).collect();
            keys.sort_unstable();
            Err(InvalidRequest::new(
                field,
                format!(
                    "a topology needs the segment {TOPOLOGY_KEY} and none that is not this driver's, not [{}]",
                    keys.join(", ")
                ),
            ))
        }
    }
}
