//! The control plane, as `integration/kube/run` starts it, for as long as a cluster is used.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

/// Where machines reach the API server: the address of the service `kubernetes`, which its certificate names.
const ADDRESS: &str = "10.96.0.1";
/// A machine's own address on that network.
pub(super) const OWN_ADDRESS: &str = "10.96.0.15/24";
/// What the programs of `target/kube` may take to be built, the first time.
const END_BOUND: Duration = Duration::from_secs(60);

/// etcd, the API server and the controller manager. They end with it, or with this process.
pub struct ApiServer {
    child: Child,
    // The command that the control plane is for ends when nobody holds its standard input.
    input: Option<ChildStdin>,
    dir: PathBuf,
    kubeconfig: PathBuf,
    port: u16,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl ApiServer {
    /// Starts it; the programs are built where they are missing.
    ///
    /// # Panics
    /// When it does not start.
    pub fn start() -> Self {
        let mut child = Command::new(root().join("integration/kube/run"))
            // The tests say what is attached: no node has a kubelet whose heartbeats would be missed.
            .args(["--api-only", "--controller-manager", "--controller-manager-arg"])
            .args(["--controllers=-node-lifecycle-controller", "--"])
            .args(["sh", "-c", "echo $UNION_KUBE_DIR; echo $KUBECONFIG; exec cat >/dev/null"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("integration/kube/run runs");
        let input = child.stdin.take();
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut line = || PathBuf::from(lines.next().expect("the control plane starts").expect("a line"));
        let (dir, kubeconfig) = (line(), line());
        let text = fs::read_to_string(&kubeconfig).expect("a kubeconfig");
        let port = text
            .split("https://127.0.0.1:")
            .nth(1)
            .and_then(|rest| rest.split(|c: char| !c.is_ascii_digit()).next())
            .and_then(|port| port.parse().ok())
            .expect("the API server's port on loopback");
        Self { child, input, dir, kubeconfig, port }
    }

    /// The second card of each machine, for QEMU: a network on which there is this server and nothing else.
    pub fn card(&self) -> Vec<String> {
        let network = format!(
            "user,id=api,restrict=on,ipv6=off,net=10.96.0.0/24,host=10.96.0.2,dhcpstart=10.96.0.15,\
             guestfwd=tcp:{ADDRESS}:443-cmd:busybox nc 127.0.0.1 {}",
            self.port
        );
        ["-netdev", &network, "-device", "virtio-net-pci,netdev=api,mac=52:54:00:00:01:01"]
            .map(str::to_owned)
            .to_vec()
    }

    /// With all rights.
    pub async fn client(&self) -> Client {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        Client::try_from(config.expect("a configuration")).expect("a client")
    }

    /// What `deploy/` installs, but for the DaemonSet: the agents are started in the machines.
    ///
    /// # Panics
    /// When the API server does not take it.
    pub fn install(&self) {
        let base = root().join("deploy/base");
        let file = |name: &str| base.join(name).display().to_string();
        let crds = root().join("deploy/crds").display().to_string();
        self.kubectl(&["apply", "-k", &crds]);
        for name in ["namespace.yaml", "csidriver.yaml", "rbac.yaml", "protection.yaml", "storageclass.yaml"]
        {
            self.kubectl(&["apply", "-f", &file(name)]);
        }
        self.kubectl(&["wait", "--for=condition=established", "--timeout=60s", "crd", "--all"]);
    }

    /// A kubeconfig for the machines, with the rights of the agents' account and no others.
    pub fn kubeconfig_of_agents(&self) -> String {
        let token = self.kubectl(&["create", "token", "union-csi", "-n", "union", "--duration=24h"]);
        let authority = self.kubectl(&[
            "config",
            "view",
            "--raw",
            "-o",
            "jsonpath={.clusters[0].cluster.certificate-authority-data}",
        ]);
        let token = token.trim();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: c, user: agent}}}}]\n\
             clusters: [{{name: c, cluster: {{server: 'https://{ADDRESS}:443', certificate-authority-data: {authority}}}}}]\n\
             users: [{{name: agent, user: {{token: {token}}}}}]\n"
        )
    }

    /// Runs kubectl with all rights.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        match self.try_kubectl(arguments, None) {
            Ok(text) => text,
            Err(text) => panic!("kubectl {}: {text}", arguments.join(" ")),
        }
    }

    /// The same where failure is an answer.
    pub fn try_kubectl(&self, arguments: &[&str], input: Option<&str>) -> Result<String, String> {
        let mut child = Command::new(self.dir.join("bin/kubectl"))
            .args(arguments)
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        if let (Some(text), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(text.as_bytes()).map_err(|error| error.to_string())?;
        }
        let output = child.wait_with_output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            Ok(text)
        } else {
            Err(format!("{text} {}", String::from_utf8_lossy(&output.stderr)))
        }
    }

    /// Stops its processor, or lets it go on.
    pub fn pause(&self, pause: bool) {
        let verb = if pause { "pause" } else { "resume" };
        let done = Command::new(root().join("integration/kube/ctl"))
            .args([verb, "apiserver"])
            .env("UNION_KUBE_DIR", &self.dir)
            .status();
        assert!(done.is_ok_and(|status| status.success()), "the API server is told to {verb}");
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        drop(self.input.take());
        let end = Instant::now() + END_BOUND;
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
