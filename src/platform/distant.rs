//! Filesystems on devices of other machines. Every call that reaches such a device may wait for that machine, for ever and
//! past every signal; here each has a bound. What runs on after its bound does so in a thread that is left alone, and ends
//! when the device answers or is taken away.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use super::mount::{self, MountAttr};
use super::{Host, HostError, Result, failed};

/// A filesystem as its superblock tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundFilesystem {
    /// `ext4`, `xfs` or `btrfs`.
    pub kind: String,
    /// Its UUID.
    pub uuid: String,
    /// What it says is wrong with it, so that it must be checked before it is used; a sentence.
    pub fault: Option<String>,
}

/// Reads at an offset, and tells whether there was that much.
type Read<'a> = &'a mut dyn FnMut(u64, &mut [u8]) -> io::Result<bool>;

impl Host {
    /// Does `work`, which concerns `path`, within `bound`; see `bounded`. `action` names it in an error.
    ///
    /// # Errors
    /// What the work tells; [`HostError::Timeout`] where it does not end, or an earlier one on the path has not.
    pub fn within<T: Send + 'static>(
        &self,
        action: &'static str,
        path: &Path,
        bound: Duration,
        work: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let host = self.clone();
        self.probes.ask(path, bound, move || work(&host))?.unwrap_or_else(|| {
            Err(HostError::Timeout { action, subject: path.display().to_string(), seconds: bound.as_secs() })
        })
    }

    /// What filesystem is on the image or device, and what it says of itself; `None` where it is none of ext4, XFS and btrfs.
    ///
    /// # Errors
    /// It cannot be read, or not within `bound`.
    pub fn examine_filesystem(&self, device: &Path, bound: Duration) -> Result<Option<FoundFilesystem>> {
        let path = device.to_owned();
        self.within("reading", device, bound, move |host| {
            let Some((uuid, kind)) = host.probe_filesystem(&path)? else { return Ok(None) };
            let opened = File::options()
                .read(true)
                .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path)
                .map_err(failed("open", &path))?;
            let mut read = |offset, bytes: &mut [u8]| match opened.read_exact_at(bytes, offset) {
                Ok(()) => Ok(true),
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
                Err(e) => Err(e),
            };
            let fault = match kind.as_str() {
                "ext4" => ext4_fault(&mut read),
                "xfs" => xfs_fault(&mut read),
                _ => Ok(None),
            };
            Ok(Some(FoundFilesystem { kind, uuid, fault: fault.map_err(failed("read", &path))? }))
        })
    }

    /// As [`Host::mount_filesystem`], within `bound`. What takes longer is unmounted as soon as it is mounted.
    ///
    /// # Errors
    /// The errno of mount(2); [`HostError::Timeout`].
    pub fn mount_filesystem_within(
        &self,
        bound: Duration,
        source: &Path,
        target: &Path,
        fs_type: &'static str,
        attr: MountAttr,
        data: &'static str,
    ) -> Result<()> {
        let (device, point) = (source.to_owned(), target.to_owned());
        self.mount_within(bound, target, move |host| {
            host.mount_filesystem(&device, &point, fs_type, attr, data)
        })
    }

    /// As [`Host::mount_overlay`], within `bound`: layers of other machines may wait for these. What takes longer is unmounted
    /// as soon as it is mounted.
    ///
    /// # Errors
    /// The errno of mount(2); [`HostError::Timeout`].
    pub fn mount_overlay_within(
        &self,
        bound: Duration,
        layers: &[PathBuf],
        target: &Path,
        attr: MountAttr,
    ) -> Result<()> {
        let (layers, point) = (layers.to_vec(), target.to_owned());
        self.mount_within(bound, target, move |host| host.mount_overlay(&layers, &point, attr))
    }

    /// As [`Host::bind`], within `bound`: the way to `source` may lead over a filesystem of another machine. Nothing is
    /// mounted later than that.
    ///
    /// # Errors
    /// The errno of the call that failed; [`HostError::Timeout`].
    pub fn bind_within(&self, bound: Duration, source: &Path, target: &Path, attr: MountAttr) -> Result<()> {
        self.enter("bind", target)?;
        let from = source.to_owned();
        // The copy is mounted nowhere: one that comes too late goes with its descriptor.
        let cloned = self.within("bind", source, bound, move |_| mount::detached_clone(&from, attr));
        mount::bind_clone(cloned, source, target, attr)
    }

    /// Whether something takes connections by TCP at `address`, within `bound`.
    ///
    /// # Errors
    /// The errno of connect(2): ECONNREFUSED, EHOSTUNREACH and others; ETIMEDOUT.
    pub fn tcp_listens(&self, address: SocketAddr, bound: Duration) -> Result<()> {
        self.enter("connect", address.to_string())?;
        TcpStream::connect_timeout(&address, bound).map(drop).map_err(|e| {
            let timed_out = || io::Error::from_raw_os_error(libc::ETIMEDOUT);
            let source = if e.raw_os_error().is_none() { timed_out() } else { e };
            HostError::Syscall { call: "connect", subject: address.to_string(), source }
        })
    }

    /// Writes out what the filesystem at `path` has not written yet (syncfs(2)), within `bound`.
    ///
    /// # Errors
    /// The errno of open(2) or syncfs(2); [`HostError::Timeout`], also while an earlier attempt has not ended.
    pub fn sync_within(&self, bound: Duration, path: &Path) -> Result<()> {
        self.enter("syncfs", path)?;
        let at = path.to_owned();
        self.within("syncfs", path, bound, move |_| {
            let opened = File::open(&at).map_err(failed("open", &at))?;
            rustix::fs::syncfs(opened).map_err(failed("syncfs", &at))
        })
    }

    /// Does `mount`, which mounts something at `target`, within `bound`; what it does later is undone.
    fn mount_within(
        &self,
        bound: Duration,
        target: &Path,
        mount: impl FnOnce(&Self) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        /// What the one who waits and the one who mounts must agree on.
        #[derive(Default)]
        struct Agreed {
            given_up: bool,
            mounted: bool,
        }
        let agreed: Arc<Mutex<Agreed>> = Arc::default();
        let (told, point) = (agreed.clone(), target.to_owned());
        let outcome = self.within("mount", target, bound, move |host| {
            mount(host)?;
            let mut agreed = told.lock().unwrap_or_else(PoisonError::into_inner);
            agreed.mounted = true;
            if agreed.given_up {
                host.unmount(&point, true)?;
            }
            Ok(())
        });
        if !matches!(outcome, Err(HostError::Timeout { .. })) {
            return outcome;
        }
        let mut agreed = agreed.lock().unwrap_or_else(PoisonError::into_inner);
        agreed.given_up = true;
        if agreed.mounted { Ok(()) } else { outcome }
    }

    /// As [`Host::unmount`], within `bound`: the last unmount of a filesystem writes out what was not written yet. What takes
    /// longer is gone from its place, and goes on.
    ///
    /// # Errors
    /// The errno of umount2(2); [`HostError::Timeout`].
    pub fn unmount_within(&self, bound: Duration, target: &Path, lazy: bool) -> Result<bool> {
        let (host, point) = (self.clone(), target.to_owned());
        let (tell, told) = mpsc::sync_channel(1);
        // Not as a question about the path: an earlier one that hangs there must not keep this from being tried.
        std::thread::Builder::new()
            .name("umount".to_owned())
            .spawn(move || {
                // Nobody may be listening any more.
                let _ = tell.send(host.unmount(&point, lazy));
            })
            .map_err(failed("clone", target))?;
        told.recv_timeout(bound).unwrap_or_else(|_| {
            Err(HostError::Timeout {
                action: "umount",
                subject: target.display().to_string(),
                seconds: bound.as_secs(),
            })
        })
    }

    /// Number of the block device at `path`: major, minor; `None` where there is none. Does not open it.
    ///
    /// # Errors
    /// The errno of stat(2).
    pub fn device_number(&self, path: &Path) -> Result<Option<(u32, u32)>> {
        match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => {
                let number = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                let device = found.rdev();
                Ok(Some((number(rustix::fs::major(device).into()), number(rustix::fs::minor(device).into()))))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("stat", path)(error)),
        }
    }
}

