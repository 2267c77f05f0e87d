//! Who may use a branch that several nodes use at once: a directory, over NFS, in the access modes of many nodes.
//!
//! The counterpart of the protocol for one node at a time, by the same parties in the same object. The leader writes who is to
//! have the branch ([`Sharing`] in the spec), with an epoch that it raises with each change; the owner lets them in its kernel
//! and reports whom it lets ([`SharingReport`] in the status); a consumer attaches what the report opens to it. Nobody has to
//! wait for another to be fenced, as they share it anyhow. What holds, whoever crashes, restarts or reads old objects:
//!
//! - Once the owner reported an order that does not name a node, that node cannot use the branch, whatever its kernel still
//!   has, until a later order names it again.
//! - Who is named by each order keeps what it has: orders that change others, a crash of the owner and its reboot do not make
//!   it attach anew. NFS loses nothing that was completed, so the generation stays for as long as the branch is shared.
//! - Who was fenced and is named again has to attach anew ([`Sharer::since`]): its kernel may hold files and locks that are of
//!   before.
//! - Who is named to read only cannot write, whatever its kernel asks for. Who may write then is fenced and let anew, as is who
//!   may no more.
//! - A branch is shared or goes to one node at a time, never both: the leader changes from one to the other only after the
//!   owner reported that nobody is let ([`exclusive_is_over`], [`shared_leader_step`]), and what was exported before has a
//!   generation that never comes again.
//!
//! The owner node may be among those that share: it uses its directory itself, without an export.

mod consumer;
mod leader;
mod owner;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Access, Epoch, ExportReport, Generation, Right};
use crate::domain::NodeName;
use crate::domain::split::BranchFormat;
use crate::domain::volume::AccessMode;

pub use consumer::{SharedConsuming, shared_consumer_step};
pub use leader::{SharedLeaderDecision, SharedLed, SharedWaiting, shared_leader_step};
pub use owner::{SharedOwned, SharedOwnerAction, shared_owner_step};

/// Who is to share a branch, and since which order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sharing {
    /// The nodes, sorted; empty: nobody, and the branch is not shared.
    #[serde(default)]
    pub consumers: Vec<NodeName>,
    /// Those of them that only read, sorted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<NodeName>,
    /// The order.
    pub epoch: Epoch,
}

/// A node that is let use a shared branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sharer {
    /// The node.
    pub node: NodeName,
    /// What it calls itself to the transport: an address; absent for the owner itself, and while it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// It may only read: the owner's kernel refuses its writes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// The order from which on it was let so without a break.
    pub since: Epoch,
}

impl Sharing {
    /// What the node may do; `None`: nothing.
    #[must_use]
    pub fn right(&self, node: &NodeName) -> Option<Right> {
        let right = if self.readers.contains(node) { Right::Read } else { Right::Write };
        self.consumers.contains(node).then_some(right)
    }
}

impl Sharer {
    /// What it may do.
    #[must_use]
    pub const fn right(&self) -> Right {
        if self.read_only { Right::Read } else { Right::Write }
    }
}

/// Whom the owner's kernel lets share a branch: observed, never meant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SharingReport {
    /// Generation of the export: the same for as long as the branch is shared.
    #[serde(default)]
    pub generation: Generation,
    /// Address and port of the export on the storage network; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Name of the export there, an NFS path; absent while there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Who is let, sorted.
    #[serde(default)]
    pub consumers: Vec<Sharer>,
    /// The order that was carried out. Everybody else whom an earlier one let is fenced.
    pub epoch: Epoch,
    /// The boot of the owner in which this was observed (/proc/sys/kernel/random/boot_id).
    #[serde(default)]
    pub boot_id: String,
}

/// What the owner must not forget about a shared branch: kept beside it on disk, written out before what depends on it is done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SharedMark {
    /// The generation that is or is about to be exported, or was last.
    #[serde(default)]
    pub generation: Generation,
    /// The newest order that was acted upon.
    #[serde(default)]
    pub epoch: Epoch,
    /// Whom it lets. After a reboot they are let again by this alone.
    #[serde(default)]
    pub consumers: Vec<Sharer>,
    /// Who is being fenced, or was while this could not be noted: if it is let again, then as one that comes anew.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leaving: Vec<Sharer>,
}

/// Whether a volume is shared: it is attached in modes of many nodes only, and its branches are directories. Everything else
/// goes to one node at a time.
#[must_use]
pub fn is_shared(modes: impl IntoIterator<Item = AccessMode>, formats: &[BranchFormat]) -> bool {
    let mut modes = modes.into_iter().peekable();
    modes.peek().is_some()
        && modes.all(AccessMode::multi_node)
        && formats.iter().all(|format| *format == BranchFormat::Directory)
}

/// Whether nobody has the branch for itself alone any more, by order and by the owner's report.
#[must_use]
pub fn exclusive_is_over(access: Option<&Access>, report: Option<&ExportReport>) -> bool {
    match access {
        None => true,
        Some(access) => {
            access.consumer.is_none()
                && *access == report.map(|report| report.allowed.clone()).unwrap_or_default()
        }
    }
}

/// Whether a node has to ask [`shared_consumer_step`] about the branch, not [`super::consumer_step`]. `mark`: where it is the
/// branch's owner; `held`: it has a branch of another node attached that was shared then.
#[must_use]
pub fn governs(sharing: Option<&Sharing>, mark: Option<&SharedMark>, held: bool) -> bool {
    let acted = mark.map_or(Epoch::default(), |mark| mark.epoch);
    held || mark.is_some_and(|mark| !mark.consumers.is_empty())
        || sharing.is_some_and(|sharing| !sharing.consumers.is_empty() && sharing.epoch > acted)
}

#[cfg(test)]
mod tests;
