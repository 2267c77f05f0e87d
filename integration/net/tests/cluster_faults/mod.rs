//! What a pod sees when something fails beneath its volume, or when it moves in the midst of that.

mod agents;
mod consumers;
mod links;
mod owners;

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::cluster::{BOUND, Cluster, Node, Volume};
use crate::support::faults::Told;
use crate::support::{Result, Running};

/// Records that must be safe before something is broken.
pub(super) const SOME: usize = 20;

/// How long links are cut, and machines off, at least.
const OUTAGE: Duration = Duration::from_secs(12);

const LOG: &str = "log";

pub(super) fn log() -> Vec<String> {
    vec![LOG.to_owned()]
}

/// A bound volume of one branch, on that node.
pub(super) fn on_node(cluster: &Cluster, name: &str, node: &str, parameters: Value) -> Volume {
    let mut all = json!({"nodeSelector": format!("kubernetes.io/hostname={node}"), "maxBranches": "1"});
    if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
        all.extend(more);
    }
    cluster.class(name, "Immediate", all);
    let volume = cluster.bound(&cluster.claim(name, name, "96Mi"));
    let owners: Vec<_> = cluster.branches_of(&volume).iter().map(|b| b.spec.node.to_string()).collect();
    assert_eq!(owners, [node]);
    volume
}

/// Waits until each of the files has that many more safe records than at the time of the call.
pub(super) fn goes_on(writer: &mut Running, files: &[String], more: usize) -> Result<Told> {
    let begun = Told::read(&writer.output_so_far());
    let end = Instant::now() + BOUND;
    loop {
        let told = Told::read(&writer.output_so_far());
        if files.iter().all(|file| told.count(file) >= begun.count(file) + more) {
            return Ok(told);
        }
        assert!(!writer.has_ended(), "the writer ended: {writer:?}");
        assert!(Instant::now() < end, "no more records are safe: {told:?}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Ends the writer and reads what it told. What it was just writing is on its way no more.
pub(super) fn ends(mut writer: Running) -> Result<Told> {
    writer.kill();
    let end = Instant::now() + BOUND;
    while !writer.has_ended() {
        assert!(Instant::now() < end, "the writer cannot be ended: {writer:?}");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(Told::read(&writer.output_so_far()))
}

/// The file's text, as a node sees it.
pub(super) fn text(node: Node<'_>, directory: &str, file: &str) -> Result<String> {
    node.machine.run_within(BOUND, format!("cat '{directory}/{file}'"))
}

/// Ends the volume on its node and in the cluster.
pub(super) fn leave(cluster: &Cluster, volume: &Volume, node: &str, pod: &str) -> Result {
    cluster.node(node).unmount(volume, pod)?;
    cluster.detach(volume, node);
    cluster.delete(volume);
    Ok(())
}

/// Files of the union, one on each of its branches: by the node that the branch is on.
fn one_on_each(
    cluster: &Cluster,
    volume: &Volume,
    node: Node<'_>,
    data: &str,
) -> Result<BTreeMap<String, String>> {
    let branches = cluster.branches_of(volume);
    let found = node.machine.run_within(
        BOUND,
        format!("cd '{data}' && for i in $(seq 40); do touch f$i; echo f$i $(getfattr --only-values -n user.mergerfs.basepath f$i); done"),
    )?;
    let mut files = BTreeMap::new();
    for line in found.lines() {
        let (file, path) = line.split_once(' ').expect("a file and a branch");
        // Where the branch is mounted on the pod's node: its number is the last of the path.
        let number = path.rsplit('/').next().and_then(|n| n.parse::<u32>().ok());
        let branch = branches.iter().find(|b| Some(b.spec.index) == number);
        let branch = branch.unwrap_or_else(|| panic!("no branch is at {path}"));
        files.entry(branch.spec.node.to_string()).or_insert_with(|| file.to_owned());
    }
    assert_eq!(files.len(), branches.len(), "a file on each branch: {found}");
    Ok(files)
}
