//! What the program asks the API server for: the one table behind `deploy/base/rbac.yaml`.
//!
//! There is one ServiceAccount for both roles, because any instance may become the leader. What lies in the program's own
//! namespace is granted there only. A verb that the program does not use is not in the table, and what is not in the table
//! is not granted: a test compares the files under `deploy/` with it, and the tests against an API server run under it.

use std::fmt::Write as _;

/// Where a permission holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// In the program's own namespace.
    Own,
    /// In the whole cluster.
    Cluster,
}

/// Verbs on resources.
#[derive(Clone, Copy, Debug)]
pub struct Permission {
    /// Where.
    pub scope: Scope,
    /// API group; empty: the core group.
    pub group: &'static str,
    /// Resources and subresources.
    pub resources: &'static [&'static str],
    /// The objects; empty: all.
    pub names: &'static [&'static str],
    /// Verbs. Server-side apply of an object that does not exist takes `create` besides `patch`.
    pub verbs: &'static [&'static str],
    /// What for; a sentence.
    pub why: &'static str,
}

/// Everything that the program may do, and does.
pub const PERMISSIONS: &[Permission] = &[
    Permission {
        scope: Scope::Own,
        group: "union.io",
        resources: &["volumesplits", "branches"],
        names: &[],
        verbs: &["get", "list", "watch", "create", "patch", "delete"],
        why: "Volumes and their branches: the leader plans and makes them, each node watches its own.",
    },
    Permission {
        scope: Scope::Own,
        group: "union.io",
        resources: &["volumesplits/status", "branches/status"],
        names: &[],
        verbs: &["patch"],
        why: "The leader reports on volumes, each node on its branches.",
    },
    Permission {
        scope: Scope::Own,
        group: "",
        resources: &["secrets"],
        names: &[],
        verbs: &["get", "create", "delete"],
        why: "Keys of pairs of nodes: the leader makes them, both nodes read them, `union-csi forget-node` deletes.",
    },
    Permission {
        scope: Scope::Own,
        group: "coordination.k8s.io",
        resources: &["leases"],
        names: &[],
        verbs: &["create"],
        why: "The lease of the leader; creation cannot be granted by name.",
    },
    Permission {
        scope: Scope::Own,
        group: "coordination.k8s.io",
        resources: &["leases"],
        names: &[super::lease::LEASE],
        verbs: &["get", "list", "watch", "update"],
        why: "Followers watch it, who leads renews it, who lost a race for it reads it.",
    },
    Permission {
        scope: Scope::Own,
        group: "storage.k8s.io",
        resources: &["csistoragecapacities"],
        names: &[],
        verbs: &["list", "watch", "create", "patch", "delete"],
        why: "The room of each node for each class, for the scheduler.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "union.io",
        resources: &["storagenodes"],
        names: &[],
        verbs: &["get", "list", "watch", "create", "delete"],
        why: "Each node publishes its pools; `union-csi forget-node` deletes.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "union.io",
        resources: &["storagenodes/status"],
        names: &[],
        verbs: &["patch"],
        why: "Each node publishes its pools.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "",
        resources: &["nodes"],
        names: &[],
        verbs: &["get"],
        why: "Each agent reads the labels of its own node, which a class's nodeSelector asks for.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "",
        resources: &["persistentvolumes"],
        names: &[],
        verbs: &["get", "list", "watch", "create", "patch", "delete"],
        why: "The provisioner makes and removes them; the attacher guards those that are attached with its finalizer.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "",
        resources: &["persistentvolumeclaims"],
        names: &[],
        verbs: &["get", "list", "watch", "patch"],
        why: "What is asked for; where the chosen node has no room, the claim is given back to the scheduler.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "storage.k8s.io",
        resources: &["storageclasses"],
        names: &[],
        verbs: &["list", "watch"],
        why: "The parameters of a claim's class.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "storage.k8s.io",
        resources: &["volumeattachments"],
        names: &[],
        verbs: &["list", "watch", "patch"],
        why: "What shall be attached; the attacher guards it with its finalizer.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "storage.k8s.io",
        resources: &["volumeattachments/status"],
        names: &[],
        verbs: &["patch"],
        why: "Whether it is attached, and why not.",
    },
    Permission {
        scope: Scope::Cluster,
        group: "",
        resources: &["events"],
        names: &[],
        verbs: &["get", "create", "patch"],
        why: "What became of a claim and why, told where people look. Said again, an event is read and counted up.",
    },
];

