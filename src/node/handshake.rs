//! Answers the kernel's requests for TLS: of connections to branches on other nodes, at both ends.
//!
//! Which keys there are, the kernel's keyring tells: nothing is kept here, and an agent that was restarted answers as well as
//! the one before. While none runs, connections that stand go on, and the kernel tries again to make those that do not.
//!
//! The kernel asks for all its connections, also for those of other programs (NFS with TLS), and whoever takes a request must answer
//! it. So nobody listens here before something of this driver is encrypted ([`Answering::ensure`]).

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use snafu::{OptionExt, ResultExt, Snafu};

use crate::platform::keyring::{KeySerial, NvmeKeyring, TlsKey};
use crate::platform::tls::{Handshake, Handshakes, Role, Session, TlsError};
use crate::platform::{Host, HostError};

/// Where the kernel says nothing of how long it waits.
const BOUND: Duration = Duration::from_secs(10);
/// Handshakes at the same time: one takes milliseconds of a processor, and some of them wait for a node that is silent.
const AT_ONCE: usize = 8;
/// How long who wants requests to be answered waits for that: it takes some system calls.
const READY: Duration = Duration::from_secs(5);
/// Until it is tried again to listen where that failed.
const AGAIN: Duration = Duration::from_secs(5);
/// How long the thread that listens is deaf to its end.
const STEP: Duration = Duration::from_millis(500);

/// Why a connection has no TLS.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum HandshakeError {
    /// Something else than this driver's.
    #[snafu(display(
        "the kernel wants a handshake of a kind that is not known here: is it another program's connection?"
    ))]
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
    fn errno(&self) -> Errno {
        match self {
            Self::Foreign => Errno::OPNOTSUPP,
            Self::Session { source: TlsError::Silent } => Errno::TIMEDOUT,
            Self::NoKeyring | Self::NoKey | Self::Keyring { .. } | Self::Session { .. } => Errno::ACCESS,
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

/// Whether the kernel's requests are answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Stand {
    /// Nothing here is encrypted.
    #[default]
    Idle,
    /// Somebody waits for it.
    Wanted,
    /// They are.
    Listening,
    /// They cannot be, and why.
    Unable(String),
}

/// That requests are answered from the time on when something here is to be encrypted: who needs it says so, and one task does it.
#[derive(Debug, Default)]
pub struct Answering {
    stand: Mutex<Stand>,
    changed: Condvar,
}

impl Answering {
    fn stand(&self) -> MutexGuard<'_, Stand> {
        self.stand.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, stand: Stand) {
        *self.stand() = stand;
        self.changed.notify_all();
    }

    /// Requests are to be answered; nobody waits for it.
    pub fn want(&self) {
        let mut stand = self.stand();
        if *stand == Stand::Idle {
            *stand = Stand::Wanted;
            self.changed.notify_all();
        }
    }

    /// Something here is encrypted, or was since the agent started.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        *self.stand() != Stand::Idle
    }

    /// Waits until requests are answered. Blocks, within a bound.
    ///
    /// # Errors
    /// Why they are not.
    pub fn ensure(&self) -> Result<(), String> {
        self.want();
        let waits = |stand: &mut Stand| *stand == Stand::Wanted;
        let waited = self.changed.wait_timeout_while(self.stand(), READY, waits);
        let (stand, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &*stand {
            Stand::Listening => Ok(()),
            Stand::Unable(reason) => Err(reason.clone()),
            Stand::Idle | Stand::Wanted => {
                Err("the kernel's requests for TLS are not answered here yet".to_owned())
            }
        }
    }

    /// Answers requests, once somebody wants it, until `ended` says so. Blocks.
    pub fn serve(&self, host: &Host, ended: &(dyn Fn() -> bool + Sync)) {
        while !ended() {
            let idle = |stand: &mut Stand| *stand == Stand::Idle;
            let waited = self.changed.wait_timeout_while(self.stand(), STEP, idle);
            if waited.is_ok_and(|(_, timeout)| timeout.timed_out()) {
                continue;
            }
            let reason = match Handshakes::listen(host) {
                Ok(Some(handshakes)) => {
                    tracing::info!(
                        "connections to other nodes are encrypted: the kernel's requests for TLS are answered"
                    );
                    self.set(Stand::Listening);
                    answer(host, &handshakes, ended);
                    continue;
                }
                Ok(None) => "this kernel was built without CONFIG_NET_HANDSHAKE".to_owned(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(reason, again_in = ?AGAIN, "the kernel's requests for TLS cannot be answered");
            self.set(Stand::Unable(reason));
            let until = Instant::now() + AGAIN;
            while Instant::now() < until && !ended() {
                std::thread::sleep(STEP);
            }
        }
        self.set(Stand::Idle);
    }
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
        // Consumers look whether an owner listens before they let their kernel connect.
        Err(error @ HandshakeError::Session { source: TlsError::Closed }) => {
            tracing::debug!(peer, ?role, %error, "a connection was given up before it had TLS");
        }
        Err(error) => tracing::warn!(peer, ?role, %error, "a connection between two nodes gets no TLS"),
    }
    if let Err(error) = handshakes.done(handshake, made.map_err(|error| error.errno().raw_os_error())) {
        tracing::warn!(peer, %error, "the kernel has given up a connection before it had TLS");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn who_needs_tls_waits_until_requests_are_answered_and_is_told_why_they_are_not() {
        let answering = Arc::new(Answering::default());
        let (told, waits) = (answering.clone(), answering.clone());
        let waiter = std::thread::spawn(move || waits.ensure());
        let server = std::thread::spawn(move || {
            let wanted = told.changed.wait_while(told.stand(), |stand| *stand == Stand::Idle);
            drop(wanted);
            told.set(Stand::Listening);
        });
        server.join().unwrap();
        assert_eq!(waiter.join().unwrap(), Ok(()));
        assert_eq!(answering.ensure(), Ok(()), "at once");
        answering.set(Stand::Unable("no family".to_owned()));
        assert_eq!(answering.ensure(), Err("no family".to_owned()));
    }

    #[test]
    fn nobody_listens_before_something_is_encrypted() {
        let answering = Answering::default();
        let until = Instant::now() + Duration::from_millis(100);
        answering.serve(&Host::new(), &|| Instant::now() > until);
        assert_eq!(*answering.stand(), Stand::Idle);
    }

    #[test]
    fn a_client_is_never_told_that_its_key_is_refused_for_good() {
        for error in [HandshakeError::NoKey, HandshakeError::NoKeyring, HandshakeError::Foreign] {
            assert!(![Errno::NOKEY, Errno::KEYREJECTED].contains(&error.errno()), "{error}");
        }
    }
}
