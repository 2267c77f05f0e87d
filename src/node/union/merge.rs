//! One union by hand: `union-csi merge`.
//!
//! The same program, options, checks and clean-up as for volumes, over directories that somebody names. Unlike a volume,
//! what is seen is the union's root, with MergerFS's control file in it: not something to give to a container.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::launch::{self, Launch, host};
use super::{MergerfsSettings, UnionError, UnionSpec, detect, watch_exit};
use crate::domain::union::UnionKind;
use crate::domain::{Bytes, VolumeId};
use crate::platform::process::ProcessId;
use crate::platform::{Host, HostError};

/// How long a branch may take to tell its space.
const BRANCH_BOUND: Duration = Duration::from_secs(5);

/// What is to be merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeRequest {
    /// Existing directories, absolute.
    pub branches: Vec<PathBuf>,
    /// Existing directory, absolute, on which nothing is mounted.
    pub target: PathBuf,
    /// Elements of `-o`: `key=value` with the keys that classes may use, or `ro`.
    pub options: Vec<String>,
    /// Where the process writes what it has to say; made where missing.
    pub log: PathBuf,
}

/// A union by hand that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Merged {
    /// Where it is mounted.
    pub target: PathBuf,
    /// Its process, which outlives the caller.
    pub process: ProcessId,
    /// Version of the program.
    pub version: String,
    /// Options that it was given and that were read back, by their names in the program's dialect.
    pub options: BTreeMap<String, String>,
}

/// Starts the union. On return it has answered and its options were read back. Blocks.
///
/// # Errors
/// See [`UnionError`]; nothing stays mounted then.
pub fn merge(
    host_: &Host,
    settings: &MergerfsSettings,
    request: &MergeRequest,
) -> Result<Merged, UnionError> {
    let spec = spec(host_, settings, request)?;
    let program = detect::find(host_, &settings.path).map_err(|reason| UnionError::NoMergerfs { reason })?;
    let launch = Launch {
        host: host_,
        program: &program,
        spec: &spec,
        passthrough: false,
        overrides: &spec.options,
        log: request.log.clone(),
        bound: settings.start_timeout,
        by_hand: true,
    };
    let launched = launch.run(&mut |_| Ok(()))?;
    Ok(Merged {
        target: request.target.clone(),
        process: launched.process,
        version: program.version.to_string(),
        options: launched.options,
    })
}

fn spec(host_: &Host, settings: &MergerfsSettings, request: &MergeRequest) -> Result<UnionSpec, UnionError> {
    let name = request.target.file_name().unwrap_or_default().to_string_lossy();
    let volume = VolumeId::from_request_name(&format!("merge-{name}"));
    let refuse = |reason: String| UnionError::Request { volume: volume.clone(), reason };
    if !request.target.is_dir() {
        return Err(refuse(format!("{} is not a directory", request.target.display())));
    }
    let table = host_.mounts().map_err(host("read the mount table"))?;
    if table.at(&request.target).is_some() {
        return Err(refuse(format!("something is mounted at {}: unmount it", request.target.display())));
    }
    let mut smallest = Bytes::MAX;
    for branch in &request.branches {
        if !branch.is_dir() {
            return Err(refuse(format!("branch {} is not a directory", branch.display())));
        }
        if request.target.starts_with(branch) {
            // The process would have to ask itself for its own files, and wait for ever.
            return Err(refuse(format!("the target lies in branch {}", branch.display())));
        }
        let space = host_.space(branch, BRANCH_BOUND).map_err(host("ask a branch for its space"))?;
        smallest = smallest.min(Bytes::new(space.total));
    }
    let mut options = settings.options.clone();
    let mut read_only = false;
    for option in &request.options {
        match option.split_once('=') {
            None if option == "ro" => read_only = true,
            None if option == "rw" => read_only = false,
            None => return Err(refuse(format!("option {option:?} is not understood: write key=value"))),
            Some((key, value)) => {
                options.insert(key.to_owned(), value.to_owned());
            }
        }
    }
    Ok(UnionSpec {
        volume: volume.clone(),
        kind: UnionKind::Mergerfs,
        branches: request.branches.clone(),
        smallest,
        mount_point: request.target.clone(),
        read_only,
        remote: false,
        options,
    })
}

/// SIGTERM and SIGINT, listened for from the moment that it is made: before [`merge`], so that none is missed.
#[derive(Debug)]
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    /// Begins to listen.
    ///
    /// # Errors
    /// What sigaction(2) tells.
    pub fn listen() -> Result<Self, UnionError> {
        let listening = |source| {
            let subject = "SIGTERM and SIGINT".to_owned();
            UnionError::Host {
                action: "listen for signals",
                source: HostError::Syscall { call: "sigaction", subject, source },
            }
        };
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(listening)?,
            interrupt: signal(SignalKind::interrupt()).map_err(listening)?,
        })
    }

    async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Stays until a signal comes, then unmounts the union; files that are open stay open until they are closed.
///
/// # Errors
/// The process ended by itself (a crash, or somebody unmounted it), or the union could not be unmounted.
pub async fn hold(host_: &Host, merged: &Merged, mut stop: StopSignals) -> Result<(), UnionError> {
    tokio::select! {
        () = stop.received() => {}
        ended = watch_exit(host_, &merged.process) => {
            ended?;
            unmerge(host_, merged)?;
            let volume = VolumeId::from_request_name(&merged.target.to_string_lossy());
            return Err(UnionError::Start { volume, reason: "its process has ended".to_owned() });
        }
    }
    unmerge(host_, merged)
}

fn unmerge(host_: &Host, merged: &Merged) -> Result<(), UnionError> {
    match launch::unmount_all(host_, &merged.target, false) {
        Err(UnionError::Host { source, .. }) if source.is_busy() => {
            // What has files open keeps them; the process ends with the last one.
            launch::unmount_all(host_, &merged.target, true)
        }
        Err(error) => Err(error),
        Ok(()) => launch::end(host_, Some(&merged.process), Duration::from_secs(2)),
    }
}
