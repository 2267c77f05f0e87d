//! Images over NVMe/TCP, served by the owner's kernel and attached by the consumer's.
//!
//! One subsystem for each branch and generation, with one namespace, open to at most one host. Nobody but the kernels is
//! needed while a branch is used: agents may die, restart and be replaced.
//!
//! - [`NvmeOwner`], [`NvmeConsumer`]: the two ends.
//! - [`tls`]: keys by which connections of encrypted exports are made, in the kernel's keyring.
//! - `names`: what branches and nodes are called on the network.
//! - `plan`: which steps bring the target's tree from what it is to what it should be.
//!
//! Invariants, and what holds them up:
//! - A tree that is not whole is never completed but ended and made anew: connections of before, which the kernel may still be
//!   ending, hold on to the old tree and cannot reach the new one.
//! - A peer stays in the list of allowed hosts until nothing of it can reach the image any more, so a fence that is interrupted
//!   is seen, and goes on when asked again.
//! - An encrypted export is linked to listeners that take no connection without TLS, and to no others. What is encrypted has another
//!   serial number than what is not, so the kernel's tree tells which it is.

mod abilities;
mod consumer;
mod names;
mod owner;
mod plan;
pub mod tls;

pub use abilities::{Signs, prepare_consumer, prepare_owner, probe, signs};
pub use consumer::NvmeConsumer;
pub use names::HostIdentity;
pub use owner::NvmeOwner;

use std::io;

use super::TransportError;
use crate::platform::HostError;

/// The port that IANA has assigned to NVMe over fabrics.
pub const DEFAULT_PORT: u16 = 4420;

/// The port after it: a listener takes encrypted connections, or those that are not.
pub const DEFAULT_TLS_PORT: u16 = 4421;

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
