//! Errors of filesystems, told by the kernel as they happen (fanotify(7), `FAN_FS_ERROR`).
//!
//! ext4 tells since Linux 5.16, others later or never: a filesystem that tells nothing may be well or not.

#![allow(unsafe_code)] // fanotify_init(2) and fanotify_mark(2) have no wrapper with these flags.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Host, Result, failed};

// From linux/fanotify.h.
const FAN_CLOEXEC: libc::c_uint = 0x1;
const FAN_NONBLOCK: libc::c_uint = 0x2;
const FAN_REPORT_FID: libc::c_uint = 0x200;
const FAN_MARK_ADD: libc::c_uint = 0x1;
const FAN_MARK_FILESYSTEM: libc::c_uint = 0x100;
const FAN_FS_ERROR: u64 = 0x8000;

/// One event with all its parts takes some hundred bytes.
const BUFFER_BYTES: usize = 8192;

/// Where errors of the watched filesystems are told. Its descriptor is readable when there was one.
#[derive(Debug)]
pub struct FsErrors(OwnedFd);

impl FsErrors {
    /// The descriptor, to wait for.
    ///
    /// # Errors
    /// What dup(2) tells.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Takes what has been told until now; what was wrong, and with which filesystem, is to be seen in the mount table.
    ///
    /// # Errors
    /// What read(2) tells.
    pub fn take(descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let mut buffer = [0_u8; BUFFER_BYTES];
        loop {
            match rustix::io::read(descriptor, &mut buffer) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for FsErrors {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Host {
    /// A place where errors are told (fanotify_init(2)); `None` where this kernel or these privileges do not allow one.
    #[must_use]
    pub fn fs_errors(&self) -> Option<FsErrors> {
        let flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_REPORT_FID;
        // SAFETY: two integers; a descriptor that nobody else has is returned, or -1.
        let fd = unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) };
        // SAFETY: it was just opened, and is closed by its only owner.
        (fd >= 0).then(|| FsErrors(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Has the errors of the filesystem at `path` told from now on until it is unmounted, which this does not hinder. False
    /// where that filesystem tells none.
    ///
    /// # Errors
    /// What fanotify_mark(2) tells.
    pub fn watch_fs_errors(&self, errors: &FsErrors, path: &Path) -> Result<bool> {
        self.enter("fanotify_mark", path)?;
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| failed("fanotify_mark", path)(io::Error::from_raw_os_error(libc::EINVAL)))?;
        let flags = FAN_MARK_ADD | FAN_MARK_FILESYSTEM;
        // SAFETY: the name ends with a zero and outlives the call; the rest are integers.
        let result = unsafe {
            libc::fanotify_mark(errors.0.as_raw_fd(), flags, FAN_FS_ERROR, libc::AT_FDCWD, name.as_ptr())
        };
        if result == 0 {
            return Ok(true);
        }
        match io::Error::last_os_error() {
            e if matches!(
                e.raw_os_error(),
                Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENODEV | libc::EXDEV)
            ) =>
            {
                Ok(false)
            }
            error => Err(failed("fanotify_mark", path)(error)),
        }
    }
}
