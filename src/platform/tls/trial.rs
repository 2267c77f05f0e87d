//! Whether this kernel's TLS works: tried on a connection of this process with itself, because which ciphers a kernel has, and whether
//! it can load their modules, nothing tells.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::{Role, Session, TlsError};
use crate::platform::Host;

/// Longer than both ends take on a machine that is busy.
const BOUND: Duration = Duration::from_secs(10);
const KEY: (&str, &[u8]) = ("trial", &[0x5a; 32]);
const WORD: &[u8] = b"read by the other end";

/// Makes a session between two ends here, gives both to the kernel, and sends a word through it.
///
/// # Errors
/// [`TlsError`]: what does not work.
pub fn trial(host: &Host) -> Result<(), TlsError> {
    host.enter("try TLS", "the kernel").map_err(|error| lost(std::io::Error::other(error)))?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(lost)?;
    let client = TcpStream::connect(listener.local_addr().map_err(lost)?).map_err(lost)?;
    let (server, peer) = listener.accept().map_err(lost)?;
    if peer != client.local_addr().map_err(lost)? {
        return Err(TlsError::Refused { reason: "another program connected to the trial".to_owned() });
    }
    for end in [&client, &server] {
        end.set_read_timeout(Some(BOUND)).map_err(lost)?;
    }
    let deadline = Instant::now() + BOUND;
    let made = |stream: TcpStream, role| -> Result<TcpStream, TlsError> {
        let mut session = Session::new(&stream, role, [KEY])?;
        session.negotiate(deadline)?;
        session.give_to_kernel()?;
        Ok(stream)
    };
    let (client, server) = std::thread::scope(|scope| {
        let server = scope.spawn(|| made(server, Role::Server));
        let client = made(client, Role::Client);
        let ended = |_| Err(TlsError::Refused { reason: "the trial's own thread ended".to_owned() });
        (client, server.join().unwrap_or_else(ended))
    });
    // What the server's end saw is the client's doing, or that of the kernel both are in.
    let (mut client, mut server) = (client?, server?);
    client.write_all(WORD).map_err(lost)?;
    let mut word = [0; WORD.len()];
    server.read_exact(&mut word).map_err(lost)?;
    match word == WORD {
        true => Ok(()),
        false => Err(TlsError::Kernel { reason: "what was read is not what was written".to_owned() }),
    }
}

fn lost(source: std::io::Error) -> TlsError {
    TlsError::Connection { source }
}
