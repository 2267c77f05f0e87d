//! What this machine's kernel can carry, and the ends to do it with.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::choose::Place;
use crate::domain::reach::{Ability as Told, Transport, TransportReport};
use crate::node::transport::nfs::{self, NfsConsumer, NfsOwner};
use crate::node::transport::nvme_tcp::tls::Tls;
use crate::node::transport::nvme_tcp::{self, HostIdentity, NvmeConsumer, NvmeOwner, Signs};
use crate::node::transport::{Abilities, Ability, Ends, TransportError};
use crate::platform::Host;
use crate::platform::nfs::{NFS_PORT, NfsRoots, NfsServing};
use crate::platform::nvme::Nvme;

/// A client that is silent for so long loses its locks, and after a restart of the owner clients claim what they had for so
/// long at most, in which nobody can open files anew. The kernel's own default, 90 s, would stop every workload for that time.
/// Twice the longest pause of a client that claims what it is not answered to (`NFS4_POLL_RETRY_MAX`, 15 s): one that is expired
/// a second time then never says that it has done (RECLAIM_COMPLETE; seen with 6.1), and may open nothing here any more.
const NFS_LEASE: Duration = Duration::from_secs(30);

/// Requests that one node works on at a time. Each waits for a disk; an idle one costs a kernel thread's stack.
const NFS_THREADS: u32 = 16;

/// Mount points of what is exported; empty again after a restart of the machine, and of the machine, as its NFS server is.
const NFS_ROOT: &str = "/run/union-csi/nfs";

/// Directory of the state directory where the kernel notes the NFS clients.
const NFS_RECOVERY: &str = "nfs-clients";

/// Directory of the state directory where it is noted what was taken from NFS clients.
const NFS_FENCES: &str = "nfs-fences";

/// Directory of the state directory below which exports of other nodes are mounted.
const NFS_ATTACHED: &str = "attached";

/// What the kernel was found to be able to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Probed {
    /// What was seen of NVMe after the last look that may have loaded modules; `None`: not seen.
    signs: Option<Signs>,
    pub(super) nvme: Abilities,
    pub(super) nfs: Abilities,
    /// Why the NFS server, which the kernel has, cannot serve for this driver.
    nfs_taken: Option<String>,
}

impl Probed {
    /// Nothing is known, and why.
    pub(super) fn unknown(reason: &str) -> Self {
        let unable = || Ability::Unable { reason: reason.to_owned() };
        let all = || Abilities {
            owner: unable(),
            consumer: unable(),
            authentication: unable(),
            encryption: unable(),
        };
        Self { signs: None, nvme: all(), nfs: all(), nfs_taken: None }
    }
}

/// The kernel, and the places that the ends use.
#[derive(Clone, Debug)]
pub(super) struct Kernel {
    host: Host,
    nvme: Result<Nvme, String>,
    nfs: NfsRoots,
    identity: Result<HostIdentity, String>,
    state_dir: PathBuf,
    ports: Ports,
    tls: Tls,
}

/// Where images are served.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ports {
    /// As they are.
    pub(super) plain: u16,
    /// Encrypted.
    pub(super) encrypted: u16,
}

impl Kernel {
    /// This machine's; `identity` is what it calls itself to owners.
    pub(super) fn new(
        host: &Host,
        identity: Result<HostIdentity, String>,
        state_dir: &Path,
        ports: Ports,
        tls: Tls,
    ) -> Self {
        Self {
            host: host.clone(),
            nvme: Nvme::new(host).map_err(|error| error.to_string()),
            nfs: NfsRoots::default(),
            identity,
            state_dir: state_dir.to_owned(),
            ports,
            tls,
        }
    }

    fn recovery(&self) -> PathBuf {
        self.state_dir.join(NFS_RECOVERY)
    }

