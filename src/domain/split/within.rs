//! Plans over nodes of which it is known what they can carry.
//!
//! Where the consumer is known, a branch lies where that node reaches it. Where it is not, it lies where some node that may
//! become the consumer reaches it, so that the volume is not bound to one; a volume that does not fit so may still lie on
//! one node as a whole, and is used there. Where no node reaches another, volumes lie on one node.
//!
//! A volume that several nodes may use at once is made of directories, because an image goes to one node at a time. One
//! that several may write has one branch: two nodes could make one path on two branches, and one file would hide the
//! other. Where nobody reaches such a branch, it is refused, unless its class keeps volumes on one node: whoever asks for it
//! counts on several nodes. One for readers lies on one node then, and is read there by as many pods as like.

use std::borrow::Cow;

use super::planner::Planner;
use super::space::Overhead;
use super::{Capacity, Infeasible, Plan, Reach, Request, Sharing};
use crate::domain::Bytes;
use crate::domain::placement::Scope;
use crate::domain::policy::{FormatChoice, Placement, Policy};
use crate::domain::pool::PoolView;
use crate::domain::reach::{Network, NodeReach, Transport};
use crate::domain::volume::VolumeMode;

/// A question with what the nodes can carry.
pub(super) struct Within<'a, O> {
    overhead: &'a O,
    request: &'a Request,
    pools: Vec<&'a PoolView>,
    first: Attempt<'a>,
    second: Option<Attempt<'a>>,
    /// Why there is no such volume, whatever room there is.
    barred: Option<String>,
}

/// A way to answer it.
struct Attempt<'a> {
    policy: Cow<'a, Policy>,
    scope: Scope<'a>,
}

impl<'a, O: Overhead> Within<'a, O> {
    pub(super) fn new(
        overhead: &'a O,
        request: &'a Request,
        policy: &'a Policy,
        pools: Vec<&'a PoolView>,
        network: &'a Network,
    ) -> Self {
        let so = |scope| Attempt { policy: Cow::Borrowed(policy), scope };
        let carried = |transports: &[Transport]| {
            transports.iter().any(|transport| carries(network, request, *transport))
        };
        let tied = policy.placement == Placement::Local || request.reach == Reach::OneNode;
        let images = request.mode == VolumeMode::Block || policy.format == FormatChoice::Image;
        let (first, second) = if tied {
            (so(Scope::All), None)
        } else if !carried(transports(request.mode, policy)) {
            (so(Scope::Isolated(network)), None)
        } else if request.sharing == Sharing::Exclusive {
            let alone = request.consumer.is_none().then(|| so(Scope::Isolated(network)));
            (so(Scope::Network(network)), alone)
        } else if images || !carried(&[Transport::Nfs]) {
            (so(Scope::Shared), None)
        } else {
            let mut policy = Policy { format: FormatChoice::Directory, ..policy.clone() };
            let writers = request.sharing == Sharing::ManyWriters;
            if writers {
                policy.max_branches = 1;
            }
            let shared = Attempt { policy: Cow::Owned(policy), scope: Scope::Network(network) };
            (shared, (!writers).then(|| so(Scope::Shared)))
        };
        let writers = request.sharing == Sharing::ManyWriters && !tied;
        let barred = writers.then(|| no_writers(request, policy, network)).flatten();
        Self { overhead, request, pools, first, second, barred }
    }

    pub(super) fn plan(&self) -> Result<Plan, Infeasible> {
        if let Some(reason) = self.barred.clone() {
            let (requested, largest, pools) = (self.request.size, Bytes::ZERO, Vec::new());
            return Err(Infeasible { requested, largest, reason, pools });
        }
        let first = self.planner(&self.first);
        if let Some(plan) = first.found() {
            return Ok(plan);
        }
        let Some(second) = &self.second else { return Err(first.refuse(first.largest())) };
        let second = self.planner(second);
        if let Some(plan) = second.found() {
            return Ok(plan);
        }
        // Why what came nearest was not enough.
        let (most, on_one) = (first.largest(), second.largest());
        Err(if on_one > most { second.refuse(on_one) } else { first.refuse(most) })
    }

    pub(super) fn capacity(&self) -> Capacity {
        if self.barred.is_some() {
            return Capacity::default();
        }
        let first = self.planner(&self.first).capacity();
        let Some(second) = &self.second else { return first };
        let second = self.planner(second).capacity();
        let least = [first, second].map(|capacity| capacity.minimum_volume_size).into_iter();
        Capacity {
            total: first.total.max(second.total),
            maximum_volume_size: first.maximum_volume_size.max(second.maximum_volume_size),
            minimum_volume_size: least.filter(|size| !size.is_zero()).min().unwrap_or(Bytes::ZERO),
        }
    }

    fn planner<'b>(&'b self, attempt: &'b Attempt<'_>) -> Planner<'b, O> {
        let pools = self.pools.iter().copied();
        Planner::within(self.overhead, self.request, &attempt.policy, pools, attempt.scope)
    }
}

/// The transports that may carry branches of such a volume.
pub(super) const fn transports(mode: VolumeMode, policy: &Policy) -> &'static [Transport] {
    match (mode, policy.format) {
        (VolumeMode::Block, _) | (VolumeMode::Filesystem, FormatChoice::Image) => &[Transport::NvmeTcp],
        (VolumeMode::Filesystem, FormatChoice::Directory) => &[Transport::Nfs],
        (VolumeMode::Filesystem, FormatChoice::Auto) => &[Transport::NvmeTcp, Transport::Nfs],
    }
}

/// Why no volume can be made that several nodes write, by the class or because no two nodes reach each other so.
fn no_writers(request: &Request, policy: &Policy, network: &Network) -> Option<String> {
    let anybody = Request { consumer: None, ..request.clone() };
    policy.writers_refusal(request.mode).or_else(|| {
        (!carries(network, &anybody, Transport::Nfs)).then(|| {
            "several nodes write one directory by NFS, and no node reaches that of another so (StorageNode \
             status.transports says why): use ReadWriteOnce, which serves all pods of a node, or a class with placement local"
                .to_owned()
        })
    })
}

/// Whether some node reaches branches of another by the transport, among those that may use the volume.
fn carries(network: &Network, request: &Request, transport: Transport) -> bool {
    let consumes = |node: &&NodeReach| node.consumes(transport);
    // Two of each tell whether there are two nodes for the two ends.
    let consumers: Vec<&NodeReach> = match (&request.consumer, request.topology.as_slice()) {
        (Some(consumer), _) => network.node(consumer).into_iter().filter(consumes).collect(),
        (None, []) => network.nodes().filter(consumes).take(2).collect(),
        (None, some) => some.iter().filter_map(|name| network.node(name)).filter(consumes).take(2).collect(),
    };
    if consumers.is_empty() {
        return false;
    }
    let owners = network.nodes().filter(|node| node.owns(transport)).take(2);
    owners.into_iter().any(|owner| consumers.iter().any(|consumer| consumer.node != owner.node))
}
