//! What machines boot from, made by `integration/net/run`, and the disks that they write to.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use snafu::{OptionExt, ResultExt};

use super::Result;
use super::trouble::{HostSnafu, NotPreparedSnafu};

/// Where everything is.
#[derive(Clone, Debug)]
pub struct Files {
    /// The kernel.
    pub kernel: PathBuf,
    /// Its first files.
    pub initramfs: PathBuf,
    /// The read-only root.
    pub base: PathBuf,
    /// The read-only programs under test.
    pub programs: PathBuf,
    /// Directories of networks go here.
    work: PathBuf,
    /// Consoles and transcripts stay here.
    logs: PathBuf,
}

impl Files {
    /// From the environment.
    pub fn find() -> Result<Self> {
        let get = |variable| env::var_os(variable).context(NotPreparedSnafu { variable });
        let here = PathBuf::from(get("UNION_CSI_NET_FILES")?);
        Ok(Self {
            kernel: here.join("vmlinuz"),
            initramfs: here.join("initramfs"),
            base: here.join("base.img"),
            programs: get("UNION_CSI_NET_PROGRAMS")?.into(),
            work: get("UNION_CSI_NET_WORK")?.into(),
            logs: get("UNION_CSI_NET_LOGS")?.into(),
        })
    }

    /// A directory for one network; the paths of unix sockets below it must stay short.
    pub fn new_directory(&self) -> Result<Directory> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let path = self.work.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
        fs::create_dir(&path).context(HostSnafu { what: "make", path: &path })?;
        Ok(Directory(path))
    }

    /// An empty directory for the logs of a network called `label`.
    pub fn new_logs(&self, label: &str) -> Result<PathBuf> {
        let path = self.logs.join(label.replace("::", "."));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).context(HostSnafu { what: "make", path: &path })?;
        Ok(path)
    }
}

/// A directory that goes with its owner.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An empty disk of that many bytes, without any of them on the host yet.
pub fn make_disk(path: &Path, bytes: u64) -> Result {
    File::create(path).and_then(|file| file.set_len(bytes)).context(HostSnafu { what: "make the disk", path })
}
