//! Objects as the API has them: `apiVersion`, `kind`, `metadata`, `spec`, `status`.
//!
//! Annotations, owners and managed fields are neither kept in memory nor written.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::resource::Resource;
use super::{GROUP, VERSION};
use crate::store::object::{Meta, Version};

/// Field of a status that holds words for `kubectl get`; never read.
pub(super) const SUMMARY: &str = "summary";

/// `metadata`, as far as it is read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMeta {
    #[serde(default)]
    name: String,
    #[serde(default)]
    uid: String,
    #[serde(default)]
    resource_version: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    finalizers: Vec<String>,
    #[serde(default)]
    creation_timestamp: Option<Timestamp>,
    #[serde(default)]
    deletion_timestamp: Option<Timestamp>,
}

impl From<WireMeta> for Meta {
    fn from(wire: WireMeta) -> Self {
        Self {
            name: wire.name,
            uid: wire.uid,
            version: Version(wire.resource_version),
            labels: wire.labels,
            finalizers: wire.finalizers,
            created: wire.creation_timestamp,
            deleting: wire.deletion_timestamp,
        }
    }
}

#[derive(Deserialize)]
struct Wire<Spec, Status> {
    metadata: WireMeta,
    spec: Spec,
    #[serde(default = "Option::default")]
    status: Option<Status>,
}

/// Whose text was not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Misread {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: Version,
    pub(super) reason: String,
}

/// The object that `text` is.
pub(super) fn read<T: Resource>(text: &str) -> Result<T, Misread> {
    let reason = match serde_json::from_str::<Wire<T::Spec, T::Status>>(text) {
        Ok(wire) if T::id(&wire.spec) == wire.metadata.name => {
            return Ok(T::assemble(wire.metadata.into(), wire.spec, wire.status.unwrap_or_default()));
        }
        Ok(wire) => format!("its spec is that of {}", T::id(&wire.spec)),
        Err(e) => e.to_string(),
    };
    #[derive(Deserialize)]
    struct Named {
        metadata: WireMeta,
        #[serde(rename = "spec")]
        _spec: Option<IgnoredAny>,
    }
    let meta = serde_json::from_str::<Named>(text).map(|named| named.metadata).unwrap_or_default();
    Err(Misread { name: meta.name, uid: meta.uid, version: Version(meta.resource_version), reason })
}

/// The body that makes an object.
pub(super) fn creation<T: Resource>(object: &T) -> serde_json::Result<Vec<u8>> {
    let meta = object.meta();
    serde_json::to_vec(&json!({
        "apiVersion": api_version(),
        "kind": T::KIND,
        "metadata": {"name": meta.name, "labels": meta.labels, "finalizers": meta.finalizers},
        "spec": serde_json::to_value(object.spec())?,
    }))
}

/// The JSON patch that writes spec, labels and finalizers, if the version is the stored one. `properties`: the fields of
/// a spec that this program knows; those that the object lacks are taken away, others stay.
pub(super) fn update<T: Resource>(object: &T, properties: &[String]) -> serde_json::Result<Vec<u8>> {
    let meta = object.meta();
    let mut steps = vec![set("/metadata/resourceVersion", json!(meta.version.0))];
    if meta.labels.is_empty() {
        steps.extend(unset("/metadata/labels"));
    } else {
        steps.push(set("/metadata/labels", json!(meta.labels)));
    }
    if meta.finalizers.is_empty() {
        steps.extend(unset("/metadata/finalizers"));
    } else {
        steps.push(set("/metadata/finalizers", json!(meta.finalizers)));
    }
    let spec: Map<String, Value> = serde_json::from_value(serde_json::to_value(object.spec())?)?;
    for absent in properties.iter().filter(|p| !spec.contains_key(*p)) {
        steps.extend(unset(&format!("/spec/{absent}")));
    }
    steps.extend(spec.into_iter().map(|(field, value)| set(&format!("/spec/{field}"), value)));
    serde_json::to_vec(&steps)
}

/// Sets a field, whether it is there or not.
fn set(path: &str, value: Value) -> Value {
    json!({"op": "add", "path": path, "value": value})
}

/// Takes a field away, whether it is there or not: `remove` alone fails where it is not.
fn unset(path: &str) -> [Value; 2] {
    [set(path, Value::Null), json!({"op": "remove", "path": path})]
}

/// What is applied to the status subresource: the status, and beside its fields what `kubectl get` shows.
pub(super) fn status<T: Resource>(object: &T) -> serde_json::Result<Vec<u8>> {
    let meta = object.meta();
    let status = shown(object)?;
    serde_json::to_vec(&json!({
        "apiVersion": api_version(),
        "kind": T::KIND,
        "metadata": {"name": meta.name, "resourceVersion": meta.version.0},
        "status": status,
    }))
}

/// The JSON patch that makes this the whole status, whatever is there, if the version is the stored one.
pub(super) fn whole_status<T: Resource>(object: &T, version: &Version) -> serde_json::Result<Vec<u8>> {
    let steps = [set("/metadata/resourceVersion", json!(version.0)), set("/status", shown(object)?)];
    serde_json::to_vec(&steps)
}

/// The status with the summary.
fn shown<T: Resource>(object: &T) -> serde_json::Result<Value> {
    let mut status = serde_json::to_value(object.status())?;
    if let Value::Object(fields) = &mut status {
        fields.insert(SUMMARY.to_owned(), serde_json::to_value(object.summary())?);
    }
    Ok(status)
}

fn api_version() -> String {
    format!("{GROUP}/{VERSION}")
}
