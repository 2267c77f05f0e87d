//! The network between a pod and a branch fails, or is bad.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{
    LOG, OUTAGE, Pod, SOME, ends, errors, goes_on, leave, log, longest, no_one_is_stuck, on_node, text,
};
use crate::support::Result;
use crate::support::cluster::on_cluster;
use crate::support::faults::{Fault, Told, record};

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

/// Each goes on.
fn all_go_on(pods: &mut [Pod<'_>]) -> Result {
    for pod in pods {
        pod.goes_on()?;
    }
    Ok(())
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_slow_link_makes_pods_slow_and_their_branches_do_not_count_as_lost() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "slow", &json!({}))?;
        cluster.net.delay("a", "b", Duration::from_millis(200));
        all_go_on(&mut pods)?;
        let delayed: Vec<_> = pods.iter_mut().map(Pod::told).collect();
        cluster.net.heal("a", "b");
        let a = cluster.node("a");
        cluster.net.limit("a", "b", 128 << 10);
        // Much more than the link takes at once.
        let loads: Vec<_> = pods
            .iter()
            .map(|pod| {
                let load = format!("dd if=/dev/zero of={}/load bs=64k count=24 conv=fsync", pod.data);
                a.machine.start_command(load, Duration::from_secs(170))
            })
            .collect::<Result<_>>()?;
        all_go_on(&mut pods)?;
        for load in loads {
            let output = load.wait()?;
            assert!(output.success(), "{output}");
        }
        for pod in &pods {
            let (abnormal, message) = pod.condition()?;
            assert!(!abnormal, "{}: {message}", pod.claim());
        }
        cluster.net.heal("a", "b");
        all_go_on(&mut pods)?;
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        assert_eq!(errors(&told), 0, "{told:?}");
        let slow = |fault: &str, told: &[Told]| Fault {
            fault: fault.to_owned(),
            seen: "its calls take longer".to_owned(),
            longest_pause_seconds: longest(told),
            errors: errors(told),
            after: "goes on by itself".to_owned(),
        };
        record("link-delay", &slow("each packet to and from a branch's node takes 200 ms", &delayed));
        record(
            "link-limit",
            &slow("the link to a branch's node carries 128 KiB/s, and more is written than that", &told),
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_link_that_is_cut_one_way_makes_pods_wait_without_an_error() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "one-way", &json!({}))?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            cluster.net.cut_one_way(from, to);
            thread::sleep(OUTAGE);
            cluster.net.heal(from, to);
            all_go_on(&mut pods)?;
        }
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        assert_eq!(errors(&told), 0, "{told:?}");
        record(
            "link-one-way",
            &Fault {
                fault: format!(
                    "the link to a branch's node is cut in one direction for {} s, then in the other",
                    OUTAGE.as_secs()
                ),
                seen: "its calls wait".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "goes on by itself".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_stands_still_for_a_while_makes_pods_wait_without_an_error() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "still", &json!({}))?;
        let b = cluster.node("b");
        // Shorter than anyone notices, and longer than NVMe's keep-alive.
        for still in [Duration::from_secs(3), Duration::from_secs(20)] {
            b.machine.pause();
            thread::sleep(still);
            b.machine.resume();
            all_go_on(&mut pods)?;
        }
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        assert_eq!(errors(&told), 0, "{told:?}");
        record(
            "owner-still",
            &Fault {
                fault: "a branch's node stands still for 3 s, then for 20 s (half-open connections)"
                    .to_owned(),
                seen: "its calls wait".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "goes on by itself".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_stands_still_longer_than_branch_timeout_gives_errors_and_volumes_heal_when_it_goes_on() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "long-still", &json!({"branchTimeout": "15s"}))?;
        let b = cluster.node("b");
        b.machine.pause();
        for pod in &mut pods {
            pod.fails();
            let said = pod.unwell();
            eprintln!("{}: {said}", pod.claim());
        }
        no_one_is_stuck(cluster, "a");
        b.machine.resume();
        all_go_on(&mut pods)?;
        pods.iter().for_each(Pod::well);
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        record(
            "owner-still-long",
            &Fault {
                fault: "a branch's node stands still for longer than `branchTimeout` (here 15 s)".to_owned(),
                seen: "its calls wait that long, then fail; the volume is reported as not well".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "when the node goes on, the volume heals under the running pod: files are to be opened again"
                    .to_owned(),
            },
        );
        Ok(())
    });
}
