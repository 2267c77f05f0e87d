//! What staging a volume takes, decided from its objects alone.

use std::collections::BTreeMap;
use std::time::Duration;

use super::error::VolumeError;
use super::flags;
use super::types::{Access, StageRequest};
use crate::domain::NodeName;
use crate::domain::policy::{OnBranchLoss, Policy};
use crate::domain::split::BranchFormat;
use crate::domain::union::{UnionKind, choose};
use crate::domain::volume::VolumeMode;
use crate::store::object::{Branch, BranchPhase, BranchSpec, VolumeSplit};

/// What is to be attached and joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StagePlan {
    /// By what.
    pub(super) kind: UnionKind,
    /// The branches, in the union's order.
    pub(super) branches: Vec<BranchSpec>,
    /// Options that the class gives MergerFS.
    pub(super) options: BTreeMap<String, String>,
    /// `onBranchLoss`.
    pub(super) on_branch_loss: OnBranchLoss,
    /// `branchTimeout`.
    pub(super) branch_timeout: Duration,
    /// Group that shall be able to write at the root.
    pub(super) group: Option<u32>,
}

/// What this node brings.
pub(super) struct Here<'a> {
    /// Its name.
    pub(super) node: &'a NodeName,
    /// Whether overlayfs works here.
    pub(super) overlay: bool,
}

/// Decides how the volume is staged.
///
/// # Errors
/// [`VolumeError::Request`] where it cannot be staged like this, [`VolumeError::Incomplete`] where it cannot be now.
pub(super) fn plan(
    request: &StageRequest,
    split: &VolumeSplit,
    branches: &[Branch],
    here: &Here<'_>,
) -> Result<StagePlan, VolumeError> {
    let volume = &request.volume;
    let refuse = |reason: String| VolumeError::Request { volume: volume.clone(), reason };
    if split.meta.deleting.is_some() {
        return Err(refuse("it is being deleted".to_owned()));
    }
    let block = match (&request.access, split.spec.volume_mode) {
        (Access::Mount { flags, .. }, VolumeMode::Filesystem) => {
            flags::parse(flags).map_err(refuse)?;
            false
        }
        (Access::Block, VolumeMode::Block) => true,
        (Access::Mount { .. }, VolumeMode::Block) => {
            return Err(refuse("it was created as a block volume: use it as one".to_owned()));
        }
        (Access::Block, VolumeMode::Filesystem) => {
            return Err(refuse("it was created with a filesystem: mount it".to_owned()));
        }
    };
    let specs = usable(request, split, branches, here.node)?;
    if block && (specs.len() != 1 || specs.iter().any(|b| b.format != BranchFormat::Image)) {
        return Err(refuse(
            "a block volume must be one image branch: create it with maxBranches=1 and branchFormat=image"
                .to_owned(),
        ));
    }
    let policy = Policy::parse(&split.spec.parameters).map_err(|e| {
        refuse({
            let faults = e.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            format!("its parameters are not understood by this version: {faults}")
        })
    })?;
    let kind =
        choose(&[request.access_mode], specs.len(), split.spec.volume_mode, policy.union, here.overlay);
    let group = match request.access {
        Access::Mount { group, .. } => group,
        Access::Block => None,
    };
    Ok(StagePlan {
        kind,
        branches: specs,
        options: policy.mergerfs,
        on_branch_loss: policy.on_branch_loss,
        branch_timeout: policy.branch_timeout,
        group,
    })
}

/// The planned branches, if all can be used on this node now.
fn usable(
    request: &StageRequest,
    split: &VolumeSplit,
    branches: &[Branch],
    node: &NodeName,
) -> Result<Vec<BranchSpec>, VolumeError> {
    let volume = &request.volume;
    let incomplete = |reason: String| VolumeError::Incomplete { volume: volume.clone(), reason };
    if split.spec.branches.is_empty() {
        return Err(incomplete("it is not split into branches yet; see its Pending condition".to_owned()));
    }
    let mut specs = Vec::with_capacity(split.spec.branches.len());
    let mut missing = Vec::new();
    for planned in &split.spec.branches {
        let id = volume.branch(planned.index);
        if planned.node != *node {
            return Err(VolumeError::Request {
                volume: volume.clone(),
                reason: format!(
                    "its branch {id} lies on node {}, and branches are reached on their own node only: use the volume \
                     there, and create volumes with placement=local",
                    planned.node
                ),
            });
        }
        match branches.iter().find(|b| b.spec.id == id) {
            Some(branch) if branch.status.phase == BranchPhase::Bound => specs.push(branch.spec.clone()),
            Some(branch) if branch.status.reason.is_empty() => {
                missing.push(format!("branch {id} is {:?}", branch.status.phase));
            }
            Some(branch) => {
                missing.push(format!("branch {id} is {:?}: {}", branch.status.phase, branch.status.reason));
            }
            None => missing.push(format!("branch {id} is not made yet")),
        }
    }
    if !missing.is_empty() {
        return Err(incomplete(missing.join("; ")));
    }
    specs.sort_by_key(|b| b.index);
    Ok(specs)
}
