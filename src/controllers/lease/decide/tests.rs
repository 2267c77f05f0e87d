use proptest::prelude::*;

use super::*;

const ME: &str = "n1_a";
const OTHER: &str = "n2_b";

fn timing() -> Timing {
    Timing::of(Duration::from_secs(12))
}

fn record(holder: Option<&str>) -> Record {
    Record {
        holder: holder.map(str::to_owned),
        duration: Duration::from_secs(12),
        stamp: "0/1".to_owned(),
        foreign: false,
    }
}

fn seen(holder: Option<&str>, changed: Instant) -> Seen {
    Seen { record: Some(record(holder)), exists: true, changed, renewed: None }
}

fn after(start: Instant, seen: &Seen, seconds: f64) -> (Finding, Step) {
    let decision = decide(seen, ME, start + Duration::from_secs_f64(seconds), &timing());
    (decision.finding, decision.step)
}

#[test]
fn a_lease_that_was_never_there_is_made_at_once() {
    let start = Instant::now();
    let none = Seen { record: None, exists: false, changed: start, renewed: None };
    assert_eq!(after(start, &none, 0.0), (Finding::Free, Step::Write));
}

#[test]
fn a_lease_that_was_released_is_taken_within_a_quarter_of_a_second() {
    let start = Instant::now();
    assert_eq!(after(start, &seen(None, start), 0.25), (Finding::Free, Step::Write));
}

#[test]
fn a_lease_that_went_may_be_held_by_whom_nobody_here_heard_of_and_is_waited_for() {
    let start = Instant::now();
    for last in [None, Some("another"), Some(ME)] {
        let gone = Seen { exists: false, ..seen(last, start) };
        assert!(matches!(after(start, &gone, 11.9), (Finding::Others, Step::Wait(_))), "{last:?}");
        assert_eq!(after(start, &gone, 13.0), (Finding::Expired, Step::Write), "{last:?}");
    }
    let mine = Seen { exists: false, renewed: Some(start), ..seen(Some(ME), start) };
    assert_eq!(after(start, &mine, 8.9), (Finding::Mine, Step::Write), "its claim holds");
    assert!(matches!(after(start, &mine, 9.0), (Finding::Others, Step::Wait(_))), "it has run out");
}

#[test]
fn a_leader_renews_after_five_seconds_and_waits_until_then() {
    let start = Instant::now();
    let mine = Seen { renewed: Some(start), ..seen(Some(ME), start) };
    assert_eq!(after(start, &mine, 1.0), (Finding::Mine, Step::Wait(start + Duration::from_secs(5))));
    assert_eq!(after(start, &mine, 5.0), (Finding::Mine, Step::Write));
    assert_eq!(after(start, &mine, 500.0), (Finding::Mine, Step::Write), "late is better than never");
}

#[test]
fn a_lease_that_names_this_instance_without_its_knowing_is_renewed_before_it_counts() {
    let start = Instant::now();
    assert_eq!(after(start, &seen(Some(ME), start), 0.0), (Finding::Mine, Step::Write));
}

#[test]
fn a_leader_whose_lease_was_deleted_makes_it_again_at_once() {
    let start = Instant::now();
    let gone = Seen { exists: false, renewed: Some(start), ..seen(Some(ME), start) };
    assert_eq!(after(start, &gone, 0.1), (Finding::Mine, Step::Write));
}

#[test]
fn another_leader_is_replaced_when_a_whole_lease_passed_without_a_change_and_within_fifteen_seconds() {
    let start = Instant::now();
    for exists in [true, false] {
        let other = Seen { exists, ..seen(Some(OTHER), start) };
        let (finding, step) = after(start, &other, 11.9);
        assert_eq!(finding, Finding::Others);
        assert!(matches!(step, Step::Wait(at) if at >= start + Duration::from_secs(12)), "{step:?}");
        assert_eq!(after(start, &other, 13.0), (Finding::Expired, Step::Write));
    }
}

#[test]
fn the_holder_says_how_long_its_lease_is_up_to_what_can_be_configured() {
    let start = Instant::now();
    let mut long = seen(Some(OTHER), start);
    long.record.as_mut().unwrap().duration = Duration::from_secs(60);
    assert_eq!(after(start, &long, 59.0).0, Finding::Others);
    assert_eq!(after(start, &long, 61.0), (Finding::Expired, Step::Write));
    long.record.as_mut().unwrap().duration = Duration::from_secs(1 << 40);
    assert_eq!(after(start, &long, 121.0), (Finding::Expired, Step::Write));
}

