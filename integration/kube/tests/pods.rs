//! What a pod may ask of a volume.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use serde_json::json;

use crate::support::{PodOf, World, is_ready, on_node};

fn inline(attributes: serde_json::Value) -> serde_json::Value {
    json!({"csi": {"driver": "union.csi.union.io", "volumeAttributes": attributes}})
}

#[test]
fn an_inline_volume_lives_with_its_pod() {
    let world = World::shared();
    world.run(PodOf::new("pod").with_volume("scratch", inline(json!({"size": "48Mi"})), json!({})));
    let node = world.running("pod");
    world.exec("pod", "echo x >/scratch/file");
    let size: u64 =
        world.exec("pod", "df -kP /scratch | tail -1 | awk '{ print $2 }'").trim().parse().expect("KiB");
    assert!((48 * 1024..60 * 1024).contains(&size), "{size} KiB");
    let uid = world.get::<Pod>("pod").and_then(|p| p.metadata.uid).expect("its uid");
    let mounts = on_node(&node, "cat /proc/self/mountinfo");
    assert!(
        mounts.lines().any(|l| l.contains(&uid) && l.contains("volumes/kubernetes.io~csi/scratch/mount"))
    );
    let is_its = |name: &str| world.splits().iter().any(|s| s.spec.ephemeral && s.spec.request_name == name);
    let name = world
        .splits()
        .into_iter()
        .rev()
        .find(|s| s.spec.ephemeral && s.spec.branches.iter().any(|b| b.node.as_str() == node));
    let name = name.expect("the volume is known to the cluster").spec.request_name;
    world.stop("pod");
    world.eventually("the volume went with its pod", || (!is_its(&name)).then_some(()));
}

#[test]
fn an_inline_volume_that_is_wrong_says_what_is_wrong_at_its_pod() {
    let world = World::shared();
    world.run(PodOf::new("odd").with_volume(
        "s",
        inline(json!({"size": "48Mi", "stratgy": "fewest"})),
        json!({}),
    ));
    world.told("Pod", "odd", &["FailedMount", "stratgy", "strategy"]);
    world.run(PodOf::new("large").with_volume("s", inline(json!({"size": "100Ti"})), json!({})));
    world.told("Pod", "large", &["FailedMount", "100Ti"]);
}

#[test]
fn a_generic_ephemeral_volume_is_a_claim_of_the_pod() {
    let world = World::shared();
    let template = json!({"ephemeral": {"volumeClaimTemplate": {"spec": {
        "storageClassName": "union", "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "32Mi"}},
    }}}});
    world.run(PodOf::new("pod").with_volume("scratch", template, json!({})));
    world.running("pod");
    world.exec("pod", "echo x >/scratch/file");
    world.bound("pod-scratch");
    world.stop("pod");
    world.eventually("the claim went with its pod", || {
        world.get::<PersistentVolumeClaim>("pod-scratch").is_none().then_some(())
    });
}

#[test]
fn the_group_of_a_pod_can_write_and_what_it_writes_is_the_groups() {
    let world = World::shared();
    world.claim("data", "union", "32Mi");
    let user = json!({"securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000, "runAsNonRoot": true}});
    world.run(PodOf::new("pod").with_claim("data").spec(user));
    world.running("pod");
    world.exec("pod", "mkdir /data/d && echo x >/data/d/file");
    assert_eq!(world.exec("pod", "stat -c '%u %g' /data/d/file /data/d"), "1000 2000\n1000 2000\n");
    let root = world.exec("pod", "stat -c '%g %A' /data");
    assert!(root.starts_with("2000 drwxrws"), "{root}");
}

#[test]
fn what_is_mounted_read_only_is_read_only() {
    let world = World::shared();
    world.claim("data", "union", "32Mi");
    world.run(PodOf::new("writer").with_claim("data"));
    world.running("writer");
    world.exec("writer", "echo x >/data/file");
    let source = json!({"persistentVolumeClaim": {"claimName": "data", "readOnly": true}});
    world.run(PodOf::new("source").with_volume("data", source, json!({})));
    let plain = json!({"persistentVolumeClaim": {"claimName": "data"}});
    world.run(PodOf::new("mount").with_volume("data", plain, json!({"readOnly": true})));
    for pod in ["source", "mount"] {
        world.running(pod);
        assert_eq!(world.exec(pod, "cat /data/file"), "x\n");
        let refused = world.try_exec(pod, "echo y >/data/other").expect_err("read-only");
        assert!(refused.contains("Read-only file system"), "{refused}");
    }
    world.exec("writer", "echo y >>/data/file");
    assert_eq!(world.exec("source", "cat /data/file"), "x\ny\n");
}

#[test]
fn a_subdirectory_of_a_volume_is_mounted_by_itself() {
    let world = World::shared();
    world.claim("data", "union", "32Mi");
    let source = json!({"persistentVolumeClaim": {"claimName": "data"}});
    let pod = PodOf::new("pod")
        .with_volume("data", source, json!({}))
        .with_mount(json!({"name": "data", "mountPath": "/logs", "subPath": "a/logs"}))
        .with_mount(json!({"name": "data", "mountPath": "/one", "subPath": "one"}));
    world.run(pod);
    world.running("pod");
    world.exec("pod", "echo x >/logs/file");
    assert_eq!(world.exec("pod", "cat /data/a/logs/file"), "x\n");
    world.stop("pod");
}

#[test]
fn a_claim_for_one_pod_is_used_by_one_pod() {
    let world = World::shared();
    world.claim_with("data", "union", "32Mi", &["ReadWriteOncePod"], "Filesystem");
    world.run(PodOf::new("first").with_claim("data"));
    world.running("first");
    world.run(PodOf::new("second").with_claim("data"));
    world.told("Pod", "second", &["ReadWriteOncePod"]);
    assert!(!world.get::<Pod>("second").as_ref().is_some_and(is_ready));
    world.stop("first");
    world.running("second");
}
