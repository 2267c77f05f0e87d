//! From what the node shows to samples. Pure.

use super::Scrape;
use super::table::{self, Spec};
use crate::csi::counters::MethodSnapshot;
use crate::domain::pool::{PoolReport, PoolState};
use crate::domain::union::UnionKind;
use crate::node::volume::VolumeSnapshot;

/// A sample's value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Count(u64),
    Real(f64),
    Times { sum: f64, count: u64, buckets: Vec<(f64, u64)> },
}

type Labels = Vec<(&'static str, String)>;

/// A metric with its samples.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) spec: &'static Spec,
    pub(super) samples: Vec<(Labels, Value)>,
}

/// All metrics, in the order of the table.
pub(super) fn families(scrape: &Scrape) -> Vec<Family> {
    let mut families: Vec<Family> =
        table::METRICS.iter().map(|spec| Family { spec, samples: Vec::new() }).collect();
    let mut add = |spec: &'static Spec, values: &[&str], value: Value| {
        debug_assert_eq!(spec.labels.len(), values.len(), "{}", spec.name);
        let labels = spec.labels.iter().copied().zip(values.iter().map(|v| (*v).to_owned())).collect();
        if let Some(family) = families.iter_mut().find(|f| f.spec == spec) {
            family.samples.push((labels, value));
        }
    };
    let version = scrape.abilities.mergerfs_version.as_deref().unwrap_or("none");
    add(&table::BUILD, &[env!("CARGO_PKG_VERSION"), version], Value::Count(1));
    add(&table::READY, &[], flag(scrape.ready));
    add(&table::PASSTHROUGH, &[], flag(scrape.abilities.passthrough));
    for report in &scrape.transports {
        for (end, ability) in [("owner", &report.owner), ("consumer", &report.consumer)] {
            add(&table::TRANSPORT_ABLE, &[report.transport.as_str(), end], flag(ability.able));
        }
    }
    add(&table::AGENT_MEMORY, &[], Value::Count(scrape.agent.resident));
    add(&table::AGENT_CPU, &[], Value::Real(scrape.agent.cpu_seconds));
    scrape.pools.iter().for_each(|p| pool(&mut add, p));
    scrape.volumes.iter().for_each(|v| volume(&mut add, v, scrape));
    scrape.counters.csi.iter().for_each(|calls| csi(&mut add, calls));
    let splitter = &scrape.counters.splitter;
    for (outcome, n) in
        [("planned", splitter.plans), ("infeasible", splitter.infeasible), ("replanned", splitter.replans)]
    {
        add(&table::SPLITS, &[outcome], Value::Count(n));
    }
    let access = &scrape.counters.access;
    for (order, n) in [("grant", access.grants), ("revoke", access.revocations)] {
        add(&table::ACCESS_ORDERS, &[order], Value::Count(n));
    }
    let exports = &scrape.counters.exports;
    for (action, n) in [("allow", exports.grants), ("fence", exports.fences), ("endHere", exports.ended)] {
        add(&table::EXPORT_ACTIONS, &[action], Value::Count(n));
    }
    for (spec, n) in [
        (&table::EXPORTS, exports.open),
        (&table::EXPORT_FAILURES, exports.failures),
        (&table::ACCESS_WAITING, access.waiting),
        (&table::SPLITTER_RECONCILES, splitter.reconciles),
        (&table::SPLITTER_ERRORS, splitter.errors),
        (&table::WAITING, splitter.waiting),
        (&table::ORPHANS, splitter.orphans),
        (&table::STORE_MALFORMED, scrape.counters.store.malformed),
    ] {
        add(spec, &[], Value::Count(n));
    }
    for (kind, n) in scrape.counters.orphans.iter().flatten() {
        add(&table::ORPHANS_BY_KIND, &[kind.as_str()], Value::Count(*n));
    }
    add(&table::LEADER, &[], flag(scrape.counters.leads));
    add(&table::TERMS, &[], Value::Count(scrape.counters.terms));
    for (verb, resource, n) in scrape.counters.kubernetes.iter().flat_map(|k| &k.requests) {
        add(&table::REQUESTS, &[verb, resource], Value::Count(*n));
    }
    for (reason, n) in scrape.counters.kubernetes.iter().flat_map(|k| &k.failures) {
        add(&table::REQUEST_FAILURES, &[reason], Value::Count(*n));
    }
    families
}

fn flag(yes: bool) -> Value {
    Value::Count(u64::from(yes))
}

fn pool(add: &mut impl FnMut(&'static Spec, &[&str], Value), pool: &PoolReport) {
    let name = pool.name.as_str();
    for (state, word) in
        [(PoolState::Ready, "Ready"), (PoolState::Absent, "Absent"), (PoolState::ReadOnly, "ReadOnly")]
    {
        add(&table::POOL_STATE, &[name, word], flag(pool.state == state));
    }
    for (spec, bytes) in [
        (&table::POOL_TOTAL, pool.total),
        (&table::POOL_FREE, pool.free),
        (&table::POOL_RESERVE, pool.reserve),
        (&table::POOL_PROMISED, pool.promised),
        (&table::POOL_OCCUPIED, pool.occupied),
        (&table::POOL_ALLOCATABLE, pool.allocatable()),
    ] {
        add(spec, &[name], Value::Count(bytes.get()));
    }
}

fn volume(add: &mut impl FnMut(&'static Spec, &[&str], Value), volume: &VolumeSnapshot, scrape: &Scrape) {
    let id = volume.volume.as_str();
    let union = match volume.union {
        UnionKind::Bind => "bind",
        UnionKind::Overlay => "overlay",
        UnionKind::Mergerfs => "mergerfs",
        UnionKind::Block => "block",
    };
    add(&table::VOLUME_INFO, &[id, union], Value::Count(1));
    add(&table::VOLUME_HEALTHY, &[id], flag(!volume.health.abnormal));
    add(&table::VOLUME_BRANCHES, &[id], Value::Count(volume.branches.len() as u64));
    add(&table::VOLUME_TARGETS, &[id], Value::Count(volume.targets.len() as u64));
    if let Some(space) = volume.space {
        add(&table::VOLUME_SIZE, &[id], Value::Count(space.total));
        add(&table::VOLUME_USED, &[id], Value::Count(space.used));
        add(&table::VOLUME_AVAILABLE, &[id], Value::Count(space.available));
    }
    if volume.union == UnionKind::Mergerfs {
        let memory = volume.pid.and_then(|pid| scrape.memory.get(&pid));
        add(&table::UNION_ALIVE, &[id], flag(memory.is_some()));
        add(&table::HEALS, &[id], Value::Count(volume.heals));
        if let Some(bytes) = memory {
            add(&table::UNION_MEMORY, &[id], Value::Count(*bytes));
        }
    }
}

fn csi(add: &mut impl FnMut(&'static Spec, &[&str], Value), calls: &MethodSnapshot) {
    let method = calls.method;
    for (code, n) in &calls.codes {
        add(&table::CSI_CALLS, &[method, code], Value::Count(*n));
    }
    let count = calls.codes.values().sum();
    // The encoder adds the buckets up itself.
    let mut below = 0;
    let mut buckets = Vec::with_capacity(calls.buckets.len() + 1);
    for (bound, cumulative) in &calls.buckets {
        buckets.push((*bound, cumulative.saturating_sub(below)));
        below = *cumulative;
    }
    if buckets.last().is_none_or(|(bound, _)| bound.is_finite()) {
        buckets.push((f64::INFINITY, u64::saturating_sub(count, below)));
    }
    add(&table::CSI_SECONDS, &[method], Value::Times { sum: calls.seconds, count, buckets });
}
