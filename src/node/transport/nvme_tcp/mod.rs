//! Images over NVMe/TCP, served by the owner's kernel and attached by the consumer's.
//!
//! One subsystem for each branch and generation, with one namespace, open to at most one host. Nobody but the kernels is
//! needed while a branch is used: agents may die, restart and be replaced.
//!
//! - [`NvmeOwner`], [`NvmeConsumer`]: the two ends.
//! - `names`: what branches and nodes are called on the network.
//! - `plan`: which steps bring the target's tree from what it is to what it should be.
//!
//! Invariants, and what holds them up:
//! - A tree that is not whole is never completed but ended and made anew: connections of before, which the kernel may still be
//!   ending, hold on to the old tree and cannot reach the new one.
//! - A peer stays in the list of allowed hosts until nothing of it can reach the image any more, so a fence that is interrupted
//!   is seen, and goes on when asked again.

mod abilities;
mod consumer;
mod names;
mod owner;
mod plan;

pub use abilities::{Signs, prepare_consumer, prepare_owner, probe, signs};
pub use consumer::NvmeConsumer;
pub use names::HostIdentity;
pub use owner::NvmeOwner;

use std::io;

use super::TransportError;
use crate::platform::HostError;

/// The port that IANA has assigned to NVMe over fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// The number of a subsystem's only namespace.
const NAMESPACE: u32 = 1;

/// Names what was to be done; for `map_err`.
fn kernel(action: impl Into<String>) -> impl FnOnce(HostError) -> TransportError {
    let action = action.into();
    move |error| match error {
        HostError::Syscall { call, subject, source } => {
            TransportError::Kernel { action: format!("{action} ({call} {subject})"), source }
        }
        HostError::Timeout { .. } => TransportError::Kernel {
            action,
            source: io::Error::new(io::ErrorKind::TimedOut, error.to_string()),
        },
        error => TransportError::Kernel { action, source: io::Error::other(error.to_string()) },
    }
}
