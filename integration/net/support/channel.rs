//! The command channel of one running machine, from the outside.

use std::collections::HashMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::protocol::{Ended, Frame, Hello, Kind, LARGEST, Request};

/// A machine that takes nothing for so long is stopped, or lost.
const WRITE_BOUND: Duration = Duration::from_secs(30);

/// What comes of a command.
#[derive(Debug)]
pub enum Event {
    /// Standard output.
    Output(Vec<u8>),
    /// Standard error.
    Errors(Vec<u8>),
    /// The end.
    Ended(Ended),
}

#[derive(Debug, Default)]
struct State {
    hello: Option<Hello>,
    closed: bool,
    commands: HashMap<u64, Sender<Event>>,
}

/// The channel; it ends with the machine.
#[derive(Debug)]
pub struct Channel {
    writer: Mutex<UnixStream>,
    state: Arc<Mutex<State>>,
    next: AtomicU64,
    reader: Option<JoinHandle<()>>,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Channel {
    /// Connects to QEMU's socket.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let writer = UnixStream::connect(path)?;
        writer.set_write_timeout(Some(WRITE_BOUND))?;
        let mut from = writer.try_clone()?;
        let state = Arc::new(Mutex::new(State::default()));
        let kept = Arc::clone(&state);
        let reader = thread::spawn(move || {
            while let Ok(frame) = Frame::read(&mut from) {
                receive(&kept, frame);
            }
            let mut state = lock(&kept);
            state.closed = true;
            // Whoever waits for one of them is told by its receiver.
            state.commands.clear();
        });
        Ok(Self { writer: Mutex::new(writer), state, next: AtomicU64::new(1), reader: Some(reader) })
    }

    /// What the agent inside said when it came up.
    pub fn hello(&self) -> Option<Hello> {
        lock(&self.state).hello.clone()
    }

    /// Whether the machine went.
    pub fn closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Starts a command; its events, and the number by which it is killed.
    pub fn start(&self, request: &Request, input: &[u8]) -> io::Result<(u64, Receiver<Event>)> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        {
            let mut state = lock(&self.state);
            if state.closed {
                return Err(io::ErrorKind::NotConnected.into());
            }
            state.commands.insert(id, sender);
        }
        self.send(&Frame::json(id, Kind::Run, request)?)?;
        if request.input {
            for chunk in input.chunks(LARGEST) {
                self.send(&Frame { id, kind: Kind::Input, body: chunk.to_vec() })?;
            }
            self.send(&Frame { id, kind: Kind::Input, body: Vec::new() })?;
        }
        Ok((id, receiver))
    }

    /// Ends a command.
    pub fn kill(&self, id: u64) -> io::Result<()> {
        self.send(&Frame { id, kind: Kind::Kill, body: Vec::new() })
    }

    fn send(&self, frame: &Frame) -> io::Result<()> {
        frame.write(&mut *self.writer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn receive(state: &Mutex<State>, frame: Frame) {
    let mut state = lock(state);
    let event = match frame.kind {
        Kind::Hello => {
            state.hello = serde_json::from_slice(&frame.body).ok();
            return;
        }
        Kind::Output => Event::Output(frame.body),
        Kind::Errors => Event::Errors(frame.body),
        Kind::Ended => match serde_json::from_slice(&frame.body) {
            Ok(ended) => Event::Ended(ended),
            Err(_) => return,
        },
        Kind::Run | Kind::Input | Kind::Kill => return,
    };
    if let Some(command) = state.commands.get(&frame.id) {
        // Whoever started it may have lost interest.
        let _ = command.send(event);
    }
    if frame.kind == Kind::Ended {
        state.commands.remove(&frame.id);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let _ = self.writer.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
