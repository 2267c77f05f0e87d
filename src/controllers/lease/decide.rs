//! What to do about the lease. Pure: the time is an argument, and never another machine's.
//!
//! Safe by this order of moments, each by the clock of whoever needs it: a leader sends a renewal, the API server takes it,
//! a follower hears of the change. The leader's claim ends [`Timing::claim`] after the first, the follower may take over a
//! whole lease after the last. What the lease says of times is for people and is compared with no clock.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;

/// The longest that a leader which is not heard of is waited for, whatever its lease says: no configuration allows more,
/// so that a figure written by hand cannot keep the cluster without a leader.
const LONGEST: Duration = Duration::from_secs(120);

/// What a lease says, as far as it matters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Who leads; `None`: nobody, it was released.
    pub holder: Option<String>,
    /// How long the holder keeps the lead without being heard of.
    pub duration: Duration,
    /// Changes with each renewal, and means nothing else.
    pub stamp: String,
    /// It was not made by this program.
    pub foreign: bool,
}

/// What is known of the lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What it says, or said before it went; `None`: it was never seen.
    pub record: Option<Record>,
    /// It exists.
    pub exists: bool,
    /// When its record was last heard to change.
    pub changed: Instant,
    /// When the last write was sent that made or kept it this instance's, and that is known to have been done.
    pub renewed: Option<Instant>,
}

/// The moments in the life of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Without being heard of for so long, a leader is replaced.
    pub lease: Duration,
    /// A leader renews after this.
    pub renew: Duration,
    /// A leader that could not renew stops writing after this. What is left of the lease is for writes under way.
    pub claim: Duration,
    /// Followers take over this much apart at most.
    pub spread: Duration,
}

impl Timing {
    /// The moments for a lease of this duration: of 12 s, renewed after 5, written with for 9, taken over within 13.
    #[must_use]
    pub fn of(lease: Duration) -> Self {
        Self { lease, renew: lease * 5 / 12, claim: lease * 3 / 4, spread: lease / 12 }
    }
}

/// Whose the lease is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Nobody's.
    Free,
    /// This instance's.
    Mine,
    /// Another instance's.
    Others,
    /// Another's who was not heard of for the whole of it.
    Expired,
    /// Not one of this program's: it is left alone.
    Foreign,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write it as this instance's now: make, take or renew it.
    Write,
    /// Look again then, or when something is heard of it.
    Wait(Instant),
    /// Look again when something is heard of it.
    Listen,
}

/// What [`decide`] found, and what to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Whose it is.
    pub finding: Finding,
    /// What to do.
    pub step: Step,
}

/// What `me` is to do about the lease at `now`.
#[must_use]
pub fn decide(seen: &Seen, me: &str, now: Instant, timing: &Timing) -> Decision {
    let at = |finding, moment: Instant| Decision {
        finding,
        step: if moment <= now { Step::Write } else { Step::Wait(moment) },
    };
    let Some(record) = &seen.record else {
        return at(Finding::Free, now);
    };
    match &record.holder {
        Some(holder) if holder == me && seen.exists => {
            at(Finding::Mine, seen.renewed.map_or(now, |renewed| renewed + timing.renew))
        }
        // One that went under a claim that holds is made again at once: the others wait for the end of this claim.
        Some(holder) if holder == me && seen.renewed.is_some_and(|sent| now < sent + timing.claim) => {
            at(Finding::Mine, now)
        }
        Some(_) if record.foreign && seen.exists => {
            Decision { finding: Finding::Foreign, step: Step::Listen }
        }
        // One that was deleted is held all the same: its holder does not know yet, and may be another than was last seen.
        holder if holder.is_some() || !seen.exists => {
            let expires = seen.changed + record.duration.min(LONGEST);
            let finding = if expires <= now { Finding::Expired } else { Finding::Others };
            at(finding, expires + spread(me, &record.stamp, timing.spread))
        }
        _ => at(Finding::Free, seen.changed + spread(me, &record.stamp, timing.spread / 4)),
    }
}

/// A delay below `most` that differs between instances, and each time: a thousand followers must not all write at once.
fn spread(me: &str, stamp: &str, most: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    (me, stamp).hash(&mut hasher);
    let share = u32::try_from(hasher.finish() % 1000).unwrap_or_default();
    most * share / 1000
}

#[cfg(test)]
mod tests;
