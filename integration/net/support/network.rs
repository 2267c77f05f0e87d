//! Machines that are joined by a switch.

use std::fmt;
use std::io;
use std::process::{Child, Command};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use snafu::ensure;

use super::image::{Directory, Files};
use super::machine::Machine;
use super::switch::Switch;
use super::trouble::TooManySnafu;
use super::{Result, cluster, shared};

/// How many machines run at the same time, of all tests together: they share four processors.
pub const MOST: usize = 4;
/// How long a test waits for those of other tests to go.
const ROOM_BOUND: Duration = Duration::from_secs(900);

/// What a network consists of.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many machines: `a`, `b`, `c`, `d`.
    pub machines: usize,
    /// Memory of each.
    pub memory_mib: u32,
    /// Data disks of each, with their sizes in bytes; `/disk/NAME` inside.
    pub disks: Vec<(String, u64)>,
    /// The largest packet; 9000 for jumbo frames.
    pub mtu: u32,
    /// More arguments for QEMU.
    pub arguments: Vec<String>,
}

impl Options {
    /// That many machines of 256 MiB with a disk `data` of 1 GiB.
    pub fn new(machines: usize) -> Self {
        let disks = vec![("data".to_owned(), 1 << 30)];
        Self { machines, memory_mib: 256, disks, mtu: 1500, arguments: Vec::new() }
    }

    /// With other memory.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// With one more disk.
    pub fn disk(mut self, name: &str, bytes: u64) -> Self {
        self.disks.push((name.to_owned(), bytes));
        self
    }

    /// With another largest packet.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }
}

/// Machines on a network. Everything is gone when it is dropped.
pub struct Network {
    // The order is that of the end: machines, then the thread that they depend on, then their files.
    machines: Vec<Machine>,
    switch: Switch,
    _keeper: Arc<Keeper>,
    _directory: Directory,
    _room: Room,
}

impl Network {
    /// That many machines, all on.
    pub fn boot(machines: usize) -> Result<Self> {
        Self::boot_with(&Options::new(machines))
    }

    /// The same, as the options say.
    pub fn boot_with(options: &Options) -> Result<Self> {
        // The test's name.
        let label = thread::current().name().unwrap_or("main").to_owned();
        Self::boot_as(&label, options)
    }

    /// The same with logs at that name.
    pub(super) fn boot_as(label: &str, options: &Options) -> Result<Self> {
        let files = Files::find()?;
        let room = Room::take(options.machines)?;
        let directory = files.new_directory()?;
        let logs = files.new_logs(label)?;
        let keeper = Arc::new(Keeper::start());
        let names: Vec<String> = ('a'..='z').take(options.machines).map(String::from).collect();
        let switch = Switch::start(directory.path(), &names)?;
        let machines = names
            .iter()
            .enumerate()
            .map(|(index, name)| Machine::new(index, name, directory.path(), &logs, &files, options, &keeper))
            .collect::<Result<_>>()?;
        let network = Self { machines, switch, _keeper: keeper, _directory: directory, _room: room };
        let started = network.start_all();
        if started.is_err() {
            network.report();
        }
        started.map(|()| network)
    }

    /// Switches on what is off, at the same time.
    pub fn start_all(&self) -> Result {
        self.machines.iter().try_for_each(Machine::launch)?;
        self.machines.iter().try_for_each(Machine::wait_up)
    }

    /// All of them, in the order of their names.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// One of them.
    ///
    /// # Panics
    /// When there is none of that name.
    pub fn machine(&self, name: &str) -> &Machine {
        let found = self.machines.iter().find(|machine| machine.name() == name);
        found.unwrap_or_else(|| panic!("no machine is called {name}"))
    }

    fn both(&self, a: &str, b: &str) -> [(usize, usize); 2] {
        let (a, b) = (self.machine(a).index(), self.machine(b).index());
        [(a, b), (b, a)]
    }

    /// Nothing gets through between two machines any more.
    pub fn cut(&self, a: &str, b: &str) {
        for (from, to) in self.both(a, b) {
            self.switch.change(from, to, |link| link.cut = true);
        }
    }

