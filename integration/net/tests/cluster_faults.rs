//! What a pod sees when something fails beneath its volume, or when it moves in the midst of that.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::cluster::{BOUND, Cluster, Node, Volume, on_cluster};
use crate::support::faults::{Fault, Told, record, rounded};
use crate::support::{Result, Running};

/// Records that must be safe before something is broken.
pub(super) const SOME: usize = 20;

/// How long links are cut, and machines off, at least.
const OUTAGE: Duration = Duration::from_secs(12);

const LOG: &str = "log";

pub(super) fn log() -> Vec<String> {
    vec![LOG.to_owned()]
}

/// A bound volume of one branch, on that node.
pub(super) fn on_node(cluster: &Cluster, name: &str, node: &str, parameters: Value) -> Volume {
    let mut all = json!({"nodeSelector": format!("kubernetes.io/hostname={node}"), "maxBranches": "1"});
    if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
        all.extend(more);
    }
    cluster.class(name, "Immediate", all);
    let volume = cluster.bound(&cluster.claim(name, name, "96Mi"));
    let owners: Vec<_> = cluster.branches_of(&volume).iter().map(|b| b.spec.node.to_string()).collect();
    assert_eq!(owners, [node]);
    volume
}

/// Waits until each of the files has that many more safe records than at the time of the call.
pub(super) fn goes_on(writer: &mut Running, files: &[String], more: usize) -> Result<Told> {
    let begun = Told::read(&writer.output_so_far());
    let end = Instant::now() + BOUND;
    loop {
        let told = Told::read(&writer.output_so_far());
        if files.iter().all(|file| told.count(file) >= begun.count(file) + more) {
            return Ok(told);
        }
        assert!(!writer.has_ended(), "the writer ended: {writer:?}");
        assert!(Instant::now() < end, "no more records are safe: {told:?}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Ends the writer and reads what it told. What it was just writing is on its way no more.
pub(super) fn ends(mut writer: Running) -> Result<Told> {
    writer.kill();
    let end = Instant::now() + BOUND;
    while !writer.has_ended() {
        assert!(Instant::now() < end, "the writer cannot be ended: {writer:?}");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(Told::read(&writer.output_so_far()))
}

/// The file's text, as a node sees it.
pub(super) fn text(node: Node<'_>, directory: &str, file: &str) -> Result<String> {
    node.machine.run_within(BOUND, format!("cat '{directory}/{file}'"))
}

/// Ends the volume on its node and in the cluster.
pub(super) fn leave(cluster: &Cluster, volume: &Volume, node: &str, pod: &str) -> Result {
    cluster.node(node).unmount(volume, pod)?;
    cluster.detach(volume, node);
    cluster.delete(volume);
    Ok(())
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owners_agent_that_is_killed_or_replaced_is_not_noticed_by_a_pod_on_another_node() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "agent", "b", json!({}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        b.kill_agent()?;
        // Written while there is no agent.
        goes_on(&mut writer, &log(), 5 * SOME)?;
        b.start_agent()?;
        b.ready()?;
        let killed = goes_on(&mut writer, &log(), SOME)?;
        b.stop_agent()?;
        goes_on(&mut writer, &log(), SOME)?;
        b.start_agent()?;
        b.ready()?;
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "nothing failed");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        let seen = |fault: &str, told: &Told| Fault {
            fault: fault.to_owned(),
            seen: "nothing".to_owned(),
            longest_pause_seconds: told.longest_pause_seconds(),
            errors: told.errors.len(),
            after: "the next agent finds what its kernel serves and goes on".to_owned(),
        };
        record(
            "agent-killed",
            &seen("the agent of a branch's node is killed (SIGKILL), and started again", &killed),
        );
        record(
            "agent-replaced",
            &seen("the agent of a branch's node is stopped and another one started", &told),
        );
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_link_that_is_cut_for_less_than_the_branch_timeout_makes_a_pod_wait_without_an_error() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "cut", "b", json!({}));
        let a = cluster.node("a");
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        cluster.net.cut("a", "b");
        thread::sleep(OUTAGE);
        cluster.net.heal("a", "b");
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "it waited");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        record(
            "link-cut",
            &Fault {
                fault: format!("the link to a branch's node is cut for {} s", OUTAGE.as_secs()),
                seen: "its calls wait".to_owned(),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: told.errors.len(),
                after: "goes on by itself".to_owned(),
            },
        );
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_that_loses_power_and_returns_loses_nothing_and_its_pod_elsewhere_sees_no_error() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "power", "b", json!({}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        b.machine.pull_plug();
        thread::sleep(OUTAGE);
        b.machine.start()?;
        b.start_agent()?;
        b.exports_again()?;
        let back = Instant::now();
        goes_on(&mut writer, &log(), 1)?;
        let resumed = back.elapsed();
        b.ready()?;
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "it waited");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        // Nor is anything in caches only.
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");
        cluster.attach(&volume, "c");
        let c = cluster.node("c");
        let data = c.mount(&volume, "other")?;
        told.require_in(LOG, "x", &text(c, &data, LOG)?);
        record(
            "owner-power",
            &Fault {
                fault: "the node of the volume's only branch loses its power and boots again".to_owned(),
                seen: "its calls wait until the node is back".to_owned(),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: told.errors.len(),
                after: format!(
                    "goes on by itself, {} after the node exports the branch again; no pod is restarted",
                    rounded(resumed.as_secs_f64())
                ),
            },
        );
        leave(cluster, &volume, "c", "other")
    });
}

