//! What was told when, so that the same is not told again and again.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::decide::Told;
use crate::controllers::events::Notice;

/// When the same is told again while it lasts: events are kept for an hour by an API server's default, and whoever looks
/// later should find the reason, too.
const REMINDER: Duration = Duration::from_secs(30 * 60);

/// How often other words under the same reason are told at once: another node was tried, or a fault made way for the next.
const BURST: u32 = 5;

/// The pause between other words under the same reason after that: figures of free space change all the time.
const PAUSE: Duration = Duration::from_secs(5 * 60);

/// What is to be done with a notice.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Now {
    /// It is told.
    Tell,
    /// It is looked at again then.
    Later(Instant),
}

#[derive(Debug)]
struct Last {
    notice: Notice,
    at: Instant,
    burst: u32,
}

#[derive(Debug, Default)]
struct OfOne {
    last: HashMap<&'static str, Last>,
    /// What is so and not told yet, since when.
    since: Option<(&'static str, Instant)>,
}

/// What was told of each volume.
#[derive(Debug, Default)]
pub(super) struct Telling(HashMap<String, OfOne>);

impl Telling {
    /// Whether it is to be told now; then it counts as told.
    pub(super) fn weigh(&mut self, name: &str, told: &Told, now: Instant) -> Now {
        let one = self.0.entry(name.to_owned()).or_default();
        let since = match one.since {
            Some((reason, since)) if reason == told.notice.reason => since,
            _ => now,
        };
        one.since = Some((told.notice.reason, since));
        if since + told.after > now {
            return Now::Later(since + told.after);
        }
        match one.last.get_mut(told.notice.reason) {
            None => {
                one.last.insert(told.notice.reason, Last { notice: told.notice.clone(), at: now, burst: 1 });
                Now::Tell
            }
            Some(last) => {
                let same = last.notice == told.notice;
                let due = match same {
                    true => last.at + REMINDER,
                    false if last.burst < BURST => now,
                    false => last.at + PAUSE,
                };
                if due > now {
                    return Now::Later(due);
                }
                let rested = last.at + PAUSE <= now;
                *last = Last {
                    notice: told.notice.clone(),
                    at: now,
                    burst: if rested { 1 } else { last.burst.saturating_add(1) },
                };
                Now::Tell
            }
        }
    }

    /// Nothing is to be told of it now.
    pub(super) fn at_rest(&mut self, name: &str) {
        if let Some(one) = self.0.get_mut(name) {
            one.since = None;
        }
    }

    /// It is gone.
    pub(super) fn forget(&mut self, name: &str) {
        self.0.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::super::decide::About;
    use super::*;

    fn told(reason: &'static str, message: &str, after: Duration) -> Told {
        Told { about: About::Claim, notice: Notice::warning(reason, message), after }
    }

    #[test]
    fn the_same_words_are_told_once_and_again_after_half_an_hour() {
        let (mut telling, start) = (Telling::default(), Instant::now());
        let full = told("Full", "no room", Duration::ZERO);
        assert_eq!(telling.weigh("v", &full, start), Now::Tell);
        assert_eq!(telling.weigh("v", &full, start), Now::Later(start + REMINDER));
        assert_eq!(telling.weigh("w", &full, start), Now::Tell, "another volume");
        assert_eq!(telling.weigh("v", &full, start + REMINDER), Now::Tell);
    }

    #[test]
    fn two_reasons_that_alternate_are_each_told_once() {
        let (mut telling, now) = (Telling::default(), Instant::now());
        let (full, trying) = (told("Full", "no room", Duration::ZERO), told("Trying", "…", Duration::ZERO));
        let tells = (0..100).map(|n| if n % 2 == 0 { &full } else { &trying });
        assert_eq!(tells.filter(|told| telling.weigh("v", told, now) == Now::Tell).count(), 2);
    }

    #[test]
    fn figures_that_change_all_the_time_are_told_a_few_times_and_then_every_five_minutes() {
        let (mut telling, start) = (Telling::default(), Instant::now());
        let mut tells = 0;
        for second in 0..3600 {
            let notice = told("Full", &format!("{second} bytes"), Duration::ZERO);
            tells += u32::from(telling.weigh("v", &notice, start + Duration::from_secs(second)) == Now::Tell);
        }
        assert!((12..=80).contains(&tells), "{tells}");
    }

    #[test]
    fn what_passes_by_itself_is_not_told() {
        let (mut telling, start) = (Telling::default(), Instant::now());
        let (patience, second) = (Duration::from_secs(60), Duration::from_secs(1));
        let slow = told("Slow", "still there", patience);
        assert_eq!(telling.weigh("v", &slow, start), Now::Later(start + patience));
        telling.at_rest("v");
        assert_eq!(telling.weigh("v", &slow, start + patience), Now::Later(start + patience + patience));
        assert_eq!(
            telling.weigh("v", &slow, start + patience + second),
            Now::Later(start + patience + patience)
        );
        assert_eq!(telling.weigh("v", &slow, start + patience + patience), Now::Tell);
    }
}
