//! Reads and writes of the objects of one kind.

use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;
use http::Request;
use http::header::CONTENT_TYPE;
use kube::core::params::{DeleteParams, GetParams, ListParams, PostParams, Preconditions};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::endpoint::{Endpoint, Server};
use super::fault::{ApiFault, Ask};
use super::resource::Resource;
use super::watch::watch;
use super::wire::{self, Misread};
use crate::store::object::Version;
use crate::store::{Collection, Event, Selector, StoreError};

/// Objects a page: a page of the largest objects stays within a few MiB.
const PAGE: u32 = 500;

/// Media types of patches.
const JSON_PATCH: &str = "application/json-patch+json";
/// As [`JSON_PATCH`].
const APPLY: &str = "application/apply-patch+yaml";

/// How often a list is begun anew where the API server forgot its continuation in the middle.
const LISTS: u32 = 3;

/// The objects of one kind.
pub(super) struct Resources<T>(Arc<Endpoint<T>>);

/// A page of a list.
#[derive(Deserialize)]
pub(super) struct Page<'a> {
    pub(super) metadata: PageMeta,
    #[serde(borrow)]
    pub(super) items: Vec<&'a RawValue>,
}

/// Where a page stands.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PageMeta {
    /// Version of the whole list.
    pub(super) resource_version: String,
    #[serde(rename = "continue", default)]
    pub(super) rest: Option<String>,
}

impl PageMeta {
    /// The token for the next page.
    pub(super) fn rest(self) -> Option<String> {
        self.rest.filter(|token| !token.is_empty())
    }
}

impl<T: Resource> Resources<T> {
    pub(super) fn new(server: &Arc<Server>) -> Self {
        Self(Arc::new(Endpoint::new(server)))
    }

    /// Versions of objects that were not understood.
    pub(super) fn malformed(&self) -> u64 {
        self.0.malformed.told()
    }

    async fn list_once(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        let ask = self.0.ask("list", "");
        let mut found = Vec::new();
        let mut rest = None;
        loop {
            let text = self.0.page(&ask, selector, rest).await?;
            let page = page(&ask, &text)?;
            let read = page.items.iter().filter_map(|item| self.0.read(item.get()).ok());
            found.extend(read.filter(|object| selector.selects(object)));
            rest = page.metadata.rest();
            if rest.is_none() {
                return Ok(found);
            }
        }
    }

    async fn patch(
        &self,
        ask: &Ask,
        content: &'static str,
        uri: String,
        body: Vec<u8>,
    ) -> Result<T, StoreError> {
        let request = Request::patch(uri).header(CONTENT_TYPE, content).body(body);
        let text = self.0.send(ask, request.map_err(|e| ask.odd(&e))?).await?;
        self.understood(&text)
    }

    fn understood(&self, text: &str) -> Result<T, StoreError> {
        let malformed = |m: Misread| StoreError::Malformed { kind: T::KIND, name: m.name, reason: m.reason };
        self.0.read(text).map_err(malformed)
    }

    /// A write that names no version would overwrite what it has not seen.
    async fn versioned(&self, object: &T) -> Result<(), StoreError> {
        let (kind, name) = (T::KIND, object.meta().name.clone());
        if !object.meta().version.0.is_empty() && is_name(&name) {
            return Ok(());
        }
        match self.get(&name).await? {
            None => Err(StoreError::Missing { kind, name }),
            Some(_) => Err(StoreError::Conflict { kind, name }),
        }
    }

    fn uri(&self, name: &str, subresource: &str) -> String {
        let (path, manager) = (&self.0.requests.url_path, &self.0.server.field_manager);
        format!("{path}/{name}{subresource}?fieldManager={manager}")
    }
}

/// A page of a list.
pub(super) fn page<'a>(ask: &Ask, text: &'a str) -> Result<Page<'a>, StoreError> {
    serde_json::from_str(text).map_err(|e| ask.odd(&e))
}

/// Whether an object can have that name, in the widest sense; others are not asked for, because they would name
/// something else in an address.
fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
    !name.is_empty() && name.len() <= 253 && name.bytes().all(plain) && !name.starts_with('.')
}

impl Ask {
    /// What was to be sent, or was answered, is not as the API says.
    pub(super) fn odd(&self, reason: &dyn std::fmt::Display) -> StoreError {
        self.backend(ApiFault::Odd { reason: reason.to_string() })
    }
}

