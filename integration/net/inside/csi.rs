//! What a kubelet asks of the agent on its node: `inside csi CALL [NAME=VALUE...]`. One run is one call, as the kubelet makes it,
//! on the socket that the agent told it by its registration; repeating a call that failed is the caller's.

#![allow(clippy::print_stdout, reason = "what it says is for the tests")]

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};
use union_csi::csi::DRIVER;
use union_csi::csi::proto::node_client::NodeClient;
use union_csi::csi::proto::volume_capability::access_mode::Mode;
use union_csi::csi::proto::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use union_csi::csi::proto::{
    NodeGetInfoRequest, NodeGetVolumeStatsRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest, VolumeCapability,
};
use union_csi::csi::registration::proto::registration_client::RegistrationClient;
use union_csi::csi::registration::proto::{InfoRequest, RegistrationStatus};

/// The kubelet gives a call two minutes (pkg/volume/csi, `csiTimeout`).
const PATIENCE: Duration = Duration::from_secs(120);

type Answer = Result<Value, Box<dyn Error>>;

struct Given(BTreeMap<String, String>);

impl Given {
    fn text(&self, name: &str) -> Result<String, String> {
        self.0.get(name).cloned().ok_or_else(|| format!("{name}= is missing"))
    }

    /// A JSON object of texts; none where it is not given.
    fn map(&self, name: &str) -> Result<HashMap<String, String>, Box<dyn Error>> {
        Ok(self.0.get(name).map(|text| serde_json::from_str(text)).transpose()?.unwrap_or_default())
    }

    /// As Kubernetes maps the access modes of volumes (`ReadWriteOnce`, ...).
    fn capability(&self) -> Result<VolumeCapability, Box<dyn Error>> {
        let mode = match self.0.get("mode").map(String::as_str) {
            None | Some("ReadWriteOnce") => Mode::SingleNodeMultiWriter,
            Some("ReadWriteOncePod") => Mode::SingleNodeSingleWriter,
            Some("ReadOnlyMany") => Mode::MultiNodeReaderOnly,
            Some("ReadWriteMany") => Mode::MultiNodeMultiWriter,
            Some(other) => return Err(format!("there is no access mode {other}").into()),
        };
        let access = match self.0.get("block").map(String::as_str) {
            Some("true") => AccessType::Block(BlockVolume {}),
            _ => AccessType::Mount(MountVolume {
                fs_type: self.0.get("fs").cloned().unwrap_or_default(),
                ..MountVolume::default()
            }),
        };
        Ok(VolumeCapability {
            access_mode: Some(AccessMode { mode: mode.into() }),
            access_type: Some(access),
        })
    }
}

/// Makes one call; the answer is printed as JSON, a refusal as `CODE: message`.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [call, given @ ..] = arguments else { return Err("say csi CALL".into()) };
    let given = Given(
        given.iter().filter_map(|a| a.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect(),
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on(answer(call, &given));
    match answer {
        Ok(answer) => println!("{answer}"),
        Err(error) => match error.downcast::<Status>() {
            Ok(status) => return Err(format!("{:?}: {}", status.code(), status.message()).into()),
            Err(error) => return Err(error),
        },
    }
    Ok(())
}

async fn answer(call: &str, given: &Given) -> Answer {
    let kubelet = PathBuf::from(given.text("kubelet")?);
    if call == "register" {
        return register(&kubelet).await;
    }
    let socket = kubelet.join("plugins").join(DRIVER).join("csi.sock");
    let mut node = NodeClient::new(connect(&socket).await?);
    match call {
        "info" => {
            let info = node.node_get_info(NodeGetInfoRequest {}).await?.into_inner();
            let segments = info.accessible_topology.map(|t| t.segments).unwrap_or_default();
            Ok(json!({"node": info.node_id, "segments": segments, "most": info.max_volumes_per_node}))
        }
        "stage" => {
            let staging = given.text("staging")?;
            fs::create_dir_all(&staging)?;
            let request = NodeStageVolumeRequest {
                volume_id: given.text("volume")?,
                publish_context: given.map("attached")?,
                staging_target_path: staging,
                volume_capability: Some(given.capability()?),
                secrets: HashMap::new(),
                volume_context: given.map("context")?,
            };
            // Whoever measures wants to know when it begins.
            println!("calls");
            let begun = Instant::now();
            node.node_stage_volume(request).await?;
            Ok(json!({ "staged": begun.elapsed().as_secs_f64() }))
        }
        "unstage" => {
            let staging = given.text("staging")?;
            node.node_unstage_volume(NodeUnstageVolumeRequest {
                volume_id: given.text("volume")?,
                staging_target_path: staging.clone(),
            })
            .await?;
            remove(Path::new(&staging))?;
            Ok(json!("unstaged"))
        }
        "publish" => {
            let target = PathBuf::from(given.text("target")?);
            fs::create_dir_all(target.parent().ok_or("the target has no parent")?)?;
            node.node_publish_volume(NodePublishVolumeRequest {
                volume_id: given.text("volume")?,
                publish_context: given.map("attached")?,
                staging_target_path: given.text("staging")?,
                target_path: given.text("target")?,
                volume_capability: Some(given.capability()?),
                readonly: given.0.get("readonly").is_some_and(|v| v == "true"),
                secrets: HashMap::new(),
                volume_context: given.map("context")?,
            })
            .await?;
            Ok(json!("published"))
        }
        "unpublish" => {
            let target = given.text("target")?;
            node.node_unpublish_volume(NodeUnpublishVolumeRequest {
                volume_id: given.text("volume")?,
                target_path: target.clone(),
            })
            .await?;
            remove(Path::new(&target))?;
            Ok(json!("unpublished"))
        }
        "stats" => {
            let stats = node
                .node_get_volume_stats(NodeGetVolumeStatsRequest {
                    volume_id: given.text("volume")?,
                    volume_path: given.text("target")?,
                    staging_target_path: given.text("staging")?,
                })
                .await?
                .into_inner();
            let condition = stats.volume_condition.unwrap_or_default();
            let usage: Vec<Value> = stats
                .usage
                .iter()
                .map(|u| json!({"unit": u.unit, "total": u.total, "used": u.used, "available": u.available}))
                .collect();
            Ok(json!({"usage": usage, "abnormal": condition.abnormal, "message": condition.message}))
        }
        other => Err(format!("a kubelet does not call {other}").into()),
    }
}

/// The kubelet removes the directory after the driver; one that is not there is as good, one that holds something is told of.
fn remove(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// What the kubelet does with a socket that it finds in its directory for plugins.
async fn register(kubelet: &Path) -> Answer {
    let socket = kubelet.join("plugins_registry").join(format!("{DRIVER}-reg.sock"));
    let mut driver = RegistrationClient::new(connect(&socket).await?);
    let info = driver.get_info(InfoRequest {}).await?.into_inner();
    let expected = kubelet.join("plugins").join(DRIVER).join("csi.sock");
    if Path::new(&info.endpoint) != expected {
        return Err(format!("it names the socket {:?}, not {}", info.endpoint, expected.display()).into());
    }
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    driver.notify_registration_status(status).await?;
    Ok(json!({"name": info.name, "versions": info.supported_versions}))
}

async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let path = socket.to_owned();
    Endpoint::from_static("http://localhost")
        .timeout(PATIENCE)
        .connect_with_connector(tower::service_fn(move |_| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
}
