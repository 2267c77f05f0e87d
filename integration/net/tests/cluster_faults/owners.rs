//! A node that holds a branch fails.

use std::thread;
use std::time::Instant;

use serde_json::json;

use super::{LOG, OUTAGE, Pod, SOME, ends, errors, goes_on, leave, log, on_node, one_on_each, text};
use crate::support::Result;
use crate::support::cluster::{BOUND, on_cluster};
use crate::support::faults::{Fault, Told, record, rounded};

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

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_of_several_branches_that_returns_refuses_none_of_those_who_wait_for_it() {
    on_cluster(|cluster| {
        // Kernels since 6.10 give up where an owner that listens already does not know the branch yet, or who may have it.
        let names: Vec<String> = (0..6).map(|number| format!("several-{number}")).collect();
        let mut pods = names
            .iter()
            .map(|name| Pod::begin(cluster, name, "24Mi", json!({})))
            .collect::<Result<Vec<_>>>()?;
        let b = cluster.node("b");
        for _ in 0..2 {
            b.machine.pull_plug();
            thread::sleep(OUTAGE);
            b.boot()?;
            for pod in &mut pods {
                pod.goes_on()?;
            }
        }
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        let failed: Vec<_> = told.iter().map(|told| &told.errors).collect();
        assert_eq!(errors(&told), 0, "{failed:?}");
        Ok(())
    });
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
