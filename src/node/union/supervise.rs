//! Making, adopting, replacing, observing and ending the unions of this node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::launch::{self, Launch, host};
use super::record::{Phase, Record, Retired};
use super::{UnionError, UnionSpec, UnionState, Unions, overlay};
use crate::domain::VolumeId;
use crate::domain::union::UnionKind;
use crate::platform::HostError;
use crate::platform::mount::MountTable;

/// How long a union may take to say that it is there.
const PING_BOUND: Duration = Duration::from_secs(2);

/// How long a process may take to end after the last unmount, before it is told to.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// Asked of the mount's root, this is answered by the process itself without a look at any branch, because the union is
/// started with `security-capability=false`; and the kernel passes it on without checking permissions, for which it
/// could have to ask for attributes. So a process that hangs is told from a branch that does.
const PING: &str = "security.capability";

impl Unions {
    /// Makes the union run, or finds that it does (also one that an earlier agent started). On return it has answered and
    /// its options were read back.
    ///
    /// A healthy union of the same branches, kind and options is left as it is wherever it is mounted, which is at
    /// `spec.mount_point` unless [`Unions::replace`] put it elsewhere: see [`Unions::record`]. A dead one is removed and
    /// started anew.
    ///
    /// # Errors
    /// See [`UnionError`]; nothing stays mounted then.
    pub fn ensure(&self, spec: &UnionSpec) -> Result<UnionState, UnionError> {
        match self.records.load(&spec.volume)? {
            Some(record) => {
                let state = self.state(&record)?;
                match &state {
                    UnionState::Running { .. } => {
                        return differences(&record.spec, spec).map_or(Ok(state), |reason| {
                            Err(UnionError::Differs { volume: spec.volume.clone(), reason })
                        });
                    }
                    UnionState::Hung { process, .. } => {
                        let reason = format!("its process {} is there and does not answer", process.pid);
                        return Err(UnionError::Start { volume: spec.volume.clone(), reason });
                    }
                    UnionState::Dead { .. } | UnionState::Absent => self.clear(&record)?,
                }
            }
            None => self.refuse_unknown(spec)?,
        }
        self.start(spec, Vec::new()).inspect_err(|_| self.forget(&spec.volume))
    }

    /// Starts a second union of the same spec at `spec.mount_point`, beside a dead or hung one that is mounted elsewhere,
    /// and makes it the volume's union on record. For healing: the replaced one stays mounted until
    /// [`Unions::discard_replaced`]. A union that already runs healthily at `spec.mount_point` is left as it is.
    ///
    /// # Errors
    /// See [`UnionError`]; the old union then stays the one on record.
    pub fn replace(&self, spec: &UnionSpec) -> Result<UnionState, UnionError> {
        let Some(old) = self.records.load(&spec.volume)? else { return self.ensure(spec) };
        if old.spec.mount_point == spec.mount_point {
            return self.ensure(spec);
        }
        let mut retired = old.retired.clone();
        retired.push(Retired {
            mount_point: old.spec.mount_point.clone(),
            process: old.process.clone(),
            device: old.device,
        });
        self.start(spec, retired).inspect_err(|_| {
            if let Err(error) = self.records.save(&old) {
                tracing::warn!(volume.id = %spec.volume, %error, "the record of the old union was not restored");
            }
        })
    }

    /// Ends the unions that [`Unions::replace`] replaced, after their mounts were swapped: unmounts what is at their mount
    /// points, ends their processes. Nothing to do is success.
    ///
    /// # Errors
    /// See [`UnionError`]; what is left is tried again with the next call, or by [`Unions::stop`].
    pub fn discard_replaced(&self, volume: &VolumeId) -> Result<(), UnionError> {
        let Some(mut record) = self.records.load(volume)? else { return Ok(()) };
        while let Some(old) = record.retired.last() {
            self.dismantle_retired(&record, old)?;
            record.retired.pop();
            self.records.save(&record)?;
        }
        Ok(())
    }

