//! What is told about volumes: space, health, everything for the status API. Never waits longer than a few seconds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::bring_up::anchor_path;
use super::diagnose::{BranchSeen, partial_reason};
use super::error::VolumeError;
use super::parallel::parallel;
use super::record::{Phase, Record, StagedBranch, branch_mount};
use super::slot::Slot;
use super::types::{AttachedBranch, Health, LinkState, RemoteBranch, Usage, VolumeSnapshot, VolumeStats};
use super::view::{Found, View};
use super::{ANSWER_TIMEOUT, Core, DATA};
use crate::domain::VolumeId;
use crate::domain::union::UnionKind;
use crate::node::union::UnionState;
use crate::platform::space::Space;

/// Volumes asked at the same time.
const PARALLEL_VOLUMES: usize = 16;

/// Name of the file whose writing shows that the state directory can be written.
const WRITE_TEST: &str = ".writable";

impl Core {
    pub(super) fn stats(&self, volume: &VolumeId, path: &Path) -> Result<VolumeStats, VolumeError> {
        let unknown = || VolumeError::Unknown { volume: volume.clone() };
        let record = self
            .records
            .load(volume)
            .map_err(|e| VolumeError::host(volume, "read its record", e))?
            .filter(|r| r.boot_id == self.boot_id)
            .ok_or_else(unknown)?;
        // A path that no volume could be at is one where this volume is not.
        let place = self.places.open(path, false).ok().flatten().ok_or_else(unknown)?;
        let view = self.view(&record)?;
        let now = view.origin(&record, &self.records.directory(volume));
        // The staging path of a block volume holds the device.
        let real = if record.kind == UnionKind::Block && path == record.request.staging {
            self.anchor(&record)?.real
        } else {
            place.real.clone()
        };
        match view.find(&real, volume, now.as_ref(), record.origin.as_ref()) {
            Found::Ours(_) | Found::Stale(_) => {}
            Found::Nothing | Found::Foreign(_) => return Err(unknown()),
        }
        let slot = self.slots.of(volume);
        let (health, answering) = self.health(&slot, &record, &view);
        if record.kind == UnionKind::Block {
            let total = record.branches.iter().map(|b| b.spec.size.get()).sum();
            return Ok(VolumeStats { bytes: Usage { total, used: 0, available: 0 }, inodes: None, health });
        }
        // A union asks all its branches: with one that does not answer, the others are asked one by one.
        let space = if answering {
            self.host.space(&real, ANSWER_TIMEOUT).ok()
        } else {
            self.space_of_branches(&record, &view)
        };
        let Some(space) = space else {
            return Ok(VolumeStats { bytes: Usage::default(), inodes: None, health: unanswered(health) });
        };
        Ok(VolumeStats { bytes: bytes(&space), inodes: inodes(&space), health })
    }

    /// How the volume does, and whether all of it answers.
    fn health(&self, slot: &Slot, record: &Record, view: &View) -> (Health, bool) {
        let mut faults = Vec::new();
        let mut answering = true;
        let patience = record.branch_timeout().as_secs();
        for (index, seen) in self.look_at_branches(slot, record, view) {
            let id = record.volume().branch(index);
            match seen {
                BranchSeen::Alive => {}
                BranchSeen::ReadOnly => faults.push(format!("branch {id} became read-only: check its disk")),
                BranchSeen::Failed(reason) => {
                    answering = false;
                    faults.push(format!("branch {id} failed: {reason}"));
                }
                BranchSeen::Away(node, time) => {
                    answering = false;
                    faults.push(format!(
                        "node {node}, which holds branch {id}, has not answered for {} s: the branch's files wait, up to {patience} s",
                        time.as_secs()
                    ));
                }
                BranchSeen::Silent(time) => {
                    answering = false;
                    faults.push(format!(
                        "branch {id} has not answered for {} s: its files wait, up to {patience} s",
                        time.as_secs()
                    ));
                }
            }
        }
        if matches!(record.kind, UnionKind::Overlay | UnionKind::Mergerfs) {
            match self.unions.observe_in(record.volume(), view.table()) {
                Ok(UnionState::Running { .. }) => {}
                Ok(UnionState::Hung { process, .. }) => {
                    answering = false;
                    faults.push(format!("its mergerfs (pid {}) does not answer", process.pid));
                }
                Ok(UnionState::Dead { .. } | UnionState::Absent) => {
                    answering = false;
                    faults.push("its union is down".to_owned());
                }
                Err(error) => faults.push(error.to_string()),
            }
        }
        if !record.left_out.is_empty() {
            faults.push(partial_reason(record));
        }
        if let Some(trouble) = slot.hints().trouble.clone()
            && !faults.contains(&trouble)
        {
            faults.push(trouble);
        }
        let health = if faults.is_empty() {
            Health { abnormal: false, message: "all branches and the union answer".to_owned() }
        } else {
            Health { abnormal: true, message: faults.join("; ") }
        };
        (health, answering)
    }

    /// The sum over the branches that answer, each filesystem once.
    fn space_of_branches(&self, record: &Record, view: &View) -> Option<Space> {
        let directory = self.records.directory(record.volume());
        let mut devices = Vec::new();
        let mut sum: Option<Space> = None;
        for branch in record.serving() {
            let point = branch_mount(&directory, branch.spec.index);
            let Some(entry) = view.at(&point) else { continue };
            if devices.contains(&entry.device) {
                continue;
            }
            devices.push(entry.device);
            let Ok(space) = self.host.space(&point.join(DATA), ANSWER_TIMEOUT) else { continue };
            sum = Some(match sum {
                None => space,
                Some(s) => Space {
                    total: s.total.saturating_add(space.total),
                    available: s.available.saturating_add(space.available),
                    free: s.free.saturating_add(space.free),
                    inodes: s.inodes.saturating_add(space.inodes),
                    inodes_free: s.inodes_free.saturating_add(space.inodes_free),
                    read_only: s.read_only || space.read_only,
                },
            });
        }
        sum
    }

