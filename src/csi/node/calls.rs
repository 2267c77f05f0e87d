//! Ordinary volumes: parse, guard, call.

use tokio::time::Instant;

use super::{NodeError, NodeService, parse};
use crate::csi::{proto, signed};
use crate::domain::VolumeId;
use crate::node::volume::{PublishRequest, StageRequest, Usage, VolumeStats};

impl NodeService {
    pub(super) async fn stage(&self, request: &proto::NodeStageVolumeRequest) -> Result<(), NodeError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let staging = parse::absolute_path("staging_target_path", &request.staging_target_path)?;
        let capability = parse::capability(request.volume_capability.as_ref())?;
        let stage = StageRequest {
            volume: known(volume, &request.volume_id)?,
            staging,
            access_mode: capability.mode,
            access: capability.access,
        };
        let volumes = self.volumes.clone();
        self.guarded(&request.volume_id, async move { Ok(volumes.stage(&stage).await?) }).await
    }

    pub(super) async fn unstage(&self, request: &proto::NodeUnstageVolumeRequest) -> Result<(), NodeError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let staging = parse::absolute_path("staging_target_path", &request.staging_target_path)?;
        // A text that was never an id was never staged.
        let Some(volume) = volume else {
            return Ok(());
        };
        let volumes = self.volumes.clone();
        self.guarded(&request.volume_id, async move { Ok(volumes.unstage(&volume, &staging).await?) }).await
    }

    pub(super) async fn publish(
        &self,
        request: &proto::NodePublishVolumeRequest,
        deadline: Instant,
    ) -> Result<(), NodeError> {
        if let Some(inline) = parse::inline(request, &self.settings.node)? {
            let service = self.clone();
            let work = async move { service.publish_ephemeral(inline, deadline).await };
            return self.guarded(&request.volume_id, work).await;
        }
        let publish = ordinary(request)?;
        let volumes = self.volumes.clone();
        self.guarded(&request.volume_id, async move { Ok(volumes.publish(&publish).await?) }).await
    }

    pub(super) async fn unpublish(
        &self,
        request: &proto::NodeUnpublishVolumeRequest,
        deadline: Instant,
    ) -> Result<(), NodeError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let target = parse::absolute_path("target_path", &request.target_path)?;
        let service = self.clone();
        let named = request.volume_id.clone();
        let work = async move {
            if let Some(ephemeral) = service.ephemeral(&named).await? {
                return service.unpublish_ephemeral(&ephemeral, &target, deadline).await;
            }
            match volume {
                Some(volume) => Ok(service.volumes.unpublish(&volume, &target).await?),
                None => Ok(()),
            }
        };
        self.guarded(&request.volume_id, work).await
    }

    pub(super) async fn stats(
        &self,
        request: &proto::NodeGetVolumeStatsRequest,
    ) -> Result<proto::NodeGetVolumeStatsResponse, NodeError> {
        let volume = parse::volume_id(&request.volume_id)?;
        let path = parse::required("volume_path", &request.volume_path)?;
        // An ephemeral volume has an id that its orchestrator does not know.
        let volume = match self.ephemeral(&request.volume_id).await? {
            Some(ephemeral) => ephemeral,
            None => known(volume, &request.volume_id)?,
        };
        Ok(told(&self.volumes.stats(&volume, std::path::Path::new(path)).await?))
    }
}

/// Reads a NodePublishVolume request for a volume that is staged.
fn ordinary(request: &proto::NodePublishVolumeRequest) -> Result<PublishRequest, NodeError> {
    let volume = parse::volume_id(&request.volume_id)?;
    let target = parse::absolute_path("target_path", &request.target_path)?;
    let capability = parse::capability(request.volume_capability.as_ref())?;
    let at_boot = parse::switch("volume_context", &request.volume_context, parse::MOUNT_AT_BOOT)?;
    if request.staging_target_path.is_empty() {
        return Err(NodeError::StagingPathMissing { volume: request.volume_id.clone() });
    }
    Ok(PublishRequest {
        volume: known(volume, &request.volume_id)?,
        staging: parse::absolute_path("staging_target_path", &request.staging_target_path)?,
        target,
        read_only: request.readonly,
        access_mode: capability.mode,
        access: capability.access,
        at_boot,
    })
}

/// The id, where the text is one: no other names a volume.
fn known(volume: Option<VolumeId>, named: &str) -> Result<VolumeId, NodeError> {
    volume.ok_or_else(|| NodeError::UnknownVolume { volume: named.to_owned() })
}

fn told(stats: &VolumeStats) -> proto::NodeGetVolumeStatsResponse {
    use proto::volume_usage::Unit;
    let usage = |usage: &Usage, unit: Unit| proto::VolumeUsage {
        available: signed(usage.available),
        total: signed(usage.total),
        used: signed(usage.used),
        unit: unit.into(),
    };
    let mut all = vec![usage(&stats.bytes, Unit::Bytes)];
    all.extend(stats.inodes.as_ref().map(|inodes| usage(inodes, Unit::Inodes)));
    proto::NodeGetVolumeStatsResponse {
        usage: all,
        volume_condition: Some(proto::VolumeCondition {
            abnormal: stats.health.abnormal,
            message: stats.health.message.clone(),
        }),
    }
}
