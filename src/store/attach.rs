//! Which nodes a volume is attached to: decisions on its object, and the one write that each leads to.
//!
//! The CSI service and, in Kubernetes, the attacher decide by the same rules. A volume's list of attachments keeps it from
//! being deleted and from being given to a second node where its access mode allows one.

use std::time::Duration;

use snafu::Snafu;

use super::object::{Attachment, VolumeSplit};
use super::view::{is_local, one_node_at_a_time, owners, reaches};
use super::{Collection, StoreError};
use crate::domain::reach::Network;
use crate::domain::volume::{AccessMode, VolumeMode, serves};
use crate::domain::{NodeName, VolumeId};

/// How often a write is decided again when another came first. Only the splitter, and another leader for a moment, write
/// the same object, a few times in its life; more than this means that something is wrong.
const ATTEMPTS: u32 = 8;

/// The first pause between two attempts; doubled each time, so that all of them end within 2 seconds.
const PAUSE: Duration = Duration::from_millis(5);

/// A volume cannot be attached so.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum AttachRefused {
    /// It changes, or is not complete yet.
    #[snafu(display("volume {volume} is being changed: {reason}; try again"))]
    Changing {
        /// The volume.
        volume: VolumeId,
        /// How.
        reason: String,
    },
    /// It was made for other uses.
    #[snafu(display("volume {volume} cannot be used so: {reason}"))]
    Unsupported {
        /// The volume.
        volume: VolumeId,
        /// Why.
        reason: String,
    },
    /// It is attached to that node in another way.
    #[snafu(display("volume {volume} is attached to node {node} already, {how}: detach it first"))]
    Differently {
        /// The volume.
        volume: VolumeId,
        /// The node.
        node: NodeName,
        /// In which way.
        how: String,
    },
    /// Another node has it.
    #[snafu(display(
        "volume {volume} is attached to node {node}, and its access mode allows one node at a time"
    ))]
    Elsewhere {
        /// The volume.
        volume: VolumeId,
        /// The other node.
        node: NodeName,
    },
    /// Another node has it, and its branches cannot serve both.
    #[snafu(display(
        "volume {volume} is attached to node {node}, and cannot be used elsewhere meanwhile: {reason}"
    ))]
    Undivided {
        /// The volume.
        volume: VolumeId,
        /// The other node.
        node: NodeName,
        /// Why.
        reason: &'static str,
    },
    /// The node cannot reach its branches.
    #[snafu(display("volume {volume}, which lies on {holders}, cannot be used on node {node}: {reason}"))]
    Unreachable {
        /// The volume.
        volume: VolumeId,
        /// The node.
        node: NodeName,
        /// Where its branches lie.
        holders: String,
        /// What is in the way.
        reason: String,
    },
}

/// Where a volume is to be detached from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detach {
    /// One node, whoever attached it there.
    Node(NodeName),
    /// All of them.
    AllNodes,
    /// Where this VolumeAttachment had it attached.
    AskedBy(String),
    /// A node that cannot exist.
    Nowhere,
}

/// Whether a volume that was made as this one can be used in `wanted` mode: in those that it was made for, and by readers on
/// many nodes where its branches serve several, so that one node fills it and many read it then.
#[must_use]
pub fn usable(split: &VolumeSplit, wanted: AccessMode) -> bool {
    let filled = || wanted == AccessMode::MultiNodeReaderOnly && one_node_at_a_time(split, false).is_none();
    serves(&split.spec.access_modes, wanted) || filled()
}

