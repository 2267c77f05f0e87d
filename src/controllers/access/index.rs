//! The picture that orders are decided on, cut down to what matters here: where volumes are wanted, what each branch's
//! object says about access, and when nodes published last.
//!
//! There are tens of thousands of branches, nearly all of them never governed: of those no more is kept than their name,
//! volume and owner. A state may be told late; that does no harm, because each branch is read anew before it is written.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::decide::Claims;
use crate::domain::NodeName;
use crate::domain::access::Access;
use crate::domain::access::shared::{Sharing, SharingReport};
use crate::store::object::{Branch, VolumeSplit};

/// Where a volume is wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) claims: Claims,
    /// The VolumeAttachment that the oldest claim comes from.
    pub(super) asked_by: Option<String>,
}

impl Wanted {
    pub(super) fn of(split: &VolumeSplit) -> Self {
        let first = split.spec.attached.first();
        Self { asked_by: first.and_then(|a| a.volume_attachment.clone()), claims: Claims::of(split) }
    }
}

/// A branch, as its object tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) volume: Arc<str>,
    pub(super) owner: NodeName,
    pub(super) access: Option<Access>,
    pub(super) allowed: Option<Access>,
    pub(super) sharing: Option<Sharing>,
    pub(super) shared: Option<SharingReport>,
}

impl Seen {
    pub(super) fn of(branch: &Branch) -> Self {
        Self {
            volume: branch.spec.volume.as_str().into(),
            owner: branch.spec.node.clone(),
            access: branch.spec.access.clone(),
            allowed: branch.status.export.as_ref().map(|export| export.allowed.clone()),
            sharing: branch.spec.sharing.clone(),
            shared: branch.status.sharing.clone(),
        }
    }
}

/// The orders and reports of a branch that has any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Governed {
    access: Option<Access>,
    allowed: Option<Access>,
    sharing: Option<Sharing>,
    shared: Option<SharingReport>,
}

#[derive(Debug)]
struct Kept {
    volume: Arc<str>,
    /// Shared with all branches of that node.
    owner: Arc<NodeName>,
    governed: Option<Box<Governed>>,
}

#[derive(Debug, Default)]
struct Volume {
    /// `None`: there is no object of it, or it was not told of yet.
    wanted: Option<Wanted>,
    /// Names.
    branches: Vec<Arc<str>>,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    volumes: HashMap<Arc<str>, Volume>,
    branches: HashMap<Arc<str>, Kept>,
    owners: HashSet<Arc<NodeName>>,
    /// When each published last.
    nodes: BTreeMap<NodeName, Option<Timestamp>>,
}

impl Index {
    /// The branch, and where its volume is wanted; `None` of one that is gone, or whose volume is.
    pub(super) fn branch(&self, name: &str) -> Option<(Seen, &Wanted)> {
        let kept = self.branches.get(name)?;
        let wanted = self.volumes.get(&kept.volume)?.wanted.as_ref()?;
        let Governed { access, allowed, sharing, shared } =
            kept.governed.as_deref().cloned().unwrap_or_default();
        let (volume, owner) = (kept.volume.clone(), (*kept.owner).clone());
        let seen = Seen { volume, owner, access, allowed, sharing, shared };
        Some((seen, wanted))
    }

    /// When a node published last, as [`super::decide::owner_down`] asks for.
    pub(super) fn heartbeat(&self, node: &NodeName) -> Option<Option<Timestamp>> {
        self.nodes.get(node).copied()
    }

    /// Takes a state of a volume; returns the branches for which that is news.
    pub(super) fn put_volume(&mut self, name: &str, wanted: Option<Wanted>) -> Vec<Arc<str>> {
        let volume = self.volumes.entry(name.into()).or_default();
        let news = volume.wanted != wanted;
        volume.wanted = wanted;
        let branches = if news { volume.branches.clone() } else { Vec::new() };
        self.drop_if_empty(name);
        branches
    }

    /// Takes a state of a branch; true where it tells anything new.
    pub(super) fn put_branch(&mut self, name: &str, seen: Seen) -> bool {
        let Seen { volume, owner, access, allowed, sharing, shared } = seen;
        let governed = Governed { access, allowed, sharing, shared };
        let governed = (governed != Governed::default()).then(|| Box::new(governed));
        let owner = match self.owners.get(&owner) {
            Some(known) => known.clone(),
            None => {
                let new = Arc::new(owner);
                self.owners.insert(new.clone());
                new
            }
        };
        if let Some(kept) = self.branches.get_mut(name)
            && kept.volume == volume
        {
            let news = kept.governed != governed || kept.owner != owner;
            (kept.owner, kept.governed) = (owner, governed);
            return news;
        }
        self.remove_branch(name);
        let name: Arc<str> = name.into();
        let of_volume = match self.volumes.get_key_value(&volume) {
            Some((known, _)) => known.clone(),
            None => volume,
        };
        self.volumes.entry(of_volume.clone()).or_default().branches.push(name.clone());
        self.branches.insert(name, Kept { volume: of_volume, owner, governed });
        true
    }

