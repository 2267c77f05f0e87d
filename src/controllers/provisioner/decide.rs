//! What is to be done for one volume now: pure, from its claim, its PersistentVolume and its `VolumeSplit` as they are.
//!
//! Each answer is at most one write, and each write leads to a state from which the next answer follows, so it does not
//! matter who was killed when. What keeps volumes from being forgotten or taken away:
//!
//! - A `VolumeSplit` carries the UID of its claim. While no PersistentVolume of it exists it can be withdrawn: nobody has it.
//! - A PersistentVolume is made with a finalizer, so it does not go without this being decided here: either its volume goes
//!   first, or, where it is retained, the `VolumeSplit` is marked so before the finalizer goes.
//! - So a `VolumeSplit` without mark, claim and PersistentVolume never had one, and goes; but one that was attached once is
//!   never withdrawn: its PersistentVolume was removed by force, and its files may be wanted.

use std::time::Duration;

use k8s_openapi::api::core::v1::PersistentVolume;

use super::objects::{Claim, ClaimRef, Split, Standing, Volume, wish};
use super::persistent_volume::persistent_volume;
use super::wanted::{Wanted, wanted};
use crate::controllers::class::Class;
use crate::controllers::events::Notice;
use crate::store::object::VolumeSplitSpec;

/// How long a volume may be on its way before people are told what it waits for: longer than any ordinary way takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// All that is known of one volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    /// Its name: of its PersistentVolume, and of its `VolumeSplit` unless the PersistentVolume names another.
    pub(super) name: &'a str,
    /// The claim that has or had this name's UID, if this driver provisions it.
    pub(super) claim: Option<&'a Claim>,
    /// The claim's class, if it is this driver's.
    pub(super) class: Option<&'a Class>,
    /// The PersistentVolume of this name, if it is this driver's.
    pub(super) volume: Option<&'a Volume>,
    /// The `VolumeSplit`.
    pub(super) split: Option<&'a Split>,
    /// Another PersistentVolume with the same handle.
    pub(super) shared_with: Option<&'a str>,
    /// The claim was given back to the scheduler several times, and is not served again yet.
    pub(super) held_back: bool,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Action {
    /// Asks for the volume.
    CreateSplit { spec: Box<VolumeSplitSpec>, claim: String },
    /// Takes back a volume that nobody has, unless a PersistentVolume of it exists after all; where it is because a claim is
    /// gone, only if that is so.
    Withdraw { gone: Option<ClaimRef> },
    /// Makes the PersistentVolume, for where its volume can be used.
    CreateVolume(Box<PersistentVolume>),
    /// Gives the claim back to the scheduler, if this node is still the selected one.
    Reschedule { claim: ClaimRef, node: String },
    /// Marks the volume as one that stays without its PersistentVolume.
    Retain { handle: String },
    /// Deletes the volume of a PersistentVolume, if that is still to be reclaimed.
    Reclaim { handle: String },
    /// Deletes the PersistentVolume with this UID.
    DeleteVolume { uid: String },
    /// Protects the volume of a PersistentVolume.
    Protect { uid: String },
    /// Lets the PersistentVolume go; the finalizer is at this place.
    Unprotect { uid: String, at: usize },
}

/// Whom a notice is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum About {
    Claim,
    Volume,
}

/// What is to be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) about: About,
    pub(super) notice: Notice,
    /// Not before it has been so for this long.
    pub(super) after: Duration,
}

/// What is to be done and told.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decision {
    pub(super) action: Option<Action>,
    /// To be told now.
    pub(super) told: Option<Told>,
    /// To be told when the action is done.
    pub(super) done: Option<Told>,
}

impl Decision {
    fn act(action: Action) -> Self {
        Self { action: Some(action), ..Self::default() }
    }

    fn tell(about: About, notice: Notice) -> Self {
        Self { told: Some(Told { about, notice, after: Duration::ZERO }), ..Self::default() }
    }

    fn tell_after(about: About, notice: Notice, after: Duration) -> Self {
        Self { told: Some(Told { about, notice, after }), ..Self::default() }
    }

    fn and(self, action: Action) -> Self {
        Self { action: Some(action), ..self }
    }
}

