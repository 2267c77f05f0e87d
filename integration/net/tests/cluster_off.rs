//! A node that is taken out of the storage network while others use its branches.

use serde_json::json;

use super::cluster_faults::{SOME, ends, goes_on, leave, log, on_node, text};
use crate::support::cluster::{Agent, on_cluster};

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_was_taken_out_of_the_network_serves_on_what_it_lent_and_takes_it_back_when_told() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "off", "b", json!({"branchFormat": "image"}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        b.restart_as(Agent::OffNetwork)?;
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "nothing failed");
        told.require_in("log", "x", &text(a, &data, "log")?);
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");
        // It is the owner's again, which only it can say that has fenced the other.
        cluster.attach(&volume, "b");
        let data = b.mount(&volume, "pod")?;
        told.require_in("log", "x", &text(b, &data, "log")?);
        leave(cluster, &volume, "b", "pod")?;
        b.restart_as(Agent::WithPool)
    });
}
