//! What no claim needs any more: found from the objects, told with its remedy, never deleted here. Pure.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::controllers::provisioner::{LABEL_CLAIM, LABEL_RETAINED};
use crate::domain::unclaimed::UnclaimedBranch;
use crate::domain::{BranchId, Bytes, NodeName};
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// A volume that has neither claim nor PersistentVolume for less than this is on its way: far more than making and
/// withdrawing one takes.
pub const ON_ITS_WAY: Duration = Duration::from_secs(60 * 60);

/// What an orphan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OrphanKind {
    /// A `Branch` whose volume does not exist.
    Branch,
    /// A `VolumeSplit` that was made for a claim, without the claim and without a PersistentVolume.
    Volume,
    /// A `VolumeSplit` that was kept on purpose without its PersistentVolume.
    Retained,
    /// A PersistentVolume whose `VolumeSplit` does not exist.
    PersistentVolume,
    /// The `VolumeSplit` of a pod's own (inline) volume whose pod, or whose node, is gone.
    Ephemeral,
    /// Something among the branches on a node's disks that no `Branch` tells of.
    Unclaimed,
}

impl OrphanKind {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::Branch,
        Self::Volume,
        Self::Retained,
        Self::PersistentVolume,
        Self::Ephemeral,
        Self::Unclaimed,
    ];

    /// The kind as the API and the metrics write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Branch => "branch",
            Self::Volume => "volume",
            Self::Retained => "retained",
            Self::PersistentVolume => "persistentVolume",
            Self::Ephemeral => "ephemeral",
            Self::Unclaimed => "unclaimed",
        }
    }
}

/// Something that nothing needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Orphan {
    /// What it is.
    pub kind: OrphanKind,
    /// Its name: of the object, or node and path.
    pub name: String,
    /// The volume that it is, or belongs to; empty where that cannot be told.
    pub volume: String,
    /// The node that holds it; absent where that is none, or several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeName>,
    /// What it takes of the disks, in bytes; absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// When it was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub created: Option<Timestamp>,
    /// When it was first found to be an orphan, by the one who tells.
    #[schemars(with = "String")]
    pub first_seen: Timestamp,
    /// Seconds from then to the scan.
    pub age_seconds: u64,
    /// Why it counts as one; a sentence.
    pub reason: String,
    /// The command that removes it, and with it the files in it; with the node's name before it where it is given there.
    pub remedy: String,
}

impl Orphan {
    /// What tells it from others.
    #[must_use]
    pub fn key(&self) -> (OrphanKind, String) {
        (self.kind, self.name.clone())
    }

    /// The same, known since `first_seen`.
    pub(super) fn since(self, first_seen: Timestamp, now: Timestamp) -> Self {
        let age_seconds = Duration::try_from(now.duration_since(first_seen)).unwrap_or_default().as_secs();
        Self { first_seen, age_seconds, ..self }
    }
}

/// How many there are of each kind, those of which there are none too.
#[must_use]
pub fn counts<'a>(orphans: impl IntoIterator<Item = &'a Orphan>) -> BTreeMap<OrphanKind, u64> {
    let mut counts = BTreeMap::from(OrphanKind::ALL.map(|kind| (kind, 0)));
    for orphan in orphans {
        *counts.entry(orphan.kind).or_default() += 1;
    }
    counts
}

/// A PersistentVolume of this driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// The `VolumeSplit`.
    pub handle: String,
    /// When it was made.
    pub created: Option<Timestamp>,
    /// It is on its way out.
    pub deleting: bool,
    /// Its size, where it says one.
    pub size: Option<Bytes>,
    /// The claim that has it, by namespace, name and UID.
    pub claim: Option<(String, String, String)>,
}

/// All that is looked at.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Namespace of volumes and branches.
    pub namespace: String,
    /// All volumes.
    pub splits: Vec<VolumeSplit>,
    /// All branches.
    pub branches: Vec<Branch>,
    /// All nodes.
    pub nodes: Vec<StorageNode>,
    /// PersistentVolumes of this driver.
    pub volumes: Vec<Volume>,
    /// UIDs of all claims.
    pub claims: HashSet<String>,
}

