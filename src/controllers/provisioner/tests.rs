//! The provisioner's decisions in a small world: a claim, a class, a PersistentVolume and a volume, and those who act on them.
//! Since every decision is made of what is there, whoever decides the next may be another: a crash is no special case, and
//! what tests cut short goes on like that.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, PersistentVolumeStatus};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rstest::rstest;
use serde_json::json;

use super::decide::{About, Action, Decision, decide};
use super::index::Index;
use super::objects::{
    Claim, LABEL_CLAIM, LABEL_RETAINED, PROTECTION, PROVISIONED_BY, SELECTED_NODE, Split, Volume,
};
use super::persistent_volume::affinity;
use crate::controllers::class::Class;
use crate::controllers::cluster::{DRIVER, TOPOLOGY_KEY};
use crate::controllers::events::Severity;
use crate::domain::Bytes;
use crate::domain::reach::Network;
use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::store::object::{
    Attachment, FINALIZER, Meta, VolumeSplit, VolumeSplitStatus, pending, set_condition,
};
use crate::store::view::accessible;

const UID: &str = "0b1a4c5e-0000-4000-8000-000000000001";

fn name() -> String {
    format!("pvc-{UID}")
}

pub(super) fn claim(more: serde_json::Value) -> PersistentVolumeClaim {
    let mut claim = json!({
        "metadata": {
            "name": "data", "namespace": "web", "uid": UID,
            "annotations": {"volume.kubernetes.io/storage-provisioner": DRIVER},
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "union",
            "resources": {"requests": {"storage": "10Gi"}},
        },
    });
    merge(&mut claim, more);
    serde_json::from_value(claim).unwrap()
}

pub(super) fn class(more: serde_json::Value) -> StorageClass {
    let mut class = json!({
        "metadata": {"name": "union"}, "provisioner": DRIVER, "volumeBindingMode": "Immediate",
        "reclaimPolicy": "Delete",
    });
    merge(&mut class, more);
    serde_json::from_value(class).unwrap()
}

fn merge(into: &mut serde_json::Value, more: serde_json::Value) {
    match (into, more) {
        (serde_json::Value::Object(into), serde_json::Value::Object(more)) => {
            for (key, value) in more {
                merge(into.entry(key).or_insert(serde_json::Value::Null), value);
            }
        }
        (into, more) => *into = more,
    }
}

fn delayed() -> serde_json::Value {
    json!({"volumeBindingMode": "WaitForFirstConsumer"})
}

fn retain() -> serde_json::Value {
    json!({"reclaimPolicy": "Retain"})
}

fn planned(index: u32, node: &str, pool: &str, gib: u64) -> PlannedBranch {
    PlannedBranch {
        index,
        node: node.parse().unwrap(),
        pool: pool.parse().unwrap(),
        size: Bytes::gib(gib),
        usable: Bytes::gib(gib),
        format: BranchFormat::Directory,
        fs_type: None,
    }
}

/// What exists.
#[derive(Clone, Debug, Default)]
struct World {
    claim: Option<PersistentVolumeClaim>,
    class: Option<StorageClass>,
    volume: Option<PersistentVolume>,
    split: Option<VolumeSplit>,
    /// GiB that each node has.
    room: BTreeMap<&'static str, u64>,
    /// What was told, as `reason: message`.
    told: Vec<String>,
}

impl World {
    fn new(class_is: serde_json::Value) -> Self {
        Self {
            claim: Some(claim(json!({}))),
            class: Some(class(class_is)),
            room: BTreeMap::from([("n1", 100)]),
            ..Self::default()
        }
    }

    fn decision(&self) -> Decision {
        self.decision_held_back(false)
    }

    fn decision_held_back(&self, held_back: bool) -> Decision {
        let mut index = Index::default();
        if let Some(claim) = self.claim.clone().and_then(Claim::read) {
            index.put_claim(name(), claim);
        }
        if let Some(class) = self.class.clone().and_then(Class::read) {
            index.put_class(class.name.clone(), class);
        }
        if let Some(volume) = self.volume.clone().and_then(Volume::read) {
            index.put_volume(volume);
        }
        if let Some(split) = &self.split {
            index.put_split(split.meta.name.clone(), Split::read(split));
        }
        decide(&index.seen(&name(), held_back))
    }