    pub(super) fn snapshot(&self) -> Vec<VolumeSnapshot> {
        let Ok(volumes) = self.records.volumes() else { return Vec::new() };
        let Ok(view) = self.host.mounts().map(View::new) else { return Vec::new() };
        parallel(&volumes, PARALLEL_VOLUMES, |volume| self.snapshot_of(volume, &view))
            .into_iter()
            .flatten()
            .collect()
    }

    fn snapshot_of(&self, volume: &VolumeId, view: &View) -> Option<VolumeSnapshot> {
        // One that cannot be read is told by the log at start and by each call for it.
        let record = self.records.load(volume).ok()??;
        let directory = self.records.directory(volume);
        let slot = self.slots.of(volume);
        let now = view.origin(&record, &directory);
        let real = |path: &Path| self.places.open(path, false).ok().flatten().map(|p| p.real);
        let mounted = |path: &Path| {
            real(path).filter(|real| {
                matches!(
                    view.find(real, volume, now.as_ref(), record.origin.as_ref()),
                    Found::Ours(_) | Found::Stale(_)
                )
            })
        };
        let staged = mounted(&anchor_path(&record));
        let targets: Vec<PathBuf> = record
            .publishes
            .iter()
            .filter(|p| mounted(&p.target).is_some())
            .map(|p| p.target.clone())
            .collect();
        let (mut health, answering) = self.health(&slot, &record, view);
        if record.phase != Phase::Staged {
            health = Health {
                abnormal: true,
                message: match record.phase {
                    Phase::Unstaging => "unstaging is not finished".to_owned(),
                    Phase::Staging | Phase::Staged => "staging is not finished".to_owned(),
                },
            };
        }
        let union = matches!(record.kind, UnionKind::Overlay | UnionKind::Mergerfs);
        let (pid, options) = match self.unions.observe_in(volume, view.table()) {
            Ok(UnionState::Running { process, .. }) if union => {
                let options = if process.is_some() {
                    self.unions.options(volume).unwrap_or_default()
                } else {
                    BTreeMap::new()
                };
                (process.map(|p| p.pid), options)
            }
            Ok(UnionState::Hung { process, .. }) => (Some(process.pid), BTreeMap::new()),
            _ => (None, BTreeMap::new()),
        };
        let space = match (&staged, answering) {
            (Some(path), true) if record.kind != UnionKind::Block => {
                self.host.space(path, ANSWER_TIMEOUT).ok()
            }
            _ => None,
        };
        let branches = record
            .branches
            .iter()
            .map(|branch| {
                let mount = branch_mount(&directory, branch.spec.index);
                let remote = self.remote_of(&slot, branch);
                let answers = remote.as_ref().is_none_or(|r| r.link == LinkState::Live);
                let space = match (record.kind, view.at(&mount)) {
                    (_, Some(_)) if record.kind != UnionKind::Block && answers => {
                        self.host.space(&mount.join(DATA), ANSWER_TIMEOUT).ok()
                    }
                    _ => None,
                };
                AttachedBranch {
                    id: branch.spec.id.clone(),
                    mount,
                    backing: branch.backing.clone().unwrap_or_default(),
                    device: branch.device.clone(),
                    space: space.as_ref().map(bytes),
                    size: branch.spec.size,
                    remote,
                }
            })
            .collect();
        Some(VolumeSnapshot {
            volume: volume.clone(),
            union: record.kind,
            pid,
            options,
            staging: staged.is_some().then(|| record.request.staging.clone()),
            targets,
            space: space.as_ref().map(bytes),
            branches,
            health,
            heals: record.heals,
        })
    }

    /// How a branch of another node is reached, as it was seen last.
    fn remote_of(&self, slot: &Slot, branch: &StagedBranch) -> Option<RemoteBranch> {
        let spec = &branch.spec;
        if spec.node == self.node {
            return None;
        }
        let seen = slot.hints().links.get(&spec.index).copied();
        let ago = |since| self.host.running_for().saturating_sub(since);
        Some(RemoteBranch {
            node: spec.node.clone(),
            transport: branch.remote.as_ref().map(|r| r.transport),
            generation: branch.remote.as_ref().map(|r| r.generation.0),
            link: seen.map_or(LinkState::Unknown, |(link, _)| link.state()),
            // By seconds: what is told twice is the same.
            since: seen.and_then(|(_, since)| {
                let at = Timestamp::now().checked_sub(ago(since)).ok()?;
                at.round(jiff::Unit::Second).ok()
            }),
        })
    }

    pub(super) fn ready(&self) -> Result<(), String> {
        self.host.mounts().map_err(|e| e.to_string())?;
        self.host
            .write_atomic(&self.state_dir.join(WRITE_TEST), b"")
            .map_err(|e| format!("the state directory cannot be written: {e}"))
    }
}

fn bytes(space: &Space) -> Usage {
    Usage { total: space.total, used: space.total.saturating_sub(space.free), available: space.available }
}

fn inodes(space: &Space) -> Option<Usage> {
    (space.inodes > 0).then(|| Usage {
        total: space.inodes,
        used: space.inodes.saturating_sub(space.inodes_free),
        available: space.inodes_free,
    })
}

fn unanswered(health: Health) -> Health {
    if health.abnormal {
        health
    } else {
        Health {
            abnormal: true,
            message: "it does not tell its space: see whether its disks answer".to_owned(),
        }
    }
}
