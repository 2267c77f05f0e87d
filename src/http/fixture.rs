//! A made-up machine for the tests of what is seen from outside.

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::BoxStream;

use super::api::Standing;
use super::{Hosts, Machine, View};
use crate::controllers::orphans::scan::{Orphan, OrphanKind, counts};
use crate::controllers::orphans::{Known, Scan};
use crate::controllers::splitter::SplitterFigures;
use crate::csi::counters::MethodSnapshot;
use crate::domain::policy::FsType;
use crate::domain::pool::{Enforcement, Media, PoolReport, PoolState};
use crate::domain::reach::{Ability, StorageNetwork, Transport, TransportReport};
use crate::domain::split::{BranchFormat, PlannedBranch};
use crate::domain::union::UnionKind;
use crate::domain::volume::{AccessMode, VolumeMode};
use crate::domain::{Bytes, VolumeId};
use crate::node::transport::Carried;
use crate::node::union::UnionAbilities;
use crate::node::volume::{AttachedBranch, Health, LinkState, RemoteBranch, Usage, VolumeSnapshot};
use crate::store::object::{
    Branch, BranchPhase, BranchSpec, BranchStatus, Meta, Object, StorageNode, StorageNodeSpec,
    StorageNodeStatus, Version, VolumeSplit, VolumeSplitSpec, VolumeSplitStatus,
};
use crate::store::{Collection, Event, Selector, Store, StoreError};
use crate::telemetry::{Counters, KubernetesFigures};

/// A name that would run as a script in a careless page.
pub(crate) const HOSTILE: &str = "<img src=x onerror=\"document.title='owned'\">";

/// Images both ways; directories of others, and none for others.
fn carried() -> Carried {
    let able = |reason: &str| Ability { able: true, reason: reason.to_owned() };
    let unable = |reason: &str| Ability { able: false, reason: reason.to_owned() };
    let nvme = TransportReport {
        transport: Transport::NvmeTcp,
        owner: able("configfs built in, nvmet loaded, nvmet-tcp loaded"),
        consumer: able("nvme-fabrics loaded, nvme-tcp loaded"),
        authentication: able("DH-HMAC-CHAP"),
        encryption: able("TLS 1.3"),
        identity: Some("nqn.2026-01.io.union:host:nas:0011223344556677".to_owned()),
    };
    let nfs = TransportReport {
        transport: Transport::Nfs,
        owner: unable("kernel 6.12 has no module nfsd"),
        consumer: able("nfsv4 is in the kernel"),
        authentication: unable("NFS knows a peer by its address only"),
        encryption: unable("NFS is not encrypted here"),
        identity: None,
    };
    let network = StorageNetwork {
        interface: "eth1".to_owned(),
        addresses: vec!["10.0.0.7".to_owned()],
        megabits: Some(10_000),
        mtu: Some(9000),
        problem: String::new(),
    };
    Carried { transports: vec![nvme, nfs], network: Some(network) }
}

pub(crate) struct FakeMachine {
    pub(crate) pools: Vec<PoolReport>,
    pub(crate) volumes: Vec<VolumeSnapshot>,
    pub(crate) abilities: UnionAbilities,
    pub(crate) carried: Carried,
    pub(crate) counters: Counters,
    pub(crate) problems: Vec<String>,
    pub(crate) hangs: bool,
    pub(crate) standing: Standing,
    pub(crate) orphans: Known,
}

#[async_trait]
impl Machine for FakeMachine {
    fn pools(&self) -> Vec<PoolReport> {
        self.pools.clone()
    }
    async fn volumes(&self) -> Vec<VolumeSnapshot> {
        if self.hangs {
            std::future::pending::<()>().await;
        }
        self.volumes.clone()
    }
    fn abilities(&self) -> UnionAbilities {
        self.abilities.clone()
    }
    fn carried(&self) -> Carried {
        self.carried.clone()
    }
    async fn ready(&self) -> Result<(), Vec<String>> {
        if self.problems.is_empty() { Ok(()) } else { Err(self.problems.clone()) }
    }
    fn counters(&self) -> Counters {
        self.counters.clone()
    }
    fn process_memory(&self, pid: i32) -> Option<u64> {
        (pid == 4242).then_some(5 << 20)
    }
    fn standing(&self) -> Standing {
        self.standing.clone()
    }
    fn orphans(&self) -> Known {
        self.orphans.clone()
    }
}

