//! What is known of the unions of this node, on disk: `<state>/unions/<volume>.json`.
//!
//! Written before a process is started and again when it answers, so that an agent that starts anew finds every union
//! that an earlier one may have begun. A record tells what was meant to be; how it stands is asked of the kernel.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{UnionError, UnionSpec};
use crate::domain::VolumeId;
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};

/// Longer than any record: 64 branches with paths of `PATH_MAX` fit.
const RECORD_MAX: usize = 1 << 20;

/// Version of the record's layout.
const VERSION: u32 = 1;

/// How far the union was brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    /// It may have been started, and was never handed out.
    Starting,
    /// It answered and was handed out.
    Running,
}

/// One union.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    /// Version of this layout.
    pub version: u32,
    /// What it is of.
    pub spec: UnionSpec,
    /// How far it was brought.
    pub phase: Phase,
    /// The boot that it belongs to (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
    /// Its process; absent for overlayfs and before the start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Device of its mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
    /// Options that it was given, by their names in the program's dialect.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
    /// Program that runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Version of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mergerfs_version: Option<String>,
    /// Unions that this one replaced and that are still mounted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retired: Vec<Retired>,
}

/// A union that was replaced, until it is discarded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Retired {
    /// Where it was mounted.
    pub mount_point: PathBuf,
    /// Its process, which may hang.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
    /// Device of its mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<(u32, u32)>,
}

impl Record {
    /// The record of a union that is about to be started.
    pub(super) fn starting(spec: &UnionSpec, boot_id: String) -> Self {
        Self {
            version: VERSION,
            spec: spec.clone(),
            phase: Phase::Starting,
            boot_id,
            process: None,
            device: None,
            options: BTreeMap::new(),
            program: None,
            mergerfs_version: None,
            retired: Vec::new(),
        }
    }
}

/// The records of a state directory.
#[derive(Clone, Debug)]
pub(super) struct Records {
    host: Host,
    directory: PathBuf,
}

impl Records {
    pub(super) fn new(host: Host, state_dir: &Path) -> Self {
        Self { host, directory: state_dir.join("unions") }
    }

    fn file(&self, volume: &VolumeId) -> PathBuf {
        self.directory.join(format!("{volume}.json"))
    }

    /// The volume's record. One that cannot be understood is an error: it may stand for a running union.
    pub(super) fn load(&self, volume: &VolumeId) -> Result<Option<Record>, UnionError> {
        let file = self.file(volume);
        let Some(content) = self.host.read_file(&file, RECORD_MAX).map_err(reading)? else { return Ok(None) };
        let record: Record = serde_json::from_slice(&content).map_err(|error| {
            reading(HostError::Unexpected { subject: file.display().to_string(), reason: error.to_string() })
        })?;
        if record.version != VERSION {
            return Err(reading(HostError::Unexpected {
                subject: file.display().to_string(),
                reason: format!("its layout is version {}, not {VERSION}", record.version),
            }));
        }
        Ok(Some(record))
    }

    pub(super) fn save(&self, record: &Record) -> Result<(), UnionError> {
        let content = serde_json::to_vec_pretty(record).map_err(|error| {
            writing(HostError::Unexpected {
                subject: record.spec.volume.to_string(),
                reason: error.to_string(),
            })
        })?;
        self.host.ensure_directory(&self.directory, 0o700).map_err(writing)?;
        self.host.write_atomic(&self.file(&record.spec.volume), &content).map_err(writing)
    }

    pub(super) fn remove(&self, volume: &VolumeId) -> Result<(), UnionError> {
        match self.host.remove_file(&self.file(volume)) {
            Ok(_) => Ok(()),
            Err(source) => Err(UnionError::Host { action: "remove the union's record", source }),
        }
    }

    /// The volumes that have a record, in the order of their names.
    pub(super) fn volumes(&self) -> Result<Vec<VolumeId>, UnionError> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => {
                return Err(reading(HostError::Syscall {
                    call: "open",
                    subject: self.directory.display().to_string(),
                    source,
                }));
            }
        };
        let mut volumes: Vec<VolumeId> = entries
            .filter_map(Result::ok)
            .filter_map(|e| e.file_name().to_str()?.strip_suffix(".json")?.parse().ok())
            .collect();
        volumes.sort();
        Ok(volumes)
    }

    /// This boot, as records name it.
    pub(super) fn boot_id(&self) -> Result<String, UnionError> {
        let file = Path::new("/proc/sys/kernel/random/boot_id");
        let content = self.host.read_file(file, 128).map_err(reading)?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&content).trim().to_owned())
    }
}

fn reading(source: HostError) -> UnionError {
    UnionError::Host { action: "read the union's record", source }
}

fn writing(source: HostError) -> UnionError {
    UnionError::Host { action: "write the union's record", source }
}
