//! The kernel's NFS client: mounting, and parting from a server that may never answer again.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use super::{NFS_PORT, NfsRoots};
use crate::platform::file::fd_path;
use crate::platform::{Host, HostError, Result, failed, mount};

/// How long the client waits for an answer before it looks whether its connection still lives, in tenths of a second, and
/// how often before it says so in the kernel's log. It never gives up by itself (`hard`); a connection that lives is kept
/// however slow the server is. Also the time after which a silent connection is probed.
const TIMEO: &str = "50";
const RETRANS: &str = "2";

/// For how many seconds the client may take attributes of files and directories for true without asking: for as long as 1 s
/// when they changed a moment ago, for 5 s when they did not. Opening a file asks in any case. The client's own 3 to 60 s would
/// keep what other nodes change from those that poll for it; asking every few seconds for what is in use costs little.
const ATTRIBUTES: [(&str, &str); 4] =
    [("acregmin", "1"), ("acregmax", "5"), ("acdirmin", "1"), ("acdirmax", "5")];
/// A name that was found is taken for true as its directory is; one that was not is asked for each time, so that what another
/// node creates is there at once: programs on several nodes wait for each other's files.
const NAMES: &str = "positive";

/// What to mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsTarget {
    /// The server.
    pub server: SocketAddr,
    /// The export's path there.
    pub path: String,
}

impl NfsTarget {
    /// As the kernel writes it into the table of mounts.
    #[must_use]
    pub fn source(&self) -> String {
        match self.server {
            SocketAddr::V4(address) => format!("{}:{}", address.ip(), self.path),
            SocketAddr::V6(address) => format!("[{}]:{}", address.ip(), self.path),
        }
    }

    /// Reads it back from a mount's source and options.
    #[must_use]
    pub fn parse(source: &str, options: &[String]) -> Option<Self> {
        let (host, path) = match source.strip_prefix('[') {
            Some(rest) => rest.split_once("]:")?,
            None => source.split_once(':')?,
        };
        let port = options.iter().find_map(|o| o.strip_prefix("port=")?.parse().ok()).filter(|p| *p != 0);
        let server = SocketAddr::new(host.parse().ok()?, port.unwrap_or(NFS_PORT));
        path.starts_with('/').then(|| Self { server, path: path.to_owned() })
    }

    /// Options of the kernel's client (nfs(5)), those with a value.
    fn options(&self) -> Vec<(&'static str, String)> {
        let mut options = vec![
            ("source", self.source()),
            ("vers", "4.2".to_owned()),
            ("proto", if self.server.is_ipv4() { "tcp" } else { "tcp6" }.to_owned()),
            ("addr", self.server.ip().to_string()),
            ("timeo", TIMEO.to_owned()),
            ("retrans", RETRANS.to_owned()),
            ("lookupcache", NAMES.to_owned()),
        ];
        options.extend(ATTRIBUTES.map(|(name, value)| (name, value.to_owned())));
        if self.server.port() != NFS_PORT {
            options.push(("port", self.server.port().to_string()));
        }
        options
    }
}

impl Host {
    /// Mounts an export nowhere yet, and reads the file `identity` at its top; both within `bound`, after which nothing is
    /// left of it, also when the server answers later.
    ///
    /// # Errors
    /// [`HostError::Timeout`]; ECONNREFUSED, EACCES, ENOENT and others of fsconfig(2); ENODEV where this kernel has no NFS
    /// client.
    pub fn nfs_open(
        &self,
        target: &NfsTarget,
        identity: &str,
        limit: usize,
        bound: Duration,
    ) -> Result<(OwnedFd, Option<Vec<u8>>)> {
        let source = target.source();
        self.enter("mount nfs", &source)?;
        let (wanted, host, name) = (target.clone(), self.clone(), identity.to_owned());
        let open = move || {
            let tree = mounted(&wanted)?;
            let content = host.read_file(&fd_path(&tree).join(name), limit)?;
            Ok((tree, content))
        };
        self.probes.ask(Path::new(&source), bound, open)?.unwrap_or_else(|| {
            Err(HostError::Timeout { action: "mount", subject: source, seconds: bound.as_secs() })
        })
    }

    /// Puts what [`Host::nfs_open`] gave at `at`.
    ///
    /// # Errors
    /// The errno of move_mount(2).
    pub fn nfs_place(&self, tree: &OwnedFd, at: &Path) -> Result<()> {
        self.enter("move mount", at)?;
        mount::attach(tree, at)
    }

    /// Unmounts what is at `at`, after its last writes were taken by the server. True: unmounted, or nothing was there.
    /// False: not within `bound`; it may still go.
    ///
    /// # Errors
    /// EBUSY while something uses it.
    pub fn nfs_unmount(&self, at: &Path, bound: Duration) -> Result<bool> {
        self.enter("umount", at)?;
        self.part(at, MntFlags::UMOUNT_NOFOLLOW, bound)
    }

