//! A branch's identity: `branch.json`, beside its data.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::domain::policy::FsType;
use crate::domain::pool::Enforcement;
use crate::domain::split::BranchFormat;
use crate::domain::{BranchId, Bytes, NodeName, PoolName, VolumeId};
use crate::platform::{Host, Result};
use crate::store::object::BranchSpec;

/// Name of the identity file.
pub(in crate::node) const RECORD: &str = "branch.json";
/// Name of an image.
pub(in crate::node) const IMAGE: &str = "disk.img";
/// Name of the directory that holds a user's files, in a `directory` branch and at the root of an image's filesystem.
pub(in crate::node) const DATA: &str = "data";

/// Begins the name of a branch that is being made. No branch id begins with a point.
const NEW: &str = ".new-";
/// Begins the name of a branch that is being removed.
const GONE: &str = ".gone-";

/// The version of a branch that may be sent as it is.
const VERSION: u32 = 1;

/// That of one that must be encrypted on the network: programs that encrypt nothing must leave it alone.
const VERSION_ENCRYPTED: u32 = 2;

const fn version(encrypted: bool) -> u32 {
    if encrypted { VERSION_ENCRYPTED } else { VERSION }
}

/// An identity is a few hundred bytes; more than this is not one.
const LIMIT: usize = 64 * 1024;

/// What a branch is. Written once, when it is made; it grows with the branch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::node) struct BranchRecord {
    pub(in crate::node) version: u32,
    pub(in crate::node) branch: BranchId,
    /// Where it was made: a copy elsewhere is another's. Absent in identities of before this was noted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) node: Option<NodeName>,
    /// The pool there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) pool: Option<PoolName>,
    pub(in crate::node) volume: VolumeId,
    pub(in crate::node) index: u32,
    pub(in crate::node) size: Bytes,
    pub(in crate::node) format: BranchFormat,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) fs_type: Option<FsType>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) fs_uuid: Option<String>,
    #[serde(default)]
    pub(in crate::node) thin: bool,
    /// Other nodes' writes to its image are written through. Images of programs that did not write this were.
    #[serde(default = "yes")]
    pub(in crate::node) write_through: bool,
    /// Other nodes reach its image by connections that are encrypted only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(in crate::node) encrypted: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) enforcement: Option<Enforcement>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(in crate::node) project: Option<u32>,
}

const fn yes() -> bool {
    true
}

impl BranchRecord {
    /// The identity of a new branch.
    pub(in crate::node) fn new(spec: &BranchSpec) -> Self {
        Self {
            version: version(spec.encrypted),
            branch: spec.id.clone(),
            node: Some(spec.node.clone()),
            pool: Some(spec.pool.clone()),
            volume: spec.volume.clone(),
            index: spec.index,
            size: spec.size,
            format: spec.format,
            fs_type: spec.fs_type,
            fs_uuid: None,
            thin: spec.thin,
            write_through: spec.write_through,
            encrypted: spec.encrypted,
            enforcement: None,
            project: None,
        }
    }

    /// Why it is the identity of a branch somewhere else, which was copied here by hand; `None` where it is none.
    pub(in crate::node) fn elsewhere(&self, node: &NodeName, pool: &PoolName) -> Option<String> {
        let (there, of) = (self.node.as_ref().unwrap_or(node), self.pool.as_ref().unwrap_or(pool));
        ((there, of) != (node, pool)).then(|| {
            format!("its {RECORD} says that it lies in pool {of} of node {there}: this is a copy, or was moved by hand")
        })
    }

    /// What of it is not as the spec wants; `None` where all is.
    pub(in crate::node) fn differs(&self, spec: &BranchSpec) -> Option<String> {
        fn pair<T: PartialEq + std::fmt::Debug>(what: &str, have: &T, want: &T) -> Option<String> {
            (have != want).then(|| format!("its {RECORD} says {what} {have:?}, expected {want:?}"))
        }
        pair("version", &self.version, &version(self.encrypted))
            .or_else(|| pair("branch", &self.branch.as_str(), &spec.id.as_str()))
            .or_else(|| self.elsewhere(&spec.node, &spec.pool))
            .or_else(|| pair("volume", &self.volume.as_str(), &spec.volume.as_str()))
            .or_else(|| pair("index", &self.index, &spec.index))
            .or_else(|| pair("size", &self.size.get(), &spec.size.get()))
            .or_else(|| pair("format", &self.format, &spec.format))
            .or_else(|| pair("filesystem", &self.fs_type, &spec.fs_type))
    }
}

