//! Asking an NFS server two questions of some bytes each (RFC 5531, RFC 8881): is anyone there, and does it know this
//! address. A mount from an address that the server does not know would wait without end.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::platform::{Host, Result};

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NfsAnswer {
    /// It serves this node, which it sees at this address.
    Serves(IpAddr),
    /// It answers, but not to this node's address.
    Denies(IpAddr),
    /// It does not answer; what was seen instead.
    Silent(String),
}

/// RPC program number of NFS, and its version.
const PROGRAM: u32 = 100_003;
const VERSION: u32 = 4;
/// Procedures: one that does nothing and is answered to anyone, and one that carries operations.
const NULL: u32 = 0;
const COMPOUND: u32 = 1;
/// What the last fragment of a message has set in its length.
const LAST_FRAGMENT: u32 = 0x8000_0000;
/// Longer answers to what is asked here do not exist.
const ANSWER_LIMIT: u32 = 4096;

impl Host {
    /// Asks the server, and waits at most `bound` for each of two answers.
    ///
    /// # Errors
    /// Only those of a test's gate: silence is an answer.
    pub fn nfs_ask(&self, server: SocketAddr, bound: Duration) -> Result<NfsAnswer> {
        self.enter("ask nfs", server.to_string())?;
        Ok(ask(server, bound))
    }
}

fn ask(server: SocketAddr, bound: Duration) -> NfsAnswer {
    let mut stream = match TcpStream::connect_timeout(&server, bound) {
        Ok(stream) => stream,
        Err(error) => return NfsAnswer::Silent(error.to_string()),
    };
    let own = match stream.local_addr() {
        Ok(address) => address.ip(),
        Err(error) => return NfsAnswer::Silent(error.to_string()),
    };
    match call(&mut stream, &message(1, NULL), bound) {
        Ok(true) => {}
        Ok(false) => return NfsAnswer::Silent("what answers there is not an NFSv4 server".to_owned()),
        Err(error) => return NfsAnswer::Silent(error.to_string()),
    }
    // A server that does not know the address says nothing or hangs up: who may ask comes from outside the kernel.
    match call(&mut stream, &message(2, COMPOUND), bound) {
        Ok(true) => NfsAnswer::Serves(own),
        Ok(false) | Err(_) => NfsAnswer::Denies(own),
    }
}

/// Sends a call; true where it was accepted and done.
fn call(stream: &mut TcpStream, message: &[u8], bound: Duration) -> std::io::Result<bool> {
    let deadline = Instant::now() + bound;
    stream.set_write_timeout(Some(bound))?;
    stream.write_all(message)?;
    let mut head = [0; 4];
    read(stream, &mut head, deadline)?;
    let length = u32::from_be_bytes(head) & !LAST_FRAGMENT;
    if length > ANSWER_LIMIT {
        return Ok(false);
    }
    let mut body = vec![0; usize::try_from(length).unwrap_or(0)];
    read(stream, &mut body, deadline)?;
    Ok(accepted(&body, &message[4..8]))
}

fn read(stream: &mut TcpStream, mut into: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        // A timeout of nothing would be none.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(into)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            read => into = &mut into[read..],
        }
        if left.is_zero() {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// The call of a procedure, as user 0 of no machine; a compound has no operation.
fn message(id: u32, procedure: u32) -> Vec<u8> {
    let mut words = vec![id, 0, 2, PROGRAM, VERSION, procedure];
    if procedure == NULL {
        // Neither credential nor verifier.
        words.extend([0, 0, 0, 0]);
    } else {
        // AUTH_SYS of 20 bytes: stamp, machine name, user, group, groups; no verifier.
        words.extend([1, 20, 0, 0, 0, 0, 0, 0, 0]);
        // Tag, minor version 2, number of operations.
        words.extend([0, 2, 0]);
    }
    let body: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
    let length = u32::try_from(body.len()).unwrap_or(0) | LAST_FRAGMENT;
    [length.to_be_bytes().as_slice(), &body].concat()
}

/// True for a reply to call `id` that the server accepted, executed successfully.
fn accepted(body: &[u8], id: &[u8]) -> bool {
    let word = |number: usize| {
        body.get(4 * number..4 * number + 4).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes)
    };
    // Reply, accepted, then a verifier of some length, then how the execution went.
    let verifier = word(4).and_then(|length| usize::try_from(length).ok()).map(|length| length.div_ceil(4));
    body.get(..4) == Some(id)
        && word(1) == Some(1)
        && word(2) == Some(0)
        && verifier.is_some_and(|words| words < 128 && word(5 + words) == Some(0))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const BOUND: Duration = Duration::from_millis(300);

    /// Answers calls with these bodies, one after the other, then holds the connection until it is closed.
    fn server(answers: Vec<Vec<u32>>) -> (SocketAddr, thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let serve = move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut buffer = [0; 512];
            for answer in answers {
                if stream.read(&mut buffer).unwrap_or(0) == 0 {
                    return;
                }
                let body: Vec<u8> = answer.iter().flat_map(|w| w.to_be_bytes()).collect();
                let length = u32::try_from(body.len()).unwrap() | LAST_FRAGMENT;
                stream.write_all(&length.to_be_bytes()).unwrap();
                stream.write_all(&body).unwrap();
            }
            while stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
        };
        (address, thread::spawn(serve))
    }

    #[test]
    fn a_server_that_executes_both_calls_serves() {
        let (address, thread) = server(vec![vec![1, 1, 0, 0, 0, 0], vec![2, 1, 0, 0, 0, 0, 0, 0, 0]]);
        assert_eq!(ask(address, BOUND), NfsAnswer::Serves(address.ip()));
        thread.join().unwrap();
    }

    #[test]
    fn a_server_that_rejects_the_address_or_keeps_silent_to_it_denies() {
        let (address, thread) = server(vec![vec![1, 1, 0, 0, 0, 0], vec![2, 1, 1, 1, 1]]);
        assert_eq!(ask(address, BOUND), NfsAnswer::Denies(address.ip()));
        thread.join().unwrap();
        let (address, thread) = server(vec![vec![1, 1, 0, 0, 0, 0]]);
        assert_eq!(ask(address, BOUND), NfsAnswer::Denies(address.ip()));
        thread.join().unwrap();
    }

    #[test]
    fn what_does_not_answer_or_speaks_otherwise_is_silent() {
        let (address, thread) = server(vec![]);
        assert!(matches!(ask(address, BOUND), NfsAnswer::Silent(_)));
        thread.join().unwrap();
        // Another call's number, and a message that ends early.
        for answer in [vec![9, 1, 0, 0, 0, 0], vec![1, 1, 0]] {
            let (address, thread) = server(vec![answer]);
            assert!(matches!(ask(address, BOUND), NfsAnswer::Silent(_)));
            thread.join().unwrap();
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(ask(closed, BOUND), NfsAnswer::Silent(_)));
    }

    #[test]
    fn a_call_tells_its_own_length() {
        for procedure in [NULL, COMPOUND] {
            let message = message(7, procedure);
            let length = u32::from_be_bytes(message[..4].try_into().unwrap());
            assert_eq!(length, LAST_FRAGMENT | u32::try_from(message.len() - 4).unwrap());
        }
    }
}
