//! Nodes that are rebooted, or come back with something missing.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{LOG, OUTAGE, Pod, SOME, ends, errors, goes_on, leave, longest, text};
use crate::support::Result;
use crate::support::cluster::{BOUND, Cluster, on_cluster};
use crate::support::faults::{Fault, Told, record};

/// How much later than the agent the pool comes.
const LATE: Duration = Duration::from_secs(60);

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_that_is_rebooted_in_good_order_is_waited_for_and_loses_nothing() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "orderly", &json!({}))?;
        let b = cluster.node("b");
        b.power_off()?;
        b.boot()?;
        cluster.within(BOUND, "its agent's log tells that it withdrew what it exports", || {
            b.last_told("exports are withdrawn until").ok().filter(|told| !told.is_empty())
        });
        for pod in &mut pods {
            pod.goes_on()?;
        }
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        assert_eq!(errors(&told), 0, "{told:?}");
        record(
            "owner-reboot",
            &Fault {
                fault: "a branch's node is rebooted in good order".to_owned(),
                seen: "its calls wait until the node is back".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "goes on by itself; no pod is restarted".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_whose_pool_comes_a_minute_after_its_agent_is_waited_for_and_makes_nothing_anew() {
    on_cluster(|cluster| {
        let mut pods = Pod::both(cluster, "late", &json!({}))?;
        let b = cluster.node("b");
        b.machine.pull_plug();
        b.machine.start()?;
        b.start_agent_only()?;
        let before: Vec<_> = pods.iter_mut().map(|pod| pod.told().count(LOG)).collect();
        thread::sleep(LATE);
        let waiting: Vec<_> = pods.iter_mut().map(|pod| pod.told().count(LOG)).collect();
        // One record may have been under way.
        for (before, waiting) in before.iter().zip(&waiting) {
            assert!(*waiting <= before + 1, "records are safe on a disk that is not there");
        }
        assert_eq!(b.machine.run("ls -A /pool")?, "", "nothing is made where the pool is to be mounted");
        b.mount_pool()?;
        b.ready()?;
        for pod in &mut pods {
            pod.goes_on()?;
        }
        let told = pods.into_iter().map(Pod::leave).collect::<Result<Vec<_>>>()?;
        let failed: Vec<_> = told.iter().map(|told| &told.errors).collect();
        eprintln!("errors: {failed:?}");
        assert_eq!(errors(&told), 0, "{failed:?}");
        record(
            "owner-pool-late",
            &Fault {
                fault: format!(
                    "a branch's node loses its power; its pool is mounted {} s after its agent has begun",
                    LATE.as_secs()
                ),
                seen: "its calls wait until the pool is there".to_owned(),
                longest_pause_seconds: longest(&told),
                errors: errors(&told),
                after: "goes on by itself; no pod is restarted".to_owned(),
            },
        );
        Ok(())
    });
}

/// The kubelet starts the pods of its node anew after a boot: each finds every safe record and goes on.
fn pods_start_anew(cluster: &Cluster, before: Vec<(super::Volume, Told)>) -> Result {
    let a = cluster.node("a");
    for (volume, told) in before {
        let data = a.mount(&volume, &volume.claim)?;
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        let again = vec!["again".to_owned()];
        let mut writer = a.write(&volume, &volume.claim, "y", &again)?;
        goes_on(&mut writer, &again, SOME)?;
        let more = ends(writer)?;
        assert_eq!(more.errors, [], "{}", volume.claim);
        more.require_in("again", "y", &text(a, &data, "again")?);
        leave(cluster, &volume, "a", &volume.claim)?;
    }
    Ok(())
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn both_ends_that_lose_power_at_once_come_back_with_every_safe_record() {
    on_cluster(|cluster| {
        let pods = Pod::both(cluster, "both", &json!({}))?;
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        a.machine.pull_plug();
        b.machine.pull_plug();
        thread::sleep(OUTAGE);
        // The one that needs the other comes first.
        a.boot()?;
        b.boot()?;
        let before = pods.into_iter().map(|mut pod| {
            let told = pod.told();
            (pod.volume, told)
        });
        pods_start_anew(cluster, before.collect())?;
        record(
            "both-power",
            &Fault {
                fault: "the pod's node and the branch's node lose their power at once, and boot again"
                    .to_owned(),
                seen: "the pod is gone with its node, and started again by its kubelet".to_owned(),
                longest_pause_seconds: None,
                errors: 0,
                after: "it has every safe record".to_owned(),
            },
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_pods_node_that_is_rebooted_in_good_order_finds_every_safe_record() {
    on_cluster(|cluster| {
        let pods = Pod::both(cluster, "consumer", &json!({}))?;
        let a = cluster.node("a");
        let mut before = Vec::new();
        for pod in pods {
            // The kubelet is not drained: pods are ended and nothing is unpublished.
            before.push((pod.volume, ends(pod.writer)?));
        }
        a.stop_agent()?;
        a.machine.power_off()?;
        a.boot()?;
        pods_start_anew(cluster, before)?;
        record(
            "consumer-reboot",
            &Fault {
                fault: "the pod's node is rebooted in good order".to_owned(),
                seen: "the pod is ended with its node, and started again by its kubelet".to_owned(),
                longest_pause_seconds: None,
                errors: 0,
                after: "it has every safe record".to_owned(),
            },
        );
        Ok(())
    });
}
