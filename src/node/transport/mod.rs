//! Reaching a branch that lies on another node, or on this one.
//!
//! A transport has two ends. The **owner** exports one branch ([`Owner`]): an export exists without anybody being allowed
//! to use it, is opened to one peer, and is *fenced* from that peer before another may have it. The **consumer** attaches an
//! export ([`Consumer`]) and gets a block device or a directory. Both ends keep nothing in memory: what is exported and what
//! is attached is read from the kernel each time, so an agent that restarts knows as much as one that did not, and the
//! kernel serves on while no agent runs.
//!
//! Every function is blocking, bounded in time and idempotent: done twice, the second call finds what the first one left and
//! changes nothing; interrupted anywhere and called again, it goes on.

pub mod nfs;
pub mod nvme_tcp;
mod set;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use self::set::{Carried, Ends, Transports};
pub use crate::domain::Secret;
pub use crate::domain::access::{Generation, Right};
use crate::domain::{BranchId, Bytes, NodeName};

/// What an export is of: a branch, and which of its generations.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExportId {
    /// The branch.
    pub branch: BranchId,
    /// Its generation.
    pub generation: Generation,
}

/// What is exported, at the owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file or block device that holds a filesystem or raw data; it goes to one consumer.
    Image {
        /// Where it is.
        path: PathBuf,
        /// What a consumer was told to be completed survives a crash of this node, whether it was flushed or not. Without it,
        /// what was not flushed can come back as zeros, and a later flush succeeds: [`Owner::durable`] is false.
        write_through: bool,
        /// It is reached by encrypted connections only.
        encrypted: bool,
    },
    /// A directory of files; it may go to several.
    Directory(PathBuf),
}

/// What a transport needs to reach an export; made by the owner, used by the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Address and port of the owner on the storage network.
    pub address: SocketAddr,
    /// Name of the export there: an NVMe subsystem NQN, or an NFS path.
    pub name: String,
}

/// A node as the other end knows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Peer {
    /// The node.
    pub node: NodeName,
    /// What it calls itself to this transport (an NVMe host NQN), or the address that it comes from (NFS).
    pub identity: String,
}

/// One thing that a kernel can or cannot do, with the reason and the remedy in words for an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ability {
    /// It can; `how` tells whether it is built in, loaded, or loaded on demand.
    Able {
        /// In words.
        how: String,
    },
    /// It cannot.
    Unable {
        /// Why, and what would help.
        reason: String,
    },
}

/// What this node can carry by one transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abilities {
    /// It can export.
    pub owner: Ability,
    /// It can attach.
    pub consumer: Ability,
    /// Both ends can prove to each other who they are (NVMe: DH-HMAC-CHAP).
    pub authentication: Ability,
    /// Both ends can encrypt what is sent (NVMe: TLS 1.3).
    pub encryption: Ability,
}

/// An export as the owner's kernel has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// What it is of.
    pub id: ExportId,
    /// Where it is reached; `None` while it is half made or half ended, and not reachable.
    pub endpoint: Option<Endpoint>,
    /// Who is allowed to use it.
    pub allowed: Vec<String>,
    /// Those of them that may only read.
    pub readers: Vec<String>,
}

/// How an attachment stands, as the consumer's kernel tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It answers.
    Live,
    /// The owner does not answer; the kernel tries again and what uses it waits.
    Connecting,
    /// The kernel has given up or was told to: whatever used it gets errors.
    Dead,
}

/// What the consumer has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// What it is of.
    pub id: ExportId,
    /// Where the owner is reached; `None` where the kernel does not tell, as while it reconnects.
    pub endpoint: Option<Endpoint>,
    /// Device node of an image, or the directory where an NFS export is mounted; `None` where the kernel took the device away
    /// or has none yet. [`Consumer::attach`] never answers with `None`.
    pub at: Option<PathBuf>,
    /// How it stands.
    pub link: Link,
}

/// What to do while an owner does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Whatever uses the branch waits until the owner is back or the agent decides otherwise.
    Wait,
    /// It gets errors after about this long.
    GiveUpAfter(Duration),
}

