//! The same images as a volume's branches, exported and attached without the driver.

use std::time::Duration;

use serde_json::Value;

use crate::support::{Machine, Network, Result};

/// Not the driver's.
const PORT: u16 = 4421;
const HOST: &str = "nqn.2024-01.org.union-csi.test:consumer";
const BOUND: Duration = Duration::from_secs(180);

/// Images on their owners, exported to one consumer.
pub struct Bare<'a> {
    consumer: &'a Machine,
    images: Vec<String>,
}

impl<'a> Bare<'a> {
    /// A copy of each of these branches, beside it in its pool: of the same size, as reserved and as written as the branch is at
    /// that time, which nobody may be using, and with its file's attributes; each exported as the driver exports.
    pub fn copies(net: &'a Network, consumer: &'a str, branches: &[(String, String)]) -> Result<Self> {
        let mut images = Vec::new();
        for (node, branch) in branches {
            let (owner, nqn) = (net.machine(node), format!("nqn.2024-01.org.union-csi.test:bare-{branch}"));
            let of = format!("/pool/branches/{branch}/disk.img");
            let image = format!("/pool/bare-{branch}");
            owner.run_within(
                BOUND,
                format!(
                    r"
                    fallocate -l $(stat -c %s {of}) {image}
                    dd if={of} of={image} bs=4096 conv=notrunc,sparse 2>/dev/null
                    chattr +S {image}
                    sync
                    cd /sys/kernel/config/nvmet
                    mkdir subsystems/{nqn}
                    echo 0 >subsystems/{nqn}/attr_allow_any_host
                    mkdir subsystems/{nqn}/namespaces/1
                    echo -n {image} >subsystems/{nqn}/namespaces/1/device_path
                    echo 0 >subsystems/{nqn}/namespaces/1/buffered_io
                    echo 1 >subsystems/{nqn}/namespaces/1/enable
                    mkdir -p hosts/{HOST}
                    ln -s /sys/kernel/config/nvmet/hosts/{HOST} subsystems/{nqn}/allowed_hosts/{HOST}
                    if ! [ -e ports/{PORT} ]; then
                        mkdir ports/{PORT}
                        echo tcp >ports/{PORT}/addr_trtype
                        echo ipv4 >ports/{PORT}/addr_adrfam
                        echo {} >ports/{PORT}/addr_traddr
                        echo {PORT} >ports/{PORT}/addr_trsvcid
                    fi
                    ln -s /sys/kernel/config/nvmet/subsystems/{nqn} ports/{PORT}/subsystems/{nqn}
                    ",
                    owner.address()
                ),
            )?;
            images.push(format!("{},{PORT},{nqn},/mnt/bare-{branch}", owner.address()));
        }
        Ok(Self { consumer: net.machine(consumer), images })
    }

    /// Connects and mounts all of them; the seconds that it took (`seconds`; `connect` and `mount` are sums over all images).
    pub fn attach(&self, order: &str) -> Result<Value> {
        let text = self.consumer.run_within(
            BOUND,
            format!("inside bare attach {order} ext4 errors=remount-ro {}", self.images.join(" ")),
        )?;
        Ok(serde_json::from_str(&text).expect("JSON"))
    }

    /// Unmounts and disconnects all of them.
    pub fn detach(&self) -> Result {
        self.consumer.run_within(BOUND, format!("inside bare detach {}", self.images.join(" "))).map(drop)
    }
}
