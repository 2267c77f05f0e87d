//! A node: its agent, and what its kubelet and its pods do.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::super::{Machine, Output, Result, Running};
use super::objects::Volume;
use super::{BOUND, apiserver};

/// Of the agent, over all its starts.
pub(super) const LOG: &str = "/state/agent.log";
const KUBELET: &str = "/state/kubelet";
/// Where a pool is mounted.
pub const POOL: &str = "/pool";
/// A pool that can enforce the size of directories.
pub const QUOTA_POOL: &str = "/quota-pool";

/// How long a pod's writer may run.
const WRITER_BOUND: Duration = Duration::from_secs(900);

/// What must not be left on a node without volumes.
const LEFT: &str = r#"
    shopt -s nullglob
    say() { printf '%s\n' "$@"; }
    for each in /pool/branches/* /sys/class/nvme/nvme* /sys/kernel/config/nvmet/subsystems/* /sys/block/loop*/loop \
        /state/kubelet/plugins/kubernetes.io/csi/*/* /state/kubelet/pods/*; do say "$each"; done
    while read -r from at _; do
        case "$from $at" in
        *' /programs' | *' /pool' | *' /state') ;;
        /dev/* | *:/* | *mergerfs* | *' /state/'*) say "mount $from at $at" ;;
        esac
    done </proc/mounts
    for each in /proc/[0-9]*/comm; do
        case "$(cat "$each" 2>/dev/null)" in mergerfs*) say "process $(tr '\0' ' ' <"${each%comm}cmdline")" ;; esac
    done
    if [ -e /proc/fs/nfsd/exports ]; then
        while read -r line; do case $line in '#'* | *'fsid=0'*) ;; *) say "export $line" ;; esac; done </proc/fs/nfsd/exports
    fi
"#;

/// How an agent is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// With the node's pool.
    WithPool,
    /// Without any: the node can only use volumes.
    WithoutPool,
    /// With that many, at `/pools/0` and so on, which the caller mounts.
    WithMany(u32),
    /// With one at [`QUOTA_POOL`] in its place, which the caller mounts.
    WithQuota,
    /// With the node's pool, and taken out of the storage network.
    OffNetwork,
}

/// A machine of the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// The machine.
    pub machine: &'a Machine,
}

