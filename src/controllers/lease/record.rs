//! Between the Lease of Kubernetes and what is decided on.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

use super::decide::Record;

/// Marks a lease that this program made. One without it, held by somebody, is foreign and left alone.
pub(super) const LABEL: (&str, &str) = ("union.io/lease", "leader");

/// What a lease says.
pub(super) fn read(lease: &Lease, default: Duration) -> Record {
    let labels = lease.metadata.labels.as_ref();
    let marked = labels.and_then(|labels| labels.get(LABEL.0)).is_some_and(|value| value == LABEL.1);
    let Some(spec) = &lease.spec else {
        return Record { holder: None, duration: default, stamp: String::new(), foreign: !marked };
    };
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).filter(|s| *s > 0);
    let renewed = spec.renew_time.as_ref().map(|MicroTime(at)| at.as_microsecond());
    Record {
        holder: spec.holder_identity.clone().filter(|holder| !holder.is_empty()),
        duration: seconds.map_or(default, Duration::from_secs),
        stamp: format!("{}/{}", spec.lease_transitions.unwrap_or_default(), renewed.unwrap_or_default()),
        foreign: !marked || spec.strategy.is_some(),
    }
}

/// The lease as `me` holds it from `now` on, made from the one that was read last; what others wrote in it stays.
pub(super) fn held(base: Option<&Lease>, name: &str, me: &str, now: Timestamp, duration: Duration) -> Lease {
    let mut lease = base.cloned().unwrap_or_else(|| Lease {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: None,
    });
    lease.metadata.labels.get_or_insert_default().insert(LABEL.0.to_owned(), LABEL.1.to_owned());
    let before = lease.spec.take().unwrap_or_default();
    let mine = before.holder_identity.as_deref() == Some(me);
    let transitions = match base {
        Some(_) if !mine => before.lease_transitions.unwrap_or_default().saturating_add(1),
        _ => before.lease_transitions.unwrap_or_default(),
    };
    // Others must see that it was renewed, also where a clock was set back or stands still.
    let next = before
        .renew_time
        .as_ref()
        .and_then(|MicroTime(at)| at.checked_add(jiff::Span::new().microseconds(1)).ok());
    let renewed = next.filter(|next| mine && *next > now).unwrap_or(now);
    lease.spec = Some(LeaseSpec {
        acquire_time: if mine { before.acquire_time } else { Some(MicroTime(now)) },
        holder_identity: Some(me.to_owned()),
        // The configuration allows whole seconds up to two minutes.
        lease_duration_seconds: Some(i32::try_from(duration.as_secs()).unwrap_or(i32::MAX)),
        lease_transitions: Some(transitions),
        renew_time: Some(MicroTime(renewed)),
        ..before
    });
    lease
}

/// The lease as nobody holds it.
pub(super) fn released(base: &Lease, now: Timestamp) -> Lease {
    let mut lease = base.clone();
    let spec = lease.spec.get_or_insert_default();
    spec.holder_identity = Some(String::new());
    spec.renew_time = Some(MicroTime(now));
    lease
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURATION: Duration = Duration::from_secs(12);

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn a_lease_that_is_held_renewed_and_released_says_so() {
        let made = held(None, "l", "a", at(1), DURATION);
        let record = read(&made, DURATION);
        assert_eq!((record.holder.as_deref(), record.duration, record.foreign), (Some("a"), DURATION, false));
        let renewed = held(Some(&made), "l", "a", at(6), DURATION);
        assert_ne!(read(&renewed, DURATION), record, "a renewal is a change");
        let spec = renewed.spec.clone().unwrap();
        assert_eq!((spec.acquire_time, spec.lease_transitions), (Some(MicroTime(at(1))), Some(0)));
        let free = released(&renewed, at(7));
        assert_eq!(read(&free, DURATION).holder, None);
        let taken = held(Some(&free), "l", "b", at(8), DURATION).spec.unwrap();
        assert_eq!((taken.acquire_time, taken.lease_transitions), (Some(MicroTime(at(8))), Some(1)));
    }

    #[test]
    fn a_renewal_is_a_change_whatever_the_clock_does() {
        let mut lease = held(None, "l", "a", at(100), DURATION);
        for now in [100, 100, 50, 50, 101] {
            let renewed = held(Some(&lease), "l", "a", at(now), DURATION);
            assert_ne!(read(&renewed, DURATION).stamp, read(&lease, DURATION).stamp, "at {now}");
            lease = renewed;
        }
    }

    #[test]
    fn what_others_wrote_in_it_stays_and_decides_nothing() {
        let mut lease = held(None, "l", "a", at(1), DURATION);
        let before = read(&lease, DURATION);
        lease.metadata.annotations.get_or_insert_default().insert("note".into(), "x".into());
        lease.metadata.resource_version = Some("77".into());
        assert_eq!(read(&lease, DURATION), before, "a note is no renewal");
        let renewed = held(Some(&lease), "l", "a", at(2), DURATION);
        assert_eq!(renewed.metadata.annotations.unwrap()["note"], "x");
        assert_eq!(
            renewed.metadata.resource_version.as_deref(),
            Some("77"),
            "never written without its version"
        );
    }

    #[test]
    fn a_lease_without_our_mark_is_foreign_and_odd_durations_are_not_believed() {
        let mut lease = held(None, "l", "a", at(1), DURATION);
        lease.metadata.labels = None;
        assert!(read(&lease, DURATION).foreign);
        for odd in [None, Some(0), Some(-5)] {
            lease.spec.as_mut().unwrap().lease_duration_seconds = odd;
            assert_eq!(read(&lease, DURATION).duration, DURATION);
        }
        assert_eq!(read(&Lease::default(), DURATION).holder, None);
    }
}
