//! Which branch is worked on when: pure.

use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;

/// First pause after a failure; doubled with each further one.
const FIRST: Duration = Duration::from_millis(500);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(60);

/// Names in the order in which they are due.
#[derive(Debug, Default)]
pub(super) struct Queue {
    due: BTreeSet<(Instant, String)>,
    at: HashMap<String, Instant>,
    /// Being worked on, and what happened to them meanwhile.
    running: HashMap<String, Meanwhile>,
    attempts: HashMap<String, u32>,
}

/// What happened to one while it was worked on; the greater counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Meanwhile {
    Nothing,
    /// Its object changed, which the work itself may have done.
    ObjectChanged,
    /// Something that the work may not have seen.
    Other,
}

impl Queue {
    /// Something happened to it.
    pub(super) fn now(&mut self, name: &str) {
        self.happened(name, Meanwhile::Other);
    }

    /// Its object changed. As [`Queue::now`], unless it turns out that the work on it did that ([`Queue::calm`]).
    pub(super) fn object_changed(&mut self, name: &str) {
        self.happened(name, Meanwhile::ObjectChanged);
    }

    /// As [`Queue::now`], unless it is waiting already.
    pub(super) fn soon(&mut self, name: &str) {
        if !self.at.contains_key(name) && !self.running.contains_key(name) {
            self.now(name);
        }
    }

    /// It is to be tried again then; an event in between is earlier.
    pub(super) fn after(&mut self, name: &str, at: Instant) {
        *self.attempts.entry(name.to_owned()).or_default() += 1;
        if !self.at.contains_key(name) {
            self.schedule(name, at);
        }
    }

    /// The next one that is due and not being worked on; it is worked on from now.
    pub(super) fn next(&mut self, now: Instant) -> Option<String> {
        let (at, name) = self.due.first()?.clone();
        if at > now {
            return None;
        }
        self.due.remove(&(at, name.clone()));
        self.at.remove(&name);
        self.running.insert(name.clone(), Meanwhile::Nothing);
        Some(name)
    }

    /// When the next one is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// It was the work on it that changed its object.
    pub(super) fn calm(&mut self, name: &str) {
        if let Some(meanwhile) = self.running.get_mut(name).filter(|m| **m == Meanwhile::ObjectChanged) {
            *meanwhile = Meanwhile::Nothing;
        }
    }

    /// Work on it has ended; what happened to it meanwhile makes it due at once.
    pub(super) fn finished(&mut self, name: &str) {
        if self.running.remove(name).is_some_and(|meanwhile| meanwhile != Meanwhile::Nothing) {
            self.schedule(name, Instant::now());
        }
    }

    /// It needs no further attempt.
    pub(super) fn succeeded(&mut self, name: &str) {
        self.attempts.remove(name);
    }

    /// How often it failed in a row.
    pub(super) fn attempt(&self, name: &str) -> u32 {
        self.attempts.get(name).copied().unwrap_or(0)
    }

    /// It does not exist any more.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(at) = self.at.remove(name) {
            self.due.remove(&(at, name.to_owned()));
        }
        if let Some(meanwhile) = self.running.get_mut(name) {
            *meanwhile = Meanwhile::Nothing;
        }
        self.attempts.remove(name);
    }

    fn happened(&mut self, name: &str, what: Meanwhile) {
        let now = Instant::now();
        if let Some(meanwhile) = self.running.get_mut(name) {
            *meanwhile = what.max(*meanwhile);
        } else if self.at.get(name).is_none_or(|&old| now < old) {
            self.schedule(name, now);
        }
    }

    fn schedule(&mut self, name: &str, at: Instant) {
        if let Some(old) = self.at.insert(name.to_owned(), at) {
            self.due.remove(&(old, name.to_owned()));
        }
        self.due.insert((at, name.to_owned()));
    }
}

/// The pause before attempt number `attempt` + 1: doubled each time up to a minute, and up to a quarter more, different
/// for each branch, so that those which failed together do not return together.
pub(super) fn backoff(name: &str, attempt: u32) -> Duration {
    let pause = FIRST.saturating_mul(2_u32.saturating_pow(attempt.min(16))).min(LONGEST);
    let mut hasher = DefaultHasher::new();
    (name, attempt).hash(&mut hasher);
    let share = u32::try_from(hasher.finish() % 256).unwrap_or(0);
    pause + pause * share / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_branch_is_never_worked_on_twice_at_once_and_no_event_is_lost() {
        let mut queue = Queue::default();
        queue.now("a");
        queue.now("a");
        assert_eq!(queue.next(Instant::now()).as_deref(), Some("a"));
        assert_eq!(queue.next(Instant::now()), None);
        queue.now("a");
        assert_eq!(queue.next(Instant::now()), None, "still being worked on");
        queue.finished("a");
        assert_eq!(queue.next(Instant::now()).as_deref(), Some("a"), "what happened meanwhile");
        queue.finished("a");
        assert_eq!(queue.next(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_work_on_a_branch_wrote_hides_nothing_else_that_happened_meanwhile() {
        type Happens = fn(&mut Queue, &str);
        let (own, other): (Happens, Happens) = (Queue::object_changed, Queue::now);
        let cases =
            [(vec![own], false), (vec![other], true), (vec![own, other], true), (vec![other, own], true)];
        for (meanwhile, again) in cases {
            let mut queue = Queue::default();
            queue.now("a");
            queue.next(Instant::now());
            meanwhile.iter().for_each(|happens| happens(&mut queue, "a"));
            queue.calm("a");
            queue.finished("a");
            assert_eq!(queue.next(Instant::now()).is_some(), again);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_one_waits_and_an_event_ends_the_wait() {
        let mut queue = Queue::default();
        queue.now("a");
        queue.next(Instant::now());
        queue.finished("a");
        queue.after("a", Instant::now() + Duration::from_secs(9));
        assert_eq!((queue.next(Instant::now()), queue.attempt("a")), (None, 1));
        queue.soon("a");
        assert_eq!(queue.next(Instant::now()), None);
        queue.now("a");
        assert_eq!(queue.next(Instant::now()).as_deref(), Some("a"));
        queue.finished("a");
        queue.succeeded("a");
        assert_eq!((queue.attempt("a"), queue.due()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_deleted_one_is_forgotten() {
        let mut queue = Queue::default();
        queue.now("a");
        queue.next(Instant::now());
        queue.now("a");
        queue.remove("a");
        queue.finished("a");
        assert_eq!(queue.due(), None);
    }

    #[test]
    fn the_pause_doubles_up_to_a_minute_and_differs_between_branches() {
        for attempt in 0..64 {
            let pause = backoff("a", attempt);
            let plain = FIRST.saturating_mul(2_u32.saturating_pow(attempt.min(16))).min(LONGEST);
            assert!(pause >= plain && pause <= plain + plain / 4, "attempt {attempt}: {pause:?}");
        }
        let all: std::collections::HashSet<_> = (0..20).map(|n| backoff(&format!("b{n}"), 3)).collect();
        assert!(all.len() > 10);
    }
}
