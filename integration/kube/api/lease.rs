//! Leader election on a real API server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::client::ClientBuilder;
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use union_csi::controllers::lease::{Claim, Elector, LEASE, Leadership, identity};

use crate::support;

/// The default of `kubernetes.leaseDuration`.
const DURATION: Duration = Duration::from_secs(12);

/// What the machine may add to what is waited for, busy as it may be.
const MARGIN: Duration = Duration::from_secs(8);

struct Instance {
    leadership: watch::Receiver<Leadership>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
    claims: Vec<Claim>,
    terms: u64,
}

impl Instance {
    fn start(client: &Client, namespace: &str, name: &str, clock: fn() -> Timestamp) -> Self {
        let elector = Elector::new(client.clone(), namespace, identity(name), DURATION, clock);
        let (leadership, shutdown) = (elector.leadership(), CancellationToken::new());
        let task = tokio::spawn(elector.run(shutdown.clone()));
        Self { leadership, shutdown, task, claims: Vec::new(), terms: 0 }
    }

    fn leads(&mut self) -> bool {
        let now = self.leadership.borrow_and_update().clone();
        if now.terms > self.terms {
            self.terms = now.terms;
            self.claims.extend(now.claim);
        }
        self.claims.iter().any(|claim| claim.held().is_ok())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The one that leads.
fn leader(instances: &mut [Instance]) -> Option<usize> {
    let leaders: Vec<usize> = (0..instances.len()).filter(|i| instances[*i].leads()).collect();
    assert!(leaders.len() <= 1, "{leaders:?} lead at once");
    leaders.first().copied()
}

/// Waits until one leads that is none of `but`; no two may lead meanwhile.
async fn until_led(instances: &mut [Instance], but: &[usize], bound: Duration) -> usize {
    let wait = async {
        loop {
            match leader(instances) {
                Some(leader) if !but.contains(&leader) => return leader,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(bound, wait).await.expect("a leader in time")
}

/// The same one leads all the while.
async fn stays(instances: &mut [Instance], expected: usize, seconds: u64) {
    for _ in 0..seconds * 10 {
        assert_eq!(leader(instances), Some(expected));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn electors(names: &[&str]) -> (Api<Lease>, Vec<Instance>) {
    let client = support::client().await;
    let namespace = support::namespace(&client).await;
    let all = names.iter().map(|n| Instance::start(&client, &namespace, n, Timestamp::now)).collect();
    (Api::namespaced(client, &namespace), all)
}

#[tokio::test]
async fn exactly_one_leads_and_keeps_leading() {
    let (leases, mut all) = electors(&["a", "b", "c"]).await;
    let first = until_led(&mut all, &[], MARGIN).await;
    stays(&mut all, first, 15).await;
    let spec = leases.get(LEASE).await.unwrap().spec.unwrap();
    assert_eq!(spec.lease_transitions, Some(0));
    assert_eq!(spec.lease_duration_seconds, Some(12));
    for one in &all {
        assert_eq!(one.leadership.borrow().holder, spec.holder_identity, "everyone knows who leads");
    }
}

#[tokio::test]
async fn a_killed_leader_is_replaced_when_its_lease_is_over() {
    let (_, mut all) = electors(&["a", "b", "c"]).await;
    let first = until_led(&mut all, &[], MARGIN).await;
    all[first].task.abort();
    let next = until_led(&mut all, &[first], DURATION + MARGIN).await;
    stays(&mut all, next, 6).await;
}

#[tokio::test]
async fn a_leader_that_ends_properly_is_replaced_without_waiting_for_its_lease() {
    let (leases, mut all) = electors(&["a", "b"]).await;
    let first = until_led(&mut all, &[], MARGIN).await;
    let before = leases.get(LEASE).await.unwrap().spec.unwrap();
    all[first].shutdown.cancel();
    until_led(&mut all, &[first], MARGIN).await;
    let after = leases.get(LEASE).await.unwrap().spec.unwrap();
    assert_eq!(after.lease_transitions, Some(1));
    assert_ne!(after.holder_identity, before.holder_identity);
    // The last one leaves an empty chair.
    all.iter().for_each(|one| one.shutdown.cancel());
    let ended = async {
        while !all.iter().all(|one| one.task.is_finished()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(MARGIN, ended).await.expect("both end");
    assert_eq!(leases.get(LEASE).await.unwrap().spec.unwrap().holder_identity.as_deref(), Some(""));
}

#[tokio::test]
async fn clocks_that_differ_by_minutes_do_not_matter() {
    let client = support::client().await;
    let namespace = support::namespace(&client).await;
    let early: fn() -> Timestamp = || Timestamp::now() - Duration::from_secs(600);
    let late: fn() -> Timestamp = || Timestamp::now() + Duration::from_secs(600);
    let mut all: Vec<_> =
        [early, late].into_iter().map(|clock| Instance::start(&client, &namespace, "n", clock)).collect();
    let first = until_led(&mut all, &[], MARGIN).await;
    stays(&mut all, first, 14).await;
    all[first].task.abort();
    let next = until_led(&mut all, &[first], DURATION + MARGIN).await;
    stays(&mut all, next, 6).await;
}

#[tokio::test]
async fn a_lease_that_is_deleted_by_hand_comes_back_with_the_same_leader() {
    let (leases, mut all) = electors(&["a", "b"]).await;
    let first = until_led(&mut all, &[], MARGIN).await;
    // Who has never seen the lease cannot know that somebody leads.
    let all_know = async {
        while all.iter().any(|one| one.leadership.borrow().holder.is_none()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(MARGIN, all_know).await.expect("everyone knows who leads");
    leases.delete(LEASE, &Default::default()).await.unwrap();
    stays(&mut all, first, 15).await;
    assert!(leases.get(LEASE).await.is_ok(), "it is there again");
}

#[tokio::test]
async fn a_lease_of_somebody_else_is_left_alone_and_told() {
    let client = support::client().await;
    let namespace = support::namespace(&client).await;
    let leases: Api<Lease> = Api::namespaced(client.clone(), &namespace);
    let foreign = Lease {
        metadata: ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: Some("another-program".to_owned()),
            lease_duration_seconds: Some(1),
            ..LeaseSpec::default()
        }),
    };
    let made = leases.create(&Default::default(), &foreign).await.unwrap();
    let mut all = vec![Instance::start(&client, &namespace, "a", Timestamp::now)];
    let told = async {
        while all[0].leadership.borrow().problem.is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(MARGIN, told).await.expect("it is told");
    let problem = all[0].leadership.borrow().problem.clone().unwrap();
    assert!(problem.contains("another-program"), "{problem}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(leader(&mut all), None);
    assert_eq!(leases.get(LEASE).await.unwrap().metadata.resource_version, made.metadata.resource_version);
    // Released, it may be had.
    let free = Patch::Merge(json!({"spec": {"holderIdentity": ""}}));
    leases.patch(LEASE, &PatchParams::default(), &free).await.unwrap();
    until_led(&mut all, &[], MARGIN).await;
}

/// A client whose requests hang while the flag is set.
async fn pausable() -> (Client, Arc<AtomicBool>) {
    let paused = Arc::new(AtomicBool::new(false));
    let flag = paused.clone();
    let hang = tower::util::MapFutureLayer::new(move |answer| {
        let flag = flag.clone();
        async move {
            while flag.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            answer.await
        }
    });
    let config = kube::Config::infer().await.expect("a configuration");
    (ClientBuilder::try_from(config).expect("a client").with_layer(&hang).build(), paused)
}

#[tokio::test]
async fn a_leader_that_cannot_write_loses_its_claim_before_another_gets_one() {
    let (client, paused) = pausable().await;
    let namespace = support::namespace(&support::client().await).await;
    let healthy = support::client().await;
    let mut all = vec![Instance::start(&client, &namespace, "a", Timestamp::now)];
    until_led(&mut all, &[], MARGIN).await;
    all.push(Instance::start(&healthy, &namespace, "b", Timestamp::now));
    paused.store(true, Ordering::SeqCst);
    // That no two lead at once is checked all the while.
    until_led(&mut all, &[0], DURATION + MARGIN).await;
    paused.store(false, Ordering::SeqCst);
    stays(&mut all, 1, 6).await;
}