/// The identity in the branch's directory `place`; the inner error says why there is none.
pub(in crate::node) fn read_or_why(
    host: &Host,
    place: &Path,
) -> Result<std::result::Result<BranchRecord, String>> {
    Ok(parse(host.read_file(&place.join(RECORD), LIMIT)?))
}

fn parse(bytes: Option<Vec<u8>>) -> std::result::Result<BranchRecord, String> {
    let bytes = bytes.ok_or_else(|| format!("it has no {RECORD}"))?;
    serde_json::from_slice(&bytes).map_err(|e| format!("its {RECORD} cannot be understood: {e}"))
}

/// Writes the identity.
pub(in crate::node) fn write(host: &Host, place: &Path, record: &BranchRecord) -> Result<()> {
    let mut text = serde_json::to_vec_pretty(record).unwrap_or_default();
    text.push(b'\n');
    host.write_atomic(&place.join(RECORD), &text)
}

/// The directory's name while the branch is made.
pub(in crate::node) fn unfinished(id: &BranchId) -> String {
    format!("{NEW}{id}")
}

/// The directory's name while the branch is removed.
pub(in crate::node) fn doomed(id: &BranchId) -> String {
    format!("{GONE}{id}")
}

/// The branch that a name under `branches/` is a leftover of; `None` where it is none of ours.
pub(in crate::node) fn leftover(name: &str) -> Option<BranchId> {
    name.strip_prefix(NEW).or_else(|| name.strip_prefix(GONE))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> BranchSpec {
        BranchSpec {
            id: "v-0".parse().unwrap(),
            volume: "v".parse().unwrap(),
            index: 0,
            node: "n".parse().unwrap(),
            pool: "p".parse().unwrap(),
            size: Bytes::mib(64),
            usable: Bytes::mib(50),
            format: BranchFormat::Image,
            fs_type: Some(FsType::Ext4),
            thin: false,
            accept_unenforced: false,
            write_through: false,
            encrypted: true,
            access: None,
            sharing: None,
        }
    }

    #[test]
    fn an_identity_names_what_differs() {
        let record = BranchRecord::new(&spec());
        assert_eq!(record.differs(&spec()), None);
        let other = BranchRecord { volume: "w".parse().unwrap(), ..record.clone() };
        assert!(other.differs(&spec()).unwrap().contains("volume \"w\", expected \"v\""));
        for (node, pool) in [("m", "p"), ("n", "q")] {
            let copied = BranchSpec { node: node.parse().unwrap(), pool: pool.parse().unwrap(), ..spec() };
            assert!(record.differs(&copied).unwrap().contains("pool p of node n: this is a copy"));
            let of_before = BranchRecord { node: None, pool: None, ..record.clone() };
            assert_eq!(of_before.differs(&copied), None);
        }
        let newer = BranchRecord { version: 3, ..record };
        assert!(newer.differs(&spec()).unwrap().contains("version"));
        let encrypted = BranchRecord::new(&BranchSpec { encrypted: true, ..spec() });
        assert_eq!((encrypted.version, encrypted.differs(&spec())), (2, None));
        let unknown = BranchRecord { encrypted: false, ..encrypted };
        assert!(unknown.differs(&spec()).is_some(), "as a program of before reads it");
    }

    #[test]
    fn an_identity_is_read_as_it_was_written() {
        let record =
            BranchRecord { project: Some(7), fs_uuid: Some("u".to_owned()), ..BranchRecord::new(&spec()) };
        let text = serde_json::to_vec(&record).unwrap();
        assert_eq!(parse(Some(text)), Ok(record.clone()));
        let mut older = serde_json::to_value(&record).unwrap();
        assert_eq!(older.as_object_mut().unwrap().remove("writeThrough"), Some(false.into()));
        let older = parse(Some(serde_json::to_vec(&older).unwrap()));
        assert_eq!(older, Ok(BranchRecord { write_through: true, ..record }));
        assert!(parse(Some(b"{".to_vec())).is_err());
        assert!(parse(None).unwrap_err().contains("no branch.json"));
    }

    #[test]
    fn only_our_own_names_are_leftovers() {
        let id: BranchId = "v-0".parse().unwrap();
        assert_eq!(leftover(&unfinished(&id)), Some(id.clone()));
        assert_eq!(leftover(&doomed(&id)), Some(id));
        for other in ["v-0", ".new-", ".new-../x", ".git", "lost+found", ".gone", ".new-A"] {
            assert_eq!(leftover(other), None, "{other}");
        }
    }
}
