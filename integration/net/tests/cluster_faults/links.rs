//! The network between a pod and a branch fails, or is bad.

use std::thread;

use serde_json::json;

use super::{LOG, OUTAGE, SOME, ends, goes_on, leave, log, on_node, text};
use crate::support::cluster::on_cluster;
use crate::support::faults::{Fault, record};

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
