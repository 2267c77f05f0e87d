//! Part `objects`: what a leader and a plain agent take where there are ten thousand volumes and a thousand nodes.
//!
//! The objects are made through the API; their nodes do not exist. The two agents are real, of the release build, in every
//! role, with a kubeconfig. The first makes the volumes' statuses as it would have over the years, and is started
//! anew before it is measured, while each of the thousand nodes reports as often as a real one does.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolume, PersistentVolumeClaim};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use union_csi::domain::{Bytes, NodeName, VolumeId};
use union_csi::store::kubernetes::{KubernetesStore, crds};
use union_csi::store::object::{Branch, FINALIZER, StorageNode, VolumeSplit, condition};
use union_csi::store::{Selector, Store};

use super::support::kubectl;
use super::{Rows, number, process, program};

/// Requests at the same time; more do not make an API server on four cores faster.
const PARALLEL: usize = 48;

/// A step takes no longer, unless something is wrong.
const BOUND: Duration = Duration::from_secs(240);

const POOLS: u64 = 4;

/// How often a node says that it is there, in seconds.
const HEARTBEAT: u64 = 300;

#[allow(clippy::cast_precision_loss, reason = "seconds and MiB")]
pub async fn run(rows: &mut Rows) {
    let (volumes, nodes) = (number("BENCH_OBJECTS", 10_000), number("BENCH_NODES", 1_000));
    let client = Client::try_default().await.expect("a client");
    prepare(&client).await;
    let store = KubernetesStore::new(client.clone(), "union", "bench");
    let directory = tempfile::tempdir().unwrap();

    let begun = Instant::now();
    each(nodes, |n| make_node(&store, n)).await;
    each(volumes, |v| make_volume(&client, &store, v, nodes)).await;
    eprintln!("{volumes} volumes and {nodes} nodes made in {:.0} s", begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    let agent = Agent::start(directory.path(), "a");
    settled(&store, volumes).await;
    rows.add(
        &format!("A leader's first sight of {volumes} volumes: their statuses written"),
        &format!("{:.0} s, peak {:.0} MiB", begun.elapsed().as_secs_f64(), agent.mib("VmHWM:")),
        "",
        None,
        json!({"seconds": begun.elapsed().as_secs_f64(), "peakMiB": agent.mib("VmHWM:")}),
    );
    drop(agent);

    let leader = Agent::start(directory.path(), "a");
    leads(&client, "agent-a").await;
    let other = Agent::start(directory.path(), "b");
    // Until all lists are read.
    let mut before = -1.0;
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        let now = leader.cpu();
        if now - before < 0.15 {
            break;
        }
        before = now;
    }
    eprintln!("the leader has read everything with {before:.1} s of processor time");
    let seconds = number("BENCH_SECONDS", 120).min(60);
    let (cpu, begun) = ((leader.cpu(), other.cpu()), Instant::now());
    let mut ticks = tokio::time::interval(Duration::from_secs_f64(HEARTBEAT as f64 / nodes as f64));
    let mut node = 0;
    while begun.elapsed() < Duration::from_secs(seconds) {
        ticks.tick().await;
        beat(&store, node % nodes).await;
        node += 1;
    }
    let share = |before: f64, now: f64| 100.0 * (now - before) / begun.elapsed().as_secs_f64();
    for (agent, name, most, before) in
        [(&leader, "Leader", 150.0, cpu.0), (&other, "Agent that does not lead", 32.0, cpu.1)]
    {
        let (now, peak, share) = (agent.mib("VmRSS:"), agent.mib("VmHWM:"), share(before, agent.cpu()));
        rows.add(
            &format!("{name} with {volumes} volumes on {nodes} nodes"),
            &format!("{now:.1} MiB (peak {peak:.1}), {share:.2} % of a core"),
            &format!("< {most:.0} MiB"),
            Some(now < most),
            json!({"mib": now, "peakMiB": peak, "anonymousMiB": agent.mib("RssAnon:"), "core%": share}),
        );
    }
}

/// Definitions and the namespace.
async fn prepare(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in crds() {
        definitions.create(&PostParams::default(), &definition).await.expect("the definition is taken");
    }
    kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"]);
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let namespace = serde_json::from_value(json!({"metadata": {"name": "union"}})).unwrap();
    namespaces.create(&PostParams::default(), &namespace).await.expect("the namespace is taken");
}