/// A scan that found one branch.
fn scan() -> Scan {
    let at = jiff::Timestamp::from_second(1_700_000_000).unwrap();
    let orphan = Orphan {
        kind: OrphanKind::Branch,
        name: "old-0".into(),
        volume: "old".into(),
        node: Some("attic".parse().unwrap()),
        size: Some(Bytes::gib(20)),
        created: None,
        first_seen: at,
        age_seconds: 0,
        reason: "its volume old does not exist".into(),
        remedy: "kubectl -n union delete branch old-0".into(),
    };
    Scan { at, counts: counts([&orphan]), orphans: vec![orphan] }
}

fn pool(name: &str, media: Media, total: u64, free: u64, promised: u64, occupied: u64) -> PoolReport {
    let tenth = |n: u64| Bytes::new(n * (1 << 30) / 10);
    PoolReport {
        name: name.parse().unwrap(),
        path: format!("/mnt/{name}"),
        state: PoolState::Ready,
        message: String::new(),
        labels: BTreeMap::new(),
        media,
        device: format!("uuid-{name}"),
        filesystem: "xfs".into(),
        enforcement: Enforcement::ProjectQuota,
        enforcement_message: String::new(),
        image_filesystems: vec![FsType::Ext4, FsType::Xfs],
        total: tenth(total),
        free: tenth(free),
        reserve: Bytes::new(total * (1 << 30) / 10 / 20),
        promised: tenth(promised),
        occupied: tenth(occupied),
        allocatable: None,
    }
}

impl Default for FakeMachine {
    fn default() -> Self {
        let mut absent = pool("usb", Media::Unknown, 0, 0, 0, 0);
        absent.state = PoolState::Absent;
        absent.message = "nothing is mounted at /mnt/usb; mount the filesystem with UUID 51c7-aa02".into();
        let calls = MethodSnapshot {
            method: "CreateVolume",
            codes: [("OK", 4), ("RESOURCE_EXHAUSTED", 1)].into(),
            buckets: vec![(0.01, 2), (0.1, 4), (1.0, 5)],
            seconds: 0.42,
        };
        Self {
            pools: vec![
                pool("disk1", Media::Hdd, 36_380, 14_000, 16_000, 11_000),
                pool("disk2", Media::Hdd, 18_190, 7_900, 6_000, 1_500),
                pool("flash", Media::Nvme, 9_310, 4_100, 2_500, 900),
                absent,
            ],
            volumes: vec![local("media", UnionKind::Mergerfs), local("backups", UnionKind::Bind)],
            abilities: UnionAbilities {
                mergerfs_version: Some("2.42.0".into()),
                mergerfs_problem: None,
                passthrough: true,
                direct_read: true,
                direct_write: true,
                overlay: true,
                moves_files: false,
                refused_options: Vec::new(),
            },
            carried: carried(),
            counters: Counters {
                access: crate::controllers::access::AccessFigures { grants: 5, revocations: 3, waiting: 1 },
                exports: crate::node::access::ExportCounts {
                    open: 2,
                    grants: 4,
                    fences: 2,
                    ..Default::default()
                },
                store: crate::store::Figures::default(),
                orphans: Some(scan().counts),
                csi: vec![calls],
                splitter: SplitterFigures { plans: 3, ..SplitterFigures::default() },
                kubernetes: Some(KubernetesFigures {
                    requests: vec![("watch", "branches", 3), ("update", "leases", 17)],
                    failures: vec![("unreachable", 1), ("server", 0)],
                }),
                leads: true,
                terms: 1,
            },
            problems: Vec::new(),
            hangs: false,
            standing: Standing {
                mode: "all".into(),
                store: "kubernetes".into(),
                leads: false,
                leader: Some("attic".into()),
            },
            orphans: Known { last: Some(Arc::new(scan())), ..Known::default() },
        }
    }
}

