use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::Code;

use super::*;
use crate::csi::proto::volume_capability::access_mode::Mode;
use crate::csi::proto::volume_capability::{AccessMode, AccessType, MountVolume};
use crate::csi::tests::fixture::{Cluster, FakeVolumes, NODE, settings};

struct Fixture {
    cluster: Cluster,
    volumes: Arc<FakeVolumes>,
    service: NodeService,
}

async fn fixture_with(volumes: FakeVolumes, cluster: Cluster) -> Fixture {
    let volumes = Arc::new(volumes);
    let settings = settings(cluster.dir.path());
    let service = NodeService::new(
        volumes.clone(),
        cluster.store.clone(),
        settings,
        crate::node::transport::Transports::none().watch(),
        TaskTracker::new(),
    );
    Fixture { cluster, volumes, service }
}

async fn fixture() -> Fixture {
    fixture_with(FakeVolumes::default(), Cluster::busy().await).await
}

fn capability() -> Option<proto::VolumeCapability> {
    Some(proto::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    })
}

fn stage_request(volume: &str) -> proto::NodeStageVolumeRequest {
    proto::NodeStageVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/s".to_owned(),
        volume_capability: capability(),
        ..proto::NodeStageVolumeRequest::default()
    }
}

fn publish_request(volume: &str, context: &[(&str, &str)]) -> proto::NodePublishVolumeRequest {
    proto::NodePublishVolumeRequest {
        volume_id: volume.to_owned(),
        staging_target_path: "/s".to_owned(),
        target_path: "/t".to_owned(),
        volume_capability: capability(),
        volume_context: context
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect::<HashMap<_, _>>(),
        ..proto::NodePublishVolumeRequest::default()
    }
}

const EPHEMERAL: (&str, &str) = ("csi.storage.k8s.io/ephemeral", "true");
const POD_VOLUME: &str = "csi-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn inline_request(attributes: &[(&str, &str)]) -> proto::NodePublishVolumeRequest {
    let context: Vec<_> = attributes.iter().copied().chain([EPHEMERAL]).collect();
    proto::NodePublishVolumeRequest {
        staging_target_path: String::new(),
        ..publish_request(POD_VOLUME, &context)
    }
}

impl Fixture {
    async fn stage(&self, request: proto::NodeStageVolumeRequest) -> Result<(), Status> {
        self.service.node_stage_volume(Request::new(request)).await.map(|_| ())
    }

    async fn publish(&self, request: proto::NodePublishVolumeRequest) -> Result<(), Status> {
        self.service.node_publish_volume(Request::new(request)).await.map(|_| ())
    }

    async fn unpublish(&self, volume: &str) -> Result<(), Status> {
        let request =
            proto::NodeUnpublishVolumeRequest { volume_id: volume.to_owned(), target_path: "/t".to_owned() };
        self.service.node_unpublish_volume(Request::new(request)).await.map(|_| ())
    }

    async fn unstage(&self, volume: &str) -> Result<(), Status> {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: "/s".to_owned(),
        };
        self.service.node_unstage_volume(Request::new(request)).await.map(|_| ())
    }

    async fn stats(&self, volume: &str, path: &str) -> Result<proto::NodeGetVolumeStatsResponse, Status> {
        let request = proto::NodeGetVolumeStatsRequest {
            volume_id: volume.to_owned(),
            volume_path: path.to_owned(),
            ..proto::NodeGetVolumeStatsRequest::default()
        };
        self.service.node_get_volume_stats(Request::new(request)).await.map(Response::into_inner)
    }

    async fn splits(&self) -> Vec<String> {
        let all = self.cluster.store.splits().list(&crate::store::Selector::All).await.unwrap();
        all.into_iter().map(|s| s.meta.name).collect()
    }
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
    result.expect_err("it succeeded").code()
}