/// The orphans, by kind and name, all first seen now.
#[must_use]
pub fn orphans(seen: &Seen, now: Timestamp) -> Vec<Orphan> {
    let splits: HashSet<&str> = seen.splits.iter().map(|s| s.meta.name.as_str()).collect();
    let handles: HashSet<&str> = seen.volumes.iter().map(|v| v.handle.as_str()).collect();
    let nodes: HashSet<&NodeName> = seen.nodes.iter().map(|n| &n.spec.node).collect();
    let mut found = BTreeSet::new();
    for branch in seen.branches.iter().filter(|b| !splits.contains(b.spec.volume.as_str())) {
        found.extend(stray_branch(branch, &nodes, &seen.namespace, now));
    }
    for split in seen.splits.iter().filter(|s| !handles.contains(s.meta.name.as_str())) {
        found.extend(unneeded(split, seen, now));
    }
    for volume in seen.volumes.iter().filter(|v| !splits.contains(v.handle.as_str())) {
        found.extend(empty(volume, &seen.claims, now));
    }
    let branches: HashSet<(&NodeName, &str)> =
        seen.branches.iter().map(|b| (&b.spec.node, b.meta.name.as_str())).collect();
    for node in &seen.nodes {
        let here = node.status.unclaimed.branches.iter();
        // The node's report may be older than the object.
        let stray = here.filter(|one| !branches.contains(&(&node.spec.node, one.name.as_str())));
        found.extend(stray.map(|one| unclaimed(&node.spec.node, one, now)));
    }
    found.into_iter().collect()
}

fn stray_branch(
    branch: &Branch,
    nodes: &HashSet<&NodeName>,
    namespace: &str,
    now: Timestamp,
) -> Option<Orphan> {
    let (name, node, volume) = (&branch.meta.name, &branch.spec.node, &branch.spec.volume);
    let (reason, remedy) = match (nodes.contains(node), branch.meta.deleting) {
        (true, None) => (
            format!("its volume {volume} does not exist"),
            format!("kubectl -n {namespace} delete branch {name}"),
        ),
        // Its node is at it, or says in its status what is in the way.
        (true, Some(_)) => return None,
        (false, _) => (
            format!("its volume {volume} does not exist, and neither does its node {node}"),
            forget(node, namespace),
        ),
    };
    Some(Orphan {
        kind: OrphanKind::Branch,
        name: name.clone(),
        volume: volume.to_string(),
        node: Some(node.clone()),
        size: Some(branch.spec.size),
        created: branch.meta.created,
        first_seen: now,
        age_seconds: 0,
        reason,
        remedy,
    })
}

/// What a volume without PersistentVolume is, where it is an orphan.
fn unneeded(split: &VolumeSplit, seen: &Seen, now: Timestamp) -> Option<Orphan> {
    if split.meta.deleting.is_some() {
        return None;
    }
    let namespace = &seen.namespace;
    let name = &split.meta.name;
    // It may be deleted by hand only where it is marked for it: `deploy/base/protection.yaml`.
    let delete = format!(
        "kubectl -n {namespace} annotate volumesplit {name} union.io/delete-volume=yes && kubectl -n {namespace} delete \
         volumesplit {name}"
    );
    let (kind, reason, remedy) = if split.spec.ephemeral {
        let (reason, remedy) = podless(split, seen, delete, now)?;
        (OrphanKind::Ephemeral, reason, remedy)
    } else if split.meta.labels.contains_key(LABEL_RETAINED) {
        let reason = "it was retained when its claim went, and has no PersistentVolume any more";
        (OrphanKind::Retained, reason.to_owned(), delete)
    } else {
        let claim = split.meta.labels.get(LABEL_CLAIM)?;
        if seen.claims.contains(claim) || is_young(split, now) {
            return None;
        }
        let reason = match super::forget::claim(split) {
            Some(claim) => format!("its claim {claim} is gone, and it has no PersistentVolume"),
            None => "its claim is gone, and it has no PersistentVolume".to_owned(),
        };
        (OrphanKind::Volume, reason, delete)
    };
    let branches = &split.spec.branches;
    let node = branches.first().map(|b| &b.node).filter(|node| branches.iter().all(|b| b.node == **node));
    Some(Orphan {
        kind,
        name: name.clone(),
        volume: split.spec.volume.to_string(),
        node: node.cloned(),
        size: Some(branches.iter().fold(Bytes::ZERO, |sum, b| sum.saturating_add(b.size))),
        created: split.meta.created,
        first_seen: now,
        age_seconds: 0,
        reason,
        remedy,
    })
}

