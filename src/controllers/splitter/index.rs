//! The picture that the splitter decides on: all volumes, branches and nodes, and what is promised of each pool.
//!
//! It is fed by the watches and, at once, by the splitter's own writes, so that the next plan counts the last one before
//! its event has come round. Versions are opaque, so which of two states is newer follows from how they came here: a
//! write made state B of state A, events come in order, hence whatever follows A is B or later, and A itself, when its
//! event comes round late, is old.
//!
//! What is promised of a pool is the sum of the sizes of the branches that are planned there, exist there, or are in a
//! plan that is being written, each branch once. It does not come from the nodes' reports, which know nothing of what
//! was planned since. What they do tell, `free` and `occupied`, was measured at one moment, and the sum of the two stays
//! the same while branches are filled and also when branches go:
//!
//! - a branch that was planned since has size in `promised` and nothing in `free` or `occupied`: counted in full;
//! - a branch that went since is in `occupied`, its bytes are missing from `free`, and it is not in `promised`: its bytes
//!   come back by `occupied`, as they really did on the disk. Where `occupied` then exceeds `promised`, it is limited to
//!   it, which understates what is free until the node reports anew, and never overstates it;
//! - files of branches that no object tells of (a store restored from a backup) are taken for foreign data. What they may
//!   still grow by is known to their node only, which is why it has the last word on admission.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use jiff::Timestamp;

use super::kept::Kept;
use super::room::{NodeRoom, Nodes, is_silent};
use crate::domain::pool::PoolView;
use crate::domain::reach::Network;
use crate::domain::split::PlannedBranch;
use crate::domain::{Bytes, NodeName, PoolName};
use crate::store::object::{Branch, BranchPhase, StorageNode, Version, VolumeSplit};
use crate::store::view::{pools_of, reach_of};

/// A pool of a node.
pub(super) type PoolKey = (NodeName, PoolName);

/// So many bytes of a pool. There are tens of thousands; the names of the pools are shared.
type Piece = (Arc<PoolKey>, Bytes);

/// Own writes of one volume whose events may be outstanding at once: two, since the next write waits for the answer to
/// the last, and a few more for events that are late.
const REPLACED: usize = 8;

/// Who says that a branch takes room; it is counted once.
#[derive(Debug, Default)]
struct Claim {
    /// The plan of its volume.
    planned: Option<Piece>,
    /// Its object.
    object: Option<Piece>,
    /// A plan that is being written.
    reserved: Option<Piece>,
    /// Its node refused it: nothing is on the disk and nothing will be, though the plan still names it.
    refused: bool,
}

impl Claim {
    fn counted(&self) -> Option<&Piece> {
        if self.refused {
            return None;
        }
        // All three are of one index, which is never used for two places.
        self.object.as_ref().or(self.planned.as_ref()).or(self.reserved.as_ref())
    }
}

#[derive(Debug, Default)]
pub(super) struct Index {
    splits: BTreeMap<String, Kept>,
    /// Volume to the versions that own writes replaced, whose events may still come.
    replaced: HashMap<String, VecDeque<Version>>,
    branches: BTreeMap<String, Branch>,
    /// Volume to names of its branches.
    of_volume: HashMap<String, Vec<String>>,
    nodes: BTreeMap<NodeName, StorageNode>,
    /// What can still be promised of each of them: kept, because many volumes ask between two changes.
    room: Nodes,
    /// What they can carry between each other.
    network: Network,
    /// Nodes whose room is another than when that was last asked.
    changed: BTreeSet<NodeName>,
    /// Branch id to who claims room for it.
    claims: HashMap<String, Claim>,
    promised: HashMap<Arc<PoolKey>, Bytes>,
    /// Volume to the ids of the plan that is being written.
    reservations: HashMap<String, Vec<String>>,
    grew: bool,
}

