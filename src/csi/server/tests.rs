use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::csi::proto;
use crate::csi::proto::identity_client::IdentityClient;
use crate::csi::proto::node_client::NodeClient;
use crate::csi::socket::{Purpose, bind};
use crate::csi::tests::fixture::{Cluster, FakeVolumes, settings};
use crate::store::Asked;

fn path(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("csi.sock")
}

struct Running {
    _cluster: Cluster,
    volumes: Arc<FakeVolumes>,
    counters: Arc<CsiCounters>,
    channel: Channel,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<Result<(), ServeError>>,
}

async fn running() -> Running {
    let cluster = Cluster::idle().await;
    let volumes = Arc::new(FakeVolumes::default());
    let counters = Arc::new(CsiCounters::default());
    let tasks = TaskTracker::new();
    let services = Services {
        identity: IdentityService::new(Arc::new(Asked(cluster.store.clone())), Some(volumes.clone())),
        controller: None,
        node: Some(NodeService::new(
            volumes.clone(),
            cluster.store.clone(),
            settings(cluster.dir.path()),
            crate::node::transport::Transports::none().watch(),
            tasks.clone(),
        )),
        counters: counters.clone(),
        tasks,
    };
    let path = path(&cluster.dir);
    let socket = bind(Purpose::Csi, &path).unwrap();
    let stop = CancellationToken::new();
    let server = tokio::spawn(serve(socket, services, stop.clone().cancelled_owned()));
    let connect = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await.unwrap();
    Running { _cluster: cluster, volumes, counters, channel, stop, server }
}

#[tokio::test]
async fn calls_are_answered_over_the_socket_and_counted_by_method_and_code() {
    let running = running().await;
    let info = IdentityClient::new(running.channel.clone())
        .get_plugin_info(proto::GetPluginInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(info.name, crate::csi::DRIVER);
    assert_eq!(info.vendor_version, env!("CARGO_PKG_VERSION"));
    let mut node = NodeClient::new(running.channel.clone());
    assert!(node.node_stage_volume(proto::NodeStageVolumeRequest::default()).await.is_err());
    assert!(node.node_expand_volume(proto::NodeExpandVolumeRequest::default()).await.is_err());
    let counted: Vec<_> = running.counters.snapshot().into_iter().map(|m| (m.method, m.codes)).collect();
    assert_eq!(
        counted,
        [
            ("GetPluginInfo", [("OK", 1)].into()),
            ("NodeStageVolume", [("INVALID_ARGUMENT", 1)].into()),
            ("NodeExpandVolume", [("UNIMPLEMENTED", 1)].into()),
        ]
    );
}

#[tokio::test]
async fn a_probe_says_why_the_node_is_not_well() {
    let running = running().await;
    let mut identity = IdentityClient::new(running.channel.clone());
    let well = identity.probe(proto::ProbeRequest {}).await.unwrap().into_inner();
    assert_eq!(well.ready, Some(true));
    *running.volumes.ready.lock().unwrap() = Some("mergerfs is missing".to_owned());
    let ill = identity.probe(proto::ProbeRequest {}).await.unwrap_err();
    assert_eq!(ill.code(), tonic::Code::FailedPrecondition);
    assert!(ill.message().contains("mergerfs is missing"), "{ill}");
}

#[tokio::test]
async fn serving_ends_when_it_is_told_to_and_takes_the_socket_away() {
    let Running { _cluster: cluster, channel, stop, server, .. } = running().await;
    drop(channel);
    stop.cancel();
    server.await.unwrap().unwrap();
    assert!(!path(&cluster.dir).exists());
}
