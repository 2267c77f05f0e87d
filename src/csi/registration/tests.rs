use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use super::proto::registration_client::RegistrationClient;
use super::proto::{InfoRequest, RegistrationStatus};
use super::*;
use crate::csi::counters::CsiCounters;
use crate::csi::proto::NodeGetInfoRequest;
use crate::csi::proto::node_client::NodeClient;
use crate::csi::tests::fixture::{Cluster, FakeVolumes, NODE, settings as csi_settings};
use crate::csi::{IdentityService, NodeService, Services};
use crate::domain::reach::{Ability, TransportReport};
use crate::node::transport::Transports;

const QUICK: Timing = Timing {
    look: Duration::from_millis(20),
    pause: Duration::from_millis(50),
    longest: Duration::from_millis(200),
};

/// Nothing here takes as long, unless it never comes.
const BOUND: Duration = Duration::from_secs(30);

/// A kubelet's directory, a CSI socket when it is wanted, and the registration.
struct Rig {
    cluster: Cluster,
    settings: RegistrationSettings,
    state: watch::Receiver<RegistrationState>,
    transports: Transports,
    stop: CancellationToken,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Rig {
    async fn new() -> Self {
        let cluster = Cluster::idle().await;
        let kubelet_dir = cluster.dir.path().join("kubelet");
        std::fs::create_dir_all(kubelet_dir.join("plugins_registry")).unwrap();
        let settings = RegistrationSettings { kubelet_dir, csi_socket: cluster.dir.path().join("csi.sock") };
        let state = watch::channel(RegistrationState::default()).1;
        let transports = Transports::none();
        Self { cluster, settings, state, transports, stop: CancellationToken::new(), tasks: Vec::new() }
    }

    fn serve_csi(&mut self) {
        let tasks = TaskTracker::new();
        let (store, volumes) = (self.cluster.store.clone(), Arc::new(FakeVolumes::default()));
        let mut about = csi_settings(self.cluster.dir.path());
        about.max_volumes = Some(7);
        let services = Services {
            identity: IdentityService::new(Arc::new(crate::store::Asked(store.clone())), None),
            controller: None,
            node: Some(NodeService::new(volumes, store, about, self.transports.watch(), tasks.clone())),
            counters: Arc::new(CsiCounters::default()),
            tasks,
        };
        let socket = bind(Purpose::Csi, &self.settings.csi_socket).unwrap();
        let stop = self.stop.clone();
        self.tasks.push(tokio::spawn(async move {
            crate::csi::serve(socket, services, stop.cancelled_owned()).await.unwrap();
        }));
    }

    /// Starts the registration; the handle ends with it.
    fn register(&mut self) -> JoinHandle<()> {
        self.register_with(QUICK)
    }

    fn register_with(&mut self, timing: Timing) -> JoinHandle<()> {
        let (tell, state) = watch::channel(RegistrationState::default());
        self.state = state;
        let carried = self.transports.watch();
        tokio::spawn(serve_with(timing, self.settings.clone(), tell, carried, self.stop.clone()))
    }

    async fn served() -> (Self, JoinHandle<()>) {
        Self::served_with(QUICK).await
    }

    async fn served_with(timing: Timing) -> (Self, JoinHandle<()>) {
        let mut rig = Self::new().await;
        rig.serve_csi();
        let registration = rig.register_with(timing);
        rig.reaches(|state| *state == RegistrationState::Offered).await;
        (rig, registration)
    }

    async fn reaches(&mut self, wanted: impl FnMut(&RegistrationState) -> bool) -> RegistrationState {
        let reached = tokio::time::timeout(BOUND, self.state.wait_for(wanted)).await;
        reached.expect("the state was not reached").expect("the registration ended").clone()
    }

    async fn kubelet(&self) -> RegistrationClient<Channel> {
        RegistrationClient::new(connect(&self.settings.socket()).await.unwrap())
    }

    /// Device and inode of the socket; `None` where there is none.
    fn file(&self) -> Option<(u64, u64)> {
        use std::os::unix::fs::MetadataExt;
        std::fs::symlink_metadata(self.settings.socket()).ok().map(|m| (m.dev(), m.ino()))
    }
}

fn refusal(reason: &str) -> RegistrationStatus {
    RegistrationStatus { plugin_registered: false, error: reason.to_owned() }
}

const TAKEN: RegistrationStatus = RegistrationStatus { plugin_registered: true, error: String::new() };

#[tokio::test]
async fn a_kubelet_finds_the_driver_asks_for_the_node_and_takes_it() {
    let (mut rig, _registration) = Rig::served().await;
    let mut kubelet = rig.kubelet().await;
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "union.csi.union.io"));
    assert_eq!(info.supported_versions, ["1.0.0"]);
    assert!(rig.settings.socket().ends_with("plugins_registry/union.csi.union.io-reg.sock"));
    let mut csi = NodeClient::new(connect(Path::new(&info.endpoint)).await.unwrap());
    let node = csi.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((node.node_id.as_str(), node.max_volumes_per_node), (NODE, 7));
    let segments = node.accessible_topology.unwrap().segments;
    assert_eq!(segments, [("topology.union.csi.union.io/node".to_owned(), NODE.to_owned())].into());
    kubelet.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
}

