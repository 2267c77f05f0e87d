//! Making and checking filesystems, by the programs of e2fsprogs, xfsprogs and btrfs-progs.

use std::path::Path;

use super::{Host, Result};
use crate::domain::policy::FsType;

impl Host {
    /// True where the program that makes this filesystem is installed.
    #[must_use]
    pub fn can_make(&self, fs: FsType) -> bool {
        let _ = fs;
        unimplemented!()
    }

    /// Makes a filesystem with the given UUID and label on `file` (an image or a device), for a branch: no blocks kept for
    /// root, journal sized by [`crate::domain::union`]'s overhead model, discard off so that the reservation stays.
    ///
    /// # Errors
    /// The program fails.
    pub fn make_filesystem(&self, file: &Path, fs: FsType, uuid: &str, label: &str) -> Result<()> {
        let _ = (file, fs, uuid, label);
        unimplemented!()
    }

    /// UUID and type of the filesystem in `file`, read from its superblock; `None` where there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn probe_filesystem(&self, file: &Path) -> Result<Option<(String, String)>> {
        let _ = file;
        unimplemented!()
    }
}
