//! What is to be done about one VolumeAttachment or PersistentVolume now: pure, from the picture.
//!
//! The writes of one answer are done one after the other, and a failure ends them: whichever were done, the next decision
//! goes on from there. Who is kept by whom lies in their order: the VolumeAttachment and the PersistentVolume are kept
//! before the volume is attached, and the VolumeAttachment is let go after it was detached.

use std::collections::BTreeSet;

use super::index::{Volume, Wish};
use crate::controllers::cluster::DRIVER;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{NodeName, VolumeId};
use crate::store::object::Attachment;

/// Keeps a VolumeAttachment until its volume is detached, and a PersistentVolume until no VolumeAttachment names it. It is
/// the name that the official external-attacher uses for this driver, so that either takes over from the other.
pub(super) const FINALIZER: &str = "external-attacher/union-csi-union-io";

/// One write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Write {
    /// The finalizer of the VolumeAttachment.
    KeepWish,
    /// The finalizer of the PersistentVolume.
    KeepVolume,
    /// The attachment, in the volume's object.
    Attach { volume: VolumeId, wanted: Attachment, mode: VolumeMode },
    /// `status.attached` of the VolumeAttachment.
    TellAttached,
    /// `status.attachError` of the VolumeAttachment, with the reason.
    Refuse(String),
    /// What was attached for the VolumeAttachment, in these volumes' objects.
    Detach(BTreeSet<VolumeId>),
    /// As [`Write::Detach`], after the server has said that the VolumeAttachment does not exist.
    DetachIfGone(BTreeSet<VolumeId>),
    /// Takes the finalizer from the VolumeAttachment.
    ReleaseWish,
    /// Takes the finalizer from the PersistentVolume.
    ReleaseVolume,
}

/// Decides about a VolumeAttachment. `held`: the volumes that are attached because of it.
pub(super) fn decide(wish: &Wish, volume: Option<&Volume>, held: BTreeSet<VolumeId>) -> Vec<Write> {
    if wish.identity.deleting {
        return detach(wish, volume, held);
    }
    if wish.attached && !held.is_empty() {
        return Vec::new();
    }
    match wanted(wish, volume) {
        Ok((handle, wanted, mode)) => {
            let mut writes = Vec::new();
            if !kept(&wish.identity.finalizers) {
                writes.push(Write::KeepWish);
            }
            if volume.is_some_and(|volume| !kept(&volume.identity.finalizers)) {
                writes.push(Write::KeepVolume);
            }
            if !held.contains(&handle) {
                writes.push(Write::Attach { volume: handle, wanted, mode });
            }
            if !wish.attached || wish.attach_error.is_some() {
                writes.push(Write::TellAttached);
            }
            writes
        }
        // It was attached, and what it was attached by is gone: whoever took it away knows, and the pod may run still.
        Err(_) if wish.attached => Vec::new(),
        Err(reason) => vec![Write::Refuse(reason)],
    }
}

/// Decides about volumes that are attached for a VolumeAttachment that is not in the picture.
pub(super) fn stray(held: BTreeSet<VolumeId>) -> Vec<Write> {
    if held.is_empty() { Vec::new() } else { vec![Write::DetachIfGone(held)] }
}

/// Decides about a PersistentVolume. `named`: VolumeAttachments name it.
pub(super) fn release(volume: &Volume, named: bool) -> Vec<Write> {
    let goes = volume.identity.deleting && kept(&volume.identity.finalizers) && !named;
    if goes { vec![Write::ReleaseVolume] } else { Vec::new() }
}

fn detach(wish: &Wish, volume: Option<&Volume>, mut held: BTreeSet<VolumeId>) -> Vec<Write> {
    let ours = kept(&wish.identity.finalizers);
    // An attachment whose write was answered with an error may have been made.
    held.extend(volume.filter(|_| ours).and_then(|volume| volume.handle.parse().ok()));
    let mut writes = Vec::new();
    if !held.is_empty() {
        writes.push(Write::Detach(held));
    }
    if ours {
        writes.push(Write::ReleaseWish);
    }
    writes
}

/// Whether our finalizer is among these.
pub(super) fn kept(finalizers: &[String]) -> bool {
    finalizers.iter().any(|f| f == FINALIZER)
}

