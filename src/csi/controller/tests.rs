use std::collections::HashMap;
use std::time::Duration;

use tonic::Code;

use super::*;
use crate::csi::proto::volume_capability::access_mode::Mode;
use crate::csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use crate::csi::proto::{
    CapacityRange, CreateVolumeRequest, Topology, TopologyRequirement, VolumeCapability,
};
use crate::csi::tests::fixture::{Cluster, NODE, ROOM, plan, settings};
use crate::store::object::set_condition;

fn service(cluster: &Cluster) -> ControllerService {
    ControllerService::new(cluster.store.clone(), settings(cluster.dir.path()))
}

fn capability(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

fn create_request(name: &str, gib: i64) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: gib << 30, limit_bytes: 0 }),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..CreateVolumeRequest::default()
    }
}

async fn create(service: &ControllerService, request: CreateVolumeRequest) -> Result<proto::Volume, Status> {
    let response = service.create_volume(Request::new(request)).await?;
    Ok(response.into_inner().volume.unwrap())
}

fn publish_request(volume: &str, node: &str) -> proto::ControllerPublishVolumeRequest {
    proto::ControllerPublishVolumeRequest {
        volume_id: volume.to_owned(),
        node_id: node.to_owned(),
        volume_capability: Some(capability(Mode::SingleNodeWriter)),
        ..proto::ControllerPublishVolumeRequest::default()
    }
}

async fn publish(service: &ControllerService, volume: &str, node: &str) -> Result<(), Status> {
    let request = Request::new(publish_request(volume, node));
    service.controller_publish_volume(request).await.map(|_| ())
}

async fn unpublish(service: &ControllerService, volume: &str, node: &str) -> Result<(), Status> {
    let request = proto::ControllerUnpublishVolumeRequest {
        volume_id: volume.to_owned(),
        node_id: node.to_owned(),
        ..proto::ControllerUnpublishVolumeRequest::default()
    };
    service.controller_unpublish_volume(Request::new(request)).await.map(|_| ())
}

async fn delete(service: &ControllerService, volume: &str) -> Result<(), Status> {
    let request = proto::DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
    service.delete_volume(Request::new(request)).await.map(|_| ())
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
    result.expect_err("it succeeded").code()
}

#[tokio::test]
async fn a_volume_is_created_with_its_size_and_the_node_that_it_can_be_used_on() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    let volume = create(&service, create_request("pvc-1", 2)).await.unwrap();
    assert_eq!(volume.volume_id, "pvc-1");
    assert_eq!(volume.capacity_bytes, 2 << 30);
    let segments = HashMap::from([(parse::TOPOLOGY_KEY.to_owned(), NODE.to_owned())]);
    assert_eq!(volume.accessible_topology, [Topology { segments }]);
    let again = create(&service, create_request("pvc-1", 2)).await.unwrap();
    assert_eq!(again, volume, "identical calls get identical answers");
}

#[tokio::test]
async fn the_same_name_with_another_size_is_refused() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 2)).await.unwrap();
    let error = create(&service, create_request("pvc-1", 3)).await.unwrap_err();
    assert_eq!(error.code(), Code::AlreadyExists);
    assert!(error.message().contains("required_bytes"), "{error}");
    assert!(create(&service, create_request("pvc-1", 1)).await.is_ok(), "two GiB are at least one");
}

#[tokio::test]
async fn a_volume_without_room_is_refused_with_the_largest_size() {
    let cluster = Cluster::busy().await;
    let error = create(&service(&cluster), create_request("pvc-1", 9)).await.unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.message().contains(&ROOM.to_string()), "{error}");
}

#[tokio::test]
async fn a_second_call_for_a_volume_is_aborted_and_another_volume_is_not_hindered() {
    let mut cluster = Cluster::idle().await;
    let service = Arc::new(service(&cluster));
    let first = tokio::spawn({
        let service = service.clone();
        async move { create(&service, create_request("pvc-1", 1)).await }
    });
    while cluster.split("pvc-1").await.is_none() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(code(create(&service, create_request("pvc-1", 1)).await), Code::Aborted);
    assert_eq!(code(delete(&service, "pvc-1").await), Code::Aborted);
    cluster.start_splitter();
    assert!(create(&service, create_request("pvc-2", 1)).await.is_ok());
    assert!(first.await.unwrap().is_ok());
}

