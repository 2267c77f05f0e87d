//! What was taken from peers that may still ask for it: one empty file each, on a disk. A restart of this node makes its kernel forget
//! what it answers, and not them what they ask.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{kernel, name};
use crate::node::transport::{ExportId, TransportError};
use crate::platform::Host;

/// How long it is kept in mind what a peer had of an export that does not exist any more.
const REMEMBERED: Duration = Duration::from_hours(24);

/// An export that was taken from a peer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Taken {
    pub peer: IpAddr,
    pub id: ExportId,
    /// The inode that the peer's handles of it name.
    pub inode: u64,
}

/// What the server says to what a peer still asks of an export that was taken from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// Nothing: the peer waits.
    Silence,
    /// That its handles are stale.
    Refusal,
}

impl Answer {
    const ALL: [Self; 2] = [Self::Silence, Self::Refusal];

    fn directory(self, root: &Path) -> PathBuf {
        root.join(match self {
            Self::Silence => "silent",
            Self::Refusal => "refused",
        })
    }
}

/// The marks below a directory.
#[derive(Debug)]
pub(super) struct Marks {
    host: Host,
    root: PathBuf,
}

impl Marks {
    /// Marks in directories below `root`. Nothing is done yet.
    pub(super) fn new(host: Host, root: PathBuf) -> Self {
        Self { host, root }
    }

    /// All that are answered so.
    pub(super) fn all(&self, answer: Answer) -> Result<BTreeSet<Taken>, TransportError> {
        let mut found = BTreeSet::new();
        for (peer, directory) in self.directories(answer)? {
            for name in self.names(&directory)? {
                let Some((id, inode)) = name.to_str().and_then(|n| n.split_once(':')) else { continue };
                if let (Some(id), Ok(inode)) = (name::parse(id.as_ref()), inode.parse()) {
                    found.insert(Taken { peer, id, inode });
                }
            }
        }
        Ok(found)
    }

    /// The directories of the peers.
    fn directories(&self, answer: Answer) -> Result<Vec<(IpAddr, PathBuf)>, TransportError> {
        let directory = answer.directory(&self.root);
        let peer = |name: OsString| Some((name.to_str()?.parse().ok()?, directory.join(&name)));
        Ok(self.names(&directory)?.into_iter().filter_map(peer).collect())
    }

    fn names(&self, directory: &Path) -> Result<Vec<OsString>, TransportError> {
        let names = self.host.directory_names(directory).map_err(kernel("look at what was fenced"))?;
        Ok(names.unwrap_or_default())
    }

    fn path(&self, answer: Answer, taken: &Taken) -> PathBuf {
        let name = format!("{}:{}", name::export(&taken.id), taken.inode);
        answer.directory(&self.root).join(taken.peer.to_string()).join(name)
    }

    /// Notes that the peer waits, unless it was refused already: that it is until it is given the export again.
    pub(super) fn silence(&self, taken: &Taken) -> Result<(), TransportError> {
        if self.all(Answer::Refusal)?.contains(taken) {
            return Ok(());
        }
        self.set(Answer::Silence, taken)
    }

    /// Notes that the peer is refused.
    pub(super) fn refuse(&self, taken: &Taken) -> Result<(), TransportError> {
        self.set(Answer::Refusal, taken)
    }

    /// Notes what is answered from now on.
    fn set(&self, answer: Answer, taken: &Taken) -> Result<(), TransportError> {
        let path = self.path(answer, taken);
        let directory = path.parent().unwrap_or(&self.root);
        self.host
            .ensure_directory(directory, 0o700)
            .and_then(|_| self.host.write_atomic(&path, b""))
            .map_err(kernel("note a fence"))?;
        Answer::ALL
            .into_iter()
            .filter(|other| *other != answer)
            .try_for_each(|other| self.clear(other, taken))
    }

    fn clear(&self, answer: Answer, taken: &Taken) -> Result<(), TransportError> {
        let removed = self.host.remove_file(&self.path(answer, taken));
        removed.map(drop).map_err(kernel("forget a fence"))
    }

    /// Forgets an export that a peer is given again.
    pub(super) fn forget(&self, peer: IpAddr, id: &ExportId) -> Result<(), TransportError> {
        for (answer, taken) in self.each()? {
            if taken.peer == peer && taken.id == *id {
                self.clear(answer, &taken)?;
            }
        }
        Ok(())
    }

