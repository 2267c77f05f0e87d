//! Waiting for a measurement of the pools that is newer than a change.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

/// How long a change waits for the figures that show it. A pool that does not answer holds up a measurement; the change
/// itself must not wait for that.
const BOUND: Duration = Duration::from_secs(1);

/// Asks for measurements and tells when they are published. Those who ask at the same time share one.
#[derive(Debug)]
pub(super) struct Fresh {
    asked: AtomicU64,
    /// The last who waits, or waited.
    awaited: AtomicU64,
    ask: Notify,
    published: watch::Sender<u64>,
}

impl Fresh {
    pub(super) fn new() -> Self {
        Self {
            asked: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            ask: Notify::new(),
            published: watch::Sender::new(0),
        }
    }

    /// Asks for a measurement and does not wait for it.
    pub(super) fn ask(&self) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.ask.notify_one();
    }

    /// The last change that somebody waits for, or waited for, to be published.
    pub(super) fn awaited(&self) -> u64 {
        self.awaited.load(Ordering::SeqCst)
    }

    /// Waits until a measurement that began after this call is published, or [`BOUND`] has passed.
    pub(super) async fn wait(&self) {
        let ticket = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        // Before the measurement begins, so that whoever publishes it knows.
        self.awaited.fetch_max(ticket, Ordering::SeqCst);
        self.ask.notify_one();
        let mut published = self.published.subscribe();
        let _late = tokio::time::timeout(BOUND, published.wait_for(|upto| *upto >= ticket)).await;
    }

    /// Until somebody asks.
    pub(super) async fn asked(&self) {
        self.ask.notified().await;
    }

    /// What a measurement that begins now answers; for [`Fresh::publish`].
    pub(super) fn begin(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }

    /// The measurement that began then is published.
    pub(super) fn publish(&self, begun: u64) {
        self.published.send_replace(begun);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_a_measurement_that_began_after_the_change_ends_the_wait() {
        let fresh = Fresh::new();
        let earlier = fresh.begin();
        let mut wait = std::pin::pin!(fresh.wait());
        assert!(futures::poll!(wait.as_mut()).is_pending());
        fresh.publish(earlier);
        assert!(futures::poll!(wait.as_mut()).is_pending(), "it began before the change");
        fresh.publish(fresh.begin());
        assert!(futures::poll!(wait.as_mut()).is_ready());
    }

    #[tokio::test(start_paused = true)]
    async fn a_measurement_that_never_ends_holds_nobody_up() {
        Fresh::new().wait().await;
    }
}