/// Decides.
pub(super) fn decide(seen: &Seen<'_>) -> Decision {
    match (seen.volume, seen.claim) {
        (Some(volume), _) => of_volume(seen, volume),
        (None, Some(claim)) => of_claim(seen, claim),
        (None, None) => abandoned(seen, None),
    }
}

/// A volume that no claim asks for any more and that nobody was given.
fn abandoned(seen: &Seen<'_>, claim: Option<&Claim>) -> Decision {
    match seen.split {
        Some(split) if made_for(seen, split) && !split.kept && !split.deleting && !split.ephemeral => {
            let gone = match claim {
                Some(claim) => Some(claim.at.clone()),
                None => split
                    .claim_name
                    .clone()
                    .zip(split.claim.clone())
                    .map(|((namespace, name), uid)| ClaimRef { namespace, name, uid }),
            };
            Decision::act(Action::Withdraw { gone })
        }
        _ => Decision::default(),
    }
}

/// Whether the volume was made for the claim whose UID is in its name.
fn made_for(seen: &Seen<'_>, split: &Split) -> bool {
    split.claim.as_ref().is_some_and(|uid| super::objects::volume_name(uid) == seen.name)
}

fn failed(message: impl Into<String>) -> Notice {
    Notice::warning("ProvisioningFailed", message)
}

/// A claim without a PersistentVolume.
fn of_claim(seen: &Seen<'_>, claim: &Claim) -> Decision {
    if let Some(split) = seen.split
        && (split.ephemeral || !made_for(seen, split))
    {
        return Decision::tell(
            About::Claim,
            failed(format!(
                "VolumeSplit {} exists and was not made for this claim: it is left alone; delete it if its files are not \
                 needed, or delete the claim and make it anew",
                seen.name
            )),
        );
    }
    if claim.deleting || !claim.volume.is_empty() {
        // A claim that has this very volume waits for its PersistentVolume to be given back by whoever took it.
        return if claim.volume == seen.name { Decision::default() } else { abandoned(seen, Some(claim)) };
    }
    let Some(class) = seen.class else {
        return Decision::tell_after(
            About::Claim,
            failed(format!("StorageClass {:?} does not exist, or is another driver's", claim.class)),
            // A class and its claims are often made at once, in any order.
            Duration::from_secs(2),
        );
    };
    let wanted = match wanted(claim, class) {
        Ok(wanted) => wanted,
        Err(reason) => {
            return Decision { action: withdrawal(seen), ..Decision::tell(About::Claim, failed(reason)) };
        }
    };
    if class.delayed && claim.selected_node.is_none() {
        // Nothing is promised on a node that no pod was given.
        return Decision { action: withdrawal(seen), ..Decision::default() };
    }
    match seen.split {
        None if seen.held_back => Decision::default(),
        None => asked_for(&wanted, claim),
        Some(split) if split.deleting => Decision::tell_after(
            About::Claim,
            Notice::warning("ProvisioningDelayed", "an earlier attempt is still being removed"),
            PATIENCE,
        ),
        // It was made for what the claim said before: another node, or a class made anew.
        Some(split) if split.wish != wish(&wanted.spec) && !split.kept => {
            Decision { action: withdrawal(seen), ..Decision::default() }
        }
        Some(split) => of_split(claim, class, &wanted, split),
    }
}

fn withdrawal(seen: &Seen<'_>) -> Option<Action> {
    let mine = |split: &&Split| made_for(seen, split) && !split.deleting && !split.kept;
    seen.split.filter(mine).map(|_| Action::Withdraw { gone: None })
}

fn asked_for(wanted: &Wanted, claim: &Claim) -> Decision {
    let place = match &wanted.spec.consumer {
        Some(node) => format!(" for node {node}"),
        None => String::new(),
    };
    let told = format!("finding room for {}{place}", wanted.spec.capacity.shown());
    Decision::tell(About::Claim, Notice::normal("Provisioning", told))
        .and(Action::CreateSplit { spec: Box::new(wanted.spec.clone()), claim: claim.at.uid.clone() })
}

