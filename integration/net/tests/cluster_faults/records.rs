//! Nothing that was acknowledged is hidden or shadowed, whatever kind of loss: MergerFS takes a branch that gives errors for one
//! without those files, says that they do not exist, and lets them be made anew on another branch. So it must not run over one.
//!
//! Three volumes of three branches each are used at the same time: images with ext4, images with XFS, and directories by NFS. A
//! pod of each looks up known paths of the branch that will be lost, again and again, and tries to make each of them anew.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{LOG, ends, goes_on, log, no_one_is_stuck, text};
use crate::support::cluster::{BOUND, Cluster, Volume, on_cluster};
use crate::support::faults::{Fault, Told, record};
use crate::support::{Result, Running};

/// Known paths made in each volume; a third of them is on each branch, about.
const PATHS: usize = 90;

/// For how long what is lost is looked up after it was.
const AFTER: Duration = Duration::from_secs(12);

/// What a program saw of paths that exist.
#[derive(Clone, Debug, Default)]
struct Looked {
    /// When paths were said not to exist, in milliseconds since it began.
    missing: Vec<u64>,
    /// When paths were made anew.
    made: Vec<u64>,
    /// How often paths were refused with another error than the time before.
    refused: usize,
    /// All that it told.
    lines: String,
}

impl Looked {
    fn read(output: &str) -> Self {
        let mut looked = Self { lines: output.to_owned(), ..Self::default() };
        for line in output.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let at = || words.get(2).and_then(|word| word.parse().ok()).unwrap_or(0);
            match words.first() {
                Some(&"missing") => looked.missing.push(at()),
                Some(&"made") => looked.made.push(at()),
                Some(&"refused") => looked.refused += 1,
                _ => {}
            }
        }
        looked
    }

    /// From the first wrong answer to the last, in milliseconds; `None` where there was none.
    fn moment(&self) -> Option<u64> {
        let all = || self.missing.iter().chain(&self.made);
        Some(all().max()? - all().min()?)
    }
}

/// A volume of three branches, and a pod of it on `a`.
struct Union<'c> {
    cluster: &'c Cluster,
    name: &'static str,
    volume: Volume,
    data: String,
    /// Known paths on the branch of the node that will fail.
    paths: Vec<String>,
    writer: Running,
    looker: Running,
}

impl<'c> Union<'c> {
    /// Known paths, and pods that use those on the branch of node `lost`.
    fn begin(
        cluster: &'c Cluster,
        name: &'static str,
        size: &str,
        lost: &str,
        parameters: Value,
    ) -> Result<Self> {
        let mut all = json!({"strategy": "spread", "minBranches": "3", "branchTimeout": "15s"});
        if let (Value::Object(all), Value::Object(more)) = (&mut all, parameters) {
            all.extend(more);
        }
        cluster.class(name, "Immediate", all);
        let volume = cluster.bound(&cluster.claim(name, name, size));
        cluster.attach(&volume, "a");
        let a = cluster.node("a");
        let data = a.mount(&volume, name)?;
        let made = a.machine.run_within(
            BOUND,
            format!(
                "cd '{data}' && for i in $(seq {PATHS}); do
                     if [ $((i % 3)) = 0 ]; then p=d$i; mkdir $p; else p=f$i; echo known >$p; fi
                     echo $p $(getfattr --only-values -n user.mergerfs.basepath $p)
                 done; sync *"
            ),
        )?;
        let branches = cluster.branches_of(&volume);
        let branch = branches.iter().find(|b| b.spec.node.as_str() == lost).expect("a branch there");
        let on_it = |path: &str| path.rsplit('/').next() == Some(&branch.spec.index.to_string());
        let paths: Vec<String> = made
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(_, path)| on_it(path))
            .map(|(name, _)| name.to_owned())
            .collect();
        assert!(paths.len() > 5, "some paths are on the branch of {lost}: {made}");
        let file = paths.iter().find(|path| path.starts_with('f')).expect("a file").clone();
        // The log is one of the files on that branch.
        a.machine.run(format!("cd '{data}' && mv {file} {LOG} && : >{LOG}"))?;
        let paths: Vec<String> =
            paths.into_iter().map(|path| if path == file { LOG.to_owned() } else { path }).collect();
        let mut writer = a.write(&volume, name, "x", &log())?;
        goes_on(&mut writer, &log(), 10)?;
        let looker = a.look(&volume, name, &paths)?;
        Ok(Self { cluster, name, volume, data, paths, writer, looker })
    }

    /// One of each kind of image.
    fn images(cluster: &'c Cluster, lost: &str) -> Result<Vec<Self>> {
        Ok(vec![
            Self::begin(cluster, "known-ext4", "48Mi", lost, json!({}))?,
            Self::begin(cluster, "known-xfs", "912Mi", lost, json!({"fsType": "xfs"}))?,
        ])
    }

    /// One of each kind.
    fn all(cluster: &'c Cluster, lost: &str) -> Result<Vec<Self>> {
        let mut all = Self::images(cluster, lost)?;
        let directory = json!({"branchFormat": "directory", "enforcement": "none"});
        all.push(Self::begin(cluster, "known-nfs", "48Mi", lost, directory)?);
        Ok(all)
    }

    fn looked(&mut self) -> Looked {
        Looked::read(&self.looker.output_so_far())
    }

    /// Waits until the paths are refused, instead of found or waited for.
    fn is_lost(&mut self) {
        let (cluster, what) = (self.cluster, format!("what is lost of {} is refused", self.name));
        cluster.within(BOUND, &what, || (self.looked().refused > 0).then_some(()));
    }

    /// Ends the programs; what they saw.
    fn end(mut self) -> Result<Ended<'c>> {
        let looked = self.looked();
        self.looker.kill();
        let told = ends(self.writer)?;
        let Self { cluster, name, volume, data, paths, .. } = self;
        Ok(Ended { cluster, name, volume, data, paths, told, looked })
    }
}

