//! Reads what the scan looks at.

use std::collections::HashMap;

use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use kube::api::{ListParams, ObjectList};
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use snafu::Snafu;

use super::scan::{Orphan, OrphanKind, Seen, Volume};
use crate::controllers::cluster::{DRIVER, said};
use crate::store::{Selector, Store, StoreError};

/// Objects a page: one of PersistentVolumes stays below a few MiB.
const PAGE: u32 = 500;

/// How often a list is begun anew where the API server forgot its continuation in the middle.
const LISTS: u32 = 3;

/// The objects were not read.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum ScanError {
    /// Of Kubernetes' own.
    #[snafu(display("cannot read {resource}: {reason}"))]
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

/// Reads all that is looked at, each kind once. What refers is read before what it refers to, so that an object that is made
/// meanwhile is not missed by what needs it; what goes meanwhile is for [`confirmed`].
///
/// # Errors
/// [`ScanError`].
pub async fn read(client: &Client, store: &dyn Store, namespace: &str) -> Result<Seen, ScanError> {
    let branches = store.branches().list(&Selector::All).await?;
    let nodes = store.nodes().list(&Selector::All).await?;
    let mut seen = Seen { namespace: namespace.to_owned(), branches, nodes, ..Seen::default() };
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let list = move |parameters: ListParams| -> Page<PersistentVolume> {
        let volumes = volumes.clone();
        Box::pin(async move { volumes.list(&parameters).await })
    };
    seen.volumes = pages("persistentvolumes", list, volume).await?;
    let claims: Api<PersistentVolumeClaim> = Api::all(client.clone());
    let list = move |parameters: ListParams| -> Page<PartialObjectMeta<PersistentVolumeClaim>> {
        let claims = claims.clone();
        Box::pin(async move { claims.list_metadata(&parameters).await })
    };
    let uids = pages("persistentvolumeclaims", list, |claim| claim.metadata.uid).await?;
    seen.claims = uids.into_iter().collect();
    seen.splits = store.splits().list(&Selector::All).await?;
    Ok(seen)
}

/// A page that is being read.
type Page<K> = BoxFuture<'static, kube::Result<ObjectList<K>>>;

/// What `keep` keeps of each object, page by page.
async fn pages<K: Clone + DeserializeOwned, T>(
    resource: &'static str,
    list: impl Fn(ListParams) -> Page<K>,
    keep: impl Fn(K) -> Option<T>,
) -> Result<Vec<T>, ScanError> {
    let (mut kept, mut rest, mut begun) = (Vec::new(), None::<String>, 1);
    loop {
        let mut parameters = ListParams::default().limit(PAGE);
        parameters.continue_token = rest.take();
        match list(parameters).await {
            Ok(page) => {
                kept.extend(page.items.into_iter().filter_map(&keep));
                rest = page.metadata.continue_.filter(|token| !token.is_empty());
                if rest.is_none() {
                    return Ok(kept);
                }
            }
            Err(kube::Error::Api(status)) if status.code == 410 && begun < LISTS => {
                begun += 1;
                kept.clear();
            }
            Err(e) => return Err(ScanError::List { resource, reason: said(&e) }),
        }
    }
}

fn volume(volume: PersistentVolume) -> Option<Volume> {
    let spec = volume.spec?;
    let csi = spec.csi.filter(|csi| csi.driver == DRIVER)?;
    let claim = spec.claim_ref.and_then(|claim| Some((claim.namespace?, claim.name?, claim.uid?)));
    Some(Volume {
        name: volume.metadata.name?,
        handle: csi.volume_handle,
        created: volume.metadata.creation_timestamp.map(|at| at.0),
        deleting: volume.metadata.deletion_timestamp.is_some(),
        size: spec.capacity.and_then(|all| all.get("storage")?.0.parse().ok()),
        claim,
    })
}

/// Those of `found` that are still so when each is looked at by itself: what went in the ordinary way while the lists were
/// read is left out, and so is what needs an object that is there and cannot be understood, which lists leave out. Those
/// that were `told` before are not looked at again.
///
/// # Errors
/// [`ScanError`].
pub async fn confirmed(
    client: &Client,
    store: &dyn Store,
    found: Vec<Orphan>,
    told: &HashMap<(OrphanKind, String), Timestamp>,
) -> Result<Vec<Orphan>, ScanError> {
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let mut kept = Vec::with_capacity(found.len());
    // One after the other: there are few, and nobody waits.
    for orphan in found {
        if told.contains_key(&orphan.key()) || still(&orphan, &volumes, store).await? {
            kept.push(orphan);
        }
    }
    Ok(kept)
}

async fn still(
    orphan: &Orphan,
    volumes: &Api<PersistentVolume>,
    store: &dyn Store,
) -> Result<bool, ScanError> {
    let failed = |e: kube::Error| ScanError::List { resource: "persistentvolumes", reason: said(&e) };
    let name = orphan.name.as_str();
    match orphan.kind {
        OrphanKind::Branch => {
            Ok(there(store.branches().get(name).await)? && !there(store.splits().get(&orphan.volume).await)?)
        }
        OrphanKind::PersistentVolume => {
            let found = volumes.get_opt(name).await.map_err(failed)?;
            let stays = found.is_some_and(|volume| volume.metadata.deletion_timestamp.is_none());
            Ok(stays && !there(store.splits().get(&orphan.volume).await)?)
        }
        OrphanKind::Unclaimed => {
            let branch = name.rsplit('/').next().unwrap_or_default();
            Ok(!there(store.branches().get(branch).await)?)
        }
        OrphanKind::Volume | OrphanKind::Retained | OrphanKind::Ephemeral => {
            let split = store.splits().get(name).await;
            let stays = matches!(split, Ok(Some(split)) if split.meta.deleting.is_none());
            Ok(stays && volumes.get_opt(name).await.map_err(failed)?.and_then(volume).is_none())
        }
    }
}

/// Whether it is there, understood or not.
fn there<T>(read: Result<Option<T>, StoreError>) -> Result<bool, ScanError> {
    match read {
        Ok(found) => Ok(found.is_some()),
        Err(StoreError::Malformed { .. }) => Ok(true),
        Err(source) => Err(source.into()),
    }
}
