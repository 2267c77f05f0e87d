//! Who may use a branch, carried out by its owner on real kernels: orders, lost power, and a workload that does not let go.

use std::time::Duration;

use serde_json::{Value, json};

use super::transport::{End, at, id};
use crate::support::{Machine, Options, Result, on};

/// Longer than any action may take.
const ACTION: Duration = Duration::from_secs(120);
/// How long a consumer may take to find its owner again.
const RETURN: Duration = Duration::from_secs(60);

/// One run of the owner's agent.
fn agent(machine: &Machine, action: &str) -> Result<Value> {
    let (action, rest) = action.split_once(' ').unwrap_or((action, ""));
    let text = machine.run_within(ACTION, format!("RUST_LOG=info inside owner {action} on=/mnt {rest}"))?;
    Ok(serde_json::from_str(&text).unwrap_or_else(|e| panic!("{action}: {text:?}: {e}")))
}

/// The pool's disk, which outlives a start of the machine.
fn mount(machine: &Machine) -> Result {
    machine.run("mkdir -p /mnt; mount /disk/data /mnt").map(drop)
}

fn prepare(machine: &Machine, fs: &str) -> Result {
    machine.run("mkfs.ext4 -q -F /disk/data")?;
    mount(machine)?;
    agent(machine, &format!("make fs={fs}")).map(drop)
}

