//! Does the writes that were decided on.

use std::sync::Arc;

use futures::future::join_all;

use super::decide::Action;
use crate::store::object::{Branch, FINALIZER, Version, VolumeSplit};
use crate::store::{Selector, Store, StoreError};

/// What came of a volume's writes.
pub(super) struct Applied {
    pub(super) volume: String,
    /// The version that was decided on.
    pub(super) base: Version,
    pub(super) written: Vec<Written>,
    pub(super) error: Option<StoreError>,
    /// The volume as it is, read after an error; `None` where it could not be read.
    pub(super) read: Option<Option<VolumeSplit>>,
}

/// What one write left.
pub(super) enum Written {
    Split(Box<VolumeSplit>),
    Branch(Box<Branch>),
    /// The branch of this name is on its way out, or gone.
    Going(String),
    Nothing,
}

/// Does them all, side by side.
pub(super) async fn apply(store: Arc<dyn Store>, split: VolumeSplit, actions: Vec<Action>) -> Applied {
    let (volume, base) = (split.meta.name.clone(), split.meta.version.clone());
    let results = join_all(actions.into_iter().map(|action| write(&*store, &split, action))).await;
    let (mut written, mut error) = (Vec::new(), None);
    for result in results {
        match result {
            Ok(one) => written.push(one),
            Err(e) => error = Some(e),
        }
    }
    let read = match &error {
        Some(_) => store.splits().get(&volume).await.ok(),
        None => None,
    };
    Applied { volume, base, written, error, read }
}

async fn write(store: &dyn Store, split: &VolumeSplit, action: Action) -> Result<Written, StoreError> {
    let mut split = split.clone();
    match action {
        Action::SetPlan { branches, next_index } => {
            split.spec.branches = branches;
            split.spec.next_index = next_index;
            Ok(Written::Split(Box::new(store.splits().update(split).await?)))
        }
        Action::SetStatus(status) => {
            split.status = status;
            Ok(Written::Split(Box::new(store.splits().update_status(split).await?)))
        }
        Action::CreateBranch(branch) => {
            let name = branch.meta.name.clone();
            match store.branches().create(*branch).await {
                Ok(branch) => Ok(Written::Branch(Box::new(branch))),
                // Made before a crash, or by another leader: its event tells.
                Err(StoreError::Exists { .. }) => match store.branches().get(&name).await? {
                    Some(branch) => Ok(Written::Branch(Box::new(branch))),
                    None => Ok(Written::Nothing),
                },
                Err(e) => Err(e),
            }
        }
        Action::DeleteBranch { name, version } => {
            store.branches().delete(&name, version).await?;
            Ok(Written::Going(name))
        }
        Action::RemoveFinalizer => {
            // The picture may lack a branch whose creation was answered with an error and took place.
            if !store.branches().list(&Selector::Volume(split.spec.volume.clone())).await?.is_empty() {
                let name = split.meta.name;
                return Err(StoreError::Conflict { kind: "VolumeSplit", name });
            }
            split.meta.finalizers.retain(|f| f != FINALIZER);
            // Without its finalizer it is not looked at again until its event tells that it is gone.
            Ok(Written::Split(Box::new(store.splits().update(split).await?)))
        }
    }
}
