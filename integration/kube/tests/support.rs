//! A world for each test: the cluster that `integration/kube/run` made, the driver in it as `kubectl apply -k deploy/` puts it
//! there, and a namespace of the test's own, which is gone with everything in it when the test ends.
//!
//! Tests run beside each other, save those that stop or replace what all of them need: these are alone.

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::fmt::Debug;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use union_csi::store::Store;
use union_csi::store::kubernetes::KubernetesStore;
use union_csi::store::object::{Branch, StorageNode, VolumeSplit};

use crate::install;

/// What any step takes at most on a busy machine, a node's restart aside.
pub const BOUND: Duration = Duration::from_secs(90);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(200);

/// The image of the tests' pods.
pub const SHELL: &str = "union-csi-test/shell:1";

/// Where the driver's own objects lie.
pub const DRIVER_NAMESPACE: &str = "union";

/// Held for reading by tests that run beside each other, for writing by those that are alone.
static ORDER: RwLock<()> = RwLock::new(());

/// The driver, once for all tests.
static INSTALLED: OnceLock<()> = OnceLock::new();

/// Its guards are held for as long as the test lasts.
#[allow(dead_code)]
enum Company {
    Shared(RwLockReadGuard<'static, ()>),
    Alone(RwLockWriteGuard<'static, ()>),
}

pub struct World {
    runtime: tokio::runtime::Runtime,
    pub client: Client,
    pub namespace: String,
    company: Company,
}

impl World {
    /// Beside other tests.
    pub fn shared() -> Self {
        Self::new(false)
    }

    /// Without any other test, and after their volumes are gone.
    pub fn alone() -> Self {
        let world = Self::new(true);
        world.eventually("the volumes of other tests are gone", || world.splits().is_empty().then_some(()));
        world
    }

    fn new(alone: bool) -> Self {
        let company = if alone {
            Company::Alone(ORDER.write().unwrap_or_else(|poisoned| poisoned.into_inner()))
        } else {
            Company::Shared(ORDER.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
        };
        assert!(
            std::env::var_os("UNION_KUBE_DIR").is_some(),
            "no cluster: run integration/kube/run --nodes 3 -- cargo test --test kube"
        );
        INSTALLED.get_or_init(install::driver);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(async { Client::try_default().await }).expect("a client");
        let namespace = format!("t-{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        kubectl(&["create", "namespace", &namespace]);
        Self { runtime, client, namespace, company }
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    // ---- objects ----

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn cluster_api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = ClusterResourceScope>,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    /// Makes an object of the test's namespace.
    pub fn create<K>(&self, object: Value) -> K
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + Serialize + DeserializeOwned,
        K::DynamicType: Default,
    {
        let object: K = serde_json::from_value(object).expect("an object");
        self.block_on(self.api::<K>().create(&Default::default(), &object)).expect("the object is taken")
    }

    pub fn get<K>(&self, name: &str) -> Option<K>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
        K::DynamicType: Default,
    {
        // While the API server is away there is no answer: whoever asks again and again finds out.
        self.block_on(self.api::<K>().get_opt(name)).ok().flatten()
    }

    pub fn list<K>(&self) -> Vec<K>
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
        K::DynamicType: Default,
    {
        self.block_on(self.api::<K>().list(&ListParams::default())).map(|list| list.items).unwrap_or_default()
    }

    pub fn delete<K>(&self, name: &str)
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
        K::DynamicType: Default,
    {
        let _ = self.block_on(self.api::<K>().delete(name, &DeleteParams::default())).expect("it is deleted");
    }

    pub fn patch<K>(&self, name: &str, patch: &Value)
    where
        K: Resource<Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned,
        K::DynamicType: Default,
    {
        self.block_on(self.api::<K>().patch(name, &PatchParams::default(), &Patch::Merge(patch)))
            .expect("it is patched");
    }

    /// The driver's own objects.
    pub fn store(&self) -> KubernetesStore {
        KubernetesStore::new(self.client.clone(), DRIVER_NAMESPACE, "union-csi-tests")
    }

    pub fn splits(&self) -> Vec<VolumeSplit> {
        self.block_on(self.store().splits().list(&union_csi::store::Selector::All)).expect("volumes")
    }

    pub fn branches(&self) -> Vec<Branch> {
        self.block_on(self.store().branches().list(&union_csi::store::Selector::All)).expect("branches")
    }

    pub fn storage_nodes(&self) -> Vec<StorageNode> {
        self.block_on(self.store().nodes().list(&union_csi::store::Selector::All)).expect("nodes")
    }

    /// The volume behind a bound claim.
    pub fn volume_of(&self, claim: &str) -> VolumeSplit {
        let name = self.handle_of(claim);
        self.block_on(self.store().splits().get(&name)).expect("an answer").expect("the claim's volume")
    }

    /// The CSI handle of a bound claim's volume.
    pub fn handle_of(&self, claim: &str) -> String {
        let claim = self.get::<PersistentVolumeClaim>(claim).expect("the claim");
        let name = claim.spec.and_then(|s| s.volume_name).expect("a bound claim");
        let volume =
            self.block_on(self.cluster_api::<PersistentVolume>().get(&name)).expect("its PersistentVolume");
        volume.spec.and_then(|s| s.csi).expect("a CSI volume").volume_handle
    }

    // ---- waiting ----

    /// What `probe` finds, within [`BOUND`].
    pub fn eventually<T>(&self, what: &str, probe: impl FnMut() -> Option<T>) -> T {
        self.within(BOUND, what, probe)
    }

    pub fn within<T>(&self, bound: Duration, what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
        let end = Instant::now() + bound;
        loop {
            if let Some(found) = probe() {
                return found;
            }
            assert!(Instant::now() < end, "NOT WITHIN {bound:?}: {what}");
            std::thread::sleep(PAUSE);
        }
    }

    // ---- claims ----

    pub fn claim(&self, name: &str, class: &str, size: &str) {
        self.claim_with(name, class, size, &["ReadWriteOnce"], "Filesystem");
    }

    pub fn claim_with(&self, name: &str, class: &str, size: &str, modes: &[&str], mode: &str) {
        let _: PersistentVolumeClaim = self.create(json!({
            "metadata": {"name": name},
            "spec": {
                "storageClassName": class, "accessModes": modes, "volumeMode": mode,
                "resources": {"requests": {"storage": size}},
            },
        }));
    }

    pub fn bound(&self, claim: &str) -> PersistentVolumeClaim {
        self.eventually(&format!("claim {claim} is bound"), || {
            self.get::<PersistentVolumeClaim>(claim).filter(is_bound)
        })
    }

    /// The messages of the events about an object of the test's namespace.
    pub fn events(&self, kind: &str, name: &str) -> Vec<String> {
        let about = |event: &Event| {
            event.involved_object.kind.as_deref() == Some(kind)
                && event.involved_object.name.as_deref() == Some(name)
        };
        let text = |e: Event| format!("{}: {}", e.reason.unwrap_or_default(), e.message.unwrap_or_default());
        self.list::<Event>().into_iter().filter(about).map(text).collect()
    }

    /// Waits for an event about the object that says all of this.
    pub fn told(&self, kind: &str, name: &str, parts: &[&str]) -> String {
        self.eventually(&format!("an event about {kind} {name} that says {parts:?}"), || {
            self.events(kind, name).into_iter().find(|text| parts.iter().all(|part| text.contains(part)))
        })
    }

    /// A class of the test's own, with the test's namespace in front of its name, which is returned.
    pub fn class(&self, name: &str, binding: &str, parameters: Value) -> String {
        self.class_with(name, json!({"volumeBindingMode": binding, "parameters": parameters}))
    }

    pub fn class_with(&self, name: &str, mut class: Value) -> String {
        let name = format!("{}-{name}", self.namespace);
        class["metadata"] = json!({"name": name});
        class["provisioner"] = json!("union.csi.union.io");
        let class: k8s_openapi::api::storage::v1::StorageClass =
            serde_json::from_value(class).expect("a class");
        self.block_on(self.cluster_api().create(&Default::default(), &class)).expect("the class is taken");
        name
    }

    // ---- pods ----

    pub fn run(&self, pod: PodOf) {
        let _: Pod = self.create(pod.object());
    }

    /// Waits until the pod runs and is ready; the node it is on is returned.
    pub fn running(&self, pod: &str) -> String {
        let found = self.eventually(&format!("pod {pod} runs"), || self.get::<Pod>(pod).filter(is_ready));
        found.spec.and_then(|s| s.node_name).expect("its node")
    }

    /// Deletes the pod and waits until it is gone, and with it what it had mounted.
    pub fn stop(&self, pod: &str) {
        self.delete::<Pod>(pod);
        self.eventually(&format!("pod {pod} is gone"), || self.get::<Pod>(pod).is_none().then_some(()));
    }

    /// Deletes a pod of a set and waits until its successor, of the same name, runs.
    pub fn stop_and_wait_for_another(&self, pod: &str) {
        let uid = |pod: &Pod| pod.metadata.uid.clone();
        let old = self.get::<Pod>(pod).as_ref().and_then(uid);
        self.delete::<Pod>(pod);
        self.eventually(&format!("another pod {pod} runs"), || {
            self.get::<Pod>(pod).filter(|p| uid(p) != old && is_ready(p))
        });
    }

    /// What a command in a pod prints; the error output where it fails.
    pub fn try_exec(&self, pod: &str, script: &str) -> Result<String, String> {
        try_kubectl(&["exec", "-n", &self.namespace, pod, "--", "sh", "-c", script], None)
    }

    pub fn exec(&self, pod: &str, script: &str) -> String {
        match self.try_exec(pod, script) {
            Ok(text) => text,
            Err(error) => panic!("in pod {pod}: {script}: {error}"),
        }
    }

    // ---- the cluster ----

    /// The pod of the agent on a node.
    pub fn agent_on(&self, node: &str) -> Pod {
        let agents: Api<Pod> = Api::namespaced(self.client.clone(), DRIVER_NAMESPACE);
        let list = self.block_on(agents.list(&ListParams::default())).expect("the agents");
        let here = |pod: &Pod| {
            pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node)
                && pod.metadata.deletion_timestamp.is_none()
        };
        list.items.into_iter().find(here).unwrap_or_else(|| panic!("no agent on {node}"))
    }

    /// The status API of a node's agent, asked on the node.
    pub fn status(&self, node: &str, path: &str) -> Option<Value> {
        let url = format!("http://127.0.0.1:9830{path}");
        let text = try_ctl(&["node", node_here(node).as_str(), "--", "curl", "-sf", "-m", "5", &url]).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// How the agent answers, as a number; empty where it does not.
    pub fn status_code(&self, node: &str, path: &str) -> String {
        let url = format!("http://127.0.0.1:9830{path}");
        let format = "%{http_code}";
        let curl = ["curl", "-s", "-o", "/dev/null", "-w", format, "-m", "5", &url];
        try_ctl(&[&["node", node_here(node).as_str(), "--"], &curl[..]].concat()).unwrap_or_default()
    }

    /// Waits until all agents are ready.
    pub fn agents_ready(&self) {
        install::wait_for_agents(&self.client, &self.runtime);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            self.dump();
        }
        // Their pods end first, then their volumes.
        let namespace = self.namespace.clone();
        let _ = try_kubectl(&["delete", "namespace", &namespace, "--timeout=90s"], None);
        let classes = try_kubectl(&["get", "storageclass", "-o", "name"], None).unwrap_or_default();
        for class in classes.lines().filter(|c| c.contains(&namespace)) {
            let _ = try_kubectl(&["delete", class], None);
        }
    }
}

impl World {
    /// Everything that tells why a test failed.
    fn dump(&self) {
        let ns = self.namespace.as_str();
        for arguments in [
            &["get", "pods,pvc", "-n", ns, "-o", "wide"][..],
            &["get", "events", "-n", ns, "--sort-by=.lastTimestamp"],
            &["get", "pv,volumeattachments,volumesplits,branches,storagenodes,leases", "-A", "-o", "wide"],
            &["describe", "pods", "-n", ns],
            &["get", "pods", "-n", DRIVER_NAMESPACE, "-o", "wide"],
            &[
                "logs",
                "-n",
                DRIVER_NAMESPACE,
                "-l",
                "app.kubernetes.io/name=union-csi",
                "--prefix",
                "--tail=60",
            ],
        ] {
            eprintln!("--- kubectl {}", arguments.join(" "));
            match try_kubectl(arguments, None) {
                Ok(text) | Err(text) => eprintln!("{text}"),
            }
        }
    }
}

pub fn is_bound(claim: &PersistentVolumeClaim) -> bool {
    claim.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Bound")
}

pub fn is_ready(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
        && pod
            .status
            .as_ref()
            .and_then(|s| s.conditions.as_ref())
            .is_some_and(|conditions| conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
}

pub fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.as_ref().and_then(|s| s.container_statuses.as_ref());
    statuses.into_iter().flatten().map(|s| s.restart_count).sum()
}

/// A pod of one container with a shell.
pub struct PodOf {
    name: String,
    script: String,
    volumes: Vec<Value>,
    mounts: Vec<Value>,
    spec: Value,
}

impl PodOf {
    /// One that sleeps.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            script: "trap exit TERM; while :; do sleep 0.2; done".to_owned(),
            volumes: Vec::new(),
            mounts: Vec::new(),
            spec: json!({}),
        }
    }

    pub fn script(mut self, script: &str) -> Self {
        self.script = script.to_owned();
        self
    }

    /// With a claim of the test's namespace mounted at `/data`.
    pub fn with_claim(self, claim: &str) -> Self {
        self.with_volume("data", json!({"persistentVolumeClaim": {"claimName": claim}}), json!({}))
    }

    /// With a volume mounted below `/`, under its name.
    pub fn with_volume(mut self, name: &str, source: Value, mount: Value) -> Self {
        let mut volume = source;
        volume["name"] = json!(name);
        self.volumes.push(volume);
        let mut mount = mount;
        mount["name"] = json!(name);
        if mount["mountPath"].is_null() {
            mount["mountPath"] = json!(format!("/{name}"));
        }
        self.mounts.push(mount);
        self
    }

    /// A further mount of a volume that it has.
    pub fn with_mount(mut self, mount: Value) -> Self {
        self.mounts.push(mount);
        self
    }

    pub fn on(mut self, node: &str) -> Self {
        // By the scheduler, as pods of users are: it writes the selected node on a claim that waits for a consumer.
        self.spec["nodeSelector"] = json!({"kubernetes.io/hostname": node});
        self
    }

    /// Further fields of the pod's spec.
    pub fn spec(mut self, fields: Value) -> Self {
        let (Value::Object(spec), Value::Object(fields)) = (&mut self.spec, fields) else { return self };
        spec.extend(fields);
        self
    }

    pub fn template(self) -> Value {
        let mut spec = self.spec;
        spec["terminationGracePeriodSeconds"] = json!(1);
        spec["volumes"] = json!(self.volumes);
        spec["tolerations"] = json!([{"operator": "Exists", "effect": "NoExecute"}]);
        spec["containers"] = json!([{
            "name": "main", "image": SHELL, "imagePullPolicy": "Never",
            "command": ["sh", "-c", self.script], "volumeMounts": self.mounts,
        }]);
        spec
    }

    fn object(self) -> Value {
        let name = self.name.clone();
        json!({"metadata": {"name": name}, "spec": self.template()})
    }
}

// ---- programs ----

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The nodes as Kubernetes calls them.
pub fn nodes() -> Vec<String> {
    let names = std::env::var("UNION_KUBE_NODES").expect("UNION_KUBE_NODES");
    names.split([' ', ',']).filter(|n| !n.is_empty()).map(str::to_owned).collect()
}

/// What the cluster's own tool calls a node: n1, n2, ...
pub fn node_here(node: &str) -> String {
    let at = nodes().iter().position(|n| n == node).unwrap_or_else(|| panic!("no node {node}"));
    format!("n{}", at + 1)
}

pub fn kubectl(arguments: &[&str]) -> String {
    match try_kubectl(arguments, None) {
        Ok(text) => text,
        Err(error) => panic!("kubectl {}: {error}", arguments.join(" ")),
    }
}

pub fn try_kubectl(arguments: &[&str], input: Option<&str>) -> Result<String, String> {
    run(Command::new("kubectl").args(arguments), input)
}

/// Stops, starts and looks into parts of the cluster.
pub fn try_ctl(arguments: &[&str]) -> Result<String, String> {
    run(Command::new(root().join("integration/kube/ctl")).args(arguments), None)
}

pub fn ctl(arguments: &[&str]) -> String {
    match try_ctl(arguments) {
        Ok(text) => text,
        Err(error) => panic!("ctl {}: {error}", arguments.join(" ")),
    }
}

/// A command on a node, as root in its host's namespaces.
pub fn on_node(node: &str, script: &str) -> String {
    ctl(&["node", &node_here(node), "--", "sh", "-c", script])
}

pub fn run(command: &mut Command, input: Option<&str>) -> Result<String, String> {
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(|e| e.to_string())?;
    if let (Some(text), Some(mut stdin)) = (input, child.stdin.take()) {
        stdin.write_all(text.as_bytes()).map_err(|e| e.to_string())?;
    }
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(format!("{} {}", text(output.stdout), text(output.stderr)))
    }
}

/// A directory of the test program's own; it goes with the cluster.
pub fn scratch(name: &str) -> PathBuf {
    let path =
        PathBuf::from(std::env::var_os("UNION_KUBE_DIR").expect("UNION_KUBE_DIR")).join("tests").join(name);
    std::fs::create_dir_all(&path).expect("a directory");
    path
}
