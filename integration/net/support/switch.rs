//! The virtual switch: Ethernet frames between machines, over unix datagram sockets, with links that can be cut, delayed and
//! narrowed in each direction.
//!
//! Each machine has two sockets in the network's directory: `NAME.switch`, which the switch reads, and `NAME.net`, which QEMU
//! reads. Per machine one thread takes what it sends and one gives it what is for it, in the order of the moments at which it
//! is due. A machine that does not read (stopped, or off) holds up nobody else.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use snafu::ResultExt;

use super::Result;
use super::trouble::HostSnafu;

/// How often threads look whether the switch is to end.
const TICK: Duration = Duration::from_millis(100);
/// What a link holds before it drops, in bytes: a second at 100 Mbit/s, more than any TCP window here.
const QUEUE: usize = 12 << 20;
/// The largest frame; jumbo frames are below it.
const LARGEST_FRAME: usize = 68 << 10;

/// How frames go in one direction between two machines.
#[derive(Clone, Copy, Debug, Default)]
pub struct Link {
    /// Nothing gets through.
    pub cut: bool,
    /// Each frame takes so long.
    pub delay: Duration,
    /// No more than so many bytes in a second.
    pub bytes_per_second: Option<u64>,
    /// When the last frame that was let in will be through.
    busy_until: Option<Instant>,
}

#[derive(Debug)]
struct State {
    /// By sender, then receiver.
    links: Vec<Vec<Link>>,
    /// Bytes let through, by sender, then receiver.
    passed: Vec<Vec<u64>>,
    /// What is looked for in every frame, and in how many it was.
    sought: Option<(Vec<u8>, u64)>,
    ended: bool,
}

/// A frame on its way.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at: Instant,
    number: u64,
    frame: Vec<u8>,
}

/// The switch; it ends when dropped.
#[derive(Debug)]
pub struct Switch {
    state: Arc<Mutex<State>>,
    threads: Vec<JoinHandle<()>>,
}

/// The hardware address of machine `index`.
pub fn hardware_address(index: usize) -> String {
    format!("52:54:00:00:00:{:02x}", index + 1)
}

impl Switch {
    /// A switch for machines with those names, its sockets in the directory.
    pub fn start(directory: &Path, names: &[String]) -> Result<Self> {
        let count = names.len();
        let state = State {
            links: vec![vec![Link::default(); count]; count],
            passed: vec![vec![0; count]; count],
            sought: None,
            ended: false,
        };
        let mut switch = Self { state: Arc::new(Mutex::new(state)), threads: Vec::new() };
        let (mut ways, mut ends) = (Vec::new(), Vec::new());
        for _ in names {
            let (way, end) = mpsc::channel::<Due>();
            ways.push(way);
            ends.push(end);
        }
        for (index, (name, due)) in names.iter().zip(ends).enumerate() {
            let path = directory.join(format!("{name}.switch"));
            let host = |what| HostSnafu { what, path: path.clone() };
            let socket = UnixDatagram::bind(&path).context(host("listen at"))?;
            socket.set_read_timeout(Some(TICK)).context(host("set up"))?;
            let sender = socket.try_clone().context(host("set up"))?;
            // A machine that does not read holds up its own thread only.
            sender.set_write_timeout(Some(TICK)).context(host("set up"))?;
            let state = Arc::clone(&switch.state);
            let ways = ways.clone();
            switch.threads.push(thread::spawn(move || take(&socket, index, &ways, &state)));
            let (to, state) = (directory.join(format!("{name}.net")), Arc::clone(&switch.state));
            switch.threads.push(thread::spawn(move || give(&sender, &to, &due, &state)));
        }
        Ok(switch)
    }

    /// Changes how frames go from one machine to another.
    pub fn change(&self, from: usize, to: usize, change: impl Fn(&mut Link)) {
        change(&mut lock(&self.state).links[from][to]);
    }

    /// Looks from now on for these bytes in the frames that are sent.
    pub fn look_for(&self, bytes: &[u8]) {
        lock(&self.state).sought = Some((bytes.to_vec(), 0));
    }

    /// In how many frames they were.
    pub fn seen(&self) -> u64 {
        lock(&self.state).sought.as_ref().map_or(0, |(_, seen)| *seen)
    }