/// Why a pod's own volume has no pod any more, and what removes it.
fn podless(split: &VolumeSplit, seen: &Seen, delete: String, now: Timestamp) -> Option<(String, String)> {
    let node = split.spec.consumer.as_ref().filter(|_| !is_young(split, now))?;
    match seen.nodes.iter().find(|n| n.spec.node == *node) {
        None => {
            let reason = format!("it is a pod's own, and the pod's node {node} does not exist");
            Some((reason, forget(node, &seen.namespace)))
        }
        Some(there) if there.status.abandoned.contains(&split.spec.volume) => {
            Some((format!("it is a pod's own, and node {node} has no such pod any more"), delete))
        }
        Some(_) => None,
    }
}

fn unclaimed(node: &NodeName, one: &UnclaimedBranch, now: Timestamp) -> Orphan {
    let UnclaimedBranch { pool, name, path, size, problem } = one;
    let why =
        if problem.is_empty() { String::new() } else { format!(", and it is not understood: {problem}") };
    let branch: Option<BranchId> = name.parse().ok();
    let volume =
        branch.as_ref().and_then(|id| id.as_str().rsplit_once('-')).map(|(volume, _)| volume.to_owned());
    Orphan {
        kind: OrphanKind::Unclaimed,
        name: format!("{node}:{path}"),
        volume: volume.unwrap_or_default(),
        node: Some(node.clone()),
        size: *size,
        created: None,
        first_seen: now,
        age_seconds: 0,
        reason: format!("no Branch tells of it; it lies in pool {pool} of {node}{why}"),
        remedy: format!("on {node}: rm -r {}", quoted(path)),
    }
}

/// A word of a shell's command.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// How many unclaimed branches nodes count without naming them.
#[must_use]
pub fn unnamed(seen: &Seen) -> u64 {
    seen.nodes.iter().map(|node| node.status.unclaimed.unnamed()).sum()
}

/// Whether its making or its withdrawal may be under way.
fn is_young(split: &VolumeSplit, now: Timestamp) -> bool {
    let age = split.meta.created.map(|created| now.duration_since(created));
    age.is_none_or(|age| Duration::try_from(age).unwrap_or_default() < ON_ITS_WAY)
}

/// What a PersistentVolume without volume is, where it does not go by itself.
fn empty(volume: &Volume, claims: &HashSet<String>, now: Timestamp) -> Option<Orphan> {
    if volume.deleting {
        return None;
    }
    let Volume { name, handle, .. } = volume;
    let bound = volume.claim.as_ref().filter(|(_, _, uid)| claims.contains(uid));
    let (by, remedy) = match bound {
        None => (String::new(), format!("kubectl delete pv {name}")),
        Some((namespace, claim, _)) => (
            format!("; claim {namespace}/{claim} still has it"),
            format!(
                "kubectl -n {namespace} delete pvc {claim} && kubectl delete pv --ignore-not-found {name}"
            ),
        ),
    };
    Some(Orphan {
        kind: OrphanKind::PersistentVolume,
        name: name.clone(),
        volume: handle.clone(),
        node: None,
        size: volume.size,
        created: volume.created,
        first_seen: now,
        age_seconds: 0,
        reason: format!("its VolumeSplit {handle} does not exist{by}"),
        remedy,
    })
}

