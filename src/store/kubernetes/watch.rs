//! A watch that goes on by itself.
//!
//! All objects are listed in pages, then the API server tells of each change from the list's version on. It ends each
//! watch after half an hour, which costs one request; where it has forgotten the last version (410), all is listed anew,
//! and what went meanwhile is told as deleted. What is kept of each object for that is its name, uid, version and the spec without
//! its large fields.
//!
//! Nothing is read ahead: who is slow is told late, and the API server ends a watch that is not read.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt};
use futures::{AsyncBufRead, AsyncBufReadExt};
use kube::core::Status;
use kube::core::params::WatchParams;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::collection::{is_expired, page};
use super::endpoint::Endpoint;
use super::fault::{ApiFault, Ask};
use super::resource::Resource;
use super::wire::Misread;
use crate::store::object::{Meta, Version};
use crate::store::{Event, Selector, StoreError};

/// How long the API server is asked to keep a watch open, at least and less than, in seconds: as long as it does unasked at
/// least (`--min-request-timeout`, 1800 s), since a dead one is found by [`QUIET`] and each new one is a request. Spread, so
/// that the agents of a cluster that started together do not come again together.
const OPEN: (u64, u64) = (1500, 1800);

/// A watch on which nothing comes for so long, not even a bookmark (about one a minute), is taken for dead.
const QUIET: Duration = Duration::from_secs(150);

/// The wait after the first failure, doubled with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// The longest wait: an agent is current again so long after its API server is.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// A watch that ended earlier than this was no use: it counts as a failure, or the loop could be a busy one.
const SHORT: Duration = Duration::from_secs(1);

/// Reports the selected objects, now and from now on.
pub(super) fn watch<T: Resource>(
    endpoint: Arc<Endpoint<T>>,
    selector: Selector,
) -> BoxStream<'static, Result<Event<T>, StoreError>> {
    let watch = Watch {
        ask: endpoint.ask("watch", ""),
        endpoint,
        selector,
        known: HashMap::new(),
        round: 0,
        news: VecDeque::new(),
        stage: Stage::List { rest: None, version: None },
        failures: 0,
    };
    stream::unfold(watch, |mut watch| async move {
        loop {
            if let Some(event) = watch.news.pop_front() {
                return Some((Ok(event), watch));
            }
            watch.step().await;
        }
    })
    .boxed()
}

struct Watch<T: Resource> {
    endpoint: Arc<Endpoint<T>>,
    ask: Ask,
    selector: Selector,
    known: HashMap<Box<str>, Known>,
    /// Number of the list that is being read, or was read last.
    round: u32,
    /// To be told.
    news: VecDeque<Event<T>>,
    stage: Stage,
    /// Since the last success.
    failures: u32,
}

/// What is kept of an object that was told of.
struct Known {
    uid: Box<str>,
    version: Box<str>,
    /// What is kept of the spec, as JSON, which is the shortest form at hand.
    spec: Box<str>,
    /// The last list that it was in.
    round: u32,
}

enum Stage {
    /// The next page, and the version of the first.
    List { rest: Option<String>, version: Option<String> },
    /// A watch is to be opened from this version on.
    Open { version: String },
    /// It is open.
    Follow { version: String, lines: Lines, since: Instant },
}

type Lines = Pin<Box<dyn AsyncBufRead + Send>>;

/// A line of a watch.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// What a line means for the watch.
#[derive(Debug, PartialEq, Eq)]
enum Turn {
    /// It goes on, from this version.
    On(String),
    /// The version is forgotten.
    Expired,
    /// It ended for this reason.
    Broken(String),
}

