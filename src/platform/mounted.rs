//! Whether something is mounted, in whatever mount namespace.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::mount::{MountEntry, table_of};
use super::{Host, Result, failed};

impl Host {
    /// Whether a mount of this mount namespace, or of another one that has a process, is one of those. In a container, this
    /// sees the rest of the machine where the container shares the host's pid namespace. A mount that was taken out of its
    /// namespace while something has it open is in no table.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn mounted_anywhere(&self, which: impl Fn(&MountEntry) -> bool) -> Result<bool> {
        if self.mounts()?.entries.iter().any(&which) {
            return Ok(true);
        }
        for table in tables()? {
            // A process that ended meanwhile took its mounts along, or left them to another of its namespace.
            if let Ok(table) = table_of(&table)
                && table.entries.iter().any(&which)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The tables of mounts of all namespaces, each as one process of it, and each other root directory in it, sees it.
fn tables() -> Result<Vec<PathBuf>> {
    let proc = Path::new("/proc");
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(failed("readdir", proc))? {
        let process = entry.map_err(failed("readdir", proc))?.path();
        let Ok(namespace) = std::fs::read_link(process.join("ns/mnt")) else { continue };
        let root = std::fs::read_link(process.join("root")).unwrap_or_default();
        if seen.insert((namespace, root)) {
            found.push(process.join("mountinfo"));
        }
    }
    Ok(found)
}
