//! TLS of the kernel's NVMe connections, with keys in its keyring and handshakes made by the agent's own code.

use std::time::Duration;

use crate::support::bare::{HOST, NQN, attach, detach, export, unexport};
use crate::support::{Machine, Network, Options, Result, on};

const IDENTITY: &str = "NVMe0R01";
const SECRET: &str = "0123456789abcdef0123456789abcdef";
/// What is written, again and again.
const PLAIN: &str = "these bytes are for nobody else";

fn write_plain(consumer: &Machine, device: &str) -> Result {
    consumer
        .run(format!(
            "(yes '{PLAIN}' || true) | head -c 1048576 >/tmp/plain
             dd if=/tmp/plain of={device} bs=64k oflag=direct 2>/dev/null
             echo 3 >/proc/sys/vm/drop_caches
             head -c 1048576 {device} | cmp - /tmp/plain"
        ))
        .map(drop)
}

fn connect(consumer: &Machine, owner: &Machine, key: &str, hostnqn: &str) -> Result<String> {
    consumer.run_within(
        Duration::from_secs(90),
        format!(
            "exec 3<>/dev/nvme-fabrics
             echo -n transport=tcp,traddr={},trsvcid=4420,nqn={NQN},hostnqn={hostnqn},hostid=6b2a4b0e-7c2c-4c39-9a0a-0d0f2f5b1c11,reconnect_delay=2,ctrl_loss_tmo=-1,keep_alive_tmo=5,tls,tls_key={key} >&3",
            owner.address()
        ),
    )
}

fn hidden(net: &Network) -> Result {
    let (owner, consumer) = (net.machine("a"), net.machine("b"));
    net.look_for(PLAIN.as_bytes());
    export(owner, 16)?;
    let device = attach(consumer, owner, HOST)?;
    write_plain(consumer, &device)?;
    assert!(net.seen() > 100, "without TLS the bytes are seen: {}", net.seen());
    detach(consumer)?;
    // Linux 6.7 and newer have it, where they are built so; cluster_tls tries that the agent says so.
    if owner
        .run("echo /sys/kernel/config/nvmet/ports/1/*")?
        .split(' ')
        .all(|file| !file.ends_with("/addr_tsas"))
    {
        eprintln!("SKIPPED: TLS itself, the NVMe target of this kernel has none; KERNEL=backports has");
        return unexport(owner);
    }
    owner.run(format!(
        "cd /sys/kernel/config/nvmet/ports/1
         rm subsystems/{NQN}
         cat addr_tsas addr_treq
         echo tls1.3 >addr_tsas
         echo required >addr_treq
         cat addr_tsas addr_treq
         ln -s /sys/kernel/config/nvmet/subsystems/{NQN} subsystems/{NQN}"
    ))?;
    net.look_for(PLAIN.as_bytes());
    let identity = format!("{IDENTITY} {HOST} {NQN}");
    let mut key = String::new();
    for machine in [owner, consumer] {
        // The image has no /sbin/modprobe for the kernel to load what its ciphers need.
        machine.run("modprobe -a tls gcm ghash_generic aesni_intel")?;
        key = machine.run(format!("inside tls key '{identity}' {SECRET}"))?;
        machine
            .run("inside tls keys; (inside tls serve 300 >/tmp/tls.log 2>&1 &); sleep 1; cat /tmp/tls.log")?;
    }
    let connected = connect(consumer, owner, &key, HOST);
    for machine in [owner, consumer] {
        eprintln!("{}", machine.run("cat /tmp/tls.log; dmesg | grep -i -E 'nvme|tls' | tail -n 30")?);
    }
    connected?;
    let device =
        consumer.eventually(Duration::from_secs(20), "ls /sys/block | grep -E 'nvme[0-9]+n[0-9]+$'")?;
    write_plain(consumer, &format!("/dev/{device}"))?;
    assert_eq!(net.seen(), 0, "with TLS none is");
    detach(consumer)?;
    unexport(owner)
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn tls_of_the_kernel_hides_what_is_written() {
    on(&Options::new(2), hidden);
}
