//! Making true what a record says: branches, union, binds. Each step finds what is there already and does the rest.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::attach::LOST;
use super::error::VolumeError;
use super::paths::Place;
use super::record::{Origin, Phase, Record, branch_mount};
use super::slot::Slot;
use super::types::PublishRequest;
use super::view::{Found, View};
use super::{Core, DATA, flags};
use crate::domain::VolumeId;
use crate::domain::union::UnionKind;
use crate::node::union::UnionState;
use crate::platform::Host;
use crate::platform::file::fd_path;
use crate::platform::mount::{MountAttr, MountEntry};
use crate::platform::namespace::SwapReport;

/// A stack of more dead mounts than this at one place is not of our making.
const MAX_STACK: usize = 16;

/// Read, write and search for the group, and new files belong to the group of the directory.
const GROUP_BITS: u32 = 0o2070;

/// How long a branch may take for that: it is little, and its disk was asked just before.
const GROUP_BOUND: Duration = Duration::from_secs(30);

/// What bringing a volume up took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Took {
    /// Until every branch was attached.
    pub(super) branches: Duration,
    /// From then until the union ran.
    pub(super) union: Duration,
}

/// How long the way to what is bound may take, where it leads over a branch of another node.
const BIND_BOUND: Duration = Duration::from_secs(10);

impl Core {
    /// Brings the volume to what its record says, and puts a new union under workloads where the old one is gone.
    pub(super) fn bring_up(&self, slot: &Slot, record: &mut Record) -> Result<Took, VolumeError> {
        let begun = Instant::now();
        let failures = self.attach(slot, record, false);
        if !failures.is_empty() {
            return Err(VolumeError::incomplete(record.volume(), failures));
        }
        let branches = begun.elapsed();
        self.apply_group(record)?;
        self.ensure_union(slot, record)?;
        let union = begun.elapsed() - branches;
        let before = record.origin.clone();
        let (now, view) = self.settle_origin(record)?;
        self.ensure_staged(record, &now, before.as_ref(), view)?;
        if !record.publishes.is_empty() {
            let view = self.view(record)?;
            for publish in record.publishes.clone() {
                self.mend_published(record, &publish, &now, before.as_ref(), &view)?;
            }
        }
        if record.restoring {
            record.restoring = false;
            self.save(record)?;
        }
        if matches!(record.kind, UnionKind::Overlay | UnionKind::Mergerfs) {
            self.unions
                .discard_replaced(record.volume())
                .map_err(|e| VolumeError::union(record.volume(), e))?;
        }
        Ok(Took { branches, union })
    }

    /// Lets the group write at the root of the volume: of each branch, so that the union shows the same whichever branch
    /// it asks. Never below the root: what is there belongs to whoever made it.
    fn apply_group(&self, record: &Record) -> Result<(), VolumeError> {
        let Some(group) = record.group else { return Ok(()) };
        // What a workload did to the root since then is its own affair.
        if record.phase != Phase::Staging || record.reader_only() || record.kind == UnionKind::Block {
            return Ok(());
        }
        let directory = self.records.directory(record.volume());
        for branch in record.serving() {
            let data = branch_mount(&directory, branch.spec.index).join(DATA);
            self.set_group(record, &data, group)?;
        }
        Ok(())
    }

    /// Lets the group write in one directory.
    pub(super) fn set_group(&self, record: &Record, data: &Path, group: u32) -> Result<(), VolumeError> {
        let failed = |e| VolumeError::host(record.volume(), "give the volume's root to its group", e);
        let path = data.to_owned();
        let set = move |host: &Host| {
            let mode = host.entry(&path)?.map_or(0o755, |e| e.mode);
            host.set_owner_mode(&path, None, Some(group), Some(mode | GROUP_BITS))
        };
        self.host.within("changing", data, GROUP_BOUND, set).map_err(failed)
    }

