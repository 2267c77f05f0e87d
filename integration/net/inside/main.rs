//! The program that runs inside the machines, as `/programs/inside`: the agent that takes the tests' commands, and whatever
//! a test wants done there by Rust code of this crate rather than by a shell.
//!
//! `inside agent` is started by the machine. Any other first word names an area: add a module and a line to `AREAS`; the
//! tests call it by `machine.run("inside AREA ARGUMENT...")`. An area prints what the test wants to know (JSON, where it is
//! more than a word) and fails with a message.

mod agent;
mod bare;
mod csi;
mod known;
mod load;
mod nfs;
mod owner;
#[path = "../protocol.rs"]
mod protocol;
#[allow(dead_code, reason = "the tests read what is written here")]
#[path = "../support/random/records.rs"]
mod records;
mod survey;
mod tls;
mod transport;
mod workload;

use std::error::Error;
use std::process::ExitCode;

/// What an area does with the arguments after its name.
type Area = fn(&[String]) -> Result<(), Box<dyn Error>>;

/// Every area, by its name.
const AREAS: &[(&str, Area)] = &[
    ("agent", agent::run),
    ("bare", bare::run),
    ("csi", csi::run),
    ("known", known::run),
    ("load", load::run),
    ("nfs", nfs::run),
    ("owner", owner::run),
    ("survey", survey::run),
    ("tls", tls::run),
    ("transport", transport::run),
    ("workload", workload::run),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("", String::as_str);
    let Some((_, area)) = AREAS.iter().find(|(known, _)| *known == name) else {
        eprintln!("inside: there is no area {name:?}");
        return ExitCode::from(2);
    };
    match area(&arguments[1..]) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("inside {name}: {error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  because: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}
