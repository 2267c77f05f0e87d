//! Volumes whose class requires encryption, in a cluster: from the parameter to both kernels, and through what may happen to them.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use union_csi::domain::reach::Transport;
use union_csi::store::object::StorageNode;
use union_csi::store::view::encrypts;

use super::cluster_faults::{LOG, OUTAGE, SOME, ends, goes_on, leave, log, on_node, text};
use crate::support::cluster::{BOUND, Cluster, NAMESPACE, Node, Volume, on_cluster};
use crate::support::faults::Told;
use crate::support::{Machine, Result};

/// What is written, again and again.
const PLAIN: &str = "these bytes are for nobody else";

/// Longer than the kernel waits for an owner that does not say what it should.
const REFUSED: Duration = Duration::from_secs(100);

/// How long nothing may go on while nobody answers the kernel: several of its attempts.
const STILL: Duration = Duration::from_secs(15);

/// Writes 1 MiB of that text to the volume, and reads it back from the branch.
fn write_plain(node: Node<'_>, data: &str) -> Result {
    node.machine
        .run_within(
            BOUND,
            format!(
                "(yes '{PLAIN}' || true) | head -c 1048576 >/tmp/plain
                 cp /tmp/plain {data}/plain && sync -f {data}/plain
                 echo 3 >/proc/sys/vm/drop_caches
                 cmp {data}/plain /tmp/plain"
            ),
        )
        .map(drop)
}

/// How often the text was seen on the network while it was written to the volume and read.
fn frames_with(cluster: &Cluster, node: Node<'_>, data: &str) -> Result<u64> {
    cluster.net.look_for(PLAIN.as_bytes());
    write_plain(node, data)?;
    Ok(cluster.net.seen())
}

