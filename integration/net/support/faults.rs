//! What applications saw of faults: each test of one writes it down, and a table is made of all of them.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What an application saw of a fault, and what came after.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// What went wrong.
    pub fault: String,
    /// What the application saw, in a sentence.
    pub seen: String,
    /// The longest time between two records that were safe, in seconds; absent where the application itself ended.
    pub longest_pause_seconds: Option<f64>,
    /// How many of its calls failed.
    pub errors: usize,
    /// How it went on.
    pub after: String,
}

/// Names of the records, in the order of the table.
pub const FAULTS: [&str; 27] = [
    "agent-killed",
    "agent-replaced",
    "link-cut",
    "link-one-way",
    "link-delay",
    "link-limit",
    "owner-still",
    "owner-still-long",
    "owner-power",
    "owner-power-union",
    "owner-pool-late",
    "owner-reboot",
    "branch-timeout",
    "owner-full",
    "owner-full-thin",
    "owner-disk-fails",
    "both-power",
    "consumer-power",
    "consumer-reboot",
    "consumer-partitioned",
    "consumer-shares-owner",
    "api-away",
    "records-cut",
    "records-away",
    "records-fenced",
    "records-export",
    "records-shutdown",
];

fn directory() -> PathBuf {
    // Beside the logs, which are in target/net too.
    let logs = env::var_os("UNION_CSI_NET_LOGS").map_or_else(env::temp_dir, PathBuf::from);
    logs.with_file_name("faults")
}

/// Writes down what was seen of the fault of that name.
///
/// # Panics
/// When the name is unknown or nothing can be written.
pub fn record(name: &str, fault: &Fault) {
    assert!(FAULTS.contains(&name), "no row of the table is called {name}");
    let directory = directory();
    fs::create_dir_all(&directory).expect("a directory");
    let text = serde_json::to_string_pretty(fault).expect("JSON");
    fs::write(directory.join(format!("{name}.json")), text).expect("written");
    eprintln!("fault {name}: {fault:?}");
    let known = FAULTS.iter().filter_map(|name| {
        let text = fs::read_to_string(directory.join(format!("{name}.json"))).ok()?;
        Some((*name, serde_json::from_str(&text).ok()?))
    });
    fs::write(directory.join("FAULTS.md"), table(&known.collect())).expect("written");
}

/// Seconds as people read them: to a half below ten, whole above.
pub fn rounded(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => "less than 1 s".to_owned(),
        s if s < 10.0 => format!("{} s", (s * 2.0).round() / 2.0),
        s => format!("{} s", s.round()),
    }
}

fn table(faults: &BTreeMap<&str, Fault>) -> String {
    let mut text = "# What applications see of faults\n\n\
        Made by `FAULTS=write integration/net/run cluster_faults`, from what a writer in a pod saw: it appends records to its\n\
        volume and counts one as safe when fsync returns. In every one of these runs, each record that was safe was there\n\
        afterwards.\n\n\
        The machines are virtual ones in software emulation: what takes a processor's time takes several times as long as on\n\
        hardware. What waits for a network, a timeout or a boot is the same. The time that the fault itself lasted is part of the pause.\n\n\
        | what happens | what the application sees | longest pause | failed calls | afterwards |\n|---|---|---|---|---|\n"
        .to_owned();
    for fault in FAULTS.iter().filter_map(|name| faults.get(name)) {
        let pause = fault.longest_pause_seconds.map_or("–".to_owned(), rounded);
        text += &format!(
            "| {} | {} | {pause} | {} | {} |\n",
            fault.fault,
            fault.seen,
            match fault.errors {
                0 => "none".to_owned(),
                _ => "yes".to_owned(),
            },
            fault.after
        );
    }
    text
}

/// What a writer (`inside workload append`) told.
#[derive(Debug, Default)]
pub struct Told {
    /// By file: the number of each record that is safe, and when, in milliseconds since the writer began.
    pub safe: BTreeMap<String, Vec<(u64, u64)>>,
    /// Each call that failed: the file, when, and the error's number.
    pub errors: Vec<(String, u64, i32)>,
    /// The file and the record's number of each of those.
    pub tried_again: Vec<(String, u64)>,
}

