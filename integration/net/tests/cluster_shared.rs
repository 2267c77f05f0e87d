//! Volumes that several nodes use at once: ReadWriteMany, and ReadOnlyMany of what one node filled.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::cluster::{Agent, BOUND, Cluster, Node, QUOTA_POOL, Volume, on_cluster};
use crate::support::faults::Told;
use crate::support::{Result, Running};

/// Records that must be safe before something is broken, and after it.
const SOME: usize = 20;

/// How long a machine is off.
const OUTAGE: Duration = Duration::from_secs(12);

/// A bound ReadWriteMany volume whose one directory is on node `b`.
fn many(cluster: &Cluster, name: &str) -> Volume {
    // The machines' pools cannot enforce the size of a directory.
    let on_b = json!({"nodeSelector": "kubernetes.io/hostname=b", "enforcement": "none"});
    cluster.class(name, "Immediate", on_b);
    let volume = cluster.bound(&cluster.claim_with(name, name, "96Mi", "ReadWriteMany"));
    let branches = cluster.branches_of(&volume);
    assert_eq!(branches.len(), 1, "{branches:?}");
    assert_eq!(branches[0].spec.node.as_str(), "b");
    volume
}

/// The volume on a node, for a pod of the same name; the directory.
fn mount(cluster: &Cluster, volume: &Volume, node: &str) -> Result<String> {
    cluster.attach(volume, node);
    cluster.node(node).mount(volume, node)
}

fn leave(cluster: &Cluster, volume: &Volume, nodes: &[&str]) -> Result {
    for node in nodes {
        cluster.node(node).unmount(volume, node)?;
        cluster.detach(volume, node);
    }
    cluster.delete(volume);
    Ok(())
}

/// A pod on each node that appends to a file of its own, named as the node.
fn writers(cluster: &Cluster, volume: &Volume, nodes: &[&str]) -> Result<Vec<Running>> {
    let mut running = Vec::new();
    for node in nodes {
        running.push(cluster.node(node).write(volume, node, node, &[(*node).to_owned()])?);
    }
    Ok(running)
}

fn safe(writer: &mut Running, file: &str) -> usize {
    Told::read(&writer.output_so_far()).count(file)
}

