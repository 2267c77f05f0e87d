//! An agent over real disks, and what is done to it.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use crate::agent::{Agent, Csi, Wanted};
use crate::support::{Scratch, disk};

pub(super) const PROGRAM: &str = env!("CARGO_BIN_EXE_union-csi");
pub(super) const WRITER: Mode = Mode::SingleNodeWriter;
pub(super) const READER: Mode = Mode::SingleNodeReaderOnly;
pub(super) const MIB: u64 = 1 << 20;

/// Longer than anything takes on a busy machine; only a failure waits for it.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);

/// Disks, and an agent that has them as pools.
pub(super) struct Ground {
    pub(super) agent: Agent,
    pub(super) disks: Vec<PathBuf>,
    // Last, so that the agent has ended before what is mounted is unmounted.
    pub(super) scratch: Scratch,
}

impl Ground {
    /// `count` ext4 disks of `mib` MiB each.
    pub(super) fn new(count: usize, mib: u64) -> Self {
        Self::on(Scratch::new(), count, mib)
    }

    pub(super) fn on(scratch: Scratch, count: usize, mib: u64) -> Self {
        Self::with(scratch, count, mib, "")
    }

    /// The same, with YAML for the agent.
    pub(super) fn with(scratch: Scratch, count: usize, mib: u64, extra: &str) -> Self {
        let disks: Vec<_> = (0..count).map(|i| disk(&scratch, &format!("disk{i}"), "ext4", mib)).collect();
        let pools: Vec<_> =
            disks.iter().enumerate().map(|(i, d)| (format!("disk{i}"), d.join("pool"))).collect();
        pools.iter().for_each(|(_, p)| fs::create_dir(p).expect("a pool directory"));
        let agent = Agent::start(Path::new(PROGRAM), scratch.path(), &pools, extra);
        Self { agent, disks, scratch }
    }

    /// Creates, stages and publishes.
    pub(super) async fn up(&self, wanted: &Wanted) -> (String, PathBuf) {
        let mut csi = self.agent.csi().await;
        let id = csi.create(wanted).await.expect("CreateVolume").volume_id;
        csi.stage(&id, WRITER).await.expect("NodeStageVolume");
        let target = csi.publish(&id, WRITER).await.expect("NodePublishVolume");
        (id, target)
    }

    /// Unpublishes, unstages and deletes.
    pub(super) async fn down(&self, id: &str) {
        let mut csi = self.agent.csi().await;
        csi.unpublish(id).await.expect("NodeUnpublishVolume");
        csi.unstage(id).await.expect("NodeUnstageVolume");
        csi.delete(id).await.expect("DeleteVolume");
    }

    /// What the agent tells of the volume.
    pub(super) fn told(&self, id: &str) -> Value {
        let body = self.agent.get(&format!("/v1/volumes/{id}")).unwrap_or_default();
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// The pid of the volume's mergerfs.
    pub(super) fn mergerfs(&self, id: &str) -> u32 {
        let told = self.told(id);
        let pid = told["local"]["pid"].as_u64().unwrap_or_else(|| panic!("no mergerfs: {told}"));
        u32::try_from(pid).expect("a pid")
    }

    /// Where the volume's branch is attached.
    pub(super) fn branch_mount(&self, id: &str, index: u32) -> PathBuf {
        self.scratch.join("state/volumes").join(id).join("branches").join(index.to_string())
    }

    /// Everything that volumes left behind: mounts, loop devices, branches, records, processes, cgroups. Nothing, where
    /// all of them were deleted.
    pub(super) fn left(&self) -> Vec<String> {
        let root = self.scratch.path().display().to_string();
        let mut left = Vec::new();
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        for point in table.lines().filter_map(|l| l.split(' ').nth(4)).filter(|p| p.starts_with(&root)) {
            let of_the_test =
                self.disks.iter().any(|d| d == Path::new(point)) || point == format!("{root}/state");
            if !of_the_test {
                left.push(format!("mount {point}"));
            }
        }
        for entry in fs::read_dir("/sys/block").expect("/sys/block").flatten() {
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.starts_with(&root) && file.contains("/pool/") {
                left.push(format!("loop device {:?} of {}", entry.file_name(), file.trim()));
            }
        }
        let pools = self.disks.iter().map(|d| d.join("pool/branches"));
        let records = ["state/volumes", "state/unions", "staging", "targets"].map(|d| self.scratch.join(d));
        for directory in pools.chain(records) {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                left.push(entry.path().display().to_string());
            }
        }
        left.extend(
            processes_of(&self.scratch).into_iter().map(|(pid, line)| format!("process {pid}: {line}")),
        );
        left
    }

    /// Waits until nothing is left.
    pub(super) async fn assert_nothing_left(&self) {
        until("nothing left", || {
            let left = self.left();
            if left.is_empty() { Ok(()) } else { Err(left.join("\n")) }
        })
        .await;
    }
}

/// Processes of mergerfs below the scratch directory.
pub(super) fn processes_of(scratch: &Scratch) -> Vec<(u32, String)> {
    let root = scratch.path().display().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if line.contains("mergerfs") && line.contains(&root) {
            found.push((pid, line));
        }
    }
    found
}

