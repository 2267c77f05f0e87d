//! Ephemeral inline volumes: made when they are published, removed when they are unpublished.
//!
//! Each has a directory below `ephemeral_dir`, made before anything else and removed last. It holds the staging path,
//! and it is how an unpublish call, which says nothing about the volume but its name, knows what it is about: also
//! after a restart, and while the store does not answer.

use std::io;
use std::path::{Path, PathBuf};

use tokio::time::Instant;

use super::{NodeError, NodeService};
use crate::csi::parse::Inline;
use crate::csi::provision::ProvisionError;
use crate::domain::VolumeId;
use crate::node::volume::{StageRequest, VolumeError};

impl NodeService {
    /// The id of the ephemeral volume that a caller calls `named`, if there is one on this node.
    pub(super) async fn ephemeral(&self, named: &str) -> Result<Option<VolumeId>, NodeError> {
        let volume = VolumeId::from_request_name(named);
        let directory = self.directory(&volume);
        match tokio::fs::try_exists(&directory).await {
            Ok(true) => Ok(Some(volume)),
            Ok(false) => Ok(None),
            Err(source) => Err(NodeError::Directory { volume, action: "look for", path: directory, source }),
        }
    }

    pub(super) async fn publish_ephemeral(&self, inline: Inline, deadline: Instant) -> Result<(), NodeError> {
        let Inline { spec, mut publish } = inline;
        let directory = self.directory(&spec.volume);
        tokio::fs::create_dir_all(&directory).await.map_err(|source| NodeError::Directory {
            volume: spec.volume.clone(),
            action: "make",
            path: directory.clone(),
            source,
        })?;
        publish.staging = staging(&directory);
        match self.provisioner.create(&spec, deadline).await {
            Ok(_) => {}
            Err(error) => {
                // Nothing was made, and nobody will call for its removal.
                if matches!(error, ProvisionError::NoRoom { .. }) {
                    self.remove_directory(&spec.volume).await?;
                }
                return Err(error.into());
            }
        }
        let stage = StageRequest {
            volume: publish.volume.clone(),
            staging: publish.staging.clone(),
            access_mode: publish.access_mode,
            access: publish.access.clone(),
        };
        self.volumes.stage(&stage).await.map_err(half_made)?;
        self.volumes.publish(&publish).await.map_err(half_made)
    }

    pub(super) async fn unpublish_ephemeral(
        &self,
        volume: &VolumeId,
        target: &Path,
        deadline: Instant,
    ) -> Result<(), NodeError> {
        let directory = self.directory(volume);
        self.volumes.unpublish(volume, target).await?;
        self.volumes.unstage(volume, &staging(&directory)).await?;
        self.provisioner.delete(volume, deadline).await?;
        self.remove_directory(volume).await
    }

    async fn remove_directory(&self, volume: &VolumeId) -> Result<(), NodeError> {
        let directory = self.directory(volume);
        // Never recursively: what is not empty is still mounted.
        for path in [staging(&directory), directory] {
            match tokio::fs::remove_dir(&path).await {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(NodeError::Directory {
                        volume: volume.clone(),
                        action: "remove",
                        path,
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    fn directory(&self, volume: &VolumeId) -> PathBuf {
        self.settings.ephemeral_dir.join(volume)
    }
}

/// A failure after the volume was made: the caller must not take it for "nothing was done", or it would never unpublish.
fn half_made(error: VolumeError) -> NodeError {
    match error {
        VolumeError::Differs { .. } => error.into(),
        source => NodeError::Ephemeral { source },
    }
}

fn staging(directory: &Path) -> PathBuf {
    directory.join("staging")
}
