//! What a node finds out about its network and its kernel, on real ones.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Machine, Options, Result, on};

const SOON: Duration = Duration::from_secs(30);

/// A machine with a second card, `store0`, that leads nowhere; up and without addresses.
fn with_card(test: impl FnOnce(&Machine) -> Result) {
    let mut options = Options::new(1);
    options.arguments =
        ["-netdev", "user,id=store,restrict=on,ipv6=off", "-device", "virtio-net-pci,netdev=store"]
            .map(str::to_owned)
            .to_vec();
    on(&options, |net| {
        let a = net.machine("a");
        a.run("ip link set eth1 name store0 && ip link set store0 up")?;
        test(a)
    });
}

fn look(machine: &Machine, given: &str) -> Result<Value> {
    let told = machine.run(format!("mkdir -p /run/survey && inside survey look /run/survey {given}"))?;
    Ok(parse(&told))
}

fn parse(told: &str) -> Value {
    serde_json::from_str(told).unwrap_or_else(|error| panic!("{error}: {told}"))
}

fn report<'v>(found: &'v Value, transport: &str) -> &'v Value {
    let all = found["transports"].as_array().expect("transports");
    all.iter().find(|report| report["transport"] == transport).expect("the transport")
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn survey_finds_the_interface_and_what_the_kernel_carries_and_starts_nothing() {
    on(&Options::new(1), |net| {
        let a = net.machine("a");
        let found = look(a, "")?;
        assert_eq!(found["network"]["interface"], "eth0", "{found}");
        assert_eq!(found["network"]["addresses"][0], a.address().to_string(), "{found}");
        assert_eq!(found["network"].get("problem"), None, "{found}");
        for transport in ["nvme-tcp", "nfs"] {
            let report = report(&found, transport);
            assert_eq!(
                (&report["owner"]["able"], &report["consumer"]["able"]),
                (&true.into(), &true.into()),
                "{found}"
            );
            assert_eq!(found["ends"][transport]["owner"], "there", "{found}");
            assert_eq!(found["ends"][transport]["consumer"], "there", "{found}");
        }
        let own: Value = parse(&a.run(format!("inside transport nvme identity at={}", a.address()))?);
        assert_eq!(report(&found, "nvme-tcp")["identity"], own, "what it tells is what it calls itself");
        let threads = a.run("cat /proc/fs/nfsd/threads 2>/dev/null || echo 0")?;
        assert_eq!(threads.trim(), "0", "no NFS server is started");
        assert_eq!(
            a.run("ls /sys/kernel/config/nvmet/ports /sys/kernel/config/nvmet/hosts | grep -v : || true")?
                .trim(),
            ""
        );
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn survey_of_several_cards_takes_the_one_that_is_named_or_routed_or_none_and_says_what_to_do() {
    with_card(|a| {
        a.run("ip addr add 10.99.0.1/24 dev store0 && ip addr add fd99::1/64 dev store0")?;
        // Not before the kernel knows that nobody else has it.
        a.eventually(SOON, "test -z \"$(ip addr show store0 | grep tentative)\"")?;
        let problem = |found: &Value| found["network"]["problem"].as_str().unwrap_or_default().to_owned();

        let unclear = look(a, "")?;
        assert!(problem(&unclear).contains("network.interface"), "{unclear}");
        assert_eq!(report(&unclear, "nvme-tcp")["owner"]["able"], false, "{unclear}");
        assert_eq!(report(&unclear, "nvme-tcp")["consumer"]["able"], true, "{unclear}");
        assert_eq!(report(&unclear, "nfs")["consumer"]["able"], false, "{unclear}");

        for given in ["interface=store0", "subnet=10.99.0.0/16"] {
            let found = look(a, given)?;
            assert_eq!(found["network"]["interface"], "store0", "{given}: {found}");
            assert_eq!(found["network"]["addresses"][0], "10.99.0.1", "{given}: {found}");
        }
        assert_eq!(look(a, "interface=store0")?["network"]["addresses"][1], "fd99::1");
        a.run("ip route add default via 10.99.0.254 dev store0")?;
        assert_eq!(look(a, "")?["network"]["interface"], "store0");
        a.run("ip route add default via 10.77.0.254 dev eth0 metric 50 && ip route del default via 10.99.0.254 && \
               ip route add default via 10.99.0.254 dev store0 metric 100")?;
        assert_eq!(look(a, "")?["network"]["interface"], "eth0", "the kernel's own choice");

        let missing = look(a, "interface=store7")?;
        assert!(problem(&missing).contains("no interface store7 (there are eth0, store0"), "{missing}");
        a.run("ip link set store0 mtu 1000")?;
        assert!(problem(&look(a, "interface=store0")?).contains("at most 1000 bytes"));
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn survey_hears_of_changes_and_keeps_the_end_that_may_have_to_fence() {
    with_card(|a| {
        let mut following = a.start_command(
            "mkdir -p /run/survey; exec inside survey follow /run/survey interface=store0",
            Duration::from_secs(120),
        )?;
        assert!(following.says("no address that", SOON)?);
        a.run("ip addr add 10.99.0.1/24 dev store0")?;
        assert!(following.says("\"addresses\":[\"10.99.0.1\"", SOON)?);
        a.run("ip link set store0 down")?;
        assert!(following.says("store0 is down", SOON)?);
        a.run("ip addr flush dev store0; ip link set store0 up")?;
        let without = |line: &&str| line.contains("no address that") && !line.contains("is down");
        let begun = Instant::now();
        let last: Value = loop {
            let all = following.output_so_far();
            // The first line is of the time before it had any; the last may still be coming.
            let whole = all.rsplit_once('\n').map_or("", |(whole, _)| whole);
            if let Some(line) = whole.lines().skip(1).find(without) {
                break parse(line);
            }
            assert!(begun.elapsed() < SOON, "not told: {all}");
            std::thread::sleep(Duration::from_millis(200));
        };
        assert_eq!(report(&last, "nvme-tcp")["owner"]["able"], false, "{last}");
        assert_eq!(last["ends"]["nvme-tcp"]["owner"], "there", "{last}");
        following.kill();
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn survey_leaves_an_nfs_server_to_whom_it_is() {
    on(&Options::new(1), |net| {
        let a = net.machine("a");
        // As nfs-server.service does, without its programs.
        a.run(
            "test -e /proc/fs/nfsd/threads || mount -t nfsd nfsd /proc/fs/nfsd
             echo '-3 +4' >/proc/fs/nfsd/versions; echo 2 >/proc/fs/nfsd/threads",
        )?;
        let before = a.run("cat /proc/fs/nfsd/threads /proc/fs/nfsd/versions")?;
        let found = look(a, "")?;
        let owner = &report(&found, "nfs")["owner"];
        assert_eq!(owner["able"], false, "{found}");
        assert!(owner["reason"].as_str().is_some_and(|r| r.contains("runs for someone else")), "{found}");
        assert_eq!(report(&found, "nfs")["consumer"]["able"], true, "{found}");
        assert_eq!(a.run("cat /proc/fs/nfsd/threads /proc/fs/nfsd/versions")?, before);
        Ok(())
    });
}
