//! Following one volume.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;

use crate::domain::VolumeId;
use crate::store::object::VolumeSplit;
use crate::store::{Event, Selector, Store, StoreError};

/// Pause before a watch that ended is begun anew.
const REWATCH: Duration = Duration::from_millis(100);

/// The states of one volume as they come; a watch that ends or fails is begun anew, because every wait has a deadline of
/// its own.
pub(super) struct States<'a> {
    store: &'a dyn Store,
    volume: &'a VolumeId,
    stream: Option<BoxStream<'static, Result<Event<VolumeSplit>, StoreError>>>,
    seen: bool,
}

impl<'a> States<'a> {
    pub(super) fn new(store: &'a dyn Store, volume: &'a VolumeId) -> Self {
        Self { store, volume, stream: None, seen: false }
    }

    /// The next state; `None` when the volume is gone.
    pub(super) async fn next(&mut self) -> Option<VolumeSplit> {
        loop {
            let Some(stream) = &mut self.stream else {
                self.watch().await;
                continue;
            };
            match stream.next().await {
                Some(Ok(Event::Applied(split))) => {
                    self.seen = true;
                    return Some(split);
                }
                Some(Ok(Event::Deleted(_))) => return None,
                Some(Ok(Event::Ready)) if self.seen => {}
                Some(Ok(Event::Ready)) => return None,
                Some(Err(error)) => {
                    tracing::warn!(volume.id = %self.volume, %error, "watching a volume failed; begun anew");
                    self.stream = None;
                    tokio::time::sleep(REWATCH).await;
                }
                None => {
                    self.stream = None;
                    tokio::time::sleep(REWATCH).await;
                }
            }
        }
    }

    async fn watch(&mut self) {
        self.seen = false;
        let selector = Selector::Name(self.volume.to_string());
        match self.store.splits().watch(selector).await {
            Ok(stream) => self.stream = Some(stream),
            Err(error) => {
                tracing::warn!(volume.id = %self.volume, %error, "watching a volume failed; begun anew");
                tokio::time::sleep(REWATCH).await;
            }
        }
    }
}
