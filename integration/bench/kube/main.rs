//! `scripts/bench kube`: what the driver costs in a cluster, and how fast it is there.
//!
//! Two clusters of `integration/kube/run`, one after the other, in each of which this program runs itself with a part's
//! name: `nodes` on a cluster of three nodes with the driver as `kubectl apply -k deploy/` puts it there, `objects` on an
//! API server alone with ten thousand volumes as objects. Each part leaves its rows in a file; the table is made of both.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints its table, and ends where it cannot measure"
)]

mod audit;
#[path = "../../kube/tests/install.rs"]
#[allow(dead_code, reason = "of the tests on whole clusters")]
mod install;
mod nodes;
mod objects;
mod process;
#[path = "../machine/report.rs"]
#[allow(dead_code, reason = "of the other benchmarks")]
mod report;
mod seen;
#[path = "../../kube/tests/support.rs"]
mod support;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use report::Report;
use serde_json::{Value, json};

/// The file that a part's rows go to.
const ROWS: &str = "UNION_BENCH_ROWS";

/// As it comes, the controller manager makes 20 requests a second, and so binds a hundred claims in as many steps of its
/// own: what it takes for the driver would not be seen behind that.
const UNHURRIED: [&str; 4] =
    ["--controller-manager-arg", "--kube-api-qps=500", "--controller-manager-arg", "--kube-api-burst=1000"];

/// A figure, and what it must be.
pub struct Rows(Vec<Value>);

impl Rows {
    /// A row. `met` is `None` where nothing was promised.
    pub fn add(&mut self, name: &str, measured: &str, target: &str, met: Option<bool>, data: Value) {
        eprintln!("{name}: {measured}");
        self.0.push(json!({"name": name, "measured": measured, "target": target, "met": met, "data": data}));
    }
}

/// A number set in the environment, to shorten or lengthen a run.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// The agent that is measured: the release build.
pub fn program() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_union-csi"))
}

/// p50 and p99 in milliseconds, for a cell.
pub fn both(seconds: &[f64]) -> String {
    let at = |p| 1000.0 * report::percentile(seconds, p);
    format!("{:.0} / {:.0} ms", at(0.5), at(0.99))
}

fn run_part(name: &str) {
    let file =
        std::env::var_os(ROWS).unwrap_or_else(|| panic!("{ROWS}: {name} is run by scripts/bench kube"));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut rows = Rows(Vec::new());
    match name {
        "part-nodes" => runtime.block_on(nodes::run(&mut rows)),
        _ => runtime.block_on(objects::run(&mut rows)),
    }
    std::fs::write(file, Value::Array(rows.0).to_string()).unwrap();
}

/// Runs a part in a cluster of its own; its rows.
fn in_cluster(name: &str, cluster: &[&str]) -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let status = Command::new(support::root().join("integration/kube/run"))
        .args(cluster)
        .arg("--")
        .arg(std::env::current_exe().unwrap())
        .arg(name)
        .env(ROWS, file.path())
        .status()
        .unwrap();
    if !status.success() {
        eprintln!("part {name} ended with {status}");
        return Vec::new();
    }
    serde_json::from_slice(&std::fs::read(file.path()).unwrap()).unwrap_or_default()
}

fn whole(parts: &[&str]) -> ExitCode {
    let mut report = Report::new(&["measured", "target", ""]);
    let mut complete = true;
    for part in parts {
        let rows = match *part {
            "nodes" => in_cluster("part-nodes", &[&["--nodes", "3", "--audit"][..], &UNHURRIED].concat()),
            _ => in_cluster("part-objects", &["--api-only"]),
        };
        complete &= !rows.is_empty();
        for row in rows {
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            let met = match row["met"].as_bool() {
                None => "",
                Some(true) => "met",
                Some(false) => "missed",
            };
            report.row(&text("name"), vec![text("measured"), text("target"), met.to_owned()], row.clone());
        }
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    report.note(format!("Load average of the last minutes at the end: {}.", load.trim()));
    report.finish("kube");
    if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn main() -> ExitCode {
    // `cargo bench` adds options of its own.
    let names: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    match names.as_slice() {
        [] => whole(&["nodes", "objects"]),
        [part @ ("part-nodes" | "part-objects")] => {
            run_part(part);
            ExitCode::SUCCESS
        }
        parts if parts.iter().all(|p| matches!(*p, "nodes" | "objects")) => whole(parts),
        _ => {
            eprintln!("usage: scripts/bench kube [nodes] [objects]");
            ExitCode::from(2)
        }
    }
}
