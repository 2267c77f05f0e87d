//! The client of the API server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::uri::{InvalidUri, Uri};
use axum::http::{HeaderValue, header};
use kube::Client;
use kube::client::ClientBuilder;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use snafu::{ResultExt, Snafu};

use super::traffic::{Traffic, TrafficLayer};
use crate::config::{Access, ApiServer, KubernetesSettings};

/// An API server that does not take a connection in this time is away.
const CONNECT: Duration = Duration::from_secs(5);

/// What a request says who makes it.
const USER_AGENT: &str = concat!("union-csi/", env!("CARGO_PKG_VERSION"));

/// How to reach the cluster is not known. Whether it answers is another matter, and no error.
#[derive(Debug, Snafu)]
#[snafu(module)]
pub enum ClusterError {
    /// The kubeconfig cannot be used.
    #[snafu(display(
        "the kubeconfig {} cannot be used: {source}; set kubernetes.kubeconfig (--kubeconfig) to one that kubectl can use",
        path.display()
    ))]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        #[snafu(source(from(KubeconfigError, Box::new)))]
        source: Box<KubeconfigError>,
    },
    /// The pod's own account cannot be used.
    #[snafu(display(
        "the pod's service account cannot be read at {}: {source}; is automountServiceAccountToken off?", path.display()
    ))]
    ServiceAccount {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The address of the API server is none.
    #[snafu(display(
        "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT do not make an address ({address}): {source}"
    ))]
    Address {
        /// What they make.
        address: String,
        /// Why.
        source: InvalidUri,
    },
    /// Nothing tells of a cluster.
    #[snafu(display(
        "no Kubernetes cluster is known here ({source}): name one with --kubeconfig. On a machine with the embedded store there \
         is nothing to do this for: it knows one node only, itself"
    ))]
    NoCluster {
        /// Why.
        #[snafu(source(from(kube::config::InferConfigError, Box::new)))]
        source: Box<kube::config::InferConfigError>,
    },
    /// What is known does not make a client.
    #[snafu(display("the API server cannot be reached as it is configured: {source}"))]
    Client {
        /// Why.
        #[snafu(source(from(kube::Error, Box::new)))]
        source: Box<kube::Error>,
    },
}

/// A client, which makes no request yet, and what is known of its requests.
///
/// # Errors
/// See [`ClusterError`].
pub(super) async fn connect(settings: &KubernetesSettings) -> Result<(Client, Arc<Traffic>), ClusterError> {
    let mut config = match &settings.access {
        Access::Kubeconfig(path) => of_file(path).await?,
        Access::InCluster { server, service_account } => of_pod(server, service_account)?,
    };
    config.connect_timeout = Some(CONNECT);
    // Every caller has its own back-off; one below it would hide what happens, and hold up a lease.
    config.default_retry = false;
    config.headers.push((header::USER_AGENT, HeaderValue::from_static(USER_AGENT)));
    config.default_namespace.clone_from(&settings.namespace);
    let traffic = Arc::new(Traffic::default());
    let builder = ClientBuilder::try_from(config).context(cluster_error::ClientSnafu)?;
    let client = builder.with_layer(&TrafficLayer { traffic: traffic.clone() }).build();
    Ok((client, traffic))
}

/// A client for an operator's command: of this kubeconfig, else as kubectl finds one, else of the pod's account.
///
/// # Errors
/// See [`ClusterError`].
pub async fn operator(kubeconfig: Option<&Path>) -> Result<Client, ClusterError> {
    let mut config = match kubeconfig {
        Some(path) => of_file(path).await?,
        None => kube::Config::infer().await.context(cluster_error::NoClusterSnafu)?,
    };
    config.connect_timeout = Some(CONNECT);
    config.headers.push((header::USER_AGENT, HeaderValue::from_static(USER_AGENT)));
    Client::try_from(config).context(cluster_error::ClientSnafu)
}

async fn of_file(path: &Path) -> Result<kube::Config, ClusterError> {
    let failed = || cluster_error::KubeconfigSnafu { path };
    let file = Kubeconfig::read_from(path).with_context(|_| failed())?;
    kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.with_context(|_| failed())
}

/// As `kube::Config::incluster`, which knows one directory only. Token and authority are read again about once a minute.
fn of_pod(server: &ApiServer, service_account: &Path) -> Result<kube::Config, ClusterError> {
    let (token, authority) = (service_account.join("token"), service_account.join("ca.crt"));
    for path in [&token, &authority] {
        std::fs::File::open(path).with_context(|_| cluster_error::ServiceAccountSnafu { path })?;
    }
    let host = match server.host.parse::<std::net::Ipv6Addr>() {
        Ok(address) => format!("[{address}]"),
        Err(_) => server.host.clone(),
    };
    let address = format!("https://{host}:{}", server.port);
    let uri: Uri = address.parse().context(cluster_error::AddressSnafu { address: &address })?;
    let mut config = kube::Config::new(uri);
    config.root_cert_file = Some(authority);
    config.auth_info =
        AuthInfo { token_file: Some(token.to_string_lossy().into_owned()), ..AuthInfo::default() };
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_that_cannot_be_used_is_told_with_its_name() {
        let settings = |path: &Path| KubernetesSettings {
            access: Access::Kubeconfig(path.to_owned()),
            namespace: "union".into(),
            kubelet_dir: "/k".into(),
            lease_duration: Duration::from_secs(12),
        };
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kubeconfig");
        for text in [None, Some("clusters: 5\n"), Some("apiVersion: v1\nkind: Config\n")] {
            if let Some(text) = text {
                std::fs::write(&file, text).unwrap();
            }
            let error = connect(&settings(&file)).await.err().expect("no client").to_string();
            assert!(error.contains(&*file.to_string_lossy()), "{error}");
        }
    }

    #[test]
    fn a_pod_is_known_by_its_account_whatever_the_addresses_look_like() {
        let directory = tempfile::tempdir().unwrap();
        let server = |host: &str| ApiServer { host: host.into(), port: 6443 };
        let missing = of_pod(&server("10.0.0.1"), directory.path()).unwrap_err().to_string();
        assert!(missing.contains("token"), "{missing}");
        for file in ["token", "ca.crt"] {
            std::fs::write(directory.path().join(file), "x").unwrap();
        }
        for (host, url) in [
            ("10.0.0.1", "https://10.0.0.1:6443/"),
            ("fd00::1", "https://[fd00::1]:6443/"),
            ("api.example", "https://api.example:6443/"),
        ] {
            let config = of_pod(&server(host), directory.path()).unwrap();
            assert_eq!(config.cluster_url.to_string(), url);
            assert_eq!(
                config.root_cert_file,
                Some(directory.path().join("ca.crt")),
                "read again when it rotates"
            );
        }
    }
}
