//! Part `nodes`: claims and pods on a cluster of three nodes, and what it asks the API server meanwhile and at rest.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::{Selector, Store};

use super::report::percentile;
use super::seen::{BOUND, Seen};
use super::support::{SHELL, nodes, on_node};
use super::{Rows, audit, both, install, number, process};

/// Of the claims and pods.
pub const NAMESPACE: &str = "default";

/// Pods in a round: three without a volume of ours, three with one of their own, and one of each other kind.
const STEPS: usize = 9;

/// What is measured here.
struct Bench {
    claims: Api<PersistentVolumeClaim>,
    pods: Api<Pod>,
    store: KubernetesStore,
    bound: Seen,
    running: Seen,
}

pub async fn run(rows: &mut Rows) {
    let client = Client::try_default().await.expect("a client");
    // It waits, with a runtime of its own.
    tokio::task::spawn_blocking(install::driver).await.expect("the driver is installed");
    let classes: Api<StorageClass> = Api::all(client.clone());
    for (name, binding, branches) in
        [("now", "Immediate", "1"), ("joined", "Immediate", "2"), ("later", "WaitForFirstConsumer", "1")]
    {
        let class = json!({
            "metadata": {"name": name}, "provisioner": "union.csi.union.io", "volumeBindingMode": binding,
            "parameters": {"splitQuantum": "16Mi", "minBranches": branches, "maxBranches": branches},
        });
        let class = serde_json::from_value(class).unwrap();
        classes.create(&PostParams::default(), &class).await.expect("the class is taken");
    }
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let bench = Bench {
        bound: Seen::follow("bound", claims.clone(), is_bound),
        running: Seen::follow("running", pods.clone(), is_running),
        store: KubernetesStore::new(client, "union", "bench"),
        claims,
        pods,
    };
    // What happens for the first time is not measured.
    for name in ["warm-1", "warm-2", "warm-3"] {
        bench.pod_after_claim(name, "later").await;
    }
    bench.clear().await;
    bench.claims_one_by_one(rows).await;
    bench.claims_at_once(rows).await;
    bench.starts(rows).await;
    idle(rows).await;
}

