//! NVMe/TCP between two machines by nothing but writes to the kernel's own files: what Union CSI's own branches on other nodes
//! are compared with.

use std::time::Duration;

use super::{Machine, Result};

/// The subsystem.
pub const NQN: &str = "nqn.2024-01.org.union-csi.test:bare";
/// The host that is allowed.
pub const HOST: &str = "nqn.2024-01.org.union-csi.test:consumer";
const HOST_ID: &str = "6b2a4b0e-7c2c-4c39-9a0a-0d0f2f5b1c11";
const NAMESPACE_ID: &str = "0f8c2b54-5f0e-4a2e-8d0c-6a3d1c7f9e21";

/// Exports an image of that size, written out in full, on the owner's data disk (mounted at `/mnt`) to [`HOST`].
pub fn export(owner: &Machine, mib: u32) -> Result {
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
        echo 0 >subsystems/{NQN}/namespaces/1/buffered_io
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
pub fn attach(consumer: &Machine, owner: &Machine, host: &str) -> Result<String> {
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

/// Ends every connection of the consumer.
pub fn detach(consumer: &Machine) -> Result {
    consumer.run("for c in /sys/class/nvme/nvme*; do echo 1 >$c/delete_controller; done").map(drop)
}

/// Takes the export and the mount of the data disk away.
pub fn unexport(owner: &Machine) -> Result {
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
