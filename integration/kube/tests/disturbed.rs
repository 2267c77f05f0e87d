//! What is stopped, killed or replaced while volumes are used: running pods do not notice, and nothing is lost or doubled.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use kube::api::DeleteParams;
use serde_json::json;

use crate::install::{AGENT, AGENT_NEXT};
use crate::support::{
    BOUND, DRIVER_NAMESPACE, PodOf, World, ctl, is_bound, kubectl, nodes, restarts, try_kubectl,
};

/// Writes a numbered line several times a second, and ends with an error at the first write that fails.
const WRITER: &str =
    "i=0; while i=$((i+1)); do echo $i >>/data/lines || exit 1; sync /data/lines || exit 1; sleep 0.1; done";

impl World {
    /// A pod that writes all the time, on that node where one is named.
    fn writer(&self, name: &str, class: &str, node: Option<&str>) {
        self.claim(name, class, "48Mi");
        let pod = PodOf::new(name).with_claim(name).script(WRITER);
        self.run(match node {
            Some(node) => pod.on(node),
            None => pod,
        });
    }

    fn lines(&self, pod: &str) -> u64 {
        self.exec(pod, "tail -1 /data/lines").trim().parse().expect("a number")
    }

    /// Waits until the pod has written more than it had, and makes sure that no write ever failed.
    fn still_writes(&self, pod: &str) {
        let before = self.lines(pod);
        self.eventually(&format!("{pod} writes on"), || (self.lines(pod) > before + 3).then_some(()));
        let found = self.get::<Pod>(pod).expect("the pod");
        assert_eq!(restarts(&found), 0, "{pod} met an error");
        let (lines, last) = (self.exec(pod, "wc -l </data/lines"), self.lines(pod));
        // Between the two it wrote on.
        let lines: u64 = lines.trim().parse().expect("a number");
        assert!(
            lines <= last && last - lines < 100,
            "every line is there: {lines} lines, the last is {last}"
        );
    }

    fn image_of_agents(&self, image: &str) {
        kubectl(&[
            "set",
            "image",
            "-n",
            DRIVER_NAMESPACE,
            "daemonset/union-csi",
            &format!("union-csi={image}"),
        ]);
    }

    fn leader(&self) -> Option<String> {
        let text = try_kubectl(
            &["get", "lease", "-n", DRIVER_NAMESPACE, "union-csi", "-o", "jsonpath={.spec.holderIdentity}"],
            None,
        );
        let holder = text.ok()?;
        // The node's name and something that differs for each start.
        let node = holder.rsplit_once('_')?.0.to_owned();
        nodes().contains(&node).then_some(node)
    }

    /// Kills the agent of a node as the kernel would for want of memory: at once, without a word.
    fn kill_agent(&self, node: &str) {
        let agents: kube::Api<Pod> = kube::Api::namespaced(self.client.clone(), DRIVER_NAMESPACE);
        let pod = self.agent_on(node).metadata.name.expect("its name");
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        crate::support::on_node(node, "kill -KILL $(pgrep -x union-csi)");
        let _ = self.block_on(agents.delete(&pod, &now));
    }
}

#[test]
fn the_agents_are_replaced_one_by_one_under_pods_that_write_without_an_error() {
    let world = World::alone();
    let union =
        world.class("union", "WaitForFirstConsumer", json!({"splitQuantum": "16Mi", "minBranches": "2"}));
    for (n, node) in nodes().iter().enumerate() {
        // Bound directly, and through a union.
        world.writer(&format!("plain-{n}"), "union", Some(node));
        world.writer(&format!("union-{n}"), &union, Some(node));
    }
    let writers: Vec<String> =
        (0..nodes().len()).flat_map(|n| [format!("plain-{n}"), format!("union-{n}")]).collect();
    writers.iter().for_each(|pod| drop(world.running(pod)));
    world.image_of_agents(AGENT_NEXT);
    world.agents_ready();
    for node in nodes() {
        let agent = world.agent_on(&node);
        let image = agent.spec.expect("a spec").containers[0].image.clone();
        assert_eq!(image.as_deref(), Some(AGENT_NEXT));
    }
    writers.iter().for_each(|pod| world.still_writes(pod));
    // The new agents work for what the old ones mounted, too.
    world.stop(&writers[0]);
    world.image_of_agents(AGENT);
    world.agents_ready();
    writers[1..].iter().for_each(|pod| world.still_writes(pod));
}

