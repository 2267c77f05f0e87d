//! Every key of `agent.yaml`: the one table behind the check for unknown keys and behind `docs/CONFIGURATION.md`.

use std::fmt::Write as _;

/// A key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its path; `[]` stands for each element of a list, `<…>` for any key.
    pub path: &'static str,
    /// What it is when it is not set, as shown to people.
    pub default: &'static str,
    /// What flag and environment variable set it too; empty: none.
    pub flag: &'static str,
    /// What it means.
    pub meaning: &'static str,
}

const fn key(path: &'static str, default: &'static str, flag: &'static str, meaning: &'static str) -> Key {
    Key { path, default, flag, meaning }
}

/// The keys, in the order of the sample.
pub const KEYS: &[Key] = &[
    key(
        "mode",
        "all",
        "--mode",
        "Roles of this instance: `all`; `node` gives and mounts storage and never leads; `controller` may lead and has \
         neither pools nor mounts. Without Kubernetes always `all`.",
    ),
    key(
        "store",
        "auto",
        "",
        "Where volumes are written down: `kubernetes`, objects of the cluster; `local`, a file in `stateDir`; `auto`, \
         `kubernetes` in a pod or where a kubeconfig is given.",
    ),
    key(
        "kubernetes.kubeconfig",
        "none",
        "--kubeconfig",
        "File that tells how to reach the API server. In a pod its service account is used unless this is set.",
    ),
    key("kubernetes.namespace", "union", "", "Namespace of the agent's own objects."),
    key(
        "kubernetes.kubeletDir",
        "/var/lib/kubelet",
        "",
        "Directory of the kubelet, its `--root-dir`; as k0s, microk8s and others place it.",
    ),
    key(
        "kubernetes.leaseDuration",
        "12s",
        "",
        "How long a leader that is not heard of keeps the lead; `6s` to `2m`. It renews after five twelfths of it.",
    ),
    key(
        "nodeName",
        "the host name",
        "--node-name",
        "Name of this node, unique in the cluster; in Kubernetes the name of its Node.",
    ),
    key(
        "nodeLabels.<label>",
        "none",
        "",
        "Labels of this node, which a class's `nodeSelector` asks for; in Kubernetes with those of its Node, which these override.",
    ),
    key(
        "stateDir",
        "/var/lib/union-csi",
        "--state-dir",
        "Directory of the agent's own state: the embedded store, records of running unions, mount points of branches.",
    ),
    key(
        "csi.endpoint",
        "unix://<stateDir>/csi.sock",
        "--endpoint",
        "Socket of the CSI services. Its path has at most 107 bytes. With Kubernetes the default is \
         `<kubeletDir>/plugins/union.csi.union.io/csi.sock`.",
    ),
    key(
        "csi.allowedTargets",
        "[<kubeletDir>, /mnt, /media, /srv]",
        "",
        "Directories below which volumes may be staged and published. Other targets are refused.",
    ),
    key(
        "http.listen",
        "127.0.0.1:9830",
        "--http-listen",
        "Address and port of the read-only HTTP API, the metrics and the page; `off` for none. \
         It asks for no password: whoever can reach it sees names, sizes and paths of volumes, never their files.",
    ),
    key(
        "http.hostNames",
        "[]",
        "",
        "Names by which the API may be asked for, besides `localhost` and addresses. A request for any other name is \
         refused, so that no web site can read the API through a visitor's browser.",
    ),
    key(
        "pools",
        "[]",
        "--pool NAME=PATH",
        "Directories that this node gives. An agent without any can still mount.",
    ),
    key("pools[].name", "required", "", "Name of the pool, unique on the node."),
    key(
        "pools[].path",
        "required",
        "",
        "Directory of the pool, absolute. Branches lie in `branches/` below it; nothing else in it is touched.",
    ),
    key("pools[].labels.<label>", "none", "", "Labels of the pool, which a class's `poolSelector` asks for."),
    key(
        "pools[].reserve",
        "5%",
        "",
        "What is kept free on the pool's filesystem: a share of its size (`5%`) or an amount (`20Gi`).",
    ),
    key("pools[].media", "detected", "", "Kind of disk: `nvme`, `ssd`, `hdd` or `unknown`."),
    key(
        "pools[].uuid",
        "recorded at first use",
        "",
        "UUID that the pool's filesystem must have. A pool on another filesystem is absent and never written to.",
    ),
    key(
        "poolsUnder",
        "[]",
        "",
        "Directories in which each mounted filesystem is a pool, named by its mount point, as soon as it is mounted; for \
         nodes that share one configuration. So is what a symbolic link leads to. A plain directory is reported and not used.",
    ),
    key(
        "poolsUnder[].path",
        "required",
        "",
        "The directory, absolute; may be missing. What is also named under `pools` is as it is said there.",
    ),
    key("poolsUnder[].labels.<label>", "none", "", "Labels of all pools below it."),
    key("poolsUnder[].reserve", "5%", "", "What is kept free on each of them, as for `pools`."),
    key("measureInterval", "5s", "", "How often pools are measured; `1s` to `1h`."),
    key(
        "mergerfs.path",
        "mergerfs",
        "--mergerfs-path",
        "The MergerFS program: an absolute path, or a name in `PATH`.",
    ),
    key(
        "mergerfs.options.<option>",
        "none",
        "",
        "MergerFS options for all unions of this node, the same that a class may set as `mergerfs.<option>`; the class \
         wins.",
    ),
    key(
        "mergerfs.startTimeout",
        "10s",
        "",
        "How long a union may take to answer after its start; `1s` to `5m`.",
    ),
    key(
        "createTimeout",
        "60s",
        "",
        "How long CreateVolume waits for branches before it answers DEADLINE_EXCEEDED; the work goes on. `1s` to `10m`.",
    ),
    key(
        "network.interface",
        "detected",
        "",
        "Interface over which branches of this node serve other nodes, and theirs this one: the one with the default route, \
         else the only one that is up. `off`: neither.",
    ),
    key(
        "network.subnet",
        "none",
        "",
        "Range of addresses as `10.0.0.0/8`: the interface is one that has an address within it, and only such addresses are \
         used. For nodes that share one configuration.",
    ),
    key("network.nvmePort", "4420", "", "TCP port at which this node serves image branches to other nodes."),
    key(
        "network.nvmeTlsPort",
        "4421",
        "",
        "TCP port at which this node serves image branches of classes with `encryption: required`; another than the one before.",
    ),
    key("maxVolumes", "no limit", "", "How many volumes this node takes."),
    key(
        "log.filter",
        "info",
        "--log",
        "What is logged: `error`, `warn`, `info`, `debug`, `trace`, or directives as `info,union_csi::node=debug`.",
    ),
    key("log.format", "text", "--log-format", "`text`, or `json` for one JSON object a line."),
];

