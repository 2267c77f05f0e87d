//! One machine: its power, its disks, and commands that run in it.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use snafu::{ResultExt, ensure};

use super::Result;
use super::channel::{Channel, Event};
use super::image::Files;
use super::network::{Keeper, Options};
use super::switch::hardware_address;
use super::trouble::{FailedSnafu, HostSnafu, NeverSnafu, NotUpSnafu, OffSnafu, SilentSnafu, StaysOnSnafu};
use crate::protocol::{Ended, Request};

/// Commands that say nothing else are killed after this.
pub const BOUND: Duration = Duration::from_secs(60);
/// A start takes 5 to 15 s in software emulation; a busy machine is slower.
const UP_BOUND: Duration = Duration::from_secs(180);
/// What a machine may take longer than the command's own bound before it counts as lost.
const GRACE: Duration = Duration::from_secs(20);
/// How long QEMU may take until its sockets are there, and a switched off machine until QEMU ends.
const QEMU_BOUND: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// How a command ended, and what it said.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Its exit status; none when it was killed.
    pub code: Option<i32>,
    /// It was killed at its bound.
    pub timed_out: bool,
    /// It did not end even then: its processes, and what they wait for in the kernel.
    pub stuck: Vec<String>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// Whether the command ended by itself, with status 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// Standard output without white space at its ends.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim().to_owned()
    }

    /// Standard error likewise.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.stderr).trim().to_owned()
    }

    fn take(&mut self, ended: Ended) {
        self.code = ended.code;
        self.timed_out = ended.timed_out;
        self.stuck = ended.stuck;
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.timed_out, self.code) {
            (true, _) => write!(f, "killed at its bound")?,
            (false, Some(code)) => write!(f, "status {code}")?,
            (false, None) => write!(f, "killed")?,
        }
        for line in &self.stuck {
            write!(f, "\n  stuck: {line}")?;
        }
        for bytes in [&self.stdout, &self.stderr] {
            match std::str::from_utf8(bytes).map(str::trim) {
                Ok("") => {}
                Ok(text) if !text.contains('\0') => write!(f, "\n{text}")?,
                _ => write!(f, "\n({} bytes that are no text)", bytes.len())?,
            }
        }
        Ok(())
    }
}

struct Power {
    qemu: Child,
    channel: Arc<Channel>,
}

/// One machine of a network. All of it may be used from several threads.
pub struct Machine {
    name: String,
    index: usize,
    directory: PathBuf,
    logs: PathBuf,
    files: Files,
    options: Options,
    keeper: Arc<Keeper>,
    power: Mutex<Option<Power>>,
}

impl Machine {
    /// A machine that is off.
    pub(super) fn new(
        index: usize,
        name: &str,
        directory: &Path,
        logs: &Path,
        files: &Files,
        options: &Options,
        keeper: &Arc<Keeper>,
    ) -> Result<Self> {
        for (disk, bytes) in &options.disks {
            super::image::make_disk(&directory.join(format!("{name}.{disk}.disk")), *bytes)?;
        }
        Ok(Self {
            name: name.to_owned(),
            index,
            directory: directory.to_owned(),
            logs: logs.to_owned(),
            files: files.clone(),
            options: options.clone(),
            keeper: Arc::clone(keeper),
            power: Mutex::new(None),
        })
    }

