//! The Container Storage Interface, version 1.12: parse, call, reply.
//!
//! What comes in over the socket is parsed into domain types (`parse`), guarded so that one volume has one call at a
//! time (`guard`), and done: for the controller by writing to the store and watching it (`provision`), for the node by
//! [`crate::node::volume::Volumes`]. What failed becomes a gRPC code by one table (`status`).
//!
//! The socket is complete and standard: any orchestrator, or the official sidecars, can drive it.

mod controller;
pub mod counters;
mod guard;
mod identity;
mod node;
mod parse;
mod provision;
pub mod registration;
mod server;
mod socket;
mod status;

/// The protocol, generated from `csi.proto`; also the client that the command line uses.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
pub mod proto {
    tonic::include_proto!("csi.v1");
}

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::domain::NodeName;

pub use controller::ControllerService;
pub use identity::IdentityService;
pub use node::{NodeService, VolumesOnNode};
pub use server::{ServeError, Services, serve};
pub use socket::{BindError, Purpose, Socket, bind};

/// The driver's name.
pub const DRIVER: &str = "union.csi.union.io";

/// The version of the specification that is served.
pub const SPECIFICATION: &str = "1.12.0";

/// What the administrator set that concerns the services.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This node.
    pub node: NodeName,
    /// How long CreateVolume and DeleteVolume wait for branches.
    pub create_timeout: Duration,
    /// How many volumes a node takes; `None`: no limit.
    pub max_volumes: Option<u32>,
    /// Where ephemeral volumes are staged; below a directory that staging paths may lie in.
    pub ephemeral_dir: PathBuf,
}

/// A caller's deadline is undercut by this much, so that the answer, which says what is waited for, still reaches it.
const ANSWER_EARLY: Duration = Duration::from_millis(200);

impl Settings {
    /// When a call must be answered whose caller waits for `patience`, where that is known.
    fn deadline(&self, patience: Option<Duration>) -> Instant {
        let caller = patience.map(|p| p.saturating_sub(ANSWER_EARLY.min(p / 2)));
        Instant::now() + caller.map_or(self.create_timeout, |p| p.min(self.create_timeout))
    }
}

/// As the protocol's signed numbers; what is larger than them is the largest.
fn signed(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
