//! What the leader orders for one branch now, or why it waits: pure.

use jiff::Timestamp;

use crate::controllers::splitter::is_silent;
use crate::domain::NodeName;
use crate::domain::access::shared::{
    SharedLeaderDecision, SharedLed, SharedWaiting, Sharing, SharingReport, is_shared, shared_leader_step,
};
use crate::domain::access::{Access, Claimant, ExportReport, LeaderDecision, Led, Waiting, leader_step};
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// Nodes that the volume is attached to, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claims {
    pub(super) nodes: Vec<NodeName>,
    /// Those of them that only read.
    pub(super) readers: Vec<NodeName>,
    /// They use it at once; otherwise one at a time.
    pub(super) shared: bool,
}

impl Claims {
    pub(super) fn of(split: &VolumeSplit) -> Self {
        let formats: Vec<_> = split.spec.branches.iter().map(|branch| branch.format).collect();
        let attached = &split.spec.attached;
        let shared = is_shared(attached.iter().map(|a| a.access_mode), &formats);
        let readers =
            attached.iter().filter(|a| a.access_mode.reader_only()).map(|a| a.node.clone()).collect();
        Self { nodes: attached.iter().map(|a| a.node.clone()).collect(), readers, shared }
    }
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
    /// Where its volume is attached.
    pub(super) claims: &'a Claims,
    /// The branch's owner.
    pub(super) owner: &'a NodeName,
    /// As [`owner_down`].
    pub(super) owner_down: Option<&'a str>,
    /// `Branch.spec.access`.
    pub(super) access: Option<&'a Access>,
    /// `Branch.status.export.allowed`.
    pub(super) allowed: Option<&'a Access>,
    /// `Branch.spec.sharing`.
    pub(super) sharing: Option<&'a Sharing>,
    /// `Branch.status.sharing`.
    pub(super) shared: Option<&'a SharingReport>,
}

/// What is to be written into a branch's spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// One node, or nobody, has it alone.
    Access(Access),
    /// These share it.
    Sharing(Sharing),
}

/// What the leader does about a branch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Order(Order),
    /// A sentence: what is waited for.
    Wait(String),
    Settled,
}

impl From<LeaderDecision> for Decision {
    fn from(decision: LeaderDecision) -> Self {
        match decision {
            LeaderDecision::Grant(access) | LeaderDecision::Revoke(access) => {
                Self::Order(Order::Access(access))
            }
            LeaderDecision::Wait(awaited) => Self::Wait(Waiting::to_string(&awaited)),
            LeaderDecision::Settled => Self::Settled,
        }
    }
}

/// Decides: who shares the branch first, since nobody has alone what others share.
pub(super) fn decide(case: &Case<'_>) -> Decision {
    // Kubernetes deletes the VolumeAttachment of a node that is out of service, and the claim goes with it.
    let claimant = |node: &NodeName| {
        let reads = case.claims.readers.contains(node);
        Claimant { node: node.clone(), out_of_service: false, reads }
    };
    let claimants: Vec<Claimant> = case.claims.nodes.iter().map(claimant).collect();
    let report =
        case.allowed.map(|allowed| ExportReport { allowed: allowed.clone(), ..ExportReport::default() });
    let alone = |claimants: &[Claimant]| {
        leader_step(&Led {
            claimants,
            owner: case.owner,
            owner_down: case.owner_down,
            access: case.access,
            report: report.as_ref(),
        })
        .into()
    };
    let shared = shared_leader_step(&SharedLed {
        claimants: &claimants,
        shared: case.claims.shared,
        access: case.access,
        export: report.as_ref(),
        owner: case.owner,
        owner_down: case.owner_down,
        sharing: case.sharing,
        report: case.shared,
    });
    match shared {
        SharedLeaderDecision::Write(sharing) => Decision::Order(Order::Sharing(sharing)),
        SharedLeaderDecision::Wait(awaited) => Decision::Wait(SharedWaiting::to_string(&awaited)),
        SharedLeaderDecision::RevokeFirst => alone(&[]),
        SharedLeaderDecision::Settled if case.claims.shared => Decision::Settled,
        SharedLeaderDecision::Settled => alone(&claimants),
    }
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
    let claims = Claims::of(split);
    let wants = claims.nodes.first()?;
    let down = owner_down(owner.map(|node| node.status.heartbeat), now);
    let case = Case {
        claims: &claims,
        owner: &branch.spec.node,
        owner_down: down.as_deref(),
        access: branch.spec.access.as_ref(),
        allowed: branch.status.export.as_ref().map(|export| &export.allowed),
        sharing: branch.spec.sharing.as_ref(),
        shared: branch.status.sharing.as_ref(),
    };
    match decide(&case) {
        Decision::Wait(awaited) => Some(sentence(&branch.meta.name, wants, &awaited)),
        Decision::Order(_) | Decision::Settled => None,
    }
}