    /// Does one write, as the API server would.
    fn apply(&mut self, action: Action) {
        match action {
            Action::CreateSplit { spec, claim } => {
                assert!(self.split.is_none(), "made twice");
                let mut meta = Meta::with_finalizer(spec.volume.as_str());
                meta.labels.insert(LABEL_CLAIM.to_owned(), claim);
                self.split = Some(VolumeSplit { meta, spec: *spec, status: VolumeSplitStatus::default() });
            }
            Action::Withdraw { .. } => {
                assert!(self.volume.is_none(), "it has a PersistentVolume");
                self.delete_split();
            }
            Action::Reclaim { handle } => {
                assert_eq!(handle, self.split.as_ref().unwrap().meta.name);
                self.delete_split();
            }
            Action::CreateVolume(volume) => {
                assert!(self.volume.is_none(), "made twice");
                let mut volume = *volume;
                let accessible = accessible(self.split.as_ref().unwrap(), &Network::default());
                volume.spec.as_mut().unwrap().node_affinity = Some(affinity(&accessible));
                volume.metadata.uid = Some("volume-uid".to_owned());
                volume.status =
                    Some(PersistentVolumeStatus { phase: Some("Pending".to_owned()), ..Default::default() });
                self.volume = Some(volume);
            }
            Action::Reschedule { node, .. } => {
                let annotations = self.claim.as_mut().unwrap().metadata.annotations.as_mut().unwrap();
                assert_eq!(annotations.remove(SELECTED_NODE), Some(node));
            }
            Action::Retain { .. } => {
                let labels = &mut self.split.as_mut().unwrap().meta.labels;
                labels.insert(LABEL_RETAINED.to_owned(), "true".to_owned());
            }
            Action::DeleteVolume { .. } => self.delete_volume(),
            Action::Protect { .. } => {
                let meta = &mut self.volume.as_mut().unwrap().metadata;
                meta.finalizers.get_or_insert_default().push(PROTECTION.to_owned());
            }
            Action::Unprotect { at, .. } => {
                let meta = &mut self.volume.as_mut().unwrap().metadata;
                assert_eq!(meta.finalizers.as_mut().unwrap().remove(at), PROTECTION);
                if meta.deletion_timestamp.is_some() && meta.finalizers.as_ref().unwrap().is_empty() {
                    self.volume = None;
                }
            }
        }
    }

    fn delete_split(&mut self) {
        let split = self.split.as_mut().unwrap();
        assert!(split.spec.attached.is_empty(), "it is attached");
        split.meta.deleting = Some(Timestamp::UNIX_EPOCH);
    }

    fn delete_volume(&mut self) {
        let meta = &mut self.volume.as_mut().unwrap().metadata;
        meta.deletion_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
        if meta.finalizers.as_ref().is_none_or(Vec::is_empty) {
            self.volume = None;
        }
    }

    /// The provisioner takes one step; false where there is nothing to do.
    fn step(&mut self) -> bool {
        let Decision { action, told, done } = self.decision();
        let is_done = action.is_some();
        if let Some(action) = action {
            self.apply(action);
        }
        for told in told.into_iter().filter(|told| told.after.is_zero()).chain(done) {
            let words = format!("{}: {}", told.notice.reason, told.notice.message);
            if self.told.last() != Some(&words) {
                self.told.push(words);
            }
        }
        is_done
    }

    /// Everyone else takes a step: the splitter and the nodes, the controller manager. False where there is nothing to do.
    fn others_step(&mut self) -> bool {
        self.splitter() | self.controller_manager()
    }

    fn splitter(&mut self) -> bool {
        let Some(split) = self.split.as_mut() else { return false };
        if split.meta.deleting.is_some() {
            self.split = None;
            return true;
        }
        let before = split.clone();
        let node = split.spec.consumer.as_ref().map_or("n1", |node| node.as_str()).to_owned();
        let room = Bytes::gib(self.room.get(node.as_str()).copied().unwrap_or_default());
        let mut set = |kind, holds, reason, message: &str| {
            set_condition(&mut split.status.conditions, Timestamp::UNIX_EPOCH, kind, holds, reason, message)
        };
        if !split.spec.branches.is_empty() {
            set("Pending", false, pending::BOUND, "");
            set("Ready", true, "Bound", "");
        } else if split.spec.capacity <= room {
            let (first, second) = (planned(0, &node, "a", 6), planned(1, &node, "b", 4));
            set("Pending", true, pending::BINDING, "");
            split.spec.branches = vec![first, second];
        } else {
            set("Pending", true, pending::INFEASIBLE, "1 of 1 pools qualify");
            split.status.largest = Some(room);
        }
        *split != before
    }

