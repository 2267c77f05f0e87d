//! Does the writes that were decided on, one after the other.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use snafu::{Snafu, ensure};

use super::decide::{FINALIZER, Write};
use super::index::{Identity, Volume, Wish};
use crate::controllers::cluster::{Cluster, FIELD_MANAGER, said};
use crate::controllers::lease::NotLeading;
use crate::domain::VolumeId;
use crate::domain::volume::VolumeMode;
use crate::store::attach::{AttachRefused, Detach, attached, change, detached};
use crate::store::object::Attachment;
use crate::store::reach::network_of;
use crate::store::view::owners;
use crate::store::{Store, StoreError};

/// The longest error in a status, in bytes: the API server refuses more (`maxVolumeErrorMessageSize`).
const LONGEST_MESSAGE: usize = 1024;

/// A write was not done.
#[derive(Debug, Snafu)]
pub(super) enum ApplyError {
    /// The volume cannot be attached now.
    #[snafu(display("{reason}"))]
    Refused {
        /// Why.
        reason: String,
    },
    /// Another writer came first.
    #[snafu(display("{name} was changed meanwhile"))]
    Conflict {
        /// What.
        name: String,
    },
    /// The API server did not do it.
    #[snafu(display("cannot {action} {name}: {reason}"))]
    Api {
        /// What was to be done.
        action: &'static str,
        /// To which object.
        name: String,
        /// The server's words.
        reason: String,
    },
    /// The store did not do it.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why.
        source: StoreError,
    },
    /// Somebody else leads.
    #[snafu(display("{source}"), context(false))]
    NotLeading {
        /// Why.
        source: NotLeading,
    },
}

impl From<AttachRefused> for ApplyError {
    fn from(refused: AttachRefused) -> Self {
        Self::Refused { reason: refused.to_string() }
    }
}

impl ApplyError {
    /// Another writer came first: no fault of anyone.
    pub(super) fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. } | Self::Store { source: StoreError::Conflict { .. } })
    }
}

/// What a write left.
#[derive(Debug)]
pub(super) enum Written {
    Wish(Box<Wish>),
    Volume(Box<Volume>),
    Held { wish: String, volume: VolumeId, attached: bool },
}

/// The objects that were decided on.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    /// Name of the VolumeAttachment; empty where the decision is about a PersistentVolume alone.
    pub(super) name: String,
    pub(super) wish: Option<Wish>,
    pub(super) volume: Option<Volume>,
}

/// Does writes.
#[derive(Clone)]
pub(super) struct Writer {
    pub(super) cluster: Cluster,
    pub(super) store: Arc<dyn Store>,
    pub(super) clock: fn() -> Timestamp,
}

impl Writer {
    /// Does them in turn, to the first that fails. The reason why a volume is not attached or detached is written to the
    /// VolumeAttachment.
    pub(super) async fn apply(
        &self,
        mut subject: Subject,
        writes: Vec<Write>,
    ) -> (Vec<Written>, Result<(), ApplyError>) {
        let mut written = Vec::new();
        for write in writes {
            let error = match self.write(&mut subject, &write, &mut written).await {
                Ok(()) => continue,
                Err(error) => error,
            };
            if !error.is_conflict() && !matches!(error, ApplyError::NotLeading { .. }) {
                let told = self.tell_failure(&mut subject, &write, &error, &mut written).await;
                if let Err(error) = told {
                    tracing::warn!(volume_attachment = subject.name, %error, "the reason could not be written");
                }
            }
            return (written, Err(error));
        }
        (written, Ok(()))
    }

