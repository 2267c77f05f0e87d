//! What branches on other nodes cost: `scripts/bench net [PART...]`, in small virtual machines on a network of their own.
//!
//! The machines are emulated in software, so no figure is one of a real network or disk: ratios of runs that alternate within
//! one start of the machines are what can be compared. Nothing here asserts a time.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints its table, and ends where it cannot measure"
)]

mod bare;
mod branches;
mod connections;
mod data;
#[path = "../../net/protocol.rs"]
mod protocol;
#[path = "../machine/report.rs"]
#[allow(dead_code, reason = "each benchmark uses some of it")]
mod report;
mod stage;
#[path = "../../net/support/mod.rs"]
#[allow(unused_imports, reason = "each benchmark uses some of it")]
mod support;
#[path = "../../net/tests/transport.rs"]
#[allow(dead_code, reason = "each benchmark uses some of it")]
mod transport;
mod writes;

use std::process::ExitCode;

use report::Report;

/// What measures a part.
type Part = fn() -> support::Result<Report>;

/// The parts, by their names.
const PARTS: &[(&str, Part)] = &[("data", data::run), ("stage", stage::run), ("writes", writes::run)];

/// Those that take an hour, and are run only when they are named.
const LONG: &[(&str, Part)] = &[
    ("branches", branches::run),
    ("connections-nvme", connections::nvme),
    ("connections-nfs", connections::nfs),
];

/// A number set in the environment, to shorten or lengthen a run.
pub fn number(name: &str, default: u32) -> u32 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn main() -> ExitCode {
    // `cargo bench` adds options of its own.
    let names: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let all = || PARTS.iter().chain(LONG);
    for name in &names {
        if !all().any(|(part, _)| part == name) {
            let parts: Vec<&str> = all().map(|(part, _)| *part).collect();
            eprintln!("no part {name:?}: {}", parts.join(" "));
            return ExitCode::from(2);
        }
    }
    let wanted = |name: &str| names.iter().any(|n| n == name);
    let unnamed = PARTS.iter().filter(|_| names.is_empty());
    for (name, part) in unnamed.chain(all().filter(|(name, _)| wanted(name))) {
        match part() {
            Ok(report) => report.finish(&format!("net-{name}")),
            Err(error) => {
                eprintln!("{error:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
