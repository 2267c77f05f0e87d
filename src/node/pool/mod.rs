//! What the configured pools are and have.
//!
//! A pool is opened ([`Pools::open`]) before each use: its directory must answer, and be recognised as the pool by
//! filesystem UUID and marker ([`marker`]). What the pools have is measured from the kernel ([`Pools::measure`]); only
//! the list of branches is kept in memory (`inventory`), read once when a pool appears and changed with each branch
//! that is made or removed, so that a measurement walks no directory. Pools are configured one by one, or found below a
//! directory ([`PoolsUnder`]).

pub mod discover;
mod inventory;
pub mod marker;
mod measure;
mod under;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::domain::policy::FsType;
use crate::domain::pool::{Enforcement, Media, Reserve};
use crate::domain::{Bytes, NodeName, PoolName};
use crate::platform::mount::MountTable;
use crate::platform::space::Space;
use crate::platform::{Host, HostError};

use inventory::Inventory;
pub(super) use inventory::{Known, Refused, occupied};
use marker::{Found, Sighting, Verdict};
use under::Listed;
pub use under::PoolsUnder;

/// The directory of branches in a pool.
pub const BRANCHES: &str = "branches";

/// How long a pool's filesystem may take to tell its space before the pool counts as absent.
const ANSWER_BOUND: Duration = Duration::from_secs(2);

/// How long what this host can make and mount is taken as known: packages and modules change rarely.
const ABILITIES_FOR: Duration = Duration::from_secs(60);

/// One pool, as configured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSettings {
    /// Name, unique on the node.
    pub name: PoolName,
    /// Directory.
    pub path: PathBuf,
    /// Labels, for `poolSelector`.
    pub labels: BTreeMap<String, String>,
    /// What to keep free. Default 5 %.
    pub reserve: Reserve,
    /// Kind of disk; detected when absent.
    pub media: Option<Media>,
    /// UUID that the filesystem must have; recorded at first use when absent.
    pub uuid: Option<String>,
}

/// A pool that was just recognised.
#[derive(Clone, Debug)]
pub struct OpenPool {
    /// Its name.
    pub name: PoolName,
    /// Its directory, without symlinks.
    pub path: PathBuf,
    /// Names its filesystem: UUID, else major:minor.
    pub device: String,
    /// Major and minor number of its files (stat(2)). btrfs gives each subvolume one of its own.
    pub number: (u32, u32),
    /// Major and minor number of its filesystem as mountinfo has it.
    pub mounted: (u32, u32),
    /// Filesystem type.
    pub filesystem: String,
    /// Where the pool's directory lies within its filesystem, as mountinfo's root and mount point tell.
    pub within: PathBuf,
    /// It takes no writes: mounted read-only, or made so by its kernel after an error of its disk.
    pub read_only: bool,
    /// How sizes of directories can be enforced here.
    pub enforcement: Enforcement,
    /// Why they cannot.
    pub enforcement_message: String,
    /// Its space.
    pub space: Space,
    /// What is to be kept free on it.
    pub reserve: Reserve,
}

impl OpenPool {
    /// Where its branches lie.
    #[must_use]
    pub fn branches(&self) -> PathBuf {
        self.path.join(BRANCHES)
    }
}

/// Room that was admitted for a branch that is being made; given back when dropped before [`Reservation::keep`].
#[derive(Debug)]
pub(super) struct Reservation<'a> {
    pools: &'a Pools,
    pool: PoolName,
    branch: crate::domain::BranchId,
    kept: bool,
}

impl Reservation<'_> {
    /// The branch exists.
    pub(super) fn keep(mut self, known: Known) {
        self.pools.remember(&self.pool, &self.branch, known);
        self.kept = true;
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.pools.forget(&self.pool, &self.branch);
        }
    }
}

/// What this host can make, and when that was found out.
#[derive(Debug, Default)]
struct Abilities {
    image_filesystems: Vec<FsType>,
    at: Option<Instant>,
}

