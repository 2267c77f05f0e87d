//! A TLS 1.3 handshake with a key that both ends have, by s2n-tls, and what comes of it given to the kernel.
//!
//! No certificate is known here, so nobody gets in by one; a session that was not made with one of the given keys is an error,
//! whatever else was agreed on.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout};
use s2n_tls_sys as s2n;
use snafu::Snafu;

use super::Role;

/// TLS 1.3; the server takes the first cipher of its list that goes with the key's hash, which is AES-128-GCM with SHA-256.
const POLICY: &CStr = c"default_tls13";

/// No session came about.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum TlsError {
    /// The library.
    #[snafu(display("cannot {action} for TLS: {reason}"))]
    Library {
        /// What was to be done.
        action: &'static str,
        /// What it says.
        reason: String,
    },
    /// The other end, or what came in its name.
    #[snafu(display("the two nodes do not agree on a TLS session: {reason}"))]
    Refused {
        /// What was seen.
        reason: String,
    },
    /// The other end has closed the connection.
    #[snafu(display("the other node has closed the connection"))]
    Closed,
    /// The other end says nothing.
    #[snafu(display("the other node does not go on with the TLS handshake"))]
    Silent,
    /// The connection.
    #[snafu(display("the connection cannot be used for TLS: {source}"))]
    Connection {
        /// Why.
        source: std::io::Error,
    },
    /// The kernel does not take the session.
    #[snafu(display("the kernel does not take over the TLS session (module tls): {reason}"))]
    Kernel {
        /// What was seen.
        reason: String,
    },
}

type Result<T, E = TlsError> = std::result::Result<T, E>;

/// One end of a session.
pub struct Session<'s> {
    socket: BorrowedFd<'s>,
    connection: NonNull<s2n::s2n_connection>,
    config: NonNull<s2n::s2n_config>,
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("socket", &self.socket).finish_non_exhaustive()
    }
}

