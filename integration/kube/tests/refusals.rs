//! Bad input: it is told what is wrong with it, and nothing else suffers.

use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim};
use serde_json::json;

use crate::support::{World, is_bound};

#[test]
fn a_class_with_an_unknown_parameter_is_told_at_the_claim_and_not_tried_again_and_again() {
    let world = World::shared();
    let class = world.class("odd", "Immediate", json!({"stratgy": "fewest"}));
    world.claim("data", &class, "32Mi");
    let told = world.told("PersistentVolumeClaim", "data", &["stratgy", "strategy"]);
    assert!(told.contains("ProvisioningFailed"), "{told}");
    let attempts = |world: &World| -> i32 {
        let events = world.list::<Event>();
        let about = |e: &Event| e.reason.as_deref() == Some("ProvisioningFailed");
        events.into_iter().filter(about).map(|e| e.count.unwrap_or(1)).sum()
    };
    let before = attempts(&world);
    std::thread::sleep(std::time::Duration::from_secs(5));
    assert!(attempts(&world) <= before + 2, "{before} events became {}", attempts(&world));
    assert!(world.splits().iter().all(|s| !s.spec.parameters.contains_key("stratgy")), "nothing was made");
}

#[test]
fn parameters_that_contradict_each_other_are_both_named() {
    let world = World::shared();
    let class = world.class("odd", "Immediate", json!({"minBranches": "5", "maxBranches": "2"}));
    world.claim("data", &class, "32Mi");
    world.told("PersistentVolumeClaim", "data", &["minBranches", "maxBranches"]);
}

#[test]
fn access_that_cannot_be_given_is_refused_with_what_can() {
    let world = World::shared();
    let class = world.class("now", "Immediate", json!({}));
    world.claim_with("many", &class, "32Mi", &["ReadWriteMany"], "Filesystem");
    // One node, and so none that reaches a directory of another.
    world.told("PersistentVolumeClaim", "many", &["several nodes", "ReadWriteOnce"]);
    let images = world.class("images", "Immediate", json!({"branchFormat": "image"}));
    world.claim_with("images", &images, "32Mi", &["ReadWriteMany"], "Filesystem");
    world.told("PersistentVolumeClaim", "images", &["StorageClass", "branchFormat", "ReadWriteOnce"]);
    let parts = world.class("parts", "Immediate", json!({"minBranches": "2"}));
    world.claim_with("block", &parts, "32Mi", &["ReadWriteOnce"], "Block");
    world.told("PersistentVolumeClaim", "block", &["block access", "minBranches"]);
    for name in ["many", "images", "block"] {
        assert!(!is_bound(&world.get::<PersistentVolumeClaim>(name).expect("the claim")));
    }
}

#[test]
fn a_claim_beyond_the_cluster_is_told_the_largest_and_taken_back_leaves_nothing() {
    let world = World::shared();
    let class = world.class("now", "Immediate", json!({}));
    world.claim("data", &class, "900Ti");
    world.told("PersistentVolumeClaim", "data", &["900Ti", "largest"]);
    let uid = world.get::<PersistentVolumeClaim>("data").and_then(|c| c.metadata.uid).expect("its uid");
    world.delete::<PersistentVolumeClaim>("data");
    world.eventually("its volume was taken back", || {
        world.splits().iter().all(|s| !s.spec.request_name.contains(&uid)).then_some(())
    });
}
