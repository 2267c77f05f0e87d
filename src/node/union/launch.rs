//! Starting one MergerFS process, and ending it.
//!
//! A launch is over when the mount has appeared, has answered, and was asked for every option that it was given. When it
//! fails, nothing of it stays: no process, no mount.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::detect::Program;
use super::{UnionError, UnionSpec};
use crate::domain::VolumeId;
use crate::domain::mergerfs::{self, Setting, Wanted};
use crate::platform::mount::{Liveness, MountEntry};
use crate::platform::process::{DetachedCommand, ProcessId};
use crate::platform::{Host, HostError};

/// Filesystem type of a MergerFS mount in mountinfo.
pub(super) const FS_TYPE: &str = "fuse.mergerfs";

/// MergerFS keeps a descriptor for each open file, and raises its limit to what it may have.
const OPEN_FILES: u64 = 1 << 20;

/// Ended later than workloads of its size, since they wait for it; and ended still, when it is what has eaten the memory. A
/// process that the kernel never ends (-1000) can bring the machine to a standstill. The same as the agent's service has.
const OOM_SCORE: i16 = -500;

/// A log longer than this is put aside when the union is started again.
const LOG_MAX: u64 = 1 << 20;

/// Given to a process to end by itself before it is killed.
const END_BOUND: Duration = Duration::from_secs(2);

/// How long a process that has taken its mount away may need to be gone.
const ENDING_BOUND: Duration = Duration::from_millis(500);

/// How long an unmount may take: files that are mapped are written through the process, which may wait for a branch.
pub(super) const UNMOUNT_BOUND: Duration = Duration::from_secs(30);

/// How long a mount may be busy before it is in use: a child of this program that is just being started has, for a
/// moment, the descriptors by which mounts are asked how they are.
const BUSY_BOUND: Duration = Duration::from_millis(250);

/// What is to be launched, and how.
#[derive(Debug)]
pub(super) struct Launch<'a> {
    pub host: &'a Host,
    pub program: &'a Program,
    pub spec: &'a UnionSpec,
    /// Use I/O passthrough.
    pub passthrough: bool,
    /// Node's and class's options together.
    pub overrides: &'a BTreeMap<String, String>,
    /// Where the process writes what it has to say.
    pub log: PathBuf,
    /// How long until it must have answered.
    pub bound: Duration,
    /// A union of somebody's own directories at somebody's own directory: the branches need not be parents of `data`, and
    /// the mount point is neither made nor changed.
    pub by_hand: bool,
}

/// A process that answered.
#[derive(Clone, Debug)]
pub(super) struct Launched {
    pub process: ProcessId,
    pub device: (u32, u32),
    /// Options as given, by their names in the program's dialect.
    pub options: BTreeMap<String, String>,
}