fn local(id: &str, union: UnionKind) -> VolumeSnapshot {
    let merged = union == UnionKind::Mergerfs;
    let total = if merged { 2_200 << 30 } else { 300 << 30 };
    let branch = |index: u32| AttachedBranch {
        id: id.parse::<VolumeId>().unwrap().branch(index),
        mount: format!("/var/lib/union-csi/branches/{id}-{index}").into(),
        backing: format!("/mnt/disk{}/branches/{id}-{index}/data", index + 1).into(),
        device: None,
        space: Some(Usage { total: total / 2, used: total / 4, available: total / 4 }),
        size: Bytes::new(total / 2),
        remote: (merged && index == 1).then(|| RemoteBranch {
            node: "attic".parse().unwrap(),
            transport: Some(Transport::NvmeTcp),
            generation: Some(3),
            link: LinkState::Away,
            since: Some(jiff::Timestamp::from_second(1_700_000_000).unwrap()),
        }),
    };
    VolumeSnapshot {
        volume: id.parse().unwrap(),
        union,
        pid: merged.then_some(4242),
        options: if merged {
            [("category.create", "pfrd"), ("cache.files", "off"), ("passthrough.io", "rw")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into()
        } else {
            BTreeMap::new()
        },
        staging: Some(format!("/var/lib/union-csi/stage/{id}").into()),
        targets: vec![if merged {
            "/var/lib/kubelet/pods/7f3b5a10-2d5e-4f7b-9a51-0a4c8d1c2e11/volumes/kubernetes.io~csi/media/mount"
                .into()
        } else {
            "/srv/backups".into()
        }],
        space: Some(Usage { total, used: total * 11 / 20, available: total * 9 / 20 }),
        branches: if merged { vec![branch(0), branch(1)] } else { vec![branch(0)] },
        health: Health { abnormal: false, message: String::new() },
        heals: u64::from(merged),
    }
}

type Piece = (&'static str, u64, BranchPhase);

fn split(id: &str, name: &str, gib: u64, pieces: &[Piece], reason: &str) -> (VolumeSplit, Vec<Branch>) {
    let volume: VolumeId = id.parse().unwrap();
    let planned: Vec<PlannedBranch> = (0u32..)
        .zip(pieces)
        .map(|(index, (pool, size, _))| PlannedBranch {
            index,
            node: "nas".parse().unwrap(),
            pool: pool.parse().unwrap(),
            size: Bytes::gib(*size),
            usable: Bytes::gib(*size),
            format: BranchFormat::Directory,
            fs_type: None,
        })
        .collect();
    let branches = planned
        .iter()
        .zip(pieces)
        .map(|(p, (_, size, phase))| Branch {
            meta: Meta::with_finalizer(volume.branch(p.index).to_string()),
            spec: BranchSpec {
                id: volume.branch(p.index),
                volume: volume.clone(),
                index: p.index,
                node: p.node.clone(),
                pool: p.pool.clone(),
                size: p.size,
                usable: p.usable,
                format: p.format,
                fs_type: None,
                thin: false,
                accept_unenforced: false,
                write_through: true,
                encrypted: false,
                access: None,
                sharing: None,
            },
            status: BranchStatus {
                phase: *phase,
                reason: if *phase == BranchPhase::Bound { String::new() } else { reason.to_owned() },
                bytes_used: Bytes::gib(size / 2),
                enforcement: Some(Enforcement::ProjectQuota),
                ..BranchStatus::default()
            },
        })
        .collect();
    let split = VolumeSplit {
        meta: Meta::with_finalizer(id),
        spec: VolumeSplitSpec {
            volume,
            request_name: name.to_owned(),
            capacity: Bytes::gib(gib),
            limit: None,
            access_modes: vec![AccessMode::SingleNodeWriter],
            volume_mode: VolumeMode::Filesystem,
            parameters: BTreeMap::new(),
            consumer: None,
            topology: Vec::new(),
            ephemeral: false,
            branches: planned,
            next_index: 0,
            attached: Vec::new(),
            used: false,
        },
        status: VolumeSplitStatus::default(),
    };
    (split, branches)
}

pub(crate) struct FakeStore {
    splits: Fixed<VolumeSplit>,
    branches: Fixed<Branch>,
    nodes: Fixed<StorageNode>,
}

impl FakeStore {
    pub(crate) fn new(down: bool) -> Self {
        use BranchPhase::{Bound, Lost, Pending};
        let volumes = [
            split(
                "media",
                "media",
                2_200,
                &[("disk1", 1_200, Bound), ("disk2", 600, Bound), ("flash", 400, Bound)],
                "",
            ),
            split("backups", "backups", 300, &[("disk1", 300, Bound)], ""),
            split(
                "pvc-5d0e",
                "pvc-5d0e",
                200,
                &[("disk1", 100, Bound), ("usb", 100, Lost)],
                "pool usb is absent",
            ),
            split("v-9f2c", HOSTILE, 150, &[("flash", 150, Pending)], ""),
        ];
        let (splits, branches): (Vec<_>, Vec<_>) = volumes.into_iter().unzip();
        let far = StorageNode {
            meta: Meta::new("attic"),
            spec: StorageNodeSpec { node: "attic".parse().unwrap() },
            status: StorageNodeStatus {
                pools: vec![pool("old", Media::Ssd, 4_650, 4_000, 0, 0)],
                agent_version: "0.1.0".into(),
                mergerfs_version: Some("2.33.5".into()),
                kernel: "6.1.0".into(),
                ..StorageNodeStatus::default()
            },
        };
        Self {
            splits: Fixed { all: splits, down },
            branches: Fixed { all: branches.into_iter().flatten().collect(), down },
            nodes: Fixed { all: vec![far], down },
        }
    }
}

impl Store for FakeStore {
    fn splits(&self) -> &dyn Collection<VolumeSplit> {
        &self.splits
    }
    fn branches(&self) -> &dyn Collection<Branch> {
        &self.branches
    }
    fn nodes(&self) -> &dyn Collection<StorageNode> {
        &self.nodes
    }
}

struct Fixed<T> {
    all: Vec<T>,
    down: bool,
}

fn refused<R>() -> Result<R, StoreError> {
    let source = std::io::Error::other("connection refused");
    Err(StoreError::Backend { action: "list objects".into(), source: source.into() })
}

#[async_trait]
impl<T: Object> Collection<T> for Fixed<T> {
    async fn get(&self, name: &str) -> Result<Option<T>, StoreError> {
        Ok(self.all.iter().find(|o| o.meta().name == name).cloned())
    }
    async fn list(&self, _: &Selector) -> Result<Vec<T>, StoreError> {
        if self.down { refused() } else { Ok(self.all.clone()) }
    }
    async fn create(&self, _: T) -> Result<T, StoreError> {
        refused()
    }
    async fn update(&self, _: T) -> Result<T, StoreError> {
        refused()
    }
    async fn update_status(&self, _: T) -> Result<T, StoreError> {
        refused()
    }
    async fn delete(&self, _: &str, _: Option<Version>) -> Result<bool, StoreError> {
        refused()
    }
    async fn watch(
        &self,
        _: Selector,
    ) -> Result<BoxStream<'static, Result<Event<T>, StoreError>>, StoreError> {
        refused()
    }
}

pub(crate) fn view(machine: FakeMachine, store_down: bool) -> Arc<View> {
    Arc::new(View {
        node: "nas".parse().unwrap(),
        node_labels: BTreeMap::new(),
        store: Arc::new(FakeStore::new(store_down)),
        machine: Arc::new(machine),
        hosts: Hosts::new("nas", []),
    })
}
