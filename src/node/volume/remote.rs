//! Branches on other nodes: which export to attach, decided from what the store and the kernel tell.

use std::net::SocketAddr;

use snafu::Snafu;

use super::record::Remote;
use crate::domain::access::shared::{SharedConsuming, Sharing, SharingReport, governs, shared_consumer_step};
use crate::domain::access::{
    Access, ConsumerDecision, Consuming, ExportReport, Generation, Held, NotYet, consumer_step,
};
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName};
use crate::node::branch::BranchError;
use crate::node::keys::KeyError;
use crate::node::transport::TransportError;
use crate::platform::HostError;
use crate::store::Pair;
use crate::store::object::{Branch, BranchPhase, BranchSpec, EXPORTED, condition};

/// What the store said last of who may use a branch, and how it is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Order {
    /// `Branch.spec.access`.
    pub(super) access: Option<Access>,
    /// `Branch.status.export`.
    pub(super) report: Option<ExportReport>,
    /// `Branch.spec.sharing`.
    pub(super) sharing: Option<Sharing>,
    /// `Branch.status.sharing`.
    pub(super) shared: Option<SharingReport>,
    /// `Branch.status.fsUuid`.
    pub(super) fs_uuid: Option<String>,
    /// Why its owner cannot open it, if it said so.
    pub(super) hindered: Option<String>,
    /// The disk that it lies on takes no writes, as its owner said: `Branch.status.reason` of one that is bound.
    pub(super) refuses_writes: bool,
}

impl Order {
    /// What the object says.
    pub(super) fn of(branch: &Branch) -> Self {
        Self {
            access: branch.spec.access.clone(),
            report: branch.status.export.clone(),
            sharing: branch.spec.sharing.clone(),
            shared: branch.status.sharing.clone(),
            fs_uuid: branch.status.fs_uuid.clone(),
            hindered: condition(&branch.status.conditions, EXPORTED)
                .filter(|exported| !exported.status)
                .map(|exported| exported.message.clone()),
            refuses_writes: branch.status.phase == BranchPhase::Bound && !branch.status.reason.is_empty(),
        }
    }
}

impl Order {
    /// Several nodes have the branch, not one alone.
    pub(super) fn is_shared(&self) -> bool {
        governs(self.sharing.as_ref(), None, false)
    }
}

/// Why a branch could not be attached.
#[derive(Debug, Snafu)]
pub(super) enum AttachError {
    /// A branch of this node.
    #[snafu(display("{source}"))]
    Here {
        /// Why.
        source: BranchError,
    },
    /// It was not given to this node yet, or not opened to it.
    #[snafu(display("branch {branch}: {reason}"))]
    NotYet {
        /// The branch.
        branch: BranchId,
        /// What it waits for; a sentence.
        reason: String,
    },
    /// Its owner is not reached, or refuses, or this node cannot.
    #[snafu(display("branch {branch} of node {node}: {source}"))]
    Transport {
        /// The branch.
        branch: BranchId,
        /// Its owner.
        node: NodeName,
        /// Why.
        source: TransportError,
    },
    /// What both nodes prove to each other cannot be used.
    #[snafu(display("branch {branch}: {source}"))]
    Key {
        /// The branch.
        branch: BranchId,
        /// Why; it names both nodes.
        source: KeyError,
    },
    /// It is encrypted, and there is no key for that.
    #[snafu(display(
        "branch {branch} is to be encrypted on the network, and there is no key for {pair} that does: detach the volumes between \
         the two nodes, and attach them anew"
    ))]
    Plain {
        /// The branch.
        branch: BranchId,
        /// Whose key lacks.
        pair: Pair,
    },
    /// What was attached cannot be mounted as it is. Nothing was changed, and it was detached again.
    #[snafu(display("branch {branch} of node {node} is not mounted: {reason}"))]
    Filesystem {
        /// The branch.
        branch: BranchId,
        /// Its owner.
        node: NodeName,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// The machine refused something.
    #[snafu(display("branch {branch}: cannot {action}: {source}"))]
    Host {
        /// The branch.
        branch: BranchId,
        /// What was to be done.
        action: &'static str,
        /// Why it failed.
        source: HostError,
    },
}

impl AttachError {
    /// True where the branch is only waited for: it is not this node's to use yet.
    pub(super) const fn passes(&self) -> bool {
        matches!(self, Self::NotYet { .. } | Self::Here { source: BranchError::Elsewhere { .. } })
    }
}

/// What is to be attached, after what was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Aim {
    /// What is to be attached.
    pub(super) remote: Remote,
    /// Generations that are attached here and are of another time.
    pub(super) end: Vec<Generation>,
}