/// `deploy/base/rbac.yaml`: the ServiceAccount, its roles with the table's rules, and their bindings.
#[must_use]
pub fn rbac_yaml() -> String {
    let mut out = String::from(HEAD);
    for (scope, kind, place) in
        [(Scope::Own, "Role", "\n  namespace: union"), (Scope::Cluster, "ClusterRole", "")]
    {
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}\nmetadata:\n  name: union-csi{place}\n{LABELS}rules:\n"
        );
        out.push_str(&rules(scope));
        let _ = write!(
            out,
            "---\napiVersion: rbac.authorization.k8s.io/v1\nkind: {kind}Binding\nmetadata:\n  name: \
             union-csi{place}\n{LABELS}roleRef:\n  apiGroup: rbac.authorization.k8s.io\n  kind: {kind}\n  name: union-csi\n\
             subjects:\n  - kind: ServiceAccount\n    name: union-csi\n    namespace: union\n"
        );
    }
    out
}

/// The rules of one scope as items of a YAML list, each with its reason as a comment.
#[must_use]
pub fn rules(scope: Scope) -> String {
    let mut out = String::new();
    for permission in PERMISSIONS.iter().filter(|p| p.scope == scope) {
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "  # {}\n  - apiGroups: [\"{}\"]\n    resources: [{}]\n    verbs: [{}]\n",
            permission.why,
            permission.group,
            permission.resources.join(", "),
            permission.verbs.join(", ")
        );
        if !permission.names.is_empty() {
            let _ = writeln!(out, "    resourceNames: [{}]", permission.names.join(", "));
        }
    }
    out
}

const LABELS: &str = "  labels:\n    app.kubernetes.io/name: union-csi\n";

const HEAD: &str = "\
# Made from src/controllers/permissions.rs; a test compares them.
#
# One ServiceAccount for every instance, because any of them may become the leader: a node's agent that does not lead has the
# leader's rights without using them. What lies in the program's own namespace is granted there only.
apiVersion: v1
kind: ServiceAccount
metadata:
  name: union-csi
  namespace: union
  labels:
    app.kubernetes.io/name: union-csi
";

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares a file with what the code says now, or writes it when `UNION_CSI_WRITE_DOCS` is set.
    fn compare_file(path: &str, wanted: &str) {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        if std::env::var_os("UNION_CSI_WRITE_DOCS").is_some() {
            std::fs::write(&file, wanted).unwrap();
            return;
        }
        assert!(
            std::fs::read_to_string(&file).unwrap() == wanted,
            "{path} is not up to date: run UNION_CSI_WRITE_DOCS=1 cargo test --lib document -- --test-threads=1, and review \
             what changed"
        );
    }

    #[test]
    fn the_document_of_the_rights_in_the_cluster_is_up_to_date() {
        compare_file("deploy/base/rbac.yaml", &rbac_yaml());
    }

    #[test]
    fn no_right_is_named_twice_and_none_is_a_wildcard() {
        let mut all = Vec::new();
        for p in PERMISSIONS {
            assert!(p.why.ends_with('.') && !p.verbs.is_empty(), "{p:?}");
            for resource in p.resources {
                for verb in p.verbs {
                    assert!(*verb != "*" && *resource != "*" && p.group != "*");
                    all.push((p.scope == Scope::Own, p.group, *resource, *verb));
                }
            }
        }
        let mut unique = all.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), all.len());
    }
}