async fn each<F: Future<Output = ()>>(count: u64, make: impl Fn(u64) -> F) {
    stream::iter(0..count).map(make).buffer_unordered(PARALLEL).collect::<()>().await;
}

fn node_name(n: u64) -> NodeName {
    format!("node-{n:04}").parse().unwrap()
}

async fn make_node(store: &KubernetesStore, n: u64) {
    let name = node_name(n);
    let object = json!({"meta": {"name": name}, "spec": {"node": name}});
    let created: StorageNode = serde_json::from_value(object).unwrap();
    let mut created = store.nodes().create(created).await.expect("the node is taken");
    let pools: Vec<Value> = (0..POOLS)
        .map(|p| {
            json!({
                "name": format!("disk{p}"), "path": format!("/srv/union/disk{p}"), "state": "Ready",
                "device": format!("sd{p}"), "filesystem": "xfs",
                "total": 4_u64 << 40, "free": 3_u64 << 40, "occupied": 1_u64 << 36,
            })
        })
        .collect();
    let status = json!({
        "labels": {
            "beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
            "node.kubernetes.io/instance-type": "m5.xlarge", "topology.kubernetes.io/region": "r",
            "topology.kubernetes.io/zone": format!("r-{}", n % 3),
        },
        "pools": pools, "agentVersion": "0.1.0", "mergerfsVersion": "2.42.0", "kernel": "6.18.0",
        "heartbeat": Timestamp::now(), "conditions": [],
    });
    created.status = serde_json::from_value(status).unwrap();
    store.nodes().update_status(created).await.expect("the node's status is taken");
}

/// A claim, its PersistentVolume, its volume with one or two branches, and these.
async fn make_volume(client: &Client, store: &KubernetesStore, v: u64, nodes: u64) {
    let uid = uuid::Uuid::from_u128(u128::from(v) + (1 << 100)).to_string();
    let id: VolumeId = format!("pvc-{uid}").parse().unwrap();
    let node = node_name(v % nodes);
    let count = 1 + v / nodes % 2;
    let size = Bytes::gib(10);
    let planned: Vec<Value> = (0..count)
        .map(|i| {
            json!({
                "index": i, "node": node, "pool": format!("disk{}", (v / nodes + i) % POOLS),
                "size": size, "usable": size, "format": "directory",
            })
        })
        .collect();
    let split = json!({
        "meta": {"name": id, "labels": {"union.io/claim": uid}, "finalizers": [FINALIZER]},
        "spec": {
            "volume": id, "requestName": id, "capacity": size.get() * count, "accessModes": ["SingleNodeWriter"],
            "parameters": {
                "strategy": "fewest",
                "csi.storage.k8s.io/pvc/name": format!("data-{v}"),
                "csi.storage.k8s.io/pvc/namespace": "default",
            },
            "consumer": node, "branches": planned, "nextIndex": count, "used": true,
        },
    });
    let split: VolumeSplit = serde_json::from_value(split).unwrap();
    store.splits().create(split).await.expect("the volume is taken");
    for (i, planned) in planned.into_iter().enumerate() {
        let branch = id.branch(u32::try_from(i).unwrap());
        let mut spec = planned;
        spec["id"] = json!(branch);
        spec["volume"] = json!(id);
        let object = json!({"meta": {"name": branch, "finalizers": [FINALIZER]}, "spec": spec});
        let object: Branch = serde_json::from_value(object).unwrap();
        let mut created = store.branches().create(object).await.expect("the branch is taken");
        created.status = serde_json::from_value(json!({
            "phase": "Bound", "bytesUsed": 1_u64 << 30, "enforcement": "ProjectQuota",
        }))
        .unwrap();
        store.branches().update_status(created).await.expect("the branch's status is taken");
    }
    claim(client, v, &uid, size.get() * count).await;
}

