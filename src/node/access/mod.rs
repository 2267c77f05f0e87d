//! What of the fencing protocol ([`crate::domain::access`]) a node carries out on its own branches.
//!
//! The leader's order comes in the branch's object; the owner's part ([`Exporter`]) looks at the mark beside the branch
//! (`mark`), at the kernel's exports and at what this node's own volumes have attached, and does what
//! [`owner_step`](crate::domain::access::owner_step) decides, until there is nothing left to do. What it saw then is the
//! report, which the executor writes into the object.
//!
//! - Nothing is remembered in memory. An agent that restarts finds exports and marks as they are and changes nothing; after a
//!   reboot the marks alone tell what to export, while no API server is asked.
//! - All of it is done in the branch's turn, in which this node's volumes attach it too. Ending a volume's use is the exception:
//!   it needs the volume's lock, whose holders wait for the branch's turn. Meanwhile the branch is closed to attaching.
//! - Where it cannot be told whether an export stands, nothing is done and nothing reported.

mod carry;
mod exporter;
pub(in crate::node) mod mark;
mod restore;
mod shared;
mod tally;

use snafu::Snafu;

use crate::domain::BranchId;
use crate::domain::reach::Transport;
use crate::node::branch::BranchError;
use crate::node::keys::KeyError;
use crate::node::transport::TransportError;
use crate::store::object::BranchSpec;

pub(in crate::node) use carry::Held;
pub(in crate::node) use exporter::{Asked, Key};
pub use exporter::{Exporter, Settled};
pub use tally::ExportCounts;

/// What this node's own volumes do with its branches: the owner's part must know, and must be able to end it.
pub trait LocalUse: Send + Sync {
    /// Ends the use of the branch by a volume of this node, now, whoever has files of it open: they get errors, and nothing that
    /// they write reaches the branch any more. What is not used here is ended already. To be called without the branch's turn,
    /// as it waits for the volume's.
    ///
    /// # Errors
    /// Why the branch may still be written to; a sentence.
    fn end(&self, branch: &BranchSpec) -> Result<(), String>;
}

/// An order was not carried out; nobody was told that it was.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(crate)), module)]
pub enum AccessError {
    /// The branch, or what is kept beside it, cannot be used.
    #[snafu(display("{source}"))]
    Branch {
        /// Why; it names the branch.
        source: BranchError,
    },
    /// The transport did not do it.
    #[snafu(display("branch {branch}: cannot {action}: {source}"))]
    Transport {
        /// The branch.
        branch: BranchId,
        /// What was to be done.
        action: &'static str,
        /// Why not.
        source: TransportError,
    },
    /// What the two nodes prove to each other cannot be used.
    #[snafu(display("{source}"), context(false))]
    Key {
        /// Why; it names both nodes.
        source: KeyError,
    },
    /// An export may stand, and this node cannot look at its exports.
    #[snafu(display(
        "branch {branch}: whether it is still exported over {transport} cannot be told: {source}; until it can, nobody else is \
         given the branch"
    ))]
    Unseen {
        /// The branch.
        branch: BranchId,
        /// The transport.
        transport: Transport,
        /// Why.
        source: TransportError,
    },
    /// A volume of this node goes on using it.
    #[snafu(display("branch {branch}: its use on this node does not end: {reason}"))]
    Used {
        /// The branch.
        branch: BranchId,
        /// Why; a sentence.
        reason: String,
    },
    /// What was done did not last.
    #[snafu(display(
        "branch {branch}: its export or its use on this node changes as fast as it is put right: see whether another program \
         changes the NVMe target or the NFS server"
    ))]
    Restless {
        /// The branch.
        branch: BranchId,
    },
}

impl From<BranchError> for AccessError {
    fn from(source: BranchError) -> Self {
        Self::Branch { source }
    }
}

#[cfg(test)]
mod tests;
