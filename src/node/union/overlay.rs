//! Unions that are only read: overlayfs over read-only layers.
//!
//! The overlay joins the branches' `data` directories and is mounted at `<mount point>/data`, on a plain directory, so
//! that a volume finds its files below `data` whatever serves it. It has no process and cannot die; a layer must not
//! change while it is mounted, so it serves only volumes that nobody writes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::launch::{UNMOUNT_BOUND, host, remove_mount_point};
use super::{UnionError, UnionSpec, UnionState};
use crate::platform::Host;
use crate::platform::mount::{MountAttr, MountEntry, MountTable};

/// Most layers that are asked for; the kernel takes 500.
const LAYERS_MAX: usize = 500;

/// How long it may take to find the layers, some of which may lie on other nodes.
const MOUNT_BOUND: Duration = Duration::from_secs(30);

fn data(mount_point: &Path) -> PathBuf {
    mount_point.join("data")
}

/// The overlay mounted for a union at `mount_point`.
pub(super) fn mounted(host_: &Host, mount_point: &Path) -> Result<Option<MountEntry>, UnionError> {
    let table = host_.mounts().map_err(host("read the mount table"))?;
    Ok(mounted_in(&table, mount_point).cloned())
}

fn mounted_in<'a>(mounts: &'a MountTable, mount_point: &Path) -> Option<&'a MountEntry> {
    mounts.at(&data(mount_point)).filter(|e| e.fs_type == "overlay")
}

/// Mounts it.
pub(super) fn mount(host_: &Host, spec: &UnionSpec) -> Result<(u32, u32), UnionError> {
    let request =
        |reason: &str| UnionError::Request { volume: spec.volume.clone(), reason: reason.to_owned() };
    if !spec.read_only {
        return Err(request("only a read-only volume can be merged by overlayfs"));
    }
    if spec.branches.len() < 2 || spec.branches.len() > LAYERS_MAX {
        return Err(request("overlayfs merges 2 to 500 branches"));
    }
    let target = data(&spec.mount_point);
    host_.ensure_directory(&target, 0o755).map_err(host("make the union's mount point"))?;
    host_.set_immutable(&target, true).map_err(host("protect the union's mount point"))?;
    let layers: Vec<PathBuf> = spec.branches.iter().map(|b| b.join("data")).collect();
    let attr = MountAttr { read_only: true, nosuid: true, nodev: true, ..MountAttr::default() };
    let outcome =
        host_.mount_overlay_within(MOUNT_BOUND, &layers, &target, attr).map_err(host("mount overlayfs"));
    let device = outcome.and_then(|()| {
        mounted(host_, &spec.mount_point)?
            .map(|e| e.device)
            .ok_or_else(|| request("overlayfs mounted, but is not in the mount table"))
    });
    if device.is_err()
        && let Err(error) = unmount(host_, &spec.mount_point, true)
    {
        tracing::warn!(volume.id = %spec.volume, %error, "an overlay that failed was not cleaned up whole");
    }
    device
}

/// How it stands.
pub(super) fn observe(mounts: &MountTable, mount_point: &Path) -> UnionState {
    match mounted_in(mounts, mount_point) {
        Some(entry) => UnionState::Running { process: None, device: entry.device },
        None => UnionState::Absent,
    }
}

/// Unmounts it and removes its directories.
pub(super) fn unmount(host_: &Host, mount_point: &Path, force: bool) -> Result<(), UnionError> {
    while mounted(host_, mount_point)?.is_some() {
        let unmounted = host_.unmount_within(UNMOUNT_BOUND, &data(mount_point), force);
        unmounted.map_err(host("unmount overlayfs"))?;
    }
    remove_mount_point(host_, &data(mount_point))?;
    host_.remove_directory(mount_point).map_err(host("remove the union's mount point"))?;
    Ok(())
}
