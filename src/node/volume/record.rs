//! What an agent must know of a volume to go on where another stopped: one file a volume, written before the effects.
//!
//! The record says what is intended, never what is: that is asked of the kernel each time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::types::{PublishRequest, StageRequest};
use crate::domain::access::{Epoch, Generation};
use crate::domain::policy::OnBranchLoss;
use crate::domain::reach::Transport;
use crate::domain::union::UnionKind;
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::node::union::UnionSpec;
use crate::platform::{Host, HostError};
use crate::store::object::BranchSpec;

/// Version of the record's form; a higher one was written by a newer agent.
const VERSION: u32 = 2;

/// The form without branches on other nodes. A record that has none is written so: agents of that time go on with it. One that
/// has some they must leave alone: they would take those branches for their own, find them missing, and end the union.
const VERSION_LOCAL: u32 = 1;

/// A longer record is not one of ours: 16 branches and 256 targets take a tenth of it.
const MAX_RECORD: usize = 1 << 20;

const FILE: &str = "record.json";

/// How far a volume's life on this node has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Phase {
    /// Staging began and has not succeeded: never repaired, only begun anew or taken back.
    Staging,
    /// Staged: kept so until it is unstaged.
    Staged,
    /// Unstaging began.
    Unstaging,
}

/// What the binds of a volume show in mountinfo: device and root of its `data` directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Origin {
    /// Device: major, minor.
    pub(super) device: (u32, u32),
    /// Root within its filesystem.
    pub(super) root: PathBuf,
}

/// A branch as it was staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct StagedBranch {
    /// What was attached.
    pub(super) spec: BranchSpec,
    /// Where it lies in its pool, once it was attached.
    #[serde(default)]
    pub(super) backing: Option<PathBuf>,
    /// Its block device, for images, once it was attached.
    #[serde(default)]
    pub(super) device: Option<PathBuf>,
    /// Where it is reached, for a branch on another node; written before it is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) remote: Option<Remote>,
    /// Since when it has not answered, in seconds that this machine had run in the record's boot: an agent that is started
    /// meanwhile goes on counting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) silent_since: Option<u64>,
}

/// An export of another node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Remote {
    /// By what it is reached.
    pub(super) transport: Transport,
    /// The owner's address and port on the storage network.
    pub(super) address: SocketAddr,
    /// The export's name there.
    pub(super) name: String,
    /// Its generation.
    pub(super) generation: Generation,
    /// The order that gave it to this node.
    pub(super) epoch: Epoch,
    /// UUID of its filesystem, where it has one and its owner told.
    #[serde(default)]
    pub(super) fs_uuid: Option<String>,
}

/// A volume on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    /// Form of this record.
    pub(super) version: u32,
    /// Boot that its mounts belong to.
    pub(super) boot_id: String,
    /// How far it has come.
    pub(super) phase: Phase,
    /// What was asked for.
    pub(super) request: StageRequest,
    /// What serves it.
    pub(super) kind: UnionKind,
    /// Its branches, in the union's order.
    pub(super) branches: Vec<StagedBranch>,
    /// Options of its MergerFS.
    pub(super) options: BTreeMap<String, String>,
    /// What becomes of it when it loses a branch.
    pub(super) on_branch_loss: OnBranchLoss,
    /// How long a branch may not answer, in seconds.
    pub(super) branch_timeout_seconds: u64,
    /// Number of the union's mount point; raised with each new union.
    pub(super) generation: u32,
    /// What its binds showed when they were last made.
    #[serde(default)]
    pub(super) origin: Option<Origin>,
    /// Numbers of the branches that the union runs without, knowingly.
    #[serde(default)]
    pub(super) left_out: Vec<u32>,
    /// True where the staging directory was made here.
    #[serde(default)]
    pub(super) made_staging: bool,
    /// The group that can write at the root.
    #[serde(default)]
    pub(super) group: Option<u32>,
    /// Where it is published.
    #[serde(default)]
    pub(super) publishes: Vec<PublishRequest>,
    /// Its mounts are those of an earlier boot and have not all been made again.
    #[serde(default)]
    pub(super) restoring: bool,
    /// Unions replaced since it was first staged.
    #[serde(default)]
    pub(super) heals: u64,
}

impl Record {
    /// The record of a volume whose staging begins.
    pub(super) fn new(boot_id: &str, request: &StageRequest, plan: super::plan::StagePlan) -> Self {
        Self {
            version: if plan.remote { VERSION } else { VERSION_LOCAL },
            boot_id: boot_id.to_owned(),
            phase: Phase::Staging,
            request: request.clone(),
            kind: plan.kind,
            branches: plan
                .branches
                .into_iter()
                .map(|spec| StagedBranch {
                    spec,
                    backing: None,
                    device: None,
                    remote: None,
                    silent_since: None,
                })
                .collect(),
            options: plan.options,
            on_branch_loss: plan.on_branch_loss,
            branch_timeout_seconds: plan.branch_timeout.as_secs(),
            generation: 1,
            origin: None,
            left_out: Vec::new(),
            made_staging: false,
            group: plan.group,
            publishes: Vec::new(),
            restoring: false,
            heals: 0,
        }
    }

