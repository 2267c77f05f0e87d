//! The right to write for the whole cluster, as long as it is held.

use snafu::Snafu;
use tokio::sync::watch;
use tokio::time::Instant;

/// A write was not made, because another instance may lead by now.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
#[snafu(display("this instance does not lead (any more): nothing is written, the leader goes on"))]
pub struct NotLeading;

/// The right to write. Cheap to clone; asked before each write, it tells what is so now.
#[derive(Clone, Debug)]
pub struct Claim(Option<watch::Receiver<Option<Instant>>>);

impl Claim {
    /// A claim that is never lost: of the only instance there is, and of tests.
    #[must_use]
    pub fn always() -> Self {
        Self(None)
    }

    /// A claim that is held until the moment last sent; `None`: not held. The moment lies before the one at which another
    /// instance may take over, by the time that a write may be under way.
    #[must_use]
    pub fn until(held: watch::Receiver<Option<Instant>>) -> Self {
        Self(Some(held))
    }

    /// Whether it is held now.
    ///
    /// # Errors
    /// [`NotLeading`] where it is not.
    pub fn held(&self) -> Result<(), NotLeading> {
        match &self.0 {
            None => Ok(()),
            Some(until) if until.borrow().is_some_and(|end| Instant::now() < end) => Ok(()),
            Some(_) => Err(NotLeading),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_claim_is_held_until_its_end_or_until_it_is_given_up() {
        let (send, receive) = watch::channel(None);
        let claim = Claim::until(receive);
        assert_eq!(claim.held(), Err(NotLeading), "not yet");
        send.send_replace(Some(Instant::now() + Duration::from_secs(5)));
        assert_eq!(claim.held(), Ok(()));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(claim.held(), Err(NotLeading), "it ran out");
        send.send_replace(Some(Instant::now() + Duration::from_secs(5)));
        send.send_replace(None);
        assert_eq!(claim.held(), Err(NotLeading), "given up");
        assert_eq!(Claim::always().held(), Ok(()));
    }
}
