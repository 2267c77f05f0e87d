//! `GET /v1/plan`: from the words of a query to the planner and back.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::api::PlanAnswer;
use crate::domain::policy::{Policy, parameters};
use crate::domain::pool::PoolView;
use crate::domain::reach::Network;
use crate::domain::split::{self, Reach, Request, Sharing};
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, NodeName};

/// The words of a query that are not StorageClass parameters.
pub(super) const OWN: [(&str, &str); 6] = [
    ("size", "Usable bytes that the volume must have at least, as `1Ti`; required."),
    ("limit", "Usable bytes that it may have at most."),
    ("consumer", "Node that will use it."),
    ("mode", "`filesystem` (default) or `block`."),
    (
        "access",
        "Access mode of the claim: `ReadWriteOnce` (default), `ReadWriteOncePod`, `ReadOnlyMany` or `ReadWriteMany`.",
    ),
    (
        "reach",
        "`one-node`: all branches on one node; `any-node`: as if all nodes could reach each other's branches. Without it: as \
         volumes are made now, on nodes that reach each other by what their StorageNodes tell.",
    ),
];

/// Plans what the query asks for over these pools; `network`: what their nodes can carry, `None` where that is not known and
/// all are taken to reach each other. The query: `size` and what else `OWN` names, and StorageClass
/// parameters.
///
/// # Errors
/// Every reason why the query itself cannot be understood.
pub fn answer(
    query: &[(String, String)],
    pools: &[PoolView],
    network: Option<&Network>,
) -> Result<PlanAnswer, Vec<String>> {
    let mut faults = Vec::new();
    let mut own: BTreeMap<&str, &str> = BTreeMap::new();
    let mut given = BTreeMap::new();
    for (key, value) in query {
        let twice = if OWN.iter().any(|(name, _)| name == key) {
            own.insert(key, value).is_some()
        } else {
            given.insert(key.clone(), value.clone()).is_some()
        };
        if twice {
            faults.push(format!("{key} is given twice"));
        }
    }
    let mut amount = |name: &str| -> Option<Bytes> {
        let text = own.get(name)?;
        match text.parse::<Bytes>() {
            Ok(bytes) if bytes.is_zero() => {
                faults.push(format!("{name}: must be more than nothing"));
                None
            }
            Ok(bytes) => Some(bytes),
            Err(why) => {
                faults.push(format!("{name}: {why}"));
                None
            }
        }
    };
    let size = amount("size");
    let limit = amount("limit");
    if !own.contains_key("size") {
        faults.push("size is missing: say how large the volume shall be, as size=1Ti".to_owned());
    }
    if let (Some(size), Some(limit)) = (size, limit)
        && limit < size
    {
        faults.push(format!("limit ({limit}) is below size ({size})"));
    }
    let consumer = own.get("consumer").and_then(|name| match name.parse::<NodeName>() {
        Ok(node) => Some(node),
        Err(e) => {
            faults.push(format!("consumer: {e}"));
            None
        }
    });
    let mode = match own.get("mode") {
        None | Some(&"filesystem") => VolumeMode::Filesystem,
        Some(&"block") => VolumeMode::Block,
        Some(other) => {
            faults.push(format!("mode: {other:?} is neither filesystem nor block"));
            VolumeMode::Filesystem
        }
    };
    let reach = match own.get("reach") {
        None => Reach::AnyNode,
        Some(&"one-node") => Reach::OneNode,
        Some(&"any-node") => Reach::AnyNode,
        Some(other) => {
            faults.push(format!("reach: {other:?} is neither one-node nor any-node"));
            Reach::AnyNode
        }
    };
    let sharing = match own.get("access").map(|name| (name, claim_mode(name))) {
        None => Sharing::Exclusive,
        Some((_, Some(mode))) => Sharing::of(&[mode]),
        Some((other, None)) => {
            faults.push(format!("access: {other:?} is no access mode of a claim"));
            Sharing::Exclusive
        }
    };
    let policy = match Policy::parse(&given) {
        Ok(policy) => Some(policy),
        Err(told) => {
            faults.extend(told.iter().map(ToString::to_string));
            None
        }
    };
    let (Some(size), Some(policy), true) = (size, policy, faults.is_empty()) else { return Err(faults) };
    let all_able = || {
        let nodes = pools.iter().map(|view| &view.node).chain(&consumer).cloned();
        Network::able(nodes.collect::<BTreeSet<_>>())
    };
    let as_if = match (network, own.contains_key("reach") && reach == Reach::AnyNode) {
        (Some(network), false) => Cow::Borrowed(network),
        _ => Cow::Owned(all_able()),
    };
    let request = Request { size, limit, mode, consumer, topology: Vec::new(), reach, sharing };
    Ok(match split::plan_within(&request, &policy, pools, &as_if) {
        Ok(plan) => PlanAnswer { feasible: true, plan: Some(plan), refusal: None },
        Err(refusal) => PlanAnswer { feasible: false, plan: None, refusal: Some(refusal) },
    })
}

/// The access mode that a claim names so.
fn claim_mode(name: &str) -> Option<AccessMode> {
    match name {
        "ReadWriteOnce" => Some(AccessMode::SingleNodeMultiWriter),
        "ReadWriteOncePod" => Some(AccessMode::SingleNodeSingleWriter),
        "ReadOnlyMany" => Some(AccessMode::MultiNodeReaderOnly),
        "ReadWriteMany" => Some(AccessMode::MultiNodeMultiWriter),
        _ => None,
    }
}

/// The StorageClass parameters with their meaning.
pub(super) fn class_parameters() -> impl Iterator<Item = (String, String)> {
    parameters().iter().map(|p| {
        let meaning = format!("{} Values: {}. Default: {}.", p.meaning, p.values, p.default);
        (p.key.to_owned(), meaning)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Two nodes with one pool of 10 GiB each.
    fn pools() -> Vec<PoolView> {
        let pool =
            |node: &str| json!({"node": node, "name": "p", "total": 10_u64 << 30, "free": 10_u64 << 30});
        serde_json::from_value(json!([pool("a"), pool("b")])).unwrap()
    }

    fn asked(query: &[(&str, &str)], network: Option<&Network>) -> PlanAnswer {
        let query: Vec<_> =
            query.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        answer(&query, &pools(), network).unwrap()
    }

    #[test]
    fn a_plan_is_over_nodes_that_reach_each_other_or_as_if_they_did_or_on_one() {
        let able = Network::able(["a", "b"].map(|name| name.parse().unwrap()));
        let silent = Network::default();
        let large = ("size", "15Gi");
        for (query, network, feasible) in [
            (vec![large], Some(&able), true),
            (vec![large], Some(&silent), false),
            (vec![large, ("reach", "any-node")], Some(&silent), true),
            (vec![large, ("reach", "one-node")], Some(&able), false),
            // Of a described cluster it is not known.
            (vec![large], None, true),
            (vec![large, ("consumer", "c")], None, true),
            (vec![large, ("reach", "one-node")], None, false),
            (vec![large, ("access", "ReadWriteMany")], None, false),
        ] {
            assert_eq!(asked(&query, network).feasible, feasible, "{query:?}");
        }
        let refused = answer(
            &[("size".to_owned(), "1Gi".to_owned()), ("access".to_owned(), "RWX".to_owned())],
            &[],
            None,
        );
        assert!(refused.unwrap_err()[0].starts_with("access:"));
    }
}
