//! Nodes that prove to each other who they are, in a cluster: keys from the Secret to both kernels.

use std::time::Duration;

use serde_json::{Value, json};
use union_csi::domain::reach::Transport;
use union_csi::store::view::authenticates;

use crate::support::cluster::{BOUND, Cluster, NAMESPACE, Volume, on_cluster};
use crate::support::{Machine, Output, Result};

/// Longer than the kernel waits where an owner ends the connection before its refusal was read.
const REFUSED: Duration = Duration::from_secs(100);

/// The key that two nodes share, from its Secret.
fn key(cluster: &Cluster, owner: &str, consumer: &str) -> Option<String> {
    let of = format!("union.io/owner={owner},union.io/consumer={consumer}");
    let text = cluster.kubectl(&["get", "secrets", "-n", NAMESPACE, "-l", &of, "-o", "json"]);
    let found: Value = serde_json::from_str(&text).expect("JSON");
    let secret = match found["items"].as_array().map(Vec::as_slice) {
        Some([secret]) => secret,
        Some([]) => return None,
        _ => panic!("one Secret for each pair: {found}"),
    };
    assert_eq!(secret["type"], "union.io/nvme-chap");
    assert_eq!(secret["immutable"], true);
    assert_eq!(secret["metadata"]["ownerReferences"][0]["kind"], "StorageNode");
    let name = secret["metadata"]["name"].as_str().expect("a name");
    let template = "go-template={{.data.key | base64decode}}";
    let key = cluster.kubectl(&["get", "secret", "-n", NAMESPACE, name, "-o", template]);
    assert!(key.starts_with("DHHC-1:"), "a key of that form");
    Some(key)
}

/// What an owner's kernel has for this consumer's branches: the branch's name, the consumer's name, and its key.
fn exported(owner: &Machine) -> Result<(String, String, String)> {
    let text = owner.run(
        "cd /sys/kernel/config/nvmet
         basename subsystems/*
         basename subsystems/*/allowed_hosts/*
         cat hosts/*/dhchap_key
         test -n \"$(cat hosts/*/dhchap_ctrl_key)\"",
    )?;
    let [branch, consumer, key] = text.lines().collect::<Vec<_>>()[..] else { panic!("one export: {text}") };
    Ok((branch.to_owned(), consumer.to_owned(), key.to_owned()))
}

/// Connects to a branch under a name, past the agent, as someone would who has taken over a machine on the network.
fn try_connect(
    from: &Machine,
    owner: &Machine,
    branch: &str,
    name: &str,
    key: Option<&str>,
) -> Result<Output> {
    let key = key.map(|key| format!(",dhchap_secret={key}")).unwrap_or_default();
    let address = owner.address();
    from.attempt(
        REFUSED,
        format!(
            "exec 3<>/dev/nvme-fabrics
             id=$(cat /proc/sys/kernel/random/uuid)
             echo -n transport=tcp,traddr={address},trsvcid=4420,nqn={branch},hostnqn={name},hostid=$id,ctrl_loss_tmo=0{key} >&3"
        ),
    )
}

