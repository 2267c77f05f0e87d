//! Bad input, against the real agent: a clear error, nothing changed, nothing lost.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tonic::{Code, Status};
use union_csi::csi::proto;
use union_csi::csi::proto::volume_capability::access_mode::Mode;

use crate::agent::{Agent, Csi, Wanted, mounted};
use crate::support::{Scratch, disk, run};

const PROGRAM: &str = env!("CARGO_BIN_EXE_union-csi");
const WRITER: Mode = Mode::SingleNodeWriter;
const MIB: u64 = 1 << 20;

/// A scratch directory, `count` ext4 disks of 256 MiB, and an agent that has them as pools.
fn agent_with_disks(count: usize) -> (Scratch, Vec<PathBuf>, Agent) {
    let scratch = Scratch::new();
    let disks: Vec<_> = (0..count).map(|i| disk(&scratch, &format!("disk{i}"), "ext4", 256)).collect();
    let pools: Vec<_> = disks.iter().enumerate().map(|(i, d)| (format!("disk{i}"), d.join("pool"))).collect();
    pools.iter().for_each(|(_, p)| fs::create_dir(p).expect("a pool directory"));
    let agent = Agent::start(Path::new(PROGRAM), scratch.path(), &pools, "");
    (scratch, disks, agent)
}

fn small(name: &str, mib: u64) -> Wanted {
    Wanted::new(name, mib * MIB, &[("splitQuantum", "16Mi")])
}

/// Everything that lies in the pools' branch directories.
fn branches_on(disks: &[PathBuf]) -> BTreeSet<String> {
    disks
        .iter()
        .filter_map(|d| fs::read_dir(d.join("pool/branches")).ok())
        .flatten()
        .map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect()
}

/// The error says which code, and each of the words that its reader needs.
fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &[&str]) {
    let error = result.expect_err("the call was accepted");
    assert_eq!(error.code(), code, "{error:?}");
    for word in words {
        assert!(error.message().contains(word), "{:?} does not say {word:?}", error.message());
    }
}

