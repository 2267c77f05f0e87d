//! The owner's part on a real kernel: `inside owner ACTION NAME=VALUE...`. Each run is an agent that begins and ends; everything
//! that it is to know lies below `on=`, a filesystem that outlives the machine's starts.
//!
//! - `make fs=xfs|ext4|none [write-through=no]`: a branch of 320 MiB, and its objects.
//! - `order consumer=NODE|nobody epoch=N [identity=NAME]`: the leader's order, and how the consumer calls itself.
//! - `obey epoch=N [generation=N]`: works until that order, and an export of that generation, is reported;
//!   prints the report.
//! - `try seconds=N`: works so long; prints the report, and why it is not as ordered.
//! - `restore`: works with an empty store until exports are back; prints them.
//! - `attach`: attaches the branch as a volume of this node would; prints where.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use union_csi::domain::access::{Access, Epoch, Generation};
use union_csi::domain::policy::FsType;
use union_csi::domain::pool::Reserve;
use union_csi::domain::reach::{StorageNetwork, Transport};
use union_csi::domain::split::BranchFormat;
use union_csi::domain::{Bytes, NodeName};
use union_csi::node::branch::Branches;
use union_csi::node::executor::{Executor, Exporting, NodeFacts};
use union_csi::node::keys::KeyFiles;
use union_csi::node::pool::{PoolSettings, Pools};
use union_csi::node::transport::nvme_tcp::{DEFAULT_PORT, NvmeOwner};
use union_csi::node::transport::{Carried, Ends, Owner, Transports};
use union_csi::node::union::{MergerfsSettings, Unions};
use union_csi::node::volume::{VolumeSettings, Volumes};
use union_csi::platform::Host;
use union_csi::platform::nvme::Nvme;
use union_csi::store::Store;
use union_csi::store::local::LocalStore;
use union_csi::store::object::{
    Branch, BranchSpec, BranchStatus, Meta, StorageNode, StorageNodeSpec, StorageNodeStatus,
};

type Answer = Result<Value, Box<dyn Error>>;

/// How long an order may take on these machines.
const BOUND: Duration = Duration::from_secs(60);

/// Runs one action.
pub fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [action, given @ ..] = arguments else { return Err("inside owner ACTION".into()) };
    let given: BTreeMap<&str, &str> = given.iter().filter_map(|a| a.split_once('=')).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let answer = runtime.block_on(act(action, &given))?;
    Ok(writeln!(std::io::stdout(), "{answer}")?)
}

async fn act(action: &str, given: &BTreeMap<&str, &str>) -> Answer {
    let text = |name: &str| given.get(name).copied().ok_or_else(|| format!("{name}= is missing"));
    let agent = Agent::new(Path::new(text("on")?), action == "restore")?;
    match action {
        "make" => agent.make(text("fs")?, given.get("write-through") != Some(&"no")).await,
        "order" => {
            agent.order(text("consumer")?, text("epoch")?.parse()?, given.get("identity").copied()).await
        }
        "obey" => {
            let generation = given.get("generation").map(|n| n.parse()).transpose()?;
            agent.obey(Epoch(text("epoch")?.parse()?), generation.map(Generation)).await
        }
        "try" => agent.work(Duration::from_secs(text("seconds")?.parse()?)).await,
        "restore" => agent.restore().await,
        "attach" => agent.attach(),
        other => Err(format!("there is no action {other}").into()),
    }
}

/// The parts of an agent that this is about, as its app wires them.
struct Agent {
    node: NodeName,
    state: PathBuf,
    store: Arc<dyn Store>,
    pools: Arc<Pools>,
    branches: Arc<Branches>,
    owner: Arc<NvmeOwner>,
    exporting: Exporting,
}

impl Agent {
    fn new(on: &Path, forgetful: bool) -> Result<Self, Box<dyn Error>> {
        let (host, state) = (Host::new(), on.join("state"));
        std::fs::create_dir_all(&state)?;
        std::fs::create_dir_all(on.join("pool"))?;
        let node: NodeName = std::fs::read_to_string("/proc/sys/kernel/hostname")?.trim().parse()?;
        let name = if forgetful { "empty.redb" } else { "store.redb" };
        let store: Arc<dyn Store> = Arc::new(LocalStore::open(&state.join(name))?);
        let pool = PoolSettings {
            name: "pool".parse()?,
            path: on.join("pool"),
            labels: BTreeMap::new(),
            reserve: Reserve::Bytes(Bytes::ZERO),
            media: None,
            uuid: None,
        };
        let pools = Arc::new(Pools::new(host.clone(), node.clone(), vec![pool], state.clone()));
        let branches = Arc::new(Branches::new(host.clone(), pools.clone()));
        let address = std::fs::read_to_string("/etc/hosts")?
            .lines()
            .filter_map(|line| line.split_once(' '))
            .find(|(_, name)| *name == node.as_str())
            .ok_or("this machine has no address")?
            .0
            .parse()?;
        let listeners = vec![SocketAddr::new(address, DEFAULT_PORT)];
        let owner = Arc::new(NvmeOwner::new(&host, Nvme::new(&host)?, listeners));
        let transports = Arc::new(Transports::none());
        let ends = Ends { owner: Ok(owner.clone()), consumer: Err("it only owns".to_owned()) };
        let network = Some(StorageNetwork::default());
        transports.install(Carried { network, ..Carried::default() }, [(Transport::NvmeTcp, ends)].into());
        let mergerfs = MergerfsSettings {
            path: "mergerfs".into(),
            options: BTreeMap::new(),
            start_timeout: Duration::from_secs(10),
        };
        let unions = Arc::new(Unions::probe(&host, &mergerfs, &state));
        let settings = VolumeSettings { state_dir: state.clone(), allowed_targets: vec![on.to_owned()] };
        let keys = KeyFiles::new(&host, &state);
        let volumes = Volumes::new(
            host,
            store.clone(),
            node.clone(),
            branches.clone(),
            unions,
            transports.clone(),
            settings,
        )?;
        let exporting = Exporting { transports, uses: Arc::new(volumes), keys };
        Ok(Self { node, state, store, pools, branches, owner, exporting })
    }

