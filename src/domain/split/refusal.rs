//! Why nothing fits: each pool with its reason, and one sentence for the whole.

use std::collections::{BTreeMap, HashMap};

use super::planner::Planner;
use super::space::{Candidate, Overhead, by_name};
use super::{Infeasible, PoolVerdict, Reach, Request, Sharing};
use crate::domain::placement::Tie;
use crate::domain::pool::PoolView;
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};

impl<O: Overhead> Planner<'_, O> {
    /// The refusal of this request; called where no plan was found. `largest`: what would work.
    pub(super) fn refuse(&self, largest: Bytes) -> Infeasible {
        let candidates: HashMap<usize, Candidate> =
            self.candidates.iter().map(|candidate| (candidate.at(), *candidate)).collect();
        let mut order: Vec<usize> = (0..self.pools.len()).collect();
        order.sort_by(|a, b| by_name(&self.pools, *a, *b));
        let mut briefs: BTreeMap<String, usize> = BTreeMap::new();
        let mut verdicts = Vec::with_capacity(order.len());
        let mut by_node: HashMap<&NodeName, Vec<&PoolView>> = HashMap::new();
        for candidate in candidates.values() {
            let view = self.pools[candidate.at()];
            by_node.entry(&view.node).or_default().push(view);
        }
        for at in order {
            let view = self.pools[at];
            let allocatable = view.pool.allocatable();
            let (usable, brief, reason) = match candidates.get(&at) {
                Some(candidate) => {
                    let space = self.scale.space(*candidate);
                    (Bytes::new(space.full), None, self.offer(space.full, space.quanta))
                }
                None => {
                    let beside = by_node.get(&view.node).map_or(&[][..], Vec::as_slice);
                    let (brief, reason) = self.rejection(view, beside);
                    (Bytes::ZERO, Some(brief), reason)
                }
            };
            if let Some(brief) = brief {
                *briefs.entry(brief).or_default() += 1;
            }
            let (node, pool) = (view.node.clone(), view.pool.name.clone());
            verdicts.push(PoolVerdict { node, pool, allocatable, usable, reason });
        }
        let reason = self.summary(largest, candidates.len(), &briefs);
        Infeasible { requested: self.request.size, largest, reason, pools: verdicts }
    }

    fn offer(&self, full: u64, quanta: u64) -> String {
        let full = Bytes::new(full).shown();
        if quanta == 0 && *self.count.end() > 1 {
            let quantum = self.policy.quantum;
            format!(
                "it could give {full}, as the branch that takes the rest: it has no room for a whole splitQuantum of \
                 {quantum}"
            )
        } else {
            format!("it could give {full}")
        }
    }

    /// Why a pool is no candidate, in a few words and in a sentence.
    fn rejection(&self, view: &PoolView, beside: &[&PoolView]) -> (String, String) {
        let format = match self.filters.admit(view) {
            Ok(format) => format,
            Err(rejection) => return (rejection.brief(), rejection.to_string()),
        };
        let allocatable = view.pool.allocatable();
        if self.scale.room(format, allocatable).is_none() {
            let least = Bytes::new(self.scale.least_size(format));
            let reason =
                format!("{} can be promised, the smallest branch is {}", allocatable.shown(), least.shown());
            return ("full".to_owned(), reason);
        }
        let sharing = beside.iter().find(|other| view.pool.shares_space_with(&other.pool));
        let reason = match sharing {
            Some(other) if other.pool.name != view.pool.name => {
                format!("it shares its filesystem with pool {}, which counts for both", other.pool.name)
            }
            _ => "another pool of this node has the same name".to_owned(),
        };
        ("on a filesystem that another pool counts for".to_owned(), reason)
    }

    fn summary(&self, largest: Bytes, qualify: usize, briefs: &BTreeMap<String, usize>) -> String {
        let total = self.pools.len();
        let mut pools = format!("{qualify} of {total} pools qualify");
        if !briefs.is_empty() {
            let mut counted: Vec<(&String, &usize)> = briefs.iter().collect();
            counted.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
            let listed: Vec<String> = counted.iter().map(|(brief, n)| format!("{n} {brief}")).collect();
            pools = format!("{pools} ({})", listed.join(", "));
        }
        format!("{}; {pools}", self.obstacle(largest))
    }

    /// Why it must be on one node, where it is only for that that nothing fits.
    fn would_fit_over_nodes(&self) -> Option<&'static str> {
        let why = match self.filters.tie()? {
            Tie::Placement => return None,
            Tie::Reach => "this one is placed on one node",
            Tie::Isolated => "a volume is placed on one node where nodes cannot reach each other's branches",
            Tie::Shared => {
                "a volume for several nodes at once is placed on one node unless its branches are directories that are \
                 reached by nfs"
            }
        };
        let request = Request { reach: Reach::AnyNode, ..self.request.clone() };
        let pools = self.pools.iter().copied();
        Planner::new(self.scale.overhead, &request, self.policy, pools).feasible().then_some(why)
    }

    /// What the class asks of the network, where nodes do not reach each other's branches; nothing where it asks for nothing.
    fn demand(&self) -> &'static str {
        if self.filters.tie() != Some(Tie::Isolated) {
            ""
        } else if self.policy.requires_encryption() {
            " (the class requires encryption, and nodes that cannot encrypt do not reach each other's branches)"
        } else if self.policy.requires_authentication() {
            " (the class requires authentication, and nodes that cannot prove who they are do not reach each other's branches)"
        } else {
            ""
        }
    }

    /// Several nodes are to write it, so that it has one branch.
    fn one_for_writers(&self) -> bool {
        self.request.sharing == Sharing::ManyWriters && self.filters.tie().is_none()
    }

    /// What stands in the way, the pools' own reasons aside.
    fn obstacle(&self, largest: Bytes) -> String {
        let size = self.request.size.shown();
        let (minimum, quantum) = (self.policy.min_branches, self.policy.quantum);
        if let Some(limit) = self.request.limit.filter(|limit| *limit < self.request.size) {
            return format!("{size} is more than the limit of {}", limit.shown());
        }
        if self.request.mode == VolumeMode::Block && minimum > 1 {
            return format!(
                "minBranches {minimum} rules out block volumes: a block volume of several branches is not supported"
            );
        }
        let most = self.groups().map(<[Candidate]>::len).max().unwrap_or(0);
        if usize::try_from(minimum).unwrap_or(usize::MAX) > most && minimum > 1 {
            let place = if self.filters.tie().is_some() { " on one node" } else { "" };
            return format!(
                "minBranches {minimum} needs as many filesystems{place}, and only {most} can be used{}",
                self.demand()
            );
        }
        let smallest = self.smallest();
        if minimum > 1 && smallest.is_zero() {
            return format!(
                "minBranches {minimum} needs room for a splitQuantum of {quantum} in all filesystems but one"
            );
        }
        if minimum > 1 && self.request.size < smallest {
            return format!(
                "{size} does not fit into {minimum} branches in quanta of {quantum}: the smallest volume that fits is {}",
                smallest.shown()
            );
        }
        if self.request.size <= largest && minimum > 1 {
            return format!(
                "{size} does not fit into {minimum} branches in quanta of {quantum}: sizes that fit come in steps, up to {}",
                largest.shown()
            );
        }
        if self.request.limit.is_some_and(|limit| limit < smallest) {
            return format!(
                "{size} does not fit within the limit: the smallest volume that fits is {}",
                smallest.shown()
            );
        }
        if let Some(why) = self.would_fit_over_nodes() {
            let (fits, there) = match &self.request.consumer {
                Some(node) => (format!("does not fit on node {node}, where it is used"), "there"),
                None => ("would fit over several nodes only".to_owned(), "on one"),
            };
            let room = if largest.is_zero() {
                format!("no volume fits {there} now")
            } else {
                format!("the largest volume that fits {there} now is {}", largest.shown())
            };
            return format!("{size} {fits}, and {why}{}: {room}", self.demand());
        }
        if largest.is_zero() {
            return format!("{size} does not fit: there is no room for any volume now");
        }
        let one = match self.request.mode {
            VolumeMode::Block => " in one branch (a block volume of several is not supported)",
            VolumeMode::Filesystem if self.one_for_writers() => {
                " in one branch (a volume that several nodes write has one: in several their files could hide each other)"
            }
            VolumeMode::Filesystem => "",
        };
        format!("{size} does not fit{one}: the largest volume that fits now is {}", largest.shown())
    }
}