/// What is told of a branch that waits.
pub(super) fn sentence(branch: &str, wants: &NodeName, awaited: &str) -> String {
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
    fn claims_are_in_their_order_and_shared_where_all_are_for_many_nodes() {
        let one = AccessMode::SingleNodeWriter;
        let claims = Claims::of(&split(&[("b", one), ("a", one)]));
        assert_eq!(
            claims,
            Claims { nodes: vec![node("b"), node("a")], readers: Vec::new(), shared: false },
            "in their order"
        );
        for mode in [AccessMode::MultiNodeMultiWriter, AccessMode::MultiNodeReaderOnly] {
            assert!(Claims::of(&split(&[("a", mode)])).shared);
            assert!(!Claims::of(&split(&[("a", mode), ("b", one)])).shared);
        }
    }

    #[test]
    fn who_shares_a_branch_is_ordered_at_once_and_after_whoever_had_it_alone() {
        let both = Claims { nodes: vec![node("b"), node("a")], readers: Vec::new(), shared: true };
        let owner = node("o");
        let case = Case {
            claims: &both,
            owner: &owner,
            owner_down: None,
            access: None,
            allowed: None,
            sharing: None,
            shared: None,
        };
        let order = Sharing { consumers: vec![node("a"), node("b")], readers: Vec::new(), epoch: Epoch(1) };
        assert_eq!(decide(&case), Decision::Order(Order::Sharing(order.clone())));
        let (has, nobody) = (access(Some("c"), 2), access(None, 3));
        let alone = Case { access: Some(&has), allowed: Some(&has), ..case };
        assert_eq!(decide(&alone), Decision::Order(Order::Access(nobody.clone())));
        let fenced = Case { access: Some(&nobody), allowed: Some(&nobody), ..case };
        assert_eq!(decide(&fenced), Decision::Order(Order::Sharing(order.clone())));
        let waits = decide(&Case { sharing: Some(&order), ..case });
        assert!(
            matches!(&waits, Decision::Wait(why) if why.contains("has not opened it to a, b")),
            "{waits:?}"
        );
        // One that wants it alone waits until nobody shares it.
        let one = Claims { nodes: vec![node("c")], readers: Vec::new(), shared: false };
        let ends = Sharing { consumers: Vec::new(), readers: Vec::new(), epoch: Epoch(2) };
        let decision = decide(&Case { claims: &one, sharing: Some(&order), ..case });
        assert_eq!(decision, Decision::Order(Order::Sharing(ends.clone())));
        let waits = decide(&Case { claims: &one, sharing: Some(&ends), ..case });
        assert!(matches!(waits, Decision::Wait(_)), "{waits:?}");
        let told = SharingReport { epoch: Epoch(2), ..SharingReport::default() };
        let decision = decide(&Case { claims: &one, sharing: Some(&ends), shared: Some(&told), ..case });
        assert_eq!(decision, Decision::Order(Order::Access(access(None, 1))), "as if it never was");
    }

    #[test]
    fn a_volume_used_where_its_branches_lie_is_left_alone() {
        let claims = |name: &str| Claims { nodes: vec![node(name)], readers: Vec::new(), shared: false };
        let (here, owner) = (claims("o"), node("o"));
        let case = Case {
            claims: &here,
            owner: &owner,
            owner_down: None,
            access: None,
            allowed: None,
            sharing: None,
            shared: None,
        };
        assert_eq!(decide(&case), Decision::Settled);
        assert_eq!(decide(&Case { claims: &Claims::default(), ..case }), Decision::Settled);
        let shared = Claims { shared: true, ..here.clone() };
        assert_eq!(decide(&Case { claims: &shared, ..case }), Decision::Settled, "by many, who are one");
        let there = claims("a");
        assert_eq!(
            decide(&Case { claims: &there, ..case }),
            Decision::Order(Order::Access(access(None, 1))),
            "its owner may have used it"
        );
    }

    #[test]
    fn a_volume_that_is_attached_nowhere_leaves_its_branches_with_nobody() {
        let owner = node("o");
        let (has, told) = (access(Some("a"), 2), access(Some("a"), 2));
        let case = Case {
            claims: &Claims::default(),
            owner: &owner,
            owner_down: None,
            access: Some(&has),
            allowed: Some(&told),
            sharing: None,
            shared: None,
        };
        assert_eq!(decide(&case), Decision::Order(Order::Access(access(None, 3))));
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
