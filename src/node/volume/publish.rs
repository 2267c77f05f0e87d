//! NodePublishVolume and NodeUnpublishVolume.

use std::path::Path;

use super::error::VolumeError;
use super::paths::Place;
use super::record::{Phase, Record};
use super::slot::Slot;
use super::types::{Access, PublishRequest};
use super::view::{Found, View};
use super::{Core, flags};
use crate::domain::VolumeId;
use crate::domain::union::UnionKind;
use crate::domain::volume::AccessMode;
use crate::platform::entry::EntryKind;

/// More mounts than this on one target are not of our making.
const MAX_STACK: usize = 16;

impl Core {
    pub(super) fn publish(&self, slot: &Slot, request: &PublishRequest) -> Result<(), VolumeError> {
        let volume = &request.volume;
        let target = self.place(&request.target, false)?;
        let record =
            self.records.load(volume).map_err(|e| VolumeError::host(volume, "read its record", e))?;
        let mut record = match record {
            Some(r)
                if r.phase == Phase::Staged
                    && r.request.staging == request.staging
                    && r.boot_id == self.boot_id =>
            {
                r
            }
            _ => {
                return Err(VolumeError::NotStaged {
                    volume: volume.clone(),
                    staging: request.staging.clone(),
                });
            }
        };
        check(&record, request)?;
        // Looks at the kernel and repairs what is dead: what is bound below is alive.
        let view = self.repair(slot, &mut record)?;
        self.free_or_ours(&record, request, &target, &view)?;
        self.apply_publish_group(&mut record, request)?;
        let known = record.publishes.iter().position(|p| p.target == request.target);
        if known.is_none_or(|i| record.publishes[i] != *request) {
            if let Some(i) = known {
                record.publishes.remove(i);
            }
            record.publishes.push(request.clone());
            self.save(&record)?;
        }
        let directory = self.records.directory(volume);
        let Some(now) = view.origin(&record, &directory) else {
            return Err(VolumeError::NotStaged { volume: volume.clone(), staging: request.staging.clone() });
        };
        let bound = self.ensure_published(&record, request, &now, record.origin.as_ref(), view);
        if bound.is_err() && known.is_none() {
            record.publishes.retain(|p| p.target != request.target);
            if let Err(error) = self.save(&record) {
                tracing::warn!(volume.id = %volume, error = %error, "a failed publish stays on record");
            }
        }
        bound
    }

    /// Refuses a second target of a single workload's volume, and a target that is mounted otherwise or that holds files, which would be hidden and then removed.
    fn free_or_ours(
        &self,
        record: &Record,
        request: &PublishRequest,
        target: &Place,
        view: &View,
    ) -> Result<(), VolumeError> {
        let volume = record.volume();
        let now = view.origin(record, &self.records.directory(volume));
        if request.access_mode == AccessMode::SingleNodeSingleWriter {
            for other in record.publishes.iter().filter(|p| p.target != request.target) {
                let place = self.places.open(&other.target, false)?;
                if place.is_some_and(|place| view.at(&place.real).is_some()) {
                    return Err(VolumeError::Busy {
                        volume: volume.clone(),
                        reason: format!(
                            "it is published at {} and its access mode allows one workload at a time",
                            other.target.display()
                        ),
                    });
                }
            }
        }
        match view.find(&target.real, volume, now.as_ref(), record.origin.as_ref()) {
            Found::Foreign(entry) => Err(VolumeError::foreign(&target.real, entry)),
            Found::Stale(_) => Ok(()),
            Found::Ours(entry) => {
                let wanted = flags::published(record, request)?;
                match flags::difference(flags::of(entry), wanted) {
                    Some(reason) if record.kind != UnionKind::Block => {
                        Err(VolumeError::differs(record, &request.target, reason))
                    }
                    _ => Ok(()),
                }
            }
            Found::Nothing => {
                let failed = |e| VolumeError::host(volume, "look at the target", e);
                let occupied = match self.host.entry(&target.handle()).map_err(failed)? {
                    Some(entry) if entry.kind == EntryKind::Directory => !self
                        .host
                        .directory_names(&target.handle())
                        .map_err(failed)?
                        .is_some_and(|n| n.is_empty()),
                    Some(entry) if entry.kind == EntryKind::File => entry.length > 0,
                    _ => false,
                };
                if occupied {
                    return Err(VolumeError::Path {
                        path: request.target.clone(),
                        reason: "it is not empty: choose another path, or move away what is there".to_owned(),
                    });
                }
                Ok(())
            }
        }
    }

