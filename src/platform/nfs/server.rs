//! The kernel's NFS server, nfsd(7), by its control files.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::mount::FsOpenFlags;

use super::NfsRoots;
use super::cache::{Cache, ExportEntry, parse_addresses, parse_exports};
use crate::platform::mount::MountAttr;
use crate::platform::{Host, HostError, Result, failed};

/// The longest control file. What is exported to whom takes some hundred bytes for each pair.
const LIMIT: usize = 64 << 20;

/// How this node serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsServing {
    /// Address and port to listen at.
    pub address: SocketAddr,
    /// How long a silent client keeps what it has open and locked, and how long clients have to claim that again after the
    /// server was away; the kernel takes 10 s to an hour.
    pub lease: Duration,
    /// Threads: that many requests are worked on at a time.
    pub threads: u32,
    /// Where the kernel notes its clients, so that they are known again after a restart of this machine. On a disk.
    pub recovery: PathBuf,
}

/// What the server does now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsServerState {
    /// Threads; none: it does not serve.
    pub threads: u32,
    /// Where it notes its clients; `None` where this kernel leaves that to a program (nfsdcld).
    pub recovery: Option<PathBuf>,
}

/// A client that the server knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsClient {
    /// The server's number for it.
    pub number: u32,
    /// Where it speaks from; `None` where the kernel does not tell.
    pub address: Option<IpAddr>,
    /// What it calls itself, with what is not plain text as the kernel escapes it.
    pub name: String,
}

impl Host {
    /// Makes the server's control files available: loads the module where it is one, and mounts them.
    ///
    /// # Errors
    /// This kernel has no NFS server (ENODEV), or what mount(2) tells.
    pub fn nfs_server_ready(&self, roots: &NfsRoots) -> Result<()> {
        self.enter("mount nfsd", &roots.nfsd)?;
        if roots.nfsd.join("threads").exists() {
            return Ok(());
        }
        // Naming the kind makes the kernel load it; the directory to mount at appears with it.
        drop(rustix::mount::fsopen("nfsd", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("fsopen", "nfsd"))?);
        self.mount_filesystem(Path::new("nfsd"), &roots.nfsd, "nfsd", MountAttr::default(), "")
    }

    /// What the server does now: nothing where its control files are not there.
    ///
    /// # Errors
    /// They cannot be read or understood.
    pub fn nfs_server_state(&self, roots: &NfsRoots) -> Result<NfsServerState> {
        let threads = self.control(&roots.nfsd.join("threads"))?.unwrap_or_else(|| "0".to_owned());
        let threads = threads.parse().map_err(|_| HostError::Unexpected {
            subject: roots.nfsd.join("threads").display().to_string(),
            reason: format!("{threads:?} is no number"),
        })?;
        let recovery = self.control(&roots.nfsd.join("nfsv4recoverydir"))?.map(PathBuf::from);
        Ok(NfsServerState { threads, recovery })
    }

    /// Starts the server, which must not serve yet: NFSv4.2 only, at one address only.
    ///
    /// # Errors
    /// The address cannot be listened at, or the kernel refuses a setting.
    pub fn nfs_server_start(&self, roots: &NfsRoots, serving: &NfsServing) -> Result<()> {
        self.enter("start nfsd", &roots.nfsd)?;
        let file = |name: &str| roots.nfsd.join(name);
        self.ensure_directory(&serving.recovery, 0o700)?;
        // Kernels without version 2 refuse its name.
        let _ = write_control(&file("versions"), b"-2\n");
        write_control(&file("versions"), b"-3 +4 -4.0 -4.1 +4.2\n")?;
        let seconds = format!("{}\n", serving.lease.as_secs());
        write_control(&file("nfsv4leasetime"), seconds.as_bytes())?;
        write_control(&file("nfsv4gracetime"), seconds.as_bytes())?;
        if file("nfsv4recoverydir").exists() {
            let line = [serving.recovery.as_os_str().as_bytes(), b"\n"].concat();
            write_control(&file("nfsv4recoverydir"), &line)?;
        }
        let nobody_to_wait_for =
            self.directory_names(&serving.recovery)?.is_none_or(|names| names.is_empty());
        let listener =
            TcpListener::bind(serving.address).map_err(failed("listen", serving.address.to_string()))?;
        // From here on the kernel holds the socket; it outlives this process.
        write_control(&file("portlist"), format!("{}\n", listener.as_raw_fd()).as_bytes())?;
        write_control(&file("threads"), format!("{}\n", serving.threads).as_bytes())?;
        if nobody_to_wait_for {
            // Otherwise the first clients of a new server would wait for a lease's time before they may open files.
            let _ = write_control(&file("v4_end_grace"), b"Y\n");
        }
        Ok(())
    }