    /// Makes the union run; a new one beside an old one that is gone.
    fn ensure_union(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        if !matches!(record.kind, UnionKind::Overlay | UnionKind::Mergerfs) {
            return Ok(());
        }
        let volume = record.volume().clone();
        let directory = self.records.directory(&volume);
        let failed = |e| VolumeError::union(&volume, e);
        let outdated = record.kind == UnionKind::Overlay && !self.overlay_is_current(record)?;
        let state = match self.unions.observe(&volume).map_err(failed)? {
            running @ UnionState::Running { .. } if !outdated => running,
            UnionState::Running { .. } => {
                // Its number was raised when a layer of it was lost.
                let spec = record.union_spec(&directory);
                self.make_mount_point(record, &spec.mount_point)?;
                self.unions.replace(&spec).map_err(failed)?
            }
            UnionState::Hung { process, .. } => {
                return Err(VolumeError::Union {
                    volume,
                    reason: format!(
                        "its mergerfs (pid {}) does not answer; it is replaced when that lasts, try again",
                        process.pid
                    ),
                });
            }
            UnionState::Absent if record.origin.is_none() => {
                let spec = record.union_spec(&directory);
                self.make_mount_point(record, &spec.mount_point)?;
                self.unions.ensure(&spec).map_err(failed)?
            }
            UnionState::Absent | UnionState::Dead { .. } => {
                record.generation += 1;
                self.save(record)?;
                let spec = record.union_spec(&directory);
                self.make_mount_point(record, &spec.mount_point)?;
                self.unions.replace(&spec).map_err(failed)?
            }
        };
        if let UnionState::Running { process, .. } = state {
            if record.kind == UnionKind::Mergerfs {
                self.note_branches(slot, record);
            }
            slot.hints().process = process;
            self.changed.notify_one();
        }
        Ok(())
    }

    /// What the binds of the volume must show from now on. Where they show a union that is gone, it is exchanged under
    /// them, in this and all other mount namespaces. Also the mounts as they are then.
    fn settle_origin(&self, record: &mut Record) -> Result<(Origin, View), VolumeError> {
        let directory = self.records.directory(record.volume());
        let mut view = self.view(record)?;
        let Some(now) = view.origin(record, &directory) else {
            return Err(VolumeError::Incomplete {
                volume: record.volume().clone(),
                reason: "what it is made of was unmounted meanwhile; try again".to_owned(),
            });
        };
        let before = record.origin.replace(now.clone());
        let living = living(record, &directory);
        let mut swapped = None;
        match (record.kind, before.as_ref()) {
            // Numbers of overlays are used again: only the one that is still mounted at its place is known to be the old one.
            (UnionKind::Overlay, Some(before)) if before.device != now.device => {
                let is_old = |e: &&MountEntry| {
                    e.device == before.device
                        && e.fs_type == "overlay"
                        && e.mount_point.starts_with(&directory)
                };
                if let Some(old) = view.table().entries.iter().find(is_old) {
                    let swap = self.host.swap_mounts_of(old, &living).map_err(|e| {
                        VolumeError::host(record.volume(), "put the new overlay under running workloads", e)
                    })?;
                    swapped = Some(swap);
                }
            }
            (UnionKind::Block, Some(_)) => swapped = self.swap_device(record, &now)?,
            _ => {}
        }
        if let Some(before) = &before
            && before.device != now.device
            && record.kind == UnionKind::Mergerfs
        {
            if !record.left_out.is_empty() && !record.reader_only() {
                // Its filesystem may be read-only for as long as it is not complete; the mounts of the workloads, which
                // outlive it, must not become so.
                self.host
                    .lift_read_only(&living)
                    .map_err(|e| VolumeError::host(record.volume(), "prepare the new union", e))?;
            }
            let swap = self.host.swap_mounts(before.device, &living).map_err(|e| {
                VolumeError::host(record.volume(), "put the new union under running workloads", e)
            })?;
            swapped = Some(swap);
        }
        let lost = directory.join(LOST);
        let kept = view.table().entries.iter().filter(|e| e.mount_point == lost);
        for dead in kept.filter(|e| e.device != now.device).cloned().collect::<Vec<_>>() {
            let swap = self.host.swap_mounts_of(&dead, &living).map_err(|e| {
                VolumeError::host(record.volume(), "put the branch under running workloads again", e)
            })?;
            swapped = Some(swap);
        }
        if let Some(swap) = swapped {
            self.drop_lost(record.volume())?;
            view = self.view(record)?;
            record.heals += 1;
            tracing::info!(
                volume.id = %record.volume(),
                union.generation = record.generation,
                swap.namespaces = swap.namespaces,
                swap.mounts = swap.swapped,
                swap.failed = swap.failed,
                "what workloads have of the volume was replaced"
            );
        }
        if before.as_ref() != Some(&now) {
            self.save(record)?;
        }
        Ok((now, view))
    }

