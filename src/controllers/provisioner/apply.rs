//! Does the one write that was decided on, and reads before it what the decision hangs on where the picture may be late.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, VolumeNodeAffinity};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use serde_json::json;
use snafu::Snafu;

use super::decide::Action;
use super::objects::{ClaimRef, LABEL_CLAIM, LABEL_RETAINED, PROTECTION, SELECTED_NODE, Volume};
use super::persistent_volume::affinity;
use super::words;
use crate::controllers::cluster::{Cluster, FIELD_MANAGER, said};
use crate::controllers::lease::NotLeading;
use crate::store::object::{Meta, Version, VolumeSplit, VolumeSplitSpec, VolumeSplitStatus};
use crate::store::reach::network_of;
use crate::store::view::{accessible, is_ready, owners};
use crate::store::{Store, StoreError};

/// A write was not done.
#[derive(Debug, Snafu)]
pub(super) enum WriteError {
    /// Another instance may lead by now.
    #[snafu(display("{source}"), context(false))]
    Leading { source: NotLeading },
    /// The store did not answer, or refused.
    #[snafu(display("{source}"), context(false))]
    Store { source: StoreError },
    /// The API server did not answer, or refused.
    #[snafu(display("cannot {verb} {resource} {name}: {}{}", said(source), advice(source, verb, resource)))]
    Api {
        verb: &'static str,
        resource: &'static str,
        name: String,
        #[snafu(source(from(kube::Error, Box::new)))]
        source: Box<kube::Error>,
    },
    /// Something of that name exists and is another's.
    #[snafu(display(
        "PersistentVolume {name} exists and was not made for this claim: it is left alone; delete it, or delete the \
                     claim and make it anew"
    ))]
    Taken { name: String },
    /// No node could use it.
    #[snafu(display(
        "no node could use the volume: its branches are {holders}, and their nodes cannot reach each other by now; see the \
         transports of the StorageNodes"
    ))]
    Nowhere { holders: String },
    /// No answer came.
    #[snafu(display("the API server did not answer within {} s", wait.as_secs()))]
    Hangs { wait: Duration },
    /// It is not so any more.
    #[snafu(display("{what} changed meanwhile"))]
    Changed { what: String },
}

impl WriteError {
    /// Whether people are to be told at once: it does not go away by trying again.
    pub(super) fn is_lasting(&self) -> bool {
        match self {
            Self::Taken { .. } | Self::Nowhere { .. } => true,
            Self::Api { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if matches!(status.code, 400 | 403 | 422))
            }
            Self::Store { source } => {
                matches!(source, StoreError::Backend { .. } | StoreError::Malformed { .. })
            }
            Self::Leading { .. } | Self::Changed { .. } | Self::Hangs { .. } => false,
        }
    }

    /// Whether it is of the ordinary course of things.
    pub(super) fn is_ordinary(&self) -> bool {
        match self {
            Self::Changed { .. } | Self::Leading { .. } => true,
            Self::Store { source } => {
                matches!(
                    source,
                    StoreError::Conflict { .. } | StoreError::Missing { .. } | StoreError::Exists { .. }
                )
            }
            Self::Api { .. } | Self::Taken { .. } | Self::Nowhere { .. } | Self::Hangs { .. } => false,
        }
    }
}

fn advice(error: &kube::Error, verb: &str, resource: &str) -> String {
    match error {
        kube::Error::Api(status) if status.is_forbidden() => {
            format!("; grant the verb {verb} on {resource} to the service account of union-csi")
        }
        _ => String::new(),
    }
}

const VOLUMES: &str = "persistentvolumes";
const CLAIMS: &str = "persistentvolumeclaims";

/// Whether a write was needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// It was done now.
    Now,
    /// It was so already.
    Before,
}

/// Writes.
#[derive(Clone)]
pub(super) struct Writer {
    pub(super) cluster: Cluster,
    pub(super) store: Arc<dyn Store>,
}

