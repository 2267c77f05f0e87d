//! Events on Kubernetes' objects: what a controller tells the people who look at a claim or a volume.
//!
//! An event is a courtesy: one that cannot be written is logged and nothing else depends on it. What repeats is the same
//! Event object, counted up, whoever leads: its name comes from what it says.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;

use super::cluster::{Cluster, DRIVER, FIELD_MANAGER, said};

/// The longest message, in bytes: a screen of text; an Event is kept in memory by many.
const LONGEST: usize = 4096;

/// How long an event is worth waiting for.
const PATIENCE: Duration = Duration::from_secs(20);

/// The longest object name, in bytes (RFC 1123 subdomain).
const LONGEST_NAME: usize = 253;

/// Whether something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Severity {
    /// All is well.
    Normal,
    /// Someone should look.
    Warning,
}

/// What is told about an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Notice {
    /// Whether something is wrong.
    pub(super) severity: Severity,
    /// One word in CamelCase, for programs.
    pub(super) reason: &'static str,
    /// A sentence, for people.
    pub(super) message: String,
}

impl Notice {
    /// All is well.
    pub(super) fn normal(reason: &'static str, message: impl Into<String>) -> Self {
        Self { severity: Severity::Normal, reason, message: message.into() }
    }

    /// Someone should look.
    pub(super) fn warning(reason: &'static str, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, reason, message: message.into() }
    }
}

/// Writes events.
#[derive(Clone)]
pub(super) struct Recorder {
    cluster: Cluster,
    clock: fn() -> Timestamp,
}

impl Recorder {
    /// A recorder; `clock` dates events.
    pub(super) fn new(cluster: Cluster, clock: fn() -> Timestamp) -> Self {
        Self { cluster, clock }
    }

    /// Tells about an object. What goes wrong is logged, and nothing is waited for long.
    pub(super) async fn record(&self, about: ObjectReference, notice: &Notice) {
        if tokio::time::timeout(PATIENCE, self.write(about, notice)).await.is_err() {
            tracing::warn!(
                event.reason = notice.reason,
                "an event was not written: the API server does not answer"
            );
        }
    }

    async fn write(&self, about: ObjectReference, notice: &Notice) {
        if self.cluster.claim.held().is_err() {
            return;
        }
        let event = event(about, notice, (self.clock)());
        let name = event.metadata.name.clone().unwrap_or_default();
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.cluster.client.clone(), &namespace);
        let parameters =
            PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let written = match api.create(&parameters, &event).await {
            Err(kube::Error::Api(status)) if status.is_already_exists() => self.again(&api, &name).await,
            other => other.map(|_| ()),
        };
        if let Err(error) = written {
            tracing::warn!(
                event.reason = notice.reason,
                event.name = name,
                error = said(&error),
                "cannot write an event; where it is forbidden, grant create, get and patch on events"
            );
        }
    }

    /// Counts an event up that was written before.
    async fn again(&self, api: &Api<Event>, name: &str) -> Result<(), kube::Error> {
        let before = match api.get_opt(name).await? {
            Some(event) => event.count.unwrap_or(1),
            None => return Ok(()),
        };
        let patch = json!({
            "count": before.saturating_add(1),
            "lastTimestamp": Time((self.clock)()),
        });
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            other => other.map(|_| ()),
        }
    }
}

fn event(about: ObjectReference, notice: &Notice, now: Timestamp) -> Event {
    // Events of objects that have no namespace lie in "default", as those of Kubernetes itself.
    let namespace = about.namespace.clone().unwrap_or_else(|| "default".to_owned());
    Event {
        metadata: ObjectMeta {
            name: Some(name(&about, notice)),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        involved_object: about,
        type_: Some(
            match notice.severity {
                Severity::Normal => "Normal",
                Severity::Warning => "Warning",
            }
            .to_owned(),
        ),
        reason: Some(notice.reason.to_owned()),
        message: Some(shortened(&notice.message)),
        source: Some(EventSource { component: Some(DRIVER.to_owned()), host: None }),
        reporting_component: Some(DRIVER.to_owned()),
        count: Some(1),
        first_timestamp: Some(Time(now)),
        last_timestamp: Some(Time(now)),
        ..Event::default()
    }
}

/// `<object>.<digits>`: the same for the same words about the same object.
fn name(about: &ObjectReference, notice: &Notice) -> String {
    let mut hasher = DefaultHasher::new();
    (&about.kind, &about.uid, notice).hash(&mut hasher);
    let digits = format!(".{:016x}", hasher.finish());
    let mut object = about.name.clone().unwrap_or_default();
    object.truncate(LONGEST_NAME - digits.len());
    // A name may not have a part that ends in a dot or dash.
    let object = object.trim_end_matches(['.', '-']);
    format!("{object}{digits}")
}

fn shortened(message: &str) -> String {
    if message.len() <= LONGEST {
        return message.to_owned();
    }
    let end = message.floor_char_boundary(LONGEST - "…".len());
    format!("{}…", &message[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(name: &str) -> ObjectReference {
        ObjectReference {
            kind: Some("PersistentVolumeClaim".to_owned()),
            name: Some(name.to_owned()),
            namespace: Some("web".to_owned()),
            uid: Some("1-2-3".to_owned()),
            ..ObjectReference::default()
        }
    }

    fn named(about: &ObjectReference, notice: &Notice) -> String {
        event(about.clone(), notice, Timestamp::UNIX_EPOCH).metadata.name.unwrap()
    }

    #[test]
    fn the_same_words_about_the_same_object_are_the_same_event_and_others_are_not() {
        let full = Notice::warning("ProvisioningFailed", "no room");
        assert_eq!(named(&claim("data"), &full), named(&claim("data"), &full.clone()));
        let other = ObjectReference { uid: Some("9".to_owned()), ..claim("data") };
        assert_ne!(named(&claim("data"), &full), named(&other, &full), "a claim made anew");
        assert_ne!(
            named(&claim("data"), &full),
            named(&claim("data"), &Notice::warning("ProvisioningFailed", "x"))
        );
        assert_ne!(
            named(&claim("data"), &full),
            named(&claim("data"), &Notice::normal("ProvisioningFailed", "no room"))
        );
    }

    #[test]
    fn the_longest_object_name_gives_a_valid_event_name() {
        for end in ["x", ".", "-", "a.b-"] {
            let long = format!("{}{end}{}", "a".repeat(236 - end.len()), "b".repeat(17));
            let name = named(&claim(&long), &Notice::normal("A", "b"));
            assert!(name.len() <= LONGEST_NAME);
            assert!(!name.contains("..") && !name.contains("-."), "{name}");
        }
    }

    #[test]
    fn a_message_is_cut_between_characters_and_only_where_it_is_too_long() {
        assert_eq!(shortened("short"), "short");
        let cut = shortened(&"ä".repeat(LONGEST));
        assert!(cut.len() <= LONGEST && cut.ends_with('…'));
    }

    #[test]
    fn events_of_objects_without_a_namespace_lie_in_default() {
        let volume = ObjectReference { namespace: None, ..claim("pvc-1") };
        let event = event(volume, &Notice::normal("A", "b"), Timestamp::UNIX_EPOCH);
        assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
        assert_eq!(event.involved_object.namespace, None);
    }
}
