//! What this node can carry to and from others, and where they reach it: found out, told, and kept true.
//!
//! Facts come from the kernel: interfaces and addresses by rtnetlink (`platform::net`), the abilities of NVMe and NFS from its
//! files. What is made of them is pure (`choose`, `probe`): a [`Carried`] and the ends of each transport, for [`Transports`].
//! A look is made before anything else of the node works, then when an interface or address changed, and once a minute.
//!
//! - The first look loads the modules that are there, as the first export or attachment would; later ones only where something
//!   has changed. The NFS server is looked at and never started here.
//! - The kernel may hang in a look. It is waited for within a bound, what was known stays, and no second one is begun beside it.
//! - Others are not contacted. A node listens only while it exports something, so an attempt to connect would tell nothing of
//!   one that is well; how attachments stand, the kernel tells.
//! - The ends outlive an address that was lost, and the agent that knew it: what is exported must be fenced and ended all the same.
//!   The last address is kept in the state directory. On a node that was taken out of the network, the ends only take back (`leaving`).

mod choose;
mod leaving;
mod probe;
mod settings;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::choose::{Place, choose};
use self::leaving::leaving;
use self::probe::{Kernel, Ports, Probed, keep};
use crate::domain::NodeName;
use crate::domain::reach::{Transport, TransportReport};
use crate::node::handshake::Answering;
use crate::node::transport::nvme_tcp::HostIdentity;
use crate::node::transport::nvme_tcp::tls::Tls;
use crate::node::transport::{Carried, Ends, Transports};
use crate::platform::Host;

pub use self::settings::{InvalidSubnet, NetworkSettings, Subnet};

/// How often everything is looked at again: routes and speeds, whose changes the kernel does not tell us, and modules.
const EVERY: Duration = Duration::from_secs(60);

/// Changes come in groups: an address follows its interface, and a pod brings several.
const SETTLE: Duration = Duration::from_secs(1);

/// Looks that are not awaited by anything are so far apart at least: an interface may come and go all the time.
const APART: Duration = Duration::from_secs(5);

/// The kernel answers about its network in milliseconds; not while something holds its lock.
const NETWORK_BOUND: Duration = Duration::from_secs(5);

/// Loading modules takes a second on a machine that just booted. The start of the agent waits for this.
const PROBE_BOUND: Duration = Duration::from_secs(20);

/// Longer than machine-id(5) allows.
const MACHINE_ID_LIMIT: usize = 256;

/// File of the state directory with the first address of the last place that had any.
const ADDRESS: &str = "storage-address";

/// Longer than any address.
const ADDRESS_LIMIT: usize = 64;

/// What machine-id(5) has in place of an id until the first boot is complete.
const UNINITIALIZED: &str = "uninitialized";

/// Finds out what this node can carry.
pub struct Survey {
    host: Host,
    settings: NetworkSettings,
    kernel: Kernel,
    transports: Arc<Transports>,
    known: Mutex<Known>,
    /// Where the address is kept.
    address: PathBuf,
    /// The node takes no part in the network.
    leaving: bool,
}

/// What is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Network and kernel.
    All,
    /// The network: on a node where pods come and go it changes all the time.
    Network,
}

/// What was found so far.
#[derive(Default)]
struct Known {
    place: Option<Place>,
    /// The first address of the last place that had any.
    address: Option<IpAddr>,
    probed: Option<Probed>,
    /// A look that was not answered within its bound.
    pending: Option<JoinHandle<Probed>>,
    /// What the ends were made of.
    installed: Option<(Probed, Option<IpAddr>)>,
    ends: Option<BTreeMap<Transport, Ends>>,
    told: Option<Carried>,
}

