//! Carries out a sequence and looks at what came of it.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::Result;
use super::super::cluster::{Cluster, Node, Volume, signal_agent};
use super::judge::{Pod, faults};
use super::left::{Consoles, disks, left};
use super::pods::{Goal, Keeper};
use super::sequence::{NodeIndex, Sequence, Step, VolumeIndex};
use super::{NODES, PODS, SHARED, VOLUMES};

/// What volumes may take to come where they shall be and back, once everything is healed. It takes a fifth of a minute, and
/// many times as long where others use the processors too.
const HEALED_BOUND: Duration = Duration::from_secs(600);
/// Before the first step, for each volume to be written to.
const BEGIN_BOUND: Duration = Duration::from_secs(600);
/// A machine that is told to go off and does not within this loses its power.
const OFF_BOUND: Duration = Duration::from_secs(15);
const TICK: Duration = Duration::from_millis(50);
const ORDER: Ordering = Ordering::SeqCst;

/// What is done to a disk on purpose, so that the checks are seen to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// Nothing.
    None,
    /// The last record of a file is cut off.
    Lose,
    /// A file is on two branches.
    Shadow,
    /// A block of an image's filesystem is overwritten.
    Damage,
}

impl Sabotage {
    /// As the environment's `SABOTAGE` says.
    ///
    /// # Panics
    /// When it is none of `lose`, `shadow`, `damage`.
    pub fn of_environment() -> Self {
        match env::var("SABOTAGE").as_deref() {
            Err(_) => Self::None,
            Ok("lose") => Self::Lose,
            Ok("shadow") => Self::Shadow,
            Ok("damage") => Self::Damage,
            Ok(other) => panic!("SABOTAGE={other} is not lose, shadow or damage"),
        }
    }

    /// For each node, before its disk is looked at.
    pub(super) fn script(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Lose => {
                Some("for f in /pool/branches/*/data/*; do [ ! -f \"$f\" ] || truncate -s -32 \"$f\"; done")
            }
            Self::Shadow => Some("for d in /pool/branches/*/data; do touch \"$d/shadow\"; done"),
            Self::Damage => Some(
                "for i in /pool/branches/*/disk.img; do [ ! -f \"$i\" ] || dd if=/dev/urandom of=\"$i\" bs=4096 seek=8 count=24 conv=notrunc; done",
            ),
        }
    }
}

/// What a sequence's threads share.
#[derive(Debug)]
pub struct World<'a> {
    /// The machines.
    pub cluster: &'a Cluster,
    /// Of each volume that steps move, and then of each pod of the one that is shared.
    goals: Mutex<Vec<Goal>>,
    /// How often each machine went off.
    boots: [AtomicUsize; NODES.len()],
    /// Off, or on the way there or back.
    down: [AtomicBool; NODES.len()],
    /// A thread is switching it on, or off and on.
    booting: [AtomicBool; NODES.len()],
    paused: [AtomicBool; NODES.len()],
    api_cut: [AtomicBool; NODES.len()],
    agent_dead: [AtomicBool; NODES.len()],
    healed: AtomicBool,
    given_up: AtomicBool,
    /// Pods that have written.
    written: AtomicUsize,
    notes: Mutex<Vec<String>>,
}

impl<'a> World<'a> {
    fn new(cluster: &'a Cluster, sequence: &Sequence) -> Self {
        let goals = sequence.begin.into_iter().chain(sequence.sharers());
        let goals = goals.map(|node| Goal { node: Some(node), by_force: false }).collect();
        Self {
            cluster,
            goals: Mutex::new(goals),
            boots: Default::default(),
            down: Default::default(),
            booting: Default::default(),
            paused: Default::default(),
            api_cut: Default::default(),
            agent_dead: Default::default(),
            healed: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            written: AtomicUsize::new(0),
            notes: Mutex::default(),
        }
    }

    /// Where a volume, or a pod of the one that is shared, shall be.
    pub fn goal(&self, index: usize) -> Goal {
        self.goals.lock().unwrap_or_else(PoisonError::into_inner)[index]
    }

    fn want(&self, volume: VolumeIndex, node: Option<NodeIndex>, by_force: bool) {
        self.goals.lock().unwrap_or_else(PoisonError::into_inner)[volume] = Goal { node, by_force };
    }

    /// The number of the machine's boot.
    pub fn boot(&self, node: NodeIndex) -> usize {
        self.boots[node].load(ORDER)
    }

    /// It is off, or on its way.
    pub fn down(&self, node: NodeIndex) -> bool {
        self.down[node].load(ORDER)
    }

    /// Its kubelet is heard of.
    pub fn answers(&self, node: NodeIndex) -> bool {
        !self.down(node) && !self.paused[node].load(ORDER) && !self.api_cut[node].load(ORDER)
    }

