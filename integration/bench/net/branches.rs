//! What more branches of a volume cost when all of them lie on two other nodes: agents, API server, exports, attachments, one
//! MergerFS over all.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::connections::used;
use crate::number;
use crate::report::Report;
use crate::stage;
use crate::support::Result;
use crate::support::cluster::{Agent, Cluster, Node, Size};

/// How many branches. One is joined too, so that the same things are compared.
const COUNTS: [u32; 5] = [1, 4, 16, 64, 256];

const BRANCH_MIB: u32 = 16;
/// Of each pool, a filesystem of its own in a sparse file: one branch, and what it takes beside its size.
const POOL_MIB: u32 = 40;
/// Of the disk that holds those, which is sparse.
const DISK: u64 = 16 << 30;

/// What is done with files, in this order: its name in the table, what `inside load` calls it.
const WORK: [(&str, &str); 4] = [
    ("list, names/s", "list"),
    ("stat each, first, /s", "stat"),
    ("stat each, again, /s", "stat"),
    ("open + read + close, /s", "open"),
];

/// How long making the pools may take in software emulation, working on files, and each step of a volume.
const BOUND: Duration = Duration::from_secs(900);

const POD: &str = "pod";

/// One number of branches, measured: name and figure, in the order of the table.
type Figures = Vec<(&'static str, f64)>;

pub fn run() -> Result<Report> {
    let (most, files) = (number("BENCH_BRANCHES", 256), number("BENCH_FILES", 300));
    let size = Size { machines: 3, memory_mib: number("BENCH_MEMORY", 1024), pool: DISK, step_bound: BOUND };
    let cluster = Cluster::boot_as(size)?;
    let consumer = cluster.node("c");
    for name in ["a", "b"] {
        divide(cluster.node(name), most.div_ceil(2))?;
    }
    consumer.restart_as(Agent::WithoutPool)?;
    let empty = used(consumer.machine)?;
    let counts: Vec<u32> = COUNTS.into_iter().filter(|count| *count < most).chain([most]).collect();
    let mut columns: Vec<Figures> = Vec::new();
    for count in &counts {
        let figures = measure(&cluster, consumer, *count, files, empty)?;
        eprintln!("{count} branches: {figures:.1?}");
        columns.push(figures);
    }
    Ok(table(&counts, &columns, files))
}

/// Gives the node that many pools in place of its one.
fn divide(node: Node<'_>, pools: u32) -> Result {
    node.machine.run_within(
        BOUND,
        format!(
            "mkdir -p /pool/disks
             for i in $(seq 0 {}); do
                 truncate -s {POOL_MIB}M /pool/disks/$i
                 mkfs.ext4 -q -F -m 0 -O ^has_journal -E nodiscard /pool/disks/$i
                 mkdir -p /pools/$i
                 mount -o loop /pool/disks/$i /pools/$i
             done",
            pools - 1
        ),
    )?;
    node.restart_as(Agent::WithMany(pools))
}

fn measure(cluster: &Cluster, node: Node<'_>, count: u32, files: u32, empty: f64) -> Result<Figures> {
    let name = format!("wide-{count}");
    let parameters = json!({
        "minBranches": count.to_string(), "maxBranches": count.to_string(), "strategy": "balanced",
        "splitQuantum": "1Mi", "branchFormat": "image", "union": "always",
    });
    cluster.class(&name, "Immediate", parameters);
    let mut figures = Figures::new();
    let mut took = |what, since: Instant| figures.push((what, since.elapsed().as_secs_f64()));
    let begun = Instant::now();
    let volume = cluster.bound(&cluster.claim(&name, &name, &format!("{}Mi", count * BRANCH_MIB)));
    took("claim to bound, s", begun);
    assert_eq!(cluster.branches_of(&volume).len(), count as usize, "the branches of {}", volume.handle);
    let begun = Instant::now();
    cluster.ask_to_attach(&volume, node.name());
    cluster.within(BOUND, "every owner has opened its branches", || {
        cluster.branches_of(&volume).iter().all(|branch| stage::is_open_to(branch, node.name())).then_some(())
    });
    took("VolumeAttachment to every branch opened, s", begun);
    let begun = Instant::now();
    let at = node.mount(&volume, POD)?;
    took("NodeStage and NodePublish, s", begun);
    let load = |kind: &str| -> Result<f64> {
        let text = node.machine.run_within(BOUND, format!("inside load {kind} {at} {files}"))?;
        Ok(text.trim().parse().unwrap_or(f64::NAN))
    };
    let created = load("create")?;
    let begun = Instant::now();
    node.unmount(&volume, POD)?;
    took("NodeUnpublish and NodeUnstage, s", begun);
    node.mount(&volume, POD)?;
    figures.push(("create, /s", created));
    for (what, kind) in WORK {
        figures.push((what, load(kind)?));
    }
    figures.extend(memory(node, empty)?);
    node.unmount(&volume, POD)?;
    let begun = Instant::now();
    cluster.detach(&volume, node.name());
    cluster.delete(&volume);
    figures.push(("detached and deleted, s", begun.elapsed().as_secs_f64()));
    Ok(figures)
}

/// What the consumer needs of the one volume that it has.
fn memory(node: Node<'_>, empty: f64) -> Result<Figures> {
    let resident = |pid: &str| -> Result<f64> {
        let script = format!("awk '/^VmRSS/ {{ print $2 }}' /proc/{pid}/status");
        Ok(node.machine.run(script)?.trim().parse().unwrap_or(f64::NAN) / 1024.0)
    };
    Ok(vec![
        ("agent, resident, MiB", resident("$(cat /run/agent.pid)")?),
        ("MergerFS, resident, MiB", resident("$(grep -ls '^mergerfs' /proc/[0-9]*/comm | cut -d/ -f3)")?),
        ("the machine's memory, more than without a volume, MiB", (used(node.machine)? - empty) / 1024.0),
    ])
}

fn table(counts: &[u32], columns: &[Figures], files: u32) -> Report {
    let names: Vec<String> = counts.iter().map(u32::to_string).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut report = Report::new(&names);
    for (row, (what, _)) in columns[0].iter().enumerate() {
        let figures: Vec<f64> = columns.iter().map(|column| column[row].1).collect();
        report.row(what, figures.iter().map(|figure| format!("{figure:.1}")).collect(), json!(figures));
    }
    report.note(format!(
        "One volume at a time, all branches on two other nodes, {files} files of 4 KiB; the first stat follows a mount. Machines \
         emulated in software, each with one processor: columns compare, figures do not."
    ));
    report
}
