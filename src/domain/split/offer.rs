//! What each node of a cluster can get, without asking the planner about all pools for each node.
//!
//! Nodes that can attach alike reach the same branches, except that each has its own pools at hand. So what they all get is
//! computed once ([`Offer::new`]), and for each node only what its own pools change ([`Offer::on`]). The largest volume needs
//! no more pools of a format than a volume may have branches, the largest ones: a larger pool gives at least as much in whole
//! quanta, and at least as much in all. As many more are kept as one node has pools, which are left out for that node.

use std::collections::HashMap;

use super::planner::Planner;
use super::space::{Candidate, Overhead, Real};
use super::within::{Within, transports};
use super::{BranchFormat, Capacity, Request, Sharing};
use crate::domain::placement::Scope;
use crate::domain::policy::{Placement, Policy};
use crate::domain::pool::PoolView;
use crate::domain::reach::{Attaches, Network, NodeReach};
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};

/// What the nodes that can attach alike get from others, under one policy, for volumes that one node at a time uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    attaches: Attaches,
    mode: VolumeMode,
    /// The best pools.
    best: Vec<PoolView>,
    /// What there is for a node that has no pools.
    everywhere: Capacity,
}

impl Offer {
    /// What nodes that attach so get from `pools`; `network` is as it is under the policy ([`Network::under`]).
    #[must_use]
    pub fn new<'a>(
        attaches: Attaches,
        mode: VolumeMode,
        policy: &Policy,
        pools: impl IntoIterator<Item = &'a PoolView>,
        network: &Network,
    ) -> Self {
        Self::with(&Real, attaches, mode, policy, pools.into_iter().collect(), network)
    }

    /// Whether nodes get anything from each other under the policy: where not, what a node gets is what its own pools give.
    #[must_use]
    pub fn counts(attaches: Attaches, policy: &Policy) -> bool {
        attaches.any() && policy.placement != Placement::Local
    }

    /// What there is for a node without pools.
    #[must_use]
    pub const fn everywhere(&self) -> Capacity {
        self.everywhere
    }

    /// What there is for volumes that are used on `node`, whose own pools are `own`; `network` as before.
    #[must_use]
    pub fn on(&self, node: &NodeName, policy: &Policy, own: &[PoolView], network: &Network) -> Capacity {
        self.on_with(&Real, node, policy, own, network)
    }

    pub(super) fn with<O: Overhead>(
        overhead: &O,
        attaches: Attaches,
        mode: VolumeMode,
        policy: &Policy,
        pools: Vec<&PoolView>,
        network: &Network,
    ) -> Self {
        let request = question(mode, None);
        let remote = Scope::Remote(network, attaches);
        let planner = Planner::within(overhead, &request, policy, pools, remote);
        let mut of_node: HashMap<&NodeName, usize> = HashMap::new();
        for candidate in &planner.candidates {
            *of_node.entry(&planner.pools[candidate.at()].node).or_default() += 1;
        }
        let of_one = of_node.values().max().copied().unwrap_or(0);
        let most = planner.count.end().saturating_add(1).saturating_add(of_one);
        let best = [BranchFormat::Directory, BranchFormat::Image].into_iter().flat_map(|format| {
            let mut all: Vec<&Candidate> =
                planner.candidates.iter().filter(|candidate| candidate.format == format).collect();
            all.sort_unstable_by_key(|candidate| (std::cmp::Reverse(candidate.room), candidate.at()));
            all.truncate(most);
            all.into_iter().map(|candidate| planner.pools[candidate.at()].clone()).collect::<Vec<_>>()
        });
        let (best, everywhere) = (best.collect(), planner.capacity());
        Self { attaches, mode, best, everywhere }
    }

    pub(super) fn on_with<O: Overhead>(
        &self,
        overhead: &O,
        node: &NodeName,
        policy: &Policy,
        own: &[PoolView],
        network: &Network,
    ) -> Capacity {
        if own.is_empty() || self.gives_others_the_same(node, policy, network) {
            return self.everywhere;
        }
        let (here, anyone) = (question(self.mode, Some(node.clone())), question(self.mode, None));
        let others = self.best.iter().filter(|view| view.node != *node);
        let known = Within::new(overhead, &here, policy, others.chain(own).collect(), network).capacity();
        let remote = Scope::Remote(network, self.attaches);
        let given = Planner::within(overhead, &anyone, policy, own, remote).total();
        let had = Within::new(overhead, &here, policy, own.iter().collect(), network).capacity().total;
        let total = self.everywhere.total.saturating_sub(given).saturating_add(had);
        Capacity { total, ..known }
    }

    /// Whether the node's pools give it what they give any other node that attaches as it does.
    fn gives_others_the_same(&self, node: &NodeName, policy: &Policy, network: &Network) -> bool {
        let owns = |reach: &NodeReach| {
            transports(self.mode, policy)
                .iter()
                .all(|transport| self.attaches.by(*transport) && reach.owns(*transport))
        };
        network.node(node).is_some_and(owns)
    }
}

/// The size does not matter to the question.
fn question(mode: VolumeMode, consumer: Option<NodeName>) -> Request {
    Request {
        size: Bytes::ZERO,
        limit: None,
        mode,
        topology: consumer.iter().cloned().collect(),
        consumer,
        reach: super::Reach::AnyNode,
        sharing: Sharing::Exclusive,
    }
}
