//! Pools as the arithmetic sees them: places of a size, in a format.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::BranchFormat;
use crate::domain::policy::{FsType, GRAIN, Policy};
use crate::domain::pool::PoolView;
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, overhead};

/// What filesystems take for themselves; see [`overhead`]. A parameter so that tests can try others.
pub(super) trait Overhead {
    /// See [`overhead::usable`].
    fn usable(&self, size: Bytes, fs: Option<FsType>) -> Bytes;
    /// See [`overhead::size_for`].
    fn size_for(&self, wanted: Bytes, fs: Option<FsType>) -> Option<Bytes>;
    /// See [`overhead::minimum`].
    fn minimum(&self, fs: Option<FsType>) -> Bytes;
}

/// What the product's filesystems take.
pub(super) struct Real;

impl Overhead for Real {
    fn usable(&self, size: Bytes, fs: Option<FsType>) -> Bytes {
        overhead::usable(size, fs)
    }

    fn size_for(&self, wanted: Bytes, fs: Option<FsType>) -> Option<Bytes> {
        overhead::size_for(wanted, fs)
    }

    fn minimum(&self, fs: Option<FsType>) -> Bytes {
        overhead::minimum(fs)
    }
}

/// A pool that qualifies; one per filesystem of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Its place in the caller's list. Narrow, because the time goes into moving candidates.
    at: u32,
    /// Whether it comes first under `preferLocal`.
    pub(super) local: bool,
    /// Whether it is the largest of its node.
    pub(super) first: bool,
    /// What a branch in it would be.
    pub(super) format: BranchFormat,
    /// The largest branch that it can hold, in bytes.
    pub(super) room: u64,
}

impl Candidate {
    /// The pool number `at` as a candidate; `None` beyond 2^32 pools.
    pub(super) fn new(at: usize, local: bool, format: BranchFormat, room: u64) -> Option<Self> {
        Some(Self { at: u32::try_from(at).ok()?, local, first: false, format, room })
    }

    /// Its place in the caller's list.
    pub(super) fn at(&self) -> usize {
        usize::try_from(self.at).unwrap_or(usize::MAX)
    }
}

/// A candidate with what it can give.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    /// The pool.
    pub(super) pool: Candidate,
    /// Whole quanta that fit; zero where it can only hold the branch that takes the rest.
    pub(super) quanta: u64,
    /// Usable bytes of that many quanta.
    pub(super) whole: u64,
    /// Usable bytes of all its room.
    pub(super) full: u64,
}

impl Space {
    /// Usable bytes that it gives more when it takes the rest than when it takes whole quanta.
    pub(super) fn gain(&self) -> u64 {
        self.full - self.whole
    }
}

/// Bounds of the branches of one format.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// The smallest branch of use, in bytes.
    minimum: u64,
    /// Usable bytes of it.
    minimum_usable: u64,
    /// The fewest quanta of use.
    quanta: u64,
    /// Usable bytes of those.
    quanta_usable: u64,
}

/// Sizes and what they are worth, under one policy.
pub(super) struct Scale<'a, O> {
    pub(super) overhead: &'a O,
    quantum: u64,
    fs: Option<FsType>,
    raw: bool,
    directory: Limits,
    image: Limits,
}

impl<'a, O: Overhead> Scale<'a, O> {
    pub(super) fn new(overhead: &'a O, policy: &Policy, mode: VolumeMode) -> Self {
        let fs = (mode == VolumeMode::Filesystem).then_some(policy.fs_type);
        let quantum = policy.quantum.get().max(1);
        let limits = |fs: Option<FsType>, grain: u64| {
            let useful = overhead.size_for(Bytes::new(1), fs).unwrap_or(Bytes::MAX);
            let minimum = overhead.minimum(fs).max(useful).round_up_to(Bytes::new(grain));
            let minimum = minimum.unwrap_or(Bytes::MAX).get();
            let quanta = minimum.div_ceil(quantum).max(1);
            let usable = |size| overhead.usable(Bytes::new(size), fs).get();
            Limits {
                minimum,
                minimum_usable: usable(minimum),
                quanta,
                quanta_usable: usable(quanta.saturating_mul(quantum)),
            }
        };
        let (directory, image) = (limits(None, 1), limits(fs, GRAIN.get()));
        Self { overhead, quantum, fs, raw: mode == VolumeMode::Block, directory, image }
    }