    /// Stops the server: its clients wait until it is back.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn nfs_server_stop(&self, roots: &NfsRoots) -> Result<()> {
        self.enter("stop nfsd", &roots.nfsd)?;
        write_control(&roots.nfsd.join("threads"), b"0\n")
    }

    /// Fills a cache with one line of [`super::cache`].
    ///
    /// # Errors
    /// The kernel refuses it: EINVAL, a path on a filesystem that cannot be exported; ENOENT, no such path or domain.
    pub fn nfs_cache_write(&self, roots: &NfsRoots, cache: Cache, line: &str) -> Result<()> {
        let path = roots.rpc.join(cache.name()).join("channel");
        self.enter("fill nfs cache", &path)?;
        write_control(&path, line.as_bytes())
    }

    /// Empties a cache, and waits until what it held is let go of as far as no request uses it.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn nfs_cache_flush(&self, roots: &NfsRoots, cache: Cache) -> Result<()> {
        let path = roots.rpc.join(cache.name()).join("flush");
        self.enter("flush nfs cache", &path)?;
        write_control(&path, b"1\n")
    }

    /// What is exported to whom, whoever wrote it. Empty where no server is loaded.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub fn nfs_exports(&self, roots: &NfsRoots) -> Result<Vec<ExportEntry>> {
        let path = roots.rpc.join(Cache::Exports.name()).join("content");
        Ok(parse_exports(&self.read_file(&path, LIMIT)?.unwrap_or_default()))
    }

    /// Whose domain each address is that it knows, whoever told it. Empty where no server is loaded.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub fn nfs_addresses(&self, roots: &NfsRoots) -> Result<BTreeMap<IpAddr, String>> {
        let path = roots.rpc.join(Cache::Addresses.name()).join("content");
        Ok(parse_addresses(&self.read_file(&path, LIMIT)?.unwrap_or_default()))
    }

    /// The clients that the server knows.
    ///
    /// # Errors
    /// The directory of clients cannot be read.
    pub fn nfs_clients(&self, roots: &NfsRoots) -> Result<Vec<NfsClient>> {
        let directory = roots.nfsd.join("clients");
        let names = self.directory_names(&directory)?.unwrap_or_default();
        let mut clients = Vec::new();
        for number in names.iter().filter_map(|n| n.to_str()?.parse::<u32>().ok()) {
            // One that goes in this moment is gone.
            let Ok(Some(info)) = self.read_file(&directory.join(number.to_string()).join("info"), LIMIT)
            else {
                continue;
            };
            let info = String::from_utf8_lossy(&info);
            let (address, name) = (client_address(&info), client_name(&info));
            clients.push(NfsClient { number, address, name });
        }
        Ok(clients)
    }

    /// Takes all that a client has open and locked, and waits until no request of it is worked on; at most `bound`. One
    /// that is gone is expired.
    ///
    /// # Errors
    /// It takes longer, or the kernel refuses.
    pub fn nfs_client_expire(&self, roots: &NfsRoots, number: u32, bound: Duration) -> Result<()> {
        let control = roots.nfsd.join("clients").join(number.to_string()).join("ctl");
        self.enter("expire nfs client", &control)?;
        let path = control.clone();
        match self.probes.ask(&control, bound, move || write_control(&path, b"expire\n"))? {
            // ENOENT, ENXIO and EBADF: it went by itself.
            Some(Err(error)) if matches!(error.errno(), Some(libc::ENOENT | libc::ENXIO | libc::EBADF)) => {
                Ok(())
            }
            Some(outcome) => outcome,
            None => Err(HostError::Timeout {
                action: "the end of its requests",
                subject: control.display().to_string(),
                seconds: bound.as_secs(),
            }),
        }
    }

    /// A control file's one line; `None` where there is no such file.
    fn control(&self, path: &Path) -> Result<Option<String>> {
        let bytes = self.read_file(path, LIMIT)?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned()))
    }
}

/// Control files take what one write(2) brings, and neither creation nor truncation.
fn write_control(path: &Path, line: &[u8]) -> Result<()> {
    let mut file = OpenOptions::new().write(true).open(path).map_err(failed("open", path))?;
    let written = file.write(line).map_err(failed("write", path))?;
    if written == line.len() {
        return Ok(());
    }
    Err(HostError::Unexpected {
        subject: path.display().to_string(),
        reason: format!("it took {written} of {} bytes", line.len()),
    })
}

