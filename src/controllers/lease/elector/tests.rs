//! Electors against an API server in memory, in time that passes only when all wait.

mod server;

use super::*;
use server::{Link, Server};

const LEASE_DURATION: Duration = Duration::from_secs(12);

/// An instance: its elector, what stops it, and every claim it ever had.
struct Instance {
    link: Link,
    leadership: watch::Receiver<Leadership>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
    claims: Vec<Claim>,
    terms: u64,
}

impl Instance {
    fn start(server: &Server, name: &str) -> Self {
        Self::with_clock(server, name, Timestamp::now)
    }

    fn with_clock(server: &Server, name: &str, clock: fn() -> Timestamp) -> Self {
        let link = Link::default();
        let client = server.client(&link);
        let elector = Elector::new(client, "union", identity(name), LEASE_DURATION, clock);
        let (leadership, shutdown) = (elector.leadership(), CancellationToken::new());
        let task = tokio::spawn(elector.run(shutdown.clone()));
        Self { link, leadership, shutdown, task, claims: Vec::new(), terms: 0 }
    }

    /// Whether any claim that it ever had is held.
    fn leads(&mut self) -> bool {
        let now = self.leadership.borrow_and_update().clone();
        if now.terms > self.terms {
            self.terms = now.terms;
            self.claims.extend(now.claim);
        }
        self.claims.iter().any(|claim| claim.held().is_ok())
    }

    fn holder(&self) -> Option<String> {
        self.leadership.borrow().holder.clone()
    }

    fn problem(&self) -> Option<String> {
        self.leadership.borrow().problem.clone()
    }
}