    async fn write(
        &self,
        subject: &mut Subject,
        write: &Write,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        self.cluster.claim.held()?;
        match write {
            Write::KeepWish => self.wish_finalizers(subject, true, written).await,
            Write::ReleaseWish => self.wish_finalizers(subject, false, written).await,
            Write::KeepVolume => self.volume_finalizers(subject, true, written).await,
            Write::ReleaseVolume => self.volume_finalizers(subject, false, written).await,
            Write::Attach { volume, wanted, mode } => {
                self.still_so(subject).await?;
                self.attach(volume, wanted, *mode).await?;
                written.push(Written::Held {
                    wish: subject.name.clone(),
                    volume: volume.clone(),
                    attached: true,
                });
                Ok(())
            }
            Write::TellAttached => {
                let status = json!({"attached": true, "attachError": null, "detachError": null});
                self.status(subject, status, written).await
            }
            Write::Refuse(reason) => RefusedSnafu { reason }.fail(),
            Write::Detach(volumes) => self.detach(subject, volumes, written).await,
            Write::DetachIfGone(volumes) => {
                let there = self.wishes().list(&only(&subject.name)).await;
                let there = there.map_err(|error| failed("read VolumeAttachment", &subject.name, &error))?;
                match there.items.into_iter().find_map(Wish::read) {
                    // The watch is late: what it tells next is decided on.
                    Some(_) => ConflictSnafu { name: &subject.name }.fail(),
                    None => self.detach(subject, volumes, written).await,
                }
            }
        }
    }

    /// Refuses where the PersistentVolume is not what was decided on: how a volume is attached follows from it, and stays so. The
    /// two watches are not in step: one that was changed before the VolumeAttachment was made may be told after it.
    async fn still_so(&self, subject: &Subject) -> Result<(), ApplyError> {
        let Some(known) = &subject.volume else { return Ok(()) };
        let name = &known.identity.name;
        let there = self.volumes().list(&only(name)).await;
        let there = there.map_err(|error| failed("read PersistentVolume", name, &error))?;
        let now = there.items.into_iter().find_map(Volume::read);
        ensure!(now.is_some_and(|now| now.says_what(known)), ConflictSnafu { name });
        Ok(())
    }

    async fn attach(
        &self,
        volume: &VolumeId,
        wanted: &Attachment,
        mode: VolumeMode,
    ) -> Result<(), ApplyError> {
        if self.store.nodes().get(wanted.node.as_str()).await?.is_none() {
            let reason = format!("node {} does not run union-csi: no StorageNode has that name", wanted.node);
            return RefusedSnafu { reason }.fail();
        }
        let gone = || {
            let reason = format!("volume {volume} does not exist: its VolumeSplit is gone");
            RefusedSnafu { reason }.build()
        };
        let split = self.store.splits().get(volume.as_str()).await?.ok_or_else(gone)?;
        let ends = owners(&split).into_iter().chain([&wanted.node]);
        let network = network_of(&*self.store, ends).await?;
        change(self.store.splits(), volume, |split| {
            let changed = attached(&split.ok_or_else(gone)?, wanted, mode, &network)?;
            self.cluster.claim.held()?;
            Ok(changed)
        })
        .await
    }

    async fn detach(
        &self,
        subject: &Subject,
        volumes: impl IntoIterator<Item = &VolumeId>,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        let from = Detach::AskedBy(subject.name.clone());
        for volume in volumes {
            change(self.store.splits(), volume, |split| {
                self.cluster.claim.held()?;
                Ok::<_, ApplyError>(split.and_then(|split| detached(&split, &from)))
            })
            .await?;
            written.push(Written::Held {
                wish: subject.name.clone(),
                volume: volume.clone(),
                attached: false,
            });
        }
        Ok(())
    }

    /// Why the volume is not attached, or not detached; nothing where that is known.
    async fn tell_failure(
        &self,
        subject: &mut Subject,
        write: &Write,
        error: &ApplyError,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        let Some(wish) = &subject.wish else { return Ok(()) };
        let message = shortened(&error.to_string()).to_owned();
        let told = json!({"message": message, "time": (self.clock)().to_string()});
        let status = match write {
            Write::Detach(_) if wish.detach_error.as_ref() != Some(&message) => json!({"detachError": told}),
            Write::KeepVolume | Write::Attach { .. } | Write::Refuse(_)
                if wish.attached || wish.attach_error.as_ref() != Some(&message) =>
            {
                json!({"attached": false, "attachError": told})
            }
            _ => return Ok(()),
        };
        self.cluster.claim.held()?;
        self.status(subject, status, written).await
    }

