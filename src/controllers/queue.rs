//! Which objects are to be looked at, and when.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;

/// The first wait after a failure: longer than the conflict of two writers lasts.
const FIRST: Duration = Duration::from_millis(50);
/// The longest wait: what an operator accepts between having repaired something and seeing it.
const LONGEST: Duration = Duration::from_secs(60);

/// The wait after failure number `attempt` (from 1) of `name`: doubling, capped, and varied by up to a half so that
/// objects that failed together do not try again together. The variation comes from the name, so that it is the same
/// in each run.
pub(super) fn backoff(name: &str, attempt: u32) -> Duration {
    let full =
        FIRST.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX)).min(LONGEST);
    let mut hasher = DefaultHasher::new();
    (name, attempt).hash(&mut hasher);
    let share = u32::try_from(hasher.finish() % 1024).unwrap_or(0);
    full / 2 + full / 2 * share / 1024
}

/// Returns at that time; never where there is none.
pub(super) async fn until(due: Option<Instant>) {
    match due {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Objects by the time at which they are due; each is in it once, at its earliest time.
#[derive(Debug, Default)]
pub(super) struct Queue {
    due: BTreeSet<(Instant, String)>,
    at: HashMap<String, Instant>,
    failures: HashMap<String, u32>,
}

impl Queue {
    /// To be looked at at `at`, or earlier if that was said before.
    pub(super) fn add(&mut self, name: &str, at: Instant) {
        match self.at.get_mut(name) {
            Some(before) if *before <= at => {}
            Some(before) => {
                self.due.remove(&(*before, name.to_owned()));
                *before = at;
                self.due.insert((at, name.to_owned()));
            }
            None => {
                self.at.insert(name.to_owned(), at);
                self.due.insert((at, name.to_owned()));
            }
        }
    }

    /// To be looked at again after a failure; returns the wait.
    pub(super) fn add_failed(&mut self, name: &str, now: Instant) -> Duration {
        let failures = self.failures.entry(name.to_owned()).or_default();
        *failures = failures.saturating_add(1);
        let wait = backoff(name, *failures);
        self.add(name, now + wait);
        wait
    }

    /// The next failure of `name` is its first again.
    pub(super) fn succeeded(&mut self, name: &str) {
        self.failures.remove(name);
    }

    /// Takes an object that is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<String> {
        if self.next_due()? > now {
            return None;
        }
        let (_, name) = self.due.pop_first()?;
        self.at.remove(&name);
        Some(name)
    }

    /// When the next object is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_queued_once_at_its_earliest_time() {
        let now = Instant::now();
        let mut queue = Queue::default();
        queue.add("a", now + Duration::from_secs(5));
        queue.add("a", now);
        queue.add("a", now + Duration::from_secs(9));
        queue.add("b", now + Duration::from_secs(1));
        assert_eq!(queue.pop(now), Some("a".to_owned()));
        assert_eq!(queue.pop(now), None);
        assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
    }

    #[test]
    fn waits_grow_up_to_the_cap_and_differ_between_objects() {
        for attempt in 1..80 {
            let wait = backoff("a", attempt);
            assert!(wait >= FIRST / 2 && wait <= LONGEST, "{attempt}: {wait:?}");
        }
        assert!(backoff("a", 40) >= LONGEST / 2);
        assert_ne!(backoff("a", 9), backoff("b", 9));
        let mut queue = Queue::default();
        let now = Instant::now();
        let first = queue.add_failed("a", now);
        let many = (0..10).map(|_| queue.add_failed("a", now)).max();
        assert!(many > Some(first * 10));
        queue.succeeded("a");
        assert_eq!(queue.add_failed("a", now), first);
    }
}