#[test]
fn agents_of_two_versions_work_side_by_side() {
    let world = World::alone();
    kubectl(&[
        "patch",
        "-n",
        DRIVER_NAMESPACE,
        "daemonset/union-csi",
        "--type=merge",
        "-p",
        r#"{"spec":{"updateStrategy":{"type":"OnDelete","rollingUpdate":null}}}"#,
    ]);
    world.image_of_agents(AGENT_NEXT);
    let all = nodes();
    // The one that leads stays old: it plans for new ones.
    let leader = world.eventually("someone leads", || world.leader());
    let new = all.iter().find(|n| **n != leader).expect("another node").clone();
    let agents: kube::Api<Pod> = kube::Api::namespaced(world.client.clone(), DRIVER_NAMESPACE);
    let name = world.agent_on(&new).metadata.name.expect("a name");
    let _ = world.block_on(agents.delete(&name, &DeleteParams::default())).expect("deleted");
    world.eventually("the new agent is ready", || {
        let pods = world.block_on(agents.list(&Default::default())).ok()?;
        pods.items
            .iter()
            .any(|p| {
                p.metadata.name.as_deref() != Some(&name)
                    && p.spec.as_ref().is_some_and(|s| {
                        s.node_name.as_deref() == Some(&new)
                            && s.containers[0].image.as_deref() == Some(AGENT_NEXT)
                    })
                    && crate::support::is_ready(p)
            })
            .then_some(())
    });
    for (n, node) in all.iter().enumerate() {
        world.writer(&format!("w-{n}"), "union", Some(node));
    }
    for n in 0..all.len() {
        world.running(&format!("w-{n}"));
        world.still_writes(&format!("w-{n}"));
    }
    kubectl(&[
        "patch",
        "-n",
        DRIVER_NAMESPACE,
        "daemonset/union-csi",
        "--type=merge",
        "-p",
        r#"{"spec":{"updateStrategy":{"type":"RollingUpdate"}}}"#,
    ]);
    world.image_of_agents(AGENT);
    world.agents_ready();
}

#[test]
fn a_leader_killed_in_the_middle_of_fifty_claims_costs_seconds_and_no_claim() {
    const CLAIMS: usize = 50;
    let world = World::alone();
    let class = world.class("now", "Immediate", json!({"splitQuantum": "1Mi", "maxBranches": "1"}));
    let leader = world.eventually("someone leads", || world.leader());
    let claims: Vec<String> = (0..CLAIMS)
        .map(|n| {
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": format!("data-{n:02}"), "namespace": world.namespace},
                "spec": {"storageClassName": class, "accessModes": ["ReadWriteOnce"],
                         "resources": {"requests": {"storage": "16Mi"}}},
            })
            .to_string()
        })
        .collect();
    crate::support::try_kubectl(&["create", "-f", "-"], Some(&claims.join("\n---\n"))).expect("50 claims");
    let bound = |world: &World| world.list::<PersistentVolumeClaim>().iter().filter(|c| is_bound(c)).count();
    world.eventually("some are bound, or at least planned", || {
        (bound(&world) > 0 || world.splits().iter().any(|s| !s.spec.branches.is_empty())).then_some(())
    });
    world.kill_agent(&leader);
    world.eventually("all claims are bound", || (bound(&world) == CLAIMS).then_some(()));
    let volumes =
        world.block_on(world.cluster_api::<PersistentVolume>().list(&Default::default())).expect("volumes");
    let ours: Vec<_> = volumes
        .items
        .iter()
        .filter(|v| {
            v.spec.as_ref().and_then(|s| s.claim_ref.as_ref()).and_then(|r| r.namespace.as_deref())
                == Some(&world.namespace)
        })
        .collect();
    assert_eq!(ours.len(), CLAIMS, "one PersistentVolume for each");
    let handles: BTreeSet<_> =
        ours.iter().filter_map(|v| v.spec.as_ref()?.csi.as_ref().map(|c| c.volume_handle.clone())).collect();
    let splits: BTreeSet<_> = world.splits().into_iter().map(|s| s.meta.name).collect();
    assert_eq!(handles, splits, "one volume for each, and none besides");
    world.assert_nothing_oversubscribed();
    world.agents_ready();
}

/// Five times the lease's duration: whatever would happen without an API server has happened by then.
const AWAY: Duration = Duration::from_secs(60);

#[test]
fn while_the_api_server_is_away_pods_write_on_and_the_status_api_answers() {
    let world = World::alone();
    let node = nodes()[0].clone();
    let union =
        world.class("union", "WaitForFirstConsumer", json!({"splitQuantum": "16Mi", "minBranches": "2"}));
    world.writer("plain", "union", Some(&node));
    world.writer("union", &union, Some(&node));
    ["plain", "union"].iter().for_each(|pod| drop(world.running(pod)));
    let volume = world.volume_of("union").meta.name;
    let before = [world.lines("plain"), world.lines("union")];
    ctl(&["stop", "apiserver"]);
    let end = std::time::Instant::now() + AWAY;
    let mut answers = 0;
    while std::time::Instant::now() < end {
        for path in ["/v1/status", "/v1/pools", &format!("/v1/volumes/{volume}")] {
            answers += u32::from(world.status(&node, path).is_some());
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    let healthy = world.status_code(&node, "/healthz");
    ctl(&["start", "apiserver"]);
    assert!(answers >= 12, "the status API answered {answers} times");
    assert_eq!(healthy, "200", "an agent without an API server is not to be restarted");
    for (pod, before) in ["plain", "union"].iter().zip(before) {
        world.within(BOUND, "exec works again", || world.try_exec(pod, "true").ok());
        // Ten lines a second, less what the machine's load takes.
        assert!(world.lines(pod) > before + AWAY.as_secs(), "it wrote all the time");
        world.still_writes(pod);
    }
    for node in nodes() {
        assert_eq!(restarts(&world.agent_on(&node)), 0, "no agent was restarted");
    }
    // And everything works again, when Kubernetes' own programs have noticed: after a minute they try again every half minute,
    // and scheduler, binder, attach controller and kubelet wait for each other.
    world.claim("after", "union", "32Mi");
    world.run(PodOf::new("after").with_claim("after"));
    world.within(5 * BOUND, "the pod that was made afterwards runs", || world.try_exec("after", "true").ok());
}
