use serde_json::json;

use super::*;
use crate::domain::volume::AccessMode;

fn volume(attached: &[(&str, AccessMode)]) -> VolumeSplit {
    let branch = json!({"index": 0, "node": "a", "pool": "p", "size": 1, "usable": 1, "format": "directory"});
    let mut split: VolumeSplit = serde_json::from_value(json!({
        "meta": {"name": "pvc-1"},
        "spec": {"volume": "pvc-1", "requestName": "pvc-1", "capacity": 1, "branches": [branch],
                 "accessModes": ["SingleNodeWriter", "MultiNodeReaderOnly"]}
    }))
    .unwrap();
    split.spec.attached = attached.iter().map(|(node, mode)| to(node, *mode)).collect();
    split
}

fn to(node: &str, access_mode: AccessMode) -> Attachment {
    Attachment { node: node.parse().unwrap(), access_mode, read_only: false, volume_attachment: None }
}

fn attach(split: &VolumeSplit, wanted: &Attachment) -> Result<Option<VolumeSplit>, AttachRefused> {
    attached(split, wanted, VolumeMode::Filesystem, &Network::default())
}

#[test]
fn readers_may_be_on_many_nodes_and_a_writer_is_alone() {
    use AccessMode::{MultiNodeReaderOnly, SingleNodeWriter};
    let reader_elsewhere = volume(&[("b", MultiNodeReaderOnly)]);
    assert!(attach(&reader_elsewhere, &to("a", MultiNodeReaderOnly)).unwrap().is_some());
    for (there, wanted) in [
        (MultiNodeReaderOnly, SingleNodeWriter),
        (SingleNodeWriter, MultiNodeReaderOnly),
        (SingleNodeWriter, SingleNodeWriter),
    ] {
        let error = attach(&volume(&[("b", there)]), &to("a", wanted)).unwrap_err();
        assert!(matches!(error, AttachRefused::Elsewhere { .. }), "{error}");
    }
}

#[test]
fn a_volume_is_not_attached_before_it_is_planned_or_while_it_goes() {
    let wanted = to("a", AccessMode::SingleNodeWriter);
    let mut split = volume(&[]);
    split.spec.branches.clear();
    assert!(matches!(attach(&split, &wanted), Err(AttachRefused::Changing { .. })));
    let mut split = volume(&[]);
    split.meta.deleting = Some(jiff::Timestamp::UNIX_EPOCH);
    assert!(matches!(attach(&split, &wanted), Err(AttachRefused::Changing { .. })));
}

#[test]
fn a_use_that_the_volume_was_not_made_for_is_refused() {
    let mode = attached(
        &volume(&[]),
        &to("a", AccessMode::SingleNodeWriter),
        VolumeMode::Block,
        &Network::default(),
    );
    assert!(matches!(mode, Err(AttachRefused::Unsupported { .. })));
    let mut readers = volume(&[]);
    readers.spec.access_modes = vec![AccessMode::MultiNodeReaderOnly];
    let writer = attach(&readers, &to("a", AccessMode::SingleNodeWriter));
    assert!(matches!(writer, Err(AttachRefused::Unsupported { .. })));
}

#[test]
fn detaching_takes_away_what_is_there_and_writes_nothing_otherwise() {
    let split = volume(&[("a", AccessMode::SingleNodeWriter), ("b", AccessMode::SingleNodeWriter)]);
    let left = |from: &Detach| detached(&split, from).map(|s| s.spec.attached.len());
    assert_eq!(left(&Detach::Node("a".parse().unwrap())), Some(1));
    assert_eq!(left(&Detach::Node("c".parse().unwrap())), None);
    assert_eq!(left(&Detach::AllNodes), Some(0));
    assert_eq!(left(&Detach::Nowhere), None);
}

#[test]
fn what_a_volume_attachment_attached_goes_with_it_and_what_others_did_stays() {
    let mut split = volume(&[("a", AccessMode::MultiNodeReaderOnly), ("b", AccessMode::MultiNodeReaderOnly)]);
    split.spec.attached[1].volume_attachment = Some("csi-1".to_owned());
    let by = |name: &str| Detach::AskedBy(name.to_owned());
    assert_eq!(detached(&split, &by("csi-2")), None);
    let left = detached(&split, &by("csi-1")).unwrap();
    assert_eq!(left.spec.attached, split.spec.attached[..1]);
    assert_eq!(detached(&left, &by("csi-1")), None);
}

#[test]
fn a_volume_that_is_attached_as_wanted_is_left_as_it_is_whoever_asked() {
    let split = volume(&[("a", AccessMode::SingleNodeWriter)]);
    let mut wanted = to("a", AccessMode::SingleNodeWriter);
    wanted.volume_attachment = Some("csi-1".to_owned());
    assert_eq!(attach(&split, &wanted), Ok(None));
    wanted.read_only = true;
    assert!(matches!(attach(&split, &wanted), Err(AttachRefused::Differently { .. })));
}
