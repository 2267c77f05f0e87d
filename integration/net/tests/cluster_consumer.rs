//! What a node that uses volumes does while the node that holds them is away, for good or for a while: nothing waits without a
//! bound, nothing that is not concerned waits at all, and what can be healed is healed under running pods.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::cluster::{BOUND, Cluster, Node, Volume, on_cluster};
use crate::support::faults::Told;
use crate::support::{Result, Running};

/// Records that must be safe before something is broken.
const SOME: usize = 20;

const LOG: &str = "log";

/// `branchTimeout` of the volumes that lose their owner.
const TIMEOUT: &str = "20s";

/// Processes, threads of the kernel aside, that not even a kill ends.
const STUCK: &str = r#"
    for each in /proc/[0-9]*/task/[0-9]*; do
        state=$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "$each/status" 2>/dev/null) || continue
        [ "$state" = D ] && [ -n "$(tr -d '\0' <"${each%/task/*}/cmdline" 2>/dev/null)" ] || continue
        sleep 0.2
        [ "$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "$each/status" 2>/dev/null)" = D ] || continue
        echo "$each $(tr '\0' ' ' <"${each%/task/*}/cmdline") in $(cat "$each/wchan")"
    done
"#;

/// Waits until no process waits in the kernel.
fn nothing_is_stuck(node: Node<'_>) -> Result {
    let script = format!("stuck=$({STUCK}); echo \"$stuck\"; [ -z \"$stuck\" ]");
    node.machine.eventually(BOUND, script).map(drop)
}

/// A bound volume of one branch on that node.
fn on_node(cluster: &Cluster, name: &str, node: &str, more: Value) -> Volume {
    let mut all = json!({"nodeSelector": format!("kubernetes.io/hostname={node}"), "maxBranches": "1"});
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    cluster.class(name, "Immediate", all);
    cluster.bound(&cluster.claim(name, name, "64Mi"))
}

fn goes_on(writer: &mut Running) -> Result {
    let count = |writer: &mut Running| Told::read(&writer.output_so_far()).count(LOG);
    let (begun, end) = (count(writer), Instant::now() + BOUND);
    while count(writer) < begun + SOME {
        assert!(!writer.has_ended() && Instant::now() < end, "no more records are safe: {writer:?}");
        thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

fn ends(mut writer: Running) {
    writer.kill();
    let end = Instant::now() + BOUND;
    while !writer.has_ended() {
        assert!(Instant::now() < end, "the writer cannot be ended: {writer:?}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Begins to write to the volume.
fn writes(node: Node<'_>, volume: &Volume) -> Result<Running> {
    let mut writer = node.write(volume, &volume.claim, "x", &[LOG.to_owned()])?;
    goes_on(&mut writer)?;
    Ok(writer)
}

/// The volume is told of as not well, and why.
fn is_told_away(cluster: &Cluster, node: Node<'_>, volume: &Volume) {
    cluster.within(BOUND, "the volume is told of as not well", || {
        let stats = node.stats(volume, &volume.claim).ok()?;
        let told = stats["message"].as_str()?.contains("node b");
        (stats["abnormal"] == json!(true) && told).then_some(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn volumes_of_a_node_that_is_away_for_good_hold_up_nobody_and_are_let_go_within_their_timeout() {
    on_cluster(|cluster| {
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        let image =
            on_node(cluster, "gone-image", "b", json!({"branchTimeout": TIMEOUT, "branchFormat": "image"}));
        let of_files = json!({"branchTimeout": TIMEOUT, "branchFormat": "directory", "enforcement": "none"});
        let directory = on_node(cluster, "gone-files", "b", of_files);
        let patient =
            on_node(cluster, "gone-later", "b", json!({"branchTimeout": "90s", "branchFormat": "image"}));
        let own = on_node(cluster, "here", "a", json!({}));
        let far = [&image, &directory, &patient];
        for volume in far.into_iter().chain([&own]) {
            cluster.attach(volume, "a");
            a.mount(volume, &volume.claim)?;
        }
        let writers = [writes(a, &image)?, writes(a, &directory)?, writes(a, &patient)?];
        let mut here = writes(a, &own)?;
        b.machine.pull_plug();
        // Whoever asks is answered, at once from now on and with the reason as soon as it is known.
        for volume in far {
            a.stats(volume, &volume.claim)?;
        }
        is_told_away(cluster, a, &patient);
        goes_on(&mut here)?;
        // Another agent takes over while its volumes wait.
        a.kill_agent()?;
        a.start_agent()?;
        a.ready()?;
        is_told_away(cluster, a, &patient);
        goes_on(&mut here)?;
        let more = on_node(cluster, "here-too", "a", json!({}));
        cluster.attach(&more, "a");
        a.mount(&more, &more.claim)?;
        // Their pods end, and never come back.
        for writer in writers {
            ends(writer);
        }
        for volume in far {
            a.unmount(volume, &volume.claim)?;
        }
        nothing_is_stuck(a)?;
        let left = a.machine.run("ls /sys/class/nvme; grep nfs4 /proc/mounts || true")?;
        assert_eq!(left.trim(), "", "it is still attached");
        goes_on(&mut here)?;
        ends(here);
        b.boot()?;
        for volume in far {
            cluster.detach(volume, "a");
            cluster.delete(volume);
        }
        for volume in [&own, &more] {
            a.unmount(volume, &volume.claim)?;
            cluster.detach(volume, "a");
            cluster.delete(volume);
        }
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_block_device_that_was_given_up_is_a_new_device_for_who_opens_it_again() {
    on_cluster(|cluster| {
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.class(
            "raw",
            "Immediate",
            json!({
                "nodeSelector": "kubernetes.io/hostname=b", "maxBranches": "1", "branchFormat": "image",
                "branchTimeout": TIMEOUT,
            }),
        );
        let volume = cluster.bound(&cluster.claim_block("raw", "raw", "64Mi"));
        cluster.attach(&volume, "a");
        let target = a.mount(&volume, "pod")?;
        // What a container runtime does that binds the node: a mount namespace that outlives each process's use of it.
        let script = format!(
            "exec unshare --mount --propagation private -- bash -c '
                touch /tmp/device && mount --bind {target} /tmp/device && echo begins
                while sleep 0.5; do
                    if text=$(dd if=/tmp/device bs=4096 count=1 iflag=direct status=none | tr -d \"\\0\"); then echo \"read $text\"; else echo failed; fi
                done'"
        );
        a.machine.run(format!(
            "{{ echo acknowledged; head -c 4083 /dev/zero; }} | dd of={target} bs=4096 count=1 iflag=fullblock oflag=direct conv=fsync status=none"
        ))?;
        let mut pod = a.machine.start_command(script, Duration::from_secs(900))?;
        let count =
            |pod: &mut Running, line: &str| pod.output_so_far().lines().filter(|l| *l == line).count();
        cluster.within(BOUND, "the pod reads", || (count(&mut pod, "read acknowledged") > 0).then_some(()));
        b.machine.pull_plug();
        cluster.within(BOUND, "the pod is given errors", || {
            (!a.machine.run("ls /sys/class/nvme").ok()?.contains("nvme")).then_some(())
        });
        b.boot()?;
        let before = count(&mut pod, "read acknowledged");
        cluster.within(BOUND, "the pod reads again", || {
            (count(&mut pod, "read acknowledged") > before + 3).then_some(())
        });
        ends(pod);
        a.unmount(&volume, "pod")?;
        cluster.detach(&volume, "a");
        cluster.delete(&volume);
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn what_an_agent_attached_that_died_in_the_midst_of_it_is_let_go_by_the_next() {
    on_cluster(|cluster| {
        let a = cluster.node("a");
        let volume = on_node(cluster, "midst", "b", json!({"branchFormat": "image"}));
        cluster.attach(&volume, "a");
        let staging = a.begin_stage(&volume)?;
        a.machine.run_within(
            BOUND,
            "until [ -n \"$(ls /sys/class/nvme)\" ]; do sleep 0.01; done; kill -9 $(cat /run/agent.pid)
             while [ -e /proc/$(cat /run/agent.pid) ]; do sleep 0.05; done",
        )?;
        drop(staging);
        // Nobody asks for it again.
        a.start_agent()?;
        a.ready()?;
        a.machine.eventually(BOUND, "[ -z \"$(ls /sys/class/nvme)\" ]")?;
        a.machine.run("[ -z \"$(ls /state/union-csi/volumes)\" ] || ! ls -R /state/union-csi/volumes")?;
        a.machine.run(format!(
            "find /state/kubelet/plugins/kubernetes.io -depth -type d -path '*{}*' -exec rmdir {{}} + 2>/dev/null || true",
            volume.handle
        ))?;
        cluster.detach(&volume, "a");
        cluster.delete(&volume);
        Ok(())
    });
}
