//! From pools to a plan: filters, one candidate per filesystem, strategy, order.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::ops::{Range, RangeInclusive};

use super::candidates::candidates;
use super::fewest::Search;
use super::fill::{Draft, Piece, Want};
use super::shaped::Shaped;
use super::space::{Candidate, Overhead, Scale, Side, by_name};
use super::{Capacity, Infeasible, Plan, PlannedBranch, Request};
use crate::domain::Bytes;
use crate::domain::placement::{Filters, Scope};
use crate::domain::policy::{Placement, Policy, Strategy};
use crate::domain::pool::PoolView;
use crate::domain::volume::VolumeMode;

/// One question: a request, a policy, the pools.
pub(super) struct Planner<'a, O> {
    pub(super) request: &'a Request,
    pub(super) policy: &'a Policy,
    pub(super) pools: Vec<&'a PoolView>,
    pub(super) filters: Filters<'a>,
    pub(super) scale: Scale<'a, O>,
    /// Pools that qualify, node by node, the largest of a node first, one per filesystem.
    pub(super) candidates: Vec<Candidate>,
    /// Those of them that may be in one plan together: all, or those of each node where a plan must be on one node.
    groups: Vec<Range<usize>>,
    pub(super) count: RangeInclusive<usize>,
}

/// The two sides of one group.
struct Sides<'c> {
    local: Side<'c>,
    remote: Side<'c>,
    /// Both together; `None` where all are remote.
    mixed: Option<Side<'c>>,
}

impl<'c> Sides<'c> {
    fn both(&self) -> &Side<'c> {
        self.mixed.as_ref().unwrap_or(&self.remote)
    }
}

impl<'a, O: Overhead> Planner<'a, O> {
    pub(super) fn new(
        overhead: &'a O,
        request: &'a Request,
        policy: &'a Policy,
        pools: impl IntoIterator<Item = &'a PoolView>,
    ) -> Self {
        Self::within(overhead, request, policy, pools, Scope::All)
    }

    /// The same for branches of some nodes.
    pub(super) fn within(
        overhead: &'a O,
        request: &'a Request,
        policy: &'a Policy,
        pools: impl IntoIterator<Item = &'a PoolView>,
        scope: Scope<'a>,
    ) -> Self {
        let pools: Vec<&PoolView> = pools.into_iter().collect();
        let filters = Filters::new(request, policy, scope);
        let scale = Scale::new(overhead, policy, request.mode);
        let (candidates, by_node) = candidates(&filters, &scale, policy, &pools);
        let groups =
            if filters.tie().is_some() { by_node } else { std::iter::once(0..candidates.len()).collect() };
        let least = usize::try_from(policy.min_branches).unwrap_or(usize::MAX).max(1);
        let most = match request.mode {
            VolumeMode::Filesystem => usize::try_from(policy.max_branches).unwrap_or(usize::MAX),
            VolumeMode::Block => 1,
        };
        Self { request, policy, pools, filters, scale, candidates, groups, count: least..=most }
    }

    pub(super) fn plan(&self) -> Result<Plan, Infeasible> {
        self.found().ok_or_else(|| self.refuse(self.largest()))
    }

    /// The plan, if there is one.
    pub(super) fn found(&self) -> Option<Plan> {
        self.solve(self.want(self.request.size)).map(|draft| self.finish(draft))
    }

    /// Whether there is one.
    pub(super) fn feasible(&self) -> bool {
        self.solve(self.want(self.request.size)).is_some()
    }

    fn want(&self, size: Bytes) -> Want {
        Want { size: size.get().max(1), limit: self.request.limit.unwrap_or(Bytes::MAX).get() }
    }

    fn solve(&self, want: Want) -> Option<Draft> {
        if want.size > want.limit {
            return None;
        }
        match self.groups.as_slice() {
            [only] => self.solve_group(&self.candidates[only.clone()], want),
            _ => self.solve_group(self.best_node(want)?, want),
        }
    }

