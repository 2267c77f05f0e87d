//! From the tree of the file and the overrides to the checked configuration, gathering every fault on the way.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::fault::{Faults, Origin};
use super::scalar::{self, Wrong, wrong};
use super::section::{Reader, Section, Typed};
use super::yaml::{self, Node, Value};
use super::{Config, DEFAULT_LISTEN, DEFAULT_STATE_DIR, Overrides, kubernetes};
use crate::domain::policy;
use crate::domain::pool::Reserve;
use crate::domain::{NodeName, PoolName};
use crate::node::pool::{PoolSettings, PoolsUnder};
use crate::node::survey::NetworkSettings;
use crate::node::union::MergerfsSettings;

/// Below these, and below the kubelet's directory, a volume may be mounted unless told otherwise: where people mount.
const ALLOWED_TARGETS: [&str; 3] = ["/mnt", "/media", "/srv"];
/// The CSI socket below the kubelet's directory: where the tools of Kubernetes look for it, by the driver's name.
const PLUGIN_SOCKET: &str = "plugins/union.csi.union.io/csi.sock";
/// Shorter would make the agent busy, longer would make its figures stale.
const MEASURE_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3600));
/// A union answers in milliseconds; the kubelet gives up on a mount after two minutes and comes back.
const START_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// The official sidecars wait between 10 s and 10 min for an answer.
const CREATE_BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(600));

pub(super) fn config(
    file: &Path,
    text: &str,
    overrides: &Overrides,
    host_name: &str,
) -> Result<Config, Faults> {
    let mut reader = Reader { file, faults: Vec::new() };
    let root = match yaml::parse(text) {
        Ok(root) => root,
        Err((line, problem)) => {
            reader.fault(reader.at(line), "", wrong(problem, "correct the YAML; the rest was not checked"));
            return Err(Faults(reader.faults));
        }
    };
    let config = reader.config(&root, overrides, host_name);
    if reader.faults.is_empty() { Ok(config) } else { Err(Faults(reader.sorted())) }
}