    fn controller_manager(&mut self) -> bool {
        let Some(volume) = self.volume.as_mut() else { return false };
        let before = volume.clone();
        let mine = self.claim.as_mut().filter(|claim| claim.metadata.deletion_timestamp.is_none());
        let phase = match mine {
            Some(claim) => {
                claim.spec.as_mut().unwrap().volume_name = Some(name());
                "Bound"
            }
            None if volume.spec.as_ref().unwrap().claim_ref.is_some() => "Released",
            None => "Available",
        };
        volume.status.as_mut().unwrap().phase = Some(phase.to_owned());
        *volume != before
    }

    /// Until nobody has anything to do.
    fn settle(&mut self) {
        for _ in 0..100 {
            if !(self.step() | self.others_step()) {
                return;
            }
        }
        panic!("it never comes to rest: {self:#?}");
    }

    /// The same until the provisioner has done so many writes.
    fn until(&mut self, writes: usize) -> bool {
        let mut done = 0;
        for _ in 0..100 {
            if done == writes {
                return true;
            }
            let wrote = self.step();
            done += usize::from(wrote);
            if !(wrote | self.others_step()) {
                return false;
            }
        }
        panic!("it never comes to rest: {self:#?}");
    }

    fn select(&mut self, node: &str) {
        let annotations = self.claim.as_mut().unwrap().metadata.annotations.as_mut().unwrap();
        annotations.insert(SELECTED_NODE.to_owned(), node.to_owned());
    }

    fn selected(&self) -> Option<&String> {
        self.claim.as_ref()?.metadata.annotations.as_ref()?.get(SELECTED_NODE)
    }

    fn volume_spec(&self) -> &k8s_openapi::api::core::v1::PersistentVolumeSpec {
        self.volume.as_ref().unwrap().spec.as_ref().unwrap()
    }

    fn is_empty(&self) -> bool {
        self.volume.is_none() && self.split.is_none()
    }

    fn attach(&mut self) {
        self.split.as_mut().unwrap().spec.attached = vec![
            serde_json::from_value::<Attachment>(
                json!({"node": "n1", "accessMode": "SingleNodeMultiWriter"}),
            )
            .unwrap(),
        ];
    }
}

#[test]
fn a_claim_becomes_a_volume_of_exactly_its_size_bound_to_it_by_uid() {
    let mut world = World::new(json!({"mountOptions": ["noatime"], "parameters": {"fsType": "xfs"}}));
    world.settle();
    let split = world.split.as_ref().unwrap();
    assert_eq!((split.meta.name.as_str(), split.spec.capacity), (name().as_str(), Bytes::gib(10)));
    assert_eq!(split.meta.finalizers, [FINALIZER]);
    let meta = &world.volume.as_ref().unwrap().metadata;
    assert_eq!(meta.name, Some(name()));
    assert_eq!(meta.annotations.as_ref().unwrap()[PROVISIONED_BY], DRIVER);
    assert_eq!(meta.finalizers.as_deref(), Some(&[PROTECTION.to_owned()][..]));
    let spec = serde_json::to_value(world.volume_spec()).unwrap();
    assert_eq!(
        spec,
        json!({
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "10Gi"},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": "data", "namespace": "web", "uid": UID},
            "csi": {"driver": DRIVER, "volumeHandle": name(), "fsType": "xfs"},
            "mountOptions": ["noatime"],
            "nodeAffinity": {"required": {"nodeSelectorTerms": [
                {"matchExpressions": [{"key": TOPOLOGY_KEY, "operator": "In", "values": ["n1"]}]},
            ]}},
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": "union",
            "volumeMode": "Filesystem",
        })
    );
    assert_eq!(
        world.told,
        [
            "Provisioning: finding room for 10Gi",
            "ProvisioningSucceeded: 10Gi: 2 branches on node n1: a 6 GiB, b 4 GiB",
        ]
    );
}

