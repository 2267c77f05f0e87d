//! Tells the people who look at a claim why a branch of its volume is waited for.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, PersistentVolume};
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use crate::controllers::cluster::{Cluster, DRIVER, said};
use crate::controllers::events::{Notice, Recorder};

/// How long the search for whom to tell is worth waiting for.
const PATIENCE: Duration = Duration::from_secs(20);

/// Writes events on claims, or on PersistentVolumes that no claim has.
#[derive(Clone)]
pub(super) struct Teller {
    cluster: Cluster,
    recorder: Recorder,
}

impl Teller {
    pub(super) fn new(cluster: Cluster, clock: fn() -> Timestamp) -> Self {
        Self { recorder: Recorder::new(cluster.clone(), clock), cluster }
    }

    /// Tells of a volume; `asked_by`: the VolumeAttachment that it is attached for. What goes wrong is logged.
    pub(super) async fn tell(&self, volume: &str, asked_by: Option<&str>, notice: &Notice) {
        let Ok(found) = tokio::time::timeout(PATIENCE, self.about(volume, asked_by)).await else {
            tracing::warn!(volume.id = volume, "whom to tell is not known: the API server does not answer");
            return;
        };
        match found {
            Ok(Some(about)) => self.recorder.record(about, notice).await,
            // Attached by hand, over the CSI socket: the log has it.
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(volume.id = volume, error = said(&error), "whom to tell is not known");
            }
        }
    }

    async fn about(
        &self,
        volume: &str,
        asked_by: Option<&str>,
    ) -> Result<Option<ObjectReference>, kube::Error> {
        let name = match asked_by {
            // A list of one needs no right beside those of the watch.
            Some(attachment) => {
                let attachments: Api<VolumeAttachment> = Api::all(self.cluster.client.clone());
                let one = ListParams::default().fields(&format!("metadata.name={attachment}"));
                let found = attachments.list(&one).await?.items.into_iter().next();
                found.and_then(|a| a.spec.source.persistent_volume_name)
            }
            None => None,
        };
        // Those that this program made have the volume's name.
        let name = name.as_deref().unwrap_or(volume);
        let volumes: Api<PersistentVolume> = Api::all(self.cluster.client.clone());
        let found = volumes.get_opt(name).await?;
        Ok(found.filter(|found| serves(found, volume)).map(reference))
    }
}

/// Whether it is a PersistentVolume of that volume.
fn serves(found: &PersistentVolume, volume: &str) -> bool {
    let csi = found.spec.as_ref().and_then(|spec| spec.csi.as_ref());
    csi.is_some_and(|csi| csi.driver == DRIVER && csi.volume_handle == volume)
}

fn reference(volume: PersistentVolume) -> ObjectReference {
    let (name, uid) = (volume.name_any(), volume.metadata.uid.clone());
    let claim = volume.spec.and_then(|spec| spec.claim_ref);
    let claim = claim.map(|claim| ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolumeClaim".to_owned()),
        name: claim.name,
        namespace: claim.namespace,
        uid: claim.uid,
        ..ObjectReference::default()
    });
    claim.unwrap_or_else(|| ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("PersistentVolume".to_owned()),
        name: Some(name),
        uid,
        ..ObjectReference::default()
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn volume(claim: serde_json::Value) -> PersistentVolume {
        serde_json::from_value(json!({
            "metadata": {"name": "pv", "uid": "1"},
            "spec": {"csi": {"driver": DRIVER, "volumeHandle": "v"}, "claimRef": claim}
        }))
        .unwrap()
    }

    #[test]
    fn the_claim_is_told_and_a_volume_without_one_itself() {
        let claimed = reference(volume(json!({"namespace": "web", "name": "data", "uid": "2"})));
        assert_eq!(claimed.kind.as_deref(), Some("PersistentVolumeClaim"));
        assert_eq!((claimed.namespace.as_deref(), claimed.uid.as_deref()), (Some("web"), Some("2")));
        let free = reference(volume(json!(null)));
        assert_eq!((free.kind.as_deref(), free.name.as_deref()), (Some("PersistentVolume"), Some("pv")));
    }

    #[test]
    fn an_object_that_only_has_the_volumes_name_is_not_told() {
        assert!(serves(&volume(json!(null)), "v"));
        assert!(!serves(&volume(json!(null)), "pv"));
        assert!(!serves(&PersistentVolume::default(), "v"));
    }
}