    /// Something of the mount at `at`, which keeps it in use: see [`Host::nfs_abandon`]. Within `bound`; the server is asked.
    ///
    /// # Errors
    /// [`HostError::Timeout`], or the errno of open(2).
    pub fn nfs_hold(&self, at: &Path, bound: Duration) -> Result<OwnedFd> {
        let path = at.to_owned();
        self.within("opening", at, bound, move |_| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(&path, flags, Mode::empty()).map_err(failed("open", &path))
        })
    }

    /// Takes away what is at `at` now: whatever waits for the server gets errors, and what was not written is lost. Never
    /// waits for the server, and at most `bound` for the kernel.
    ///
    /// Before Linux 6.5 only those fail that wait at the moment, and only while the mount is there: whoever holds something of
    /// it (`hold`) lets the others get their errors, close their files and be told once more.
    ///
    /// # Errors
    /// It is still there, with what umount2(2) told.
    pub fn nfs_abandon(
        &self,
        roots: &NfsRoots,
        at: &Path,
        hold: Option<OwnedFd>,
        bound: Duration,
    ) -> Result<()> {
        self.enter("umount", at)?;
        let Some(entry) = self.mounts()?.at(at).cloned() else { return Ok(()) };
        // Since 6.5: every request that waits and every later one fails.
        let shutdown = roots.sysfs.join(format!("{}:{}", entry.device.0, entry.device.1)).join("shutdown");
        let for_good = std::fs::write(shutdown, b"1\n").is_ok();
        let force = MntFlags::MNT_FORCE | MntFlags::UMOUNT_NOFOLLOW;
        let (deadline, round) = (Instant::now() + bound / 2, bound / 50);
        while !for_good && Instant::now() < deadline {
            match self.part(at, force, round) {
                Err(error) if error.is_busy() => std::thread::sleep(round),
                // On its way: what it ends closes its files next.
                Ok(false) => {}
                Ok(true) | Err(_) => break,
            }
        }
        drop(hold);
        let flags = force | MntFlags::MNT_DETACH;
        // What the last user leaves unwritten may keep that thread; the mount is gone from its place before.
        let outcome = self.part(at, flags, bound);
        match self.mounts()?.at(at) {
            Some(left) if left.id == entry.id => {
                outcome?;
                Err(HostError::Timeout {
                    action: "umount",
                    subject: at.display().to_string(),
                    seconds: bound.as_secs(),
                })
            }
            _ => Ok(()),
        }
    }

    /// umount2(2) in a thread that is left alone after `bound`.
    fn part(&self, at: &Path, flags: MntFlags, bound: Duration) -> Result<bool> {
        let (told, answer) = std::sync::mpsc::sync_channel(1);
        let point: PathBuf = at.to_owned();
        std::thread::Builder::new()
            .name("umount".to_owned())
            .spawn(move || {
                // Nobody may be listening any more.
                let _ = told.send(umount2(&point, flags));
            })
            .map_err(failed("clone", at))?;
        match answer.recv_timeout(bound) {
            // EINVAL: nothing is mounted there.
            Ok(Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT)) => Ok(true),
            Ok(Err(errno)) => Err(failed("umount2", at)(errno)),
            Err(_) => Ok(false),
        }
    }
}

fn mounted(target: &NfsTarget) -> Result<OwnedFd> {
    let source = target.source();
    let context =
        rustix::mount::fsopen("nfs4", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen", "nfs4"))?;
    for (name, value) in target.options() {
        rustix::mount::fsconfig_set_string(&context, name, value.as_str())
            .map_err(failed("fsconfig", format!("{source} ({name})")))?;
    }
    rustix::mount::fsconfig_set_flag(&context, "hard").map_err(failed("fsconfig", &source))?;
    rustix::mount::fsconfig_create(&context).map_err(failed("mount", &source))?;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
        .map_err(failed("fsmount", &source))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(server: &str) -> NfsTarget {
        NfsTarget { server: server.parse().unwrap(), path: "/v-0@1".to_owned() }
    }

    #[test]
    fn what_is_mounted_is_known_again_by_its_line_in_the_table_of_mounts() {
        for (server, options) in [
            ("10.0.0.1:2049", vec!["vers=4.2".to_owned()]),
            ("10.0.0.1:2050", vec!["port=2050".to_owned()]),
            ("[fd00::1]:2049", vec!["port=0".to_owned()]),
        ] {
            let target = target(server);
            assert_eq!(NfsTarget::parse(&target.source(), &options), Some(target));
        }
        for source in ["nas:/x", "10.0.0.1", "10.0.0.1:x", "[fd00::1:/x"] {
            assert_eq!(NfsTarget::parse(source, &[]), None, "{source}");
        }
    }

    #[test]
    fn the_client_is_told_version_address_and_never_to_give_up() {
        let options = target("10.0.0.1:2050").options();
        let of = |name: &str| options.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str());
        assert_eq!(of("source"), Some("10.0.0.1:/v-0@1"));
        assert_eq!(of("vers"), Some("4.2"));
        assert_eq!(of("addr"), Some("10.0.0.1"));
        assert_eq!(of("port"), Some("2050"));
        assert_eq!(of("soft"), None);
    }
}
