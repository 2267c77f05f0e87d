//! A node with pools on real disks, and volumes on it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use union_csi::domain::access::{Access as AccessOrder, Epoch, ExportReport};
use union_csi::domain::pool::Reserve;
use union_csi::domain::reach::Transport;
use union_csi::domain::split::{BranchFormat, PlannedBranch};
use union_csi::domain::volume::{AccessMode, VolumeMode};
use union_csi::domain::{BranchId, Bytes, VolumeId};
use union_csi::node::branch::Branches;
use union_csi::node::heal::Healer;
use union_csi::node::pool::{PoolSettings, Pools};
use union_csi::node::transport::{ExportId, Generation};
use union_csi::node::union::{MergerfsSettings, Unions};
use union_csi::node::volume::{
    Access, PublishRequest, StageRequest, VolumeError, VolumeSettings, VolumeSnapshot, Volumes,
};
use union_csi::platform::Host;
use union_csi::store::local::LocalStore;
use union_csi::store::object::{
    Branch, BranchPhase, BranchSpec, Meta, VolumeSplit, VolumeSplitSpec, VolumeSplitStatus,
};
use union_csi::store::{Selector, Store};

use super::fabric::Fabric;
use crate::support::{Scratch, disk};

/// Longer than anything takes on a busy machine; only a failure waits for it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) const IMAGE: BranchFormat = BranchFormat::Image;
pub(super) const DIRECTORY: BranchFormat = BranchFormat::Directory;

/// One planned branch: pool, MiB, format.
pub(super) type Piece<'a> = (&'a str, u64, BranchFormat);

/// A node. What it started and mounted goes with it.
pub(super) struct Rig {
    pub(super) volumes: Volumes,
    pub(super) store: Arc<LocalStore>,
    pub(super) branches: Arc<Branches>,
    pub(super) unions: Arc<Unions>,
    /// The branches of another node, `node-b`: those in pools whose names begin with `far`.
    pub(super) far: Arc<Branches>,
    pub(super) fabric: Arc<Fabric>,
    pub(super) mnt: PathBuf,
    pub(super) state: PathBuf,
    healer: Option<(CancellationToken, tokio::task::JoinHandle<()>)>,
    children: Vec<Child>,
    pub(super) scratch: Scratch,
}

/// Whether a pool lies on the other node.
fn is_far(pool: &str) -> bool {
    pool.starts_with("far")
}

