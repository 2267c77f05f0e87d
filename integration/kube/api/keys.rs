//! Keys that pairs of nodes share, as Secrets on a real API server.

use k8s_openapi::api::core::v1::Secret;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{Meta, StorageNode, StorageNodeSpec};
use union_csi::store::{Pair, Store, StoreError};

use crate::support;

struct Bench {
    secrets: Api<Secret>,
    store: KubernetesStore,
    owner: StorageNode,
}

impl Bench {
    async fn new() -> Self {
        let client: Client = support::client().await;
        support::definitions(&client).await;
        let namespace = support::namespace(&client).await;
        let store = KubernetesStore::new(client.clone(), &namespace, "union-csi");
        // Nodes are the whole cluster's: the namespace's name makes them this test's.
        let node = StorageNode {
            meta: Meta::new(format!("a.{namespace}")),
            spec: StorageNodeSpec { node: format!("a.{namespace}").parse().expect("a name") },
            status: Default::default(),
        };
        let owner = store.nodes().create(node).await.expect("a node");
        Self { secrets: Api::namespaced(client, &namespace), store, owner }
    }

    fn pair(&self, consumer: &str) -> Pair {
        Pair { owner: self.owner.spec.node.clone(), consumer: consumer.parse().expect("a name") }
    }

    async fn all(&self) -> Vec<Secret> {
        self.secrets.list(&ListParams::default()).await.expect("secrets").items
    }

    async fn end(self) {
        self.store.nodes().delete(&self.owner.meta.name, None).await.expect("deleted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_has_one_key_whoever_makes_it_and_another_after_it_was_taken_away() {
    let bench = Bench::new().await;
    let (keys, pair) = (bench.store.keys(), bench.pair("b"));
    assert_eq!(keys.get(&pair).await.expect("asked"), None);
    let makers = (0..8).map(|_| keys.ensure(&pair, &bench.owner));
    for made in futures::future::join_all(makers).await {
        assert!(made.expect("made or found"));
    }
    let first = keys.get(&pair).await.expect("asked").expect("a key");
    assert!(first.tls().is_some());

    let secrets = bench.all().await;
    let [secret] = &secrets[..] else { panic!("{} Secrets", secrets.len()) };
    let owners = secret.metadata.owner_references.as_ref().expect("it goes with its owner");
    assert_eq!((owners[0].kind.as_str(), &owners[0].uid), ("StorageNode", &bench.owner.meta.uid));
    let name = secret.metadata.name.as_deref().expect("a name");
    let changed = json!({"data": {"key": "eA=="}});
    let refused = bench.secrets.patch(name, &PatchParams::default(), &Patch::Merge(changed)).await;
    assert!(refused.is_err(), "a key is never changed in its place");

    assert!(keys.remove(&pair).await.expect("removed"));
    assert!(!keys.remove(&pair).await.expect("twice"));
    assert!(keys.ensure(&pair, &bench.owner).await.expect("made again"));
    assert_ne!(keys.get(&pair).await.expect("asked"), Some(first));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_someone_else_put_in_its_place_is_refused_and_left_alone() {
    let bench = Bench::new().await;
    let (keys, pair) = (bench.store.keys(), bench.pair("b"));
    assert!(keys.ensure(&pair, &bench.owner).await.expect("made"));
    let mut secret = bench.all().await.remove(0);
    let name = secret.metadata.name.clone().expect("a name");
    bench.secrets.delete(&name, &Default::default()).await.expect("deleted");
    secret.metadata =
        kube::core::ObjectMeta { name: Some(name.clone()), ..kube::core::ObjectMeta::default() };
    secret.type_ = Some("Opaque".to_owned());
    let theirs = bench.secrets.create(&Default::default(), &secret).await.expect("made");
    for result in [keys.get(&pair).await.map(drop), keys.ensure(&pair, &bench.owner).await.map(drop)] {
        let error = result.expect_err("it is not ours");
        assert!(matches!(error, StoreError::Malformed { .. }), "{error}");
        assert!(error.to_string().contains(&name) && error.to_string().contains("delete it"), "{error}");
    }
    assert_eq!(bench.all().await, [theirs]);
    bench.end().await;
}
