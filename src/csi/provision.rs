//! Making and removing volumes in the store, and waiting for the other roles to do their part.
//!
//! A wanted volume is a `VolumeSplit` without branches. The splitter plans it, the nodes make its branches, and its
//! conditions tell. Each wait has a deadline, and a repeated call goes on waiting where the last one stopped.

mod compare;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use snafu::{ResultExt, Snafu};
use tokio::time::Instant;

use crate::domain::reach::Network;
use crate::domain::{Bytes, VolumeId};
use crate::store::object::{Meta, VolumeSplit, VolumeSplitSpec, VolumeSplitStatus, condition, pending};
use crate::store::reach::network_of;
use crate::store::view::{is_ready, owners};
use crate::store::{Store, StoreError};
use compare::compatible;
use watch::States;

/// How long the answer "no room" waits for the withdrawn volume to be gone, so that the same name can be asked for again
/// at once. It is a courtesy: the answer is the same without it.
const WITHDRAWAL: Duration = Duration::from_secs(2);

/// A volume was not made, or not removed.
#[derive(Debug, Snafu)]
pub enum ProvisionError {
    /// A volume of that name exists and is another.
    #[snafu(display("volume {volume} exists already and differs: {difference}"))]
    Differs {
        /// The volume.
        volume: VolumeId,
        /// In what.
        difference: String,
    },
    /// It is being removed.
    #[snafu(display("volume {volume} is being deleted: try again when it is gone"))]
    Deleting {
        /// The volume.
        volume: VolumeId,
    },
    /// Somebody removed it while it was waited for.
    #[snafu(display("volume {volume} was deleted while it was being made: try again"))]
    Vanished {
        /// The volume.
        volume: VolumeId,
    },
    /// No split fits.
    #[snafu(display(
        "no room for volume {volume} of {}: the largest that would fit now has {}; {reason}", requested.shown(), largest.shown()
    ))]
    NoRoom {
        /// The volume.
        volume: VolumeId,
        /// Usable bytes that were asked for.
        requested: Bytes,
        /// Usable bytes of the largest volume that would fit.
        largest: Bytes,
        /// Every pool with its reason.
        reason: String,
    },
    /// It is not ready yet.
    #[snafu(display("volume {volume} is not ready yet: {reason}; it goes on being made: call again"))]
    NotReady {
        /// The volume.
        volume: VolumeId,
        /// What is waited for.
        reason: String,
    },
    /// Nodes have it attached.
    #[snafu(display("volume {volume} is attached to {}: detach it first", nodes.join(", ")))]
    Attached {
        /// The volume.
        volume: VolumeId,
        /// The nodes.
        nodes: Vec<String>,
    },
    /// Its branches are not gone yet.
    #[snafu(display("volume {volume} is not gone yet: {reason}; it goes on being removed: call again"))]
    NotGone {
        /// The volume.
        volume: VolumeId,
        /// What is waited for.
        reason: String,
    },
    /// The store did not answer, or refused.
    #[snafu(display("{source}"))]
    Store {
        /// Why.
        source: StoreError,
    },
}

/// Makes and removes volumes.
#[derive(Clone)]
pub(super) struct Provisioner {
    store: Arc<dyn Store>,
}

/// How the making of a volume ended, for now.
enum Settled {
    Ready(Box<VolumeSplit>),
    Infeasible(Box<VolumeSplit>),
}

impl Provisioner {
    pub(super) fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Makes the volume, or finds it, and waits until it can be used.
    pub(super) async fn create(
        &self,
        wanted: &VolumeSplitSpec,
        deadline: Instant,
    ) -> Result<VolumeSplit, ProvisionError> {
        let mut split = self.ensure_wanted(wanted).await?;
        loop {
            if split.meta.deleting.is_some() {
                return DeletingSnafu { volume: wanted.volume.clone() }.fail();
            }
            self.check(&split, wanted).await?;
            match self.settle(&split, deadline).await? {
                Settled::Ready(ready) => {
                    self.check(&ready, wanted).await?;
                    return Ok(*ready);
                }
                Settled::Infeasible(hopeless) => match self.withdraw(&hopeless, deadline).await? {
                    Withdrawn::Gone => return Err(no_room(&hopeless)),
                    Withdrawn::Changed(now) => split = *now,
                },
            }
        }
    }

    async fn check(&self, have: &VolumeSplit, wanted: &VolumeSplitSpec) -> Result<(), ProvisionError> {
        // Only who asks for certain nodes asks for what others can carry.
        let network = match wanted.topology.is_empty() {
            true => Network::default(),
            false => network_of(&*self.store, owners(have)).await.context(StoreSnafu)?,
        };
        compatible(have, wanted, &network)
    }

    /// Removes the volume and waits until it is gone. One that does not exist is gone.
    pub(super) async fn delete(&self, volume: &VolumeId, deadline: Instant) -> Result<(), ProvisionError> {
        loop {
            let Some(split) = self.get(volume).await? else {
                return Ok(());
            };
            if !split.spec.attached.is_empty() {
                let nodes: Vec<String> = split.spec.attached.iter().map(|a| a.node.to_string()).collect();
                return AttachedSnafu { volume: volume.clone(), nodes }.fail();
            }
            // Only the state that was looked at may go: it could have been attached meanwhile.
            let version = Some(split.meta.version.clone());
            match self.store.splits().delete(volume.as_str(), version).await {
                Ok(_) => return self.await_gone(&split, deadline).await,
                Err(StoreError::Conflict { .. }) if Instant::now() < deadline => {}
                Err(source) => return Err(ProvisionError::Store { source }),
            }
        }
    }

