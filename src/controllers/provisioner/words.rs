//! What events say.

use std::fmt::Write as _;

use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::store::object::{Condition, VolumeSplit};

/// Branches that are named one by one: an event is read on a screen.
const MOST: usize = 16;

/// A split in words: `2 branches on node n1: a 4Gi, b 2Gi`.
pub(super) fn branches(branches: &[PlannedBranch]) -> String {
    let mut nodes: Vec<&str> = branches.iter().map(|b| b.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let several = nodes.len() > 1;
    let mut text = match branches.len() {
        1 => "1 branch".to_owned(),
        n => format!("{n} branches"),
    };
    // Writing to a String cannot fail.
    let _ = match nodes.as_slice() {
        [node] => write!(text, " on node {node}"),
        nodes => write!(text, " on {} nodes", nodes.len()),
    };
    for (at, branch) in branches.iter().take(MOST).enumerate() {
        text.push_str(if at == 0 { ": " } else { ", " });
        if several {
            let _ = write!(text, "{}/", branch.node);
        }
        let _ = write!(text, "{} {}", branch.pool, branch.size.human());
        if branch.format == BranchFormat::Image {
            text.push_str(" (image)");
        }
    }
    if let Some(more) = branches.len().checked_sub(MOST).filter(|more| *more > 0) {
        let _ = write!(text, ", and {more} more");
    }
    text
}

/// Why nothing fits, with the largest size that would.
pub(super) fn infeasible(split: &VolumeSplit, told: &Condition) -> String {
    let place = match &split.spec.consumer {
        Some(node) => format!("no room on node {node}: "),
        None => String::new(),
    };
    let largest = match split.status.largest {
        Some(largest) if largest.is_zero() => "; no volume of any size would fit now".to_owned(),
        Some(largest) if !told.message.contains(&largest.shown()) => {
            format!("; the largest volume that fits now is {}", largest.shown())
        }
        _ => String::new(),
    };
    format!("{place}{}{largest}", told.message)
}

/// How far a volume has come.
pub(super) fn progress(split: &VolumeSplit) -> String {
    if split.spec.branches.is_empty() {
        return "it is not planned yet".to_owned();
    }
    format!(
        "{} of {} branches are made ({})",
        split.status.bound_replicas,
        split.spec.branches.len(),
        branches(&split.spec.branches)
    )
}
