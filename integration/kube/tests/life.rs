//! From a claim to a running pod and back.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use serde_json::json;

use crate::support::{PodOf, World, nodes, on_node};

/// Sizes of the tests are in MiB, so branches are in few of them.
const QUANTUM: (&str, &str) = ("splitQuantum", "16Mi");

#[test]
fn a_claim_becomes_a_volume_in_a_running_pod_keeps_its_files_and_goes_without_a_trace() {
    let world = World::shared();
    world.claim("data", "union", "64Mi");
    world.run(PodOf::new("writer").with_claim("data"));
    let node = world.running("writer");
    world.exec(
        "writer",
        "echo hello >/data/file && mkdir /data/d && head -c 1000000 /dev/urandom >/data/d/random",
    );
    let sum = world.exec("writer", "md5sum /data/d/random");
    let size: u64 = world
        .exec("writer", "df -kP /data | tail -1 | awk '{ print $2 }'")
        .trim()
        .parse()
        .expect("a number of KiB");
    assert!((64 * 1024..80 * 1024).contains(&size), "df shows what was asked for: {size} KiB");

    let claim = world.bound("data");
    let capacity = claim.status.and_then(|s| s.capacity).expect("its capacity");
    assert_eq!(capacity["storage"].0, "64Mi", "to the byte");
    let split = world.volume_of("data");
    assert!(split.spec.branches.iter().all(|b| b.node.as_str() == node), "on the pod's node");
    let name = claim.spec.and_then(|s| s.volume_name).expect("its PersistentVolume");
    let volume = world.block_on(world.cluster_api::<PersistentVolume>().get(&name)).expect("the volume");
    let affinity = serde_json::to_string(&volume.spec.expect("a spec").node_affinity).expect("JSON");
    assert!(affinity.contains(&node), "pods that use it are sent to its node: {affinity}");

    world.stop("writer");
    world.run(PodOf::new("reader").with_claim("data"));
    assert_eq!(world.running("reader"), node);
    assert_eq!(world.exec("reader", "cat /data/file").trim(), "hello");
    assert_eq!(world.exec("reader", "md5sum /data/d/random"), sum);

    world.stop("reader");
    world.delete::<PersistentVolumeClaim>("data");
    world.eventually("the volume and all that it was are gone", || {
        let volume =
            world.block_on(world.cluster_api::<PersistentVolume>().get_opt(&name)).expect("an answer");
        let id = split.spec.volume.as_str();
        let none = volume.is_none()
            && world.splits().iter().all(|s| s.meta.name != id)
            && world.branches().iter().all(|b| b.spec.volume.as_str() != id);
        none.then_some(())
    });
    let left = on_node(&node, "ls -d /srv/pools/*/*/branches/* /srv/pools/*/branches/* 2>/dev/null; mount");
    assert!(!left.contains(split.spec.volume.as_str()), "on the node is nothing of it: {left}");
}

#[test]
fn a_volume_larger_than_any_disk_of_its_node_is_one_filesystem_over_several() {
    let world = World::shared();
    let class =
        world.class("split", "WaitForFirstConsumer", json!({QUANTUM.0: QUANTUM.1, "minBranches": "2"}));
    world.claim("data", &class, "96Mi");
    world.run(PodOf::new("writer").with_claim("data"));
    world.running("writer");
    let split = world.volume_of("data");
    assert!(split.spec.branches.len() >= 2, "{:?}", split.spec.branches);
    world.exec("writer", "for i in 1 2 3 4 5 6 7 8; do head -c 8000000 /dev/zero >/data/$i || exit 1; done");
    let size: u64 =
        world.exec("writer", "df -kP /data | tail -1 | awk '{ print $2 }'").trim().parse().expect("KiB");
    assert!(size >= 96 * 1024, "{size}");
    assert_eq!(world.exec("writer", "ls /data | wc -l").trim(), "8", "and no lost+found");
}

#[test]
fn a_stateful_set_has_a_volume_for_each_pod_and_they_keep_theirs() {
    let world = World::shared();
    let pod = PodOf::new("store").script("echo $HOSTNAME >>/data/names; exec sleep 100000").with_volume(
        "unused",
        json!({"emptyDir": {}}),
        json!({}),
    );
    let mut spec = pod.template();
    spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    spec["volumes"] = json!([]);
    let _: StatefulSet = world.create(json!({
        "metadata": {"name": "store"},
        "spec": {
            "serviceName": "store", "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "store"}},
            "template": {"metadata": {"labels": {"app": "store"}}, "spec": spec},
            "volumeClaimTemplates": [{
                "metadata": {"name": "data"},
                "spec": {
                    "storageClassName": "union", "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "32Mi"}},
                },
            }],
        },
    }));
    for n in 0..3 {
        world.running(&format!("store-{n}"));
    }
    world.stop_and_wait_for_another("store-1");
    let names = world.exec("store-1", "cat /data/names");
    assert_eq!(names, "store-1\nstore-1\n", "the new pod has the old one's files");
    assert_eq!(world.exec("store-2", "cat /data/names"), "store-2\n");
}