    /// The volume.
    pub(super) const fn volume(&self) -> &VolumeId {
        &self.request.volume
    }

    /// True where nothing may be written to its branches.
    pub(super) const fn reader_only(&self) -> bool {
        self.request.access_mode.reader_only()
    }

    /// `branchTimeout`.
    pub(super) const fn branch_timeout(&self) -> Duration {
        Duration::from_secs(self.branch_timeout_seconds)
    }

    /// The branches that the union runs with.
    pub(super) fn serving(&self) -> impl Iterator<Item = &StagedBranch> {
        self.branches.iter().filter(|b| !self.left_out.contains(&b.spec.index))
    }

    /// True where some of its branches lie on other nodes.
    pub(super) const fn has_remote(&self) -> bool {
        self.version != VERSION_LOCAL
    }

    /// The other nodes that its branches lie on.
    pub(super) fn owners(&self, here: &NodeName) -> BTreeSet<NodeName> {
        let owners = self.branches.iter().map(|branch| &branch.spec.node);
        owners.filter(|node| *node != here).cloned().collect()
    }

    /// What is to be joined, in the volume's directory.
    pub(super) fn union_spec(&self, directory: &Path) -> UnionSpec {
        UnionSpec {
            volume: self.volume().clone(),
            kind: self.kind,
            branches: self.serving().map(|b| branch_mount(directory, b.spec.index)).collect(),
            smallest: self.serving().map(|b| b.spec.usable).min().unwrap_or(Bytes::ZERO),
            mount_point: self.union_mount(directory),
            remote: self.has_remote(),
            read_only: self.reader_only()
                || (!self.left_out.is_empty() && self.on_branch_loss == OnBranchLoss::ReadOnly),
            options: self.options.clone(),
        }
    }

    /// Where its union is mounted, in the volume's directory.
    pub(super) fn union_mount(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{UNION_PREFIX}{}", self.generation))
    }
}

/// Mount points of unions are named by this and the generation.
pub(super) const UNION_PREFIX: &str = "union-";

/// Where branch number `index` is mounted, in the volume's directory.
pub(super) fn branch_mount(directory: &Path, index: u32) -> PathBuf {
    directory.join("branches").join(index.to_string())
}

/// The records of this node: `<state>/volumes/<volume>/record.json`.
#[derive(Clone, Debug)]
pub(super) struct Records {
    host: Host,
    directory: PathBuf,
}

impl Records {
    /// The records below the agent's state directory.
    pub(super) fn new(host: Host, state_dir: &Path) -> Self {
        Self { host, directory: state_dir.join("volumes") }
    }

    /// The directory that holds the volumes' directories.
    pub(super) fn root(&self) -> &Path {
        &self.directory
    }

    /// The volume's directory.
    pub(super) fn directory(&self, volume: &VolumeId) -> PathBuf {
        self.directory.join(volume)
    }

    /// The volume's record, if there is one.
    ///
    /// # Errors
    /// It cannot be read or is of a newer form.
    pub(super) fn load(&self, volume: &VolumeId) -> Result<Option<Record>, HostError> {
        let path = self.directory(volume).join(FILE);
        let Some(bytes) = self.host.read_file(&path, MAX_RECORD)? else { return Ok(None) };
        parse(&bytes, volume)
            .map(Some)
            .map_err(|reason| HostError::Unexpected { subject: path.display().to_string(), reason })
    }

    /// Writes the record, whole or not at all.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn save(&self, record: &Record) -> Result<(), HostError> {
        let directory = self.directory(record.volume());
        self.host.ensure_directory(&directory, 0o700)?;
        let bytes = serde_json::to_vec_pretty(record).map_err(|e| HostError::Unexpected {
            subject: directory.join(FILE).display().to_string(),
            reason: e.to_string(),
        })?;
        self.host.write_atomic(&directory.join(FILE), &bytes)
    }

    /// The volumes that have a directory here, with or without a record.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn volumes(&self) -> Result<Vec<VolumeId>, HostError> {
        let names = self.host.directory_names(&self.directory)?.unwrap_or_default();
        Ok(names.iter().filter_map(|n| n.to_str()?.parse().ok()).collect())
    }

    /// Removes the volume's directory, stopping at anything that is still mounted in it.
    ///
    /// # Errors
    /// EXDEV where something is mounted in it.
    pub(super) fn remove(&self, volume: &VolumeId) -> Result<(), HostError> {
        self.host.remove_tree(&self.directory, volume.as_str()).map(|_| ())
    }
}

fn parse(bytes: &[u8], volume: &VolumeId) -> Result<Record, String> {
    #[derive(Deserialize)]
    struct Form {
        version: u32,
    }
    let remedy = "unstage the volume, or end its workloads, unmount what is mounted below that directory \
                  and remove it; its files are in the branches and are not touched by that";
    let form: Form = serde_json::from_slice(bytes).map_err(|e| format!("{e}; {remedy}"))?;
    if form.version > VERSION {
        return Err(format!("it was written by a newer version (form {}); run that version", form.version));
    }
    let record: Record = serde_json::from_slice(bytes).map_err(|e| format!("{e}; {remedy}"))?;
    if record.volume() == volume {
        Ok(record)
    } else {
        Err(format!("it is of volume {}; {remedy}", record.volume()))
    }
}
