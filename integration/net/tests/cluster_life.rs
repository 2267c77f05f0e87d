//! Volumes over several nodes, from the claim to the last trace.

use std::collections::BTreeSet;

use serde_json::json;

use crate::support::cluster::{BOUND, Cluster, Volume, on_cluster};

/// What `find | sha256sum` prints of a volume: one line for each file.
const SUMS: &str = "find . -type f -print0 | sort -z | xargs -0 sha256sum";

/// The nodes that a volume's branches lie on.
fn owners(cluster: &Cluster, volume: &Volume) -> BTreeSet<String> {
    cluster.branches_of(volume).iter().map(|b| b.spec.node.to_string()).collect()
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_claim_larger_than_any_node_is_one_volume_over_three_nodes_and_moves_with_its_files() {
    on_cluster(|cluster| {
        cluster.class("large", "Immediate", json!({}));
        let claim = cluster.claim("large", "large", "1Gi");
        let volume = cluster.bound(&claim);
        assert_eq!(owners(cluster, &volume).len(), 3, "{:?}", cluster.branches_of(&volume));

        cluster.attach(&volume, "a");
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let data = a.mount(&volume, "first")?;
        let total: u64 =
            a.machine.run(format!("df -kP {data} | tail -n 1 | awk '{{ print $2 }}'"))?.parse().expect("KiB");
        assert!(total >= 1 << 20, "df shows what was asked for: {total} KiB");
        // More than two of the nodes could hold.
        a.machine.run_within(
            4 * BOUND,
            format!(
                "cd {data} && mkdir d && for i in $(seq 28); do dd if=/dev/urandom of=d/$i bs=1M count=32 conv=fsync status=none; done"
            ),
        )?;
        let sums = a.machine.run_within(2 * BOUND, format!("cd {data} && {SUMS}"))?;
        assert_eq!(sums.lines().count(), 28);
        let stats = a.stats(&volume, "first")?;
        assert!(stats["usage"][0]["used"].as_u64().expect("bytes") >= 28 * (32 << 20), "{stats}");
        assert_eq!(stats["abnormal"], json!(false), "{stats}");
        a.unmount(&volume, "first")?;
        cluster.detach(&volume, "a");

        cluster.attach(&volume, "b");
        let data = b.mount(&volume, "second")?;
        let again = b.machine.run_within(2 * BOUND, format!("cd {data} && {SUMS}"))?;
        assert_eq!(again, sums, "the same files on another node");
        b.machine.run(format!("cd {data} && echo two >d/two && rm d/1 && ls d | wc -l | grep -x 28"))?;
        b.unmount(&volume, "second")?;
        cluster.detach(&volume, "b");
        cluster.delete(&volume);
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_volume_on_one_node_is_served_to_its_pod_there() {
    on_cluster(|cluster| {
        cluster.class("one", "WaitForFirstConsumer", json!({}));
        let claim = cluster.claim("one", "one", "64Mi");
        cluster.select(&claim, "b");
        let volume = cluster.bound(&claim);
        cluster.attach(&volume, "b");
        let b = cluster.node("b");
        let data = b.mount(&volume, "pod")?;
        b.machine.run(format!("echo hello >{data}/file"))?;
        let mut writer = b.write(&volume, "pod", "one", &["log".to_owned()])?;
        assert!(writer.says("ack log 20 ", BOUND)?);
        writer.kill();
        b.unmount(&volume, "pod")?;
        cluster.detach(&volume, "b");
        cluster.delete(&volume);
        Ok(())
    });
}
