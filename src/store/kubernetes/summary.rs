//! What `kubectl get` shows of an object: columns cannot add up, or write an amount for people.
//!
//! It follows from the object alone, so that writing a status again changes nothing.

use std::collections::BTreeMap;

use crate::domain::Bytes;
use crate::domain::pool::PoolState;
use crate::store::object::{Branch, BranchPhase, StorageNode, VolumeSplit, condition};

/// Words by column.
pub(super) type Summary = BTreeMap<&'static str, String>;

/// The columns of each kind that come from [`Summary`], for its schema.
pub(super) const SPLIT: [&str; 4] = ["size", "branches", "nodes", "state"];
/// As [`SPLIT`].
pub(super) const BRANCH: [&str; 2] = ["size", "used"];
/// As [`SPLIT`].
pub(super) const NODE: [&str; 5] = ["pools", "total", "promised", "allocatable", "state"];

/// Nodes that are named before the rest is only counted.
const NAMED: usize = 2;

pub(super) fn split(split: &VolumeSplit) -> Summary {
    let conditions = &split.status.conditions;
    let holds = |kind| condition(conditions, kind).filter(|c| c.status);
    let state = if split.meta.deleting.is_some() {
        "Deleting".to_owned()
    } else if let Some(degraded) = holds("Degraded") {
        format!("Degraded: {}", degraded.reason)
    } else if holds("Ready").is_some() {
        "Ready".to_owned()
    } else {
        condition(conditions, "Pending").map_or_else(|| "Pending".to_owned(), |c| c.reason.clone())
    };
    let mut nodes: Vec<&str> = split.spec.branches.iter().map(|b| b.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let rest = nodes.len().saturating_sub(NAMED);
    nodes.truncate(NAMED);
    let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
    BTreeMap::from([
        ("size", split.spec.capacity.human()),
        ("branches", format!("{}/{}", split.status.bound_replicas, split.status.replicas)),
        ("nodes", format!("{}{more}", nodes.join(","))),
        ("state", state),
    ])
}

pub(super) fn branch(branch: &Branch) -> Summary {
    let used = match branch.status.phase {
        BranchPhase::Bound => branch.status.bytes_used.human(),
        BranchPhase::Pending | BranchPhase::Refused | BranchPhase::Failing | BranchPhase::Lost => {
            String::new()
        }
    };
    BTreeMap::from([("size", branch.spec.size.human()), ("used", used)])
}

pub(super) fn node(node: &StorageNode) -> Summary {
    let pools = &node.status.pools;
    // Pools on one filesystem share its space: it is counted with the first of them.
    let own =
        pools.iter().enumerate().filter(|(i, p)| !pools.iter().take(*i).any(|q| q.shares_space_with(p)));
    let own: Vec<_> = own.map(|(_, p)| p).collect();
    let sum =
        |of: fn(&crate::domain::pool::PoolReport) -> Bytes| own.iter().map(|p| of(p)).sum::<Bytes>().human();
    let ready = pools.iter().filter(|p| p.state == PoolState::Ready).count();
    let faulty = node.status.conditions.iter().find(|c| c.kind == "Ready" && !c.status);
    let state = faulty.map_or_else(|| "Ready".to_owned(), |c| c.reason.clone());
    BTreeMap::from([
        ("pools", format!("{ready}/{}", pools.len())),
        ("total", sum(|p| p.total)),
        ("promised", sum(|p| p.promised)),
        ("allocatable", sum(crate::domain::pool::PoolReport::allocatable)),
        ("state", state),
    ])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pools_on_one_filesystem_are_added_up_once() {
        let node: StorageNode = serde_json::from_value(json!({
            "meta": {"name": "n"}, "spec": {"node": "n"}, "status": {"pools": [
                {"name": "a", "device": "d", "total": 1_073_741_824_u64, "free": 1_073_741_824_u64},
                {"name": "b", "device": "d", "total": 1_073_741_824_u64, "free": 1_073_741_824_u64, "state": "Absent"},
                {"name": "c", "total": 1_073_741_824_u64, "free": 1_073_741_824_u64}
            ]}
        }))
        .unwrap();
        let summary = super::node(&node);
        assert_eq!((summary["pools"].as_str(), summary["total"].as_str()), ("2/3", "2 GiB"));
    }

    #[test]
    fn a_volume_on_many_nodes_names_two_of_them_and_counts_the_rest() {
        let branch = |index: u32, node: &str| json!({"index": index, "node": node, "pool": "p", "size": 1, "usable": 1, "format": "image"});
        let split: VolumeSplit = serde_json::from_value(json!({
            "meta": {"name": "v"},
            "spec": {"volume": "v", "requestName": "v", "capacity": 1_649_267_441_664_u64, "accessModes": [],
                     "branches": [branch(0, "c"), branch(1, "a"), branch(2, "b"), branch(3, "a"), branch(4, "d")]},
            "status": {"replicas": 5, "boundReplicas": 3}
        }))
        .unwrap();
        let summary = super::split(&split);
        assert_eq!(summary["nodes"], "a,b and 2 more");
        assert_eq!((summary["size"].as_str(), summary["branches"].as_str()), ("1.5 TiB", "3/5"));
        assert_eq!(summary["state"], "Pending");
    }

    #[test]
    fn every_column_has_its_place_in_the_schema() {
        let split: VolumeSplit = serde_json::from_value(json!({
            "meta": {"name": "v"}, "spec": {"volume": "v", "requestName": "v", "capacity": 1, "accessModes": []}
        }))
        .unwrap();
        let branch = crate::store::contract::branch("v", 0, "n");
        let node: StorageNode =
            serde_json::from_value(json!({"meta": {"name": "n"}, "spec": {"node": "n"}})).unwrap();
        let keys = |s: Summary| s.into_keys().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(keys(super::split(&split)), SPLIT.into());
        assert_eq!(keys(super::branch(&branch)), BRANCH.into());
        assert_eq!(keys(super::node(&node)), NODE.into());
    }
}