impl Launch<'_> {
    /// The settings that the process is to get.
    pub(super) fn settings(&self) -> Result<Vec<Setting>, UnionError> {
        let wanted = Wanted {
            fsname: self.spec.volume.as_str(),
            smallest: self.spec.smallest,
            read_only: self.spec.read_only,
            remote: self.spec.remote,
            passthrough: self.passthrough,
            moves: self.program.moves,
            overrides: self.overrides,
            refused: &self.program.refused,
        };
        mergerfs::options(self.program.version, &wanted).map_err(|error| self.request(error.to_string()))
    }

    fn request(&self, reason: String) -> UnionError {
        UnionError::Request { volume: self.spec.volume.clone(), reason }
    }

    /// Starts the process and waits until it has answered. `started` is told of it as soon as it exists.
    pub(super) fn run(
        &self,
        started: &mut dyn FnMut(&ProcessId) -> Result<(), UnionError>,
    ) -> Result<Launched, UnionError> {
        let settings = self.settings()?;
        let branches = mergerfs::branch_list(&self.spec.branches, self.spec.read_only)
            .map_err(|error| self.request(error.to_string()))?;
        if branches.is_empty() {
            return Err(self.request("it has no branches".to_owned()));
        }
        mergerfs::check_branch_path(&self.spec.mount_point)
            .map_err(|error| self.request(error.to_string()))?;
        self.prepare_mount_point()?;
        let log_start = self.prepare_log()?;
        let process = self.host.spawn_detached(&self.command(&settings, &branches)).map_err(|error| {
            UnionError::Start { volume: self.spec.volume.clone(), reason: error.to_string() }
        })?;
        let outcome = started(&process)
            .and_then(|()| self.wait_for_mount(&process, log_start))
            .and_then(|entry| self.check(&entry, &settings, &branches).map(|()| entry));
        match outcome {
            Ok(entry) => Ok(Launched {
                process,
                device: entry.device,
                options: settings.into_iter().filter_map(|s| Some((s.name, s.value?))).collect(),
            }),
            Err(error) => {
                let error = self.why_it_ended(&process, log_start, error);
                self.abandon(&process);
                Err(error)
            }
        }
    }

    /// MergerFS 2.33 mounts before it refuses an option that it does not know, and takes the mount away as it ends: who has
    /// seen that mount is answered by the directory beneath, and what the process said tells more than that.
    fn why_it_ended(&self, process: &ProcessId, log_start: usize, seen: UnionError) -> UnionError {
        match seen {
            UnionError::Host { .. } | UnionError::Request { .. }
                if self.host.process_wait(process, ENDING_BOUND).unwrap_or(false) =>
            {
                self.ended_at_once(log_start)
            }
            _ => seen,
        }
    }

    fn ended_at_once(&self, log_start: usize) -> UnionError {
        let reason = format!("it ended at once: {}", self.said(log_start));
        UnionError::Start { volume: self.spec.volume.clone(), reason }
    }

    fn command(&self, settings: &[Setting], branches: &str) -> DetachedCommand {
        let options: Vec<String> = settings.iter().map(Setting::argument).collect();
        DetachedCommand {
            program: self.program.path.clone(),
            args: vec![
                "-f".into(),
                "-o".into(),
                options.join(",").into(),
                branches.into(),
                self.spec.mount_point.clone().into(),
            ],
            log: self.log.clone(),
            cgroup: cgroup(&self.spec.volume),
            open_files: OPEN_FILES,
            // FUSE checks the caller's permissions (`default_permissions`), all groups included. MergerFS takes the
            // caller's id after that, with such groups only as the host's group file tells: without its capabilities it
            // would refuse members of a group that only the workload knows (fsGroup), and could not even reach the
            // branches through directories of root's.
            keeps_capabilities: true,
            oom_score_adj: Some(OOM_SCORE),
        }
    }

    /// The directory under the mount is immutable, so that nothing is ever written into it when the union is gone.
    fn prepare_mount_point(&self) -> Result<(), UnionError> {
        let point = &self.spec.mount_point;
        if self.by_hand {
            return Ok(());
        }
        self.host.ensure_directory(point, 0o755).map_err(host("make the union's mount point"))?;
        self.host.set_immutable(point, true).map_err(host("protect the union's mount point"))?;
        Ok(())
    }

    /// Puts a long log aside; returns how long the log is before the start.
    fn prepare_log(&self) -> Result<usize, UnionError> {
        if let Some(directory) = self.log.parent() {
            self.host.ensure_directory(directory, 0o700).map_err(host("make the directory of logs"))?;
        }
        let length = match self.host.occupied(&self.log) {
            Ok((_, length)) => length,
            Err(error) if error.is_missing() => 0,
            Err(source) => return Err(UnionError::Host { action: "look at the union's log", source }),
        };
        if length <= LOG_MAX {
            return Ok(usize::try_from(length).unwrap_or(usize::MAX));
        }
        let mut aside = self.log.clone().into_os_string();
        aside.push(".old");
        self.host.rename(&self.log, Path::new(&aside)).map_err(host("put the union's log aside"))?;
        Ok(0)
    }

    fn wait_for_mount(&self, process: &ProcessId, log_start: usize) -> Result<MountEntry, UnionError> {
        let deadline = Instant::now() + self.bound;
        let mut pause = Duration::from_millis(1);
        let start = |reason: String| UnionError::Start { volume: self.spec.volume.clone(), reason };
        let entry = loop {
            let gone = self.host.process_wait(process, pause).map_err(host("wait for mergerfs"))?;
            if gone {
                return Err(self.ended_at_once(log_start));
            }
            if let Some(entry) = mounted_at(self.host, &self.spec.mount_point)? {
                break entry;
            }
            if Instant::now() >= deadline {
                return Err(start(format!("it did not mount within {:?}", self.bound)));
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        };
        if entry.source != self.spec.volume.as_str() {
            return Err(start(format!("what is mounted is named {:?}", entry.source)));
        }
        // The mount is there before the process has taken up its work: only an answer tells that it can be used.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
        match self.host.liveness(&self.spec.mount_point, left).map_err(host("ask the union for its space"))? {
            Liveness::Alive => Ok(entry),
            Liveness::Hung => Err(start(format!("it did not answer within {:?}", self.bound))),
            Liveness::Dead(errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                Err(start(format!("its mount answers {error}: {}", self.said(log_start))))
            }
        }
    }

    /// What the process printed since its start, on one line.
    fn said(&self, log_start: usize) -> String {
        let limit = usize::try_from(2 * LOG_MAX).unwrap_or(usize::MAX);
        let content = self.host.read_file(&self.log, limit).ok().flatten().unwrap_or_default();
        let text = String::from_utf8_lossy(content.get(log_start..).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|l| !l.is_empty()).take(8).collect();
        if lines.is_empty() { "it printed nothing".to_owned() } else { lines.join("; ") }
    }

    /// Reads back what the process was given; a newer one leaves out what it does not know without a word.
    fn check(&self, entry: &MountEntry, settings: &[Setting], branches: &str) -> Result<(), UnionError> {
        // Without the first nobody but root gets in; without the second everybody gets at everything.
        for needed in ["allow_other", "default_permissions"] {
            if !entry.super_options.iter().any(|o| o == needed) {
                return Err(self.differs(needed, "set", "not set"));
            }
        }
        if self.spec.read_only && !entry.read_only() {
            return Err(self.differs("ro", "set", "not set"));
        }
        let ask = |name: &str| control(self.host, &self.spec.mount_point, name, self.bound);
        for setting in settings {
            let Some(wanted) = &setting.value else { continue };
            let found = ask(&setting.name)?.unwrap_or_else(|| "nothing".to_owned());
            if !mergerfs::confirmed(setting, &found) {
                return Err(self.differs(setting.key, wanted, &found));
            }
        }
        let found = ask("branches")?.unwrap_or_default();
        if mergerfs::parse_branch_list(&found) != mergerfs::parse_branch_list(branches) {
            return Err(self.differs("branches", branches, &found));
        }
        if !self.by_hand {
            let data = self.spec.mount_point.join("data");
            match self.host.liveness(&data, self.bound).map_err(host("look at the union's data"))? {
                Liveness::Alive => {}
                Liveness::Hung => return Err(self.request("its branches do not answer".to_owned())),
                Liveness::Dead(errno) => {
                    let error = std::io::Error::from_raw_os_error(errno);
                    return Err(self.request(format!("its branches have no data directory: {error}")));
                }
            }
        }
        Ok(())
    }

    fn differs(&self, option: &str, wanted: &str, found: &str) -> UnionError {
        UnionError::Option {
            volume: self.spec.volume.clone(),
            option: option.to_owned(),
            wanted: wanted.to_owned(),
            found: found.to_owned(),
        }
    }

    /// Takes back a failed start. What fails here is told in the log: the first error is the one that matters.
    fn abandon(&self, process: &ProcessId) {
        let Self { host, spec, .. } = self;
        let cleaned = mounted_at(host, &spec.mount_point).and_then(|entry| {
            let device = entry.map(|e| e.device);
            dismantle(host, &spec.mount_point, Some(process), device)
        });
        let cleaned = cleaned.and_then(|()| match self.by_hand {
            true => Ok(()),
            false => remove_mount_point(host, &spec.mount_point),
        });
        if let Err(error) = cleaned {
            tracing::warn!(volume.id = %spec.volume, %error, "a union that failed to start was not cleaned up whole");
        }
        remove_cgroup(host, &spec.volume);
    }
}

