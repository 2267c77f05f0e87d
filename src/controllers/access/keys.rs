//! Keys by which the two nodes of an order prove to each other who they are.
//!
//! The key is made before the order is written, so that whoever acts on the order finds it: that a pair has a key is all that
//! the owner and the consumer need to agree on.

use super::apply::{NoKeySnafu, WriteError};
use crate::domain::access::Access;
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName};
use crate::store::object::{Branch, StorageNode};
use crate::store::view::{authenticates, requires_authentication};
use crate::store::{Pair, Selector, Store, StoreError};

/// Makes the owner of the branch and the node that the order gives it to a key, where both can use one.
///
/// A pair that has branches open without a key gets none before they are closed: what is attached without one could not be
/// attached again after the owner knows one, because its kernel keeps it for the node, not for the branch.
///
/// # Errors
/// Those of the store, and [`WriteError::NoKey`] where the volume's class requires a key and there is none. The order is not to
/// be written then.
pub(super) async fn ensure_key(store: &dyn Store, branch: &Branch, order: &Access) -> Result<(), WriteError> {
    let owner = &branch.spec.node;
    let Some(consumer) = order.consumer.as_ref().filter(|node| *node != owner) else { return Ok(()) };
    let pair = Pair { owner: owner.clone(), consumer: consumer.clone() };
    let Err(lack) = keyed(store, branch, &pair).await? else { return Ok(()) };
    let split = store.splits().get(branch.spec.volume.as_str()).await?;
    if split.is_some_and(|split| requires_authentication(&split)) {
        return NoKeySnafu { pair, reason: lack.to_string() }.fail();
    }
    if let Lack::Open(open) = lack {
        tracing::warn!(
            branch.id = %branch.spec.id, node.owner = %owner, node.consumer = %consumer, open = %open,
            "the nodes can prove to each other who they are, and get a key when no branch is open between them without one"
        );
    }
    Ok(())
}

/// Why two nodes have no key.
enum Lack {
    /// The transport knows none.
    Transport,
    /// This node cannot use one.
    Node(NodeName),
    /// A branch is open between them without.
    Open(BranchId),
    /// The store keeps none.
    Store,
}

impl std::fmt::Display for Lack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Transport => {
                f.write_str("directories go over NFS, which knows none: use branchFormat image")
            }
            Self::Node(node) => write!(f, "node {node} cannot use one, as its StorageNode tells"),
            Self::Open(branch) => {
                write!(f, "branch {branch} is open between them without one: detach its volume first")
            }
            Self::Store => f.write_str("this store keeps none"),
        }
    }
}

/// Sees to it that the pair has a key; where it has none, why.
async fn keyed(store: &dyn Store, branch: &Branch, pair: &Pair) -> Result<Result<(), Lack>, StoreError> {
    if Transport::between_nodes(branch.spec.format) != Transport::NvmeTcp {
        return Ok(Err(Lack::Transport));
    }
    let nodes = store.nodes();
    let able = |node: &StorageNode| authenticates(node, Transport::NvmeTcp);
    let Some(owner) = nodes.get(pair.owner.as_str()).await?.filter(able) else {
        return Ok(Err(Lack::Node(pair.owner.clone())));
    };
    if !nodes.get(pair.consumer.as_str()).await?.is_some_and(|node| able(&node)) {
        return Ok(Err(Lack::Node(pair.consumer.clone())));
    }
    if store.keys().get(pair).await?.is_some() {
        return Ok(Ok(()));
    }
    let others = store.branches().list(&Selector::Node(pair.owner.clone())).await?;
    let mut others = others.into_iter().filter(|other| other.meta.name != branch.meta.name);
    if let Some(open) = others.find(|other| is_open(other, &pair.consumer)) {
        return Ok(Err(Lack::Open(open.spec.id)));
    }
    if !store.keys().ensure(pair, &owner).await? {
        return Ok(Err(Lack::Store));
    }
    tracing::info!(node.owner = %pair.owner, node.consumer = %pair.consumer, "two nodes share a key from now on");
    Ok(Ok(()))
}

