//! Takes commands from the tests over a virtio port and runs them.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::protocol::{Ended, Frame, Hello, Kind, Request};

/// The name that the port has on QEMU's command line.
const PORT: &str = "command";
/// A killed command that has not ended after this waits for something in the kernel.
const KILLED_BOUND: Duration = Duration::from_secs(3);
/// How long what a command left in the background may hold its output open: then what is in the pipe is taken, and no more is
/// waited for.
const OUTPUT_BOUND: Duration = Duration::from_millis(500);
/// How often the reader of an output that says nothing looks whether its command has ended.
const LOOKS: Duration = Duration::from_millis(100);
/// While nobody is connected, reads of the port return nothing at once.
const UNCONNECTED: Duration = Duration::from_millis(20);

type Port = Arc<Mutex<File>>;

/// What may still come for a command that runs.
enum Order {
    Input(Vec<u8>),
    Kill,
}

/// Serves until the port fails.
pub fn run(_: &[String]) -> Result<(), Box<dyn Error>> {
    let path = port()?;
    let mut from = File::options().read(true).write(true).open(&path)?;
    let port: Port = Arc::new(Mutex::new(from.try_clone()?));
    let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
    let hello = Hello {
        release: read("/proc/sys/kernel/osrelease")?,
        boot_id: read("/proc/sys/kernel/random/boot_id")?,
    };
    send(&port, &Frame::json(0, Kind::Hello, &hello)?)?;

    let mut running: HashMap<u64, Sender<Order>> = HashMap::new();
    loop {
        let frame = Frame::read(&mut Patient(&mut from))?;
        match frame.kind {
            Kind::Run => {
                let request: Request = serde_json::from_slice(&frame.body)?;
                let (orders, taken) = mpsc::channel();
                running.insert(frame.id, orders);
                let port = Arc::clone(&port);
                thread::spawn(move || {
                    let ended = command(&port, frame.id, &request, taken).unwrap_or_else(|error| {
                        let _ = send(
                            &port,
                            &Frame { id: frame.id, kind: Kind::Errors, body: error.to_string().into_bytes() },
                        );
                        Ended { code: Some(127), ..Ended::default() }
                    });
                    if let Ok(frame) = Frame::json(frame.id, Kind::Ended, &ended) {
                        let _ = send(&port, &frame);
                    }
                });
            }
            Kind::Input | Kind::Kill => {
                if let Some(orders) = running.get(&frame.id) {
                    let order = if frame.kind == Kind::Kill { Order::Kill } else { Order::Input(frame.body) };
                    if orders.send(order).is_err() {
                        running.remove(&frame.id);
                    }
                }
            }
            Kind::Hello | Kind::Output | Kind::Errors | Kind::Ended => {}
        }
    }
}

/// The port's device, by its name.
fn port() -> io::Result<PathBuf> {
    for entry in fs::read_dir("/sys/class/virtio-ports")? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name"))?.trim() == PORT {
            return Ok(PathBuf::from("/dev").join(entry.file_name()));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, format!("no virtio port is called {PORT}")))
}

/// Reads that wait while nobody is connected.
struct Patient<'a>(&'a mut File);

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer)? {
                0 if !buffer.is_empty() => thread::sleep(UNCONNECTED),
                length => return Ok(length),
            }
        }
    }
}

