//! Some bytes of RPC (RFC 5531) to an NFS server (RFC 8881). Two questions: is anyone there, and does it know this address; a mount
//! from an address that the server does not know would wait without end. And a word to whoever looks after the server, which it
//! keeps where they can read it: the name of a client.

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
/// The operation by which a client makes itself known (RFC 8881, section 18.35).
const EXCHANGE_ID: u32 = 42;
/// What the last fragment of a message has set in its length.
const LAST_FRAGMENT: u32 = 0x8000_0000;
/// Longer answers to what is asked here do not exist.
const ANSWER_LIMIT: u32 = 4096;
/// A longer name of a client is refused (RFC 8881, `NFS4_OPAQUE_LIMIT`).
const NAME_LIMIT: usize = 1024;

/// A procedure of NFS.
enum Procedure<'a> {
    /// Does nothing, and is answered to anyone.
    Null,
    /// Carries operations: here none.
    Nothing,
    /// Carries the operation that makes a client of this name known.
    Introduce(&'a str),
}

impl Procedure<'_> {
    /// Its number, credential, verifier and arguments.
    fn bytes(&self) -> Vec<u8> {
        // Neither credential nor verifier; else AUTH_SYS of 20 bytes: stamp, machine name, user, group, groups; no verifier.
        let nobody = [0, 0, 0, 0].as_slice();
        let root = [1, 20, 0, 0, 0, 0, 0, 0, 0].as_slice();
        // A compound: tag, minor version 2, number of operations.
        match self {
            Self::Null => words(&[&[0], nobody]),
            Self::Nothing => words(&[&[1], root, &[0, 2, 0]]),
            Self::Introduce(name) => {
                let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
                // Its verifier: who says the same once more says nothing new.
                let mut bytes = words(&[&[1], root, &[0, 2, 1], &[EXCHANGE_ID, 0, 0, length]]);
                bytes.extend_from_slice(name.as_bytes());
                bytes.resize(bytes.len().next_multiple_of(4), 0);
                // No flags, no protection of state, nothing of the implementation.
                bytes.extend(words(&[&[0, 0, 0]]));
                bytes
            }
        }
    }
}

fn words(parts: &[&[u32]]) -> Vec<u8> {
    parts.iter().flat_map(|part| part.iter()).flat_map(|word| word.to_be_bytes()).collect()
}

impl Host {
    /// Asks the server, and waits at most `bound` for each of two answers.
    ///
    /// # Errors
    /// Only those of a test's gate: silence is an answer.
    pub fn nfs_ask(&self, server: SocketAddr, bound: Duration) -> Result<NfsAnswer> {
        self.enter("ask nfs", server.to_string())?;
        Ok(ask(server, bound))
    }

    /// Has the server note this name among those of its clients, until its lease is over: [`NfsClient::name`](super::NfsClient).
    /// Waits at most `bound` for its answer; false where it did not take it.
    ///
    /// # Errors
    /// Only those of a test's gate.
    pub fn nfs_tell(&self, server: SocketAddr, name: &str, bound: Duration) -> Result<bool> {
        self.enter("tell nfs", server.to_string())?;
        let told = || {
            let mut stream = TcpStream::connect_timeout(&server, bound)?;
            call(&mut stream, &message(1, &Procedure::Introduce(name)), bound)
        };
        Ok(name.len() <= NAME_LIMIT && matches!(told(), Ok(Some(0))))
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
    match call(&mut stream, &message(1, &Procedure::Null), bound) {
        Ok(Some(_)) => {}
        Ok(None) => return NfsAnswer::Silent("what answers there is not an NFSv4 server".to_owned()),
        Err(error) => return NfsAnswer::Silent(error.to_string()),
    }
    // A server that does not know the address says nothing or hangs up: who may ask comes from outside the kernel.
    match call(&mut stream, &message(2, &Procedure::Nothing), bound) {
        Ok(Some(_)) => NfsAnswer::Serves(own),
        Ok(None) | Err(_) => NfsAnswer::Denies(own),
    }
}

/// Sends a call; where it was accepted and done, the first word of its result, 0 where there is none.
fn call(stream: &mut TcpStream, message: &[u8], bound: Duration) -> std::io::Result<Option<u32>> {
    let deadline = Instant::now() + bound;
    stream.set_write_timeout(Some(bound))?;
    stream.write_all(message)?;
    let mut head = [0; 4];
    read(stream, &mut head, deadline)?;
    let length = u32::from_be_bytes(head) & !LAST_FRAGMENT;
    if length > ANSWER_LIMIT {
        return Ok(None);
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

/// The call of a procedure.
fn message(id: u32, procedure: &Procedure<'_>) -> Vec<u8> {
    let body = [words(&[&[id, 0, 2, PROGRAM, VERSION]]), procedure.bytes()].concat();
    let length = u32::try_from(body.len()).unwrap_or(0) | LAST_FRAGMENT;
    [length.to_be_bytes().as_slice(), &body].concat()
}

/// Of a reply to call `id` that the server accepted and executed, the first word of the result.
fn accepted(body: &[u8], id: &[u8]) -> Option<u32> {
    let word = |number: usize| {
        body.get(4 * number..4 * number + 4).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes)
    };
    // Reply, accepted, then a verifier of some length, then how the execution went.
    let verifier = word(4).and_then(|length| usize::try_from(length).ok()).map(|length| length.div_ceil(4));
    let executed = 5 + verifier.filter(|words| *words < 128)?;
    let done =
        body.get(..4) == Some(id) && word(1) == Some(1) && word(2) == Some(0) && word(executed) == Some(0);
    done.then(|| word(executed + 1).unwrap_or(0))
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
        for procedure in [Procedure::Null, Procedure::Nothing, Procedure::Introduce("abcde")] {
            let message = message(7, &procedure);
            let length = u32::from_be_bytes(message[..4].try_into().unwrap());
            assert_eq!(length, LAST_FRAGMENT | u32::try_from(message.len() - 4).unwrap());
            assert_eq!(message.len() % 4, 0);
        }
    }

    #[test]
    fn a_name_is_taken_where_the_server_says_so() {
        let host = Host::new();
        for (result, taken) in [(0, true), (10_008, false)] {
            let (address, thread) = server(vec![vec![1, 1, 0, 0, 0, 0, result, 0, 1]]);
            assert_eq!(host.nfs_tell(address, "a name", BOUND).unwrap(), taken);
            thread.join().unwrap();
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(!host.nfs_tell(closed, "a name", BOUND).unwrap());
    }
}