#[test]
fn a_volume_that_got_more_than_was_asked_for_says_how_much() {
    let mut world = World::new(json!({}));
    let request = json!({"spec": {"resources": {"requests": {"storage": "9.5Gi"}}}});
    world.claim = Some(claim(request));
    world.settle();
    assert_eq!(world.split.as_ref().unwrap().spec.capacity, "9.5Gi".parse().unwrap());
    assert_eq!(world.volume_spec().capacity.as_ref().unwrap()["storage"].0, "10Gi");
}

#[test]
fn a_claim_of_another_driver_or_one_that_is_bound_gets_nothing() {
    let mut other = World::new(json!({}));
    other.claim =
        Some(claim(json!({"metadata": {"annotations": {"volume.kubernetes.io/storage-provisioner": "x"}}})));
    assert_eq!(other.decision(), Decision::default());
    let mut bound = World::new(json!({}));
    bound.claim = Some(claim(json!({"spec": {"volumeName": "another"}})));
    assert_eq!(bound.decision(), Decision::default());
}

#[test]
fn the_older_annotations_mean_the_same() {
    let mut world = World::new(json!({"metadata": {"name": "old"}}));
    let claim = world.claim.as_mut().unwrap();
    claim.metadata.annotations = Some(BTreeMap::from([
        ("volume.beta.kubernetes.io/storage-provisioner".to_owned(), DRIVER.to_owned()),
        ("volume.beta.kubernetes.io/storage-class".to_owned(), "old".to_owned()),
    ]));
    claim.spec.as_mut().unwrap().storage_class_name = None;
    world.settle();
    assert_eq!(world.volume_spec().storage_class_name.as_deref(), Some("old"));
}

#[test]
fn a_delayed_claim_waits_for_its_node_and_is_made_there() {
    let mut world = World::new(delayed());
    world.room.insert("n2", 100);
    world.settle();
    assert!(world.is_empty() && world.told.is_empty());
    world.select("n2");
    world.settle();
    assert_eq!(world.split.as_ref().unwrap().spec.consumer.as_ref().unwrap().as_str(), "n2");
    let affinity = serde_json::to_string(&world.volume_spec().node_affinity).unwrap();
    assert!(affinity.contains("n2"), "{affinity}");
    assert_eq!(world.told[0], "Provisioning: finding room for 10Gi for node n2");
}

#[test]
fn allowed_topologies_are_the_nodes_a_volume_may_be_on() {
    let allowed = |key: &str, values: &[&str]| json!({"allowedTopologies": [{"matchLabelExpressions": [{"key": key, "values": values}]}]});
    let mut world = World::new(allowed(TOPOLOGY_KEY, &["n2", "n1"]));
    world.step();
    let nodes: Vec<_> = world.split.unwrap().spec.topology.iter().map(ToString::to_string).collect();
    assert_eq!(nodes, ["n1", "n2"]);

    let zone = World::new(allowed("topology.kubernetes.io/zone", &["z"])).decision();
    assert_eq!(zone.action, None);
    assert!(zone.told.unwrap().notice.message.contains("topology.kubernetes.io/zone"));
    assert_eq!(World::new(allowed(TOPOLOGY_KEY, &[])).decision().action, None, "no node is allowed");

    let mut outside = allowed(TOPOLOGY_KEY, &["n1"]);
    merge(&mut outside, delayed());
    let mut outside = World::new(outside);
    outside.select("n2");
    assert_eq!(outside.decision().action, None);
}

#[test]
fn a_node_without_room_gives_the_claim_back_to_the_scheduler_and_keeps_nothing() {
    let mut world = World::new(delayed());
    world.room.extend([("n1", 3), ("n2", 20)]);
    world.select("n1");
    world.settle();
    assert!(world.is_empty(), "{world:#?}");
    assert_eq!(world.selected(), None);
    let told = world.told.last().unwrap();
    assert!(told.starts_with("ProvisioningFailed: no room on node n1: "), "{told}");
    assert!(
        told.contains("1 of 1 pools qualify") && told.contains("the largest volume that fits now is 3Gi"),
        "{told}"
    );
    world.select("n2");
    assert_eq!(world.decision_held_back(true), Decision::default(), "it waits before another attempt");
    world.settle();
    assert!(world.volume.is_some());
}

