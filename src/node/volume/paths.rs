//! Paths that callers give: only below the directories that the administrator allowed, and never through a symlink there.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::error::VolumeError;
use crate::platform::file::fd_path;
use crate::platform::{Host, HostError};

/// `PATH_MAX` of Linux (limits.h), which a path with its terminating zero must keep.
const PATH_MAX: usize = 4096;

/// `NAME_MAX` of Linux (limits.h).
const NAME_MAX: usize = 255;

/// The directories below which staging and target paths may lie.
#[derive(Clone, Debug)]
pub(super) struct Places {
    host: Host,
    allowed: Vec<PathBuf>,
}

/// A path that was checked: its parent is open, so that nothing can be exchanged under it.
#[derive(Debug)]
pub(super) struct Place {
    host: Host,
    root: PathBuf,
    given: PathBuf,
    parent: OwnedFd,
    name: OsString,
    /// The path as the kernel knows it, as in mountinfo.
    pub(super) real: PathBuf,
}

impl Place {
    /// The place by way of its open parent; the last component is not followed where it is a symlink. Valid while the
    /// place lives.
    pub(super) fn handle(&self) -> PathBuf {
        fd_path(&self.parent).join(&self.name)
    }

    /// The directory there, made where nothing is, open so that it can be bound over. For a place that nothing is mounted
    /// at.
    ///
    /// # Errors
    /// [`VolumeError::Path`] where something else or a symlink is there.
    pub(super) fn directory(&self) -> Result<OwnedFd, VolumeError> {
        self.host.open_beneath(&self.root, &self.given, true).map_err(|e| self.refused(&e))
    }

    /// The empty file there, made where nothing is, as [`Place::directory`].
    ///
    /// # Errors
    /// [`VolumeError::Path`] where something else or a symlink is there.
    pub(super) fn file(&self) -> Result<OwnedFd, VolumeError> {
        self.host.ensure_file_beneath(&self.root, &self.given).map_err(|e| self.refused(&e))
    }

    fn refused(&self, error: &HostError) -> VolumeError {
        VolumeError::Path { path: self.given.clone(), reason: refusal(&self.root, error) }
    }
}

impl Places {
    /// Paths below `allowed`.
    pub(super) const fn new(host: Host, allowed: Vec<PathBuf>) -> Self {
        Self { host, allowed }
    }

    /// Opens the parent of `path`; missing directories above it are made where `create`. `None` where the parent does not
    /// exist.
    ///
    /// # Errors
    /// [`VolumeError::Path`] where the path is refused.
    pub(super) fn open(&self, path: &Path, create: bool) -> Result<Option<Place>, VolumeError> {
        let refuse = |reason: String| VolumeError::Path { path: path.to_owned(), reason };
        let (root, name) = self.check(path).map_err(refuse)?;
        let above = path.parent().unwrap_or(root);
        let parent = match self.host.open_beneath(root, above, create) {
            Ok(parent) => parent,
            Err(e) if e.is_missing() && !create => return Ok(None),
            Err(e) => return Err(refuse(refusal(root, &e))),
        };
        let real = self.host.path_of(&parent).map_err(|e| refuse(e.to_string()))?.join(name);
        Ok(Some(Place {
            host: self.host.clone(),
            root: root.to_owned(),
            given: path.to_owned(),
            parent,
            name: name.to_owned(),
            real,
        }))
    }

    /// The allowed directory that holds `path`, and the path's last component.
    fn check<'a>(&'a self, path: &'a Path) -> Result<(&'a Path, &'a OsStr), String> {
        let bytes = path.as_os_str().as_encoded_bytes();
        if !path.is_absolute() {
            return Err("it is not absolute".to_owned());
        }
        if bytes.contains(&0) || bytes.len() >= PATH_MAX {
            return Err(format!("it is {} bytes long, or has a zero byte in it", bytes.len()));
        }
        if bytes.split(|&b| b == b'/').any(|c| c.len() > NAME_MAX) {
            return Err(format!("a component of it is longer than {NAME_MAX} bytes"));
        }
        // `Path` drops "." and doubled slashes by itself: the text would not be what the kernel tells.
        let plain = bytes.strip_suffix(b"/").unwrap_or(bytes).split(|&b| b == b'/').skip(1);
        if plain.into_iter().any(|c| matches!(c, b"." | b".." | b"")) {
            return Err("it has a component '.', '..' or an empty one: give the plain path".to_owned());
        }
        let root = self
            .allowed
            .iter()
            .filter(|root| path.starts_with(root) && path != root.as_path())
            .max_by_key(|root| root.components().count());
        match (root, path.file_name()) {
            (Some(root), Some(name)) => Ok((root, name)),
            _ => Err(format!(
                "it is not below {}: choose another path, or add its directory to allowedTargets in agent.yaml",
                self.allowed.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
            )),
        }
    }
}

fn refusal(root: &Path, error: &HostError) -> String {
    if error.is_wrong_kind() {
        format!(
            "below {} no symlink may be on the way, and only a directory (for a block volume, a file) at its end: {error}",
            root.display()
        )
    } else {
        error.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str) -> Result<(PathBuf, OsString), String> {
        let places =
            Places::new(Host::new(), vec!["/mnt".into(), "/var/lib/kubelet".into(), "/mnt/deep".into()]);
        places.check(Path::new(path)).map(|(root, name)| (root.to_owned(), name.to_owned()))
    }

    #[test]
    fn a_path_below_an_allowed_directory_is_accepted() {
        assert_eq!(check("/mnt/a").unwrap(), ("/mnt".into(), "a".into()));
        assert_eq!(check("/var/lib/kubelet/pods/.hidden/mount").unwrap().1, "mount");
        assert_eq!(check("/mnt/deep/a").unwrap().0, Path::new("/mnt/deep"), "the nearest directory counts");
    }

    #[test]
    fn a_path_elsewhere_is_refused_with_the_allowed_directories() {
        for path in ["/etc/passwd", "/mnt", "/mnt-other/a", "/", "relative", "", "/mnt/deep/../../etc"] {
            assert!(check(path).is_err(), "{path:?} was accepted");
        }
        assert!(check("/srv/a").unwrap_err().contains("/mnt, /var/lib/kubelet"));
    }

    #[test]
    fn a_path_that_is_not_plain_is_refused() {
        for path in ["/mnt/../etc", "/mnt/a/..", "/mnt/./a", "/mnt//a", "/mnt/a\0b", "/mnt/a/."] {
            assert!(check(path).is_err(), "{path:?} was accepted");
        }
        assert!(check(&format!("/mnt/{}", "x/".repeat(3000))).is_err(), "longer than PATH_MAX");
    }
}
