//! `union-csi volume …`: volumes on a machine without an orchestrator, through the agent's CSI socket.

use std::collections::HashMap;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use snafu::ResultExt;

use super::client::{AgentArgs, block_on};
use super::draw::{self, Cell, Tone};
use super::output::{Look, Out};
use super::socket::{Agent, SocketArgs};
use super::{CliError, DONE, Format, cli_error, volumes};
use crate::csi::proto;
use crate::csi::proto::controller_client::ControllerClient;
use crate::csi::proto::node_client::NodeClient;
use crate::domain::{Bytes, VolumeId};

/// Volume context of NodePublishVolume: mounted again when the agent starts.
const MOUNT_AT_BOOT: &str = "union.io/mount-at-boot";
/// Entries of a page of ListVolumes.
const PAGE: i32 = 500;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi volume create media --size 2Ti\n  \
    union-csi volume mount media /srv/media --at-boot\n  \
    union-csi volume list\n  \
    union-csi volume unmount media\n  \
    union-csi volume delete media --yes")]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Create a volume; again with the same name and size changes nothing.
    Create(Create),
    /// Mount a volume.
    Mount(Mount),
    /// Unmount a volume everywhere on this machine, or at one place.
    Unmount(Unmount),
    /// Delete a volume and all its files.
    Delete(Delete),
    /// List all volumes.
    List(List),
}

#[derive(Debug, clap::Args)]
struct Create {
    /// Name of the volume
    name: String,
    /// Usable bytes that it must have at least, as 2Ti
    #[arg(long, short, value_name = "SIZE")]
    size: String,
    /// A parameter, as in a StorageClass; may be repeated
    #[arg(long = "param", short, value_name = "KEY=VALUE")]
    params: Vec<String>,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, clap::Args)]
struct Mount {
    /// Name or id of the volume
    name: String,
    /// Directory to mount it at; made where missing
    target: PathBuf,
    /// Nothing can be written through this mount
    #[arg(long)]
    read_only: bool,
    /// Mount it again whenever the agent starts
    #[arg(long)]
    at_boot: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, clap::Args)]
struct Unmount {
    /// Name or id of the volume
    name: String,
    /// Only here; without it the agent is asked where the volume is mounted
    target: Option<PathBuf>,
    #[command(flatten)]
    socket: SocketArgs,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Debug, clap::Args)]
struct Delete {
    /// Name or id of the volume
    name: String,
    /// Delete without asking; all files in it are lost
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

#[derive(Debug, clap::Args)]
struct List {
    #[command(flatten)]
    socket: SocketArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: Args, out: &mut Out) -> Result<u8, CliError> {
    match args.action {
        Action::Create(args) => block_on(create(args, out))?,
        Action::Mount(args) => block_on(mount(args, out))?,
        Action::Unmount(args) => unmount(&args, out),
        Action::Delete(args) => delete(&args, out),
        Action::List(args) => block_on(list(args, out))?,
    }
}

/// The id of the volume that a person calls so: its id itself, or the name it was created under.
fn id_of(name: &str) -> String {
    let digest = name
        .strip_prefix("v-")
        .is_some_and(|rest| rest.len() == 40 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    if digest { name.to_owned() } else { VolumeId::from_request_name(name).to_string() }
}

/// How volumes are used here: one machine, files.
fn capability() -> proto::VolumeCapability {
    use proto::volume_capability::access_mode::Mode;
    use proto::volume_capability::{AccessMode, AccessType, MountVolume};
    proto::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter.into() }),
        access_type: Some(AccessType::Mount(MountVolume::default())),
    }
}

async fn create(args: Create, out: &mut Out) -> Result<u8, CliError> {
    let size: Bytes = args.size.parse().map_err(|e| CliError::Usage {
        problem: format!("--size: {e}"),
        remedy: "write an amount as 500Gi or 2Ti".to_owned(),
    })?;
    let required_bytes = i64::try_from(size.get()).map_err(|_| CliError::Usage {
        problem: format!("--size {} is more than any volume can have", args.size),
        remedy: "ask for less than 8Ei".to_owned(),
    })?;
    let agent = args.socket.connect().await?;
    let request = proto::CreateVolumeRequest {
        name: args.name.clone(),
        capacity_range: Some(proto::CapacityRange { required_bytes, limit_bytes: 0 }),
        volume_capabilities: vec![capability()],
        parameters: super::parameters(&args.params)?.into_iter().collect(),
        ..Default::default()
    };
    let answer = ControllerClient::new(agent.channel())
        .create_volume(request)
        .await
        .map_err(|status| agent.failed(format!("create volume {}", args.name), &status))?
        .into_inner();
    let volume = answer.volume.unwrap_or_default();
    let size = draw::size(bytes(volume.capacity_bytes));
    out.print(&format!(
        "Volume {} of {size} is there; mount it: union-csi volume mount {} DIRECTORY\n",
        args.name, args.name
    ))?;
    Ok(DONE)
}

