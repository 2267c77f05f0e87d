//! Writes one order: over the state that it is decided on, and no other.

use std::sync::Arc;
use std::time::Duration;

use snafu::Snafu;

use super::decide::{Case, Claims, Decision, Order, decide};
use super::index::Seen;
use super::keys::ensure_key;
use crate::store::{Pair, Store, StoreError};

/// How long a write is waited for: longer than a client waits for an answer, so that its reason is told.
const LONGEST_WRITE: Duration = Duration::from_secs(60);

/// An order was not written.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub(super) enum WriteError {
    /// The store did not do it.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why.
        source: StoreError,
    },
    /// The volume's class asks for more than the nodes can prove.
    #[snafu(display("{pair}: the volume's class requires {what}, and the nodes have no key: {reason}"))]
    NoKey {
        /// The nodes.
        pair: Pair,
        /// What it asks for.
        what: &'static str,
        /// Why.
        reason: String,
    },
    /// The store does not answer.
    #[snafu(display("the store did not answer within {} s", LONGEST_WRITE.as_secs()))]
    Hangs,
}

impl WriteError {
    /// Another writer came first: no fault of anyone.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, Self::Store { source: StoreError::Conflict { .. } | StoreError::Missing { .. } })
    }
}

/// What came of it.
#[derive(Debug)]
pub(super) enum Written {
    /// The order is there.
    Ordered { order: Order, seen: Seen },
    /// As the branch is now, there is nothing to be written.
    Needless(Seen),
    /// There is no such branch any more.
    Gone,
}

/// What the order is decided on beside the branch itself.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    pub(super) claims: Claims,
    pub(super) owner_down: Option<String>,
}

impl Ground {
    /// With a branch.
    pub(super) fn case<'a>(&'a self, seen: &'a Seen) -> Case<'a> {
        Case {
            claims: &self.claims,
            owner: &seen.owner,
            owner_down: self.owner_down.as_deref(),
            access: seen.access.as_ref(),
            allowed: seen.allowed.as_ref(),
            sharing: seen.sharing.as_ref(),
            shared: seen.shared.as_ref(),
        }
    }
}

/// Reads the branch, decides about it, and writes what was decided.
pub(super) async fn order(
    store: Arc<dyn Store>,
    name: Arc<str>,
    ground: Ground,
) -> Result<Written, WriteError> {
    let written = tokio::time::timeout(LONGEST_WRITE, order_now(&*store, &name, &ground)).await;
    written.unwrap_or(Err(WriteError::Hangs))
}

async fn order_now(store: &dyn Store, name: &str, ground: &Ground) -> Result<Written, WriteError> {
    // Whoever watches hears late of what others wrote; an order is only ever based on what the store has now.
    let Some(mut branch) = store.branches().get(name).await? else { return Ok(Written::Gone) };
    let seen = Seen::of(&branch);
    let Decision::Order(order) = decide(&ground.case(&seen)) else { return Ok(Written::Needless(seen)) };
    match &order {
        Order::Access(access) => {
            ensure_key(store, &branch, access).await?;
            branch.spec.access = Some(access.clone());
        }
        Order::Sharing(sharing) => branch.spec.sharing = Some(sharing.clone()),
    }
    let branch = store.branches().update(branch).await?;
    Ok(Written::Ordered { order, seen: Seen::of(&branch) })
}
