//! What users and Kubernetes' own controllers make: classes, claims, nodes, attachments.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node as KubeNode, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::api::storage::v1::{CSINode, StorageClass, VolumeAttachment};
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use union_csi::csi::DRIVER;
use union_csi::store::object::{Branch, VolumeSplit};
use union_csi::store::{Selector, Store};

use super::Cluster;

/// A claim.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Its name.
    pub name: String,
}

/// The volume of a bound claim.
#[derive(Clone, Debug)]
pub struct Volume {
    /// The claim's name.
    pub claim: String,
    /// The PersistentVolume's name.
    pub name: String,
    /// The driver's name for it.
    pub handle: String,
    /// What the driver wants to be told when it is staged.
    pub context: BTreeMap<String, String>,
    /// Of the filesystem, where the class says one.
    pub fs_type: String,
    /// The claim's.
    pub mode: String,
    /// A block device instead of a filesystem.
    pub block: bool,
}

impl Cluster {
    /// The Node of a kubelet that has just started.
    pub(super) fn add_node(&self, name: &str) {
        let node = json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}});
        let _: KubeNode = self.create(&self.api(), node);
    }

    /// What a kubelet does when a driver was registered: topology labels at its Node, and the CSINode.
    pub(super) fn join(&self, name: &str, info: &Value) {
        let segments = info["segments"].clone();
        let keys: Vec<String> = segments.as_object().map(|s| s.keys().cloned().collect()).unwrap_or_default();
        let patch = json!({"metadata": {"labels": segments}});
        self.block_on(self.api::<KubeNode>().patch(name, &PatchParams::default(), &Patch::Merge(patch)))
            .expect("the node is labelled");
        let csi = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSINode", "metadata": {"name": name},
            "spec": {"drivers": [{"name": DRIVER, "nodeID": info["node"], "topologyKeys": keys}]},
        });
        let apply = PatchParams::apply("kubelet").force();
        self.block_on(self.api::<CSINode>().patch(name, &apply, &Patch::Apply(csi))).expect("a CSINode");
    }

    /// A class; branches are in few MiB, since the machines' disks are small.
    pub fn class(&self, name: &str, binding: &str, parameters: Value) {
        let mut all = json!({"splitQuantum": "16Mi"});
        if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
            all.extend(more);
        }
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
            "metadata": {"name": name}, "provisioner": DRIVER, "volumeBindingMode": binding, "parameters": all,
        });
        // Classes cannot be changed, and tests may run again.
        let api = self.api::<StorageClass>();
        let _ = self.block_on(api.delete(name, &DeleteParams::default()));
        let _: StorageClass = self.create(&api, class);
    }

    /// A claim.
    pub fn claim(&self, name: &str, class: &str, size: &str) -> Claim {
        self.claim_with(name, class, size, "ReadWriteOnce")
    }

    /// A claim in another access mode.
    pub fn claim_with(&self, name: &str, class: &str, size: &str, mode: &str) -> Claim {
        self.claim_as(name, class, size, mode, "Filesystem")
    }

    /// A claim of a block device.
    pub fn claim_block(&self, name: &str, class: &str, size: &str) -> Claim {
        self.claim_as(name, class, size, "ReadWriteOnce", "Block")
    }

    fn claim_as(&self, name: &str, class: &str, size: &str, mode: &str, volume_mode: &str) -> Claim {
        let claim = json!({
            "metadata": {"name": name},
            "spec": {
                "storageClassName": class, "accessModes": [mode], "volumeMode": volume_mode,
                "resources": {"requests": {"storage": size}},
            },
        });
        let _: PersistentVolumeClaim = self.create(&self.named(), claim);
        Claim { name: name.to_owned() }
    }

    /// Says, as the scheduler does, on which node the claim's first pod will run.
    pub fn select(&self, claim: &Claim, node: &str) {
        let patch = json!({"metadata": {"annotations": {"volume.kubernetes.io/selected-node": node}}});
        let api: Api<PersistentVolumeClaim> = self.named();
        self.block_on(api.patch(&claim.name, &PatchParams::default(), &Patch::Merge(patch)))
            .expect("selected");
    }

    /// Waits until it is bound.
    pub fn bound(&self, claim: &Claim) -> Volume {
        let claims: Api<PersistentVolumeClaim> = self.named();
        let found = self.within(self.step_bound, &format!("claim {} is bound", claim.name), || {
            let found = self.block_on(claims.get_opt(&claim.name)).ok().flatten()?;
            (found.status.as_ref()?.phase.as_deref() == Some("Bound")).then_some(found)
        });
        let spec = found.spec.expect("a spec");
        let name = spec.volume_name.expect("a volume");
        let volume = self.block_on(self.api::<PersistentVolume>().get(&name)).expect("the volume");
        let csi = volume.spec.and_then(|s| s.csi).expect("a CSI volume");
        Volume {
            claim: claim.name.clone(),
            name,
            handle: csi.volume_handle,
            context: csi.volume_attributes.unwrap_or_default(),
            fs_type: csi.fs_type.unwrap_or_default(),
            mode: spec.access_modes.and_then(|m| m.into_iter().next()).unwrap_or_default(),
            block: spec.volume_mode.as_deref() == Some("Block"),
        }
    }

    /// Gives a volume that is bound another access mode, as `kubectl patch persistentvolume` does.
    pub fn change_mode(&self, volume: &Volume, mode: &str) -> Volume {
        let patch = json!({"spec": {"accessModes": [mode]}});
        let api = self.api::<PersistentVolume>();
        self.block_on(api.patch(&volume.name, &PatchParams::default(), &Patch::Merge(patch)))
            .expect("patched");
        Volume { mode: mode.to_owned(), ..volume.clone() }
    }

    /// The volume's object.
    pub fn split(&self, volume: &Volume) -> VolumeSplit {
        self.block_on(self.store().splits().get(&volume.handle)).expect("an answer").expect("the volume")
    }

    /// The volume's branches.
    pub fn branches_of(&self, volume: &Volume) -> Vec<Branch> {
        let selector = Selector::Volume(volume.handle.parse().expect("an id"));
        self.block_on(self.store().branches().list(&selector)).expect("branches")
    }

    fn attachment(volume: &Volume, node: &str) -> String {
        format!("csi-{}-{node}", volume.handle)
    }

    /// Asks for the volume on a node, as the attach-detach controller does, and does not wait.
    pub fn ask_to_attach(&self, volume: &Volume, node: &str) {
        let object = json!({
            "metadata": {"name": Self::attachment(volume, node)},
            "spec": {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": volume.name}},
        });
        let _: VolumeAttachment = self.create(&self.api(), object);
    }

    /// What became of that: attached, or why not.
    pub fn attached(&self, volume: &Volume, node: &str) -> Result<bool, String> {
        let name = Self::attachment(volume, node);
        let Ok(Some(found)) = self.block_on(self.api::<VolumeAttachment>().get_opt(&name)) else {
            return Ok(false);
        };
        let status = found.status.unwrap_or_default();
        match status.attach_error.and_then(|e| e.message) {
            Some(message) => Err(message),
            None => Ok(status.attached),
        }
    }

    /// Attaches the volume to a node.
    pub fn attach(&self, volume: &Volume, node: &str) {
        self.ask_to_attach(volume, node);
        let mut said = String::new();
        let end = std::time::Instant::now() + self.step_bound;
        loop {
            match self.attached(volume, node) {
                Ok(true) => return,
                Ok(false) => {}
                Err(message) => said = message,
            }
            assert!(
                std::time::Instant::now() < end,
                "volume {} is not attached to {node}: {said}",
                volume.handle
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Takes the volume from a node, as the attach-detach controller does when its kubelet has unmounted it, or when the node
    /// has the out-of-service taint; waits until the driver lets the VolumeAttachment go.
    pub fn detach(&self, volume: &Volume, node: &str) {
        let (api, name) = (self.api::<VolumeAttachment>(), Self::attachment(volume, node));
        let _ = self.block_on(api.delete(&name, &DeleteParams::default()));
        self.within(self.step_bound, &format!("volume {} is detached from {node}", volume.handle), || {
            self.block_on(api.get_opt(&name)).ok()?.is_none().then_some(())
        });
    }

    /// One attempt at [`Cluster::ask_to_attach`]; whether the VolumeAttachment is there.
    pub fn try_to_attach(&self, volume: &Volume, node: &str) -> bool {
        let object = json!({
            "metadata": {"name": Self::attachment(volume, node)},
            "spec": {"attacher": DRIVER, "nodeName": node, "source": {"persistentVolumeName": volume.name}},
        });
        let object: VolumeAttachment = serde_json::from_value(object).expect("an object");
        self.block_on(self.api::<VolumeAttachment>().create(&Default::default(), &object)).is_ok()
    }

    /// Deletes the VolumeAttachment; whether it is gone. To be called until it is.
    pub fn try_to_detach(&self, volume: &Volume, node: &str) -> bool {
        let (api, name) = (self.api::<VolumeAttachment>(), Self::attachment(volume, node));
        match self.block_on(api.get_opt(&name)) {
            Ok(None) => true,
            Ok(Some(found)) if found.metadata.deletion_timestamp.is_none() => {
                let _ = self.block_on(api.delete(&name, &DeleteParams::default()));
                false
            }
            _ => false,
        }
    }

    /// Names of all VolumeAttachments.
    pub fn attachments(&self) -> Vec<String> {
        let found = self.block_on(self.api::<VolumeAttachment>().list(&Default::default()));
        found.expect("attachments").into_iter().filter_map(|each| each.metadata.name).collect()
    }

    /// Makes the branches' reports name another address of their owner, with the port that is there.
    pub fn say_address(&self, volume: &Volume, address: &str) {
        for branch in self.branches_of(volume) {
            let name = branch.meta.name.clone();
            self.block_on(async {
                let store = self.store();
                let branches = store.branches();
                loop {
                    let mut found = branches.get(&name).await.expect("an answer").expect("the branch");
                    let report = found.status.export.as_mut().expect("it is exported");
                    let port = report.address.as_deref().and_then(|a| a.rsplit(':').next()).expect("a port");
                    report.address = Some(format!("{address}:{port}"));
                    match branches.update_status(found).await {
                        Ok(_) => break,
                        Err(union_csi::store::StoreError::Conflict { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    }

    /// What was told about a claim by events.
    pub fn events_of(&self, claim: &str) -> Vec<String> {
        let events =
            self.block_on(self.named::<k8s_openapi::api::core::v1::Event>().list(&Default::default()));
        let events = events.map(|list| list.items).unwrap_or_default();
        let about = events.into_iter().filter(|e| e.involved_object.name.as_deref() == Some(claim));
        about.filter_map(|event| event.message).collect()
    }

    /// Deletes a claim and waits until its volume is gone.
    pub fn delete(&self, volume: &Volume) {
        let claims: Api<PersistentVolumeClaim> = self.named();
        let _ = self.block_on(claims.delete(&volume.claim, &DeleteParams::default())).expect("deleted");
        self.within(self.step_bound, &format!("volume {} is gone", volume.name), || {
            let none = self.block_on(self.api::<PersistentVolume>().get_opt(&volume.name)).ok()?.is_none();
            let split = self.block_on(self.store().splits().get(&volume.handle)).ok()?.is_none();
            (none && split && self.branches_of(volume).is_empty()).then_some(())
        });
    }
}
