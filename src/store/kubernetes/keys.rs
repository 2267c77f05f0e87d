//! Keys of pairs of nodes, each a Secret of its own.
//!
//! Only the Secret of a pair is ever asked for, by a name made of both names: agents need no right to list Secrets. It is
//! immutable, and goes with the `StorageNode` of the owner. Neither its text nor what a parser says about it gets into an
//! error.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use http::Request;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::core::params::{DeleteParams, GetParams, PostParams};
use kube::core::request::Request as Requests;
use sha2::{Digest, Sha256};

use super::endpoint::Server;
use super::fault::Ask;
use super::{GROUP, VERSION};
use crate::domain::{NodeName, Secret};
use crate::store::StoreError;
use crate::store::keys::{Keys, Pair, generate};
use crate::store::object::{Object, StorageNode, label_value};

const KIND: &str = "Secret";

/// The type of the Secrets.
const TYPE: &str = "union.io/nvme-chap";

/// Labels, for people and their selectors.
const LABELS: [&str; 2] = ["union.io/owner", "union.io/consumer"];

/// What a Secret holds.
const OWNER: &str = "owner";
/// As [`OWNER`].
const CONSUMER: &str = "consumer";
/// As [`OWNER`].
const KEY: &str = "key";
/// As [`OWNER`]; those that programs of before made lack it.
const TLS: &str = "tls";

/// The Secrets of one namespace.
pub(super) struct KeySecrets {
    server: Arc<Server>,
    requests: Requests,
}

impl KeySecrets {
    pub(super) fn new(server: &Arc<Server>) -> Self {
        let path = format!("/api/v1/namespaces/{}/secrets", server.namespace);
        Self { server: server.clone(), requests: Requests::new(path) }
    }

    fn ask(&self, verb: &'static str, name: &str) -> Ask {
        Ask {
            verb,
            kind: KIND,
            group: "",
            plural: "secrets",
            subresource: "",
            namespace: Some(self.server.namespace.clone()),
            name: name.to_owned(),
        }
    }

    async fn create(&self, pair: &Pair, owner: &StorageNode) -> Result<(), StoreError> {
        let ask = self.ask("create", &name(pair));
        let body =
            serde_json::to_vec(&made(pair, owner, &generate())).map_err(|_| ask.odd(&"it is no JSON"))?;
        let manager = Some(self.server.field_manager.clone());
        let parameters = PostParams { field_manager: manager, ..PostParams::default() };
        let request = self.requests.create(&parameters, body).map_err(|e| ask.odd(&e))?;
        self.send(&ask, request).await.map(drop)
    }

    async fn send(&self, ask: &Ask, request: Request<Vec<u8>>) -> Result<String, StoreError> {
        self.server.send(ask, request).await
    }
}

