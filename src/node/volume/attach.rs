//! Attaching a volume's branches, of this node and of others, and letting those of others go.
//!
//! An image of another node is a block device here whose filesystem this node mounts; a directory is a mount that is bound.
//! Whatever reaches such a branch may wait for its owner, and has a bound.

use std::path::Path;
use std::time::{Duration, Instant};

use super::error::VolumeError;
use super::links::{LinkSeen, VolumeLinks};
use super::parallel::parallel;
use super::record::{Record, Remote, StagedBranch, branch_mount};
use super::remote::{Aim, AttachError, Order, aim};
use super::slot::{Hints, Slot};
use super::{ANSWER_TIMEOUT, Core, DATA};
use crate::domain::access::Generation;
use crate::domain::policy::FsType;
use crate::domain::split::BranchFormat;
use crate::domain::union::UnionKind;
use crate::domain::{BranchId, VolumeId};
use crate::node::branch::Attached;
use crate::node::pool::fs_name;
use crate::node::transport::{Consumer, Endpoint, ExportId, Patience, TransportError};
use crate::platform::HostError;
use crate::platform::mount::{Liveness, MountAttr, MountEntry};
use crate::store::object::Branch;

/// Branches attached at the same time: each is a few system calls and a mount, which one disk serves one by one anyway.
const PARALLEL_BRANCHES: usize = 8;

/// How long a superblock may take to be read, and what was mounted to be looked at, from an owner that has just answered.
const READ_BOUND: Duration = Duration::from_secs(10);

/// How long a mount may take: it writes again what the log has, which is 256 MiB at most.
const MOUNT_BOUND: Duration = Duration::from_secs(30);

/// How long the last writes may take while a branch is let go: with the unmount, less than the kubelet's two minutes.
const FLUSH_BOUND: Duration = Duration::from_secs(60);

/// How long an unmount may take after that.
pub(super) const UNMOUNT_BOUND: Duration = Duration::from_secs(30);

/// How long an unmount may take of what has lost its device: nothing is written any more.
const DEAD_UNMOUNT_BOUND: Duration = Duration::from_secs(5);

/// Mounts at one place that are taken away before giving up.
const MAX_STACKED: usize = 8;

/// Where what workloads have of a branch that was lost is kept mounted until it is exchanged: as long as it is, no other
/// device gets its number.
pub(super) const LOST: &str = "lost";

impl Core {
    /// Takes what the store says of a volume's branches; true where that is news.
    pub(super) fn note_orders(&self, slot: &Slot, branches: &[Branch]) -> bool {
        self.note_in(&mut slot.hints(), branches)
    }

