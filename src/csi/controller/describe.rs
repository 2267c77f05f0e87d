//! Volumes as the protocol tells of them: one, a page of them, and whether one can be used in a certain way.

use std::collections::HashMap;

use super::{ControllerError, ControllerService};
use crate::csi::{parse, proto, signed};
use crate::domain::policy::Policy;
use crate::domain::reach::{Network, Transport};
use crate::domain::{NodeName, VolumeId};
use crate::store::Selector;
use crate::store::attach::usable;
use crate::store::object::{self, VolumeSplit};
use crate::store::view::{Accessible, accessible, capacity, is_ready, label_of, network};

/// Before the name of the last volume of a page, in the token of the next. A token that was not given by us is told from
/// one that was by it.
const TOKEN: &str = "after:";

impl ControllerService {
    /// One page of the volumes that a caller made, by name: a volume that comes or goes between two pages shifts no
    /// other.
    pub(super) async fn list(
        &self,
        request: &proto::ListVolumesRequest,
    ) -> Result<proto::ListVolumesResponse, ControllerError> {
        let invalid = || parse::InvalidRequest::new("max_entries", "must not be negative");
        let most = usize::try_from(request.max_entries).map_err(|_| invalid())?;
        let after = match request.starting_token.as_str() {
            "" => None,
            token => Some(last_of_page(token)?),
        };
        let (mut splits, nodes) = futures::try_join!(
            self.store.splits().list(&Selector::All),
            self.store.nodes().list(&Selector::All),
        )?;
        let network = network(&nodes);
        splits.retain(|s| is_listed(s) && after.as_ref().is_none_or(|last| s.spec.volume > *last));
        splits.sort_by(|a, b| a.spec.volume.cmp(&b.spec.volume));
        let more = most != 0 && splits.len() > most;
        if more {
            splits.truncate(most);
        }
        let next_token = match splits.last() {
            Some(last) if more => format!("{TOKEN}{}", last.spec.volume),
            _ => String::new(),
        };
        Ok(proto::ListVolumesResponse {
            entries: splits.iter().map(|split| entry(split, &network)).collect(),
            next_token,
        })
    }
}

fn last_of_page(token: &str) -> Result<VolumeId, ControllerError> {
    let unknown = || ControllerError::Token { token: token.to_owned() };
    token.strip_prefix(TOKEN).and_then(|name| name.parse().ok()).ok_or_else(unknown)
}

/// Whether a caller knows the volume by its id: it was planned, it is not on its way out, and it does not belong to a pod.
fn is_listed(split: &VolumeSplit) -> bool {
    !split.spec.ephemeral && !split.spec.branches.is_empty() && split.meta.deleting.is_none()
}

fn entry(split: &VolumeSplit, network: &Network) -> proto::list_volumes_response::Entry {
    proto::list_volumes_response::Entry {
        volume: Some(volume(split, network)),
        status: Some(proto::list_volumes_response::VolumeStatus {
            published_node_ids: published_nodes(split),
            volume_condition: Some(condition(split)),
        }),
    }
}

/// The volume; `network`: what the nodes that hold it can carry. Its context stays empty: a caller keeps it for ever, and nothing of a volume is fixed for ever.
pub(super) fn volume(split: &VolumeSplit, network: &Network) -> proto::Volume {
    proto::Volume {
        capacity_bytes: signed(capacity(split).get()),
        volume_id: split.spec.volume.to_string(),
        volume_context: HashMap::new(),
        content_source: None,
        accessible_topology: topologies(&accessible(split, network)),
    }
}

/// The topology of a node that can attach branches of others by these transports. What it cannot is left out and never told
/// as `false`: a value that a node was registered with must not change.
pub(in crate::csi) fn topology(
    node: &NodeName,
    transports: impl IntoIterator<Item = Transport>,
) -> proto::Topology {
    let mut topology = reaching(transports);
    topology.segments.insert(parse::TOPOLOGY_KEY.to_owned(), node.to_string());
    topology
}