    /// There are no faults any more.
    pub fn healed(&self) -> bool {
        self.healed.load(ORDER)
    }

    /// A pod has written for the first time.
    pub fn is_written(&self) {
        self.written.fetch_add(1, ORDER);
    }

    fn everything_runs(&self) -> bool {
        self.written.load(ORDER) == PODS
    }

    /// Something that must not be.
    pub fn note(&self, text: String) {
        eprintln!("    {text}");
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    }

    fn node(&self, node: NodeIndex) -> Node<'a> {
        self.cluster.node(NODES[node])
    }

    /// Does one step; one that makes no sense any more, as after others were left out, is passed over.
    fn carry_out<'scope>(&'scope self, step: Step, scope: &'scope Scope<'scope, '_>) -> Result
    where
        'a: 'scope,
    {
        let net = &self.cluster.net;
        let usable = |a: NodeIndex| !self.down(a) && !self.paused[a].load(ORDER);
        match step {
            Step::KillAgent(a) if usable(a) && !self.agent_dead[a].swap(true, ORDER) => {
                self.node(a).machine.run(signal_agent("KILL", 5))?;
            }
            Step::StartAgent(a) if usable(a) && self.agent_dead[a].swap(false, ORDER) => {
                self.node(a).start_agent()?;
            }
            Step::ReplaceAgent(a) if usable(a) && !self.agent_dead[a].load(ORDER) => {
                self.node(a).tell_agent_to_stop()?;
                self.node(a).start_agent()?;
            }
            Step::Cut(a, b) => net.cut(NODES[a], NODES[b]),
            Step::CutOneWay(a, b) => net.cut_one_way(NODES[a], NODES[b]),
            Step::Heal(a, b) => net.heal(NODES[a], NODES[b]),
            Step::Isolate(a) => net.isolate(NODES[a]),
            Step::CutApi(a) if usable(a) => {
                self.api_cut[a].store(true, ORDER);
                self.node(a).reach_api(false)?;
            }
            Step::HealApi(a) if usable(a) => {
                self.node(a).reach_api(true)?;
                self.api_cut[a].store(false, ORDER);
            }
            Step::PauseApi => self.cluster.pause_api(true),
            Step::ResumeApi => self.cluster.pause_api(false),
            Step::Pause(a) if !self.down(a) => {
                self.paused[a].store(true, ORDER);
                self.node(a).machine.pause();
            }
            Step::Resume(a) => {
                self.node(a).machine.resume();
                self.paused[a].store(false, ORDER);
            }
            Step::Pull(a) if usable(a) => {
                self.down[a].store(true, ORDER);
                self.node(a).machine.pull_plug();
                self.boots[a].fetch_add(1, ORDER);
            }
            Step::Boot(a) if self.down(a) && !self.booting[a].swap(true, ORDER) => {
                scope.spawn(move || self.start(a));
            }
            Step::Reboot(a) if usable(a) => {
                self.down[a].store(true, ORDER);
                self.booting[a].store(true, ORDER);
                scope.spawn(move || {
                    self.go_off(a);
                    self.start(a);
                });
            }
            Step::Move(volume, a) => self.want(volume, Some(a), false),
            Step::Take(volume, a) => self.want(volume, Some(a), true),
            Step::Detach(volume) => self.want(volume, None, false),
            _ => eprintln!("    passed over"),
        }
        Ok(())
    }

    /// As a service manager does it: programs end, disks are written, the power goes.
    fn go_off(&self, a: NodeIndex) {
        let machine = self.node(a).machine;
        let script = format!(
            "for each in /proc/[0-9]*; do
                 case $(tr '\\0' ' ' <$each/cmdline 2>/dev/null) in
                 'inside workload '*) kill ${{each#/proc/}} || true ;;
                 esac
             done
             printf '#!/bin/sh\necho stopping\n' >/usr/bin/systemctl; chmod +x /usr/bin/systemctl
             {{ {}; }} || true
             timeout 5 sync /pool /state || true
             poweroff -f -n",
            signal_agent("TERM", 20)
        );
        let asked = machine.start_command(script, OFF_BOUND);
        let end = Instant::now() + OFF_BOUND;
        while asked.is_ok() && machine.is_on() && Instant::now() < end {
            thread::sleep(TICK);
        }
        machine.pull_plug();
        self.boots[a].fetch_add(1, ORDER);
    }

    /// The machine's power is back.
    fn start(&self, a: NodeIndex) {
        let node = self.node(a);
        let started = node.machine.start().and_then(|()| node.start_agent());
        if let Err(error) = started {
            self.note(format!("{} does not boot: {error}", NODES[a]));
        }
        self.agent_dead[a].store(false, ORDER);
        self.api_cut[a].store(false, ORDER);
        self.down[a].store(false, ORDER);
        self.booting[a].store(false, ORDER);
    }

    /// Everything is as at the beginning, but for where the volumes are.
    fn heal(&self) -> Result {
        for node in self.cluster.nodes() {
            node.machine.resume();
        }
        self.cluster.net.heal_all();
        self.cluster.pause_api(false);
        thread::scope(|scope| {
            for (a, paused) in self.paused.iter().enumerate() {
                paused.store(false, ORDER);
                scope.spawn(move || {
                    if let Err(error) = self.bring_back(a) {
                        self.note(format!("{} does not come back: {error}", NODES[a]));
                    }
                });
            }
        });
        self.healed.store(true, ORDER);
        Ok(())
    }

    fn bring_back(&self, a: NodeIndex) -> Result {
        let end = Instant::now() + HEALED_BOUND;
        // One that boots already is waited for.
        while self.booting[a].load(ORDER) && Instant::now() < end {
            thread::sleep(TICK);
        }
        if self.down(a) {
            self.start(a);
        }
        if self.agent_dead[a].swap(false, ORDER) {
            self.node(a).start_agent()?;
        }
        if self.api_cut[a].swap(false, ORDER) {
            self.node(a).reach_api(true)?;
        }
        self.node(a).ready()
    }

    /// Keeps one volume until all is over, or given up.
    fn keep(&self, mut keeper: Keeper<'_>) -> Vec<Pod> {
        let mut healed_since = None;
        while !keeper.tick() {
            if self.given_up.load(ORDER) {
                self.note(keeper.describe());
                break;
            }
            if self.healed() {
                let since = *healed_since.get_or_insert_with(Instant::now);
                if since.elapsed() > HEALED_BOUND {
                    self.note(format!(
                        "not over {HEALED_BOUND:?} after all was healed: {}",
                        keeper.describe()
                    ));
                    break;
                }
            }
            thread::sleep(TICK);
        }
        keeper.into_pods()
    }
}