/// The owner's end.
pub trait Owner: Send + Sync {
    /// Until [`Owner::open`] was called as often, exports of the branch that are made are not reached by anybody. A consumer that
    /// comes back while its export is only half made is refused, and kernels since 6.10 take that for final and give their users
    /// errors (`nvmf_should_reconnect`, the bit "do not retry"); while nobody listens they try again.
    fn hold(&self, _branch: &BranchId) {}

    /// Ends what [`Owner::hold`] began, for all of them at once; the branches whose exports cannot be reached now, and why.
    fn open(&self, _branches: &[BranchId]) -> Vec<(BranchId, TransportError)> {
        Vec::new()
    }

    /// Exports a branch; nobody is allowed to use it yet. An export of an earlier generation of the branch is ended first; while
    /// a later one stands, [`TransportError::Outdated`]. Whoever is allowed on an export that stands already stays allowed.
    ///
    /// # Errors
    /// [`TransportError`].
    fn export(&self, id: &ExportId, source: &Source) -> Result<Endpoint, TransportError>;

    /// Lets one peer use it so; one that is allowed otherwise is fenced first. An image has one peer, which may write: while
    /// another is allowed, [`TransportError::Held`]. One that is exported encrypted needs a secret with a key for that.
    ///
    /// # Errors
    /// [`TransportError`].
    fn allow(
        &self,
        id: &ExportId,
        peer: &Peer,
        right: Right,
        secret: Option<&Secret>,
    ) -> Result<(), TransportError>;

    /// Takes the right from a peer, on every generation of the branch, and ends its live connections. After it returned nothing
    /// that the peer sends, and nothing that it sent before, can change the branch. Until it returned the peer counts as
    /// allowed, also after a crash in the middle. A peer that is not allowed is fenced already.
    ///
    /// # Errors
    /// [`TransportError`]; the peer counts as not fenced then.
    fn fence(&self, id: &ExportId, peer: &Peer) -> Result<(), TransportError>;

    /// Ends the export, whoever uses it. What is not exported is ended already.
    ///
    /// # Errors
    /// [`TransportError`].
    fn unexport(&self, branch: &BranchId) -> Result<(), TransportError>;

    /// Whether the kernel has forgotten some of what this driver told it, by another program's hand: the next order for such a
    /// branch, or its restoring, tells it again.
    ///
    /// # Errors
    /// [`TransportError`].
    fn forgotten(&self) -> Result<bool, TransportError> {
        Ok(false)
    }

    /// Has a peer heard that lost the branch, which lies at `source`, while this machine was off: the kernel that it had it of is gone,
    /// and the peer may still wait for this one with what it asks of `id`. It gets its errors when it tells that its union does not
    /// use the branch any more. It is given nothing.
    ///
    /// # Errors
    /// [`TransportError`].
    fn hear(&self, _id: &ExportId, _source: &Source, _peer: &Peer) -> Result<(), TransportError> {
        Ok(())
    }