/// Waits until as many more records as [`SOME`] are safe in the file.
fn goes_on(writer: &mut Running, file: &str) {
    let (before, end) = (safe(writer, file), Instant::now() + BOUND);
    while safe(writer, file) < before + SOME {
        assert!(
            !writer.has_ended() && Instant::now() < end,
            "no more records are safe in {file}: {writer:?}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

/// Ends the writer and requires every safe record in its file, as another node sees it.
fn ends(mut writer: Running, file: &str, reader: Node<'_>, data: &str) -> Result<Told> {
    writer.kill();
    let end = Instant::now() + BOUND;
    while !writer.has_ended() {
        assert!(Instant::now() < end, "the writer cannot be ended: {writer:?}");
        thread::sleep(Duration::from_millis(100));
    }
    let told = Told::read(&writer.output_so_far());
    told.require_in(file, file, &reader.machine.run_within(BOUND, format!("cat '{data}/{file}'"))?);
    Ok(told)
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn pods_on_two_and_then_three_nodes_write_one_volume_and_find_each_others_files_and_locks() {
    on_cluster(|cluster| {
        let volume = many(cluster, "shared");
        let (a, c) = (cluster.node("a"), cluster.node("c"));
        let (on_a, on_c) = (mount(cluster, &volume, "a")?, mount(cluster, &volume, "c")?);
        // Neither of the two is the owner.
        a.machine.run(format!("echo from a >{on_a}/a; mkdir {on_a}/d"))?;
        assert_eq!(
            c.machine.run(format!("cat {on_c}/a; echo from c >{on_c}/d/c; echo more >>{on_c}/a"))?,
            "from a"
        );
        assert_eq!(a.machine.run(format!("cat {on_a}/d/c {on_a}/a"))?, "from c\nfrom a\nmore");

        let on_b = mount(cluster, &volume, "b")?;
        let all = [("a", on_a.as_str()), ("b", &on_b), ("c", &on_c)];
        for (number, (writer, at)) in all.iter().enumerate() {
            let file = format!("file-{number}");
            cluster.node(writer).machine.run(format!("echo {writer} >{at}/{file}"))?;
            for (reader, there) in all {
                assert_eq!(&cluster.node(reader).machine.run(format!("cat {there}/{file}"))?, writer);
            }
        }
        // A lock on one node keeps the others out, the owner's node among them, whoever has it.
        cluster.node("a").machine.run(format!("touch {on_a}/lock"))?;
        for (holder, at) in all {
            let machine = cluster.node(holder).machine;
            let mut held = machine.start_command(format!("inside nfs hold-range {at}/lock"), BOUND)?;
            assert!(held.says("held", BOUND)?);
            for (other, there) in all.iter().filter(|(other, _)| *other != holder) {
                let found = cluster.node(other).machine.run(format!("inside nfs try-range {there}/lock"))?;
                assert_eq!(found, "taken", "{holder} has it, {other} tries");
            }
            held.kill();
        }
        // Nothing is lost of what all three append under it.
        let mut appending = Vec::new();
        for (node, at) in all {
            let script = format!("inside nfs append-locked {at}/log {node} 60");
            cluster.node("b").machine.run(format!("touch {on_b}/log"))?;
            appending.push(cluster.node(node).machine.start_command(script, BOUND)?);
        }
        for each in appending {
            let outcome = each.wait()?;
            assert!(outcome.success(), "{outcome}");
        }
        let counts = c.machine.run(format!("sort {on_c}/log | uniq -c | tr -s ' '"))?;
        assert_eq!(counts.split_whitespace().collect::<Vec<_>>(), ["60", "a", "60", "b", "60", "c"]);

        // One leaves in order: the others notice nothing.
        let mut running = writers(cluster, &volume, &["b", "c"])?;
        running.iter_mut().zip(["b", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        a.unmount(&volume, "a")?;
        cluster.detach(&volume, "a");
        for (mut writer, file) in running.into_iter().zip(["b", "c"]) {
            goes_on(&mut writer, file);
            assert_eq!(ends(writer, file, c, &on_c)?.errors, []);
        }
        leave(cluster, &volume, &["b", "c"])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn the_size_of_a_directory_holds_on_every_node_but_for_root_where_it_lies_on_ext4() {
    on_cluster(|cluster| {
        let b = cluster.node("b");
        b.machine.run(format!(
            "truncate -s 160M /state/quota.disk && mkfs.ext4 -q -O quota,project -E quotatype=prjquota /state/quota.disk &&
             mkdir -p {QUOTA_POOL} && mount -o loop,prjquota /state/quota.disk {QUOTA_POOL}"
        ))?;
        b.restart_as(Agent::WithQuota)?;
        cluster.class("sized", "Immediate", json!({"nodeSelector": "kubernetes.io/hostname=b"}));
        let volume = cluster.bound(&cluster.claim_with("sized", "sized", "32Mi", "ReadWriteMany"));
        let on_a = mount(cluster, &volume, "a")?;
        let a = cluster.node("a").machine;
        assert_eq!(a.run(format!("df -k {on_a} | awk 'END {{print $2}}'"))?, (32 * 1024).to_string());
        a.run(format!("mkdir {on_a}/user && chown 1000:1000 {on_a}/user"))?;
        let written = |script: &str| {
            a.attempt(BOUND, format!("{script} dd if=/dev/zero of={on_a}/user/big bs=1M count=40 conv=fsync"))
        };
        let refused = written("setpriv --reuid 1000 --regid 1000 --clear-groups")?;
        assert!(!refused.success(), "40 MiB were written into 32: {refused}");
        let told = refused.errors();
        assert!(told.contains("No space left") || told.contains("quota exceeded"), "{told}");
        let kept = b.machine.run(format!("du -sk {QUOTA_POOL}/branches/*/data | awk '{{print $1}}'"))?;
        let kept: u64 = kept.parse().expect("KiB");
        assert!(kept > 24 << 10 && kept <= 32 << 10, "{kept} KiB on the owner's disk, of 32 MiB");
        a.run(format!("rm {on_a}/user/big"))?;
        // The kernel's server writes as root with CAP_SYS_RESOURCE, and ext4 lets that pass: docs/LIMITS.md says so.
        let passed = written("")?;
        assert!(passed.success(), "LIMITS can promise more: {passed}");
        leave(cluster, &volume, &["a"])?;
        b.restart_as(Agent::WithPool)?;
        b.machine.run(format!("umount {QUOTA_POOL} && rm /state/quota.disk")).map(drop)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_node_that_is_detached_under_its_pod_writes_no_more_while_the_others_go_on() {
    on_cluster(|cluster| {
        let volume = many(cluster, "forced");
        for node in ["a", "b", "c"] {
            mount(cluster, &volume, node)?;
        }
        let mut running = writers(cluster, &volume, &["a", "b", "c"])?;
        running.iter_mut().zip(["a", "b", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        // As by the out-of-service taint: nobody asks the node.
        cluster.detach(&volume, "a");
        let end = Instant::now() + BOUND;
        while Told::read(&running[0].output_so_far()).errors.is_empty() {
            assert!(Instant::now() < end, "it writes on: {:?}", running[0]);
            thread::sleep(Duration::from_millis(200));
        }
        let (a, b, c) = (cluster.node("a"), cluster.node("b"), cluster.node("c"));
        let (on_b, on_c) = (Node::target(&volume, "b"), Node::target(&volume, "c"));
        let size = || b.machine.run(format!("stat -c %s {on_b}/a"));
        cluster.within(BOUND, "its owner has fenced it", || {
            let told = cluster.branches_of(&volume).remove(0).status.sharing?;
            (!told.consumers.iter().any(|sharer| sharer.node.as_str() == "a")).then_some(())
        });
        let before = size()?;
        running[1..].iter_mut().zip(["b", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        assert_eq!(size()?, before, "nothing of the node that was fenced landed");
        let fenced = ends(running.remove(0), "a", b, &on_b)?;
        assert!(!fenced.errors.is_empty());
        // It may not have it again, whatever its kubelet asks for, until it is attached again.
        a.unmount(&volume, "a")?;
        let refused = a.try_stage(&volume)?;
        assert!(!refused.success(), "it was staged: {refused}");
        let on_a = mount(cluster, &volume, "a")?;
        assert_eq!(a.machine.run(format!("stat -c %s {on_a}/a"))?, before);
        a.machine.run(format!("echo again >{on_a}/again"))?;
        assert_eq!(c.machine.run(format!("cat {on_c}/again"))?, "again");
        for (mut writer, file) in running.into_iter().zip(["b", "c"]) {
            goes_on(&mut writer, file);
            assert_eq!(ends(writer, file, a, &on_a)?.errors, [], "who stays sees no error");
        }
        leave(cluster, &volume, &["a", "b", "c"])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn one_of_the_nodes_that_loses_power_holds_up_no_other_and_finds_its_volume_when_it_returns() {
    on_cluster(|cluster| {
        let volume = many(cluster, "one-gone");
        for node in ["a", "b", "c"] {
            mount(cluster, &volume, node)?;
        }
        let mut running = writers(cluster, &volume, &["a", "b", "c"])?;
        running.iter_mut().zip(["a", "b", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        let (a, b, c) = (cluster.node("a"), cluster.node("b"), cluster.node("c"));
        let (on_a, on_b, on_c) =
            (Node::target(&volume, "a"), Node::target(&volume, "b"), Node::target(&volume, "c"));
        let mut held = a
            .machine
            .start_command(format!("touch {on_a}/lock; inside nfs hold-range {on_a}/lock"), BOUND)?;
        assert!(held.says("held", BOUND)?);
        a.machine.pull_plug();
        let last = Told::read(&running.remove(0).output_so_far());
        running.iter_mut().zip(["b", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        last.require_in("a", "a", &c.machine.run_within(BOUND, format!("cat {on_c}/a"))?);
        // What it had locked is free when its lease has ended.
        c.machine.eventually(BOUND, format!("test \"$(inside nfs try-range {on_c}/lock)\" = free"))?;
        a.boot()?;
        // Its VolumeAttachment stands: its kubelet starts the pod again.
        let on_a = a.mount(&volume, "a")?;
        last.require_in("a", "a", &a.machine.run_within(BOUND, format!("cat {on_a}/a"))?);
        let mut writer = a.write(&volume, "a", "second", &["second".to_owned()])?;
        goes_on(&mut writer, "second");
        ends(writer, "second", b, &on_b)?;
        for (mut writer, file) in running.into_iter().zip(["b", "c"]) {
            goes_on(&mut writer, file);
            let told = ends(writer, file, a, &on_a)?;
            assert_eq!(told.errors, []);
        }
        leave(cluster, &volume, &["a", "b", "c"])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn the_owner_of_a_shared_volume_that_loses_power_holds_all_up_until_it_returns_and_nothing_is_lost() {
    on_cluster(|cluster| {
        let volume = many(cluster, "owner-gone");
        for node in ["a", "c"] {
            mount(cluster, &volume, node)?;
        }
        let mut running = writers(cluster, &volume, &["a", "c"])?;
        running.iter_mut().zip(["a", "c"]).for_each(|(writer, file)| goes_on(writer, file));
        let (a, b, c) = (cluster.node("a"), cluster.node("b"), cluster.node("c"));
        b.machine.pull_plug();
        thread::sleep(OUTAGE);
        b.boot()?;
        let (on_a, on_c) = (Node::target(&volume, "a"), Node::target(&volume, "c"));
        for (mut writer, file) in running.into_iter().zip(["a", "c"]) {
            goes_on(&mut writer, file);
            let (reader, data) = if file == "a" { (c, &on_c) } else { (a, &on_a) };
            let told = ends(writer, file, reader, data)?;
            assert_eq!(told.errors, [], "it waited");
        }
        // A third node comes only now.
        let on_b = mount(cluster, &volume, "b")?;
        assert_eq!(b.machine.run(format!("cd {on_b} && ls"))?, "a\nc");
        leave(cluster, &volume, &["a", "b", "c"])
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn what_one_node_filled_is_read_by_three_and_their_writes_are_refused_by_its_owners_too() {
    on_cluster(|cluster| {
        let parameters = json!({
            "strategy": "spread", "minBranches": "2", "maxBranches": "2", "branchFormat": "directory", "enforcement": "none",
        });
        cluster.class("fill", "Immediate", parameters);
        let volume = cluster.bound(&cluster.claim("fill", "fill", "96Mi"));
        let a = cluster.node("a");
        let data = mount(cluster, &volume, "a")?;
        a.machine.run(format!("cd {data} && mkdir d && for i in $(seq 30); do head -c 100000 /dev/urandom >d/$i; done; sync -f ."))?;
        let sums = "find . -type f -print0 | sort -z | xargs -0 sha256sum";
        let filled = a.machine.run_within(BOUND, format!("cd {data} && {sums}"))?;
        a.unmount(&volume, "a")?;
        cluster.detach(&volume, "a");

        // From here on it is read, on all nodes.
        let volume = cluster.change_mode(&volume, "ReadOnlyMany");
        let nodes = ["a", "b", "c"];
        for node in nodes {
            let data = mount(cluster, &volume, node)?;
            let machine = cluster.node(node).machine;
            assert_eq!(machine.run_within(BOUND, format!("cd {data} && {sums}"))?, filled);
            let refused = machine.attempt(BOUND, format!("touch {data}/new"))?;
            assert!(refused.errors().contains("Read-only file system"), "{refused}");
        }
        // Also whoever goes around what the driver mounted is refused: by the servers. Each node has at least one branch of
        // another attached.
        for node in nodes {
            let machine = cluster.node(node).machine;
            let attached =
                machine.run("awk '$3 == \"nfs4\" && $2 ~ /attached/ { print $2 }' /proc/mounts | sort -u")?;
            assert!(!attached.is_empty(), "node {node}");
            for point in attached.lines() {
                machine
                    .run(format!("awk '$2 == \"{point}\" {{ print $4 }}' /proc/mounts | grep -q '^rw'"))?;
                let refused = machine.attempt(BOUND, format!("touch {point}/data/new"))?;
                assert!(refused.errors().contains("Read-only file system"), "{node}: {refused}");
            }
        }
        leave(cluster, &volume, &nodes)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_copy_of_a_branch_on_another_node_serves_nobody_and_who_is_not_let_is_refused() {
    on_cluster(|cluster| {
        let volume = many(cluster, "copied");
        let (a, b, c) = (cluster.node("a"), cluster.node("b"), cluster.node("c"));
        let on_a = mount(cluster, &volume, "a")?;
        a.machine.run(format!("echo true >{on_a}/file; sync -f {on_a}"))?;
        let branch = &cluster.branches_of(&volume)[0];
        let generation = branch.status.sharing.as_ref().expect("it is shared").generation;
        let id = format!("{}@{generation}", branch.spec.id);

        // By hand, with all that says what it is.
        let copied = format!("/pool/branches/{}", branch.spec.id);
        let files = ["branch.json", "export.json", "sharing.json"];
        c.machine.run(format!("mkdir -p {copied}/data && echo false >{copied}/data/file"))?;
        for file in files {
            let text = b.machine.run(format!("cat {copied}/{file}"))?;
            c.machine.write(&format!("{copied}/{file}"), text.as_bytes())?;
        }
        // A node that restarts finds it, and neither serves nor removes it.
        for node in [c, b] {
            node.stop_agent()?;
            node.start_agent()?;
            node.ready()?;
        }
        let exports = c.machine.run("cat /proc/fs/nfsd/exports 2>/dev/null | grep -v '^#' || true")?;
        assert!(!exports.contains(branch.spec.id.as_str()), "{exports}");
        for owner in [b, c] {
            let script = format!("inside nfs attach {id} {}", owner.machine.address());
            let refused = c.machine.attempt(BOUND, script)?;
            assert!(!refused.success(), "{refused}");
        }
        // The other consumer comes, and finds what is true.
        let on_c = mount(cluster, &volume, "c")?;
        assert_eq!(c.machine.run(format!("cat {on_c}/file"))?, "true");
        assert_eq!(a.machine.run(format!("cat {on_a}/file"))?, "true");
        c.unmount(&volume, "c")?;
        cluster.detach(&volume, "c");
        a.unmount(&volume, "a")?;
        cluster.detach(&volume, "a");
        cluster.delete(&volume);
        assert_eq!(
            c.machine.run(format!("cat {copied}/data/file"))?,
            "false",
            "what is not known is left as it is"
        );
        c.machine.run(format!("rm -r {copied}")).map(drop)
    });
}
