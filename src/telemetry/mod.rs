//! Logs and metrics of the agent.
//!
//! Logs go to standard error. Metrics are made when they are asked for, from what the node shows at that moment
//! ([`Scrape`]); the one table of them is [`table::METRICS`].

mod gather;
pub mod table;

use std::collections::BTreeMap;
use std::io::IsTerminal;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use tracing_subscriber::EnvFilter;

use crate::controllers::access::AccessFigures;
use crate::controllers::orphans::scan::OrphanKind;
use crate::controllers::splitter::SplitterFigures;
use crate::csi::counters::MethodSnapshot;
use crate::domain::NodeName;
use crate::domain::pool::PoolReport;
use crate::domain::reach::TransportReport;
use crate::node::union::UnionAbilities;
use crate::node::volume::VolumeSnapshot;
use gather::{Family, Value};
use table::Kind;

/// Media type of [`encode`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Starts logging on standard error. `filter` was checked with the configuration. A second call changes nothing: the
/// first subscriber stays.
pub fn init(filter: &str, json: bool) {
    let filter = EnvFilter::new(filter);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_writer(std::io::stderr);
    // Only a second call can fail, and what it wanted exists then.
    let _ = if json { builder.json().flatten_event(true).try_init() } else { builder.try_init() };
}

/// What was counted since the agent started.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// CSI calls by method.
    pub csi: Vec<MethodSnapshot>,
    /// What the splitter has done.
    pub splitter: SplitterFigures,
    /// What the leader ordered of branches.
    pub access: AccessFigures,
    /// What this node's branches did for other nodes.
    pub exports: crate::node::access::ExportCounts,
    /// Orphans of each kind in the last scan of this instance; `None`: it does not lead, or has not scanned yet.
    pub orphans: Option<BTreeMap<OrphanKind, u64>>,
    /// What the store has.
    pub store: crate::store::Figures,
    /// Requests to the API server; `None`: the embedded store.
    pub kubernetes: Option<KubernetesFigures>,
    /// Whether this instance leads.
    pub leads: bool,
    /// Terms that it began.
    pub terms: u64,
}

/// Requests to the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubernetesFigures {
    /// Verb, resource, how many.
    pub requests: Vec<(&'static str, &'static str, u64)>,
    /// What became of those that failed, how many.
    pub failures: Vec<(&'static str, u64)>,
}

/// What the agent's own process takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AgentUsage {
    /// Resident memory in bytes.
    pub resident: u64,
    /// Processor time in seconds, user and system.
    pub cpu_seconds: f64,
}

impl AgentUsage {
    /// As it is now; zero where the kernel does not tell.
    #[must_use]
    pub fn now() -> Self {
        let resident = resident("self").unwrap_or_default();
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF);
        let cpu_seconds = usage.map_or(0.0, |u| {
            [u.user_time(), u.system_time()]
                .iter()
                .map(|t| {
                    std::time::Duration::new(t.tv_sec().unsigned_abs(), 0).as_secs_f64() + micros(t.tv_usec())
                })
                .sum()
        });
        Self { resident, cpu_seconds }
    }
}

/// Resident memory in bytes of the process with this pid (or `self`), `None` where it is gone (`VmRSS` in
/// proc_pid_status(5)).
#[must_use]
pub fn resident(pid: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib.saturating_mul(1024))
}

fn micros(n: i64) -> f64 {
    std::time::Duration::from_micros(n.unsigned_abs()).as_secs_f64()
}

/// What the metrics are made from.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// This node.
    pub node: NodeName,
    /// Whether it can serve volumes.
    pub ready: bool,
    /// Its pools.
    pub pools: Vec<PoolReport>,
    /// The volumes that are staged or published on it.
    pub volumes: Vec<VolumeSnapshot>,
    /// Resident memory in bytes of the MergerFS processes that live, by pid.
    pub memory: BTreeMap<i32, u64>,
    /// What unions it can make.
    pub abilities: UnionAbilities,
    /// What it can carry between itself and other nodes.
    pub transports: Vec<TransportReport>,
    /// What was counted.
    pub counters: Counters,
    /// The agent's own process.
    pub agent: AgentUsage,
}

/// The metrics in OpenMetrics text.
#[must_use]
pub fn encode(scrape: &Scrape) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Gathered(gather::families(scrape))));
    let mut out = String::new();
    // Writing to a String cannot fail, and the table's test encodes every metric.
    if text::encode(&mut out, &registry).is_err() {
        tracing::error!("metrics cannot be encoded");
    }
    out
}

#[derive(Debug)]
struct Gathered(Vec<Family>);

impl Collector for Gathered {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        for family in &self.0 {
            let spec = family.spec;
            let kind = match spec.kind {
                Kind::Gauge => MetricType::Gauge,
                Kind::Counter => MetricType::Counter,
                Kind::Histogram => MetricType::Histogram,
            };
            // The encoder adds the unit and `_total` itself.
            let unit = spec.unit.map(|unit| unit.prometheus());
            let mut metric = encoder.encode_descriptor(spec.base_name(), spec.help, unit.as_ref(), kind)?;
            for (labels, value) in &family.samples {
                if labels.is_empty() {
                    put(spec.kind, value, &mut metric)?;
                } else {
                    put(spec.kind, value, &mut metric.encode_family(labels)?)?;
                }
            }
        }
        Ok(())
    }
}

fn put(kind: Kind, value: &Value, one: &mut MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
    match (kind, value) {
        (Kind::Counter, Value::Count(n)) => one.encode_counter::<NoLabelSet, _, f64>(n, None),
        (Kind::Counter, Value::Real(x)) => one.encode_counter::<NoLabelSet, _, f64>(x, None),
        (_, Value::Count(n)) => one.encode_gauge(n),
        (_, Value::Real(x)) => one.encode_gauge(x),
        (_, Value::Times { sum, count, buckets }) => {
            one.encode_histogram::<NoLabelSet>(*sum, *count, buckets, None)
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
