//! Where the objects are kept and which roles this instance plays.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::Overrides;
use super::fault::Origin;
use super::scalar::{self, Wrong, wrong};
use super::section::{Reader, Section};
use crate::domain::spelling;

/// The kubelet's own default (`--root-dir`).
const KUBELET_DIR: &str = "/var/lib/kubelet";

/// The thesis's namespace, kept.
const NAMESPACE: &str = "union";

/// Where Kubernetes mounts a pod's service account.
pub const SERVICE_ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// A killed leader is replaced after this and a jitter of a twelfth of it: within 15 s.
const LEASE_SECONDS: u64 = 12;

/// Shorter, and an API server that is busy for a second would cost the lead; longer, and a dead leader would be missed.
const LEASE_BOUNDS: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(120));

/// Which roles an instance plays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Both: gives and mounts storage, and may lead.
    #[default]
    All,
    /// May lead; neither pools nor mounts.
    Controller,
    /// Gives and mounts storage; never leads.
    Node,
}

impl Mode {
    /// Whether it gives and mounts storage.
    #[must_use]
    pub const fn is_node(self) -> bool {
        matches!(self, Self::All | Self::Node)
    }

    /// Whether it may lead.
    #[must_use]
    pub const fn may_lead(self) -> bool {
        matches!(self, Self::All | Self::Controller)
    }

    /// Its word in the configuration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Controller => "controller",
            Self::Node => "node",
        }
    }
}

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// As a kubeconfig file says, in its current context.
    Kubeconfig(PathBuf),
    /// As the pod that this program runs in.
    InCluster {
        /// Host and port, from the environment that Kubernetes gives each container.
        server: ApiServer,
        /// Directory with `token` and `ca.crt`, read again when they change.
        service_account: PathBuf,
    },
}

/// `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiServer {
    /// An address or a name.
    pub host: String,
    /// Its port.
    pub port: u16,
}

impl ApiServer {
    /// What Kubernetes tells the containers of a pod; `None` outside of one.
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        let host = std::env::var("KUBERNETES_SERVICE_HOST").ok().filter(|host| !host.is_empty())?;
        let port = std::env::var("KUBERNETES_SERVICE_PORT").ok().and_then(|port| port.parse().ok())?;
        Some(Self { host, port })
    }
}

/// Everything about the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// How the API server is reached.
    pub access: Access,
    /// Namespace of the program's own objects. Default `union`.
    pub namespace: String,
    /// The kubelet's directory. Default `/var/lib/kubelet`.
    pub kubelet_dir: PathBuf,
    /// How long a leader that is not heard of keeps the lead. Whole seconds. Default 12 s.
    pub lease_duration: Duration,
}

/// What [`read`] found out.
pub(super) struct Found {
    pub(super) mode: Mode,
    pub(super) kubernetes: Option<KubernetesSettings>,
    /// The kubelet's directory and where it was set, also without Kubernetes.
    pub(super) kubelet_dir: (PathBuf, Origin),
}

