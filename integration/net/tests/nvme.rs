//! Branches over NVMe/TCP, by both ends of the transport itself on real kernels.

use std::time::Duration;

use serde_json::{Value, json};

use super::transport::{self, BRANCH, End, Kind, NOTICE, at, id};
use crate::support::{Machine, Network, Result, on_shared};

const SOURCE: &str = "/mnt/image";

fn make(owner: &Machine) -> Result {
    owner
        .run("mkfs.ext4 -q -F /disk/data; mkdir -p /mnt; mount /disk/data /mnt; truncate -s 64M /mnt/image")
        .map(drop)
}

fn clear(owner: &Machine) -> Result {
    owner.run("umount /mnt").map(drop)
}

fn format(consumer: &Machine, device: &str) -> Result {
    consumer.run(format!("mkfs.ext4 -q -F {device}")).map(drop)
}

fn open(consumer: &Machine, device: &str) -> Result<String> {
    consumer.run(format!("mkdir -p /mnt; mount {device} /mnt"))?;
    Ok("/mnt".to_owned())
}

fn close(consumer: &Machine, _: &str) -> Result {
    consumer.run("umount /mnt").map(drop)
}

fn target(device: &str) -> String {
    device.to_owned()
}

const NVME: Kind = Kind {
    name: "nvme",
    one_peer: true,
    gives_up: true,
    grows: true,
    make,
    source: SOURCE,
    bytes: SOURCE,
    target,
    format,
    open,
    close,
    clear,
};

fn end<'a>(net: &'a Network, name: &str) -> End<'a> {
    NVME.end(net, name)
}

fn attached(net: &Network, generation: u64) -> Result<(Value, String)> {
    NVME.attached(net, generation)
}