impl Bench {
    async fn claim(&self, name: &str, class: &str) -> Instant {
        let claim = json!({
            "metadata": {"name": name},
            "spec": {
                "storageClassName": class, "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": "32Mi"}},
            },
        });
        let begun = Instant::now();
        let claim = serde_json::from_value(claim).unwrap();
        self.claims.create(&PostParams::default(), &claim).await.expect("the claim is taken");
        begun
    }

    async fn pod(&self, name: &str, volume: Value) -> Instant {
        let mut volume = volume;
        volume["name"] = json!("data");
        let pod = json!({
            "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "volumes": [volume],
                "containers": [{
                    "name": "main", "image": SHELL, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", "while :; do sleep 1; done"],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }],
            },
        });
        let begun = Instant::now();
        let pod = serde_json::from_value(pod).unwrap();
        self.pods.create(&PostParams::default(), &pod).await.expect("the pod is taken");
        begun
    }

    async fn pod_with(&self, name: &str, claim: &str) -> Instant {
        self.pod(name, json!({"persistentVolumeClaim": {"claimName": claim}})).await
    }

    /// A claim and its pod, made together; seconds until the claim was bound and until the container ran.
    async fn pod_after_claim(&self, name: &str, class: &str) -> (f64, f64) {
        let claimed = self.claim(name, class).await;
        let begun = self.pod_with(name, name).await;
        let bound = self.bound.at(name).await - claimed;
        let running = self.running.at(name).await - begun;
        (bound.as_secs_f64(), running.as_secs_f64())
    }

    /// Deletes all pods and claims, and waits until nothing is left of the volumes.
    async fn clear(&self) {
        let all = Default::default();
        let _ = self.pods.delete_collection(&DeleteParams::default(), &all).await.expect("pods are deleted");
        let _ =
            self.claims.delete_collection(&DeleteParams::default(), &all).await.expect("claims are deleted");
        let end = Instant::now() + BOUND;
        loop {
            let splits = self.store.splits().list(&Selector::All).await.map_or(1, |s| s.len());
            let branches = self.store.branches().list(&Selector::All).await.map_or(1, |b| b.len());
            if splits + branches == 0 {
                return;
            }
            assert!(Instant::now() < end, "{splits} volumes and {branches} branches stay after {BOUND:?}");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "a number of requests")]
    async fn claims_one_by_one(&self, rows: &mut Rows) {
        let count = number("BENCH_VOLUMES", 60);
        let mut seconds = Vec::new();
        let begun = Timestamp::now();
        for i in 0..count {
            let name = format!("one-{i}");
            let claimed = self.claim(&name, "now").await;
            seconds.push((self.bound.at(&name).await - claimed).as_secs_f64());
        }
        // What follows the last binding belongs to it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let bound = Timestamp::now();
        self.clear().await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        let gone = Timestamp::now();
        rows.add(
            &format!("PVC created to Bound, Immediate, {count} one by one, p50 / p99"),
            &both(&seconds),
            "p99 < 1 s",
            Some(percentile(&seconds, 0.99) < 1.0),
            json!(seconds),
        );
        let (made, removed) = (audit::between(begun, bound), audit::between(bound, gone));
        let each = |requests: &audit::Requests| requests.without_upkeep() as f64 / count as f64;
        rows.add(
            "API requests for a volume, made / removed",
            &format!("{:.1} / {:.1}", each(&made), each(&removed)),
            "",
            None,
            json!({"made": made.by_kind, "removed": removed.by_kind, "volumes": count}),
        );
    }

    async fn claims_at_once(&self, rows: &mut Rows) {
        let names: Vec<String> = (0..100).map(|i| format!("burst-{i}")).collect();
        let begun = Instant::now();
        join_all(names.iter().map(|name| self.claim(name, "now"))).await;
        let mut seconds = Vec::new();
        for name in &names {
            seconds.push((self.bound.at(name).await - begun).as_secs_f64());
        }
        let last = percentile(&seconds, 1.0);
        rows.add(
            "100 claims at once, to half / the last Bound",
            &format!("{:.1} / {last:.1} s", percentile(&seconds, 0.5)),
            "",
            None,
            json!(seconds),
        );
        self.clear().await;
    }

    /// Pods with each kind of volume in turn, so that what disturbs the machine disturbs all alike.
    async fn starts(&self, rows: &mut Rows) {
        let rounds = usize::try_from(number("BENCH_ROUNDS", 10)).unwrap();
        let (mut empty, mut inline, mut bound, mut joined) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut late, mut late_bound) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let (claim, pair) = (format!("start-{round}"), format!("pair-{round}"));
            for (claim, class) in [(&claim, "now"), (&pair, "joined")] {
                self.claim(claim, class).await;
                self.bound.at(claim).await;
            }
            for step in 0..STEPS {
                let name = format!("pod-{round}-{step}");
                match (step + round) % STEPS {
                    0 | 3 | 6 => {
                        let begun = self.pod(&name, json!({"emptyDir": {}})).await;
                        empty.push((self.running.at(&name).await - begun).as_secs_f64());
                    }
                    1 | 4 | 7 => {
                        let begun = self.pod(&name, own_volume()).await;
                        inline.push((self.running.at(&name).await - begun).as_secs_f64());
                    }
                    2 => {
                        let begun = self.pod_with(&name, &claim).await;
                        bound.push((self.running.at(&name).await - begun).as_secs_f64());
                    }
                    5 => {
                        let begun = self.pod_with(&name, &pair).await;
                        joined.push((self.running.at(&name).await - begun).as_secs_f64());
                    }
                    _ => {
                        let (to_bound, to_running) = self.pod_after_claim(&name, "later").await;
                        late_bound.push(to_bound);
                        late.push(to_running);
                    }
                }
                // A node holds few pods, and their ends shall not fall into the next start.
                let _ = self.pods.delete(&name, &DeleteParams::default().grace_period(0)).await;
                self.gone(&name).await;
            }
            for claim in [&claim, &pair] {
                let _ = self.claims.delete(claim, &DeleteParams::default()).await;
            }
        }
        rows.add(
            &format!("PVC created to Bound, with its pod, {rounds}, p50 / p99"),
            &both(&late_bound),
            "p99 < 1 s",
            Some(percentile(&late_bound, 0.99) < 1.0),
            json!(late_bound),
        );
        rows.add("Pod created to running, emptyDir, p50 / p99", &both(&empty), "", None, json!(empty));
        for (name, seconds) in [
            ("an inline volume, made for it", &inline),
            ("a bound claim of one branch", &bound),
            ("a bound claim of two, joined", &joined),
            ("a claim made with it", &late),
        ] {
            let over = |p| percentile(seconds, p) - percentile(&empty, p);
            rows.add(
                &format!("The same with {name}"),
                &format!("{}; {:+.0} / {:+.0} ms", both(seconds), 1000.0 * over(0.5), 1000.0 * over(0.99)),
                "p99 < 500 ms over emptyDir",
                Some(over(0.99) < 0.5),
                json!(seconds),
            );
        }
        self.clear().await;
    }

    async fn gone(&self, pod: &str) {
        let end = Instant::now() + BOUND;
        while !matches!(self.pods.get_opt(pod).await, Ok(None)) {
            assert!(Instant::now() < end, "pod {pod} is there after {BOUND:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Requests per minute while nothing happens, by the audit log and by the agents' own metric, and what agents take.
#[allow(clippy::cast_precision_loss, reason = "a number of requests")]
async fn idle(rows: &mut Rows) {
    let seconds = number("BENCH_SECONDS", 300);
    tokio::time::sleep(Duration::from_secs(15)).await;
    let counted = || nodes().iter().map(|node| requests_by_metric(node)).collect::<Vec<_>>();
    let before = counted();
    let from = Timestamp::now();
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let after = counted();
    let requests = audit::between(from, Timestamp::now());
    let minutes = seconds as f64 / 60.0;
    let per_node: BTreeMap<&String, f64> =
        requests.by_pod.iter().map(|(pod, n)| (pod, *n as f64 / minutes)).collect();
    let mean = requests.total as f64 / minutes / 3.0;
    let leader = per_node.values().copied().fold(0.0, f64::max);
    let others = (requests.total as f64 / minutes - leader) / 2.0;
    let metric: f64 = after.iter().zip(before).map(|(a, b)| a - b).sum::<f64>() / minutes / 3.0;
    rows.add(
        "API requests a minute and node, idle, mean of 3",
        &format!("{mean:.1} (leader {leader:.1}, others {others:.1}; by metric {metric:.1})"),
        "<= 6",
        Some(mean <= 6.0),
        json!({"byPod": per_node, "byKind": requests.by_kind, "seconds": seconds, "metric": metric}),
    );
    let status = nodes().into_iter().map(|node| {
        on_node(&node, "for p in /proc/[0-9]*; do read -r n <$p/comm 2>/dev/null && [ $n = union-csi ] && cat $p/status; done; true")
    });
    let resident: Vec<f64> = status.map(|s| process::mib(&s, "VmRSS:")).collect();
    let most = percentile(&resident, 1.0);
    rows.add(
        "Agent's RSS after all that, the largest of 3",
        &format!("{most:.1} MiB"),
        "< 32 MiB",
        Some(most < 32.0),
        json!(resident),
    );
}

/// Requests that an agent has counted since it began.
fn requests_by_metric(node: &str) -> f64 {
    let text = on_node(node, "curl -sf -m 5 http://127.0.0.1:9830/metrics");
    let lines = text.lines().filter(|l| l.starts_with("union_csi_kubernetes_requests_total{"));
    lines.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// An inline volume: the kubelet asks the driver at once, where all others wait until Kubernetes has attached them.
fn own_volume() -> Value {
    let attributes = json!({"size": "32Mi", "splitQuantum": "16Mi", "maxBranches": "1"});
    json!({"csi": {"driver": "union.csi.union.io", "volumeAttributes": attributes}})
}

fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound")
}

fn is_running(pod: &Pod) -> bool {
    let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_ref());
    statuses.is_some_and(|all| all.iter().any(|s| s.state.as_ref().is_some_and(|s| s.running.is_some())))
}
