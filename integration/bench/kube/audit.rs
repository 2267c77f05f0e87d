//! What the agents asked the API server, from its audit log.

use std::collections::{BTreeMap, HashSet};

use jiff::Timestamp;
use serde_json::Value;

const ACCOUNT: &str = "system:serviceaccount:union:union-csi";

/// Requests of the agents within a time, each once.
#[derive(Debug, Default)]
pub struct Requests {
    /// By the agent's pod.
    pub by_pod: BTreeMap<String, u64>,
    /// By verb and resource, such as `patch volumesplits/status`.
    pub by_kind: BTreeMap<String, u64>,
    pub total: u64,
}

impl Requests {
    /// Of what is asked all the time: the lease's renewal, watches that begin again.
    pub fn without_upkeep(&self) -> u64 {
        let upkeep = |kind: &str| kind.contains("leases") || kind.starts_with("watch");
        self.by_kind.iter().filter(|(kind, _)| !upkeep(kind)).map(|(_, n)| n).sum()
    }
}

/// Reads the log of the cluster.
pub fn between(from: Timestamp, until: Timestamp) -> Requests {
    let directory = std::env::var("UNION_KUBE_DIR").expect("UNION_KUBE_DIR");
    let log = std::fs::read_to_string(format!("{directory}/log/audit.log")).expect("an audit log");
    let mut seen = HashSet::new();
    let mut requests = Requests::default();
    for line in log.lines() {
        // The last line may be half written.
        let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
        let at = event["requestReceivedTimestamp"].as_str().and_then(|at| at.parse::<Timestamp>().ok());
        if event["user"]["username"] != ACCOUNT || !at.is_some_and(|at| from <= at && at < until) {
            continue;
        }
        // A watch is told of when it begins and when it ends.
        if !seen.insert(event["auditID"].as_str().unwrap_or_default().to_owned()) {
            continue;
        }
        let pod = event["user"]["extra"]["authentication.kubernetes.io/pod-name"][0].as_str();
        let of = |key: &str| event["objectRef"][key].as_str().unwrap_or_default();
        let sub = match of("subresource") {
            "" => String::new(),
            sub => format!("/{sub}"),
        };
        let kind = format!("{} {}{sub}", event["verb"].as_str().unwrap_or_default(), of("resource"));
        *requests.by_pod.entry(pod.unwrap_or("unknown").to_owned()).or_default() += 1;
        *requests.by_kind.entry(kind).or_default() += 1;
        requests.total += 1;
    }
    requests
}
