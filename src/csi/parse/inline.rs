//! Ephemeral inline volumes: what a pod's own manifest asks for.
//!
//! Whoever may make a pod may write these attributes, so they get less than a StorageClass, which is the
//! administrator's: what could take space that was promised to others is not theirs to set.

use std::collections::{BTreeMap, HashMap};

use super::create::{DEFAULT_CAPACITY, parameters};
use super::{Capability, InvalidRequest, MOUNT_AT_BOOT, absolute_path, capability, required, switch};
use crate::csi::proto;
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName, VolumeId};
use crate::node::volume::PublishRequest;
use crate::store::object::VolumeSplitSpec;

const FIELD: &str = "volume_context";

/// Kubernetes sets it for inline volumes (<https://kubernetes-csi.github.io/docs/ephemeral-local-volumes.html>).
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// What Kubernetes adds about the pod (CSIDriver `podInfoOnMount` and `tokenRequests`); nothing here depends on it.
const POD_KEYS: [&str; 6] = [
    EPHEMERAL,
    "csi.storage.k8s.io/pod.name",
    "csi.storage.k8s.io/pod.namespace",
    "csi.storage.k8s.io/pod.uid",
    "csi.storage.k8s.io/serviceAccount.name",
    "csi.storage.k8s.io/serviceAccount.tokens",
];

/// Attributes that only a StorageClass may set: they let a volume outgrow what was planned for it.
const ADMINISTRATORS_KEYS: [&str; 2] = ["enforcement", "provisioning"];

const SIZE: &str = "size";
const PLACEMENT: &str = "placement";

/// An ephemeral volume to be made and published.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::csi) struct Inline {
    /// The volume that shall exist.
    pub spec: VolumeSplitSpec,
    /// How it shall be published; `staging` is still empty.
    pub publish: PublishRequest,
}

/// Reads a NodePublishVolume request for an ephemeral volume; `None` where it is for an ordinary one.
pub(in crate::csi) fn inline(
    request: &proto::NodePublishVolumeRequest,
    node: &NodeName,
) -> Result<Option<Inline>, InvalidRequest> {
    let context = &request.volume_context;
    if !switch(FIELD, context, EPHEMERAL)? {
        return Ok(None);
    }
    let name = required("volume_id", &request.volume_id)?;
    let target = absolute_path("target_path", &request.target_path)?;
    let capability = capability(request.volume_capability.as_ref())?;
    if !request.staging_target_path.is_empty() {
        return Err(InvalidRequest::new(
            "staging_target_path",
            "an ephemeral volume is not staged by the caller",
        ));
    }
    if capability.volume_mode() == VolumeMode::Block {
        return Err(InvalidRequest::new("volume_capability", "an ephemeral volume cannot be a block device"));
    }
    if context.contains_key(MOUNT_AT_BOOT) {
        return Err(InvalidRequest::new(
            FIELD,
            format!("{MOUNT_AT_BOOT}: an ephemeral volume ends with its pod"),
        ));
    }
    let volume = VolumeId::from_request_name(name);
    let (parameters, capacity) = attributes(context, &capability)?;
    let spec = VolumeSplitSpec {
        volume: volume.clone(),
        request_name: name.to_owned(),
        capacity,
        limit: None,
        access_modes: vec![capability.mode],
        volume_mode: VolumeMode::Filesystem,
        parameters,
        consumer: Some(node.clone()),
        topology: vec![node.clone()],
        ephemeral: true,
        branches: Vec::new(),
        next_index: 0,
        attached: Vec::new(),
        used: false,
    };
    let publish = PublishRequest {
        volume,
        staging: std::path::PathBuf::new(),
        target,
        read_only: request.readonly,
        access_mode: capability.mode,
        access: capability.access,
        at_boot: false,
    };
    Ok(Some(Inline { spec, publish }))
}

/// The class parameters among the attributes, and the size.
fn attributes(
    context: &HashMap<String, String>,
    capability: &Capability,
) -> Result<(BTreeMap<String, String>, Bytes), InvalidRequest> {
    let mut given = context.clone();
    given.retain(|key, _| !POD_KEYS.contains(&key.as_str()));
    let capacity = match given.remove(SIZE) {
        None => DEFAULT_CAPACITY,
        Some(text) => size(&text)?,
    };
    if let Some(key) = ADMINISTRATORS_KEYS.iter().find(|key| given.contains_key(**key)) {
        return Err(InvalidRequest::new(
            FIELD,
            format!(
                "{key} can be set in a StorageClass only: use a generic ephemeral volume of such a class"
            ),
        ));
    }
    match given.insert(PLACEMENT.to_owned(), "local".to_owned()).as_deref() {
        None | Some("local") => {}
        Some(other) => {
            return Err(InvalidRequest::new(
                FIELD,
                format!("{PLACEMENT} is {other:?}: an ephemeral volume lies on its pod's node; leave it out"),
            ));
        }
    }
    let (kept, _) = parameters(&given, std::slice::from_ref(capability))
        .map_err(|e| InvalidRequest::new(FIELD, e.reason))?;
    Ok((kept, capacity))
}

fn size(text: &str) -> Result<Bytes, InvalidRequest> {
    let invalid = |reason: String| InvalidRequest::new(FIELD, format!("{SIZE} {text:?}: {reason}"));
    let bytes: Bytes = text.parse().map_err(|e| invalid(format!("{e}")))?;
    if bytes.is_zero() { Err(invalid("must be more than zero".to_owned())) } else { Ok(bytes) }
}
