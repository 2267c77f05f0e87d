//! The Unix sockets that are served: made so that only root may connect, and never taken from a living program.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use snafu::{ResultExt, Snafu, ensure};
use tokio::net::{UnixListener, UnixSocket};

/// The longest path of a socket, in bytes: `sun_path` less its closing zero (unix(7)).
const MAX_PATH: usize = 107;

/// Connections that may wait to be accepted. A kubelet has one, the official sidecars one each.
const BACKLOG: u32 = 64;

/// What a socket is for; its name in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The Container Storage Interface.
    Csi,
    /// Registration with the kubelet.
    Registration,
}

impl Purpose {
    /// The setting that the path comes from.
    const fn setting(self) -> &'static str {
        match self {
            Self::Csi => "csi.endpoint",
            Self::Registration => "kubernetes.kubeletDir",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Csi => "CSI socket",
            Self::Registration => "registration socket",
        })
    }
}

/// The socket cannot be had. Nothing was removed that is in use.
#[derive(Debug, Snafu)]
pub enum BindError {
    /// The kernel has no room for such a path.
    #[snafu(display(
        "the path of the {purpose} has {length} bytes, {MAX_PATH} are possible: {}; set a shorter {}",
        path.display(), purpose.setting()
    ))]
    TooLong {
        /// Which socket.
        purpose: Purpose,
        /// The path.
        path: PathBuf,
        /// Its length.
        length: usize,
    },
    /// Somebody serves it.
    #[snafu(display(
        "another program serves the {purpose} {}: is another agent running? stop it, or set another {}",
        path.display(), purpose.setting()
    ))]
    InUse {
        /// Which socket.
        purpose: Purpose,
        /// The path.
        path: PathBuf,
    },
    /// Something else lies there.
    #[snafu(display(
        "{} is not a socket and is left alone: remove it, or set another {}",
        path.display(), purpose.setting()
    ))]
    NotASocket {
        /// Which socket.
        purpose: Purpose,
        /// The path.
        path: PathBuf,
    },
    /// The machine refused.
    #[snafu(display("cannot {action} the {purpose} {}: {source}", path.display()))]
    Socket {
        /// Which socket.
        purpose: Purpose,
        /// What was to be done.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A bound socket; its file is removed when it is dropped, unless told otherwise.
#[derive(Debug)]
pub struct Socket {
    listener: Option<UnixListener>,
    purpose: Purpose,
    path: PathBuf,
    /// Whether the file stays when this is dropped.
    stays: bool,
    /// Device and inode of the file, to recognise it by.
    file: (u64, u64),
}

impl Socket {
    /// What to accept connections from; `None` where it was taken already.
    pub(super) fn listener(&mut self) -> Option<UnixListener> {
        self.listener.take()
    }

    /// Whether its file is still where it was made.
    pub(super) fn in_place(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|m| (m.dev(), m.ino()) == self.file)
    }

    /// Lets the file stay when this is dropped.
    pub(super) fn leave(&mut self) {
        self.stays = true;
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.stays
            && self.in_place()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the {} cannot be removed", self.purpose);
        }
    }
}

/// Binds the socket at `path` with mode 0600. A socket that an agent left there when it died is replaced.
///
/// # Errors
/// See [`BindError`].
pub fn bind(purpose: Purpose, path: &Path) -> Result<Socket, BindError> {
    let length = path.as_os_str().len();
    ensure!(length <= MAX_PATH, TooLongSnafu { purpose, path, length });
    remove_stale(purpose, path)?;
    let failed = |action| SocketSnafu { purpose, action, path };
    let socket = UnixSocket::new_stream().context(failed("make"))?;
    // The mode of the socket itself becomes the file's (less the umask), so that there is no moment at which others can
    // connect: unix_bind() in Linux' net/unix/af_unix.c.
    let descriptor = socket.as_fd().try_clone_to_owned().context(failed("make"))?;
    let owner_only = std::fs::Permissions::from_mode(0o600);
    std::fs::File::from(descriptor).set_permissions(owner_only.clone()).context(failed("protect"))?;
    socket.bind(path).context(failed("bind"))?;
    let metadata = std::fs::symlink_metadata(path).context(failed("find"))?;
    let mut bound = Socket {
        listener: None,
        purpose,
        path: path.to_owned(),
        stays: false,
        file: (metadata.dev(), metadata.ino()),
    };
    std::fs::set_permissions(path, owner_only).context(failed("protect"))?;
    bound.listener = Some(socket.listen(BACKLOG).context(failed("listen on"))?);
    Ok(bound)
}

/// Removes a socket that nobody listens on.
fn remove_stale(purpose: Purpose, path: &Path) -> Result<(), BindError> {
    let failed = |action| SocketSnafu { purpose, action, path };
    let metadata = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).context(failed("look for")),
    };
    ensure!(metadata.file_type().is_socket(), NotASocketSnafu { purpose, path });
    match std::os::unix::net::UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).context(failed("remove the stale"))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        // EAGAIN: its backlog is full, so somebody serves it.
        Ok(_) => InUseSnafu { purpose, path }.fail(),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => InUseSnafu { purpose, path }.fail(),
        Err(e) => Err(e).context(failed("probe")),
    }
}

#[cfg(test)]
mod tests;
