//! Who leads: one of all instances, by a Lease.
//!
//! An [`Elector`] holds the lease for its instance or waits for its turn; whether it holds it is a [`Claim`], which each
//! write of a leader asks ([`Guarded`] for those to the store). The invariants: the lease is never written without the
//! version that was read; no clock is compared with another's; a claim ends before anyone else may hold one. One case is
//! given up for a quick first start: an instance that finds no lease at all makes one at once, so that a lease which was
//! deleted by hand while somebody led may have a second holder until the first renews, within five seconds. As with every
//! doubt about who leads, versions and the owners' admission then keep each write and each byte right.

mod claim;
pub mod decide;
mod elector;
mod guarded;
mod record;

pub use claim::{Claim, NotLeading};
pub use elector::{Elector, LEASE, Leadership, identity};
pub use guarded::Guarded;