#[tokio::test]
async fn a_callers_deadline_bounds_the_wait_and_the_answer_says_what_is_waited_for() {
    let cluster = Cluster::idle().await;
    let mut request = Request::new(create_request("pvc-1", 1));
    request.set_timeout(Duration::from_millis(50));
    let error = service(&cluster).create_volume(request).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(error.message().contains("call again"), "{error}");
}

#[tokio::test]
async fn deleting_what_does_not_exist_succeeds() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    for unknown in ["nothing", "../../etc", "Größe", &"x".repeat(500)] {
        delete(&service, unknown).await.unwrap();
        unpublish(&service, unknown, NODE).await.unwrap();
    }
    assert_eq!(code(delete(&service, "").await), Code::InvalidArgument);
    assert_eq!(code(unpublish(&service, "", NODE).await), Code::InvalidArgument);
}

#[tokio::test]
async fn a_volume_lives_from_create_to_delete() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    for _ in 0..2 {
        publish(&service, "pvc-1", NODE).await.unwrap();
    }
    assert_eq!(cluster.split("pvc-1").await.unwrap().spec.attached.len(), 1);
    assert_eq!(code(delete(&service, "pvc-1").await), Code::FailedPrecondition);
    for _ in 0..2 {
        unpublish(&service, "pvc-1", NODE).await.unwrap();
    }
    for _ in 0..2 {
        delete(&service, "pvc-1").await.unwrap();
    }
    assert!(cluster.split("pvc-1").await.is_none());
}

#[tokio::test]
async fn publishing_checks_volume_and_node_before_anything_else() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    assert_eq!(code(publish(&service, "nothing", NODE).await), Code::NotFound);
    assert_eq!(code(publish(&service, "a/b", NODE).await), Code::NotFound);
    assert_eq!(code(publish(&service, "pvc-1", "nobody").await), Code::NotFound);
    assert_eq!(code(publish(&service, "pvc-1", "No Node").await), Code::NotFound);
    assert_eq!(code(publish(&service, "", NODE).await), Code::InvalidArgument);
    assert_eq!(code(publish(&service, "pvc-1", "").await), Code::InvalidArgument);
    let bare =
        proto::ControllerPublishVolumeRequest { volume_capability: None, ..publish_request("pvc-1", NODE) };
    assert_eq!(code(service.controller_publish_volume(Request::new(bare)).await), Code::InvalidArgument);
    assert!(cluster.split("pvc-1").await.unwrap().spec.attached.is_empty());
}

#[tokio::test]
async fn publishing_again_in_another_way_is_refused() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    publish(&service, "pvc-1", NODE).await.unwrap();
    let read_only =
        proto::ControllerPublishVolumeRequest { readonly: true, ..publish_request("pvc-1", NODE) };
    assert_eq!(code(service.controller_publish_volume(Request::new(read_only)).await), Code::AlreadyExists);
}

#[tokio::test]
async fn a_node_that_does_not_reach_the_branches_of_a_volume_cannot_have_it() {
    let cluster = Cluster::busy().await;
    cluster.add_node("other").await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    let error = publish(&service, "pvc-1", "other").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(
        error.message().contains("lies on here, cannot be used on node other: node here cannot export"),
        "{error}"
    );
}

#[tokio::test]
async fn a_volume_of_one_node_is_not_given_to_a_second() {
    let cluster = Cluster::busy().await;
    cluster.add_node("other").await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    publish(&service, "pvc-1", NODE).await.unwrap();
    let error = publish(&service, "pvc-1", "other").await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("attached to node here"), "{error}");
    unpublish(&service, "pvc-1", "").await.unwrap();
    assert!(cluster.split("pvc-1").await.unwrap().spec.attached.is_empty(), "no node means all nodes");
}

#[tokio::test]
async fn a_node_takes_as_many_volumes_as_it_may() {
    let cluster = Cluster::busy().await;
    let settings = Settings { max_volumes: Some(1), ..settings(cluster.dir.path()) };
    let service = ControllerService::new(cluster.store.clone(), settings);
    for name in ["pvc-1", "pvc-2"] {
        create(&service, create_request(name, 1)).await.unwrap();
    }
    publish(&service, "pvc-1", NODE).await.unwrap();
    assert_eq!(code(publish(&service, "pvc-2", NODE).await), Code::ResourceExhausted);
    publish(&service, "pvc-1", NODE).await.unwrap();
    unpublish(&service, "pvc-1", NODE).await.unwrap();
    publish(&service, "pvc-2", NODE).await.unwrap();
}