#[test]
fn a_foreign_lease_is_left_alone_for_as_long_as_it_is_held() {
    let start = Instant::now();
    let mut foreign = seen(Some("someone"), start);
    foreign.record.as_mut().unwrap().foreign = true;
    for seconds in [0.0, 20.0, 1e6] {
        assert_eq!(after(start, &foreign, seconds), (Finding::Foreign, Step::Listen));
    }
    foreign.record.as_mut().unwrap().holder = None;
    assert_eq!(
        after(start, &foreign, 1.0),
        (Finding::Free, Step::Write),
        "one made beforehand by an administrator"
    );
}

#[test]
fn followers_take_over_apart_from_each_other() {
    let start = Instant::now();
    let moments: std::collections::BTreeSet<Duration> = (0..100)
        .map(|n| match decide(&seen(Some(OTHER), start), &format!("n{n}"), start, &timing()).step {
            Step::Wait(at) => at - start,
            step => panic!("{step:?}"),
        })
        .collect();
    assert!(moments.len() > 80, "{}", moments.len());
}

fn any_seen() -> impl Strategy<Value = (Seen, Duration)> {
    let holder = prop_oneof![Just(None), Just(Some(ME)), Just(Some(OTHER)), Just(Some("x"))];
    let moment = || (0_u64..400_000).prop_map(Duration::from_millis);
    (
        proptest::option::of((holder, 1_u64..1_000_000, any::<u32>(), any::<bool>())),
        any::<bool>(),
        moment(),
        proptest::option::of(moment()),
        moment(),
    )
        .prop_map(|(record, exists, changed, renewed, now)| {
            let start = Instant::now();
            let record = record.map(|(holder, seconds, stamp, foreign)| Record {
                holder: holder.map(str::to_owned),
                duration: Duration::from_secs(seconds),
                stamp: stamp.to_string(),
                foreign,
            });
            let exists = exists && record.is_some();
            let seen =
                Seen { record, exists, changed: start + changed, renewed: renewed.map(|at| start + at) };
            (seen, now)
        })
}

proptest! {
    #[test]
    fn whatever_is_seen_the_wait_ends_and_nothing_held_is_taken((seen, now) in any_seen()) {
        let now = seen.changed.checked_sub(Duration::from_secs(400)).unwrap_or(seen.changed) + now;
        let timing = timing();
        let decision = decide(&seen, ME, now, &timing);
        let holder = seen.record.as_ref().and_then(|r| r.holder.as_deref());
        match decision.step {
            Step::Write if holder.is_some_and(|h| h != ME) => {
                let duration = seen.record.as_ref().unwrap().duration.min(Duration::from_secs(120));
                prop_assert!(now >= seen.changed + duration, "taken from a holder that may write");
                prop_assert!(!(seen.exists && seen.record.as_ref().unwrap().foreign));
            }
            Step::Write => {}
            Step::Wait(at) => {
                prop_assert!(at > now, "a wait for the past never ends");
                // Nothing else happening, the next look writes.
                prop_assert_eq!(decide(&seen, ME, at, &timing).step, Step::Write);
            }
            Step::Listen => prop_assert_eq!(decision.finding, Finding::Foreign),
        }
    }

    /// A leader that is not heard of has stopped writing before anyone takes over, whatever the three moments are:
    /// its write was sent, the server took it, the follower heard of it.
    #[test]
    fn a_claim_ends_before_the_next_begins(seconds in 6_u64..=120, took in 0_u64..60_000, heard in 0_u64..600_000) {
        let timing = Timing::of(Duration::from_secs(seconds));
        let sent = Instant::now();
        let changed = sent + Duration::from_millis(took) + Duration::from_millis(heard);
        let seen = Seen {
            record: Some(Record { duration: timing.lease, ..record(Some(OTHER)) }),
            exists: true,
            changed,
            renewed: None,
        };
        let Step::Wait(takes) = decide(&seen, ME, changed, &timing).step else { panic!("taken at once") };
        prop_assert!(takes >= sent + timing.claim + timing.lease / 4);
        prop_assert!(timing.renew + timing.lease / 6 < timing.claim, "one renewal may hang");
        prop_assert!(takes <= changed + timing.lease + timing.spread);
    }
}
