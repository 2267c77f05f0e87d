//! The picture that the attacher decides on: VolumeAttachments and PersistentVolumes of this driver, each cut down to what
//! matters here, and which volumes are attached for whom.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::{VolumeAttachment, VolumeError};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::controllers::cluster::DRIVER;
use crate::domain::VolumeId;
use crate::store::object::VolumeSplit;

/// What identifies one state of one of Kubernetes' objects, and who keeps it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: String,
    pub(super) finalizers: Vec<String>,
    pub(super) deleting: bool,
}

impl Identity {
    fn of(meta: ObjectMeta) -> Self {
        Self {
            name: meta.name.unwrap_or_default(),
            uid: meta.uid.unwrap_or_default(),
            version: meta.resource_version.unwrap_or_default(),
            finalizers: meta.finalizers.unwrap_or_default(),
            deleting: meta.deletion_timestamp.is_some(),
        }
    }

    /// Whether `other` is an earlier state of the same object. Resource versions are numbers that rise
    /// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>); where one is not, nothing is
    /// taken for earlier, which costs a write that changes nothing.
    fn follows(&self, other: &Self) -> bool {
        let number = |identity: &Self| identity.version.parse::<u64>().ok();
        self.uid == other.uid && number(self).zip(number(other)).is_some_and(|(this, earlier)| this > earlier)
    }
}

/// A VolumeAttachment: the wish that a volume be attached to a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) identity: Identity,
    pub(super) node: String,
    /// The PersistentVolume; absent where the volume is described in a pod (in-tree volumes that were migrated).
    pub(super) volume: Option<String>,
    pub(super) attached: bool,
    pub(super) attach_error: Option<String>,
    pub(super) detach_error: Option<String>,
}

impl Wish {
    /// What matters of it; `None` where another driver is asked.
    pub(super) fn read(attachment: VolumeAttachment) -> Option<Self> {
        let VolumeAttachment { metadata, spec, status } = attachment;
        let said = |error: Option<VolumeError>| error.map(|e| e.message.unwrap_or_default());
        let status = status.unwrap_or_default();
        (spec.attacher == DRIVER).then(|| Self {
            identity: Identity::of(metadata),
            node: spec.node_name,
            volume: spec.source.persistent_volume_name,
            attached: status.attached,
            attach_error: said(status.attach_error),
            detach_error: said(status.detach_error),
        })
    }
}

/// A PersistentVolume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) identity: Identity,
    /// The CSI volume id.
    pub(super) handle: String,
    pub(super) read_only: bool,
    pub(super) access_modes: Vec<String>,
    pub(super) block: bool,
}

impl Volume {
    /// What matters of it; `None` where it is another driver's.
    pub(super) fn read(volume: PersistentVolume) -> Option<Self> {
        let spec = volume.spec?;
        let csi = spec.csi.filter(|csi| csi.driver == DRIVER)?;
        Some(Self {
            identity: Identity::of(volume.metadata),
            handle: csi.volume_handle,
            read_only: csi.read_only.unwrap_or_default(),
            access_modes: spec.access_modes.unwrap_or_default(),
            block: spec.volume_mode.as_deref() == Some("Block"),
        })
    }

    /// Whether this state of it says what `other` does of how it is to be attached.
    pub(super) fn says_what(&self, other: &Self) -> bool {
        let said = |state: &Self| Self { identity: Identity::default(), ..state.clone() };
        self.identity.uid == other.identity.uid
            && self.identity.deleting == other.identity.deleting
            && said(self) == said(other)
    }
}

#[derive(Debug, Default)]
pub(super) struct Index {
    wishes: BTreeMap<String, Wish>,
    volumes: HashMap<String, Volume>,
    /// PersistentVolume to the VolumeAttachments that name it.
    of_volume: HashMap<String, BTreeSet<String>>,
    /// VolumeAttachment to the volumes whose objects say that it had them attached.
    held: BTreeMap<String, BTreeSet<VolumeId>>,
    /// The same, by volume.
    attached: BTreeMap<VolumeId, BTreeSet<String>>,
}

