//! What agents asked of an API server, from its audit log, against the table of their rights.
//!
//! `scripts/test kube` runs the whole cluster's tests with `--audit` and then this, with the log's path in
//! `UNION_KUBE_AUDIT`.

use std::collections::BTreeSet;

use serde_json::Value;
use union_csi::controllers::permissions::PERMISSIONS;

const ACCOUNT: &str = "system:serviceaccount:union:union-csi";

/// Rights that the tests of a cluster need not meet: what they are for happens in the tests of a single controller, or by hand.
const MAY_BE_UNUSED: [(&str, &str); 10] = [
    // Server-side apply that creates asks for both; the log has it as `patch`.
    ("csistoragecapacities", "create"),
    // A claim is given back to the scheduler.
    ("persistentvolumeclaims", "patch"),
    // A leader took over between the making of a branch and the answer.
    ("branches", "get"),
    // `union-csi forget-node`.
    ("storagenodes", "delete"),
    ("secrets", "delete"),
    // The nodes of that cluster share a kernel: none attaches a branch of another.
    ("secrets", "get"),
    ("secrets", "create"),
    // A race for the lease was lost.
    ("leases", "get"),
    // An event that is said again.
    ("events", "get"),
    ("events", "patch"),
];

/// Group, resource with subresource, verb.
type Right = (String, String, String);

fn granted() -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for p in PERMISSIONS {
        for (resource, verb) in p.resources.iter().flat_map(|r| p.verbs.iter().map(move |v| (r, v))) {
            rights.insert((p.group.to_owned(), (*resource).to_owned(), (*verb).to_owned()));
        }
    }
    rights
}

/// What one line of the log says that an agent asked for, and the answer's code.
fn asked(line: &str) -> Option<(Right, u64)> {
    let event: Value = serde_json::from_str(line).ok()?;
    if event["user"]["username"] != ACCOUNT {
        return None;
    }
    let of = |key: &str| event["objectRef"][key].as_str().unwrap_or_default().to_owned();
    let resource = match of("subresource") {
        sub if sub.is_empty() => of("resource"),
        sub => format!("{}/{sub}", of("resource")),
    };
    // Requests for no object: the server's version, what it serves.
    if resource.is_empty() {
        return None;
    }
    let verb = event["verb"].as_str()?.to_owned();
    Some(((of("apiGroup"), resource, verb), event["responseStatus"]["code"].as_u64().unwrap_or_default()))
}

#[test]
#[ignore = "needs the audit log of a cluster's tests: scripts/test kube"]
fn agents_in_a_cluster_are_forbidden_nothing_and_have_no_right_in_vain() {
    let path = std::env::var("UNION_KUBE_AUDIT").expect("UNION_KUBE_AUDIT: the path of an audit log");
    let log = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let mut used = BTreeSet::new();
    let mut forbidden = BTreeSet::new();
    for (right, code) in log.lines().filter_map(asked) {
        if code == 403 {
            forbidden.insert(right);
        } else {
            used.insert(right);
        }
    }
    assert!(!used.is_empty(), "{path} tells of no request of {ACCOUNT}");
    // A test takes a right away for a while, and an API server that has just started knows of none for a moment.
    forbidden.retain(|right| !used.contains(right));
    assert!(forbidden.is_empty(), "the agents were forbidden: {forbidden:#?}");
    let in_vain: Vec<Right> = granted()
        .into_iter()
        .filter(|right| !used.contains(right))
        .filter(|(_, resource, verb)| !MAY_BE_UNUSED.contains(&(resource.as_str(), verb.as_str())))
        .collect();
    assert!(in_vain.is_empty(), "granted in src/controllers/permissions.rs and never used: {in_vain:#?}");
}

#[test]
fn a_line_of_the_audit_log_tells_the_right_that_was_used() {
    let line = r#"{"verb":"patch","user":{"username":"system:serviceaccount:union:union-csi"},
        "objectRef":{"resource":"branches","subresource":"status","apiGroup":"union.io","namespace":"union","name":"a"},
        "responseStatus":{"code":200}}"#;
    let (right, code) = asked(line).expect("a request of an agent");
    assert_eq!((right.1.as_str(), code), ("branches/status", 200));
    assert!(granted().contains(&right));
    assert_eq!(asked(&line.replace("union:union-csi", "default:default")), None, "others' requests");
    assert_eq!(asked(&line.replace("objectRef", "other")), None, "a request for no object");
}
