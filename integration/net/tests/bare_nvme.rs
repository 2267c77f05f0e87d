//! NVMe/TCP between two machines by nothing but the kernel's own files: that the machines can carry it, and the figures that
//! Union CSI's own are compared with.

use std::time::Duration;

use crate::support::{Machine, Network, Result, on_shared};

const NQN: &str = "nqn.2024-01.org.union-csi.test:bare";
const HOST: &str = "nqn.2024-01.org.union-csi.test:consumer";
const HOST_ID: &str = "6b2a4b0e-7c2c-4c39-9a0a-0d0f2f5b1c11";
const NAMESPACE_ID: &str = "0f8c2b54-5f0e-4a2e-8d0c-6a3d1c7f9e21";

/// Exports an image on the owner's data disk to one host.
fn export(owner: &Machine, mib: u32) -> Result {
    owner.run(format!(
        r"
        mkfs.ext4 -q -F /disk/data
        mkdir -p /mnt
        mount /disk/data /mnt
        dd if=/dev/zero of=/mnt/image bs=1M count={mib} conv=fsync 2>/dev/null
        cd /sys/kernel/config/nvmet
        mkdir subsystems/{NQN}
        echo 0 >subsystems/{NQN}/attr_allow_any_host
        mkdir subsystems/{NQN}/namespaces/1
        echo -n /mnt/image >subsystems/{NQN}/namespaces/1/device_path
        echo {NAMESPACE_ID} >subsystems/{NQN}/namespaces/1/device_uuid
        echo 1 >subsystems/{NQN}/namespaces/1/enable
        mkdir -p hosts/{HOST}
        ln -s /sys/kernel/config/nvmet/hosts/{HOST} subsystems/{NQN}/allowed_hosts/{HOST}
        mkdir ports/1
        echo tcp >ports/1/addr_trtype
        echo ipv4 >ports/1/addr_adrfam
        echo {} >ports/1/addr_traddr
        echo 4420 >ports/1/addr_trsvcid
        ln -s /sys/kernel/config/nvmet/subsystems/{NQN} ports/1/subsystems/{NQN}
        ",
        owner.address()
    ))?;
    Ok(())
}

/// Connects as `host`; the block device.
fn attach(consumer: &Machine, owner: &Machine, host: &str) -> Result<String> {
    consumer.run(format!(
        "exec 3<>/dev/nvme-fabrics
         echo -n transport=tcp,traddr={},trsvcid=4420,nqn={NQN},hostnqn={host},hostid={HOST_ID},reconnect_delay=2,ctrl_loss_tmo=-1,keep_alive_tmo=5 >&3",
        owner.address()
    ))?;
    let name = consumer.eventually(
        Duration::from_secs(10),
        // The paths of a shared namespace (nvme0c0n1) are no devices to be opened.
        format!("grep -lx {NAMESPACE_ID} /sys/block/nvme*/uuid | cut -d/ -f4 | grep -v c"),
    )?;
    Ok(format!("/dev/{name}"))
}

fn detach(consumer: &Machine) -> Result {
    consumer.run("for c in /sys/class/nvme/nvme*; do echo 1 >$c/delete_controller; done").map(drop)
}

fn unexport(owner: &Machine) -> Result {
    owner.run(format!(
        "cd /sys/kernel/config/nvmet
         rm ports/1/subsystems/{NQN}
         rmdir ports/1
         rm subsystems/{NQN}/allowed_hosts/*
         rmdir subsystems/{NQN}/namespaces/1 subsystems/{NQN} hosts/{HOST}
         umount /mnt"
    ))?;
    Ok(())
}

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
        consumer.run("dd if=/dev/urandom of=/mnt/file bs=1M count=16 conv=fsync 2>/dev/null")?;
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
        net.heal("a", "b");
        let output = writing.wait()?;
        assert!(output.success(), "{output}");
        assert_eq!(consumer.run("cat /mnt/before /mnt/during")?, "before\nduring");
        consumer.run(format!("umount /mnt; fsck.ext4 -fn {device}"))?;
        detach(consumer)?;
        unexport(owner)
    });
}
