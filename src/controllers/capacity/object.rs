//! `CSIStorageCapacity` objects: what is kept of one, its name, and how it is written.

use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::controllers::cluster::{DRIVER, TOPOLOGY_KEY};
use crate::domain::split::Capacity;
use crate::domain::{Bytes, NodeName};

/// Whose figures they are: the label of the official external-provisioner.
const LABEL_DRIVER: &str = "csi.storage.k8s.io/drivername";

/// Who writes them: the same.
const LABEL_MANAGER: &str = "csi.storage.k8s.io/managed-by";

/// The value of [`LABEL_MANAGER`]: what has another is another's, of this driver too.
const MANAGER: &str = "union-csi";

/// The room for volumes of one class on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Figures {
    /// Usable bytes for several volumes together.
    pub(super) capacity: Bytes,
    /// Usable bytes of the largest volume: what the scheduler compares a claim with.
    pub(super) maximum: Bytes,
}

impl Figures {
    /// No volume fits.
    pub(super) const NONE: Self = Self { capacity: Bytes::ZERO, maximum: Bytes::ZERO };
}

impl From<Capacity> for Figures {
    fn from(room: Capacity) -> Self {
        Self { capacity: room.total, maximum: room.maximum_volume_size }
    }
}

/// An object in the program's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It is the publisher's.
    Own(Published),
    /// It is someone else's, and never touched.
    Foreign,
}

/// An object of the publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Published {
    pub(super) uid: String,
    /// Resource version, a number that rises
    /// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>); zero where it is none.
    pub(super) version: u64,
    /// What it says; nothing where that cannot be read.
    pub(super) figures: Option<Figures>,
    /// Its class and node are those that its name was made of.
    pub(super) fits: bool,
}

impl Found {
    pub(super) fn read(object: CSIStorageCapacity) -> Self {
        let meta = object.metadata;
        let labels = meta.labels.unwrap_or_default();
        let has = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
        if !has(LABEL_DRIVER, DRIVER) || !has(LABEL_MANAGER, MANAGER) {
            return Self::Foreign;
        }
        let bytes = |quantity: Option<k8s_openapi::apimachinery::pkg::api::resource::Quantity>| {
            quantity.and_then(|q| q.0.parse::<Bytes>().ok())
        };
        let figures = bytes(object.capacity).zip(bytes(object.maximum_volume_size));
        let node = object.node_topology.filter(|t| t.match_expressions.as_ref().is_none_or(Vec::is_empty));
        let node = node.and_then(|t| t.match_labels).filter(|labels| labels.len() == 1);
        let node = node.and_then(|labels| labels.get(TOPOLOGY_KEY)?.parse::<NodeName>().ok());
        let named = node.map(|node| name(&object.storage_class_name, &node));
        Self::Own(Published {
            uid: meta.uid.unwrap_or_default(),
            version: meta.resource_version.and_then(|v| v.parse().ok()).unwrap_or_default(),
            figures: figures.map(|(capacity, maximum)| Figures { capacity, maximum }),
            fits: named.is_some() && named == meta.name,
        })
    }
}

/// The name of the object for a class and a node: the same in each term, so that no leader makes a second one.
pub(super) fn name(class: &str, node: &NodeName) -> String {
    /// Bytes of the digest: no two of any number of pairs that a cluster can have are alike.
    const KEPT: usize = 10;
    // No name has a slash.
    let digest = Sha256::digest(format!("{class}/{node}"));
    let hex: String = digest.iter().take(KEPT).map(|byte| format!("{byte:02x}")).collect();
    format!("union-{hex}")
}

/// The object, as it is applied.
pub(super) fn object(name: &str, class: &str, node: &NodeName, figures: Figures) -> Value {
    json!({
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIStorageCapacity",
        "metadata": {"name": name, "labels": {LABEL_DRIVER: DRIVER, LABEL_MANAGER: MANAGER}},
        "storageClassName": class,
        "nodeTopology": {"matchLabels": {TOPOLOGY_KEY: node.as_str()}},
        "capacity": figures.capacity.to_string(),
        "maximumVolumeSize": figures.maximum.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(change: impl FnOnce(&mut Value)) -> Found {
        let node = "n1".parse().unwrap();
        let figures = Figures { capacity: Bytes::gib(3), maximum: Bytes::new(1234567) };
        let mut object = object(&name("fast", &node), "fast", &node, figures);
        object["metadata"]["resourceVersion"] = json!("7");
        change(&mut object);
        Found::read(serde_json::from_value(object).unwrap())
    }

    fn own(found: Found) -> Published {
        match found {
            Found::Own(published) => published,
            Found::Foreign => panic!("it is ours"),
        }
    }

    #[test]
    fn what_is_written_is_read_back_to_the_byte() {
        let read = own(made(|_| {}));
        let figures = Figures { capacity: Bytes::gib(3), maximum: Bytes::new(1234567) };
        assert_eq!((read.version, read.figures, read.fits), (7, Some(figures), true));
    }

    #[test]
    fn what_lacks_one_of_the_labels_is_foreign() {
        for label in [LABEL_DRIVER, LABEL_MANAGER] {
            assert_eq!(made(|o| o["metadata"]["labels"][label] = json!("other")), Found::Foreign);
        }
    }

    #[test]
    fn an_object_for_another_pair_than_its_name_says_does_not_fit() {
        assert!(!own(made(|o| o["storageClassName"] = json!("slow"))).fits);
        assert!(!own(made(|o| o["nodeTopology"] = json!({"matchLabels": {TOPOLOGY_KEY: "n2"}}))).fits);
        assert!(!own(made(|o| o["nodeTopology"] = json!({}))).fits);
        assert_eq!(own(made(|o| o["capacity"] = json!("-1"))).figures, None);
    }

    #[test]
    fn names_are_valid_stable_and_differ_by_class_and_node() {
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        assert_eq!(name("a", &node("b")), name("a", &node("b")));
        assert_eq!(name("a", &node("b")).len(), 26);
        assert_ne!(name("a", &node("b")), name("b", &node("a")));
        assert_ne!(name("a.b", &node("c")), name("a", &node("b.c")));
    }
}
