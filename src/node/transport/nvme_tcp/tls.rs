//! Keys by which encrypted connections are made: put into the kernel's keyring by who exports and who attaches, before a connection
//! can want them, and taken out when none can be made any more.
//!
//! The kernel makes no handshake by itself, it asks a process: whoever has a key put here sees to it first that somebody answers
//! ([`Answering`]).

use std::sync::Arc;

use super::names;
use crate::domain::{BranchId, Secret};
use crate::node::handshake::Answering;
use crate::node::transport::TransportError;
use crate::platform::keyring::{KeySerial, NvmeKeyring};
use crate::platform::{Host, HostError};

/// What encrypted connections of this node need.
#[derive(Clone, Debug)]
pub struct Tls {
    host: Host,
    answering: Arc<Answering>,
}

impl Tls {
    /// With who answers the kernel.
    #[must_use]
    pub fn new(host: &Host, answering: Arc<Answering>) -> Self {
        Self { host: host.clone(), answering }
    }

    /// The kernel's requests are answered from now on.
    pub(super) fn ready(&self, branch: &BranchId) -> Result<(), TransportError> {
        self.answering.ensure().map_err(|reason| readable(branch, reason))
    }

    /// Puts the key of connections between this host and this subsystem into the keyring.
    pub(super) fn keep(
        &self,
        branch: &BranchId,
        host: &str,
        subsystem: &str,
        secret: Option<&Secret>,
    ) -> Result<KeySerial, TransportError> {
        let identity = names::tls_identity(host, subsystem);
        let key = secret.and_then(|secret| secret.psk(&identity));
        let key = key.ok_or_else(|| readable(branch, "there is no key for that".to_owned()))?;
        let put = || {
            let ring = NvmeKeyring::find(&self.host).map_err(|error| error.to_string())?;
            let ring = ring.ok_or("this kernel has no keyring .nvme (module nvme-keyring)")?;
            ring.ensure(&identity, &key).map_err(|error| error.to_string())
        };
        put().map_err(|reason: String| readable(branch, reason))
    }

    /// Takes the keys of the subsystem out. Connections that stand go on.
    pub(super) fn forget(&self, subsystem: &str) -> Result<(), HostError> {
        if !self.answering.is_wanted() {
            return Ok(());
        }
        let Some(ring) = NvmeKeyring::find(&self.host)? else { return Ok(()) };
        for key in ring.keys()? {
            if names::of_tls_identity(&key.identity) == Some(subsystem) {
                ring.ensure_absent(&key.identity)?;
            }
        }
        Ok(())
    }
}

fn readable(branch: &BranchId, reason: String) -> TransportError {
    TransportError::Readable { branch: branch.clone(), reason }
}

/// Whether the kernel has keys that an earlier agent put there: connections may stand that it makes anew at any time.
#[must_use]
pub fn has_keys(host: &Host) -> bool {
    let keys = || -> Result<bool, HostError> {
        let Some(ring) = NvmeKeyring::find(host)? else { return Ok(false) };
        Ok(ring.keys()?.iter().any(|key| names::of_tls_identity(&key.identity).is_some()))
    };
    keys().unwrap_or_else(|error| {
        tracing::warn!(%error, "which connections are encrypted cannot be seen");
        false
    })
}