/// The owner's one listener with something at it: its port, and what it asks for.
fn listener(owner: &Machine) -> Result<(String, String)> {
    let text = owner.run(
        "cd /sys/kernel/config/nvmet/ports
         linked=$(echo */subsystems/*)
         cd ${linked%%/*}
         cat addr_trsvcid
         echo $(cat addr_tsas) $(cat addr_treq)",
    )?;
    let (port, asks) = text.split_once('\n').expect("two lines");
    Ok((port.to_owned(), asks.to_owned()))
}

/// Connects to what the owner exports as its consumer would, but for TLS.
fn try_plain(from: &Machine, owner: &Machine) -> Result<bool> {
    let text = owner
        .run("cd /sys/kernel/config/nvmet; basename subsystems/*; basename subsystems/*/allowed_hosts/*")?;
    let (branch, consumer) = text.split_once('\n').expect("one export");
    let address = owner.address();
    let tried = from.attempt(
        REFUSED,
        format!(
            "exec 3<>/dev/nvme-fabrics
             id=$(cat /proc/sys/kernel/random/uuid)
             echo -n transport=tcp,traddr={address},trsvcid=4421,nqn={branch},hostnqn={consumer},hostid=$id,ctrl_loss_tmo=0 >&3"
        ),
    )?;
    from.eventually(BOUND, "test -z \"$(ls /sys/class/nvme)\"")?;
    Ok(tried.success())
}

/// Nothing of the keys is in a log, nor in any object but the Secrets.
fn kept_secret(cluster: &Cluster) -> Result {
    let kinds = "volumesplits,branches,storagenodes,volumeattachments,events,configmaps";
    let shown = cluster.kubectl(&["get", kinds, "-A", "-o", "yaml"]);
    assert!(!shown.contains("NVMeTLSkey") && !shown.contains("DHHC-1:"), "a key is in an object");
    for node in cluster.nodes() {
        for word in ["NVMeTLSkey", "DHHC-1:"] {
            let told = node.last_told(word).unwrap_or_default();
            assert!(told.is_empty(), "a key is in the log of {}", node.name());
        }
    }
    Ok(())
}

/// Keys that are left in the kernel's keyring.
fn keys(machine: &Machine) -> Result<usize> {
    let text = machine.run("inside tls keys | { grep -o 'NVMe0R01 nqn.2026-01.io.union' || true; }")?;
    Ok(text.lines().count())
}

fn node_object(cluster: &Cluster, name: &str) -> StorageNode {
    let mut nodes = cluster.storage_nodes();
    nodes.retain(|node| node.spec.node.as_str() == name);
    nodes.pop().expect("a node")
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn cluster_tls_hides_a_branch_from_the_network_through_the_death_of_agents_and_machines() {
    on_cluster(|cluster| {
        if !cluster.storage_nodes().iter().all(|node| encrypts(node, Transport::NvmeTcp)) {
            for node in cluster.storage_nodes() {
                eprintln!("{}: {:?}", node.spec.node, node.status.transports.first().map(|t| &t.encryption));
            }
            eprintln!("SKIPPED: encryption itself, this kernel has none; that the class is refused is tried");
            return refused(cluster, "3");
        }
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let plain = on_node(cluster, "plain", "b", json!({}));
        cluster.attach(&plain, "a");
        let data = a.mount(&plain, "pod")?;
        let frames = frames_with(cluster, a, &data)?;
        assert!(frames > 100, "without encryption the bytes are seen: {frames}");
        leave(cluster, &plain, "a", "pod")?;

        let volume = on_node(cluster, "secret", "b", json!({"encryption": "required"}));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        assert_eq!(frames_with(cluster, a, &data)?, 0, "with it none is");
        assert_eq!(listener(b.machine)?, ("4421".to_owned(), "tls1.3 required".to_owned()));
        assert!(!try_plain(cluster.machine("c"), b.machine)?, "nobody gets in without TLS");
        let modes = a.machine.run("stat -c %a /sys/class/nvme/nvme*/dhchap{,_ctrl}_secret | sort -u")?;
        assert_eq!(modes, "600", "a pod that sees sysfs reads no key");
        kept_secret(cluster)?;

        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        // Connections that stand need no agent; one that is made anew waits for it, at either end.
        for node in [b, a] {
            node.kill_agent()?;
            goes_on(&mut writer, &log(), SOME)?;
            cluster.net.cut("a", "b");
            thread::sleep(OUTAGE);
            cluster.net.heal("a", "b");
            thread::sleep(STILL);
            let held = Told::read(&writer.output_so_far()).count(LOG);
            thread::sleep(STILL);
            assert_eq!(Told::read(&writer.output_so_far()).count(LOG), held, "nobody answers the kernel");
            node.start_agent()?;
            goes_on(&mut writer, &log(), SOME)?;
            node.ready()?;
        }

        b.machine.pull_plug();
        thread::sleep(OUTAGE);
        b.machine.start()?;
        b.start_agent()?;
        b.exports_again()?;
        goes_on(&mut writer, &log(), SOME)?;
        b.ready()?;
        assert_eq!(listener(b.machine)?.0, "4421", "after a reboot too");
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "it waited");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        assert_eq!(frames_with(cluster, a, &data)?, 0, "after all that");
        kept_secret(cluster)?;

        // Another node gets it, by a key of its own.
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");
        assert_eq!(keys(a.machine)?, 0, "what is detached has no key any more");
        cluster.attach(&volume, "c");
        let c = cluster.node("c");
        let data = c.mount(&volume, "other")?;
        told.require_in(LOG, "x", &text(c, &data, LOG)?);
        assert_eq!(frames_with(cluster, c, &data)?, 0);
        assert_eq!((keys(b.machine)?, keys(c.machine)?), (1, 1));
        leave(cluster, &volume, "c", "other")?;
        assert_eq!((keys(b.machine)?, keys(c.machine)?), (0, 0));
        old_key(cluster)?;
        one_that_cannot(cluster)
    });
}

