//! Who leads: one of all instances, by a Lease.
//!
//! An [`Elector`] holds the lease for its instance or waits for its turn; whether it holds it is a [`Claim`], which each
//! write of a leader asks ([`Guarded`] for those to the store). The invariants: the lease is never written without the
//! version that was read; no clock is compared with another's; a claim ends before anyone else may hold one.

mod claim;
pub mod decide;
mod elector;
mod guarded;
mod record;

pub use claim::{Claim, NotLeading};
pub use elector::{Elector, LEASE, Leadership, identity};
pub use guarded::Guarded;
