//! From where a branch can be reached, for one request.

use std::cell::Cell;

use super::Rejection;
use crate::domain::NodeName;
use crate::domain::reach::{Attaches, Network, NodeReach, Transport, Unreachable, reachable};
use crate::domain::split::{BranchFormat, Request, Sharing};

/// What is known of the way from a branch to whoever uses it.
#[derive(Debug)]
pub(super) struct Paths<'a> {
    network: &'a Network,
    to: To<'a>,
    /// Branches must be exported, also those on the node that is known to use the volume: others will use it too.
    exported: bool,
    /// The owner that was asked for last: pools come node by node.
    owner: Cell<Option<&'a NodeReach>>,
}

/// Who uses the volume.
#[derive(Debug)]
enum To<'a> {
    /// This node, which can attach so.
    Node(&'a NodeName, Attaches),
    /// A node without pools that can attach so.
    Remote(Attaches),
    /// Not known yet: whether some, and whether all, of those who may can attach by NVMe and by NFS.
    Unknown { nvme: Those, nfs: Those },
}

/// How many of the nodes that may use a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Those {
    None,
    Some,
    All,
}

impl<'a> Paths<'a> {
    pub(super) fn new(network: &'a Network, request: &'a Request) -> Self {
        let to = match &request.consumer {
            Some(node) => To::Node(node, network.node(node).map(NodeReach::attaches).unwrap_or_default()),
            None => To::Unknown {
                nvme: those(network, request, Transport::NvmeTcp),
                nfs: those(network, request, Transport::Nfs),
            },
        };
        let exported = request.sharing != Sharing::Exclusive;
        Self { network, to, exported, owner: Cell::new(None) }
    }

    pub(super) fn to_remote(network: &'a Network, attaches: Attaches) -> Self {
        Self { network, to: To::Remote(attaches), exported: false, owner: Cell::new(None) }
    }

    /// The format, where a branch of it on `owner` reaches whoever uses the volume, or somebody who may.
    pub(super) fn check<'v>(
        &self,
        owner: &NodeName,
        format: BranchFormat,
    ) -> Result<BranchFormat, Rejection<'v>> {
        if self.of(owner, format) == Those::None {
            Err(Rejection::OutOfReach(self.obstacle(owner, format)))
        } else {
            Ok(format)
        }
    }

    /// Whether it reaches whoever uses the volume, and everybody who may. An image goes to one node at a time, and where
    /// it is carried to is told with the volume; for it somebody is enough.
    pub(super) fn reaches_all(&self, owner: &NodeName, format: BranchFormat) -> bool {
        match format {
            BranchFormat::Image => self.of(owner, format) != Those::None,
            BranchFormat::Directory => self.of(owner, format) == Those::All,
        }
    }

    /// Why a format that somebody reaches is not taken by itself.
    pub(super) fn not_all<'v>(&self, format: BranchFormat) -> Rejection<'v> {
        let transport = Transport::between_nodes(format);
        Rejection::OutOfReach(Unreachable::NotEveryConsumer { transport })
    }

    fn of(&self, owner: &NodeName, format: BranchFormat) -> Those {
        let transport = Transport::between_nodes(format);
        let owns = || self.known(owner).is_some_and(|node| node.owns(transport));
        let all_if = |reached| if reached { Those::All } else { Those::None };
        match &self.to {
            To::Node(consumer, _) if *consumer == owner => all_if(!self.exported || owns()),
            To::Node(_, attaches) | To::Remote(attaches) => all_if(attaches.by(transport) && owns()),
            To::Unknown { nvme, nfs } => {
                let those = if transport == Transport::NvmeTcp { *nvme } else { *nfs };
                if those != Those::None && owns() { those } else { Those::None }
            }
        }
    }

    fn known(&self, owner: &NodeName) -> Option<&'a NodeReach> {
        if let Some(last) = self.owner.get()
            && last.node == *owner
        {
            return Some(last);
        }
        let known = self.network.node(owner);
        self.owner.set(known);
        known
    }

    fn obstacle(&self, owner: &NodeName, format: BranchFormat) -> Unreachable {
        let transport = Transport::between_nodes(format);
        let known = |name: &NodeName| {
            self.network.node(name).cloned().unwrap_or_else(|| NodeReach::silent(name.clone()))
        };
        let found = match &self.to {
            To::Node(consumer, _) if *consumer != owner => {
                reachable(&known(owner), &known(consumer), format).map(|_| ())
            }
            To::Node(..) | To::Remote(_) | To::Unknown { .. } => known(owner).can_own(transport),
        };
        found.err().unwrap_or(Unreachable::NoConsumer { transport })
    }
}

/// How many of the nodes that may use the volume can attach by the transport.
fn those(network: &Network, request: &Request, transport: Transport) -> Those {
    let (mut able, mut all) = (0_usize, 0_usize);
    let mut count = |node: Option<&NodeReach>| {
        all += 1;
        able += usize::from(node.is_some_and(|node| node.consumes(transport)));
    };
    if request.topology.is_empty() {
        network.nodes().for_each(|node| count(Some(node)));
    } else {
        request.topology.iter().for_each(|name| count(network.node(name)));
    }
    match able {
        0 => Those::None,
        able if able == all => Those::All,
        _ => Those::Some,
    }
}