impl Index {
    pub(super) fn split(&self, name: &str) -> Option<Cow<'_, VolumeSplit>> {
        self.splits.get(name)?.split()
    }

    /// The branches of a volume, by name.
    pub(super) fn branches(&self, volume: &str) -> Vec<&Branch> {
        let names = self.of_volume.get(volume).into_iter().flatten();
        names.filter_map(|name| self.branches.get(name)).collect()
    }

    pub(super) fn split_names(&self) -> impl Iterator<Item = &String> {
        self.splits.keys()
    }

    pub(super) fn branch_names(&self) -> impl Iterator<Item = &String> {
        self.branches.keys()
    }

    pub(super) fn node_names(&self) -> impl Iterator<Item = &NodeName> {
        self.nodes.keys()
    }

    /// All nodes, with what can still be promised of their pools.
    pub(super) fn nodes(&self) -> &Nodes {
        &self.room
    }

    /// What the nodes can carry between each other.
    pub(super) fn network(&self) -> &Network {
        &self.network
    }

    /// The volume of a branch.
    pub(super) fn volume_of(&self, branch: &str) -> Option<String> {
        self.branches.get(branch).map(|b| b.spec.volume.to_string())
    }

    /// Branches whose volume does not exist.
    pub(super) fn orphans(&self) -> impl Iterator<Item = &Branch> {
        self.branches.values().filter(|b| !self.splits.contains_key(b.spec.volume.as_str()))
    }

    /// True once after there came to be more room, or another pool, than before.
    pub(super) fn take_grew(&mut self) -> bool {
        std::mem::take(&mut self.grew)
    }

    /// The nodes whose room changed since this was last asked, as it is now; nothing of one that is gone.
    pub(super) fn take_changed(&mut self) -> BTreeMap<NodeName, Option<NodeRoom>> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.map(|name| (name.clone(), self.room.get(&name).cloned())).collect()
    }

    /// Takes what an event told.
    pub(super) fn put_split(&mut self, split: VolumeSplit) {
        if self.replaced.get(&split.meta.name).is_some_and(|old| old.contains(&split.meta.version)) {
            return;
        }
        let name = split.meta.name.clone();
        if self.split(&name).is_some_and(|known| known.spec.branches != split.spec.branches) {
            self.unplan(&name);
        }
        for planned in &split.spec.branches {
            let id = split.spec.volume.branch(planned.index).to_string();
            let piece = self.piece(&planned.node, &planned.pool, planned.size);
            self.claim(&id, |claim| claim.planned = Some(piece));
        }
        self.splits.insert(name, Kept::new(split));
    }

    /// Takes what a write, or a read after a failed write, made of the version `base`.
    pub(super) fn put_later_split(&mut self, base: &Version, split: VolumeSplit) {
        let name = split.meta.name.clone();
        if self.splits.get(&name).is_none_or(|known| known.version() != base) {
            // An event came first, with this state or a later one.
            return;
        }
        if split.meta.version != *base {
            let replaced = self.replaced.entry(name).or_default();
            replaced.push_back(base.clone());
            if replaced.len() > REPLACED {
                replaced.pop_front();
            }
        }
        self.put_split(split);
    }

    pub(super) fn remove_split(&mut self, name: &str) {
        self.unplan(name);
        self.splits.remove(name);
        self.replaced.remove(name);
    }

    fn unplan(&mut self, name: &str) {
        let Some(split) = self.split(name) else { return };
        let ids: Vec<_> =
            split.spec.branches.iter().map(|b| split.spec.volume.branch(b.index).to_string()).collect();
        for id in ids {
            self.claim(&id, |claim| claim.planned = None);
        }
    }

    /// Takes a branch that was made, if no event has told of it yet.
    pub(super) fn put_new_branch(&mut self, branch: Branch) {
        if !self.branches.contains_key(&branch.meta.name) {
            self.put_branch(branch);
        }
    }

    /// The branch was asked to go, if it is there: that need not be asked again before its event comes.
    pub(super) fn branch_goes(&mut self, name: &str, now: Timestamp) {
        if let Some(branch) = self.branches.get_mut(name) {
            branch.meta.deleting.get_or_insert(now);
        }
    }

    /// Takes what an event told.
    pub(super) fn put_branch(&mut self, branch: Branch) {
        let branch = essence(branch);
        let name = branch.meta.name.clone();
        let place = self.piece(&branch.spec.node, &branch.spec.pool, branch.spec.size);
        let refused = branch.status.phase == BranchPhase::Refused;
        self.claim(&name, |claim| {
            claim.object = Some(place);
            claim.refused = refused;
        });
        let names = self.of_volume.entry(branch.spec.volume.to_string()).or_default();
        if let Err(at) = names.binary_search(&name) {
            names.insert(at, name.clone());
        }
        self.branches.insert(name, branch);
    }

    pub(super) fn remove_branch(&mut self, name: &str) {
        self.claim(name, |claim| {
            claim.object = None;
            claim.refused = false;
        });
        if let Some(branch) = self.branches.remove(name)
            && let Some(names) = self.of_volume.get_mut(branch.spec.volume.as_str())
        {
            names.retain(|n| n != name);
            if names.is_empty() {
                self.of_volume.remove(branch.spec.volume.as_str());
            }
        }
    }

    pub(super) fn put_node(&mut self, node: StorageNode) {
        let name = node.spec.node.clone();
        self.network.put(reach_of(&node));
        self.nodes.insert(name.clone(), node);
        let before = self.room.remove(&name).unwrap_or_default();
        self.refresh(&name);
        let Some(after) = self.room.get(&name) else { return };
        let spoke_again = after.heartbeat.is_some_and(|now| is_silent(before.heartbeat, now));
        self.grew |= spoke_again
            || after.reach != before.reach
            || after.pools.iter().any(|new| {
                let old = before.pools.iter().find(|old| old.pool.name == new.pool.name);
                old.is_none_or(|old| more_or_other(old, new))
            });
    }

    pub(super) fn remove_node(&mut self, name: &NodeName) {
        self.nodes.remove(name);
        self.network.remove(name);
        self.room.remove(name);
        self.changed.insert(name.clone());
    }

    /// Counts a plan that is about to be written.
    pub(super) fn reserve(&mut self, split: &VolumeSplit, branches: &[PlannedBranch]) {
        let mut ids = Vec::new();
        for planned in branches {
            let id = split.spec.volume.branch(planned.index).to_string();
            let piece = self.piece(&planned.node, &planned.pool, planned.size);
            self.claim(&id, |claim| claim.reserved = Some(piece));
            ids.push(id);
        }
        self.reservations.entry(split.meta.name.clone()).or_default().extend(ids);
    }

    /// What was reserved for the volume is written by now, and known, or is known not to be.
    pub(super) fn release(&mut self, volume: &str) {
        for id in self.reservations.remove(volume).unwrap_or_default() {
            self.claim(&id, |claim| claim.reserved = None);
        }
    }

    fn claim(&mut self, id: &str, change: impl FnOnce(&mut Claim)) {
        let claim = self.claims.entry(id.to_owned()).or_default();
        let before = claim.counted().cloned();
        change(claim);
        let after = claim.counted().cloned();
        if claim.object.is_none() && claim.planned.is_none() && claim.reserved.is_none() {
            self.claims.remove(id);
        }
        if before == after {
            return;
        }
        let mut nodes = Vec::new();
        if let Some((pool, size)) = before {
            if let Some(sum) = self.promised.get_mut(&pool) {
                *sum = sum.saturating_sub(size);
                if sum.is_zero() {
                    self.promised.remove(&pool);
                }
            }
            self.grew = true;
            nodes.push(pool);
        }
        if let Some((pool, size)) = after {
            let sum = self.promised.entry(pool.clone()).or_default();
            *sum = sum.saturating_add(size);
            nodes.push(pool);
        }
        nodes.dedup_by(|a, b| a.0 == b.0);
        nodes.iter().for_each(|pool| self.refresh(&pool.0));
    }

    /// A piece of a pool, whose name is kept once for as long as there are pieces of it.
    fn piece(&mut self, node: &NodeName, pool: &PoolName, size: Bytes) -> Piece {
        let key = (node.clone(), pool.clone());
        let known = self.promised.get_key_value(&key).map(|(known, _)| known.clone());
        (known.unwrap_or_else(|| Arc::new(key)), size)
    }

    /// Computes the room of a node anew.
    fn refresh(&mut self, name: &NodeName) {
        let Some(node) = self.nodes.get(name) else { return };
        let promised =
            |pool: &PoolName| self.promised.get(&(name.clone(), pool.clone())).copied().unwrap_or_default();
        let room = NodeRoom {
            pools: pools_of(node, promised),
            heartbeat: node.status.heartbeat,
            reach: self.network.node(name).filter(|reach| !reach.is_silent()).cloned(),
        };
        self.room.insert(name.clone(), room);
        self.changed.insert(name.clone());
    }
}