#[allow(unsafe_code)]
impl<'s> Session<'s> {
    /// One end over this connection, with these keys: the identity that both ends know each by, and its secret.
    ///
    /// # Errors
    /// The library refuses: a secret of less than 16 bytes, two of one identity.
    pub fn new<'k>(
        socket: &'s impl AsFd,
        role: Role,
        keys: impl IntoIterator<Item = (&'k str, &'k [u8])>,
    ) -> Result<Self> {
        ready()?;
        let mode = match role {
            Role::Client => s2n::s2n_mode::CLIENT,
            Role::Server => s2n::s2n_mode::SERVER,
        };
        // SAFETY: the library is ready; a configuration of our own.
        let config = NonNull::new(unsafe { s2n::s2n_config_new_minimal() });
        let config = config.ok_or_else(|| library("make a configuration"))?;
        // SAFETY: as above.
        let Some(connection) = NonNull::new(unsafe { s2n::s2n_connection_new(mode) }) else {
            let error = library("make a connection");
            // SAFETY: made above, and used by nothing.
            unsafe { s2n::s2n_config_free(config.as_ptr()) };
            return Err(error);
        };
        let session = Self { socket: socket.as_fd(), connection, config };
        let (connection, config) = (connection.as_ptr(), config.as_ptr());
        // SAFETY: both live as long as `session`; the policy's name ends in a zero byte; the descriptor is borrowed for as long.
        unsafe {
            check(s2n::s2n_config_set_cipher_preferences(config, POLICY.as_ptr()), "choose the ciphers")?;
            // The kernel cannot change keys in the middle. Neither end asks for it.
            check(s2n::s2n_config_ktls_enable_unsafe_tls13(config), "allow the kernel's TLS 1.3")?;
            check(s2n::s2n_connection_set_config(connection, config), "configure")?;
            // A pause after errors hides how long ciphers took that are not used here.
            check(
                s2n::s2n_connection_set_blinding(connection, s2n::s2n_blinding::SELF_SERVICE_BLINDING),
                "configure",
            )?;
            check(s2n::s2n_connection_set_fd(connection, session.socket.as_raw_fd()), "take the connection")?;
        }
        for (identity, secret) in keys {
            session.append(identity, secret)?;
        }
        Ok(session)
    }

    fn append(&self, identity: &str, secret: &[u8]) -> Result<()> {
        let length = |bytes: &[u8]| {
            u16::try_from(bytes.len()).map_err(|_| TlsError::Library {
                action: "take a key",
                reason: "it is longer than 65535 bytes".to_owned(),
            })
        };
        let (identity, secret) = (identity.as_bytes(), secret);
        let (identity_length, secret_length) = (length(identity)?, length(secret)?);
        // SAFETY: both are as long as is said, and are copied; the connection keeps a copy of the key, which is freed here
        // in every case.
        unsafe {
            let mut key = s2n::s2n_external_psk_new();
            if key.is_null() {
                return Err(library("make a key"));
            }
            let taken =
                check(s2n::s2n_psk_set_identity(key, identity.as_ptr(), identity_length), "take a key")
                    .and_then(|()| {
                        check(s2n::s2n_psk_set_secret(key, secret.as_ptr(), secret_length), "take a key")
                    })
                    .and_then(|()| check(s2n::s2n_psk_set_hmac(key, s2n::s2n_psk_hmac::SHA256), "take a key"))
                    .and_then(|()| {
                        check(s2n::s2n_connection_append_psk(self.connection.as_ptr(), key), "take a key")
                    });
            s2n::s2n_psk_free(&raw mut key);
            taken
        }
    }

    /// Makes the handshake until `deadline`, and returns the identity of the key that both ends had.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn negotiate(&mut self, deadline: Instant) -> Result<String> {
        let flags = fcntl(self.socket, FcntlArg::F_GETFL).map_err(connection)?;
        let flags = OFlag::from_bits_truncate(flags);
        fcntl(self.socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map_err(connection)?;
        let agreed = self.handshake(deadline);
        fcntl(self.socket, FcntlArg::F_SETFL(flags)).map_err(connection)?;
        agreed?;
        self.identity()
    }

    fn handshake(&mut self, deadline: Instant) -> Result<()> {
        loop {
            let mut blocked = s2n::s2n_blocked_status::NOT_BLOCKED;
            // SAFETY: the connection lives; `blocked` is ours.
            let done = unsafe { s2n::s2n_negotiate(self.connection.as_ptr(), &raw mut blocked) };
            if done == s2n::s2n_status_code::SUCCESS {
                return Ok(());
            }
            let (kind, reason) = complaint();
            if kind == s2n::s2n_error_type::CLOSED {
                return Err(TlsError::Closed);
            }
            if kind != s2n::s2n_error_type::BLOCKED {
                return Err(TlsError::Refused { reason });
            }
            let events = match blocked {
                s2n::s2n_blocked_status::BLOCKED_ON_READ => PollFlags::POLLIN,
                s2n::s2n_blocked_status::BLOCKED_ON_WRITE => PollFlags::POLLOUT,
                _ => return Err(TlsError::Refused { reason }),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(TlsError::Silent);
            }
            let bound = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            match nix::poll::poll(&mut [PollFd::new(self.socket, events)], bound) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(connection(errno)),
            }
        }
    }

    /// Which key was used.
    fn identity(&self) -> Result<String> {
        let connection = self.connection.as_ptr();
        let mut length = 0_u16;
        // SAFETY: the connection lives, and `length` is ours.
        let (told, version) = unsafe {
            let told = s2n::s2n_connection_get_negotiated_psk_identity_length(connection, &raw mut length);
            (told, s2n::s2n_connection_get_actual_protocol_version(connection))
        };
        check(told, "tell the key")?;
        if length == 0 || version != s2n::s2n_tls_version::TLS13 {
            return Err(TlsError::Refused { reason: "it was agreed on without a key".to_owned() });
        }
        let mut identity = vec![0_u8; length.into()];
        // SAFETY: the buffer has as many bytes as is said.
        let told = unsafe {
            s2n::s2n_connection_get_negotiated_psk_identity(connection, identity.as_mut_ptr(), length)
        };
        check(told, "tell the key")?;
        String::from_utf8(identity)
            .map_err(|_| TlsError::Refused { reason: "the key's identity is no text".to_owned() })
    }

    /// Gives the session to the kernel: whatever is written to the connection is encrypted from now on.
    ///
    /// # Errors
    /// [`TlsError::Kernel`]; the connection is of no use then.
    pub fn give_to_kernel(self) -> Result<()> {
        let connection = self.connection.as_ptr();
        // SAFETY: the connection lives, and its handshake is over; the library checks the latter.
        let given = unsafe {
            s2n::s2n_connection_ktls_enable_send(connection) == s2n::s2n_status_code::SUCCESS
                && s2n::s2n_connection_ktls_enable_recv(connection) == s2n::s2n_status_code::SUCCESS
        };
        if given {
            return Ok(());
        }
        let os = std::io::Error::last_os_error();
        Err(TlsError::Kernel { reason: format!("{}; {os}", complaint().1) })
    }
}