/// Name of the cgroup of a volume's process.
pub(super) fn cgroup(volume: &VolumeId) -> String {
    format!("union-csi-{volume}")
}

/// The MergerFS mount seen at `point`, if one is.
pub(super) fn mounted_at(host_: &Host, point: &Path) -> Result<Option<MountEntry>, UnionError> {
    let table = host_.mounts().map_err(host("read the mount table"))?;
    Ok(table.at(point).filter(|e| e.fs_type == FS_TYPE).cloned())
}

/// Asks the control file for an option; `None` where the program does not have it.
pub(super) fn control(
    host_: &Host,
    mount_point: &Path,
    option: &str,
    bound: Duration,
) -> Result<Option<String>, UnionError> {
    host_
        .xattr_read(&mount_point.join(".mergerfs"), &format!("user.mergerfs.{option}"), bound)
        .map(|value| value.map(|v| v.trim_end_matches('\0').to_owned()))
        .map_err(host("ask mergerfs for an option"))
}

/// Ends a union by force: abort of the connection `device`, lazy unmount of what is at its mount point, kill. Idempotent.
///
/// A connection is only aborted while it is seen mounted there: after a heal, the living union may be in its place, and
/// the number of a device whose last mount is gone is given to the next mount on the machine.
pub(super) fn dismantle(
    host_: &Host,
    mount_point: &Path,
    process: Option<&ProcessId>,
    device: Option<(u32, u32)>,
) -> Result<(), UnionError> {
    if let Some(entry) = mounted_at(host_, mount_point)?.filter(|e| Some(e.device) == device) {
        // Every waiter gets an error, and a process that waits for a branch is not waited for.
        host_.fuse_abort(entry.device.1).map_err(host("abort the union's connection"))?;
    }
    unmount_all(host_, mount_point, true)?;
    end(host_, process, Duration::ZERO)?;
    // It may have mounted between the two steps above.
    unmount_all(host_, mount_point, true)
}

