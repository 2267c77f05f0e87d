//! The four watches as one stream of changes.

use futures::stream::{self, BoxStream, StreamExt};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::{Api, ResourceExt};

use super::objects::{Claim, Split, Volume, volume_name};
use crate::controllers::class::Class;
use crate::controllers::cluster::Cluster;
use crate::controllers::watch::{Heard, Told, watched};

/// What happened to the objects.
pub(super) enum Change {
    /// By the name of the claim's volume.
    Claim(Told<Claim>),
    Class(Told<Class>),
    Volume(Told<Volume>),
    Split(Told<Split>),
}

impl Change {
    /// Whether all objects of one kind have been reported for the first time.
    pub(super) fn is_first_read(&self) -> bool {
        matches!(
            self,
            Self::Claim(Told::FirstRead)
                | Self::Class(Told::FirstRead)
                | Self::Volume(Told::FirstRead)
                | Self::Split(Told::FirstRead)
        )
    }
}

/// The kinds in [`feed`].
pub(super) const KINDS: u32 = 4;

/// All changes, beginning with all objects.
pub(super) fn feed(cluster: &Cluster, heard: &mut Heard) -> BoxStream<'static, Change> {
    let claims = Api::<PersistentVolumeClaim>::all(cluster.client.clone());
    let claim_volume = |claim: &PersistentVolumeClaim| volume_name(&claim.uid().unwrap_or_default());
    let classes = Api::<StorageClass>::all(cluster.client.clone());
    let volumes = Api::<PersistentVolume>::all(cluster.client.clone());
    let splits = heard.splits().map(|told| Change::Split(told.map(|split| Split::read(&split))));
    stream::select_all([
        watched(claims, "persistentvolumeclaims", claim_volume, Claim::read).map(Change::Claim).boxed(),
        watched(classes, "storageclasses", ResourceExt::name_any, Class::read).map(Change::Class).boxed(),
        watched(volumes, "persistentvolumes", ResourceExt::name_any, Volume::read)
            .map(Change::Volume)
            .boxed(),
        splits.boxed(),
    ])
    .boxed()
}