/// The claim and the PersistentVolume, bound to each other.
async fn claim(client: &Client, v: u64, uid: &str, size: u64) {
    let (name, volume) = (format!("data-{v}"), format!("pvc-{uid}"));
    let storage = json!({"storage": size.to_string()});
    let claim = json!({
        "metadata": {
            "name": name, "finalizers": ["kubernetes.io/pvc-protection"],
            "annotations": {
                "pv.kubernetes.io/bind-completed": "yes", "pv.kubernetes.io/bound-by-controller": "yes",
                "volume.kubernetes.io/storage-provisioner": "union.csi.union.io",
                "volume.beta.kubernetes.io/storage-provisioner": "union.csi.union.io",
            },
        },
        "spec": {
            "storageClassName": "union", "accessModes": ["ReadWriteOnce"], "volumeName": volume,
            "resources": {"requests": storage},
        },
    });
    let claims: Api<PersistentVolumeClaim> = Api::default_namespaced(client.clone());
    let claim = serde_json::from_value(claim).unwrap();
    claims.create(&PostParams::default(), &claim).await.expect("the claim is taken");
    let object = json!({
        "metadata": {
            "name": volume,
            "finalizers": ["kubernetes.io/pv-protection", "external-provisioner.volume.kubernetes.io/finalizer"],
            "annotations": {"pv.kubernetes.io/provisioned-by": "union.csi.union.io"},
        },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "capacity": storage, "storageClassName": "union",
            "persistentVolumeReclaimPolicy": "Delete",
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "default", "name": name, "uid": uid},
            "csi": {"driver": "union.csi.union.io", "volumeHandle": volume},
        },
    });
    let volumes: Api<PersistentVolume> = Api::all(client.clone());
    let object = serde_json::from_value(object).unwrap();
    volumes.create(&PostParams::default(), &object).await.expect("the PersistentVolume is taken");
    let bound = Patch::Merge(json!({"status": {"phase": "Bound"}}));
    volumes.patch_status(&volume, &PatchParams::default(), &bound).await.expect("its phase is taken");
}

/// What a node's agent writes when there is nothing to tell.
async fn beat(store: &KubernetesStore, n: u64) {
    let node = store.nodes().get(node_name(n).as_str()).await.expect("an answer");
    let mut node = node.expect("the node");
    node.status.heartbeat = Some(Timestamp::now());
    store.nodes().update_status(node).await.expect("the heartbeat is taken");
}

/// Waits until the leader has written that each volume is ready.
async fn settled(store: &KubernetesStore, volumes: u64) {
    let end = Instant::now() + BOUND;
    loop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let all = store.splits().list(&Selector::All).await.expect("the volumes");
        let ready =
            |split: &&VolumeSplit| condition(&split.status.conditions, "Ready").is_some_and(|c| c.status);
        let ready = all.iter().filter(ready).count();
        if u64::try_from(ready).is_ok_and(|ready| ready == volumes) {
            return;
        }
        assert!(
            Instant::now() < end,
            "{ready} of {volumes} volumes are ready after {BOUND:?}: {:?}",
            all.first()
        );
    }
}

async fn leads(client: &Client, node: &str) {
    let leases: Api<Lease> = Api::namespaced(client.clone(), "union");
    let end = Instant::now() + BOUND;
    loop {
        let lease = leases.list(&Default::default()).await.expect("the leases").items.pop();
        let holder = lease.and_then(|l| l.spec).and_then(|s| s.holder_identity).unwrap_or_default();
        if holder.starts_with(node) {
            return;
        }
        assert!(Instant::now() < end, "{node} does not lead, {holder:?} does");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A running agent without pools; it ends with this.
struct Agent {
    child: Child,
    log: PathBuf,
}

impl Agent {
    fn start(directory: &Path, name: &str) -> Self {
        let own = directory.join(name);
        std::fs::create_dir_all(own.join("kubelet")).unwrap();
        let kubeconfig = std::env::var("KUBECONFIG").expect("KUBECONFIG");
        let config = json!({
            "nodeName": format!("agent-{name}"), "stateDir": own.join("state"), "http": {"listen": "127.0.0.1:0"},
            "kubernetes": {"kubeconfig": kubeconfig, "kubeletDir": own.join("kubelet")},
            "log": {"filter": "info"},
        });
        let file = own.join("agent.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let log = own.join("log");
        let child = Command::new(program())
            .args(["agent", "--config"])
            .arg(&file)
            .env_remove("KUBERNETES_SERVICE_HOST")
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .expect("the agent starts");
        Self { child, log }
    }

    fn mib(&self, key: &str) -> f64 {
        let status = process::status(self.child.id());
        if status.contains("State:\tZ") {
            panic!("the agent has ended: {}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
        process::mib(&status, key)
    }

    fn cpu(&self) -> f64 {
        process::cpu_seconds(self.child.id())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // As a kubelet ends it, so that the lease is free.
        let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}