/// The volume attached as wanted; `None` where it is so already, whoever asked for that. `network`: what the nodes that hold
/// its branches can carry, and that node.
///
/// # Errors
/// Why it cannot be attached so.
pub fn attached(
    split: &VolumeSplit,
    wanted: &Attachment,
    mode: VolumeMode,
    network: &Network,
) -> Result<Option<VolumeSplit>, AttachRefused> {
    let volume = split.spec.volume.clone();
    if split.meta.deleting.is_some() {
        return ChangingSnafu { volume, reason: "it is being deleted" }.fail();
    }
    if split.spec.branches.is_empty() {
        return ChangingSnafu { volume, reason: "its branches are not planned yet" }.fail();
    }
    if mode != split.spec.volume_mode {
        return UnsupportedSnafu { volume, reason: format!("it is of mode {:?}", split.spec.volume_mode) }
            .fail();
    }
    if !usable(split, wanted.access_mode) {
        let reason = format!("it was made for {:?}", split.spec.access_modes);
        return UnsupportedSnafu { volume, reason }.fail();
    }
    if let Some(there) = split.spec.attached.iter().find(|a| a.node == wanted.node) {
        if (there.access_mode, there.read_only) == (wanted.access_mode, wanted.read_only) {
            return Ok(None);
        }
        let how = format!("{:?}{}", there.access_mode, if there.read_only { ", read-only" } else { "" });
        return DifferentlySnafu { volume, node: wanted.node.clone(), how }.fail();
    }
    let exclusive = |a: &&Attachment| !(a.access_mode.multi_node() && wanted.access_mode.multi_node());
    if let Some(other) = split.spec.attached.iter().find(exclusive) {
        return ElsewhereSnafu { volume, node: other.node.clone() }.fail();
    }
    if let Some(other) = split.spec.attached.first() {
        let writers = split.spec.attached.iter().chain([wanted]);
        let writing = writers.into_iter().any(|a| !a.access_mode.reader_only() && !a.read_only);
        if let Some(reason) = one_node_at_a_time(split, writing) {
            return UndividedSnafu { volume, node: other.node.clone(), reason }.fail();
        }
    }
    let unreachable = |reason: String| {
        let holders: Vec<&str> = owners(split).into_iter().map(NodeName::as_str).collect();
        UnreachableSnafu {
            volume: split.spec.volume.clone(),
            node: wanted.node.clone(),
            holders: holders.join(", "),
            reason,
        }
        .build()
    };
    if is_local(split) && !owners(split).contains(&wanted.node) {
        return Err(unreachable("its class has placement local".to_owned()));
    }
    reaches(split, &wanted.node, network).map_err(|obstacle| unreachable(obstacle.to_string()))?;
    let mut changed = split.clone();
    changed.spec.attached.push(wanted.clone());
    changed.spec.used = true;
    Ok(Some(changed))
}

/// The volume detached; `None` where it is so already.
#[must_use]
pub fn detached(split: &VolumeSplit, from: &Detach) -> Option<VolumeSplit> {
    let mut changed = split.clone();
    match from {
        Detach::Node(node) => changed.spec.attached.retain(|a| a.node != *node),
        Detach::AllNodes => changed.spec.attached.clear(),
        Detach::AskedBy(name) => {
            changed.spec.attached.retain(|a| a.volume_attachment.as_deref() != Some(name));
        }
        Detach::Nowhere => {}
    }
    (changed.spec.attached.len() != split.spec.attached.len()).then_some(changed)
}

/// Decides on the newest state of the volume and writes the result, until no other write comes between. `None` decides that
/// nothing is to be written.
///
/// # Errors
/// What `decide` refuses; [`StoreError::Conflict`] where others keep writing; what the store answers else.
pub async fn change<E: From<StoreError>>(
    splits: &dyn Collection<VolumeSplit>,
    volume: &VolumeId,
    decide: impl Fn(Option<VolumeSplit>) -> Result<Option<VolumeSplit>, E>,
) -> Result<(), E> {
    for attempt in 0..ATTEMPTS {
        let Some(changed) = decide(splits.get(volume.as_str()).await?)? else {
            return Ok(());
        };
        match splits.update(changed).await {
            Ok(_) => return Ok(()),
            Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {
                tokio::time::sleep(PAUSE * 2_u32.pow(attempt)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(StoreError::Conflict { kind: "VolumeSplit", name: volume.to_string() }.into())
}

#[cfg(test)]
mod tests;