/// Decides what to attach of a branch of another node that a volume here needs. `known` is what is on record, `held` what the
/// kernel has; without an `order` (the store was not read yet) what is on record holds.
pub(super) fn aim(
    node: &NodeName,
    spec: &BranchSpec,
    order: Option<&Order>,
    known: Option<&Remote>,
    held: &[Generation],
) -> Result<Aim, AttachError> {
    let not_yet = |reason: String| AttachError::NotYet { branch: spec.id.clone(), reason };
    let Some(order) = order else {
        let Some(known) = known else {
            return Err(not_yet(
                "nothing is known of who may use it: the store has not answered yet".to_owned(),
            ));
        };
        let end = held.iter().copied().filter(|g| *g != known.generation).collect();
        return Ok(Aim { remote: known.clone(), end });
    };
    let epoch = |generation| known.filter(|k| k.generation == generation).map(|k| k.epoch);
    let mut held: Vec<_> =
        held.iter().map(|&generation| Held { generation, epoch: epoch(generation) }).collect();
    let mut end = Vec::new();
    let owner = &spec.node;
    let waits = || {
        let closed = NotYet::Opened { owner: owner.clone() };
        not_yet(match &order.hindered {
            Some(reason) => format!("{closed}: {reason}"),
            None => closed.to_string(),
        })
    };
    loop {
        let decision = decide(node, spec, order, &held);
        match decision {
            ConsumerDecision::ForceDetach(generation) | ConsumerDecision::Detach(generation) => {
                end.push(generation);
                held.retain(|h| h.generation != generation);
            }
            ConsumerDecision::Wait(NotYet::Opened { .. }) => return Err(waits()),
            ConsumerDecision::Wait(reason) => return Err(not_yet(reason.to_string())),
            ConsumerDecision::Attach { generation, .. } => {
                let remote = opened(node, order).filter(|r| r.generation == generation).ok_or_else(waits)?;
                return Ok(Aim { remote, end });
            }
            ConsumerDecision::Settled | ConsumerDecision::AttachHere | ConsumerDecision::DetachHere => {
                let kept = held.first().map(|h| h.generation);
                let of = |remote: &Remote| Some(remote.generation) == kept;
                let remote = opened(node, order).filter(of).or_else(|| known.filter(|k| of(k)).cloned());
                return Ok(Aim { remote: remote.ok_or_else(waits)?, end });
            }
        }
    }
}

/// Why what is attached of a branch must not be used any more, if so.
pub(super) fn outdated(
    node: &NodeName,
    spec: &BranchSpec,
    order: Option<&Order>,
    attached: &Remote,
    answers: bool,
) -> Option<String> {
    let order = order?;
    let held = [Held { generation: attached.generation, epoch: Some(attached.epoch) }];
    if let ConsumerDecision::ForceDetach(_) = decide(node, spec, order, &held) {
        if order.is_shared() {
            return Some("it is shared by others, and was taken from this node".to_owned());
        }
        let newer = order.report.as_ref().map(|r| r.generation).filter(|g| *g > attached.generation);
        let holder = order.access.as_ref().and_then(|a| a.consumer.as_ref());
        return Some(match (holder, newer) {
            (Some(holder), _) if holder != node => format!("it was given to node {holder}"),
            (None, _) => "it was taken from this node".to_owned(),
            (Some(_), Some(generation)) => {
                format!("node {} opened it anew, as generation {generation}", spec.node)
            }
            (Some(_), None) => "it was taken from this node and given to it anew".to_owned(),
        });
    }
    let moved = opened(node, order).filter(|now| {
        now.generation == attached.generation
            && (now.address != attached.address || now.transport != attached.transport)
    });
    moved.filter(|_| !answers).map(|now| format!("node {} is reached at {} now", spec.node, now.address))
}

/// What to do about a branch, by the rules for one node alone or for those who share it.
fn decide(node: &NodeName, spec: &BranchSpec, order: &Order, held: &[Held]) -> ConsumerDecision {
    if order.is_shared() {
        return shared_consumer_step(&SharedConsuming {
            node,
            owner: &spec.node,
            needed: true,
            sharing: order.sharing.as_ref(),
            report: order.shared.as_ref(),
            held,
            here: false,
            mark: None,
        });
    }
    // What is attached from when the branch was shared is of a generation before any that one node has alone.
    let shared = order.shared.as_ref().map(|report| report.generation);
    if let Some(old) = held.iter().find(|held| Some(held.generation) == shared) {
        return ConsumerDecision::ForceDetach(old.generation);
    }
    consumer_step(&Consuming {
        node,
        owner: &spec.node,
        needed: true,
        access: order.access.as_ref(),
        report: order.report.as_ref(),
        held,
        here: false,
        mark: None,
    })
}

