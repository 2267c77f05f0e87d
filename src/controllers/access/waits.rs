//! Which branches wait for their owners, since when, and what was told of it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// A wait that is over before is none to tell of: an owner that is up acts within a second or two.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// While one lasts it is looked at again: the reason may be another.
pub(super) const AGAIN: Duration = Duration::from_secs(60);

/// When the same is told again while it lasts: events are kept for an hour by an API server's default, and whoever looks
/// later should find the reason, too.
const REMINDER: Duration = Duration::from_secs(30 * 60);

#[derive(Debug)]
struct Wait {
    volume: Arc<str>,
    since: Instant,
    /// It lasts longer than [`PATIENCE`].
    late: bool,
}

/// All waits.
#[derive(Debug, Default)]
pub(super) struct Waits {
    branches: BTreeMap<Arc<str>, Wait>,
    late: u64,
    /// Volume to what was told last, and when: of one branch at a time, however many wait.
    told: HashMap<Arc<str>, (Arc<str>, String, Instant)>,
}

/// What is to be done about a branch that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// People are to be told.
    pub(super) tell: bool,
    /// It is to be looked at again then.
    pub(super) again: Instant,
}

impl Waits {
    /// The branch waits, for this reason.
    pub(super) fn waits(&mut self, branch: &Arc<str>, volume: &Arc<str>, why: &str, now: Instant) -> Look {
        let new = || Wait { volume: volume.clone(), since: now, late: false };
        let wait = self.branches.entry(branch.clone()).or_insert_with(new);
        let due = wait.since + PATIENCE;
        if due > now {
            return Look { tell: false, again: due };
        }
        self.late += u64::from(!std::mem::replace(&mut wait.late, true));
        let tell = self
            .told
            .get(volume)
            .is_none_or(|(of, words, at)| (of == branch && words != why) || *at + REMINDER <= now);
        if tell {
            self.told.insert(volume.clone(), (branch.clone(), why.to_owned(), now));
        }
        Look { tell, again: now + AGAIN }
    }

    /// The branch does not wait; true where people were told that it does.
    pub(super) fn over(&mut self, branch: &str) -> bool {
        let Some(wait) = self.branches.remove(branch) else { return false };
        self.late -= u64::from(wait.late);
        let told = self.told.get(&wait.volume).is_some_and(|(of, ..)| **of == *branch);
        if told {
            // The next of its branches that waits may have another reason.
            self.told.remove(&wait.volume);
        }
        told
    }

    /// Branches that wait for longer than is usual.
    pub(super) const fn late(&self) -> u64 {
        self.late
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_wait_is_not_told_and_a_long_one_is_told_once_in_a_while() {
        let (mut waits, begin) = (Waits::default(), Instant::now());
        let (branch, volume): (Arc<str>, Arc<str>) = ("v-0".into(), "v".into());
        let mut look = |why: &str, after: Duration| waits.waits(&branch, &volume, why, begin + after);
        let second = Duration::from_secs(1);
        assert_eq!(look("x", Duration::ZERO), Look { tell: false, again: begin + PATIENCE });
        assert!(look("x", PATIENCE).tell);
        assert!(!look("x", PATIENCE + second).tell);
        assert!(look("y", PATIENCE + second * 2).tell, "another reason");
        assert!(!look("y", REMINDER).tell);
        assert!(look("y", REMINDER + PATIENCE + second * 2).tell, "a reminder");
        assert_eq!(waits.late(), 1);
        assert!(waits.over("v-0"));
        assert_eq!(waits.late(), 0);
        assert!(!waits.over("v-0"));
    }

    #[test]
    fn a_volume_with_many_branches_that_wait_is_told_of_once() {
        let (mut waits, begin) = (Waits::default(), Instant::now());
        let volume: Arc<str> = "v".into();
        let (a, b): (Arc<str>, Arc<str>) = ("v-0".into(), "v-1".into());
        for branch in [&a, &b] {
            waits.waits(branch, &volume, "x", begin);
        }
        assert!(waits.waits(&a, &volume, "x", begin + PATIENCE).tell);
        assert!(!waits.waits(&b, &volume, "y", begin + PATIENCE).tell);
        assert_eq!(waits.late(), 2);
        assert!(waits.over("v-0"));
        assert!(waits.waits(&b, &volume, "y", begin + PATIENCE + AGAIN).tell, "the next of them");
    }
}
