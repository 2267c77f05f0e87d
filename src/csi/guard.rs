//! One call for a volume at a time.
//!
//! The specification lets a plugin answer `ABORTED` to a call for a volume that has one in flight; the caller then tries
//! again later. Nothing waits here, and nothing is held for other volumes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use snafu::Snafu;

/// A call for this volume is in flight.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display("another call for volume {volume} is in flight: try again when it has ended"))]
pub struct InFlight {
    volume: String,
}

/// The volumes that have a call in flight.
#[derive(Clone, Debug, Default)]
pub(super) struct Guards {
    volumes: Arc<Mutex<BTreeSet<String>>>,
}

/// Permission to work on a volume; given back when it is dropped.
#[derive(Debug)]
pub(super) struct Guard {
    guards: Guards,
    volume: String,
}

impl Guards {
    /// Permission to work on `volume`.
    ///
    /// # Errors
    /// [`InFlight`] while somebody else has it.
    pub(super) fn enter(&self, volume: &impl ToString) -> Result<Guard, InFlight> {
        let volume = volume.to_string();
        if self.lock().insert(volume.clone()) {
            Ok(Guard { guards: self.clone(), volume })
        } else {
            Err(InFlight { volume })
        }
    }

    /// The set is whole between any two operations on it, so one that a panic interrupted elsewhere is too.
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.guards.lock().remove(&self.volume);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_call_for_a_volume_is_turned_away_until_the_first_has_ended() {
        let guards = Guards::default();
        let first = guards.enter(&"a").expect("nobody is there");
        assert!(guards.enter(&"a").is_err());
        drop(first);
        assert!(guards.enter(&"a").is_ok());
    }

    #[test]
    fn volumes_do_not_hinder_each_other() {
        let guards = Guards::default();
        let _a = guards.enter(&"a").expect("nobody is there");
        assert!(guards.enter(&"b").is_ok());
    }

    #[test]
    fn a_call_that_panics_gives_its_volume_back() {
        let guards = Guards::default();
        let inside = guards.clone();
        let panicked = std::panic::catch_unwind(move || {
            let _guard = inside.enter(&"a").expect("nobody is there");
            panic!("on purpose");
        });
        assert!(panicked.is_err());
        assert!(guards.enter(&"a").is_ok());
    }
}