#[test]
fn claims_that_wait_for_their_pods_lie_where_the_pods_run() {
    let world = World::shared();
    for (n, node) in nodes().iter().enumerate() {
        let name = format!("data-{n}");
        world.claim(&name, "union", "32Mi");
        world.run(PodOf::new(&format!("pod-{n}")).with_claim(&name).on(node));
    }
    for (n, node) in nodes().iter().enumerate() {
        assert_eq!(world.running(&format!("pod-{n}")), *node);
        let split = world.volume_of(&format!("data-{n}"));
        assert!(split.spec.branches.iter().all(|b| b.node.as_str() == node), "{:?}", split.spec.branches);
    }
}

#[test]
fn immediate_claims_are_bound_without_a_pod_and_spread_over_the_nodes() {
    let world = World::alone();
    let class = world.class("now", "Immediate", json!({QUANTUM.0: QUANTUM.1, "maxBranches": "1"}));
    // Larger than what the nodes' disks differ by, in all: who has the most room changes with each.
    let names: Vec<String> = (0..6).map(|n| format!("data-{n}")).collect();
    names.iter().for_each(|name| world.claim(name, &class, "600Mi"));
    let mut used = std::collections::BTreeSet::new();
    for name in &names {
        world.bound(name);
        used.insert(world.volume_of(name).spec.branches[0].node.clone());
    }
    assert_eq!(used.len(), nodes().len(), "{used:?}");
    // A pod goes where its volume is.
    world.run(PodOf::new("user").with_claim("data-0"));
    let node = world.running("user");
    assert_eq!(world.volume_of("data-0").spec.branches[0].node.as_str(), node);
}

#[test]
fn a_volume_passes_from_one_pod_to_the_next_on_its_node_and_two_share_it() {
    let world = World::shared();
    world.claim("data", "union", "32Mi");
    world.run(PodOf::new("first").with_claim("data"));
    let node = world.running("first");
    world.exec("first", "echo one >/data/file");
    world.run(PodOf::new("second").with_claim("data"));
    assert_eq!(world.running("second"), node, "ReadWriteOnce is one node, not one pod");
    world.exec("second", "echo two >>/data/file");
    assert_eq!(world.exec("first", "cat /data/file"), "one\ntwo\n");
    world.stop("first");
    assert_eq!(world.exec("second", "cat /data/file"), "one\ntwo\n", "the other's end changes nothing");
    world.stop("second");
    world.run(PodOf::new("third").with_claim("data"));
    world.running("third");
    assert_eq!(world.exec("third", "cat /data/file"), "one\ntwo\n");
}

#[test]
fn a_volume_of_a_class_that_retains_stays_with_its_files() {
    let world = World::shared();
    let class = world.class_with(
        "kept",
        json!({"volumeBindingMode": "Immediate", "reclaimPolicy": "Retain", "parameters": {QUANTUM.0: QUANTUM.1}}),
    );
    world.claim("data", &class, "32Mi");
    world.bound("data");
    let split = world.volume_of("data");
    let claim = world.get::<PersistentVolumeClaim>("data").expect("the claim");
    let name = claim.spec.and_then(|s| s.volume_name).expect("its PersistentVolume");
    world.delete::<PersistentVolumeClaim>("data");
    let api = world.cluster_api::<PersistentVolume>();
    world.eventually("the volume is released", || {
        let volume = world.block_on(api.get(&name)).ok()?;
        (volume.status?.phase? == "Released").then_some(())
    });
    assert!(world.splits().iter().any(|s| s.meta.name == split.meta.name), "kept");
    // Whoever deletes the PersistentVolume of a class that retains keeps the files too: they are deleted by their name.
    let _ = world.block_on(api.delete(&name, &Default::default())).expect("deleted");
    world.eventually("the PersistentVolume is gone", || {
        world.block_on(api.get_opt(&name)).ok()?.is_none().then_some(())
    });
    assert!(world.splits().iter().any(|s| s.meta.name == split.meta.name && s.meta.deleting.is_none()));
    let named = ["-n", "union", "volumesplit", &split.meta.name];
    crate::support::kubectl(&[&["annotate"], &named[..], &["union.io/delete-volume=yes"]].concat());
    crate::support::kubectl(&[&["delete"], &named[..], &["--timeout=60s"]].concat());
}