async fn volumes(csi: &mut Csi) -> Vec<String> {
    let reply = csi.controller.list_volumes(proto::ListVolumesRequest::default()).await.expect("ListVolumes");
    reply.into_inner().entries.into_iter().filter_map(|e| e.volume).map(|v| v.volume_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_makes_no_sense_is_refused_by_name_and_leaves_nothing() {
    let (_scratch, disks, agent) = agent_with_disks(2);
    let mut csi = agent.csi().await;
    let parameters = |pairs: &[(&str, &str)]| Wanted::new("claim", 32 * MIB, pairs);

    for (pairs, words) in [
        (&[("splitquantum", "1Gi")][..], &["splitquantum", "splitQuantum"][..]),
        (&[("splitQuantum", "a lot")], &["splitQuantum", "a lot"]),
        (&[("minBranches", "0")], &["minBranches"]),
        (&[("minBranches", "5"), ("maxBranches", "2")], &["minBranches", "maxBranches"]),
        (&[("strategy", "random"), ("placement", "moon")], &["strategy", "random", "placement", "moon"]),
        (&[("mergerfs.branches", "/etc")], &["mergerfs.branches"]),
        (&[("mergerfs.category.create", "no-such-policy")], &["no-such-policy"]),
        (&[("branchFormat", "zip")], &["branchFormat", "zip"]),
        (&[("fsType", "ntfs")], &["fsType", "ntfs"]),
        (&[("branchTimeout", "soon")], &["branchTimeout", "soon"]),
        (&[("media", "tape")], &["media", "tape"]),
    ] {
        refused(csi.create(&parameters(pairs)).await, Code::InvalidArgument, words);
    }
    for (required, limit) in [(-1, 0), (0, -1), (2 << 20, 1 << 20)] {
        let request = proto::CreateVolumeRequest {
            name: "claim".to_owned(),
            capacity_range: Some(proto::CapacityRange { required_bytes: required, limit_bytes: limit }),
            volume_capabilities: vec![mounted(WRITER)],
            ..Default::default()
        };
        let result = csi.controller.create_volume(request).await;
        refused(result, Code::InvalidArgument, &["capacity_range"]);
    }
    for name in ["", "line\nbreak", "nul\0", &"n".repeat(129)] {
        refused(
            csi.create(&Wanted { name: name.to_owned(), ..small("x", 32) }).await,
            Code::InvalidArgument,
            &["name"],
        );
    }
    refused(
        csi.create(&Wanted::new("claim", i64::MAX as u64, &[])).await,
        Code::ResourceExhausted,
        &["largest"],
    );
    refused(
        csi.create(&small("claim", 10_000)).await,
        Code::ResourceExhausted,
        &["largest", "disk0", "disk1"],
    );

    assert_eq!(volumes(&mut csi).await, [""; 0], "a refused claim left a volume");
    assert_eq!(branches_on(&disks), BTreeSet::new(), "a refused claim left a branch");
}

#[tokio::test(flavor = "multi_thread")]
async fn any_name_that_csi_allows_makes_a_volume_that_stays_in_its_place() {
    let (_scratch, disks, agent) = agent_with_disks(1);
    let mut csi = agent.csi().await;
    for name in ["../../etc/passwd", "a/b", "a:b=c,d", "größe", "UPPER", "..", &"n".repeat(128)] {
        let wanted = Wanted { name: name.to_owned(), ..small("x", 24) };
        let id = csi.create(&wanted).await.unwrap_or_else(|e| panic!("{name:?}: {e}")).volume_id;
        assert_eq!(csi.create(&wanted).await.expect("the same again").volume_id, id);
        csi.stage(&id, WRITER).await.expect("NodeStageVolume");
        let target = csi.publish(&id, WRITER).await.expect("NodePublishVolume");
        fs::write(target.join("file"), name).expect("a file in the volume");
        csi.unpublish(&id).await.expect("NodeUnpublishVolume");
        csi.unstage(&id).await.expect("NodeUnstageVolume");
        csi.delete(&id).await.expect("DeleteVolume");
    }
    assert_eq!(branches_on(&disks), BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_outside_the_allowed_directories_are_refused_and_symlinks_are_not_followed() {
    let (scratch, _disks, agent) = agent_with_disks(1);
    let outside = Scratch::new();
    let mut csi = agent.csi().await;
    let id = csi.create(&small("paths", 24)).await.expect("CreateVolume").volume_id;
    csi.stage(&id, WRITER).await.expect("NodeStageVolume");

    let publish = |csi: &Csi, target: PathBuf| {
        let mut node = csi.node.clone();
        let request = proto::NodePublishVolumeRequest {
            volume_id: id.clone(),
            staging_target_path: csi.staging(&id).display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(mounted(WRITER)),
            ..Default::default()
        };
        async move { node.node_publish_volume(request).await }
    };
    std::os::unix::fs::symlink(outside.path(), scratch.join("link")).expect("a symlink");
    for target in [
        outside.join("target"),
        scratch.join("link/target"),
        scratch.join("link"),
        scratch.join("sub/../../target"),
        PathBuf::from("/etc"),
        PathBuf::from("relative"),
    ] {
        refused(publish(&csi, target.clone()).await, Code::InvalidArgument, &[]);
        assert!(
            fs::read_dir(outside.path()).expect("the outside").next().is_none(),
            "{target:?} made something outside"
        );
    }
    let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
    assert!(!table.contains(&outside.path().display().to_string()), "something was mounted outside");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    csi.delete(&id).await.expect("DeleteVolume");
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_in_the_wrong_order_repeated_or_for_unknown_volumes_are_answered_as_csi_says() {
    let (_scratch, disks, agent) = agent_with_disks(1);
    let mut csi = agent.csi().await;
    for unknown in ["no-such-volume", "../../etc", "UPPER:case"] {
        csi.delete(unknown).await.expect("deleting what does not exist is done");
        refused(csi.stage("no-such-volume", WRITER).await, Code::NotFound, &["no-such-volume"]);
        csi.unpublish("no-such-volume").await.expect("unpublishing what does not exist is done");
        csi.unstage("no-such-volume").await.expect("unstaging what does not exist is done");
    }
    let id = csi.create(&small("order", 24)).await.expect("CreateVolume").volume_id;
    refused(csi.publish(&id, WRITER).await, Code::FailedPrecondition, &["NodeStageVolume"]);
    for _ in 0..3 {
        csi.stage(&id, WRITER).await.expect("NodeStageVolume, repeated");
    }
    let mut target = PathBuf::new();
    for _ in 0..3 {
        target = csi.publish(&id, WRITER).await.expect("NodePublishVolume, repeated");
    }
    fs::write(target.join("file"), "kept").expect("a file");
    refused(csi.unstage(&id).await, Code::FailedPrecondition, &["publish"]);
    refused(csi.create(&small("order", 64)).await, Code::AlreadyExists, &["capacity"]);
    assert_eq!(fs::read_to_string(target.join("file")).expect("the file"), "kept");
    for _ in 0..2 {
        csi.unpublish(&id).await.expect("NodeUnpublishVolume, repeated");
    }
    for _ in 0..2 {
        csi.unstage(&id).await.expect("NodeUnstageVolume, repeated");
    }
    for _ in 0..2 {
        csi.delete(&id).await.expect("DeleteVolume, repeated");
    }
    assert_eq!(branches_on(&disks), BTreeSet::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_calls_for_one_volume_give_one_volume_and_never_a_mess() {
    let (_scratch, disks, agent) = agent_with_disks(2);
    let csi = agent.csi().await;
    let calls: Vec<_> = (0..16)
        .map(|_| {
            let mut csi = csi.clone();
            tokio::spawn(async move { csi.create(&small("same", 300)).await.map(|v| v.volume_id) })
        })
        .collect();
    let mut made = 0;
    for call in calls {
        match call.await.expect("no panic") {
            Ok(id) => {
                assert_eq!(id, "same");
                made += 1;
            }
            Err(error) => assert_eq!(error.code(), Code::Aborted, "{error:?}"),
        }
    }
    assert!(made >= 1, "no call succeeded");
    assert_eq!(branches_on(&disks).len(), 2, "one volume of two branches");
    let mut csi = csi;
    csi.delete("same").await.expect("DeleteVolume");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_whose_identity_was_altered_is_not_used_and_not_touched() {
    let (_scratch, disks, agent) = agent_with_disks(1);
    let mut csi = agent.csi().await;
    let id = csi.create(&small("identity", 24)).await.expect("CreateVolume").volume_id;
    let branch = disks[0].join("pool/branches").join(format!("{id}-0"));
    let file = branch.join("branch.json");
    let original = fs::read_to_string(&file).expect("branch.json");
    for altered in [original.replace("identity", "somebody-else"), "{".to_owned(), String::new()] {
        fs::write(&file, &altered).expect("branch.json");
        let error = csi.stage(&id, WRITER).await.expect_err("a foreign branch was staged");
        assert!(error.message().contains(&format!("{id}-0")), "{error:?}");
        assert_eq!(
            fs::read_to_string(&file).expect("branch.json"),
            altered,
            "the foreign identity was overwritten"
        );
    }
    fs::remove_file(&file).expect("branch.json");
    csi.stage(&id, WRITER).await.expect_err("a branch without identity was staged");
    assert!(!file.exists(), "the identity was made anew");
    fs::write(&file, &original).expect("branch.json");
    csi.stage(&id, WRITER).await.expect("the right identity is accepted again");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    csi.delete(&id).await.expect("DeleteVolume");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_full_read_only_or_gone_is_told_so_and_never_written_to() {
    let (scratch, disks, mut agent) = agent_with_disks(2);
    let mut csi = agent.csi().await;
    let id = csi
        .create(&Wanted::new(
            "both",
            150 * MIB,
            &[("splitQuantum", "16Mi"), ("minBranches", "2"), ("strategy", "balanced")],
        ))
        .await
        .expect("CreateVolume")
        .volume_id;
    csi.stage(&id, WRITER).await.expect("NodeStageVolume");
    let target = csi.publish(&id, WRITER).await.expect("NodePublishVolume");
    fs::write(target.join("file"), "kept").expect("a file");

    // Full: what others wrote counts.
    let filler = disks[0].join("filler");
    let _ = Command::new("fallocate")
        .args(["-l", "100M", &filler.display().to_string()])
        .output()
        .expect("fallocate");
    refused(csi.create(&small("too-much", 200)).await, Code::ResourceExhausted, &["disk0"]);
    fs::remove_file(&filler).expect("the filler");

    // Read-only: no new branch there.
    let point = disks[1].display().to_string();
    csi.unpublish(&id).await.expect("NodeUnpublishVolume");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    run("mount", &["-o", "remount,ro", &point]);
    refused(csi.create(&small("two", 150)).await, Code::ResourceExhausted, &["disk1"]);
    run("mount", &["-o", "remount,rw", &point]);

    // Gone: the empty mount point is not the pool.
    agent.stop();
    run("umount", &[&point]);
    fs::create_dir_all(disks[1].join("pool")).expect("the empty mount point's directory");
    agent.restart();
    let mut csi = agent.csi().await;
    refused(csi.create(&small("three", 150)).await, Code::ResourceExhausted, &["disk1"]);
    csi.stage(&id, WRITER).await.expect_err("a volume without one of its branches was staged");
    assert_eq!(
        fs::read_dir(disks[1].join("pool")).expect("the directory").count(),
        0,
        "the root disk was written to"
    );
    run("mount", &["-o", "loop", &scratch.join("disk1.disk").display().to_string(), &point]);
    let begun = std::time::Instant::now();
    while let Err(error) = csi.stage(&id, WRITER).await {
        assert!(begun.elapsed().as_secs() < 60, "the pool is back and the volume is not: {error}");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    let target = csi.publish(&id, WRITER).await.expect("NodePublishVolume");
    assert_eq!(fs::read_to_string(target.join("file")).expect("the file"), "kept");
    csi.unpublish(&id).await.expect("NodeUnpublishVolume");
    csi.unstage(&id).await.expect("NodeUnstageVolume");
    csi.delete(&id).await.expect("DeleteVolume");
    assert_eq!(branches_on(&disks), BTreeSet::new());
}

/// Runs the agent on this configuration until it ends by itself.
fn agent_must_refuse(scratch: &Scratch, yaml: &str) -> String {
    let file = scratch.join("bad.yaml");
    fs::write(&file, yaml).expect("bad.yaml");
    let out: Output = Command::new("timeout")
        .args(["60", PROGRAM, "agent", "--config", &file.display().to_string()])
        .output()
        .expect("the agent");
    assert!(!out.status.success(), "the agent ran and ended well");
    assert_ne!(out.status.code(), Some(124), "the agent did not refuse to start");
    String::from_utf8_lossy(&out.stderr).into_owned() + &String::from_utf8_lossy(&out.stdout)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_cannot_run_says_why_and_what_to_do() {
    let (scratch, _disks, agent) = agent_with_disks(1);
    let state = scratch.join("state").display().to_string();
    let text = agent_must_refuse(&scratch, &format!("stateDir: {state}\nhttp: {{ listen: \"off\" }}\n"));
    assert!(
        text.contains("another agent") && text.contains(&state),
        "two agents on one state directory: {text}"
    );

    let port = agent.url.rsplit(':').next().expect("a port").to_owned();
    let other = scratch.join("other").display().to_string();
    let text = agent_must_refuse(
        &scratch,
        &format!("stateDir: {other}\nhttp: {{ listen: \"127.0.0.1:{port}\" }}\n"),
    );
    assert!(text.contains(&port) && text.contains("in use"), "a port in use: {text}");

    let long = format!("/tmp/{}", "s".repeat(120));
    let text =
        agent_must_refuse(&scratch, &format!("stateDir: {other}\ncsi: {{ endpoint: \"unix://{long}\" }}\n"));
    assert!(text.contains("107"), "a socket path too long: {text}");

    drop(agent);
    let store = fs::read_dir(scratch.join("state"))
        .expect("the state directory")
        .map(|e| e.expect("an entry").path())
        .find(|p| p.extension().is_some_and(|e| e == "redb"))
        .expect("the store file");
    let whole = fs::read(&store).expect("the store");
    for damaged in [whole[..whole.len() / 3].to_vec(), Vec::new(), vec![0x5a; 8192]] {
        fs::write(&store, &damaged).expect("a damaged store");
        let text = agent_must_refuse(&scratch, &format!("stateDir: {state}\nhttp: {{ listen: \"off\" }}\n"));
        assert!(text.contains(&store.display().to_string()), "the store file is named: {text}");
        assert!(fs::read(&store).expect("the store") == damaged, "the damaged store was changed");
    }
}

/// An agent whose `mergerfs` is this script.
fn agent_with_mergerfs(scratch: &Scratch, script: &str) -> (Agent, Vec<PathBuf>) {
    let program = scratch.join("fake-mergerfs");
    fs::write(&program, script).expect("the script");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("its mode");
    let disks: Vec<_> = (0..2).map(|i| disk(scratch, &format!("disk{i}"), "ext4", 256)).collect();
    let pools: Vec<_> = disks.iter().enumerate().map(|(i, d)| (format!("disk{i}"), d.join("pool"))).collect();
    pools.iter().for_each(|(_, p)| fs::create_dir(p).expect("a pool directory"));
    let extra = format!("mergerfs: {{ path: {}, startTimeout: 3s }}\n", program.display());
    (Agent::start(Path::new(PROGRAM), scratch.path(), &pools, &extra), disks)
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_mergerfs_that_works_single_branches_are_served_and_unions_are_refused_with_the_reason() {
    for (script, word) in [
        ("#!/bin/sh\nexit 1\n", "mergerfs"),
        ("#!/bin/sh\necho 'mergerfs version: 2.20.0'\n", "2.20.0"),
        (
            "#!/bin/sh\ncase \"$1\" in -V|--version) echo 'mergerfs version: 2.33.5';; *) exit 3;; esac\n",
            "mergerfs",
        ),
        (
            "#!/bin/sh\ncase \"$1\" in -V|--version) echo 'mergerfs version: 2.33.5';; *) exec sleep 100;; esac\n",
            "mergerfs",
        ),
    ] {
        let scratch = Scratch::new();
        let (agent, _disks) = agent_with_mergerfs(&scratch, script);
        let mut csi = agent.csi().await;
        let one = csi.create(&small("one", 24)).await.expect("CreateVolume").volume_id;
        csi.stage(&one, WRITER).await.unwrap_or_else(|e| panic!("{script}: one branch needs no union: {e}"));
        let pair = [("splitQuantum", "16Mi"), ("minBranches", "2"), ("strategy", "balanced")];
        let two = csi.create(&Wanted::new("two", 60 * MIB, &pair)).await.expect("CreateVolume").volume_id;
        let error = csi.stage(&two, WRITER).await.expect_err("a union without mergerfs");
        assert!(error.message().contains(word), "{script}: {error:?}");
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let left = table.lines().filter(|l| l.contains("volumes/two")).count();
        assert_eq!(left, 0, "{script}: a failed staging left mounts");
        csi.unstage(&one).await.expect("NodeUnstageVolume");
        csi.unstage(&two).await.expect("NodeUnstageVolume of what was not staged");
        csi.delete(&one).await.expect("DeleteVolume");
        csi.delete(&two).await.expect("DeleteVolume");
    }
}
