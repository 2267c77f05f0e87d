//! What a class that does not have images written through means for a pod elsewhere when their owner loses its power.

use serde_json::json;

use super::cluster_faults::{SOME, ends, goes_on, leave, log, on_node, text};
use crate::support::cluster::{BOUND, on_cluster};
use crate::support::faults::Told;

#[test]
#[ignore = "boots machines: integration/net/run"]
fn without_write_through_a_pod_is_told_that_the_owner_lost_power_and_keeps_what_it_had_flushed() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "back", "b", json!({"writeThrough": "never", "branchFormat": "image"}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let export = || {
            let status = cluster.branches_of(&volume).remove(0).status;
            status.export.unwrap_or_default()
        };
        let before = export();
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        // Written and not flushed: what becomes of it is told by the error alone.
        a.machine.run(format!("head -c 4194304 /dev/urandom >{data}/unflushed"))?;
        b.machine.pull_plug();
        b.boot()?;
        cluster.within(BOUND, "the writer is told", || {
            (!Told::read(&writer.output_so_far()).errors.is_empty()).then_some(())
        });
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        let now = export();
        assert_eq!(now.allowed, before.allowed, "the order is the same");
        assert!(now.generation > before.generation, "and its export another: {before:?}, {now:?}");
        told.require_in("log", "x", &text(a, &data, "log")?);
        cluster.within(BOUND, "the volume is reported as well again", || {
            (a.stats(&volume, "pod").ok()?["abnormal"] == json!(false)).then_some(())
        });
        leave(cluster, &volume, "a", "pod")
    });
}
