//! The real agent as a process, and its CSI socket as an orchestrator sees it.

#![allow(dead_code, reason = "each test uses some of it")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Request, Status};
use union_csi::csi::proto;
use union_csi::csi::proto::controller_client::ControllerClient;
use union_csi::csi::proto::identity_client::IdentityClient;
use union_csi::csi::proto::node_client::NodeClient;
use union_csi::csi::proto::volume_capability::access_mode::Mode;

/// How long an agent may take to answer after its start, before the test gives up.
const START_BOUND: Duration = Duration::from_secs(60);

/// An agent with its own state directory, pools and socket below one directory.
pub struct Agent {
    pub dir: PathBuf,
    pub url: String,
    program: PathBuf,
    child: Option<Child>,
}

impl Agent {
    /// Starts an agent whose state is in `<dir>/state` and whose targets may lie below `dir`. `extra` is YAML added to its
    /// configuration.
    pub fn start(program: &Path, dir: &Path, pools: &[(String, PathBuf)], extra: &str) -> Self {
        let mut yaml = format!("{extra}\npools:\n");
        for (name, path) in pools {
            let _ = writeln!(yaml, "  - {{ name: {name}, path: {}, reserve: \"0\" }}", path.display());
        }
        if pools.is_empty() {
            yaml.push_str("  []\n");
        }
        Self::start_with(program, dir, &yaml)
    }