fn report(value: &Value) -> (Value, Value, Value) {
    (value["generation"].clone(), value["allowed"]["consumer"].clone(), value["allowed"]["epoch"].clone())
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn owner_gives_takes_and_exports_again_after_lost_power() {
    on(&Options::new(3), |net| {
        let a = net.machine("a");
        let [b, c] = ["b", "c"].map(|name| End { machine: net.machine(name), kind: "nvme" });
        let (to_b, to_c) = (b.identity()?, c.identity()?);
        prepare(a, "none")?;
        let attach = |report: &Value| {
            let generation = report["generation"].as_u64().unwrap_or_default();
            format!("attach {} {}", id(generation), at(report))
        };

        agent(a, &format!("order consumer=b epoch=1 identity={to_b}"))?;
        let first = agent(a, "obey epoch=1")?;
        assert_eq!(report(&first), (json!(1), json!("b"), json!(1)));
        c.refused(&attach(&first), "Refused")?;
        let device = b.must(&attach(&first))?["at"].as_str().expect("a device").to_owned();
        let write =
            |text: &str| format!("printf '%-4096s' {text} | dd of={device} bs=4k oflag=direct 2>/dev/null");
        let read = format!("dd if={device} bs=4k count=1 iflag=direct 2>/dev/null | head -c 8");
        b.machine.run(write("written1"))?;
        let same = agent(a, "obey epoch=1")?;
        assert_eq!(same, first, "another agent finds it as it is");
        assert_eq!(b.machine.run(&read)?, "written1");

        // Written through: the generation stays, and the consumer goes on by itself.
        a.pull_plug();
        a.start()?;
        mount(a)?;
        let back = agent(a, "restore")?;
        assert_eq!(back, json!([{ "generation": 1, "allowed": [to_b], "reachable": true }]));
        b.until_link(1, Some("Live"), RETURN)?;
        assert_eq!(b.machine.run(&read)?, "written1");
        b.machine.run(write("written2"))?;

        // Taken back while it is used: nothing that is written afterwards is told to be on the disk.
        agent(a, "order consumer=nobody epoch=2")?;
        assert_eq!(report(&agent(a, "obey epoch=2")?), (json!(1), Value::Null, json!(2)));
        assert!(!b.machine.attempt(Duration::from_secs(20), write("fenced!!"))?.success());
        b.must(&format!("force-detach {}", id(1)))?;
        agent(a, &format!("order consumer=c epoch=3 identity={to_c}"))?;
        let third = agent(a, "obey epoch=3")?;
        assert_eq!(report(&third), (json!(2), json!("c"), json!(3)));
        b.refused(&attach(&first), "Refused")?;
        let device = c.must(&attach(&third))?["at"].as_str().expect("a device").to_owned();
        let read = format!("dd if={device} bs=4k count=1 iflag=direct 2>/dev/null | head -c 8");
        assert_eq!(c.machine.run(&read)?, "written2");
        c.must(&format!("detach {}", id(2)))?;
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn owner_exports_what_is_not_written_through_under_another_name_after_lost_power() {
    on(&Options::new(2), |net| {
        let a = net.machine("a");
        let b = End { machine: net.machine("b"), kind: "nvme" };
        let to_b = b.identity()?;
        prepare(a, "none write-through=no")?;
        let attach = |report: &Value| {
            let generation = report["generation"].as_u64().unwrap_or_default();
            format!("attach {} {}", id(generation), at(report))
        };
        agent(a, &format!("order consumer=b epoch=1 identity={to_b}"))?;
        let first = agent(a, "obey epoch=1")?;
        assert_eq!(report(&first), (json!(1), json!("b"), json!(1)));
        a.run("! lsattr /mnt/pool/branches/pvc-1-0/disk.img | cut -d' ' -f1 | grep S")?;
        let device = b.must(&attach(&first))?["at"].as_str().expect("a device").to_owned();
        let write = |device: &str, text: &str| {
            format!(
                "printf '%-4096s' {text} | dd of={device} bs=4k oflag=direct conv=notrunc,fsync 2>/dev/null"
            )
        };
        let read =
            |device: &str| format!("dd if={device} bs=4k count=1 iflag=direct 2>/dev/null | head -c 8");
        b.machine.run(write(&device, "flushed1"))?;

        // What was completed may be lost: the consumer is not taken back silently, and what it had flushed is there.
        a.pull_plug();
        a.start()?;
        mount(a)?;
        let back = agent(a, "restore")?;
        assert_eq!(back, json!([{ "generation": 2, "allowed": [to_b], "reachable": true }]));
        let second = agent(a, "obey epoch=1 generation=2")?;
        assert_eq!(report(&second), (json!(2), json!("b"), json!(1)));
        // Older kernels go on trying what newer ones give up.
        let error = b.ask(&attach(&first))?["error"].clone();
        assert!(["Refused", "Unreachable"].map(Value::from).contains(&error), "{error}");
        b.must(&format!("force-detach {}", id(1)))?;
        let device = b.must(&attach(&second))?["at"].as_str().expect("a device").to_owned();
        assert_eq!(b.machine.run(read(&device))?, "flushed1");
        b.must(&format!("detach {}", id(2)))?;
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn owner_takes_a_branch_from_a_workload_of_its_own_that_does_not_let_go() {
    on(&Options::new(1), |net| {
        let a = net.machine("a");
        for fs in ["ext4", "xfs"] {
            prepare(a, fs)?;
            let at = agent(a, "attach")?["at"].as_str().expect("a mount").to_owned();
            // It appends for ever, and tells when it was refused.
            a.run(format!("mkdir -p {at}/data; touch {at}/data/log"))?;
            a.write(
                "/tmp/workload",
                &format!(
                    "exec 3>>{at}/data/log\nfor i in $(seq 300); do echo $i >&3 2>/dev/null || echo refused; sleep 1; done\n"
                )
                .into_bytes(),
            )?;
            a.run("setsid bash /tmp/workload >/tmp/told 2>&1 & echo $! >/tmp/pid")?;
            a.eventually(Duration::from_secs(20), format!("grep -q 2 {at}/data/log"))?;
            agent(a, "order consumer=nobody epoch=1")?;
            let tried = agent(a, "try seconds=20")?;
            assert_eq!(tried["export"], Value::Null, "nobody is told that it is free: {tried}");
            let reason = tried["conditions"][0]["message"].as_str().unwrap_or_default();
            assert!(reason.contains("end the pods"), "{tried}");
            a.eventually(Duration::from_secs(20), "grep -q refused /tmp/told")?;
            a.run("sleep 3; kill $(cat /tmp/pid)")?;
            let report = agent(a, "obey epoch=1")?;
            assert_eq!(report["allowed"]["epoch"], 1);
            let refused = agent(a, "attach")?;
            assert!(refused["error"].as_str().is_some_and(|e| e.contains("nobody")), "{refused}");
            agent(a, "order consumer=a epoch=2")?;
            agent(a, "obey epoch=2")?;
            let at = agent(a, "attach")?["at"].as_str().expect("given back").to_owned();
            // What was written first is there, and nothing from after the first refusal.
            a.run(format!("test -s {at}/data/log; seq $(wc -l <{at}/data/log) | cmp - {at}/data/log"))?;
            a.run(format!("umount {at}; umount /mnt"))?;
        }
        Ok(())
    });
}