/// The pools of this node. Functions block.
#[derive(Debug)]
pub struct Pools {
    host: Host,
    node: NodeName,
    settings: Vec<PoolSettings>,
    under: Vec<PoolsUnder>,
    /// Entries below `under` that the log told of.
    warned: Mutex<BTreeSet<PathBuf>>,
    state_dir: PathBuf,
    inventories: Mutex<HashMap<PoolName, Inventory>>,
    /// One for each device, held while a branch is admitted.
    admissions: Mutex<HashMap<String, Arc<Mutex<()>>>>,
    abilities: Mutex<Abilities>,
}

impl Pools {
    /// The pools as configured. `state_dir` remembers which filesystem each of them lies on.
    #[must_use]
    pub fn new(host: Host, node: NodeName, settings: Vec<PoolSettings>, state_dir: PathBuf) -> Self {
        Self {
            host,
            node,
            settings,
            under: Vec::new(),
            warned: Mutex::default(),
            state_dir,
            inventories: Mutex::default(),
            admissions: Mutex::default(),
            abilities: Mutex::default(),
        }
    }

    /// The pools that are configured by name.
    #[must_use]
    pub fn settings(&self) -> &[PoolSettings] {
        &self.settings
    }

    /// The names of the pools that this node has now, usable or not.
    ///
    /// # Errors
    /// The mount table cannot be read.
    pub fn names(&self) -> crate::platform::Result<Vec<PoolName>> {
        let mounts = self.host.mounts()?;
        Ok(self.listed(&mounts).into_iter().map(|l| l.settings.name).collect())
    }

    /// Opens a pool: it answers and is recognised. At first use it is marked.
    ///
    /// # Errors
    /// Why it cannot be used, and what to do; a sentence.
    pub fn open(&self, name: &PoolName) -> Result<OpenPool, String> {
        let mounts = self.host.mounts().map_err(|e| e.to_string())?;
        let Some(listed) = self.listed(&mounts).into_iter().find(|l| l.settings.name == *name) else {
            return Err(format!("this node has no pool {name} in its configuration"));
        };
        self.open_one(&listed, &mounts)
    }

    fn open_one(&self, listed: &Listed, mounts: &MountTable) -> Result<OpenPool, String> {
        let settings = &listed.settings;
        let path = &settings.path;
        // The first question, because it alone has a bound: a disk that hangs holds nothing else up.
        let space = match self.host.space(path, ANSWER_BOUND) {
            Ok(space) => space,
            Err(e) if e.is_missing() => {
                return Err(format!(
                    "{} does not exist: mount the pool's disk and make the directory",
                    path.display()
                ));
            }
            Err(e) => return Err(format!("{} does not answer: {e}", path.display())),
        };
        let unusable = |e: HostError| format!("{} cannot be examined: {e}", path.display());
        let (path, number) = self.host.resolve_directory(path).map_err(unusable)?;
        let Some(mount) = mounts.containing(&path) else {
            return Err(format!("{} is on no mounted filesystem", path.display()));
        };
        let uuid = self.host.filesystem_uuid(&path).map_err(unusable)?;
        let refuses = || {
            // Who does not answer in time is asked again, and does not answer at all then.
            mount.fs_type == "ext4"
                && self.host.ext4_refuses_writes(mount.device, &path, ANSWER_BOUND).unwrap_or(false)
        };
        let read_only = space.read_only || refuses();
        let seen = Sighting {
            uuid: uuid.clone(),
            filesystem: mount.fs_type.clone(),
            marker: marker::read(&self.host, &path.join(marker::MARKER)).map_err(unusable)?,
            record: marker::read(&self.host, &self.record_path(settings)).map_err(unusable)?,
            has_branches: self
                .host
                .directory_names(&path.join(BRANCHES))
                .map_err(unusable)?
                .is_some_and(|n| !n.is_empty()),
            read_only,
        };
        if listed.plain && seen.record == Found::Nothing {
            return Err(under::not_mounted(&settings.path));
        }
        match marker::judge(settings, &self.node, &seen) {
            Verdict::Absent(reason) => return Err(reason),
            Verdict::Recognised => {}
            Verdict::Remember(identity) => self.record(settings, &identity)?,
            Verdict::Claim(identity) => {
                let place = path.join(marker::MARKER);
                marker::write(&self.host, &place, &identity)
                    .map_err(|e| format!("{} cannot be marked as a pool: {e}", path.display()))?;
                self.record(settings, &identity)?;
            }
        }
        let (enforcement, enforcement_message) = self.host.enforcement(&path).map_err(unusable)?;
        let below = path.strip_prefix(&mount.mount_point).unwrap_or(Path::new(""));
        let pool = OpenPool {
            name: settings.name.clone(),
            device: uuid.unwrap_or_else(|| format!("{}:{}", number.0, number.1)),
            number,
            mounted: mount.device,
            filesystem: mount.fs_type.clone(),
            within: mount.root.join(below),
            read_only,
            enforcement,
            enforcement_message,
            space,
            reserve: settings.reserve,
            path,
        };
        self.load(&pool).map_err(unusable)?;
        Ok(pool)
    }

