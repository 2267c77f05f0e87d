//! Ephemeral inline volumes: they come and go with their pod.

use std::collections::HashMap;

use super::*;

fn request(csi: &Csi, name: &str, attributes: &[(&str, &str)]) -> proto::NodePublishVolumeRequest {
    let mut context: HashMap<String, String> =
        attributes.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    context.insert("csi.storage.k8s.io/ephemeral".to_owned(), "true".to_owned());
    context.insert("csi.storage.k8s.io/pod.name".to_owned(), "pod".to_owned());
    let target = csi.target(name);
    fs::create_dir_all(target.parent().expect("a parent")).expect("targets directory");
    proto::NodePublishVolumeRequest {
        volume_id: name.to_owned(),
        target_path: target.display().to_string(),
        volume_capability: Some(mounted(WRITER)),
        volume_context: context,
        ..Default::default()
    }
}

/// What the kubelet calls an inline volume.
fn kubelet_name() -> String {
    format!("csi-{}", "0123456789abcdef".repeat(4))
}

async fn stats(csi: &mut Csi, id: &str) -> proto::NodeGetVolumeStatsResponse {
    let request = proto::NodeGetVolumeStatsRequest {
        volume_id: id.to_owned(),
        volume_path: csi.target(id).display().to_string(),
        ..Default::default()
    };
    csi.node.node_get_volume_stats(request).await.expect("NodeGetVolumeStats").into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inline_volume_lives_with_its_pod_and_through_a_restart_of_the_agent() {
    let mut machine = Machine::new(&[128, 128]);
    let mut csi = machine.agent.csi().await;
    let name = kubelet_name();
    let attributes = [("size", "150Mi"), ("splitQuantum", "16Mi")];
    csi.node.node_publish_volume(request(&csi, &name, &attributes)).await.expect("NodePublishVolume");
    let target = csi.target(&name);
    fs::write(target.join("scratch"), "pad").expect("a file");
    assert_eq!(machine.branches().len(), 2, "it needs both disks");
    csi.node.node_publish_volume(request(&csi, &name, &attributes)).await.expect("the same again");
    assert!(!stats(&mut csi, &name).await.usage.is_empty());
    let listed =
        csi.controller.list_volumes(proto::ListVolumesRequest::default()).await.expect("ListVolumes");
    assert!(listed.into_inner().entries.is_empty(), "an inline volume is no volume of the orchestrator");

    machine.agent.kill();
    assert_eq!(fs::read_to_string(target.join("scratch")).expect("the file"), "pad");
    machine.agent.restart();
    let mut csi = machine.agent.csi().await;
    assert_eq!(fs::read_to_string(target.join("scratch")).expect("the file"), "pad");
    csi.node
        .node_publish_volume(request(&csi, &name, &attributes))
        .await
        .expect("the kubelet repeats itself");
    assert!(!stats(&mut csi, &name).await.volume_condition.expect("a condition").abnormal);
    assert_eq!(fs::read_to_string(target.join("scratch")).expect("the file"), "pad");

    for _ in 0..2 {
        unpublish(&mut csi, &name, &target).await.expect("NodeUnpublishVolume");
    }
    assert!(!target.exists(), "its target is removed");
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inline_volume_that_may_not_be_or_does_not_fit_leaves_nothing() {
    let machine = Machine::new(&[128]);
    let mut csi = machine.agent.csi().await;
    let name = kubelet_name();
    for (attribute, value) in [
        ("enforcement", "none"),
        ("provisioning", "thin"),
        ("placement", "any"),
        ("size", "much"),
        ("size", "0"),
        ("sise", "1Gi"),
        ("mergerfs.branches", "+>/etc"),
    ] {
        let result = csi.node.node_publish_volume(request(&csi, &name, &[(attribute, value)])).await;
        refused(result, Code::InvalidArgument, &[attribute]);
    }
    let mut staged = request(&csi, &name, &[]);
    staged.staging_target_path = csi.staging(&name).display().to_string();
    refused(csi.node.node_publish_volume(staged).await, Code::InvalidArgument, &["staging_target_path"]);
    let result = csi.node.node_publish_volume(request(&csi, &name, &[("size", "10Gi")])).await;
    refused(result, Code::ResourceExhausted, &["largest", "disk0"]);
    let left: Vec<_> = fs::read_dir(machine.scratch.join("state/ephemeral")).into_iter().flatten().collect();
    assert!(left.is_empty(), "a refused inline volume left {left:?}");
    let target = csi.target(&name);
    unpublish(&mut csi, &name, &target).await.expect("unpublishing what was never made");
    machine.is_clean();
    assert_eq!(machine.json("/v1/volumes"), serde_json::json!([]));
}