    /// Forgets, after a day, what was taken of branches that are not exported any more; which ones are is asked only where it
    /// matters. Removes what an interrupted call left.
    pub(super) fn tidy(
        &self,
        standing: impl FnOnce() -> Result<BTreeSet<ExportId>, TransportError>,
    ) -> Result<(), TransportError> {
        for answer in Answer::ALL {
            for (_, directory) in self.directories(answer)? {
                self.host.remove_temporaries(&directory).map_err(kernel("tidy what was fenced"))?;
            }
        }
        let mut old = Vec::new();
        for (answer, taken) in self.each()? {
            let age = self.host.age(&self.path(answer, &taken)).map_err(kernel("look at a fence"))?;
            if age.is_some_and(|age| age > REMEMBERED) {
                old.push((answer, taken));
            }
        }
        if old.is_empty() {
            return Ok(());
        }
        let standing = standing()?;
        old.retain(|(_, taken)| standing.iter().all(|id| id.branch != taken.id.branch));
        old.iter().try_for_each(|(answer, taken)| self.clear(*answer, taken))
    }

    /// Those whom something is marked of.
    pub(super) fn peers(&self) -> Result<BTreeSet<IpAddr>, TransportError> {
        Ok(self.each()?.into_iter().map(|(_, taken)| taken.peer).collect())
    }

    /// All, with how each is answered.
    pub(super) fn each(&self) -> Result<Vec<(Answer, Taken)>, TransportError> {
        let mut each = Vec::new();
        for answer in Answer::ALL {
            each.extend(self.all(answer)?.into_iter().map(|taken| (answer, taken)));
        }
        Ok(each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::transport::Generation;

    fn taken(peer: &str, branch: &str, inode: u64) -> Taken {
        let id = ExportId { branch: branch.parse().unwrap(), generation: Generation(2) };
        Taken { peer: peer.parse().unwrap(), id, inode }
    }

    #[test]
    fn a_mark_is_of_one_answer_and_forgotten_when_the_peer_has_the_export_again() {
        let directory = tempfile::tempdir().unwrap();
        let marks = Marks::new(Host::new(), directory.path().to_path_buf());
        assert!(marks.all(Answer::Silence).unwrap().is_empty(), "before anything was marked");
        let (one, moved, other) =
            (taken("10.0.0.1", "v-0", 5), taken("10.0.0.1", "v-0", 6), taken("fd00::2", "v-0", 5));
        for all in [&one, &moved, &other] {
            marks.silence(all).unwrap();
        }
        assert_eq!(marks.all(Answer::Silence).unwrap(), [one.clone(), moved.clone(), other.clone()].into());

        marks.refuse(&one).unwrap();
        marks.silence(&one).unwrap();
        assert_eq!(marks.all(Answer::Refusal).unwrap(), [one.clone()].into());
        assert_eq!(marks.all(Answer::Silence).unwrap(), [moved, other.clone()].into());

        // What another program left there is nothing to us.
        std::fs::write(directory.path().join("silent/file"), "").unwrap();
        std::fs::create_dir_all(directory.path().join("silent/nobody/v-0@2:5")).unwrap();
        std::fs::create_dir_all(directory.path().join("silent/10.0.0.1/v-0@2")).unwrap();
        marks.forget(one.peer, &one.id).unwrap();
        assert!(marks.all(Answer::Refusal).unwrap().is_empty());
        assert_eq!(marks.all(Answer::Silence).unwrap(), [other].into(), "another peer's");
    }

    #[test]
    fn a_mark_younger_than_a_day_outlives_its_export() {
        let directory = tempfile::tempdir().unwrap();
        let marks = Marks::new(Host::new(), directory.path().to_path_buf());
        let (gone, standing) = (taken("10.0.0.1", "v-0", 5), taken("10.0.0.1", "v-1", 5));
        for all in [&gone, &standing] {
            marks.silence(all).unwrap();
        }
        let interrupted = directory.path().join("silent/10.0.0.1").join(format!(".tmp-{:032x}", 7));
        std::fs::write(&interrupted, "").unwrap();
        marks.tidy(|| panic!("nothing is old enough to ask")).unwrap();
        assert!(!interrupted.exists());
        assert_eq!(marks.all(Answer::Silence).unwrap(), [gone.clone(), standing.clone()].into());
        let two_days_ago = std::time::SystemTime::now() - 2 * REMEMBERED;
        for of in [&gone, &standing] {
            let mark = std::fs::File::open(marks.path(Answer::Silence, of)).unwrap();
            mark.set_modified(two_days_ago).unwrap();
        }
        marks.tidy(|| Ok([standing.id.clone()].into())).unwrap();
        assert_eq!(marks.all(Answer::Silence).unwrap(), [standing].into());
    }
}
