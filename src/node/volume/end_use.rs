//! Ending this node's use of one of its own branches, now, because another node is to have it.
//!
//! The orchestrator has given the volume up here; its workload may still run. An image's filesystem is shut down first, so that
//! no process can write to it any more, whichever files it has open and in whichever mount namespace: they get EIO. Then what
//! this node mounted of it goes. It counts as ended when the loop device is gone, because only then has the kernel let go of the
//! image: a mount in a workload's namespace, or a file that it has open, keeps it, and the workload must be ended. That the
//! filesystem is shut down is not enough: ext4 of Linux 6.1 still writes to the image when its last user goes.
//!
//! A directory has no filesystem of its own to be shut down, and not every kernel can shut a Btrfs down. Those are ended when
//! nothing uses them, and else refused, with who uses them.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::sync::OwnedMutexGuard;

use super::Core;
use super::holders::named;
use super::record::{Record, branch_mount};
use super::slot::Slot;
use crate::domain::split::BranchFormat;
use crate::node::branch::is_export;
use crate::node::pool::BRANCHES;
use crate::node::union::UnionState;
use crate::platform::holders::Holder;
use crate::platform::loopdev::LoopDevice;
use crate::platform::mount::MountEntry;
use crate::platform::shutdown::Shutdown;
use crate::store::object::BranchSpec;

/// How long whoever is at the volume just now may take: less than other nodes wait for the branch.
const LOCK_BOUND: Duration = Duration::from_secs(30);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);

/// How long a killed MergerFS may take to be gone.
const KILL_BOUND: Duration = Duration::from_secs(5);

/// How long the kernel may take to let go of an image that nothing uses any more.
const RELEASE_BOUND: Duration = Duration::from_secs(3);

