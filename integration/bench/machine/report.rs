//! Tables for people, JSON for programs.

use std::fs;

use serde_json::{Value, json};

/// A benchmark's result.
pub struct Report {
    columns: Vec<String>,
    rows: Vec<(String, Vec<String>)>,
    notes: Vec<String>,
    data: Vec<Value>,
}

impl Report {
    pub fn new(columns: &[&str]) -> Self {
        Self {
            columns: columns.iter().map(|c| (*c).to_owned()).collect(),
            rows: Vec::new(),
            notes: Vec::new(),
            data: Vec::new(),
        }
    }

    pub fn row(&mut self, name: &str, cells: Vec<String>, data: Value) {
        self.rows.push((name.to_owned(), cells));
        self.data.push(json!({ "name": name, "values": data }));
    }

    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Prints the table (Markdown, so that it can go into `docs/` as it is) and writes the JSON.
    pub fn finish(&self, name: &str) {
        println!("\n| {name} | {} |", self.columns.join(" | "));
        println!("|---|{}", "---|".repeat(self.columns.len()));
        for (row, cells) in &self.rows {
            println!("| {row} | {} |", cells.join(" | "));
        }
        println!();
        for note in &self.notes {
            println!("{note}");
        }
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/target/bench");
        fs::create_dir_all(dir).expect("target/bench");
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let whole = json!({
            "benchmark": name, "columns": self.columns, "rows": self.data, "notes": self.notes,
            "kernel": kernel.trim(), "cores": cores,
        });
        let file = format!("{dir}/{name}.json");
        fs::write(&file, format!("{whole:#}\n")).expect("the result file");
        println!("written to target/bench/{name}.json");
    }
}

/// The middle value; the mean of both where there are two.
pub fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

/// The value below which the share `p` of all values lies, interpolated.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an index into a short list"
)]
pub fn percentile(values: &[f64], p: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = p * last as f64;
    let low = sorted[at.floor() as usize];
    let high = sorted[at.ceil() as usize];
    low + (high - low) * at.fract()
}