#[tokio::test]
async fn volumes_are_listed_in_pages_that_survive_changes_between_them() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    for name in ["pvc-a", "pvc-b", "pvc-c", "pvc-d"] {
        create(&service, create_request(name, 1)).await.unwrap();
    }
    publish(&service, "pvc-a", NODE).await.unwrap();
    let list = |max_entries, starting_token: String| {
        let request = proto::ListVolumesRequest { max_entries, starting_token };
        let service = &service;
        async move { service.list_volumes(Request::new(request)).await.map(Response::into_inner) }
    };
    let ids = |page: &proto::ListVolumesResponse| -> Vec<String> {
        page.entries.iter().map(|e| e.volume.as_ref().unwrap().volume_id.clone()).collect()
    };
    let all = list(0, String::new()).await.unwrap();
    assert_eq!(ids(&all), ["pvc-a", "pvc-b", "pvc-c", "pvc-d"]);
    assert_eq!(all.next_token, "");
    let status = all.entries[0].status.as_ref().unwrap();
    assert_eq!(status.published_node_ids, [NODE]);
    assert!(!status.volume_condition.as_ref().unwrap().abnormal);

    let first = list(2, String::new()).await.unwrap();
    assert_eq!(ids(&first), ["pvc-a", "pvc-b"]);
    delete(&service, "pvc-b").await.unwrap();
    delete(&service, "pvc-c").await.unwrap();
    let second = list(2, first.next_token).await.unwrap();
    assert_eq!((ids(&second), second.next_token.as_str()), (vec!["pvc-d".to_owned()], ""));

    assert_eq!(code(list(0, "invalid-token".to_owned()).await), Code::Aborted);
    assert_eq!(code(list(-1, String::new()).await), Code::InvalidArgument);
}

#[tokio::test]
async fn volumes_that_no_caller_knows_are_not_listed() {
    let cluster = Cluster::idle().await;
    let service = service(&cluster);
    for name in ["pods", "unplanned", "leaving"] {
        let mut request = Request::new(create_request(name, 1));
        request.set_timeout(Duration::from_millis(20));
        assert!(service.create_volume(request).await.is_err());
    }
    cluster.change("leaving", plan).await;
    cluster.store.splits().delete("leaving", None).await.unwrap();
    cluster
        .change("pods", |split| {
            plan(split);
            split.spec.ephemeral = true;
        })
        .await;
    let page = service.list(&proto::ListVolumesRequest::default()).await.unwrap();
    assert!(page.entries.is_empty(), "{page:?}");
}

#[tokio::test]
async fn a_volume_tells_how_it_does() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    let get = |name: &str| {
        let request = proto::ControllerGetVolumeRequest { volume_id: name.to_owned() };
        let service = &service;
        async move { service.controller_get_volume(Request::new(request)).await.map(Response::into_inner) }
    };
    let condition = |r: proto::ControllerGetVolumeResponse| r.status.unwrap().volume_condition.unwrap();
    let well = condition(get("pvc-1").await.unwrap());
    assert_eq!((well.abnormal, well.message.as_str()), (false, "The branch is bound."));
    cluster
        .change_status("pvc-1", |split| {
            let now = jiff::Timestamp::UNIX_EPOCH;
            set_condition(
                &mut split.status.conditions,
                now,
                "Degraded",
                true,
                "PoolAbsent",
                "pool a is absent",
            );
        })
        .await;
    let ill = condition(get("pvc-1").await.unwrap());
    assert_eq!((ill.abnormal, ill.message.as_str()), (true, "Degraded: pool a is absent"));
    assert_eq!(code(get("nothing").await), Code::NotFound);
    assert_eq!(code(get("").await), Code::InvalidArgument);
}

async fn validate(
    service: &ControllerService,
    capabilities: Vec<VolumeCapability>,
    parameters: &[(&str, &str)],
) -> Result<proto::ValidateVolumeCapabilitiesResponse, Status> {
    let request = proto::ValidateVolumeCapabilitiesRequest {
        volume_id: "pvc-1".to_owned(),
        volume_capabilities: capabilities,
        parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..proto::ValidateVolumeCapabilitiesRequest::default()
    };
    service.validate_volume_capabilities(Request::new(request)).await.map(Response::into_inner)
}