impl std::fmt::Debug for Survey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Survey").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Survey {
    /// Of `node` on this machine, for `transports`; what is encrypted needs `answering`. Nothing is looked at yet.
    #[must_use]
    pub fn new(
        host: &Host,
        node: &NodeName,
        settings: NetworkSettings,
        state_dir: &Path,
        transports: Arc<Transports>,
        answering: Arc<Answering>,
    ) -> Self {
        let ports = Ports { plain: settings.nvme_port, encrypted: settings.nvme_tls_port };
        let tls = Tls::new(host, answering);
        let kernel = Kernel::new(host, identity(host, node, state_dir), state_dir, ports, tls);
        let address = state_dir.join(ADDRESS);
        let known = Known { address: kept_address(host, &address), ..Known::default() };
        let (host, known) = (host.clone(), Mutex::new(known));
        Self { host, settings, kernel, transports, known, address, leaving: false }
    }

    /// Of a node that takes no part in the network, or no more: what it lent and borrowed while it did can be taken back, and it
    /// tells of nothing that it could carry.
    #[must_use]
    pub fn leaving(self) -> Self {
        Self { leaving: true, ..self }
    }

    /// Looks at everything once, within bounds, and tells what was found.
    pub async fn look(&self) {
        if self.leaving {
            self.look_back().await;
        } else {
            self.look_at(Part::All).await;
        }
    }

    /// Finds the ends to take back with. A node without an address of before never took part, and nothing is asked of its kernel.
    async fn look_back(&self) {
        let mut known = self.known.lock().await;
        let mut ends = BTreeMap::new();
        if let Some(address) = known.address {
            let asked = self.probe(&mut known).await;
            let probed = asked.or_else(|| known.probed.clone()).unwrap_or_else(unanswered);
            ends = keep(known.ends.as_ref(), leaving(self.kernel.ends(&probed, Some(address))));
            known.probed = Some(probed);
        }
        self.transports.install(Carried::default(), ends.clone());
        known.ends = Some(ends);
    }

    async fn look_at(&self, part: Part) {
        let mut known = self.known.lock().await;
        let place = self.place(&mut known).await;
        if let Some(address) = place.addresses.first().copied().filter(|a| Some(*a) != known.address) {
            known.address = Some(address);
            if let Err(error) = self.host.write_atomic(&self.address, format!("{address}\n").as_bytes()) {
                warn!(%error, "this node's address is not kept: should it be lost, nothing can be fenced after a restart");
            }
        }
        let asked = match (part, &known.probed) {
            (Part::Network, Some(probed)) => Some(probed.clone()),
            _ => self.probe(&mut known).await,
        };
        let probed = match asked {
            Some(probed) => {
                known.probed = Some(probed.clone());
                probed
            }
            None => known.probed.clone().unwrap_or_else(unanswered),
        };
        let carried = Carried {
            transports: self.kernel.reports(&probed, &place),
            network: Some(place.network.clone()),
        };
        let made_of = (probed, known.address);
        if known.told.as_ref() == Some(&carried) && known.installed.as_ref() == Some(&made_of) {
            return;
        }
        log(known.told.as_ref(), &carried);
        if known.installed.as_ref() == Some(&made_of) {
            self.transports.tell(carried.clone());
        } else {
            let same_place = known.installed.as_ref().is_some_and(|(_, address)| *address == made_of.1);
            let made = known.ends.as_ref().filter(|_| same_place);
            let ends = keep(made, self.kernel.ends(&made_of.0, made_of.1));
            self.transports.install(carried.clone(), ends.clone());
            known.ends = Some(ends);
        }
        known.told = Some(carried);
        known.installed = Some(made_of);
    }

    /// Looks again and again until `stop`.
    pub async fn run(&self, stop: CancellationToken) {
        if self.leaving {
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(EVERY) => self.look_back().await,
                }
            }
        }
        let mut changes: Option<BoxStream<'static, ()>> = None;
        let mut full = Instant::now();
        loop {
            if changes.is_none() {
                match self.host.network_changes() {
                    Ok(begun) => changes = Some(begun),
                    Err(error) => {
                        warn!(%error, looking_every = ?EVERY, "changes of the network are not told by the kernel")
                    }
                }
            }
            let looked = Instant::now();
            let changed = tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => false,
                more = next(&mut changes) => {
                    if !more {
                        changes = None;
                        tokio::time::sleep(SETTLE).await;
                    }
                    true
                }
            };
            if changed {
                let at = (looked + APART).max(Instant::now() + SETTLE);
                if stop.run_until_cancelled(settle(&mut changes, at)).await.is_none() {
                    return;
                }
            }
            let part = if changed && full.elapsed() < EVERY {
                Part::Network
            } else {
                full = Instant::now();
                Part::All
            };
            if stop.run_until_cancelled(self.look_at(part)).await.is_none() {
                return;
            }
        }
    }

    /// Where this node is now, or was when the kernel last told.
    async fn place(&self, known: &mut Known) -> Place {
        let problem = match timeout(NETWORK_BOUND, self.host.network()).await {
            Ok(Ok(facts)) => {
                let mut place = choose(&facts, &self.settings);
                place.network.megabits = self.megabits(&place.network.interface).await;
                known.place = Some(place.clone());
                return place;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the kernel did not tell of its network within {NETWORK_BOUND:?}"),
        };
        known.place.clone().unwrap_or_else(|| {
            let name = self.settings.interface.as_deref().unwrap_or_default();
            Place::nowhere(name, format!("this node's interfaces cannot be read: {problem}"))
        })
    }

    async fn megabits(&self, interface: &str) -> Option<u32> {
        if interface.is_empty() {
            return None;
        }
        let (host, interface) = (self.host.clone(), interface.to_owned());
        let asked = tokio::task::spawn_blocking(move || host.link_megabits(&interface)).await;
        asked.ok()?.ok()?
    }

    /// What the kernel can; `None` where it does not answer in time.
    async fn probe(&self, known: &mut Known) -> Option<Probed> {
        let mut asked = known.pending.take().unwrap_or_else(|| {
            let (kernel, before) = (self.kernel.clone(), known.probed.clone());
            tokio::task::spawn_blocking(move || kernel.probe(before.as_ref()))
        });
        match timeout(PROBE_BOUND, &mut asked).await {
            Ok(answer) => answer.ok(),
            Err(_) => {
                warn!(bound = ?PROBE_BOUND, "the kernel does not answer what it can carry; it is waited for");
                known.pending = Some(asked);
                None
            }
        }
    }
}