    /// The first group to come may write; another one later would take that from the first.
    fn apply_publish_group(&self, record: &mut Record, request: &PublishRequest) -> Result<(), VolumeError> {
        let Access::Mount { group: Some(group), .. } = request.access else { return Ok(()) };
        match record.group {
            Some(applied) if applied == group => Ok(()),
            Some(applied) => Err(VolumeError::differs(
                record,
                &request.target,
                format!(
                    "group {applied} can write at its root on this node and group {group} is asked for: give both \
                     workloads the same fsGroup"
                ),
            )),
            None => {
                let read_only = flags::published(record, request)?.read_only;
                if !read_only && record.kind != UnionKind::Block {
                    let anchor = self.anchor(record)?;
                    self.set_group(record, &anchor.real, group)?;
                    record.group = Some(group);
                    self.save(record)?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn unpublish(&self, volume: &VolumeId, target: &Path) -> Result<(), VolumeError> {
        let failed = |action| move |e| VolumeError::host(volume, action, e);
        let record = self.records.load(volume).map_err(failed("read its record"))?;
        let kind = record.as_ref().map(|r| r.kind);
        let forget = |mut record: Record| {
            let before = record.publishes.len();
            record.publishes.retain(|p| p.target != target);
            if record.publishes.len() == before { Ok(()) } else { self.save(&record) }
        };
        if let Some(place) = self.places.open(target, false)? {
            self.unbind_target(volume, record.as_ref(), &place)?;
            let handle = place.handle();
            let entry = self.host.entry(&handle).map_err(failed("look at the target"))?;
            match entry.map(|e| (e.kind, e.length)) {
                Some((EntryKind::Directory, _)) => {
                    self.host.remove_directory(&handle).map_err(failed("remove the target directory"))?;
                }
                Some((EntryKind::File, 0)) if kind.is_none_or(|k| k == UnionKind::Block) => {
                    self.host.remove_file(&handle).map_err(failed("remove the target file"))?;
                }
                Some(_) => {
                    return Err(VolumeError::Path {
                        path: target.to_owned(),
                        reason: "it is neither an empty directory nor an empty file: this was not made here"
                            .to_owned(),
                    });
                }
                None => {}
            }
        }
        record.map_or(Ok(()), forget)
    }

    fn unbind_target(
        &self,
        volume: &VolumeId,
        record: Option<&Record>,
        place: &Place,
    ) -> Result<(), VolumeError> {
        let directory = self.records.directory(volume);
        let before = record.and_then(|r| r.origin.as_ref());
        for _ in 0..MAX_STACK {
            let view = self
                .host
                .mounts()
                .map(View::new)
                .map_err(|e| VolumeError::host(volume, "read the kernel's mounts", e))?;
            let now = record.and_then(|r| view.origin(r, &directory));
            match view.find(&place.real, volume, now.as_ref(), before) {
                Found::Nothing => return Ok(()),
                Found::Ours(_) => self.unmount(volume, place, false)?,
                Found::Stale(_) => self.unmount(volume, place, true)?,
                Found::Foreign(entry) => return Err(VolumeError::foreign(&place.real, entry)),
            }
        }
        Err(VolumeError::Path {
            path: place.real.clone(),
            reason: "too many mounts lie there: unmount them by hand".to_owned(),
        })
    }
}

/// Refuses what the staged volume cannot give.
fn check(record: &Record, request: &PublishRequest) -> Result<(), VolumeError> {
    let volume = record.volume();
    let differ = |reason: &str| Err(VolumeError::differs(record, &record.request.staging, reason.to_owned()));
    match (&record.request.access, &request.access) {
        (Access::Mount { .. }, Access::Block) => return differ("it is staged with a filesystem"),
        (Access::Block, Access::Mount { .. }) => return differ("it is staged as a block device"),
        _ => {}
    }
    // Also tells an unknown flag.
    let attr = flags::published(record, request)?;
    if record.reader_only() && !request.access_mode.reader_only() {
        return differ("it is staged for reading only");
    }
    let writes = !request.read_only && !request.access_mode.reader_only() && !attr.read_only;
    if record.kind == UnionKind::Block && !writes && !record.reader_only() {
        return Err(VolumeError::Request {
            volume: volume.clone(),
            reason: "a block device is read-only by its access mode only: use SINGLE_NODE_READER_ONLY"
                .to_owned(),
        });
    }
    Ok(())
}

/// What one way of access has otherwise than another; the group aside.
pub(super) fn access_difference(staged: &Access, asked: &Access) -> Option<String> {
    match (staged, asked) {
        (Access::Mount { flags: was, .. }, Access::Mount { flags: is, .. }) => {
            match (flags::parse(was), flags::parse(is)) {
                (Ok(was), Ok(is)) => flags::difference(was, is),
                (_, Err(reason)) | (Err(reason), _) => Some(reason),
            }
        }
        (Access::Block, Access::Block) => None,
        (Access::Mount { .. }, Access::Block) => {
            Some("it has a filesystem and a block device is asked for".to_owned())
        }
        (Access::Block, Access::Mount { .. }) => {
            Some("it is a block device and a filesystem is asked for".to_owned())
        }
    }
}
