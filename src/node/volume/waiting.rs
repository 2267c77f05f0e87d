//! Waiting for a volume's branches to be given to this node and opened to it, by the store's own news.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};

use crate::domain::VolumeId;
use crate::store::object::{Branch, Object, Version};
use crate::store::{Event, Selector, Store, StoreError};

/// How long staging waits for that, in all: it takes a second or two where every node answers, and the kubelet gives up a call
/// after two minutes.
pub(super) const GRANT_BOUND: Duration = Duration::from_secs(60);

/// A volume's branches, as the store tells them.
pub(in crate::node) struct BranchNews {
    known: BTreeMap<String, Branch>,
    events: BoxStream<'static, Result<Event<Branch>, StoreError>>,
}

impl BranchNews {
    /// Begins with what was read.
    ///
    /// # Errors
    /// The store cannot be asked.
    pub(super) async fn begin(
        store: &dyn Store,
        volume: &VolumeId,
        read: &[Branch],
    ) -> Result<Self, StoreError> {
        let events = store.branches().watch(Selector::Volume(volume.clone())).await?;
        let known = read.iter().map(|b| (b.meta.name.clone(), b.clone())).collect();
        Ok(Self { known, events })
    }

    /// The branches, when one has changed since the last call. Does not return while nothing changes.
    ///
    /// # Errors
    /// The store tells no more.
    pub(super) async fn changed(&mut self) -> Result<Vec<Branch>, StoreError> {
        loop {
            match self.events.next().await {
                Some(Ok(event)) => {
                    if self.take(event) {
                        return Ok(self.known.values().cloned().collect());
                    }
                }
                Some(Err(error)) => return Err(error),
                // The store is being closed.
                None => std::future::pending().await,
            }
        }
    }

    fn take(&mut self, event: Event<Branch>) -> bool {
        match event {
            Event::Applied(branch) => {
                let version = |b: &Branch| -> Version { b.meta().version.clone() };
                let news = self.known.get(&branch.meta.name).is_none_or(|b| version(b) != version(&branch));
                self.known.insert(branch.meta.name.clone(), branch);
                news
            }
            Event::Deleted(branch) => self.known.remove(&branch.meta.name).is_some(),
            Event::Ready => false,
        }
    }
}