#[tokio::test]
async fn capabilities_are_confirmed_or_answered_with_the_reason() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    let writer = vec![capability(Mode::SingleNodeWriter)];
    assert_eq!(code(validate(&service, vec![], &[]).await), Code::InvalidArgument);
    assert_eq!(code(validate(&service, writer.clone(), &[]).await), Code::NotFound);
    create(&service, create_request("pvc-1", 1)).await.unwrap();
    let confirmed = validate(&service, writer.clone(), &[]).await.unwrap().confirmed.unwrap();
    assert_eq!(confirmed.volume_capabilities, writer);

    let block = VolumeCapability {
        access_type: Some(AccessType::Block(BlockVolume {})),
        ..capability(Mode::SingleNodeWriter)
    };
    let xfs = VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume { fs_type: "xfs".to_owned(), ..Default::default() })),
        ..capability(Mode::SingleNodeWriter)
    };
    let unsupported = [
        (vec![capability(Mode::MultiNodeSingleWriter)], "second node"),
        (vec![capability(Mode::MultiNodeMultiWriter)], "asked is MultiNodeMultiWriter"),
        (vec![block], "asked is Block"),
    ];
    for (capabilities, reason) in unsupported {
        let answer = validate(&service, capabilities, &[]).await.unwrap();
        assert!(answer.confirmed.is_none() && answer.message.contains(reason), "{answer:?}");
    }
    let answer = validate(&service, writer, &[("strategy", "spread")]).await.unwrap();
    assert!(answer.confirmed.is_none() && answer.message.contains("strategy"), "{answer:?}");
    let answer = validate(&service, vec![xfs], &[]).await.unwrap();
    assert!(answer.confirmed.is_none() && answer.message.contains("fs_type"), "{answer:?}");
}

#[tokio::test]
async fn capacity_is_what_the_planner_could_give() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    let capacity = |parameters: &[(&str, &str)], node: Option<&str>| {
        let topology = |node: &str| Topology {
            segments: HashMap::from([(parse::TOPOLOGY_KEY.to_owned(), node.to_owned())]),
        };
        let request = proto::GetCapacityRequest {
            volume_capabilities: Vec::new(),
            parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            accessible_topology: node.map(topology),
        };
        let service = &service;
        async move { service.get_capacity(Request::new(request)).await.map(Response::into_inner) }
    };
    let before = capacity(&[], Some(NODE)).await.unwrap();
    assert!(before.available_capacity > 7 << 30, "{before:?}");
    assert!(before.maximum_volume_size.unwrap() <= before.available_capacity);
    create(&service, create_request("pvc-1", 4)).await.unwrap();
    let after = capacity(&[], Some(NODE)).await.unwrap();
    assert!(before.available_capacity - after.available_capacity > 3 << 30, "{before:?} {after:?}");
    assert_eq!(capacity(&[], Some("nobody")).await.unwrap().available_capacity, 0);
    assert_eq!(code(capacity(&[("sploit", "1")], None).await), Code::InvalidArgument);
}

#[tokio::test]
async fn a_topology_that_the_existing_volume_does_not_meet_is_refused() {
    let cluster = Cluster::busy().await;
    let service = service(&cluster);
    let on = |node: &str| TopologyRequirement {
        requisite: vec![Topology {
            segments: HashMap::from([(parse::TOPOLOGY_KEY.to_owned(), node.to_owned())]),
        }],
        preferred: Vec::new(),
    };
    let request = |node| CreateVolumeRequest {
        accessibility_requirements: Some(on(node)),
        ..create_request("pvc-1", 1)
    };
    create(&service, request(NODE)).await.unwrap();
    assert_eq!(code(create(&service, request("other")).await), Code::AlreadyExists);
}

#[tokio::test]
async fn what_is_not_claimed_is_unimplemented() {
    let cluster = Cluster::idle().await;
    let service = service(&cluster);
    let expand = service.controller_expand_volume(Request::new(Default::default())).await;
    let snapshot = service.create_snapshot(Request::new(Default::default())).await;
    let modify = service.controller_modify_volume(Request::new(Default::default())).await;
    assert_eq!([code(expand), code(snapshot), code(modify)], [Code::Unimplemented; 3]);
}