    /// Writes the status of the VolumeAttachment. Nobody else does, so no version is named: only that it is this object.
    async fn status(
        &self,
        subject: &mut Subject,
        status: Value,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        let Some(wish) = &subject.wish else { return Ok(()) };
        let patch = json!({"metadata": {"uid": wish.identity.uid}, "status": status});
        let result =
            self.wishes().patch_status(&wish.identity.name, &parameters(), &Patch::Merge(&patch)).await;
        let now =
            result.map_err(|error| failed("write the status of VolumeAttachment", &subject.name, &error))?;
        take_wish(subject, now, written);
        Ok(())
    }

    async fn wish_finalizers(
        &self,
        subject: &mut Subject,
        keep: bool,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        let Some(wish) = &subject.wish else { return Ok(()) };
        let patch = finalizers(&wish.identity, keep);
        match self.wishes().patch(&wish.identity.name, &parameters(), &Patch::Merge(&patch)).await {
            Ok(now) => {
                take_wish(subject, now, written);
                Ok(())
            }
            Err(error) if !keep && is_missing(&error) => Ok(()),
            Err(error) => Err(failed("change the finalizers of VolumeAttachment", &subject.name, &error)),
        }
    }

    async fn volume_finalizers(
        &self,
        subject: &mut Subject,
        keep: bool,
        written: &mut Vec<Written>,
    ) -> Result<(), ApplyError> {
        let Some(volume) = &subject.volume else { return Ok(()) };
        let patch = finalizers(&volume.identity, keep);
        let name = volume.identity.name.clone();
        match self.volumes().patch(&name, &parameters(), &Patch::Merge(&patch)).await {
            Ok(now) => {
                subject.volume = Volume::read(now);
                written.extend(subject.volume.clone().map(|volume| Written::Volume(Box::new(volume))));
                Ok(())
            }
            Err(error) if !keep && is_missing(&error) => Ok(()),
            Err(error) => Err(failed("change the finalizers of PersistentVolume", &name, &error)),
        }
    }

    fn wishes(&self) -> Api<VolumeAttachment> {
        Api::all(self.cluster.client.clone())
    }

    fn volumes(&self) -> Api<PersistentVolume> {
        Api::all(self.cluster.client.clone())
    }
}

fn take_wish(subject: &mut Subject, now: VolumeAttachment, written: &mut Vec<Written>) {
    subject.wish = Wish::read(now);
    written.extend(subject.wish.clone().map(|wish| Written::Wish(Box::new(wish))));
}

/// One object, as a list: that needs no right beside those of the watch.
fn only(name: &str) -> ListParams {
    ListParams::default().fields(&format!("metadata.name={name}"))
}

fn parameters() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// A merge patch replaces the whole list, so it names the version that it was made from.
fn finalizers(identity: &Identity, keep: bool) -> Value {
    let others = identity.finalizers.iter().map(String::as_str).filter(|f| *f != FINALIZER);
    let list: Vec<&str> = others.chain(keep.then_some(FINALIZER)).collect();
    json!({"metadata": {"uid": identity.uid, "resourceVersion": identity.version, "finalizers": list}})
}

fn failed(action: &'static str, name: &str, error: &kube::Error) -> ApplyError {
    match error {
        kube::Error::Api(status) if status.code == 409 => ConflictSnafu { name }.build(),
        other => ApiSnafu { action, name, reason: said(other) }.build(),
    }
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

fn shortened(message: &str) -> &str {
    &message[..message.floor_char_boundary(LONGEST_MESSAGE)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_finalizers_of_others_stay_in_their_order() {
        let identity = Identity {
            finalizers: ["a/a", FINALIZER, "b/b"].map(str::to_owned).to_vec(),
            version: "7".to_owned(),
            ..Identity::default()
        };
        let list = |keep| finalizers(&identity, keep)["metadata"]["finalizers"].clone();
        assert_eq!(list(false), json!(["a/a", "b/b"]));
        assert_eq!(list(true), json!(["a/a", "b/b", FINALIZER]));
        assert_eq!(finalizers(&identity, true)["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let long = "ä".repeat(LONGEST_MESSAGE);
        assert_eq!(shortened(&long).len(), LONGEST_MESSAGE);
        assert_eq!(shortened(&format!("x{long}")).len(), LONGEST_MESSAGE - 1);
        assert_eq!(shortened("short"), "short");
    }
}
