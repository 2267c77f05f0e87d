//! Random sequences of faults on three nodes, and everything that must hold after each.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use crate::support::cluster::on_cluster;
use crate::support::random::{Sabotage, Sequence, Trial, kept};

/// Where seeds begin when none is given.
const SEED: u64 = 1;
/// How many sequences there are when nothing is said: a few minutes.
const SEQUENCES: u64 = 3;

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn after_any_sequence_of_faults_every_safe_record_is_there_once_and_nothing_is_left() {
    let first = number("SEED").unwrap_or(SEED);
    // One seed is one sequence, unless more are asked for.
    let count = number("SEQUENCES").unwrap_or(if env::var_os("SEED").is_some() { 1 } else { SEQUENCES });
    let sabotage = Sabotage::of_environment();
    let mut left = (first..first + count).peekable();
    let (begun, mut well, mut failed) = (Instant::now(), 0_u64, Vec::new());
    while left.peek().is_some() {
        // After one that failed, the next is tried on a new cluster.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            on_cluster(|cluster| {
                let mut trial = Trial::begin(cluster);
                for seed in left.by_ref() {
                    let mut sequence = Sequence::new(seed);
                    if let Ok(steps) = env::var("STEPS") {
                        let kept = kept(&steps, sequence.steps.len());
                        sequence = sequence.only(&kept);
                    }
                    let wrong = trial.run(&sequence, sabotage);
                    if !wrong.is_empty() {
                        failed.push(format!("SEED={seed}\n  {}", wrong.join("\n  ")));
                        eprintln!("{}", failed[failed.len() - 1]);
                        panic!("SEED={seed} failed");
                    }
                    well += 1;
                }
                trial.end();
                Ok(())
            });
        }));
        let hours = begun.elapsed().as_secs_f64() / 3600.0;
        eprintln!("{well} sequences are well, {} failed, in {:.2} hours", failed.len(), hours);
    }
    assert!(
        failed.is_empty() && well == count,
        "{} of {count} are well; failed:\n{}",
        well,
        failed.join("\n")
    );
}
