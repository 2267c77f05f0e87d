//! Plans over nodes of which it is known what they can carry.
//!
//! Where the consumer is known, a branch lies where that node reaches it. Where it is not, it lies where some node that may
//! become the consumer reaches it, so that the volume is not bound to one; a volume that does not fit so may still lie on
//! one node as a whole, and is used there.

use super::planner::Planner;
use super::space::Overhead;
use super::{Capacity, Infeasible, Plan, Reach, Request};
use crate::domain::Bytes;
use crate::domain::policy::Policy;
use crate::domain::pool::PoolView;
use crate::domain::reach::Network;

/// A question with what the nodes can carry.
pub(super) struct Within<'a, O> {
    pub(super) overhead: &'a O,
    pub(super) request: &'a Request,
    pub(super) policy: &'a Policy,
    pub(super) pools: Vec<&'a PoolView>,
    pub(super) network: &'a Network,
}

impl<O: Overhead> Within<'_, O> {
    pub(super) fn plan(&self) -> Result<Plan, Infeasible> {
        let over = self.over();
        if let Some(plan) = over.found() {
            return Ok(plan);
        }
        let Some(request) = self.on_one_node() else { return Err(over.refuse(over.largest())) };
        let one = self.one(&request);
        one.found().ok_or_else(|| over.refuse(over.largest().max(one.largest())))
    }

    pub(super) fn capacity(&self) -> Capacity {
        let over = self.over().capacity();
        let Some(request) = self.on_one_node() else { return over };
        let one = self.one(&request).capacity();
        let least = [over, one].map(|capacity| capacity.minimum_volume_size).into_iter();
        Capacity {
            total: over.total.max(one.total),
            maximum_volume_size: over.maximum_volume_size.max(one.maximum_volume_size),
            minimum_volume_size: least.filter(|size| !size.is_zero()).min().unwrap_or(Bytes::ZERO),
        }
    }

    fn over(&self) -> Planner<'_, O> {
        let pools = self.pools.iter().copied();
        Planner::within(self.overhead, self.request, self.policy, pools, Some(self.network))
    }

    fn one<'b>(&'b self, request: &'b Request) -> Planner<'b, O> {
        Planner::new(self.overhead, request, self.policy, self.pools.iter().copied())
    }

    /// The same request for one node, where that is another question.
    fn on_one_node(&self) -> Option<Request> {
        (self.request.consumer.is_none() && self.request.reach == Reach::AnyNode)
            .then(|| Request { reach: Reach::OneNode, ..self.request.clone() })
    }
}
