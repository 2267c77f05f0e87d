//! What unions work on this host: found out by making one, at start.
//!
//! No version is believed. Two scratch branches are merged with the options that volumes get; files are made, read,
//! and written through the union, also by `O_DIRECT`; passthrough counts only when it was seen to work while the process
//! stood still. A file is made to outgrow a tiny branch, to see whether the program moves it without damage. An option for
//! speed that the program refuses is left out from then on.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::detect::{self, Program};
use super::launch::{self, Launch, Launched};
use super::{MergerfsSettings, UnionAbilities, UnionError, UnionSpec};
use crate::domain::mergerfs;
use crate::domain::union::UnionKind;
use crate::domain::{Bytes, VolumeId};
use crate::platform::mount::MountAttr;
use crate::platform::{Host, HostError};

/// Name of the scratch directory, before the pid.
const PREFIX: &str = "selftest-";

/// Options for speed that a program may refuse before it is given up.
const REFUSALS_MAX: usize = 12;

/// How long a file of the scratch union may take to be read or written.
const IO_BOUND: Duration = Duration::from_secs(5);

/// Size of the branch that a file outgrows, and blocks of 64 KiB that this file has: half as much again.
const TINY: &str = "size=1m";
const OUTGROWN: u8 = 24;

/// How long a read may take while the process is stopped; with passthrough it takes microseconds.
const PASSTHROUGH_BOUND: Duration = Duration::from_millis(500);

/// Finds the program and tries it; tries overlayfs.
pub(super) fn run(
    host: &Host,
    settings: &MergerfsSettings,
    state_dir: &Path,
) -> (Option<Program>, UnionAbilities) {
    remove_leftovers(host, state_dir);
    let mut abilities = UnionAbilities::default();
    let scratch = Scratch { host, root: state_dir.join(format!("{PREFIX}{}", std::process::id())) };
    if let Err(error) = scratch.prepare() {
        abilities.mergerfs_problem = Some(format!("the self-test has no place to run: {error}"));
        return (None, abilities);
    }
    abilities.overlay = match scratch.overlay() {
        Ok(()) => true,
        Err(error) => {
            tracing::warn!(%error, "overlayfs does not work here; mergerfs serves read-only volumes too");
            false
        }
    };
    let found = detect::find(host, &settings.path)
        .map(|program| detect::keep_copy(host, program, &state_dir.join("bin")));
    let tried = found.and_then(|program| {
        scratch.mergerfs(program, settings, &mut abilities).map_err(|error| error.to_string())
    });
    match tried {
        Ok(program) => {
            abilities.mergerfs_version = Some(program.version.to_string());
            abilities.refused_options.clone_from(&program.refused);
            abilities.moves_files = program.moves;
            tracing::info!(
                mergerfs.version = %program.version,
                mergerfs.passthrough = abilities.passthrough,
                mergerfs.direct_read = abilities.direct_read,
                mergerfs.direct_write = abilities.direct_write,
                mergerfs.moves_files = abilities.moves_files,
                "mergerfs passed the self-test"
            );
            (Some(program), abilities)
        }
        Err(problem) => {
            tracing::warn!(%problem, "no mergerfs can be used; only volumes of one branch can be served");
            abilities.mergerfs_problem = Some(problem);
            (None, abilities)
        }
    }
}

/// Removes what a self-test left that was cut off.
fn remove_leftovers(host: &Host, state_dir: &Path) {
    let entries = std::fs::read_dir(state_dir).into_iter().flatten().filter_map(Result::ok);
    for name in entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| n.starts_with(PREFIX)) {
        let scratch = Scratch { host, root: state_dir.join(name) };
        scratch.remove();
    }
}

/// Two branches and a mount point, gone when dropped.
struct Scratch<'a> {
    host: &'a Host,
    root: PathBuf,
}

