//! Room: what fits is bound, what does not says why, and nobody gets what is another's.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde_json::json;
use union_csi::domain::Bytes;
use union_csi::domain::policy::Policy;
use union_csi::domain::pool::PoolView;
use union_csi::domain::split::{Plan, Reach, Request, Sharing, plan};
use union_csi::domain::volume::VolumeMode;
use union_csi::store::object::BranchPhase;
use union_csi::store::view::pool_views;

use crate::support::{PodOf, World, ctl, is_bound, kubectl, node_here, nodes};

#[test]
fn a_claim_that_is_too_large_says_why_and_binds_by_itself_when_a_pool_is_added() {
    let world = World::alone();
    let class = world.class("now", "Immediate", json!({}));
    let size = Bytes::gib(9);
    world.claim("data", &class, "9Gi");
    let told = world.told("PersistentVolumeClaim", "data", &["9Gi", "the largest volume that fits"]);
    // On one node there are 6 GiB, in all 18: the transports are why, and the event says so.
    assert!(told.contains("one node"), "{told}");
    let node = nodes()[0].clone();
    ctl(&["pool", &node_here(&node), "added=12G:xfs"]);
    world.bound("data");
    let split = world.volume_of("data");
    assert!(split.status.capacity >= size);
    assert!(split.spec.branches.iter().all(|b| b.node.as_str() == node), "{:?}", split.spec.branches);
}

#[test]
fn a_pod_whose_volume_fits_on_no_node_says_so_and_its_claim_waits() {
    let world = World::shared();
    world.claim("data", "union", "50Ti");
    world.run(PodOf::new("pod").with_claim("data"));
    // By the scheduler, once it knows of the class's room (CSIStorageCapacity); else by the provisioner.
    world.eventually("it is told", || {
        let scheduler =
            world.events("Pod", "pod").iter().any(|e| e.contains("did not have enough free storage"));
        let provisioner = world.events("PersistentVolumeClaim", "data").iter().any(|e| e.contains("largest"));
        (scheduler || provisioner).then_some(())
    });
    let claim = world.get::<PersistentVolumeClaim>("data").expect("the claim");
    assert!(!is_bound(&claim));
}

#[test]
fn of_a_hundred_claims_at_once_exactly_those_that_fit_are_bound_and_the_rest_follows() {
    const CLAIMS: usize = 100;
    const FIT: usize = 60;
    let world = World::alone();
    let (size, fit) = size_for(&world.room(), FIT);
    let class = world.class("now", "Immediate", parameters());
    let names: Vec<String> = (0..CLAIMS).map(|n| format!("data-{n:03}")).collect();
    let claims: Vec<String> = names
        .iter()
        .map(|name| {
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": world.namespace},
                "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
                         "resources": {"requests": {"storage": size.to_string()}}},
            })
            .to_string()
        })
        .collect();
    crate::support::try_kubectl(&["create", "-f", "-"], Some(&claims.join("\n---\n"))).expect("100 claims");
    let bound = |world: &World| -> Vec<String> {
        let claims = world.list::<PersistentVolumeClaim>();
        claims.into_iter().filter(is_bound).filter_map(|c| c.metadata.name).collect()
    };
    world.eventually(&format!("{fit} of {CLAIMS} claims are bound"), || {
        (bound(&world).len() >= fit).then_some(())
    });
    // What cannot be bound says so.
    world.eventually("all others are told why", || {
        let waiting = world.splits().iter().filter(|s| s.status.largest.is_some()).count();
        (waiting == CLAIMS - fit).then_some(())
    });
    let first = bound(&world);
    assert_eq!(first.len(), fit, "not one more than fits");
    world.assert_nothing_oversubscribed();
    for name in &first[..10] {
        world.delete::<PersistentVolumeClaim>(name);
    }
    world.eventually("ten of those that waited are bound in their place", || {
        (bound(&world).iter().filter(|name| !first.contains(name)).count() >= 10).then_some(())
    });
    assert_eq!(bound(&world).iter().filter(|name| !first.contains(name)).count(), 10);
    world.assert_nothing_oversubscribed();
    kubectl(&["delete", "pvc", "--all", "-n", &world.namespace, "--timeout=80s"]);
    world.eventually("nothing is left of any of them", || {
        (world.splits().is_empty() && world.branches().is_empty()).then_some(())
    });
}

fn parameters() -> serde_json::Value {
    json!({"maxBranches": "1", "splitQuantum": "1Mi"})
}

/// A size of which so many volumes fit, as nearly as there is one, and how many of it do: the product's own planner on the
/// cluster's own pools, one volume after the other.
fn size_for(pools: &[PoolView], wanted: usize) -> (Bytes, usize) {
    let given: BTreeMap<String, String> = serde_json::from_value(parameters()).expect("parameters");
    let policy = Policy::parse(&given).expect("valid parameters");
    let fit = |size: Bytes| -> usize {
        let mut pools = pools.to_vec();
        let request = Request {
            size,
            limit: None,
            mode: VolumeMode::Filesystem,
            consumer: None,
            topology: Vec::new(),
            reach: Reach::OneNode,
            sharing: Sharing::Exclusive,
        };
        let mut count = 0;
        while let Ok(Plan { branches, .. }) = plan(&request, &policy, &pools) {
            count += 1;
            for branch in branches {
                let pool = pools
                    .iter_mut()
                    .find(|v| v.node == branch.node && v.pool.name == branch.pool)
                    .expect("a planned pool");
                let left = pool.pool.allocatable().saturating_sub(branch.size);
                pool.pool.allocatable = Some(left);
            }
        }
        count
    };
    let (mut low, mut high) = (1_u64, 1 << 20);
    while low + 1 < high {
        let middle = u64::midpoint(low, high);
        if fit(Bytes::mib(middle)) >= wanted { low = middle } else { high = middle }
    }
    (Bytes::mib(low), fit(Bytes::mib(low)))
}

impl World {
    /// All pools with what can be promised of them.
    fn room(&self) -> Vec<PoolView> {
        pool_views(&self.storage_nodes(), &self.splits(), &self.branches())
    }

    /// No pool has promised more than it has, by the objects and on the disks.
    pub fn assert_nothing_oversubscribed(&self) {
        let mut promised: BTreeMap<(String, String), u64> = BTreeMap::new();
        for branch in self.branches() {
            if branch.status.phase == BranchPhase::Bound {
                let pool = (branch.spec.node.to_string(), branch.spec.pool.to_string());
                *promised.entry(pool).or_default() += branch.spec.size.get();
            }
        }
        for node in self.storage_nodes() {
            for pool in &node.status.pools {
                let key = (node.spec.node.to_string(), pool.name.to_string());
                let sum = promised.get(&key).copied().unwrap_or_default();
                let most = pool.total.get().saturating_sub(pool.reserve.get());
                assert!(sum <= most, "{key:?}: {sum} bytes are promised of {most}");
            }
        }
    }
}