impl<T: Resource> Endpoint<T> {
    /// The text of a page of the selected objects.
    pub(super) async fn page(
        &self,
        ask: &Ask,
        selector: &Selector,
        rest: Option<String>,
    ) -> Result<String, StoreError> {
        let parameters = ListParams {
            field_selector: T::fields(selector),
            limit: Some(PAGE),
            continue_token: rest,
            ..ListParams::default()
        };
        let request = self.requests.list(&parameters).map_err(|e| ask.odd(&e))?;
        self.send(ask, request).await
    }

    /// The object that `text` is; one that is not understood is reported.
    pub(super) fn read(&self, text: &str) -> Result<T, Misread> {
        match wire::read::<T>(text) {
            Ok(object) => {
                self.malformed.forget(&object.meta().name);
                Ok(object)
            }
            Err(misread) => {
                self.malformed.note(&misread);
                Err(misread)
            }
        }
    }
}

#[async_trait]
impl<T: Resource> Collection<T> for Resources<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        if !is_name(name) {
            return Ok(None);
        }
        let ask = self.0.ask("get", name);
        let request = self.0.requests.get(name, &GetParams::default()).map_err(|e| ask.odd(&e))?;
        match self.0.send(&ask, request).await {
            Ok(text) => self.understood(&text).map(Some),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    async fn list(&self, selector: &Selector) -> Result<Vec<T>, StoreError> {
        if let Selector::Name(name) = selector {
            return match self.get(name).await {
                Ok(found) => Ok(found.into_iter().collect()),
                Err(StoreError::Malformed { .. }) => Ok(Vec::new()),
                Err(e) => Err(e),
            };
        }
        let mut attempt = 1;
        let mut found = loop {
            match self.list_once(selector).await {
                Err(e) if is_expired(&e) && attempt < LISTS => attempt += 1,
                result => break result?,
            }
        };
        found.sort_by(|a, b| a.meta().name.cmp(&b.meta().name));
        Ok(found)
    }

    async fn create(&self, object: T) -> Result<T, StoreError> {
        let ask = self.0.ask("create", &object.meta().name);
        let body = wire::creation(&object).map_err(|e| ask.odd(&e))?;
        let manager = Some(self.0.server.field_manager.clone());
        let parameters = PostParams { field_manager: manager, ..PostParams::default() };
        let request = self.0.requests.create(&parameters, body).map_err(|e| ask.odd(&e))?;
        let text = self.0.send(&ask, request).await?;
        self.understood(&text)
    }

    async fn update(&self, object: T) -> Result<T, StoreError> {
        self.versioned(&object).await?;
        let ask = self.0.ask("patch", &object.meta().name);
        let body = wire::update(&object, &self.0.properties).map_err(|e| ask.odd(&e))?;
        self.patch(&ask, JSON_PATCH, self.uri(&object.meta().name, ""), body).await
    }

    async fn update_status(&self, object: T) -> Result<T, StoreError> {
        self.versioned(&object).await?;
        let ask = Ask { subresource: "/status", ..self.0.ask("patch", &object.meta().name) };
        let body = wire::status(&object).map_err(|e| ask.odd(&e))?;
        // Forced: the status has one writer, and what others wrote there by hand gives way.
        let uri = self.uri(&object.meta().name, "/status");
        let applied = self.patch(&ask, APPLY, format!("{uri}&force=true"), body).await?;
        if applied.status() == object.status() {
            return Ok(applied);
        }
        // A field that someone added by hand stays with an apply, because it is not ours.
        let body = wire::whole_status(&object, &applied.meta().version).map_err(|e| ask.odd(&e))?;
        self.patch(&ask, JSON_PATCH, uri, body).await
    }

    async fn delete(&self, name: &str, version: Option<Version>) -> Result<bool, StoreError> {
        if !is_name(name) {
            return Ok(false);
        }
        let ask = self.0.ask("delete", name);
        let preconditions =
            version.map(|v| Preconditions { resource_version: Some(v.0), ..Preconditions::default() });
        let parameters = DeleteParams { preconditions, ..DeleteParams::background() };
        let request = self.0.requests.delete(name, &parameters).map_err(|e| ask.odd(&e))?;
        match self.0.send(&ask, request).await {
            Ok(_) => Ok(true),
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(e) => Err(e),
        }
    }

    async fn watch(
        &self,
        selector: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        Ok(watch(self.0.clone(), selector))
    }
}

/// Whether the API server has forgotten what was asked to go on from (410).
pub(super) fn is_expired(error: &StoreError) -> bool {
    matches!(error, StoreError::Backend { source, .. }
        if matches!(source.downcast_ref(), Some(ApiFault::Failed { code: 410, .. })))
}
