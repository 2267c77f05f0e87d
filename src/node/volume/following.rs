//! Following what the store says of branches on other nodes that volumes of this node use.
//!
//! A watch costs a connection to the API server and a request every few minutes. With a few volumes each has one for its own
//! branches; where the volumes are more than the nodes that own their branches, each of those nodes' branches are watched
//! instead: a consumer of hundreds of volumes needs as many watches as it has owners.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};

use super::slot::{Hints, Slot};
use super::waiting::BranchNews;
use super::{Core, Volumes};
use crate::domain::{NodeName, VolumeId};
use crate::store::object::Branch;
use crate::store::{Event, Selector, StoreError};

/// How soon the store is asked again that could not tell its news.
const ASK_AGAIN: Duration = Duration::from_secs(15);

/// Whose branches' objects are followed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::node) enum Followed {
    /// Those of a volume.
    Volume(VolumeId),
    /// Those on a node.
    Owner(NodeName),
}

/// What is to be followed for volumes with branches on these nodes: as few as possible.
pub(in crate::node) fn to_follow(remote: &BTreeMap<VolumeId, BTreeSet<NodeName>>) -> BTreeSet<Followed> {
    let owners: BTreeSet<&NodeName> = remote.values().flatten().collect();
    if remote.len() <= owners.len() {
        return remote.keys().cloned().map(Followed::Volume).collect();
    }
    owners.into_iter().cloned().map(Followed::Owner).collect()
}

/// News of what is followed.
pub(in crate::node) enum News {
    /// Of a volume's branches.
    Volume(BranchNews),
    /// Of a node's branches.
    Owner(BoxStream<'static, Result<Event<Branch>, StoreError>>),
}

impl Volumes {
    /// The volumes some of whose branches lie on other nodes, and on which.
    pub(in crate::node) fn remote(&self) -> BTreeMap<VolumeId, BTreeSet<NodeName>> {
        self.core.slots.remote()
    }

    /// Waits for news of branches on other nodes, and takes them; `news` is what the last call gave back. Also the volumes for
    /// which they change who may use a branch, or how it is reached.
    pub(in crate::node) async fn follow(
        &self,
        followed: &Followed,
        news: Option<News>,
    ) -> (Option<News>, Vec<VolumeId>) {
        match self.next_news(followed, news).await {
            Ok((news, branches)) => {
                let matter = self.core.take_news(&branches);
                (Some(news), matter)
            }
            Err(error) => {
                tracing::warn!(
                    following = ?followed, error = %error, retry.seconds = ASK_AGAIN.as_secs(),
                    "news of branches on other nodes are not told"
                );
                tokio::time::sleep(ASK_AGAIN).await;
                (None, Vec::new())
            }
        }
    }

    async fn next_news(
        &self,
        followed: &Followed,
        news: Option<News>,
    ) -> Result<(News, Vec<Branch>), StoreError> {
        let mut news = match (news, followed) {
            (Some(news), _) => news,
            (None, Followed::Volume(volume)) => {
                News::Volume(BranchNews::begin(self.store.as_ref(), volume, &[]).await?)
            }
            (None, Followed::Owner(node)) => {
                News::Owner(self.store.branches().watch(Selector::Node(node.clone())).await?)
            }
        };
        let branches = match &mut news {
            News::Volume(of) => of.changed().await?,
            News::Owner(events) => loop {
                match events.next().await {
                    Some(Ok(Event::Applied(branch))) => break vec![branch],
                    Some(Ok(Event::Deleted(_) | Event::Ready)) => {}
                    Some(Err(error)) => return Err(error),
                    // The store is being closed.
                    None => std::future::pending().await,
                }
            },
        };
        Ok((news, branches))
    }

    /// Reads the volume's branches once, for one that was staged after the news of their owners began. True where that changes
    /// what is known of them.
    pub(in crate::node) async fn catch_up(&self, volume: &VolumeId) -> bool {
        loop {
            let Some(slot) = self.core.slots.known(volume) else { return false };
            let told = slot.hints().told;
            match self.store.branches().list(&Selector::Volume(volume.clone())).await {
                Ok(branches) => {
                    if let Some(matters) = self.core.note_unless_told(&slot, told, &branches) {
                        return matters;
                    }
                    // Something was told meanwhile, and may be newer than what was read.
                }
                Err(error) => {
                    tracing::warn!(
                        volume.id = %volume, error = %error, retry.seconds = ASK_AGAIN.as_secs(),
                        "its branches on other nodes cannot be read"
                    );
                    tokio::time::sleep(ASK_AGAIN).await;
                }
            }
        }
    }
}

impl Core {
    /// Takes what the store told of branches; the volumes for which it is news.
    fn take_news(&self, branches: &[Branch]) -> Vec<VolumeId> {
        let mut by_volume: BTreeMap<&VolumeId, Vec<&Branch>> = BTreeMap::new();
        for branch in branches {
            by_volume.entry(&branch.spec.volume).or_default().push(branch);
        }
        let mut matter = Vec::new();
        for (volume, branches) in by_volume {
            let Some(slot) = self.slots.known(volume) else { continue };
            let mut hints = slot.hints();
            hints.told += 1;
            if self.heed(&mut hints, branches) {
                // What is being staged looks for itself.
                if !hints.owners.is_empty() {
                    matter.push(volume.clone());
                }
            }
        }
        matter
    }

    /// Takes what was read of a volume's branches, unless the store has told of them since `told` was looked at.
    fn note_unless_told(&self, slot: &Slot, told: u64, branches: &[Branch]) -> Option<bool> {
        let mut hints = slot.hints();
        if hints.told != told {
            return None;
        }
        Some(self.heed(&mut hints, branches))
    }

    /// As [`Core::note_in`]; news may be what a repair waits for.
    fn heed<'a>(&self, hints: &mut Hints, branches: impl IntoIterator<Item = &'a Branch>) -> bool {
        let matters = self.note_in(hints, branches);
        if matters {
            hints.next_attempt = None;
        }
        matters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remote(of: &[(&str, &[&str])]) -> BTreeMap<VolumeId, BTreeSet<NodeName>> {
        let nodes = |names: &[&str]| names.iter().map(|n| n.parse().unwrap()).collect();
        of.iter().map(|(volume, owners)| (volume.parse().unwrap(), nodes(owners))).collect()
    }

    #[test]
    fn a_volume_over_many_nodes_is_followed_by_itself_and_many_volumes_by_their_owners() {
        assert!(to_follow(&BTreeMap::new()).is_empty());
        let wide = to_follow(&remote(&[("pvc-1", &["a", "b", "c"])]));
        assert_eq!(wide, [Followed::Volume("pvc-1".parse().unwrap())].into());
        let many = to_follow(&remote(&[("pvc-1", &["a", "b"]), ("pvc-2", &["b"]), ("pvc-3", &["a"])]));
        let owner = |name: &str| Followed::Owner(name.parse().unwrap());
        assert_eq!(many, [owner("a"), owner("b")].into());
    }
}
