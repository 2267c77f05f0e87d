//! What the objects in the store say, alone and together; pure functions on them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::object::{Branch, BranchPhase, StorageNode, VolumeSplit, condition};
use crate::domain::policy::{Placement, Policy};
use crate::domain::pool::{PoolReport, PoolView, allocatable};
use crate::domain::reach::{Network, NodeReach, Transport, Unreachable, reachable};
use crate::domain::split::{BranchFormat, PlannedBranch, Sharing};
use crate::domain::{BranchId, Bytes, NodeName, PoolName};

/// The pools of all nodes as a planner is to see them.
///
/// What is promised of a pool is the sum of the sizes of the branches that are planned there or exist there, each once; it
/// does not come from the nodes' reports, which know nothing of what was planned since. A branch that its node refused
/// takes no room, though its plan still names it.
#[must_use]
pub fn pool_views(nodes: &[StorageNode], splits: &[VolumeSplit], branches: &[Branch]) -> Vec<PoolView> {
    let promised = promised(splits, branches);
    let of_node = |node: &StorageNode| {
        pools_of(node, |pool| promised.get(&(&node.spec.node, pool)).copied().unwrap_or_default())
    };
    nodes.iter().flat_map(of_node).collect()
}

/// The pools of one node, given what is promised of each, by the store.
///
/// The report's `free` and `occupied` were measured at one moment. Where `occupied` exceeds what is promised (a branch
/// went since), it is limited to it, which understates what is free until the node reports anew and never overstates it.
#[must_use]
pub fn pools_of(node: &StorageNode, promised: impl Fn(&PoolName) -> Bytes) -> Vec<PoolView> {
    let pools = &node.status.pools;
    let labels = Arc::new(node.status.labels.clone());
    let view = |report: &PoolReport| {
        let mut pool = report.clone();
        pool.promised = pools
            .iter()
            .filter(|p| p.name == pool.name || (!p.device.is_empty() && p.device == pool.device))
            .fold(Bytes::ZERO, |sum, p| sum.saturating_add(promised(&p.name)));
        pool.occupied = pool.occupied.min(pool.promised);
        pool.allocatable =
            Some(allocatable(pool.total, pool.free, pool.reserve, pool.promised, pool.occupied));
        PoolView { node: node.spec.node.clone(), node_labels: labels.clone(), pool }
    };
    pools.iter().map(view).collect()
}

/// What the nodes can carry between each other, as they publish it.
#[must_use]
pub fn network<'a>(nodes: impl IntoIterator<Item = &'a StorageNode>) -> Network {
    Network::new(nodes.into_iter().map(reach_of))
}

/// What a node can carry, as it publishes it.
#[must_use]
pub fn reach_of(node: &StorageNode) -> NodeReach {
    NodeReach {
        node: node.spec.node.clone(),
        transports: node.status.transports.clone(),
        addresses: node.status.network.as_ref().map(|network| network.addresses.clone()).unwrap_or_default(),
    }
}

/// Whether the node can prove by that transport who it is.
#[must_use]
pub fn authenticates(node: &StorageNode, transport: Transport) -> bool {
    let reports = node.status.transports.iter();
    reports.filter(|report| report.transport == transport).any(|report| report.authentication.able)
}

/// Whether the node can encrypt what is sent by that transport.
#[must_use]
pub fn encrypts(node: &StorageNode, transport: Transport) -> bool {
    let reports = node.status.transports.iter();
    reports.filter(|report| report.transport == transport).any(|report| report.encryption.able)
}

/// Whether all branches of the volume exist.
#[must_use]
pub fn is_ready(split: &VolumeSplit) -> bool {
    condition(&split.status.conditions, "Ready").is_some_and(|c| c.status)
}

/// Usable bytes of the volume: those of its plan. While the plan is not whole, what it will have at least; while a branch
/// is lost, still what it has when it is complete.
#[must_use]
pub fn capacity(split: &VolumeSplit) -> Bytes {
    let planned = split.spec.branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.usable));
    planned.max(split.spec.capacity)
}

/// Label of a node that can attach branches of others by that transport, with the value `true`: a segment of its topology, and
/// what a volume with such branches asks of nodes. `None` for branches on the node itself.
#[must_use]
pub const fn label_of(transport: Transport) -> Option<&'static str> {
    match transport {
        Transport::Local => None,
        Transport::NvmeTcp => Some("union.csi.union.io/nvme-tcp"),
        Transport::Nfs => Some("union.csi.union.io/nfs"),
    }
}

/// Where a volume can be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accessible {
    /// On these nodes, which hold branches of it.
    pub nodes: Vec<NodeName>,
    /// And on any node that can attach branches by all of these; on no further one where there are none.
    pub transports: BTreeSet<Transport>,
}

