//! A cluster: agents in three machines, on one real API server that runs beside them, and what plays the kubelets.
//!
//! Real are the API server, etcd, kube-controller-manager (claims are bound and volumes deleted by it), the agents with
//! the rights of `deploy/`, their kernels, their disks and the network between them. Played by the tests are the kubelet (its
//! CSI calls, by `inside csi`; a pod is a process in a mount namespace of its own), the scheduler (claims are `Immediate`, or
//! are given their node) and the attach-detach controller (the tests make and delete VolumeAttachments).
//!
//! A machine reaches the API server by a second card, on a network of QEMU's own on which there is nothing but that one port,
//! at the address that a service `kubernetes` has: the server itself listens on the host's loopback.

mod apiserver;
mod kubelet;
mod objects;
mod shared;

use std::fmt::Debug;
use std::thread;
use std::time::{Duration, Instant};

use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{Branch, StorageNode, VolumeSplit};
use union_csi::store::{Selector, Store};

use super::{Machine, Network, Options, Result};
use apiserver::ApiServer;
pub use kubelet::{Agent, Node, QUOTA_POOL, signal_agent};
#[allow(unused_imports, reason = "some tests name them")]
pub use objects::{Claim, Volume};
pub(super) use shared::end_if_idle;
pub use shared::on_cluster;

/// The namespace of the driver's own objects, as in `deploy/`.
pub const NAMESPACE: &str = "union";

/// What a step of a test's cluster takes at most: machines in software emulation, four of which may share a processor.
pub const BOUND: Duration = Duration::from_secs(180);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(300);

/// How many machines have a pool.
const POOLS: usize = 3;

/// Of each pool's disk.
pub const POOL: u64 = 512 << 20;

/// How large a cluster is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Machines.
    pub machines: usize,
    /// Memory of each.
    pub memory_mib: u32,
    /// Bytes of the disk of each machine's pool.
    pub pool: u64,
    /// What a step takes at most.
    pub step_bound: Duration,
}

/// Machines with agents, and their API server.
pub struct Cluster {
    /// Tests cut links and pull plugs here.
    pub net: Network,
    step_bound: Duration,
    runtime: tokio::runtime::Runtime,
    client: Client,
    // Ends after the machines.
    server: ApiServer,
}

impl Cluster {
    /// Three machines whose agents are ready, each with one pool.
    fn boot() -> Result<Self> {
        Self::boot_with(POOLS)
    }

    /// That many, of which those beyond the third have no pool.
    pub fn boot_with(machines: usize) -> Result<Self> {
        Self::boot_as(Size { machines, memory_mib: 400, pool: POOL, step_bound: BOUND })
    }

    /// As [`Cluster::boot_with`], of another size.
    pub fn boot_as(size: Size) -> Result<Self> {
        let begun = Instant::now();
        let server = ApiServer::start();
        server.install();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(server.client());
        let mut options = Options::new(size.machines).memory_mib(size.memory_mib);
        options.disks = vec![("data".to_owned(), size.pool), ("state".to_owned(), 256 << 20)];
        options.arguments = server.card();
        let net = Network::boot_as("cluster", &options)?;
        let cluster = Self { net, step_bound: size.step_bound, runtime, client, server };
        let machines = begun.elapsed();
        if let Err(error) = cluster.begin() {
            cluster.report();
            return Err(error);
        }
        eprintln!("cluster: machines up after {machines:.0?}, agents ready after {:.0?}", begun.elapsed());
        Ok(cluster)
    }

    fn begin(&self) -> Result {
        for (index, node) in self.nodes().into_iter().enumerate() {
            self.add_node(node.name());
            node.prepare(&self.server.kubeconfig_of_agents())?;
            if index >= POOLS {
                node.configure(Agent::WithoutPool)?;
            }
            node.start_agent()?;
        }
        for node in self.nodes() {
            node.ready()?;
            self.join(node.name(), &node.info()?);
        }
        Ok(())
    }