#[tokio::test]
async fn no_kubelet_finds_the_driver_before_its_csi_socket_answers() {
    let mut rig = Rig::new().await;
    let _registration = rig.register();
    tokio::time::sleep(2 * CSI_PAUSE).await;
    assert_eq!(rig.file(), None);
    assert_eq!(*rig.state.borrow(), RegistrationState::Starting);
    rig.serve_csi();
    rig.reaches(|state| *state == RegistrationState::Offered).await;
    assert!(rig.file().is_some());
}

#[tokio::test]
async fn a_refused_driver_is_offered_again_by_a_new_socket_until_it_is_taken() {
    // Long enough for the refused state to be seen on a busy machine.
    let second = Duration::from_secs(1);
    let (mut rig, _registration) = Rig::served_with(Timing { pause: second, longest: second, ..QUICK }).await;
    for attempt in 0..2 {
        let mut kubelet = rig.kubelet().await;
        kubelet.notify_registration_status(refusal(&format!("not yet {attempt}"))).await.unwrap();
        let told = rig.reaches(|state| matches!(state, RegistrationState::Failed { .. })).await;
        assert_eq!(told, RegistrationState::Failed { reason: format!("not yet {attempt}") });
        rig.reaches(|state| *state == RegistrationState::Offered).await;
        assert!(rig.file().is_some());
    }
    rig.kubelet().await.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
}

#[tokio::test]
async fn a_kubelet_that_asks_again_by_itself_keeps_the_socket() {
    let (mut rig, _registration) = Rig::served().await;
    let before = rig.file();
    let mut kubelet = rig.kubelet().await;
    kubelet.notify_registration_status(refusal("the API server does not answer")).await.unwrap();
    kubelet.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
    tokio::time::sleep(4 * QUICK.pause).await;
    assert_eq!(rig.file(), before);
    assert_eq!(*rig.state.borrow(), RegistrationState::Registered);
}

#[tokio::test]
async fn a_socket_that_is_removed_with_its_directory_is_made_anew() {
    let (mut rig, _registration) = Rig::served().await;
    rig.kubelet().await.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
    std::fs::remove_dir_all(rig.settings.registry()).unwrap();
    let told = rig.reaches(|state| matches!(state, RegistrationState::Failed { .. })).await;
    let RegistrationState::Failed { reason } = told else { panic!("{told:?}") };
    assert!(reason.contains("plugins_registry does not exist"), "{reason}");
    assert!(reason.contains("kubernetes.kubeletDir"), "{reason}");
    std::fs::create_dir(rig.settings.registry()).unwrap();
    rig.reaches(|state| *state == RegistrationState::Offered).await;
    assert!(rig.file().is_some());
}

