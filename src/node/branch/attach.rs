//! Attaching and detaching branches.
//!
//! An image is attached by a loop device that goes with its mount; a directory is bound. Either way the mount point shows
//! `data/` and what lies beside it, and workloads are given `data/` only.

use std::path::Path;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::record::{self, BranchRecord};
use super::{Attached, BranchError, Branches, Result, branch_error, place};
use crate::domain::BranchId;
use crate::domain::policy::FsType;
use crate::domain::split::BranchFormat;
use crate::node::pool::{BRANCHES, OpenPool, fs_name};
use crate::platform::HostError;
use crate::platform::loopdev::LoopOptions;
use crate::platform::mount::{Liveness, MountAttr, MountEntry};
use crate::store::object::BranchSpec;

/// How long a mounted branch may take to answer before it counts as hung. A busy disk answers statfs from memory.
const ANSWER_BOUND: Duration = Duration::from_secs(2);

/// Pauses between attempts at what is busy.
pub(super) const PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(30),
    Duration::from_millis(100),
];

/// Mounts at one place that are taken away before giving up: more than one is a race or a mistake, this many is neither.
const MAX_STACKED: u32 = 8;

impl Branches {
    pub(super) fn attach(&self, spec: &BranchSpec, at: &Path, read_only: bool) -> Result<Attached> {
        let pool = self.open(spec)?;
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let path = place(&pool, &spec.id);
        let Some(record) = self.find(&pool, spec)? else {
            return branch_error::MissingSnafu { branch: spec.id.clone(), path }.fail();
        };
        self.permit(spec, &path)?;
        if pool.read_only && !read_only {
            return branch_error::PoolSnafu {
                branch: spec.id.clone(),
                pool: spec.pool.clone(),
                reason: format!("{} takes no writes", pool.path.display()),
            }
            .fail();
        }
        if record.format == BranchFormat::Image && record.fs_type.is_none() {
            let options = LoopOptions { read_only, direct_io: true, autoclear: false, tag: tag(at) };
            let attachment = self
                .host
                .loop_attach(&path.join(record::IMAGE), &options)
                .map_err(host("attach its image"))?;
            let device = attachment.device.path;
            return Ok(Attached { mount: device.clone(), backing: path, device: Some(device) });
        }
        let mounts = self.host.mounts().map_err(host("read the mount table"))?;
        if let Some(entry) = mounts.at(at) {
            if let Some(attached) = self.attached_already(&pool, spec, &record, at, entry, read_only)? {
                return Ok(attached);
            }
            // Dead, or with the other read-only flag: not lazily, because what still uses it must not lose it.
            let lazy = self.host.liveness(at, ANSWER_BOUND).map_err(host("ask it"))? != Liveness::Alive;
            self.unmount(at, lazy).map_err(host("unmount it"))?;
        }
        self.host.ensure_directory(at, 0o700).map_err(host("make its mount point"))?;
        // What is written while nothing is mounted here would be hidden later. Not every filesystem has the flag.
        let _ = self.host.set_immutable(at, true);
        let device = match record.format {
            BranchFormat::Directory => {
                let attr = MountAttr { read_only, ..MountAttr::default() };
                self.host.bind(&path, at, attr).map_err(host("bind its directory"))?;
                None
            }
            BranchFormat::Image => {
                Some(self.mount_image(spec, &record, &path, at, read_only, pool.read_only)?)
            }
        };
        if let Err(error) = self.check_data(spec, at) {
            let _ = self.host.unmount(at, true);
            return Err(error);
        }
        Ok(Attached { mount: at.to_owned(), backing: path, device })
    }

    /// The branch as it is attached already; `None` where what is mounted is dead or has the other read-only flag.
    fn attached_already(
        &self,
        pool: &OpenPool,
        spec: &BranchSpec,
        record: &BranchRecord,
        at: &Path,
        entry: &MountEntry,
        read_only: bool,
    ) -> Result<Option<Attached>> {
        let path = place(pool, &spec.id);
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let device = match record.format {
            BranchFormat::Image => {
                // btrfs mounts have device numbers of their own; the source names the loop device.
                let device = std::path::PathBuf::from(&entry.source);
                let ours = self
                    .host
                    .loop_device_has(&device, &path.join(record::IMAGE))
                    .map_err(host("look at what is mounted there"))?;
                if !ours {
                    return self.mounted_by_others(spec, at, entry);
                }
                Some(device)
            }
            BranchFormat::Directory => {
                let inside = Path::new(BRANCHES).join(&spec.id);
                if !entry.root.ends_with(&inside) {
                    return self.mounted_by_others(spec, at, entry);
                }
                // The pool's disk went and came back, as another filesystem or under another number: what is bound here
                // is the one that went.
                if entry.device != pool.mounted {
                    return Ok(None);
                }
                None
            }
        };
        match self.host.liveness(at, ANSWER_BOUND).map_err(host("ask it"))? {
            Liveness::Alive if entry.read_only() == read_only => {
                self.check_data(spec, at)?;
                Ok(Some(Attached { mount: at.to_owned(), backing: path, device }))
            }
            Liveness::Alive | Liveness::Dead(_) => Ok(None),
            Liveness::Hung => Err(host("use it")(HostError::Timeout {
                action: "statfs",
                subject: at.display().to_string(),
                seconds: ANSWER_BOUND.as_secs(),
            })),
        }
    }