impl Core {
    /// Ends the use of the branch by a volume of this node.
    pub(super) fn end_use(&self, branch: &BranchSpec) -> Result<(), String> {
        let slot = self.slots.of(&branch.volume);
        let _guard = lock(&slot).ok_or_else(|| {
            format!("a call for volume {} has been under way for {} s", branch.volume, LOCK_BOUND.as_secs())
        })?;
        let attached = |core: &Self| core.branches.attached_here(branch).map_err(|e| e.to_string());
        if !attached(self)? {
            return Ok(());
        }
        let directory = self.records.directory(&branch.volume);
        let record = self.records.load(&branch.volume).unwrap_or_else(|error| {
            tracing::warn!(volume.id = %branch.volume, %error, "a branch is ended without its volume's record");
            None
        });
        if record.is_some() {
            self.end_union(&slot, branch)?;
        }
        let point = branch_mount(&directory, branch.index);
        let devices = match branch.format {
            BranchFormat::Image => self.branches.devices(branch).map_err(|e| e.to_string())?,
            BranchFormat::Directory => Vec::new(),
        };
        let lazily = match branch.format {
            BranchFormat::Image => self.end_image(branch, &devices, &directory, record.as_ref())?,
            BranchFormat::Directory => {
                self.end_directory(branch)?;
                false
            }
        };
        self.branches.ensure_detached(&branch.id, &point, lazily).map_err(|e| e.to_string())?;
        let deadline = Instant::now() + RELEASE_BOUND;
        while attached(self)? {
            if Instant::now() >= deadline {
                let how = match branch.format {
                    BranchFormat::Image if lazily => "which gets errors from it",
                    BranchFormat::Image => "and its filesystem cannot be shut down by this kernel",
                    BranchFormat::Directory => "and a directory cannot be taken from what uses it",
                };
                let who = self.who(record.as_ref(), &devices);
                return Err(format!(
                    "volume {} is still mounted or open in a workload on this node, {how}: end the pods that use it here{who}",
                    branch.volume
                ));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Ends the volume's MergerFS: it holds its branches. The healer brings none up while one of them is refused.
    fn end_union(&self, slot: &Slot, branch: &BranchSpec) -> Result<(), String> {
        let state = self.unions.observe(&branch.volume).map_err(|e| e.to_string())?;
        let (process, device) = match state {
            UnionState::Running { process: Some(process), device } => (process, device),
            UnionState::Hung { process, device } => (process, device),
            UnionState::Running { process: None, .. } | UnionState::Dead { .. } | UnionState::Absent => {
                return Ok(());
            }
        };
        tracing::warn!(
            volume.id = %branch.volume, branch.id = %branch.id, process.id = process.pid,
            "the union is taken down: one of its branches goes to another node"
        );
        if let Err(error) = self.host.fuse_abort(device.1) {
            tracing::warn!(volume.id = %branch.volume, %error, "its connection is not aborted; its process is killed");
        }
        self.host.process_kill(&process).map_err(|e| e.to_string())?;
        let gone = self.host.process_wait(&process, KILL_BOUND).map_err(|e| e.to_string())?;
        let mut hints = slot.hints();
        hints.process = None;
        hints.hung = None;
        hints.branches.clear();
        hints.cut_off = None;
        drop(hints);
        self.changed.notify_one();
        if gone { Ok(()) } else { Err(format!("mergerfs (pid {}) was killed and does not end", process.pid)) }
    }

    /// Makes writing impossible, and takes away what of it this node mounted for the volume; false where nothing used it but those
    /// mounts, and its filesystem cannot be shut down.
    fn end_image(
        &self,
        branch: &BranchSpec,
        devices: &[LoopDevice],
        directory: &Path,
        record: Option<&Record>,
    ) -> Result<bool, String> {
        let mut shut = true;
        for device in devices {
            let name = device.path.display();
            match self.host.shut_down(device.device).map_err(|e| e.to_string())? {
                Shutdown::Done => tracing::warn!(
                    branch.id = %branch.id, device = %name,
                    "the branch's filesystem is shut down: what has its files open gets errors"
                ),
                // A raw device, or a filesystem that is open in no mount any more: only its users can end that. A Btrfs is mounted
                // under another number than its device's.
                Shutdown::Unseen => {
                    let mounted = |entry: &MountEntry| entry.source.as_str() == name.to_string();
                    shut = shut && !self.host.mounted_anywhere(mounted).map_err(|e| e.to_string())?;
                }
                Shutdown::Unknown => shut = false,
            }
            let used = |reason: String| {
                let who = self.who(record, devices);
                format!(
                    "its filesystem on {name} cannot be shut down by this kernel, so it is given back when nothing uses it: end \
                     the pods that use volume {} here{who} ({reason})",
                    branch.volume
                )
            };
            // Asked before anything is taken from those who use it.
            let holders = if shut { None } else { self.holders(device) };
            if holders.is_some_and(|holders| holders.iter().any(|holder| holder.files > 0)) {
                return Err(used("it is in use".to_owned()));
            }
            let of_branch = |entry: &MountEntry| {
                entry.device == device.device || entry.source.as_str() == name.to_string()
            };
            let unmounted = self.unmount_all(record, directory, shut, of_branch);
            unmounted.map_err(|reason| if shut { reason } else { used(reason) })?;
        }
        Ok(shut)
    }

    /// The processes that hold the device; `None` where that cannot be told.
    fn holders(&self, device: &LoopDevice) -> Option<Vec<Holder>> {
        let found = self.host.holders(device);
        found.inspect_err(|error| tracing::debug!(%error, "who holds a branch is not known")).ok().flatten()
    }

    /// Who uses the branch, to be put after what is to be done; empty where that is not known.
    fn who(&self, record: Option<&Record>, devices: &[LoopDevice]) -> String {
        let holders: Vec<Holder> =
            devices.iter().filter_map(|device| self.holders(device)).flatten().collect();
        let targets = record.into_iter().flat_map(|record| &record.publishes);
        match named(&holders, targets.map(|publish| publish.target.as_path())).as_str() {
            "" => String::new(),
            who => format!(": {who}"),
        }
    }

    /// Takes away the volume's mounts on this node that are of the branch, and overlays of it. Those in workloads' namespaces
    /// stay: without them, workloads would write beneath and be told that all is well.
    fn unmount_all(
        &self,
        record: Option<&Record>,
        directory: &Path,
        lazily: bool,
        of_branch: impl Fn(&MountEntry) -> bool,
    ) -> Result<(), String> {
        let table = self.host.mounts().map_err(|e| e.to_string())?;
        let union = record.map(|record| record.union_mount(directory).join(super::DATA));
        let overlay = union.and_then(|point| table.at(&point)).filter(|e| e.fs_type == "overlay");
        let overlay = overlay.map(|entry| entry.device);
        let ours = |entry: &&MountEntry| of_branch(entry) || Some(entry.device) == overlay;
        let points: Vec<PathBuf> = table.entries.iter().filter(ours).map(|e| e.mount_point.clone()).collect();
        for point in points.iter().rev() {
            self.host.unmount(point, lazily).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Unmounts the directory where this node mounted it, if nothing uses it.
    fn end_directory(&self, branch: &BranchSpec) -> Result<(), String> {
        let inside = Path::new(BRANCHES).join(&branch.id);
        let of_branch = |entry: &MountEntry| {
            let within = entry.root.ancestors().any(|root| root.ends_with(&inside));
            within && !is_export(entry, &branch.id)
        };
        let table = self.host.mounts().map_err(|e| e.to_string())?;
        for entry in table.entries.iter().rev().filter(|e| of_branch(e)) {
            self.host.unmount(&entry.mount_point, false).map_err(|e| {
                let volume = &branch.volume;
                format!("{e}: a directory cannot be taken from what uses it; end the pods that use volume {volume} here")
            })?;
        }
        Ok(())
    }
}

/// The volume's lock, within the bound. The caller is on a thread of its own.
fn lock(slot: &Slot) -> Option<OwnedMutexGuard<()>> {
    let deadline = Instant::now() + LOCK_BOUND;
    loop {
        match slot.lock.clone().try_lock_owned() {
            Ok(guard) => return Some(guard),
            Err(_) if Instant::now() >= deadline => return None,
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