impl<T: Resource> Watch<T> {
    async fn step(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::List { rest: None, version: None }) {
            Stage::List { rest, version } => self.list(rest, version).await,
            Stage::Open { version } => self.open(version).await,
            Stage::Follow { version, lines, since } => self.follow(version, lines, since).await,
        }
    }

    async fn list(&mut self, rest: Option<String>, version: Option<String>) {
        let ask = Ask { verb: "list", ..self.ask.clone() };
        if rest.is_none() {
            self.round = self.round.wrapping_add(1);
        }
        let text = match self.endpoint.page(&ask, &self.selector, rest.clone()).await {
            Ok(text) => text,
            // A page that failed is asked for again, unless the list has to begin anew.
            Err(e) if is_expired(&e) => return self.pause(&e.to_string()).await,
            Err(e) => {
                self.pause(&e.to_string()).await;
                if rest.is_some() {
                    self.stage = Stage::List { rest, version };
                }
                return;
            }
        };
        let page = match page(&ask, &text) {
            Ok(page) => page,
            Err(e) => return self.pause(&e.to_string()).await,
        };
        for item in &page.items {
            match self.endpoint.read(item.get()) {
                Ok(object) => self.present(object),
                Err(misread) => self.misread(&misread),
            }
        }
        let version = version.unwrap_or_else(|| page.metadata.resource_version.clone());
        match page.metadata.rest() {
            Some(rest) => self.stage = Stage::List { rest: Some(rest), version: Some(version) },
            None => {
                self.sweep();
                self.news.push_back(Event::Ready);
                self.stage = Stage::Open { version };
                self.succeeded();
            }
        }
    }

    async fn open(&mut self, version: String) {
        let parameters = WatchParams {
            field_selector: T::fields(&self.selector),
            timeout: u32::try_from(spread(OPEN.0, OPEN.1)).ok(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let opened = match self.endpoint.requests.watch(&parameters, &version) {
            Ok(request) => self.endpoint.open(&self.ask, request).await,
            Err(e) => Err(self.ask.odd(&e)),
        };
        match opened {
            Ok(lines) => {
                self.stage = Stage::Follow { version, lines: Box::pin(lines), since: Instant::now() };
            }
            Err(e) if is_expired(&e) => self.expired(),
            Err(e) => {
                self.stage = Stage::Open { version };
                self.pause(&e.to_string()).await;
            }
        }
    }

    async fn follow(&mut self, version: String, mut lines: Lines, since: Instant) {
        let mut line = Vec::new();
        let broken = match tokio::time::timeout(QUIET, lines.read_until(b'\n', &mut line)).await {
            Ok(Ok(0)) if since.elapsed() >= SHORT => {
                self.stage = Stage::Open { version };
                return;
            }
            Ok(Ok(0)) => "the API server ended it at once".to_owned(),
            Ok(Ok(_)) => match self.line(&line, &version) {
                Turn::On(version) => {
                    self.succeeded();
                    self.stage = Stage::Follow { version, lines, since };
                    return;
                }
                Turn::Expired => return self.expired(),
                Turn::Broken(reason) => reason,
            },
            Ok(Err(e)) => ApiFault::Unreachable { reason: e.to_string() }.to_string(),
            Err(_) => {
                tracing::info!(kind = T::KIND, quiet.s = QUIET.as_secs(), "watch is silent: opened anew");
                self.stage = Stage::Open { version };
                return;
            }
        };
        self.stage = Stage::Open { version };
        self.pause(&broken).await;
    }

    /// Takes in what a line tells.
    fn line(&mut self, line: &[u8], version: &str) -> Turn {
        let line: Line<'_> = match serde_json::from_slice(line) {
            Ok(line) => line,
            // Cut off with the connection.
            Err(e) => return Turn::Broken(format!("an event is not understood: {e}")),
        };
        let text = line.object.get();
        let read = match line.kind {
            "ADDED" | "MODIFIED" | "DELETED" => self.endpoint.read(text),
            "BOOKMARK" => {
                return match serde_json::from_str::<Bookmark>(text) {
                    Ok(bookmark) => Turn::On(bookmark.metadata.resource_version),
                    Err(e) => Turn::Broken(format!("a bookmark is not understood: {e}")),
                };
            }
            "ERROR" => {
                return match serde_json::from_str::<Status>(text) {
                    Ok(status) if status.code == 410 => Turn::Expired,
                    Ok(status) => Turn::Broken(status.message),
                    Err(_) => Turn::Broken(text.chars().take(200).collect()),
                };
            }
            other => {
                tracing::debug!(kind = T::KIND, event = other, "watch event of an unknown type left out");
                return Turn::On(version.to_owned());
            }
        };
        let gone = line.kind == "DELETED";
        let version = match read {
            Ok(object) => {
                let version = object.meta().version.0.clone();
                if gone {
                    self.gone(object)
                } else {
                    self.present(object)
                }
                version
            }
            Err(misread) => {
                if gone {
                    self.forget(&misread);
                } else {
                    self.misread(&misread);
                }
                misread.version.0
            }
        };
        // Without a version there is nothing to go on from but the last one.
        if version.is_empty() {
            Turn::Broken("an event has no version".to_owned())
        } else {
            Turn::On(version)
        }
    }

    fn present(&mut self, object: T) {
        if !self.selector.selects(&object) {
            if self.known.remove(object.meta().name.as_str()).is_some() {
                self.news.push_back(Event::Deleted(object));
            }
            return;
        }
        let meta = object.meta();
        match self.known.get_mut(meta.name.as_str()) {
            Some(known) if *known.version == *meta.version.0 => {
                known.round = self.round;
                return;
            }
            Some(known) if *known.uid != *meta.uid => {
                let last = known.last::<T>(&meta.name);
                self.news.extend(last.map(Event::Deleted));
            }
            _ => {}
        }
        let known = Known {
            uid: meta.uid.as_str().into(),
            version: meta.version.0.as_str().into(),
            spec: compact(&object),
            round: self.round,
        };
        self.known.insert(meta.name.as_str().into(), known);
        self.news.push_back(Event::Applied(object));
    }

    fn gone(&mut self, object: T) {
        self.endpoint.malformed.forget(&object.meta().name);
        if self.known.remove(object.meta().name.as_str()).is_some() {
            self.news.push_back(Event::Deleted(object));
        }
    }

    /// It is there and cannot be told of; what was told of it stays.
    fn misread(&mut self, misread: &Misread) {
        if let Some(known) = self.known.get_mut(misread.name.as_str()) {
            known.round = self.round;
        }
    }

    /// It is gone, and its last state cannot be told.
    fn forget(&mut self, misread: &Misread) {
        self.endpoint.malformed.forget(&misread.name);
        if let Some(known) = self.known.remove(misread.name.as_str()) {
            self.news.extend(known.last(&misread.name).map(Event::Deleted));
        }
    }

    /// Tells what was not in the list that has been read.
    fn sweep(&mut self) {
        let round = self.round;
        let gone = self.known.extract_if(|_, known| known.round != round);
        let mut gone: Vec<_> = gone.collect();
        gone.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.news.extend(gone.iter().filter_map(|(name, known)| known.last(name)).map(Event::Deleted));
    }

    fn expired(&mut self) {
        tracing::info!(kind = T::KIND, "the API server forgot the last version of a watch: all is read anew");
        self.stage = Stage::List { rest: None, version: None };
    }

    fn succeeded(&mut self) {
        if std::mem::take(&mut self.failures) > 0 {
            tracing::info!(kind = T::KIND, "watch goes on");
        }
    }

    async fn pause(&mut self, reason: &str) {
        self.failures = self.failures.saturating_add(1);
        let doubled = 1_u32.checked_shl(self.failures - 1).unwrap_or(u32::MAX);
        let full = FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE);
        let most = u64::try_from(full.as_millis()).unwrap_or(u64::MAX);
        let wait = Duration::from_millis(spread(most / 2, most));
        tracing::warn!(kind = T::KIND, error = reason, retry.ms = wait.as_millis(), "watch failed");
        tokio::time::sleep(wait).await;
    }
}