    /// Looks, at the first time and when something has changed by trying: that loads modules. Blocking.
    pub(super) fn probe(&self, before: Option<&Probed>) -> Probed {
        let mut probed = match &self.nvme {
            Err(reason) => Probed::unknown(reason),
            Ok(nvme) => match (before, nvme_tcp::signs(nvme)) {
                (Some(before), Ok(signs)) if before.signs.as_ref() == Some(&signs) => before.clone(),
                _ => {
                    let found = nvme_tcp::probe(&self.host, nvme);
                    Probed { signs: nvme_tcp::signs(nvme).ok(), nvme: found, ..Probed::unknown("") }
                }
            },
        };
        // That of NFS loads and starts nothing: the server is started with the first export.
        let words = |error: TransportError| error.to_string();
        probed.nfs =
            nfs::probe(&self.host, &self.nfs).unwrap_or_else(|error| Probed::unknown(&words(error)).nfs);
        let taken = nfs::occupied(&self.host, &self.nfs, &self.recovery());
        probed.nfs_taken = taken.unwrap_or_else(|error| Some(words(error)));
        probed
    }

    /// What this node tells of its transports.
    pub(super) fn reports(&self, probed: &Probed, place: &Place) -> Vec<TransportReport> {
        let identity = self.identity.as_ref().ok().map(|identity| identity.nqn.clone());
        let mut nvme = report(Transport::NvmeTcp, &probed.nvme, place, identity);
        if let (true, Err(reason)) = (nvme.consumer.able, &self.identity) {
            nvme.consumer = Told { able: false, reason: reason.clone() };
        }
        if nvme.encryption.able && self.ports.plain == self.ports.encrypted {
            let reason = format!("network.nvmePort and network.nvmeTlsPort are both {}", self.ports.plain);
            nvme.encryption = Told { able: false, reason };
        }
        let mut nfs = report(Transport::Nfs, &probed.nfs, place, None);
        if let (true, Some(reason)) = (nfs.owner.able, &probed.nfs_taken) {
            nfs.owner = Told { able: false, reason: reason.clone() };
        }
        // Owners know it by its address.
        if nfs.consumer.able && place.addresses.is_empty() {
            nfs.consumer = no_address(place);
        }
        vec![nvme, nfs]
    }

    /// The ends where the kernel can be them. `address` is this node's, or was it when it last had any: what is exported must be
    /// fenced and ended also while there is none, and while someone else uses the NFS server too. The first address is the only
    /// one that others are told, and so listened at.
    pub(super) fn ends(&self, probed: &Probed, address: Option<IpAddr>) -> BTreeMap<Transport, Ends> {
        let reason = |ability: &Ability| match ability {
            Ability::Able { .. } => Ok(()),
            Ability::Unable { reason } => Err(reason.clone()),
        };
        let address = address.ok_or_else(|| NO_ADDRESS.to_owned());
        let owner = reason(&probed.nvme.owner).and(address.clone()).and_then(|ip| {
            let at = |port| vec![SocketAddr::new(ip, port)];
            let owner = NvmeOwner::new(&self.host, self.nvme.clone()?, at(self.ports.plain));
            Ok(Arc::new(owner.encrypting(at(self.ports.encrypted), self.tls.clone())) as _)
        });
        let consumer = reason(&probed.nvme.consumer).and_then(|()| {
            let consumer = NvmeConsumer::new(&self.host, self.nvme.clone()?, self.identity.clone()?);
            Ok(Arc::new(consumer.encrypting(self.tls.clone())) as _)
        });
        let nvme = Ends { owner, consumer };
        let owner = reason(&probed.nfs.owner).and(address.clone()).map(|ip| {
            let serving = NfsServing {
                address: SocketAddr::new(ip, NFS_PORT),
                lease: NFS_LEASE,
                threads: NFS_THREADS,
                recovery: self.recovery(),
            };
            let fences = self.state_dir.join(NFS_FENCES);
            Arc::new(NfsOwner::new(self.host.clone(), self.nfs.clone(), serving, NFS_ROOT.into(), fences))
                as _
        });
        let consumer = reason(&probed.nfs.consumer).and(address).map(|ip| {
            let directory = self.state_dir.join(NFS_ATTACHED);
            Arc::new(NfsConsumer::new(self.host.clone(), self.nfs.clone(), directory, ip)) as _
        });
        [(Transport::NvmeTcp, nvme), (Transport::Nfs, Ends { owner, consumer })].into()
    }
}

