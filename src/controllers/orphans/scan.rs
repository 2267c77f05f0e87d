//! What no claim needs any more: found from the objects, told with its remedy, never deleted here.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::ListParams;
use kube::{Api, Client};
use serde::Serialize;
use snafu::Snafu;

use crate::controllers::cluster::{DRIVER, said};
use crate::controllers::provisioner::{LABEL_CLAIM, LABEL_RETAINED};
use crate::store::object::{Branch, VolumeSplit};
use crate::store::{Selector, Store, StoreError};

/// A volume that has neither claim nor PersistentVolume for less than this is on its way: far more than making and
/// withdrawing one takes.
pub const ON_ITS_WAY: Duration = Duration::from_secs(60 * 60);

/// What an orphan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum OrphanKind {
    /// A `Branch` whose volume does not exist.
    Branch,
    /// A `VolumeSplit` that was made for a claim, without the claim and without a PersistentVolume.
    Volume,
    /// A `VolumeSplit` that was kept on purpose without its PersistentVolume.
    Retained,
    /// A PersistentVolume whose `VolumeSplit` does not exist.
    PersistentVolume,
}

/// An object that nothing needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Orphan {
    /// What it is.
    pub kind: OrphanKind,
    /// Its name.
    pub name: String,
    /// When it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<Timestamp>,
    /// The command that removes it, and with it the files in it.
    pub remedy: String,
}

/// A PersistentVolume of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// The `VolumeSplit`.
    pub handle: String,
    /// When it was made.
    pub created: Option<Timestamp>,
}

/// All that is looked at.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Namespace of volumes and branches.
    pub namespace: String,
    /// All volumes.
    pub splits: Vec<VolumeSplit>,
    /// All branches.
    pub branches: Vec<Branch>,
    /// PersistentVolumes of this driver.
    pub volumes: Vec<Volume>,
    /// UIDs of all claims.
    pub claims: HashSet<String>,
}

/// The objects were not read.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum ScanError {
    /// Of Kubernetes' own.
    #[snafu(display("cannot list {resource}: {reason}"))]
    List {
        /// Which.
        resource: &'static str,
        /// The server's words.
        reason: String,
    },
    /// Of the store.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why.
        source: StoreError,
    },
}

/// Reads all that is looked at. What refers is read before what it refers to, so that an object that is made meanwhile is
/// not missed by what needs it.
///
/// # Errors
/// [`ScanError`].
pub async fn read(client: &Client, store: &dyn Store, namespace: &str) -> Result<Seen, ScanError> {
    let failed = |resource| move |e: kube::Error| ScanError::List { resource, reason: said(&e) };
    let branches = store.branches().list(&Selector::All).await?;
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let found = volumes.list(&ListParams::default()).await.map_err(failed("persistentvolumes"))?;
    let mut seen = Seen { namespace: namespace.to_owned(), branches, ..Seen::default() };
    seen.volumes.extend(found.items.into_iter().filter_map(volume));
    seen.splits = store.splits().list(&Selector::All).await?;
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let found =
        claims.list_metadata(&ListParams::default()).await.map_err(failed("persistentvolumeclaims"))?;
    seen.claims = found.items.into_iter().filter_map(|claim| claim.metadata.uid).collect();
    // A claim may have got its PersistentVolume since the first look.
    let found = volumes.list(&ListParams::default()).await.map_err(failed("persistentvolumes"))?;
    let later = found.items.into_iter().filter_map(volume);
    let splits: HashSet<String> = seen.splits.iter().map(|s| s.meta.name.clone()).collect();
    seen.volumes.extend(later.filter(|v| splits.contains(&v.handle)));
    Ok(seen)
}

fn volume(volume: PersistentVolume) -> Option<Volume> {
    let csi = volume.spec?.csi.filter(|csi| csi.driver == DRIVER)?;
    Some(Volume {
        name: volume.metadata.name?,
        handle: csi.volume_handle,
        created: volume.metadata.creation_timestamp.map(|at| at.0),
    })
}