/// The VolumeAttachments that a volume is attached for, by its object.
pub(super) fn attached_for(split: &VolumeSplit) -> BTreeSet<String> {
    split.spec.attached.iter().filter_map(|a| a.volume_attachment.clone()).collect()
}

impl Index {
    pub(super) fn wish(&self, name: &str) -> Option<&Wish> {
        self.wishes.get(name)
    }

    pub(super) fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.get(name)
    }

    /// The VolumeAttachments that name a PersistentVolume.
    pub(super) fn wishes_of(&self, volume: &str) -> impl Iterator<Item = &String> {
        self.of_volume.get(volume).into_iter().flatten()
    }

    /// Volumes that are attached because of this VolumeAttachment.
    pub(super) fn held(&self, wish: &str) -> BTreeSet<VolumeId> {
        self.held.get(wish).cloned().unwrap_or_default()
    }

    /// Takes a state of a VolumeAttachment; true where it tells anything new.
    pub(super) fn put_wish(&mut self, wish: Wish) -> bool {
        let name = wish.identity.name.clone();
        let known = self.wishes.get(&name);
        if known.is_some_and(|known| known.identity.follows(&wish.identity)) {
            return false;
        }
        let new = known.is_none_or(|known| !same(known, &wish, |w| &mut w.identity));
        if let Some(volume) = &wish.volume {
            self.of_volume.entry(volume.clone()).or_default().insert(name.clone());
        }
        self.wishes.insert(name, wish);
        new
    }

    /// Takes away a VolumeAttachment; returns its PersistentVolume.
    pub(super) fn remove_wish(&mut self, name: &str) -> Option<String> {
        let volume = self.wishes.remove(name)?.volume?;
        if let Some(names) = self.of_volume.get_mut(&volume) {
            names.remove(name);
            if names.is_empty() {
                self.of_volume.remove(&volume);
            }
        }
        Some(volume)
    }

    /// Takes a state of a PersistentVolume; true where it tells anything new.
    pub(super) fn put_volume(&mut self, volume: Volume) -> bool {
        let name = volume.identity.name.clone();
        let known = self.volumes.get(&name);
        if known.is_some_and(|known| known.identity.follows(&volume.identity)) {
            return false;
        }
        let new = known.is_none_or(|known| !same(known, &volume, |v| &mut v.identity));
        self.volumes.insert(name, volume);
        new
    }

    pub(super) fn remove_volume(&mut self, name: &str) {
        self.volumes.remove(name);
    }

    /// Takes what was written to a volume's object, or read from it.
    pub(super) fn put_held(&mut self, wish: &str, volume: &VolumeId, attached: bool) {
        if attached {
            self.held.entry(wish.to_owned()).or_default().insert(volume.clone());
            self.attached.entry(volume.clone()).or_default().insert(wish.to_owned());
            return;
        }
        take_away(&mut self.held, wish, volume);
        take_away(&mut self.attached, volume, wish);
    }

    /// Takes for whom a volume is attached, by its object; returns the VolumeAttachments for which that is news. A state
    /// from before an own write may be told after it: the decision that follows finds that there is nothing to write.
    pub(super) fn put_attached(&mut self, volume: &VolumeId, wishes: BTreeSet<String>) -> Vec<String> {
        let before = self.attached.get(volume).cloned().unwrap_or_default();
        let news: Vec<String> = before.symmetric_difference(&wishes).cloned().collect();
        for wish in &news {
            self.put_held(wish, volume, wishes.contains(wish));
        }
        news
    }

    /// Volumes with attachments that are not among these.
    pub(super) fn attached_beside(&self, names: &HashSet<String>) -> Vec<VolumeId> {
        self.attached.keys().filter(|volume| !names.contains(volume.as_str())).cloned().collect()
    }

    /// VolumeAttachments that are not among these.
    pub(super) fn wishes_beside(&self, names: &HashSet<String>) -> Vec<String> {
        self.wishes.keys().filter(|name| !names.contains(*name)).cloned().collect()
    }

    /// PersistentVolumes that are not among these.
    pub(super) fn volumes_beside(&self, names: &HashSet<String>) -> Vec<String> {
        self.volumes.keys().filter(|name| !names.contains(*name)).cloned().collect()
    }
}