    pub(super) fn remove_branch(&mut self, name: &str) {
        let Some(kept) = self.branches.remove(name) else { return };
        if let Some(volume) = self.volumes.get_mut(&kept.volume) {
            volume.branches.retain(|branch| **branch != *name);
        }
        self.drop_if_empty(&kept.volume);
    }

    fn drop_if_empty(&mut self, volume: &str) {
        if self.volumes.get(volume).is_some_and(|v| v.wanted.is_none() && v.branches.is_empty()) {
            self.volumes.remove(volume);
        }
    }

    pub(super) fn put_node(&mut self, name: &NodeName, heartbeat: Option<Timestamp>) {
        self.nodes.insert(name.clone(), heartbeat);
    }

    pub(super) fn remove_node(&mut self, name: &str) {
        self.nodes.retain(|node, _| node.as_str() != name);
    }

    /// All branches.
    pub(super) fn branches(&self) -> impl Iterator<Item = &Arc<str>> {
        self.branches.keys()
    }

    /// Volumes that have an object here and are not among these.
    pub(super) fn volumes_beside(&self, names: &HashSet<String>) -> Vec<Arc<str>> {
        let there = self.volumes.iter().filter(|(_, volume)| volume.wanted.is_some());
        there.map(|(name, _)| name).filter(|name| !names.contains(&***name)).cloned().collect()
    }

    /// Branches that are not among these.
    pub(super) fn branches_beside(&self, names: &HashSet<String>) -> Vec<Arc<str>> {
        self.branches.keys().filter(|name| !names.contains(&***name)).cloned().collect()
    }

    /// Keeps the nodes that are among these.
    pub(super) fn only_nodes(&mut self, names: &HashSet<String>) {
        self.nodes.retain(|node, _| names.contains(node.as_str()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::access::Epoch;

    fn seen(volume: &str, owner: &str) -> Seen {
        Seen {
            volume: volume.into(),
            owner: owner.parse().unwrap(),
            access: None,
            allowed: None,
            sharing: None,
            shared: None,
        }
    }

    fn wanted(node: &str) -> Option<Wanted> {
        Some(Wanted {
            claims: Claims { nodes: vec![node.parse().unwrap()], readers: Vec::new(), shared: false },
            asked_by: None,
        })
    }

    #[test]
    fn what_tells_nothing_new_has_nothing_looked_at() {
        let mut index = Index::default();
        assert!(index.put_branch("v-0", seen("v", "o")));
        assert!(!index.put_branch("v-0", seen("v", "o")), "its size was reported");
        let access = Some(Access { consumer: None, epoch: Epoch(1) });
        assert!(index.put_branch("v-0", Seen { access: access.clone(), ..seen("v", "o") }));
        assert!(index.put_branch("v-0", Seen { access: access.clone(), allowed: access, ..seen("v", "o") }));
        assert_eq!(index.put_volume("v", wanted("a")), ["v-0".into()]);
        assert!(index.put_volume("v", wanted("a")).is_empty(), "its status was written");
        assert_eq!(index.put_volume("v", wanted("b")), ["v-0".into()]);
    }

    #[test]
    fn a_branch_without_its_volume_is_not_decided_about() {
        let mut index = Index::default();
        index.put_branch("v-0", seen("v", "o"));
        assert!(index.branch("v-0").is_none());
        index.put_volume("v", wanted("a"));
        assert_eq!(index.branch("v-0").unwrap().0, seen("v", "o"));
        index.put_volume("v", None);
        assert!(index.branch("v-0").is_none());
    }

    #[test]
    fn nothing_is_kept_of_what_is_gone() {
        let mut index = Index::default();
        index.put_branch("v-0", seen("v", "o"));
        index.put_volume("v", wanted("a"));
        assert_eq!(index.branches_beside(&HashSet::new()).len(), 1);
        assert_eq!(index.volumes_beside(&HashSet::new()).len(), 1);
        index.remove_branch("v-0");
        assert!(index.put_volume("v", None).is_empty());
        assert!(index.volumes.is_empty() && index.branches.is_empty());
        index.put_node(&"n".parse().unwrap(), None);
        index.only_nodes(&HashSet::new());
        assert_eq!(index.heartbeat(&"n".parse().unwrap()), None);
    }

    #[test]
    fn branches_of_one_node_share_its_name() {
        let mut index = Index::default();
        index.put_branch("v-0", seen("v", "o"));
        index.put_branch("v-1", seen("v", "o"));
        assert_eq!(index.owners.len(), 1);
        assert!(Arc::ptr_eq(&index.branches["v-0"].owner, &index.branches["v-1"].owner));
    }
}
