//! Writes and deletes objects.

use std::time::Duration;

use k8s_openapi::api::storage::v1::CSIStorageCapacity;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use snafu::Snafu;

use super::index::Wanted;
use super::object::{Found, Published, object};
use crate::controllers::cluster::{Cluster, FIELD_MANAGER, said};
use crate::controllers::lease::NotLeading;

/// The longest that one write may take: longer than an API server that is busy lets wait (a minute by its default, for
/// what it then answers with an error), so that what hangs is the connection.
const LONGEST_WRITE: Duration = Duration::from_secs(90);

/// A write was not done.
#[derive(Debug, Snafu)]
pub(super) enum WriteError {
    /// Another instance may lead by now.
    #[snafu(display("{source}"), context(false))]
    Leading { source: NotLeading },
    /// The API server did not answer, or refused.
    #[snafu(display("cannot {verb} csistoragecapacities: {}{}", said(source), advice(source, verb)))]
    Api {
        verb: &'static str,
        #[snafu(source(from(kube::Error, Box::new)))]
        source: Box<kube::Error>,
    },
    /// No answer came.
    #[snafu(display("the API server did not answer within {} s", wait.as_secs()))]
    Hangs { wait: Duration },
}

fn advice(error: &kube::Error, verb: &str) -> String {
    match error {
        kube::Error::Api(status) if status.is_forbidden() => {
            format!("; grant the verb {verb} on them to the service account of union-csi")
        }
        _ => String::new(),
    }
}

impl WriteError {
    /// Whether it is of the ordinary course of things.
    pub(super) fn is_ordinary(&self) -> bool {
        match self {
            Self::Leading { .. } => true,
            Self::Api { source, .. } => {
                matches!(&**source, kube::Error::Api(status) if status.is_conflict())
            }
            Self::Hangs { .. } => false,
        }
    }
}

/// One write.
pub(super) enum Write {
    Apply(Wanted),
    Delete(Published),
}

/// Does it; what is there then is returned.
pub(super) async fn apply(cluster: Cluster, name: &str, write: Write) -> Result<Option<Found>, WriteError> {
    cluster.claim.held()?;
    let written = tokio::time::timeout(LONGEST_WRITE, send(&cluster, name, write)).await;
    written.unwrap_or(Err(WriteError::Hangs { wait: LONGEST_WRITE }))
}

async fn send(cluster: &Cluster, name: &str, write: Write) -> Result<Option<Found>, WriteError> {
    let api: Api<CSIStorageCapacity> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    match write {
        Write::Apply(Wanted { class, node, figures }) => {
            let parameters = PatchParams::apply(FIELD_MANAGER).force();
            let object = object(name, &class, &node, figures);
            match api.patch(name, &parameters, &Patch::Apply(object)).await {
                Ok(written) => Ok(Some(Found::read(written))),
                Err(source) => Err(WriteError::Api { verb: "patch", source: Box::new(source) }),
            }
        }
        Write::Delete(published) => {
            // What was made anew under the name meanwhile stays.
            let preconditions = Preconditions { uid: Some(published.uid), resource_version: None };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            match api.delete(name, &parameters).await {
                Ok(_) => Ok(None),
                Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
                Err(source) => Err(WriteError::Api { verb: "delete", source: Box::new(source) }),
            }
        }
    }
}
