//! What is to be done about one object, and when; pure.

use std::time::Duration;

use tokio::time::Instant;

use super::object::{Figures, Found};
use crate::domain::Bytes;

/// Differences up to this are small, as are those up to 1 % of what is published.
const STEP: Bytes = Bytes::mib(64);

/// How long a node's room that rises is watched before it is told: what many deletions free is told once.
const RAISE: Duration = Duration::from_secs(3);

/// How long a small difference is left: about as often as a node tells of its pools, so that a disk that others write to
/// costs one write in this time, and a claim that needs the last bytes does not wait for ever.
const SMALL: Duration = Duration::from_secs(5 * 60);

/// What shrinks goes before so much of other work: a new class of 1,000 nodes, several times.
const BEFORE_OTHERS: Duration = Duration::from_secs(30);

/// How often one object is written at most.
const AGAIN: Duration = Duration::from_secs(1);

/// How often it is told at most that there is less, though still something: a burst of claims is told in steps. Who is
/// sent to where there is no room any more meanwhile is sent on.
const LESS_AGAIN: Duration = Duration::from_secs(5);

/// What is to be done about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It is as it should be.
    Nothing,
    /// It has someone else's content under our name.
    Foreign,
    /// To be written.
    Write(Urgency),
    /// To be deleted.
    Delete,
}

/// How soon a difference is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// There is nothing any more, or there was nothing; or it was edited.
    Now,
    /// There is less room than is told, which sends pods to where they do not fit.
    Less,
    /// Nothing was told.
    New,
    /// There is more.
    Raise,
    /// It hardly differs.
    Small,
}

/// What to do about what was found under a name for which these figures are wanted; `None`: no object is wanted.
pub(super) fn decide(wanted: Option<Figures>, found: Option<&Found>) -> Step {
    match (wanted, found) {
        (None, None | Some(Found::Foreign)) => Step::Nothing,
        (Some(_), Some(Found::Foreign)) => Step::Foreign,
        (None, Some(Found::Own(_))) => Step::Delete,
        // Class and node cannot be changed; what is deleted is made anew.
        (Some(_), Some(Found::Own(published))) if !published.fits => Step::Delete,
        (Some(_), None) => Step::Write(Urgency::New),
        (Some(wanted), Some(Found::Own(published))) => match published.figures {
            None => Step::Write(Urgency::Now),
            Some(told) if told == wanted => Step::Nothing,
            Some(told) => Step::Write(urgency(told, wanted)),
        },
    }
}

fn urgency(told: Figures, wanted: Figures) -> Urgency {
    let pairs = [(told.capacity, wanted.capacity), (told.maximum, wanted.maximum)];
    let crosses = |(old, new): &(Bytes, Bytes)| old.is_zero() != new.is_zero();
    let step = |old: Bytes| STEP.max(Bytes::new(old.get() / 100));
    if pairs.iter().any(crosses) {
        Urgency::Now
    } else if pairs.iter().any(|(old, new)| old.saturating_sub(*new) > step(*old)) {
        Urgency::Less
    } else if pairs.iter().any(|(old, new)| new.saturating_sub(*old) > step(*old)) {
        Urgency::Raise
    } else {
        Urgency::Small
    }
}

/// When a difference is to be told that is there since `since`, where the object was written last at `last`.
pub(super) fn due(urgency: Urgency, since: Instant, last: Option<Instant>) -> Instant {
    let early = since.checked_sub(BEFORE_OTHERS).unwrap_or(since);
    let (at, again) = match urgency {
        Urgency::Now => (early, AGAIN),
        Urgency::Less => (early, LESS_AGAIN),
        Urgency::New => (since, AGAIN),
        Urgency::Raise => (since + RAISE, AGAIN),
        Urgency::Small => (since + SMALL, AGAIN),
    };
    last.map_or(at, |last| at.max(last + again))
}

/// Limits all writes together: so many at once, and then one after each pause.
#[derive(Debug)]
pub(super) struct Pace {
    /// When the next would be due, had all before come one after the other.
    next: Instant,
}

impl Pace {
    /// Between two writes: 200 in a second, so that a new class is told of 1,000 nodes in five, and other work of the API
    /// server is not held up.
    const PAUSE: Duration = Duration::from_millis(5);
    /// What may come at once, in pauses: a hundred writes.
    const AHEAD: Duration = Duration::from_millis(500);

    pub(super) fn new(now: Instant) -> Self {
        Self { next: now }
    }

    /// When the next write may be made.
    pub(super) fn allowed(&self) -> Instant {
        self.next.checked_sub(Self::AHEAD).unwrap_or(self.next)
    }

    /// A write is made.
    pub(super) fn took(&mut self, now: Instant) {
        self.next = self.next.max(now) + Self::PAUSE;
    }
}