/// A volume with a branch on each node.
fn over_all(cluster: &Cluster, name: &str) -> Volume {
    cluster.bound(&cluster.claim(name, "proven", "192Mi"))
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn cluster_keys_are_made_kept_proven_and_changed_and_a_class_may_require_them() {
    on_cluster(|cluster| {
        let parameters = json!({"authentication": "required", "strategy": "spread", "minBranches": "3"});
        cluster.class("proven", "Immediate", parameters);
        let nodes = cluster.storage_nodes();
        if !nodes.iter().all(|node| authenticates(node, Transport::NvmeTcp)) {
            eprintln!("SKIPPED: keys themselves, this kernel has none; that the class is refused is tried");
            return refused(cluster);
        }
        let volume = over_all(cluster, "proven");
        cluster.attach(&volume, "a");
        let (a, b, c) = (cluster.node("a"), cluster.machine("b"), cluster.machine("c"));
        let data = a.mount(&volume, "pod")?;
        a.machine.run(format!("echo one >{data}/file && sync -f {data}"))?;

        // One key for each pair that shares a branch, in no other pair's hands.
        let first = key(cluster, "b", "a").expect("b and a have a key");
        let other = key(cluster, "c", "a").expect("c and a have a key");
        assert_ne!(first, other);
        assert_eq!(key(cluster, "a", "b"), None);
        let (branch, consumer, known) = exported(b)?;
        assert!(known == first, "the owner's kernel asks for the key of the Secret");
        let shown = a.machine.run(
            "grep -lx live /sys/class/nvme/nvme*/state | wc -l; cat /sys/class/nvme/nvme*/dhchap_secret",
        )?;
        let mut shown: Vec<&str> = shown.lines().collect();
        assert_eq!(shown.remove(0), "2", "both branches of others are connected");
        shown.sort_unstable();
        let mut both = [first.as_str(), other.as_str()];
        both.sort_unstable();
        assert!(shown == both, "the consumer's kernel proves to have the keys of the Secrets");

        // Another machine that takes the consumer's name gets nothing without its key, nor under another name with it.
        let wrong = c.run("inside transport nvme key")?;
        let wrong: Value = serde_json::from_str(&wrong).expect("JSON");
        let another = consumer.replace(":a:", ":c:");
        let tries = [(&consumer, None), (&consumer, wrong["key"].as_str()), (&another, Some(first.as_str()))];
        for (name, key) in tries {
            let tried = try_connect(c, b, &branch, name, key)?;
            assert!(!tried.success(), "connected as {name}, with a key: {}", key.is_some());
            c.eventually(BOUND, "test -z \"$(ls /sys/class/nvme)\"")?;
        }
        a.machine.run(format!("grep -x one {data}/file && echo two >>{data}/file && sync -f {data}"))?;
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");

        // A key that was taken out is made anew, and the one before opens nothing.
        let of = "union.io/owner=b,union.io/consumer=a";
        cluster.kubectl(&["delete", "secrets", "-n", NAMESPACE, "-l", of]);
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        a.machine.run(format!("tail -n 1 {data}/file | grep -x two"))?;
        let second = key(cluster, "b", "a").expect("b and a have a key again");
        assert!(second != first, "another key");
        let (branch, consumer, known) = exported(b)?;
        assert!(known == second, "the owner's kernel asks for the new key");
        let tried = try_connect(c, b, &branch, &consumer, Some(&first))?;
        assert!(!tried.success(), "connected with the key of before");
        c.eventually(BOUND, "test -z \"$(ls /sys/class/nvme)\"")?;
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");
        cluster.delete(&volume);
        Ok(())
    });
}

/// Where kernels know no keys, a class that requires them gets nothing over the network, and its claims say why.
fn refused(cluster: &Cluster) -> Result {
    let claim = cluster.claim("proven", "proven", "192Mi");
    let told = cluster.within(BOUND, "the claim says why it is not bound", || {
        let of = "involvedObject.name=proven,reason=ProvisioningFailed";
        let text =
            cluster.kubectl(&["get", "events", "--field-selector", of, "-o", "jsonpath={.items[*].message}"]);
        (!text.is_empty()).then_some(text)
    });
    assert!(told.contains("requires authentication"), "{told}");
    cluster.kubectl(&["delete", "pvc", &claim.name, "--wait=false"]);
    // On one node nobody has to be asked.
    cluster.class("proven-here", "WaitForFirstConsumer", json!({"authentication": "required"}));
    let claim = cluster.claim("proven-here", "proven-here", "64Mi");
    cluster.select(&claim, "b");
    let volume = cluster.bound(&claim);
    cluster.attach(&volume, "b");
    let b = cluster.node("b");
    b.mount(&volume, "pod")?;
    b.unmount(&volume, "pod")?;
    cluster.detach(&volume, "b");
    cluster.delete(&volume);
    Ok(())
}