impl Known {
    /// The last state as far as it is kept.
    fn last<T: Resource>(&self, name: &str) -> Option<T> {
        let spec = serde_json::from_str(&self.spec).ok()?;
        let meta =
            Meta { uid: self.uid.to_string(), version: Version(self.version.to_string()), ..Meta::new(name) };
        Some(T::assemble(meta, spec, T::Status::default()))
    }
}

#[derive(Deserialize)]
struct Bookmark {
    metadata: BookmarkMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMeta {
    resource_version: String,
}

/// What is kept of an object's spec.
fn compact<T: Resource>(object: &T) -> Box<str> {
    let Ok(mut spec) = serde_json::to_value(object.spec()) else { return Box::default() };
    if let Some(fields) = spec.as_object_mut() {
        fields.retain(|field, _| !T::FORGOTTEN.contains(&field.as_str()));
    }
    spec.to_string().into()
}

/// A number from `least` on, below `most`, another each time.
fn spread(least: u64, most: u64) -> u64 {
    let random = RandomState::new().build_hasher().finish();
    least + random % most.saturating_sub(least).max(1)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::object::{Branch, StorageNode, VolumeSplit};

    fn kept<T: Resource>(object: T) {
        let meta = object.meta();
        let known = Known { uid: "u".into(), version: "1".into(), spec: compact(&object), round: 0 };
        let last = known.last::<T>(&meta.name).expect("what is kept is an object");
        assert_eq!(T::id(last.spec()), meta.name);
        assert_eq!((last.meta().name.as_str(), last.meta().uid.as_str()), (meta.name.as_str(), "u"));
        let (last, object) = (serde_json::to_value(last.spec()), serde_json::to_value(object.spec()));
        let (last, object) = (last.expect("a spec"), object.expect("a spec"));
        for (field, value) in object.as_object().expect("fields") {
            assert!(T::FORGOTTEN.contains(&field.as_str()) || last[field] == *value, "{field} is kept");
        }
    }

    #[test]
    fn the_last_state_of_an_object_that_went_unseen_is_what_it_was_for() {
        kept::<Branch>(crate::store::contract::branch("v", 3, "n"));
        let split = json!({"meta": {"name": "v"}, "spec": {
            "volume": "v", "requestName": "v", "capacity": 7, "limit": 9, "accessModes": ["SingleNodeWriter"],
            "parameters": {"strategy": "fewest"}, "topology": ["n"], "nextIndex": 4, "used": true
        }});
        kept::<VolumeSplit>(serde_json::from_value(split).expect("a volume"));
        let node = json!({"meta": {"name": "n"}, "spec": {"node": "n"}});
        kept::<StorageNode>(serde_json::from_value(node).expect("a node"));
    }
}