/// The line `address: "10.0.0.2:770"`.
fn client_address(info: &str) -> Option<IpAddr> {
    client_line(info, "address: ")?.parse::<SocketAddr>().ok().map(|a| a.ip().to_canonical())
}

/// The line `name: "Linux NFSv4.2 node-1"`.
fn client_name(info: &str) -> String {
    client_line(info, "name: ").unwrap_or_default().to_owned()
}

fn client_line<'a>(info: &'a str, begins: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(begins)).map(|text| text.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roots(at: &Path) -> NfsRoots {
        let roots = NfsRoots {
            nfsd: at.join("nfsd"),
            rpc: at.join("rpc"),
            sysfs: at.join("sys"),
            filesystems: at.join("filesystems"),
            modules: at.join("modules"),
        };
        for name in ["versions", "nfsv4leasetime", "nfsv4gracetime", "portlist", "threads", "v4_end_grace"] {
            std::fs::create_dir_all(&roots.nfsd).unwrap();
            std::fs::write(roots.nfsd.join(name), "").unwrap();
        }
        roots
    }

    #[test]
    fn where_a_client_speaks_from_is_read() {
        let of = |text: &str| client_address(text);
        let info = "clientid: 0x1\naddress: \"10.0.0.2:770\"\nstatus: confirmed\n";
        assert_eq!(of(info), Some("10.0.0.2".parse().unwrap()));
        assert_eq!(of("address: \"[fd00::2]:770\"\n"), Some("fd00::2".parse().unwrap()));
        assert_eq!(of("address: \"[::ffff:10.0.0.2]:770\"\n"), Some("10.0.0.2".parse().unwrap()));
        assert_eq!(of("clientid: 0x1\n"), None);
        assert_eq!(of("address: (null)\n"), None);
    }

    #[test]
    fn the_server_is_started_with_one_version_one_address_and_threads() {
        let directory = tempfile::tempdir().unwrap();
        let roots = roots(directory.path());
        let serving = NfsServing {
            address: "127.0.0.1:0".parse().unwrap(),
            lease: Duration::from_secs(15),
            threads: 4,
            recovery: directory.path().join("recovery"),
        };
        let host = Host::new();
        host.nfs_server_start(&roots, &serving).unwrap();
        let read = |name: &str| std::fs::read_to_string(roots.nfsd.join(name)).unwrap();
        assert_eq!(read("nfsv4leasetime"), "15\n");
        assert_eq!(read("nfsv4gracetime"), "15\n");
        assert_eq!(read("threads"), "4\n");
        assert_eq!(read("v4_end_grace"), "Y\n", "a new server has nobody to wait for");
        assert!(read("portlist").trim().parse::<u32>().is_ok());
        assert!(serving.recovery.is_dir());
        let state = NfsServerState { threads: 4, recovery: None };
        assert_eq!(host.nfs_server_state(&roots).unwrap(), state);
    }

    #[test]
    fn a_server_that_had_clients_waits_for_them() {
        let directory = tempfile::tempdir().unwrap();
        let roots = roots(directory.path());
        let recovery = directory.path().join("recovery");
        std::fs::create_dir_all(recovery.join("0123")).unwrap();
        let serving = NfsServing {
            address: "127.0.0.1:0".parse().unwrap(),
            lease: Duration::from_secs(10),
            threads: 1,
            recovery,
        };
        Host::new().nfs_server_start(&roots, &serving).unwrap();
        assert_eq!(std::fs::read_to_string(roots.nfsd.join("v4_end_grace")).unwrap(), "");
    }

    #[test]
    fn clients_are_listed_and_one_that_is_gone_is_expired() {
        let directory = tempfile::tempdir().unwrap();
        let roots = roots(directory.path());
        let client = roots.nfsd.join("clients/3");
        std::fs::create_dir_all(&client).unwrap();
        let info = "address: \"10.0.0.9:1\"\nstatus: confirmed\nname: \"Linux NFSv4.2 b\"\n";
        std::fs::write(client.join("info"), info).unwrap();
        std::fs::write(client.join("ctl"), "").unwrap();
        let host = Host::new();
        let found = host.nfs_clients(&roots).unwrap();
        let address = Some("10.0.0.9".parse().unwrap());
        assert_eq!(found, [NfsClient { number: 3, address, name: "Linux NFSv4.2 b".to_owned() }]);
        host.nfs_client_expire(&roots, 3, Duration::from_secs(10)).unwrap();
        assert_eq!(std::fs::read_to_string(client.join("ctl")).unwrap(), "expire\n");
        host.nfs_client_expire(&roots, 4, Duration::from_secs(10)).unwrap();
    }
}
