//! Who leads: one of all instances, by a Lease.

mod claim;

pub use claim::{Claim, NotLeading};