    fn limits(&self, format: BranchFormat) -> &Limits {
        match format {
            BranchFormat::Directory => &self.directory,
            BranchFormat::Image => &self.image,
        }
    }

    /// The filesystem that a branch of this format has.
    pub(super) fn fs(&self, format: BranchFormat) -> Option<FsType> {
        match format {
            BranchFormat::Directory => None,
            BranchFormat::Image => self.fs,
        }
    }

    /// Bytes of `n` quanta.
    pub(super) fn size(&self, quanta: u64) -> u64 {
        quanta.saturating_mul(self.quantum)
    }

    /// Usable bytes of a branch of `size` bytes.
    pub(super) fn usable(&self, format: BranchFormat, size: u64) -> u64 {
        self.overhead.usable(Bytes::new(size), self.fs(format)).get().min(size)
    }

    /// The smallest branch with `usable` bytes, and what of it the volume counts. That is `usable` itself, although the
    /// size was rounded up to [`GRAIN`], so that a volume has exactly what was asked for; only a branch that cannot be
    /// made any smaller, and a raw device, which cannot hide its size, count in full.
    pub(super) fn rest(&self, format: BranchFormat, usable: u64) -> Option<(u64, u64)> {
        let limits = self.limits(format);
        if usable <= limits.minimum_usable {
            return Some((limits.minimum, limits.minimum_usable));
        }
        let size = self.overhead.size_for(Bytes::new(usable), self.fs(format))?;
        match format {
            BranchFormat::Directory => Some((size.get(), usable)),
            BranchFormat::Image => {
                let size = size.round_up_to(GRAIN)?.get().max(limits.minimum);
                Some((size, if self.raw { size } else { usable }))
            }
        }
    }

    /// Usable bytes of the smallest branch.
    pub(super) fn least_rest(&self, format: BranchFormat) -> u64 {
        self.limits(format).minimum_usable
    }

    /// The smallest branch, in bytes.
    pub(super) fn least_size(&self, format: BranchFormat) -> u64 {
        self.limits(format).minimum
    }

    /// The fewest whole quanta that are of use.
    pub(super) fn least_quanta(&self, format: BranchFormat) -> u64 {
        self.limits(format).quanta
    }

    /// Usable bytes of those.
    pub(super) fn least_whole(&self, format: BranchFormat) -> u64 {
        self.limits(format).quanta_usable
    }

    /// The largest branch that fits into `allocatable`; `None` where that would be of no use.
    pub(super) fn room(&self, format: BranchFormat, allocatable: Bytes) -> Option<u64> {
        let room = match format {
            BranchFormat::Directory => allocatable,
            BranchFormat::Image => allocatable.round_down_to(GRAIN),
        };
        (room.get() >= self.limits(format).minimum).then_some(room.get())
    }

