//! What a pod sees when something fails beneath its volume, or when it moves in the midst of that.

mod agents;
mod bad_input;
mod consumers;
mod disks;
mod links;
mod owners;
mod records;
mod returns;

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
pub(super) const OUTAGE: Duration = Duration::from_secs(12);

pub(super) const LOG: &str = "log";

pub(super) fn log() -> Vec<String> {
    vec![LOG.to_owned()]
}

/// A bound volume of one branch, on that node.
pub(super) fn on_node(cluster: &Cluster, name: &str, node: &str, parameters: Value) -> Volume {
    sized_on_node(cluster, name, "96Mi", node, parameters)
}

/// The same of that size.
fn sized_on_node(cluster: &Cluster, name: &str, size: &str, node: &str, parameters: Value) -> Volume {
    let mut all = json!({"nodeSelector": format!("kubernetes.io/hostname={node}"), "maxBranches": "1"});
    if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
        all.extend(more);
    }
    cluster.class(name, "Immediate", all);
    let volume = cluster.bound(&cluster.claim(name, name, size));
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

/// A pod on one node that writes to a volume whose only branch is on another.
struct Pod<'c> {
    cluster: &'c Cluster,
    volume: Volume,
    /// Its node.
    on: &'c str,
    /// Where the volume is, on the host.
    data: String,
    writer: Running,
}

/// What makes a class's branches directories, on pools that have no quotas.
fn directory() -> Value {
    json!({"branchFormat": "directory", "enforcement": "none"})
}

impl<'c> Pod<'c> {
    /// With some records safe, on node `a`; the branch is on `b`.
    fn begin(cluster: &'c Cluster, name: &str, size: &str, parameters: Value) -> Result<Self> {
        let (volume, on) = (sized_on_node(cluster, name, size, "b", parameters), "a");
        cluster.attach(&volume, on);
        let node = cluster.node(on);
        let data = node.mount(&volume, name)?;
        let mut writer = node.write(&volume, name, "x", &log())?;
        goes_on(&mut writer, &log(), SOME)?;
        Ok(Self { cluster, volume, on, data, writer })
    }

    /// One with an image and one with a directory.
    fn both(cluster: &'c Cluster, name: &str, parameters: &Value) -> Result<[Self; 2]> {
        let mut directory = directory();
        if let (Value::Object(all), Value::Object(more)) = (&mut directory, parameters.clone()) {
            all.extend(more);
        }
        Ok([
            Self::begin(cluster, &format!("{name}-image"), "48Mi", parameters.clone())?,
            Self::begin(cluster, &format!("{name}-directory"), "48Mi", directory)?,
        ])
    }

    fn claim(&self) -> &str {
        &self.volume.claim
    }

    fn told(&mut self) -> Told {
        Told::read(&self.writer.output_so_far())
    }

    /// Waits until more records are safe.
    fn goes_on(&mut self) -> Result<Told> {
        goes_on(&mut self.writer, &log(), SOME / 2)
    }

    /// Waits until a call fails.
    fn fails(&mut self) {
        let (cluster, what) = (self.cluster, format!("the writer of {} is given an error", self.claim()));
        let (begun, mut looked) = (Instant::now(), false);
        cluster.within(BOUND, &what, || {
            // For whoever reads why not.
            if begun.elapsed() > BOUND / 2 && !std::mem::replace(&mut looked, true) {
                eprintln!("the writers wait in: {:?}", cluster.node(self.on).machine.run(WHERE));
            }
            (!self.told().errors.is_empty()).then_some(())
        });
    }

    /// Whether the volume is reported as not well, and the words.
    fn condition(&self) -> Result<(bool, String)> {
        let stats = self.cluster.node(self.on).stats(&self.volume, self.claim())?;
        Ok((stats["abnormal"] == json!(true), stats["message"].as_str().unwrap_or_default().to_owned()))
    }

    /// Waits until the volume is reported as not well; the words.
    fn unwell(&self) -> String {
        self.cluster.within(BOUND, &format!("{} is reported as not well", self.claim()), || {
            self.condition().ok().filter(|(abnormal, _)| *abnormal).map(|(_, message)| message)
        })
    }

    /// Waits until it is reported as well.
    fn well(&self) {
        self.cluster.within(BOUND, &format!("{} is reported as well", self.claim()), || {
            self.condition().ok().filter(|(abnormal, _)| !*abnormal).map(drop)
        });
    }

    /// Ends the writer, looks for every safe record, and ends the volume.
    fn leave(self) -> Result<Told> {
        let Self { cluster, volume, on, data, writer } = self;
        let told = ends(writer)?;
        told.require_in(LOG, "x", &text(cluster.node(on), &data, LOG)?);
        leave(cluster, &volume, on, &volume.claim)?;
        Ok(told)
    }
}

/// The longest pause of several writers, in seconds.
fn longest(told: &[Told]) -> Option<f64> {
    told.iter().filter_map(Told::longest_pause_seconds).reduce(f64::max)
}

/// How many calls failed, of several writers.
fn errors(told: &[Told]) -> usize {
    told.iter().map(|told| told.errors.len()).sum()
}

/// The numbers of the errors that a writer was given, each once.
fn errnos(told: &Told) -> Vec<i32> {
    let mut errnos: Vec<i32> = told.errors.iter().map(|(_, _, errno)| *errno).collect();
    errnos.sort_unstable();
    errnos.dedup();
    errnos
}

/// Where in the kernel the pods' writers are.
const WHERE: &str = r#"for each in /proc/[0-9]*; do
        words=$(tr '\0' ' ' <$each/cmdline 2>/dev/null) || continue
        case $words in 'inside workload'*) for task in $each/task/*; do echo "$words: $(tr '\n' ';' <$task/stack)"; done ;; esac
    done"#;

/// No process of the node waits for what not even a kill ends.
fn no_one_is_stuck(cluster: &Cluster, node: &str) {
    let look = "for each in /proc/[0-9]*; do
            [ \"$(sed -n 's/^State:\\t\\(.\\).*/\\1/p' $each/status 2>/dev/null)\" = D ] || continue
            [ -s $each/cmdline ] && echo \"$(tr '\\0' ' ' <$each/cmdline): $(cat $each/wchan)\"
        done; true";
    let mut before = None;
    cluster.within(BOUND, "no process waits without an end", || {
        let stuck = cluster.node(node).machine.run(look).ok()?;
        if before.as_ref() != Some(&stuck) {
            eprintln!("waiting on {node}: {stuck:?}");
        }
        before = Some(stuck.clone());
        stuck.is_empty().then_some(())
    });
}