impl Told {
    /// From the writer's output. The last line may be cut off by a loss of power.
    pub fn read(output: &str) -> Self {
        let mut told = Self::default();
        for line in output.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
            match (words.first(), words.get(1), number(2), number(3)) {
                (Some(&"ack"), Some(file), Some(record), Some(at)) => {
                    told.safe.entry((*file).to_owned()).or_default().push((record, at));
                }
                (Some(&"error"), Some(file), Some(record), Some(at)) => {
                    told.tried_again.push(((*file).to_owned(), record));
                    let errno = words.get(4).and_then(|word| word.parse().ok()).unwrap_or(0);
                    told.errors.push(((*file).to_owned(), at, errno));
                }
                _ => {}
            }
        }
        told
    }

    /// The longest time between two safe records of one file.
    pub fn longest_pause(&self) -> Duration {
        let of = |records: &Vec<(u64, u64)>| records.windows(2).map(|w| w[1].1 - w[0].1).max().unwrap_or(0);
        Duration::from_millis(self.safe.values().map(of).max().unwrap_or(0))
    }

    /// The same in seconds.
    pub fn longest_pause_seconds(&self) -> Option<f64> {
        Some(self.longest_pause().as_secs_f64())
    }

    /// How many records are safe, of that file.
    pub fn count(&self, file: &str) -> usize {
        self.safe.get(file).map_or(0, Vec::len)
    }

    /// How often writing that record of that file failed.
    pub fn failed(&self, file: &str, record: u64) -> usize {
        self.tried_again.iter().filter(|(name, number)| name == file && *number == record).count()
    }

    /// How many of the least written file are.
    pub fn least(&self, files: &[String]) -> usize {
        files.iter().map(|file| self.count(file)).min().unwrap_or(0)
    }

    /// Checks that each safe record is in the file, whose text is given.
    ///
    /// # Panics
    /// With the records that are lost.
    pub fn require_in(&self, file: &str, tag: &str, text: &str) {
        let found: std::collections::BTreeSet<&str> = text.lines().collect();
        let records = self.safe.get(file).map(Vec::as_slice).unwrap_or_default();
        assert!(!records.is_empty(), "nothing was ever safe in {file}");
        let lost: Vec<u64> = records
            .iter()
            .map(|(number, _)| *number)
            .filter(|number| !found.contains(format!("{tag} {number:06}").as_str()))
            .collect();
        assert!(
            lost.is_empty(),
            "{} of {} safe records of {file} are lost: {lost:?}",
            lost.len(),
            records.len()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_writer_told_is_read_to_the_last_whole_line() {
        let told = Told::read(
            "begins\nack f 0 10\nack f 1 30\nerror f 2 40 5\nack g 0 50\nack f 2 2030\nack f 3 20",
        );
        assert_eq!(told.count("f"), 3);
        assert_eq!(told.errors, [("f".to_owned(), 40, 5)]);
        assert_eq!(told.longest_pause(), Duration::from_secs(2));
        told.require_in("f", "t", "t 000000\nt 000001\nt 000002\n");
    }

    #[test]
    #[should_panic(expected = "1 of 1 safe records of f are lost: [7]")]
    fn a_record_that_is_lost_is_told() {
        Told::read("ack f 7 10\n").require_in("f", "t", "t 000006\n");
    }

    #[test]
    fn the_document_is_made_from_records_like_these() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/FAULTS.md");
        let text = fs::read_to_string(path).expect("docs/FAULTS.md");
        let rows = |text: &str| text.lines().filter(|l| l.starts_with("| ")).count();
        assert!((2..=FAULTS.len() + 1).contains(&rows(&text)), "{text}");
        let beginning = |text: &str| text.split("|---").next().map(str::to_owned);
        assert_eq!(beginning(&text), beginning(&table(&BTreeMap::new())));
    }
}
