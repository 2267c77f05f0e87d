//! Brings the driver into the cluster as a user does: its image, then `kubectl apply -k` of an overlay of `deploy/`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::DaemonSet;
use kube::{Api, Client};

use crate::support::{DRIVER_NAMESPACE, SHELL, nodes, root, run, scratch, try_kubectl};

/// The image of the agent, and the same under a second name, for what replaces one by another.
pub const AGENT: &str = "union-csi-test/agent:1";
/// See [`AGENT`].
pub const AGENT_NEXT: &str = "union-csi-test/agent:2";

/// Agents start within this time also where four cores compile beside.
const BOUND: Duration = Duration::from_secs(180);

/// Installs it, and waits until every node's agent is ready.
pub fn driver() {
    images();
    let overlay = overlay();
    for definition in union_csi::store::kubernetes::crds() {
        let text = serde_json::to_string(&definition).expect("a definition");
        must(try_kubectl(&["apply", "--server-side", "--force-conflicts", "-f", "-"], Some(&text)));
    }
    must(try_kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"], None));
    must(try_kubectl(
        &["apply", "--server-side", "--force-conflicts", "-k", &overlay.display().to_string()],
        None,
    ));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let client = runtime.block_on(async { Client::try_default().await }).expect("a client");
    wait_for_agents(&client, &runtime);
}

/// Waits until the DaemonSet is as it should be on every node.
pub fn wait_for_agents(client: &Client, runtime: &tokio::runtime::Runtime) {
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), DRIVER_NAMESPACE);
    let wanted = i32::try_from(nodes().len()).expect("a number of nodes");
    let end = Instant::now() + BOUND;
    loop {
        let set = runtime.block_on(api.get_opt("union-csi")).ok().flatten();
        let done = set.is_some_and(|set| {
            let generation = set.metadata.generation;
            set.status.is_some_and(|s| {
                s.observed_generation == generation
                    && s.number_ready == wanted
                    && s.updated_number_scheduled == Some(wanted)
            })
        });
        if done {
            return;
        }
        if Instant::now() > end {
            for what in [
                &["get", "pods", "-A", "-o", "wide"][..],
                &["describe", "pods", "-n", DRIVER_NAMESPACE],
                &[
                    "logs",
                    "-n",
                    DRIVER_NAMESPACE,
                    "-l",
                    "app.kubernetes.io/name=union-csi",
                    "--prefix",
                    "--tail=40",
                ],
            ] {
                match try_kubectl(what, None) {
                    Ok(text) | Err(text) => eprintln!("{text}"),
                }
            }
            panic!("the agents are not ready in {BOUND:?}");
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn images() {
    // A kept cluster has what an earlier run left there.
    let _ = fs::remove_dir_all(scratch(""));
    let program = PathBuf::from(env!("CARGO_BIN_EXE_union-csi"));
    let rootfs = scratch("agent");
    // Without what only a debugger reads, it is a tenth of the size.
    let stripped = scratch("program").join("union-csi");
    must(run(Command::new("strip").arg("-o").arg(&stripped).arg(&program), None));
    must(run(Command::new(root().join("scripts/image")).arg("--program").arg(&stripped).arg(&rootfs), None));
    // As deploy/image/Containerfile says.
    let entrypoint = ["/usr/local/bin/union-csi"];
    put(&rootfs, AGENT, &entrypoint);
    put(&rootfs, AGENT_NEXT, &entrypoint);
    put(&shell(), SHELL, &[]);
}

/// A root directory with busybox for everything.
fn shell() -> PathBuf {
    let rootfs = scratch("shell");
    let bin = rootfs.join("bin");
    fs::create_dir_all(&bin).expect("a directory");
    fs::create_dir_all(rootfs.join("tmp")).expect("a directory");
    let busybox = must(run(Command::new("sh").args(["-c", "command -v busybox"]), None));
    fs::copy(busybox.trim(), bin.join("busybox")).expect("busybox is copied");
    let programs = must(run(Command::new(bin.join("busybox")).arg("--list"), None));
    for program in programs.lines().filter(|p| *p != "busybox") {
        symlink("busybox", bin.join(program)).expect("a link");
    }
    rootfs
}

fn put(rootfs: &Path, name: &str, entrypoint: &[&str]) {
    must(run(
        Command::new(root().join("integration/kube/image")).arg(rootfs).arg(name).args(entrypoint),
        None,
    ));
}

/// `deploy/` with the image of this build, and pools where the test nodes have their disks.
fn overlay() -> PathBuf {
    let directory = root().join(format!("target/kube/overlay-{}", std::process::id()));
    fs::create_dir_all(&directory).expect("a directory");
    let kustomization = format!(
        r#"apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../../../deploy]
images:
- {{name: ghcr.io/union-csi/union-csi, newName: union-csi-test/agent, newTag: "1"}}
patches:
- target: {{kind: ConfigMap, name: union-csi}}
  patch: |
    apiVersion: v1
    kind: ConfigMap
    metadata: {{name: union-csi}}
    data:
      agent.yaml: |
        poolsUnder: [{{path: /srv/pools}}]
        http: {{listen: "127.0.0.1:9830"}}
        kubernetes: {{namespace: {DRIVER_NAMESPACE}, kubeletDir: /var/lib/kubelet}}
        log: {{filter: info}}
"#
    );
    fs::write(directory.join("kustomization.yaml"), kustomization).expect("the overlay");
    directory
}

fn must<T>(result: Result<T, String>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