    /// Nothing that the first sends reaches the second any more; the other direction stays as it is.
    pub fn cut_one_way(&self, from: &str, to: &str) {
        let [(from, to), _] = self.both(from, to);
        self.switch.change(from, to, |link| link.cut = true);
    }

    /// Cuts a machine from all others.
    pub fn isolate(&self, name: &str) {
        for other in self.machines.iter().filter(|other| other.name() != name) {
            self.cut(name, other.name());
        }
    }

    /// Between two machines everything is as at the start.
    pub fn heal(&self, a: &str, b: &str) {
        for (from, to) in self.both(a, b) {
            self.switch.change(from, to, |link| *link = Default::default());
        }
    }

    /// Between all of them.
    pub fn heal_all(&self) {
        for from in 0..self.machines.len() {
            for to in 0..self.machines.len() {
                self.switch.change(from, to, |link| *link = Default::default());
            }
        }
    }

    /// Each packet between two machines takes so long in each direction.
    pub fn delay(&self, a: &str, b: &str, delay: Duration) {
        for (from, to) in self.both(a, b) {
            self.switch.change(from, to, |link| link.delay = delay);
        }
    }

    /// No more than so many bytes get through in a second, in each direction between two machines; what comes faster waits up
    /// to a quarter of a second and is dropped after that.
    pub fn limit(&self, a: &str, b: &str, bytes_per_second: u64) {
        for (from, to) in self.both(a, b) {
            self.switch.change(from, to, |link| link.bytes_per_second = Some(bytes_per_second));
        }
    }

    /// How many bytes the switch let through from one machine to another.
    pub fn passed(&self, from: &str, to: &str) -> u64 {
        let [(from, to), _] = self.both(from, to);
        self.switch.passed(from, to)
    }

    /// Looks from now on for these bytes in what the machines send each other.
    pub fn look_for(&self, bytes: &[u8]) {
        self.switch.look_for(bytes);
    }

    /// In how many frames they were.
    pub fn seen(&self) -> u64 {
        self.switch.seen()
    }

    /// Prints every machine's console and what was run in it.
    pub fn report(&self) {
        for machine in &self.machines {
            eprint!("{}", machine.report());
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if thread::panicking() {
            self.report();
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("machines", &self.machines).finish_non_exhaustive()
    }
}

type Order = (Command, Sender<io::Result<Child>>);

/// The thread that starts QEMU: its processes are killed when the thread that started them ends, and a test's own thread
/// may end before the network that it shares with others.
#[derive(Debug)]
pub struct Keeper {
    orders: Mutex<Option<Sender<Order>>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    fn start() -> Self {
        let (orders, taken) = mpsc::channel::<Order>();
        let thread = thread::spawn(move || {
            for (mut command, answer) in taken {
                let _ = answer.send(command.spawn());
            }
        });
        Self { orders: Mutex::new(Some(orders)), thread: Some(thread) }
    }

    /// Starts a process that ends with the network, at the latest.
    pub fn spawn(&self, command: Command) -> io::Result<Child> {
        let (answer, answered) = mpsc::channel();
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sent = orders.is_some_and(|orders| orders.send((command, answer)).is_ok());
        if !sent {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        answered.recv().map_err(io::Error::other)?
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

/// The right to run some machines.
struct Room(usize);

impl Room {
    fn take(wanted: usize) -> Result<Self> {
        ensure!(wanted <= MOST, TooManySnafu { wanted, most: MOST });
        let fits = |taken: usize| taken + wanted <= MOST;
        if !fits(*TAKEN.lock().unwrap_or_else(PoisonError::into_inner)) {
            shared::end_if_idle();
            cluster::end_if_idle();
        }
        let deadline = Instant::now() + ROOM_BOUND;
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        while !fits(*taken) {
            let wait = deadline.saturating_duration_since(Instant::now());
            ensure!(!wait.is_zero(), TooManySnafu { wanted: *taken + wanted, most: MOST });
            taken = FREED.wait_timeout(taken, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken += wanted;
        Ok(Self(wanted))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= self.0;
        FREED.notify_all();
    }
}
