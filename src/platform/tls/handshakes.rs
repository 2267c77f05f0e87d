//! The kernel's requests for a handshake: the generic netlink family `handshake` (its specification is
//! `Documentation/netlink/specs/handshake.yaml` of the kernel).
//!
//! Whoever listens in the group `tlshd` is told that there is a request; the first who accepts gets the connection's socket.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, ErrorContext, NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, Nla, NlaBuffer, NlasIterator, Parseable, ParseableParametrized,
};
use netlink_packet_generic::ctrl::nlas::{GenlCtrlAttrs, McastGrpAttrs};
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_packet_generic::{GenlFamily, GenlHeader, GenlMessage};
use netlink_sys::{Socket, SocketAddr as NetlinkAddr, protocols::NETLINK_GENERIC};
use nix::poll::{PollFd, PollFlags, PollTimeout};

use crate::platform::keyring::KeySerial;
use crate::platform::{Host, HostError, Result, failed};

/// What is named in errors.
const SUBJECT: &str = "the kernel's requests for TLS";
const FAMILY: &str = "handshake";
const GROUP: &str = "tlshd";
/// The kernel answers at once; what takes longer is a fault.
const ANSWER: Duration = Duration::from_secs(5);

// Commands, attributes and values, from linux/handshake.h.
const ACCEPT: u8 = 2;
const DONE: u8 = 3;
const ACCEPT_SOCKET: u16 = 1;
const ACCEPT_CLASS: u16 = 2;
const ACCEPT_KIND: u16 = 3;
const ACCEPT_TIMEOUT: u16 = 4;
const ACCEPT_AUTH: u16 = 5;
const ACCEPT_IDENTITY: u16 = 6;
const DONE_STATUS: u16 = 1;
const DONE_SOCKET: u16 = 2;
const DONE_REMOTE: u16 = 3;
const CLASS_TLS: u32 = 1;
const KIND_CLIENT: u32 = 1;
const KIND_SERVER: u32 = 2;
const AUTH_PSK: u32 = 2;

/// Which end of the handshake the kernel wants made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has connected.
    Client,
    /// It was connected to.
    Server,
}

/// A request that is ours to answer.
#[derive(Debug)]
pub struct Handshake {
    /// The connection. The kernel has it too: closing it here ends nothing.
    pub socket: OwnedFd,
    /// Which end; `None` for a kind that is not known here.
    pub role: Option<Role>,
    /// It is to be made with a key that both ends have.
    pub by_key: bool,
    /// The keys that a client may use, by the kernel's numbers.
    pub keys: Vec<KeySerial>,
    /// How long the kernel waits for it; `None`: for ever.
    pub bound: Option<Duration>,
}

impl Handshake {
    /// Who is at the other end, as far as the connection tells.
    #[must_use]
    pub fn peer(&self) -> Option<SocketAddr> {
        let stream = std::net::TcpStream::from(self.socket.try_clone().ok()?);
        stream.peer_addr().ok()
    }
}

/// Where requests come from. While it lives, the kernel counts on this process.
pub struct Handshakes {
    host: Host,
    family: u16,
    told: Socket,
    asked: Mutex<Socket>,
}

impl std::fmt::Debug for Handshakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshakes").field("family", &self.family).finish_non_exhaustive()
    }
}

impl Handshakes {
    /// Begins to listen; `None` where this kernel makes no such requests.
    ///
    /// # Errors
    /// The kernel does not let us: EPERM without `CAP_NET_ADMIN`.
    pub fn listen(host: &Host) -> Result<Option<Self>> {
        host.enter("listen", SUBJECT)?;
        let asked = open()?;
        let Some((family, group)) = find(&asked, FAMILY, GROUP)? else { return Ok(None) };
        let told = open()?;
        told.add_membership(group).map_err(failed("setsockopt NETLINK_ADD_MEMBERSHIP", SUBJECT))?;
        Ok(Some(Self { host: host.clone(), family, told, asked: Mutex::new(asked) }))
    }

    /// Whether this kernel makes such requests.
    ///
    /// # Errors
    /// There is no generic netlink.
    pub fn known(host: &Host) -> Result<bool> {
        host.enter("look for", SUBJECT)?;
        Ok(find(&open()?, FAMILY, GROUP)?.is_some())
    }

    /// Waits for news, at most as long as is given; whether there were any.
    ///
    /// # Errors
    /// poll(2) fails.
    pub fn wait(&self, bound: Duration) -> Result<bool> {
        if !readable(&self.told, bound)? {
            return Ok(false);
        }
        // What they say is known: there is a request. Too many (ENOBUFS) say the same.
        while self.told.recv_from_full().is_ok() {
            if !readable(&self.told, Duration::ZERO)? {
                break;
            }
        }
        Ok(true)
    }