    /// The same, with pools and everything else in `extra`.
    pub fn start_with(program: &Path, dir: &Path, extra: &str) -> Self {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            listener.local_addr().expect("its number").port()
        };
        let yaml = format!(
            "nodeName: test-node\nstateDir: {dir}/state\ncsi: {{ endpoint: \"unix://{dir}/csi.sock\", allowedTargets: [\"{dir}\"] }}\n\
             http: {{ listen: \"127.0.0.1:{port}\" }}\n{extra}\n",
            dir = dir.display()
        );
        fs::write(dir.join("agent.yaml"), yaml).expect("agent.yaml");
        let mut agent = Self {
            dir: dir.to_owned(),
            url: format!("http://127.0.0.1:{port}"),
            program: program.to_owned(),
            child: None,
        };
        agent.restart();
        agent
    }

    /// Starts the agent again on the same state, and waits until it is ready.
    pub fn restart(&mut self) {
        self.restart_until("/readyz");
    }

    /// Starts the agent again on the same state, and waits until it answers with 200 there.
    pub fn restart_until(&mut self, path: &str) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.join("agent.log"))
            .expect("agent.log");
        let child = Command::new(&self.program)
            .args(["agent", "--config"])
            .arg(self.dir.join("agent.yaml"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("agent.log"))
            .stderr(log)
            .spawn()
            .expect("the agent's program");
        self.child = Some(child);
        let begun = Instant::now();
        while begun.elapsed() < START_BOUND {
            if let Some(status) = self.child.as_mut().and_then(|c| c.try_wait().ok().flatten()) {
                panic!("the agent ended with {status}:\n{}", self.log_end());
            }
            if self.get(path).is_some() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("the agent is not ready after {START_BOUND:?}:\n{}", self.log_end());
    }

    /// Starts the agent again, by another program.
    pub fn run_as(&mut self, program: &Path) {
        program.clone_into(&mut self.program);
        self.restart();
    }

    /// The body that the agent's HTTP answers, where it answers with 200.
    pub fn get(&self, path: &str) -> Option<String> {
        let out =
            Command::new("curl").args(["-fsS", "-m", "10", &format!("{}{path}", self.url)]).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
    }

    /// The last lines of its log.
    pub fn log_end(&self) -> String {
        let text = fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    /// How many lines of its log have `text`.
    pub fn log_count(&self, text: &str) -> usize {
        let log = fs::read_to_string(self.dir.join("agent.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(text)).count()
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("a running agent").id()
    }

    /// Ends the agent as a crash does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Ends the agent as an administrator does, and returns its exit status.
    pub fn stop(&mut self) -> Option<std::process::ExitStatus> {
        let mut child = self.child.take()?;
        let _ = Command::new("kill").arg(child.id().to_string()).status();
        let begun = Instant::now();
        while begun.elapsed() < START_BOUND {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }

    /// A client of its CSI socket.
    pub async fn csi(&self) -> Csi {
        let socket = self.dir.join("csi.sock");
        let channel = Endpoint::from_static("http://csi")
            .connect_with_connector(tower::service_fn(move |_: Uri| {
                let socket = socket.clone();
                async move { UnixStream::connect(socket).await.map(TokioIo::new) }
            }))
            .await
            .expect("the CSI socket");
        Csi {
            dir: self.dir.clone(),
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
        // Unions outlive their agent by design; those of this test's agent end with the test.
        if std::thread::panicking() {
            eprintln!("agent log:\n{}", self.log_end());
        }
        let _ = Command::new("pkill").args(["-9", "-f", &format!("{}/", self.dir.display())]).status();
    }
}

/// What to make and how to use it.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub name: String,
    pub bytes: i64,
    pub parameters: HashMap<String, String>,
    pub modes: Vec<Mode>,
}

impl Wanted {
    pub fn new(name: &str, bytes: u64, parameters: &[(&str, &str)]) -> Self {
        Self {
            name: name.to_owned(),
            bytes: i64::try_from(bytes).expect("a size"),
            parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            modes: vec![Mode::SingleNodeWriter],
        }
    }
}

/// A mounted capability with this mode.
pub fn mounted(mode: Mode) -> proto::VolumeCapability {
    proto::VolumeCapability {
        access_mode: Some(proto::volume_capability::AccessMode { mode: mode.into() }),
        access_type: Some(proto::volume_capability::AccessType::Mount(
            proto::volume_capability::MountVolume::default(),
        )),
    }
}

/// The CSI calls of an orchestrator, with its usual paths.
#[derive(Clone)]
pub struct Csi {
    pub dir: PathBuf,
    pub identity: IdentityClient<Channel>,
    pub controller: ControllerClient<Channel>,
    pub node: NodeClient<Channel>,
}

impl Csi {
    pub fn staging(&self, id: &str) -> PathBuf {
        self.dir.join("staging").join(id)
    }

    pub fn target(&self, id: &str) -> PathBuf {
        self.dir.join("targets").join(id)
    }

    pub async fn create(&mut self, wanted: &Wanted) -> Result<proto::Volume, Status> {
        let request = proto::CreateVolumeRequest {
            name: wanted.name.clone(),
            capacity_range: Some(proto::CapacityRange { required_bytes: wanted.bytes, limit_bytes: 0 }),
            volume_capabilities: wanted.modes.iter().map(|m| mounted(*m)).collect(),
            parameters: wanted.parameters.clone(),
            ..Default::default()
        };
        let reply = self.controller.create_volume(Request::new(request)).await?.into_inner();
        reply.volume.ok_or_else(|| Status::internal("CreateVolume answered without a volume"))
    }

    pub async fn stage(&mut self, id: &str, mode: Mode) -> Result<(), Status> {
        let staging = self.staging(id);
        fs::create_dir_all(&staging).expect("staging directory");
        let request = proto::NodeStageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: staging.display().to_string(),
            volume_capability: Some(mounted(mode)),
            ..Default::default()
        };
        self.node.node_stage_volume(request).await.map(drop)
    }

    pub async fn publish(&mut self, id: &str, mode: Mode) -> Result<PathBuf, Status> {
        let target = self.target(id);
        fs::create_dir_all(target.parent().expect("a parent")).expect("targets directory");
        let request = proto::NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: self.staging(id).display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(mounted(mode)),
            readonly: false,
            ..Default::default()
        };
        self.node.node_publish_volume(request).await?;
        Ok(target)
    }

    pub async fn unpublish(&mut self, id: &str) -> Result<(), Status> {
        let request = proto::NodeUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            target_path: self.target(id).display().to_string(),
        };
        self.node.node_unpublish_volume(request).await.map(drop)
    }

    pub async fn unstage(&mut self, id: &str) -> Result<(), Status> {
        let request = proto::NodeUnstageVolumeRequest {
            volume_id: id.to_owned(),
            staging_target_path: self.staging(id).display().to_string(),
        };
        self.node.node_unstage_volume(request).await?;
        let _ = fs::remove_dir(self.staging(id));
        Ok(())
    }

    pub async fn delete(&mut self, id: &str) -> Result<(), Status> {
        let request = proto::DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        self.controller.delete_volume(request).await.map(drop)
    }
}
