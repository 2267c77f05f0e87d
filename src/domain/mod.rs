//! Values and decisions of the product, without any effect: the same input always gives the same output.
//!
//! Nothing here does I/O, reads a clock, or knows Kubernetes or gRPC. What comes in was parsed at the edge; what goes
//! out is data for others to act on.

pub mod access;
pub mod duration;
pub mod id;
pub mod mergerfs;
pub mod overhead;
pub mod placement;
pub mod policy;
pub mod pool;
pub mod quantity;
pub mod reach;
pub mod secret;
pub mod spelling;
pub mod split;
pub mod unclaimed;
pub mod union;
pub mod volume;

pub use id::{BranchId, InvalidId, NodeName, PoolName, VolumeId};
pub use quantity::Bytes;
pub use secret::{Psk, Secret};