impl Scratch<'_> {
    fn prepare(&self) -> Result<(), HostError> {
        for branch in ["a", "b"] {
            let data = self.root.join(branch).join("data");
            self.host.ensure_directory(&data, 0o755)?;
            self.host.write_atomic(&data.join(format!("only-in-{branch}")), branch.as_bytes())?;
        }
        Ok(())
    }

    fn branches(&self) -> Vec<PathBuf> {
        vec![self.root.join("a"), self.root.join("b")]
    }

    /// A branch so small that a file outgrows it, with the beginning of that file.
    fn tiny_branch(&self) -> Result<PathBuf, HostError> {
        let tiny = self.root.join("tiny");
        if self.host.ensure_directory(&tiny, 0o755)? {
            let none = MountAttr::default();
            self.host.mount_filesystem(Path::new("tmpfs"), &tiny, "tmpfs", none, TINY)?;
        }
        self.host.ensure_directory(&tiny.join("data"), 0o755)?;
        self.host.write_atomic(&tiny.join("data/outgrows"), b"")?;
        Ok(tiny)
    }

    fn remove(&self) {
        if let Err(error) = self.try_remove() {
            tracing::warn!(path = %self.root.display(), %error, "the self-test was not cleaned up whole");
        }
    }

    fn try_remove(&self) -> Result<(), HostError> {
        let mounted: Vec<PathBuf> =
            self.host.mounts()?.below(&self.root).map(|e| e.mount_point.clone()).collect();
        for point in mounted.iter().rev() {
            self.host.unmount(point, true)?;
        }
        if let (Some(parent), Some(name)) =
            (self.root.parent(), self.root.file_name().and_then(|n| n.to_str()))
        {
            self.host.remove_tree(parent, name)?;
        }
        Ok(())
    }

    fn overlay(&self) -> Result<(), HostError> {
        let target = self.root.join("overlay");
        self.host.ensure_directory(&target, 0o755)?;
        let layers: Vec<PathBuf> = self.branches().iter().map(|b| b.join("data")).collect();
        self.host.mount_overlay(&layers, &target, MountAttr { read_only: true, ..MountAttr::default() })?;
        let seen = both_seen(self.host, &target);
        self.host.unmount(&target, true)?;
        seen
    }

    /// Tries the program until it starts with all options that it is to have, then what works through it.
    fn mergerfs(
        &self,
        mut program: Program,
        settings: &MergerfsSettings,
        abilities: &mut UnionAbilities,
    ) -> Result<Program, UnionError> {
        let mut passthrough = program.version.may_pass_through();
        loop {
            // Asked for, to be tried.
            program.moves = true;
            let spec = self.spec();
            let launch = Launch {
                host: self.host,
                program: &program,
                spec: &spec,
                passthrough,
                overrides: &settings.options,
                log: self.root.join("log"),
                bound: settings.start_timeout,
                by_hand: false,
            };
            match launch.run(&mut |_| Ok(())) {
                Ok(launched) => {
                    let tried = self.try_union(&spec, &launched, passthrough, abilities);
                    let moved = self.try_moving(&spec);
                    let ended = launch::dismantle(
                        self.host,
                        &spec.mount_point,
                        Some(&launched.process),
                        Some(launched.device),
                    );
                    launch::remove_cgroup(self.host, &spec.volume);
                    tried?;
                    ended?;
                    program.moves = moved;
                    if passthrough && !abilities.passthrough {
                        // What works without it is another question: direct I/O differs.
                        passthrough = false;
                        continue;
                    }
                    return Ok(program);
                }
                Err(error) => {
                    let Some(key) = dispensable(&launch, &error) else { return Err(error) };
                    if key == "passthrough.io" && passthrough {
                        passthrough = false;
                    } else if program.refused.len() < REFUSALS_MAX && !program.refused.contains(&key) {
                        tracing::warn!(option = %key, %error, "mergerfs refuses an option; unions do without it");
                        program.refused.push(key);
                    } else {
                        return Err(error);
                    }
                }
            }
        }
    }

    fn spec(&self) -> UnionSpec {
        UnionSpec {
            volume: VolumeId::from_request_name(&format!("{PREFIX}{}", std::process::id())),
            kind: UnionKind::Mergerfs,
            branches: self.tiny_branch().into_iter().chain(self.branches()).collect(),
            smallest: Bytes::gib(1),
            mount_point: self.root.join("union"),
            read_only: false,
            remote: false,
            options: std::collections::BTreeMap::new(),
        }
    }

    fn try_union(
        &self,
        spec: &UnionSpec,
        launched: &Launched,
        passthrough: bool,
        abilities: &mut UnionAbilities,
    ) -> Result<(), UnionError> {
        let data = spec.mount_point.join("data");
        let start =
            |error: HostError| UnionError::Start { volume: spec.volume.clone(), reason: error.to_string() };
        both_seen(self.host, &data).map_err(start)?;
        let trial = self.host.try_io(&data.join("trial"), IO_BOUND).map_err(start)?;
        abilities.direct_read = trial.direct_read;
        abilities.direct_write = trial.direct_write;
        self.host.try_users(&data, IO_BOUND).map_err(start)?;
        abilities.passthrough = passthrough
            && self
                .host
                .try_passthrough(&data.join("passthrough"), &launched.process, PASSTHROUGH_BOUND)
                .map_err(start)?;
        Ok(())
    }
}

impl Scratch<'_> {
    /// Whether a file that outgrows its branch is moved and stays whole. Where that cannot be found out it is not.
    fn try_moving(&self, spec: &UnionSpec) -> bool {
        let Some((grown, tiny)) = spec
            .branches
            .first()
            .map(|tiny| (spec.mount_point.join("data/outgrows"), tiny.join("data/outgrows")))
        else {
            return false;
        };
        match self.host.try_append(&grown, OUTGROWN, IO_BOUND) {
            Ok(whole) => whole && !tiny.exists(),
            Err(error) => {
                tracing::warn!(%error, "whether files can be moved was not found out; they are not");
                false
            }
        }
    }
}

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Files of both branches can be found in what joins them.
fn both_seen(host: &Host, joined: &Path) -> Result<(), HostError> {
    for branch in ["a", "b"] {
        let file = joined.join(format!("only-in-{branch}"));
        host.space(&file, IO_BOUND)?;
    }
    Ok(())
}

/// The option that was refused, where a union can do without it.
fn dispensable(launch: &Launch<'_>, error: &UnionError) -> Option<String> {
    let key = match error {
        UnionError::Option { option, .. } => option.clone(),
        UnionError::Start { reason, .. } => mergerfs::refused_option(reason)?,
        _ => return None,
    };
    let settings = launch.settings().ok()?;
    settings.iter().any(|s| s.key == key && !s.essential).then_some(key)
}