/// Takes a value from the set of a key, and the key with the last of them.
fn take_away<K: Ord + Borrow<Q>, Q: Ord + ?Sized, V: Ord + Borrow<W>, W: Ord + ?Sized>(
    sets: &mut BTreeMap<K, BTreeSet<V>>,
    key: &Q,
    value: &W,
) {
    if let Some(values) = sets.get_mut(key) {
        values.remove(value);
        if values.is_empty() {
            sets.remove(key);
        }
    }
}

/// Whether two states are the same but for their version.
fn same<T: Clone + PartialEq>(one: &T, other: &T, identity: fn(&mut T) -> &mut Identity) -> bool {
    let without_version = |state: &T| {
        let mut state = state.clone();
        identity(&mut state).version.clear();
        state
    };
    without_version(one) == without_version(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(version: &str, attached: bool) -> Wish {
        let identity =
            Identity { name: "a".into(), uid: "1".into(), version: version.into(), ..Identity::default() };
        Wish { identity, volume: Some("pv".into()), attached, ..Wish::default() }
    }

    #[test]
    fn a_late_event_does_not_take_back_an_own_write_and_its_echo_is_no_news() {
        let mut index = Index::default();
        assert!(index.put_wish(wish("9", false)));
        assert!(index.put_wish(wish("11", true)), "what the write returned");
        assert!(!index.put_wish(wish("9", false)), "an event from before it");
        assert!(!index.put_wish(wish("11", true)), "its own event");
        assert!(index.wish("a").unwrap().attached);
        let mut anew = wish("10", false);
        anew.identity.uid = "2".into();
        assert!(index.put_wish(anew), "another object of that name");
    }

    #[test]
    fn what_a_volume_is_attached_for_is_known_from_both_sides() {
        let mut index = Index::default();
        let volume: VolumeId = "pvc-1".parse().unwrap();
        let wishes = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<BTreeSet<_>>();
        index.put_held("a", &volume, true);
        assert!(index.put_attached(&volume, wishes(&["a"])).is_empty(), "the own write's event");
        assert_eq!(index.put_attached(&volume, wishes(&["b"])), ["a", "b"], "edited by hand");
        assert!(index.held("a").is_empty());
        assert_eq!(index.held("b"), [volume.clone()].into());
        assert_eq!(index.attached_beside(&HashSet::new()).len(), 1);
        assert_eq!(index.put_attached(&volume, wishes(&[])), ["b"]);
        assert!(index.held.is_empty() && index.attached.is_empty());
    }

    #[test]
    fn another_state_of_a_volume_says_the_same_unless_it_is_to_be_attached_in_another_way() {
        let identity = Identity { uid: "1".into(), version: "1".into(), ..Identity::default() };
        let known = Volume { identity, access_modes: vec!["ReadWriteOnce".into()], ..Volume::default() };
        let changed = |change: fn(&mut Volume)| {
            let mut volume = known.clone();
            change(&mut volume);
            volume.says_what(&known)
        };
        assert!(changed(|v| v.identity.version = "2".into()), "its labels");
        assert!(changed(|v| v.identity.finalizers.push("a/a".into())), "who keeps it");
        assert!(!changed(|v| v.access_modes = vec!["ReadOnlyMany".into()]));
        assert!(!changed(|v| v.read_only = true));
        assert!(!changed(|v| v.identity.deleting = true));
        assert!(!changed(|v| v.identity.uid = "2".into()), "another of that name");
    }

    #[test]
    fn other_drivers_objects_are_left_aside() {
        let mut theirs = VolumeAttachment::default();
        theirs.spec.attacher = "other.example.org".into();
        assert_eq!(Wish::read(theirs), None);
        assert_eq!(Volume::read(PersistentVolume::default()), None);
    }

    #[test]
    fn a_volume_knows_the_attachments_that_name_it() {
        let mut index = Index::default();
        index.put_wish(wish("1", false));
        assert_eq!(index.wishes_of("pv").collect::<Vec<_>>(), ["a"]);
        assert_eq!(index.remove_wish("a").as_deref(), Some("pv"));
        assert_eq!(index.wishes_of("pv").count(), 0);
        assert!(index.of_volume.is_empty());
    }
}
