//! The picture that the attacher decides on: VolumeAttachments and PersistentVolumes of this driver, each cut down to what
//! matters here, and which volumes are attached for whom.

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
}

#[derive(Debug, Default)]
pub(super) struct Index {
    wishes: BTreeMap<String, Wish>,
    volumes: HashMap<String, Volume>,
    /// PersistentVolume to the VolumeAttachments that name it.
    of_volume: HashMap<String, BTreeSet<String>>,
    /// VolumeAttachment to the volumes whose objects say that it had them attached.
    held: BTreeMap<String, BTreeSet<VolumeId>>,
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

    /// VolumeAttachments that exist, or that volumes are still attached for.
    pub(super) fn wish_names(&self) -> BTreeSet<String> {
        self.wishes.keys().chain(self.held.keys()).cloned().collect()
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
        } else if let Some(volumes) = self.held.get_mut(wish) {
            volumes.remove(volume);
            if volumes.is_empty() {
                self.held.remove(wish);
            }
        }
    }

    /// Takes what all volumes' objects say. What was written while they were read may be missing then, or be told though it
    /// is gone: the next decision about it finds that there is nothing to write.
    pub(super) fn put_all_held(&mut self, splits: &[VolumeSplit]) {
        self.held.clear();
        for split in splits {
            for wish in split.spec.attached.iter().filter_map(|a| a.volume_attachment.as_deref()) {
                self.put_held(wish, &split.spec.volume, true);
            }
        }
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
