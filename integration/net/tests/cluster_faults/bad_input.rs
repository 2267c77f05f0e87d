//! What others got wrong: addresses, ports, kernels, versions.

use std::time::Duration;

use serde_json::{Value, json};

use super::{directory, leave, on_node};
use crate::support::Result;
use crate::support::cluster::{BOUND, Cluster, Node, Volume, on_cluster};

/// Asks once for the volume on `a`; why it was refused.
fn refused(cluster: &Cluster, volume: &Volume) -> Result<String> {
    let output = cluster.node("a").try_stage(volume)?;
    assert!(!output.success(), "it was staged: {output}");
    Ok(format!("{} {}", output.text(), output.errors()))
}

/// What is said of the branch's export, or of nothing yet.
fn exported(cluster: &Cluster, volume: &Volume) -> (bool, String) {
    let branches = cluster.branches_of(volume);
    let conditions = branches.first().map(|b| b.status.conditions.clone()).unwrap_or_default();
    let found = conditions.iter().find(|c| c.kind == "Exported").cloned();
    found.map_or((false, String::new()), |c| (c.status, c.message))
}

/// Volumes on `b`, attached to `a` and not staged.
fn two(cluster: &Cluster, name: &str) -> [Volume; 2] {
    [("image", json!({})), ("directory", directory())].map(|(kind, parameters)| {
        let volume = on_node(cluster, &format!("{name}-{kind}"), "b", parameters);
        cluster.attach(&volume, "a");
        volume
    })
}

