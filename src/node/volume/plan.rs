//! What staging a volume takes, decided from its objects alone.

use std::collections::BTreeMap;
use std::time::Duration;

use super::error::VolumeError;
use super::flags;
use super::types::{Access, StageRequest};
use crate::domain::NodeName;
use crate::domain::policy::{FsType, OnBranchLoss, Policy, UnionMode};
use crate::domain::split::BranchFormat;
use crate::domain::union::{UnionKind, choose};
use crate::domain::volume::VolumeMode;
use crate::store::object::{Branch, BranchPhase, BranchSpec, VolumeSplit};

/// What is to be attached and joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StagePlan {
    /// By what.
    pub(super) kind: UnionKind,
    /// The branches, in the union's order: this node's first.
    pub(super) branches: Vec<BranchSpec>,
    /// Some of them lie on other nodes.
    pub(super) remote: bool,
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
    let remote = specs.iter().any(|b| b.node != *here.node);
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
    // The kernel does not mount a btrfs while it has one of the same UUID mounted, be it dead: what workloads have of it
    // could not be exchanged. Nobody but a MergerFS that was ended holds it.
    let held = remote && specs.iter().any(|b| b.node != *here.node && b.fs_type == Some(FsType::Btrfs));
    let union = if held { UnionMode::Always } else { policy.union };
    let overlay = here.overlay && !held;
    let kind = choose(&[request.access_mode], specs.len(), split.spec.volume_mode, union, overlay);
    let group = match request.access {
        Access::Mount { group, .. } => group,
        Access::Block => None,
    };
    Ok(StagePlan {
        kind,
        branches: specs,
        remote,
        options: policy.mergerfs,
        on_branch_loss: policy.on_branch_loss,
        branch_timeout: policy.branch_timeout,
        group,
    })
}

