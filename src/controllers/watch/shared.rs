//! One watch of each kind of object for all controllers of a term.
//!
//! A watch keeps what it needs to tell that an object went unseen, and each event of it is sent and read once for every watch: with
//! ten thousand volumes four watches of them are most of what a leader would have in memory. Here each kind is watched once, and
//! whoever works on it is told of each change in the same order.
//!
//! All who want to hear are known before the first event: nothing is kept for those who come later. What is not taken yet is
//! bounded: a controller that is slow makes the watch, and with it the others, wait.

use std::sync::Arc;

use futures::stream::{BoxStream, StreamExt, poll_fn};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Stored, Told, stored};
use crate::store::Store;
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// Changes that a controller may be behind.
const BEHIND: usize = 32;

type News<T> = BoxStream<'static, Told<T>>;

/// Those who are told of one kind.
type Hearers<T> = Vec<mpsc::Sender<Arc<Told<T>>>>;

/// Watches that controllers share. Give it to all of them, then let it [run](Watches::run).
pub struct Watches {
    store: Arc<dyn Store>,
    splits: Hearers<VolumeSplit>,
    branches: Hearers<Branch>,
    nodes: Hearers<StorageNode>,
}

impl Watches {
    /// Of the objects in `store`.
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store, splits: Vec::new(), branches: Vec::new(), nodes: Vec::new() }
    }

    /// Tells everyone of every change, until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let Self { store, splits, branches, nodes } = self;
        let all = futures::future::join3(tell(&store, splits), tell(&store, branches), tell(&store, nodes));
        shutdown.run_until_cancelled(all).await;
    }
}

/// Tells of one kind. Does not return.
async fn tell<T: Stored + Sync>(store: &Arc<dyn Store>, hearers: Hearers<T>) {
    if !hearers.is_empty() {
        let mut news = stored::<T>(store);
        while let Some(told) = news.next().await {
            let told = Arc::new(told);
            for hearer in &hearers {
                // One that has ended hears no more.
                let _ = hearer.send(told.clone()).await;
            }
        }
    }
    futures::future::pending().await
}

fn hear<T: Clone + Send + Sync + 'static>(hearers: &mut Hearers<T>) -> Option<News<T>> {
    let (hearer, mut news) = mpsc::channel::<Arc<Told<T>>>(BEHIND);
    hearers.push(hearer);
    Some(poll_fn(move |context| news.poll_recv(context)).map(Arc::unwrap_or_clone).boxed())
}

/// How one controller hears of objects: by watches that it shares with others, or by its own.
pub(in crate::controllers) struct Heard {
    store: Arc<dyn Store>,
    splits: Option<News<VolumeSplit>>,
    branches: Option<News<Branch>>,
    nodes: Option<News<StorageNode>>,
}

impl Heard {
    /// By watches of its own.
    pub(in crate::controllers) fn alone(store: &Arc<dyn Store>) -> Self {
        Self { store: store.clone(), splits: None, branches: None, nodes: None }
    }

    /// By shared ones, of every kind: each must be taken.
    pub(in crate::controllers) fn all(watches: &mut Watches) -> Self {
        Self {
            branches: hear(&mut watches.branches),
            nodes: hear(&mut watches.nodes),
            ..Self::volumes(watches)
        }
    }

    /// By a shared one, of volumes, which must be taken.
    pub(in crate::controllers) fn volumes(watches: &mut Watches) -> Self {
        Self { splits: hear(&mut watches.splits), ..Self::alone(&watches.store) }
    }

    /// Changes of volumes, beginning with all of them.
    pub(in crate::controllers) fn splits(&mut self) -> News<VolumeSplit> {
        self.splits.take().unwrap_or_else(|| stored(&self.store))
    }

    /// Changes of branches, beginning with all of them.
    pub(in crate::controllers) fn branches(&mut self) -> News<Branch> {
        self.branches.take().unwrap_or_else(|| stored(&self.store))
    }

    /// Changes of nodes, beginning with all of them.
    pub(in crate::controllers) fn nodes(&mut self) -> News<StorageNode> {
        self.nodes.take().unwrap_or_else(|| stored(&self.store))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::store::contract::branch;
    use crate::store::local::LocalStore;

    const COUNT: u32 = 3 * 32;

    /// The branches' names up to the end of the first reading, in that order.
    async fn first_reading(news: &mut News<Branch>) -> Vec<String> {
        let mut names = Vec::new();
        loop {
            match news.next().await.expect("the watches run") {
                Told::Here(name, _) => names.push(name),
                Told::Gone(name) => panic!("{name} is there"),
                Told::Only(all) => assert_eq!(all.len(), names.len()),
                Told::FirstRead => return names,
            }
        }
    }

    #[tokio::test]
    async fn everyone_hears_of_everything_and_one_that_ended_holds_up_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
        for index in 0..COUNT {
            store.branches().create(branch("v", index, "n")).await.unwrap();
        }
        let mut watches = Watches::new(store.clone());
        let [mut one, mut other, mut ended] =
            [(); 3].map(|()| hear(&mut watches.branches).expect("it is heard"));
        let volumes = Heard::volumes(&mut watches).splits();
        let stop = CancellationToken::new();
        let running = tokio::spawn(watches.run(stop.clone()));
        ended.next().await.expect("the first");
        drop((ended, volumes));

        let (first, second) = tokio::join!(first_reading(&mut one), first_reading(&mut other));
        assert_eq!(first, second, "in the same order");
        assert_eq!(first.into_iter().collect::<BTreeSet<_>>().len(), usize::try_from(COUNT).unwrap());

        store.branches().create(branch("w", 0, "n")).await.unwrap();
        for news in [&mut one, &mut other] {
            assert!(matches!(news.next().await, Some(Told::Here(name, _)) if name == "w-0"));
        }
        stop.cancel();
        running.await.unwrap();
        assert!(one.next().await.is_none(), "the term is over");
    }

    #[tokio::test]
    async fn a_controller_alone_watches_by_itself() {
        let directory = tempfile::tempdir().unwrap();
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&directory.path().join("s")).unwrap());
        store.branches().create(branch("v", 0, "n")).await.unwrap();
        assert_eq!(first_reading(&mut Heard::alone(&store).branches()).await, ["v-0"]);
    }
}