#[tokio::test]
async fn a_node_that_can_attach_by_more_is_registered_anew_with_it_and_one_that_can_by_less_is_left() {
    let (mut rig, _registration) = Rig::served().await;
    rig.kubelet().await.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
    let carries = |transports: &[Transport]| {
        let able = || Ability { able: true, reason: String::new() };
        let report = |transport: &Transport| TransportReport {
            transport: *transport,
            owner: able(),
            consumer: able(),
            authentication: able(),
            encryption: able(),
            identity: None,
        };
        Carried { transports: transports.iter().map(report).collect(), network: None }
    };
    rig.transports.install(carries(&[Transport::Nfs]), std::collections::BTreeMap::new());
    rig.reaches(|state| *state == RegistrationState::Offered).await;
    assert!(rig.file().is_some());
    let mut kubelet = rig.kubelet().await;
    let info = kubelet.get_info(InfoRequest {}).await.unwrap().into_inner();
    let mut csi = NodeClient::new(connect(Path::new(&info.endpoint)).await.unwrap());
    let node = csi.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner();
    let segments = node.accessible_topology.unwrap().segments;
    assert_eq!(segments.get("union.csi.union.io/nfs").map(String::as_str), Some("true"));
    assert!(!segments.contains_key("union.csi.union.io/nvme-tcp"), "what it cannot is not told as false");
    kubelet.notify_registration_status(TAKEN).await.unwrap();
    rig.reaches(|state| *state == RegistrationState::Registered).await;
    let before = rig.file();
    rig.transports.install(Carried::default(), std::collections::BTreeMap::new());
    tokio::time::sleep(4 * QUICK.pause).await;
    assert_eq!((rig.file(), rig.state.borrow().clone()), (before, RegistrationState::Registered));
}

#[tokio::test]
async fn the_socket_stays_when_the_agent_ends_and_the_next_agent_replaces_it() {
    let (mut rig, registration) = Rig::served().await;
    rig.stop.cancel();
    tokio::time::timeout(BOUND, registration).await.unwrap().unwrap();
    assert!(rig.file().is_some(), "its removal would unregister the driver");
    rig.stop = CancellationToken::new();
    while rig.settings.csi_socket.exists() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    rig.serve_csi();
    let _next = rig.register();
    rig.reaches(|state| *state == RegistrationState::Offered).await;
    assert!(rig.kubelet().await.get_info(InfoRequest {}).await.is_ok());
}

#[tokio::test]
async fn what_lies_at_its_place_and_is_no_socket_is_left_alone_and_told() {
    let mut rig = Rig::new().await;
    rig.serve_csi();
    std::fs::write(rig.settings.socket(), "precious").unwrap();
    let _registration = rig.register();
    let told = rig.reaches(|state| matches!(state, RegistrationState::Failed { .. })).await;
    let RegistrationState::Failed { reason } = told else { panic!("{told:?}") };
    assert!(reason.contains("is not a socket and is left alone"), "{reason}");
    assert_eq!(std::fs::read_to_string(rig.settings.socket()).unwrap(), "precious");
}

/// The kubelet's client (grpc-go) names the socket's path as the authority, which a client made with tonic cannot.
#[tokio::test]
async fn a_kubelet_may_name_the_path_of_the_socket_as_the_authority() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (rig, _registration) = Rig::served().await;
    let frame = |kind: u8, flags: u8, stream: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
    };
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let (post, http) = (vec![0x83], vec![0x86]);
    let path = [vec![0x44], text("/pluginregistration.Registration/GetInfo")].concat();
    let authority = [vec![0x41], text("%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fsocket")].concat();
    let content = [vec![0x5F], text("application/grpc")].concat();
    let te = [vec![0x40], text("te"), text("trailers")].concat();
    let first = [&post, &http, &path, &authority, &content, &te].map(|f| &f[..]).concat();
    // The second time, what is in the table is referred to: te is its latest entry, the path its oldest.
    let again = [0x83, 0x86, 0xC1, 0xC0, 0xBF, 0xBE];
    let nothing = [0; 5];
    let mut kubelet = tokio::net::UnixStream::connect(rig.settings.socket()).await.unwrap();
    for bytes in [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(1, 4, 1, &first),
        frame(0, 1, 1, &nothing),
        frame(1, 4, 3, &again),
        frame(0, 1, 3, &nothing),
    ] {
        kubelet.write_all(&bytes).await.unwrap();
    }
    let mut told = Vec::new();
    let both_answered = async {
        while String::from_utf8_lossy(&told).matches("CSIPlugin").count() < 2 {
            assert_ne!(kubelet.read_buf(&mut told).await.unwrap(), 0, "the connection was ended");
        }
    };
    tokio::time::timeout(BOUND, both_answered).await.expect("two answers");
}

#[test]
fn pauses_double_up_to_the_longest() {
    let mut pause = Pause::new(TIMING);
    let seconds: Vec<u64> = (0..9).map(|_| pause.next().as_secs()).collect();
    assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 64, 120, 120]);
    pause.attempts = u32::MAX;
    assert_eq!(pause.next(), TIMING.longest);
}
