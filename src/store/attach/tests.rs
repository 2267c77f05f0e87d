use serde_json::json;

use super::*;
use crate::domain::reach::NodeReach;
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

/// The same with branches of these formats on these nodes.
fn lying(branches: &[(&str, &str)], modes: &[&str], attached: &[(&str, AccessMode)]) -> VolumeSplit {
    let mut split = volume(attached);
    let branches: Vec<_> = (0..)
        .zip(branches)
        .map(|(index, (node, format))| {
            json!({"index": index, "node": node, "pool": "p", "size": 1, "usable": 1, "format": format})
        })
        .collect();
    split.spec.branches = serde_json::from_value(json!(branches)).unwrap();
    split.spec.access_modes = serde_json::from_value(json!(modes)).unwrap();
    split
}

fn able() -> Network {
    Network::able(["a", "b", "c"].map(|name| name.parse().unwrap()))
}

#[test]
fn a_node_that_reaches_all_branches_may_have_the_volume_and_another_is_told_what_it_lacks() {
    let split = lying(&[("a", "image"), ("b", "directory")], &["SingleNodeWriter"], &[]);
    let wanted = to("c", AccessMode::SingleNodeWriter);
    let on = |network: &Network| attached(&split, &wanted, VolumeMode::Filesystem, network);
    assert!(on(&able()).unwrap().is_some());
    let mut without = able();
    without.put(NodeReach::silent("c".parse().unwrap()));
    let error = on(&without).unwrap_err();
    assert_eq!(
        error.to_string(),
        "volume pvc-1, which lies on a, b, cannot be used on node c: node c cannot attach branches of other nodes by \
         nvme-tcp: its agent tells of no such transport"
    );
    assert!(matches!(on(&Network::default()), Err(AttachRefused::Unreachable { .. })));
}

#[test]
fn a_volume_of_a_local_class_is_used_where_it_lies_only() {
    let mut split = lying(&[("a", "image")], &["SingleNodeWriter"], &[]);
    split.spec.parameters.insert("placement".to_owned(), "local".to_owned());
    let on = |node: &str| {
        attached(&split, &to(node, AccessMode::SingleNodeWriter), VolumeMode::Filesystem, &able())
    };
    assert!(on("a").unwrap().is_some());
    assert!(on("b").unwrap_err().to_string().contains("placement local"));
}

#[test]
fn a_second_node_is_refused_where_the_branches_serve_one() {
    use AccessMode::{MultiNodeMultiWriter, MultiNodeReaderOnly};
    let modes = ["MultiNodeReaderOnly", "MultiNodeMultiWriter"];
    let second = |branches: &[(&str, &str)], mode| {
        let split = lying(branches, &modes, &[("a", mode)]);
        attached(&split, &to("b", mode), VolumeMode::Filesystem, &able())
    };
    let directories = [("a", "directory"), ("c", "directory")];
    assert!(second(&directories, MultiNodeReaderOnly).unwrap().is_some());
    assert!(second(&directories[..1], MultiNodeMultiWriter).unwrap().is_some());
    for (branches, mode, reason) in [
        (&[("a", "image")][..], MultiNodeReaderOnly, "one node at a time"),
        (&directories, MultiNodeMultiWriter, "could hide each other"),
    ] {
        let error = second(branches, mode).unwrap_err();
        assert!(
            matches!(error, AttachRefused::Undivided { .. }) && error.to_string().contains(reason),
            "{error}"
        );
    }
}

#[test]
fn what_one_node_filled_is_read_by_many_where_its_branches_serve_them() {
    use AccessMode::{MultiNodeMultiWriter, MultiNodeReaderOnly};
    let first = |branches: &[(&str, &str)], mode| {
        let split = lying(branches, &["SingleNodeMultiWriter"], &[]);
        attached(&split, &to("b", mode), VolumeMode::Filesystem, &able())
    };
    assert!(first(&[("a", "directory"), ("c", "directory")], MultiNodeReaderOnly).unwrap().is_some());
    for (branches, mode) in
        [(&[("a", "image")], MultiNodeReaderOnly), (&[("a", "directory")], MultiNodeMultiWriter)]
    {
        assert!(matches!(first(branches, mode), Err(AttachRefused::Unsupported { .. })), "{branches:?}");
    }
}