    /// Looks after what was taken from peers; to be called every few seconds. Those that still wait for it get their errors as soon
    /// as they tell that their own union does not use it any more.
    ///
    /// # Errors
    /// [`TransportError`].
    fn tend(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Ends the connections of all exports of this driver, because the machine is about to stop: its kernel answers to the end, with
    /// errors once the disks are off, and consumers would take these for their branches'. So they wait for its return. Who may use
    /// what stays as it is.
    ///
    /// # Errors
    /// [`TransportError`].
    fn withdraw(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Tells the kernel, and so the consumer, that the image has grown to what its file holds now.
    ///
    /// # Errors
    /// [`TransportError`].
    fn grown(&self, id: &ExportId) -> Result<Bytes, TransportError>;

    /// Whether what is completed on an export of `source` survives a crash of this node, as the branch lies on the disk now:
    /// its image is written through, or its clients send again what was not committed.
    ///
    /// # Errors
    /// [`TransportError`].
    fn durable(&self, source: &Source) -> Result<bool, TransportError>;

    /// All exports of this driver on this node, from the kernel.
    ///
    /// # Errors
    /// [`TransportError`].
    fn exports(&self) -> Result<Vec<Exported>, TransportError>;

    /// Those of one branch, of all generations. Looking at them must not cost more the more others there are, where the kernel
    /// can be asked so.
    ///
    /// # Errors
    /// [`TransportError`].
    fn exports_of(&self, branch: &BranchId) -> Result<Vec<Exported>, TransportError> {
        let mut all = self.exports()?;
        all.retain(|export| export.id.branch == *branch);
        Ok(all)
    }
}

/// The consumer's end.
pub trait Consumer: Send + Sync {
    /// What this node calls itself to owners.
    ///
    /// # Errors
    /// [`TransportError`].
    fn identity(&self) -> Result<String, TransportError>;

    /// Attaches an export, and checks that what answers is the branch and the generation that was asked for. A secret with a key
    /// for encryption means that it is attached encrypted or not at all.
    ///
    /// # Errors
    /// [`TransportError`]; nothing that this call attached stays then.
    fn attach(
        &self,
        id: &ExportId,
        endpoint: &Endpoint,
        secret: Option<&Secret>,
        patience: Patience,
    ) -> Result<Attached, TransportError>;

    /// Changes what happens while the owner does not answer, also while it does not.
    ///
    /// # Errors
    /// [`TransportError`].
    fn set_patience(&self, id: &ExportId, patience: Patience) -> Result<(), TransportError>;

    /// Ends an attachment that nothing uses any more. What is not attached is ended already.
    ///
    /// # Errors
    /// [`TransportError`].
    fn detach(&self, id: &ExportId) -> Result<(), TransportError>;

    /// Ends an attachment now: never waits for the owner. Whatever uses it gets errors.
    ///
    /// # Errors
    /// [`TransportError`].
    fn force_detach(&self, id: &ExportId) -> Result<(), TransportError>;

    /// All attachments of this driver on this node, from the kernel.
    ///
    /// # Errors
    /// [`TransportError`].
    fn attachments(&self) -> Result<Vec<Attached>, TransportError>;
}

/// Why something was not done.
#[derive(Debug, snafu::Snafu)]
#[snafu(visibility(pub(crate)))]
pub enum TransportError {
    /// This kernel cannot.
    #[snafu(display("this node cannot {action}: {reason}"))]
    Unable {
        /// What was to be done.
        action: &'static str,
        /// Why, and what would help.
        reason: String,
    },
    /// Another peer is allowed to use it and was not fenced.
    #[snafu(display("branch {branch} is open to {holder}: fence that node first"))]
    Held {
        /// The branch.
        branch: BranchId,
        /// Who has it.
        holder: String,
    },
    /// It would be readable on the way.
    #[snafu(display("branch {branch} is to be encrypted on the network, and {reason}"))]
    Readable {
        /// The branch.
        branch: BranchId,
        /// What lacks.
        reason: String,
    },
    /// The owner refuses this node.
    #[snafu(display("{endpoint} refuses this node: {reason}"))]
    Refused {
        /// Who refuses.
        endpoint: String,
        /// Why, as far as the kernel tells.
        reason: String,
    },
    /// Nothing answers there in time.
    #[snafu(display("{endpoint} does not answer: {reason}"))]
    Unreachable {
        /// Who.
        endpoint: String,
        /// What was seen.
        reason: String,
    },
    /// What answers is not what was asked for.
    #[snafu(display("{endpoint} answers, but not with branch {branch}: {reason}"))]
    Foreign {
        /// Who answers.
        endpoint: String,
        /// What was asked for.
        branch: BranchId,
        /// What came instead.
        reason: String,
    },
    /// A later generation of the branch is exported: who asks is late.
    #[snafu(display(
        "branch {branch} is exported as generation {current}, so generation {asked} is outdated"
    ))]
    Outdated {
        /// The branch.
        branch: BranchId,
        /// What was asked for.
        asked: Generation,
        /// What is exported.
        current: Generation,
    },
    /// Something on this node uses the attachment.
    #[snafu(display("branch {branch} is still in use here as {device}: unmount it first"))]
    InUse {
        /// The branch.
        branch: BranchId,
        /// Its device or directory.
        device: String,
    },
    /// There is no such export or attachment.
    #[snafu(display("branch {branch} is not {what} here"))]
    Absent {
        /// The branch.
        branch: BranchId,
        /// `exported` or `attached`.
        what: &'static str,
    },
    /// The kernel did not do it.
    #[snafu(display("cannot {action}: {source}"))]
    Kernel {
        /// What was to be done.
        action: String,
        /// The kernel's answer.
        source: std::io::Error,
    },
}