fn send(port: &Port, frame: &Frame) -> io::Result<()> {
    frame.write(&mut *port.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Runs one command to its end or its bound.
fn command(port: &Port, id: u64, request: &Request, orders: Receiver<Order>) -> io::Result<Ended> {
    let mut child = Command::new("/bin/bash")
        .args(["-euo", "pipefail", "-c", &request.script])
        .env("PATH", "/programs:/usr/bin:/usr/sbin:/bin:/sbin")
        .current_dir("/root")
        .process_group(0)
        .stdin(if request.input { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let group = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    let (done, heard) = mpsc::channel();
    let end = Arc::new(OnceLock::new());
    if let Some(output) = child.stdout.take() {
        forward(port, id, Kind::Output, output, Arc::clone(&end), done.clone());
    }
    if let Some(errors) = child.stderr.take() {
        forward(port, id, Kind::Errors, errors, Arc::clone(&end), done.clone());
    }
    drop(done);
    take_orders(&mut child, orders, group);
    let (ended, status) = mpsc::channel();
    thread::spawn(move || ended.send(child.wait()));

    let answer = match status.recv_timeout(Duration::from_millis(request.bound_ms)) {
        Ok(status) => told(status?, false),
        Err(RecvTimeoutError::Disconnected) => Ended::default(),
        Err(RecvTimeoutError::Timeout) => {
            // Gone already is as good.
            let _ = killpg(group, Signal::SIGKILL);
            match status.recv_timeout(KILLED_BOUND) {
                Ok(status) => told(status?, true),
                Err(_) => Ended { timed_out: true, stuck: waiting(group), ..Ended::default() },
            }
        }
    };
    let _ = end.set(Instant::now());
    // However long that takes where the processor has much else to do: a test counts on what its command said before it ended.
    for () in heard {}
    Ok(answer)
}

fn told(status: ExitStatus, timed_out: bool) -> Ended {
    Ended { code: status.code(), signal: status.signal(), timed_out, stuck: Vec::new() }
}

/// Sends on what comes, and drops `done` when all that a command said before its `end` was sent. It reads on after that: who
/// still writes is in the background, and must not die of it.
fn forward(
    port: &Port,
    id: u64,
    kind: Kind,
    mut from: impl Read + AsFd + Send + 'static,
    end: Arc<OnceLock<Instant>>,
    done: Sender<()>,
) {
    let port = Arc::clone(port);
    thread::spawn(move || {
        let mut done = Some(done);
        let mut buffer = vec![0; 32 << 10];
        loop {
            if done.is_some() {
                let over = end.get().is_some_and(|end| end.elapsed() >= OUTPUT_BOUND);
                if let Ok(false) = readable(&from, if over { Duration::ZERO } else { LOOKS }) {
                    // Nothing is left of what it said.
                    done = done.filter(|_| !over);
                    continue;
                }
            }
            match from.read(&mut buffer) {
                Ok(length @ 1..)
                    if send(&port, &Frame { id, kind, body: buffer[..length].to_vec() }).is_ok() => {}
                _ => break,
            }
        }
    });
}

/// Whether a read would return at once, or does within that time.
fn readable(from: &impl AsFd, wait: Duration) -> io::Result<bool> {
    let timeout = PollTimeout::try_from(wait).map_err(io::Error::other)?;
    Ok(poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout)? > 0)
}

fn take_orders(child: &mut Child, orders: Receiver<Order>, group: Pid) {
    let mut input = child.stdin.take();
    thread::spawn(move || {
        for order in orders {
            match order {
                Order::Kill => {
                    let _ = killpg(group, Signal::SIGKILL);
                }
                Order::Input(bytes) if bytes.is_empty() => input = None,
                // A command need not read all of its input.
                Order::Input(bytes) => {
                    if input.as_mut().is_some_and(|input| input.write_all(&bytes).is_err()) {
                        input = None;
                    }
                }
            }
        }
    });
}

/// What the processes of a group wait for in the kernel.
fn waiting(group: Pid) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name, in parentheses, may itself hold some; after it: state, parent, group.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        let fields: Vec<&str> = rest.split(' ').collect();
        if fields.get(2).and_then(|g| g.parse().ok()) != Some(group.as_raw()) {
            continue;
        }
        let read = |name: &str| fs::read(entry.path().join(name)).unwrap_or_default();
        let line = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
        let stack = String::from_utf8_lossy(&read("stack")).replace('\n', "; ");
        found.push(format!(
            "{} ({}) in state {}: {stack}",
            entry.file_name().display(),
            line.trim(),
            fields[0]
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn all_that_a_command_said_is_sent_before_its_end_is_told_however_late() {
        let said = vec![b'x'; 60 << 10];
        let (to, mut from) = UnixStream::pair().unwrap();
        let port: Port = Arc::new(Mutex::new(File::from(OwnedFd::from(to))));
        let (output, mut writes) = io::pipe().unwrap();
        writes.write_all(&said).unwrap();
        // Somebody else, in the background, holds it open.
        let _writes = writes;
        let taken_by_others = port.lock().unwrap();
        let (done, heard) = mpsc::channel();
        forward(&port, 1, Kind::Output, output, Arc::new(OnceLock::from(Instant::now())), done);
        assert_eq!(heard.recv_timeout(OUTPUT_BOUND * 2), Err(RecvTimeoutError::Timeout), "nothing was sent");
        drop(taken_by_others);
        assert_eq!(heard.recv_timeout(OUTPUT_BOUND * 20), Err(RecvTimeoutError::Disconnected));
        from.set_nonblocking(true).unwrap();
        let mut sent = Vec::new();
        while let Ok(frame) = Frame::read(&mut from) {
            sent.extend(frame.body);
        }
        assert!(sent == said, "{} of {} bytes were sent", sent.len(), said.len());
    }

    #[test]
    fn what_is_left_in_the_background_holds_up_no_end_and_does_not_die_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let (stop, stopped) = (directory.path().join("stop"), directory.path().join("stopped"));
        let script = format!(
            "(n=0; until [ -e {} ] || ((n++ > 400)); do echo late; sleep .05; done; >{}) &",
            stop.display(),
            stopped.display()
        );
        let (port, _taken) = UnixStream::pair().unwrap();
        let port = Arc::new(Mutex::new(File::from(OwnedFd::from(port))));
        let (_orders, taken) = mpsc::channel();
        let ended = command(&port, 1, &Request { script, bound_ms: 20_000, input: false }, taken).unwrap();
        assert!(ended.code == Some(0) && !stopped.exists(), "{ended:?}");
        fs::write(stop, "").unwrap();
        let goes_on = (0..200).any(|_| {
            thread::sleep(Duration::from_millis(50));
            stopped.exists()
        });
        assert!(goes_on, "what was left in the background is gone");
    }
}