    /// Candidates that may be in one plan together.
    pub(super) fn groups(&self) -> impl Iterator<Item = &[Candidate]> {
        self.groups.iter().map(|group| &self.candidates[group.clone()])
    }

    /// The node for a volume that must be on one: the fewest branches, then the most room, so that volumes spread, then the
    /// name. Only `fewest` asks for few branches; the other strategies go where the most room is.
    fn best_node(&self, want: Want) -> Option<&[Candidate]> {
        // A branch is worth no more than its room: so many branches it takes at least. Nodes are asked in the order of
        // that bound, and once it is not better than what was found, no later one can be.
        let bound = |group: &[Candidate]| {
            let mut sum = 0_u128;
            let enough = group.iter().position(|candidate| {
                sum += u128::from(candidate.room);
                sum >= u128::from(want.size)
            })?;
            let room: u128 = group.iter().map(|candidate| u128::from(candidate.room)).sum();
            let fewest = if self.policy.strategy == Strategy::Fewest { enough + 1 } else { 0 };
            Some((fewest, Reverse(room)))
        };
        let mut nodes: Vec<_> =
            self.groups().filter_map(|group| bound(group).map(|bound| (bound, group))).collect();
        let node = |group: &[Candidate]| group.first().map(|candidate| &self.pools[candidate.at()].node);
        nodes.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| node(a.1).cmp(&node(b.1))));
        let mut best = None;
        for ((least, room), group) in nodes {
            if best.is_some_and(|((count, best_room), _)| (least, room) >= (count, best_room)) {
                break;
            }
            let Some(draft) = self.fewest(&self.sides(group), want) else { continue };
            let count = if self.policy.strategy == Strategy::Fewest { draft.branches.len() } else { 0 };
            let score = (count, room);
            if best.is_none_or(|(best, _)| score < best) {
                best = Some((score, group));
            }
        }
        best.map(|(_, group)| group)
    }

    fn solve_group(&self, group: &[Candidate], want: Want) -> Option<Draft> {
        let sides = self.sides(group);
        if !sides.local.all.is_empty() {
            let local = Sides {
                local: self.side(Cow::Borrowed(&[])),
                remote: self.side(Cow::Borrowed(&sides.local.all)),
                mixed: None,
            };
            if let Some(draft) = self.by_strategy(&local, want) {
                return Some(draft);
            }
        }
        self.by_strategy(&sides, want)
    }

    fn by_strategy(&self, sides: &Sides<'_>, want: Want) -> Option<Draft> {
        let shaped = Shaped {
            scale: &self.scale,
            pools: &self.pools,
            one_node: self.filters.tie().is_some(),
            group: &sides.both().all,
            sides: [&sides.local, &sides.remote],
            count: self.count.clone(),
            want,
        };
        let draft = match self.policy.strategy {
            Strategy::Fewest => None,
            // One branch is the same by every strategy, and best-fit.
            _ if *self.count.end() <= 1 => None,
            Strategy::Balanced => shaped.balanced(),
            Strategy::Spread => shaped.spread(),
        };
        draft.or_else(|| self.fewest(sides, want))
    }

    fn fewest(&self, sides: &Sides<'_>, want: Want) -> Option<Draft> {
        let search = Search {
            scale: &self.scale,
            pools: &self.pools,
            sides: [&sides.local, &sides.remote],
            both: sides.both(),
            count: self.count.clone(),
            want,
        };
        search.run()
    }

    fn side<'c>(&self, all: Cow<'c, [Candidate]>) -> Side<'c> {
        Side::new(&self.scale, &self.pools, all, *self.count.end())
    }

    fn sides<'c>(&self, group: &'c [Candidate]) -> Sides<'c> {
        let (local, remote): (Vec<Candidate>, Vec<Candidate>) = match self.policy.placement {
            Placement::PreferLocal if group.iter().any(|candidate| candidate.local) => {
                group.iter().partition(|candidate| candidate.local)
            }
            _ => (Vec::new(), Vec::new()),
        };
        if local.is_empty() {
            let (local, remote) = (self.side(Cow::Borrowed(&[])), self.side(Cow::Borrowed(group)));
            return Sides { local, remote, mixed: None };
        }
        let mixed = Some(self.side(Cow::Borrowed(group)));
        Sides { local: self.side(local.into()), remote: self.side(remote.into()), mixed }
    }

    /// Usable bytes of the largest volume within the limit, whatever size was asked for.
    pub(super) fn largest(&self) -> Bytes {
        let limit = self.request.limit.unwrap_or(Bytes::MAX).get();
        let reach = self.groups().map(|group| self.reach(group)).max().unwrap_or(0);
        let most = reach.min(limit);
        if most == 0 || self.solve(self.want(Bytes::new(most))).is_some() {
            return Bytes::new(most);
        }
        // A limit between what few quanta and what more quanta can give: sizes below it work in steps only, and the largest
        // is looked for as if they worked without gaps.
        let (mut low, mut high) = (0, most);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if self.solve(self.want(Bytes::new(middle))).is_some() {
                low = middle;
            } else {
                high = middle;
            }
        }
        Bytes::new(low)
    }

    fn reach(&self, group: &[Candidate]) -> u64 {
        let side = self.side(Cow::Borrowed(group));
        let reach =
            self.count.clone().take_while(|n| *n <= side.all.len()).filter_map(|n| side.reach(n)).max();
        u64::try_from(reach.unwrap_or(0)).unwrap_or(u64::MAX)
    }

    /// Usable bytes that all candidates could give.
    pub(super) fn total(&self) -> Bytes {
        self.candidates.iter().map(|candidate| Bytes::new(self.scale.space(*candidate).full)).sum()
    }

    pub(super) fn capacity(&self) -> Capacity {
        let total = self.total();
        let maximum_volume_size = self.largest();
        let minimum_volume_size = if maximum_volume_size.is_zero() { Bytes::ZERO } else { self.smallest() };
        Capacity { total, maximum_volume_size, minimum_volume_size }
    }

    /// The smallest size that comes out exactly: the smallest branches that the fewest allowed number can have.
    pub(super) fn smallest(&self) -> Bytes {
        let wholes = *self.count.start() - 1;
        let least = self.groups().filter_map(|group| {
            let mut quanta: Vec<u64> = group
                .iter()
                .map(|candidate| self.scale.space(*candidate))
                .filter(|space| space.quanta > 0)
                .map(|space| self.scale.least_whole(space.pool.format))
                .collect();
            quanta.sort_unstable();
            let rest = group.iter().map(|candidate| self.scale.least_rest(candidate.format)).min()?;
            (wholes < group.len() && wholes <= quanta.len())
                .then(|| quanta[..wholes].iter().fold(rest, |sum, usable| sum.saturating_add(*usable)))
        });
        Bytes::new(least.min().unwrap_or(0))
    }

    /// Puts the branches into the union's order: local ones first, each group the largest first and the rest last.
    fn finish(&self, draft: Draft) -> Plan {
        let capacity = Bytes::new(u64::try_from(draft.capacity).unwrap_or(u64::MAX));
        let rest = draft.branches.last().map(|piece| piece.space.pool.at());
        let mut pieces = draft.branches;
        pieces.sort_by(|a, b| {
            let key = |piece: &Piece| {
                let at = piece.space.pool.at();
                (!self.filters.is_local(&self.pools[at].node), Some(at) == rest, Reverse(piece.size))
            };
            key(a).cmp(&key(b)).then_with(|| by_name(&self.pools, a.space.pool.at(), b.space.pool.at()))
        });
        let branch = |(index, piece): (u32, Piece)| {
            let view = self.pools[piece.space.pool.at()];
            PlannedBranch {
                index,
                node: view.node.clone(),
                pool: view.pool.name.clone(),
                size: Bytes::new(piece.size),
                usable: Bytes::new(piece.usable),
                format: piece.space.pool.format,
                fs_type: self.scale.fs(piece.space.pool.format),
            }
        };
        Plan { capacity, branches: (0..).zip(pieces).map(branch).collect() }
    }
}
