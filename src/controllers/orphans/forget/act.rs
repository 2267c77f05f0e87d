//! Reads what is known of a node, and does what was decided.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use snafu::Snafu;

use super::{Forgetting, Known, Step, alive, forgetting, let_go};
use crate::controllers::cluster::said;
use crate::domain::NodeName;
use crate::store::attach::change;
use crate::store::object::FINALIZER;
use crate::store::{Pair, Selector, Store, StoreError};

/// How often the objects are read again for what the controllers wrote meanwhile on an older picture.
const ROUNDS: u32 = 5;

/// Between two rounds: longer than a controller's writes that were under way take.
const SETTLE: Duration = Duration::from_secs(1);

/// Keys that are removed at the same time: a few connections, as a person's commands use.
const KEYS_AT_ONCE: usize = 8;

/// How often one branch is written anew when its object changes meanwhile.
const ATTEMPTS: u32 = 8;

/// A node was not forgotten, or not wholly: the command may be given again.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum ForgetError {
    /// It is there.
    #[snafu(display(
        "node {node} is alive ({why}) and is not forgotten: to take it away for good, stop its agent and the machine first"
    ))]
    Alive {
        /// The node.
        node: NodeName,
        /// Why it is taken to be.
        why: String,
    },
    /// Whether it is there is not known.
    #[snafu(display("cannot read the Kubernetes Node {node}: {reason}"))]
    Node {
        /// The node.
        node: NodeName,
        /// The server's words.
        reason: String,
    },
    /// A read or write was not done.
    #[snafu(display("{source}; what was done stays done: give the command again"), context(false))]
    Store {
        /// Why.
        source: StoreError,
    },
    /// Someone keeps making objects for it.
    #[snafu(display(
        "objects of node {node} are still being made ({left} writes are left): give the command again in a minute"
    ))]
    Unsettled {
        /// The node.
        node: NodeName,
        /// How many writes are left.
        left: usize,
    },
}

/// Whether the Kubernetes Node is Ready; `None` where there is none.
///
/// # Errors
/// [`ForgetError::Node`].
pub async fn ready(client: &Client, node: &NodeName) -> Result<Option<bool>, ForgetError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let found = nodes.get_opt(node.as_str()).await;
    let found = found.map_err(|e| ForgetError::Node { node: node.clone(), reason: said(&e) })?;
    Ok(found.map(|found| {
        let conditions = found.status.and_then(|status| status.conditions).unwrap_or_default();
        conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
    }))
}

/// Reads all that is known of the node. `ready` tells of its Kubernetes Node.
///
/// # Errors
/// [`ForgetError::Store`].
pub async fn known(store: &dyn Store, node: &NodeName, ready: Option<bool>) -> Result<Known, ForgetError> {
    Ok(Known {
        storage: store.nodes().get(node.as_str()).await?,
        ready,
        splits: store.splits().list(&Selector::All).await?,
        branches: store.branches().list(&Selector::Node(node.clone())).await?,
    })
}

/// What it takes to forget the node.
///
/// # Errors
/// [`ForgetError::Alive`], and what a read may meet.
pub async fn look(
    store: &dyn Store,
    node: &NodeName,
    ready: Option<bool>,
    now: Timestamp,
) -> Result<Forgetting, ForgetError> {
    let known = known(store, node, ready).await?;
    match alive(&known, now) {
        Some(why) => Err(ForgetError::Alive { node: node.clone(), why }),
        None => Ok(forgetting(node, &known)),
    }
}

/// Forgets the node, whose Kubernetes Node was found not to be Ready, or not to be. What was decided is looked at anew
/// before each round of writes; the first decision is returned.
///
/// # Errors
/// [`ForgetError`]; what was done stays done.
pub async fn forget(
    store: &dyn Store,
    node: &NodeName,
    ready: Option<bool>,
    clock: fn() -> Timestamp,
) -> Result<Forgetting, ForgetError> {
    let first = look(store, node, ready, clock()).await?;
    let mut next = first.clone();
    for _ in 0..ROUNDS {
        if next.steps.is_empty() {
            drop_keys(store, node).await?;
            return Ok(first);
        }
        for step in &next.steps {
            apply(store, node, step).await?;
        }
        tokio::time::sleep(SETTLE).await;
        next = look(store, node, ready, clock()).await?;
    }
    if next.steps.is_empty() {
        drop_keys(store, node).await?;
        return Ok(first);
    }
    Err(ForgetError::Unsettled { node: node.clone(), left: next.steps.len() })
}

async fn apply(store: &dyn Store, node: &NodeName, step: &Step) -> Result<(), ForgetError> {
    match step {
        Step::DeleteStorageNode => {
            store.nodes().delete(node.as_str(), None).await?;
        }
        Step::LetGo(volume) => {
            let decide = |split: Option<_>| Ok::<_, StoreError>(split.and_then(|split| let_go(&split, node)));
            change(store.splits(), volume, decide).await?;
        }
        Step::DeleteVolume(volume) => {
            store.splits().delete(volume.as_str(), None).await?;
        }
        Step::DropBranch(name) => drop_branch(store, node, name).await?,
    }
    Ok(())
}

/// Removes the keys that it shares with the nodes that are left; those with a node that was forgotten went with that one.
async fn drop_keys(store: &dyn Store, node: &NodeName) -> Result<(), StoreError> {
    let others = store.nodes().list(&Selector::All).await?;
    let pairs =
        others.iter().map(|other| &other.spec.node).filter(|other| *other != node).flat_map(|other| {
            let pair = |owner: &NodeName, consumer: &NodeName| Pair {
                owner: owner.clone(),
                consumer: consumer.clone(),
            };
            [pair(node, other), pair(other, node)]
        });
    let removals: Vec<_> = pairs.map(|pair| async move { store.keys().remove(&pair).await }).collect();
    futures::stream::iter(removals).buffer_unordered(KEYS_AT_ONCE).try_for_each(|_| async { Ok(()) }).await
}

async fn drop_branch(store: &dyn Store, node: &NodeName, name: &str) -> Result<(), StoreError> {
    let conflict = || StoreError::Conflict { kind: "Branch", name: name.to_owned() };
    for _ in 0..ATTEMPTS {
        let Some(mut branch) = store.branches().get(name).await? else { return Ok(()) };
        if branch.spec.node != *node {
            return Ok(());
        }
        if branch.meta.finalizers.iter().any(|f| f == FINALIZER) {
            branch.meta.finalizers.retain(|f| f != FINALIZER);
            branch = match store.branches().update(branch).await {
                Ok(branch) => branch,
                Err(StoreError::Conflict { .. }) => continue,
                // It was being deleted already, and went.
                Err(StoreError::Missing { .. }) => return Ok(()),
                Err(e) => return Err(e),
            };
        }
        if branch.meta.deleting.is_some() {
            return Ok(());
        }
        // Only as it was seen: with its finalizer put back, its node would be asked to remove files.
        match store.branches().delete(name, Some(branch.meta.version)).await {
            Err(StoreError::Conflict { .. }) => {}
            done => return done.map(|_| ()),
        }
    }
    Err(conflict())
}
