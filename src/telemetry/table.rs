//! The table of metrics: names, units, types, labels and meanings, behind `/metrics` and `docs/METRICS.md`.

use std::fmt::Write as _;

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only goes up, until the agent restarts.
    Counter,
    /// How often it was at most so much.
    Histogram,
}

/// Unit of a metric, which its name ends in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
}

impl Unit {
    /// As prometheus-client has it.
    pub(super) const fn prometheus(self) -> prometheus_client::registry::Unit {
        match self {
            Self::Bytes => prometheus_client::registry::Unit::Bytes,
            Self::Seconds => prometheus_client::registry::Unit::Seconds,
        }
    }
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Spec {
    /// Full name, as it is scraped.
    pub name: &'static str,
    /// Type.
    pub kind: Kind,
    /// Unit.
    pub unit: Option<Unit>,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// Meaning.
    pub help: &'static str,
}

impl Spec {
    /// The name without what the encoder adds: `_total` and the unit.
    pub(super) fn base_name(&self) -> &'static str {
        let name = self.name.strip_suffix("_total").unwrap_or(self.name);
        match self.unit {
            Some(Unit::Bytes) => name.strip_suffix("_bytes").unwrap_or(name),
            Some(Unit::Seconds) => name.strip_suffix("_seconds").unwrap_or(name),
            None => name,
        }
    }
}

macro_rules! metrics {
    ($($id:ident $name:literal $kind:ident $unit:expr, [$($label:literal),*], $help:literal;)*) => {
        $(pub(super) static $id: Spec = Spec {
            name: $name,
            kind: Kind::$kind,
            unit: $unit,
            labels: &[$($label),*],
            help: $help,
        };)*

        /// Every metric.
        pub static METRICS: &[&Spec] = &[$(&$id),*];
    };
}

const BYTES: Option<Unit> = Some(Unit::Bytes);
const SECONDS: Option<Unit> = Some(Unit::Seconds);

