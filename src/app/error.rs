//! Why the agent could not run.

use std::path::PathBuf;

use snafu::Snafu;

use crate::platform::HostError;
use crate::store::local::OpenError;
use crate::{csi, http};

/// The agent could not run.
#[derive(Debug, Snafu)]
#[snafu(visibility(pub(super)))]
pub enum AppError {
    /// Another agent has the state directory.
    #[snafu(display(
        "another agent runs on the state directory {}: stop it, or set another stateDir",
        path.display()
    ))]
    Locked {
        /// The directory.
        path: PathBuf,
    },
    /// The machine refused something that the agent cannot be without.
    #[snafu(display("cannot {action}: {source}"))]
    Host {
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
    /// No kubelet is where it is said to be.
    #[snafu(display(
        "the kubelet's directory {} does not exist: set kubernetes.kubeletDir to what the kubelet has as --root-dir",
        path.display()
    ))]
    NoKubelet {
        /// The directory.
        path: PathBuf,
    },
    /// The store cannot be opened.
    #[snafu(display("{source}"), context(false))]
    Store {
        /// Why, and what to do.
        source: OpenError,
    },
    /// How to reach the cluster is not known.
    #[snafu(display("{source}"), context(false))]
    Cluster {
        /// Why, and what to do.
        source: super::cluster::ClusterError,
    },
    /// The CSI socket cannot be had.
    #[snafu(display("{source}"), context(false))]
    CsiSocket {
        /// Why, and what to do.
        source: csi::BindError,
    },
    /// The CSI socket is no longer served.
    #[snafu(display("{source}"), context(false))]
    CsiServe {
        /// Why.
        source: csi::ServeError,
    },
    /// The HTTP API cannot be served.
    #[snafu(display("{source}"), context(false))]
    Http {
        /// Why, and what to do.
        source: http::HttpError,
    },
    /// The process could not be set up.
    #[snafu(display("cannot {action}: {source}"))]
    Process {
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A task that must run ended.
    #[snafu(display("{task} ended unexpectedly; the log says why"))]
    Task {
        /// Which.
        task: &'static str,
    },
}
