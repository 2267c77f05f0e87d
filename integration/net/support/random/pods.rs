//! One volume's kubelets, its pods and its VolumeAttachments: keeps it where the steps want it, whatever happens meanwhile.
//!
//! Nothing here waits: [`Keeper::tick`] looks at what it began and begins the next thing. So a step that changes the goal finds
//! whatever was under way, as a user's does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::super::cluster::{Node, Volume};
use super::super::faults::Told;
use super::super::{Output, Running};
use super::judge::Pod;
use super::run::World;
use super::sequence::{NodeIndex, Sequence};
use super::{NODES, SHARED, VOLUMES};

/// A call of a kubelet, its own bound included.
const CALL_BOUND: Duration = Duration::from_secs(300);
/// Longer than any sequence.
const WRITER_BOUND: Duration = Duration::from_secs(3000);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(300);
/// A pod whose volume was taken writes on so long after its node is heard of again: kubelets do not notice at once.
const NOTICES: Duration = Duration::from_secs(4);
/// Records that each file must still get after everything was healed.
const GOES_ON: usize = 3;

/// Where a volume shall be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// On which node; nowhere.
    pub node: Option<NodeIndex>,
    /// The node where it is now is not waited for.
    pub by_force: bool,
}

/// What is done with the volume on the node where it is.
#[derive(Debug)]
enum Phase {
    /// There is a VolumeAttachment.
    Attaching,
    /// The kubelet stages and publishes.
    Mounting(Call),
    /// The pod writes; its place among the pods.
    Running(Running, usize),
    /// The pod is told to end.
    Ending(Running, usize),
    /// The kubelet unpublishes and unstages.
    Unmounting(Call),
    /// The VolumeAttachment is deleted, and its finalizer holds it.
    Detaching,
}

/// A call that is made until it succeeds.
#[derive(Debug, Default)]
struct Call {
    running: Option<Running>,
    next: Option<Instant>,
    said: String,
}

/// Where the volume is.
#[derive(Debug)]
struct Here {
    node: NodeIndex,
    /// The machine's boot that the phase belongs to.
    boot: usize,
    pod: String,
    phase: Phase,
}

/// What is left on a node that the volume was taken from.
#[derive(Debug)]
struct Stale {
    here: Here,
    since: Instant,
}

/// Keeps one volume where it shall be; of a volume that is shared, one of its pods.
#[derive(Debug)]
pub struct Keeper<'a> {
    world: &'a World<'a>,
    volume: &'a Volume,
    /// The volume's number; for each further pod of the one that is shared, one more.
    index: usize,
    name: String,
    files: Vec<String>,
    prefix: String,
    seed: u64,
    here: Option<Here>,
    stale: Vec<Stale>,
    pods: Vec<Pod>,
    /// What the files had when the last fault was healed.
    healed_at: Option<BTreeMap<String, usize>>,
    /// It was seen to go on after everything was healed.
    done: bool,
    /// Each of its files has records.
    written: bool,
    started: usize,
}

impl Call {
    /// Whether it succeeded meanwhile.
    fn tick(&mut self, node: Node<'_>, script: &str) -> bool {
        if let Some(running) = &mut self.running {
            if !running.has_ended() {
                return false;
            }
            if let Some(Ok(output)) = self.running.take().map(Running::wait) {
                if output.success() {
                    return true;
                }
                self.said = output.to_string();
            }
            self.next = Some(Instant::now() + AGAIN);
        }
        if self.next.is_none_or(|next| next <= Instant::now()) {
            match node.machine.start_command(script, CALL_BOUND) {
                Ok(running) => self.running = Some(running),
                Err(error) => {
                    self.said = error.to_string();
                    self.next = Some(Instant::now() + AGAIN);
                }
            }
        }
        false
    }

    /// The kubelet gives up the one that is under way.
    fn end(&self) {
        if let Some(running) = &self.running {
            running.kill();
        }
    }
}

impl<'a> Keeper<'a> {
    /// A volume that is nowhere.
    pub fn new(world: &'a World<'a>, volume: &'a Volume, index: usize, sequence: &Sequence) -> Self {
        let prefix = sequence.prefix();
        let name = match index.checked_sub(VOLUMES.len()) {
            None => VOLUMES[index].to_owned(),
            Some(sharer) => format!("{SHARED}{sharer}-"),
        };
        // One for each branch.
        let count = if matches!(index, 1 | 2) { 3 } else { 1 };
        Self {
            world,
            volume,
            index,
            files: (0..count).map(|n| format!("{prefix}{name}{n}")).collect(),
            name,
            prefix,
            seed: sequence.seed,
            here: None,
            stale: Vec::new(),
            pods: Vec::new(),
            healed_at: None,
            done: false,
            written: false,
            started: 0,
        }
    }

    /// Every pod that had the volume.
    pub fn into_pods(self) -> Vec<Pod> {
        self.pods
    }