    /// The most quanta, within what the space has and not below the fewest of use, that are worth at most `usable`.
    pub(super) fn quanta_within(&self, space: &Space, usable: u64) -> u64 {
        let least = self.least_quanta(space.pool.format);
        if space.whole <= usable {
            return space.quanta;
        }
        let (mut low, mut high) = (least, space.quanta);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            if self.usable(space.pool.format, self.size(middle)) <= usable {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    /// What the candidate can give.
    pub(super) fn space(&self, pool: Candidate) -> Space {
        let fitting = pool.room / self.quantum;
        let quanta = if fitting < self.least_quanta(pool.format) { 0 } else { fitting };
        let full = self.usable(pool.format, pool.room);
        Space { pool, quanta, whole: self.usable(pool.format, self.size(quanta)).min(full), full }
    }
}

/// The order of pools that are worth the same: by node, then name.
pub(super) fn by_name(pools: &[&PoolView], a: usize, b: usize) -> Ordering {
    let (a, b) = (pools[a], pools[b]);
    a.node.cmp(&b.node).then_with(|| a.pool.name.cmp(&b.pool.name))
}

/// So many candidates are gathered before the best are selected from them.
const SELECT: usize = 256;

/// Candidates, the most valuable ones ranked.
pub(super) struct Side<'c> {
    /// All of them.
    pub(super) all: Cow<'c, [Candidate]>,
    /// The best of each format, by what whole quanta give, then by all they give, then by name.
    pub(super) ranked: Vec<Space>,
    /// `wholes[n]`: what whole quanta of the first `n` give.
    wholes: Vec<u128>,
    /// `fulls[n]`: the most that one of those from number `n` on gives in full.
    fulls: Vec<u64>,
    /// `gains[n]`: the largest gain among the first `n`.
    gains: Vec<u64>,
    /// How many can hold whole quanta; they are the first.
    pub(super) big: usize,
}

impl<'c> Side<'c> {
    /// Ranks the candidates for plans of at most `most` branches. What is not ranked is worth no more, in its format, than
    /// what is, so that no plan needs it.
    pub(super) fn new<O: Overhead>(
        scale: &Scale<'_, O>,
        pools: &[&PoolView],
        all: Cow<'c, [Candidate]>,
        most: usize,
    ) -> Self {
        let order =
            |a: &Candidate, b: &Candidate| b.room.cmp(&a.room).then_with(|| by_name(pools, a.at(), b.at()));
        let mut best = [const { Vec::new() }; 2];
        // The room below which a candidate is not among the best.
        let mut bars = [0_u64; 2];
        let keep = most.saturating_add(1);
        let full = keep.saturating_mul(4).max(SELECT);
        for candidate in all.iter() {
            let format = match candidate.format {
                BranchFormat::Directory => 0,
                BranchFormat::Image => 1,
            };
            if candidate.room < bars[format] {
                continue;
            }
            let best: &mut Vec<Candidate> = &mut best[format];
            best.push(*candidate);
            if best.len() >= full {
                let (_, last, _) = best.select_nth_unstable_by(keep - 1, order);
                bars[format] = last.room;
                best.truncate(keep);
            }
        }
        let mut ranked = Vec::with_capacity(best.iter().map(|best| best.len().min(keep)).sum());
        for mut best in best {
            best.sort_unstable_by(order);
            best.truncate(keep);
            ranked.extend(best.into_iter().map(|candidate| scale.space(candidate)));
        }
        Self::of(pools, all, ranked)
    }

    /// A side of these spaces.
    pub(super) fn of(pools: &[&PoolView], all: Cow<'c, [Candidate]>, mut ranked: Vec<Space>) -> Self {
        ranked.sort_unstable_by(|a, b| {
            (b.whole, b.full).cmp(&(a.whole, a.full)).then_with(|| by_name(pools, a.pool.at(), b.pool.at()))
        });
        let big = ranked.partition_point(|space| space.quanta > 0 && space.whole > 0);
        let mut wholes = vec![0_u128];
        let mut gains = vec![0_u64];
        for space in &ranked {
            wholes.push(wholes[wholes.len() - 1] + u128::from(space.whole));
            gains.push(gains[gains.len() - 1].max(space.gain()));
        }
        let mut fulls = vec![0_u64; ranked.len() + 1];
        for (n, space) in ranked.iter().enumerate().rev() {
            fulls[n] = fulls[n + 1].max(space.full);
        }
        Self { all, ranked, wholes, fulls, gains, big }
    }

    /// The most that whole quanta of `n` spaces give; `None` where there are not so many.
    pub(super) fn whole(&self, n: usize) -> Option<u128> {
        if n <= self.big { self.wholes.get(n).copied() } else { None }
    }

    /// The most that `n` spaces with whole quanta and one with the rest give, where the one is not among the best `n`.
    pub(super) fn reach_outside(&self, n: usize) -> Option<u128> {
        let rest = *self.fulls.get(n)?;
        if rest == 0 { None } else { Some(self.whole(n)? + u128::from(rest)) }
    }

    /// The same, where the one is among the best `n + 1` and those are the others.
    pub(super) fn reach_inside(&self, n: usize) -> Option<u128> {
        Some(self.whole(n + 1)? + u128::from(self.gains[n + 1]))
    }

    /// The most that `n` branches give.
    pub(super) fn reach(&self, n: usize) -> Option<u128> {
        let n = n.checked_sub(1)?;
        self.reach_outside(n).max(self.reach_inside(n))
    }
}
