use super::compare::difference;
use super::*;
use crate::csi::tests::fixture::{Cluster, NODE, ROOM, bind, node, plan, plan_on};
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::store::object::Attachment;
use crate::store::view::{accessible, capacity};

fn wanted(name: &str) -> VolumeSplitSpec {
    VolumeSplitSpec {
        volume: VolumeId::from_request_name(name),
        request_name: name.to_owned(),
        capacity: Bytes::gib(1),
        limit: None,
        access_modes: vec![AccessMode::SingleNodeWriter],
        volume_mode: VolumeMode::Filesystem,
        parameters: [("strategy".to_owned(), "fewest".to_owned())].into(),
        consumer: None,
        topology: Vec::new(),
        ephemeral: false,
        branches: Vec::new(),
        next_index: 0,
        attached: Vec::new(),
        used: false,
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// For waits that are to run out.
fn at_once() -> Instant {
    Instant::now() + Duration::from_millis(30)
}

#[tokio::test]
async fn a_volume_is_made_once_and_found_again() {
    let cluster = Cluster::busy().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let first = provisioner.create(&wanted("pvc-1"), soon()).await.unwrap();
    assert_eq!(first.meta.finalizers, [crate::store::object::FINALIZER]);
    assert_eq!(capacity(&first), Bytes::gib(1));
    assert_eq!(accessible(&first, &Network::default()).nodes, [node(NODE)]);
    let second = provisioner.create(&wanted("pvc-1"), soon()).await.unwrap();
    assert_eq!(second.meta.uid, first.meta.uid);
}

#[tokio::test]
async fn a_call_that_ran_out_of_time_is_continued_by_the_next() {
    let mut cluster = Cluster::idle().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let late = provisioner.create(&wanted("pvc-1"), at_once()).await.unwrap_err();
    assert!(matches!(&late, ProvisionError::NotReady { .. }), "{late}");
    assert!(late.to_string().contains("is the controller running"), "{late}");
    let uid = cluster.split("pvc-1").await.unwrap().meta.uid;
    cluster.start_splitter();
    assert_eq!(provisioner.create(&wanted("pvc-1"), soon()).await.unwrap().meta.uid, uid);
}

#[tokio::test]
async fn a_volume_without_room_is_refused_with_the_largest_size_and_leaves_nothing() {
    let cluster = Cluster::busy().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let large = VolumeSplitSpec { capacity: Bytes::gib(9), ..wanted("pvc-1") };
    let error = provisioner.create(&large, soon()).await.unwrap_err();
    assert!(matches!(&error, ProvisionError::NoRoom { largest, .. } if *largest == ROOM), "{error}");
    assert!(error.to_string().contains("pool here/a has 8Gi"), "{error}");
    assert!(cluster.split("pvc-1").await.is_none());
    let smaller = VolumeSplitSpec { capacity: ROOM, ..wanted("pvc-1") };
    assert!(provisioner.create(&smaller, soon()).await.is_ok(), "the name is free at once");
}

#[tokio::test]
async fn a_volume_that_was_never_complete_is_withdrawn_with_the_branches_that_it_has() {
    let cluster = Cluster::idle().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let _late = provisioner.create(&wanted("pvc-1"), at_once()).await.unwrap_err();
    cluster.change("pvc-1", plan).await;
    let infeasible = |split: &mut VolumeSplit| {
        let now = jiff::Timestamp::UNIX_EPOCH;
        crate::store::object::set_condition(
            &mut split.status.conditions,
            now,
            "Pending",
            true,
            pending::INFEASIBLE,
            "branch 0 was refused",
        );
    };
    cluster.change_status("pvc-1", infeasible).await;
    let error = provisioner.create(&wanted("pvc-1"), at_once()).await.unwrap_err();
    assert!(matches!(error, ProvisionError::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("branch 0 was refused"), "{error}");
    // The splitter removes its branches, then the volume.
    assert!(cluster.split("pvc-1").await.is_none_or(|split| split.meta.deleting.is_some()));
}

#[tokio::test]
async fn a_volume_that_is_planned_while_it_is_withdrawn_is_kept() {
    let cluster = Cluster::idle().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let _late = provisioner.create(&wanted("pvc-1"), at_once()).await.unwrap_err();
    let stale = cluster.split("pvc-1").await.unwrap();
    cluster.change("pvc-1", plan).await;
    assert!(matches!(provisioner.withdraw(&stale, soon()).await.unwrap(), Withdrawn::Changed(_)));
    assert!(cluster.split("pvc-1").await.unwrap().meta.deleting.is_none());
}

#[tokio::test]
async fn a_volume_that_is_on_its_way_out_is_not_given_out_again() {
    let cluster = Cluster::idle().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let _late = provisioner.create(&wanted("pvc-1"), at_once()).await.unwrap_err();
    let late = provisioner.delete(&wanted("pvc-1").volume, at_once()).await.unwrap_err();
    assert!(matches!(late, ProvisionError::NotGone { .. }), "{late}");
    let error = provisioner.create(&wanted("pvc-1"), soon()).await.unwrap_err();
    assert!(matches!(error, ProvisionError::Deleting { .. }), "{error}");
}

#[tokio::test]
async fn a_wait_ends_when_the_volume_is_deleted_by_others() {
    let cluster = Cluster::idle().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let waiting = {
        let provisioner = provisioner.clone();
        tokio::spawn(async move { provisioner.create(&wanted("pvc-1"), soon()).await })
    };
    while cluster.split("pvc-1").await.is_none() {
        assert!(!waiting.is_finished(), "the volume was not made");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    cluster.store.splits().delete("pvc-1", None).await.unwrap();
    let error = waiting.await.unwrap().unwrap_err();
    assert!(matches!(error, ProvisionError::Deleting { .. }), "{error}");
}

#[tokio::test]
async fn deleting_waits_until_the_volume_is_gone_and_once_more_is_fine() {
    let cluster = Cluster::busy().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    let volume = wanted("pvc-1").volume;
    provisioner.create(&wanted("pvc-1"), soon()).await.unwrap();
    provisioner.delete(&volume, soon()).await.unwrap();
    assert!(cluster.split("pvc-1").await.is_none());
    provisioner.delete(&volume, soon()).await.unwrap();
}

#[tokio::test]
async fn an_attached_volume_is_not_deleted() {
    let cluster = Cluster::busy().await;
    let provisioner = Provisioner::new(cluster.store.clone());
    provisioner.create(&wanted("pvc-1"), soon()).await.unwrap();
    cluster
        .change("pvc-1", |split| {
            split.spec.attached = vec![Attachment {
                node: node(NODE),
                access_mode: AccessMode::SingleNodeWriter,
                read_only: false,
                volume_attachment: None,
            }];
        })
        .await;
    let error = provisioner.delete(&wanted("pvc-1").volume, soon()).await.unwrap_err();
    assert!(error.to_string().contains("attached to here"), "{error}");
    assert!(cluster.split("pvc-1").await.unwrap().meta.deleting.is_none());
}

fn existing(change: impl Fn(&mut VolumeSplit)) -> VolumeSplit {
    let mut split =
        VolumeSplit { meta: Meta::new("pvc-1"), spec: wanted("pvc-1"), status: VolumeSplitStatus::default() };
    plan(&mut split);
    bind(&mut split);
    change(&mut split);
    split
}

#[test]
fn what_differs_from_an_existing_volume_is_named() {
    type Change = fn(&mut VolumeSplit);
    let cases: [(Change, Option<&str>); 13] = [
        (|_| {}, None),
        (|s| s.status.capacity = Bytes::ZERO, None),
        (|s| s.spec.branches[0].usable = Bytes::gib(2), None),
        (
            |s| (s.spec.capacity, s.spec.branches[0].usable) = (Bytes::mib(1), Bytes::mib(2)),
            Some("required_bytes"),
        ),
        (|s| s.spec.branches[0].usable = Bytes::gib(3), Some("limit_bytes")),
        (|s| s.spec.request_name = "other".to_owned(), Some("\"other\"")),
        (|s| s.spec.ephemeral = true, Some("ephemeral")),
        (|s| s.spec.volume_mode = VolumeMode::Block, Some("mode Block")),
        (|s| s.spec.access_modes = vec![AccessMode::SingleNodeMultiWriter], None),
        (|s| s.spec.access_modes = vec![AccessMode::MultiNodeReaderOnly], Some("volume_capabilities")),
        (|s| s.spec.parameters.clear(), Some("parameters: strategy")),
        (|s| drop(s.spec.parameters.insert("a".to_owned(), "b".to_owned())), Some("parameters: a")),
        (|s| plan_on(s, "elsewhere"), Some("accessibility_requirements")),
    ];
    let want = VolumeSplitSpec { limit: Some(Bytes::gib(2)), topology: vec![node(NODE)], ..wanted("pvc-1") };
    for (index, (change, expected)) in cases.into_iter().enumerate() {
        let told = difference(&existing(change), &want, &Network::default());
        match expected {
            None => assert_eq!(told, None, "case {index}"),
            Some(part) => assert!(told.as_ref().is_some_and(|t| t.contains(part)), "case {index}: {told:?}"),
        }
    }
}