impl Accessible {
    /// Nowhere.
    #[must_use]
    pub fn is_nowhere(&self) -> bool {
        self.nodes.is_empty() && self.transports.is_empty()
    }
}

/// Nodes that hold branches of the volume, each once.
#[must_use]
pub fn owners(split: &VolumeSplit) -> BTreeSet<&NodeName> {
    split.spec.branches.iter().map(|branch| &branch.node).collect()
}

/// Where a volume can be used, given what the nodes that hold its branches can carry.
///
/// A volume that several nodes may use at once, and whose branches cannot serve several, is used on their node, where it
/// serves any number of pods; else the second pod could be sent to where it cannot start.
#[must_use]
pub fn accessible(split: &VolumeSplit, network: &Network) -> Accessible {
    let network = &*under_its_class(split, network);
    let owners = owners(split);
    let at_home = owners.len() == 1 && (is_local(split) || confined(split));
    let serves = |node: &&NodeName| at_home || reaches(split, node, network).is_ok();
    let nodes = owners.iter().copied().filter(serves).cloned().collect();
    let exported = |branch: &PlannedBranch| {
        let transport = Transport::between_nodes(branch.format);
        network.node(&branch.node).filter(|owner| owner.owns(transport)).map(|_| transport)
    };
    let transports: Option<BTreeSet<Transport>> = split.spec.branches.iter().map(exported).collect();
    let transports = transports.filter(|_| !is_local(split) && !confined(split)).unwrap_or_default();
    Accessible { nodes, transports }
}

/// Whether a node reaches all branches of a volume, whoever may use it.
///
/// # Errors
/// The first branch that it does not reach: why.
pub fn reaches(split: &VolumeSplit, node: &NodeName, network: &Network) -> Result<(), Unreachable> {
    let network = under_its_class(split, network);
    let known =
        |name: &NodeName| network.node(name).cloned().unwrap_or_else(|| NodeReach::silent(name.clone()));
    let consumer = known(node);
    split
        .spec
        .branches
        .iter()
        .try_for_each(|branch| reachable(&known(&branch.node), &consumer, branch.format).map(|_| ()))
}

/// What the nodes can carry for this volume.
fn under_its_class<'a>(split: &VolumeSplit, network: &'a Network) -> Cow<'a, Network> {
    Policy::parse(&split.spec.parameters).map_or(Cow::Borrowed(network), |policy| network.under(&policy))
}

/// Whether nodes must prove to each other who they are before they use its branches over the network.
#[must_use]
pub fn requires_authentication(split: &VolumeSplit) -> bool {
    Policy::parse(&split.spec.parameters).is_ok_and(|policy| policy.requires_authentication())
}

/// Whether its branches are used over the network only where nobody can read what is sent.
#[must_use]
pub fn requires_encryption(split: &VolumeSplit) -> bool {
    Policy::parse(&split.spec.parameters).is_ok_and(|policy| policy.requires_encryption())
}

/// Whether its class has `placement: local`: it is used where it lies only.
#[must_use]
pub fn is_local(split: &VolumeSplit) -> bool {
    Policy::parse(&split.spec.parameters).is_ok_and(|policy| policy.placement == Placement::Local)
}

/// Why a volume cannot be used on several nodes at once, writing where `writing`, whatever its access modes; `None` where it
/// can.
#[must_use]
pub fn one_node_at_a_time(split: &VolumeSplit, writing: bool) -> Option<&'static str> {
    let branches = &split.spec.branches;
    if branches.iter().any(|branch| branch.format == BranchFormat::Image) {
        Some(
            "it has an image branch, which goes to one node at a time (branchFormat directory serves several)",
        )
    } else if writing && branches.len() > 1 {
        Some("it has several branches, and files that several nodes make could hide each other")
    } else {
        None
    }
}

/// It is for several nodes at once and cannot be used so.
fn confined(split: &VolumeSplit) -> bool {
    match Sharing::of(&split.spec.access_modes) {
        Sharing::Exclusive => false,
        Sharing::ManyReaders => one_node_at_a_time(split, false).is_some(),
        Sharing::ManyWriters => one_node_at_a_time(split, true).is_some(),
    }
}

type Promised<'a> = BTreeMap<(&'a NodeName, &'a PoolName), Bytes>;

