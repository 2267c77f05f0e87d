//! What the owner must not forget about a branch: `access.json`, beside its data.
//!
//! It is written whole, down to the disk, before the first action that depends on it, and goes with the branch. One that cannot
//! be understood counts as lost: what it said is taken from the last report, and every right is given anew. Until that is done
//! this node does not attach the branch, since nothing says that nobody else has it.
//!
//! What is not to be forgotten of a branch that several nodes share is beside it, in `sharing.json`, by the same rules.

use std::path::Path;

use serde::{Deserialize, Serialize};

use serde::de::DeserializeOwned;

use crate::domain::access::Mark;
use crate::domain::access::shared::SharedMark;
use crate::platform::{Host, Result};

/// What is kept in a file of its own.
pub(in crate::node) trait Memory: Serialize + DeserializeOwned + Clone {
    /// Name of the file.
    const FILE: &str;
}

impl Memory for Mark {
    const FILE: &str = "access.json";
}

impl Memory for SharedMark {
    const FILE: &str = "sharing.json";
}

/// The version that this program writes and reads.
const VERSION: u32 = 1;

/// A mark is a few hundred bytes; more than this is not one.
const LIMIT: usize = 64 * 1024;

#[derive(Debug, Serialize, Deserialize)]
struct Form<M> {
    version: u32,
    mark: M,
}

/// What was found where a mark may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::node) enum Kept<M = Mark> {
    /// Nothing: the branch was never governed.
    Nothing,
    /// A mark.
    Mark(M),
    /// A file that is none: why.
    Lost(String),
    /// The file of a newer program: why it is not touched.
    Newer(String),
}

/// The mark in the branch's directory `place`.
///
/// # Errors
/// It cannot be read, which says nothing about what it is.
pub(in crate::node) fn read<M: Memory>(host: &Host, place: &Path) -> Result<Kept<M>> {
    Ok(host.read_file(&place.join(M::FILE), LIMIT)?.map_or(Kept::Nothing, |bytes| parse(&bytes)))
}

fn parse<M: Memory>(bytes: &[u8]) -> Kept<M> {
    let file = M::FILE;
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    match serde_json::from_slice::<Version>(bytes) {
        Ok(Version { version }) if version > VERSION => Kept::Newer(format!(
            "its {file} was written by a newer version of this program (form {version}): run that version"
        )),
        Ok(_) => match serde_json::from_slice::<Form<M>>(bytes) {
            Ok(form) => Kept::Mark(form.mark),
            Err(e) => Kept::Lost(format!("its {file} cannot be understood: {e}")),
        },
        Err(e) => Kept::Lost(format!("its {file} cannot be understood: {e}")),
    }
}

/// Writes the mark. When this returned it is on the disk.
///
/// # Errors
/// The errno of the call that failed; the mark is the old or the new one.
pub(in crate::node) fn write<M: Memory>(host: &Host, place: &Path, mark: &M) -> Result<()> {
    // Left by an agent that ended in the middle of this; the branch's turn keeps others away.
    let _ = host.remove_temporaries(place);
    let mut text =
        serde_json::to_vec_pretty(&Form { version: VERSION, mark: mark.clone() }).unwrap_or_default();
    text.push(b'\n');
    host.write_atomic(&place.join(M::FILE), &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::access::{Access, Epoch, Generation};

    fn mark() -> Mark {
        Mark {
            generation: Generation(3),
            access: Access { consumer: Some("b".parse().unwrap()), epoch: Epoch(7) },
            peer: Some("nqn.b".to_owned()),
            boot_id: "boot".to_owned(),
            clean: false,
            durable: true,
        }
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_replaces_the_one_before() {
        let (host, place) = (Host::new(), tempfile::tempdir().unwrap());
        assert_eq!(read::<Mark>(&host, place.path()).unwrap(), Kept::Nothing);
        write(&host, place.path(), &Mark::default()).unwrap();
        write(&host, place.path(), &mark()).unwrap();
        assert_eq!(read(&host, place.path()).unwrap(), Kept::Mark(mark()));
        let names: Vec<_> =
            std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [Mark::FILE]);
        write(&host, place.path(), &SharedMark::default()).unwrap();
        assert_eq!(read(&host, place.path()).unwrap(), Kept::Mark(SharedMark::default()));
        assert_eq!(read(&host, place.path()).unwrap(), Kept::Mark(mark()), "each has its own");
    }

    #[test]
    fn what_cannot_be_understood_is_lost_and_what_is_newer_is_left_alone() {
        for bytes in
            [&b""[..], b"{", b"[]", br#"{"version":1}"#, br#"{"version":1,"mark":{"generation":"x"}}"#]
        {
            assert!(matches!(parse::<Mark>(bytes), Kept::Lost(_)), "{}", String::from_utf8_lossy(bytes));
        }
        assert!(matches!(parse::<Mark>(br#"{"version":2,"orders":[]}"#), Kept::Newer(_)));
    }

    #[test]
    fn a_file_that_the_disk_does_not_give_is_not_a_lost_mark() {
        let place = tempfile::tempdir().unwrap();
        std::fs::create_dir(place.path().join(Mark::FILE)).unwrap();
        assert!(read::<Mark>(&Host::new(), place.path()).is_err());
    }
}