fn unanswered() -> Probed {
    Probed::unknown("this node's kernel was asked and has not answered yet: see its log (dmesg)")
}

/// The address that this node had on the storage network when it was last looked at.
fn kept_address(host: &Host, file: &Path) -> Option<IpAddr> {
    let text = host.read_file(file, ADDRESS_LIMIT).inspect_err(|error| {
        warn!(%error, "the address that this node had cannot be read: should it have none now, nothing can be fenced");
    });
    String::from_utf8_lossy(&text.ok()??).trim().parse().ok()
}

/// What this machine calls itself to owners of images: by its id, and where it has none (not every distribution makes one) by
/// one that is made and kept in the state directory.
fn identity(host: &Host, node: &NodeName, state_dir: &Path) -> Result<HostIdentity, String> {
    let own = state_dir.join("machine-id");
    let read = |path: &Path| {
        let text = host.read_file(path, MACHINE_ID_LIMIT).map_err(|error| error.to_string())?;
        let text = text.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned());
        Ok::<_, String>(text.filter(|id| !id.is_empty() && id != UNINITIALIZED))
    };
    let id = match read(&own)? {
        Some(id) => id,
        None => match read(Path::new("/etc/machine-id"))? {
            Some(id) => id,
            None => {
                let id = uuid::Uuid::new_v4().simple().to_string();
                let kept = host.write_atomic(&own, format!("{id}\n").as_bytes());
                kept.map_err(|error| {
                    format!("this machine has no /etc/machine-id, and none can be kept: {error}")
                })?;
                id
            }
        },
    };
    Ok(HostIdentity::of(node, &id))
}

/// The next change; `false` when no more are told. Waits for ever where none are told.
async fn next(changes: &mut Option<BoxStream<'static, ()>>) -> bool {
    match changes {
        Some(changes) => changes.next().await.is_some(),
        None => std::future::pending().await,
    }
}

/// Waits until `at`, and passes over what is told meanwhile.
async fn settle(changes: &mut Option<BoxStream<'static, ()>>, at: Instant) {
    let pass = async {
        while next(changes).await {}
        *changes = None;
        std::future::pending::<()>().await;
    };
    // Passing over never ends.
    let _ = tokio::time::timeout_at(at, pass).await;
}