metrics! {
    BUILD "union_csi_build_info" Gauge None, ["version", "mergerfs"],
        "1; the versions of the agent and of the mergerfs that passed its self-test (none where none did).";
    READY "union_csi_ready" Gauge None, [],
        "1 where this node can serve volumes, else 0; /readyz tells why.";
    PASSTHROUGH "union_csi_passthrough" Gauge None, [],
        "1 where unions pass reads and writes through to the kernel, else 0.";
    TRANSPORT_ABLE "union_csi_transport_able" Gauge None, ["transport", "end"],
        "1 where this node can serve its branches to other nodes (owner) or use theirs (consumer) by the transport (nvme-tcp, \
         nfs), else 0; `union-csi status --output json` tells why. None where it looks for no network.";
    POOL_STATE "union_csi_pool_state" Gauge None, ["pool", "state"],
        "1 for the state that the pool is in (Ready, Absent, ReadOnly), 0 for the others.";
    POOL_TOTAL "union_csi_pool_total_bytes" Gauge BYTES, ["pool"],
        "Size of the pool's filesystem.";
    POOL_FREE "union_csi_pool_free_bytes" Gauge BYTES, ["pool"],
        "What is free for writing on it.";
    POOL_RESERVE "union_csi_pool_reserve_bytes" Gauge BYTES, ["pool"],
        "What the administrator keeps out of reach.";
    POOL_PROMISED "union_csi_pool_promised_bytes" Gauge BYTES, ["pool"],
        "Sum of the sizes of the branches on its device.";
    POOL_OCCUPIED "union_csi_pool_occupied_bytes" Gauge BYTES, ["pool"],
        "What these branches occupy already.";
    POOL_ALLOCATABLE "union_csi_pool_allocatable_bytes" Gauge BYTES, ["pool"],
        "What a new branch could have: min(total - reserve - promised, free - reserve - (promised - occupied)).";
    VOLUME_INFO "union_csi_volume_info" Gauge None, ["volume", "union"],
        "1 for each volume on this node; what serves it (bind, overlay, mergerfs, block).";
    VOLUME_HEALTHY "union_csi_volume_healthy" Gauge None, ["volume"],
        "1 where nothing is wrong with the volume on this node, else 0.";
    VOLUME_SIZE "union_csi_volume_size_bytes" Gauge BYTES, ["volume"],
        "Space of the volume, as df tells in it.";
    VOLUME_USED "union_csi_volume_used_bytes" Gauge BYTES, ["volume"],
        "Space used in it.";
    VOLUME_AVAILABLE "union_csi_volume_available_bytes" Gauge BYTES, ["volume"],
        "Space available in it.";
    VOLUME_BRANCHES "union_csi_volume_branches" Gauge None, ["volume"],
        "Branches of the volume that are attached on this node.";
    VOLUME_TARGETS "union_csi_volume_targets" Gauge None, ["volume"],
        "Places that the volume is published at on this node.";
    UNION_ALIVE "union_csi_union_alive" Gauge None, ["volume"],
        "1 where the volume's MergerFS process lives, 0 where it should and does not.";
    UNION_MEMORY "union_csi_union_resident_bytes" Gauge BYTES, ["volume"],
        "Resident memory of the volume's MergerFS process.";
    HEALS "union_csi_union_heals_total" Counter None, ["volume"],
        "Times that the volume's union was replaced since the agent first staged it.";
    CSI_CALLS "union_csi_csi_calls_total" Counter None, ["method", "code"],
        "CSI calls that ended, by method and gRPC code.";
    CSI_SECONDS "union_csi_csi_call_seconds" Histogram SECONDS, ["method"],
        "How long CSI calls took.";
    SPLITS "union_csi_splits_total" Counter None, ["outcome"],
        "Splits that the splitter computed, by outcome: planned, infeasible, or replanned because a node refused a branch.";
    SPLITTER_RECONCILES "union_csi_splitter_reconciles_total" Counter None, [],
        "Decisions that the splitter made.";
    SPLITTER_ERRORS "union_csi_splitter_errors_total" Counter None, [],
        "Writes of the splitter that failed, conflicts with other writers included.";
    WAITING "union_csi_volumes_waiting" Gauge None, [],
        "Volumes that wait for room.";
    ACCESS_ORDERS "union_csi_access_orders_total" Counter None, ["order"],
        "Branches that this instance, leading, gave to a node (grant) or took back (revoke).";
    ACCESS_WAITING "union_csi_access_waiting" Gauge None, [],
        "Branches that an attached volume needs and that their owner has not made over for 10 s, on the leader; the events \
         of their claims tell why.";
    EXPORTS "union_csi_exports" Gauge None, [],
        "Branches of this node that were open to another node when they were last looked at.";
    EXPORT_ACTIONS "union_csi_export_actions_total" Counter None, ["action"],
        "What this node did with its branches for other nodes: let one use a branch (allow), took that from one (fence), ended \
         its own use of one (endHere).";
    EXPORT_FAILURES "union_csi_export_failures_total" Counter None, [],
        "Attempts to carry out who may use a branch of this node that failed; the branch's Exported condition tells why.";
    ORPHANS "union_csi_branches_orphaned" Gauge None, [],
        "Branches whose volume does not exist.";
    ORPHANS_BY_KIND "union_csi_orphans" Gauge None, ["kind"],
        "What no claim needs any more, on the leader after its first scan, as of its last (one an hour): branch, volume, \
         retained, persistentVolume, ephemeral, unclaimed. `union-csi orphans` lists it.";
    STORE_MALFORMED "union_csi_store_malformed_total" Counter None, [],
        "Versions of stored objects that this agent does not understand and leaves out; its log names each once.";
    LEADER "union_csi_leader" Gauge None, [],
        "1 where this instance leads: it plans, provisions and attaches for all nodes.";
    TERMS "union_csi_leader_terms_total" Counter None, [],
        "Times that this instance began to lead. Leaders that change often have trouble reaching the API server.";
    REQUESTS "union_csi_kubernetes_requests_total" Counter None, ["verb", "resource"],
        "Requests made of the Kubernetes API. A watch counts when it begins.";
    REQUEST_FAILURES "union_csi_kubernetes_request_failures_total" Counter None, ["reason"],
        "Requests that failed: no answer (unreachable), 401 or 403 (refused), 429 (throttled), 500 and above (server).";
    AGENT_MEMORY "union_csi_agent_resident_bytes" Gauge BYTES, [],
        "Resident memory of the agent.";
    AGENT_CPU "union_csi_agent_cpu_seconds_total" Counter SECONDS, [],
        "Processor time of the agent, user and system.";
}

/// The table in Markdown, for `docs/METRICS.md`.
#[must_use]
pub fn markdown() -> String {
    let mut out = String::from("| metric | type | labels | meaning |\n|---|---|---|---|\n");
    for metric in METRICS {
        let kind = match metric.kind {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        };
        let labels: Vec<String> = metric.labels.iter().map(|l| format!("`{l}`")).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(out, "| `{}` | {kind} | {} | {} |", metric.name, labels.join(", "), metric.help);
    }
    out
}