/// Names of volumes are unique on the machine: tests run at the same time, and loop devices are known by them.
fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("t{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

impl Rig {
    /// A node with ext4 pools of 256 MiB.
    pub(super) fn new(pools: &[&str]) -> Self {
        Self::with(&pools.iter().map(|&p| (p, "ext4", 256)).collect::<Vec<_>>())
    }

    /// A node with pools: name, filesystem, MiB.
    pub(super) fn with(pools: &[(&str, &str, u64)]) -> Self {
        // What the agent logs, when a test fails or is asked to tell (`RUST_LOG`).
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let scratch = Scratch::new();
        // Workloads of other users find their way to their volumes.
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o711)).expect("chmod");
        for (name, fs, mib) in pools {
            disk(&scratch, name, fs, *mib);
        }
        let (mnt, state) = (scratch.join("mnt"), scratch.join("state"));
        fs::create_dir(&mnt).expect("mnt");
        fs::create_dir(&state).expect("state");
        let store = Arc::new(LocalStore::open(&state.join("store.redb")).expect("a store"));
        let settings: Vec<_> = pools.iter().map(|(name, _, _)| pool(&scratch, name)).collect();
        let fabric = Arc::new(Fabric::default());
        let (far, near) = settings.into_iter().partition(|pool| is_far(pool.name.as_str()));
        let (volumes, branches, unions) = agent(&Host::new(), &state, &mnt, near, &store, &fabric);
        let away = scratch.join("state-b");
        fs::create_dir(&away).expect("state of node-b");
        let far = Arc::new(Pools::new(Host::new(), "node-b".parse().expect("a node"), far, away));
        let far = Arc::new(Branches::new(Host::new(), far));
        let (healer, children) = (None, Vec::new());
        Self { volumes, store, branches, unions, far, fabric, mnt, state, healer, children, scratch }
    }

    /// The agent ends and another one takes its place, on the machine as `host` lets it.
    pub(super) async fn restart(&mut self, host: &Host) {
        self.stop_healing().await;
        let pools = fs::read_dir(self.scratch.path())
            .expect("scratch")
            .filter_map(|e| e.expect("entry").file_name().into_string().ok())
            .filter_map(|n| n.strip_suffix(".disk").map(str::to_owned))
            .filter(|name| !is_far(name))
            .map(|name| pool(&self.scratch, &name))
            .collect();
        let (volumes, branches, unions) =
            agent(host, &self.state, &self.mnt, pools, &self.store, &self.fabric);
        (self.volumes, self.branches, self.unions) = (volumes, branches, unions);
    }

    /// Starts the healer.
    pub(super) fn heal(&mut self) {
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(Healer::new(self.volumes.clone()).run(shutdown.clone()));
        self.healer = Some((shutdown, task));
    }

    pub(super) async fn stop_healing(&mut self) {
        if let Some((shutdown, task)) = self.healer.take() {
            shutdown.cancel();
            task.await.expect("the healer ends");
        }
    }

    /// A volume of these branches, all bound.
    pub(super) async fn volume(&self, pieces: &[Piece<'_>]) -> Vol {
        self.volume_with(pieces, &[("union", "whenNeeded")]).await
    }

    /// As [`Rig::volume`], with StorageClass parameters.
    pub(super) async fn volume_with(&self, pieces: &[Piece<'_>], parameters: &[(&str, &str)]) -> Vol {
        self.volume_of(pieces, parameters, VolumeMode::Filesystem).await
    }

    /// As [`Rig::volume_with`], files or block.
    pub(super) async fn volume_of(
        &self,
        pieces: &[Piece<'_>],
        parameters: &[(&str, &str)],
        mode: VolumeMode,
    ) -> Vol {
        let id: VolumeId = unique().parse().expect("a volume id");
        let mut planned = Vec::new();
        for (index, (pool, mib, format)) in (0..).zip(pieces) {
            let image = *format == IMAGE && mode == VolumeMode::Filesystem;
            let spec = BranchSpec {
                id: id.branch(index),
                volume: id.clone(),
                index,
                node: if is_far(pool) { "node-b" } else { "node-a" }.parse().expect("a node"),
                pool: pool.parse().expect("a pool"),
                size: Bytes::mib(*mib),
                usable: Bytes::mib(*mib / 2),
                format: *format,
                fs_type: image.then(|| match parameters.iter().find(|(k, _)| *k == "fsType") {
                    Some((_, "xfs")) => union_csi::domain::policy::FsType::Xfs,
                    Some((_, "btrfs")) => union_csi::domain::policy::FsType::Btrfs,
                    _ => union_csi::domain::policy::FsType::Ext4,
                }),
                thin: false,
                accept_unenforced: true,
                write_through: true,
                encrypted: false,
                access: None,
                sharing: None,
            };
            let owner = if is_far(pool) { &self.far } else { &self.branches };
            let status = owner.ensure_present(&spec, false).expect("a branch");
            assert_eq!(status.phase, BranchPhase::Bound);
            planned.push(PlannedBranch {
                index,
                node: spec.node.clone(),
                pool: spec.pool.clone(),
                size: spec.size,
                usable: spec.usable,
                format: spec.format,
                fs_type: spec.fs_type,
            });
            let meta = Meta::with_finalizer(spec.id.as_str());
            let branch = self.store.branches().create(Branch { meta, spec, status: status.clone() }).await;
            let mut branch = branch.expect("a branch object");
            branch.status = status;
            self.store.branches().update_status(branch).await.expect("its status");
        }
        let spec = VolumeSplitSpec {
            volume: id.clone(),
            request_name: id.to_string(),
            capacity: Bytes::mib(1),
            limit: None,
            access_modes: vec![AccessMode::SingleNodeWriter],
            volume_mode: mode,
            parameters: parameters.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            consumer: None,
            topology: Vec::new(),
            ephemeral: false,
            next_index: u32::try_from(planned.len()).expect("few branches"),
            branches: planned,
            attached: Vec::new(),
            used: false,
        };
        let split = VolumeSplit { meta: Meta::new(id.as_str()), spec, status: VolumeSplitStatus::default() };
        self.store.splits().create(split).await.expect("a volume object");
        let access = match mode {
            VolumeMode::Filesystem => Access::Mount { flags: Vec::new(), group: None },
            VolumeMode::Block => Access::Block,
        };
        Vol {
            staging: self.mnt.join(format!("{id}-staging")),
            target: self.mnt.join(format!("{id}-target")),
            mode: AccessMode::SingleNodeWriter,
            access,
            id,
        }
    }

    /// The leader gives the branch to `consumer` by this order, and nobody has acted upon it yet.
    pub(super) async fn give(&self, vol: &Vol, index: u32, consumer: Option<&str>, epoch: u64) {
        let name = vol.branch(index);
        let mut branch = self.store.branches().get(name.as_str()).await.expect("store").expect("a branch");
        let consumer = consumer.map(|node| node.parse().expect("a node"));
        branch.spec.access = Some(AccessOrder { consumer, epoch: Epoch(epoch) });
        self.store.branches().update(branch).await.expect("an order");
    }

    /// The branch's node opens it to whom the order says, as this generation.
    pub(super) async fn open(&self, vol: &Vol, index: u32, generation: u64) {
        let name = vol.branch(index);
        let mut branch = self.store.branches().get(name.as_str()).await.expect("store").expect("a branch");
        let id = ExportId { branch: name.clone(), generation: Generation(generation) };
        let place = self.scratch.join(branch.spec.pool.as_str()).join("branches").join(name.as_str());
        let image = branch.spec.format == IMAGE;
        self.fabric.export(&id, if image { place.join("disk.img") } else { place });
        branch.status.export = Some(ExportReport {
            generation: id.generation,
            address: Some("127.0.0.1:4420".to_owned()),
            name: Some(format!("{name}@{generation}")),
            transport: Some(Transport::between_nodes(branch.spec.format)),
            allowed: branch.spec.access.clone().unwrap_or_default(),
            boot_id: "boot".to_owned(),
        });
        self.store.branches().update_status(branch).await.expect("a report");
    }

    /// The branch's node reports what it reported before, with other figures.
    pub(super) async fn touch(&self, vol: &Vol, index: u32) {
        let name = vol.branch(index);
        let mut branch = self.store.branches().get(name.as_str()).await.expect("store").expect("a branch");
        branch.status.bytes_used = branch.status.bytes_used.checked_add(Bytes::mib(1)).expect("little");
        self.store.branches().update_status(branch).await.expect("a report");
    }

    /// Gives all branches of `node-b` to this node, and opens them.
    pub(super) async fn grant(&self, vol: &Vol, epoch: u64, generation: u64) {
        let selector = Selector::Volume(vol.id.clone());
        let branches = self.store.branches().list(&selector).await.expect("store");
        for branch in branches.iter().filter(|b| b.spec.node.as_str() == "node-b") {
            self.give(vol, branch.spec.index, Some("node-a"), epoch).await;
            self.open(vol, branch.spec.index, generation).await;
        }
    }

    /// Stages and publishes.
    pub(super) async fn up(&self, vol: &Vol) {
        self.volumes.stage(&vol.stage()).await.expect("stage");
        self.volumes.publish(&vol.publish()).await.expect("publish");
    }

    /// Unpublishes and unstages.
    pub(super) async fn down(&self, vol: &Vol) {
        self.volumes.unpublish(&vol.id, &vol.target).await.expect("unpublish");
        self.volumes.unstage(&vol.id, &vol.staging).await.expect("unstage");
    }

    /// Where the volume's branches are mounted.
    pub(super) fn branch_mount(&self, vol: &Vol, index: u32) -> PathBuf {
        self.state.join("volumes").join(&vol.id).join("branches").join(index.to_string())
    }

    pub(super) async fn snapshot(&self, vol: &Vol) -> VolumeSnapshot {
        let all = self.volumes.snapshot().await;
        all.into_iter().find(|v| v.volume == vol.id).expect("the volume is on this node")
    }

    /// Where the volume's record is.
    pub(super) fn record_file(&self, vol: &Vol) -> PathBuf {
        self.state.join("volumes").join(&vol.id).join("record.json")
    }

    /// Pid of the volume's MergerFS.
    pub(super) async fn pid(&self, vol: &Vol) -> i32 {
        self.snapshot(vol).await.pid.expect("a mergerfs")
    }

    /// The mounts of this rig: id, device and place.
    pub(super) fn mounts(&self) -> Vec<(u64, (u32, u32), PathBuf)> {
        let table = Host::new().mounts().expect("mounts");
        table.below(self.scratch.path()).map(|e| (e.id, e.device, e.mount_point.clone())).collect()
    }

    /// Nothing of any volume is left: no mounts, no processes, no loop devices, no directories.
    pub(super) fn assert_nothing_left(&self) {
        self.assert_nothing_left_after("the test");
    }

    /// As [`Rig::assert_nothing_left`], telling after what.
    pub(super) fn assert_nothing_left_after(&self, after: &str) {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        for place in [&self.mnt, &self.state] {
            let place = place.to_str().expect("utf-8");
            let left: Vec<_> = table.lines().filter(|l| l.contains(place)).collect();
            assert!(left.is_empty(), "mounts are left after {after}: {left:#?}");
        }
        let processes = processes_of(self.scratch.path());
        assert!(processes.is_empty(), "processes are left after {after}: {processes:?}");
        // The kernel lets go of a device by itself, soon after its filesystem was unmounted (autoclear): whoever looks at the
        // device at that moment, as udev and our own scans do, delays it.
        let mut loops = self.loop_devices();
        for _ in 0..100 {
            if loops.is_empty() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
            loops = self.loop_devices();
        }
        assert!(loops.is_empty(), "loop devices are left after {after}: {loops:?}");
        for directory in ["volumes", "unions"] {
            let left = names(&self.state.join(directory));
            assert!(left.is_empty(), "state is left in {directory} after {after}: {left:?}");
        }
        let left = names(&self.mnt);
        assert!(left.is_empty(), "directories are left after {after}: {left:?}");
    }

    /// Loop devices of branches in this scratch directory.
    pub(super) fn loop_devices(&self) -> Vec<String> {
        let out = Command::new("losetup").args(["-n", "-O", "NAME,BACK-FILE"]).output().expect("losetup");
        let root = self.scratch.path().to_string_lossy().into_owned();
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .filter(|l| l.contains(&root) && l.contains("/branches/"))
            .map(str::to_owned)
            .collect()
    }

    /// A shell command that lives as long as the rig, in a mount namespace of its own, as a container would.
    pub(super) fn container(&mut self, script: &str) -> Container {
        let mut child = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c"])
            .arg(format!("echo up; {script}"))
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()
            .expect("unshare");
        let mut line = [0; 3];
        std::io::Read::read_exact(child.stdout.as_mut().expect("stdout"), &mut line).expect("it starts");
        let pid = child.id();
        self.children.push(child);
        Container { root: format!("/proc/{pid}/root").into() }
    }

    pub(super) fn end_containers(&mut self) {
        for mut child in self.children.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.end_containers();
        if let Some((shutdown, task)) = self.healer.take() {
            shutdown.cancel();
            task.abort();
        }
        // A repair that was under way when the test failed may still start one.
        for _ in 0..5 {
            for pid in processes_of(self.scratch.path()) {
                let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
            }
            if !std::thread::panicking() {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Another mount namespace.
pub(super) struct Container {
    root: PathBuf,
}

impl Container {
    /// A path as it is in there.
    pub(super) fn path(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").expect("absolute"))
    }
}

/// A volume, and how the tests use it.
#[derive(Clone, Debug)]
pub(super) struct Vol {
    pub(super) id: VolumeId,
    pub(super) staging: PathBuf,
    pub(super) target: PathBuf,
    pub(super) mode: AccessMode,
    pub(super) access: Access,
}

impl Vol {
    pub(super) fn stage(&self) -> StageRequest {
        StageRequest {
            volume: self.id.clone(),
            staging: self.staging.clone(),
            access_mode: self.mode,
            access: self.access.clone(),
        }
    }

    pub(super) fn publish(&self) -> PublishRequest {
        PublishRequest {
            volume: self.id.clone(),
            staging: self.staging.clone(),
            target: self.target.clone(),
            read_only: false,
            access_mode: self.mode,
            access: self.access.clone(),
            at_boot: false,
        }
    }

    pub(super) fn branch(&self, index: u32) -> BranchId {
        self.id.branch(index)
    }

    /// With these mount flags.
    pub(super) fn flags(mut self, list: &[&str]) -> Self {
        if let Access::Mount { flags, .. } = &mut self.access {
            *flags = list.iter().map(|&f| f.to_owned()).collect();
        }
        self
    }

    /// With this group.
    pub(super) fn group(mut self, gid: u32) -> Self {
        if let Access::Mount { group, .. } = &mut self.access {
            *group = Some(gid);
        }
        self
    }
}

fn pool(scratch: &Scratch, name: &str) -> PoolSettings {
    PoolSettings {
        name: name.parse().expect("a pool name"),
        path: scratch.join(name),
        labels: BTreeMap::new(),
        reserve: Reserve::Percent(0),
        media: None,
        uuid: None,
    }
}

fn names(directory: &Path) -> Vec<OsString> {
    fs::read_dir(directory).into_iter().flatten().map(|e| e.expect("entry").file_name()).collect()
}

/// An agent's parts, as `app` wires them.
pub(super) fn agent(
    host: &Host,
    state: &Path,
    mnt: &Path,
    pools: Vec<PoolSettings>,
    store: &Arc<LocalStore>,
    fabric: &Arc<Fabric>,
) -> (Volumes, Arc<Branches>, Arc<Unions>) {
    let node: union_csi::domain::NodeName = "node-a".parse().expect("a node");
    let pools = Arc::new(Pools::new(host.clone(), node.clone(), pools, state.to_owned()));
    let branches = Arc::new(Branches::new(host.clone(), pools));
    let mergerfs = MergerfsSettings {
        path: "mergerfs".into(),
        options: BTreeMap::new(),
        start_timeout: Duration::from_secs(30),
    };
    let unions = Arc::new(Unions::probe(host, &mergerfs, state));
    let settings = VolumeSettings { state_dir: state.to_owned(), allowed_targets: vec![mnt.to_owned()] };
    let store: Arc<dyn Store> = store.clone();
    let transports = fabric.transports();
    let volumes =
        Volumes::new(host.clone(), store, node, branches.clone(), unions.clone(), transports, settings)
            .expect("volumes");
    (volumes, branches, unions)
}

/// MergerFS processes that have the directory in their arguments.
pub(super) fn processes_of(directory: &Path) -> Vec<i32> {
    let directory = directory.to_string_lossy().into_owned();
    let processes =
        fs::read_dir("/proc").expect("/proc").filter_map(|e| e.ok()?.file_name().into_string().ok());
    processes
        .filter_map(|name| name.parse::<i32>().ok())
        .filter(|pid| {
            let args = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args = String::from_utf8_lossy(&args).into_owned();
            args.starts_with(['/', 'm'])
                && args.split('\0').next().is_some_and(|p| p.ends_with("mergerfs"))
                && args.contains(&directory)
        })
        .collect()
}

/// Waits until `done` answers, and returns the answer.
pub(super) async fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    until(what, async || done()).await
}

/// As [`eventually`], for a question that waits itself.
pub(super) async fn until<T>(what: &str, mut done: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = done().await {
            return value;
        }
        assert!(Instant::now() < deadline, "{what} did not come");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The errno that something failed with.
pub(super) fn errno(result: std::io::Result<impl Sized>) -> Option<i32> {
    result.err().and_then(|e| e.raw_os_error())
}

/// The error that was expected.
pub(super) fn refused<T: std::fmt::Debug>(result: Result<T, VolumeError>) -> VolumeError {
    result.expect_err("this must be refused")
}

/// Options of the topmost mount at the path, per mount.
pub(super) fn options(path: &Path) -> Vec<String> {
    let table = Host::new().mounts().expect("mounts");
    table.at(path).unwrap_or_else(|| panic!("nothing is mounted at {}", path.display())).options.clone()
}