/// A key of a version that did not encrypt is made anew when encryption is required.
fn old_key(cluster: &Cluster) -> Result {
    let of = "union.io/owner=b,union.io/consumer=a";
    let text = cluster.kubectl(&["get", "secrets", "-n", NAMESPACE, "-l", of, "-o", "json"]);
    let found: Value = serde_json::from_str(&text).expect("JSON");
    let mut secret = found["items"][0].clone();
    assert!(secret["data"]["tls"].is_string(), "it has a key for TLS beside the other");
    secret["data"].as_object_mut().expect("data").remove("tls");
    let name = secret["metadata"]["name"].as_str().expect("a name").to_owned();
    secret["metadata"] = json!({"name": name, "namespace": NAMESPACE, "labels": secret["metadata"]["labels"],
        "ownerReferences": secret["metadata"]["ownerReferences"]});
    cluster.kubectl(&["delete", "secret", "-n", NAMESPACE, &name]);
    let file = std::env::temp_dir().join(format!("union-csi-secret-{}", std::process::id()));
    std::fs::write(&file, secret.to_string()).expect("a file");
    cluster.kubectl(&["create", "-f", file.to_str().expect("a path")]);
    let _ = std::fs::remove_file(&file);
    let (a, volume) = (cluster.node("a"), on_node(cluster, "old", "b", json!({"encryption": "required"})));
    cluster.attach(&volume, "a");
    let data = a.mount(&volume, "pod")?;
    assert_eq!(frames_with(cluster, a, &data)?, 0);
    leave(cluster, &volume, "a", "pod")
}

/// A node that lacks a module gets no branch, and the claim that needs it says why.
fn one_that_cannot(cluster: &Cluster) -> Result {
    let c = cluster.node("c");
    c.stop_agent()?;
    c.machine.run(
        "rmmod tls
         mount -t tmpfs none /lib/modules/$(uname -r)/kernel/net/tls",
    )?;
    c.start_agent()?;
    c.ready()?;
    let reason = cluster.within(BOUND, "the node says that it cannot encrypt", || {
        let node = node_object(cluster, "c");
        let nvme = node.status.transports.iter().find(|t| t.transport == Transport::NvmeTcp)?;
        (!nvme.encryption.able && nvme.authentication.able).then(|| nvme.encryption.reason.clone())
    });
    assert!(reason.contains("tls"), "{reason}");
    refused(cluster, "3")?;
    cluster.class(
        "two",
        "Immediate",
        json!({"encryption": "required", "strategy": "spread", "minBranches": "2"}),
    );
    let volume: Volume = cluster.bound(&cluster.claim("two", "two", "96Mi"));
    let mut owners: Vec<_> =
        cluster.branches_of(&volume).iter().map(|branch| branch.spec.node.to_string()).collect();
    owners.sort_unstable();
    assert_eq!(owners, ["a", "b"], "none on the one that cannot");
    cluster.ask_to_attach(&volume, "c");
    let why = cluster
        .within(BOUND, "it is said why it is not attached there", || cluster.attached(&volume, "c").err());
    assert!(why.contains("encrypt"), "{why}");
    cluster.detach(&volume, "c");
    cluster.attach(&volume, "a");
    let data = cluster.node("a").mount(&volume, "pod")?;
    assert_eq!(frames_with(cluster, cluster.node("a"), &data)?, 0);
    leave(cluster, &volume, "a", "pod")?;
    c.stop_agent()?;
    c.machine.run("umount /lib/modules/$(uname -r)/kernel/net/tls")?;
    c.start_agent()?;
    c.ready()
}

/// Where that many nodes are needed and not all can encrypt, a class that requires it gets nothing, and its claim says why.
fn refused(cluster: &Cluster, branches: &str) -> Result {
    let parameters = json!({"encryption": "required", "strategy": "spread", "minBranches": branches});
    cluster.class("all", "Immediate", parameters);
    let claim = cluster.claim("all", "all", "192Mi");
    let told = cluster.within(BOUND, "the claim says why it is not bound", || {
        let told = cluster.events_of(&claim.name).join("; ");
        told.contains("encrypt").then_some(told)
    });
    assert!(told.contains("requires encryption"), "{told}");
    cluster.kubectl(&["delete", "pvc", &claim.name, "--wait=false"]);
    Ok(())
}
