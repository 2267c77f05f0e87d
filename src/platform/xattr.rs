//! Extended attributes (xattr(7)), for MergerFS's control file.

use std::path::Path;
use std::time::Duration;

use super::{Host, Result};

impl Host {
    /// The attribute's value, within `bound`; `None` where it does not exist (ENODATA).
    ///
    /// # Errors
    /// What getxattr(2) tells, or a timeout.
    pub fn xattr_read(&self, path: &Path, name: &str, bound: Duration) -> Result<Option<String>> {
        let _ = (path, name, bound);
        unimplemented!()
    }

    /// Sets the attribute, within `bound`.
    ///
    /// # Errors
    /// What setxattr(2) tells, or a timeout.
    pub fn xattr_write(&self, path: &Path, name: &str, value: &str, bound: Duration) -> Result<()> {
        let _ = (path, name, value, bound);
        unimplemented!()
    }
}