    fn mounted_by_others(
        &self,
        spec: &BranchSpec,
        at: &Path,
        entry: &MountEntry,
    ) -> Result<Option<Attached>> {
        branch_error::ForeignSnafu {
            branch: spec.id.clone(),
            path: at,
            reason: format!("{} ({}) is mounted there", entry.source, entry.fs_type),
        }
        .fail()
    }

    fn mount_image(
        &self,
        spec: &BranchSpec,
        record: &BranchRecord,
        path: &Path,
        at: &Path,
        read_only: bool,
        pool_read_only: bool,
    ) -> Result<std::path::PathBuf> {
        let host = |action| move |source| BranchError::Host { branch: spec.id.clone(), action, source };
        let fs = record.fs_type.unwrap_or_default();
        // A read-only mount on a writable device: the filesystem can replay its journal after a crash.
        let options =
            LoopOptions { read_only: pool_read_only, direct_io: true, autoclear: true, tag: String::new() };
        let attachment =
            self.host.loop_attach(&path.join(record::IMAGE), &options).map_err(host("attach its image"))?;
        let device = attachment.device.path.clone();
        let attr = MountAttr { read_only, ..MountAttr::default() };
        self.host
            .mount_filesystem(&device, at, fs_name(fs), attr, mount_data(fs))
            .map_err(host("mount its filesystem"))?;
        // Only now may the device lose this user.
        drop(attachment);
        Ok(device)
    }

    /// A workload is given `<at>/data`: it must be a directory, not a link to one.
    fn check_data(&self, spec: &BranchSpec, at: &Path) -> Result<()> {
        let data = at.join(record::DATA);
        let found = self.host.identity(&data).map_err(|source| BranchError::Host {
            branch: spec.id.clone(),
            action: "look at its data directory",
            source,
        })?;
        if found.is_some_and(|f| f.directory) {
            return Ok(());
        }
        branch_error::ForeignSnafu {
            branch: spec.id.clone(),
            path: data,
            reason: "its data directory is missing or something else".to_owned(),
        }
        .fail()
    }

    pub(super) fn detach(&self, branch: &BranchId, at: &Path, force: bool) -> Result<()> {
        let host = |action| move |source| BranchError::Host { branch: branch.clone(), action, source };
        for _ in 0..MAX_STACKED {
            if !self.unmount(at, force).map_err(host("unmount it"))? {
                break;
            }
        }
        // A raw image has no mount; its device is known by its tag.
        let devices = self.host.loop_devices_tagged(&image_suffix(branch), &tag(at));
        for device in devices.map_err(host("look for its loop devices"))? {
            self.host.loop_detach(&device, &tag(at)).map_err(host("detach its image"))?;
        }
        if self.host.identity(at).map_err(host("look at its mount point"))?.is_some() {
            let _ = self.host.set_immutable(at, false);
            self.host.remove_directory(at).map_err(host("remove its mount point"))?;
        }
        Ok(())
    }
}

impl Branches {
    /// Unmounts, waiting a little where something uses it: programs that look at each new mount, or a child process
    /// between fork and exec that has a copy of an open descriptor, are gone in milliseconds.
    fn unmount(&self, at: &Path, lazy: bool) -> std::result::Result<bool, HostError> {
        for pause in PAUSES {
            match self.host.unmount(at, lazy) {
                Err(e) if e.is_busy() => std::thread::sleep(pause),
                outcome => return outcome,
            }
        }
        self.host.unmount(at, lazy)
    }
}

/// What a raw image's device at `at` is known by: the place is one installation's and one branch's.
fn tag(at: &Path) -> String {
    let digest = Sha256::digest(at.as_os_str().as_encoded_bytes());
    let hex: String = digest.iter().take(20).map(|b| format!("{b:02x}")).collect();
    format!("union-csi:{hex}")
}

/// How the path of a branch's image ends, whichever pool it lies in.
fn image_suffix(branch: &BranchId) -> std::path::PathBuf {
    Path::new(BRANCHES).join(branch).join(record::IMAGE)
}

/// Options of each filesystem for mount(2). Times are kept as everywhere (relatime): a workload sees no other rules than on
/// the disk itself.
const fn mount_data(fs: FsType) -> &'static str {
    match fs {
        // Damage stops writing at once; by default ext4 would go on.
        FsType::Ext4 => "errors=remount-ro",
        FsType::Xfs | FsType::Btrfs => "",
    }
}