/// Volumes on a cluster that sequences are tried on, one after the other.
#[derive(Debug)]
pub struct Trial<'a> {
    cluster: &'a Cluster,
    volumes: Vec<Volume>,
    branches: BTreeSet<String>,
    consoles: Consoles,
}

impl<'a> Trial<'a> {
    /// Makes the volumes.
    pub fn begin(cluster: &'a Cluster) -> Self {
        let classes: [(&str, Value); VOLUMES.len()] = [
            ("96Mi", json!({"nodeSelector": "kubernetes.io/hostname=b", "maxBranches": "1"})),
            ("192Mi", json!({"strategy": "spread", "minBranches": "3"})),
            (
                "96Mi",
                json!({"strategy": "spread", "minBranches": "3", "branchFormat": "directory", "enforcement": "none"}),
            ),
        ];
        let mut claims: Vec<_> = VOLUMES
            .iter()
            .zip(classes)
            .map(|(name, (size, parameters))| {
                cluster.class(name, "Immediate", parameters);
                cluster.claim(name, name, size)
            })
            .collect();
        let on_b = json!({"nodeSelector": "kubernetes.io/hostname=b", "enforcement": "none"});
        cluster.class(SHARED, "Immediate", on_b);
        claims.push(cluster.claim_with(SHARED, SHARED, "32Mi", "ReadWriteMany"));
        let volumes = claims.iter().map(|claim| cluster.bound(claim)).collect();
        let branches = cluster.branches().into_iter().map(|branch| branch.meta.name).collect();
        Self { cluster, volumes, branches, consoles: Consoles::default() }
    }

    /// The volume that a goal is for.
    fn volume(&self, index: usize) -> &Volume {
        &self.volumes[index.min(VOLUMES.len())]
    }

    /// Deletes them.
    pub fn end(self) {
        for volume in &self.volumes {
            self.cluster.delete(volume);
        }
    }

