//! Going on where an earlier agent stopped.

use super::Core;
use super::error::VolumeError;
use super::parallel::parallel;
use super::record::Phase;
use super::repair::Outcome;
use super::slot::Slot;
use super::view::View;
use crate::domain::VolumeId;

/// Volumes looked at at the same time: mostly questions to the kernel, seldom a start of mergerfs.
const PARALLEL_VOLUMES: usize = 16;

impl Core {
    pub(super) fn recover(&self) {
        let volumes = match self.records.volumes() {
            Ok(volumes) => volumes,
            Err(error) => {
                tracing::error!(error = %error, "the volumes on record cannot be listed: none is adopted");
                return;
            }
        };
        // One reading for all: nothing else changes the volumes' mounts now, and each volume's repair reads anew.
        let view = match self.host.mounts() {
            Ok(mounts) => View::new(mounts),
            Err(error) => {
                tracing::error!(error = %error, "the kernel's mounts cannot be read: no volume is adopted");
                return;
            }
        };
        let adopted = parallel(&volumes, PARALLEL_VOLUMES, |volume| {
            let slot = self.slots.of(volume);
            // Requests are not served yet, and the healer does not run: nobody else holds it for long.
            let _guard = slot.lock.blocking_lock();
            self.recover_volume(&slot, volume, &view)
                .inspect_err(|error| {
                    slot.hints().trouble = Some(error.to_string());
                    tracing::error!(volume.id = %volume, error = %error, "volume cannot be adopted yet");
                })
                .is_ok()
        });
        let count = adopted.iter().filter(|ok| **ok).count();
        if !volumes.is_empty() {
            tracing::info!(volumes.adopted = count, volumes.total = volumes.len(), "volumes adopted");
        }
    }

    fn recover_volume(&self, slot: &Slot, volume: &VolumeId, view: &View) -> Result<(), VolumeError> {
        let failed = |action| move |e| VolumeError::host(volume, action, e);
        let Some(record) = self.records.load(volume).map_err(failed("read its record"))? else {
            return self.clear(volume);
        };
        if record.boot_id == self.boot_id {
            self.recall_silence(slot, &record);
            if record.phase == Phase::Staging {
                // Nobody may ask for it again, and until somebody did, what it attached of other nodes would stay.
                let mut record = record;
                return self.take_back(slot, &mut record);
            }
            return match self.heal(slot, volume, Some(view)) {
                Outcome::Troubled { reason, .. } => {
                    Err(VolumeError::Incomplete { volume: volume.clone(), reason })
                }
                Outcome::Fine | Outcome::Repaired | Outcome::Gone => Ok(()),
            };
        }
        let mut record = self.of_this_boot(record);
        if record.phase != Phase::Staged || record.publishes.is_empty() {
            // Nothing of it is mounted; the orchestrator asks for it again when it needs it.
            return self.take_back(slot, &mut record);
        }
        record.restoring = true;
        self.save(&record)?;
        match self.heal(slot, volume, Some(view)) {
            Outcome::Troubled { reason, .. } => {
                Err(VolumeError::Incomplete { volume: volume.clone(), reason })
            }
            Outcome::Fine | Outcome::Repaired | Outcome::Gone => Ok(()),
        }
    }
}