    /// Puts the node of the device that the volume has now where the node of one that is gone is still mounted. What has the old
    /// one open keeps it and gets errors; whoever opens it again has the new one.
    fn swap_device(&self, record: &Record, now: &Origin) -> Result<Option<SwapReport>, VolumeError> {
        let failed = |e| VolumeError::host(record.volume(), "put the new device under running workloads", e);
        let Some(device) = record.branches.first().and_then(|b| b.device.as_deref()) else { return Ok(None) };
        let mut swapped: Option<SwapReport> = None;
        let targets = record.publishes.iter().map(|p| p.target.clone());
        for path in std::iter::once(anchor_path(record)).chain(targets) {
            let Some(place) = self.places.open(&path, false)? else { continue };
            let gone = |entry: &&MountEntry| entry.device == now.device && entry.root != now.root;
            // Anew each time: one exchange reaches all mounts of a node.
            if self.view(record)?.at(&place.real).filter(gone).is_none() {
                continue;
            }
            let swap = self.host.swap_device_nodes(&place.real, device).map_err(failed)?;
            let sum = swapped.get_or_insert_default();
            sum.namespaces = sum.namespaces.max(swap.namespaces);
            sum.swapped += swap.swapped;
            sum.failed += swap.failed;
        }
        Ok(swapped)
    }

    /// Whether the overlay of the record's number is mounted: one of an earlier number has a layer that was lost.
    pub(super) fn overlay_is_current(&self, record: &Record) -> Result<bool, VolumeError> {
        let directory = self.records.directory(record.volume());
        Ok(self.view(record)?.origin(record, &directory).is_some())
    }

    /// Binds the volume at its staging path.
    fn ensure_staged(
        &self,
        record: &mut Record,
        now: &Origin,
        before: Option<&Origin>,
        view: View,
    ) -> Result<(), VolumeError> {
        let directory = self.records.directory(record.volume());
        let staging = self.place(&record.request.staging, true)?;
        if view.at(&staging.real).is_none() {
            if !record.made_staging && self.missing(record, &staging)? {
                record.made_staging = true;
                self.save(record)?;
            }
            if record.kind == UnionKind::Block {
                // The device is bound at a file in the staging directory.
                staging.directory()?;
            }
        }
        let anchor = self.anchor(record)?;
        let (source, attr) = match record.kind {
            UnionKind::Overlay | UnionKind::Mergerfs => {
                (record.union_mount(&directory).join(DATA), flags::staged(record)?)
            }
            UnionKind::Bind => {
                let index = record.branches.first().map_or(0, |b| b.spec.index);
                (branch_mount(&directory, index).join(DATA), flags::staged(record)?)
            }
            UnionKind::Block => {
                let device = record.branches.first().and_then(|b| b.device.clone());
                (device.unwrap_or_default(), MountAttr::default())
            }
        };
        self.bind(record, &source, &anchor, attr, (now, before), view)
    }

    /// Binds the staged volume at a target where a dead mount of it lies. A target that someone unmounted is put back only
    /// after a reboot: else whoever wants it publishes again.
    fn mend_published(
        &self,
        record: &Record,
        publish: &PublishRequest,
        now: &Origin,
        before: Option<&Origin>,
        view: &View,
    ) -> Result<(), VolumeError> {
        let Some(target) = self.places.open(&publish.target, false)? else { return Ok(()) };
        let stale = matches!(view.find(&target.real, record.volume(), Some(now), before), Found::Stale(_));
        if stale || record.restoring {
            self.ensure_published(record, publish, now, before, self.view(record)?)?;
        }
        Ok(())
    }

    /// Binds the staged volume at a target.
    pub(super) fn ensure_published(
        &self,
        record: &Record,
        publish: &PublishRequest,
        now: &Origin,
        before: Option<&Origin>,
        view: View,
    ) -> Result<(), VolumeError> {
        let target = self.place(&publish.target, false)?;
        let attr = flags::published(record, publish)?;
        let source = self.anchor(record)?.real;
        self.bind(record, &source, &target, attr, (now, before), view)
    }