/// From the kernel's `Documentation/filesystems/ext4/super.rst`: `s_state` and `s_error_count`, little-endian.
fn ext4_fault(read: Read<'_>) -> io::Result<Option<String>> {
    const STATE_AT: u64 = 1024 + 0x3A;
    const ERRORS: u16 = 0x0002;
    const COUNT_AT: u64 = 1024 + 0x194;
    let (mut state, mut count) = ([0; 2], [0; 4]);
    if !read(STATE_AT, &mut state)? || !read(COUNT_AT, &mut count)? {
        return Ok(Some("its superblock is cut off".to_owned()));
    }
    let (state, count) = (u16::from_le_bytes(state), u32::from_le_bytes(count));
    Ok((state & ERRORS != 0 || count > 0)
        .then(|| format!("ext4 found errors in it ({count} counted) that were not repaired")))
}

/// From `fs/xfs/libxfs/xfs_format.h`: `sb_versionnum`, `sb_inprogress`, `sb_features_incompat`, big-endian.
fn xfs_fault(read: Read<'_>) -> io::Result<Option<String>> {
    const VERSION_AT: u64 = 100;
    const IN_PROGRESS_AT: u64 = 126;
    const INCOMPATIBLE_AT: u64 = 216;
    const NEEDS_REPAIR: u32 = 1 << 4;
    let (mut version, mut in_progress, mut incompatible) = ([0; 2], [0; 1], [0; 4]);
    if !read(VERSION_AT, &mut version)?
        || !read(IN_PROGRESS_AT, &mut in_progress)?
        || !read(INCOMPATIBLE_AT, &mut incompatible)?
    {
        return Ok(Some("its superblock is cut off".to_owned()));
    }
    if in_progress != [0] {
        return Ok(Some("it was never made whole".to_owned()));
    }
    let has_features = u16::from_be_bytes(version) & 0xF == 5;
    Ok((has_features && u32::from_be_bytes(incompatible) & NEEDS_REPAIR != 0)
        .then(|| "it says that it needs repair".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(image: &[u8]) -> impl FnMut(u64, &mut [u8]) -> io::Result<bool> + '_ {
        |offset, bytes| {
            let at = usize::try_from(offset).unwrap();
            let Some(found) = image.get(at..at + bytes.len()) else { return Ok(false) };
            bytes.copy_from_slice(found);
            Ok(true)
        }
    }

    #[test]
    fn an_ext4_that_found_errors_says_so_by_its_state_or_their_number() {
        let mut image = vec![0; 4096];
        image[1024 + 0x3A] = 1;
        assert_eq!(ext4_fault(&mut reader(&image)).unwrap(), None);
        image[1024 + 0x3A] = 3;
        assert!(ext4_fault(&mut reader(&image)).unwrap().is_some());
        image[1024 + 0x3A] = 1;
        image[1024 + 0x194] = 7;
        assert!(ext4_fault(&mut reader(&image)).unwrap().unwrap().contains("7 counted"));
        assert!(ext4_fault(&mut reader(&image[..1200])).unwrap().unwrap().contains("cut off"));
    }

    #[test]
    fn an_xfs_that_needs_repair_says_so() {
        let mut image = vec![0; 512];
        image[101] = 5;
        assert_eq!(xfs_fault(&mut reader(&image)).unwrap(), None);
        image[219] = 0x10;
        assert!(xfs_fault(&mut reader(&image)).unwrap().unwrap().contains("repair"));
        image[101] = 4;
        assert_eq!(xfs_fault(&mut reader(&image)).unwrap(), None, "the field means nothing there");
        image[126] = 1;
        assert!(xfs_fault(&mut reader(&image)).unwrap().is_some());
    }

    #[test]
    fn what_hangs_is_left_alone_after_its_bound() {
        let (_keep, never) = mpsc::channel::<()>();
        let outcome = Host::new().within("waiting", Path::new("/a"), Duration::from_millis(20), move |_| {
            let _ = never.recv_timeout(Duration::from_secs(60));
            Ok(())
        });
        assert!(matches!(outcome, Err(HostError::Timeout { .. })), "{outcome:?}");
    }
}
