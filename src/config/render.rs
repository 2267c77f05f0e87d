//! The effective configuration, shown as a file that would give it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{Access, Config, KubernetesSettings};
use crate::domain::duration;
use crate::domain::pool::Reserve;
use crate::node::pool::{PoolSettings, PoolsUnder};
use crate::node::survey::NetworkSettings;

/// The configuration as JSON, in the keys of the file.
#[must_use]
pub fn json(config: &Config) -> Value {
    let mut value = json!({
        "mode": config.mode,
        "store": if config.kubernetes.is_some() { "kubernetes" } else { "local" },
        "nodeName": config.node,
        "nodeLabels": config.node_labels,
        "stateDir": config.state_dir,
        "csi": {
            "endpoint": format!("unix://{}", config.csi_socket.display()),
            "allowedTargets": config.allowed_targets,
        },
        "http": {
            "listen": config.http_listen.map_or_else(|| "off".to_owned(), |at| at.to_string()),
            "hostNames": config.http_host_names,
        },
        "pools": config.pools.iter().map(pool).collect::<Vec<_>>(),
        "poolsUnder": config.pools_under.iter().map(under).collect::<Vec<_>>(),
        "measureInterval": duration::format(config.measure_interval),
        "mergerfs": {
            "path": config.mergerfs.path,
            "options": config.mergerfs.options,
            "startTimeout": duration::format(config.mergerfs.start_timeout),
        },
        "network": network(&config.network),
        "createTimeout": duration::format(config.create_timeout),
        "log": {
            "filter": config.log_filter,
            "format": if config.log_json { "json" } else { "text" },
        },
    });
    if let Some(cluster) = &config.kubernetes {
        value["kubernetes"] = kubernetes(cluster);
    }
    if let Some(max) = config.max_volumes {
        value["maxVolumes"] = json!(max);
    }
    value
}

fn network(settings: &NetworkSettings) -> Value {
    let mut value = json!({ "nvmePort": settings.nvme_port, "nvmeTlsPort": settings.nvme_tls_port });
    if !settings.enabled {
        value["interface"] = json!("off");
    } else if let Some(interface) = &settings.interface {
        value["interface"] = json!(interface);
    }
    if let Some(subnet) = settings.subnet {
        value["subnet"] = json!(subnet.to_string());
    }
    value
}

fn reserve(reserve: Reserve) -> String {
    match reserve {
        Reserve::Percent(percent) => format!("{percent}%"),
        Reserve::Bytes(bytes) => bytes.get().to_string(),
    }
}

fn under(under: &PoolsUnder) -> Value {
    json!({ "path": under.path, "labels": under.labels, "reserve": reserve(under.reserve) })
}

fn kubernetes(cluster: &KubernetesSettings) -> Value {
    let mut value = json!({
        "namespace": cluster.namespace,
        "kubeletDir": cluster.kubelet_dir,
        "leaseDuration": duration::format(cluster.lease_duration),
    });
    if let Access::Kubeconfig(path) = &cluster.access {
        value["kubeconfig"] = json!(path);
    }
    value
}

fn pool(pool: &PoolSettings) -> Value {
    let reserve = reserve(pool.reserve);
    let mut value =
        json!({ "name": pool.name, "path": pool.path, "labels": pool.labels, "reserve": reserve });
    if let Some(media) = pool.media {
        value["media"] = json!(media);
    }
    if let Some(uuid) = &pool.uuid {
        value["uuid"] = json!(uuid);
    }
    value
}

/// The configuration as a YAML file that, read again, gives it.
#[must_use]
pub fn yaml_text(config: &Config) -> String {
    let mut out = String::new();
    if let Value::Object(map) = json(config) {
        for (key, value) in &map {
            write_entry(&mut out, 0, key, value);
        }
    }
    out
}

fn write_entry(out: &mut String, indent: usize, key: &str, value: &Value) {
    // Writing to a String cannot fail.
    let _ = match value {
        Value::Object(map) if !map.is_empty() => {
            let _ = writeln!(out, "{:indent$}{key}:", "");
            map.iter().for_each(|(k, v)| write_entry(out, indent + 2, k, v));
            Ok(())
        }
        Value::Array(list) if !list.is_empty() => {
            let _ = writeln!(out, "{:indent$}{key}:", "");
            list.iter().for_each(|element| write_element(out, indent + 2, element));
            Ok(())
        }
        // JSON's empty mapping and list and its quoted text are YAML as well.
        scalar => writeln!(out, "{:indent$}{key}: {}", "", plain(scalar)),
    };
}

fn write_element(out: &mut String, indent: usize, element: &Value) {
    let Value::Object(map) = element else {
        let _ = writeln!(out, "{:indent$}- {}", "", plain(element));
        return;
    };
    let mut body = String::new();
    map.iter().for_each(|(k, v)| write_entry(&mut body, indent + 2, k, v));
    let first = indent + 2;
    let _ = write!(out, "{:indent$}- {}", "", body.get(first..).unwrap_or_default());
}

/// A scalar without quotes where YAML needs none.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text)
            if text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"/-_.:".contains(&b))
                && !text.ends_with(':')
                && !matches!(
                    text.to_ascii_lowercase().as_str(),
                    "true" | "false" | "null" | "yes" | "no" | "on" | "off" | "y" | "n"
                ) =>
        {
            text.clone()
        }
        other => other.to_string(),
    }
}