    /// Binds `source` at the place, once and with these attributes; dead mounts of the volume there are removed first.
    fn bind(
        &self,
        record: &Record,
        source: &Path,
        place: &Place,
        attr: MountAttr,
        (now, before): (&Origin, Option<&Origin>),
        mut view: View,
    ) -> Result<(), VolumeError> {
        let volume = record.volume();
        for _ in 0..MAX_STACK {
            match view.find(&place.real, volume, Some(now), before) {
                Found::Nothing => {
                    let made = self.missing(record, place)?;
                    let target: OwnedFd =
                        if record.kind == UnionKind::Block { place.file()? } else { place.directory()? };
                    let bound = self
                        .host
                        .bind_within(BIND_BOUND, source, &fd_path(&target), attr)
                        .map_err(|e| VolumeError::host(volume, "bind the volume", e));
                    if bound.is_err()
                        && made
                        && let Err(error) = self.remove_place(volume, record.kind, place)
                    {
                        tracing::warn!(volume.id = %volume, error = %error, "a mount point that was made stays");
                    }
                    return bound;
                }
                Found::Ours(entry) => {
                    return match flags::difference(flags::of(entry), attr) {
                        Some(reason) if record.kind != UnionKind::Block => {
                            Err(VolumeError::differs(record, &place.real, reason))
                        }
                        _ => Ok(()),
                    };
                }
                Found::Stale(_) => {
                    // It answers nobody any more, so there is nothing to be flushed.
                    self.unmount(volume, place, true)?;
                    view = self.view(record)?;
                }
                Found::Foreign(entry) => return Err(VolumeError::foreign(&place.real, entry)),
            }
        }
        Err(VolumeError::Path {
            path: place.real.clone(),
            reason: "too many dead mounts lie there: unmount them by hand".to_owned(),
        })
    }

    /// True where nothing is at the place. For a place that nothing is mounted at.
    fn missing(&self, record: &Record, place: &Place) -> Result<bool, VolumeError> {
        self.host
            .entry(&place.handle())
            .map(|entry| entry.is_none())
            .map_err(|e| VolumeError::host(record.volume(), "look at the target", e))
    }

    /// Removes an empty directory or file of ours. A directory that others put something into stays.
    pub(super) fn remove_place(
        &self,
        volume: &VolumeId,
        kind: UnionKind,
        place: &Place,
    ) -> Result<(), VolumeError> {
        let handle = place.handle();
        let removed = if kind == UnionKind::Block {
            self.host.remove_file(&handle)
        } else {
            self.host.remove_directory(&handle)
        };
        match removed {
            Err(error) if error.is_not_empty() => Ok(()),
            removed => {
                removed.map(|_| ()).map_err(|e| VolumeError::host(volume, "remove its mount point", e))
            }
        }
    }

    fn make_mount_point(&self, record: &Record, path: &Path) -> Result<(), VolumeError> {
        self.host
            .ensure_directory(path, 0o700)
            .map(|_| ())
            .map_err(|e| VolumeError::host(record.volume(), "make the union's mount point", e))
    }

    /// Where the staged volume is mounted.
    pub(super) fn anchor(&self, record: &Record) -> Result<Place, VolumeError> {
        self.place(&anchor_path(record), false)
    }

    /// A path of a caller, checked.
    pub(super) fn place(&self, path: &Path, create: bool) -> Result<Place, VolumeError> {
        self.places.open(path, create)?.ok_or_else(|| VolumeError::Path {
            path: path.to_owned(),
            reason: "its parent directory does not exist: make it first".to_owned(),
        })
    }

    /// The mounts of this moment.
    pub(super) fn view(&self, record: &Record) -> Result<View, VolumeError> {
        self.host
            .mounts()
            .map(View::new)
            .map_err(|e| VolumeError::host(record.volume(), "read the kernel's mounts", e))
    }

    /// Writes the record.
    pub(super) fn save(&self, record: &Record) -> Result<(), VolumeError> {
        self.records.save(record).map_err(|e| VolumeError::host(record.volume(), "write its record", e))
    }
}

/// The mount that workloads' mounts of the volume are made of.
fn living(record: &Record, directory: &Path) -> PathBuf {
    match record.kind {
        UnionKind::Mergerfs => record.union_mount(directory),
        // It is mounted on the `data` directory itself.
        UnionKind::Overlay => record.union_mount(directory).join(DATA),
        UnionKind::Bind | UnionKind::Block => {
            branch_mount(directory, record.branches.first().map_or(0, |b| b.spec.index))
        }
    }
}

/// Where the staged volume is mounted, as given: a block device at a file in the staging directory.
pub(super) fn anchor_path(record: &Record) -> PathBuf {
    match record.kind {
        UnionKind::Block => record.request.staging.join("device"),
        UnionKind::Bind | UnionKind::Overlay | UnionKind::Mergerfs => record.request.staging.clone(),
    }
}