impl Drop for Session<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: both were made by `new` and are used by nothing else; the connection goes before what it refers to. Freeing
        // says nothing to the other end, and leaves the descriptor open.
        unsafe {
            s2n::s2n_connection_free(self.connection.as_ptr());
            s2n::s2n_config_free(self.config.as_ptr());
        }
    }
}

/// Sees to it that the library is ready: it keeps its own state for the process, and wants to be asked once.
#[allow(unsafe_code)]
fn ready() -> Result<()> {
    static READY: OnceLock<std::result::Result<(), String>> = OnceLock::new();
    let ready = READY.get_or_init(|| {
        // SAFETY: called once, and before every other function of the library.
        let done = unsafe {
            // What it has is gone with the process.
            s2n::s2n_disable_atexit() == s2n::s2n_status_code::SUCCESS
                && s2n::s2n_init() == s2n::s2n_status_code::SUCCESS
        };
        if done { Ok(()) } else { Err(complaint().1) }
    });
    ready.clone().map_err(|reason| TlsError::Library { action: "prepare the library", reason })
}

fn check(status: libc::c_int, action: &'static str) -> Result<()> {
    if status == s2n::s2n_status_code::SUCCESS { Ok(()) } else { Err(library(action)) }
}

fn library(action: &'static str) -> TlsError {
    TlsError::Library { action, reason: complaint().1 }
}

fn connection(errno: nix::errno::Errno) -> TlsError {
    TlsError::Connection { source: errno.into() }
}

/// The kind of the last error on this thread, and what the library says of it.
#[allow(unsafe_code)]
fn complaint() -> (libc::c_uint, String) {
    // SAFETY: the location belongs to this thread; the texts are constants of the library.
    unsafe {
        let number = *s2n::s2n_errno_location();
        let text = s2n::s2n_strerror(number, c"EN".as_ptr());
        let text =
            if text.is_null() { "no reason is known".into() } else { CStr::from_ptr(text).to_string_lossy() };
        (s2n::s2n_error_get_type(number).unsigned_abs(), text.into_owned())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    const BOUND: Duration = Duration::from_secs(60);

    /// What both ends come to.
    fn meet(client: &[(&str, &[u8])], server: &[(&str, &[u8])]) -> [Result<String>; 2] {
        let (near, far) = UnixStream::pair().unwrap();
        let deadline = Instant::now() + BOUND;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                // A refusal ends the connection, as the kernel does.
                let far = far;
                Session::new(&far, Role::Server, server.iter().copied())?.negotiate(deadline)
            });
            let one = (|| {
                let near = near;
                Session::new(&near, Role::Client, client.iter().copied())?.negotiate(deadline)
            })();
            [one, other.join().unwrap()]
        })
    }

    #[test]
    fn two_ends_that_have_one_key_agree_on_it() {
        let (first, second) = ([1_u8; 32], [2_u8; 32]);
        let long = format!("NVMe0R01 {} {}", "h".repeat(223), "s".repeat(223));
        let server = [("one", first.as_slice()), (long.as_str(), second.as_slice())];
        let [client, server] = meet(&[(&long, &second)], &server);
        assert_eq!(client.unwrap(), long);
        assert_eq!(server.unwrap(), long);
    }

    #[test]
    fn nobody_gets_in_without_the_key() {
        let (right, wrong) = ([1_u8; 32], [2_u8; 32]);
        let server = [("one", right.as_slice())];
        for client in [&[("one", wrong.as_slice())][..], &[("two", right.as_slice())][..], &[][..]] {
            let [client, server] = meet(client, &server);
            assert!(client.is_err() && server.is_err(), "{client:?} {server:?}");
        }
    }

    #[test]
    fn a_silent_end_is_not_waited_for_longer_than_was_said() {
        let (near, _far) = UnixStream::pair().unwrap();
        let mut session = Session::new(&near, Role::Server, [("one", [1_u8; 32].as_slice())]).unwrap();
        let silent = session.negotiate(Instant::now() + Duration::from_millis(50));
        assert!(matches!(silent, Err(TlsError::Silent)), "{silent:?}");
    }
}