/// A claim and the volume that is being made for it.
fn of_split(claim: &Claim, class: &Class, wanted: &Wanted, split: &Split) -> Decision {
    match &split.standing {
        Standing::Ready { capacity, split } => {
            let volume = persistent_volume(claim, class, wanted, *capacity);
            Decision {
                action: Some(Action::CreateVolume(Box::new(volume))),
                told: None,
                done: Some(Told {
                    about: About::Claim,
                    notice: Notice::normal("ProvisioningSucceeded", format!("{}: {split}", capacity.shown())),
                    after: Duration::ZERO,
                }),
            }
        }
        Standing::Infeasible(reason) => {
            let told = Decision::tell(About::Claim, failed(reason.clone()));
            match &claim.selected_node {
                // The annotation goes first and the volume after it: the other way round, the volume would be made again.
                Some(node) if class.delayed => {
                    told.and(Action::Reschedule { claim: claim.at.clone(), node: node.clone() })
                }
                // The splitter plans it when there is room.
                _ => told,
            }
        }
        Standing::Failing(reason) => Decision::tell(About::Claim, failed(reason.clone())),
        Standing::Making(progress) => Decision::tell_after(
            About::Claim,
            Notice::warning(
                "ProvisioningDelayed",
                format!(
                    "still being made: {progress}; does union-csi run on that node, and does a controller lead?"
                ),
            ),
            PATIENCE,
        ),
    }
}

/// A PersistentVolume of this driver.
fn of_volume(seen: &Seen<'_>, volume: &Volume) -> Decision {
    // What somebody made by hand is theirs.
    if !volume.provisioned {
        return Decision::default();
    }
    if volume.to_be_reclaimed() {
        return reclaimed(seen, volume);
    }
    match volume.protection {
        Some(at) if !volume.reclaimed => match seen.split {
            Some(split) if split.claim.is_some() && !split.kept && !split.deleting => {
                Decision::act(Action::Retain { handle: volume.handle.clone() })
            }
            _ => Decision::act(Action::Unprotect { uid: volume.uid.clone(), at }),
        },
        None if volume.reclaimed && !volume.deleting => {
            Decision::act(Action::Protect { uid: volume.uid.clone() })
        }
        _ => lost(seen, volume),
    }
}

/// A PersistentVolume that somebody has or may have, and whose volume is not there.
fn lost(seen: &Seen<'_>, volume: &Volume) -> Decision {
    if volume.deleting {
        return Decision::default();
    }
    let message = match seen.split {
        None => format!(
            "VolumeSplit {} does not exist: the volume's files are gone or cannot be found",
            volume.handle
        ),
        Some(split) if split.deleting => {
            format!("VolumeSplit {} is being deleted, and not by this PersistentVolume", volume.handle)
        }
        Some(_) => return Decision::default(),
    };
    // It is told to be there by one watch, and its volume by another.
    Decision::tell_after(About::Volume, Notice::warning("VolumeLost", message), Duration::from_secs(5))
}

/// A PersistentVolume whose volume is to go, and it after that.
fn reclaimed(seen: &Seen<'_>, volume: &Volume) -> Decision {
    let hindered = |message: String, after| {
        Decision::tell_after(About::Volume, Notice::warning("VolumeFailedDelete", message), after)
    };
    if let Some(other) = seen.shared_with {
        let message = format!(
            "PersistentVolume {other} has the same volume {}: it is not deleted while that exists",
            volume.handle
        );
        return hindered(message, Duration::ZERO);
    }
    match (seen.split, volume.protection) {
        (None, _) if !volume.deleting => Decision::act(Action::DeleteVolume { uid: volume.uid.clone() }),
        (None, Some(at)) => Decision::act(Action::Unprotect { uid: volume.uid.clone(), at }),
        (None, None) => Decision::default(),
        (Some(split), _) if split.ephemeral => hindered(
            format!("volume {} is a pod's own inline volume: it goes with its pod", volume.handle),
            Duration::ZERO,
        ),
        (Some(split), _) if !split.attached.is_empty() => {
            let nodes: Vec<&str> = split.attached.iter().map(crate::domain::NodeName::as_str).collect();
            let message =
                format!("volume is attached to node {}: it is deleted when it is detached", nodes.join(", "));
            hindered(message, PATIENCE)
        }
        (Some(split), _) if split.deleting => hindered(
            "its branches are still being removed: does union-csi run on their nodes?".to_owned(),
            PATIENCE,
        ),
        (Some(_), _) => Decision::act(Action::Reclaim { handle: volume.handle.clone() }),
    }
}
