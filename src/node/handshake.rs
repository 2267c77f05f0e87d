//! Answers the kernel's requests for TLS: of connections to branches on other nodes, at both ends.
//!
//! Which keys there are, the kernel's keyring tells: nothing is kept here, and an agent that was restarted answers as well as
//! the one before. While none runs, connections that stand go on, and the kernel tries again to make those that do not.

use std::time::{Duration, Instant};

use snafu::{OptionExt, ResultExt, Snafu};

use crate::platform::keyring::{KeySerial, NvmeKeyring, TlsKey};
use crate::platform::tls::{Handshake, Handshakes, Role, Session, TlsError};
use crate::platform::{Host, HostError};

/// Where the kernel says nothing of how long it waits.
const BOUND: Duration = Duration::from_secs(10);
/// Handshakes at the same time: one takes milliseconds of a processor, and some of them wait for a node that is silent.
const AT_ONCE: usize = 8;
/// How long the thread that listens is deaf to its end.
const STEP: Duration = Duration::from_millis(500);

/// Why a connection has no TLS.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum HandshakeError {
    /// Something else than this driver's.
    #[snafu(display("the kernel wants a handshake of a kind that is not known here: is it another program's connection?"))]
    Foreign,
    /// There is no keyring.
    #[snafu(display("this kernel has no keyring .nvme"))]
    NoKeyring,
    /// The client's key is not there any more.
    #[snafu(display("the key for this connection is not in the kernel's keyring"))]
    NoKey,
    /// The keyring.
    #[snafu(display("the kernel's keys cannot be read: {source}"))]
    Keyring {
        /// Why not.
        source: HostError,
    },
    /// The handshake.
    #[snafu(display("{source}"))]
    Session {
        /// What was seen.
        source: TlsError,
    },
}

impl HandshakeError {
    /// What the connection fails with. Never ENOKEY or EKEYREJECTED, which a client takes for final: it would give up a branch
    /// whose owner has only not put its keys back yet, after a reboot.
    fn errno(&self) -> i32 {
        match self {
            Self::Foreign => libc::EOPNOTSUPP,
            Self::Session { source: TlsError::Silent } => libc::ETIMEDOUT,
            Self::NoKeyring | Self::NoKey | Self::Keyring { .. } | Self::Session { .. } => libc::EACCES,
        }
    }
}

/// Makes one handshake, and gives the session to the kernel; the key that was used.
///
/// # Errors
/// See [`HandshakeError`].
pub fn shake(host: &Host, handshake: &Handshake) -> Result<KeySerial, HandshakeError> {
    let role = handshake.role.filter(|_| handshake.by_key).context(handshake_error::ForeignSnafu)?;
    let ring = NvmeKeyring::find(host).context(handshake_error::KeyringSnafu)?;
    let ring = ring.context(handshake_error::NoKeyringSnafu)?;
    let mut keys = ring.keys().context(handshake_error::KeyringSnafu)?;
    if role == Role::Client {
        keys.retain(|key| handshake.keys.contains(&key.serial));
    }
    snafu::ensure!(!keys.is_empty(), handshake_error::NoKeySnafu);
    let deadline = Instant::now() + handshake.bound.unwrap_or(BOUND);
    let given = keys.iter().map(|key: &TlsKey| (key.identity.as_str(), key.secret.as_slice()));
    let made = || -> Result<String, TlsError> {
        let mut session = Session::new(&handshake.socket, role, given)?;
        let identity = session.negotiate(deadline)?;
        session.give_to_kernel()?;
        Ok(identity)
    };
    let identity = made().context(handshake_error::SessionSnafu)?;
    let used = keys.iter().find(|key| key.identity == identity);
    used.map(|key| key.serial).context(handshake_error::NoKeySnafu)
}

/// Answers requests until `ended` says so. Blocks.
pub fn answer(host: &Host, handshakes: &Handshakes, ended: &(dyn Fn() -> bool + Sync)) {
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while !ended() {
                    match handshakes.accept() {
                        Ok(Some(handshake)) => one(host, handshakes, handshake),
                        Ok(None) => {
                            if let Err(error) = handshakes.wait(STEP) {
                                tracing::warn!(%error, "the kernel's requests for TLS cannot be heard");
                                std::thread::sleep(STEP);
                            }
                        }
                        Err(error) => {
                            tracing::warn!(%error, "a request of the kernel for TLS cannot be taken");
                            std::thread::sleep(STEP);
                        }
                    }
                }
            });
        }
    });
}

fn one(host: &Host, handshakes: &Handshakes, handshake: Handshake) {
    let (peer, role) = (handshake.peer(), handshake.role);
    let peer = peer.map(|peer| peer.to_string()).unwrap_or_default();
    let made = shake(host, &handshake);
    match &made {
        Ok(key) => tracing::debug!(peer, ?role, %key, "a connection is encrypted"),
        Err(error) => tracing::warn!(peer, ?role, %error, "a connection between two nodes gets no TLS"),
    }
    if let Err(error) = handshakes.done(handshake, made.map_err(|error| error.errno())) {
        tracing::warn!(peer, %error, "the kernel has given up a connection before it had TLS");
    }
}