    /// The same while the hints are held.
    pub(super) fn note_in<'a>(
        &self,
        hints: &mut Hints,
        branches: impl IntoIterator<Item = &'a Branch>,
    ) -> bool {
        let mut news = false;
        for branch in branches.into_iter().filter(|b| b.spec.node != self.node) {
            let order = Order::of(branch);
            news |= hints.orders.get(&branch.spec.index) != Some(&order);
            hints.orders.insert(branch.spec.index, order);
        }
        news
    }

    /// How the attachments of the record's branches stand.
    pub(super) fn links_of(&self, record: &Record) -> VolumeLinks {
        self.links.of(&self.transports, &self.node, record)
    }

    /// Attaches the branches that the record's union runs with, or, where `all`, also those that it runs without; the numbers
    /// of those that could not be, and why.
    pub(super) fn attach(&self, slot: &Slot, record: &mut Record, all: bool) -> Vec<(u32, AttachError)> {
        let left_out = record.left_out.clone();
        let wanted = |b: &&mut StagedBranch| all || !left_out.contains(&b.spec.index);
        let links = self.links_of(record);
        let mut failures = Vec::new();
        let mut jobs: Vec<(StagedBranch, Vec<Generation>)> = Vec::new();
        let mut news = false;
        for branch in record.branches.iter_mut().filter(wanted) {
            if branch.spec.node == self.node {
                jobs.push((branch.clone(), Vec::new()));
                continue;
            }
            match self.aim(slot, branch, &links) {
                Ok(Aim { remote, end }) => {
                    news |= branch.remote.as_ref() != Some(&remote);
                    branch.remote = Some(remote);
                    jobs.push((branch.clone(), end));
                }
                Err(error) => failures.push((branch.spec.index, error)),
            }
        }
        if news && let Err(source) = self.records.save(record) {
            let branch = record.volume().branch(0);
            let action = "write down where it is reached";
            return vec![(0, AttachError::Host { branch, action, source })];
        }
        let results =
            parallel(&jobs, PARALLEL_BRANCHES, |(branch, end)| self.attach_one(record, branch, end));
        for ((job, _), result) in jobs.iter().zip(results) {
            match result {
                Ok(Attached { backing, device, .. }) => {
                    if let Some(branch) = record.branches.iter_mut().find(|b| b.spec.index == job.spec.index)
                    {
                        branch.backing = Some(backing);
                        branch.device = device;
                    }
                }
                Err(error) => failures.push((job.spec.index, error)),
            }
        }
        failures
    }

    /// What is to be attached of a branch of another node.
    pub(super) fn aim(
        &self,
        slot: &Slot,
        branch: &StagedBranch,
        links: &VolumeLinks,
    ) -> Result<Aim, AttachError> {
        let order = slot.hints().orders.get(&branch.spec.index).cloned();
        let held = links.held(&branch.spec.id);
        aim(&self.node, &branch.spec, order.as_ref(), branch.remote.as_ref(), &held)
    }

    fn attach_one(
        &self,
        record: &Record,
        branch: &StagedBranch,
        end: &[Generation],
    ) -> Result<Attached, AttachError> {
        let at = branch_mount(&self.records.directory(record.volume()), branch.spec.index);
        let Some(remote) = branch.remote.as_ref().filter(|_| branch.spec.node != self.node) else {
            return self
                .branches
                .ensure_attached(&branch.spec, &at, record.reader_only())
                .map_err(|source| AttachError::Here { source });
        };
        let result = self.attach_remote(record, branch, remote, end, &at);
        self.links.forget(remote.transport);
        result
    }

    fn attach_remote(
        &self,
        record: &Record,
        branch: &StagedBranch,
        remote: &Remote,
        end: &[Generation],
        at: &Path,
    ) -> Result<Attached, AttachError> {
        let spec = &branch.spec;
        let failed =
            |source| AttachError::Transport { branch: spec.id.clone(), node: spec.node.clone(), source };
        let consumer = self.transports.consumer(remote.transport).map_err(failed)?;
        for &generation in end {
            tracing::warn!(branch.id = %spec.id, branch.generation = %generation, "an attachment of another time is ended");
            let id = ExportId { branch: spec.id.clone(), generation };
            consumer.force_detach(&id).map_err(failed)?;
        }
        let id = ExportId { branch: spec.id.clone(), generation: remote.generation };
        let endpoint = Endpoint { address: remote.address, name: remote.name.clone() };
        let key = self.key(spec, remote.transport)?;
        let begun = Instant::now();
        let attached = consumer.attach(&id, &endpoint, key.as_ref(), Patience::Wait).map_err(failed)?;
        let absent = || failed(TransportError::Absent { branch: spec.id.clone(), what: "attached" });
        let place = attached.at.ok_or_else(absent)?;
        let connected = begun.elapsed();
        let is_image = spec.format == BranchFormat::Image;
        let device = is_image.then(|| place.clone());
        if record.kind == UnionKind::Block {
            return Ok(Attached { mount: place.clone(), backing: place, device });
        }
        if let Err(error) = self.mount_remote(record, branch, remote, &place, at) {
            if matches!(error, AttachError::Filesystem { .. }) {
                // Its owner can repair it only while nobody has it.
                self.end_attachment(&*consumer, &id);
            }
            return Err(error);
        }
        tracing::info!(
            branch.id = %spec.id, branch.generation = %remote.generation, node = %spec.node,
            connect.seconds = connected.as_secs_f64(), mount.seconds = (begun.elapsed() - connected).as_secs_f64(),
            "a branch of another node is attached"
        );
        Ok(Attached { mount: at.to_owned(), backing: place, device })
    }

    fn end_attachment(&self, consumer: &dyn Consumer, id: &ExportId) {
        if let Err(error) = consumer.detach(id) {
            tracing::warn!(branch.id = %id.branch, error = %error, "what cannot be mounted stays attached");
        }
    }

    /// Mounts what was attached at `place` so that the branch's files are in `<at>/data`; finds it mounted.
    fn mount_remote(
        &self,
        record: &Record,
        branch: &StagedBranch,
        remote: &Remote,
        place: &Path,
        at: &Path,
    ) -> Result<(), AttachError> {
        let spec = &branch.spec;
        let host = |action| move |source| AttachError::Host { branch: spec.id.clone(), action, source };
        let read_only = record.reader_only();
        let mounts = self.host.mounts().map_err(host("read the mount table"))?;
        if let Some(entry) = mounts.at(at) {
            let alive = self.is_mount_of(entry, spec.format, place).map_err(host("look at its device"))?
                && entry.read_only() == read_only
                && self.host.liveness(at, ANSWER_TIMEOUT).map_err(host("ask it"))? == Liveness::Alive;
            if alive {
                return self.check_data(branch, at);
            }
            self.drop_mount(record, at).map_err(host("unmount what is dead"))?;
        }
        self.host.ensure_directory(at, 0o700).map_err(host("make its mount point"))?;
        // What is written while nothing is mounted here would be hidden later. Not every filesystem has the flag.
        let _ = self.host.set_immutable(at, true);
        let attr = MountAttr { read_only, ..MountAttr::default() };
        match spec.format {
            BranchFormat::Image => {
                let fs = spec.fs_type.unwrap_or_default();
                self.examine(branch, remote, fs, place)?;
                self.host
                    .mount_filesystem_within(MOUNT_BOUND, place, at, fs_name(fs), attr, mount_data(fs))
                    .map_err(host("mount its filesystem"))?;
            }
            BranchFormat::Directory => {
                self.host.bind_within(READ_BOUND, place, at, attr).map_err(host("bind its directory"))?;
            }
        }
        self.check_data(branch, at).inspect_err(|_| {
            let _ = self.host.unmount_within(DEAD_UNMOUNT_BOUND, at, true);
        })
    }

    /// Whether `entry` is a mount of what is attached at `place`.
    fn is_mount_of(&self, entry: &MountEntry, format: BranchFormat, place: &Path) -> Result<bool, HostError> {
        match format {
            BranchFormat::Image => {
                // btrfs mounts have device numbers of their own; a name may have been another device's before.
                let same = entry.fs_type == fs_name(FsType::Btrfs)
                    || self.host.device_number(place)? == Some(entry.device);
                Ok(same && Path::new(&entry.source) == place)
            }
            BranchFormat::Directory => {
                Ok(self.host.mounts()?.at(place).is_some_and(|from| from.device == entry.device))
            }
        }
    }

    /// Refuses a filesystem that is not the branch's, or that must be repaired: that is for its owner's operator to decide.
    fn examine(
        &self,
        branch: &StagedBranch,
        remote: &Remote,
        fs: FsType,
        device: &Path,
    ) -> Result<(), AttachError> {
        let spec = &branch.spec;
        let found = self.host.examine_filesystem(device, READ_BOUND).map_err(|source| AttachError::Host {
            branch: spec.id.clone(),
            action: "read its superblock",
            source,
        })?;
        let refuse = |reason: String| {
            Err(AttachError::Filesystem { branch: spec.id.clone(), node: spec.node.clone(), reason })
        };
        let Some(found) = found else {
            return refuse(format!("it holds no filesystem, expected {}", fs_name(fs)));
        };
        if found.kind != fs_name(fs) || remote.fs_uuid.as_ref().is_some_and(|uuid| *uuid != found.uuid) {
            let expected = remote.fs_uuid.clone().unwrap_or_default();
            return refuse(format!(
                "it holds {} {}, expected {} {expected}",
                found.kind,
                found.uuid,
                fs_name(fs)
            ));
        }
        match found.fault {
            None => Ok(()),
            Some(fault) => refuse(format!(
                "{fault}: end the workloads that use the volume, run `{}` on the image {}/disk.img in pool {} of node {}, and \
                 start them again",
                check_command(fs),
                spec.id,
                spec.pool,
                spec.node
            )),
        }
    }

    /// A workload is given `<at>/data`: it must be a directory, not a link to one.
    fn check_data(&self, branch: &StagedBranch, at: &Path) -> Result<(), AttachError> {
        let spec = &branch.spec;
        let data = at.join(DATA);
        let asked = data.clone();
        let found = self.host.within("looking", &data, READ_BOUND, move |host| host.identity(&asked));
        let found = found.map_err(|source| AttachError::Host {
            branch: spec.id.clone(),
            action: "look at its data directory",
            source,
        })?;
        if found.is_some_and(|f| f.directory) {
            return Ok(());
        }
        Err(AttachError::Filesystem {
            branch: spec.id.clone(),
            node: spec.node.clone(),
            reason: "its data directory is missing or something else".to_owned(),
        })
    }

    /// Unmounts what is dead at a branch's mount point, so that the branch can be mounted anew. Where workloads have it without a
    /// union between, it stays mounted elsewhere until it was exchanged under them.
    fn drop_mount(&self, record: &Record, at: &Path) -> Result<(), HostError> {
        if record.kind == UnionKind::Bind {
            let directory = self.records.directory(record.volume());
            self.keep_lost(&directory, at)?;
        }
        for _ in 0..MAX_STACKED {
            if !self.host.unmount_within(DEAD_UNMOUNT_BOUND, at, true)? {
                break;
            }
        }
        Ok(())
    }

    /// Binds what is mounted at `at` at the place of what was lost.
    pub(super) fn keep_lost(&self, directory: &Path, at: &Path) -> Result<(), HostError> {
        let lost = directory.join(LOST);
        let mounts = self.host.mounts()?;
        let Some(device) = mounts.at(at).map(|e| e.device) else { return Ok(()) };
        if mounts.entries.iter().any(|e| e.mount_point == lost && e.device == device) {
            return Ok(());
        }
        self.host.ensure_directory(&lost, 0o700)?;
        self.host.bind_within(DEAD_UNMOUNT_BOUND, at, &lost, MountAttr::default())
    }

    /// Takes away what was kept of lost branches.
    pub(super) fn drop_lost(&self, volume: &VolumeId) -> Result<(), VolumeError> {
        let lost = self.records.directory(volume).join(LOST);
        let failed = |e| VolumeError::host(volume, "unmount what was lost", e);
        for _ in 0..MAX_STACKED {
            if !self.host.unmount_within(DEAD_UNMOUNT_BOUND, &lost, true).map_err(failed)? {
                break;
            }
        }
        self.host.remove_directory(&lost).map(|_| ()).map_err(failed)
    }

    /// Ends the attachments of these branches of other nodes now: whatever waits for them gets errors.
    pub(super) fn sever(&self, record: &Record, indexes: &[u32]) -> Result<(), VolumeError> {
        let branches: Vec<_> = record.branches.iter().filter(|b| indexes.contains(&b.spec.index)).collect();
        let results = parallel(&branches, PARALLEL_BRANCHES, |branch| {
            let (spec, Some(remote)) = (&branch.spec, &branch.remote) else { return Ok(()) };
            let id = ExportId { branch: spec.id.clone(), generation: remote.generation };
            let severed =
                self.transports.consumer(remote.transport).and_then(|consumer| consumer.force_detach(&id));
            self.links.forget(remote.transport);
            severed.map_err(|source| {
                let node = spec.node.clone();
                let error = AttachError::Transport { branch: spec.id.clone(), node, source };
                VolumeError::incomplete(record.volume(), vec![(spec.index, error)])
            })
        });
        results.into_iter().collect()
    }

    /// Lets branches of other nodes go that failed, so that they can be attached anew.
    pub(super) fn release_remote(&self, record: &Record, branch: &StagedBranch) {
        let at = branch_mount(&self.records.directory(record.volume()), branch.spec.index);
        if let Err(error) = self.drop_mount(record, &at) {
            tracing::warn!(branch.id = %branch.spec.id, error = %error, "a branch that was lost is not unmounted yet");
        }
    }

    /// Detaches a branch of another node, after its last writes were taken.
    pub(super) fn let_go_remote(&self, record: &Record, branch: &StagedBranch) -> Result<(), VolumeError> {
        let volume = record.volume();
        let at = branch_mount(&self.records.directory(volume), branch.spec.index);
        self.bound_last_writes(record, branch);
        self.flush(record, branch, &at)?;
        for _ in 0..MAX_STACKED {
            let unmounted = self.host.unmount_within(UNMOUNT_BOUND, &at, false);
            if !unmounted.map_err(|e| VolumeError::host(volume, "unmount a branch of another node", e))? {
                break;
            }
        }
        if let Some(remote) = &branch.remote {
            let id = ExportId { branch: branch.spec.id.clone(), generation: remote.generation };
            match self.transports.consumer(remote.transport).and_then(|consumer| consumer.detach(&id)) {
                // What this node cannot attach is not attached; what it could and cannot now is ended when it can again.
                Ok(()) | Err(TransportError::Unable { .. } | TransportError::Absent { .. }) => {}
                Err(error @ TransportError::InUse { .. }) => {
                    return Err(VolumeError::Busy { volume: volume.clone(), reason: error.to_string() });
                }
                Err(source) => {
                    let (branch, node) = (branch.spec.id.clone(), branch.spec.node.clone());
                    let error = AttachError::Transport { branch, node, source };
                    return Err(VolumeError::Incomplete {
                        volume: volume.clone(),
                        reason: error.to_string(),
                    });
                }
            }
            self.links.forget(remote.transport);
        }
        self.branches.ensure_detached(&branch.spec.id, &at, false).map_err(|e| VolumeError::branch(volume, e))
    }

    /// Has the kernel itself give the owner up after `branchTimeout`, where it can: nothing but this agent uses the branch any more,
    /// and a thread that writes to a disk of another node cannot be killed. An agent that is killed meanwhile would else stay, and
    /// its successor not begin, until the owner is back. Staging has it wait without end again.
    fn bound_last_writes(&self, record: &Record, branch: &StagedBranch) {
        let Some(remote) = &branch.remote else { return };
        let id = ExportId { branch: branch.spec.id.clone(), generation: remote.generation };
        let patience = Patience::GiveUpAfter(record.branch_timeout());
        match self.transports.consumer(remote.transport).and_then(|c| c.set_patience(&id, patience)) {
            // NFS waits so that it can be killed.
            Ok(()) | Err(TransportError::Absent { .. } | TransportError::Unable { .. }) => {}
            Err(error) => {
                tracing::warn!(branch.id = %branch.spec.id, %error, "the kernel waits for its node for as long as it takes");
            }
        }
    }

    /// Has what was written last taken by the branch's owner, while the branch is still mounted and so seen by whoever asks next:
    /// an unmount that waits for the owner has left its place already, and looks as if it had succeeded.
    fn flush(&self, record: &Record, branch: &StagedBranch, at: &Path) -> Result<(), VolumeError> {
        let failed = |e| VolumeError::host(record.volume(), "look for a branch of another node", e);
        if record.reader_only() || self.host.mounts().map_err(failed)?.at(at).is_none() {
            return Ok(());
        }
        match self.host.sync_within(FLUSH_BOUND, at) {
            Ok(()) => Ok(()),
            Err(error @ HostError::Timeout { .. }) => Err(VolumeError::Busy {
                volume: record.volume().clone(),
                reason: format!("node {} has not taken what was written last: {error}", branch.spec.node),
            }),
            Err(error) => {
                // Its device is gone, and with it what was not written: whoever wrote it was told.
                tracing::warn!(branch.id = %branch.spec.id, %error, "what was written last to a branch is lost");
                Ok(())
            }
        }
    }

    /// The branches of other nodes whose owners do not answer, and for how long.
    pub(super) fn silent(&self, slot: &Slot, record: &Record) -> Vec<(u32, Duration)> {
        for branch in record.branches.iter().filter_map(|b| b.remote.as_ref()) {
            self.links.forget(branch.transport);
        }
        let links = self.links_of(record);
        let now = self.host.running_for();
        let mut silent = Vec::new();
        for branch in &record.branches {
            let Some(remote) = &branch.remote else { continue };
            if links.seen(&branch.spec.id, remote) == LinkSeen::Connecting {
                let since = *slot.hints().hung_branches.entry(branch.spec.index).or_insert(now);
                silent.push((branch.spec.index, now.saturating_sub(since)));
            } else {
                slot.hints().hung_branches.remove(&branch.spec.index);
            }
        }
        silent
    }

    /// Whether the owner of some branch does not answer; as fresh as whoever asked last.
    pub(super) fn is_silent(&self, record: &Record) -> bool {
        let links = self.links_of(record);
        let connecting = |(id, remote): (&BranchId, &Remote)| links.seen(id, remote) == LinkSeen::Connecting;
        let mut remote = record.branches.iter().filter_map(|b| Some((&b.spec.id, b.remote.as_ref()?)));
        remote.any(connecting)
    }

    /// Writes down since when branches have not answered, where that changed: who is started next counts on.
    pub(super) fn note_silence(&self, slot: &Slot, record: &mut Record) -> Result<(), VolumeError> {
        let since = slot.hints().hung_branches.clone();
        let mut changed = false;
        for branch in &mut record.branches {
            let known = since.get(&branch.spec.index).map(Duration::as_secs);
            changed |= branch.silent_since != known;
            branch.silent_since = known;
        }
        if changed { self.save(record) } else { Ok(()) }
    }

    /// Takes up what an earlier agent of this boot counted.
    pub(super) fn recall_silence(&self, slot: &Slot, record: &Record) {
        let known = record.branches.iter().filter_map(|b| Some((b.spec.index, b.silent_since?)));
        slot.hints().hung_branches = known.map(|(index, s)| (index, Duration::from_secs(s))).collect();
    }
}

/// Options of each filesystem for mount(2), on a device of another node.
const fn mount_data(fs: FsType) -> &'static str {
    match fs {
        // Damage stops writing at once; by default ext4 would go on.
        FsType::Ext4 => "errors=remount-ro",
        // Workloads may still hold what was lost, which has the same UUID. That it is the right one was checked.
        FsType::Xfs => "nouuid",
        FsType::Btrfs => "",
    }
}

/// What checks a filesystem.
const fn check_command(fs: FsType) -> &'static str {
    match fs {
        FsType::Ext4 => "e2fsck -f",
        FsType::Xfs => "xfs_repair",
        FsType::Btrfs => "btrfs check",
    }
}
