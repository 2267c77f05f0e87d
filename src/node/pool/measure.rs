//! Measuring the pools.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::{OpenPool, PoolSettings, Pools};
use crate::domain::Bytes;
use crate::domain::policy::FsType;
use crate::domain::pool::{Enforcement, Media, PoolReport, PoolState, allocatable};
use crate::platform::mount::MountTable;

impl Pools {
    /// What the pools are and have now, in the order of the configuration. Takes a few system calls for each pool and one
    /// for each branch, and never longer than the bound for each pool that does not answer. Where the mount table cannot be
    /// read, pools that are not configured by name are left out.
    #[must_use]
    pub fn measure(&self) -> Vec<PoolReport> {
        let filesystems = self.image_filesystems();
        let opened = match self.host.mounts() {
            Ok(mounts) => self.open_all(&mounts),
            Err(e) => self.settings.iter().map(|s| (s.clone(), Err(e.to_string()))).collect(),
        };
        self.unload_all_but(opened.iter().filter(|(_, pool)| pool.is_ok()).map(|(s, _)| &s.name));
        // Only now, because a device's load is the sum over all pools that lie on it.
        opened
            .into_iter()
            .map(|(settings, pool)| match pool {
                Ok(pool) => self.report(&settings, &pool, &filesystems),
                Err(reason) => absent(&settings, reason),
            })
            .collect()
    }

    fn open_all(&self, mounts: &MountTable) -> Vec<(PoolSettings, Result<OpenPool, String>)> {
        let open = |listed: super::Listed| {
            let pool = self.open_one(&listed, mounts);
            (listed.settings, pool)
        };
        self.listed(mounts).into_iter().map(open).collect()
    }

    fn report(&self, settings: &PoolSettings, pool: &OpenPool, filesystems: &[FsType]) -> PoolReport {
        let admission = self.admission(&pool.device);
        let _nothing_is_made = soon(&admission);
        // `occupied` before and after `free`, the smaller of both: what is written or removed between the readings then
        // makes the pool look fuller than it is, never emptier.
        let before = self.load_of(&pool.device);
        let space = self.host.space(&pool.path, super::ANSWER_BOUND).unwrap_or(pool.space);
        let after = self.load_of(&pool.device);
        let promised = before.promised.max(after.promised);
        let occupied = before.occupied.min(after.occupied);
        let (total, free) = (Bytes::new(space.total), Bytes::new(space.available));
        let reserve = Self::reserve_of(pool);
        let read_only = pool.read_only;
        let room =
            if read_only { Bytes::ZERO } else { allocatable(total, free, reserve, promised, occupied) };
        PoolReport {
            name: settings.name.clone(),
            path: settings.path.display().to_string(),
            state: if read_only { PoolState::ReadOnly } else { PoolState::Ready },
            message: if read_only {
                format!(
                    "{} takes no writes: its branches can be read, none can be made or removed; mount it writable (after an \
                     error of its disk the kernel refuses writes by itself: look at its log)",
                    settings.path.display()
                )
            } else {
                String::new()
            },
            labels: settings.labels.clone(),
            media: settings.media.unwrap_or_else(|| self.host.media(pool.number).unwrap_or(Media::Unknown)),
            device: pool.device.clone(),
            filesystem: pool.filesystem.clone(),
            enforcement: pool.enforcement,
            enforcement_message: pool.enforcement_message.clone(),
            image_filesystems: filesystems.to_vec(),
            total,
            free,
            reserve,
            promised,
            occupied,
            allocatable: Some(room),
        }
    }
}

/// Keeps room on the device from being taken during a measurement, so that what is free and what is occupied belong to one
/// moment and nothing that fits is refused. `None` where the device is too busy for that: a disk that does not answer must
/// not hold up the measurement of the others.
fn soon(admission: &Mutex<()>) -> Option<MutexGuard<'_, ()>> {
    const ATTEMPTS: u32 = 50;
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 0..ATTEMPTS {
        match admission.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
        }
    }
    None
}

fn absent(settings: &PoolSettings, message: String) -> PoolReport {
    PoolReport {
        name: settings.name.clone(),
        path: settings.path.display().to_string(),
        state: PoolState::Absent,
        message,
        labels: settings.labels.clone(),
        media: settings.media.unwrap_or(Media::Unknown),
        device: String::new(),
        filesystem: String::new(),
        enforcement: Enforcement::None,
        enforcement_message: String::new(),
        image_filesystems: Vec::new(),
        total: Bytes::ZERO,
        free: Bytes::ZERO,
        reserve: Bytes::ZERO,
        promised: Bytes::ZERO,
        occupied: Bytes::ZERO,
        allocatable: Some(Bytes::ZERO),
    }
}