fn finish(net: &Network, generation: u64) -> Result {
    NVME.finish(net, generation)
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_everything_can_be_done_twice() {
    on_shared(|net| transport::everything_can_be_done_twice(net, &NVME));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_generations_only_rise() {
    on_shared(|net| transport::generations_only_rise(net, &NVME));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_nothing_is_left_in_the_kernel_and_the_image_is_written_through() {
    on_shared(|net| {
        let (owner, consumer) = (end(net, "a"), end(net, "b"));
        make(owner.machine)?;
        let (_, device) = attached(net, 0)?;
        assert!(owner.machine.run(format!("lsattr {SOURCE}"))?.contains('S'));
        let limit = consumer
            .machine
            .run(format!("cat /sys/block/{}/queue/max_sectors_kb", device.trim_start_matches("/dev/")))?;
        assert!(limit.trim().parse::<u32>().is_ok_and(|kib| kib <= 1024), "{limit}");
        consumer.machine.run(format!("mkfs.ext4 -q {device}; mkdir -p /mnt; mount {device} /mnt"))?;
        consumer.refused(&format!("detach {}", id(0)), "InUse")?;
        consumer.machine.run("umount /mnt")?;

        owner.machine.run(format!("truncate -s 96M {SOURCE}"))?;
        assert_eq!(owner.must(&format!("grown {}", id(0)))?, json!(96 << 20));
        consumer.machine.eventually(
            Duration::from_secs(20),
            format!("test $(blockdev --getsize64 {device}) = {}", 96 << 20),
        )?;
        consumer.must(&format!("detach {}", id(0)))?;
        let opt_out = format!("export {} source={SOURCE} write-through=no", id(0));
        owner.must(&opt_out)?;
        assert!(owner.machine.run(format!("lsattr {SOURCE}"))?.contains('S'));
        owner.must(&format!("unexport branch={BRANCH}"))?;
        let left = owner
            .machine
            .run("cd /sys/kernel/config/nvmet; ls subsystems hosts ports | grep -v : || true")?;
        assert_eq!(left.trim(), "", "left in the kernel");
        clear(owner.machine)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_a_fence_ends_a_live_writer_and_nothing_of_it_lands_afterwards() {
    on_shared(|net| transport::a_fence_ends_a_live_writer_and_nothing_of_it_lands_afterwards(net, &NVME));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_a_consumer_that_connects_twice_loses_both_connections_with_one_fence() {
    on_shared(|net| {
        let (owner, consumer, next) = (end(net, "a"), end(net, "b"), end(net, "c"));
        make(owner.machine)?;
        let (endpoint, device) = attached(net, 0)?;
        let name = endpoint["name"].as_str().expect("a name");
        let live = format!(
            "for each in /sys/class/nvme/nvme*; do
                 if grep -qx {name} $each/subsysnqn && grep -qx live $each/state; then echo $each; fi
             done 2>/dev/null | wc -l"
        );
        // By hand, beside the product's own, in the same name.
        consumer.machine.run(format!(
            "first=$(grep -lx {name} /sys/class/nvme/nvme*/subsysnqn | head -n 1)
             hostid=$(cat $(dirname $first)/hostid)
             exec 3<>/dev/nvme-fabrics
             echo -n transport=tcp,traddr={},trsvcid=4420,nqn={name},hostnqn={},hostid=$hostid,duplicate_connect >&3",
            owner.machine.address(),
            consumer.identity()?
        ))?;
        consumer.machine.eventually(NOTICE, format!("[ $({live}) = 2 ]"))?;
        let mut writer = consumer.machine.start_command(NVME.writers(&device), Duration::from_secs(600))?;
        assert!(writer.says("written by 3", Duration::from_secs(60))?);
        owner.must(&format!("fence {} peer={}", id(0), consumer.identity()?))?;
        let fenced = NVME.sum(owner.machine)?;
        owner.must(&format!("allow {} peer={}", id(0), next.identity()?))?;
        std::thread::sleep(Duration::from_secs(6));
        assert_eq!(consumer.machine.run(&live)?, "0", "a connection outlived the fence");
        assert_eq!(NVME.sum(owner.machine)?, fenced, "something landed after the fence");
        consumer.must(&format!("force-detach {}", id(0)))?;
        assert!(writer.says("all writers ended", NOTICE)?, "{}", writer.output_so_far());
        assert_eq!(NVME.sum(owner.machine)?, fenced);
        finish(net, 0)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_what_a_partitioned_consumer_still_has_to_send_never_lands_after_its_fence() {
    on_shared(|net| {
        transport::what_a_partitioned_consumer_still_has_to_send_never_lands_after_its_fence(net, &NVME)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_a_consumer_waits_while_the_link_is_cut_and_goes_on_after_it() {
    on_shared(|net| transport::a_consumer_waits_while_the_link_is_cut_and_goes_on_after_it(net, &NVME));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_force_detach_returns_while_the_link_is_cut_and_so_does_giving_up() {
    on_shared(|net| transport::force_detach_returns_while_the_link_is_cut_and_so_does_giving_up(net, &NVME));
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_an_owner_that_lost_power_is_not_met_again_silently() {
    on_shared(|net| {
        let (owner, consumer) = (end(net, "a"), end(net, "b"));
        make(owner.machine)?;
        let (_, device) = attached(net, 1)?;
        format(consumer.machine, &device)?;
        open(consumer.machine, &device)?;
        consumer.machine.run("dd if=/dev/urandom of=/mnt/file bs=1M count=4 conv=fsync 2>/dev/null")?;
        let sum = consumer.machine.run("sha256sum </mnt/file")?;
        owner.machine.pull_plug();
        owner.machine.start()?;
        owner.machine.run("mkdir -p /mnt; mount /disk/data /mnt")?;
        assert_eq!(owner.must("exports")?, json!([]), "configfs is empty after a start");
        let endpoint = owner.must(&format!("export {} source={SOURCE}", id(2)))?;
        owner.must(&format!("allow {} peer={}", id(2), consumer.identity()?))?;
        for _ in 0..10 {
            assert_ne!(consumer.link(1)?.as_deref(), Some("Live"), "it came back by itself");
            std::thread::sleep(Duration::from_secs(1));
        }
        // The old one has failed when nobody waits any more; the new one is beside it already.
        consumer.must(&format!("force-detach {}", id(1)))?;
        consumer.machine.attempt(Duration::from_secs(60), "umount /mnt || umount -l /mnt")?;
        let attached = consumer.must(&format!("attach {} {}", id(2), at(&endpoint)))?;
        let device = attached["at"].as_str().expect("a device");
        open(consumer.machine, device)?;
        assert_eq!(consumer.machine.run("sha256sum </mnt/file")?, sum, "what was flushed is there");
        close(consumer.machine, device)?;
        consumer.must(&format!("detach {}", id(2)))?;
        consumer.until_link(1, None, NOTICE)?;
        finish(net, 2)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_an_address_that_answers_with_something_else_is_foreign() {
    on_shared(|net| {
        let (owner, consumer) = (end(net, "a"), end(net, "b"));
        make(owner.machine)?;
        let (endpoint, _) = attached(net, 0)?;
        consumer.must(&format!("detach {}", id(0)))?;
        // Somebody's own export of another image under the same name.
        let nqn = endpoint["name"].as_str().expect("a name");
        owner.machine.run(format!(
            "cd /sys/kernel/config/nvmet/subsystems/{nqn}/namespaces/1
             truncate -s 32M /mnt/other
             echo 0 >enable
             echo -n /mnt/other >device_path
             echo 0f8c2b54-5f0e-4a2e-8d0c-6a3d1c7f9e21 >device_uuid
             echo 1 >enable"
        ))?;
        let attach = format!("attach {} {}", id(0), at(&endpoint));
        let said = consumer.refused(&attach, "Foreign")?;
        assert!(said.contains(BRANCH), "{said}");
        consumer.until_link(0, None, NOTICE)?;
        // The owner puts it right, and closes it: what was changed by others is made anew.
        owner.must(&format!("export {} source={SOURCE}", id(0)))?;
        consumer.refused(&attach, "Refused")?;
        owner.must(&format!("allow {} peer={}", id(0), consumer.identity()?))?;
        consumer.must(&attach)?;
        consumer.must(&format!("detach {}", id(0)))?;
        finish(net, 0)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_an_export_that_cannot_be_says_why() {
    on_shared(|net| {
        let owner = end(net, "a");
        make(owner.machine)?;
        // An administrator's own export has the port.
        owner.machine.run(
            "cd /sys/kernel/config/nvmet
             mkdir subsystems/nqn.2024-01.test:own ports/1
             cd ports/1
             echo tcp >addr_trtype; echo ipv4 >addr_adrfam; echo 10.77.0.1 >addr_traddr; echo 4420 >addr_trsvcid
             ln -s /sys/kernel/config/nvmet/subsystems/nqn.2024-01.test:own subsystems/",
        )?;
        let export = format!("export {} source={SOURCE}", id(0));
        let said = owner.refused(&export, "Unable")?;
        assert!(said.contains("4420") && said.contains("taken"), "{said}");
        let half: Value = owner.must("exports")?;
        assert_eq!(half[0]["endpoint"], Value::Null, "it is told as not reachable: {half}");
        owner.must(&format!("{export} port=4421"))?;
        // What is not ours is as it was.
        owner.machine.run(
            "cd /sys/kernel/config/nvmet
             rm ports/1/subsystems/nqn.2024-01.test:own
             rmdir ports/1 subsystems/nqn.2024-01.test:own",
        )?;
        owner.must(&format!("unexport branch={BRANCH}"))?;

        let said = owner.refused(&format!("export {} source=/mnt/none", id(0)), "Kernel")?;
        assert!(said.contains("/mnt/none"), "{said}");
        let said = owner.refused(&format!("{export} at=10.77.0.99"), "Unable")?;
        assert!(said.contains("10.77.0.99:4420 is not an address of this node"), "{said}");
        owner.must(&format!("unexport branch={BRANCH}"))?;
        clear(owner.machine)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_a_node_tells_what_it_can_carry_and_loads_what_is_there() {
    on_shared(|net| {
        let owner = end(net, "a");
        owner.machine.run("modprobe -r nvmet-tcp nvmet; umount /sys/kernel/config")?;
        let probe = owner.must("probe")?;
        assert!(probe["owner"]["able"].is_string() && probe["consumer"]["able"].is_string(), "{probe}");
        eprintln!("authentication on this kernel: {}", probe["authentication"]);
        owner.machine.run("modprobe -r nvmet-tcp nvmet; mount --bind /mnt /lib/modules")?;
        let probe = owner.must("probe");
        owner.machine.run("umount /lib/modules; modprobe nvmet-tcp")?;
        let probe = probe?;
        let reason = probe["owner"]["unable"].as_str().unwrap_or_default();
        assert!(reason.contains("nvmet") && reason.contains("modprobe"), "{probe}");
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn nvme_keys_are_proven_where_the_kernel_can() {
    on_shared(|net| {
        let (owner, consumer) = (end(net, "a"), end(net, "b"));
        let probe = owner.must("probe")?;
        make(owner.machine)?;
        let endpoint = owner.must(&format!("export {} source={SOURCE}", id(0)))?;
        let key = |end: &End<'_>| end.must("key").map(|k| k["key"].as_str().unwrap_or_default().to_owned());
        let (right, wrong) = (key(&owner)?, key(&owner)?);
        let allow = format!("allow {} peer={} secret={right}", id(0), consumer.identity()?);
        if probe["authentication"]["able"].is_null() {
            let said = owner.refused(&allow, "Unable")?;
            assert!(said.contains("CONFIG_NVME_TARGET_AUTH"), "{said}");
            eprintln!("SKIPPED: keys themselves, {}", probe["authentication"]["unable"]);
        } else {
            owner.must(&allow)?;
            let attach = format!("attach {} {}", id(0), at(&endpoint));
            consumer.refused(&attach, "Refused")?;
            // The kernel sees the owner's refusal, or the end of the connection before it and waits for a minute.
            let answer = consumer.ask(&format!("{attach} secret={wrong}"))?;
            assert!(answer["error"] == "Refused" || answer["error"] == "Unreachable", "{answer}");
            assert!(answer["text"].as_str().is_some_and(|text| text.contains("key")), "{answer}");
            assert_eq!(consumer.must("attachments")?, json!([]));
            consumer.must(&format!("{attach} secret={right}"))?;
            consumer.must(&format!("detach {}", id(0)))?;
            // The key was changed: who replays the old one is refused.
            owner.must(&format!("fence {} peer={}", id(0), consumer.identity()?))?;
            owner.must(&format!("allow {} peer={} secret={wrong}", id(0), consumer.identity()?))?;
            let answer = consumer.ask(&format!("{attach} secret={right}"))?;
            assert!(answer["error"] == "Refused" || answer["error"] == "Unreachable", "{answer}");
            consumer.must(&format!("{attach} secret={wrong}"))?;
            consumer.must(&format!("detach {}", id(0)))?;
        }
        finish(net, 0)
    });
}
