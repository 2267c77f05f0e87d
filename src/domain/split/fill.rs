//! How much each chosen space takes.
//!
//! All but one take whole quanta; the one takes the rest. So the quanta must leave a rest that the one can hold: not more
//! than all its room, and not less than the smallest branch of use.

use super::space::{Overhead, Scale, Space};

/// Sizes of the branches of a plan.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    /// The branches of whole quanta, then the one that takes the rest.
    pub(super) branches: Vec<Piece>,
    /// Usable bytes of all.
    pub(super) capacity: u128,
}

/// One branch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The space it is in.
    pub(super) space: Space,
    /// What it takes of it, in bytes.
    pub(super) size: u64,
    /// What it gives to the volume.
    pub(super) usable: u64,
}

/// What a volume must have and may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    /// Usable bytes at least; one or more.
    pub(super) size: u64,
    /// Usable bytes at most.
    pub(super) limit: u64,
}

/// Whether the smallest branch may take a rest that is smaller than itself, so that the volume gets more than it asked
/// for. Only where nothing exact is to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    Refuse,
    Accept,
}

impl<O: Overhead> Scale<'_, O> {
    /// The most that whole quanta may give beside a rest in `format`.
    pub(super) fn most_whole(&self, want: Want, format: super::BranchFormat, excess: Excess) -> Option<u128> {
        let rest = match excess {
            Excess::Refuse => self.least_rest(format).max(1),
            Excess::Accept => 1,
        };
        want.size.checked_sub(rest).map(u128::from)
    }

    /// Quanta that give as much as they can but at most `most`, the first spaces filled first; and what they give.
    pub(super) fn fill_in_turn(&self, spaces: &[Space], most: u128) -> Option<(Vec<u64>, u128)> {
        let mut later: u128 =
            spaces.iter().map(|space| u128::from(self.least_whole(space.pool.format))).sum();
        let mut sum = 0_u128;
        let mut quanta = Vec::with_capacity(spaces.len());
        for space in spaces {
            later -= u128::from(self.least_whole(space.pool.format));
            let budget = most.checked_sub(sum + later)?;
            let n = self.quanta_within(space, u64::try_from(budget).unwrap_or(u64::MAX));
            let usable = u128::from(self.usable(space.pool.format, self.size(n)));
            if usable > budget {
                return None;
            }
            sum += usable;
            quanta.push(n);
        }
        Some((quanta, sum))
    }

    /// Quanta as near to `targets` (usable bytes for each space) as rounding allows, that give at least `least` and at
    /// most `most`; and what they give. `rest_target` is what the rest should come to.
    pub(super) fn fill_towards(
        &self,
        spaces: &[Space],
        targets: &[u64],
        want: Want,
        rest_target: u64,
        least: u128,
        most: u128,
    ) -> Option<(Vec<u64>, u128)> {
        let worth = |i: usize, n: u64| self.usable(spaces[i].pool.format, self.size(n));
        let mut quanta: Vec<u64> =
            spaces.iter().zip(targets).map(|(space, target)| self.quanta_within(space, *target)).collect();
        let mut usable: Vec<u64> = quanta.iter().enumerate().map(|(i, n)| worth(i, *n)).collect();
        let mut sum: u128 = usable.iter().map(|u| u128::from(*u)).sum();
        // Rounding is off by a quantum or so for each space; what needs more steps is no matter of rounding.
        for _ in 0..8 * (spaces.len() + 1) {
            let rest = u128::from(want.size).saturating_sub(sum);
            let over = rest.saturating_sub(u128::from(rest_target));
            if sum > most {
                let i = (0..spaces.len())
                    .filter(|i| quanta[*i] > self.least_quanta(spaces[*i].pool.format))
                    .min_by_key(|i| i128::from(targets[*i]) - i128::from(usable[*i]))?;
                quanta[i] -= 1;
                sum -= u128::from(usable[i]);
                usable[i] = worth(i, quanta[i]);
                sum += u128::from(usable[i]);
                continue;
            }
            let step = |i: usize| u128::from(worth(i, quanta[i] + 1).saturating_sub(usable[i]));
            let next = (0..spaces.len())
                .filter(|i| quanta[*i] < spaces[*i].quanta && sum + step(*i) <= most)
                .max_by_key(|i| (i128::from(targets[*i]) - i128::from(usable[*i]), std::cmp::Reverse(*i)));
            let Some(i) = next else { break };
            if sum >= least && over * 2 < step(i).max(1) {
                break;
            }
            quanta[i] += 1;
            sum -= u128::from(usable[i]);
            usable[i] = worth(i, quanta[i]);
            sum += u128::from(usable[i]);
        }
        (least <= sum && sum <= most).then_some((quanta, sum))
    }

    /// The plan of these spaces in these quanta, with `last` for the rest; `None` where the rest does not fit there, or
    /// the volume would have more than it may.
    pub(super) fn draft(
        &self,
        spaces: &[Space],
        quanta: &[u64],
        sum: u128,
        last: Space,
        want: Want,
    ) -> Option<Draft> {
        let missing = u64::try_from(u128::from(want.size).checked_sub(sum)?).ok()?.max(1);
        let (size, usable) = self.rest(last.pool.format, missing)?;
        let capacity = sum + u128::from(usable);
        if size > last.pool.room || capacity > u128::from(want.limit) {
            return None;
        }
        let piece = |(space, n): (&Space, &u64)| {
            let size = self.size(*n);
            Piece { space: *space, size, usable: self.usable(space.pool.format, size) }
        };
        let mut branches: Vec<Piece> = spaces.iter().zip(quanta).map(piece).collect();
        branches.push(Piece { space: last, size, usable });
        Some(Draft { branches, capacity })
    }
}

/// Shares of `size` among spaces, as equal as what they can give allows (water-filling).
pub(super) fn level(spaces: &[Space], size: u64) -> Vec<u64> {
    let mut caps: Vec<u64> = spaces.iter().map(|space| space.full).collect();
    caps.sort_unstable();
    let mut left = size;
    let mut height = caps.last().copied().unwrap_or(0);
    for (n, cap) in caps.iter().enumerate() {
        let share = left.div_ceil(u64::try_from(caps.len() - n).unwrap_or(1));
        if share <= *cap {
            height = share;
            break;
        }
        left -= cap;
    }
    spaces.iter().map(|space| space.full.min(height)).collect()
}

/// Shares of `size` among spaces, in proportion to what they can give.
pub(super) fn proportion(spaces: &[Space], size: u64) -> Vec<u64> {
    let total: u128 = spaces.iter().map(|space| u128::from(space.full)).sum();
    let share = |space: &Space| {
        let share = u128::from(size) * u128::from(space.full) / total.max(1);
        u64::try_from(share).unwrap_or(u64::MAX).min(space.full)
    };
    spaces.iter().map(share).collect()
}
