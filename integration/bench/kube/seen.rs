//! When something was seen for the first time, as a watch tells it: closer than asking again and again.

use std::collections::HashMap;
use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

/// No step takes so long, unless something is wrong.
pub const BOUND: Duration = Duration::from_secs(120);

/// Objects by name, and when each was first seen to be so.
pub struct Seen {
    what: &'static str,
    times: watch::Receiver<HashMap<String, Instant>>,
}

impl Seen {
    /// Follows the objects for as long as the benchmark runs.
    pub fn follow<K>(what: &'static str, api: Api<K>, is_so: fn(&K) -> bool) -> Self
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Send + 'static,
        K::DynamicType: Default,
    {
        let (tell, times) = watch::channel(HashMap::new());
        tokio::spawn(async move {
            let mut objects =
                watcher(api, watcher::Config::default()).default_backoff().touched_objects().boxed();
            while let Some(object) = objects.next().await {
                if let Ok(object) = object
                    && is_so(&object)
                {
                    let now = Instant::now();
                    tell.send_if_modified(|times: &mut HashMap<String, Instant>| {
                        let news = !times.contains_key(&object.name_any());
                        times.entry(object.name_any()).or_insert(now);
                        news
                    });
                }
            }
        });
        Self { what, times }
    }

    /// Waits until it is so; when that was.
    pub async fn at(&self, name: &str) -> Instant {
        let mut times = self.times.clone();
        let seen = times.wait_for(|times| times.contains_key(name));
        let Ok(seen) = tokio::time::timeout(BOUND, seen).await else {
            let dump = |arguments: &[&str]| eprintln!("{}", super::support::kubectl(arguments));
            dump(&["describe", "pvc,pods", "-n", super::nodes::NAMESPACE]);
            dump(&["logs", "-n", "union", "-l", "app.kubernetes.io/name=union-csi", "--prefix", "--tail=30"]);
            panic!("{name} is not {} within {BOUND:?}", self.what);
        };
        seen.expect("the watch goes on")[name]
    }
}
