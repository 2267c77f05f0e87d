//! Extended attributes (xattr(7)), for MergerFS's control file.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, XattrFlags};
use rustix::io::Errno;

use super::file::fd_path;
use super::{Host, HostError, Result, failed};

/// `XATTR_SIZE_MAX` of linux/limits.h: no value is longer.
const VALUE_MAX: usize = 64 * 1024;

impl Host {
    /// The attribute's value, within `bound`; `None` where it does not exist (ENODATA).
    ///
    /// The call is made through an `O_PATH` descriptor: for MergerFS's control file that asks the daemon alone and
    /// touches no branch. Bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// What getxattr(2) tells, or a timeout.
    pub fn xattr_read(&self, path: &Path, name: &str, bound: Duration) -> Result<Option<String>> {
        self.enter("getxattr", path)?;
        let (file, key) = (path.to_owned(), name.to_owned());
        let read = move || -> Result<Vec<u8>, Errno> {
            let fd = open(&file)?;
            let mut value = vec![0; VALUE_MAX];
            let length = rustix::fs::getxattr(fd_path(&fd), &key, &mut value)?;
            value.truncate(length);
            Ok(value)
        };
        match self.probes.ask(path, bound, read)? {
            None => Err(late("getxattr", path, bound)),
            Some(Ok(value)) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
            Some(Err(Errno::NODATA)) => Ok(None),
            Some(Err(errno)) => Err(failed("getxattr", path)(errno)),
        }
    }

    /// Sets the attribute, within `bound`. After a timeout the value may still be set, late.
    ///
    /// # Errors
    /// What setxattr(2) tells, or a timeout.
    pub fn xattr_write(&self, path: &Path, name: &str, value: &str, bound: Duration) -> Result<()> {
        self.enter("setxattr", path)?;
        let (file, key, value) = (path.to_owned(), name.to_owned(), value.to_owned());
        let write = move || -> Result<(), Errno> {
            let fd = open(&file)?;
            rustix::fs::setxattr(fd_path(&fd), &key, value.as_bytes(), XattrFlags::empty())
        };
        match self.probes.ask(path, bound, write)? {
            None => Err(late("setxattr", path, bound)),
            Some(result) => result.map_err(failed("setxattr", path)),
        }
    }
}

fn open(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

fn late(action: &'static str, path: &Path, bound: Duration) -> HostError {
    HostError::Timeout { action, subject: path.display().to_string(), seconds: bound.as_secs() }
}
