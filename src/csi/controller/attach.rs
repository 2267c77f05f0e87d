//! Which nodes a volume is attached to: a decision on its spec, then one write.

use std::time::Duration;

use super::{ControllerError, ControllerService};
use crate::csi::parse;
use crate::csi::provision::accessible_nodes;
use crate::domain::volume::VolumeMode;
use crate::domain::{NodeName, VolumeId};
use crate::store::object::{Attachment, VolumeSplit};
use crate::store::{Selector, StoreError};

/// How often a write is decided again when another came first. Only the splitter, and another leader for a moment, write
/// the same object, a few times in its life; more than this means that something is wrong.
const ATTEMPTS: u32 = 8;

/// The first pause between two attempts; doubled each time, so that all of them end within 2 seconds.
const PAUSE: Duration = Duration::from_millis(5);

/// Where a volume is to be detached from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Detach {
    /// One node.
    Node(NodeName),
    /// All of them.
    AllNodes,
    /// A node that cannot exist.
    Nowhere,
}

impl ControllerService {
    pub(super) async fn attach(
        &self,
        volume: &VolumeId,
        wanted: &Attachment,
        mode: VolumeMode,
    ) -> Result<(), ControllerError> {
        let unknown = || ControllerError::UnknownVolume { volume: volume.to_string() };
        let split = self.provisioner.get(volume).await?.ok_or_else(unknown)?;
        if self.store.nodes().get(wanted.node.as_str()).await?.is_none() {
            return Err(ControllerError::UnknownNode { node: wanted.node.to_string() });
        }
        if !split.spec.attached.iter().any(|a| a.node == wanted.node) {
            self.room_on(&wanted.node).await?;
        }
        self.change(volume, |split| {
            let split = split.ok_or_else(unknown)?;
            attached(&split, wanted, mode)
        })
        .await
    }

    pub(super) async fn detach(&self, volume: &VolumeId, from: &Detach) -> Result<(), ControllerError> {
        self.change(volume, |split| Ok(split.and_then(|split| detached(&split, from)))).await
    }

    /// Whether the node may have one more volume.
    async fn room_on(&self, node: &NodeName) -> Result<(), ControllerError> {
        let Some(limit) = self.settings.max_volumes else {
            return Ok(());
        };
        let all = self.store.splits().list(&Selector::All).await?;
        let there = all.iter().filter(|s| s.spec.attached.iter().any(|a| a.node == *node)).count();
        if u32::try_from(there).is_ok_and(|n| n < limit) {
            Ok(())
        } else {
            Err(ControllerError::NodeFull { node: node.clone(), limit })
        }
    }

    /// Decides on the newest state and writes the result, until no other write comes between.
    async fn change(
        &self,
        volume: &VolumeId,
        decide: impl Fn(Option<VolumeSplit>) -> Result<Option<VolumeSplit>, ControllerError>,
    ) -> Result<(), ControllerError> {
        for attempt in 0..ATTEMPTS {
            let now = self.provisioner.get(volume).await?;
            let Some(changed) = decide(now)? else {
                return Ok(());
            };
            match self.store.splits().update(changed).await {
                Ok(_) => return Ok(()),
                Err(StoreError::Conflict { .. } | StoreError::Missing { .. }) => {
                    tokio::time::sleep(PAUSE * 2_u32.pow(attempt)).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let reason = format!("{ATTEMPTS} attempts to write it met other writers");
        Err(ControllerError::Busy { volume: volume.clone(), reason })
    }
}

/// The volume attached as wanted; `None` where it is so already.
fn attached(
    split: &VolumeSplit,
    wanted: &Attachment,
    mode: VolumeMode,
) -> Result<Option<VolumeSplit>, ControllerError> {
    let volume = split.spec.volume.clone();
    if split.meta.deleting.is_some() {
        return Err(ControllerError::Busy { volume, reason: "it is being deleted".to_owned() });
    }
    if split.spec.branches.is_empty() {
        return Err(ControllerError::Busy { volume, reason: "its branches are not planned yet".to_owned() });
    }
    if mode != split.spec.volume_mode {
        let reason = format!("it is of mode {:?}", split.spec.volume_mode);
        return Err(ControllerError::Unsupported { volume, reason });
    }
    if !parse::serves(&split.spec.access_modes, wanted.access_mode) {
        let reason = format!("it was made for {:?}", split.spec.access_modes);
        return Err(ControllerError::Unsupported { volume, reason });
    }
    if let Some(there) = split.spec.attached.iter().find(|a| a.node == wanted.node) {
        if there == wanted {
            return Ok(None);
        }
        let how = format!("{:?}{}", there.access_mode, if there.read_only { ", read-only" } else { "" });
        return Err(ControllerError::AttachedDifferently { volume, node: wanted.node.clone(), how });
    }
    let exclusive = |a: &&Attachment| !(a.access_mode.multi_node() && wanted.access_mode.multi_node());
    if let Some(other) = split.spec.attached.iter().find(exclusive) {
        return Err(ControllerError::AttachedElsewhere { volume, node: other.node.clone() });
    }
    if !accessible_nodes(split).contains(&wanted.node) {
        let mut holders: Vec<&str> = split.spec.branches.iter().map(|b| b.node.as_str()).collect();
        holders.sort_unstable();
        holders.dedup();
        let holders = holders.join(", ");
        return Err(ControllerError::Unreachable { volume, node: wanted.node.clone(), holders });
    }
    let mut changed = split.clone();
    changed.spec.attached.push(wanted.clone());
    Ok(Some(changed))
}

/// The volume detached; `None` where it is so already.
fn detached(split: &VolumeSplit, from: &Detach) -> Option<VolumeSplit> {
    let mut changed = split.clone();
    match from {
        Detach::Node(node) => changed.spec.attached.retain(|a| a.node != *node),
        Detach::AllNodes => changed.spec.attached.clear(),
        Detach::Nowhere => {}
    }
    (changed.spec.attached.len() != split.spec.attached.len()).then_some(changed)
}

#[cfg(test)]
mod tests;
