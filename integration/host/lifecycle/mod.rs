//! A volume's life as its users see it: the real agent, its socket, real files.

mod access;
mod away;
mod inline;
mod room;
mod space;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tonic::{Code, Status};
use union_csi::csi::proto;
use union_csi::csi::proto::volume_capability::AccessType;
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use crate::agent::{Agent, Csi, Wanted, mounted};
use crate::support::{Scratch, disk};

const PROGRAM: &str = env!("CARGO_BIN_EXE_union-csi");
const NODE: &str = "test-node";
const WRITER: Mode = Mode::SingleNodeWriter;
const MIB: u64 = 1 << 20;

/// Sparse disks with pools, and an agent that gives them.
struct Machine {
    agent: Agent,
    disks: Vec<PathBuf>,
    scratch: Scratch,
}

impl Machine {
    /// One ext4 disk for each size, in MiB.
    fn new(mib: &[u64]) -> Self {
        Self::with(mib, "")
    }

    /// The same, with YAML for the agent.
    fn with(mib: &[u64], extra: &str) -> Self {
        let scratch = Scratch::new();
        let disks: Vec<_> = mib
            .iter()
            .enumerate()
            .map(|(i, mib)| disk(&scratch, &format!("disk{i}"), "ext4", *mib))
            .collect();
        let pools: Vec<_> =
            disks.iter().enumerate().map(|(i, d)| (format!("disk{i}"), d.join("pool"))).collect();
        pools.iter().for_each(|(_, p)| fs::create_dir(p).expect("a pool directory"));
        let agent = Agent::start(Path::new(PROGRAM), scratch.path(), &pools, extra);
        Self { agent, disks, scratch }
    }

    /// What lies in the branch directories of all pools.
    fn branches(&self) -> BTreeSet<String> {
        self.disks
            .iter()
            .filter_map(|d| fs::read_dir(d.join("pool/branches")).ok())
            .flatten()
            .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Nothing of a volume is left: no branch, no mount, no loop device, no process.
    fn is_clean(&self) {
        assert_eq!(self.branches(), BTreeSet::new(), "branches are left");
        let root = self.scratch.path().display().to_string();
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let of_disk = |point: &str| self.disks.iter().any(|d| d.as_os_str() == point);
        let left: Vec<_> = table
            .lines()
            .filter_map(|l| l.split(' ').nth(4))
            .filter(|point| point.starts_with(&root) && !of_disk(point))
            .collect();
        assert_eq!(left, [""; 0], "mounts are left");
        let devices = Command::new("losetup").args(["-n", "-O", "BACK-FILE"]).output().expect("losetup");
        let devices = String::from_utf8_lossy(&devices.stdout).into_owned();
        let left: Vec<_> =
            devices.lines().filter(|l| l.starts_with(&root) && l.contains("/branches/")).collect();
        assert_eq!(left, [""; 0], "loop devices are left");
        assert_eq!(self.unions(), [0; 0], "processes are left");
    }

    /// MergerFS processes of this machine's agent.
    fn unions(&self) -> Vec<u32> {
        let root = self.scratch.path().display().to_string();
        let processes = fs::read_dir("/proc").expect("/proc");
        processes
            .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
            .filter(|pid| *pid != self.agent.pid())
            .filter(|pid| {
                fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| {
                    let line = String::from_utf8_lossy(&line).into_owned();
                    line.contains(&root) && line.contains("mergerfs")
                })
            })
            .collect()
    }

    fn json(&self, path: &str) -> serde_json::Value {
        let text = self.agent.get(path).unwrap_or_else(|| panic!("{path} is not answered"));
        serde_json::from_str(&text).expect("JSON")
    }

    /// What serves the volume, as the API tells.
    fn served_by(&self, id: &str) -> String {
        let volume = self.json(&format!("/v1/volumes/{id}"));
        volume["local"]["union"]
            .as_str()
            .unwrap_or_else(|| panic!("{id} is not mounted: {volume}"))
            .to_owned()
    }