/// Lets time pass, and checks all the while that no two lead. Which leads at the end.
async fn pass(instances: &mut [Instance], seconds: f64) -> Option<usize> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    loop {
        let leaders: Vec<usize> = (0..instances.len()).filter(|i| instances[*i].leads()).collect();
        assert!(leaders.len() <= 1, "{leaders:?} lead at once");
        if Instant::now() >= end {
            return leaders.first().copied();
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn instances(server: &Server, n: usize) -> Vec<Instance> {
    (0..n).map(|i| Instance::start(server, &format!("n{i}"))).collect()
}

#[tokio::test(start_paused = true)]
async fn one_of_many_leads_and_goes_on_leading_and_the_others_ask_nothing() {
    let server = Server::default();
    let mut all = instances(&server, 5);
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    let before = server.requests();
    assert_eq!(pass(&mut all, 120.0).await, Some(leader));
    assert_eq!(server.requests() - before, 24, "a renewal every five seconds, and nothing else");
    assert_eq!(server.transitions(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_killed_leader_is_replaced_within_fifteen_seconds() {
    let server = Server::default();
    let mut all = instances(&server, 3);
    for _ in 0..5 {
        let leader = pass(&mut all, 20.0).await.expect("a leader");
        all[leader].task.abort();
        let next = pass(&mut all, 14.0).await.expect("the next");
        assert_ne!(next, leader);
        all[leader] = Instance::start(&server, "again");
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_is_told_to_stop_is_replaced_at_once() {
    let server = Server::default();
    let mut all = instances(&server, 3);
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    all[leader].shutdown.cancel();
    let next = pass(&mut all, 0.5).await.expect("the next");
    assert_ne!(next, leader);
    assert!(all[leader].task.is_finished());
    assert_eq!(server.transitions(), 1);
}

#[tokio::test(start_paused = true)]
async fn clocks_that_differ_by_hours_change_nothing() {
    let server = Server::default();
    let clocks: [fn() -> Timestamp; 3] = [
        || Timestamp::from_second(1_000_000_000).unwrap(),
        || Timestamp::from_second(2_000_000_000).unwrap(),
        Timestamp::now,
    ];
    let mut all: Vec<_> = clocks
        .into_iter()
        .enumerate()
        .map(|(i, c)| Instance::with_clock(&server, &format!("n{i}"), c))
        .collect();
    // A clock that stands still makes renewals that look alike.
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    assert_eq!(pass(&mut all, 60.0).await, Some(leader));
    all[leader].task.abort();
    assert!(pass(&mut all, 14.0).await.is_some_and(|next| next != leader));
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_cannot_write_stops_before_another_begins_and_returns_as_a_follower() {
    let server = Server::default();
    let mut all = instances(&server, 2);
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    all[leader].link.hang(true);
    assert_eq!(pass(&mut all, 9.5).await, None, "one has stopped, the other has not begun");
    let next = pass(&mut all, 6.0).await.expect("the other");
    assert_ne!(next, leader);
    assert!(all[leader].problem().is_some_and(|problem| problem.contains("no answer")));
    all[leader].link.hang(false);
    assert_eq!(pass(&mut all, 60.0).await, Some(next));
    assert_eq!(all[leader].problem(), None);
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_is_away_for_a_minute_ends_the_term_and_the_same_or_another_goes_on() {
    let server = Server::default();
    let mut all = instances(&server, 3);
    pass(&mut all, 2.0).await.expect("a leader");
    all.iter().for_each(|one| one.link.refuse(true));
    assert_eq!(pass(&mut all, 60.0).await, None);
    all.iter().for_each(|one| one.link.refuse(false));
    assert!(pass(&mut all, 10.0).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_deleted_by_hand_is_made_again_by_who_leads() {
    let server = Server::default();
    let mut all = instances(&server, 3);
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    server.delete();
    assert_eq!(pass(&mut all, 30.0).await, Some(leader));
    // Deleted while its holder is dead, it is taken when the holder's time is over.
    all[leader].task.abort();
    server.delete();
    assert!(pass(&mut all, 14.0).await.is_some_and(|next| next != leader));
}

#[tokio::test(start_paused = true)]
async fn a_foreign_lease_is_left_alone_and_told_until_it_is_deleted() {
    let server = Server::default();
    server.put(serde_json::json!({"holderIdentity": "someone", "leaseDurationSeconds": 1}));
    let before = server.lease();
    let mut all = instances(&server, 2);
    assert_eq!(pass(&mut all, 300.0).await, None);
    assert_eq!(server.lease(), before, "nobody wrote it");
    let problem = all[0].problem().expect("it is told");
    assert!(problem.contains("held by someone"), "{problem}");
    server.delete();
    assert!(pass(&mut all, 14.0).await.is_some());
    assert_eq!(all[0].problem(), None);
}

#[tokio::test(start_paused = true)]
async fn a_note_on_the_lease_neither_ends_a_term_nor_keeps_a_dead_leader_alive() {
    let server = Server::default();
    let mut all = instances(&server, 2);
    let leader = pass(&mut all, 2.0).await.expect("a leader");
    for n in 0..20 {
        server.annotate(n);
        assert_eq!(pass(&mut all, 1.0).await, Some(leader));
    }
    all[leader].task.abort();
    for n in 0..14 {
        server.annotate(n + 100);
        pass(&mut all, 1.0).await;
    }
    assert!(all.iter_mut().any(Instance::leads));
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_is_lost_is_found_out_and_kept() {
    let server = Server::default();
    let mut all = instances(&server, 1);
    all[0].link.lose_answers(true);
    server.put(serde_json::json!({}));
    pass(&mut all, 2.0).await;
    all[0].link.lose_answers(false);
    assert_eq!(pass(&mut all, 12.0).await, Some(0), "a first look that is not answered is repeated");
    let mut another = vec![Instance::start(&server, "other")];
    all[0].task.abort();
    pass(&mut another, 5.0).await;
    another[0].link.lose_answers(true);
    assert_eq!(pass(&mut another, 20.0).await, None, "what is not known to be held is not used");
    assert_ne!(server.holder(), all[0].holder());
    another[0].link.lose_answers(false);
    assert_eq!(pass(&mut another, 5.0).await, Some(0));
    assert_eq!(server.transitions(), 2);
}

/// What is not held against it: an instance that starts just after the lease of a living leader was deleted by hand cannot
/// know of that leader. So no seed has both.
#[tokio::test(start_paused = true)]
async fn whatever_the_network_does_no_two_lead_and_one_does_when_it_is_well_again() {
    for seed in 1..=40 {
        let mut random = Random(seed);
        let server = Server::default();
        let mut all = instances(&server, 4);
        for _ in 0..40 {
            let one = random.below(4);
            let link = &all[one].link;
            match random.below(8) {
                0 => link.refuse(true),
                1 => link.hang(true),
                2 => link.lose_answers(true),
                3 => link.delay(Duration::from_millis(random.below(4000) as u64)),
                4 if seed % 2 == 0 => server.delete(),
                5 if seed % 2 == 1 => {
                    all[one].task.abort();
                    // Its claims still count: nobody told what works under them.
                    let claims = std::mem::take(&mut all[one].claims);
                    all[one] = Instance { claims, ..Instance::start(&server, &format!("r{one}")) };
                }
                _ => link.heal(),
            }
            let seconds = random.below(8000) as f64 / 1000.0;
            pass(&mut all, seconds).await;
        }
        all.iter().for_each(|one| one.link.heal());
        assert!(
            pass(&mut all, 30.0).await.is_some(),
            "nobody leads (seed {seed}): {:?}",
            all.iter().map(Instance::problem).collect::<Vec<_>>()
        );
        all.iter().for_each(|one| one.task.abort());
    }
}

/// Numbers that look random and are the same in each run (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap()
    }
}
