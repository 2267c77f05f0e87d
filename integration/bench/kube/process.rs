//! What processes take.

use std::fs;

/// A line of `/proc/PID/status` in MiB.
pub fn mib(status: &str, key: &str) -> f64 {
    let line = status.lines().find(|l| l.starts_with(key)).unwrap_or_else(|| panic!("{key} in {status}"));
    let kib: f64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap();
    kib / 1024.0
}

/// `/proc/PID/status`.
pub fn status(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).expect("a running process")
}

/// Processor time that a process has used, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a running process");
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap();
    ticks / 100.0
}
