//! What the API server answers instead of doing what was asked, for the operator who must act on it.

use std::time::Duration;

use kube::core::Status;
use snafu::Snafu;

use crate::store::StoreError;

/// What was asked of the API server.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// As rules of access have it: `get`, `create`, …
    pub(super) verb: &'static str,
    pub(super) kind: &'static str,
    /// API group; empty: the core group.
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    /// `/status`, or nothing.
    pub(super) subresource: &'static str,
    pub(super) namespace: Option<String>,
    /// Empty for all objects of the kind.
    pub(super) name: String,
}

impl Ask {
    fn action(&self) -> String {
        let what = if self.subresource.is_empty() { "" } else { "the status of " };
        match self.name.as_str() {
            "" => format!("{} all objects of kind {}", self.verb, self.kind),
            name => format!("{} {what}{} {name}", self.verb, self.kind),
        }
    }

    /// The resource as rules of access have it.
    fn resource(&self) -> String {
        format!("{}{}", self.plural, self.subresource)
    }

    /// The resource as `kubectl` has it.
    fn full_resource(&self) -> String {
        let dot = if self.group.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.resource(), self.group)
    }

    pub(super) fn backend(&self, fault: ApiFault) -> StoreError {
        StoreError::Backend { action: self.action(), source: Box::new(fault) }
    }

    /// What an answer of the API server means.
    pub(super) fn refused(&self, status: &Status) -> StoreError {
        let (kind, name) = (self.kind, self.name.clone());
        let of = |want: &str| {
            status.details.as_ref().is_some_and(|d| d.kind == want && (want != self.plural || d.name == name))
        };
        let message = status.message.clone();
        match status.code {
            404 if of("namespaces") => {
                self.backend(ApiFault::NoNamespace { namespace: self.namespace.clone().unwrap_or_default() })
            }
            404 if !name.is_empty() && status.reason == "NotFound" && of(self.plural) => {
                StoreError::Missing { kind, name }
            }
            404 => self.backend(ApiFault::NotInstalled { resource: self.full_resource() }),
            409 if status.reason == "AlreadyExists" => StoreError::Exists { kind, name },
            409 => StoreError::Conflict { kind, name },
            401 => self.backend(ApiFault::Unauthorized { message }),
            403 if status.details.as_ref().is_some_and(|d| !d.causes.is_empty()) => {
                self.backend(ApiFault::Refused { message })
            }
            403 => self.backend(ApiFault::Forbidden {
                verb: self.verb,
                resource: self.resource(),
                group: self.group,
                message,
            }),
            400 | 422 => self.backend(ApiFault::Refused { message }),
            code => self.backend(ApiFault::Failed { code, message }),
        }
    }

    pub(super) fn failed(&self, error: kube::Error) -> StoreError {
        match error {
            kube::Error::Api(status) => self.refused(&status),
            other => self.backend(ApiFault::Unreachable { reason: chain(&other) }),
        }
    }
}

/// An error with its causes, each once: the outer ones of a client mostly repeat the inner ones.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

/// The API server did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Snafu)]
pub enum ApiFault {
    /// A rule of access is missing.
    #[snafu(display(
        "the API server does not let this agent {verb} {resource} ({message}); give its ServiceAccount the verb {verb:?} on \
         {resource:?} of API group {group:?}, as the roles in deploy/ do"
    ))]
    Forbidden {
        /// As rules of access have it.
        verb: &'static str,
        /// Plural, with the subresource.
        resource: String,
        /// API group; empty: the core group.
        group: &'static str,
        /// The server's words.
        message: String,
    },
    /// The kind is not known.
    #[snafu(display(
        "the API server does not know {resource}; install the CustomResourceDefinitions: \
         union-csi crds | kubectl apply --server-side -f -"
    ))]
    NotInstalled {
        /// Plural, with the subresource and the group.
        resource: String,
    },
    /// The program's namespace is missing.
    #[snafu(display(
        "the namespace {namespace} does not exist; create it, or set kubernetes.namespace to the one in use"
    ))]
    NoNamespace {
        /// Its name.
        namespace: String,
    },
    /// Who asks is not known.
    #[snafu(display(
        "the API server does not accept this agent's credentials ({message}); see that its ServiceAccount exists and its \
         token is mounted, or that the kubeconfig is that of this cluster"
    ))]
    Unauthorized {
        /// The server's words.
        message: String,
    },
    /// What was to be written is against a rule.
    #[snafu(display("the API server refuses it: {message}"))]
    Refused {
        /// The server's words.
        message: String,
    },
    /// It is not answering as it should.
    #[snafu(display("the API server failed with code {code}: {message}"))]
    Failed {
        /// HTTP status.
        code: u16,
        /// The server's words.
        message: String,
    },
    /// No connection, or it broke.
    #[snafu(display("the API server cannot be reached: {reason}"))]
    Unreachable {
        /// Why.
        reason: String,
    },
    /// No answer.
    #[snafu(display("the API server did not answer within {} s", after.as_secs()))]
    Silent {
        /// How long was waited.
        after: Duration,
    },
    /// Its answer is not what the API says.
    #[snafu(display("the API server's answer is not understood: {reason}"))]
    Odd {
        /// Why.
        reason: String,
    },
}
