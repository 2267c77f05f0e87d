//! FUSE connections (`/sys/fs/fuse/connections`, the filesystem fusectl).

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::mount::MountAttr;
use super::{Host, HostError, Result, failed};

/// Where fusectl belongs; the directory is made by the kernel's fuse module.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// A connection that can be aborted at once, at any later time. It is that connection and no other: when it is gone, its number
/// may be another's, and nothing happens.
#[derive(Debug)]
pub struct FuseConnection(File);

impl FuseConnection {
    /// Every request fails with ENOTCONN or ECONNABORTED from now on.
    ///
    /// # Errors
    /// What write(2) tells.
    pub fn abort(&self) -> io::Result<()> {
        (&self.0).write_all(b"1")
    }
}

impl Host {
    /// The connection of the mount whose device has this minor number; `None` where there is no such.
    ///
    /// # Errors
    /// What mount(2) of fusectl or opening `abort` tells.
    pub fn fuse_connection(&self, minor: u32) -> Result<Option<FuseConnection>> {
        let file = self.connections()?.join(minor.to_string()).join("abort");
        match File::options().write(true).open(&file) {
            Ok(file) => Ok(Some(FuseConnection(file))),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(failed("open", &file)(error)),
        }
    }

    /// Ends a connection whose daemon hangs: every request fails with ENOTCONN or ECONNABORTED from now on. Mounts fusectl
    /// where it is not mounted. False where there is no such connection.
    ///
    /// `minor` is the minor number of the mount's device.
    ///
    /// # Errors
    /// What mount(2) of fusectl or writing to `abort` tells.
    pub fn fuse_abort(&self, minor: u32) -> Result<bool> {
        let file = self.connections()?.join(minor.to_string()).join("abort");
        self.enter("fuse abort", &file)?;
        let write = || std::fs::OpenOptions::new().write(true).open(&file)?.write_all(b"1");
        match write() {
            Ok(()) => Ok(true),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(failed("write", &file)(error)),
        }
    }

    /// Requests that wait for the daemon (`waiting`), or `None` where there is no such connection.
    ///
    /// # Errors
    /// fusectl cannot be mounted or read.
    pub fn fuse_waiting(&self, minor: u32) -> Result<Option<u64>> {
        let file = self.connections()?.join(minor.to_string()).join("waiting");
        self.enter("fuse waiting", &file)?;
        match std::fs::read_to_string(&file) {
            Ok(text) => text.trim().parse().map(Some).map_err(|error| HostError::Unexpected {
                subject: file.display().to_string(),
                reason: format!("{text:?}: {error}"),
            }),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(failed("read", &file)(error)),
        }
    }

    /// Where fusectl is mounted, after mounting it where it is not.
    fn connections(&self) -> Result<PathBuf> {
        if let Some(mounted) = self.mounts()?.entries.iter().find(|entry| entry.fs_type == "fusectl") {
            return Ok(mounted.mount_point.clone());
        }
        let target = Path::new(CONNECTIONS);
        let attr = MountAttr { nosuid: true, nodev: true, noexec: true, noatime: false, read_only: false };
        match self.mount_filesystem("fusectl".as_ref(), target, "fusectl", attr, "") {
            // Somebody else mounted it meanwhile.
            Err(error) if error.is_busy() => {}
            outcome => outcome?,
        }
        Ok(target.to_owned())
    }
}

/// ENODEV: the connection ended between opening and reading.
fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}
