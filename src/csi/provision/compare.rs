//! Whether two calls of one name ask for the same volume.

use super::{DiffersSnafu, ProvisionError};
use crate::csi::parse;
use crate::domain::NodeName;
use crate::domain::reach::Network;
use crate::store::object::{VolumeSplit, VolumeSplitSpec};
use crate::store::view::{accessible, capacity};

/// Whether the volume that exists is what is wanted; `network`: what the nodes that hold it can carry.
pub(super) fn compatible(
    have: &VolumeSplit,
    want: &VolumeSplitSpec,
    network: &Network,
) -> Result<(), ProvisionError> {
    match difference(have, want, network) {
        None => Ok(()),
        Some(difference) => DiffersSnafu { volume: want.volume.clone(), difference }.fail(),
    }
}

pub(super) fn difference(have: &VolumeSplit, want: &VolumeSplitSpec, network: &Network) -> Option<String> {
    let spec = &have.spec;
    let size = capacity(have);
    if spec.request_name != want.request_name {
        return Some(format!("it was asked for under the name {:?}", spec.request_name));
    }
    if spec.ephemeral != want.ephemeral {
        let is = if spec.ephemeral { "is" } else { "is not" };
        return Some(format!("it {is} an ephemeral volume"));
    }
    if size < want.capacity {
        return Some(format!(
            "capacity_range.required_bytes: it has {size} bytes, wanted are {}",
            want.capacity
        ));
    }
    if let Some(limit) = want.limit
        && size > limit
    {
        return Some(format!("capacity_range.limit_bytes: it has {size} bytes, allowed are {limit}"));
    }
    if spec.volume_mode != want.volume_mode {
        return Some(format!("volume_capabilities: it is of mode {:?}", spec.volume_mode));
    }
    if let Some(mode) = want.access_modes.iter().find(|m| !parse::serves(&spec.access_modes, **m)) {
        return Some(format!(
            "volume_capabilities: it was made for {:?}, wanted is {mode:?}",
            spec.access_modes
        ));
    }
    let keys = spec.parameters.keys().chain(want.parameters.keys());
    let mut changed: Vec<&str> = keys
        .filter(|key| spec.parameters.get(*key) != want.parameters.get(*key))
        .map(String::as_str)
        .collect();
    changed.sort_unstable();
    changed.dedup();
    if !changed.is_empty() {
        return Some(format!("parameters: {}", changed.join(", ")));
    }
    // Where other nodes can attach it, some of those that are asked for can; which ones, the topology in the answer says.
    let accessible = accessible(have, network);
    let nodes = &accessible.nodes;
    let reachable = want.topology.is_empty()
        || nodes.is_empty()
        || !accessible.transports.is_empty()
        || nodes.iter().any(|n| want.topology.contains(n));
    if !reachable {
        let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
        return Some(format!("accessibility_requirements: it can be used on {}", nodes.join(", ")));
    }
    None
}
