//! Pools that are not named one by one: everything mounted directly below a directory.
//!
//! In a cluster all nodes share one configuration, and their disks differ. So the administrator names a directory once,
//! and mounts each disk that a node gives below it; a disk that is mounted later becomes a pool by itself. What lies there
//! is looked at anew each time, nothing is remembered here.
//!
//! A plain directory may be the mount point of a disk that did not mount, so it is listed and never taken into use. A
//! symbolic link is taken: nobody makes one by accident.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{PoolSettings, Pools, lock};
use crate::domain::PoolName;
use crate::domain::pool::Reserve;
use crate::platform::Result;
use crate::platform::directory::EntryKind;
use crate::platform::mount::MountTable;

/// A directory whose entries are pools, each named by its entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolsUnder {
    /// The directory; may be missing.
    pub path: PathBuf,
    /// Labels of all pools below it.
    pub labels: BTreeMap<String, String>,
    /// What to keep free on each of them. Default 5 %.
    pub reserve: Reserve,
}

/// A pool that this node has, configured by name or found.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) settings: PoolSettings,
    /// It is a plain directory that nobody named: not to be taken into use for the first time.
    pub(super) plain: bool,
}

impl Pools {
    /// Also gives what lies directly below these directories.
    #[must_use]
    pub fn with_under(mut self, under: Vec<PoolsUnder>) -> Self {
        self.under = under;
        self
    }

    /// All pools: the configured ones in their order, then those found, by directory and name. A configured pool's name or
    /// directory is not listed a second time.
    pub(super) fn listed(&self, mounts: &MountTable) -> Vec<Listed> {
        let mut listed: Vec<Listed> =
            self.settings.iter().map(|s| Listed { settings: s.clone(), plain: false }).collect();
        for under in &self.under {
            match self.entries(under, mounts) {
                Ok(entries) => entries.into_iter().for_each(|(name, path, plain)| {
                    self.list(&mut listed, under, &name, path, plain);
                }),
                Err(error) => self.warn_once(&under.path, &error.to_string()),
            }
        }
        listed
    }

    /// The directories and links directly below, by name: the path as configured, and whether it is a plain directory.
    fn entries(&self, under: &PoolsUnder, mounts: &MountTable) -> Result<Vec<(String, PathBuf, bool)>> {
        let real = match self.host.resolve_directory(&under.path) {
            Ok((real, _)) => real,
            Err(e) if e.is_missing() => return Ok(Vec::new()),
            Err(e) => return Err(e),
        };
        let mut entries = Vec::new();
        for (name, kind) in self.host.directory_entries(&real)?.unwrap_or_default() {
            let plain = match kind {
                EntryKind::Directory => mounts.at(&real.join(&name)).is_none(),
                EntryKind::Link => false,
                EntryKind::Other => continue,
            };
            let path = under.path.join(&name);
            entries.push((name.to_string_lossy().into_owned(), path, plain));
        }
        entries.sort();
        Ok(entries)
    }

    fn list(&self, listed: &mut Vec<Listed>, under: &PoolsUnder, name: &str, path: PathBuf, plain: bool) {
        // Hidden directories and what mkfs made are nobody's disks.
        if name.starts_with('.') || name == "lost+found" || listed.iter().any(|l| l.settings.path == path) {
            return;
        }
        let Ok(name) = name.parse::<PoolName>() else {
            let why = "its name cannot be a pool's: use lower-case letters, digits and '-', at most 63";
            return self.warn_once(&path, why);
        };
        if let Some(other) = listed.iter().find(|l| l.settings.name == name) {
            let why = format!("the name is taken by the pool at {}", other.settings.path.display());
            return self.warn_once(&path, &why);
        }
        let settings = PoolSettings {
            name,
            path,
            labels: under.labels.clone(),
            reserve: under.reserve,
            media: None,
            uuid: None,
        };
        listed.push(Listed { settings, plain });
    }

    /// The measurement comes every few seconds; the log shall tell once.
    fn warn_once(&self, path: &Path, reason: &str) {
        if lock(&self.warned).insert(path.to_owned()) {
            tracing::warn!(path = %path.display(), reason, "it is not taken as a pool");
        }
    }
}

/// Why a plain directory below `poolsUnder` is not used.
pub(super) fn not_mounted(path: &Path) -> String {
    format!(
        "no filesystem is mounted at {}: mount the disk; if the directory itself shall be a pool, put a symbolic link to \
         another directory in its place, or name it under `pools`",
        path.display()
    )
}