    /// All of them.
    pub fn nodes(&self) -> Vec<Node<'_>> {
        self.net.machines().iter().map(|machine| Node { machine }).collect()
    }

    /// One of them.
    pub fn node(&self, name: &str) -> Node<'_> {
        Node { machine: self.net.machine(name) }
    }

    pub(super) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    fn store(&self) -> KubernetesStore {
        KubernetesStore::new(self.client.clone(), NAMESPACE, "union-csi-tests")
    }

    /// The driver's own objects: volumes.
    pub fn splits(&self) -> Vec<VolumeSplit> {
        self.block_on(self.store().splits().list(&Selector::All)).expect("volumes")
    }

    /// Branches.
    pub fn branches(&self) -> Vec<Branch> {
        self.block_on(self.store().branches().list(&Selector::All)).expect("branches")
    }

    /// What the nodes report.
    pub fn storage_nodes(&self) -> Vec<StorageNode> {
        self.block_on(self.store().nodes().list(&Selector::All)).expect("nodes")
    }

    /// What `probe` finds, within the bound.
    ///
    /// # Panics
    /// When it finds nothing.
    pub fn within<T>(&self, bound: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + bound;
        loop {
            if let Some(found) = probe() {
                return found;
            }
            assert!(Instant::now() < end, "NOT WITHIN {bound:?}: {what}");
            thread::sleep(PAUSE);
        }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::ClusterResourceScope>,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    fn named<K>(&self) -> Api<K>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    fn create<K>(&self, api: &Api<K>, object: Value) -> K
    where
        K: Resource + Clone + Debug + Serialize + DeserializeOwned,
        K::DynamicType: Default,
    {
        let object: K = serde_json::from_value(object).expect("an object");
        self.block_on(api.create(&Default::default(), &object)).expect("the object is taken")
    }

    /// Nothing of any volume is left, in the cluster or on any node that is on.
    pub fn is_clean(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> = self.splits().iter().map(|s| format!("volume {}", s.meta.name)).collect();
        left.extend(self.branches().iter().map(|b| format!("branch {}", b.meta.name)));
        for node in self.nodes() {
            left.extend(node.left()?.into_iter().map(|line| format!("{}: {line}", node.name())));
        }
        Ok(left)
    }

    /// Waits until nothing is left.
    ///
    /// # Panics
    /// With what is left.
    pub fn comes_clean(&self) -> Result {
        let end = Instant::now() + BOUND;
        loop {
            let left = self.is_clean()?;
            if left.is_empty() {
                return Ok(());
            }
            assert!(Instant::now() < end, "LEFT BEHIND:\n{}", left.join("\n"));
            thread::sleep(PAUSE);
        }
    }

    /// The driver's objects, the VolumeAttachments and the events, for people.
    pub fn objects(&self) -> String {
        let kinds = "volumesplits,branches,storagenodes,volumeattachments,leases,events";
        match self.server.try_kubectl(&["get", kinds, "-A", "-o", "yaml"], None) {
            Ok(text) | Err(text) => text,
        }
    }

    /// Prints what tells why a test failed.
    pub fn report(&self) {
        for kinds in ["volumesplits,branches,storagenodes", "events"] {
            eprintln!("--- {kinds}");
            match self.server.try_kubectl(
                &["get", kinds, "-A", "-o", if kinds == "events" { "wide" } else { "yaml" }],
                None,
            ) {
                Ok(text) | Err(text) => eprintln!("{text}"),
            }
        }
        for node in self.nodes() {
            eprintln!("--- agent on {}", node.name());
            match node.machine.attempt(Duration::from_secs(20), format!("tail -n 80 {}", kubelet::LOG)) {
                Ok(output) => eprintln!("{}", output.text()),
                Err(error) => eprintln!("{error:?}"),
            }
        }
    }

    /// Stops the API server's processor, or lets it go on.
    pub fn pause_api(&self, pause: bool) {
        self.server.pause(pause);
    }

    /// Runs kubectl with all rights.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.server.kubectl(arguments)
    }

    /// One of the machines.
    pub fn machine(&self, name: &str) -> &Machine {
        self.net.machine(name)
    }
}

impl Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("net", &self.net).finish_non_exhaustive()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            self.report();
        }
    }
}