    /// Where it is, for people.
    pub fn describe(&mut self) -> String {
        let mut text = format!("{}: ", self.name);
        let goal = self.goal();
        text += &format!("goal {:?}; ", goal.node.map(|n| NODES[n]));
        let stale = self.stale.iter_mut().map(|s| &mut s.here);
        for here in self.here.iter_mut().chain(stale) {
            let phase = match &mut here.phase {
                Phase::Attaching => {
                    format!("attaching: {:?}", self.world.cluster.attached(self.volume, NODES[here.node]))
                }
                Phase::Mounting(call) => format!("mounting, last: {}", call.said),
                Phase::Running(writer, _) => format!("writing: {:?}", last_lines(writer)),
                Phase::Ending(writer, _) => format!("the writer does not end: {:?}", last_lines(writer)),
                Phase::Unmounting(call) => format!("unmounting, last: {}", call.said),
                Phase::Detaching => "detaching".to_owned(),
            };
            text += &format!("on {} (boot {}): {phase}; ", NODES[here.node], here.boot);
        }
        text
    }

    fn node(&self, node: NodeIndex) -> Node<'a> {
        self.world.cluster.node(NODES[node])
    }

    fn goal(&self) -> Goal {
        if self.done { Goal { node: None, by_force: false } } else { self.world.goal(self.index) }
    }

    /// Looks at everything once; whether all is over.
    pub fn tick(&mut self) -> bool {
        let mut stale = std::mem::take(&mut self.stale);
        stale.retain_mut(|each| !self.cleaned(each));
        self.stale = stale;
        let goal = self.goal();
        match self.here.take() {
            None => self.begin(goal),
            Some(here) => self.here = self.follow(here, goal),
        }
        self.here.is_none() && self.stale.is_empty() && self.world.healed() && self.goal().node.is_none()
    }

    fn begin(&mut self, goal: Goal) {
        let Some(node) = goal.node else {
            if self.world.healed() {
                self.done = true;
            }
            return;
        };
        // A kubelet ends what is left of the last pod before it begins with the next one.
        if self.stale.iter().any(|stale| stale.here.node == node) {
            return;
        }
        if self.world.cluster.try_to_attach(self.volume, NODES[node]) {
            self.started += 1;
            let pod = format!("{}{}-{}", self.prefix, self.index, self.started);
            self.here = Some(Here { node, boot: self.world.boot(node), pod, phase: Phase::Attaching });
        }
    }

    /// What becomes of a volume that is somewhere.
    fn follow(&mut self, mut here: Here, goal: Goal) -> Option<Here> {
        let node = self.node(here.node);
        let leaves = goal.node != Some(here.node);
        if leaves && goal.by_force && !matches!(here.phase, Phase::Attaching | Phase::Detaching) {
            if let Phase::Running(_, pod) | Phase::Ending(_, pod) = &here.phase {
                self.pods[*pod].taken = true;
            }
            let (index, boot, pod) = (here.node, here.boot, here.pod.clone());
            self.stale.push(Stale { here, since: Instant::now() });
            return Some(Here { node: index, boot, pod, phase: Phase::Detaching });
        }
        let detaching = matches!(here.phase, Phase::Attaching | Phase::Detaching);
        if !detaching && self.world.down(here.node) {
            return Some(here);
        }
        let booted = here.boot != self.world.boot(here.node);
        here.boot = self.world.boot(here.node);
        here.phase = match here.phase {
            Phase::Attaching if leaves => Phase::Detaching,
            Phase::Attaching => match self.world.cluster.attached(self.volume, NODES[here.node]) {
                Ok(true) => Phase::Mounting(Call::default()),
                Ok(false) | Err(_) => Phase::Attaching,
            },
            Phase::Mounting(call) if leaves => {
                call.end();
                Phase::Unmounting(Call::default())
            }
            Phase::Mounting(_) if booted => Phase::Mounting(Call::default()),
            Phase::Mounting(mut call) => match call.tick(node, &node.mounting(self.volume, &here.pod)) {
                true => self.writer(node, &here.pod),
                false => Phase::Mounting(call),
            },
            Phase::Running(writer, pod) if booted => {
                self.heard(writer, pod, true);
                // The kubelet starts the pod's containers again, in the same pod.
                Phase::Mounting(Call::default())
            }
            Phase::Running(writer, pod) if leaves => {
                writer.kill();
                Phase::Ending(writer, pod)
            }
            Phase::Running(mut writer, pod) => {
                if writer.has_ended() {
                    let said = last_lines(&mut writer);
                    self.heard(writer, pod, false);
                    self.world.note(format!("{} ended by itself: {said:?}", self.pods[pod].tag));
                    return Some(Here { phase: Phase::Mounting(Call::default()), ..here });
                }
                if !self.written && Told::read(&writer.output_so_far()).least(&self.files) >= GOES_ON {
                    self.written = true;
                    self.world.is_written();
                }
                self.goes_on(&mut writer);
                Phase::Running(writer, pod)
            }
            Phase::Ending(writer, pod) if booted => {
                self.heard(writer, pod, true);
                Phase::Unmounting(Call::default())
            }
            Phase::Ending(writer, pod) => self.ending(writer, pod),
            Phase::Unmounting(_) if booted => Phase::Unmounting(Call::default()),
            Phase::Unmounting(mut call) => match call.tick(node, &node.unmounting(self.volume, &here.pod)) {
                true => Phase::Detaching,
                false => Phase::Unmounting(call),
            },
            Phase::Detaching => {
                if self.world.cluster.try_to_detach(self.volume, NODES[here.node]) {
                    return None;
                }
                Phase::Detaching
            }
        };
        Some(here)
    }

    /// Whether nothing is left of it on a node that the volume was taken from.
    fn cleaned(&mut self, stale: &mut Stale) -> bool {
        let Stale { here, since } = stale;
        let node = self.node(here.node);
        let booted = here.boot != self.world.boot(here.node);
        if self.world.down(here.node) {
            return false;
        }
        here.boot = self.world.boot(here.node);
        if !booted && !self.world.answers(here.node) {
            *since = Instant::now();
            return false;
        }
        let wanted = self.goal().node == Some(here.node) || self.world.healed();
        if !booted && !wanted && since.elapsed() < NOTICES {
            return false;
        }
        let phase = std::mem::replace(&mut here.phase, Phase::Detaching);
        here.phase = match phase {
            Phase::Running(writer, pod) | Phase::Ending(writer, pod) if booted => {
                self.heard(writer, pod, true);
                Phase::Unmounting(Call::default())
            }
            Phase::Running(writer, pod) => {
                writer.kill();
                Phase::Ending(writer, pod)
            }
            Phase::Ending(writer, pod) => self.ending(writer, pod),
            Phase::Mounting(call) => {
                call.end();
                Phase::Unmounting(Call::default())
            }
            Phase::Unmounting(_) if booted => Phase::Unmounting(Call::default()),
            Phase::Unmounting(mut call) => match call.tick(node, &node.unmounting(self.volume, &here.pod)) {
                true => return true,
                false => Phase::Unmounting(call),
            },
            Phase::Attaching | Phase::Detaching => return true,
        };
        false
    }

    /// The pod's container begins.
    fn writer(&mut self, node: Node<'_>, pod: &str) -> Phase {
        let tag: String =
            format!("{}.{}.{}", self.index, self.pods.len(), self.seed).chars().take(14).collect();
        let script = format!(
            "exec unshare --mount --propagation slave -- bash -c 'mkdir -p /tmp/{pod} && mount --bind {target} /tmp/{pod} && \
             cd / && {{ find /tmp/{pod} -maxdepth 1 -type f ! -name \"{}*\" -exec rm -f {{}} + || true; }} && \
             exec inside workload records /tmp/{pod} {tag} {}'",
            self.prefix,
            self.files.join(" "),
            target = Node::target(self.volume, pod),
        );
        match node.machine.start_command(script, WRITER_BOUND) {
            Ok(writer) => {
                self.pods.push(Pod { tag, told: Told::default(), cut_off: false, taken: false });
                Phase::Running(writer, self.pods.len() - 1)
            }
            Err(_) => Phase::Mounting(Call::default()),
        }
    }

    fn ending(&mut self, mut writer: Running, pod: usize) -> Phase {
        if !writer.has_ended() {
            return Phase::Ending(writer, pod);
        }
        self.heard(writer, pod, false);
        Phase::Unmounting(Call::default())
    }

    /// What the pod told, once it has ended.
    fn heard(&mut self, mut writer: Running, pod: usize, cut_off: bool) {
        self.pods[pod].told = Told::read(&writer.output_so_far());
        self.pods[pod].cut_off = cut_off;
        if !cut_off && let Ok(Output { timed_out: true, stuck, .. }) = writer.wait() {
            self.world.note(format!("{} is stuck: {stuck:?}", self.pods[pod].tag));
        }
    }

    /// Once everything is healed, each file gets some more records; then the volume is given back.
    fn goes_on(&mut self, writer: &mut Running) {
        if !self.world.healed() || self.done {
            return;
        }
        let told = Told::read(&writer.output_so_far());
        let counts = self.files.iter().map(|file| (file.clone(), told.count(file))).collect();
        let before: &BTreeMap<String, usize> = self.healed_at.get_or_insert(counts);
        self.done = self
            .files
            .iter()
            .all(|file| told.count(file) >= before.get(file).copied().unwrap_or(0).saturating_add(GOES_ON));
        // Another writer may begin meanwhile, and count anew.
        if self.files.iter().any(|file| told.count(file) < before.get(file).copied().unwrap_or(0)) {
            self.healed_at = None;
        }
    }
}

fn last_lines(writer: &mut Running) -> String {
    let text = writer.output_so_far();
    let lines: Vec<&str> = text.lines().collect();
    format!("{} {:?}", lines[lines.len().saturating_sub(4)..].join(" | "), writer).chars().take(600).collect()
}