#[test]
fn what_is_being_removed_from_one_node_is_waited_for_before_the_next() {
    let mut world = World::new(delayed());
    world.room.extend([("n1", 3), ("n2", 20)]);
    world.select("n1");
    assert!(world.until(2) && world.step(), "asked for, given back, withdrawn");
    world.select("n2");
    assert!(world.split.as_ref().unwrap().meta.deleting.is_some());
    assert_eq!(world.decision().action, None);
    world.settle();
    assert_eq!(world.split.unwrap().spec.consumer.unwrap().as_str(), "n2");
}

#[test]
fn an_immediate_claim_without_room_stays_and_binds_when_there_is_room() {
    let mut world = World::new(json!({}));
    world.room.insert("n1", 3);
    world.settle();
    assert!(world.split.is_some() && world.volume.is_none());
    assert!(
        world.told.last().unwrap().contains("the largest volume that fits now is 3Gi"),
        "{:?}",
        world.told
    );
    world.room.insert("n1", 30);
    world.settle();
    assert!(world.volume.is_some());
}

#[rstest]
#[case::unknown(json!({"sploitQuantum": "1Gi"}), "sploitQuantum")]
#[case::value(json!({"strategy": "best"}), "strategy")]
#[case::contradiction(json!({"minBranches": "4", "maxBranches": "2"}), "minBranches")]
#[case::reserved(json!({"csi.storage.k8s.io/nonsense": "x"}), "csi.storage.k8s.io/nonsense")]
#[case::secret(json!({"csi.storage.k8s.io/node-stage-secret-name": "x"}), "node-stage-secret-name")]
fn a_wrong_parameter_is_named_and_nothing_is_made(
    #[case] parameters: serde_json::Value,
    #[case] named: &str,
) {
    let mut world = World::new(json!({"parameters": parameters}));
    world.settle();
    assert!(world.is_empty());
    assert_eq!(world.told.len(), 1, "{:?}", world.told);
    assert!(world.told[0].starts_with("ProvisioningFailed: StorageClass union: "), "{:?}", world.told);
    assert!(world.told[0].contains(named), "{:?}", world.told);
}

#[test]
fn a_mount_option_that_no_node_would_take_is_told_at_once() {
    let mut world = World::new(json!({"mountOptions": ["noatime", "nobarrier"]}));
    world.settle();
    assert!(world.is_empty());
    assert!(world.told[0].contains("mountOptions: nobarrier not supported"), "{:?}", world.told);
}

#[test]
fn keys_that_kubernetes_keeps_for_itself_are_read_as_the_official_provisioner_does() {
    let mut world = World::new(json!({"parameters": {
        "csi.storage.k8s.io/fstype": "btrfs", "csi.storage.k8s.io/pvc/name": "someone else's",
    }}));
    world.settle();
    assert_eq!(world.volume_spec().csi.as_ref().unwrap().fs_type.as_deref(), Some("btrfs"));
    let parameters = &world.split.as_ref().unwrap().spec.parameters;
    assert_eq!(parameters["csi.storage.k8s.io/pvc/name"], "data");
    assert_eq!(parameters["csi.storage.k8s.io/pvc/namespace"], "web");
}

#[rstest]
#[case::many_writers_of_a_block_device(json!({"accessModes": ["ReadWriteMany"], "volumeMode": "Block"}), "ReadWriteMany")]
#[case::unknown_mode(json!({"accessModes": ["ReadSometimes"]}), "ReadSometimes")]
#[case::selector(json!({"selector": {"matchLabels": {"a": "b"}}}), "selector")]
#[case::clone(json!({"dataSource": {"kind": "PersistentVolumeClaim", "name": "x"}}), "clones")]
#[case::limit(json!({"resources": {"limits": {"storage": "1Gi"}}}), "resources.limits.storage")]
#[case::zero(json!({"resources": {"requests": {"storage": "0"}}}), "resources.requests.storage")]
#[case::beyond(json!({"resources": {"requests": {"storage": "20Ei"}}}), "too large")]
fn a_claim_that_cannot_be_served_is_told_why_and_nothing_is_made(
    #[case] spec: serde_json::Value,
    #[case] named: &str,
) {
    let mut world = World::new(json!({}));
    world.claim = Some(claim(json!({"spec": spec})));
    world.settle();
    assert!(world.is_empty());
    assert!(
        world.told[0].starts_with("ProvisioningFailed: ") && world.told[0].contains(named),
        "{:?}",
        world.told
    );
}

