//! FUSE connections (`/sys/fs/fuse/connections`).

use super::{Host, Result};

impl Host {
    /// Ends a connection whose daemon hangs: every request fails with ENOTCONN or ECONNABORTED from now on. Mounts fusectl
    /// where it is not mounted. False where there is no such connection.
    ///
    /// # Errors
    /// What writing to `abort` tells.
    pub fn fuse_abort(&self, minor: u32) -> Result<bool> {
        let _ = minor;
        unimplemented!()
    }

    /// Requests that wait for the daemon (`waiting`), or `None` where there is no such connection.
    ///
    /// # Errors
    /// fusectl cannot be read.
    pub fn fuse_waiting(&self, minor: u32) -> Result<Option<u64>> {
        let _ = minor;
        unimplemented!()
    }
}
