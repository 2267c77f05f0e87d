//! That the machines can carry NVMe/TCP at all, without Union CSI, and what it takes.

use std::time::{Duration, Instant};

use crate::support::bare::{HOST, attach, detach, export, unexport};
use crate::support::{Machine, Network, Result, on_shared};

fn exchanged(net: &Network) -> Result<(&Machine, &Machine, String)> {
    let (owner, consumer) = (net.machine("a"), net.machine("b"));
    export(owner, 96)?;
    let device = attach(consumer, owner, HOST)?;
    Ok((owner, consumer, device))
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_filesystem_over_the_network_holds_what_was_written_to_it() {
    on_shared(|net| {
        let (owner, consumer, device) = exchanged(net)?;
        let refused = attach(net.machine("c"), owner, "nqn.2024-01.org.union-csi.test:stranger");
        assert!(refused.is_err(), "a host that is not allowed is connected");

        consumer.run(format!("mkfs.ext4 -q {device} && mount {device} /mnt"))?;
        consumer.run("dd if=/dev/urandom of=/tmp/file bs=1M count=16 2>/dev/null")?;
        let begun = Instant::now();
        consumer.run("dd if=/tmp/file of=/mnt/file bs=1M conv=fsync 2>/dev/null")?;
        let written = begun.elapsed();
        consumer.run("dd if=/mnt/file of=/dev/null bs=1M iflag=direct 2>/dev/null")?;
        let read = begun.elapsed() - written;
        eprintln!("bare NVMe/TCP, 16 MiB: written and synced in {written:.1?}, read in {read:.1?}");
        let sum = consumer.run("sha256sum </mnt/file")?;
        consumer.run("umount /mnt")?;
        detach(consumer)?;
        unexport(owner)?;
        // What the owner's own kernel finds in the image.
        owner.run("mount /disk/data /mnt && mkdir -p /tmp/in && mount -o loop /mnt/image /tmp/in")?;
        assert_eq!(owner.run("sha256sum </tmp/in/file")?, sum);
        owner.run("umount /tmp/in /mnt")?;
        Ok(())
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_consumer_waits_while_the_link_is_cut_and_loses_nothing() {
    on_shared(|net| {
        let (owner, consumer, device) = exchanged(net)?;
        consumer.run(format!(
            "mkfs.ext4 -q {device} && mount {device} /mnt && echo before >/mnt/before && sync"
        ))?;
        net.cut("a", "b");
        let writing =
            consumer.start_command("echo during >/mnt/during; sync -f /mnt", Duration::from_secs(100))?;
        // The keep-alive notices after twice its time.
        consumer.eventually(Duration::from_secs(40), "grep -x connecting /sys/class/nvme/nvme*/state")?;
        let killed = consumer.attempt(Duration::from_secs(2), "echo more >/mnt/more; sync -f /mnt")?;
        assert!(killed.timed_out && killed.stuck.len() == 1, "what waits for a lost disk ends: {killed}");
        net.heal("a", "b");
        let output = writing.wait()?;
        assert!(output.success(), "{output}");
        assert_eq!(consumer.run("cat /mnt/before /mnt/during")?, "before\nduring");
        consumer.run(format!("umount /mnt; fsck.ext4 -fn {device}"))?;
        detach(consumer)?;
        unexport(owner)
    });
}
