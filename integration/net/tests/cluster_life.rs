//! Volumes over several nodes, from the claim to the last trace.

use std::collections::BTreeSet;

use serde_json::json;

use crate::support::cluster::{Agent, BOUND, Cluster, Volume, on_cluster};

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
        // More than one node could hold.
        a.machine.run_within(
            4 * BOUND,
            format!(
                "cd {data} && mkdir d && for i in $(seq 72); do head -c 8388608 /dev/urandom >d/$i; done; sync d/*"
            ),
        )?;
        let sums = a.machine.run_within(2 * BOUND, format!("cd {data} && {SUMS}"))?;
        assert_eq!(sums.lines().count(), 72);
        let stats = a.stats(&volume, "first")?;
        assert!(stats["usage"][0]["used"].as_u64().expect("bytes") >= 72 * (8 << 20), "{stats}");
        assert_eq!(stats["abnormal"], json!(false), "{stats}");
        a.unmount(&volume, "first")?;
        cluster.detach(&volume, "a");

        cluster.attach(&volume, "b");
        let data = b.mount(&volume, "second")?;
        let again = b.machine.run_within(2 * BOUND, format!("cd {data} && {SUMS}"))?;
        assert_eq!(again, sums, "the same files on another node");
        b.machine.run(format!("cd {data} && echo two >d/two && rm d/1 && ls d | wc -l | grep -x 72"))?;
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

#[test]
#[ignore = "boots machines: integration/net/run"]
fn three_pods_on_three_nodes_get_their_volumes_at_the_same_time() {
    on_cluster(|cluster| {
        cluster.class("set", "WaitForFirstConsumer", json!({}));
        let claims: Vec<_> = ["a", "b", "c"]
            .map(|node| {
                let claim = cluster.claim(&format!("data-{node}"), "set", "64Mi");
                cluster.select(&claim, node);
                (node, claim)
            })
            .into();
        let volumes: Vec<_> = claims.iter().map(|(node, claim)| (*node, cluster.bound(claim))).collect();
        for (node, volume) in &volumes {
            assert_eq!(owners(cluster, volume), BTreeSet::from([(*node).to_owned()]), "where its pod is");
            cluster.ask_to_attach(volume, node);
        }
        let served = std::thread::scope(|scope| {
            let pods: Vec<_> = volumes
                .iter()
                .map(|(node, volume)| {
                    scope.spawn(move || {
                        cluster.within(BOUND, "the volume is attached", || {
                            cluster.attached(volume, node).ok()?.then_some(())
                        });
                        let data = cluster.node(node).mount(volume, "pod")?;
                        cluster.node(node).machine.run(format!("echo {node} >{data}/name && cat {data}/name"))
                    })
                })
                .collect();
            pods.into_iter().map(|pod| pod.join().expect("a pod")).collect::<Vec<_>>()
        });
        for ((node, volume), said) in volumes.iter().zip(served) {
            assert_eq!(said?, *node);
            cluster.node(node).unmount(volume, "pod")?;
            cluster.detach(volume, node);
            cluster.delete(volume);
        }
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_without_any_pool_uses_a_volume_of_two_others() {
    on_cluster(|cluster| {
        let c = cluster.node("c");
        c.restart_as(Agent::WithoutPool)?;
        cluster.within(BOUND, "its node tells of no pool", || {
            let nodes = cluster.storage_nodes();
            nodes.iter().find(|n| n.meta.name == "c").filter(|n| n.status.pools.is_empty()).map(drop)
        });
        cluster.class("two", "WaitForFirstConsumer", json!({"strategy": "spread", "minBranches": "2"}));
        let claim = cluster.claim("two", "two", "128Mi");
        cluster.select(&claim, "c");
        let volume = cluster.bound(&claim);
        assert_eq!(owners(cluster, &volume), ["a", "b"].map(str::to_owned).into());
        cluster.attach(&volume, "c");
        let data = c.mount(&volume, "pod")?;
        c.machine.run(format!(
            "cd {data} && for i in $(seq 20); do echo $i >$i; done && sync && cat $(seq 20) | sha256sum"
        ))?;
        let files: Vec<String> = ["x", "y", "z"].map(str::to_owned).into();
        let mut writer = c.write(&volume, "pod", "t", &files)?;
        assert!(writer.says("ack z 20 ", BOUND)?);
        writer.kill();
        c.unmount(&volume, "pod")?;
        cluster.detach(&volume, "c");
        cluster.delete(&volume);
        c.restart_as(Agent::WithPool)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn directories_on_other_nodes_are_one_volume_too_by_nfs() {
    on_cluster(|cluster| {
        let parameters = json!({
            "strategy": "spread", "minBranches": "3", "branchFormat": "directory", "enforcement": "none",
        });
        cluster.class("directories", "Immediate", parameters);
        let volume = cluster.bound(&cluster.claim("directories", "directories", "96Mi"));
        assert_eq!(owners(cluster, &volume).len(), 3);
        cluster.attach(&volume, "a");
        let (a, c) = (cluster.node("a"), cluster.node("c"));
        let data = a.mount(&volume, "first")?;
        a.machine.run(format!(
            "cd {data} && for i in $(seq 12); do head -c 1000000 /dev/urandom >$i; done; sync"
        ))?;
        let sums = a.machine.run_within(BOUND, format!("cd {data} && {SUMS}"))?;
        a.unmount(&volume, "first")?;
        cluster.detach(&volume, "a");
        cluster.attach(&volume, "c");
        let data = c.mount(&volume, "second")?;
        assert_eq!(c.machine.run_within(BOUND, format!("cd {data} && {SUMS}"))?, sums);
        c.unmount(&volume, "second")?;
        cluster.detach(&volume, "c");
        cluster.delete(&volume);
        Ok(())
    });
}
