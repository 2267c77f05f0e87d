//! `strategy: fewest`: as few branches as fit, the last one best-fit. Also the measure of what is feasible at all: the
//! other strategies fall back on it, so that they can never refuse what it accepts.

use std::cmp::Reverse;
use std::ops::RangeInclusive;

use super::BranchFormat;
use super::fill::{Draft, Excess, Want, level};
use super::space::{Candidate, Overhead, Scale, Side, Space, by_name};
use crate::domain::pool::PoolView;

/// The search for one plan: two sides, the first preferred (local and remote, or one of them empty).
pub(super) struct Search<'a, O> {
    pub(super) scale: &'a Scale<'a, O>,
    pub(super) pools: &'a [&'a PoolView],
    pub(super) sides: [&'a Side<'a>; 2],
    /// Both together.
    pub(super) both: &'a Side<'a>,
    /// How many branches there may be.
    pub(super) count: RangeInclusive<usize>,
    pub(super) want: Want,
}

impl<O: Overhead> Search<'_, O> {
    /// The plan with the fewest branches and, among those, the most on the first side.
    pub(super) fn run(&self) -> Option<Draft> {
        let size = u128::from(self.want.size);
        for count in self.count.clone() {
            if count > self.both.all.len() {
                break;
            }
            if self.both.reach(count).is_none_or(|reach| reach < size) {
                continue;
            }
            if let Some(draft) = self.with_count(count) {
                return Some(draft);
            }
        }
        None
    }

    fn with_count(&self, count: usize) -> Option<Draft> {
        // Branches of whole quanta can be made smaller than their space only where a minimum forces more of them than the
        // size needs. Only then can the smallest sizes be too large for the volume, and only then does it matter which
        // format has the smaller ones.
        let forced = count > 1 && count == *self.count.start();
        for excess in [Excess::Refuse, Excess::Accept] {
            if let Some(draft) = self.over_sides(self.sides, count, forced, excess) {
                return Some(draft);
            }
            if forced && let Some(draft) = self.over_formats(count, excess) {
                return Some(draft);
            }
        }
        None
    }

    fn over_sides(&self, sides: [&Side<'_>; 2], count: usize, forced: bool, excess: Excess) -> Option<Draft> {
        let first = count.min(sides[0].all.len());
        let others = count.saturating_sub(sides[1].all.len());
        (others..=first).rev().find_map(|first| {
            let counts = [first, count - first];
            // The rest goes to the second side where it can, so that the first one's space is used whole.
            [1, 0].into_iter().filter(|side| counts[*side] > 0).find_map(|side| {
                let mut wholes = counts;
                wholes[side] -= 1;
                self.arrange(sides, wholes, side, forced, excess)
            })
        })
    }

    /// The same by format instead of by locality, for the case that one format has smaller branches.
    fn over_formats(&self, count: usize, excess: Excess) -> Option<Draft> {
        let of = |format: BranchFormat| -> Side<'static> {
            let ranked =
                self.both.ranked.iter().copied().filter(|space| space.pool.format == format).collect();
            let all: Vec<Candidate> =
                self.both.all.iter().copied().filter(|pool| pool.format == format).collect();
            Side::of(self.pools, all.into(), ranked)
        };
        let (directories, images) = (of(BranchFormat::Directory), of(BranchFormat::Image));
        if directories.all.is_empty() || images.all.is_empty() {
            return None;
        }
        self.over_sides([&images, &directories], count, true, excess)
    }

    /// A plan with so many branches of whole quanta on each side and the rest on side `side`.
    fn arrange(
        &self,
        sides: [&Side<'_>; 2],
        wholes: [usize; 2],
        side: usize,
        forced: bool,
        excess: Excess,
    ) -> Option<Draft> {
        let size = u128::from(self.want.size);
        let other = 1 - side;
        let beside = sides[other].whole(wholes[other])?;
        let n = wholes[side];
        let top = |side: &Side<'_>, n: usize| side.ranked[..n].to_vec();
        if sides[side].reach_outside(n).is_some_and(|reach| beside + reach >= size) {
            let mut spaces = top(sides[0], wholes[0]);
            spaces.extend(top(sides[1], wholes[1]));
            let likely = sides[side].ranked[n];
            let fitting = [BranchFormat::Directory, BranchFormat::Image]
                .into_iter()
                .filter_map(|format| self.outside(&spaces, likely, sides[side], format, forced, excess))
                .min_by_key(|draft| draft.branches.last().map(|last| last.space.pool.room - last.size));
            if fitting.is_some() {
                return fitting;
            }
        }
        if sides[side].reach_inside(n).is_none_or(|reach| beside + reach < size) {
            return None;
        }
        let mut set = top(sides[side], n + 1);
        set.extend(top(sides[other], wholes[other]));
        let mut lasts: Vec<usize> = (0..=n).collect();
        lasts.sort_by_key(|i| (set[*i].pool.room, Reverse(*i)));
        lasts.into_iter().find_map(|i| {
            let mut spaces = set.clone();
            let last = spaces.remove(i);
            let whole: u128 = spaces.iter().map(|space| u128::from(space.whole)).sum();
            if whole + u128::from(last.full) < size {
                return None;
            }
            let (quanta, sum) = self.quanta(&spaces, last, last.pool.format, forced, excess)?;
            self.scale.draft(&spaces, &quanta, sum, last, self.want)
        })
    }

    /// Whole quanta in `spaces`, the rest in the smallest other space of that format on the side that takes it.
    fn outside(
        &self,
        spaces: &[Space],
        likely: Space,
        side: &Side<'_>,
        format: BranchFormat,
        forced: bool,
        excess: Excess,
    ) -> Option<Draft> {
        let (quanta, sum) = self.quanta(spaces, likely, format, forced, excess)?;
        let missing = u64::try_from(u128::from(self.want.size).checked_sub(sum)?).ok()?.max(1);
        let (size, _) = self.scale.rest(format, missing)?;
        let last = self.best_fit(side, format, size, spaces)?;
        self.scale.draft(spaces, &quanta, sum, self.scale.space(last), self.want)
    }

    /// Quanta for `spaces` beside a rest of that format.
    fn quanta(
        &self,
        spaces: &[Space],
        last: Space,
        format: BranchFormat,
        forced: bool,
        excess: Excess,
    ) -> Option<(Vec<u64>, u128)> {
        let most = self.scale.most_whole(self.want, format, excess)?;
        if forced {
            let mut all = spaces.to_vec();
            all.push(last);
            let mut targets = level(&all, self.want.size);
            let rest = targets.pop()?;
            let least = u128::from(self.want.size.saturating_sub(last.full));
            let filled = self.scale.fill_towards(spaces, &targets, self.want, rest, least, most);
            if filled.is_some() {
                return filled;
            }
        }
        self.scale.fill_in_turn(spaces, most)
    }

    /// The smallest pool of a side that a branch of `size` fits into, `taken` ones aside.
    fn best_fit(
        &self,
        side: &Side<'_>,
        format: BranchFormat,
        size: u64,
        taken: &[Space],
    ) -> Option<Candidate> {
        let mut best: Option<Candidate> = None;
        for pool in side.all.iter() {
            if pool.format != format || pool.room < size {
                continue;
            }
            let better = best.is_none_or(|best| {
                pool.room < best.room
                    || (pool.room == best.room && by_name(self.pools, pool.at(), best.at()).is_lt())
            });
            if better && taken.iter().all(|space| space.pool.at() != pool.at()) {
                best = Some(*pool);
            }
        }
        best
    }
}