impl Reader<'_> {
    fn config(&mut self, root: &Node, over: &Overrides, host_name: &str) -> Config {
        let root = self.section(root, "", "");
        let csi = self.subsection(root, "csi");
        let http = self.subsection(root, "http");
        let mergerfs = self.subsection(root, "mergerfs");
        let log = self.subsection(root, "log");

        let node = self.node_name(root, over, host_name);
        let state_dir = self.flagged(root, "stateDir", "stateDir", over.state_dir.as_ref(), "--state-dir");
        let (state_dir, state_origin) = match state_dir {
            Some(typed) => {
                let origin = typed.origin.clone();
                (self.parsed(Some(typed), DEFAULT_STATE_DIR.into(), scalar::absolute), origin)
            }
            None => (PathBuf::from(DEFAULT_STATE_DIR), Origin::Default),
        };
        let found = kubernetes::read(self, root, over);
        let (kubelet_dir, kubelet_origin) = found.kubelet_dir;
        // One that never mounts has nothing to tell the kubelet, and may run beside one that does.
        let default_socket = if found.kubernetes.is_some() && found.mode.is_node() {
            (kubelet_dir.join(PLUGIN_SOCKET), kubelet_origin, "kubernetes.kubeletDir")
        } else {
            (state_dir.join("csi.sock"), state_origin, "stateDir")
        };
        let csi_socket = self.socket(csi, over, default_socket);
        let listen = self.flagged(http, "listen", "http.listen", over.http_listen.as_ref(), "--http-listen");
        let http_listen = self.parsed(listen, DEFAULT_LISTEN.parse::<SocketAddr>().ok(), scalar::listen);
        let program =
            self.flagged(mergerfs, "path", "mergerfs.path", over.mergerfs_path.as_ref(), "--mergerfs-path");
        let filter = self.flagged(log, "filter", "log.filter", over.log_filter.as_ref(), "--log");
        let format = self.flagged(log, "format", "log.format", over.log_format.as_ref(), "--log-format");

        Config {
            mode: found.mode,
            kubernetes: found.kubernetes,
            node,
            node_labels: self.labels(root, "nodeLabels", "nodeLabels"),
            allowed_targets: self.allowed_targets(csi, &kubelet_dir),
            csi_socket,
            http_listen,
            http_host_names: self.host_names(http),
            pools: self.pools(root, &over.pools, &state_dir),
            pools_under: self.pools_under(root, &state_dir),
            state_dir,
            measure_interval: self.duration(root, "measureInterval", "measureInterval", 5, MEASURE_BOUNDS),
            bundled_mergerfs: None,
            mergerfs: MergerfsSettings {
                path: self.parsed(program, PathBuf::from("mergerfs"), scalar::program),
                options: self.options(mergerfs),
                start_timeout: self.duration(
                    mergerfs,
                    "startTimeout",
                    "mergerfs.startTimeout",
                    10,
                    START_BOUNDS,
                ),
            },
            create_timeout: self.duration(root, "createTimeout", "createTimeout", 60, CREATE_BOUNDS),
            network: self.network(root),
            max_volumes: self.max_volumes(root),
            log_filter: self.parsed(filter, "info".to_owned(), scalar::log_filter),
            log_json: self.parsed(format, false, scalar::log_format),
        }
    }

    /// The CSI socket: as set, or the default, whose length is the fault of the key that it comes from.
    fn socket(
        &mut self,
        csi: Section<'_>,
        over: &Overrides,
        (default, origin, key): (PathBuf, Origin, &str),
    ) -> PathBuf {
        let typed = self.flagged(csi, "endpoint", "csi.endpoint", over.endpoint.as_ref(), "--endpoint");
        if typed.is_some() {
            return self.parsed(typed, default, scalar::socket);
        }
        if let Err(fault) = scalar::check_socket(&default) {
            self.fault(origin, key, fault);
        }
        default
    }

    fn node_name(&mut self, root: Section<'_>, over: &Overrides, host_name: &str) -> NodeName {
        let typed = self.flagged(root, "nodeName", "nodeName", over.node_name.as_ref(), "--node-name").or(
            Some(Typed { text: host_name.to_owned(), key: "nodeName".to_owned(), origin: Origin::Default }),
        );
        // Stands in for a name that was refused; the fault keeps it from being used.
        let placeholder = "unnamed".parse::<NodeName>().ok();
        match self.parsed(typed, placeholder, |text| scalar::name(text).map(Some)) {
            Some(name) => name,
            None => unreachable!("the placeholder is a valid name"),
        }
    }

    fn pools(&mut self, root: Section<'_>, flags: &[String], state_dir: &Path) -> Vec<PoolSettings> {
        let mut pools: Vec<(PoolSettings, Origin)> = Vec::new();
        for (i, node) in self.list(root, "pools").iter().enumerate() {
            if let Some(pool) = self.pool(node, &format!("pools[{i}]")) {
                pools.push((pool, self.at(node.line)));
            }
        }
        for typed in flags {
            let origin = Origin::Flag("--pool");
            let Some((name, path)) = typed.split_once('=') else {
                self.fault(
                    origin,
                    "",
                    wrong(format!("{typed:?} is not NAME=PATH"), "write --pool disk1=/mnt/disk1"),
                );
                continue;
            };
            let of = |text: &str| Typed { text: text.to_owned(), key: String::new(), origin: origin.clone() };
            let name = self.parsed(Some(of(name)), None, |t| scalar::name(t).map(Some));
            let path = self.parsed(Some(of(path)), None, |t| scalar::absolute(t).map(Some));
            if let (Some(name), Some(path)) = (name, path) {
                pools.push((plain_pool(name, path), origin));
            }
        }
        self.pools_together(&pools, state_dir);
        pools.into_iter().map(|(pool, _)| pool).collect()
    }

    /// What no two pools may have in common.
    fn pools_together(&mut self, pools: &[(PoolSettings, Origin)], state_dir: &Path) {
        for (i, (pool, origin)) in pools.iter().enumerate() {
            let mut fault = |wrong: Wrong| self.fault(origin.clone(), &format!("pool {}", pool.name), wrong);
            if pool.path.starts_with(state_dir) {
                fault(wrong(
                    format!("{} lies inside stateDir {}", pool.path.display(), state_dir.display()),
                    "keep the agent's state and the pools apart",
                ));
            }
            for (other, whence) in &pools[..i] {
                if other.name == pool.name {
                    fault(wrong(
                        format!("the name is taken by the pool at {whence}"),
                        "give each pool of a node its own name",
                    ));
                }
                if other.path == pool.path {
                    fault(wrong(
                        format!("{} is pool {} already", pool.path.display(), other.name),
                        "give each directory once",
                    ));
                } else if pool.path.starts_with(&other.path) || other.path.starts_with(&pool.path) {
                    fault(wrong(
                        format!("{} and {} lie inside each other", pool.path.display(), other.path.display()),
                        "give directories beside each other",
                    ));
                }
            }
        }
    }

    fn pool(&mut self, node: &Node, at: &str) -> Option<PoolSettings> {
        let before = self.faults.len();
        let section = self.section(node, "pools[]", at);
        if self.faults.len() > before && section.entries.is_empty() {
            return None;
        }
        let key = |name: &str| format!("{at}.{name}");
        let name = self.required(section, "name", &key("name"), node.line, scalar::name);
        let path = self.required(section, "path", &key("path"), node.line, scalar::absolute);
        let reserve = self.text(section, "reserve", &key("reserve"));
        let media = self.text(section, "media", &key("media"));
        let uuid = self.text(section, "uuid", &key("uuid"));
        let labels = self.labels(section, "labels", &key("labels"));
        let reserve = self.parsed(reserve, Reserve::Percent(5), scalar::reserve);
        let media = self.parsed(media, None, |text| scalar::media(text).map(Some));
        let uuid = self.parsed(uuid, None, |text| scalar::uuid(text).map(Some));
        Some(PoolSettings { name: name?, path: path?, labels, reserve, media, uuid })
    }

    fn pools_under(&mut self, root: Section<'_>, state_dir: &Path) -> Vec<PoolsUnder> {
        let mut all: Vec<PoolsUnder> = Vec::new();
        for (i, node) in self.list(root, "poolsUnder").iter().enumerate() {
            let at = format!("poolsUnder[{i}]");
            let before = self.faults.len();
            let section = self.section(node, "poolsUnder[]", &at);
            if self.faults.len() > before && section.entries.is_empty() {
                continue;
            }
            let path = self.required(section, "path", &format!("{at}.path"), node.line, scalar::absolute);
            let reserve = self.text(section, "reserve", &format!("{at}.reserve"));
            let labels = self.labels(section, "labels", &format!("{at}.labels"));
            let reserve = self.parsed(reserve, Reserve::Percent(5), scalar::reserve);
            let Some(path) = path else { continue };
            let mut fault =
                |problem: String, remedy| self.fault(self.at(node.line), &at, wrong(problem, remedy));
            if path.starts_with(state_dir) {
                let problem = format!("{} lies inside stateDir {}", path.display(), state_dir.display());
                fault(problem, "keep the agent's state and the pools apart");
            }
            if all.iter().any(|other| other.path == path) {
                fault(format!("{} is listed already", path.display()), "list each directory once");
            }
            all.push(PoolsUnder { path, labels, reserve });
        }
        all
    }

    fn allowed_targets(&mut self, csi: Section<'_>, kubelet_dir: &Path) -> Vec<PathBuf> {
        if csi.find("allowedTargets").is_none() {
            let others = ALLOWED_TARGETS.iter().map(PathBuf::from);
            return std::iter::once(kubelet_dir.to_owned()).chain(others).collect();
        }
        let mut paths = Vec::new();
        for (i, node) in self.list_at(csi, "allowedTargets", "csi.allowedTargets").iter().enumerate() {
            let key = format!("csi.allowedTargets[{i}]");
            let typed = self.scalar(node, &key);
            let parse = |text: &str| match scalar::absolute(text)? {
                root if root.parent().is_none() => Err(wrong(
                    "'/' would allow a volume to cover any directory of the host",
                    "name the directories that volumes are mounted below",
                )),
                path => Ok(Some(path)),
            };
            paths.extend(self.parsed(typed, None, parse));
        }
        if paths.is_empty() && self.faults.is_empty() {
            let line = csi.find("allowedTargets").map_or(0, |(name, _)| name.line);
            let fault = wrong("no volume could be mounted anywhere", "name at least one directory");
            self.fault(self.at(line), "csi.allowedTargets", fault);
        }
        paths
    }

    fn host_names(&mut self, http: Section<'_>) -> Vec<String> {
        let mut names = Vec::new();
        for (i, node) in self.list_at(http, "hostNames", "http.hostNames").iter().enumerate() {
            let key = format!("http.hostNames[{i}]");
            let typed = self.scalar(node, &key);
            let parse = |text: &str| {
                let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'.';
                if text.is_empty() || !text.bytes().all(plain) {
                    let remedy = "write the name alone, without scheme and port, as nas.example.org";
                    return Err(wrong(format!("{text:?} is not a host name"), remedy));
                }
                Ok(Some(text.to_ascii_lowercase()))
            };
            names.extend(self.parsed(typed, None, parse));
        }
        names
    }

    fn options(&mut self, mergerfs: Section<'_>) -> BTreeMap<String, String> {
        let mut options = BTreeMap::new();
        for (name, node) in self.map_at(mergerfs, "options", "mergerfs.options") {
            let key = format!("mergerfs.options.{}", name.text);
            // Options are words for MergerFS: true, 60 and off are as good as their quoted forms.
            let text = match &node.value {
                Value::Bool(b) => Some(b.to_string()),
                _ => self.scalar(node, &key).map(|typed| typed.text),
            };
            let Some(text) = text else { continue };
            match policy::mergerfs::parse(&BTreeMap::from([(name.text.clone(), text)])) {
                Ok(parsed) => options.extend(parsed),
                Err(faults) => {
                    for fault in faults {
                        let remedy = "use an option and value that docs/CONFIGURATION.md lists";
                        self.fault(self.at(name.line), &key, wrong(fault.to_string(), remedy));
                    }
                }
            }
        }
        options
    }

    fn labels(&mut self, section: Section<'_>, name: &str, key: &str) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        for (name, node) in self.map_at(section, name, key) {
            let typed = self.scalar(node, &format!("{key}.{}", name.text));
            let check = |text: &str| scalar::label(&name.text, text).map(|()| Some(text.to_owned()));
            if let Some(value) = self.parsed(typed, None, check) {
                labels.insert(name.text.clone(), value);
            }
        }
        labels
    }

    fn network(&mut self, root: Section<'_>) -> NetworkSettings {
        let section = self.subsection(root, "network");
        // YAML reads a plain off as false.
        let off = section.find("interface").is_some_and(|(_, node)| matches!(node.value, Value::Bool(false)));
        let interface = if off { None } else { self.text(section, "interface", "network.interface") };
        let subnet = self.text(section, "subnet", "network.subnet");
        let port = self.text(section, "nvmePort", "network.nvmePort");
        let tls_port = self.text(section, "nvmeTlsPort", "network.nvmeTlsPort");
        let default = NetworkSettings::default();
        // The outer one tells whether it is set, the inner whether it is a name.
        let interface = self.parsed(interface, None, |text| scalar::interface(text).map(Some));
        NetworkSettings {
            enabled: !off && interface != Some(None),
            interface: interface.flatten(),
            subnet: self.parsed(subnet, None, |text| scalar::subnet(text).map(Some)),
            nvme_port: self.parsed(port, default.nvme_port, scalar::port),
            nvme_tls_port: self.parsed(tls_port, default.nvme_tls_port, scalar::port),
        }
    }

    fn max_volumes(&mut self, root: Section<'_>) -> Option<u32> {
        let typed = self.text(root, "maxVolumes", "maxVolumes");
        self.parsed(typed, None, |text| match text.parse::<u32>() {
            Ok(n) if n > 0 => Ok(Some(n)),
            _ => Err(wrong(
                format!("{text:?} is not a number of volumes"),
                "write a whole number above 0, or leave the key out for no limit",
            )),
        })
    }

    fn duration(
        &mut self,
        section: Section<'_>,
        name: &str,
        key: &str,
        default_seconds: u64,
        (least, most): (Duration, Duration),
    ) -> Duration {
        let typed = self.text(section, name, key);
        self.parsed(typed, Duration::from_secs(default_seconds), |text| scalar::duration(text, least, most))
    }
}

/// A pool with every setting at its default.
fn plain_pool(name: PoolName, path: PathBuf) -> PoolSettings {
    PoolSettings {
        name,
        path,
        labels: BTreeMap::new(),
        reserve: Reserve::Percent(5),
        media: None,
        uuid: None,
    }
}