impl Node<'_> {
    /// Its name, in Kubernetes too.
    pub fn name(&self) -> &str {
        self.machine.name()
    }

    /// Filesystems on its disks and the agent's configuration.
    pub(super) fn prepare(&self, kubeconfig: &str) -> Result {
        self.machine.run(
            "mkfs.ext4 -q -F /disk/data && mkfs.ext4 -q -F /disk/state && mkdir -p /pool /state && mount /disk/state /state
             mkdir -p /state/etc /state/kubelet/{plugins,plugins_registry,pods}",
        )?;
        self.machine.write("/state/etc/kubeconfig", kubeconfig.as_bytes())?;
        self.configure(Agent::WithPool)
    }

    /// Writes the agent's configuration; it is read at its next start.
    pub fn configure(&self, agent: Agent) -> Result {
        let pools = match agent {
            Agent::WithPool | Agent::OffNetwork => format!("[{{name: disk, path: {POOL}, reserve: 4Mi}}]"),
            Agent::WithoutPool => "[]".to_owned(),
            Agent::WithMany(count) => {
                let pool = |i| format!("{{name: p{i}, path: /pools/{i}, reserve: 1Mi}}");
                format!("[{}]", (0..count).map(pool).collect::<Vec<_>>().join(", "))
            }
            Agent::WithQuota => format!("[{{name: quota, path: {QUOTA_POOL}, reserve: 4Mi}}]"),
        };
        let interface = if agent == Agent::OffNetwork { "\"off\"" } else { "eth0" };
        // Where many share the processors, an agent may not be able to renew its lease within half a minute.
        let lease = std::env::var("LEASE").unwrap_or_else(|_| "30s".to_owned());
        let text = format!(
            "store: kubernetes\nkubernetes: {{kubeconfig: /state/etc/kubeconfig, kubeletDir: {KUBELET}, leaseDuration: {lease}}}\n\
             stateDir: /state/union-csi\nnetwork: {{interface: {interface}}}\npools: {pools}\n"
        );
        self.machine.write("/state/etc/agent.yaml", text.as_bytes())
    }

    /// Everything that a boot does before the kubelet, and the agent.
    pub fn start_agent(&self) -> Result {
        self.mount_pool()?;
        self.start_agent_only()
    }

    /// Mounts the pool, unless it is.
    pub fn mount_pool(&self) -> Result {
        let mount = format!("mkdir -p {POOL}; grep -q ' {POOL} ' /proc/mounts || mount /disk/data {POOL}");
        self.machine.run(mount).map(drop)
    }

    /// As [`Node::start_agent`], whether or not the pool is mounted. Where an earlier one is not gone yet, it begins when that is,
    /// as with a kubelet. Every second one is of the version `/programs/other`, where there is that.
    pub fn start_agent_only(&self) -> Result {
        let script = format!(
            "earlier=$(cat /run/agent.pid 2>/dev/null || echo none)
             mount --make-rshared /
             mkdir -p /state {POOL}
             grep -q ' /state ' /proc/mounts || mount /disk/state /state
             if ! ip addr show eth1 | grep -q 'inet '; then ip addr add {} dev eth1; fi
             ip link set eth1 up
             echo start >>/state/starts
             program=union-csi
             if [ -e /programs/other ] && [ $(($(wc -l </state/starts) % 2)) = 0 ]; then program=other; fi
             setsid sh -c \"while [ -e /proc/$earlier ]; do sleep 0.1; done
                 exec /programs/$program agent --config /state/etc/agent.yaml\" >>{LOG} 2>&1 </dev/null &
             echo $! >/run/agent.pid",
            apiserver::OWN_ADDRESS
        );
        self.machine.run(script).map(drop)
    }

    /// Ends the agent, and starts another one that is set up so.
    pub fn restart_as(&self, agent: Agent) -> Result {
        self.stop_agent()?;
        self.configure(agent)?;
        self.start_agent()?;
        self.ready()
    }

    /// Waits until the agent is ready, its driver registered as by a kubelet.
    pub fn ready(&self) -> Result {
        self.csi(BOUND, "register", &[])?;
        self.machine.eventually(BOUND, "curl -sf http://127.0.0.1:9830/readyz").map(drop)
    }

    /// Waits until it exports an image, as its agent does again after a boot.
    pub fn exports_again(&self) -> Result {
        self.machine.eventually(BOUND, "ls -d /sys/kernel/config/nvmet/ports/*/subsystems/*").map(drop)
    }

    /// The machine on again after [`Machine::pull_plug`], and its agent.
    pub fn boot(&self) -> Result {
        self.machine.start()?;
        self.start_agent()?;
        self.ready()
    }

    /// Kills the agent as the kernel does where memory is short.
    pub fn kill_agent(&self) -> Result {
        self.machine
            .run("kill -9 $(cat /run/agent.pid); while [ -e /proc/$(cat /run/agent.pid) ]; do sleep 0.05; done")
            .map(drop)
    }

    /// Ends the agent as a kubelet does that replaces it.
    pub fn stop_agent(&self) -> Result {
        self.machine
            .run("kill $(cat /run/agent.pid); while [ -e /proc/$(cat /run/agent.pid) ]; do sleep 0.05; done")
            .map(drop)
    }

    /// Tells the agent to stop, and lets it do what it does for that.
    pub fn tell_agent_to_stop(&self) -> Result {
        self.machine.run(signal_agent("TERM", 30)).map(drop)
    }

    /// Switches the machine off in good order: systemd, whose part is played, says so; its services end; the power goes.
    pub fn power_off(&self) -> Result {
        self.machine
            .run("printf '#!/bin/sh\necho stopping\n' >/usr/bin/systemctl; chmod +x /usr/bin/systemctl")?;
        self.tell_agent_to_stop()?;
        self.machine.power_off()
    }

    /// Cuts the node off the API server, or joins it again.
    pub fn reach_api(&self, reach: bool) -> Result {
        self.machine.run(format!("ip link set eth1 {}", if reach { "up" } else { "down" })).map(drop)
    }

    pub(super) fn info(&self) -> Result<Value> {
        let text = self.csi(BOUND, "info", &[])?;
        Ok(serde_json::from_str(&text).expect("JSON"))
    }

    /// One call, repeated until it succeeds, as the kubelet does.
    fn csi(&self, bound: Duration, call: &str, given: &[String]) -> Result<String> {
        self.machine.eventually(bound, csi_script(call, given))
    }

    fn staging(volume: &Volume) -> String {
        format!("{KUBELET}/plugins/kubernetes.io/csi/union.csi.union.io/{}/globalmount", volume.handle)
    }

    /// Where a pod of that name has the volume, on the host.
    pub fn target(volume: &Volume, pod: &str) -> String {
        format!("{KUBELET}/pods/{pod}/volumes/kubernetes.io~csi/{}/mount", volume.name)
    }

    fn given(volume: &Volume) -> Vec<String> {
        let context = serde_json::to_string(&volume.context).expect("JSON");
        vec![
            format!("volume={}", volume.handle),
            format!("staging={}", Self::staging(volume)),
            format!("context={context}"),
            format!("fs={}", volume.fs_type),
            format!("mode={}", volume.mode),
            format!("block={}", volume.block),
        ]
    }

    /// Stages the volume.
    pub fn stage(&self, volume: &Volume) -> Result {
        self.csi(BOUND, "stage", &Self::given(volume)).map(drop)
    }

    /// Begins one attempt at that; `calls` is told when the call is made, `{"staged": SECONDS}` when it was answered.
    pub fn begin_stage(&self, volume: &Volume) -> Result<Running> {
        self.machine.start_command(csi_script("stage", &Self::given(volume)), BOUND)
    }

    /// One attempt at that.
    pub fn try_stage(&self, volume: &Volume) -> Result<Output> {
        self.machine.attempt(BOUND, csi_script("stage", &Self::given(volume)))
    }

    /// Publishes it for a pod; the directory on the host.
    pub fn publish(&self, volume: &Volume, pod: &str) -> Result<String> {
        let (mut given, target) = (Self::given(volume), Self::target(volume, pod));
        given.push(format!("target={target}"));
        self.csi(BOUND, "publish", &given)?;
        Ok(target)
    }

    /// Stages and publishes.
    pub fn mount(&self, volume: &Volume, pod: &str) -> Result<String> {
        self.stage(volume)?;
        self.publish(volume, pod)
    }

    /// Unpublishes and unstages.
    pub fn unmount(&self, volume: &Volume, pod: &str) -> Result {
        self.csi(
            BOUND,
            "unpublish",
            &[format!("volume={}", volume.handle), format!("target={}", Self::target(volume, pod))],
        )?;
        // The kubelet removes a pod's directories.
        self.machine.run(format!("find {KUBELET}/pods/{pod} -depth -type d -exec rmdir {{}} +"))?;
        self.unstage(volume)
    }

    /// Unstages.
    pub fn unstage(&self, volume: &Volume) -> Result {
        self.csi(
            BOUND,
            "unstage",
            &[format!("volume={}", volume.handle), format!("staging={}", Self::staging(volume))],
        )?;
        self.machine.run(format!("rmdir \"$(dirname '{}')\"", Self::staging(volume))).map(drop)
    }

    /// One attempt at [`Node::mount`], as a script.
    pub fn mounting(&self, volume: &Volume, pod: &str) -> String {
        let staged = Self::given(volume);
        let mut published = staged.clone();
        published.push(format!("target={}", Self::target(volume, pod)));
        format!("{}\n{}", csi_script("stage", &staged), csi_script("publish", &published))
    }

    /// One attempt at [`Node::unmount`], as a script; of what was never mounted, too.
    pub fn unmounting(&self, volume: &Volume, pod: &str) -> String {
        let (target, staging) = (Self::target(volume, pod), Self::staging(volume));
        let named = format!("volume={}", volume.handle);
        let unpublish = csi_script("unpublish", &[named.clone(), format!("target={target}")]);
        let unstage = csi_script("unstage", &[named, format!("staging={staging}")]);
        format!(
            "{unpublish}
             [ ! -e {KUBELET}/pods/{pod} ] || find {KUBELET}/pods/{pod} -depth -type d -exec rmdir {{}} +
             {unstage}
             [ ! -e \"$(dirname '{staging}')\" ] || rmdir \"$(dirname '{staging}')\""
        )
    }

    /// What a kubelet does after a boot with directories of volumes that it has no more: it may have removed them just before its
    /// node lost its power.
    pub fn remove_empty_directories(&self) -> Result {
        let script = format!(
            "find {KUBELET}/plugins/kubernetes.io/csi/*/ {KUBELET}/pods -mindepth 1 -depth -type d -exec rmdir {{}} + 2>/dev/null || true"
        );
        self.machine.run(script).map(drop)
    }

    /// What the driver tells of the volume: its usage and whether it is well.
    pub fn stats(&self, volume: &Volume, pod: &str) -> Result<Value> {
        let mut given = Self::given(volume);
        given.push(format!("target={}", Self::target(volume, pod)));
        let text = self.csi(BOUND, "stats", &given)?;
        Ok(serde_json::from_str(&text).expect("JSON"))
    }

    /// Starts a pod's writer: appends to these files of its volume, in a mount namespace of its own.
    pub fn write(&self, volume: &Volume, pod: &str, tag: &str, files: &[String]) -> Result<Running> {
        self.pod(volume, pod, tag, |data| format!("workload append {data} {tag} {}", files.join(" ")))
    }

    /// Starts a pod's program that looks up these paths of its volume, which exist, and tries to make them anew.
    pub fn look(&self, volume: &Volume, pod: &str, names: &[String]) -> Result<Running> {
        self.pod(volume, pod, "look", |data| format!("known look {data} {}", names.join(" ")))
    }

    /// Starts a program of `inside` with the volume in a mount namespace of its own, in which there is nothing else of the
    /// kubelet and the agent, as in a container.
    fn pod(
        &self,
        volume: &Volume,
        pod: &str,
        container: &str,
        action: impl FnOnce(&str) -> String,
    ) -> Result<Running> {
        let (target, data) = (Self::target(volume, pod), format!("/tmp/{pod}-{container}"));
        let action = action(&data);
        let script = format!(
            "exec unshare --mount --propagation private -- bash -c 'mkdir -p {data} && mount --bind {target} {data} && \
             cd / && umount -l /state && exec inside {action}'"
        );
        let mut running = self.machine.start_command(script, WRITER_BOUND)?;
        let begun = Instant::now();
        while !running.says("begins", Duration::from_secs(5))? {
            assert!(
                !running.has_ended() && begun.elapsed() < BOUND,
                "the workload does not begin: {running:?}"
            );
        }
        Ok(running)
    }

    /// The newest line of the agent's log that holds that text. A power failure may have left zeros in the file: it counts as text
    /// all the same.
    pub fn last_told(&self, text: &str) -> Result<String> {
        self.machine.run(format!("grep -aF '{text}' {LOG} | tail -n 1"))
    }

    /// What is left of volumes, once none should be.
    pub(super) fn left(&self) -> Result<Vec<String>> {
        if !self.machine.is_on() {
            return Ok(Vec::new());
        }
        Ok(self.machine.run(LEFT)?.lines().map(str::to_owned).collect())
    }
}

fn csi_script(call: &str, given: &[String]) -> String {
    let given: Vec<String> = given.iter().map(|g| format!("'{g}'")).collect();
    format!("inside csi {call} kubelet={KUBELET} {}", given.join(" "))
}

/// A script that sends the agent a signal and waits for its end, at most so many seconds: a thread of it that waits for a node
/// that does not answer lasts longer, until that is given up.
pub fn signal_agent(signal: &str, seconds: u32) -> String {
    format!(
        "kill -{signal} $(cat /run/agent.pid)
         for i in $(seq {}); do [ -e /proc/$(cat /run/agent.pid) ] || break; sleep 0.1; done",
        seconds * 10
    )
}
