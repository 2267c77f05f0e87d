//! What the API server refuses to have changed, whoever asks: what the files on the disks depend on.
//!
//! Rules are in CEL (<https://kubernetes.io/docs/reference/using-api/cel/>), one a field: a rule on the whole spec would
//! refuse the writes of a newer version of the program, which has more fields. They hold for the fields that this version
//! knows, also where a field is taken away or put in.

use serde_json::{Map, Value, json};

use super::structural::at;

/// For one kind.
pub(super) struct Rules {
    /// On the whole object.
    pub(super) whole: Vec<Value>,
    /// On the spec.
    spec: Vec<Value>,
    /// Further words for fields of the spec.
    fields: Vec<(&'static [&'static str], Value)>,
}

impl Rules {
    /// Adds those of the spec to its schema.
    pub(super) fn apply_to(&self, spec: &mut Value) {
        let all = std::iter::once((&[][..], json!({"x-kubernetes-validations": self.spec})));
        for (path, words) in all.chain(self.fields.iter().map(|(p, w)| (*p, w.clone()))) {
            let Some(fields) = at(spec, path) else {
                debug_assert!(false, "no field {path:?}");
                continue;
            };
            fields.extend(words.as_object().cloned().unwrap_or_default());
        }
    }
}

fn rule(rule: impl Into<String>, message: impl Into<String>) -> Value {
    json!({"rule": rule.into(), "message": message.into()})
}

/// A field that keeps its value, or its absence.
fn fixed(field: &str) -> Value {
    rule(
        format!(
            "has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        ),
        format!("{field} cannot be changed"),
    )
}

fn named(field: &str) -> Value {
    rule(format!("self.metadata.name == self.spec.{field}"), format!("metadata.name must be spec.{field}"))
}

pub(super) fn split() -> Rules {
    let used = "(has(oldSelf.spec.used) && oldSelf.spec.used) || \
                (has(oldSelf.spec.attached) && size(oldSelf.spec.attached) > 0)";
    let bound = "has(oldSelf.status) && has(oldSelf.status.conditions) && \
                 oldSelf.status.conditions.exists(c, c.type == 'Pending' && c.reason == 'Bound')";
    let kept = "oldSelf.spec.branches.all(o, has(self.spec.branches) && \
                self.spec.branches.exists(b, b.index == o.index))";
    let spec = ["volume", "requestName", "limit", "accessModes", "volumeMode", "parameters", "ephemeral"];
    let growing = [
        rule("self.capacity >= oldSelf.capacity", "capacity cannot shrink"),
        rule(
            "!has(oldSelf.nextIndex) || (has(self.nextIndex) && self.nextIndex >= oldSelf.nextIndex)",
            "nextIndex cannot go back: the number of a branch is never used twice",
        ),
        rule(
            "!has(oldSelf.used) || !oldSelf.used || (has(self.used) && self.used)",
            "used cannot be taken back: the branches may hold files",
        ),
    ];
    let item = ["node", "pool", "size", "usable", "format", "fsType"].map(fixed);
    Rules {
        whole: vec![
            named("volume"),
            rule(
                format!("!has(oldSelf.spec.branches) || !({used} || ({bound})) || {kept}"),
                "the branches of a complete volume stay in its plan: files may lie in each of them",
            ),
        ],
        spec: spec.into_iter().map(fixed).chain(growing).collect(),
        fields: vec![
            (
                &["branches"],
                json!({"maxItems": 256, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["index"]}),
            ),
            (&["branches", "*"], json!({"x-kubernetes-validations": item})),
            (&["accessModes"], json!({"maxItems": 16})),
            (&["attached"], json!({"maxItems": 1024})),
            // A cluster of the largest size that Kubernetes supports has 5000 nodes.
            (&["topology"], json!({"maxItems": 10000})),
            (&["requestName"], json!({"minLength": 1, "maxLength": 1024})),
            (&["parameters"], json!({"maxProperties": 256, "additionalProperties": text(4096)})),
        ],
    }
}

pub(super) fn branch() -> Rules {
    let spec = [
        "id",
        "volume",
        "index",
        "node",
        "pool",
        "size",
        "usable",
        "format",
        "fsType",
        "thin",
        "acceptUnenforced",
        "writeThrough",
        "encrypted",
    ];
    let access = rule(
        "!has(oldSelf.access) || (has(self.access) && (self.access == oldSelf.access || \
         self.access.epoch > oldSelf.access.epoch))",
        "access can only be changed with a higher epoch",
    );
    let spec = spec.into_iter().map(fixed).chain([access]).collect();
    Rules { whole: vec![named("id")], spec, fields: Vec::new() }
}

pub(super) fn node() -> Rules {
    Rules { whole: vec![named("node")], spec: vec![fixed("node")], fields: Vec::new() }
}

fn text(longest: u32) -> Map<String, Value> {
    Map::from_iter([("type".to_owned(), json!("string")), ("maxLength".to_owned(), json!(longest))])
}
