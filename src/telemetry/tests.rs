use super::*;
use crate::http::fixture;

fn scrape() -> Scrape {
    let machine = fixture::FakeMachine::default();
    Scrape {
        node: "nas".parse().unwrap(),
        ready: true,
        pools: machine.pools.clone(),
        volumes: machine.volumes.clone(),
        memory: [(4242, 5 << 20)].into(),
        abilities: machine.abilities.clone(),
        transports: machine.carried.transports.clone(),
        counters: machine.counters.clone(),
        agent: AgentUsage::now(),
    }
}

#[test]
fn every_metric_of_the_table_is_set() {
    for family in gather::families(&scrape()) {
        assert!(!family.samples.is_empty(), "{} is never set", family.spec.name);
        for (labels, _) in &family.samples {
            let names: Vec<&str> = labels.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, family.spec.labels, "{}", family.spec.name);
        }
    }
}

#[test]
fn what_is_scraped_has_the_names_of_the_table() {
    let text = encode(&scrape());
    assert!(text.ends_with("# EOF\n"));
    for metric in table::METRICS {
        let name = match metric.kind {
            Kind::Histogram => format!("{}_bucket", metric.name),
            Kind::Gauge | Kind::Counter => metric.name.to_owned(),
        };
        let found = text.lines().any(|l| {
            l.strip_prefix(&name).is_some_and(|rest| rest.starts_with('{') || rest.starts_with(' '))
        });
        assert!(found, "{name} is not in\n{text}");
    }
    let known = |line: &str| table::METRICS.iter().any(|m| line.starts_with(m.name));
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        assert!(known(line), "{line} is not in the table");
    }
    assert!(
        text.contains("union_csi_csi_call_seconds_bucket{le=\"+Inf\",method=\"CreateVolume\"} 5"),
        "{text}"
    );
}

#[test]
fn names_are_unique_and_end_in_their_unit() {
    let mut names: Vec<&str> = table::METRICS.iter().map(|m| m.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), table::METRICS.len());
    for metric in table::METRICS {
        let name = metric.name.strip_suffix("_total").unwrap_or(metric.name);
        match metric.unit {
            Some(table::Unit::Bytes) => assert!(name.ends_with("_bytes"), "{name}"),
            Some(table::Unit::Seconds) => assert!(name.ends_with("_seconds"), "{name}"),
            None => assert!(!name.ends_with("_bytes") && !name.ends_with("_seconds"), "{name}"),
        }
        assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{name}");
    }
}

#[test]
fn the_agent_sees_its_own_memory() {
    assert!(AgentUsage::now().resident > 1 << 20);
}

#[test]
fn the_document_of_metrics_is_up_to_date() {
    crate::telemetry::tests::compare("docs/METRICS.md", &table::markdown());
}

/// Compares the generated part of a document (between its two marks) with what the code says now, or writes it when
/// `UNION_CSI_WRITE_DOCS` is set.
pub(crate) fn compare(path: &str, generated: &str) {
    compare_part(path, "generated", generated);
}

/// As [`compare`], for one of several generated parts.
pub(crate) fn compare_part(path: &str, part: &str, generated: &str) {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let text = std::fs::read_to_string(&file).unwrap();
    let (begin, end) = (format!("<!-- {part}: begin -->\n"), format!("<!-- {part}: end -->"));
    let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{path} lacks {begin}"));
    let (inside, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{path} lacks {end}"));
    let wanted = format!("\n{generated}\n");
    if std::env::var_os("UNION_CSI_WRITE_DOCS").is_some() {
        std::fs::write(&file, format!("{before}{begin}{wanted}{end}{after}")).unwrap();
        return;
    }
    assert!(
        inside == wanted,
        "{path} is not up to date: run UNION_CSI_WRITE_DOCS=1 cargo test --lib document -- --test-threads=1, and review \
         what changed"
    );
}