fn promised<'a>(splits: &'a [VolumeSplit], branches: &'a [Branch]) -> Promised<'a> {
    let planned = splits.iter().flat_map(|split| {
        split.spec.branches.iter().map(|b| (split.spec.volume.branch(b.index), (&b.node, &b.pool, b.size)))
    });
    let existing = branches.iter().map(|b| (b.spec.id.clone(), (&b.spec.node, &b.spec.pool, b.spec.size)));
    let mut each: BTreeMap<BranchId, (&NodeName, &PoolName, Bytes)> = planned.chain(existing).collect();
    for refused in branches.iter().filter(|b| b.status.phase == BranchPhase::Refused) {
        each.remove(&refused.spec.id);
    }
    let mut sums = Promised::new();
    for (node, pool, size) in each.into_values() {
        let sum = sums.entry((node, pool)).or_default();
        *sum = sum.saturating_add(size);
    }
    sums
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::domain::reach::Transport;

    fn node(name: &str, pools: serde_json::Value) -> StorageNode {
        serde_json::from_value(json!({
            "meta": {"name": name}, "spec": {"node": name}, "status": {"pools": pools, "labels": {"rack": "1"}}
        }))
        .unwrap()
    }

    fn split(name: &str, branches: &[(u32, &str, &str, u64)]) -> VolumeSplit {
        let branches: Vec<_> = branches
            .iter()
            .map(|(index, node, pool, size)| {
                json!({"index": index, "node": node, "pool": pool, "size": size, "usable": size, "format": "image"})
            })
            .collect();
        serde_json::from_value(json!({
            "meta": {"name": name},
            "spec": {"volume": name, "requestName": name, "capacity": 1, "accessModes": [], "branches": branches}
        }))
        .unwrap()
    }

    fn branch(volume: &str, index: u32, node: &str, pool: &str, size: u64) -> Branch {
        let id = format!("{volume}-{index}");
        serde_json::from_value(json!({
            "meta": {"name": id},
            "spec": {"id": id, "volume": volume, "index": index, "node": node, "pool": pool, "size": size,
                     "usable": size, "format": "image"}
        }))
        .unwrap()
    }

    fn free(views: &[PoolView], pool: &str) -> u64 {
        views.iter().find(|v| v.pool.name.as_str() == pool).unwrap().pool.allocatable().get()
    }

    #[test]
    fn a_plan_that_its_node_has_not_seen_is_promised_already() {
        let nodes = [node("n", json!([{"name": "a", "total": 100, "free": 100}]))];
        assert_eq!(free(&pool_views(&nodes, &[], &[]), "a"), 100);
        assert_eq!(free(&pool_views(&nodes, &[split("v", &[(0, "n", "a", 30)])], &[]), "a"), 70);
    }

    #[test]
    fn a_branch_that_is_planned_and_exists_and_is_counted_by_its_node_counts_once() {
        let nodes =
            [node("n", json!([{"name": "a", "total": 100, "free": 90, "promised": 30, "occupied": 10}]))];
        let views = pool_views(&nodes, &[split("v", &[(0, "n", "a", 30)])], &[branch("v", 0, "n", "a", 30)]);
        assert_eq!(free(&views, "a"), 70);
    }

    #[test]
    fn a_branch_that_left_the_plan_keeps_its_room_until_it_is_gone() {
        let nodes = [node("n", json!([{"name": "a", "total": 100, "free": 100}]))];
        let views = pool_views(&nodes, &[split("v", &[(1, "n", "a", 30)])], &[branch("v", 0, "n", "a", 20)]);
        assert_eq!(free(&views, "a"), 50);
    }

    #[test]
    fn pools_on_one_device_share_what_is_promised_and_others_do_not() {
        let pools = json!([
            {"name": "a", "total": 100, "free": 100, "device": "d"},
            {"name": "b", "total": 100, "free": 100, "device": "d"},
            {"name": "c", "total": 100, "free": 100},
            {"name": "e", "total": 100, "free": 100}
        ]);
        let nodes = [node("n", pools.clone()), node("m", pools)];
        let views = pool_views(&nodes, &[split("v", &[(0, "n", "a", 30), (1, "n", "c", 20)])], &[]);
        let first: Vec<u64> = views.iter().take(4).map(|v| v.pool.allocatable().get()).collect();
        assert_eq!(first, [70, 70, 80, 100]);
        assert!(views.iter().skip(4).all(|v| v.pool.allocatable().get() == 100 && v.node.as_str() == "m"));
    }

    #[test]
    fn a_branch_that_was_refused_takes_no_room() {
        let nodes = [node("n", json!([{"name": "a", "total": 100, "free": 100}]))];
        let mut refused = branch("v", 0, "n", "a", 30);
        refused.status.phase = BranchPhase::Refused;
        assert_eq!(free(&pool_views(&nodes, &[split("v", &[(0, "n", "a", 30)])], &[refused]), "a"), 100);
    }

    #[test]
    fn a_report_from_before_a_branch_went_understates_and_never_overstates() {
        let pool = json!([{"name": "a", "total": 100, "free": 60, "promised": 40, "occupied": 40, "allocatable": 60}]);
        assert_eq!(free(&pool_views(&[node("n", pool)], &[], &[]), "a"), 60);
    }

    /// A volume with branches on these nodes in these formats.
    fn on(branches: &[(&str, &str)], access_modes: &[&str], placement: &str) -> VolumeSplit {
        let branches: Vec<_> = branches
            .iter()
            .enumerate()
            .map(|(index, (node, format))| {
                json!({"index": index, "node": node, "pool": "p", "size": 1, "usable": 1, "format": format})
            })
            .collect();
        serde_json::from_value(json!({
            "meta": {"name": "v"},
            "spec": {"volume": "v", "requestName": "v", "capacity": 1, "accessModes": access_modes,
                     "branches": branches, "parameters": {"placement": placement}}
        }))
        .unwrap()
    }

    fn is_accessible(split: &VolumeSplit, network: &Network, nodes: &[&str], transports: &[Transport]) {
        let found = accessible(split, network);
        let names: Vec<&str> = found.nodes.iter().map(NodeName::as_str).collect();
        assert_eq!((names.as_slice(), &found.transports), (nodes, &transports.iter().copied().collect()));
    }

    const ONE: &[&str] = &["SingleNodeWriter"];

    #[test]
    fn a_volume_can_be_used_where_it_lies_and_wherever_its_branches_can_be_attached() {
        let names = ["a", "b"].map(|name| name.parse().unwrap());
        let (able, silent) = (Network::able(names), Network::default());
        let image = on(&[("a", "image")], ONE, "preferLocal");
        is_accessible(&image, &silent, &["a"], &[]);
        is_accessible(&image, &able, &["a"], &[Transport::NvmeTcp]);
        is_accessible(&on(&[("a", "image")], ONE, "local"), &able, &["a"], &[]);
        let both = on(&[("a", "image"), ("b", "directory")], ONE, "any");
        is_accessible(&both, &able, &["a", "b"], &[Transport::NvmeTcp, Transport::Nfs]);
        is_accessible(&both, &silent, &[], &[]);
        assert!(accessible(&both, &silent).is_nowhere());
        // One owner that exports nothing ties the volume to itself.
        let mut mixed = able.clone();
        mixed.put(NodeReach { addresses: Vec::new(), ..able.node(&"a".parse().unwrap()).unwrap().clone() });
        is_accessible(&both, &mixed, &["a"], &[]);
    }

    #[test]
    fn a_volume_for_several_nodes_that_serves_one_is_used_where_it_lies() {
        let able = Network::able(["a", "b"].map(|name| name.parse().unwrap()));
        let nfs: &[Transport] = &[Transport::Nfs];
        let (readers, writers): (&[&str], &[&str]) = (&["MultiNodeReaderOnly"], &["MultiNodeMultiWriter"]);
        for (branches, modes, transports) in [
            (&[("a", "image")][..], readers, &[][..]),
            (&[("a", "directory"), ("a", "directory")], readers, nfs),
            (&[("a", "directory")], writers, nfs),
            (&[("a", "directory"), ("a", "directory")], writers, &[]),
        ] {
            is_accessible(&on(branches, modes, "preferLocal"), &able, &["a"], transports);
        }
    }

    #[test]
    fn what_a_node_can_carry_is_read_from_its_object_and_one_of_before_can_carry_nothing() {
        let old = node("n", json!([]));
        let written = serde_json::to_value(&old.status).unwrap();
        assert!(written.get("transports").is_none() && written.get("network").is_none(), "{written}");
        assert_eq!(network([&old]).node(&old.spec.node), Some(&NodeReach::silent(old.spec.node.clone())));

        let mut new = serde_json::to_value(&old).unwrap();
        let can = json!({"able": true, "reason": "built in"});
        new["status"]["transports"] = json!([{"transport": "nvme-tcp", "owner": can, "consumer": can, "authentication": {"able": false}}]);
        new["status"]["network"] = json!({"interface": "eth1", "addresses": ["10.0.0.1"], "mtu": 9000});
        let new: StorageNode = serde_json::from_value(new).unwrap();
        let network = network([&new]);
        let read = network.node(&new.spec.node).unwrap();
        assert!(read.owns(Transport::NvmeTcp) && read.consumes(Transport::NvmeTcp));
        assert!(!read.owns(Transport::Nfs) && !read.consumes(Transport::Nfs));
    }
}