/// A [`Union`] whose programs have ended.
struct Ended<'c> {
    cluster: &'c Cluster,
    name: &'static str,
    volume: Volume,
    data: String,
    paths: Vec<String>,
    told: Told,
    looked: Looked,
}

impl Ended<'_> {
    /// Every record and every known path is there, as it was.
    fn is_whole(&self, node: &str) -> Result {
        let node = self.cluster.node(node);
        self.told.require_in(LOG, "x", &text(node, &self.data, LOG)?);
        let files: Vec<&str> = self.paths.iter().filter(|p| p.starts_with('f')).map(String::as_str).collect();
        let directories: Vec<&str> =
            self.paths.iter().filter(|p| p.starts_with('d')).map(String::as_str).collect();
        node.machine.run_within(
            BOUND,
            format!(
                "cd '{}' && for f in {}; do [ \"$(cat $f)\" = known ] || {{ echo $f differs >&2; exit 1; }}; done
                 for d in {}; do [ -d $d ] || {{ echo $d is gone >&2; exit 1; }}; done",
                self.data,
                files.join(" "),
                directories.join(" ")
            ),
        )?;
        Ok(())
    }

    /// Nothing was ever said to be missing, nor made anew.
    fn hid_nothing(&self) {
        let Looked { missing, made, .. } = &self.looked;
        assert!(
            missing.is_empty() && made.is_empty(),
            "{}: {} answers that a known path does not exist, {} paths made anew, within {:?} ms:\n{}",
            self.name,
            missing.len(),
            made.len(),
            self.looked.moment(),
            self.looked.lines
        );
    }

    fn leave(self, node: &str) -> Result {
        super::leave(self.cluster, &self.volume, node, &self.volume.claim)
    }
}

/// What the table says of those.
fn words(ended: &[Ended<'_>]) -> String {
    let of = |ended: &Ended<'_>| match ended.looked.moment() {
        None => format!("{}: never", ended.name.trim_start_matches("known-")),
        Some(moment) => format!(
            "{}: for {} ms ({} answers, {} made anew)",
            ended.name.trim_start_matches("known-"),
            moment.max(1),
            ended.looked.missing.len(),
            ended.looked.made.len()
        ),
    };
    format!(
        "known paths are refused; said not to exist, or made anew: {}",
        ended.iter().map(of).collect::<Vec<_>>().join(", ")
    )
}

