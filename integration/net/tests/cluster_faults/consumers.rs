//! The node of the pod fails or is cut off, and its volume moves.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{LOG, Pod, SOME, directory, ends, errors, goes_on, leave, log, longest, on_node, text};
use crate::support::cluster::{BOUND, on_cluster};
use crate::support::faults::{Fault, Told, record, rounded};

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
fn a_pod_waits_without_an_error_while_another_pods_directory_is_taken_from_its_node_unheard() {
    on_cluster(|cluster| {
        let a = cluster.node("a");
        let mut taken = Pod::begin(cluster, "taken", "48Mi", directory())?;
        let mut kept = Pod::begin(cluster, "kept", "48Mi", directory())?;
        a.kill_agent()?;
        cluster.detach(&taken.volume, "a");
        // The owner answers nothing more of the one, and their common client asks for that before it goes on.
        thread::sleep(Duration::from_secs(10));
        assert_eq!(errors(&[taken.told(), kept.told()]), 0, "an error comes before the agent does");
        a.start_agent()?;
        a.ready()?;
        taken.fails();
        kept.goes_on()?;
        let first = ends(taken.writer)?;
        a.unmount(&taken.volume, &taken.volume.claim)?;
        cluster.attach(&taken.volume, "c");
        let data = cluster.node("c").mount(&taken.volume, &taken.volume.claim)?;
        first.require_in(LOG, "x", &text(cluster.node("c"), &data, LOG)?);
        leave(cluster, &taken.volume, "c", &taken.volume.claim)?;
        let told = kept.leave()?;
        assert_eq!(told.errors, [], "the other pod notices nothing but the wait");
        record(
            "consumer-shares-owner",
            &Fault {
                fault: "another pod's directory on the same branch's node is taken from the pod's node, whose agent is \
                        killed and started again 10 s later"
                    .to_owned(),
                seen: "its calls may wait until the agent is back".to_owned(),
                longest_pause_seconds: longest(&[told]),
                errors: 0,
                after: "goes on by itself".to_owned(),
            },
        );
        Ok(())
    });
}
