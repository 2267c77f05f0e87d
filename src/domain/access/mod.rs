//! Who may use a branch that goes to one node at a time: the fencing protocol, as three pure decisions.
//!
//! The three parties meet in the `Branch` object. The leader writes whom it wants to have the branch, with an epoch that it
//! raises each time ([`Access`] in the spec). The owner carries that out in its kernel and reports what it then observes
//! there ([`ExportReport`] in the status). The consumer attaches what the report names, while spec and report both name it.
//!
//! What holds, whoever crashes, is partitioned, restarts or reads old objects, at any point between two actions:
//!
//! - At most one node can write. The owner's kernel is the judge: an export has one peer, and what was allowed before is
//!   fenced, live connections included, before a newer order is even noted.
//! - The leader grants a branch only after the owner reported, at the epoch of the revocation or a later one, that nobody is
//!   allowed. An owner that does not answer is waited for: the bytes are there, and so is the only one who can fence.
//! - Each grant has a generation of its own, which is part of the export's name. A peer that was fenced keeps its kernel's
//!   attachment and may try to come back with writes of its time; it asks for a name that will never exist again, also when
//!   the same node is granted the branch later.
//! - An owner that went down without a clean stop may have lost completed writes. Its next export has another generation,
//!   so that the peer notices, fails what it has mounted, and attaches anew. Where nothing that was completed can be lost
//!   (an image that is written through; NFS, whose clients send again what was not committed), the generation stays, and
//!   peers that waited go on by themselves.
//! - The owner acts on the newest order it ever saw. It keeps that, the generation and the boot they belong to beside the
//!   branch ([`Mark`]), on disk before the first action that depends on it, so that an old object, a store that was
//!   restored from a backup or a second leader cannot take it back.
//!
//! A branch whose spec names no access at all was never governed by this: its own node uses it, and no order is written for
//! as long as only that node wants it. The first that is wanted elsewhere is revoked first: its owner ends its own use.

mod consumer;
mod leader;
mod owner;
pub mod shared;

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NodeName;
use super::reach::Transport;

pub use consumer::{ConsumerDecision, Consuming, Held, NotYet, consumer_step};
pub use leader::{Claimant, LeaderDecision, Led, Waiting, leader_step};
pub use owner::{Exported, Owned, OwnerAction, Peer, owner_step};

/// What a node that is let use a branch may do with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Right {
    /// Read it and write it.
    #[default]
    Write,
    /// Read it: the owner's kernel refuses writes.
    Read,
}

/// Orders the grants and revocations of one branch; raised by the leader with each, never used twice. Zero: none yet.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The last: numbers in Kubernetes' objects are signed and of 64 bits.
    const LAST: u64 = u64::MAX >> 1;

    /// The one after it; `None` after the last.
    #[must_use]
    pub fn next(self) -> Option<Self> {
        (self.0 < Self::LAST).then(|| Self(self.0 + 1))
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Part of an export's name on the network; raised by the owner for each grant, and when completed writes may have been
/// lost. Zero: never exported.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(transparent)]
pub struct Generation(pub u64);

impl Generation {
    /// The one after it. The last is its own successor: at a thousand a second it is reached in 500 million years.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Who may use a branch, and since which order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Access {
    /// The node that may use it; absent: nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consumer: Option<NodeName>,
    /// The order.
    pub epoch: Epoch,
}

/// What the owner's kernel lets whom do with a branch: observed, never meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExportReport {
    /// Generation of the export, or of the last there was.
    #[serde(default)]
    pub generation: Generation,
    /// Address and port of the export on the storage network; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Name of the export there: an NVMe subsystem NQN, or an NFS path; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// How it is reached; absent while nobody is allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Who is allowed. Everybody whom an order before this epoch allowed is fenced and stays so.
    #[serde(default)]
    pub allowed: Access,
    /// The boot of the owner in which this was observed (/proc/sys/kernel/random/boot_id).
    #[serde(default)]
    pub boot_id: String,
}

/// What the owner must not forget about a branch: kept beside it on disk, written out before what depends on it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mark {
    /// The newest generation that was or is about to be exported.
    #[serde(default)]
    pub generation: Generation,
    /// The newest order that was acted upon: all from before it are fenced.
    #[serde(default)]
    pub access: Access,
    /// What the consumer of that order calls itself to the transport, as far as it was known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The boot in which `generation` is exported.
    #[serde(default)]
    pub boot_id: String,
    /// The export was stopped and everything that was completed is on disk: the next boot may go on with the generation.
    #[serde(default)]
    pub clean: bool,
    /// What is completed on the export survives a crash of this node, by [`Owned::durable`] of when this was written: the next
    /// boot may go on with the generation, however this one ends.
    #[serde(default)]
    pub durable: bool,
}

impl Mark {
    /// The mark of a clean stop of the export in the boot `boot_id`; `None` where there is none to be made: what an earlier
    /// boot left unclean does not become clean because a later one that did not look at it stops.
    #[must_use]
    pub fn stopped(&self, boot_id: &str) -> Option<Self> {
        (self.boot_id == boot_id && !self.clean).then(|| Self { clean: true, ..self.clone() })
    }
}

#[cfg(test)]
mod tests;
