//! TLS for connections that the kernel makes: it asks a process for the handshake (its `Documentation/networking/tls-handshake.rst`),
//! gets the keys of the session, and encrypts by itself from then on.
//!
//! [`Handshakes`] is the kernel's side: who is asked, what for, and what came of it. [`Session`] is the handshake itself, made by
//! s2n-tls: TLS 1.3 with a key that both ends have, and nothing else. [`trial()`] tells whether this kernel can take one over.

mod handshakes;
mod session;
mod trial;

pub use self::handshakes::{Handshake, Handshakes, Role};
pub use self::session::{Session, TlsError};
pub use self::trial::trial;