fn write_down(name: &str, fault: &str, after: &str, ended: &[Ended<'_>]) {
    record(
        name,
        &Fault {
            fault: fault.to_owned(),
            seen: words(ended),
            longest_pause_seconds: None,
            errors: ended.iter().map(|ended| ended.told.errors.len()).sum(),
            after: after.to_owned(),
        },
    );
}

/// Lets the paths be looked up for a while, and ends the programs.
fn end_all(unions: Vec<Union<'_>>) -> Result<Vec<Ended<'_>>> {
    thread::sleep(AFTER);
    unions.into_iter().map(Union::end).collect()
}

/// Waits until the volumes are whole under the same pods, and ends them.
fn all_heal(ended: Vec<Ended<'_>>) -> Result {
    for each in &ended {
        let a = each.cluster.node("a");
        each.cluster.within(BOUND, &format!("{} is whole again", each.name), || {
            let stats = a.stats(&each.volume, &each.volume.claim).ok()?;
            (stats["abnormal"] == json!(false)).then_some(())
        });
        each.is_whole("a")?;
    }
    ended.into_iter().try_for_each(|each| each.leave("a"))
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_link_that_is_cut_beyond_branch_timeout_never_makes_known_files_missing() {
    on_cluster(|cluster| {
        let mut unions = Union::all(cluster, "b")?;
        cluster.net.cut("a", "b");
        unions.iter_mut().for_each(Union::is_lost);
        no_one_is_stuck(cluster, "a");
        let ended = end_all(unions)?;
        cluster.net.heal("a", "b");
        ended.iter().for_each(Ended::hid_nothing);
        write_down(
            "records-cut",
            "union of three: the link to one is cut for longer than `branchTimeout`",
            "heals under the running pod",
            &ended,
        );
        all_heal(ended)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_owner_away_beyond_branch_timeout_never_makes_known_files_missing() {
    on_cluster(|cluster| {
        let mut unions = Union::all(cluster, "b")?;
        cluster.node("b").machine.pull_plug();
        unions.iter_mut().for_each(Union::is_lost);
        cluster.node("b").boot()?;
        let ended = end_all(unions)?;
        ended.iter().for_each(Ended::hid_nothing);
        write_down(
            "records-away",
            "union of three: one's node is away for longer than `branchTimeout`, and returns",
            "heals under the running pod",
            &ended,
        );
        all_heal(ended)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_pod_whose_branches_are_given_to_another_node_finds_none_of_its_files_missing() {
    on_cluster(|cluster| {
        let mut unions = Union::all(cluster, "b")?;
        let a = cluster.node("a");
        // The worst case: it does not hear of it, and goes on using what the owners take away.
        a.reach_api(false)?;
        for union in &unions {
            cluster.detach(&union.volume, "a");
        }
        // An owner does not answer by NFS: the pod's node ends that when `branchTimeout` is over, also without the API server.
        if let Some(nfs) = unions.last_mut() {
            nfs.is_lost();
        }
        thread::sleep(AFTER);
        a.reach_api(true)?;
        unions.iter_mut().for_each(Union::is_lost);
        let mut ended = end_all(unions)?;
        ended.iter().for_each(Ended::hid_nothing);
        write_down(
            "records-fenced",
            "union of three: its volume is given to another node, and the pod's node does not hear of it",
            "a pod on the other node has every safe record",
            &ended,
        );
        for each in &mut ended {
            a.unmount(&each.volume, &each.volume.claim)?;
            cluster.attach(&each.volume, "c");
            each.data = cluster.node("c").mount(&each.volume, &each.volume.claim)?;
            each.is_whole("c")?;
        }
        ended.into_iter().try_for_each(|each| each.leave("c"))
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn an_export_that_is_gone_makes_no_known_file_missing() {
    on_cluster(|cluster| {
        let mut unions = Union::all(cluster, "b")?;
        let b = cluster.node("b");
        // Its agent would put them back.
        b.kill_agent()?;
        // The kernel's NFS server asks who served it last for so long before it takes what it was not told of for refused.
        thread::sleep(Duration::from_secs(31));
        b.machine.run(
            "for each in /sys/kernel/config/nvmet/ports/*/subsystems/*; do rm $each; done
             for each in nfsd.fh nfsd.export; do date +%s >/proc/net/rpc/$each/flush; done",
        )?;
        unions.iter_mut().for_each(Union::is_lost);
        let ended = end_all(unions)?;
        b.start_agent()?;
        b.ready()?;
        ended.iter().for_each(Ended::hid_nothing);
        write_down(
            "records-export",
            "union of three: one's export is taken away on its node by hand, while no agent runs there",
            "heals under the running pod when the agent is back",
            &ended,
        );
        all_heal(ended)
    });
}

#[test]
#[ignore = "boots machines: integration/net/run"]
fn a_filesystem_that_shuts_down_makes_no_known_file_missing() {
    on_cluster(|cluster| {
        let mut unions = Union::images(cluster, "b")?;
        let a = cluster.node("a");
        for union in &mut unions {
            let branches = cluster.branches_of(&union.volume);
            let branch = branches.iter().find(|b| b.spec.node.as_str() == "b").expect("a branch on b");
            a.machine.run(format!(
                "at=$(grep '/{}/branches/{} ' /proc/self/mountinfo | grep ' - {} ' | cut -d ' ' -f 3 | head -n 1)
                 inside known shutdown $at",
                union.volume.handle,
                branch.spec.index,
                if union.name.contains("xfs") { "xfs" } else { "ext4" },
            ))?;
            union.is_lost();
        }
        let ended = end_all(unions)?;
        ended.iter().for_each(Ended::hid_nothing);
        write_down(
            "records-shutdown",
            "union of three: one's filesystem shuts down after an error, on the pod's node",
            "heals under the running pod",
            &ended,
        );
        all_heal(ended)
    });
}
