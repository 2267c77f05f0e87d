//! A node that loses its power, and comes back.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::storage::v1::VolumeAttachment;

use crate::support::{PodOf, World, ctl, kubectl, node_here, nodes};

#[test]
fn a_node_out_of_service_lets_its_volumes_go_and_gives_them_back_when_it_returns() {
    let world = World::alone();
    let node = nodes()[1].clone();
    world.claim("data", "union", "32Mi");
    world.run(PodOf::new("pod").with_claim("data").on(&node));
    world.running("pod");
    world.exec("pod", "echo kept >/data/file && sync");
    let volume = world.volume_of("data").meta.name;
    ctl(&["kill", &node_here(&node)]);
    // The administrator knows that it has no power; the taint takes its pods and attachments away.
    kubectl(&["taint", "node", &node, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"]);
    world.delete::<Pod>("pod");
    world.within(std::time::Duration::from_secs(180), "the pod and the attachment are gone", || {
        let attachments =
            world.block_on(world.cluster_api::<VolumeAttachment>().list(&Default::default())).ok()?;
        let attached = attachments.items.iter().any(|a| a.spec.node_name == node);
        let split = world.splits().into_iter().find(|s| s.meta.name == volume)?;
        (world.get::<Pod>("pod").is_none() && !attached && split.spec.attached.is_empty()).then_some(())
    });
    ctl(&["start", &node_here(&node)]);
    kubectl(&["taint", "node", &node, "node.kubernetes.io/out-of-service-"]);
    world.agents_ready();
    world.run(PodOf::new("again").with_claim("data"));
    assert_eq!(world.running("again"), node, "its files are there and nowhere else");
    assert_eq!(world.exec("again", "cat /data/file"), "kept\n");
}