/// Whether the branch is, or may still be, open to the node over NVMe.
fn is_open(branch: &Branch, node: &NodeName) -> bool {
    let allowed = branch.status.export.as_ref().map(|export| &export.allowed);
    let named = |access: Option<&Access>| access.is_some_and(|access| access.consumer.as_ref() == Some(node));
    Transport::between_nodes(branch.spec.format) == Transport::NvmeTcp
        && (named(branch.spec.access.as_ref()) || named(allowed))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use async_trait::async_trait;

    use super::*;
    use crate::domain::Secret;
    use crate::domain::access::Epoch;
    use crate::domain::split::BranchFormat;
    use crate::store::keys::generate;
    use crate::store::local::LocalStore;
    use crate::store::object::{StorageNode, VolumeSplit};
    use crate::store::{Collection, Keys, contract};

    /// An embedded store that keeps keys.
    struct Keyed {
        inner: LocalStore,
        keys: Kept,
        _directory: tempfile::TempDir,
    }

    #[derive(Default)]
    struct Kept(Mutex<BTreeMap<Pair, Secret>>);

    #[async_trait]
    impl Keys for Kept {
        async fn get(&self, pair: &Pair) -> Result<Option<Secret>, StoreError> {
            Ok(self.0.lock().unwrap().get(pair).cloned())
        }
        async fn ensure(&self, pair: &Pair, owner: &StorageNode) -> Result<bool, StoreError> {
            assert_eq!(pair.owner, owner.spec.node);
            self.0.lock().unwrap().entry(pair.clone()).or_insert_with(generate);
            Ok(true)
        }
        async fn remove(&self, pair: &Pair) -> Result<bool, StoreError> {
            Ok(self.0.lock().unwrap().remove(pair).is_some())
        }
    }

    impl Store for Keyed {
        fn splits(&self) -> &dyn Collection<VolumeSplit> {
            self.inner.splits()
        }
        fn branches(&self) -> &dyn Collection<Branch> {
            self.inner.branches()
        }
        fn nodes(&self) -> &dyn Collection<StorageNode> {
            self.inner.nodes()
        }
        fn keys(&self) -> &dyn Keys {
            &self.keys
        }
    }

    impl Keyed {
        /// Nodes that can authenticate, or not.
        async fn new(nodes: &[(&str, bool)]) -> Self {
            let directory = tempfile::Builder::new().prefix("union-csi-keys-").tempdir().unwrap();
            let inner = LocalStore::open(&directory.path().join("store.redb")).unwrap();
            for (name, able) in nodes {
                let ability = serde_json::json!({ "able": able });
                let object: StorageNode = serde_json::from_value(serde_json::json!({
                    "meta": {"name": name}, "spec": {"node": name},
                    "status": {"transports": [
                        {"transport": "nvme-tcp", "owner": ability, "consumer": ability, "authentication": ability}
                    ]}
                }))
                .unwrap();
                let made = inner.nodes().create(object.clone()).await.unwrap();
                let status = object.status;
                inner.nodes().update_status(StorageNode { status, ..made }).await.unwrap();
            }
            Self { inner, keys: Kept::default(), _directory: directory }
        }

        /// What comes of giving a branch of `owner` to `consumer`.
        async fn keyed(&self, branch: &Branch, consumer: &str) -> bool {
            let access = Access { consumer: Some(consumer.parse().unwrap()), epoch: Epoch(2) };
            ensure_key(self, branch, &access).await.unwrap();
            !self.keys.0.lock().unwrap().is_empty()
        }
    }

    fn image(owner: &str) -> Branch {
        let mut branch = contract::branch("v", 0, owner);
        branch.spec.format = BranchFormat::Image;
        branch
    }

    #[tokio::test]
    async fn two_nodes_that_both_can_share_a_key_before_one_gets_a_branch_of_the_other() {
        let store = Keyed::new(&[("a", true), ("b", true), ("old", false)]).await;
        assert!(!store.keyed(&image("a"), "a").await, "at home nobody is asked");
        assert!(!store.keyed(&image("a"), "old").await);
        assert!(!store.keyed(&image("old"), "b").await);
        assert!(!store.keyed(&image("gone"), "b").await);
        let mut directory = image("a");
        directory.spec.format = BranchFormat::Directory;
        assert!(!store.keyed(&directory, "b").await, "NFS knows no keys");
        assert!(store.keyed(&image("a"), "b").await);
        let pair = Pair { owner: "a".parse().unwrap(), consumer: "b".parse().unwrap() };
        let first = store.keys.get(&pair).await.unwrap();
        store.keyed(&image("a"), "b").await;
        assert_eq!(store.keys.get(&pair).await.unwrap(), first, "one key for all branches between them");
        let split: VolumeSplit = serde_json::from_value(serde_json::json!({
            "meta": {"name": "v"}, "spec": {"volume": "v", "requestName": "v", "capacity": 1, "accessModes": [],
                "parameters": {"authentication": "required"}}
        }))
        .unwrap();
        store.splits().create(split).await.unwrap();
        let refused = async |branch: &Branch, consumer: &str| {
            let access = Access { consumer: Some(consumer.parse().unwrap()), epoch: Epoch(2) };
            ensure_key(&store, branch, &access).await.err().map(|error| error.to_string())
        };
        assert_eq!(refused(&image("a"), "b").await, None);
        assert_eq!(refused(&image("old"), "old").await, None, "at home there is nobody to be asked");
        let said = refused(&image("a"), "old").await.unwrap();
        assert!(said.contains("node old cannot use one") && said.contains("requires"), "{said}");
        assert!(refused(&directory, "b").await.unwrap().contains("NFS"));
        let none = Access { consumer: None, epoch: Epoch(3) };
        ensure_key(&store, &image("old"), &none).await.unwrap();
    }

    #[tokio::test]
    async fn a_pair_with_a_branch_open_without_a_key_gets_one_when_that_is_closed() {
        let store = Keyed::new(&[("a", true), ("b", true)]).await;
        let mut open = contract::branch("w", 0, "a");
        open.spec.format = BranchFormat::Image;
        open.spec.access = Some(Access { consumer: Some("b".parse().unwrap()), epoch: Epoch(2) });
        let mut open = store.branches().create(open).await.unwrap();
        assert!(!store.keyed(&image("a"), "b").await);
        open.spec.access = Some(Access { consumer: None, epoch: Epoch(3) });
        store.branches().update(open).await.unwrap();
        assert!(store.keyed(&image("a"), "b").await);
    }
}