    /// Takes the next request; `None` where there is none, or somebody else took it.
    ///
    /// # Errors
    /// The kernel's answer is an error, or none.
    pub fn accept(&self) -> Result<Option<Handshake>> {
        self.host.enter("accept", SUBJECT)?;
        let message = self.message(ACCEPT, vec![number(ACCEPT_CLASS, CLASS_TLS)]);
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        match ask(&asked, message, NLM_F_REQUEST) {
            Err(error) if error.errno() == Some(libc::EAGAIN) => Ok(None),
            Err(error) => Err(error),
            Ok(None) => Ok(None),
            Ok(Some(answer)) => accepted(&answer.attributes).map(Some),
        }
    }

    /// Tells what came of a request: the key that was used, or the errno that the connection fails with.
    ///
    /// # Errors
    /// The kernel does not take it: it has given up the connection meanwhile.
    pub fn done(&self, handshake: Handshake, outcome: std::result::Result<KeySerial, i32>) -> Result<()> {
        self.host.enter("done", SUBJECT)?;
        let status = outcome.err().unwrap_or(0);
        let mut attributes = vec![
            number(DONE_STATUS, status.unsigned_abs()),
            number(DONE_SOCKET, handshake.socket.as_raw_fd().unsigned_abs()),
        ];
        if let Ok(key) = outcome {
            attributes.push(number(DONE_REMOTE, key.0.unsigned_abs()));
        }
        let message = self.message(DONE, attributes);
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        ask(&asked, message, NLM_F_REQUEST | NLM_F_ACK).map(drop)
    }

    fn message(&self, command: u8, attributes: Vec<DefaultNla>) -> GenlMessage<Payload> {
        let mut message = GenlMessage::from_payload(Payload { command, attributes });
        message.set_resolved_family_id(self.family);
        message
    }
}

/// A message of the family.
#[derive(Clone, Debug)]
struct Payload {
    command: u8,
    attributes: Vec<DefaultNla>,
}

impl GenlFamily for Payload {
    fn family_name() -> &'static str {
        FAMILY
    }
    fn command(&self) -> u8 {
        self.command
    }
    fn version(&self) -> u8 {
        1
    }
}

impl Emitable for Payload {
    fn buffer_len(&self) -> usize {
        self.attributes.as_slice().buffer_len()
    }
    fn emit(&self, buffer: &mut [u8]) {
        self.attributes.as_slice().emit(buffer);
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Payload {
    fn parse_with_param(buffer: &[u8], header: GenlHeader) -> std::result::Result<Self, DecodeError> {
        let attributes = NlasIterator::new(buffer)
            .map(|nla| nla.and_then(|nla: NlaBuffer<&[u8]>| DefaultNla::parse(&nla)))
            .collect::<std::result::Result<_, _>>()
            .context("attributes of a handshake")?;
        Ok(Self { command: header.cmd, attributes })
    }
}

fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_ne_bytes().to_vec())
}

/// The number of a family, and that of a group of it; `None` where this kernel has no such family.
fn find(socket: &Socket, family: &str, group: &str) -> Result<Option<(u16, u32)>> {
    let query =
        GenlCtrl { cmd: GenlCtrlCmd::GetFamily, nlas: vec![GenlCtrlAttrs::FamilyName(family.to_owned())] };
    let answer = match ask(socket, GenlMessage::from_payload(query), NLM_F_REQUEST) {
        Err(error) if error.is_missing() => return Ok(None),
        answer => answer?,
    };
    let found = answer.and_then(|answer| numbers(&answer.nlas, group));
    found.map(Some).ok_or_else(|| unexpected(&format!("{family} has no number, or no group {group}")))
}

/// What stands in the answer to that question.
fn numbers(attributes: &[GenlCtrlAttrs], group: &str) -> Option<(u16, u32)> {
    let family = attributes.iter().find_map(|attribute| match attribute {
        GenlCtrlAttrs::FamilyId(number) => Some(*number),
        _ => None,
    })?;
    let groups = attributes.iter().find_map(|attribute| match attribute {
        GenlCtrlAttrs::McastGroups(groups) => Some(groups),
        _ => None,
    })?;
    let ours = groups
        .iter()
        .find(|parts| parts.iter().any(|part| matches!(part, McastGrpAttrs::Name(name) if name == group)))?;
    let group = ours.iter().find_map(|part| match part {
        McastGrpAttrs::Id(number) => Some(*number),
        McastGrpAttrs::Name(_) => None,
    })?;
    Some((family, group))
}

