//! Agents and the API server fail: data goes on without them.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{LOG, Pod, SOME, ends, goes_on, leave, log, on_node, text};
use crate::support::Result;
use crate::support::cluster::{BOUND, on_cluster};
use crate::support::faults::{Fault, Told, record};

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owners_agent_that_is_killed_or_replaced_is_not_noticed_by_a_pod_on_another_node() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "agent", "b", json!({}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        b.kill_agent()?;
        // Written while there is no agent.
        goes_on(&mut writer, &log(), 5 * SOME)?;
        b.start_agent()?;
        b.ready()?;
        let killed = goes_on(&mut writer, &log(), SOME)?;
        b.stop_agent()?;
        goes_on(&mut writer, &log(), SOME)?;
        b.start_agent()?;
        b.ready()?;
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "nothing failed");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        let seen = |fault: &str, told: &Told| Fault {
            fault: fault.to_owned(),
            seen: "nothing".to_owned(),
            longest_pause_seconds: told.longest_pause_seconds(),
            errors: told.errors.len(),
            after: "the next agent finds what its kernel serves and goes on".to_owned(),
        };
        record(
            "agent-killed",
            &seen("the agent of a branch's node is killed (SIGKILL), and started again", &killed),
        );
        record(
            "agent-replaced",
            &seen("the agent of a branch's node is stopped and another one started", &told),
        );
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_pod_notices_nothing_of_an_api_server_that_is_away() {
    on_cluster(|cluster| {
        let volume = on_node(cluster, "api", "b", json!({}));
        let (a, b) = (cluster.node("a"), cluster.node("b"));
        cluster.attach(&volume, "a");
        let data = a.mount(&volume, "pod")?;
        let mut writer = a.write(&volume, "pod", "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        cluster.pause_api(true);
        // Both ends begin anew, from what they have on disk and in their kernels.
        for node in [a, b] {
            node.kill_agent()?;
            node.start_agent()?;
        }
        goes_on(&mut writer, &log(), 5 * SOME)?;
        cluster.pause_api(false);
        for node in [a, b] {
            node.ready()?;
        }
        goes_on(&mut writer, &log(), SOME)?;
        let told = ends(writer)?;
        assert_eq!(told.errors, [], "nothing failed");
        told.require_in(LOG, "x", &text(a, &data, LOG)?);
        record(
            "api-away",
            &Fault {
                fault: "the API server is away, and agents of both ends are killed and started".to_owned(),
                seen: "nothing".to_owned(),
                longest_pause_seconds: told.longest_pause_seconds(),
                errors: told.errors.len(),
                after: "goes on; new volumes wait for the API server".to_owned(),
            },
        );
        leave(cluster, &volume, "a", "pod")
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_agent_that_is_killed_while_it_waits_for_another_node_is_gone_before_that_node_is_back() {
    on_cluster(|cluster| {
        let a = cluster.node("a");
        let pods = Pod::both(cluster, "stuck", &json!({"branchTimeout": "20s"}))?;
        let volumes: Vec<_> = pods.iter().map(|pod| pod.volume.clone()).collect();
        for pod in pods {
            // Not on its disk yet when the node is away.
            a.machine
                .run(format!("dd if=/dev/urandom of='{}/late' bs=64k count=32 2>/dev/null", pod.data))?;
            ends(pod.writer)?;
        }
        cluster.net.cut("a", "b");
        let ending =
            volumes.iter().map(|volume| a.machine.start_command(a.unmounting(volume, &volume.claim), BOUND));
        let ending = ending.collect::<Result<Vec<_>>>()?;
        thread::sleep(Duration::from_secs(4));
        let waits = a.machine.run("grep -l 'State:.D' /proc/$(cat /run/agent.pid)/task/*/status || true")?;
        eprintln!("threads of the agent that nobody can kill: {}", waits.lines().count());
        a.machine.run("kill -9 $(cat /run/agent.pid)")?;
        a.machine.eventually(BOUND, "[ ! -e /proc/$(cat /run/agent.pid) ]")?;
        drop(ending);
        a.start_agent()?;
        // The next one gives up what does not answer, and says so in its log.
        for volume in &volumes {
            a.machine.eventually(BOUND, a.unmounting(volume, &volume.claim))?;
        }
        cluster.net.heal("a", "b");
        for volume in &volumes {
            cluster.detach(volume, "a");
            cluster.delete(volume);
        }
        Ok(())
    });
}