/// The planned branches, if all exist.
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
    specs.sort_by_key(|b| (b.node != *node, b.index));
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Bytes;
    use crate::domain::split::PlannedBranch;
    use crate::domain::volume::AccessMode;
    use crate::store::object::{BranchStatus, Meta, VolumeSplitSpec, VolumeSplitStatus};

    fn objects(formats: &[BranchFormat]) -> (StageRequest, VolumeSplit, Vec<Branch>) {
        let volume: crate::domain::VolumeId = "vol".parse().unwrap();
        let node: NodeName = "node-a".parse().unwrap();
        let planned: Vec<_> = (0..)
            .zip(formats)
            .map(|(index, &format)| PlannedBranch {
                index,
                node: node.clone(),
                pool: "pool".parse().unwrap(),
                size: Bytes::gib(1),
                usable: Bytes::gib(1),
                format,
                fs_type: None,
            })
            .collect();
        let branches = planned.iter().rev().map(|p| Branch {
            meta: Meta::new(volume.branch(p.index).as_str()),
            spec: BranchSpec {
                id: volume.branch(p.index),
                volume: volume.clone(),
                index: p.index,
                node: node.clone(),
                pool: p.pool.clone(),
                size: p.size,
                usable: p.usable,
                format: p.format,
                fs_type: None,
                thin: false,
                accept_unenforced: false,
                write_through: true,
                encrypted: false,
                access: None,
                sharing: None,
            },
            status: BranchStatus { phase: BranchPhase::Bound, ..BranchStatus::default() },
        });
        let branches = branches.collect();
        let split = VolumeSplit {
            meta: Meta::new("vol"),
            spec: VolumeSplitSpec {
                volume: volume.clone(),
                request_name: "vol".to_owned(),
                capacity: Bytes::gib(1),
                limit: None,
                access_modes: vec![AccessMode::SingleNodeWriter],
                volume_mode: VolumeMode::Filesystem,
                parameters: BTreeMap::new(),
                consumer: None,
                topology: Vec::new(),
                ephemeral: false,
                next_index: 0,
                branches: planned,
                attached: Vec::new(),
                used: false,
            },
            status: VolumeSplitStatus::default(),
        };
        let request = StageRequest {
            volume,
            staging: "/mnt/staging".into(),
            access_mode: AccessMode::SingleNodeWriter,
            access: Access::Mount { flags: Vec::new(), group: Some(7) },
        };
        (request, split, branches)
    }

    fn planned(
        request: &StageRequest,
        split: &VolumeSplit,
        branches: &[Branch],
    ) -> Result<StagePlan, VolumeError> {
        let node = "node-a".parse().unwrap();
        plan(request, split, branches, &Here { node: &node, overlay: true })
    }

    const IMAGE: BranchFormat = BranchFormat::Image;

    #[test]
    fn branches_are_joined_in_their_order_with_the_options_of_the_class() {
        let (request, mut split, branches) = objects(&[IMAGE, BranchFormat::Directory, IMAGE]);
        split.spec.parameters.insert("onBranchLoss".to_owned(), "readOnly".to_owned());
        let plan = planned(&request, &split, &branches).unwrap();
        assert_eq!(plan.kind, UnionKind::Mergerfs);
        assert_eq!(plan.branches.iter().map(|b| b.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!((plan.on_branch_loss, plan.group), (OnBranchLoss::ReadOnly, Some(7)));
    }

    #[test]
    fn the_mode_of_this_use_decides_what_joins_them() {
        let (mut request, split, branches) = objects(&[IMAGE, IMAGE]);
        request.access_mode = AccessMode::SingleNodeReaderOnly;
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Overlay);
        let (request, split, branches) = objects(&[IMAGE]);
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Bind);
    }

    #[test]
    fn a_block_volume_is_one_image() {
        let (mut request, mut split, branches) = objects(&[IMAGE]);
        split.spec.volume_mode = VolumeMode::Block;
        request.access = Access::Block;
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Block);
        let (_, mut split, branches) = objects(&[IMAGE, IMAGE]);
        split.spec.volume_mode = VolumeMode::Block;
        assert!(matches!(planned(&request, &split, &branches), Err(VolumeError::Request { .. })));
    }

    #[test]
    fn a_volume_whose_branches_are_not_all_bound_waits() {
        let (request, split, mut branches) = objects(&[IMAGE, IMAGE]);
        branches[0].status.phase = BranchPhase::Lost;
        branches[0].status.reason = "its pool is absent".to_owned();
        let error = planned(&request, &split, &branches).unwrap_err().to_string();
        assert!(error.contains("vol-1 is Lost: its pool is absent"), "{error}");
        branches.remove(0);
        let error = planned(&request, &split, &branches).unwrap_err();
        assert!(matches!(error, VolumeError::Incomplete { .. }), "{error}");
        let (request, mut split, _) = objects(&[]);
        assert!(matches!(planned(&request, &split, &[]), Err(VolumeError::Incomplete { .. })));
        split.meta.deleting = Some(jiff::Timestamp::UNIX_EPOCH);
        assert!(matches!(planned(&request, &split, &[]), Err(VolumeError::Request { .. })));
    }

    fn elsewhere(split: &mut VolumeSplit, branches: &mut [Branch], index: u32) {
        let node: NodeName = "node-b".parse().unwrap();
        for planned in split.spec.branches.iter_mut().filter(|b| b.index == index) {
            planned.node = node.clone();
        }
        for branch in branches.iter_mut().filter(|b| b.spec.index == index) {
            branch.spec.node = node.clone();
        }
    }

    #[test]
    fn branches_of_this_node_come_first() {
        let (request, mut split, mut branches) = objects(&[IMAGE, IMAGE, IMAGE]);
        assert!(!planned(&request, &split, &branches).unwrap().remote);
        elsewhere(&mut split, &mut branches, 0);
        let plan = planned(&request, &split, &branches).unwrap();
        assert_eq!(plan.branches.iter().map(|b| b.index).collect::<Vec<_>>(), [1, 2, 0]);
        assert!(plan.remote);
        branches.iter_mut().find(|b| b.spec.index == 0).unwrap().status.phase = BranchPhase::Pending;
        assert!(matches!(planned(&request, &split, &branches), Err(VolumeError::Incomplete { .. })));
    }

    #[test]
    fn one_branch_elsewhere_is_bound_unless_the_kernel_could_not_mount_it_again() {
        let (mut request, mut split, mut branches) = objects(&[IMAGE]);
        elsewhere(&mut split, &mut branches, 0);
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Bind);
        branches[0].spec.fs_type = Some(FsType::Btrfs);
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Mergerfs);
        let (_, mut split, mut branches) = objects(&[IMAGE, IMAGE]);
        request.access_mode = AccessMode::SingleNodeReaderOnly;
        elsewhere(&mut split, &mut branches, 1);
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Overlay);
        branches.iter_mut().for_each(|b| b.spec.fs_type = Some(FsType::Btrfs));
        assert_eq!(planned(&request, &split, &branches).unwrap().kind, UnionKind::Mergerfs);
    }
}
