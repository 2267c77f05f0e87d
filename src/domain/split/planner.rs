//! From pools to a plan: filters, one candidate per filesystem, strategy, order.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use super::fewest::Search;
use super::fill::{Draft, Piece, Want};
use super::shaped::Shaped;
use super::space::{Candidate, Overhead, Scale, Side, by_name};
use super::{Capacity, Infeasible, Plan, PlannedBranch, Request};
use crate::domain::placement::Filters;
use crate::domain::policy::{Placement, Policy, Strategy};
use crate::domain::pool::PoolView;
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};

/// Above so many pools on one node, the ones that share a filesystem are found by hashing.
const FEW: usize = 16;

/// One question: a request, a policy, the pools.
pub(super) struct Planner<'a, O> {
    pub(super) request: &'a Request,
    pub(super) policy: &'a Policy,
    pub(super) pools: &'a [PoolView],
    pub(super) filters: Filters<'a>,
    pub(super) scale: Scale<'a, O>,
    /// Candidates that may be in one plan together: all, or those of each node where a plan must be on one node.
    pub(super) groups: Vec<Vec<Candidate>>,
    pub(super) count: RangeInclusive<usize>,
}

/// The two sides of one group.
struct Sides {
    local: Side,
    remote: Side,
    both: Side,
}

impl<'a, O: Overhead> Planner<'a, O> {
    pub(super) fn new(
        overhead: &'a O,
        request: &'a Request,
        policy: &'a Policy,
        pools: &'a [PoolView],
    ) -> Self {
        let filters = Filters::new(request, policy);
        let scale = Scale::new(overhead, policy, request.mode);
        let by_node = candidates(&filters, &scale, policy, pools);
        let groups = if policy.placement == Placement::Local {
            by_node
        } else {
            vec![by_node.into_iter().flatten().collect()]
        };
        let least = usize::try_from(policy.min_branches).unwrap_or(usize::MAX).max(1);
        let most = match request.mode {
            VolumeMode::Filesystem => usize::try_from(policy.max_branches).unwrap_or(usize::MAX),
            VolumeMode::Block => 1,
        };
        Self { request, policy, pools, filters, scale, groups, count: least..=most }
    }

    pub(super) fn plan(&self) -> Result<Plan, Infeasible> {
        match self.solve(self.want(self.request.size)) {
            Some(draft) => Ok(self.finish(draft)),
            None => Err(self.refuse()),
        }
    }

    fn want(&self, size: Bytes) -> Want {
        Want { size: size.get().max(1), limit: self.request.limit.unwrap_or(Bytes::MAX).get() }
    }

    fn solve(&self, want: Want) -> Option<Draft> {
        if want.size > want.limit {
            return None;
        }
        match self.groups.as_slice() {
            [only] => self.solve_group(only, want),
            groups => self.solve_group(self.best_node(groups, want)?, want),
        }
    }