    /// Its name, which is its host name and stands in every machine's `/etc/hosts`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Its address on the network.
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, u8::try_from(self.index + 1).unwrap_or(u8::MAX))
    }

    /// The file on the host that is one of its disks (`/disk/DISK` inside). Only to be touched while the machine is off.
    pub fn disk(&self, disk: &str) -> PathBuf {
        self.directory.join(format!("{}.{disk}.disk", self.name))
    }

    /// The file on the host that holds what its console showed, over all its starts.
    pub fn console(&self) -> PathBuf {
        self.logs.join(format!("{}.console", self.name))
    }

    fn power(&self) -> MutexGuard<'_, Option<Power>> {
        self.power.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", self.name))
    }

    /// Whether it is on.
    pub fn is_on(&self) -> bool {
        let mut power = self.power();
        power.as_mut().is_some_and(|power| matches!(power.qemu.try_wait(), Ok(None)))
    }

    /// Switches it on and waits until it takes commands. Nothing happens when it is on.
    pub fn start(&self) -> Result {
        self.launch()?;
        self.wait_up()
    }

    /// Switches it on.
    pub(super) fn launch(&self) -> Result {
        if self.is_on() {
            return Ok(());
        }
        *self.power() = None;
        let (socket, net) = (self.file("command"), self.file("net"));
        for path in [&socket, &net] {
            let _ = fs::remove_file(path);
        }
        let said = self.file("qemu");
        let errors = fs::File::create(&said).context(HostSnafu { what: "write", path: said.as_path() })?;
        let mut command = self.qemu(&socket, &net);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let mut qemu =
            self.keeper.spawn(command).context(HostSnafu { what: "run", path: "qemu-system-x86_64" })?;
        let deadline = Instant::now() + QEMU_BOUND;
        let channel = loop {
            match Channel::connect(&socket) {
                Ok(channel) => break channel,
                Err(_) if Instant::now() < deadline && matches!(qemu.try_wait(), Ok(None)) => {
                    thread::sleep(POLL)
                }
                Err(_) => {
                    let _ = qemu.kill();
                    let _ = qemu.wait();
                    return self.not_up(QEMU_BOUND);
                }
            }
        };
        *self.power() = Some(Power { qemu, channel: Arc::new(channel) });
        Ok(())
    }

    fn not_up(&self, bound: Duration) -> Result {
        let said = fs::read_to_string(self.file("qemu")).unwrap_or_default();
        NotUpSnafu { machine: &self.name, bound, said: said.trim() }.fail()
    }

    /// Waits until it takes commands.
    pub(super) fn wait_up(&self) -> Result {
        let deadline = Instant::now() + UP_BOUND;
        loop {
            let (up, gone) = match self.power().as_ref() {
                Some(power) => (power.channel.hello().is_some(), power.channel.closed()),
                None => (false, true),
            };
            if up {
                return Ok(());
            }
            if gone || Instant::now() > deadline {
                return self.not_up(UP_BOUND);
            }
            thread::sleep(POLL);
        }
    }

    fn qemu(&self, socket: &Path, net: &Path) -> Command {
        let show = |path: &Path| path.display().to_string();
        let mut command = Command::new("setpriv");
        // It goes with the thread that started it, which goes with the tests however they end.
        command.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64"]);
        command.args([
            "-name",
            &self.name,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ]);
        // One processor each: QEMU 7.2 with more of them panicked in 1 of 25 starts.
        command.args(["-accel", "tcg,thread=multi,tb-size=128", "-cpu", "max", "-smp", "1"]);
        command.args(["-m", &self.options.memory_mib.to_string()]);
        command.arg("-kernel").arg(&self.files.kernel).arg("-initrd").arg(&self.files.initramfs);
        command.arg("-append").arg(format!(
            "console=ttyS0 quiet panic=-1 mitigations=off audit=0 random.trust_cpu=on machine={} address={} mtu={}",
            self.name,
            self.address(),
            self.options.mtu
        ));
        let console = self.logs.join(format!("{}.console", self.name));
        command.arg("-chardev").arg(format!("file,id=console,path={},append=on", show(&console)));
        command.args(["-serial", "chardev:console", "-device", "virtio-rng-pci"]);
        command.arg("-chardev").arg(format!("socket,id=command,path={},server=on,wait=off", show(socket)));
        command.args(["-device", "virtio-serial-pci", "-device"]);
        command.arg("virtserialport,chardev=command,name=command");
        command.arg("-netdev").arg(format!(
            "dgram,id=net,local.type=unix,local.path={},remote.type=unix,remote.path={}",
            show(net),
            show(&self.file("switch"))
        ));
        let address = hardware_address(self.index);
        command
            .arg("-device")
            .arg(format!("virtio-net-pci,netdev=net,mac={address},host_mtu={}", self.options.mtu));
        for (name, path) in [("base", &self.files.base), ("programs", &self.files.programs)] {
            command.arg("-drive").arg(format!(
                "if=none,id={name},format=raw,readonly=on,file.locking=off,file={}",
                show(path)
            ));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={name},serial={name}"));
        }
        for (name, _) in &self.options.disks {
            command.arg("-drive").arg(format!(
                "if=none,id={name},format=raw,cache=writeback,discard=unmap,file={}",
                show(&self.disk(name))
            ));
            command.arg("-device").arg(format!("virtio-blk-pci,drive={name},serial={name}"));
        }
        command.args(&self.options.arguments);
        command
    }

    /// Takes its power away, at once. What its disks have completed is kept; memory, and what the kernel had not written
    /// yet, is lost.
    pub fn pull_plug(&self) {
        if let Some(mut power) = self.power().take() {
            let _ = power.qemu.kill();
            let _ = power.qemu.wait();
        }
    }

    /// Writes everything to the disks and switches it off. What a service manager does before (ending programs, unmounting)
    /// is the test's to do.
    pub fn power_off(&self) -> Result {
        // The answer may get lost on the way.
        drop(self.start_command("sync; poweroff -f", QEMU_BOUND)?);
        let deadline = Instant::now() + QEMU_BOUND;
        while self.is_on() {
            ensure!(Instant::now() < deadline, StaysOnSnafu { machine: &self.name, bound: QEMU_BOUND });
            thread::sleep(POLL);
        }
        self.pull_plug();
        Ok(())
    }

    /// Switches it off as [`Machine::power_off`] does, and on again.
    pub fn reboot(&self) -> Result {
        self.power_off()?;
        self.start()
    }

    /// Stops its processor: it neither answers nor knows that time passes.
    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// Ends [`Machine::pause`].
    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = self.power().as_ref().and_then(|power| i32::try_from(power.qemu.id()).ok()) {
            // One that is gone needs neither.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Runs a script (`bash -euo pipefail`, as root, in `/root`) that must succeed within a minute; what it wrote to its
    /// standard output, without white space at the ends.
    pub fn run(&self, script: impl AsRef<str>) -> Result<String> {
        self.run_within(BOUND, script)
    }

    /// The same with another bound.
    pub fn run_within(&self, bound: Duration, script: impl AsRef<str>) -> Result<String> {
        let (script, output) = (script.as_ref(), self.attempt(bound, &script)?);
        ensure!(output.success(), FailedSnafu { machine: &self.name, script, output });
        Ok(output.text())
    }

    /// Runs a script that may fail, or be killed at its bound.
    pub fn attempt(&self, bound: Duration, script: impl AsRef<str>) -> Result<Output> {
        self.start_command(script, bound)?.wait()
    }

    /// Runs a script again and again until it succeeds.
    pub fn eventually(&self, bound: Duration, script: impl AsRef<str>) -> Result<String> {
        let (begun, script) = (Instant::now(), script.as_ref());
        loop {
            let output = self.attempt(bound.saturating_sub(begun.elapsed()), script)?;
            if output.success() {
                return Ok(output.text());
            }
            ensure!(begun.elapsed() < bound, NeverSnafu { machine: &self.name, script, bound, output });
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Starts a script and does not wait for it. It is killed at its bound; not when the handle is dropped.
    pub fn start_command(&self, script: impl AsRef<str>, bound: Duration) -> Result<Running> {
        self.start_with(script.as_ref(), bound, None)
    }

    fn start_with(&self, script: &str, bound: Duration, input: Option<&[u8]>) -> Result<Running> {
        let off = || OffSnafu { machine: &self.name, script };
        let Some(channel) = self.power().as_ref().map(|power| Arc::clone(&power.channel)) else {
            return off().fail();
        };
        let request = Request {
            script: script.to_owned(),
            bound_ms: u64::try_from(bound.as_millis()).unwrap_or(u64::MAX),
            input: input.is_some(),
        };
        let (id, events) = match channel.start(&request, input.unwrap_or_default()) {
            Ok(started) => started,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return SilentSnafu { machine: &self.name, script }.fail();
            }
            Err(_) => return off().fail(),
        };
        Ok(Running {
            machine: self.name.clone(),
            transcript: self.logs.join(format!("{}.commands", self.name)),
            script: script.to_owned(),
            begun: Instant::now(),
            deadline: Instant::now() + bound + GRACE,
            channel,
            id,
            events,
            output: Output::default(),
            ended: false,
        })
    }

    /// Copies a file of the host into the machine, executable.
    pub fn push(&self, from: &Path, to: &str) -> Result {
        let bytes = fs::read(from).context(HostSnafu { what: "read", path: from })?;
        self.write(to, &bytes)?;
        self.run(format!("chmod 755 '{to}'")).map(drop)
    }

    /// Writes a file in the machine; it is there after a loss of power.
    pub fn write(&self, to: &str, bytes: &[u8]) -> Result {
        let script = format!("cat >'{to}' && sync '{to}' \"$(dirname '{to}')\"");
        let output = self.start_with(&script, BOUND, Some(bytes))?.wait()?;
        ensure!(output.success(), FailedSnafu { machine: &self.name, script, output });
        Ok(())
    }

    /// Reads a file of the machine.
    pub fn read(&self, from: &str) -> Result<Vec<u8>> {
        let script = format!("cat '{from}'");
        let output = self.attempt(BOUND, &script)?;
        ensure!(output.success(), FailedSnafu { machine: &self.name, script, output });
        Ok(output.stdout)
    }

    /// The ends of what its console showed and of what was run in it.
    pub fn report(&self) -> String {
        let mut report = String::new();
        for (kind, lines) in [("console", 60), ("commands", 60)] {
            let path = self.logs.join(format!("{}.{kind}", self.name));
            let text = fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let all: Vec<&str> = text.lines().collect();
            report += &format!("--- {} (the end of {})\n", self.name, path.display());
            for line in &all[all.len().saturating_sub(lines)..] {
                report += line.trim_end_matches('\r');
                report.push('\n');
            }
        }
        report
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.pull_plug();
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A command that runs.
#[derive(Debug)]
pub struct Running {
    machine: String,
    transcript: PathBuf,
    script: String,
    begun: Instant,
    deadline: Instant,
    channel: Arc<Channel>,
    id: u64,
    events: Receiver<Event>,
    output: Output,
    ended: bool,
}

impl Running {
    /// Waits for its end, by itself or at its bound.
    pub fn wait(mut self) -> Result<Output> {
        self.follow(None)?;
        Ok(std::mem::take(&mut self.output))
    }

    /// Waits until its standard output holds that text; whether it does before the command ends or the time is over.
    pub fn says(&mut self, text: &str, bound: Duration) -> Result<bool> {
        self.follow(Some((text, Instant::now() + bound)))?;
        Ok(self.output_so_far().contains(text))
    }

    /// What it wrote to its standard output until now.
    pub fn output_so_far(&mut self) -> String {
        while let Ok(event) = self.events.try_recv() {
            self.take(event);
        }
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    /// Whether it ended.
    pub fn has_ended(&mut self) -> bool {
        let _ = self.output_so_far();
        self.ended
    }

    /// Kills it with everything in its process group.
    pub fn kill(&self) {
        // A machine that is off runs nothing.
        let _ = self.channel.kill(self.id);
    }

    fn follow(&mut self, until: Option<(&str, Instant)>) -> Result {
        let deadline = until.map_or(self.deadline, |(_, bound)| bound.min(self.deadline));
        while !self.ended {
            if until.is_some_and(|(text, _)| String::from_utf8_lossy(&self.output.stdout).contains(text)) {
                return Ok(());
            }
            let wait = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(wait) {
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) if until.is_some() => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    self.note("no answer");
                    return SilentSnafu { machine: &self.machine, script: &self.script }.fail();
                }
                Err(RecvTimeoutError::Disconnected) => {
                    self.note("the machine went off");
                    return OffSnafu { machine: &self.machine, script: &self.script }.fail();
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Output(bytes) => self.output.stdout.extend(bytes),
            Event::Errors(bytes) => self.output.stderr.extend(bytes),
            Event::Ended(ended) => {
                self.output.take(ended);
                self.ended = true;
                let shown: String = self.output.to_string().chars().take(4000).collect();
                self.note(&shown);
            }
        }
    }

    /// Adds the command to the machine's transcript.
    fn note(&self, what: &str) {
        let file = fs::OpenOptions::new().create(true).append(true).open(&self.transcript);
        // It helps people; no test depends on it.
        let _ = file.and_then(|mut file| {
            let took = self.begun.elapsed().as_secs_f32();
            writeln!(file, "{}$ {}\n{took:.2} s: {what}", self.machine, self.script)
        });
    }
}