/// Files of the union, one on each of its branches: by the node that the branch is on.
fn one_on_each(
    cluster: &Cluster,
    volume: &Volume,
    node: Node<'_>,
    data: &str,
) -> Result<BTreeMap<String, String>> {
    let branches = cluster.branches_of(volume);
    let found = node.machine.run_within(
        BOUND,
        format!("cd '{data}' && for i in $(seq 40); do touch f$i; echo f$i $(getfattr --only-values -n user.mergerfs.basepath f$i); done"),
    )?;
    let mut files = BTreeMap::new();
    for line in found.lines() {
        let (file, path) = line.split_once(' ').expect("a file and a branch");
        // Where the branch is mounted on the pod's node: its number is the last of the path.
        let number = path.rsplit('/').next().and_then(|n| n.parse::<u32>().ok());
        let branch = branches.iter().find(|b| Some(b.spec.index) == number);
        let branch = branch.unwrap_or_else(|| panic!("no branch is at {path}"));
        files.entry(branch.spec.node.to_string()).or_insert_with(|| file.to_owned());
    }
    assert_eq!(files.len(), branches.len(), "a file on each branch: {found}");
    Ok(files)
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn one_of_three_owners_that_loses_power_holds_up_its_own_files_and_no_others() {
    on_cluster(|cluster| {
        cluster.class("union", "Immediate", json!({"strategy": "spread", "minBranches": "3"}));
        let volume = cluster.bound(&cluster.claim("union", "union", "192Mi"));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let by_node = one_on_each(cluster, &volume, a, &data)?;
        let files: Vec<String> = by_node.values().cloned().collect();
        let others: Vec<String> =
            by_node.iter().filter(|(node, _)| *node != "b").map(|(_, f)| f.clone()).collect();
        let mut writer = a.write(&volume, "pod", "x", &files)?;
        goes_on(&mut writer, &files, SOME)?;
        b.machine.pull_plug();
        thread::sleep(OUTAGE);
        let held = Told::read(&writer.output_so_far()).count(&by_node["b"]);
        goes_on(&mut writer, &others, SOME)?;
        assert_eq!(Told::read(&writer.output_so_far()).count(&by_node["b"]), held, "what is on b waits");
        b.boot()?;
        goes_on(&mut writer, &files, SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "it waited");
        for file in &files {
            told.require_in(file, "x", &text(a, &data, file)?);
        }
        let pause_of = |files: &[String]| {
            let safe = files.iter().filter_map(|f| Some((f.clone(), told.safe.get(f)?.clone()))).collect();
            Told { safe, ..Told::default() }.longest_pause().as_secs_f64()
        };
        record(
            "owner-power-union",
            &Fault {
                fault: "one of three nodes of a volume loses its power and boots again".to_owned(),
                seen: format!(
                    "calls for files on its branch wait; files on the others go on (longest pause there: {:.1} s)",
                    pause_of(&others)
                ),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: told.errors.len(),
                after: "goes on by itself; no pod is restarted".to_owned(),
            },
        );
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_branch_that_stays_away_longer_than_its_timeout_gives_errors_and_the_volume_heals_under_the_same_pod() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "timeout", "b", json!({"branchTimeout": "20s"}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        b.machine.pull_plug();
        cluster.within(BOUND, "the writer is given an error", || {
            (!Told::read(&writer.output_so_far()).errors.is_empty()).then_some(())
        });
        let condition = cluster.within(BOUND, "the volume is reported as not well", || {
            let stats = a.stats(&volume, "pod").ok()?;
            (stats["abnormal"] == json!(true)).then_some(stats["message"].to_string())
        });
        b.boot()?;
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        cluster.within(BOUND, "the volume is reported as well again", || {
            (a.stats(&volume, "pod").ok()?["abnormal"] == json!(false)).then_some(())
        });
        let mut errnos: Vec<i32> = told.errors.iter().map(|(_, _, errno)| *errno).collect();
        errnos.sort_unstable();
        errnos.dedup();
        eprintln!("reported: {condition}; errors {errnos:?}");
        record("branch-timeout", &Fault {
            fault: "a branch's node is away for longer than `branchTimeout` (here 20 s)".to_owned(),
            seen: "its calls wait that long, then fail; the volume is reported as not well".to_owned(),
            longest_pause_seconds: told.longest_pause_seconds(),
            errors: told.errors.len(),
            after: "when the node is back, the volume heals under the running pod: files are to be opened again".to_owned(),
        });
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_uses_a_volume_and_loses_power_is_replaced_by_another_and_cannot_write_when_it_returns() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "moved", "b", json!({}));
        let (a, c) = (cluster.node("a"), cluster.node("c"));
        cluster.attach(&volume, "a");
        a.mount(&volume, "first")?;
        let mut writer = a.write(&volume, "first", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        a.machine.pull_plug();
        let first = Told::read(&writer.output_so_far());
        // The out-of-service taint: the attach-detach controller does not wait for that node's kubelet.
        let tainted = Instant::now();
        cluster.detach(&volume, "a");
        let detached = tainted.elapsed();
        cluster.attach(&volume, "c");
        let attached = tainted.elapsed();
        let data = c.mount(&volume, "second")?;
        let mounted = tainted.elapsed();
        let mut writer = c.write(&volume, "second", "y", &["log2".to_owned()])?;
        assert!(writer.says("ack log2 0 ", BOUND)?, "the second pod writes: {writer:?}");
        let taken_over = tainted.elapsed();
        eprintln!(
            "after the taint: detached {detached:.1?}, attached {attached:.1?}, mounted {mounted:.1?}, first record {taken_over:.1?}"
        );
        let found = text(c, &data, LOG)?;
        first.require_in(LOG, "x", &found);
        goes_on(&mut writer, &["log2".to_owned()], SOME)?;

        a.boot()?;
        // It may not have the volume any more, whatever its kubelet remembers.
        let refused = a.try_stage(&volume)?;
        assert!(!refused.success(), "the stale attachment was used: {refused}");
        goes_on(&mut writer, &["log2".to_owned()], SOME)?;
        let second = ends(writer)?;
        assert_eq!(second.errors, [], "the second writer notices nothing of the first node");
        second.require_in("log2", "y", &text(c, &data, "log2")?);
        assert_eq!(text(c, &data, LOG)?, found, "nothing came from the first node");
        // Its kubelet cleans up after a pod that is gone.
        a.unmount(&volume, "first")?;
        record(
            "consumer-power",
            &Fault {
                fault: "the node of the pod loses its power, and is declared out of service".to_owned(),
                seen: format!(
                    "the pod is gone with its node; the next one, on another node, writes {} after that",
                    rounded(taken_over.as_secs_f64())
                ),
                longest_pause_seconds: None,
                errors: 0,
                after: "a pod on another node has every safe record; the node that returns is refused"
                    .to_owned(),
            },
        );
        leave(cluster, &volume, "c", "second")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_is_cut_off_while_its_volume_moves_never_writes_beside_the_next_one() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "split", "b", json!({}));
        let (a, b, c) = (cluster.node("a"), cluster.node("b"), cluster.node("c"));
        cluster.attach(&volume, "a");
        a.mount(&volume, "first")?;
        let mut old = a.write(&volume, "first", "x", &log())?;
        goes_on(&mut old, &log(), SOME)?;
        cluster.net.isolate("a");
        a.reach_api(false)?;
        // It goes on writing, into its caches, and does not know that it is alone.
        thread::sleep(Duration::from_secs(3));
        cluster.detach(&volume, "a");
        cluster.attach(&volume, "c");
        let data = c.mount(&volume, "second")?;
        let found = text(c, &data, LOG)?;
        let mut new = c.write(&volume, "second", "y", &["log2".to_owned()])?;
        goes_on(&mut new, &["log2".to_owned()], SOME)?;
        cluster.net.heal_all();
        a.reach_api(true)?;
        // The old node meets the owner again and would write what it has.
        cluster.within(BOUND, "the old node's writer is told that it is over", || {
            (!Told::read(&old.output_so_far()).errors.is_empty()).then_some(())
        });
        goes_on(&mut new, &["log2".to_owned()], 2 * SOME)?;
        let (first, second) = (ends(old)?, ends(new)?);
        first.require_in(LOG, "x", &found);
        assert_eq!(second.errors, [], "the second writer notices nothing");
        a.unmount(&volume, "first")?;
        // As it is on the disk, by its owner, behind every cache of the two.
        c.unmount(&volume, "second")?;
        cluster.detach(&volume, "c");
        cluster.attach(&volume, "b");
        let data = b.mount(&volume, "third")?;
        assert_eq!(
            text(b, &data, LOG)?,
            found,
            "nothing of the first was written after the second had begun"
        );
        second.require_in("log2", "y", &text(b, &data, "log2")?);
        record(
            "consumer-partitioned",
            &Fault {
                fault: "the node of the pod is cut off from everything, and its volume moves to another node"
                    .to_owned(),
                seen: "the old pod's calls wait, and fail when its node is back".to_owned(),
                longest_pause_seconds: None,
                errors: first.errors.len(),
                after: "the new pod has every safe record; nothing of the old one is written after it began"
                    .to_owned(),
            },
        );
        leave(cluster, &volume, "b", "third")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_pod_notices_nothing_of_an_api_server_that_is_away() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "api", "b", json!({}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        cluster.pause_api(true);
        // Both ends begin anew, from what they have on disk and in their kernels.
        for node in [a, b] {
            node.kill_agent()?;
            node.start_agent()?;
        }
        goes_on(&mut writer, &log(), 5 * SOME)?;
        cluster.pause_api(false);
        for node in [a, b] {
            node.ready()?;
        }
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "nothing failed");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        record(
            "api-away",
            &Fault {
                fault: "the API server is away, and agents of both ends are killed and started".to_owned(),
                seen: "nothing".to_owned(),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: told.errors.len(),
                after: "goes on; new volumes wait for the API server".to_owned(),
            },
        );
        leave(cluster, &volume, "a", "pod")
    });
}
