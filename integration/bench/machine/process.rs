//! What processes take, from `/proc`.

use std::fs;
use std::process::Command;

/// Resident memory of a process, in KiB.
pub fn resident_kib(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a running process");
    number_after(&status, "VmRSS:").expect("VmRSS")
}

/// Its share of memory, in KiB: what several processes have in common is divided among them.
pub fn share_kib(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a running process");
    number_after(&rollup, "Pss:").expect("Pss")
}

/// Its threads.
pub fn threads(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a running process");
    number_after(&status, "Threads:").expect("Threads")
}

/// Its open descriptors.
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).expect("a running process").count()
}

/// Processor time that a process has used, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a running process");
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().expect("utime") + fields[12].parse::<f64>().expect("stime");
    ticks / 100.0
}

/// The MergerFS processes of the agent whose state is below `dir`.
pub fn unions(dir: &str) -> Vec<u32> {
    let out = Command::new("pgrep").args(["-f", &format!("mergerfs.*{dir}/")]).output().expect("pgrep");
    String::from_utf8_lossy(&out.stdout).lines().filter_map(|l| l.trim().parse().ok()).collect()
}

fn number_after(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}
