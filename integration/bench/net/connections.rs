//! How many branches of another node a node can have attached, and what each takes at both ends: the transports alone, without
//! agents, filesystems or unions.

use std::time::Duration;

use serde_json::{Value, json};

use crate::number;
use crate::report::{Report, percentile};
use crate::support::{Machine, Network, Options, Result};
use crate::transport::End;

/// Attached at each row, in all.
const STEPS: [u32; 5] = [1, 100, 300, 600, 1200];

/// How long a step may take in software emulation.
const BOUND: Duration = Duration::from_secs(1800);

/// A kernel's own memory, that of caches apart, in KiB.
const USED: &str = "sync; echo 3 >/proc/sys/vm/drop_caches; sleep 1; awk '/^MemTotal/ { t = $2 } /^MemFree/ { print t - $2 }' \
    /proc/meminfo";

/// Images.
pub fn nvme() -> Result<Report> {
    run("nvme")
}

/// Directories.
pub fn nfs() -> Result<Report> {
    run("nfs")
}

fn run(kind: &'static str) -> Result<Report> {
    let (most, processors) = (number("BENCH_CONNECTIONS", 1200), number("BENCH_PROCESSORS", 4));
    let mut options = Options::new(2).memory_mib(number("BENCH_MEMORY", 3072));
    // A connection has a queue for each processor, four at most.
    options.arguments = vec!["-smp".to_owned(), processors.to_string()];
    let net = Network::boot_with(&options)?;
    let (owner, consumer) =
        (End { machine: net.machine("a"), kind }, End { machine: net.machine("b"), kind });
    let make = match kind {
        "nvme" => "truncate -s 16M",
        _ => "mkdir",
    };
    owner.machine.run_within(
        BOUND,
        format!(
            "mkfs.ext4 -q -F /disk/data; mkdir -p /mnt; mount /disk/data /mnt; mkdir /mnt/many; cd /mnt/many; \
             seq 0 {} | xargs {make}",
            most.saturating_sub(1)
        ),
    )?;
    let peer = consumer.identity()?;
    let address = match kind {
        "nvme" => format!("{}:4420", owner.machine.address()),
        _ => format!("{}:2049", owner.machine.address()),
    };
    let empty = [used(owner.machine)?, used(consumer.machine)?];
    let mut report = Report::new(&[
        "export p50 / p99 ms",
        "attach p50 / p99 ms",
        "KiB each, owner",
        "KiB each, consumer",
        "all attachments read in ms",
        "one export, all exports read in ms",
    ]);
    let mut done = 0;
    for step in STEPS.iter().copied().filter(|step| *step < most).chain([most]) {
        let range = format!("from={done} to={step} names=/tmp/names");
        let exported = many(&owner, &format!("export-many source=/mnt/many peer={peer} {range}"))?;
        consumer.machine.write("/tmp/names", &owner.machine.read("/tmp/names")?)?;
        let attached = many(&consumer, &format!("attach-many address={address} {range}"))?;
        let each =
            |machine: &Machine, empty: f64| -> Result<f64> { Ok((used(machine)? - empty) / f64::from(step)) };
        let memory = [each(owner.machine, empty[0])?, each(consumer.machine, empty[1])?];
        let (exports, attachments) = (many(&owner, "count")?, many(&consumer, "count")?);
        let of = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
        let (export, attach) = (times(&exported), times(&attached));
        report.row(
            &step.to_string(),
            vec![
                format!("{:.0} / {:.0}", export.0, export.1),
                format!("{:.0} / {:.0}", attach.0, attach.1),
                format!("{:.0}", memory[0]),
                format!("{:.0}", memory[1]),
                format!("{:.0}", of(&attachments, "attachments_ms")),
                format!("{:.1}, {:.0}", of(&exports, "of_one_ms"), of(&exports, "exports_ms")),
            ],
            json!({
                "count": step, "export_ms": export, "attach_ms": attach, "owner_kib": memory[0], "consumer_kib": memory[1],
                "exports": exports, "attachments": attachments,
            }),
        );
        eprintln!(
            "{kind}: {step} of {most}: export {export:?} attach {attach:?} KiB {memory:?} {exports} {attachments}"
        );
        if let Some(why) = [&exported, &attached].into_iter().find(|answer| answer.get("failed").is_some()) {
            report.note(format!(
                "It ended at number {}: {}",
                why["failed"],
                why["why"].as_str().unwrap_or_default()
            ));
            break;
        }
        done = step;
    }
    let detached = times(&many(&consumer, &format!("detach-many from=0 to={done}"))?);
    let unexported = times(&many(&owner, &format!("unexport-many from=0 to={done}"))?);
    report.note(format!(
        "Detaching took {:.0} / {:.0} ms each, ending the exports {:.0} / {:.0} ms. {processors} processors in each machine, \
         emulated in software: times compare rows, not machines. Memory is all that is not free once caches are dropped.",
        detached.0, detached.1, unexported.0, unexported.1
    ));
    Ok(report)
}

/// One call that does many.
fn many(end: &End<'_>, call: &str) -> Result<Value> {
    let (action, rest) = call.split_once(' ').unwrap_or((call, ""));
    let line = format!(
        "inside transport {} {action} at={} write-through=no {rest}",
        end.kind,
        end.machine.address()
    );
    let text = end.machine.run_within(BOUND, &line)?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|e| panic!("{line}: {text:?}: {e}")))
}

/// What is not free once caches are dropped, in KiB.
pub fn used(machine: &Machine) -> Result<f64> {
    Ok(machine.run(USED)?.trim().parse().unwrap_or(f64::NAN))
}

/// The middle and the ninety-ninth of a hundred.
fn times(answer: &Value) -> (f64, f64) {
    let all: Vec<f64> = answer["ms"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
    match all.is_empty() {
        true => (f64::NAN, f64::NAN),
        false => (percentile(&all, 0.5), percentile(&all, 0.99)),
    }
}