/// The ends that were made, and in place of those that were not, the new ones: one that is at work takes turns with itself, and
/// must be able to end what it began, whatever else changed.
pub(super) fn keep(
    made: Option<&BTreeMap<Transport, Ends>>,
    new: BTreeMap<Transport, Ends>,
) -> BTreeMap<Transport, Ends> {
    let Some(made) = made else { return new };
    let one = |(transport, new): (Transport, Ends)| {
        let Some(old) = made.get(&transport) else { return (transport, new) };
        let owner = if old.owner.is_ok() { old.owner.clone() } else { new.owner };
        let consumer = if old.consumer.is_ok() { old.consumer.clone() } else { new.consumer };
        (transport, Ends { owner, consumer })
    };
    new.into_iter().map(one).collect()
}

const NO_ADDRESS: &str = "this node has no address on the storage network";

fn no_address(place: &Place) -> Told {
    let reason = match place.network.problem.as_str() {
        "" => NO_ADDRESS.to_owned(),
        problem => format!("{NO_ADDRESS}: {problem}"),
    };
    Told { able: false, reason }
}

/// What a node at this place tells of one transport. Nobody reaches a node without an address or with a link that is down.
fn report(
    transport: Transport,
    abilities: &Abilities,
    place: &Place,
    identity: Option<String>,
) -> TransportReport {
    let told = |ability: &Ability| match ability {
        Ability::Able { how } => Told { able: true, reason: how.clone() },
        Ability::Unable { reason } => Told { able: false, reason: reason.clone() },
    };
    let mut owner = told(&abilities.owner);
    if owner.able && place.addresses.is_empty() {
        owner = no_address(place);
    } else if owner.able && !place.up {
        owner = Told { able: false, reason: place.network.problem.clone() };
    }
    TransportReport {
        transport,
        owner,
        consumer: told(&abilities.consumer),
        authentication: told(&abilities.authentication),
        encryption: told(&abilities.encryption),
        identity,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::domain::reach::StorageNetwork;

    fn kernel(identity: Result<HostIdentity, String>) -> Kernel {
        let (host, ports) = (Host::new(), Ports { plain: 4420, encrypted: 4421 });
        let tls = Tls::new(&host, Arc::default());
        Kernel::new(&host, identity, Path::new("/nowhere"), ports, tls)
    }

    pub(in crate::node::survey) fn able() -> Probed {
        let able = || Ability::Able { how: "loaded".to_owned() };
        let all =
            || Abilities { owner: able(), consumer: able(), authentication: able(), encryption: able() };
        Probed { signs: None, nvme: all(), nfs: all(), nfs_taken: None }
    }

    fn place(addresses: &[&str], up: bool, problem: &str) -> Place {
        let network = StorageNetwork {
            interface: "eth0".to_owned(),
            problem: problem.to_owned(),
            ..StorageNetwork::default()
        };
        Place { network, addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(), up }
    }

    fn identity() -> HostIdentity {
        HostIdentity::of(&"n".parse().unwrap(), "machine")
    }

    #[test]
    fn a_node_that_nobody_reaches_owns_nothing_and_may_use_what_others_own() {
        let kernel = kernel(Ok(identity()));
        let well = kernel.reports(&able(), &place(&["10.0.0.1"], true, ""));
        assert!(well.iter().all(|report| report.owner.able && report.consumer.able));
        assert_eq!(well[0].identity, Some(identity().nqn));
        let lost = kernel.reports(&able(), &place(&[], true, "eth0 has none"));
        assert!(lost.iter().all(|report| !report.owner.able));
        assert!(lost[0].owner.reason.ends_with("eth0 has none"), "{lost:?}");
        assert!(lost[0].consumer.able, "NVMe connects from any address");
        assert!(!lost[1].consumer.able, "an NFS owner could not know it");
        let dark = kernel.reports(&able(), &place(&["10.0.0.1"], false, "eth0 is down"));
        assert!(!dark[0].owner.able && dark[0].owner.reason == "eth0 is down");
    }

    #[test]
    fn a_node_encrypts_nothing_where_both_listeners_would_be_at_one_port() {
        let mut kernel = kernel(Ok(identity()));
        let told = |kernel: &Kernel| {
            let reports = kernel.reports(&able(), &place(&["10.0.0.1"], true, ""));
            reports[0].encryption.clone()
        };
        assert!(told(&kernel).able);
        kernel.ports.plain = 4421;
        assert!(told(&kernel).reason.contains("both 4421"));
    }

    #[test]
    fn a_node_whose_nfs_server_is_anothers_serves_none_and_can_end_what_it_serves() {
        let kernel = kernel(Ok(identity()));
        let taken = Probed { nfs_taken: Some("it is anothers".to_owned()), ..able() };
        let reports = kernel.reports(&taken, &place(&["10.0.0.1"], true, ""));
        assert_eq!(reports[1].owner, Told { able: false, reason: "it is anothers".to_owned() });
        assert!(reports[0].owner.able && reports[1].consumer.able);
        assert!(kernel.ends(&taken, "10.0.0.1".parse().ok())[&Transport::Nfs].owner.is_ok());
    }

    #[test]
    fn an_end_that_is_at_work_stays_the_same_until_the_address_changes() {
        let kernel = kernel(Ok(identity()));
        let at = |address: &str, probed: &Probed| kernel.ends(probed, address.parse().ok());
        let is = |a: &Ends, b: &Ends| match (&a.owner, &b.owner) {
            (Ok(a), Ok(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let first = at("10.0.0.1", &able());
        let nvme = |ends: &BTreeMap<Transport, Ends>| ends[&Transport::NvmeTcp].clone();
        let kept = keep(Some(&first), at("10.0.0.1", &able()));
        assert!(is(&nvme(&first), &nvme(&kept)));
        let kept = keep(Some(&first), at("10.0.0.1", &Probed::unknown("gone")));
        assert!(is(&nvme(&first), &nvme(&kept)), "it may have to fence");
        let found = keep(Some(&at("10.0.0.1", &Probed::unknown("not yet"))), at("10.0.0.1", &able()));
        assert!(nvme(&found).owner.is_ok());
        assert!(!is(&nvme(&first), &nvme(&keep(None, at("10.0.0.2", &able())))));
    }

    #[test]
    fn a_node_without_identity_attaches_nothing_by_nvme() {
        let reports = kernel(Err("no machine-id".into())).reports(&able(), &place(&["10.0.0.1"], true, ""));
        assert_eq!(reports[0].consumer, Told { able: false, reason: "no machine-id".to_owned() });
        assert!(reports[0].owner.able && reports[0].identity.is_none());
    }

    #[test]
    fn an_end_is_there_where_the_kernel_can_be_it_and_the_reason_where_it_cannot() {
        let kernel = kernel(Ok(identity()));
        let ends = kernel.ends(&able(), "10.0.0.1".parse().ok());
        assert!(ends.values().all(|ends| ends.owner.is_ok() && ends.consumer.is_ok()));
        let ends = kernel.ends(&able(), None);
        assert!(ends.values().all(|ends| ends.owner.is_err()));
        assert!(ends[&Transport::NvmeTcp].consumer.is_ok() && ends[&Transport::Nfs].consumer.is_err());
        let ends = kernel.ends(&Probed::unknown("no answer"), "10.0.0.1".parse().ok());
        assert_eq!(ends[&Transport::Nfs].owner.as_ref().err(), Some(&"no answer".to_owned()));
    }
}
