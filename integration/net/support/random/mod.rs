//! Random sequences of faults on a cluster, and what must hold after each.
//!
//! `sequence` makes steps from a seed, `run` carries them out on machines, `pods` keeps each volume where the steps want it,
//! `left` looks at disks and kernels afterwards, and `judge` says what of all that is not allowed to be true. The first and
//! the last are pure.

mod judge;
mod left;
mod pods;
mod records;
mod run;
mod sequence;

pub use run::{Sabotage, Trial};
pub use sequence::{Sequence, kept};

/// The machines, by their number.
pub const NODES: [&str; 3] = ["a", "b", "c"];

/// The volumes that steps move, by their number: one branch on `b`; three images, one on each node; three directories.
pub const VOLUMES: [&str; 3] = ["image", "union", "nfs"];

/// The volume that two nodes write at once, for the whole time: a directory on `b`, ReadWriteMany. Its number is the next one.
pub const SHARED: &str = "shared";
/// How many pods it has, each on a node of its own.
pub const SHARERS: usize = 2;

/// How many pods there are at a time.
pub const PODS: usize = VOLUMES.len() + SHARERS;