#[test]
fn every_access_mode_of_a_claim_is_granted() {
    use crate::domain::volume::AccessMode::{
        MultiNodeMultiWriter, MultiNodeReaderOnly, SingleNodeMultiWriter, SingleNodeSingleWriter,
    };
    for (asked, granted) in [
        (json!(["ReadWriteOnce"]), vec![SingleNodeMultiWriter]),
        (json!(["ReadWriteOncePod"]), vec![SingleNodeSingleWriter]),
        (json!(["ReadWriteOnce", "ReadOnlyMany"]), vec![MultiNodeReaderOnly, SingleNodeMultiWriter]),
        (json!(["ReadWriteMany"]), vec![MultiNodeMultiWriter]),
        (json!(["ReadWriteOnce", "ReadWriteMany"]), vec![MultiNodeMultiWriter, SingleNodeMultiWriter]),
    ] {
        let mut world = World::new(json!({}));
        world.claim = Some(claim(json!({"spec": {"accessModes": asked}})));
        world.settle();
        assert_eq!(world.split.unwrap().spec.access_modes, granted);
    }
}

#[rstest]
#[case::images(json!({"branchFormat": "image"}), "branchFormat is image")]
#[case::branches(json!({"minBranches": "2"}), "minBranches is 2")]
fn a_class_whose_volumes_several_nodes_cannot_write_is_named_with_the_remedy(
    #[case] parameters: serde_json::Value,
    #[case] reason: &str,
) {
    let mut world = World::new(json!({"parameters": parameters}));
    world.claim = Some(claim(json!({"spec": {"accessModes": ["ReadWriteMany"]}})));
    world.settle();
    assert!(world.is_empty());
    for named in ["ReadWriteMany", "StorageClass union", reason, "ReadWriteOnce"] {
        assert!(world.told[0].contains(named), "{:?}", world.told);
    }
}

#[test]
fn a_block_volume_has_one_branch_and_no_filesystem() {
    let block = claim(json!({"spec": {"volumeMode": "Block"}}));
    let mut world = World { claim: Some(block.clone()), ..World::new(json!({})) };
    world.settle();
    assert_eq!(world.volume_spec().csi.as_ref().unwrap().fs_type, None);
    assert_eq!(world.volume_spec().volume_mode.as_deref(), Some("Block"));
    for parameters in [json!({"minBranches": "2"}), json!({"branchFormat": "directory"})] {
        let refused =
            World { claim: Some(block.clone()), ..World::new(json!({"parameters": parameters})) }.decision();
        assert_eq!(refused.action, None);
        assert!(refused.told.unwrap().notice.message.contains("volumeMode Block"));
    }
}

#[test]
fn a_class_that_does_not_exist_yet_is_waited_for() {
    let mut world = World { class: None, ..World::new(json!({})) };
    world.settle();
    let told = world.decision().told.unwrap();
    assert!(told.notice.message.contains("\"union\"") && !told.after.is_zero());
    world.class = Some(class(json!({})));
    world.settle();
    assert!(world.volume.is_some());
}

#[test]
fn a_class_that_was_made_anew_before_the_volume_was_ready_counts() {
    let mut world = World::new(json!({"parameters": {"strategy": "balanced"}}));
    world.room.insert("n1", 1);
    world.settle();
    world.class = Some(class(json!({"parameters": {"strategy": "spread"}})));
    world.room.insert("n1", 100);
    world.settle();
    assert_eq!(world.split.as_ref().unwrap().spec.parameters["strategy"], "spread");
    assert!(world.volume.is_some());
}

#[test]
fn a_branch_that_cannot_be_made_is_told_of() {
    let mut world = World::new(json!({}));
    world.until(1);
    let status = &mut world.split.as_mut().unwrap().status;
    let message = "branch v-0 on n1/a: mkfs failed";
    set_condition(
        &mut status.conditions,
        Timestamp::UNIX_EPOCH,
        "ReplicaFailure",
        true,
        "BranchFailed",
        message,
    );
    let told = world.decision().told.unwrap();
    assert_eq!((told.notice.severity, told.notice.message.as_str()), (Severity::Warning, message));
}