    fn record_path(&self, settings: &PoolSettings) -> PathBuf {
        self.state_dir.join(marker::record_name(&settings.name))
    }

    fn record(&self, settings: &PoolSettings, identity: &marker::Identity) -> Result<(), String> {
        let path = self.record_path(settings);
        let parent = path.parent().unwrap_or(&self.state_dir);
        self.host
            .ensure_directory(parent, 0o700)
            .and_then(|_| marker::write(&self.host, &path, identity))
            .map_err(|e| format!("pool {} cannot be remembered: {e}", settings.name))
    }

    /// What this host can make and mount as an image's filesystem.
    fn image_filesystems(&self) -> Vec<FsType> {
        let mut abilities = lock(&self.abilities);
        if abilities.at.is_none_or(|at| at.elapsed() >= ABILITIES_FOR) {
            let kernel = self.host.kernel_filesystems().unwrap_or_default();
            abilities.image_filesystems = [FsType::Ext4, FsType::Xfs, FsType::Btrfs]
                .into_iter()
                .filter(|&fs| self.host.can_make(fs) && kernel.iter().any(|k| k == fs_name(fs)))
                .collect();
            abilities.at = Some(Instant::now());
        }
        abilities.image_filesystems.clone()
    }

    /// True where this host can make and mount images with this filesystem.
    #[must_use]
    pub fn can_image(&self, fs: FsType) -> bool {
        self.image_filesystems().contains(&fs)
    }

    /// Held while room on the device is given away.
    fn admission(&self, device: &str) -> Arc<Mutex<()>> {
        lock(&self.admissions).entry(device.to_owned()).or_default().clone()
    }

    /// What planners must leave free: what the administrator says, but never less than [`upkeep`].
    fn reserve_of(pool: &OpenPool) -> Bytes {
        let total = Bytes::new(pool.space.total);
        reserve_bytes(pool.reserve, total).max(upkeep(total))
    }
}

/// Type of a filesystem as mount(2) takes it.
#[must_use]
pub const fn fs_name(fs: FsType) -> &'static str {
    match fs {
        FsType::Ext4 => "ext4",
        FsType::Xfs => "xfs",
        FsType::Btrfs => "btrfs",
    }
}

/// What a reserve is on a filesystem of `total` bytes; rounded up.
fn reserve_bytes(reserve: Reserve, total: Bytes) -> Bytes {
    match reserve {
        Reserve::Bytes(bytes) => bytes,
        Reserve::Percent(percent) => {
            let share = (u128::from(total.get()) * u128::from(percent)).div_ceil(100);
            Bytes::new(u64::try_from(share).unwrap_or(u64::MAX))
        }
    }
}

/// The part of the reserve that making a branch may use: its directory, its identity, the list of its image's extents. A
/// plan that fills a pool to its last byte would else be refused for a block of 1 KiB.
///
/// A share, so that small disks keep their room; bounded, because a branch's own needs do not grow without end: ext4 lists
/// 10 TiB in 1 MiB of extents.
fn upkeep(total: Bytes) -> Bytes {
    const SHARE: u64 = 256;
    Bytes::new(total.get() / SHARE).min(Bytes::mib(16))
}

/// A poisoned lock is taken: each change of what these locks guard is one step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
