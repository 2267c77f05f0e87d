//! What the leader orders for one branch now, or why it waits: pure.

use jiff::Timestamp;

use crate::controllers::splitter::is_silent;
use crate::domain::NodeName;
use crate::domain::access::{
    Access, Claimant, ExportReport, LeaderDecision, Led, Waiting as Awaited, leader_step,
};
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// Nodes that the volume is attached to for use by one at a time, the oldest first.
///
/// What many nodes use at once is not governed by orders to one: whoever had the branch before loses it.
pub(super) fn claims(split: &VolumeSplit) -> Vec<NodeName> {
    let exclusive = split.spec.attached.iter().filter(|a| !a.access_mode.multi_node());
    exclusive.map(|a| a.node.clone()).collect()
}

/// Why the owner of a branch is not expected to act. `heartbeat`: when it published last, so far as that is told; `None`:
/// there is no such node.
pub(super) fn owner_down(heartbeat: Option<Option<Timestamp>>, now: Timestamp) -> Option<String> {
    match heartbeat {
        None => Some("there is no StorageNode of that name".to_owned()),
        Some(last) if is_silent(last, now) => {
            last.map(|last| format!("its agent has published nothing since {last:.0}"))
        }
        Some(_) => None,
    }
}

/// What a branch's object and the cluster say about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    /// As [`claims`].
    pub(super) claims: &'a [NodeName],
    /// The branch's owner.
    pub(super) owner: &'a NodeName,
    /// As [`owner_down`].
    pub(super) owner_down: Option<&'a str>,
    /// `Branch.spec.access`.
    pub(super) access: Option<&'a Access>,
    /// `Branch.status.export.allowed`.
    pub(super) allowed: Option<&'a Access>,
}

/// Decides.
pub(super) fn decide(case: &Case<'_>) -> LeaderDecision {
    // Kubernetes deletes the VolumeAttachment of a node that is out of service, and the claim goes with it.
    let claimant = |node: &NodeName| Claimant { node: node.clone(), out_of_service: false };
    let claimants: Vec<Claimant> = case.claims.iter().map(claimant).collect();
    let report =
        case.allowed.map(|allowed| ExportReport { allowed: allowed.clone(), ..ExportReport::default() });
    leader_step(&Led {
        claimants: &claimants,
        owner: case.owner,
        owner_down: case.owner_down,
        access: case.access,
        report: report.as_ref(),
    })
}

/// Why a branch of an attached volume is not used where the volume is; a sentence. `None` where it is, where the next order
/// is to be written at once, and where nobody wants it.
#[must_use]
pub fn waiting(
    split: &VolumeSplit,
    branch: &Branch,
    owner: Option<&StorageNode>,
    now: Timestamp,
) -> Option<String> {
    let claims = claims(split);
    let wants = claims.first()?;
    let down = owner_down(owner.map(|node| node.status.heartbeat), now);
    let case = Case {
        claims: &claims,
        owner: &branch.spec.node,
        owner_down: down.as_deref(),
        access: branch.spec.access.as_ref(),
        allowed: branch.status.export.as_ref().map(|export| &export.allowed),
    };
    match decide(&case) {
        LeaderDecision::Wait(awaited) => Some(sentence(&branch.meta.name, wants, &awaited)),
        LeaderDecision::Grant(_) | LeaderDecision::Revoke(_) | LeaderDecision::Settled => None,
    }
}

/// What is told of a branch that waits.
pub(super) fn sentence(branch: &str, wants: &NodeName, awaited: &Awaited) -> String {
    format!("branch {branch} cannot be used on node {wants} yet: {awaited}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::access::Epoch;
    use crate::domain::volume::AccessMode;
    use crate::store::contract;
    use crate::store::object::Attachment;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn access(consumer: Option<&str>, epoch: u64) -> Access {
        Access { consumer: consumer.map(node), epoch: Epoch(epoch) }
    }

    fn split(attached: &[(&str, AccessMode)]) -> VolumeSplit {
        let attached = attached.iter().map(|(name, mode)| Attachment {
            node: node(name),
            access_mode: *mode,
            read_only: false,
            volume_attachment: None,
        });
        serde_json::from_value(serde_json::json!({
            "meta": {"name": "v"},
            "spec": {"volume": "v", "requestName": "v", "capacity": 1, "accessModes": [],
                     "attached": attached.collect::<Vec<_>>()}
        }))
        .unwrap()
    }

    #[test]
    fn only_attachments_for_one_node_at_a_time_are_claims() {
        let one = AccessMode::SingleNodeWriter;
        assert_eq!(claims(&split(&[("b", one), ("a", one)])), [node("b"), node("a")], "in their order");
        for mode in [AccessMode::MultiNodeMultiWriter, AccessMode::MultiNodeReaderOnly] {
            assert!(claims(&split(&[("a", mode)])).is_empty());
        }
    }

    #[test]
    fn a_volume_used_where_its_branches_lie_is_left_alone() {
        let (here, owner) = ([node("o")], node("o"));
        let case = Case { claims: &here, owner: &owner, owner_down: None, access: None, allowed: None };
        assert_eq!(decide(&case), LeaderDecision::Settled);
        assert_eq!(decide(&Case { claims: &[], ..case }), LeaderDecision::Settled);
        let there = [node("a")];
        assert_eq!(
            decide(&Case { claims: &there, ..case }),
            LeaderDecision::Revoke(access(None, 1)),
            "its owner may have used it"
        );
    }

    #[test]
    fn a_volume_that_is_attached_nowhere_leaves_its_branches_with_nobody() {
        let owner = node("o");
        let (has, told) = (access(Some("a"), 2), access(Some("a"), 2));
        let case =
            Case { claims: &[], owner: &owner, owner_down: None, access: Some(&has), allowed: Some(&told) };
        assert_eq!(decide(&case), LeaderDecision::Revoke(access(None, 3)));
    }

    #[test]
    fn whoever_looks_is_told_which_node_must_answer_and_why_it_does_not() {
        let now: Timestamp = "2026-01-02T03:00:00Z".parse().unwrap();
        let mut branch = contract::branch("v", 0, "o");
        branch.spec.access = Some(access(None, 3));
        branch.status.export =
            Some(ExportReport { allowed: access(Some("a"), 2), ..ExportReport::default() });
        let attached = split(&[("b", AccessMode::SingleNodeWriter)]);
        let mut owner: StorageNode = serde_json::from_value(serde_json::json!({
            "meta": {"name": "o"}, "spec": {"node": "o"}, "status": {"heartbeat": "2026-01-02T02:59:00Z"}
        }))
        .unwrap();
        let told = |owner: Option<&StorageNode>| waiting(&attached, &branch, owner, now).unwrap();
        let lively = told(Some(&owner));
        assert!(
            lively.starts_with("branch v-0 cannot be used on node b yet: node a may still write"),
            "{lively}"
        );
        assert!(!lively.contains("does not answer"), "{lively}");
        owner.status.heartbeat = Some("2026-01-02T02:30:00Z".parse().unwrap());
        let silent = told(Some(&owner));
        assert!(silent.contains("published nothing since 2026-01-02T02:30:00Z"), "{silent}");
        assert!(told(None).contains("there is no StorageNode of that name"));
        assert_eq!(waiting(&split(&[]), &branch, Some(&owner), now), None, "nobody wants it");
        branch.spec.access = Some(access(Some("b"), 4));
        branch.status.export =
            Some(ExportReport { allowed: access(Some("b"), 4), ..ExportReport::default() });
        assert_eq!(
            waiting(&attached, &branch, Some(&owner), now),
            None,
            "it has it, whatever its owner does"
        );
    }
}