/// What an answer to [`ACCEPT`] has.
#[allow(unsafe_code)]
fn accepted(attributes: &[DefaultNla]) -> Result<Handshake> {
    let all = |kind: u16| {
        let those = attributes.iter().filter(move |nla| nla.kind() == kind);
        those.filter_map(|nla| {
            let mut value = [0_u8; 4];
            (nla.value_len() == value.len()).then(|| {
                nla.emit_value(&mut value);
                u32::from_ne_bytes(value)
            })
        })
    };
    let one = |kind| all(kind).next();
    let socket = one(ACCEPT_SOCKET).and_then(|fd| i32::try_from(fd).ok());
    let Some(socket) = socket.filter(|fd| *fd > 2) else {
        return Err(unexpected("there is no socket in it"));
    };
    // SAFETY: the kernel opened this descriptor for us with its answer, and nothing else here knows of it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    Ok(Handshake {
        socket,
        role: match one(ACCEPT_KIND) {
            Some(KIND_CLIENT) => Some(Role::Client),
            Some(KIND_SERVER) => Some(Role::Server),
            _ => None,
        },
        by_key: one(ACCEPT_AUTH) == Some(AUTH_PSK),
        keys: all(ACCEPT_IDENTITY).filter_map(|n| i32::try_from(n).ok()).map(KeySerial).collect(),
        bound: one(ACCEPT_TIMEOUT).map(|milliseconds| Duration::from_millis(milliseconds.into())),
    })
}

fn open() -> Result<Socket> {
    let mut socket = Socket::new(NETLINK_GENERIC).map_err(failed("socket", SUBJECT))?;
    socket.bind_auto().map_err(failed("bind", SUBJECT))?;
    socket.connect(&NetlinkAddr::new(0, 0)).map_err(failed("connect", SUBJECT))?;
    Ok(socket)
}

#[allow(unsafe_code)]
fn readable(socket: &Socket, bound: Duration) -> Result<bool> {
    // SAFETY: the socket lives as long as the borrow of it.
    let fd = unsafe { BorrowedFd::borrow_raw(socket.as_raw_fd()) };
    let bound = PollTimeout::try_from(bound).unwrap_or(PollTimeout::MAX);
    match nix::poll::poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], bound) {
        Ok(ready) => Ok(ready > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(errno) => Err(failed("poll", SUBJECT)(errno)),
    }
}

/// Sends a message and waits for its answer: a message, or `None` where the kernel acknowledges it.
fn ask<F>(socket: &Socket, message: GenlMessage<F>, flags: u16) -> Result<Option<F>>
where
    F: GenlFamily + Emitable + ParseableParametrized<[u8], GenlHeader> + Clone + std::fmt::Debug,
{
    // What an earlier call did not wait for must not be taken for this answer.
    while readable(socket, Duration::ZERO)? {
        drop(socket.recv_from_full());
    }
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
    packet.finalize();
    let mut buffer = vec![0; packet.buffer_len()];
    packet.serialize(&mut buffer);
    socket.send(&buffer, 0).map_err(failed("send", SUBJECT))?;
    if !readable(socket, ANSWER)? {
        return Err(HostError::Timeout {
            action: "waiting for an answer",
            subject: SUBJECT.to_owned(),
            seconds: ANSWER.as_secs(),
        });
    }
    let (answer, _) = socket.recv_from_full().map_err(failed("recv", SUBJECT))?;
    let answer = NetlinkMessage::<GenlMessage<F>>::deserialize(&answer);
    match answer.map_err(|error| unexpected(&error.to_string()))?.payload {
        NetlinkPayload::InnerMessage(message) => Ok(Some(message.into_parts().1)),
        NetlinkPayload::Error(error) if error.code.is_some() => {
            Err(failed("send", SUBJECT)(std::io::Error::from_raw_os_error(error.raw_code().abs())))
        }
        _ => Ok(None),
    }
}

fn unexpected(reason: &str) -> HostError {
    HostError::Unexpected { subject: SUBJECT.to_owned(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_found_with_its_group_and_one_that_is_not_there_is_none() {
        let socket = open().unwrap();
        // The family of families is in every kernel, and its group may be listened to by everybody.
        let (family, group) = find(&socket, "nlctrl", "notify").unwrap().unwrap();
        assert_eq!(i32::from(family), libc::GENL_ID_CTRL);
        assert!(group > 0);
        assert!(find(&socket, "nlctrl", "no-such-group").is_err());
        assert_eq!(find(&socket, "no-such-family", "notify").unwrap(), None);
    }

    #[test]
    fn an_answer_tells_which_end_with_which_keys_and_how_long() {
        use std::os::fd::IntoRawFd;
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = OwnedFd::from(ours).into_raw_fd();
        let attributes = [
            number(ACCEPT_SOCKET, fd.unsigned_abs()),
            number(ACCEPT_KIND, KIND_CLIENT),
            number(ACCEPT_TIMEOUT, 10_000),
            number(ACCEPT_AUTH, AUTH_PSK),
            number(ACCEPT_IDENTITY, 7),
            number(ACCEPT_IDENTITY, 8),
        ];
        let handshake = accepted(&attributes).unwrap();
        assert_eq!((handshake.role, handshake.by_key), (Some(Role::Client), true));
        assert_eq!(handshake.keys, [KeySerial(7), KeySerial(8)]);
        assert_eq!(handshake.bound, Some(Duration::from_secs(10)));
        assert_eq!(handshake.peer(), None);
        assert!(accepted(&attributes[1..]).is_err(), "no socket");
        assert!(accepted(&[number(ACCEPT_SOCKET, 0)]).is_err(), "never standard input");
    }
}