    fn spec(&self, fs: &str) -> Result<BranchSpec, Box<dyn Error>> {
        let fs_type = match fs {
            "xfs" => Some(FsType::Xfs),
            "ext4" => Some(FsType::Ext4),
            _ => None,
        };
        Ok(BranchSpec {
            id: "pvc-1-0".parse()?,
            volume: "pvc-1".parse()?,
            index: 0,
            node: self.node.clone(),
            pool: "pool".parse()?,
            size: Bytes::mib(320),
            usable: Bytes::mib(200),
            format: BranchFormat::Image,
            fs_type,
            thin: false,
            accept_unenforced: false,
            write_through: true,
            encrypted: false,
            access: None,
            sharing: None,
        })
    }

    async fn make(&self, fs: &str, write_through: bool) -> Answer {
        let spec = BranchSpec { write_through, ..self.spec(fs)? };
        let status = self.branches.ensure_present(&spec, false)?;
        let meta = Meta::with_finalizer(spec.id.as_str());
        let made = Branch { meta, spec, status: BranchStatus::default() };
        let mut made = self.store.branches().create(made).await?;
        made.status = status;
        self.store.branches().update_status(made).await?;
        Ok(json!("made"))
    }

    async fn branch(&self) -> Result<Branch, Box<dyn Error>> {
        Ok(self.store.branches().get("pvc-1-0").await?.ok_or("there is no branch")?)
    }

    async fn order(&self, consumer: &str, epoch: u64, identity: Option<&str>) -> Answer {
        let consumer: Option<NodeName> = if consumer == "nobody" { None } else { Some(consumer.parse()?) };
        if let (Some(node), Some(identity)) = (&consumer, identity)
            && self.store.nodes().get(node.as_str()).await?.is_none()
        {
            let object = StorageNode {
                meta: Meta::new(node.as_str()),
                spec: StorageNodeSpec { node: node.clone() },
                status: StorageNodeStatus::default(),
            };
            let mut made = self.store.nodes().create(object).await?;
            let able = json!({"able": true});
            made.status = serde_json::from_value(json!({
                "transports": [{"transport": "nvme-tcp", "owner": able, "consumer": able, "authentication": able,
                    "identity": identity}]
            }))?;
            self.store.nodes().update_status(made).await?;
        }
        let mut branch = self.branch().await?;
        branch.spec.access = Some(Access { consumer, epoch: Epoch(epoch) });
        self.store.branches().update(branch).await?;
        Ok(json!("ordered"))
    }

    fn executor(&self) -> Arc<Executor> {
        let facts = NodeFacts {
            labels: BTreeMap::new(),
            cluster_labels: tokio::sync::watch::Sender::new(Some(BTreeMap::new())).subscribe(),
            agent_version: "1".to_owned(),
            mergerfs_version: None,
            kernel: String::new(),
            measure_interval: Duration::from_secs(60),
            ephemeral_dir: self.state.join("ephemeral"),
        };
        let (store, node) = (self.store.clone(), self.node.clone());
        let (pools, branches) = (self.pools.clone(), self.branches.clone());
        Arc::new(Executor::new(store, node, facts, pools, branches, self.exporting.clone()))
    }

    async fn obey(&self, epoch: Epoch, generation: Option<Generation>) -> Answer {
        let (executor, stop, begun) = (self.executor(), CancellationToken::new(), Instant::now());
        let task = tokio::spawn({
            let (executor, stop) = (executor.clone(), stop.clone());
            async move { executor.run(stop).await }
        });
        loop {
            let branch = self.branch().await?;
            let obeyed = branch.status.export.as_ref().is_some_and(|export| {
                export.allowed.epoch == epoch && generation.is_none_or(|g| export.generation == g)
            });
            if obeyed {
                stop.cancel();
                task.await?;
                return Ok(json!(branch.status.export));
            }
            if begun.elapsed() > BOUND {
                return Err(format!("it is not obeyed: {}", json!(branch.status)).into());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn work(&self, time: Duration) -> Answer {
        let (executor, stop) = (self.executor(), CancellationToken::new());
        let end = async {
            tokio::time::sleep(time).await;
            stop.cancel();
        };
        tokio::join!(executor.run(stop.clone()), end);
        let status = self.branch().await?.status;
        Ok(json!({ "export": status.export, "conditions": status.conditions }))
    }

    async fn restore(&self) -> Answer {
        self.executor().restore_exports().await;
        let tell = |e: union_csi::node::transport::Exported| json!({ "generation": e.id.generation, "allowed": e.allowed, "reachable": e.endpoint.is_some() });
        Ok(self.owner.exports()?.into_iter().map(tell).collect())
    }

    fn attach(&self) -> Answer {
        let record = std::fs::read_to_string(self.state.join("../pool/branches/pvc-1-0/branch.json"))?;
        let record: Value = serde_json::from_str(&record)?;
        let fs = record["fsType"].as_str().unwrap_or("none").to_owned();
        let at = self.state.join("volumes/pvc-1/branches/0");
        std::fs::create_dir_all(at.parent().ok_or("no parent")?)?;
        let attached = self.branches.ensure_attached(&self.spec(&fs)?, &at, false);
        Ok(match attached {
            Ok(attached) => json!({ "at": attached.mount, "device": attached.device }),
            Err(e) => json!({ "error": e.to_string() }),
        })
    }
}