    /// The branches that the volume's plan has: pool and size of each.
    fn plan_of(&self, id: &str) -> Vec<(String, u64)> {
        let volume = self.json(&format!("/v1/volumes/{id}"));
        let branches = volume["branches"].as_array().expect("branches");
        branches
            .iter()
            .map(|b| (b["pool"].as_str().expect("a pool").to_owned(), b["size"].as_u64().expect("a size")))
            .collect()
    }
}

/// A volume of exactly this many branches, of 16 MiB steps.
fn of_branches(name: &str, mib: u64, count: &str, more: &[(&str, &str)]) -> Wanted {
    let mut parameters = vec![
        ("splitQuantum", "16Mi"),
        ("minBranches", count),
        ("maxBranches", count),
        ("strategy", "balanced"),
    ];
    parameters.extend(more);
    Wanted::new(name, mib * MIB, &parameters)
}

/// How a workload mounts it.
#[derive(Clone, Copy)]
struct Use<'a> {
    mode: Mode,
    flags: &'a [&'a str],
    group: &'a str,
    readonly: bool,
}

const PLAIN: Use<'static> = Use { mode: WRITER, flags: &[], group: "", readonly: false };

impl Use<'_> {
    fn capability(self) -> proto::VolumeCapability {
        let mut capability = mounted(self.mode);
        capability.access_type = Some(AccessType::Mount(proto::volume_capability::MountVolume {
            mount_flags: self.flags.iter().map(|f| (*f).to_owned()).collect(),
            volume_mount_group: self.group.to_owned(),
            ..Default::default()
        }));
        capability
    }
}

async fn stage(csi: &mut Csi, id: &str, how: Use<'_>) -> Result<(), Status> {
    fs::create_dir_all(csi.staging(id)).expect("staging directory");
    let request = proto::NodeStageVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: csi.staging(id).display().to_string(),
        volume_capability: Some(how.capability()),
        ..Default::default()
    };
    csi.node.node_stage_volume(request).await.map(drop)
}

async fn publish(csi: &mut Csi, id: &str, target: &Path, how: Use<'_>) -> Result<(), Status> {
    fs::create_dir_all(target.parent().expect("a parent")).expect("targets directory");
    let request = proto::NodePublishVolumeRequest {
        volume_id: id.to_owned(),
        staging_target_path: csi.staging(id).display().to_string(),
        target_path: target.display().to_string(),
        volume_capability: Some(how.capability()),
        readonly: how.readonly,
        ..Default::default()
    };
    csi.node.node_publish_volume(request).await.map(drop)
}

async fn unpublish(csi: &mut Csi, id: &str, target: &Path) -> Result<(), Status> {
    let request = proto::NodeUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        target_path: target.display().to_string(),
    };
    csi.node.node_unpublish_volume(request).await.map(drop)
}

/// Staged and published as a whole; where.
async fn mount(csi: &mut Csi, id: &str, how: Use<'_>) -> PathBuf {
    stage(csi, id, how).await.unwrap_or_else(|e| panic!("NodeStageVolume {id}: {e}"));
    let target = csi.target(id);
    publish(csi, id, &target, how).await.unwrap_or_else(|e| panic!("NodePublishVolume {id}: {e}"));
    target
}

async fn remove(csi: &mut Csi, id: &str) {
    csi.unpublish(id).await.unwrap_or_else(|e| panic!("NodeUnpublishVolume {id}: {e}"));
    csi.unstage(id).await.unwrap_or_else(|e| panic!("NodeUnstageVolume {id}: {e}"));
    csi.delete(id).await.unwrap_or_else(|e| panic!("DeleteVolume {id}: {e}"));
}

