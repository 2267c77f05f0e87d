//! Takes commands from the tests over a virtio port and runs them.

use std::collections::HashMap;
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::protocol::{Ended, Frame, Hello, Kind, Request};

/// The name that the port has on QEMU's command line.
const PORT: &str = "command";
/// A killed command that has not ended after this waits for something in the kernel.
const KILLED_BOUND: Duration = Duration::from_secs(3);
/// How long what a command left in the background may hold its output open, before the output is given up.
const OUTPUT_BOUND: Duration = Duration::from_millis(500);
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
    let (done, finished) = mpsc::channel();
    if let Some(output) = child.stdout.take() {
        forward(port, id, Kind::Output, output, done.clone());
    }
    if let Some(errors) = child.stderr.take() {
        forward(port, id, Kind::Errors, errors, done.clone());
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
    for _ in 0..2 {
        // The sender's end is a reader that came to its end.
        if finished.recv_timeout(OUTPUT_BOUND) == Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    Ok(answer)
}

fn told(status: ExitStatus, timed_out: bool) -> Ended {
    Ended { code: status.code(), signal: status.signal(), timed_out, stuck: Vec::new() }
}

fn forward(port: &Port, id: u64, kind: Kind, mut from: impl Read + Send + 'static, done: Sender<()>) {
    let port = Arc::clone(port);
    thread::spawn(move || {
        let mut buffer = vec![0; 32 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            if send(&port, &Frame { id, kind, body: buffer[..length].to_vec() }).is_err() {
                break;
            }
        }
        let _ = done.send(());
    });
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