#[async_trait]
impl Keys for KeySecrets {
    async fn get(&self, pair: &Pair) -> Result<Option<Secret>, StoreError> {
        let name = name(pair);
        let ask = self.ask("get", &name);
        let request = self.requests.get(&name, &GetParams::default()).map_err(|e| ask.odd(&e))?;
        match self.send(&ask, request).await {
            Ok(text) => read(&text, pair).map(Some),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn ensure(&self, pair: &Pair, owner: &StorageNode) -> Result<bool, StoreError> {
        if self.get(pair).await?.is_some() {
            return Ok(true);
        }
        match self.create(pair, owner).await {
            Ok(()) => Ok(true),
            // Another leader, a moment ago.
            Err(StoreError::Exists { .. }) => self.get(pair).await.map(|key| key.is_some()),
            Err(e) => Err(e),
        }
    }

    async fn remove(&self, pair: &Pair) -> Result<bool, StoreError> {
        let name = name(pair);
        let ask = self.ask("delete", &name);
        let request = self.requests.delete(&name, &DeleteParams::background()).map_err(|e| ask.odd(&e))?;
        match self.send(&ask, request).await {
            Ok(_) => Ok(true),
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// The name of a pair's Secret: the names of two nodes can be longer together than a name may be.
pub(super) fn name(pair: &Pair) -> String {
    // No name of a node contains a slash, so no two pairs are spelled alike.
    let digest = Sha256::digest(format!("{}/{}", pair.owner, pair.consumer).as_bytes());
    let digest: String = digest.iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("union-csi-nvme-{digest}")
}

fn made(pair: &Pair, owner: &StorageNode, key: &Secret) -> core::Secret {
    let label = |(key, node): (&str, &NodeName)| (key.to_owned(), label_value(node.as_str()));
    let mut labels: BTreeMap<String, String> =
        LABELS.into_iter().zip([&pair.owner, &pair.consumer]).map(label).collect();
    labels.insert("app.kubernetes.io/name".to_owned(), "union-csi".to_owned());
    let data = [(OWNER, pair.owner.as_str()), (CONSUMER, pair.consumer.as_str()), (KEY, key.chap())];
    let data = data.into_iter().chain(key.tls().map(|tls| (TLS, tls)));
    core::Secret {
        metadata: ObjectMeta {
            name: Some(name(pair)),
            labels: Some(labels),
            owner_references: Some(vec![OwnerReference {
                api_version: format!("{GROUP}/{VERSION}"),
                kind: StorageNode::KIND.to_owned(),
                name: owner.meta.name.clone(),
                uid: owner.meta.uid.clone(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        type_: Some(TYPE.to_owned()),
        immutable: Some(true),
        data: Some(data.map(|(k, v)| (k.to_owned(), ByteString(v.as_bytes().to_vec()))).collect()),
        ..core::Secret::default()
    }
}

/// The key in a Secret, if it is that of the pair.
fn read(text: &str, pair: &Pair) -> Result<Secret, StoreError> {
    let malformed = |what: &str| StoreError::Malformed {
        kind: KIND,
        name: name(pair),
        reason: format!(
            "{what}; it should be the key for {pair}: delete it, and another is made when it is needed"
        ),
    };
    let secret: core::Secret = serde_json::from_str(text).map_err(|_| malformed("it is no Secret"))?;
    if secret.type_.as_deref() != Some(TYPE) {
        return Err(malformed(&format!("its type is not {TYPE}")));
    }
    let data = secret.data.unwrap_or_default();
    let names =
        |field: &str, node: &NodeName| data.get(field).is_some_and(|v| v.0 == node.as_str().as_bytes());
    if !names(OWNER, &pair.owner) || !names(CONSUMER, &pair.consumer) {
        return Err(malformed("it names other nodes"));
    }
    let part = |field: &str| data.get(field).map(|value| value.0.as_slice());
    part(KEY).and_then(|key| Secret::read(key, part(TLS))).ok_or_else(|| malformed("its key is none"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::object::{Meta, StorageNodeSpec};

    fn pair(owner: &str, consumer: &str) -> Pair {
        Pair { owner: owner.parse().unwrap(), consumer: consumer.parse().unwrap() }
    }

    fn node(name: &str) -> StorageNode {
        let mut meta = Meta::new(name);
        meta.uid = "u-1".to_owned();
        StorageNode {
            meta,
            spec: StorageNodeSpec { node: name.parse().unwrap() },
            status: Default::default(),
        }
    }

    #[test]
    fn a_secret_is_named_by_its_pair_and_reads_back() {
        let long = "a".repeat(63);
        let pairs = [pair("a", "b"), pair("b", "a"), pair("a.b", "c"), pair("a", "b.c"), pair(&long, &long)];
        let mut names: Vec<String> = pairs.iter().map(name).collect();
        assert!(names.iter().all(|n| n.len() <= 63), "{names:?}");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), pairs.len());
        for pair in &pairs {
            let key = generate();
            for key in [key.clone(), key.without_tls()] {
                let text = serde_json::to_string(&made(pair, &node(pair.owner.as_str()), &key)).unwrap();
                assert_eq!(read(&text, pair).unwrap(), key, "also one of before");
            }
        }
    }

    #[test]
    fn what_is_not_the_pairs_key_is_refused_and_none_of_it_is_told() {
        let (ours, key) = (pair("a", "b"), generate());
        let good = made(&ours, &node("a"), &key);
        let with = |change: fn(&mut core::Secret)| {
            let mut secret = good.clone();
            change(&mut secret);
            serde_json::to_string(&secret).unwrap()
        };
        let others = serde_json::to_string(&made(&pair("a", "c"), &node("a"), &key)).unwrap();
        for text in [
            others,
            with(|s| s.type_ = Some("Opaque".to_owned())),
            with(|s| s.data = None),
            with(|s| {
                s.data.as_mut().unwrap().insert(KEY.to_owned(), ByteString(b"DHHC-1:short".to_vec()));
            }),
            with(|s| {
                s.data.as_mut().unwrap().insert(TLS.to_owned(), ByteString(b"NVMeTLSkey-1:short".to_vec()));
            }),
            format!("[\"{}\"]", key.chap()),
        ] {
            let error = read(&text, &ours).unwrap_err();
            assert!(matches!(error, StoreError::Malformed { .. }));
            let said = format!("{error} {error:?}");
            assert!(
                !said.contains("DHHC") && !said.contains("NVMeTLS") && said.contains("delete it"),
                "{said}"
            );
        }
    }
}