/// The command that gives up what lies on a node that is gone.
fn forget(node: &NodeName, namespace: &str) -> String {
    format!("union-csi forget-node {node} --namespace {namespace} --accept-data-loss")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::unclaimed::Unclaimed;
    use crate::store::contract;
    use crate::store::object::Meta;

    fn split(name: &str, age_minutes: i64, labels: &[(&str, &str)]) -> VolumeSplit {
        let spec = serde_json::json!({
            "volume": name, "requestName": name, "capacity": 1, "accessModes": ["SingleNodeWriter"],
        });
        let mut meta = Meta::with_finalizer(name);
        meta.created = Some(Timestamp::from_second(-age_minutes * 60).unwrap());
        meta.labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        VolumeSplit { meta, spec: serde_json::from_value(spec).unwrap(), status: Default::default() }
    }

    #[test]
    fn only_what_nothing_needs_is_told_each_with_its_command() {
        let claim = |uid| (LABEL_CLAIM, uid);
        let pv = |name: &str, handle: &str| Volume {
            name: name.into(),
            handle: handle.into(),
            created: None,
            deleting: false,
            size: None,
            claim: None,
        };
        let node = |name: &str| -> StorageNode {
            serde_json::from_value(serde_json::json!({"meta": {"name": name}, "spec": {"node": name}}))
                .unwrap()
        };
        let mut n1 = node("n1");
        n1.status.abandoned = vec!["podless".parse().unwrap()];
        let stray = |name: &str, problem: &str| UnclaimedBranch {
            pool: "disk1".parse().unwrap(),
            name: name.into(),
            path: format!("/srv/union/disk 1/branches/{name}"),
            size: None,
            problem: problem.into(),
        };
        // The second has got its object since.
        n1.status.unclaimed =
            Unclaimed::of(vec![stray("old-0", ""), stray("gone-0", ""), stray("it's", "odd")]);
        let inline = |name: &str, age, node: &str| {
            let mut split = split(name, age, &[]);
            split.spec.ephemeral = true;
            split.spec.consumer = Some(node.parse().unwrap());
            split
        };
        let mut removed = contract::branch("gone", 1, "n1");
        removed.meta.deleting = Some(Timestamp::UNIX_EPOCH);
        let held = Volume { claim: Some(("web".into(), "data".into(), "uid".into())), ..pv("pv-3", "none") };
        let mut going = split("going", 99, &[claim("x")]);
        going.meta.deleting = Some(Timestamp::UNIX_EPOCH);
        let seen = Seen {
            namespace: "union".into(),
            splits: vec![
                split("asked", 99, &[claim("uid")]),
                split("by-hand", 99, &[]),
                going,
                split("has-pv", 99, &[claim("x")]),
                split("kept", 1, &[claim("x"), (LABEL_RETAINED, "true")]),
                split("left", 60, &[claim("x")]),
                inline("podless", 60, "n1"),
                inline("in-use", 60, "n1"),
                inline("nodeless", 60, "n2"),
                inline("starting", 59, "n2"),
                split("young", 59, &[claim("x")]),
            ],
            branches: vec![contract::branch("gone", 0, "n1"), removed, contract::branch("gone", 2, "n2")],
            nodes: vec![n1],
            volumes: vec![
                pv("pv-1", "has-pv"),
                pv("pv-2", "nothing"),
                held,
                Volume { deleting: true, ..pv("pv-4", "nothing") },
            ],
            claims: ["uid".to_owned()].into(),
        };
        let found = orphans(&seen, Timestamp::UNIX_EPOCH);
        let told: Vec<_> = found.iter().map(|o| (o.kind, o.remedy.as_str())).collect();
        let delete = |name: &str| {
            format!(
                "kubectl -n union annotate volumesplit {name} union.io/delete-volume=yes && kubectl -n union delete volumesplit {name}"
            )
        };
        assert_eq!(
            told,
            [
                (OrphanKind::Branch, "kubectl -n union delete branch gone-0"),
                (OrphanKind::Branch, "union-csi forget-node n2 --namespace union --accept-data-loss"),
                (OrphanKind::Volume, delete("left").as_str()),
                (OrphanKind::Retained, delete("kept").as_str()),
                (OrphanKind::PersistentVolume, "kubectl delete pv pv-2"),
                (
                    OrphanKind::PersistentVolume,
                    "kubectl -n web delete pvc data && kubectl delete pv --ignore-not-found pv-3"
                ),
                (OrphanKind::Ephemeral, "union-csi forget-node n2 --namespace union --accept-data-loss"),
                (OrphanKind::Ephemeral, delete("podless").as_str()),
                (OrphanKind::Unclaimed, r"on n1: rm -r '/srv/union/disk 1/branches/it'\''s'"),
                (OrphanKind::Unclaimed, "on n1: rm -r '/srv/union/disk 1/branches/old-0'"),
            ]
        );
        assert!(found.iter().all(|o| !o.reason.is_empty() && o.first_seen == Timestamp::UNIX_EPOCH));
    }

    #[test]
    fn what_was_seen_before_keeps_its_time_and_the_kinds_are_counted_also_where_there_is_none() {
        let seen = Seen { branches: vec![contract::branch("gone", 0, "n1")], ..Seen::default() };
        let now = Timestamp::from_second(7200).unwrap();
        let orphan = orphans(&seen, now).remove(0).since(Timestamp::from_second(600).unwrap(), now);
        assert_eq!((orphan.first_seen.as_second(), orphan.age_seconds), (600, 6600));
        let counts = counts(&[orphan]);
        assert_eq!((counts[&OrphanKind::Branch], counts[&OrphanKind::Retained]), (1, 0));
        for kind in OrphanKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
    }
}