/// A volume of `count` image branches, at least `mib` MiB in all.
pub(super) fn split(name: &str, mib: u64, count: u32, more: &[(&str, &str)]) -> Wanted {
    let count = count.to_string();
    let mut parameters = vec![
        ("splitQuantum", "16Mi"),
        ("minBranches", &count),
        ("maxBranches", &count),
        ("strategy", "balanced"),
        ("branchFormat", "image"),
    ];
    parameters.extend_from_slice(more);
    // Volumes of tests that run at the same time have names of their own: cgroups are named by them.
    let mut wanted = Wanted::new(&format!("{name}-{}", std::process::id()), mib * MIB, &parameters);
    wanted.modes = vec![WRITER, READER];
    wanted
}

/// Waits until `look` is content; what it last complained of where it never is.
pub(super) async fn until<T>(what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match look() {
            Ok(value) => return value,
            Err(reason) if begun.elapsed() > PATIENCE => panic!("{what}: not within {PATIENCE:?}: {reason}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Shuts the filesystem at `point` down, as it does by itself when its disk fails (`FS_IOC_SHUTDOWN`; ext4, XFS).
pub(super) fn shut_down(point: &Path) {
    let script = "import fcntl,os,struct,sys\n\
                  fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587d, struct.pack('I', 1))";
    crate::support::run("python3", &["-c", script, point.to_str().expect("utf-8")]);
}

/// Another mount namespace with a copy of all mounts, as a container has; ends when it is dropped.
pub(super) struct Container(Child);

impl Container {
    /// Runs `script` and stays.
    pub(super) fn new(script: &str) -> Self {
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-ec"])
            .arg(format!("{script}\necho ready\nexec sleep 600"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut line = String::new();
        let mut out = std::io::BufReader::new(child.stdout.take().expect("its output"));
        std::io::BufRead::read_line(&mut out, &mut line).expect("its output");
        assert_eq!(line, "ready\n", "the container did not start");
        Self(child)
    }

    /// A path as it is inside.
    pub(super) fn path(&self, path: &Path) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{}", self.0.id(), path.display()))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes numbered records, each flushed before the next, until it is told to stop.
pub(super) struct Records {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<Vec<(u64, String)>>>,
}

impl Records {
    /// Writes into `directory`; made where missing.
    pub(super) fn write(directory: &Path) -> Self {
        fs::create_dir_all(directory).expect("the directory of records");
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let thread = {
            let (directory, stop, written) = (directory.to_owned(), stop.clone(), written.clone());
            std::thread::spawn(move || {
                let mut errors = Vec::new();
                for number in 0_u64.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    // A record that failed is not acknowledged, and is written again under another number.
                    match write_record(&directory, number) {
                        Ok(()) => written.store(number + 1, Ordering::Relaxed),
                        Err(error) => errors.push((number, error.to_string())),
                    }
                    // So that a long test does not fill the volume.
                    std::thread::sleep(Duration::from_millis(10));
                }
                errors
            })
        };
        Self { stop, written, thread: Some(thread) }
    }

    /// Waits until further records were written.
    pub(super) async fn progress(&self) {
        let before = self.written.load(Ordering::Relaxed);
        until("another record", || {
            let now = self.written.load(Ordering::Relaxed);
            if now > before + 2 { Ok(()) } else { Err(format!("{now} records")) }
        })
        .await;
    }

    /// Stops; the number of records, and the errors by number.
    pub(super) fn end(mut self) -> (u64, BTreeMap<u64, String>) {
        self.stop.store(true, Ordering::Relaxed);
        let errors = self.thread.take().expect("a writer").join().expect("the writer");
        (self.written.load(Ordering::Relaxed), errors.into_iter().collect())
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

pub(super) fn record_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("record-{number}"))
}

pub(super) fn write_record(directory: &Path, number: u64) -> std::io::Result<()> {
    let path = record_path(directory, number);
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(path)?;
    file.write_all(content(number).as_bytes())?;
    file.sync_all()?;
    fs::File::open(directory)?.sync_all()
}

pub(super) fn content(number: u64) -> String {
    format!("record {number} ").repeat(64)
}

/// Every acknowledged record is there and whole.
pub(super) fn assert_records(directory: &Path, count: u64, except: &BTreeMap<u64, String>) {
    for number in (0..count).filter(|n| !except.contains_key(n)) {
        let path = record_path(directory, number);
        let found = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(found, content(number), "{}", path.display());
    }
}

/// Whether the record can be read.
pub(super) fn readable(directory: &Path, number: u64) -> Result<(), String> {
    match fs::read_to_string(record_path(directory, number)) {
        Ok(text) if text == content(number) => Ok(()),
        Ok(text) => Err(format!("it holds {text:?}")),
        Err(error) => Err(error.to_string()),
    }
}

/// True where the directory cannot be reached because its union is gone.
pub(super) fn is_down(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
        || error.kind() == ErrorKind::NotConnected
}

pub(super) async fn csi(ground: &Ground) -> Csi {
    ground.agent.csi().await
}
