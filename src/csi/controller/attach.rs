//! Which nodes a volume is attached to: the calls. What is decided stands in [`crate::store::attach`].

use super::{ControllerError, ControllerService};
use crate::domain::volume::VolumeMode;
use crate::domain::{NodeName, VolumeId};
use crate::store::Selector;
use crate::store::attach::{Detach, attached, change, detached};
use crate::store::object::Attachment;
use crate::store::reach::network_of;
use crate::store::view::owners;

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
        let ends = owners(&split).into_iter().chain([&wanted.node]);
        let network = network_of(&*self.store, ends).await?;
        change(self.store.splits(), volume, |split| {
            Ok(attached(&split.ok_or_else(unknown)?, wanted, mode, &network)?)
        })
        .await
    }

    pub(super) async fn detach(&self, volume: &VolumeId, from: &Detach) -> Result<(), ControllerError> {
        change(self.store.splits(), volume, |split| Ok(split.and_then(|split| detached(&split, from)))).await
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
}