fn log(before: Option<&Carried>, now: &Carried) {
    let before_network = before.and_then(|before| before.network.as_ref());
    if let Some(network) = now.network.as_ref().filter(|now| before_network != Some(now)) {
        let (interface, addresses) = (&network.interface, network.addresses.join(" "));
        if network.problem.is_empty() {
            info!(network.interface = interface, network.addresses = addresses, "the storage network");
        } else {
            warn!(
                network.interface = interface,
                problem = network.problem,
                "the storage network is not well"
            );
        }
    }
    for report in &now.transports {
        let old = before.and_then(|b| b.transports.iter().find(|old| old.transport == report.transport));
        let told = |r: &TransportReport| (r.owner.clone(), r.consumer.clone(), r.encryption.clone());
        if old.map(told) == Some(told(report)) {
            continue;
        }
        info!(
            transport = %report.transport, owner.able = report.owner.able, owner.reason = report.owner.reason,
            consumer.able = report.consumer.able, consumer.reason = report.consumer.reason,
            encryption.able = report.encryption.able, encryption.reason = report.encryption.reason, "what this node can carry"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::transport::{ExportId, Generation, Source};

    fn survey(settings: NetworkSettings, state_dir: &Path, transports: &Arc<Transports>) -> Survey {
        let (host, node) = (Host::new(), "n".parse().unwrap());
        Survey::new(&host, &node, settings, state_dir, transports.clone(), Arc::default())
    }

    #[tokio::test]
    async fn a_look_tells_where_this_node_is_and_the_same_again_is_no_news() {
        let directory = tempfile::tempdir().unwrap();
        let transports = Arc::new(Transports::none());
        let mut seen = transports.watch();
        let settings =
            NetworkSettings { interface: Some("nosuch0".to_owned()), ..NetworkSettings::default() };
        let survey = survey(settings, directory.path(), &transports);
        // Nothing is loaded for a test.
        survey.known.lock().await.probed = Some(Probed::unknown("not asked"));
        survey.known.lock().await.pending = Some(tokio::spawn(async { Probed::unknown("not asked") }));
        survey.look().await;
        let carried = seen.borrow_and_update().clone();
        let network = carried.network.unwrap();
        assert!(network.problem.contains("no interface nosuch0"), "{network:?}");
        assert_eq!(carried.transports.len(), 2);
        let refused = transports.owner(Transport::NvmeTcp).err().map(|e| e.to_string());
        assert!(refused.is_some_and(|text| text.ends_with("not asked")));
        survey.known.lock().await.pending = Some(tokio::spawn(async { Probed::unknown("not asked") }));
        survey.look().await;
        assert!(!seen.has_changed().unwrap());
    }

    #[tokio::test]
    async fn a_node_that_was_taken_out_takes_back_what_it_lent_and_lends_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let look = async || {
            let transports = Arc::new(Transports::none());
            let settings = NetworkSettings { enabled: false, ..Default::default() };
            let survey = survey(settings, directory.path(), &transports).leaving();
            let probed = probe::tests::able();
            survey.known.lock().await.pending = Some(tokio::spawn(async { probed }));
            survey.look().await;
            assert!(transports.surveyed() && *transports.watch().borrow() == Carried::default());
            transports
        };
        let never = look().await;
        assert!(never.owner(Transport::NvmeTcp).is_err(), "it never took part");
        std::fs::write(directory.path().join(ADDRESS), "10.0.0.1\n").unwrap();
        let left = look().await;
        for transport in [Transport::NvmeTcp, Transport::Nfs] {
            let owner = left.owner(transport).ok().unwrap();
            let id = ExportId { branch: "v-0".parse().unwrap(), generation: Generation(1) };
            let source = Source::Directory("/nowhere".into());
            let refused = owner.export(&id, &source).unwrap_err().to_string();
            assert!(refused.contains("network.interface"), "{refused}");
            assert!(left.consumer(transport).is_ok());
        }
    }

    #[test]
    fn a_machine_keeps_the_id_that_was_made_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let (host, node) = (Host::new(), "n".parse().unwrap());
        std::fs::write(directory.path().join("machine-id"), "made\n").unwrap();
        let of = || identity(&host, &node, directory.path()).unwrap();
        assert_eq!(of(), HostIdentity::of(&node, "made"), "also when it gets another later");
        std::fs::remove_file(directory.path().join("machine-id")).unwrap();
        assert_eq!(of(), of());
    }

    #[tokio::test(start_paused = true)]
    async fn a_kernel_that_hangs_is_asked_once_and_what_was_known_stays() {
        let directory = tempfile::tempdir().unwrap();
        let transports = Arc::new(Transports::none());
        let settings = NetworkSettings::default();
        let survey = survey(settings, directory.path(), &transports);
        let mut known = Known { pending: Some(tokio::spawn(std::future::pending())), ..Known::default() };
        let pending = known.pending.as_ref().map(JoinHandle::id);
        assert_eq!(survey.probe(&mut known).await, None);
        assert_eq!(survey.probe(&mut known).await, None);
        assert_eq!(known.pending.as_ref().map(JoinHandle::id), pending, "no second question");
        known.pending.as_ref().unwrap().abort();
    }
}
