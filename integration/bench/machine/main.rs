//! What a user of this machine would measure: `scripts/bench NAME` runs one of these against the real agent, prints a
//! table and writes `target/bench/NAME.json`.
//!
//! Figures that compare are ratios of runs that alternate within one benchmark, medians of several: machines are shared
//! and noisy. Nothing here asserts a time.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints its table, and ends where it cannot measure"
)]

#[path = "../../support/agent.rs"]
mod agent;
mod footprint;
mod image;
mod io;
mod latency;
mod process;
mod report;
mod scale;
#[path = "../../host/support.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use support::{Scratch, run};

/// Where the disks of a benchmark lie; `BENCH_DIR` chooses another filesystem.
pub fn scratch() -> Scratch {
    Scratch::new()
}

/// The agent that is measured: the release build, beside this program.
pub fn program() -> PathBuf {
    std::env::var_os("UNION_CSI_PROGRAM")
        .map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_union-csi")), PathBuf::from)
}

/// A number set in the environment, to shorten or lengthen a run.
pub fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Disks of `mib` MiB each, really reserved, ext4, attached with direct I/O so that the machine's cache holds data once.
pub fn disks(scratch: &Scratch, count: usize, mib: u64, reserved: bool) -> Vec<(String, PathBuf)> {
    (0..count)
        .map(|i| {
            let name = format!("disk{i}");
            let image = scratch.join(&format!("{name}.disk"));
            let point = scratch.join(&name);
            let (image_text, point_text) = (image.display().to_string(), point.display().to_string());
            if reserved {
                run("fallocate", &["-l", &format!("{mib}MiB"), &image_text]);
            } else {
                run("truncate", &["-s", &format!("{mib}M"), &image_text]);
            }
            run("mkfs.ext4", &["-q", "-m", "0", "-E", "nodiscard,lazy_itable_init=0", &image_text]);
            std::fs::create_dir_all(&point).expect("mount point");
            let device = run("losetup", &["--find", "--show", "--direct-io=on", &image_text]);
            run("mount", &[&device, &point_text]);
            // In use, the device is not detached now but with its mount, however this ends.
            run("losetup", &["-d", &device]);
            let pool = point.join("pool");
            std::fs::create_dir_all(&pool).expect("pool");
            (name, pool)
        })
        .collect()
}

/// The directory of the disk that holds a pool made by [`disks`].
pub fn disk_of(pool: &Path) -> &Path {
    pool.parent().expect("a pool lies on a disk")
}

fn main() -> ExitCode {
    // `cargo bench` adds options of its own.
    let names: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for name in &names {
        let report = match name.as_str() {
            "io" => runtime.block_on(io::run()),
            "image" => image::run(),
            "latency" => runtime.block_on(latency::run()),
            "footprint" => runtime.block_on(footprint::run()),
            "restart" => runtime.block_on(footprint::restart()),
            "scale-branches" => runtime.block_on(scale::branches()),
            "scale-volumes" => runtime.block_on(scale::volumes()),
            other => {
                eprintln!(
                    "no benchmark {other:?}: io image latency footprint restart scale-branches scale-volumes"
                );
                return ExitCode::from(2);
            }
        };
        report.finish(name);
    }
    if names.is_empty() {
        eprintln!("usage: scripts/bench io|image|latency|footprint|restart|scale-branches|scale-volumes");
        return ExitCode::from(2);
    }
    ExitCode::SUCCESS
}
