//! Takes, keeps, watches and releases the lease.
//!
//! A follower watches it, so that it costs nothing to wait; a leader writes it and need not watch: whatever another does to
//! it makes the next renewal fail.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::runtime::watcher;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::claim::Claim;
use super::decide::{Decision, Finding, Seen, Step, Timing, decide};
use super::record;
use crate::controllers::queue::until;

/// Name of the Lease, in the namespace of the program's objects.
pub const LEASE: &str = "union-csi";

/// Field manager of the lease.
const FIELD_MANAGER: &str = "union-csi-elector";

/// Pauses between attempts double from the spread of the lease up to this part of it.
const LONGEST_PAUSE: u32 = 3;

/// An identity for an instance on `node` that no other has had: a restarted one has to earn the lead anew.
#[must_use]
pub fn identity(node: &str) -> String {
    format!("{node}_{}", uuid::Uuid::new_v4().simple())
}

/// Who leads, as this instance knows it.
#[derive(Clone, Debug, Default)]
pub struct Leadership {
    /// The right to write, while this instance leads. Each term has its own: one that was lost never returns.
    pub claim: Option<Claim>,
    /// Terms that this instance began.
    pub terms: u64,
    /// Who holds the lease; `None`: nobody, or not known yet.
    pub holder: Option<String>,
    /// Why it cannot be known, or not be held; a sentence.
    pub problem: Option<String>,
}

/// A term of this instance.
struct Term {
    held: watch::Sender<Option<Instant>>,
    until: Instant,
}

type Events = BoxStream<'static, Result<Option<Lease>, watcher::Error>>;

/// See the module.
pub struct Elector {
    leases: Api<Lease>,
    me: String,
    timing: Timing,
    clock: fn() -> Timestamp,
    leadership: watch::Sender<Leadership>,
    /// As it was last read or written, with its version.
    lease: Option<Lease>,
    /// `None`: never read.
    seen: Option<Seen>,
    term: Option<Term>,
    /// Attempts that failed in a row, and when the next may be made.
    failures: u32,
    not_before: Instant,
}

