//! Keys by which the two nodes of an order prove to each other who they are.
//!
//! The key is made before the order is written, so that whoever acts on the order finds it: that a pair has a key is all that
//! the owner and the consumer need to agree on.

use super::apply::{NoKeySnafu, WriteError};
use crate::domain::access::Access;
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName};
use crate::store::object::{Branch, StorageNode};
use crate::store::view::{authenticates, encrypts, requires_authentication, requires_encryption};
use crate::store::{Pair, Selector, Store, StoreError};

/// Makes the owner of the branch and the node that the order gives it to a key, where both can use one.
///
/// A pair that has branches open without a key gets none before they are closed: what is attached without one could not be
/// attached again after the owner knows one, because its kernel keeps it for the node, not for the branch.
///
/// A key that a program of before made has no part for encryption. Where that is required it is taken away and made anew, also
/// only while no other branch is open between the two.
///
/// # Errors
/// Those of the store, and [`WriteError::NoKey`] where the volume's class requires a key and there is none. The order is not to
/// be written then.
pub(super) async fn ensure_key(store: &dyn Store, branch: &Branch, order: &Access) -> Result<(), WriteError> {
    let owner = &branch.spec.node;
    let Some(consumer) = order.consumer.as_ref().filter(|node| *node != owner) else { return Ok(()) };
    let pair = Pair { owner: owner.clone(), consumer: consumer.clone() };
    let split = store.splits().get(branch.spec.volume.as_str()).await?;
    let encrypted = branch.spec.encrypted || split.as_ref().is_some_and(requires_encryption);
    let Err(lack) = keyed(store, branch, &pair, encrypted).await? else { return Ok(()) };
    if encrypted || split.is_some_and(|split| requires_authentication(&split)) {
        let what = if encrypted { "encryption" } else { "authentication" };
        return NoKeySnafu { pair, what, reason: lack.to_string() }.fail();
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
    /// This node cannot encrypt.
    Plain(NodeName),
    /// A branch is open between them without.
    Open(BranchId),
    /// A branch is open between them with one that is for authentication only.
    Old(BranchId),
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
            Self::Plain(node) => write!(f, "node {node} cannot encrypt, as its StorageNode tells"),
            Self::Open(branch) => {
                write!(f, "branch {branch} is open between them without one: detach its volume first")
            }
            Self::Old(branch) => write!(
                f,
                "theirs is of a version that did not encrypt, and branch {branch} is open between them with it: detach its \
                 volume first"
            ),
            Self::Store => f.write_str("this store keeps none"),
        }
    }
}

/// Sees to it that the pair has a key; where it has none, why.
async fn keyed(
    store: &dyn Store,
    branch: &Branch,
    pair: &Pair,
    encrypted: bool,
) -> Result<Result<(), Lack>, StoreError> {
    if Transport::between_nodes(branch.spec.format) != Transport::NvmeTcp {
        return Ok(Err(Lack::Transport));
    }
    let nodes = store.nodes();
    let able = |node: &StorageNode| authenticates(node, Transport::NvmeTcp);
    let Some(owner) = nodes.get(pair.owner.as_str()).await?.filter(able) else {
        return Ok(Err(Lack::Node(pair.owner.clone())));
    };
    let Some(consumer) = nodes.get(pair.consumer.as_str()).await?.filter(able) else {
        return Ok(Err(Lack::Node(pair.consumer.clone())));
    };
    if let Some(node) =
        [&owner, &consumer].into_iter().find(|n| encrypted && !encrypts(n, Transport::NvmeTcp))
    {
        return Ok(Err(Lack::Plain(node.spec.node.clone())));
    }
    let known = store.keys().get(pair).await?;
    if known.as_ref().is_some_and(|key| !encrypted || key.tls().is_some()) {
        return Ok(Ok(()));
    }
    let others = store.branches().list(&Selector::Node(pair.owner.clone())).await?;
    let mut others = others.into_iter().filter(|other| other.meta.name != branch.meta.name);
    if let Some(open) = others.find(|other| is_open(other, &pair.consumer)) {
        return Ok(Err(if known.is_some() { Lack::Old(open.spec.id) } else { Lack::Open(open.spec.id) }));
    }
    if known.is_some() {
        store.keys().remove(pair).await?;
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
                        {"transport": "nvme-tcp", "owner": ability, "consumer": ability, "authentication": ability,
                         "encryption": {"able": *able && *name != "plain"}}
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
    async fn where_encryption_is_required_a_key_of_before_is_made_anew_while_nothing_is_open_with_it() {
        let store = Keyed::new(&[("a", true), ("b", true), ("plain", true)]).await;
        let pair = Pair { owner: "a".parse().unwrap(), consumer: "b".parse().unwrap() };
        let old = generate().without_tls();
        store.keys.0.lock().unwrap().insert(pair.clone(), old.clone());
        let key = async || store.keys.get(&pair).await.unwrap().unwrap();
        let ensured = async |branch: &Branch, consumer: &str| {
            let access = Access { consumer: Some(consumer.parse().unwrap()), epoch: Epoch(2) };
            ensure_key(&store, branch, &access).await.map_err(|error| error.to_string())
        };
        ensured(&image("a"), "b").await.unwrap();
        assert!(key().await == old, "what is not encrypted goes on with it");
        let mut encrypted = image("a");
        encrypted.spec.encrypted = true;
        let said = ensured(&encrypted, "plain").await.unwrap_err();
        assert!(said.contains("requires encryption") && said.contains("node plain cannot encrypt"), "{said}");
        let mut open = contract::branch("w", 0, "a");
        open.spec.format = BranchFormat::Image;
        open.spec.access = Some(Access { consumer: Some("b".parse().unwrap()), epoch: Epoch(2) });
        let mut open = store.branches().create(open).await.unwrap();
        let said = ensured(&encrypted, "b").await.unwrap_err();
        assert!(said.contains("did not encrypt") && said.contains("detach"), "{said}");
        assert!(key().await == old);
        open.spec.access = Some(Access { consumer: None, epoch: Epoch(3) });
        store.branches().update(open).await.unwrap();
        ensured(&encrypted, "b").await.unwrap();
        let new = key().await;
        assert!(new != old && new.tls().is_some());
        ensured(&encrypted, "b").await.unwrap();
        assert!(key().await == new);
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