    /// Does the sequence's steps, heals everything, ends all pods, and tells what is wrong afterwards.
    pub fn run(&mut self, sequence: &Sequence, sabotage: Sabotage) -> Vec<String> {
        let begun = Instant::now();
        eprintln!("{sequence}");
        let world = World::new(self.cluster, sequence);
        let mut all: Vec<Vec<Pod>> = thread::scope(|scope| {
            let keepers: Vec<_> = (0..PODS)
                .map(|index| {
                    let keeper = Keeper::new(&world, self.volume(index), index, sequence);
                    let world = &world;
                    scope.spawn(move || world.keep(keeper))
                })
                .collect();
            let done = catch_unwind(AssertUnwindSafe(|| steps(&world, sequence, begun)));
            match done {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    world.note(format!("a step cannot be done: {error:?}"));
                    world.given_up.store(true, ORDER);
                }
                Err(_) => {
                    world.note("a step panicked".to_owned());
                    world.given_up.store(true, ORDER);
                }
            }
            keepers
                .into_iter()
                .map(|keeper| {
                    keeper.join().unwrap_or_else(|_| {
                        world.note("a keeper panicked".to_owned());
                        Vec::new()
                    })
                })
                .collect()
        });
        // Those who share a volume write files of their own: the order among them has no meaning.
        let sharing = all.split_off(VOLUMES.len()).into_iter().flatten().collect();
        all.push(sharing);
        for node in (0..NODES.len()).filter(|node| world.boot(*node) > 0) {
            if let Err(error) = world.node(node).remove_empty_directories() {
                world.note(format!("{}: {error}", NODES[node]));
            }
        }
        let mut wrong = world.notes.into_inner().unwrap_or_else(PoisonError::into_inner);
        let over = begun.elapsed();
        wrong.extend(self.consoles.complaints(self.cluster));
        // What is on disks can only be said when nothing writes to them.
        if wrong.is_empty() {
            wrong.extend(left(self.cluster, &self.branches));
        }
        let mut safe = 0;
        if wrong.is_empty() {
            let disks = disks(self.cluster, &self.branches, sabotage);
            wrong.extend(disks.faults);
            for (volume, pods) in self.volumes.iter().zip(&all) {
                let of = |f: &&super::judge::Found| {
                    f.branch.starts_with(&volume.handle) && !sequence.is_of_another(&f.file)
                };
                let found: Vec<_> = disks.found.iter().filter(of).cloned().collect();
                wrong.extend(
                    faults(pods, &found).into_iter().map(|fault| format!("{}: {fault}", volume.claim)),
                );
                safe += pods.iter().flat_map(|pod| pod.told.safe.values()).map(Vec::len).sum::<usize>();
            }
        }
        let pods: usize = all.iter().map(Vec::len).sum();
        eprintln!(
            "    SEED={} {} after {:.0?} and {:.0?} of looking: {pods} pods, {safe} safe records",
            sequence.seed,
            if wrong.is_empty() { "is well" } else { "FAILED" },
            over,
            begun.elapsed().saturating_sub(over),
        );
        if !wrong.is_empty() {
            self.keep_logs(sequence, &wrong);
        }
        wrong
    }

    /// Keeps what tells why a sequence failed: logs of agents, kernels' last words, what pods told.
    fn keep_logs(&self, sequence: &Sequence, wrong: &[String]) {
        let logs = env::var_os("UNION_CSI_NET_LOGS").map_or_else(env::temp_dir, PathBuf::from);
        let directory = logs.join(format!("random-{}", sequence.seed));
        let _ = fs::create_dir_all(&directory);
        let _ = fs::write(directory.join("what"), format!("{sequence}\n{}\n", wrong.join("\n")));
        let _ = fs::write(directory.join("objects.yaml"), self.cluster.objects());
        for node in self.cluster.nodes() {
            let name = node.name();
            if let Ok(text) = node.machine.attempt(Duration::from_secs(30), "cat /state/agent.log") {
                let _ = fs::write(directory.join(format!("{name}.agent.log")), text.stdout);
            }
            let look = "cat /proc/mounts; losetup -a; ls /sys/kernel/config/nvmet/subsystems /sys/class/nvme; \
                for p in /proc/[0-9]*; do echo \"${p#/proc/} $(tr '\\0' ' ' <$p/cmdline) $(tr '\\n' ';' <$p/stack)\"; done; dmesg | tail -n 200";
            if let Ok(text) = node.machine.attempt(Duration::from_secs(30), format!("set +e; {look}")) {
                let _ = fs::write(directory.join(format!("{name}.state")), text.stdout);
            }
            let _ = fs::copy(node.machine.console(), directory.join(format!("{name}.console")));
        }
        eprintln!("    kept in {}", directory.display());
    }
}

fn steps(world: &World<'_>, sequence: &Sequence, begun: Instant) -> Result {
    let end = Instant::now() + BEGIN_BOUND;
    while !world.everything_runs() {
        if Instant::now() > end {
            world.note("the volumes are not all written to before the first step".to_owned());
            world.given_up.store(true, ORDER);
            return Ok(());
        }
        thread::sleep(TICK);
    }
    thread::scope(|scope| {
        for (number, (step, after)) in sequence.steps.iter().enumerate() {
            eprintln!("  {:>6.1} s  {}: {step}", begun.elapsed().as_secs_f32(), number + 1);
            world.carry_out(*step, scope)?;
            thread::sleep(*after);
        }
        eprintln!("  {:>6.1} s  heal", begun.elapsed().as_secs_f32());
        world.heal()
    })
    .inspect(|()| eprintln!("  {:>6.1} s  healed", begun.elapsed().as_secs_f32()))
}