impl Elector {
    /// An elector; it does nothing until [`Elector::run`]. `me`: see [`identity`]. `clock` dates what people read.
    #[must_use]
    pub fn new(
        client: Client,
        namespace: &str,
        me: String,
        duration: Duration,
        clock: fn() -> Timestamp,
    ) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            me,
            timing: Timing::of(duration),
            clock,
            leadership: watch::Sender::new(Leadership::default()),
            lease: None,
            seen: None,
            term: None,
            failures: 0,
            not_before: Instant::now(),
        }
    }

    /// Who leads, now and from now on.
    #[must_use]
    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Works until `shutdown`, and releases the lease then. What writes under its claim must have ended before.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut events: Option<Events> = None;
        // When the first event of a watch is overdue.
        let mut overdue: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if self.term.as_ref().is_some_and(|term| term.until <= now) {
                self.lose("the lease could not be renewed in time");
            }
            if self.term.is_some() {
                events = None;
            } else if events.is_none() && self.not_before <= now {
                events = Some(watcher::watch_object(self.leases.clone(), LEASE).boxed());
                overdue = Some(now + self.timing.lease / 2);
            }
            let step = match &self.seen {
                Some(seen) => {
                    let Decision { finding, step } = decide(seen, &self.me, now, &self.timing);
                    self.tell(finding);
                    step
                }
                // Nothing is decided before it was read.
                None => Step::Listen,
            };
            let wake = match step {
                Step::Write if self.not_before <= now => {
                    // Cut off in the middle it would not be known whether the lease is held and to be released.
                    self.write().await;
                    if shutdown.is_cancelled() {
                        break;
                    }
                    continue;
                }
                Step::Write => Some(self.not_before),
                Step::Wait(at) => Some(at),
                Step::Listen => None,
            };
            let pause = events.is_none().then_some(self.not_before).filter(|_| self.term.is_none());
            let end = self.term.as_ref().map(|term| term.until);
            let late = overdue.filter(|_| events.is_some());
            let wake = wake.into_iter().chain(pause).chain(end).chain(late).min();
            tokio::select! {
                () = shutdown.cancelled() => break,
                event = next(&mut events) => match event {
                    Some(Ok(lease)) => {
                        overdue = None;
                        self.failures = 0;
                        self.observe(lease);
                    }
                    Some(Err(error)) => {
                        events = None;
                        self.failed("watch", &error);
                    }
                    None => events = None,
                },
                () = until(wake) => {
                    if late.is_some_and(|late| late <= Instant::now()) {
                        events = None;
                        self.failed("watch", &"no answer");
                    }
                }
            }
        }
        self.release().await;
    }

    /// Takes note of the lease as it is now.
    fn observe(&mut self, lease: Option<Lease>) {
        let now = Instant::now();
        let record = lease.as_ref().map(|lease| record::read(lease, self.timing.lease));
        let exists = record.is_some();
        let seen = match (self.seen.take(), record) {
            (Some(before), Some(record)) if before.record.as_ref() == Some(&record) => {
                Seen { exists, ..before }
            }
            // Who was away while it went may have missed another leader, who knows nothing of it yet: it is waited for from now
            // on.
            (Some(before), None) => {
                let changed = if before.exists { now } else { before.changed };
                Seen { exists, changed, ..before }
            }
            (before, record) => {
                let mine = record.as_ref().and_then(|r| r.holder.as_deref()) == Some(self.me.as_str());
                let renewed = before.and_then(|before| before.renewed).filter(|_| mine);
                Seen { record, exists, changed: now, renewed }
            }
        };
        self.lease = lease;
        self.seen = Some(seen);
    }

    /// Makes, takes or renews the lease.
    async fn write(&mut self) {
        let base = self.lease.as_ref();
        let lease = record::held(base, LEASE, &self.me, (self.clock)(), self.timing.lease);
        let parameters =
            PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let sent = Instant::now();
        // A renewal that hangs leaves time for another.
        let patience = match &self.term {
            Some(term) => (self.timing.lease / 6).min(term.until.saturating_duration_since(sent)),
            None => self.timing.lease / 4,
        };
        let write = async {
            match base {
                Some(_) => self.leases.replace(LEASE, &parameters, &lease).await,
                None => self.leases.create(&parameters, &lease).await,
            }
        };
        let written = tokio::time::timeout(patience, write).await;
        match written {
            Ok(Ok(lease)) => self.hold(lease, sent),
            // It is not what it was: to be read before anything else is decided.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => {
                debug!(code = status.code, "the lease was changed by another");
                self.read().await;
            }
            Ok(Err(error)) => self.failed("write", &error),
            Err(_) => self.failed("write", &format!("no answer within {} ms", patience.as_millis())),
        }
    }

    async fn read(&mut self) {
        let patience = self.timing.lease / 6;
        match tokio::time::timeout(patience, self.leases.get_opt(LEASE)).await {
            Ok(Ok(lease)) => {
                self.observe(lease);
                let holder = self.seen.as_ref().and_then(|seen| seen.record.as_ref()?.holder.clone());
                let mine = holder.as_deref() == Some(self.me.as_str());
                if self.term.is_some() && !mine {
                    self.lose("another instance holds the lease");
                }
                // Who lost a race does not run the next one at once.
                self.not_before = Instant::now() + if mine { Duration::ZERO } else { self.pause() };
            }
            Ok(Err(error)) => self.failed("read", &error),
            Err(_) => self.failed("read", &format!("no answer within {} ms", patience.as_millis())),
        }
    }

    /// The lease is this instance's, by a write that was sent then.
    fn hold(&mut self, lease: Lease, sent: Instant) {
        let record = record::read(&lease, self.timing.lease);
        self.seen = Some(Seen { record: Some(record), exists: true, changed: sent, renewed: Some(sent) });
        self.lease = Some(lease);
        self.failures = 0;
        self.not_before = sent;
        let until = sent + self.timing.claim;
        if let Some(term) = &mut self.term {
            term.until = until;
            term.held.send_replace(Some(until));
            return;
        }
        let (held, claim) = watch::channel(Some(until));
        self.term = Some(Term { held, until });
        info!(lease.holder = self.me, "this instance leads");
        self.leadership.send_modify(|leadership| {
            leadership.claim = Some(Claim::until(claim));
            leadership.terms += 1;
        });
    }

    /// Ends the term, if there is one.
    fn lose(&mut self, reason: &str) {
        let Some(term) = self.term.take() else { return };
        term.held.send_replace(None);
        warn!(lease.holder = self.me, reason, "this instance no longer leads");
        self.leadership.send_modify(|leadership| leadership.claim = None);
    }

    /// Tells who leads, and logs it when it changed.
    fn tell(&self, finding: Finding) {
        let holder = self.seen.as_ref().and_then(|seen| seen.record.as_ref()?.holder.clone());
        let problem = (finding == Finding::Foreign).then(|| {
            format!(
                "the Lease {LEASE} is held by {} and was not made by Union CSI: it is left alone and nobody leads; delete \
                 it, or have it released",
                holder.as_deref().unwrap_or_default()
            )
        });
        self.leadership.send_if_modified(|told| {
            let problem = problem.or_else(|| told.problem.take().filter(|_| self.failures > 0));
            if told.holder == holder && told.problem == problem {
                return false;
            }
            if told.holder != holder && holder.as_deref() != Some(self.me.as_str()) {
                info!(lease.holder = holder, "the lease changed hands");
            }
            if finding == Finding::Foreign {
                warn!(problem, "nobody can lead");
            }
            *told = Leadership { holder, problem, ..told.clone() };
            true
        });
    }

    /// An attempt failed: the next is made later.
    fn failed(&mut self, action: &'static str, error: &dyn std::fmt::Display) {
        self.failures = self.failures.saturating_add(1);
        let pause = self.pause();
        self.not_before = Instant::now() + pause;
        let problem = format!("cannot {action} the Lease {LEASE}: {error}");
        let new = self.leadership.send_if_modified(|told| {
            let new = told.problem.is_none();
            told.problem = Some(problem.clone());
            new
        });
        if new {
            warn!(problem, retry_after = ?pause, "the lease is not within reach");
        } else {
            debug!(problem, retry_after = ?pause, "the lease is not within reach");
        }
    }

    /// How long to wait after so many failures: a leader has no time to lose.
    fn pause(&self) -> Duration {
        let least = self.timing.spread;
        let most = if self.term.is_some() { least } else { self.timing.lease / LONGEST_PAUSE };
        (least * 2_u32.saturating_pow(self.failures.saturating_sub(1).min(8))).min(most)
    }

    /// Gives the lease back, so that the next need not wait for its end.
    async fn release(&mut self) {
        if self.term.is_none() {
            return;
        }
        self.lose("it is told to stop");
        for _attempt in 0..2 {
            let Some(lease) = &self.lease else { return };
            let free = record::released(lease, (self.clock)());
            let parameters =
                PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            let write = self.leases.replace(LEASE, &parameters, &free);
            match tokio::time::timeout(self.timing.lease / 6, write).await {
                Ok(Ok(_)) => {
                    info!("the lease is released");
                    return;
                }
                Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                    self.read().await;
                    let holder = self.seen.as_ref().and_then(|seen| seen.record.as_ref()?.holder.as_deref());
                    if holder != Some(self.me.as_str()) {
                        return;
                    }
                }
                Ok(Err(error)) => {
                    warn!(%error, "the lease cannot be released: the next leader waits for its end");
                    return;
                }
                Err(_) => {
                    warn!("the lease is not released in time: the next leader waits for its end");
                    return;
                }
            }
        }
    }
}

async fn next(events: &mut Option<Events>) -> Option<Result<Option<Lease>, watcher::Error>> {
    match events {
        Some(events) => events.next().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
