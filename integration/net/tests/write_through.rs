//! Why images are written through: what completed writes are worth when their owner loses power and its consumer reconnects
//! by itself.

use std::time::Duration;

use super::transport::{BRANCH, End, at, id};
use crate::support::{Machine, Network, Result, on_shared};

const IMAGE: &str = "/mnt/image";

/// How often power is lost before nothing is taken to be lost.
const TRIES: u32 = 3;

/// How long a consumer may take to find an owner that has returned: the kernel's pause between two attempts, and a slow
/// machine.
const RETURN: Duration = Duration::from_secs(60);

fn mount(owner: &Machine) -> Result {
    // The longer the journal stays open, the more is in it: without this it depends on the moment.
    owner.run("mkdir -p /mnt; mount -o commit=300 /disk/data /mnt").map(drop)
}

/// Writes to a part of the image that was not written before, loses power, and reconnects without a word to the consumer;
/// whether what the consumer then reads is what it wrote.
fn survives(net: &Network, write_through: bool) -> Result<bool> {
    let (owner, consumer) =
        (End { machine: net.machine("a"), kind: "nvme" }, End { machine: net.machine("b"), kind: "nvme" });
    let through = if write_through { "write-through=yes" } else { "write-through=no" };
    owner.machine.run("mkfs.ext4 -q -F /disk/data")?;
    mount(owner.machine)?;
    // Reserved as branches are, and on the disk.
    owner.machine.run(format!("fallocate -l 64MiB {IMAGE}; sync"))?;
    let export = format!("export {} source={IMAGE} {through}", id(0));
    let allow = format!("allow {} peer={} {through}", id(0), consumer.identity()?);
    let endpoint = owner.must(&export)?;
    owner.must(&allow)?;
    let attached = consumer.must(&format!("attach {} {}", id(0), at(&endpoint)))?;
    let device = attached["at"].as_str().expect("a device");
    let sum = format!("dd if={device} bs=1M skip=8 count=4 iflag=direct 2>/dev/null | sha256sum");
    // It returns when every write is completed.
    consumer.machine.run(format!(
        "dd if=/dev/urandom of=/tmp/wanted bs=1M count=4 2>/dev/null
         dd if=/tmp/wanted of={device} bs=1M seek=8 count=4 oflag=direct conv=notrunc 2>/dev/null"
    ))?;
    let wanted = consumer.machine.run("sha256sum </tmp/wanted")?;
    assert_eq!(consumer.machine.run(&sum)?, wanted);

    owner.machine.pull_plug();
    owner.machine.start()?;
    mount(owner.machine)?;
    owner.must(&export)?;
    owner.must(&allow)?;
    consumer.until_link(0, Some("Live"), RETURN)?;
    // The consumer's kernel is told that all is well.
    consumer.machine.run(format!("dd if=/dev/null of={device} conv=notrunc,fsync 2>/dev/null"))?;
    let found = consumer.machine.run(&sum)?;
    let zeros = consumer.machine.run("dd if=/dev/zero bs=1M count=4 2>/dev/null | sha256sum")?;
    if found == zeros {
        eprintln!("with {through}: completed writes are zeros, fsync succeeds");
    }
    consumer.must(&format!("detach {}", id(0)))?;
    owner.must(&format!("unexport branch={BRANCH}"))?;
    owner.machine.run("umount /mnt")?;
    Ok(found == wanted)
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn write_through_keeps_what_was_completed_when_the_owner_loses_power() {
    on_shared(|net| {
        for _ in 0..TRIES {
            assert!(survives(net, true)?, "a completed write is gone");
        }
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn write_through_is_needed_for_without_it_completed_writes_are_lost() {
    on_shared(|net| {
        for _ in 0..TRIES {
            if !survives(net, false)? {
                return Ok(());
            }
        }
        panic!("nothing was lost in {TRIES} tries: write-through may be needless on this kernel");
    });
}
