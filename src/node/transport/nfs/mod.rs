//! Directories over NFSv4.2, served and mounted by the kernels alone.
//!
//! The owner gives each peer a root of its own, `peers/ADDRESS/`, a directory on a small tmpfs in which each branch that the
//! peer may use is bound as `BRANCH@GENERATION`, read-only where the peer only reads: then neither the server nor the mount
//! lets it write. A bound directory is the right: [`Exported::allowed`](super::Exported) is read from the table of mounts, and
//! the kernel's caches are filled to match. It is also the proof of a fence: it is unmounted without force, which the kernel
//! does only when no request of the peer and no file that the peer has open holds it any more. A second bind,
//! `exports/BRANCH@GENERATION`, stands for an export that nobody may use yet.
//!
//! What the server does not know makes a client wait (Linux 5.6 and later): after a restart of the owner, clients wait until
//! their branch is exported and allowed again, in whatever order that is done, and go on with what they had open. They send
//! again what was not on the disk before. So an owner that went down does not need another [`Generation`].
//!
//! A peer that is fenced waits likewise for what it still asks for. An error (ESTALE) would come to its union before its agent:
//! MergerFS takes files for missing then, and lets them be made anew on another branch. Meanwhile its kernel may keep what it has
//! of this owner's other branches waiting too (its state manager claims what was open again, one after the other). So it gets its
//! errors in the end: as soon as it tells that it let go of the branch by force ([`Owner::tend`](super::Owner::tend)). It does so where
//! the owner's kernel itself keeps it for the owner's agent, in the name of a client that it introduces to the server; no other
//! connection between agents is needed, and none to the API server. Who does not tell is never refused. What was taken is noted on
//! the disk: who did not hear of it before the owner restarts asks the next kernel the same, and could not tell it either.
//!
//! A peer is an address, and its kernel is trusted with what it may use: there is no proof of identity, and who is root there
//! is root here, within the filesystem of the pool that the branch lies in (a forged file handle reaches other directories of
//! it). Addresses of the storage network must not be anyone's to take.
//!
//! Fencing a peer that still has files open ends all that it has open and locked at this owner: on its other branches here it
//! opens them again by itself, but locks of byte ranges and flock(2) there are lost, and their holders get EIO. A peer that
//! unmounted before is fenced without that.

mod consumer;
mod marks;
mod name;
mod owner;

pub use self::consumer::NfsConsumer;
pub use self::owner::{NfsOwner, occupied};

use serde::{Deserialize, Serialize};

use super::{Abilities, Ability, ExportId, Generation, TransportError};
use crate::domain::BranchId;
use crate::platform::nfs::{Facility, NfsRoots};
use crate::platform::{Host, HostError};

/// The identity of an export: a file at its top, beside `data`. Workloads are given `data` only.
const IDENTITY: &str = "export.json";

/// An identity takes some hundred bytes.
const IDENTITY_LIMIT: usize = 4096;

/// The version of the identity that this program writes and reads.
const IDENTITY_VERSION: u32 = 1;

/// What a consumer finds in [`IDENTITY`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Identity {
    version: u32,
    branch: BranchId,
    generation: u64,
}

impl Identity {
    fn of(id: &ExportId) -> Self {
        Self { version: IDENTITY_VERSION, branch: id.branch.clone(), generation: id.generation.0 }
    }

    fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(self).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Why what was found is not the identity of `id`.
    fn differs(found: Option<&[u8]>, id: &ExportId) -> Option<String> {
        let Some(found) = found else { return Some(format!("it has no {IDENTITY}")) };
        match serde_json::from_slice::<Self>(found) {
            Err(error) => Some(format!("its {IDENTITY} cannot be understood: {error}")),
            Ok(found) if found == Self::of(id) => None,
            Ok(found) => Some(format!(
                "its {IDENTITY} says branch {}, generation {} (version {})",
                found.branch,
                Generation(found.generation),
                found.version
            )),
        }
    }
}

/// What this node can carry by NFS.
///
/// # Errors
/// The kernel's own lists cannot be read.
pub fn probe(host: &Host, roots: &NfsRoots) -> Result<Abilities, TransportError> {
    let found = host.nfs_facilities(roots).map_err(kernel("look for NFS in this kernel"))?;
    let authentication =
        "NFS with AUTH_SYS knows a peer by its address only; separate the storage network, or use \
                          image branches over NVMe/TCP where peers must prove who they are"
            .to_owned();
    Ok(Abilities {
        owner: ability(found.server, "nfsd"),
        consumer: ability(found.client, "nfsv4"),
        authentication: Ability::Unable { reason: authentication },
        encryption: Ability::Unable {
            reason: "NFS is not encrypted here; use image branches over NVMe/TCP where nobody must read what is sent"
                .to_owned(),
        },
    })
}

fn ability(facility: Facility, module: &str) -> Ability {
    match facility {
        Facility::Present => Ability::Able { how: format!("{module} is in the kernel") },
        Facility::Loadable => {
            Ability::Able { how: format!("the kernel loads the module {module} on demand") }
        }
        Facility::Missing(reason) => Ability::Unable { reason },
    }
}

/// Names what was to be done; for `map_err`.
fn kernel(action: impl Into<String>) -> impl FnOnce(HostError) -> TransportError {
    move |error| {
        let source = match error {
            HostError::Syscall { source, .. } => source,
            other => std::io::Error::other(other.to_string()),
        };
        TransportError::Kernel { action: action.into(), source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(branch: &str, generation: u64) -> ExportId {
        ExportId { branch: branch.parse().unwrap(), generation: Generation(generation) }
    }

    #[test]
    fn an_identity_is_of_one_branch_and_one_generation() {
        let text = Identity::of(&id("v-0", 3)).text();
        assert_eq!(Identity::differs(Some(&text), &id("v-0", 3)), None);
        let other = Identity::differs(Some(&text), &id("v-1", 3)).unwrap();
        assert!(other.contains("branch v-0, generation 3"), "{other}");
        assert!(Identity::differs(Some(&text), &id("v-0", 4)).is_some());
        assert!(Identity::differs(Some(b"{"), &id("v-0", 3)).is_some());
        assert!(Identity::differs(None, &id("v-0", 3)).unwrap().contains("no export.json"));
    }

    #[test]
    fn a_node_without_the_modules_says_so_at_each_end() {
        let directory = tempfile::tempdir().unwrap();
        let roots = NfsRoots {
            filesystems: directory.path().join("filesystems"),
            modules: directory.path().join("modules"),
            ..NfsRoots::default()
        };
        std::fs::write(&roots.filesystems, "nodev\tnfs4\n").unwrap();
        let abilities = probe(&Host::new(), &roots).unwrap();
        assert!(matches!(abilities.owner, Ability::Unable { .. }));
        assert!(matches!(abilities.consumer, Ability::Able { .. }));
        assert!(matches!(abilities.authentication, Ability::Unable { .. }));
    }
}
