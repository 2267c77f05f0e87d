//! Objects that someone deletes, edits or makes by hand, and rights that someone takes away.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
use serde_json::json;

use crate::support::{DRIVER_NAMESPACE, PodOf, World, is_bound, kubectl, nodes, on_node, try_kubectl};

#[test]
fn objects_deleted_by_hand_in_any_order_take_no_files_from_a_running_pod_and_leave_nothing_behind() {
    let orders = [
        ["volumesplit", "branch", "pv", "pvc"],
        ["branch", "pvc", "volumesplit", "pv"],
        ["pv", "branch", "volumesplit", "pvc"],
    ];
    let world = World::shared();
    let node = nodes()[1].clone();
    let mut volumes = Vec::new();
    for n in 0..orders.len() {
        let name = format!("data-{n}");
        world.claim(&name, "union", "32Mi");
        world.run(PodOf::new(&name).with_claim(&name).on(&node));
    }
    for (n, order) in orders.iter().enumerate() {
        let name = format!("data-{n}");
        world.running(&name);
        world.exec(&name, "echo kept >/data/file");
        let volume = world.volume_of(&name).meta.name;
        let persistent =
            world.get::<PersistentVolumeClaim>(&name).and_then(|c| c.spec?.volume_name).expect("bound");
        for kind in order {
            let delete = |object: &str, namespace: &str| {
                kubectl(&["delete", kind, object, "-n", namespace, "--wait=false"]);
            };
            match *kind {
                "volumesplit" => {
                    let named = ["volumesplit", &volume, "-n", DRIVER_NAMESPACE];
                    let said =
                        try_kubectl(&[&["delete"], &named[..]].concat(), None).expect_err("not in passing");
                    assert!(said.contains("delete its claim instead"), "{said}");
                    kubectl(&[&["annotate"], &named[..], &["union.io/delete-volume=yes"]].concat());
                    delete(&volume, DRIVER_NAMESPACE);
                }
                "branch" => delete(&format!("{volume}-0"), DRIVER_NAMESPACE),
                "pv" => kubectl(&["delete", "pv", &persistent, "--wait=false"]).clear(),
                _ => delete(&name, &world.namespace),
            }
        }
        volumes.push((name, volume, persistent));
    }
    // Whoever waits for finalizers has had the time.
    std::thread::sleep(std::time::Duration::from_secs(5));
    for (name, _, _) in &volumes {
        assert_eq!(world.exec(name, "cat /data/file && echo more >>/data/file"), "kept\n");
    }
    for (name, volume, persistent) in &volumes {
        world.stop(name);
        world.eventually(&format!("nothing is left of {name}"), || {
            let split = world.splits().iter().any(|s| s.meta.name == *volume);
            let branch = world.branches().iter().any(|b| b.spec.volume.as_str() == volume);
            let api = world.cluster_api::<PersistentVolume>();
            let other = world.block_on(api.get_opt(persistent)).expect("an answer").is_some();
            let claim = world.get::<PersistentVolumeClaim>(name).is_some();
            (!split && !branch && !other && !claim).then_some(())
        });
        let left = on_node(
            &node,
            &format!(
                "find /srv/pools -maxdepth 5 -name '{volume}*'; grep {volume} /proc/self/mountinfo || true"
            ),
        );
        assert_eq!(left, "", "of {name}");
    }
}

#[test]
fn what_would_break_a_volume_cannot_be_edited() {
    let world = World::shared();
    let class = world.class("now", "Immediate", json!({"splitQuantum": "16Mi"}));
    world.claim("data", &class, "32Mi");
    world.bound("data");
    let volume = world.volume_of("data").meta.name;
    let edit = |kind: &str, name: &str, patch: &str| {
        try_kubectl(&["patch", "-n", DRIVER_NAMESPACE, kind, name, "--type=merge", "-p", patch], None)
    };
    for (kind, name, patch) in [
        ("volumesplit", volume.clone(), r#"{"spec":{"capacity":1}}"#),
        ("volumesplit", volume.clone(), r#"{"spec":{"volume":"other"}}"#),
        ("branch", format!("{volume}-0"), r#"{"spec":{"size":4096}}"#),
        ("branch", format!("{volume}-0"), r#"{"spec":{"node":"elsewhere"}}"#),
        ("branch", format!("{volume}-0"), r#"{"spec":{"pool":"other"}}"#),
    ] {
        let refused = edit(kind, &name, patch).expect_err(patch);
        assert!(
            refused.contains("immutable") || refused.contains("Invalid") || refused.contains("invalid"),
            "{refused}"
        );
    }
    world.run(PodOf::new("pod").with_claim("data"));
    world.running("pod");
}

#[test]
fn what_others_made_under_our_names_is_left_alone_and_named() {
    let world = World::shared();
    // A PersistentVolume with the name that the claim's will have, once its uid is known.
    let class = world.class("later", "WaitForFirstConsumer", json!({}));
    world.claim("data", &class, "32Mi");
    let uid = world.get::<PersistentVolumeClaim>("data").and_then(|c| c.metadata.uid).expect("its uid");
    let name = format!("pvc-{uid}");
    let foreign: PersistentVolume = serde_json::from_value(json!({
        "metadata": {"name": name},
        "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": "others",
                 "hostPath": {"path": "/tmp/not-ours"}},
    }))
    .expect("a volume");
    let api = world.cluster_api::<PersistentVolume>();
    let made = world.block_on(api.create(&Default::default(), &foreign)).expect("made");
    world.run(PodOf::new("pod").with_claim("data"));
    world.told("PersistentVolumeClaim", "data", &[&name]);
    let found = world.block_on(api.get(&name)).expect("it is there");
    assert_eq!((found.metadata.uid, found.spec), (made.metadata.uid, made.spec), "untouched");
    assert!(!is_bound(&world.get::<PersistentVolumeClaim>("data").expect("the claim")));
    // When it is gone, the claim gets its own.
    let _ = world.block_on(api.delete(&name, &Default::default())).expect("deleted");
    world.running("pod");
}

#[test]
fn a_verb_that_is_missing_is_named_and_given_back_all_goes_on() {
    let world = World::alone();
    let name = kubectl(&["get", "clusterrole", "-o", "name"])
        .lines()
        .find(|l| l.contains("/union-csi"))
        .expect("the program's role")
        .to_owned();
    let role = kubectl(&["get", &name, "-o", "json"]);
    let mut less: serde_json::Value = serde_json::from_str(&role).expect("JSON");
    for rule in less["rules"].as_array_mut().expect("rules") {
        if rule["resources"] == json!(["persistentvolumes"]) {
            rule["verbs"].as_array_mut().expect("verbs").retain(|verb| verb != "create");
        }
    }
    // What the server wrote into it is not for the next writer.
    less["metadata"].as_object_mut().expect("metadata").remove("resourceVersion");
    try_kubectl(&["replace", "-f", "-"], Some(&less.to_string())).expect("less");
    let class = world.class("now", "Immediate", json!({}));
    world.claim("data", &class, "32Mi");
    world.told("PersistentVolumeClaim", "data", &["grant the verb create on persistentvolumes"]);
    let mut whole: serde_json::Value = serde_json::from_str(&role).expect("JSON");
    whole["metadata"].as_object_mut().expect("metadata").remove("resourceVersion");
    try_kubectl(&["replace", "-f", "-"], Some(&whole.to_string())).expect("the rights are back");
    world.bound("data");
}