#[tokio::test]
async fn the_calls_reach_the_volumes_of_the_node() {
    let f = fixture().await;
    f.stage(stage_request("pvc-1")).await.unwrap();
    f.publish(publish_request("pvc-1", &[])).await.unwrap();
    f.unpublish("pvc-1").await.unwrap();
    f.unstage("pvc-1").await.unwrap();
    assert_eq!(
        f.volumes.taken(),
        ["stage pvc-1 /s", "publish pvc-1 /s /t", "unpublish pvc-1 /t", "unstage pvc-1 /s"]
    );
}

#[tokio::test]
async fn a_volume_that_shall_be_there_after_a_reboot_is_marked_so() {
    let f = fixture().await;
    f.publish(publish_request("pvc-1", &[("union.io/mount-at-boot", "true")])).await.unwrap();
    assert_eq!(f.volumes.taken(), ["publish pvc-1 /s /t at-boot"]);
    let odd = publish_request("pvc-1", &[("union.io/mount-at-boot", "maybe")]);
    assert_eq!(code(f.publish(odd).await), Code::InvalidArgument);
}

#[tokio::test]
async fn a_call_that_lacks_something_is_refused_with_its_field_and_nothing_is_called() {
    let f = fixture().await;
    let stage = stage_request("pvc-1");
    let publish = publish_request("pvc-1", &[]);
    let refused = [
        f.stage(proto::NodeStageVolumeRequest { volume_id: String::new(), ..stage.clone() }).await,
        f.stage(proto::NodeStageVolumeRequest { staging_target_path: String::new(), ..stage.clone() }).await,
        f.stage(proto::NodeStageVolumeRequest { staging_target_path: "s".to_owned(), ..stage.clone() }).await,
        f.stage(proto::NodeStageVolumeRequest { volume_capability: None, ..stage }).await,
        f.publish(proto::NodePublishVolumeRequest { volume_id: String::new(), ..publish.clone() }).await,
        f.publish(proto::NodePublishVolumeRequest { target_path: String::new(), ..publish.clone() }).await,
        f.publish(proto::NodePublishVolumeRequest { volume_capability: None, ..publish.clone() }).await,
        f.unpublish("").await,
        f.unstage("").await,
    ];
    for result in refused {
        assert_eq!(code(result), Code::InvalidArgument);
    }
    let unstaged = proto::NodePublishVolumeRequest { staging_target_path: String::new(), ..publish };
    assert_eq!(code(f.publish(unstaged).await), Code::FailedPrecondition);
    assert!(f.volumes.taken().is_empty());
}

#[tokio::test]
async fn a_text_that_is_no_id_names_no_volume() {
    let f = fixture().await;
    for text in ["../../etc", "A", &"x".repeat(100)] {
        assert_eq!(code(f.stage(stage_request(text)).await), Code::NotFound);
        assert_eq!(code(f.publish(publish_request(text, &[])).await), Code::NotFound);
        assert_eq!(code(f.stats(text, "/t").await), Code::NotFound);
        f.unpublish(text).await.unwrap();
        f.unstage(text).await.unwrap();
    }
    assert!(f.volumes.taken().is_empty());
}

#[tokio::test]
async fn usage_and_condition_are_told_and_an_unknown_path_is_not_found() {
    let f = fixture().await;
    let stats = f.stats("pvc-1", "/t").await.unwrap();
    let usage: Vec<_> = stats.usage.iter().map(|u| (u.unit, u.total, u.used, u.available)).collect();
    assert_eq!(usage, [(1, 10, 4, 6), (2, 3, 1, 2)]);
    let condition = stats.volume_condition.unwrap();
    assert_eq!((condition.abnormal, condition.message.as_str()), (true, "a branch is slow"));
    assert_eq!(code(f.stats("pvc-1", "some/path").await), Code::NotFound);
    assert_eq!(code(f.stats("pvc-1", "").await), Code::InvalidArgument);
    assert_eq!(code(f.stats("", "/t").await), Code::InvalidArgument);
}

