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

/// The volumes, by their number: one branch on `b`; three images, one on each node; three directories.
pub const VOLUMES: [&str; 3] = ["image", "union", "nfs"];