    /// The node for a volume that must be on one: the fewest branches, then the least room left over, then the name.
    fn best_node<'g>(&self, groups: &'g [Vec<Candidate>], want: Want) -> Option<&'g Vec<Candidate>> {
        let scored = groups.iter().filter_map(|group| {
            let room: u128 = group.iter().map(|candidate| u128::from(candidate.room)).sum();
            if room < u128::from(want.size) {
                return None;
            }
            let draft = self.fewest(&self.sides(group, false), want)?;
            let node = group.first().map(|candidate| &self.pools[candidate.at].node);
            Some(((draft.branches.len(), room, node), group))
        });
        scored.min_by_key(|(score, _)| *score).map(|(_, group)| group)
    }

    fn solve_group(&self, group: &[Candidate], want: Want) -> Option<Draft> {
        let prefer = self.policy.placement == Placement::PreferLocal;
        let sides = self.sides(group, prefer);
        if prefer && !sides.local.all.is_empty() {
            let local = Sides {
                both: self.side(sides.local.all.clone()),
                remote: self.side(Vec::new()),
                local: self.side(sides.local.all.clone()),
            };
            if let Some(draft) = self.by_strategy(&local, want) {
                return Some(draft);
            }
        }
        self.by_strategy(&sides, want)
    }

    fn by_strategy(&self, sides: &Sides, want: Want) -> Option<Draft> {
        let shaped = Shaped {
            scale: &self.scale,
            pools: self.pools,
            group: &sides.both.all,
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

    fn fewest(&self, sides: &Sides, want: Want) -> Option<Draft> {
        let search = Search {
            scale: &self.scale,
            pools: self.pools,
            sides: [&sides.local, &sides.remote],
            both: &sides.both,
            count: self.count.clone(),
            want,
        };
        search.run()
    }

    fn side(&self, all: Vec<Candidate>) -> Side {
        Side::new(&self.scale, self.pools, all, *self.count.end())
    }

    fn sides(&self, group: &[Candidate], prefer: bool) -> Sides {
        let (local, remote) = group.iter().partition(|candidate| prefer && candidate.local);
        Sides { local: self.side(local), remote: self.side(remote), both: self.side(group.to_vec()) }
    }

    /// Usable bytes of the largest volume within the limit, whatever size was asked for.
    pub(super) fn largest(&self) -> Bytes {
        let limit = self.request.limit.unwrap_or(Bytes::MAX).get();
        let reach = self.groups.iter().map(|group| self.reach(group)).max().unwrap_or(0);
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
        let side = self.side(group.to_vec());
        let reach =
            self.count.clone().take_while(|n| *n <= side.all.len()).filter_map(|n| side.reach(n)).max();
        u64::try_from(reach.unwrap_or(0)).unwrap_or(u64::MAX)
    }

    pub(super) fn capacity(&self) -> Capacity {
        let candidates = self.groups.iter().flatten();
        let total = candidates.map(|candidate| Bytes::new(self.scale.space(*candidate).full)).sum();
        let maximum_volume_size = self.largest();
        let minimum_volume_size = if maximum_volume_size.is_zero() { Bytes::ZERO } else { self.smallest() };
        Capacity { total, maximum_volume_size, minimum_volume_size }
    }

    /// The smallest size that comes out exactly: the smallest branches that the fewest allowed number can have.
    pub(super) fn smallest(&self) -> Bytes {
        let wholes = *self.count.start() - 1;
        let least = self.groups.iter().filter_map(|group| {
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
        let rest = draft.branches.last().map(|piece| piece.space.pool.at);
        let mut pieces = draft.branches;
        pieces.sort_by(|a, b| {
            let key = |piece: &Piece| {
                let at = piece.space.pool.at;
                (!self.filters.is_local(&self.pools[at].node), Some(at) == rest, Reverse(piece.size))
            };
            key(a).cmp(&key(b)).then_with(|| by_name(self.pools, a.space.pool.at, b.space.pool.at))
        });
        let branch = |(index, piece): (u32, Piece)| {
            let view = &self.pools[piece.space.pool.at];
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

/// The pools that qualify, by node, one per filesystem.
fn candidates<O: Overhead>(
    filters: &Filters<'_>,
    scale: &Scale<'_, O>,
    policy: &Policy,
    pools: &[PoolView],
) -> Vec<Vec<Candidate>> {
    let mut nodes: HashMap<&NodeName, usize> = HashMap::new();
    let mut groups: Vec<Vec<Candidate>> = Vec::new();
    let prefer = policy.placement == Placement::PreferLocal;
    // Pools mostly come node by node: a run of them is looked up once.
    let mut run: Option<(&NodeName, usize, bool)> = None;
    for (at, view) in pools.iter().enumerate() {
        let Ok(format) = filters.admit(view) else { continue };
        let Some(room) = scale.room(format, view.pool.allocatable()) else { continue };
        let (group, local) = match run {
            Some((node, group, local)) if *node == view.node => (group, local),
            _ => {
                let group = *nodes.entry(&view.node).or_insert_with(|| {
                    groups.push(Vec::new());
                    groups.len() - 1
                });
                let local = prefer && filters.is_local(&view.node);
                run = Some((&view.node, group, local));
                (group, local)
            }
        };
        groups[group].push(Candidate { at, local, format, room });
    }
    for group in &mut groups {
        one_per_filesystem(pools, group);
    }
    groups
}

/// Keeps, of the pools that share a filesystem, the one that can give the most. Pools of one name are one pool.
fn one_per_filesystem(pools: &[PoolView], group: &mut Vec<Candidate>) {
    group.sort_unstable_by(|a, b| {
        b.room.cmp(&a.room).then_with(|| pools[a.at].pool.name.cmp(&pools[b.at].pool.name))
    });
    let same = |a: usize, b: usize| pools[a].pool.shares_space_with(&pools[b].pool);
    if group.len() <= FEW {
        let mut kept = 0;
        for i in 0..group.len() {
            if group[..kept].iter().all(|other| !same(other.at, group[i].at)) {
                group.swap(kept, i);
                kept += 1;
            }
        }
        group.truncate(kept);
    } else {
        let mut names = HashSet::new();
        let mut devices = HashSet::new();
        group.retain(|candidate| {
            let pool = &pools[candidate.at].pool;
            if names.contains(&pool.name) || devices.contains(&pool.device) {
                return false;
            }
            names.insert(&pool.name);
            if !pool.device.is_empty() {
                devices.insert(&pool.device);
            }
            true
        });
    }
}