/// The export, where it is open to `node` under the present order.
fn opened(node: &NodeName, order: &Order) -> Option<Remote> {
    if order.is_shared() {
        let (sharing, report) = (order.sharing.as_ref()?, order.shared.as_ref()?);
        let named = |node: &NodeName| report.consumers.iter().any(|sharer| sharer.node == *node);
        return (sharing.consumers.contains(node) && named(node)).then_some(Remote {
            transport: Transport::Nfs,
            address: report.address.as_ref()?.parse::<SocketAddr>().ok()?,
            name: report.name.clone()?,
            generation: report.generation,
            epoch: report.epoch,
            fs_uuid: order.fs_uuid.clone(),
        });
    }
    let (access, report) = (order.access.as_ref()?, order.report.as_ref()?);
    if report.allowed != *access || access.consumer.as_ref() != Some(node) {
        return None;
    }
    Some(Remote {
        transport: report.transport?,
        address: report.address.as_ref()?.parse::<SocketAddr>().ok()?,
        name: report.name.clone()?,
        generation: report.generation,
        epoch: access.epoch,
        fs_uuid: order.fs_uuid.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::Bytes;
    use crate::domain::access::Epoch;
    use crate::domain::access::shared::Sharer;
    use crate::domain::split::BranchFormat;

    fn node(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn spec() -> BranchSpec {
        BranchSpec {
            id: "vol-0".parse().unwrap(),
            volume: "vol".parse().unwrap(),
            index: 0,
            node: node("owner"),
            pool: "pool".parse().unwrap(),
            size: Bytes::gib(1),
            usable: Bytes::gib(1),
            format: BranchFormat::Image,
            fs_type: None,
            thin: false,
            accept_unenforced: false,
            write_through: true,
            encrypted: false,
            access: None,
            sharing: None,
        }
    }

    fn access(consumer: &str, epoch: u64) -> Access {
        Access { consumer: Some(node(consumer)), epoch: Epoch(epoch) }
    }

    fn order(wanted: Access, allowed: Access, generation: u64) -> Order {
        let report = ExportReport {
            generation: Generation(generation),
            address: Some("10.0.0.1:4420".to_owned()),
            name: Some("nqn".to_owned()),
            transport: Some(Transport::NvmeTcp),
            allowed,
            boot_id: "boot".to_owned(),
        };
        let fs_uuid = Some("uuid".to_owned());
        Order { access: Some(wanted), report: Some(report), fs_uuid, ..Order::default() }
    }

    fn granted(epoch: u64, generation: u64) -> Order {
        order(access("me", epoch), access("me", epoch), generation)
    }

    fn attached(epoch: u64, generation: u64) -> Remote {
        opened(&node("me"), &granted(epoch, generation)).unwrap()
    }

    fn aimed(order: Option<&Order>, known: Option<&Remote>, held: &[u64]) -> Result<(u64, Vec<u64>), String> {
        let held: Vec<_> = held.iter().map(|&g| Generation(g)).collect();
        aim(&node("me"), &spec(), order, known, &held)
            .map(|aim| (aim.remote.generation.0, aim.end.iter().map(|g| g.0).collect()))
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_branch_is_attached_when_it_was_given_and_opened() {
        assert_eq!(aimed(Some(&granted(3, 7)), None, &[]), Ok((7, vec![])));
        let given = order(access("me", 3), Access::default(), 0);
        assert!(aimed(Some(&given), None, &[]).unwrap_err().ends_with("has not opened it to this node yet"));
        let hindered = Order { hindered: Some("its port is taken".to_owned()), ..given };
        assert!(
            aimed(Some(&hindered), None, &[]).unwrap_err().ends_with("to this node yet: its port is taken")
        );
        let other = order(access("other", 3), access("other", 3), 7);
        assert!(aimed(Some(&other), None, &[]).unwrap_err().contains("given to node other"));
        assert!(aimed(None, None, &[]).unwrap_err().contains("store"));
        assert!(aimed(Some(&Order::default()), None, &[]).unwrap_err().contains("nobody"));
    }

    #[test]
    fn what_is_attached_already_stays_and_what_is_of_another_time_ends_first() {
        let known = attached(3, 7);
        assert_eq!(aimed(Some(&granted(3, 7)), Some(&known), &[7]), Ok((7, vec![])));
        assert_eq!(aimed(Some(&granted(3, 8)), Some(&known), &[7]), Ok((8, vec![7])));
        assert_eq!(aimed(Some(&granted(5, 9)), Some(&known), &[6, 7]), Ok((9, vec![6, 7])));
        assert_eq!(aimed(Some(&granted(3, 7)), None, &[7]), Ok((7, vec![])), "left by an earlier agent");
    }

    /// A branch that these share.
    fn shared(nodes: &[&str], epoch: u64, told: u64, since: u64, generation: u64) -> Order {
        let consumers: Vec<_> = nodes.iter().map(|name| node(name)).collect();
        let sharer = |node: &NodeName| Sharer {
            node: node.clone(),
            identity: None,
            read_only: false,
            since: Epoch(since),
        };
        let report = SharingReport {
            generation: Generation(generation),
            address: Some("10.0.0.1:2049".to_owned()),
            name: Some(format!("/vol-0@{generation}")),
            consumers: consumers.iter().map(sharer).collect(),
            epoch: Epoch(told),
            boot_id: "boot".to_owned(),
        };
        let sharing = Sharing { consumers, readers: Vec::new(), epoch: Epoch(epoch) };
        Order { sharing: Some(sharing), shared: Some(report), ..Order::default() }
    }

    #[test]
    fn a_shared_branch_is_attached_with_others_kept_through_their_changes_and_ended_with_its_right() {
        let both = shared(&["me", "other"], 2, 2, 2, 1);
        assert_eq!(aimed(Some(&both), None, &[]), Ok((1, vec![])));
        let known = opened(&node("me"), &both).unwrap();
        assert_eq!(known.transport, Transport::Nfs);
        let alone = shared(&["me"], 3, 3, 2, 1);
        assert_eq!(aimed(Some(&alone), Some(&known), &[1]), Ok((1, vec![])), "the other left");
        let told = |order: &Order| outdated(&node("me"), &spec(), Some(order), &known, true);
        assert_eq!(told(&alone), None);
        assert!(told(&shared(&["other"], 3, 2, 2, 1)).unwrap().contains("taken from this node"));
        assert!(told(&shared(&["me"], 4, 4, 4, 1)).is_some(), "fenced in between");
        let waits = aimed(Some(&shared(&["other"], 3, 3, 2, 1)), None, &[]).unwrap_err();
        assert!(waits.contains("shared by other nodes"), "{waits}");
        // One has it alone from now on.
        let mut then = granted(3, 7);
        then.sharing = Some(Sharing { consumers: Vec::new(), readers: Vec::new(), epoch: Epoch(4) });
        then.shared = shared(&[], 4, 4, 0, 1).shared;
        assert_eq!(aimed(Some(&then), Some(&known), &[1]), Ok((7, vec![1])));
        assert!(told(&then).is_some());
    }

    #[test]
    fn without_the_store_what_is_on_record_holds() {
        let known = attached(3, 7);
        assert_eq!(aimed(None, Some(&known), &[]), Ok((7, vec![])));
        assert_eq!(aimed(None, Some(&known), &[6, 7]), Ok((7, vec![6])));
    }

    #[test]
    fn a_report_without_an_address_is_none() {
        let mut order = granted(3, 7);
        for address in [None, Some("nonsense".to_owned())] {
            order.report.as_mut().unwrap().address = address;
            assert!(aimed(Some(&order), None, &[]).unwrap_err().contains("has not opened it"));
        }
    }

    #[test]
    fn what_must_not_be_used_any_more_says_why() {
        let known = attached(3, 7);
        let told = |order: &Order, answers| outdated(&node("me"), &spec(), Some(order), &known, answers);
        assert_eq!(told(&granted(3, 7), true), None);
        assert_eq!(told(&granted(2, 6), true), None, "old objects change nothing");
        assert!(told(&granted(3, 8), true).unwrap().contains("generation 8"));
        let other = order(access("other", 4), access("me", 3), 7);
        assert!(told(&other, true).unwrap().contains("node other"));
        let nobody = order(Access { consumer: None, epoch: Epoch(4) }, access("me", 3), 7);
        assert!(told(&nobody, true).unwrap().contains("taken"));
        assert!(told(&granted(5, 7), true).unwrap().contains("anew"));
        let mut moved = granted(3, 7);
        moved.report.as_mut().unwrap().address = Some("10.0.0.9:4420".to_owned());
        assert_eq!(told(&moved, true), None, "what answers is not disturbed");
        assert!(told(&moved, false).unwrap().contains("10.0.0.9"));
        assert_eq!(outdated(&node("me"), &spec(), None, &known, false), None);
    }
}