fn bytes(n: i64) -> Bytes {
    Bytes::new(u64::try_from(n).unwrap_or(0))
}

async fn mount(args: Mount, out: &mut Out) -> Result<u8, CliError> {
    let target = absolute(&args.target)?;
    let volume_id = id_of(&args.name);
    let agent = args.socket.connect().await?;
    let failed = |status| agent.failed(format!("mount volume {}", args.name), &status);
    let mut node = NodeClient::new(agent.channel());
    let info = node.node_get_info(proto::NodeGetInfoRequest {}).await.map_err(failed)?.into_inner();
    let attach = proto::ControllerPublishVolumeRequest {
        volume_id: volume_id.clone(),
        node_id: info.node_id,
        volume_capability: Some(capability()),
        ..Default::default()
    };
    let attached = ControllerClient::new(agent.channel())
        .controller_publish_volume(attach)
        .await
        .map_err(failed)?
        .into_inner();
    let staging = agent.staging.join(&volume_id);
    let staging = staging.to_string_lossy().into_owned();
    let stage = proto::NodeStageVolumeRequest {
        volume_id: volume_id.clone(),
        publish_context: attached.publish_context.clone(),
        staging_target_path: staging.clone(),
        volume_capability: Some(capability()),
        ..Default::default()
    };
    node.node_stage_volume(stage).await.map_err(failed)?;
    let context: HashMap<String, String> =
        args.at_boot.then(|| (MOUNT_AT_BOOT.to_owned(), "true".to_owned())).into_iter().collect();
    let publish = proto::NodePublishVolumeRequest {
        volume_id,
        publish_context: attached.publish_context,
        staging_target_path: staging,
        target_path: target.to_string_lossy().into_owned(),
        volume_capability: Some(capability()),
        readonly: args.read_only,
        volume_context: context,
        ..Default::default()
    };
    node.node_publish_volume(publish).await.map_err(failed)?;
    let again = if args.at_boot { ", and will be again whenever the agent starts" } else { "" };
    out.print(&format!("Volume {} is mounted at {}{again}\n", args.name, target.display()))?;
    Ok(DONE)
}

fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path).map_err(|e| CliError::Usage {
        problem: format!("{} is no path: {e}", path.display()),
        remedy: "write the directory from the root".to_owned(),
    })
}

fn unmount(args: &Unmount, out: &mut Out) -> Result<u8, CliError> {
    // Where it is mounted is known to the agent; a volume that the agent does not know of needs the target.
    let local = match volumes::one(&args.agent, &args.name) {
        Ok(volume) => volume.local,
        Err(_) if args.target.is_some() => None,
        Err(error) => return Err(error),
    };
    let known = local.as_ref().map(|l| l.targets.clone()).unwrap_or_default();
    let targets = match &args.target {
        Some(target) => vec![absolute(target)?],
        None => known.clone(),
    };
    let last = known.iter().all(|t| targets.contains(t));
    block_on(take_down(args, &targets, last))??;
    let places: Vec<String> = targets.iter().map(|t| t.display().to_string()).collect();
    let told = match places.len() {
        0 => format!("Volume {} was not mounted here\n", args.name),
        _ => format!("Volume {} is unmounted from {}\n", args.name, places.join(", ")),
    };
    out.print(&told)?;
    Ok(DONE)
}

/// Unpublishes the targets; unstages and detaches the volume too where they were the last.
async fn take_down(args: &Unmount, targets: &[PathBuf], last: bool) -> Result<(), CliError> {
    let volume_id = id_of(&args.name);
    let agent = args.socket.connect().await?;
    let failed = |status| agent.failed(format!("unmount volume {}", args.name), &status);
    let mut node = NodeClient::new(agent.channel());
    for target in targets {
        let request = proto::NodeUnpublishVolumeRequest {
            volume_id: volume_id.clone(),
            target_path: target.to_string_lossy().into_owned(),
        };
        node.node_unpublish_volume(request).await.map_err(failed)?;
    }
    if !last {
        return Ok(());
    }
    let staging = agent.staging.join(&volume_id).to_string_lossy().into_owned();
    let unstage =
        proto::NodeUnstageVolumeRequest { volume_id: volume_id.clone(), staging_target_path: staging };
    node.node_unstage_volume(unstage).await.map_err(failed)?;
    let info = node.node_get_info(proto::NodeGetInfoRequest {}).await.map_err(failed)?.into_inner();
    let detach =
        proto::ControllerUnpublishVolumeRequest { volume_id, node_id: info.node_id, ..Default::default() };
    ControllerClient::new(agent.channel()).controller_unpublish_volume(detach).await.map_err(failed)?;
    Ok(())
}