    /// The volume, if it exists.
    pub(super) async fn get(&self, volume: &VolumeId) -> Result<Option<VolumeSplit>, ProvisionError> {
        self.store.splits().get(volume.as_str()).await.context(StoreSnafu)
    }

    async fn ensure_wanted(&self, wanted: &VolumeSplitSpec) -> Result<VolumeSplit, ProvisionError> {
        if let Some(split) = self.get(&wanted.volume).await? {
            return Ok(split);
        }
        let split = VolumeSplit {
            meta: Meta::with_finalizer(wanted.volume.as_str()),
            spec: wanted.clone(),
            status: VolumeSplitStatus::default(),
        };
        match self.store.splits().create(split).await {
            Ok(split) => Ok(split),
            Err(StoreError::Exists { .. }) => {
                let volume = wanted.volume.clone();
                self.get(&wanted.volume).await?.ok_or(ProvisionError::Vanished { volume })
            }
            Err(source) => Err(ProvisionError::Store { source }),
        }
    }

    /// Waits until the volume is ready, or cannot be planned.
    async fn settle(&self, split: &VolumeSplit, deadline: Instant) -> Result<Settled, ProvisionError> {
        let mut latest = split.clone();
        let mut states = States::new(&*self.store, &split.spec.volume);
        loop {
            if let Some(settled) = settled(&latest) {
                return Ok(settled);
            }
            match tokio::time::timeout_at(deadline, states.next()).await {
                Ok(Some(now)) if now.meta.uid == split.meta.uid && now.meta.deleting.is_none() => {
                    latest = now;
                }
                Ok(Some(now)) if now.meta.uid == split.meta.uid => {
                    return DeletingSnafu { volume: now.spec.volume }.fail();
                }
                Ok(_) => return VanishedSnafu { volume: latest.spec.volume }.fail(),
                Err(_) => {
                    let reason = waits_for(&latest);
                    return NotReadySnafu { volume: latest.spec.volume, reason }.fail();
                }
            }
        }
    }

    /// Takes back a volume that was never complete, unless that has changed meanwhile.
    async fn withdraw(&self, hopeless: &VolumeSplit, deadline: Instant) -> Result<Withdrawn, ProvisionError> {
        let version = Some(hopeless.meta.version.clone());
        match self.store.splits().delete(&hopeless.meta.name, version).await {
            Ok(_) => {
                let soon = deadline.min(Instant::now() + WITHDRAWAL);
                // Gone later is as good: nobody was ever given it.
                let _late = self.await_gone(hopeless, soon).await;
                Ok(Withdrawn::Gone)
            }
            Err(StoreError::Conflict { .. }) => match self.get(&hopeless.spec.volume).await? {
                Some(now) if now.meta.uid == hopeless.meta.uid => Ok(Withdrawn::Changed(Box::new(now))),
                _ => VanishedSnafu { volume: hopeless.spec.volume.clone() }.fail(),
            },
            Err(source) => Err(ProvisionError::Store { source }),
        }
    }

    async fn await_gone(&self, split: &VolumeSplit, deadline: Instant) -> Result<(), ProvisionError> {
        let mut states = States::new(&*self.store, &split.spec.volume);
        let mut latest = split.clone();
        loop {
            match tokio::time::timeout_at(deadline, states.next()).await {
                Ok(Some(now)) if now.meta.uid == split.meta.uid => latest = now,
                Ok(_) => return Ok(()),
                Err(_) => {
                    let reason = waits_for(&latest);
                    return NotGoneSnafu { volume: split.spec.volume.clone(), reason }.fail();
                }
            }
        }
    }
}

enum Withdrawn {
    Gone,
    Changed(Box<VolumeSplit>),
}

fn settled(split: &VolumeSplit) -> Option<Settled> {
    if is_ready(split) {
        return Some(Settled::Ready(Box::new(split.clone())));
    }
    let infeasible = condition(&split.status.conditions, "Pending")
        .is_some_and(|c| c.status && c.reason == pending::INFEASIBLE);
    // Infeasible is told only of a volume that was never complete, so nobody ever had it and nothing is lost with it: also
    // where some of its branches exist, because a node refused others.
    (infeasible && split.spec.attached.is_empty()).then(|| Settled::Infeasible(Box::new(split.clone())))
}

fn no_room(split: &VolumeSplit) -> ProvisionError {
    ProvisionError::NoRoom {
        volume: split.spec.volume.clone(),
        requested: split.spec.capacity,
        largest: split.status.largest.unwrap_or_default(),
        reason: condition(&split.status.conditions, "Pending").map(|c| c.message.clone()).unwrap_or_default(),
    }
}

/// What stands in the way, for people.
fn waits_for(split: &VolumeSplit) -> String {
    let told: Vec<&str> = ["Degraded", "ReplicaFailure", "Pending", "ReplicaProgressing"]
        .into_iter()
        .filter_map(|kind| condition(&split.status.conditions, kind))
        .filter(|c| c.status && !c.message.is_empty())
        .map(|c| c.message.as_str())
        .collect();
    if !told.is_empty() {
        return told.join("; ");
    }
    if split.spec.branches.is_empty() {
        "no controller has planned it: is the controller running, and can it write the store (for an embedded one: is there \
         space in the state directory)?"
            .to_owned()
    } else {
        format!("{} of {} branches exist", split.status.bound_replicas, split.spec.branches.len())
    }
}

#[cfg(test)]
mod tests;
