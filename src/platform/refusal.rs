//! Whether an ext4 filesystem still takes writes.
//!
//! After an error ext4 aborts its journal and refuses every write from then on. Which kernels say so in the mount table: those
//! that set the filesystem read-only (`ro`), and those from 6.15 on (`emergency_ro`). Between them lie 6.12 and what was taken
//! from it into older stable kernels: there the table says `rw`, stat(2) and getxattr(2) answer from memory, and only a write is
//! told the truth (measured on Debian's 6.1.0-56: 66 s of refused writes with nothing else to see).

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Host, Result};

impl Host {
    /// True where the ext4 filesystem on that device has noted errors and refuses a new file at `path`, a directory on it. The
    /// file has no name (`O_TMPFILE`, open(2)) and is gone when this returns. A filesystem without errors is not asked, and one
    /// that is full does not refuse.
    ///
    /// # Errors
    /// [`super::HostError::Timeout`] where it does not answer within `bound`.
    pub fn ext4_refuses_writes(&self, device: (u32, u32), path: &Path, bound: Duration) -> Result<bool> {
        if !has_errors(device) {
            return Ok(false);
        }
        self.enter("open a file without a name", path)?;
        let directory = path.to_owned();
        self.within("trying to write", path, bound, move |_| match unnamed_file(&directory) {
            Err(Errno::ROFS | Errno::IO) => Ok(true),
            Ok(()) | Err(_) => Ok(false),
        })
    }
}

fn unnamed_file(directory: &Path) -> std::result::Result<(), Errno> {
    rustix::fs::open(directory, OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC, Mode::RUSR).map(drop)
}

/// Of the filesystem's life, until e2fsck mends it: a count above zero does not say that it fails now
/// (`Documentation/ABI/testing/sysfs-fs-ext4`).
fn has_errors(device: (u32, u32)) -> bool {
    let link = PathBuf::from(format!("/sys/dev/block/{}:{}", device.0, device.1));
    let Some(name) = std::fs::read_link(link).ok().and_then(|to| to.file_name().map(ToOwned::to_owned))
    else {
        return false;
    };
    let count = std::fs::read_to_string(Path::new("/sys/fs/ext4").join(name).join("errors_count"));
    count.is_ok_and(|count| count.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_name_leaves_nothing_and_a_place_that_cannot_have_one_is_told() {
        let directory = tempfile::tempdir().unwrap();
        unnamed_file(directory.path()).unwrap();
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        // sysfs takes no files.
        unnamed_file(Path::new("/sys")).unwrap_err();
    }

    #[test]
    fn a_device_that_is_none_has_no_errors() {
        assert!(!has_errors((0, 4_000_000)));
    }
}
