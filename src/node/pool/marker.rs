//! Recognising a pool: its filesystem's UUID, and a marker in it.
//!
//! A disk that did not mount after a reboot leaves an empty directory on the root disk. So a pool is remembered: the
//! marker lies in the pool, the record in the state directory, both name the filesystem. What does not agree is absent and
//! never written to. The decision is a pure function of what was seen.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::PoolSettings;
use crate::domain::{NodeName, PoolName};
use crate::platform::{Host, Result};

/// Name of the marker in a pool's directory.
pub const MARKER: &str = ".union-csi-pool.json";

/// The version of marker and record that this program writes and reads.
const VERSION: u32 = 1;

/// A marker or a record is a few hundred bytes; more than this is not one.
const LIMIT: usize = 64 * 1024;

/// What marker and record hold: whose pool this is and on which filesystem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Identity {
    version: u32,
    node: NodeName,
    pool: PoolName,
    /// UUID of the filesystem; absent for those that have none.
    uuid: Option<String>,
    /// Its type, for people.
    filesystem: String,
}

/// What was found where an identity should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    This(Identity),
    /// It is there and cannot be understood: why.
    Unreadable(String),
}

/// What is known of a pool's place.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    pub(super) uuid: Option<String>,
    pub(super) filesystem: String,
    pub(super) marker: Found,
    pub(super) record: Found,
    /// `branches/` exists and holds something.
    pub(super) has_branches: bool,
    pub(super) read_only: bool,
}

/// What follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is the pool.
    Recognised,
    /// It is the pool; the state directory does not know it (it was lost or is new).
    Remember(Identity),
    /// Nobody's yet: mark it, then remember it.
    Claim(Identity),
    /// It is not the pool, or not certainly: why, and what to do.
    Absent(String),
}

/// Decides whether what was seen is the pool.
pub(super) fn judge(settings: &PoolSettings, node: &NodeName, seen: &Sighting) -> Verdict {
    let path = settings.path.display();
    let uuid = |u: &Option<String>| u.clone().unwrap_or_else(|| "none".to_owned());
    if let Some(wanted) = &settings.uuid
        && seen.uuid.as_ref().is_none_or(|u| !u.eq_ignore_ascii_case(wanted))
    {
        return Verdict::Absent(format!(
            "the filesystem at {path} has UUID {}, the configuration says {wanted}: mount the right disk there, or \
             correct `uuid`",
            uuid(&seen.uuid)
        ));
    }
    let here = Identity {
        version: VERSION,
        node: node.clone(),
        pool: settings.name.clone(),
        uuid: seen.uuid.clone(),
        filesystem: seen.filesystem.clone(),
    };
    if let Found::This(record) = &seen.record
        && !same_filesystem(record, &here)
    {
        return Verdict::Absent(format!(
            "the filesystem at {path} has UUID {} ({}), this pool lies on {} ({}): its disk is not mounted, mount it; if \
             the pool was given a new disk on purpose, remove {} of the state directory",
            uuid(&seen.uuid),
            seen.filesystem,
            uuid(&record.uuid),
            record.filesystem,
            record_name(&settings.name),
        ));
    }
    if let Found::Unreadable(reason) = &seen.record {
        return Verdict::Absent(format!(
            "{} of the state directory cannot be understood ({reason}): restore it, or remove it if {path} is certainly \
             the pool's disk",
            record_name(&settings.name)
        ));
    }
    match &seen.marker {
        Found::Unreadable(reason) => Verdict::Absent(format!(
            "{path}/{MARKER} cannot be understood ({reason}): restore it from a backup, or take this pool out of the \
             configuration"
        )),
        Found::This(marker) if marker.node != *node || marker.pool != settings.name => {
            Verdict::Absent(format!(
                "{path} is pool {} of node {}, not pool {} of node {node}: correct the path or the names",
                marker.pool, marker.node, settings.name
            ))
        }
        Found::This(marker) if !same_filesystem(marker, &here) => Verdict::Absent(format!(
            "{path}/{MARKER} was written for the filesystem {}, and lies on {} now: the pool was copied; mount the \
             original, or remove the marker if this copy shall be used and the original never again",
            uuid(&marker.uuid),
            uuid(&seen.uuid)
        )),
        Found::This(_) if matches!(seen.record, Found::This(_)) => Verdict::Recognised,
        Found::This(_) => Verdict::Remember(here),
        Found::Nothing if matches!(seen.record, Found::This(_)) => Verdict::Absent(format!(
            "{path} was used before and its {MARKER} is gone: its disk is not mounted or was emptied; mount it, or \
             remove {} of the state directory to begin anew with an empty pool",
            record_name(&settings.name)
        )),
        Found::Nothing if seen.has_branches => Verdict::Absent(format!(
            "{path}/branches holds branches but there is no {MARKER}: they belong to another installation; choose an \
             empty directory"
        )),
        Found::Nothing if seen.read_only => Verdict::Absent(format!(
            "{path} is mounted read-only and was never used: mount it writable once, so that it can be marked"
        )),
        Found::Nothing => Verdict::Claim(here),
    }
}