/// Unmounts all MergerFS mounts at `mount_point`.
pub(super) fn unmount_all(host_: &Host, mount_point: &Path, lazy: bool) -> Result<(), UnionError> {
    let deadline = Instant::now() + BUSY_BOUND;
    while mounted_at(host_, mount_point)?.is_some() {
        match host_.unmount_within(UNMOUNT_BOUND, mount_point, lazy) {
            Err(error) if error.is_busy() && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => outcome.map(|_| ()).map_err(host("unmount the union"))?,
        }
    }
    Ok(())
}

/// Waits `patience` for the process to end by itself, then asks it to, then kills it. One that waits in the kernel for a
/// branch that does not answer cannot die before that does: it has its signal, serves nothing any more, and is only told
/// of.
pub(super) fn end(host_: &Host, process: Option<&ProcessId>, patience: Duration) -> Result<(), UnionError> {
    let Some(process) = process else { return Ok(()) };
    let gone = |bound| host_.process_wait(process, bound).map_err(host("wait for mergerfs to end"));
    if gone(patience)? {
        return Ok(());
    }
    for (signal, bound) in [(Signal::SIGTERM, END_BOUND / 4), (Signal::SIGKILL, END_BOUND)] {
        host_.process_signal(process, signal as i32).map_err(host("end mergerfs"))?;
        if gone(bound)? {
            return Ok(());
        }
    }
    tracing::warn!(
        union.pid = process.pid,
        "a mergerfs was killed and waits for a branch that does not answer; it ends with that wait"
    );
    Ok(())
}

/// Removes the directory that the union was mounted on; none is fine.
///
/// A process that ends may take its mount away between the two steps, or still bring it: then the flag was cleared on the
/// mount's root and not on the directory beneath (EPERM), or the directory is busy. Both pass, and are tried again.
pub(super) fn remove_mount_point(host_: &Host, mount_point: &Path) -> Result<(), UnionError> {
    let deadline = Instant::now() + BUSY_BOUND;
    loop {
        match host_.set_immutable(mount_point, false) {
            Ok(_) => {}
            Err(error) if error.is_missing() => return Ok(()),
            Err(source) => {
                return Err(UnionError::Host { action: "release the union's mount point", source });
            }
        }
        match host_.remove_directory(mount_point) {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() < deadline && (error.is_busy() || error.is_not_permitted()) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(source) => {
                return Err(UnionError::Host { action: "remove the union's mount point", source });
            }
        }
    }
}

/// An empty cgroup costs nothing: one that stays is only told of.
pub(super) fn remove_cgroup(host_: &Host, volume: &VolumeId) {
    if let Err(error) = host_.remove_cgroup(&cgroup(volume)) {
        tracing::debug!(volume.id = %volume, %error, "the union's cgroup stays");
    }
}

/// Names what the machine refused.
pub(super) fn host(action: &'static str) -> impl FnOnce(HostError) -> UnionError {
    move |source| UnionError::Host { action, source }
}
