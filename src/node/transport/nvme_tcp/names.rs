//! What branches and nodes are called on the network.

use sha2::{Digest, Sha256};

use crate::domain::NodeName;
use crate::node::transport::{ExportId, Generation, TransportError};

const BRANCH_PREFIX: &str = "nqn.2026-01.io.union:branch:";
const HOST_PREFIX: &str = "nqn.2026-01.io.union:host:";

/// What identities of keys for TLS begin with.
const TLS_IDENTITY: &str = "NVMe0R01 ";

/// The longest NQN, in bytes (NVM Express base specification, "NVMe Qualified Names").
const NQN_MAX: usize = 223;

/// The longest serial number, in bytes (Identify Controller, SN).
const SERIAL_MAX: usize = 20;

/// The NQN of a branch's subsystem.
///
/// # Errors
/// The branch's name is too long for an NQN. Those of volumes are not.
pub(super) fn subsystem(id: &ExportId) -> Result<String, TransportError> {
    let nqn = format!("{BRANCH_PREFIX}{}:{}", id.branch, id.generation);
    if nqn.len() > NQN_MAX {
        let reason = format!("its name is longer than the {NQN_MAX} bytes of an NVMe qualified name allow");
        return Err(TransportError::Unable { action: "call a branch by its name on the network", reason });
    }
    Ok(nqn)
}

/// What a subsystem is of; `None` for those that are not of this driver.
pub(super) fn parse(nqn: &str) -> Option<ExportId> {
    let (branch, generation) = nqn.strip_prefix(BRANCH_PREFIX)?.rsplit_once(':')?;
    let number: u64 = generation.parse().ok()?;
    // One spelling only: what is listed must be found again under the name that is made from it.
    (number.to_string() == generation)
        .then(|| branch.parse().ok())
        .flatten()
        .map(|branch| ExportId { branch, generation: Generation(number) })
}

/// The uuid of the namespace of a branch: kernels refuse two devices with the same one, so each generation has its own.
pub(super) fn uuid(id: &ExportId) -> String {
    digest_uuid(&format!("namespace of {} {}", id.branch, id.generation))
}

/// The serial number of a branch's subsystem: another where it is encrypted, so that the one is never taken for the other.
pub(super) fn serial(id: &ExportId, encrypted: bool) -> String {
    let kind = if encrypted { "encrypted serial" } else { "serial" };
    hex(&format!("{kind} of {} {}", id.branch, id.generation), SERIAL_MAX / 2)
}

/// Under what both ends of a connection know its key: the kernels' own form (6.12: version 0, a key that is kept, SHA-256).
pub(super) fn tls_identity(host: &str, subsystem: &str) -> String {
    format!("{TLS_IDENTITY}{host} {subsystem}")
}

/// The subsystem of such an identity, if it is of this driver.
pub(super) fn of_tls_identity(identity: &str) -> Option<&str> {
    let (host, subsystem) = identity.strip_prefix(TLS_IDENTITY)?.split_once(' ')?;
    (is_host(host) && subsystem.starts_with(BRANCH_PREFIX)).then_some(subsystem)
}

/// An NQN that is a node of this driver.
pub(super) fn is_host(nqn: &str) -> bool {
    nqn.starts_with(HOST_PREFIX)
}

/// The name of a host that is only made to see what a host has.
pub(super) fn trial_host() -> String {
    format!("{HOST_PREFIX}trial")
}

/// What a node calls itself. One pair, fixed: kernels refuse one host id with two NQNs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    /// Its NQN: owners allow it by this.
    pub nqn: String,
    /// Its id, a UUID.
    pub id: String,
}

impl HostIdentity {
    /// The identity of the node on the machine with this id (machine-id(5)). A machine that took over another's name, and
    /// one that was cloned and renamed, are told apart.
    #[must_use]
    pub fn of(node: &NodeName, machine: &str) -> Self {
        let machine = hex(&format!("machine {}", machine.trim()), 8);
        let plain = format!("{HOST_PREFIX}{node}:{machine}");
        let nqn = if plain.len() > NQN_MAX {
            format!("{HOST_PREFIX}{}:{machine}", hex(&format!("node {node}"), 20))
        } else {
            plain
        };
        let id = digest_uuid(&format!("host id of {nqn}"));
        Self { nqn, id }
    }
}

fn hex(text: &str, bytes: usize) -> String {
    Sha256::digest(text.as_bytes()).iter().take(bytes).map(|b| format!("{b:02x}")).collect()
}

fn digest_uuid(text: &str) -> String {
    let digest = Sha256::digest(text.as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid().hyphenated().to_string()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn id(branch: &str, generation: u64) -> ExportId {
        ExportId { branch: branch.parse().unwrap(), generation: Generation(generation) }
    }

    #[test]
    fn a_name_is_understood_as_what_it_was_made_from() {
        for id in [id("pvc-1-0", 0), id("a.b-c", u64::MAX), id(&"x".repeat(170), 7)] {
            assert_eq!(parse(&subsystem(&id).unwrap()), Some(id));
        }
        for other in [
            "nqn.2014-08.org.nvmexpress.discovery",
            "nqn.2026-01.io.union:branch:a",
            "nqn.2026-01.io.union:branch:a:01",
            "nqn.2026-01.io.union:branch:a:-1",
            "nqn.2026-01.io.union:branch:A:1",
            "nqn.2026-01.io.union:branch:a/b:1",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_branch_whose_name_does_not_fit_is_refused_not_cut() {
        assert!(matches!(subsystem(&id(&"x".repeat(253), 0)), Err(TransportError::Unable { .. })));
    }

    #[test]
    fn uuid_and_serial_are_of_one_branch_and_generation_only() {
        let ids = [id("a", 1), id("a", 2), id("a-1", 1), id("b", 1)];
        assert_eq!(ids.iter().map(uuid).collect::<BTreeSet<_>>().len(), ids.len());
        let serials: BTreeSet<_> = ids.iter().flat_map(|i| [serial(i, false), serial(i, true)]).collect();
        assert_eq!(serials.len(), 2 * ids.len());
        assert_eq!(uuid(&id("a", 1)), uuid(&id("a", 1)));
        assert!(serials.iter().all(|serial| serial.len() == SERIAL_MAX));
    }

    #[test]
    fn an_identity_of_a_key_tells_its_subsystem_and_those_of_others_none() {
        let (host, nqn) = (trial_host(), subsystem(&id("a", 1)).unwrap());
        assert_eq!(of_tls_identity(&tls_identity(&host, &nqn)), Some(nqn.as_str()));
        for other in ["NVMe0R01 nqn.a nqn.b", "NVMe1R01 nqn.a nqn.b", "", "NVMe0R01 "] {
            assert_eq!(of_tls_identity(other), None, "{other}");
        }
    }

    #[test]
    fn a_node_has_one_name_and_id_and_shares_them_with_no_other_machine() {
        let node: NodeName = "node-1".parse().unwrap();
        let identity = HostIdentity::of(&node, "abc\n");
        assert_eq!(identity, HostIdentity::of(&node, "abc"));
        assert!(is_host(&identity.nqn) && identity.nqn.contains("node-1"));
        let cloned = HostIdentity::of(&"node-2".parse().unwrap(), "abc");
        let replaced = HostIdentity::of(&node, "def");
        for other in [cloned, replaced] {
            assert!(other.nqn != identity.nqn && other.id != identity.id);
        }
        let long = HostIdentity::of(&"n".repeat(253).parse().unwrap(), "abc");
        assert!(long.nqn.len() <= NQN_MAX);
    }
}