impl Writer {
    /// Does it, for the volume of that name, whose `VolumeSplit` was last seen in that version.
    pub(super) async fn apply(
        &self,
        name: &str,
        version: Option<Version>,
        action: Action,
    ) -> Result<Written, WriteError> {
        self.cluster.claim.held()?;
        match action {
            Action::CreateSplit { spec, claim } => self.create_split(*spec, claim).await?,
            Action::Withdraw { gone } => self.withdraw(name, version, gone).await?,
            Action::CreateVolume(volume) => return self.create_volume(name, *volume).await,
            Action::Reschedule { claim, node } => self.reschedule(&claim, &node).await?,
            Action::Retain { handle } => self.retain(&handle, version).await?,
            Action::Reclaim { handle } => self.reclaim(name, &handle, version).await?,
            Action::DeleteVolume { uid } => self.delete_volume(name, uid).await?,
            Action::Protect { uid } => self.protect(name, &uid).await?,
            Action::Unprotect { uid, at } => self.unprotect(name, &uid, at).await?,
        }
        Ok(Written::Now)
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.cluster.client.clone())
    }

    fn claims(&self, namespace: &str) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.cluster.client.clone(), namespace)
    }

    async fn create_split(&self, spec: VolumeSplitSpec, claim: String) -> Result<(), WriteError> {
        let mut meta = Meta::with_finalizer(spec.volume.as_str());
        meta.labels.insert(LABEL_CLAIM.to_owned(), claim);
        let split = VolumeSplit { meta, spec, status: VolumeSplitStatus::default() };
        let name = split.meta.name.clone();
        match self.store.splits().create(split).await {
            Ok(_) => Ok(()),
            // Made before a crash, or by another: its event tells, if it can be read at all.
            Err(StoreError::Exists { .. }) => Ok(self.store.splits().get(&name).await.map(|_| ())?),
            Err(error) => Err(error.into()),
        }
    }

    /// The PersistentVolume as it is now.
    async fn volume(&self, name: &str) -> Result<Option<PersistentVolume>, WriteError> {
        self.volumes().get_opt(name).await.map_err(|e| api("get", VOLUMES, name, e))
    }

    async fn withdraw(
        &self,
        name: &str,
        version: Option<Version>,
        gone: Option<ClaimRef>,
    ) -> Result<(), WriteError> {
        let changed = |what: &str| Err(WriteError::Changed { what: format!("{what} {name}") });
        if self.volume(name).await?.is_some() {
            return changed("PersistentVolume");
        }
        if let Some(claim) = gone {
            let now = self.claims(&claim.namespace).get_opt(&claim.name).await;
            let now = now.map_err(|e| api("get", CLAIMS, &claim.name, e))?;
            let there = now.filter(|now| now.metadata.uid.as_deref() == Some(&claim.uid));
            let wants = there.is_some_and(|now| {
                let volume = now.spec.and_then(|spec| spec.volume_name).unwrap_or_default();
                now.metadata.deletion_timestamp.is_none() && (volume.is_empty() || volume == name)
            });
            if wants {
                return changed("the claim of volume");
            }
        }
        self.delete_split(name, version).await
    }

    async fn delete_split(&self, name: &str, version: Option<Version>) -> Result<(), WriteError> {
        self.cluster.claim.held()?;
        self.store.splits().delete(name, version).await?;
        Ok(())
    }

    /// Where the volume can be used now; it stays so in the PersistentVolume.
    async fn affinity(&self, handle: &str) -> Result<VolumeNodeAffinity, WriteError> {
        let changed = || WriteError::Changed { what: format!("volume {handle}") };
        let split = self.store.splits().get(handle).await?.filter(is_ready).ok_or_else(changed)?;
        let network = network_of(&*self.store, owners(&split)).await?;
        let accessible = accessible(&split, &network);
        if accessible.is_nowhere() {
            return Err(WriteError::Nowhere { holders: words::branches(&split.spec.branches) });
        }
        Ok(affinity(&accessible))
    }

    async fn create_volume(&self, name: &str, mut volume: PersistentVolume) -> Result<Written, WriteError> {
        if let Some(spec) = &mut volume.spec
            && let Some(csi) = &spec.csi
        {
            spec.node_affinity = Some(self.affinity(&csi.volume_handle).await?);
            self.cluster.claim.held()?;
        }
        let parameters =
            PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match self.volumes().create(&parameters, &volume).await {
            Ok(_) => Ok(Written::Now),
            Err(kube::Error::Api(status)) if status.is_already_exists() => {
                let claim = volume.spec.and_then(|spec| spec.claim_ref).and_then(|claim| claim.uid);
                match self.volume(name).await?.and_then(Volume::read) {
                    // Made before a crash, or by another leader: its event tells.
                    Some(there)
                        if there.provisioned && there.claim.as_ref().map(|c| &c.uid) == claim.as_ref() =>
                    {
                        Ok(Written::Before)
                    }
                    _ => Err(WriteError::Taken { name: name.to_owned() }),
                }
            }
            Err(error) => Err(api("create", VOLUMES, name, error)),
        }
    }

    async fn reschedule(&self, claim: &ClaimRef, node: &str) -> Result<(), WriteError> {
        let at = format!("/metadata/annotations/{}", SELECTED_NODE.replace('~', "~0").replace('/', "~1"));
        let patch = json!([
            {"op": "test", "path": "/metadata/uid", "value": claim.uid},
            {"op": "test", "path": at, "value": node},
            {"op": "remove", "path": at},
        ]);
        let result = self.claims(&claim.namespace).patch(&claim.name, &manager(), &json_patch(patch)).await;
        done_or_changed("patch", CLAIMS, &claim.name, result)
    }

    async fn retain(&self, handle: &str, version: Option<Version>) -> Result<(), WriteError> {
        let Some(mut split) = self.store.splits().get(handle).await? else { return Ok(()) };
        if Some(&split.meta.version) != version.as_ref() {
            return Err(WriteError::Changed { what: format!("VolumeSplit {handle}") });
        }
        split.meta.labels.insert(LABEL_RETAINED.to_owned(), "true".to_owned());
        self.cluster.claim.held()?;
        self.store.splits().update(split).await?;
        Ok(())
    }

    async fn reclaim(&self, name: &str, handle: &str, version: Option<Version>) -> Result<(), WriteError> {
        // The last look before what cannot be taken back: an administrator may have decided to keep it.
        let now = self.volume(name).await?.and_then(Volume::read);
        if !now.is_some_and(|now| now.to_be_reclaimed() && now.handle == handle) {
            return Err(WriteError::Changed { what: format!("PersistentVolume {name}") });
        }
        self.delete_split(handle, version).await
    }

    async fn delete_volume(&self, name: &str, uid: String) -> Result<(), WriteError> {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
            ..DeleteParams::default()
        };
        let result = self.volumes().delete(name, &parameters).await.map(|_| ());
        done_or_changed("delete", VOLUMES, name, result)
    }

    async fn protect(&self, name: &str, uid: &str) -> Result<(), WriteError> {
        let Some(now) = self.volume(name).await? else { return Ok(()) };
        let mut finalizers = now.metadata.finalizers.unwrap_or_default();
        if now.metadata.uid.as_deref() != Some(uid) || finalizers.iter().any(|f| f == PROTECTION) {
            return Ok(());
        }
        finalizers.push(PROTECTION.to_owned());
        self.cluster.claim.held()?;
        let patch =
            json!({"metadata": {"resourceVersion": now.metadata.resource_version, "finalizers": finalizers}});
        let result = self.volumes().patch(name, &manager(), &Patch::Merge(patch)).await;
        done_or_changed("patch", VOLUMES, name, result)
    }

    async fn unprotect(&self, name: &str, uid: &str, at: usize) -> Result<(), WriteError> {
        let path = format!("/metadata/finalizers/{at}");
        let patch = json!([
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "test", "path": path, "value": PROTECTION},
            {"op": "remove", "path": path},
        ]);
        let result = self.volumes().patch(name, &manager(), &json_patch(patch)).await;
        done_or_changed("patch", VOLUMES, name, result)
    }
}

fn manager() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// A JSON patch from constants of this file and names, which always parses.
fn json_patch(operations: serde_json::Value) -> Patch<()> {
    Patch::Json(serde_json::from_value(operations).unwrap_or_default())
}

fn api(verb: &'static str, resource: &'static str, name: &str, source: kube::Error) -> WriteError {
    WriteError::Api { verb, resource, name: name.to_owned(), source: Box::new(source) }
}

/// What is gone needs no write; what changed is decided anew.
fn done_or_changed<T>(
    verb: &'static str,
    resource: &'static str,
    name: &str,
    result: Result<T, kube::Error>,
) -> Result<(), WriteError> {
    match result {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        // 422: a `test` of the patch does not hold.
        Err(kube::Error::Api(status)) if status.is_conflict() || status.code == 422 => {
            Err(WriteError::Changed { what: format!("{resource} {name}") })
        }
        Err(error) => Err(api(verb, resource, name, error)),
    }
}
