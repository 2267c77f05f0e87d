//! The pools that qualify: one for each filesystem of a node, node by node.
//!
//! This is where the time of a plan goes in a large cluster: everything that is read of a pool is read here in one pass in
//! the caller's order, and what follows works on small records. Names are compared where the node changes only.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use super::space::{Candidate, Overhead, Scale};
use crate::domain::NodeName;
use crate::domain::placement::Filters;
use crate::domain::policy::{Placement, Policy};
use crate::domain::pool::PoolView;

/// Above so many pools on one node, the ones that share a filesystem are found by hashing.
const FEW: usize = 16;

/// A pool that passed the filters.
#[derive(Clone, Copy)]
struct Found {
    /// Number of its node, in the order in which nodes were met.
    node: u32,
    /// The end of its device's name, zero where that is short: most pools share with none, which it tells faster than the
    /// names.
    device_end: u64,
    candidate: Candidate,
}

/// The pools that qualify, node by node, the largest of a node first, one per filesystem; and which of them are each
/// node's. Nodes are in the order in which the caller's list has them.
pub(super) fn candidates<O: Overhead>(
    filters: &Filters<'_>,
    scale: &Scale<'_, O>,
    policy: &Policy,
    pools: &[&PoolView],
) -> (Vec<Candidate>, Vec<Range<usize>>) {
    let prefer = policy.placement == Placement::PreferLocal && filters.tie().is_none();
    let mut found = Vec::with_capacity(pools.len());
    let mut nodes = Nodes::default();
    for (at, view) in pools.iter().enumerate() {
        let Ok(format) = filters.admit(view) else { continue };
        let Some(room) = scale.room(format, view.pool.allocatable()) else { continue };
        let local = prefer && filters.is_local(&view.node);
        let Some(candidate) = Candidate::new(at, local, format, room) else { continue };
        let Some(node) = nodes.number(&view.node) else { continue };
        let device_end = view.pool.device.as_bytes().last_chunk().map_or(0, |end| u64::from_ne_bytes(*end));
        found.push(Found { node, device_end, candidate });
    }
    if nodes.mixed() {
        found = node_by_node(&found, nodes.count);
    }
    let mut kept = Vec::with_capacity(found.len());
    let mut groups = Vec::with_capacity(nodes.count);
    for group in found.chunk_by_mut(|a, b| a.node == b.node) {
        let from = kept.len();
        keep_one_per_filesystem(pools, group, &mut kept);
        kept[from].first = true;
        groups.push(from..kept.len());
    }
    (kept, groups)
}

/// Gives nodes their numbers. Pools mostly come node by node, and nodes by name: as long as they do, a name is only
/// compared with the one before.
#[derive(Default)]
struct Nodes<'a> {
    count: usize,
    /// The node of the pool before, with its number.
    last: Option<(&'a NodeName, u32)>,
    /// All so far, for as long as they come by name; then they are in `numbers`.
    ordered: Vec<&'a NodeName>,
    numbers: HashMap<&'a str, u32, BuildHasherDefault<Words>>,
}

impl<'a> Nodes<'a> {
    /// The node's number; `None` beyond 2^32 nodes.
    fn number(&mut self, node: &'a NodeName) -> Option<u32> {
        let order = self.last.map_or(Ordering::Less, |(last, _)| last.cmp(node));
        let number = match (order, self.last) {
            (Ordering::Equal, Some((_, number))) => return Some(number),
            (Ordering::Less, _) if !self.mixed() => {
                self.ordered.push(node);
                self.new_number()?
            }
            _ => {
                self.numbers
                    .extend((0..).zip(self.ordered.drain(..)).map(|(number, node)| (node.as_str(), number)));
                match self.numbers.get(node.as_str()) {
                    Some(number) => *number,
                    None => {
                        let number = self.new_number()?;
                        self.numbers.insert(node.as_str(), number);
                        number
                    }
                }
            }
        };
        self.last = Some((node, number));
        Some(number)
    }

    /// True where the pools of a node may not be together.
    fn mixed(&self) -> bool {
        !self.numbers.is_empty()
    }

    fn new_number(&mut self) -> Option<u32> {
        let number = u32::try_from(self.count).ok()?;
        self.count += 1;
        Some(number)
    }
}

/// The same, sorted by the nodes' numbers, those of a node in the order they had.
fn node_by_node(found: &[Found], nodes: usize) -> Vec<Found> {
    let place = |found: &Found| usize::try_from(found.node).unwrap_or(usize::MAX);
    let mut next = vec![0_usize; nodes + 1];
    for one in found {
        next[place(one) + 1] += 1;
    }
    for n in 1..next.len() {
        next[n] += next[n - 1];
    }
    let mut sorted = found.to_vec();
    for one in found {
        let at = &mut next[place(one)];
        sorted[*at] = *one;
        *at += 1;
    }
    sorted
}

/// Adds a node's candidates to `kept`, the largest first; of those that share a filesystem only the one that can give the
/// most.
fn keep_one_per_filesystem(pools: &[&PoolView], group: &mut [Found], kept: &mut Vec<Candidate>) {
    let pool = |candidate: &Candidate| &pools[candidate.at()].pool;
    group.sort_unstable_by(|Found { candidate: a, .. }, Found { candidate: b, .. }| {
        b.room.cmp(&a.room).then_with(|| pool(a).name.cmp(&pool(b).name))
    });
    let from = kept.len();
    if group.len() <= FEW {
        let mut ends = [u64::MAX; FEW];
        for Found { device_end: end, candidate, .. } in group {
            let shares = |(other, other_end): (&Candidate, &u64)| {
                (*end == *other_end || *end == 0 || *other_end == 0)
                    && pool(other).shares_space_with(pool(candidate))
            };
            if !kept[from..].iter().zip(&ends).any(shares) {
                ends[kept.len() - from] = *end;
                kept.push(*candidate);
            }
        }
        return;
    }
    let mut names = HashSet::new();
    let mut devices = HashSet::new();
    for Found { candidate, .. } in group {
        let pool = pool(candidate);
        let new = if pool.device.is_empty() {
            !names.contains(&(&pool.name, true)) && !names.contains(&(&pool.name, false))
        } else {
            !devices.contains(&pool.device) && !names.contains(&(&pool.name, true))
        };
        if new {
            names.insert((&pool.name, pool.device.is_empty()));
            devices.insert(&pool.device);
            kept.push(*candidate);
        }
    }
}

/// A quick hash of names: whoever could choose them to collide is the cluster's administrator.
#[derive(Default)]
struct Words(u64);

impl Hasher for Words {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            // Multiplier: 2^64 divided by the golden ratio, odd (Knuth, volume 3, section 6.4).
            self.0 = (self.0.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }

    /// The table uses the lowest and the highest bits; a product's good ones are the high ones.
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}