/// Reads `mode`, `store` and `kubernetes`.
pub(super) fn read(reader: &mut Reader<'_>, root: Section<'_>, over: &Overrides) -> Found {
    let section = reader.subsection(root, "kubernetes");
    let typed = reader.flagged(root, "mode", "mode", over.mode.as_ref(), "--mode");
    let mode_at = typed.as_ref().map_or(Origin::Default, |typed| typed.origin.clone());
    let mode = reader.parsed(typed, Mode::All, mode_of);
    let typed = reader.text(root, "store", "store");
    let store_at = typed.as_ref().map_or(Origin::Default, |typed| typed.origin.clone());
    let kind = reader.parsed(typed, StoreKind::Auto, store_of);

    let flag = over.kubeconfig.as_ref();
    let kubeconfig = reader.flagged(section, "kubeconfig", "kubernetes.kubeconfig", flag, "--kubeconfig");
    let kubeconfig_at = kubeconfig.as_ref().map(|typed| typed.origin.clone());
    let kubeconfig = reader.parsed(kubeconfig, None, |text| scalar::absolute(text).map(Some));
    let namespace = reader.text(section, "namespace", "kubernetes.namespace");
    let namespace = reader.parsed(namespace, NAMESPACE.to_owned(), namespace_of);
    let kubelet = reader.text(section, "kubeletDir", "kubernetes.kubeletDir");
    let kubelet_at = kubelet.as_ref().map_or(Origin::Default, |typed| typed.origin.clone());
    let kubelet_dir = reader.parsed(kubelet, PathBuf::from(KUBELET_DIR), kubelet_dir_of);
    let lease = reader.text(section, "leaseDuration", "kubernetes.leaseDuration");
    let lease_duration = reader.parsed(lease, Duration::from_secs(LEASE_SECONDS), lease_of);

    let access = match (kubeconfig, &over.api_server) {
        (Some(path), _) => Some(Access::Kubeconfig(path)),
        (None, Some(server)) => Some(Access::InCluster {
            server: server.clone(),
            service_account: Path::new(SERVICE_ACCOUNT_DIR).to_owned(),
        }),
        (None, None) => None,
    };
    let access = match kind {
        StoreKind::Local => {
            // A flag that is given for nothing is a mistake; a key of a file that nodes share is not.
            if let Some(at @ Origin::Flag(_)) = kubeconfig_at.clone() {
                let fault = wrong(
                    "store is local: no cluster is used",
                    "leave the flag out, or set store: kubernetes",
                );
                reader.fault(at, "", fault);
            }
            None
        }
        StoreKind::Auto => access,
        StoreKind::Kubernetes => {
            // A kubeconfig that is faulty is told already.
            if access.is_none() && kubeconfig_at.is_none() {
                let fault = wrong(
                    "no API server is known",
                    "set kubernetes.kubeconfig (--kubeconfig), or run in a pod of the cluster",
                );
                reader.fault(store_at, "store", fault);
            }
            access
        }
    };
    let alone =
        kind == StoreKind::Local || (kind == StoreKind::Auto && access.is_none() && kubeconfig_at.is_none());
    if alone && mode != Mode::All {
        let fault = wrong(
            "without Kubernetes one agent plays all roles, for it alone has the store",
            "leave mode (--mode, UNION_CSI_MODE) out, or name a cluster with kubernetes.kubeconfig (--kubeconfig)",
        );
        reader.fault(mode_at, "mode", fault);
    }
    Found {
        mode,
        kubernetes: access.map(|access| KubernetesSettings {
            access,
            namespace,
            kubelet_dir: kubelet_dir.clone(),
            lease_duration,
        }),
        kubelet_dir: (kubelet_dir, kubelet_at),
    }
}

/// What `store` says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    Auto,
    Local,
    Kubernetes,
}

fn mode_of(text: &str) -> Result<Mode, Wrong> {
    const ALL: [Mode; 3] = [Mode::All, Mode::Controller, Mode::Node];
    match ALL.into_iter().find(|mode| mode.as_str() == text) {
        Some(mode) => Ok(mode),
        None => Err(unknown_word(text, "a mode", &ALL.map(Mode::as_str))),
    }
}

fn store_of(text: &str) -> Result<StoreKind, Wrong> {
    match text {
        "auto" => Ok(StoreKind::Auto),
        "local" => Ok(StoreKind::Local),
        "kubernetes" => Ok(StoreKind::Kubernetes),
        _ => Err(unknown_word(text, "a store", &["auto", "local", "kubernetes"])),
    }
}

fn unknown_word(text: &str, what: &str, known: &[&str]) -> Wrong {
    let remedy = match spelling::nearest(text, known.iter().copied()) {
        Some(meant) => format!("did you mean {meant}?"),
        None => format!("choose one of {}", known.join(", ")),
    };
    wrong(format!("{text:?} is not {what}"), remedy)
}

/// An RFC 1123 label, as Kubernetes has them for namespaces.
fn namespace_of(text: &str) -> Result<String, Wrong> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let good = (1..=63).contains(&text.len())
        && text.bytes().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-');
    if good {
        return Ok(text.to_owned());
    }
    Err(wrong(
        format!("{text:?} is not the name of a namespace"),
        "use lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit",
    ))
}

fn kubelet_dir_of(text: &str) -> Result<PathBuf, Wrong> {
    match scalar::absolute(text)? {
        root if root.parent().is_none() => {
            Err(wrong("'/' is not the kubelet's directory", "give what the kubelet has as --root-dir"))
        }
        path => Ok(path),
    }
}

/// The lease's field counts whole seconds.
fn lease_of(text: &str) -> Result<Duration, Wrong> {
    let duration = scalar::duration(text, LEASE_BOUNDS.0, LEASE_BOUNDS.1)?;
    if duration.subsec_nanos() != 0 {
        return Err(wrong(format!("{text} is not a whole number of seconds"), "write for example 12s"));
    }
    Ok(duration)
}