fn same_filesystem(a: &Identity, b: &Identity) -> bool {
    a.uuid == b.uuid
}

/// Where the state directory remembers a pool, relative to it.
pub(super) fn record_name(pool: &PoolName) -> String {
    format!("pools/{pool}.json")
}

/// Reads a marker or a record.
pub(super) fn read(host: &Host, path: &Path) -> Result<Found> {
    Ok(match host.read_file(path, LIMIT)? {
        None => Found::Nothing,
        Some(bytes) => match serde_json::from_slice::<Identity>(&bytes) {
            Ok(identity) if identity.version == VERSION => Found::This(identity),
            Ok(identity) => {
                Found::Unreadable(format!("version {}, this program knows {VERSION}", identity.version))
            }
            Err(error) => Found::Unreadable(error.to_string()),
        },
    })
}

/// Writes a marker or a record.
pub(super) fn write(host: &Host, path: &Path, identity: &Identity) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(identity).unwrap_or_default();
    text.push(b'\n');
    host.write_atomic(path, &text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::domain::pool::Reserve;

    fn settings() -> PoolSettings {
        PoolSettings {
            name: "big".parse().unwrap(),
            path: "/disk".into(),
            labels: BTreeMap::new(),
            reserve: Reserve::Percent(5),
            media: None,
            uuid: None,
        }
    }

    fn node() -> NodeName {
        "n1".parse().unwrap()
    }

    fn identity(uuid: &str) -> Identity {
        Identity {
            version: VERSION,
            node: node(),
            pool: settings().name,
            uuid: Some(uuid.to_owned()),
            filesystem: "ext4".to_owned(),
        }
    }

    fn sighting(uuid: &str, marker: Found, record: Found) -> Sighting {
        Sighting {
            uuid: Some(uuid.to_owned()),
            filesystem: "ext4".to_owned(),
            marker,
            record,
            has_branches: false,
            read_only: false,
        }
    }

    fn absent(seen: &Sighting) -> String {
        match judge(&settings(), &node(), seen) {
            Verdict::Absent(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_empty_directory_becomes_a_pool_and_is_known_afterwards() {
        let seen = sighting("a", Found::Nothing, Found::Nothing);
        assert_eq!(judge(&settings(), &node(), &seen), Verdict::Claim(identity("a")));
        let seen = sighting("a", Found::This(identity("a")), Found::This(identity("a")));
        assert_eq!(judge(&settings(), &node(), &seen), Verdict::Recognised);
    }

    #[test]
    fn a_pool_whose_record_was_lost_is_remembered_again() {
        let seen = sighting("a", Found::This(identity("a")), Found::Nothing);
        assert_eq!(judge(&settings(), &node(), &seen), Verdict::Remember(identity("a")));
    }

    #[test]
    fn a_disk_that_did_not_mount_is_absent() {
        let root_disk = sighting("root", Found::Nothing, Found::This(identity("a")));
        assert!(absent(&root_disk).contains("not mounted"));
        let emptied = sighting("a", Found::Nothing, Found::This(identity("a")));
        assert!(absent(&emptied).contains("is gone"));
    }

    #[test]
    fn what_belongs_to_others_is_not_taken() {
        let other = Identity { pool: "other".parse().unwrap(), ..identity("a") };
        assert!(absent(&sighting("a", Found::This(other), Found::Nothing)).contains("pool other"));
        let node = Identity { node: "n2".parse().unwrap(), ..identity("a") };
        assert!(absent(&sighting("a", Found::This(node), Found::Nothing)).contains("node n2"));
        let branches = Sighting { has_branches: true, ..sighting("a", Found::Nothing, Found::Nothing) };
        assert!(absent(&branches).contains("another installation"));
        let copied = sighting("b", Found::This(identity("a")), Found::Nothing);
        assert!(absent(&copied).contains("copied"));
    }

    #[test]
    fn the_configured_uuid_has_the_last_word() {
        let wanted = PoolSettings { uuid: Some("AA-01".to_owned()), ..settings() };
        let seen = sighting("aa-01", Found::Nothing, Found::Nothing);
        assert_eq!(judge(&wanted, &node(), &seen), Verdict::Claim(identity("aa-01")));
        let seen = sighting("b", Found::This(identity("b")), Found::This(identity("b")));
        assert!(matches!(judge(&wanted, &node(), &seen), Verdict::Absent(_)));
        let none = Sighting { uuid: None, ..seen };
        assert!(matches!(judge(&wanted, &node(), &none), Verdict::Absent(_)));
    }

    #[test]
    fn what_cannot_be_understood_is_never_overwritten() {
        let bad = Found::Unreadable("x".to_owned());
        absent(&sighting("a", bad.clone(), Found::Nothing));
        absent(&sighting("a", Found::This(identity("a")), bad));
        let read_only = Sighting { read_only: true, ..sighting("a", Found::Nothing, Found::Nothing) };
        assert!(absent(&read_only).contains("writable"));
    }
}