/// The orphans, by kind and name.
#[must_use]
pub fn orphans(seen: &Seen, now: Timestamp) -> Vec<Orphan> {
    let splits: HashSet<&str> = seen.splits.iter().map(|s| s.meta.name.as_str()).collect();
    let handles: HashSet<&str> = seen.volumes.iter().map(|v| v.handle.as_str()).collect();
    let namespace = &seen.namespace;
    let mut found = BTreeSet::new();
    for branch in seen.branches.iter().filter(|b| !splits.contains(b.spec.volume.as_str())) {
        let name = branch.meta.name.clone();
        let remedy = format!("kubectl -n {namespace} delete branch {name}");
        found.insert(Orphan { kind: OrphanKind::Branch, name, created: branch.meta.created, remedy });
    }
    for split in seen.splits.iter().filter(|s| !handles.contains(s.meta.name.as_str())) {
        let Some(kind) = unneeded(split, &seen.claims, now) else { continue };
        let name = split.meta.name.clone();
        let remedy = format!("kubectl -n {namespace} delete volumesplit {name}");
        found.insert(Orphan { kind, name, created: split.meta.created, remedy });
    }
    for volume in seen.volumes.iter().filter(|v| !splits.contains(v.handle.as_str())) {
        let (name, created) = (volume.name.clone(), volume.created);
        let remedy = format!("kubectl delete pv {name}");
        found.insert(Orphan { kind: OrphanKind::PersistentVolume, name, created, remedy });
    }
    found.into_iter().collect()
}

/// What a volume without PersistentVolume is, where it is an orphan.
fn unneeded(split: &VolumeSplit, claims: &HashSet<String>, now: Timestamp) -> Option<OrphanKind> {
    if split.meta.deleting.is_some() {
        return None;
    }
    if split.meta.labels.contains_key(LABEL_RETAINED) {
        return Some(OrphanKind::Retained);
    }
    let claim = split.meta.labels.get(LABEL_CLAIM)?;
    let age = Duration::try_from(now.duration_since(split.meta.created?)).unwrap_or_default();
    (!claims.contains(claim) && age >= ON_ITS_WAY).then_some(OrphanKind::Volume)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::contract;
    use crate::store::object::Meta;

    fn split(name: &str, age_minutes: i64, labels: &[(&str, &str)]) -> VolumeSplit {
        let spec = serde_json::json!({
            "volume": name, "requestName": name, "capacity": 1, "accessModes": ["SingleNodeWriter"],
        });
        let mut meta = Meta::with_finalizer(name);
        meta.created = Some(Timestamp::from_second(-age_minutes * 60).unwrap());
        meta.labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        VolumeSplit { meta, spec: serde_json::from_value(spec).unwrap(), status: Default::default() }
    }

    #[test]
    fn only_what_nothing_needs_is_told_each_with_its_command() {
        let claim = |uid| (LABEL_CLAIM, uid);
        let pv =
            |name: &str, handle: &str| Volume { name: name.into(), handle: handle.into(), created: None };
        let mut going = split("going", 99, &[claim("x")]);
        going.meta.deleting = Some(Timestamp::UNIX_EPOCH);
        let seen = Seen {
            namespace: "union".into(),
            splits: vec![
                split("asked", 99, &[claim("uid")]),
                split("by-hand", 99, &[]),
                going,
                split("has-pv", 99, &[claim("x")]),
                split("kept", 1, &[claim("x"), (LABEL_RETAINED, "true")]),
                split("left", 60, &[claim("x")]),
                split("young", 59, &[claim("x")]),
            ],
            branches: vec![contract::branch("gone", 0, "n1")],
            volumes: vec![pv("pv-1", "has-pv"), pv("pv-2", "nothing")],
            claims: ["uid".to_owned()].into(),
        };
        let found = orphans(&seen, Timestamp::UNIX_EPOCH);
        let told: Vec<_> = found.iter().map(|o| (o.kind, o.remedy.as_str())).collect();
        let branch = format!("kubectl -n union delete branch {}", seen.branches[0].meta.name);
        assert_eq!(
            told,
            [
                (OrphanKind::Branch, branch.as_str()),
                (OrphanKind::Volume, "kubectl -n union delete volumesplit left"),
                (OrphanKind::Retained, "kubectl -n union delete volumesplit kept"),
                (OrphanKind::PersistentVolume, "kubectl delete pv pv-2"),
            ]
        );
    }
}
