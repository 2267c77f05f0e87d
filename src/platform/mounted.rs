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
        for process in processes()? {
            // A process that ended meanwhile took its mounts along, or left them to another of its namespace.
            if let Ok(table) = table_of(&process.join("mountinfo"))
                && table.entries.iter().any(&which)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// One process of each mount namespace, and of each other root directory in it, as its directory in `/proc`; this one first.
pub(super) fn processes() -> Result<Vec<PathBuf>> {
    let proc = Path::new("/proc");
    let mut all = vec![proc.join("self")];
    for entry in std::fs::read_dir(proc).map_err(failed("readdir", proc))? {
        all.push(entry.map_err(failed("readdir", proc))?.path());
    }
    let mut seen = BTreeSet::new();
    all.retain(|process| {
        let Ok(namespace) = std::fs::read_link(process.join("ns/mnt")) else { return false };
        seen.insert((namespace, std::fs::read_link(process.join("root")).unwrap_or_default()))
    });
    Ok(all)
}