/// The topology of all nodes that can attach by these.
fn reaching(transports: impl IntoIterator<Item = Transport>) -> proto::Topology {
    let labels = transports.into_iter().filter_map(label_of);
    proto::Topology { segments: labels.map(|label| (label.to_owned(), "true".to_owned())).collect() }
}

fn topologies(accessible: &Accessible) -> Vec<proto::Topology> {
    let Accessible { nodes, transports } = accessible;
    let anywhere = (!transports.is_empty()).then(|| reaching(transports.iter().copied()));
    nodes.iter().map(|node| topology(node, [])).chain(anywhere).collect()
}

pub(super) fn published_nodes(split: &VolumeSplit) -> Vec<String> {
    split.spec.attached.iter().map(|a| a.node.to_string()).collect()
}

/// How the volume does, from its conditions.
pub(super) fn condition(split: &VolumeSplit) -> proto::VolumeCondition {
    let wrong = ["Degraded", "ReplicaFailure"]
        .into_iter()
        .filter_map(|kind| object::condition(&split.status.conditions, kind))
        .find(|c| c.status);
    match wrong {
        Some(c) => proto::VolumeCondition { abnormal: true, message: format!("{}: {}", c.kind, c.message) },
        None if is_ready(split) => {
            let n = split.spec.branches.len();
            let are = if n == 1 { "The branch is" } else { &format!("All {n} branches are") };
            proto::VolumeCondition { abnormal: false, message: format!("{are} bound.") }
        }
        None => proto::VolumeCondition {
            abnormal: true,
            message: object::condition(&split.status.conditions, "Ready")
                .map_or_else(|| "The volume is not complete.".to_owned(), |c| c.message.clone()),
        },
    }
}

/// Whether the volume can be used in all the ways that are asked about. What it cannot do is no error here: the answer
/// then confirms nothing and says why.
pub(super) fn validated(
    split: &VolumeSplit,
    request: &proto::ValidateVolumeCapabilitiesRequest,
) -> proto::ValidateVolumeCapabilitiesResponse {
    match objection(split, request) {
        Some(message) => proto::ValidateVolumeCapabilitiesResponse { confirmed: None, message },
        None => proto::ValidateVolumeCapabilitiesResponse {
            confirmed: Some(proto::validate_volume_capabilities_response::Confirmed {
                volume_context: request.volume_context.clone(),
                volume_capabilities: request.volume_capabilities.clone(),
                parameters: request.parameters.clone(),
                mutable_parameters: HashMap::new(),
            }),
            message: String::new(),
        },
    }
}

fn objection(split: &VolumeSplit, request: &proto::ValidateVolumeCapabilitiesRequest) -> Option<String> {
    let wanted = match parse::capabilities(&request.volume_capabilities) {
        Ok(wanted) => wanted,
        Err(invalid) => return Some(invalid.to_string()),
    };
    if !request.mutable_parameters.is_empty() {
        return Some("mutable_parameters: no parameter of a volume can be changed".to_owned());
    }
    let spec = &split.spec;
    if let Some(c) = wanted.iter().find(|c| c.volume_mode() != spec.volume_mode) {
        return Some(format!("the volume is of mode {:?}, asked is {:?}", spec.volume_mode, c.volume_mode()));
    }
    if let Some(c) = wanted.iter().find(|c| !usable(split, c.mode)) {
        return Some(format!("the volume was made for {:?}, asked is {:?}", spec.access_modes, c.mode));
    }
    let has = Policy::parse(&spec.parameters).map(|policy| policy.fs_type).unwrap_or_default();
    if let Some(fs) = wanted.iter().filter_map(|c| c.fs_type).find(|fs| *fs != has) {
        return Some(format!("fs_type: the volume was made for {has}, asked is {fs}"));
    }
    let mut other: Vec<&str> = request
        .parameters
        .iter()
        .filter(|(key, value)| spec.parameters.get(*key) != Some(value))
        .map(|(key, _)| key.as_str())
        .collect();
    other.sort_unstable();
    (!other.is_empty()).then(|| format!("the volume was made with other parameters: {}", other.join(", ")))
}
