//! What exports and peers are called. Pure.

use std::ffi::OsStr;
use std::net::IpAddr;

use sha2::{Digest, Sha256};

use crate::node::transport::{ExportId, Generation, Peer, TransportError};

/// Begins the name of each of this driver's domains in the kernel's caches.
const DOMAIN: &str = "union-csi:";

/// Begins what a consumer calls itself to tell an owner what it has let go of.
const RELEASED: &str = "union-csi-released:";

/// The directory of an export: `BRANCH@GENERATION`. No branch's name has an `@`.
pub(super) fn export(id: &ExportId) -> String {
    format!("{}@{}", id.branch, id.generation)
}

/// What [`export`] named.
pub(super) fn parse(name: &OsStr) -> Option<ExportId> {
    let (branch, generation) = name.to_str()?.split_once('@')?;
    let id = ExportId { branch: branch.parse().ok()?, generation: Generation(generation.parse().ok()?) };
    // One spelling only: `@07` is none of ours.
    (export(&id) == name.to_str()?).then_some(id)
}

/// What file handles of the export begin with: the same after each restart, another for each generation.
pub(super) fn uuid(id: &ExportId) -> [u8; 16] {
    let digest = Sha256::digest(format!("union-csi nfs export {}", export(id)));
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&digest[..16]);
    uuid
}

/// The address that a peer comes from.
pub(super) fn address(peer: &Peer) -> Result<IpAddr, TransportError> {
    peer.identity.parse::<IpAddr>().map(|a| a.to_canonical()).map_err(|_| TransportError::Unable {
        action: "allow a peer by NFS",
        reason: format!("{:?}, as node {} calls itself, is no IP address", peer.identity, peer.node),
    })
}

/// The domain of a peer in the kernel's caches.
pub(super) fn domain(peer: IpAddr) -> String {
    format!("{DOMAIN}{peer}")
}

/// True for a domain that this driver made.
pub(super) fn is_ours(domain: &str) -> bool {
    domain.starts_with(DOMAIN)
}

/// The client by whose name a consumer tells that it has let go of the export.
pub(super) fn released(id: &ExportId) -> String {
    format!("{RELEASED}{}", export(id))
}

/// What a client of that name tells.
pub(super) fn parse_released(client: &str) -> Option<ExportId> {
    parse(client.strip_prefix(RELEASED)?.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(branch: &str, generation: u64) -> ExportId {
        ExportId { branch: branch.parse().unwrap(), generation: Generation(generation) }
    }

    #[test]
    fn a_name_is_read_as_it_was_written() {
        for id in [id("v-0", 0), id("a.b-7.3", 12)] {
            assert_eq!(parse(OsStr::new(&export(&id))).as_ref(), Some(&id));
            assert_eq!(parse_released(&released(&id)), Some(id));
        }
        for other in ["v-0", "v-0@", "v-0@x", "v-0@07", "@1", "V@1", "v-0@1@2", "lost+found"] {
            assert_eq!(parse(OsStr::new(other)), None, "{other}");
            assert_eq!(parse_released(other), None, "{other}");
        }
    }

    #[test]
    fn each_generation_of_each_branch_has_handles_of_its_own() {
        let all = [id("v-0", 1), id("v-0", 2), id("v-1", 1)].map(|id| uuid(&id));
        assert!(all[0] != all[1] && all[1] != all[2] && all[0] != all[2]);
        assert_eq!(uuid(&id("v-0", 1)), all[0]);
    }

    #[test]
    fn a_peer_is_an_address_however_it_is_spelled() {
        let peer = |identity: &str| Peer { node: "n".parse().unwrap(), identity: identity.to_owned() };
        assert_eq!(address(&peer("::ffff:10.0.0.2")).unwrap(), "10.0.0.2".parse::<IpAddr>().unwrap());
        assert!(matches!(address(&peer("node-2")), Err(TransportError::Unable { .. })));
        assert!(is_ours(&domain("10.0.0.2".parse().unwrap())) && !is_ours("*"));
    }
}