/// The error says which code, and each of the words that its reader needs.
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &[&str]) {
    let error = result.expect_err("the call was accepted");
    assert_eq!(error.code(), code, "{error:?}");
    for word in words {
        assert!(error.message().contains(word), "{:?} does not say {word:?}", error.message());
    }
}

async fn attach(csi: &mut Csi, id: &str, mode: Mode) -> Result<(), Status> {
    let request = proto::ControllerPublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: NODE.to_owned(),
        volume_capability: Some(mounted(mode)),
        ..Default::default()
    };
    csi.controller.controller_publish_volume(request).await.map(drop)
}

async fn detach(csi: &mut Csi, id: &str) -> Result<(), Status> {
    let request = proto::ControllerUnpublishVolumeRequest {
        volume_id: id.to_owned(),
        node_id: NODE.to_owned(),
        ..Default::default()
    };
    csi.controller.controller_unpublish_volume(request).await.map(drop)
}

async fn published_on(csi: &mut Csi, id: &str) -> Vec<String> {
    let request = proto::ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let reply =
        csi.controller.controller_get_volume(request).await.expect("ControllerGetVolume").into_inner();
    let status = reply.status.expect("a status");
    assert!(status.volume_condition.is_some_and(|c| !c.abnormal), "{id} is not well");
    status.published_node_ids
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_made_used_by_two_pods_and_removed_and_leaves_nothing() {
    let mut machine = Machine::new(&[128, 192, 256]);
    let mut csi = machine.agent.csi().await;
    let wanted = Wanted::new("claim", 400 * MIB, &[("splitQuantum", "16Mi")]);
    let volume = csi.create(&wanted).await.expect("CreateVolume");
    let id = volume.volume_id;
    assert!(volume.capacity_bytes >= wanted.bytes, "it has {} bytes", volume.capacity_bytes);
    assert!(machine.branches().len() > 1, "it needs more than one disk");

    attach(&mut csi, &id, WRITER).await.expect("ControllerPublishVolume");
    attach(&mut csi, &id, WRITER).await.expect("the same again");
    assert_eq!(published_on(&mut csi, &id).await, [NODE]);
    refused(csi.delete(&id).await, Code::FailedPrecondition, &["attached", NODE]);

    let first = mount(&mut csi, &id, PLAIN).await;
    let second = machine.scratch.join("targets/second");
    publish(&mut csi, &id, &second, PLAIN).await.expect("a second pod");
    fs::write(first.join("file"), "of the first").expect("a file");
    assert_eq!(fs::read_to_string(second.join("file")).expect("the file"), "of the first");
    assert_eq!(machine.served_by(&id), "mergerfs");

    // The agent restarts in between, as in an upgrade.
    machine.agent.stop();
    fs::write(second.join("meanwhile"), "no agent").expect("a file without an agent");
    machine.agent.restart();
    let mut csi = machine.agent.csi().await;
    assert_eq!(csi.create(&wanted).await.expect("CreateVolume again").volume_id, id);
    publish(&mut csi, &id, &first, PLAIN).await.expect("the kubelet repeats itself");
    assert_eq!(published_on(&mut csi, &id).await, [NODE]);

    unpublish(&mut csi, &id, &second).await.expect("the second pod ends");
    assert!(!second.exists(), "its target is removed");
    assert_eq!(fs::read_to_string(first.join("meanwhile")).expect("the file"), "no agent");
    csi.unpublish(&id).await.expect("the first pod ends");
    csi.unstage(&id).await.expect("NodeUnstageVolume");

    // Another pod later finds its files.
    let again = mount(&mut csi, &id, PLAIN).await;
    assert_eq!(fs::read_to_string(again.join("file")).expect("the file"), "of the first");
    csi.unpublish(&id).await.expect("NodeUnpublishVolume");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    detach(&mut csi, &id).await.expect("ControllerUnpublishVolume");
    detach(&mut csi, &id).await.expect("the same again");
    csi.delete(&id).await.expect("DeleteVolume");
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn without_its_store_file_an_agent_warns_of_the_branches_and_leaves_them_to_be_read_by_hand() {
    let mut machine = Machine::new(&[256]);
    let mut csi = machine.agent.csi().await;
    let id = csi.create(&of_branches("lost", 64, "1", &[])).await.expect("CreateVolume").volume_id;
    let target = mount(&mut csi, &id, PLAIN).await;
    fs::write(target.join("file"), "kept").expect("a file");
    csi.unpublish(&id).await.expect("NodeUnpublishVolume");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    machine.agent.stop();
    let store = machine.scratch.join("state/store.redb");
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&store).expect("the store").permissions());
    assert_eq!(mode & 0o077, 0, "others can read the store");
    let backup = fs::read(&store).expect("the store");
    fs::remove_file(&store).expect("the store");
    machine.agent.restart();
    let begun = std::time::Instant::now();
    while !machine.agent.log_end().contains("belongs to no volume") {
        assert!(begun.elapsed().as_secs() < 30, "no warning:\n{}", machine.agent.log_end());
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert!(machine.agent.log_end().contains("lost-0"));
    let mut csi = machine.agent.csi().await;
    refused(csi.create(&of_branches("new", 200, "1", &[])).await, Code::ResourceExhausted, &["disk0"]);
    // As docs/OPERATIONS.md says.
    let look = machine.scratch.join("look");
    fs::create_dir(&look).expect("a directory");
    let image = machine.disks[0].join("pool/branches/lost-0/disk.img");
    let (image, point) = (image.display().to_string(), look.display().to_string());
    crate::support::run("mount", &["-o", "loop,ro", &image, &point]);
    assert_eq!(fs::read_to_string(look.join("data/file")).expect("the file"), "kept");
    crate::support::run("umount", &[&point]);
    // With the backup everything is there again.
    machine.agent.stop();
    fs::write(&store, backup).expect("the backup");
    machine.agent.restart();
    let mut csi = machine.agent.csi().await;
    let target = mount(&mut csi, &id, PLAIN).await;
    assert_eq!(fs::read_to_string(target.join("file")).expect("the file"), "kept");
    remove(&mut csi, &id).await;
    machine.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_has_all_it_needs_with_the_privileges_that_its_unit_gives_it() {
    let unit = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/systemd/union-csi.service"))
        .expect("the unit");
    let set = unit.lines().find_map(|l| l.strip_prefix("CapabilityBoundingSet=")).expect("its capabilities");
    let documented =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CONFIGURATION.md")).expect("the page");
    for capability in set.split(' ') {
        assert!(
            documented.contains(&format!("`{capability}`")),
            "docs/CONFIGURATION.md does not tell what {capability} is for"
        );
    }
    let kept = set.split(' ').map(|c| c.replace("CAP_", "+").to_lowercase()).collect::<Vec<_>>().join(",");
    let tools = Scratch::new();
    let program = tools.join("union-csi");
    let script =
        format!("#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=-all,{kept} {PROGRAM} \"$@\"\n");
    fs::write(&program, script).expect("a script");
    fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
    let mut machine = Machine::new(&[128, 128]);
    machine.agent.stop();
    machine.agent.run_as(&program);
    assert_eq!(machine.json("/v1/status")["abilities"]["mergerfsProblem"], serde_json::Value::Null);
    let mut csi = machine.agent.csi().await;
    for (count, group) in [("1", ""), ("2", "5555")] {
        let id = csi
            .create(&of_branches(&format!("unit{count}"), 64, count, &[]))
            .await
            .expect("CreateVolume")
            .volume_id;
        let target = mount(&mut csi, &id, Use { group, ..PLAIN }).await;
        fs::write(target.join("file"), "x").expect("a file");
        if !group.is_empty() {
            assert!(access::as_user(&target, group, "echo x > own"), "a member of the group cannot write");
        }
        remove(&mut csi, &id).await;
    }
    machine.is_clean();
}