fn wanted(wish: &Wish, volume: Option<&Volume>) -> Result<(VolumeId, Attachment, VolumeMode), String> {
    let Some(name) = &wish.volume else {
        return Err(format!(
            "{DRIVER} attaches PersistentVolumes only: an inline volume needs no VolumeAttachment"
        ));
    };
    let Some(volume) = volume else {
        return Err(format!("PersistentVolume {name} does not exist, or is not a volume of {DRIVER}"));
    };
    if volume.identity.deleting {
        return Err(format!("PersistentVolume {name} is being deleted"));
    }
    let handle: VolumeId = volume
        .handle
        .parse()
        .map_err(|_| format!("PersistentVolume {name}: there is no volume {:?}", volume.handle))?;
    let node: NodeName = wish.node.parse().map_err(|error| format!("{error}"))?;
    let access_mode = access_mode(&volume.access_modes)
        .map_err(|reason| format!("PersistentVolume {name} cannot be attached: {reason}"))?;
    let mode = if volume.block { VolumeMode::Block } else { VolumeMode::Filesystem };
    let wanted = Attachment {
        node,
        access_mode,
        read_only: volume.read_only,
        volume_attachment: Some(wish.identity.name.clone()),
    };
    Ok((handle, wanted, mode))
}

/// The CSI access mode for a PersistentVolume's, as Kubernetes maps them for drivers with `SINGLE_NODE_MULTI_WRITER`
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#access-modes>).
fn access_mode(modes: &[String]) -> Result<AccessMode, String> {
    let has = |mode: &str| modes.iter().any(|m| m == mode);
    let (once, pod, many, all) =
        (has("ReadWriteOnce"), has("ReadWriteOncePod"), has("ReadOnlyMany"), has("ReadWriteMany"));
    if pod && modes.len() > 1 {
        return Err("ReadWriteOncePod must be its only access mode".to_owned());
    }
    match (all, many, pod, once) {
        (true, ..) => Ok(AccessMode::MultiNodeMultiWriter),
        (_, true, _, true) => Err("ReadOnlyMany and ReadWriteOnce cannot stand side by side".to_owned()),
        (_, true, ..) => Ok(AccessMode::MultiNodeReaderOnly),
        (_, _, true, _) => Ok(AccessMode::SingleNodeSingleWriter),
        (_, _, _, true) => Ok(AccessMode::SingleNodeMultiWriter),
        _ => Err(format!("access modes {modes:?} are not known")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::index::Identity;
    use super::*;

    fn identity(name: &str, finalizers: &[&str]) -> Identity {
        let finalizers = finalizers.iter().map(|f| (*f).to_owned()).collect();
        Identity { name: name.to_owned(), finalizers, ..Identity::default() }
    }

    fn wish(finalizers: &[&str]) -> Wish {
        Wish {
            identity: identity("csi-1", finalizers),
            node: "n1".to_owned(),
            volume: Some("pv".to_owned()),
            ..Wish::default()
        }
    }

    fn volume(finalizers: &[&str], modes: &[&str]) -> Volume {
        Volume {
            identity: identity("pv", finalizers),
            handle: "pvc-1".to_owned(),
            access_modes: modes.iter().map(|m| (*m).to_owned()).collect(),
            ..Volume::default()
        }
    }

    fn held() -> BTreeSet<VolumeId> {
        ["pvc-1".parse().unwrap()].into()
    }

    const RWO: &[&str] = &["ReadWriteOnce"];

    #[test]
    fn an_attachment_is_kept_before_it_is_made_and_told_after() {
        let writes = decide(&wish(&[]), Some(&volume(&[], RWO)), BTreeSet::new());
        let [
            Write::KeepWish,
            Write::KeepVolume,
            Write::Attach { volume: id, wanted, mode },
            Write::TellAttached,
        ] = writes.as_slice()
        else {
            panic!("{writes:?}")
        };
        assert_eq!((id.as_str(), wanted.node.as_str(), *mode), ("pvc-1", "n1", VolumeMode::Filesystem));
        assert_eq!(wanted.volume_attachment.as_deref(), Some("csi-1"));
        assert_eq!(wanted.access_mode, AccessMode::SingleNodeMultiWriter);
    }

    #[test]
    fn what_a_crash_left_undone_is_done_and_no_more() {
        let kept = [FINALIZER];
        let attached = Wish { attached: true, ..wish(&kept) };
        let pv = volume(&kept, RWO);
        assert_eq!(decide(&attached, Some(&pv), held()), []);
        assert_eq!(decide(&wish(&kept), Some(&pv), held()), [Write::TellAttached]);
        let repaired = decide(&attached, Some(&pv), BTreeSet::new());
        assert!(matches!(repaired.as_slice(), [Write::Attach { .. }]), "{repaired:?}");
        let refused_once = Wish { attach_error: Some("no".to_owned()), ..wish(&kept) };
        assert_eq!(decide(&refused_once, Some(&pv), held()), [Write::TellAttached], "the error is cleared");
        assert_eq!(
            decide(&attached, None, BTreeSet::new()),
            [],
            "a volume that is gone is not told of again"
        );
    }

    #[test]
    fn a_volume_is_detached_before_its_attachment_may_go() {
        let going = |finalizers: &[&str]| {
            let mut wish = wish(finalizers);
            wish.identity.deleting = true;
            wish
        };
        let expected = [Write::Detach(held()), Write::ReleaseWish];
        assert_eq!(decide(&going(&[FINALIZER]), Some(&volume(&[], RWO)), held()), expected);
        assert_eq!(decide(&going(&[FINALIZER]), None, held()), expected, "the PersistentVolume may be gone");
        let unsure = decide(&going(&[FINALIZER]), Some(&volume(&[], RWO)), BTreeSet::new());
        assert_eq!(unsure, expected, "a write that failed may have been done");
        assert_eq!(decide(&going(&[FINALIZER]), None, BTreeSet::new()), [Write::ReleaseWish]);
        assert_eq!(decide(&going(&["other/finalizer"]), Some(&volume(&[], RWO)), BTreeSet::new()), []);
    }

    #[test]
    fn what_cannot_be_attached_is_said_with_the_name_of_the_thing() {
        let said =
            |wish: &Wish, volume: Option<&Volume>| match decide(wish, volume, BTreeSet::new()).as_slice() {
                [Write::Refuse(reason)] => reason.clone(),
                other => panic!("{other:?}"),
            };
        assert!(said(&wish(&[]), None).contains("PersistentVolume pv does not exist"));
        assert!(said(&Wish { volume: None, ..wish(&[]) }, None).contains("inline"));
        let mut pv = volume(&[], RWO);
        pv.identity.deleting = true;
        assert!(said(&wish(&[]), Some(&pv)).contains("being deleted"));
        let mut pv = volume(&[], RWO);
        pv.handle = "No Volume".to_owned();
        assert!(said(&wish(&[]), Some(&pv)).contains("No Volume"));
        assert!(said(&wish(&[]), Some(&volume(&[], &[]))).contains("access modes"));
        assert!(
            said(&wish(&[]), Some(&volume(&[], &["ReadOnlyMany", "ReadWriteOnce"]))).contains("side by side")
        );
    }

    #[test]
    fn access_modes_are_mapped_as_kubernetes_does() {
        let of =
            |modes: &[&str]| access_mode(&modes.iter().map(|m| (*m).to_owned()).collect::<Vec<_>>()).ok();
        assert_eq!(of(&["ReadWriteOnce"]), Some(AccessMode::SingleNodeMultiWriter));
        assert_eq!(of(&["ReadWriteOncePod"]), Some(AccessMode::SingleNodeSingleWriter));
        assert_eq!(of(&["ReadOnlyMany"]), Some(AccessMode::MultiNodeReaderOnly));
        assert_eq!(of(&["ReadWriteMany"]), Some(AccessMode::MultiNodeMultiWriter));
        assert_eq!(of(&["ReadWriteMany", "ReadWriteOnce"]), Some(AccessMode::MultiNodeMultiWriter));
        assert_eq!(of(&["ReadOnlyMany", "ReadWriteOnce"]), None);
        assert_eq!(of(&["ReadWriteOncePod", "ReadWriteOnce"]), None);
        assert_eq!(of(&["Sometimes"]), None);
    }

    #[test]
    fn a_persistent_volume_goes_when_no_attachment_names_it() {
        let mut pv = volume(&[FINALIZER, "other/finalizer"], RWO);
        assert_eq!(release(&pv, false), [], "it is not asked to go");
        pv.identity.deleting = true;
        assert_eq!(release(&pv, true), []);
        assert_eq!(release(&pv, false), [Write::ReleaseVolume]);
        assert_eq!(release(&Volume { identity: identity("pv", &[]), ..pv }, false), []);
    }

    #[test]
    fn what_is_attached_for_an_attachment_that_is_gone_is_detached_after_asking() {
        assert_eq!(stray(BTreeSet::new()), []);
        assert_eq!(stray(held()), [Write::DetachIfGone(held())]);
    }
}
