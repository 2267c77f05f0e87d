//! `strategy: balanced` and `strategy: spread`: a set of pools, and shares of the size for each.
//!
//! They choose a set that is large enough and let the shares decide the sizes; where no such set exists or rounding to
//! quanta does not come out, `fewest` decides, so that they accept all that it accepts.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

use super::fill::{Draft, Excess, Want, level, proportion};
use super::space::{Candidate, Overhead, Scale, Side, Space, by_name};
use crate::domain::pool::PoolView;

/// How many spaces of a set are tried for the rest.
const ATTEMPTS: usize = 4;

pub(super) struct Shaped<'a, O> {
    pub(super) scale: &'a Scale<'a, O>,
    pub(super) pools: &'a [&'a PoolView],
    /// All candidates, node by node, the largest of a node first.
    pub(super) group: &'a [Candidate],
    /// The same, the preferred ones first; may be empty.
    pub(super) sides: [&'a Side<'a>; 2],
    /// They are all on one node, so that spreading is over its disks.
    pub(super) one_node: bool,
    pub(super) count: RangeInclusive<usize>,
    pub(super) want: Want,
}

impl<O: Overhead> Shaped<'_, O> {
    /// Over as many pools as have a share worth a branch, in proportion to what they can give.
    pub(super) fn balanced(&self) -> Option<Draft> {
        let most = (*self.count.end()).min(self.sides[0].big + self.sides[1].big);
        (*self.count.start()..=most).rev().find_map(|count| {
            let set = self.set_of(count)?;
            let shares = proportion(&set, self.want.size);
            let worth_it = set
                .iter()
                .zip(&shares)
                .all(|(space, share)| *share >= self.scale.least_whole(space.pool.format));
            if worth_it { self.share_out(&set, &shares) } else { None }
        })
    }

    /// So many pools, of the preferred side as many as leave enough room, the largest of each side.
    fn set_of(&self, count: usize) -> Option<Vec<Space>> {
        let [first, second] = self.sides;
        let from = count.saturating_sub(second.big);
        (from..=count.min(first.big)).rev().find_map(|n| {
            let sum = first.whole(n)? + second.whole(count - n)?;
            let set: Vec<Space> =
                first.ranked[..n].iter().chain(&second.ranked[..count - n]).copied().collect();
            let gain = set.iter().map(Space::gain).max().unwrap_or(0);
            (sum + u128::from(gain) >= u128::from(self.want.size)).then_some(set)
        })
    }

    /// Over as many nodes as possible, the shares as equal as the pools allow; a node's second disk only where the first
    /// ones are not enough. Where all must be on one node: over as many of its disks as possible.
    pub(super) fn spread(&self) -> Option<Draft> {
        let (first, second) = self.first_and_further();
        let most = *self.count.end();
        (1..=most.min(first.len())).rev().find_map(|nodes| {
            let further = self.count.start().saturating_sub(nodes)..=(most - nodes).min(second.len());
            // The more nodes the better, then the fewer disks.
            let set = further.into_iter().find_map(|n| {
                let set: Vec<Space> = first[..nodes].iter().chain(&second[..n]).copied().collect();
                let sum: u128 = set.iter().map(|space| u128::from(space.whole)).sum();
                let gain = set.iter().map(Space::gain).max().unwrap_or(0);
                (sum + u128::from(gain) >= u128::from(self.want.size)).then_some(set)
            })?;
            let least: u128 =
                set.iter().map(|space| u128::from(self.scale.least_whole(space.pool.format))).sum();
            if least > u128::from(self.want.size) {
                return None;
            }
            self.share_out(&set, &level(&set, self.want.size))
        })
    }

    /// The best disk of each node, and all others; each the preferred ones before, then the largest first.
    fn first_and_further(&self) -> (Vec<Space>, Vec<Space>) {
        let (first, further) = self.group.iter().partition(|candidate| self.one_node || candidate.first);
        let ranked = |candidates: Vec<Candidate>| {
            let side = Side::new(self.scale, self.pools, candidates.into(), *self.count.end());
            let mut spaces = side.ranked;
            spaces.truncate(side.big);
            spaces.sort_by_key(|space| !space.pool.local);
            spaces
        };
        (ranked(first), ranked(further))
    }

    /// The plan of exactly this set with these shares.
    fn share_out(&self, set: &[Space], shares: &[u64]) -> Option<Draft> {
        let mut lasts: Vec<usize> = (0..set.len()).collect();
        // The largest gain makes the set's reach; of equal ones the smaller share is disturbed less by the rest.
        lasts.sort_by(|a, b| {
            let key = |i: usize| (Reverse(set[i].gain()), shares[i]);
            key(*a).cmp(&key(*b)).then_with(|| by_name(self.pools, set[*b].pool.at(), set[*a].pool.at()))
        });
        lasts.into_iter().take(ATTEMPTS).find_map(|last| {
            let (mut spaces, mut targets) = (set.to_vec(), shares.to_vec());
            let (last, rest) = (spaces.remove(last), targets.remove(last));
            let most = self.scale.most_whole(self.want, last.pool.format, Excess::Refuse)?;
            let least = u128::from(self.want.size.saturating_sub(last.full));
            let (quanta, sum) = self.scale.fill_towards(&spaces, &targets, self.want, rest, least, most)?;
            self.scale.draft(&spaces, &quanta, sum, last, self.want)
        })
    }
}
