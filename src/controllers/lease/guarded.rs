//! A store that is written to only while the claim is held.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;

use super::claim::Claim;
use crate::domain::Secret;
use crate::store::object::{Branch, Object, StorageNode, Version, VolumeSplit};
use crate::store::{Collection, Event, Keys, Pair, Selector, Store, StoreError};

/// The store of a leader: reads pass, writes are refused from the moment that the claim is not held.
pub struct Guarded {
    splits: Checked<VolumeSplit>,
    branches: Checked<Branch>,
    nodes: Checked<StorageNode>,
    keys: CheckedKeys,
}

impl Guarded {
    /// `store`, written to while `claim` is held.
    #[must_use]
    pub fn new(store: &Arc<dyn Store>, claim: &Claim) -> Self {
        Self {
            splits: Checked::new(store, claim, |store| store.splits()),
            branches: Checked::new(store, claim, |store| store.branches()),
            nodes: Checked::new(store, claim, |store| store.nodes()),
            keys: CheckedKeys { store: store.clone(), claim: claim.clone() },
        }
    }
}

impl Store for Guarded {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }

    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }

    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }

    fn keys(&self) -> &dyn Keys {
        &self.keys
    }
}

struct CheckedKeys {
    store: Arc<dyn Store>,
    claim: Claim,
}

impl CheckedKeys {
    fn check(&self, verb: &str, pair: &Pair) -> Result<(), StoreError> {
        self.claim.held().map_err(|source| StoreError::Backend {
            action: format!("{verb} the key for {pair}"),
            source: Box::new(source),
        })
    }
}

#[async_trait]
impl Keys for CheckedKeys {
    async fn get(&self, pair: &Pair) -> Result<Option<Secret>, StoreError> {
        self.store.keys().get(pair).await
    }

    async fn ensure(&self, pair: &Pair, owner: &StorageNode) -> Result<bool, StoreError> {
        self.check("make", pair)?;
        self.store.keys().ensure(pair, owner).await
    }

    async fn remove(&self, pair: &Pair) -> Result<bool, StoreError> {
        self.check("remove", pair)?;
        self.store.keys().remove(pair).await
    }
}

struct Checked<T> {
    store: Arc<dyn Store>,
    claim: Claim,
    of: fn(&dyn Store) -> &dyn Collection<T>,
}

impl<T: Object> Checked<T> {
    fn new(store: &Arc<dyn Store>, claim: &Claim, of: fn(&dyn Store) -> &dyn Collection<T>) -> Self {
        Self { store: store.clone(), claim: claim.clone(), of }
    }

    fn inner(&self) -> &dyn Collection<T> {
        (self.of)(&*self.store)
    }

    fn check(&self, verb: &str, name: &str) -> Result<(), StoreError> {
        self.claim.held().map_err(|source| StoreError::Backend {
            action: format!("{verb} {} {name}", T::KIND),
            source: Box::new(source),
        })
    }
}

#[async_trait]
impl<T: Object> Collection<T> for Checked<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        self.inner().get(name).await
    }

    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        self.inner().list(selector).await
    }

    async fn create(&self, object: T) -> Result<T, StoreError> {
        self.check("create", &object.meta().name)?;
        self.inner().create(object).await
    }

    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.check("update", &object.meta().name)?;
        self.inner().update(object).await
    }

    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.check("update the status of", &object.meta().name)?;
        self.inner().update_status(object).await
    }

    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        self.check("delete", name)?;
        self.inner().delete(name, version).await
    }

    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        self.inner().watch(selector).await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::watch;
    use tokio::time::Instant;

    use super::*;
    use crate::store::local::LocalStore;
    use crate::store::object::{Meta, StorageNodeSpec};

    fn node(name: &str) -> StorageNode {
        StorageNode {
            meta: Meta::new(name),
            spec: StorageNodeSpec { node: name.parse().unwrap() },
            status: Default::default(),
        }
    }

    #[tokio::test]
    async fn writes_are_refused_when_the_claim_is_lost_and_reads_pass() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
        let (send, receive) = watch::channel(Some(Instant::now() + Duration::from_secs(3600)));
        let guarded = Guarded::new(&store, &Claim::until(receive));
        let made = guarded.nodes().create(node("n")).await.unwrap();

        let pair = Pair { owner: "n".parse().unwrap(), consumer: "m".parse().unwrap() };
        send.send_replace(None);
        let refused = [
            guarded.nodes().create(node("m")).await.unwrap_err(),
            guarded.nodes().update(made.clone()).await.unwrap_err(),
            guarded.nodes().update_status(made.clone()).await.unwrap_err(),
            guarded.nodes().delete("n", None).await.unwrap_err(),
            guarded.keys().ensure(&pair, &made).await.unwrap_err(),
            guarded.keys().remove(&pair).await.unwrap_err(),
        ];
        for error in refused {
            assert!(error.to_string().contains("does not lead"), "{error}");
        }
        assert_eq!(guarded.nodes().list(&Selector::All).await.unwrap(), std::slice::from_ref(&made));
        assert_eq!(guarded.nodes().get("n").await.unwrap(), Some(made));
        assert_eq!(store.nodes().list(&Selector::All).await.unwrap().len(), 1, "nothing was written");
    }
}
