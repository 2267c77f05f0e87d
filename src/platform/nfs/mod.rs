//! NFSv4.2, both ends, by the kernel alone: no program of the NFS utilities is run or needed.
//!
//! The server (nfsd(7)) is configured by files under `/proc/fs/nfsd`. Whom it serves what it asks through three caches
//! under `/proc/net/rpc`, which are filled here beforehand ([`cache`]); what is not in them makes a client wait, not fail.
//! The client is mounted by fsopen(2) and looked at before it is put anywhere. A few bytes of RPC, spoken here (`rpc`),
//! tell a server that is silent from one that does not know this address, without a mount that could hang.

pub mod cache;
mod client;
mod probe;
mod rpc;
mod server;

use std::path::PathBuf;

pub use self::client::NfsTarget;
pub use self::probe::{Facility, NfsFacilities};
pub use self::rpc::NfsAnswer;
pub use self::server::{NfsClient, NfsServerState, NfsServing};

/// The TCP port of NFS (RFC 8881, section 2.9.3).
pub const NFS_PORT: u16 = 2049;

/// Where the kernel's files are; tests put others in their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsRoots {
    /// The control files of the server; `nfsd` is mounted here.
    pub nfsd: PathBuf,
    /// The caches of the server.
    pub rpc: PathBuf,
    /// What the client tells about its mounts (Linux 6.5 and later).
    pub sysfs: PathBuf,
    /// The kinds of filesystems that the kernel knows now.
    pub filesystems: PathBuf,
    /// Modules of the kernels on this machine.
    pub modules: PathBuf,
}

impl Default for NfsRoots {
    fn default() -> Self {
        Self {
            nfsd: "/proc/fs/nfsd".into(),
            rpc: "/proc/net/rpc".into(),
            sysfs: "/sys/fs/nfs".into(),
            filesystems: "/proc/filesystems".into(),
            modules: "/lib/modules".into(),
        }
    }
}