#[tokio::test]
async fn the_node_tells_its_name_where_it_is_and_how_much_it_takes() {
    let f = fixture().await;
    let info = f.service.node_get_info(Request::new(Default::default())).await.unwrap().into_inner();
    assert_eq!((info.node_id.as_str(), info.max_volumes_per_node), (NODE, 0));
    let segments = info.accessible_topology.unwrap().segments;
    assert_eq!(segments, HashMap::from([(parse::TOPOLOGY_KEY.to_owned(), NODE.to_owned())]));
}

#[tokio::test]
async fn work_goes_on_when_its_caller_gives_up_and_keeps_others_out_until_it_ends() {
    let gate = Arc::new(Semaphore::new(0));
    let volumes = FakeVolumes { gate: Some(gate.clone()), ..FakeVolumes::default() };
    let f = fixture_with(volumes, Cluster::busy().await).await;
    let caller = tokio::time::timeout(Duration::from_millis(30), f.stage(stage_request("pvc-1"))).await;
    assert!(caller.is_err(), "the caller gave up");
    assert_eq!(code(f.unstage("pvc-1").await), Code::Aborted);
    gate.add_permits(1);
    f.service.tasks.close();
    f.service.tasks.wait().await;
    assert_eq!(f.volumes.taken(), ["stage pvc-1 /s"]);
    assert!(f.service.guards.enter(&"pvc-1").is_ok());
    assert_eq!(code(f.unstage("pvc-1").await), Code::Unavailable, "an agent that stops begins nothing new");
}

#[tokio::test]
async fn an_inline_volume_is_made_and_published_and_all_of_it_goes_with_the_pod() {
    let f = fixture().await;
    let volume = VolumeId::from_request_name(POD_VOLUME);
    let staging = f.cluster.dir.path().join("ephemeral").join(&volume).join("staging");
    let staging = staging.display();
    for _ in 0..2 {
        f.publish(inline_request(&[("size", "1Gi")])).await.unwrap();
        let calls = [format!("stage {volume} {staging}"), format!("publish {volume} {staging} /t")];
        assert_eq!(f.volumes.taken(), calls);
    }
    assert_eq!(f.splits().await, [volume.as_str()]);
    assert!(f.stats(POD_VOLUME, "/t").await.is_ok());
    for _ in 0..2 {
        f.unpublish(POD_VOLUME).await.unwrap();
    }
    assert_eq!(f.volumes.taken(), [format!("unpublish {volume} /t"), format!("unstage {volume} {staging}")]);
    assert!(f.splits().await.is_empty());
    assert_eq!(std::fs::read_dir(f.cluster.dir.path().join("ephemeral")).unwrap().count(), 0);
}

#[tokio::test]
async fn an_inline_volume_that_could_not_be_mounted_is_still_removed_by_the_unpublish_that_follows() {
    let f = fixture().await;
    *f.volumes.fail.lock().unwrap() = Some("stage");
    let error = f.publish(inline_request(&[])).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable, "nothing final: something exists");
    assert!(error.message().contains("mergerfs is missing"), "{error}");
    *f.volumes.fail.lock().unwrap() = None;
    f.unpublish(POD_VOLUME).await.unwrap();
    assert!(f.splits().await.is_empty());
}

#[tokio::test]
async fn an_inline_volume_whose_unmount_fails_keeps_its_data() {
    let f = fixture().await;
    f.publish(inline_request(&[])).await.unwrap();
    *f.volumes.fail.lock().unwrap() = Some("unstage");
    assert!(f.unpublish(POD_VOLUME).await.is_err());
    assert_eq!(f.splits().await.len(), 1);
    *f.volumes.fail.lock().unwrap() = None;
    f.unpublish(POD_VOLUME).await.unwrap();
    assert!(f.splits().await.is_empty());
}

#[tokio::test]
async fn an_inline_volume_without_room_is_refused_and_leaves_nothing_behind() {
    let f = fixture().await;
    assert_eq!(code(f.publish(inline_request(&[("size", "9Gi")])).await), Code::ResourceExhausted);
    assert!(f.splits().await.is_empty());
    f.unpublish(POD_VOLUME).await.unwrap();
    assert_eq!(std::fs::read_dir(f.cluster.dir.path().join("ephemeral")).unwrap().count(), 0);
}