fn delete(args: &Delete, out: &mut Out) -> Result<u8, CliError> {
    if !args.yes && !confirmed(&args.name)? {
        out.print("Nothing was deleted.\n")?;
        return Ok(super::FAILED);
    }
    block_on(async {
        let agent = args.socket.connect().await?;
        let request = proto::DeleteVolumeRequest { volume_id: id_of(&args.name), ..Default::default() };
        let answer = ControllerClient::new(agent.channel()).delete_volume(request).await;
        answer.map_err(|status| agent.failed(format!("delete volume {}", args.name), &status))
    })??;
    out.print(&format!("Volume {} is deleted.\n", args.name))?;
    Ok(DONE)
}

/// Asks a person at a terminal to type the name; anybody else must say `--yes`.
fn confirmed(name: &str) -> Result<bool, CliError> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return cli_error::UsageSnafu {
            problem: format!("deleting volume {name} loses all files in it"),
            remedy: "say --yes if that is meant",
        }
        .fail();
    }
    let mut stderr = std::io::stderr().lock();
    write!(stderr, "All files in volume {name} will be lost. Type its name to delete it: ")
        .and_then(|()| stderr.flush())
        .context(cli_error::OutputSnafu)?;
    let mut typed = String::new();
    stdin.lock().read_line(&mut typed).context(cli_error::OutputSnafu)?;
    Ok(typed.trim_end_matches('\n') == name)
}

async fn list(args: List, out: &mut Out) -> Result<u8, CliError> {
    let agent = args.socket.connect().await?;
    let entries = entries(&agent).await?;
    match args.output {
        Format::Text if entries.is_empty() => out.print("No volumes.\n")?,
        Format::Text => out.print(&text(out.look, &entries))?,
        Format::Json => {
            let list: Vec<_> = entries
                .iter()
                .map(|e| {
                    serde_json::json!({
                        "id": e.id, "capacity": e.capacity.get(), "nodes": e.nodes, "abnormal": e.abnormal, "message": e.message,
                    })
                })
                .collect();
            out.json(&list)?;
        }
    }
    Ok(DONE)
}

/// A volume as ListVolumes tells of it.
struct Entry {
    id: String,
    capacity: Bytes,
    nodes: Vec<String>,
    abnormal: bool,
    message: String,
}

async fn entries(agent: &Agent) -> Result<Vec<Entry>, CliError> {
    let mut controller = ControllerClient::new(agent.channel());
    let mut all = Vec::new();
    let mut starting_token = String::new();
    loop {
        let request = proto::ListVolumesRequest { max_entries: PAGE, starting_token };
        let page = controller.list_volumes(request).await;
        let page = page.map_err(|status| agent.failed("list volumes".to_owned(), &status))?.into_inner();
        for entry in page.entries {
            let (volume, status) = (entry.volume.unwrap_or_default(), entry.status.unwrap_or_default());
            let condition = status.volume_condition.unwrap_or_default();
            all.push(Entry {
                id: volume.volume_id,
                capacity: bytes(volume.capacity_bytes),
                nodes: status.published_node_ids,
                abnormal: condition.abnormal,
                message: condition.message,
            });
        }
        if page.next_token.is_empty() {
            return Ok(all);
        }
        starting_token = page.next_token;
    }
}

fn text(look: Look, entries: &[Entry]) -> String {
    let head = [Cell::left("VOLUME"), Cell::right("SIZE"), Cell::left("MOUNTED ON"), Cell::left("HEALTH")];
    let rows: Vec<Vec<Cell>> = entries
        .iter()
        .map(|entry| {
            let nodes = if entry.nodes.is_empty() { "-".to_owned() } else { entry.nodes.join(", ") };
            let (word, tone) =
                if entry.abnormal { (&*entry.message, Tone::Bad) } else { ("healthy", Tone::Good) };
            vec![
                Cell::left(&*entry.id),
                Cell::right(draw::size(entry.capacity)),
                Cell::left(nodes),
                Cell::left(word).tone(tone),
            ]
        })
        .collect();
    draw::table(look, &head, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_found_by_its_name_and_by_its_id() {
        assert_eq!(id_of("media"), "media");
        let hashed = id_of("My Media");
        assert!(hashed.starts_with("v-"));
        assert_eq!(id_of(&hashed), hashed, "an id as the list shows it is kept");
    }
}