#[test]
fn a_claim_that_goes_at_any_moment_leaves_nothing_behind() {
    for policy in [json!({}), delayed()] {
        for writes in 0..10 {
            let mut world = World::new(policy.clone());
            if policy == delayed() {
                world.select("n1");
            }
            let reached = world.until(writes);
            world.claim = None;
            world.settle();
            assert!(world.is_empty(), "after {writes} writes: {world:#?}");
            assert!(reached || writes > 2);
        }
    }
}

#[test]
fn a_retained_volume_stays_whenever_its_claim_goes_and_when_its_persistent_volume_is_deleted() {
    for writes in 0..10 {
        let mut world = World::new(retain());
        world.until(writes);
        let had_volume = world.volume.is_some();
        world.claim = None;
        world.settle();
        assert_eq!(world.volume.is_some(), had_volume, "after {writes} writes: {world:#?}");
        assert_eq!(world.split.is_some(), had_volume, "after {writes} writes: {world:#?}");
        if had_volume {
            world.delete_volume();
            world.settle();
            assert!(world.volume.is_none() && world.split.is_some(), "after {writes} writes: {world:#?}");
        }
    }
}

#[test]
fn a_persistent_volume_deleted_by_hand_goes_after_its_claim_and_its_volume() {
    let mut world = World::new(json!({}));
    world.settle();
    world.delete_volume();
    world.settle();
    assert!(world.volume.is_some() && world.split.is_some(), "its claim has it still");
    world.claim = None;
    world.settle();
    assert!(world.is_empty());
}

#[test]
fn a_used_volume_whose_persistent_volume_was_removed_by_force_is_kept() {
    let mut world = World::new(json!({}));
    world.settle();
    world.split.as_mut().unwrap().spec.used = true;
    world.volume = None;
    for claim in [world.claim.clone(), None] {
        world.claim = claim;
        assert_eq!(world.decision().action, None);
    }
}

#[test]
fn an_available_persistent_volume_deleted_by_hand_takes_its_volume_along() {
    let mut world = World::new(json!({}));
    world.settle();
    world.claim = None;
    world.volume.as_mut().unwrap().spec.as_mut().unwrap().claim_ref = None;
    world.controller_manager();
    assert_eq!(world.decision(), Decision::default(), "any claim may take it");
    world.delete_volume();
    world.settle();
    assert!(world.is_empty());
}

#[test]
fn an_attached_volume_is_deleted_when_it_is_detached() {
    let mut world = World::new(json!({}));
    world.settle();
    world.attach();
    world.claim = None;
    world.settle();
    assert!(world.split.as_ref().unwrap().meta.deleting.is_none() && world.volume.is_some());
    let told = world.decision().told.unwrap();
    assert_eq!((told.about, told.notice.reason), (About::Volume, "VolumeFailedDelete"));
    assert!(told.notice.message.contains("n1") && !told.after.is_zero(), "an ordinary detach is no fault");
    world.split.as_mut().unwrap().spec.attached.clear();
    world.settle();
    assert!(world.is_empty());
}

#[test]
fn a_policy_that_is_changed_to_delete_protects_and_one_changed_to_retain_keeps() {
    let mut world = World::new(retain());
    world.settle();
    let policy = |world: &mut World, policy: &str| {
        let spec = world.volume.as_mut().unwrap().spec.as_mut().unwrap();
        spec.persistent_volume_reclaim_policy = Some(policy.to_owned());
    };
    assert_eq!(world.volume.as_ref().unwrap().metadata.finalizers.as_deref(), Some(&[][..]));
    policy(&mut world, "Delete");
    world.settle();
    assert_eq!(world.volume.as_ref().unwrap().metadata.finalizers.as_ref().unwrap(), &[PROTECTION]);
    let mut goes = world.clone();
    goes.claim = None;
    goes.settle();
    assert!(goes.is_empty());
    policy(&mut world, "Retain");
    world.settle();
    world.claim = None;
    world.settle();
    assert!(world.volume.is_some() && world.split.is_some());
}

#[test]
fn a_volume_that_was_deleted_by_hand_first_lets_its_persistent_volume_go() {
    let mut world = World::new(json!({}));
    world.settle();
    world.split = None;
    let told = world.decision().told.unwrap();
    assert_eq!((told.about, told.notice.reason), (About::Volume, "VolumeLost"));
    world.claim = None;
    world.settle();
    assert!(world.is_empty());
}