    /// How the volume's union stands; touches no branch, comes back within 2 seconds.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn observe(&self, volume: &VolumeId) -> Result<UnionState, UnionError> {
        match self.records.load(volume)? {
            Some(record) => self.state(&record),
            None => Ok(UnionState::Absent),
        }
    }

    /// As [`Unions::observe`], for who has just read the mounts: where there are thousands, reading them is what costs.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub fn observe_in(&self, volume: &VolumeId, mounts: &MountTable) -> Result<UnionState, UnionError> {
        match self.records.load(volume)? {
            Some(record) => self.state_in(&record, mounts),
            None => Ok(UnionState::Absent),
        }
    }

    /// Whether the MergerFS that is mounted at `mount_point` answers within 2 seconds. Touches no branch and reads no table:
    /// cheaper than [`Unions::observe`] by far where there are many mounts, for who knows what is mounted there.
    #[must_use]
    pub fn answers(&self, mount_point: &Path) -> bool {
        match self.host.xattr_read(mount_point, PING, PING_BOUND) {
            Err(HostError::Timeout { .. }) => false,
            Err(error) => !error.is_disconnected(),
            Ok(_) => true,
        }
    }

    /// The options that the running process has, by their names in its dialect, as they were read back from it when it
    /// started, with `version`, and its `branches` as it has them now: it makes those read-only itself, nobody changes the
    /// others. Empty for overlayfs and where there is no union.
    ///
    /// # Errors
    /// It does not answer.
    pub fn options(&self, volume: &VolumeId) -> Result<BTreeMap<String, String>, UnionError> {
        let Some(record) = self.records.load(volume)?.filter(|r| r.spec.kind == UnionKind::Mergerfs) else {
            return Ok(BTreeMap::new());
        };
        let branches = launch::control(&self.host, &record.spec.mount_point, "branches", PING_BOUND)?;
        let mut options = record.options;
        options.extend(branches.map(|v| ("branches".to_owned(), v)));
        options.extend(record.mergerfs_version.map(|v| ("version".to_owned(), v)));
        Ok(options)
    }

    /// The volumes that have, or may have, a union here; for adoption when the agent starts.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn volumes(&self) -> Result<Vec<VolumeId>, UnionError> {
        self.records.volumes()
    }

    /// What is on record of the volume's union: where it is mounted, what it was given.
    ///
    /// # Errors
    /// The record cannot be read or understood.
    pub fn record(&self, volume: &VolumeId) -> Result<Option<Record>, UnionError> {
        self.records.load(volume)
    }

    /// Unmounts the volume's union, ends its process, removes its records. Nothing to do is success.
    ///
    /// # Errors
    /// EBUSY where files are open in it or it is bound somewhere, and `force` is false: nothing was changed then. With
    /// `force`: lazy unmount, abort, kill.
    pub fn stop(&self, volume: &VolumeId, force: bool) -> Result<(), UnionError> {
        let Some(record) = self.records.load(volume)? else { return Ok(()) };
        if force {
            self.clear(&record)?;
        } else {
            self.refuse_bound(&record)?;
            let point = &record.spec.mount_point;
            match record.spec.kind {
                UnionKind::Overlay => overlay::unmount(&self.host, point, false)?,
                UnionKind::Mergerfs | UnionKind::Bind | UnionKind::Block => {
                    launch::unmount_all(&self.host, point, false)?;
                    // The last unmount ends it, after it has closed what was open.
                    launch::end(&self.host, record.process.as_ref(), END_PATIENCE)?;
                }
            }
            self.clear(&record)?;
        }
        self.records.remove(volume)
    }

    /// Starts it, with a record before and after.
    fn start(&self, spec: &UnionSpec, retired: Vec<Retired>) -> Result<UnionState, UnionError> {
        let mut record = Record { retired, ..Record::starting(spec, self.boot_id.clone()) };
        match spec.kind {
            UnionKind::Overlay => {
                self.records.save(&record)?;
                record.device = Some(overlay::mount(&self.host, spec)?);
            }
            UnionKind::Mergerfs => self.launch(&mut record)?,
            UnionKind::Bind | UnionKind::Block => {
                let reason = "a volume that is bound or a block device has no union".to_owned();
                return Err(UnionError::Request { volume: spec.volume.clone(), reason });
            }
        }
        record.phase = Phase::Running;
        let device = record.device.unwrap_or_default();
        let process = record.process.clone();
        self.records.save(&record).inspect_err(|_| {
            if let Err(error) = self.clear(&record) {
                tracing::warn!(volume.id = %spec.volume, %error, "a union without a record was not ended");
            }
        })?;
        tracing::info!(
            volume.id = %spec.volume,
            union.pid = process.as_ref().map(|p| p.pid),
            union.path = %spec.mount_point.display(),
            "union started"
        );
        Ok(UnionState::Running { process, device })
    }

    fn launch(&self, record: &mut Record) -> Result<(), UnionError> {
        let spec = record.spec.clone();
        let tested = self.tested_with_program();
        let Some(program) = &tested.program else {
            let reason = tested.abilities.mergerfs_problem.clone().unwrap_or_default();
            return Err(UnionError::NoMergerfs { reason });
        };
        record.program = Some(program.path.clone());
        record.mergerfs_version = Some(program.version.to_string());
        self.records.save(record)?;
        let overrides = self.overrides(&spec);
        let launch = Launch {
            host: &self.host,
            program,
            spec: &spec,
            passthrough: tested.abilities.passthrough,
            overrides: &overrides,
            log: self.log(&spec.volume),
            bound: self.settings.start_timeout,
            by_hand: false,
        };
        let launched = launch.run(&mut |process| {
            record.process = Some(process.clone());
            self.records.save(record)
        })?;
        record.device = Some(launched.device);
        record.options = launched.options;
        Ok(())
    }

    /// The node's options and over them the class's.
    fn overrides(&self, spec: &UnionSpec) -> BTreeMap<String, String> {
        let mut all = self.settings.options.clone();
        all.extend(spec.options.clone());
        all
    }

    fn log(&self, volume: &VolumeId) -> PathBuf {
        self.logs.join(format!("{volume}.log"))
    }

    fn state(&self, record: &Record) -> Result<UnionState, UnionError> {
        self.state_in(record, &*self.host.mounts().map_err(host("read the mount table"))?)
    }

    fn state_in(&self, record: &Record, mounts: &MountTable) -> Result<UnionState, UnionError> {
        if record.boot_id != self.boot_id {
            return Ok(UnionState::Absent);
        }
        if record.phase == Phase::Starting {
            let device = record.retired.last().and_then(|r| r.device);
            return Ok(UnionState::Dead { device });
        }
        let point = &record.spec.mount_point;
        if record.spec.kind == UnionKind::Overlay {
            return Ok(overlay::observe(mounts, point));
        }
        let process = match &record.process {
            Some(id) => self.host.process_open(id).map_err(host("look for mergerfs"))?.map(|_| id.clone()),
            None => None,
        };
        let mounted = mounts.at(point).filter(|e| e.fs_type == launch::FS_TYPE);
        let Some((process, entry)) = process.zip(mounted) else {
            return Ok(UnionState::Dead { device: self.still_mounted(record)? });
        };
        let device = entry.device;
        match self.host.xattr_read(point, PING, PING_BOUND) {
            Err(HostError::Timeout { .. }) => Ok(UnionState::Hung { process, device }),
            Err(error) if error.is_disconnected() => Ok(UnionState::Dead { device: Some(device) }),
            // Any other answer is one.
            Ok(_) | Err(_) => Ok(UnionState::Running { process: Some(process), device }),
        }
    }

    /// The device of the record, where it is still mounted anywhere in this namespace.
    fn still_mounted(&self, record: &Record) -> Result<Option<(u32, u32)>, UnionError> {
        let table = self.host.mounts().map_err(host("read the mount table"))?;
        let source = record.spec.volume.as_str();
        let ours = |device| {
            table
                .entries
                .iter()
                .any(|e| e.device == device && e.fs_type == launch::FS_TYPE && e.source == source)
        };
        Ok(record.device.filter(|device| ours(*device)))
    }

    /// Something that is not on record is mounted where the union would be: it is not ours to remove.
    fn refuse_unknown(&self, spec: &UnionSpec) -> Result<(), UnionError> {
        let table = self.host.mounts().map_err(host("read the mount table"))?;
        let Some(entry) = table.below(&spec.mount_point).next() else { return Ok(()) };
        let reason = format!(
            "{} is mounted at {} and not on record: unmount it",
            entry.source,
            entry.mount_point.display()
        );
        Err(UnionError::Differs { volume: spec.volume.clone(), reason })
    }

    /// EBUSY while the union is mounted in more places than its own.
    fn refuse_bound(&self, record: &Record) -> Result<(), UnionError> {
        let Some(device) = record.device else { return Ok(()) };
        let table = self.host.mounts().map_err(host("read the mount table"))?;
        let own: Vec<&PathBuf> =
            record.retired.iter().map(|r| &r.mount_point).chain([&record.spec.mount_point]).collect();
        let bound = table.entries.iter().find(|e| {
            e.device == device
                && (e.fs_type == launch::FS_TYPE || e.fs_type == "overlay")
                && !own.iter().any(|p| e.mount_point == **p || e.mount_point == p.join("data"))
        });
        bound.map_or(Ok(()), |entry| {
            let subject = entry.mount_point.display().to_string();
            let source = nix::errno::Errno::EBUSY.into();
            Err(UnionError::Host {
                action: "unmount the union while it is mounted elsewhere",
                source: HostError::Syscall { call: "umount2", subject, source },
            })
        })
    }

    /// Removes all that may be left of a union, except its record.
    fn clear(&self, record: &Record) -> Result<(), UnionError> {
        for old in record.retired.iter().rev() {
            self.dismantle_retired(record, old)?;
        }
        let point = &record.spec.mount_point;
        if record.spec.kind == UnionKind::Overlay {
            return overlay::unmount(&self.host, point, true);
        }
        let device = self.still_mounted(record)?;
        launch::dismantle(&self.host, point, record.process.as_ref(), device)?;
        launch::remove_mount_point(&self.host, point)?;
        launch::remove_cgroup(&self.host, &record.spec.volume);
        Ok(())
    }

    fn dismantle_retired(&self, record: &Record, old: &Retired) -> Result<(), UnionError> {
        if record.spec.kind == UnionKind::Overlay {
            return overlay::unmount(&self.host, &old.mount_point, true);
        }
        // The living union may be mounted in its place, with a number that the old one had once.
        let device = old.device.filter(|d| record.device != Some(*d));
        launch::dismantle(&self.host, &old.mount_point, old.process.as_ref(), device)?;
        launch::remove_mount_point(&self.host, &old.mount_point)
    }

    fn forget(&self, volume: &VolumeId) {
        if let Err(error) = self.records.remove(volume) {
            tracing::warn!(volume.id = %volume, %error, "the record of a union that failed to start stays");
        }
    }
}

/// What makes a running union another than the one asked for.
fn differences(running: &UnionSpec, wanted: &UnionSpec) -> Option<String> {
    let list =
        |paths: &[PathBuf]| paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
    if running.kind != wanted.kind {
        return Some(format!("it is {:?}, not {:?}", running.kind, wanted.kind));
    }
    if running.branches != wanted.branches {
        return Some(format!("it is of {}, not of {}", list(&running.branches), list(&wanted.branches)));
    }
    if running.read_only != wanted.read_only {
        let mode = |read_only| if read_only { "read-only" } else { "writable" };
        return Some(format!("it is {}, not {}", mode(running.read_only), mode(wanted.read_only)));
    }
    if running.options != wanted.options {
        return Some("it has other mergerfs options".to_owned());
    }
    None
}
