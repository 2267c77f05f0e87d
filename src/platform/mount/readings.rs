//! One reading of the table of mounts for all who ask at the same time.
//!
//! The kernel writes the whole table for each reading, with thousands of lines where hundreds of volumes are mounted, and an
//! agent that starts asks for each branch. Whoever asks gets a reading that began after that, so it is never older than one of
//! its own; those who wait for one share the next.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::MountTable;
use crate::platform::Result;

/// Readings that are under way and awaited.
#[derive(Debug, Default)]
pub(in crate::platform) struct Readings {
    begun: AtomicUsize,
    asking: AtomicUsize,
    /// Held while one reads. The last reading and its number, as long as somebody asks for one.
    last: Mutex<Option<(usize, Arc<MountTable>)>>,
}

impl Readings {
    /// What `read` tells, called here or by another caller after this call began.
    ///
    /// # Errors
    /// Those of `read`; they are not shared.
    pub(super) fn next(&self, read: impl FnOnce() -> Result<MountTable>) -> Result<Arc<MountTable>> {
        // In this order: who is not counted yet has seen all readings that have begun.
        self.asking.fetch_add(1, Ordering::SeqCst);
        let seen = self.begun.load(Ordering::SeqCst);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.asking.fetch_sub(1, Ordering::SeqCst);
        let shared = last.take().filter(|(number, _)| *number > seen);
        let (number, table) = match shared {
            Some(shared) => shared,
            None => (self.begun.fetch_add(1, Ordering::SeqCst) + 1, Arc::new(read()?)),
        };
        if self.asking.load(Ordering::SeqCst) > 0 {
            *last = Some((number, table.clone()));
        }
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread::{self, ScopedJoinHandle};
    use std::time::Duration;

    use super::*;
    use crate::platform::HostError;

    type Answer = Result<Arc<MountTable>>;

    /// While one reads, which ends with `outcome`, `late` others ask; what it and they were told, and how often those read.
    fn asked_meanwhile(
        readings: &Readings,
        outcome: Result<MountTable>,
        late: usize,
    ) -> (Answer, Vec<Answer>, usize) {
        let (begun, end, count) = (Barrier::new(2), Barrier::new(2), AtomicUsize::new(0));
        let read = || {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(MountTable::default())
        };
        let told = |asking: ScopedJoinHandle<'_, Answer>| asking.join().unwrap();
        let (first, others) = thread::scope(|scope| {
            let first = scope.spawn(|| {
                readings.next(|| {
                    begun.wait();
                    end.wait();
                    outcome
                })
            });
            begun.wait();
            let others: Vec<_> = (0..late).map(|_| scope.spawn(|| readings.next(read))).collect();
            while readings.asking.load(Ordering::SeqCst) < late {
                thread::sleep(Duration::from_millis(1));
            }
            end.wait();
            (told(first), others.into_iter().map(told).collect())
        });
        (first, others, count.load(Ordering::SeqCst))
    }

    #[test]
    fn those_who_ask_during_a_reading_share_the_next_one() {
        let readings = Readings::default();
        let (first, others, count) = asked_meanwhile(&readings, Ok(MountTable::default()), 5);
        let (first, others): (_, Vec<_>) = (first.unwrap(), others.into_iter().map(Result::unwrap).collect());
        assert!(!Arc::ptr_eq(&first, &others[0]), "not the one that had begun when they asked");
        assert!(others.iter().all(|table| Arc::ptr_eq(table, &others[0])));
        assert_eq!(count, 1);
        drop(others);
        let alone = readings.next(|| Ok(MountTable::default())).unwrap();
        assert_eq!(Arc::strong_count(&alone), 1, "nothing is kept when nobody asks");
    }

    #[test]
    fn a_reading_that_fails_is_only_its_callers() {
        let reason = || HostError::Unexpected { subject: "mountinfo".into(), reason: "a test".into() };
        let (first, others, _) = asked_meanwhile(&Readings::default(), Err(reason()), 2);
        assert!(first.is_err());
        assert!(others.iter().all(Result::is_ok));
    }
}