/// What decisions need of a branch: there are tens of thousands, and they are not written back.
fn essence(mut branch: Branch) -> Branch {
    branch.meta.labels.clear();
    branch.meta.finalizers = Vec::new();
    branch.meta.uid = String::new();
    branch.status.conditions = Vec::new();
    branch
}

/// Whether a plan that did not fit the old pool may fit the new one.
fn more_or_other(old: &PoolView, new: &PoolView) -> bool {
    let others = |view: &PoolView| {
        let mut view = view.clone();
        view.pool.total = Bytes::ZERO;
        view.pool.free = Bytes::ZERO;
        view.pool.promised = Bytes::ZERO;
        view.pool.occupied = Bytes::ZERO;
        view.pool.allocatable = None;
        view
    };
    new.pool.allocatable > old.pool.allocatable || others(old) != others(new)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{pool, split};
    use super::*;
    use crate::domain::split::BranchFormat;
    use crate::store::contract::branch;
    use crate::store::object::{Meta, StorageNodeSpec, StorageNodeStatus};

    fn node(pools: Vec<crate::domain::pool::PoolReport>) -> StorageNode {
        StorageNode {
            meta: Meta::new("n"),
            spec: StorageNodeSpec { node: "n".parse().unwrap() },
            status: StorageNodeStatus { pools, ..StorageNodeStatus::default() },
        }
    }

    /// A volume with one branch of so many GiB in the pool that [`branch`] names.
    fn planned(name: &str, version: &str, gib: u64) -> VolumeSplit {
        let mut split = split(name, gib);
        split.meta.version = Version(version.to_owned());
        split.spec.branches = vec![PlannedBranch {
            index: 0,
            node: "n".parse().unwrap(),
            pool: "pool".parse().unwrap(),
            size: Bytes::gib(gib),
            usable: Bytes::gib(gib),
            format: BranchFormat::Directory,
            fs_type: None,
        }];
        split.spec.next_index = 1;
        split
    }

    fn all(index: &Index) -> Vec<u64> {
        let pools = index.nodes().values().flat_map(|node| &node.pools);
        pools.map(|view| view.pool.allocatable().get() >> 30).collect()
    }

    fn left(index: &Index) -> u64 {
        all(index)[0]
    }

    #[test]
    fn a_branch_is_counted_once_however_many_tell_of_it() {
        let mut index = Index::default();
        index.put_node(node(vec![pool("pool", 10)]));
        assert_eq!(left(&index), 10);
        let plan = planned("v", "1", 1);
        index.reserve(&plan, &plan.spec.branches);
        assert_eq!(left(&index), 9);
        index.put_split(plan);
        index.put_branch(branch("v", 0, "n"));
        index.release("v");
        assert_eq!(left(&index), 9);
        index.take_grew();
        index.remove_split("v");
        assert_eq!((left(&index), index.take_grew()), (9, false), "the object is there still");
        index.remove_branch("v-0");
        assert_eq!((left(&index), index.take_grew()), (10, true));
        assert!(index.claims.is_empty());
    }

    #[test]
    fn a_branch_that_was_asked_to_go_is_known_to_before_its_event_comes() {
        let mut index = Index::default();
        index.put_node(node(vec![pool("pool", 10)]));
        index.put_branch(branch("v", 0, "n"));
        index.branch_goes("v-0", Timestamp::UNIX_EPOCH);
        index.branch_goes("gone-0", Timestamp::UNIX_EPOCH);
        let known: Vec<_> = index.branches("v").into_iter().map(|b| b.meta.deleting).collect();
        assert_eq!(known, [Some(Timestamp::UNIX_EPOCH)]);
        assert_eq!(left(&index), 9, "its files are there still");
    }

    #[test]
    fn a_plan_that_was_not_written_gives_its_room_back() {
        let mut index = Index::default();
        index.put_node(node(vec![pool("pool", 10)]));
        let plan = planned("v", "1", 4);
        index.reserve(&plan, &plan.spec.branches);
        index.release("v");
        assert_eq!((left(&index), index.take_grew()), (10, true));
    }

    #[test]
    fn a_refused_branch_takes_no_room_though_its_plan_still_names_it() {
        let mut index = Index::default();
        index.put_node(node(vec![pool("pool", 10)]));
        index.put_split(planned("v", "1", 1));
        let mut refused = branch("v", 0, "n");
        refused.status.phase = BranchPhase::Refused;
        index.put_branch(refused);
        index.put_split(planned("v", "2", 1));
        assert_eq!(left(&index), 10);
    }

    #[test]
    fn pools_of_one_device_share_what_is_promised() {
        let shared = |name| crate::domain::pool::PoolReport { device: "uuid".into(), ..pool(name, 10) };
        let mut index = Index::default();
        index.put_node(node(vec![shared("other"), shared("pool"), pool("alone", 10)]));
        index.put_split(planned("v", "1", 4));
        assert_eq!(all(&index), [6, 6, 10]);
    }

    #[test]
    fn the_report_of_a_branch_that_went_since_overstates_nothing() {
        let mut index = Index::default();
        // 4 GiB are occupied by a branch that is gone by now, and 1 GiB is promised and empty.
        let stale = crate::domain::pool::PoolReport {
            free: Bytes::gib(6),
            promised: Bytes::gib(4),
            occupied: Bytes::gib(4),
            ..pool("pool", 10)
        };
        index.put_node(node(vec![stale]));
        index.put_split(planned("v", "1", 1));
        assert!(left(&index) <= 9, "what the disk will have");
        assert_eq!(left(&index), 6, "as much as is sure");
    }

    #[test]
    fn a_late_event_does_not_take_back_an_own_write() {
        let mut index = Index::default();
        let unplanned = |version: &str| {
            let mut split = planned("v", version, 1);
            split.spec.branches.clear();
            split
        };
        let base = Version("1".into());
        index.put_split(unplanned("1"));
        index.put_later_split(&base, planned("v", "2", 1));
        index.put_split(unplanned("1"));
        assert_eq!(index.split("v").unwrap().spec.branches.len(), 1);
        // An event of a later write of someone else came before the answer to ours.
        index.put_split(planned("v", "4", 1));
        index.put_later_split(&Version("2".into()), planned("v", "3", 1));
        assert_eq!(index.split("v").unwrap().meta.version, Version("4".into()));
        index.remove_split("v");
        index.put_later_split(&Version("4".into()), planned("v", "5", 1));
        assert!(index.split("v").is_none(), "what is gone stays gone");
    }

    #[test]
    fn more_room_or_another_pool_is_news_and_less_is_not() {
        let mut index = Index::default();
        let mut news = |pools: Vec<crate::domain::pool::PoolReport>| {
            index.put_node(node(pools));
            index.take_grew()
        };
        assert!(news(vec![pool("pool", 10)]));
        assert!(!news(vec![pool("pool", 10)]));
        assert!(!news(vec![pool("pool", 9)]));
        assert!(news(vec![pool("pool", 10)]));
        assert!(news(vec![pool("pool", 10), pool("b", 1)]));
        let labelled = [("a".to_owned(), "b".to_owned())].into();
        assert!(news(vec![crate::domain::pool::PoolReport { labels: labelled, ..pool("pool", 10) }]));
    }
}
