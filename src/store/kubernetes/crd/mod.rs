//! The CustomResourceDefinitions, made from the program's types.
//!
//! The schema of each spec and status is that of its Rust type, made structural (`structural`). What the types cannot
//! say is added here: what may not change (`rules`), what `kubectl get` shows, and what can be selected.

mod rules;
mod structural;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use schemars::JsonSchema;
use serde_json::{Value, json};

use super::resource::Resource;
use super::wire::SUMMARY;
use super::{GROUP, VERSION, summary};
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// What a kind needs besides its types.
struct Kind {
    singular: &'static str,
    short: &'static str,
    description: &'static str,
    /// Columns that come from the summary.
    summary: &'static [&'static str],
    /// Name, type and path of each column, and whether it is shown with `--output wide` only.
    columns: &'static [(&'static str, &'static str, &'static str, bool)],
    /// Fields of the spec that can be selected by.
    selectable: &'static [&'static str],
}

const AGE: (&str, &str, &str, bool) = ("Age", "date", ".metadata.creationTimestamp", false);

const SPLIT: Kind = Kind {
    singular: "volumesplit",
    short: "vsplit",
    description: "A volume: what was asked for, how it is split over the disks of the cluster, and how it stands.",
    summary: &summary::SPLIT,
    columns: &[
        ("Size", "string", ".status.summary.size", false),
        ("Branches", "string", ".status.summary.branches", false),
        ("Nodes", "string", ".status.summary.nodes", false),
        ("Attached", "string", ".spec.attached[0].node", false),
        ("State", "string", ".status.summary.state", false),
        ("Request", "string", ".spec.requestName", true),
        ("Message", "string", r#".status.conditions[?(@.type=="Pending")].message"#, true),
        AGE,
    ],
    selectable: &[],
};

const BRANCH: Kind = Kind {
    singular: "branch",
    short: "ubranch",
    description: "One piece of a volume: a file or directory in one pool of one node.",
    summary: &summary::BRANCH,
    columns: &[
        ("Volume", "string", ".spec.volume", false),
        ("Node", "string", ".spec.node", false),
        ("Pool", "string", ".spec.pool", false),
        ("Size", "string", ".status.summary.size", false),
        ("Used", "string", ".status.summary.used", false),
        ("Format", "string", ".spec.format", false),
        ("Phase", "string", ".status.phase", false),
        ("Reason", "string", ".status.reason", true),
        AGE,
    ],
    selectable: &["node", "volume"],
};

const NODE: Kind = Kind {
    singular: "storagenode",
    short: "snode",
    description: "What a node has to give: its pools and what of them can still be promised.",
    summary: &summary::NODE,
    columns: &[
        ("Pools", "string", ".status.summary.pools", false),
        ("Total", "string", ".status.summary.total", false),
        ("Promised", "string", ".status.summary.promised", false),
        ("Allocatable", "string", ".status.summary.allocatable", false),
        ("State", "string", ".status.summary.state", false),
        ("Agent", "string", ".status.agentVersion", true),
        ("Mergerfs", "string", ".status.mergerfsVersion", true),
        ("Kernel", "string", ".status.kernel", true),
        AGE,
    ],
    selectable: &[],
};

/// The definitions, as they are to be installed.
#[must_use]
pub fn crds() -> Vec<CustomResourceDefinition> {
    let documents = [
        document::<VolumeSplit>(&SPLIT, rules::split()),
        document::<Branch>(&BRANCH, rules::branch()),
        document::<StorageNode>(&NODE, rules::node()),
    ];
    // A test parses each of them, so none is lost here.
    documents.into_iter().filter_map(|d| serde_json::from_value(d).ok()).collect()
}

fn document<T: Resource>(kind: &Kind, rules: rules::Rules) -> Value {
    let mut spec = structural::schema::<T::Spec>();
    rules.apply_to(&mut spec);
    let mut status = structural::schema::<T::Status>();
    let words = kind.summary.iter().map(|word| ((*word).to_owned(), json!({"type": "string"})));
    status["properties"][SUMMARY] = json!({
        "type": "object",
        "description": "Words for kubectl get; never read.",
        "properties": words.collect::<serde_json::Map<_, _>>(),
    });
    let columns = kind.columns.iter().map(|(name, of, path, wide)| {
        json!({"name": name, "type": of, "jsonPath": path, "priority": i32::from(*wide)})
    });
    let selectable = kind.selectable.iter().map(|field| json!({"jsonPath": format!(".spec.{field}")}));
    let mut version = json!({
        "name": VERSION,
        "served": true,
        "storage": true,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns.collect::<Vec<_>>(),
        "schema": {"openAPIV3Schema": {
            "type": "object",
            "description": kind.description,
            "required": ["spec"],
            "properties": {"spec": spec, "status": status},
            "x-kubernetes-validations": rules.whole,
        }},
    });
    if !kind.selectable.is_empty() {
        version["selectableFields"] = selectable.collect();
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{}.{GROUP}", T::PLURAL),
            "labels": {"app.kubernetes.io/name": "union-csi"},
        },
        "spec": {
            "group": GROUP,
            "scope": if T::NAMESPACED { "Namespaced" } else { "Cluster" },
            "names": {
                "kind": T::KIND,
                "listKind": format!("{}List", T::KIND),
                "plural": T::PLURAL,
                "singular": kind.singular,
                "shortNames": [kind.short],
                "categories": ["union"],
            },
            "versions": [version],
        },
    })
}

/// Keeps the bound that a schema needs `T` to have in one place.
trait Described: JsonSchema {}
impl<T: JsonSchema> Described for T {}

#[cfg(test)]
mod tests;