#[cfg(test)]
mod tests {
    use super::super::object::Published;
    use super::*;

    fn figures(mib: u64) -> Figures {
        Figures { capacity: Bytes::mib(mib), maximum: Bytes::mib(mib) }
    }

    fn found(figures: Option<Figures>) -> Found {
        Found::Own(Published { uid: "u".into(), version: 1, figures, fits: true })
    }

    fn told(old: u64, new: u64) -> Step {
        decide(Some(figures(new)), Some(&found(Some(figures(old)))))
    }

    #[test]
    fn a_difference_up_to_a_step_is_small_and_more_is_told_less_room_first() {
        // Below 6.4 GiB a step is 64 MiB, above it is 1 %.
        for (old, new, urgency) in [
            (1000, 1064, Urgency::Small),
            (1000, 936, Urgency::Small),
            (1000, 1065, Urgency::Raise),
            (1000, 935, Urgency::Less),
            (100_000, 101_000, Urgency::Small),
            (100_000, 99_000, Urgency::Small),
            (100_000, 101_001, Urgency::Raise),
            (100_000, 98_999, Urgency::Less),
        ] {
            assert_eq!(told(old, new), Step::Write(urgency), "{old} -> {new}");
        }
        assert_eq!(told(1000, 1000), Step::Nothing);
    }

    #[test]
    fn the_last_and_the_first_bytes_are_told_at_once() {
        assert_eq!(told(0, 1), Step::Write(Urgency::Now));
        assert_eq!(told(1, 0), Step::Write(Urgency::Now));
    }

    #[test]
    fn one_figure_that_shrinks_is_enough() {
        let old = figures(1000);
        let new = Figures { maximum: Bytes::mib(500), capacity: Bytes::mib(2000) };
        assert_eq!(decide(Some(new), Some(&found(Some(old)))), Step::Write(Urgency::Less));
    }

    #[test]
    fn a_minute_of_claims_one_after_the_other_is_told_in_a_dozen_steps_and_the_end_of_room_within_a_second() {
        let start = Instant::now();
        let (mut last, mut since, mut writes) = (None, None, 0);
        for tenth in 0..600 {
            let now = start + Duration::from_millis(100 * tenth);
            let first = *since.get_or_insert(now);
            if due(Urgency::Less, first, last) <= now {
                (last, since, writes) = (Some(now), None, writes + 1);
            }
        }
        assert_eq!(writes, 12);
        let last = last.unwrap();
        assert_eq!(due(Urgency::Now, last, Some(last)), last + AGAIN);
    }

    #[test]
    fn what_is_missing_or_was_edited_is_written_and_what_is_too_much_deleted() {
        assert_eq!(decide(Some(Figures::NONE), None), Step::Write(Urgency::New), "zero is told too");
        assert_eq!(decide(Some(figures(1)), Some(&found(None))), Step::Write(Urgency::Now));
        assert_eq!(decide(None, Some(&found(None))), Step::Delete);
        let other = Found::Own(Published { uid: "u".into(), version: 1, figures: None, fits: false });
        assert_eq!(decide(Some(figures(1)), Some(&other)), Step::Delete);
        assert_eq!(decide(None, None), Step::Nothing);
    }

    #[test]
    fn what_is_foreign_is_never_touched() {
        assert_eq!(decide(None, Some(&Found::Foreign)), Step::Nothing);
        assert_eq!(decide(Some(figures(1)), Some(&Found::Foreign)), Step::Foreign);
    }

    #[test]
    fn one_object_is_written_once_a_second_at_most_and_raises_wait() {
        let now = Instant::now();
        assert_eq!(due(Urgency::New, now, None), now);
        assert!(due(Urgency::Now, now, None) < now, "before what is new");
        assert_eq!(due(Urgency::Now, now, Some(now)), now + AGAIN);
        assert_eq!(due(Urgency::Raise, now, Some(now)), now + RAISE);
        assert_eq!(due(Urgency::Small, now, None), now + SMALL);
    }

    #[test]
    fn a_hundred_writes_go_at_once_and_then_two_hundred_a_second() {
        let now = Instant::now() + Duration::from_secs(60);
        let mut pace = Pace::new(now);
        let mut at_once = 0;
        while pace.allowed() <= now {
            pace.took(now);
            at_once += 1;
        }
        assert_eq!(at_once, 101);
        let later = now + Duration::from_secs(1);
        let mut then = 0;
        while pace.allowed() <= later {
            pace.took(now);
            then += 1;
        }
        assert_eq!(then, 200);
        let idle = now + Duration::from_secs(3600);
        let mut after = 0;
        while pace.allowed() <= idle {
            pace.took(idle);
            after += 1;
        }
        assert_eq!(after, 101, "a long rest saves nothing up");
    }
}