    /// How many bytes went from one machine to another.
    pub fn passed(&self, from: usize, to: usize) -> u64 {
        lock(&self.state).passed[from][to]
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        lock(&self.state).ended = true;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Which machines a frame is for, by its first six bytes.
fn receivers(frame: &[u8], from: usize, count: usize) -> Vec<usize> {
    match frame {
        // One bit tells what is for several.
        [first, ..] if first & 1 == 1 => (0..count).filter(|to| *to != from).collect(),
        [0x52, 0x54, 0, 0, 0, number, ..] => {
            let to = usize::from(*number).wrapping_sub(1);
            if to < count && to != from { vec![to] } else { Vec::new() }
        }
        _ => Vec::new(),
    }
}

/// When a frame is through the link; none when it is dropped.
fn through(link: &mut Link, length: usize, now: Instant) -> Option<Instant> {
    if link.cut {
        return None;
    }
    let Some(rate) = link.bytes_per_second else { return Some(now + link.delay) };
    let begins = link.busy_until.filter(|until| *until > now).unwrap_or(now);
    let length_ns = u128::try_from(length).unwrap_or(u128::MAX).saturating_mul(1_000_000_000);
    let takes = Duration::from_nanos(u64::try_from(length_ns / u128::from(rate.max(1))).unwrap_or(u64::MAX));
    // A quarter of a second is what a switch of that speed has room for.
    if begins.duration_since(now) > Duration::from_millis(250) {
        return None;
    }
    link.busy_until = Some(begins + takes);
    Some(begins + takes + link.delay)
}

fn take(socket: &UnixDatagram, from: usize, ways: &[Sender<Due>], state: &Mutex<State>) {
    let mut buffer = vec![0; LARGEST_FRAME];
    let mut number = 0;
    loop {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => 0,
            Err(_) => return,
        };
        let mut state = lock(state);
        if state.ended {
            return;
        }
        if let Some((bytes, seen)) = &mut state.sought
            && buffer[..length].windows(bytes.len()).any(|window| window == bytes)
        {
            *seen += 1;
        }
        let now = Instant::now();
        for to in receivers(&buffer[..length], from, ways.len()) {
            let Some(at) = through(&mut state.links[from][to], length, now) else { continue };
            state.passed[from][to] += length as u64;
            number += 1;
            let _ = ways[to].send(Due { at, number, frame: buffer[..length].to_vec() });
        }
    }
}

fn give(socket: &UnixDatagram, to: &PathBuf, due: &Receiver<Due>, state: &Mutex<State>) {
    let mut waiting = BinaryHeap::new();
    let mut held = 0;
    loop {
        let next = waiting.peek().map(|Reverse(first): &Reverse<Due>| first.at);
        let wait = next.map_or(TICK, |at| at.saturating_duration_since(Instant::now()).min(TICK));
        match due.recv_timeout(wait) {
            Ok(frame) => {
                if held + frame.frame.len() <= QUEUE {
                    held += frame.frame.len();
                    waiting.push(Reverse(frame));
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) if lock(state).ended => return,
            Err(RecvTimeoutError::Timeout) => {}
        }
        while waiting.peek().is_some_and(|Reverse(first)| first.at <= Instant::now()) {
            if let Some(Reverse(first)) = waiting.pop() {
                held -= first.frame.len();
                // Nobody there, or nobody who reads: dropped, as on a cable.
                let _ = socket.send_to(&first.frame, to);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A frame for machine `to`.
    fn frame(to: u8) -> Vec<u8> {
        vec![0x52, 0x54, 0, 0, 0, to + 1, 0, 0]
    }

    /// A switch for three machines, and what they read.
    fn switch(directory: &Path) -> (Switch, Vec<UnixDatagram>) {
        let names = ["a", "b", "c"].map(String::from);
        let switch = Switch::start(directory, &names).expect("a switch");
        let sockets = names.iter().map(|name| {
            let socket = UnixDatagram::bind(directory.join(format!("{name}.net"))).expect("a socket");
            socket.set_read_timeout(Some(300 * MS)).expect("a bound");
            socket
        });
        (switch, sockets.collect())
    }

    fn arrives(socket: &UnixDatagram) -> bool {
        socket.recv(&mut [0; 64]).is_ok()
    }

    #[test]
    fn frames_reach_whom_they_are_for_and_broadcasts_all_others() {
        let directory = tempfile::tempdir().expect("a directory");
        let (switch, sockets) = switch(directory.path());
        let a = directory.path().join("a.switch");
        sockets[0].send_to(&frame(1), &a).expect("sent");
        assert!(arrives(&sockets[1]) && !arrives(&sockets[2]) && !arrives(&sockets[0]));
        sockets[0].send_to(&[0xff; 60], &a).expect("sent");
        assert!(arrives(&sockets[1]) && arrives(&sockets[2]) && !arrives(&sockets[0]));
        sockets[0].send_to(&frame(7), &a).expect("sent");
        assert!(!arrives(&sockets[1]) && !arrives(&sockets[2]));
        assert_eq!((switch.passed(0, 1), switch.passed(0, 2), switch.passed(1, 0)), (68, 60, 0));
    }

    #[test]
    fn one_direction_can_be_cut_and_a_machine_that_is_off_holds_up_nobody() {
        let directory = tempfile::tempdir().expect("a directory");
        let (switch, mut sockets) = switch(directory.path());
        let (a, b) = (directory.path().join("a.switch"), directory.path().join("b.switch"));
        switch.change(0, 1, |link| link.cut = true);
        sockets[0].send_to(&frame(1), &a).expect("sent");
        sockets[1].send_to(&frame(0), &b).expect("sent");
        assert!(!arrives(&sockets[1]) && arrives(&sockets[0]));
        switch.change(0, 1, |link| *link = Link::default());
        drop(sockets.pop());
        for _ in 0..50 {
            sockets[0].send_to(&frame(2), &a).expect("sent");
        }
        sockets[0].send_to(&frame(1), &a).expect("sent");
        assert!(arrives(&sockets[1]));
    }

    #[test]
    fn a_narrow_link_lets_so_many_bytes_through_and_drops_what_would_wait_too_long() {
        let now = Instant::now();
        let mut link = Link { bytes_per_second: Some(10_000), delay: 5 * MS, ..Link::default() };
        let due: Vec<_> = (0..6).map(|_| through(&mut link, 1_000, now)).collect();
        let expected = [105, 205, 305].map(|ms| Some(now + ms * MS));
        assert_eq!(due[..3], expected);
        assert_eq!(due[3..], [None; 3], "more than a quarter of a second waits");
        assert_eq!(through(&mut link, 1_000, now + 1_000 * MS), Some(now + 1_105 * MS));
        link.cut = true;
        assert_eq!(through(&mut link, 1, now), None);
    }
}