#[test]
fn a_persistent_volume_made_by_hand_is_never_touched() {
    for phase in ["Available", "Bound", "Released", "Failed"] {
        for deleting in [false, true] {
            let mut world = World::new(json!({}));
            world.settle();
            let volume = world.volume.as_mut().unwrap();
            volume.metadata.annotations = None;
            volume.metadata.finalizers = None;
            volume.status.as_mut().unwrap().phase = Some(phase.to_owned());
            volume.metadata.deletion_timestamp = deleting.then_some(Time(Timestamp::UNIX_EPOCH));
            assert_eq!(world.decision(), Decision::default(), "{phase}");
        }
    }
}

#[test]
fn a_volume_of_our_name_that_was_not_made_for_the_claim_is_left_alone_and_said_so() {
    let mut made = World::new(json!({}));
    made.settle();
    made.volume = None;
    made.claim = Some(claim(json!({})));
    for spoil in [
        (|split: &mut VolumeSplit| split.meta.labels.clear()) as fn(&mut VolumeSplit),
        |split| _ = split.meta.labels.insert(LABEL_CLAIM.to_owned(), "other".to_owned()),
        |split| split.spec.ephemeral = true,
    ] {
        let mut world = made.clone();
        spoil(world.split.as_mut().unwrap());
        let decision = world.decision();
        assert_eq!(decision.action, None);
        assert!(decision.told.unwrap().notice.message.contains("not made for this claim"));
        world.claim = None;
        assert_eq!(world.decision(), Decision::default(), "nor when the claim is gone");
    }
}

#[test]
fn an_inline_volume_is_never_touched_whatever_points_at_it() {
    let mut world = World::new(json!({}));
    world.settle();
    world.split.as_mut().unwrap().spec.ephemeral = true;
    world.claim = None;
    world.controller_manager();
    assert_eq!(world.decision().action, None);
}

#[test]
fn a_volume_that_two_persistent_volumes_name_is_not_deleted_under_one_of_them() {
    let mut world = World::new(json!({}));
    world.settle();
    world.claim = None;
    world.controller_manager();
    let mut index = Index::default();
    let volume = world.volume.clone().unwrap();
    let mut other = volume.clone();
    other.metadata.name = Some("restored".to_owned());
    index.put_volume(Volume::read(other).unwrap());
    index.put_volume(Volume::read(volume).unwrap());
    index.put_split(name(), Split::read(world.split.as_ref().unwrap()));
    for one in [name(), "restored".to_owned()] {
        let decision = decide(&index.seen(&one, false));
        assert_eq!(decision.action, None, "{one}");
        assert!(decision.told.unwrap().notice.message.contains("has the same volume"));
    }
    assert_eq!(index.remove_volume("restored"), [name()], "the other is looked at then");
    assert!(matches!(decide(&index.seen(&name(), false)).action, Some(Action::Reclaim { .. })));
}

#[test]
fn a_retained_volume_given_a_new_persistent_volume_and_claim_goes_with_that_claim() {
    let mut world = World::new(retain());
    world.settle();
    world.claim = None;
    world.settle();
    let spec = world.volume.as_mut().unwrap().spec.as_mut().unwrap();
    spec.claim_ref.as_mut().unwrap().uid = Some("another".to_owned());
    spec.persistent_volume_reclaim_policy = Some("Delete".to_owned());
    world.settle();
    assert!(world.is_empty());
}

#[test]
fn a_class_wakes_only_the_claims_that_wait_for_it() {
    let mut index = Index::default();
    index.put_claim("a".to_owned(), Claim::read(claim(json!({}))).unwrap());
    index.put_claim("b".to_owned(), Claim::read(claim(json!({"spec": {"volumeName": "b"}}))).unwrap());
    let other = claim(json!({"spec": {"storageClassName": "other"}}));
    index.put_claim("c".to_owned(), Claim::read(other).unwrap());
    let read = |more| Class::read(class(more)).unwrap();
    assert_eq!(index.put_class("union".to_owned(), read(json!({}))), ["a"]);
    assert!(index.put_class("union".to_owned(), read(json!({}))).is_empty(), "nothing changed");
    assert_eq!(index.remove_class("union"), ["a"]);
    index.remove_claim("a");
    assert!(index.put_class("union".to_owned(), read(json!({}))).is_empty());
}