/// The keys that may stand directly in the mapping at `path` (`""`: the file itself); `None` where any may.
#[must_use]
pub fn children(path: &str) -> Option<Vec<&'static str>> {
    let mut names = Vec::new();
    for key in KEYS {
        let rest = if path.is_empty() {
            key.path
        } else {
            match key.path.strip_prefix(path).and_then(|rest| rest.strip_prefix('.')) {
                Some(rest) => rest,
                None => continue,
            }
        };
        let name = rest.split(['.', '[']).next().unwrap_or(rest);
        if name.starts_with('<') {
            return None;
        }
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Some(names)
}

/// The table of all keys in Markdown, for `docs/CONFIGURATION.md`.
#[must_use]
pub fn table() -> String {
    let mut out = String::from("| key | default | flag | meaning |\n|---|---|---|---|\n");
    for key in KEYS {
        let flag = if key.flag.is_empty() { String::new() } else { format!("`{}`", key.flag) };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| `{}` | {} | {flag} | {} |", key.path, code(key.default), key.meaning);
    }
    out
}

/// Values in code quotes, words as they are.
fn code(default: &str) -> String {
    match default {
        "none" | "required" | "detected" | "no limit" | "the host name" | "recorded at first use" => {
            default.to_owned()
        }
        value => format!("`{value}`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::spelling::nearest;

    #[test]
    fn a_misspelt_key_finds_the_one_that_was_meant() {
        let top = children("").unwrap();
        assert_eq!(nearest("nodename", top.iter().copied()), Some("nodeName"));
        assert_eq!(nearest("pool", top.iter().copied()), Some("pools"));
        assert_eq!(nearest("state_dir", top.iter().copied()), Some("stateDir"));
        assert_eq!(nearest("zebra", top.iter().copied()), None);
    }

    #[test]
    fn the_document_of_the_configuration_is_up_to_date() {
        crate::telemetry::tests::compare_part("docs/CONFIGURATION.md", "keys", &table());
    }

    #[test]
    fn the_document_of_the_parameters_is_up_to_date() {
        let mut out = String::from("| parameter | values | default | meaning |\n|---|---|---|---|\n");
        for p in crate::domain::policy::parameters() {
            out.push_str(&format!("| `{}` | {} | {} | {} |\n", p.key, p.values, p.default, p.meaning));
        }
        crate::telemetry::tests::compare_part("docs/CONFIGURATION.md", "parameters", &out);
    }

    #[test]
    fn the_document_of_the_mergerfs_options_is_up_to_date() {
        let mut out = String::from("| option | takes | meaning |\n|---|---|---|\n");
        for o in crate::domain::mergerfs::allowed() {
            out.push_str(&format!("| `{}` | {} | {} |\n", o.key, o.values, o.meaning));
        }
        crate::telemetry::tests::compare_part("docs/CONFIGURATION.md", "mergerfs", &out);
    }

    #[test]
    fn children_are_the_keys_of_one_mapping() {
        assert_eq!(children("csi"), Some(vec!["endpoint", "allowedTargets"]));
        assert_eq!(children("nodeLabels"), None);
        assert!(children("pools[]").unwrap().contains(&"reserve"));
    }
}
