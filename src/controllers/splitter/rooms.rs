//! What can still be promised of each node, told to whoever publishes it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use super::room::NodeRoom;
use crate::domain::NodeName;

/// The room of nodes as the splitter counts it, with what it has just planned; for one reader.
///
/// It is shared, because the same picture of all volumes and branches a second time would double what the leader keeps and
/// asks for. What was not read yet is held once for each node.
#[derive(Clone, Debug, Default)]
pub struct Rooms(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    news: Mutex<News>,
    told: Notify,
}

#[derive(Debug, Default)]
struct News {
    /// All nodes were told of once, though there may be none.
    begun: bool,
    nodes: Changed,
}

/// Nodes to their room; nothing of one that is gone.
type Changed = BTreeMap<NodeName, Option<NodeRoom>>;

impl Rooms {
    /// These changed; the first time: these are all.
    pub(super) fn tell(&self, changed: Changed) {
        let mut news = self.0.news.lock().unwrap_or_else(PoisonError::into_inner);
        if news.begun && changed.is_empty() {
            return;
        }
        news.begun = true;
        news.nodes.extend(changed);
        self.0.told.notify_one();
    }

    /// What changed since this was last asked, as soon as there is something; the first time: all nodes, as soon as the
    /// splitter knows them.
    pub(in crate::controllers) async fn changed(&self) -> Changed {
        self.0.told.notified().await;
        let mut news = self.0.news.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut news.nodes)
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn one(name: &str, room: Option<NodeRoom>) -> Changed {
        [(name.parse().unwrap(), room)].into()
    }

    #[test]
    fn each_node_is_told_of_once_as_it_is_and_a_cluster_without_nodes_is_told_of_too() {
        let rooms = Rooms::default();
        assert!(rooms.changed().now_or_never().is_none());
        rooms.tell(Changed::new());
        assert!(rooms.changed().now_or_never().unwrap().is_empty(), "that there is none");
        rooms.tell(Changed::new());
        assert!(rooms.changed().now_or_never().is_none());
        rooms.tell(one("a", Some(NodeRoom::default())));
        rooms.tell(one("b", None));
        rooms.tell(one("a", None));
        let news = rooms.changed().now_or_never().unwrap();
        assert_eq!(news.len(), 2);
        assert!(news.values().all(Option::is_none));
        assert!(rooms.changed().now_or_never().is_none());
    }
}