fn works(cluster: &Cluster, volume: &Volume) -> Result {
    let a = cluster.node("a");
    let data = a.mount(volume, "pod")?;
    a.machine.run_within(BOUND, format!("echo well >{data}/file; sync -f {data}; cat {data}/file"))?;
    leave(cluster, volume, "a", "pod")
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_that_tells_a_wrong_address_is_not_used_and_put_right_by_itself() {
    on_cluster(|cluster| {
        let volumes = two(cluster, "address");
        for volume in &volumes {
            cluster.within(BOUND, "it is exported", || exported(cluster, volume).0.then_some(()));
        }
        let b = cluster.node("b");
        b.kill_agent()?;
        // Of another owner, and of nobody.
        for wrong in ["10.77.0.3", "10.77.0.99"] {
            for volume in &volumes {
                cluster.say_address(volume, wrong);
                let said = refused(cluster, volume)?;
                assert!(said.contains(wrong), "{said}");
            }
        }
        b.start_agent()?;
        b.ready()?;
        volumes.iter().try_for_each(|volume| works(cluster, volume))
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_port_that_another_program_has_is_told_of_and_used_when_it_is_free() {
    on_cluster(|cluster| {
        let b = cluster.node("b");
        // The kernel's NFS server listens on when nothing is exported any more.
        b.machine.run("for each in /proc/fs/nfsd/threads; do [ ! -e $each ] || echo 0 >$each; done")?;
        let mut listener =
            b.machine.start_command("exec inside known listen 4420 2049", Duration::from_secs(900))?;
        assert!(listener.says("begins", BOUND)?, "{listener:?}");
        let volumes = two(cluster, "port");
        for (volume, port) in volumes.iter().zip(["4420", "2049"]) {
            let said = cluster.within(BOUND, "the owner says why it is not exported", || {
                let (open, message) = exported(cluster, volume);
                (!open && message.contains(port)).then_some(message)
            });
            let told = refused(cluster, volume)?;
            assert!(told.contains(&said), "{told}");
        }
        listener.kill();
        volumes.iter().try_for_each(|volume| works(cluster, volume))
    });
}

/// Waits until node `b` says that it can or cannot be the owner by that transport; its reason.
fn owns(cluster: &Cluster, transport: &str, able: bool) -> String {
    cluster.within(BOUND, &format!("b says that it can own by {transport}: {able}"), || {
        let nodes = cluster.storage_nodes();
        let b = nodes.iter().find(|n| n.meta.name == "b")?;
        let report = b.status.transports.iter().find(|t| t.transport.as_str() == transport)?;
        (report.owner.able == able).then(|| report.owner.reason.clone())
    })
}

fn begin_anew(b: Node<'_>) -> Result {
    b.stop_agent()?;
    b.start_agent()?;
    b.ready()
}

/// Why the claim is not bound, once that is said.
fn waits(cluster: &Cluster, claim: &str) -> String {
    cluster.within(BOUND, "it is said why the claim is not bound", || {
        let said: Vec<String> = cluster.events_of(claim);
        said.into_iter().find(|message| message.contains("node") && !message.starts_with("finding room"))
    })
}

/// A claim of a pod on `a` whose class wants its branch on `b`.
fn wanted_on_b(cluster: &Cluster, name: &str, parameters: Value) -> crate::support::cluster::Claim {
    let mut all = json!({"nodeSelector": "kubernetes.io/hostname=b", "maxBranches": "1"});
    if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
        all.extend(more);
    }
    cluster.class(name, "WaitForFirstConsumer", all);
    let claim = cluster.claim(name, name, "64Mi");
    cluster.select(&claim, "a");
    claim
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nothing_is_placed_on_an_owner_whose_kernel_lacks_the_module_until_it_is_there() {
    on_cluster(|cluster| {
        let b = cluster.node("b");
        b.stop_agent()?;
        b.machine.run(
            "modprobe -r nvmet-tcp
             cd /lib/modules/$(uname -r)
             cp modules.dep modules.all; sed -i '/nvmet-tcp[.]ko[^:]*:/d' modules.dep
             file=$(find . -name 'nvmet-tcp.ko*'); mv $file $file.away",
        )?;
        b.start_agent()?;
        b.ready()?;
        let reason = owns(cluster, "nvme-tcp", false);
        assert!(reason.contains("nvmet-tcp") || reason.contains("nvmet_tcp"), "{reason}");
        let claim = wanted_on_b(cluster, "module", json!({"branchFormat": "image"}));
        let said = waits(cluster, &claim.name);
        eprintln!("the claim: {said}");
        assert!(cluster.branches().is_empty(), "nothing is placed");
        b.machine.run(
            "cd /lib/modules/$(uname -r); mv modules.all modules.dep; file=$(find . -name 'nvmet-tcp.ko*.away'); mv $file ${file%.away}",
        )?;
        owns(cluster, "nvme-tcp", true);
        // The claim was given back to the scheduler, which tries again.
        cluster.select(&claim, "a");
        let volume = cluster.bound(&claim);
        cluster.attach(&volume, "a");
        works(cluster, &volume)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nothing_is_placed_on_an_owner_whose_nfs_server_is_someone_elses_and_that_server_stays_as_it_is() {
    on_cluster(|cluster| {
        let b = cluster.node("b");
        b.stop_agent()?;
        // As nfs-server.service does, without its programs.
        b.machine.run(
            "test -e /proc/fs/nfsd/threads || mount -t nfsd nfsd /proc/fs/nfsd
             echo 0 >/proc/fs/nfsd/threads
             mkdir -p /root/recovery; echo /root/recovery >/proc/fs/nfsd/nfsv4recoverydir
             echo '-3 +4' >/proc/fs/nfsd/versions; echo 2 >/proc/fs/nfsd/threads",
        )?;
        b.start_agent()?;
        b.ready()?;
        let reason = owns(cluster, "nfs", false);
        assert!(reason.contains("someone else"), "{reason}");
        let claim = wanted_on_b(cluster, "foreign", directory());
        eprintln!("the claim: {}", waits(cluster, &claim.name));
        assert_eq!(b.machine.run("cat /proc/fs/nfsd/threads")?, "2");
        b.machine.run("echo 0 >/proc/fs/nfsd/threads")?;
        begin_anew(b)?;
        owns(cluster, "nfs", true);
        // The claim was given back to the scheduler, which tries again.
        cluster.select(&claim, "a");
        let volume = cluster.bound(&claim);
        cluster.attach(&volume, "a");
        works(cluster, &volume)
    });
}
