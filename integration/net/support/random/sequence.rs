//! What is done, made from a seed: the same seed makes the same steps for ever, on every machine.
//!
//! The generator keeps a small model of the world, so that each step makes sense when it comes: what is off is not paused,
//! what is whole is not healed, and a volume is taken by force only from a node that its orchestrator has reason to give up.

use std::fmt;
use std::time::Duration;

use super::{NODES, SHARERS, VOLUMES};

/// A machine's number.
pub type NodeIndex = usize;
/// A volume's number.
pub type VolumeIndex = usize;

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// SIGKILL to the agent.
    KillAgent(NodeIndex),
    /// The next agent begins.
    StartAgent(NodeIndex),
    /// The agent is told to end, as at an upgrade, and the next one begins.
    ReplaceAgent(NodeIndex),
    /// Nothing gets through between two machines.
    Cut(NodeIndex, NodeIndex),
    /// Nothing gets through from the first to the second.
    CutOneWay(NodeIndex, NodeIndex),
    /// Between two machines everything gets through again.
    Heal(NodeIndex, NodeIndex),
    /// Nothing gets through between the machine and the others.
    Isolate(NodeIndex),
    /// The machine does not reach the API server.
    CutApi(NodeIndex),
    /// It does again.
    HealApi(NodeIndex),
    /// The API server's processor stops.
    PauseApi,
    /// It goes on.
    ResumeApi,
    /// The machine's processor stops.
    Pause(NodeIndex),
    /// It goes on.
    Resume(NodeIndex),
    /// The machine loses its power.
    Pull(NodeIndex),
    /// It is switched on.
    Boot(NodeIndex),
    /// The machine ends its programs, writes everything to its disks, goes off and boots.
    Reboot(NodeIndex),
    /// The volume's pod ends where it is and the next one begins on that node; or the first one does.
    Move(VolumeIndex, NodeIndex),
    /// The same when the node where it is does not answer: nobody waits for it.
    Take(VolumeIndex, NodeIndex),
    /// The volume's pod ends, and the volume is detached.
    Detach(VolumeIndex),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (n, v) = (|n: usize| NODES[n], |v: usize| VOLUMES[v]);
        match *self {
            Self::KillAgent(a) => write!(f, "kill the agent on {}", n(a)),
            Self::StartAgent(a) => write!(f, "start the agent on {}", n(a)),
            Self::ReplaceAgent(a) => write!(f, "replace the agent on {}", n(a)),
            Self::Cut(a, b) => write!(f, "cut {} - {}", n(a), n(b)),
            Self::CutOneWay(a, b) => write!(f, "cut {} > {}", n(a), n(b)),
            Self::Heal(a, b) => write!(f, "heal {} - {}", n(a), n(b)),
            Self::Isolate(a) => write!(f, "isolate {}", n(a)),
            Self::CutApi(a) => write!(f, "cut {} - API", n(a)),
            Self::HealApi(a) => write!(f, "heal {} - API", n(a)),
            Self::PauseApi => write!(f, "pause the API server"),
            Self::ResumeApi => write!(f, "resume the API server"),
            Self::Pause(a) => write!(f, "pause {}", n(a)),
            Self::Resume(a) => write!(f, "resume {}", n(a)),
            Self::Pull(a) => write!(f, "pull the plug of {}", n(a)),
            Self::Boot(a) => write!(f, "boot {}", n(a)),
            Self::Reboot(a) => write!(f, "reboot {}", n(a)),
            Self::Move(volume, a) => write!(f, "move {} to {}", v(volume), n(a)),
            Self::Take(volume, a) => write!(f, "take {} to {}", v(volume), n(a)),
            Self::Detach(volume) => write!(f, "detach {}", v(volume)),
        }
    }
}

/// What is done in one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// What it was made from.
    pub seed: u64,
    /// Where each volume's pod runs at the beginning.
    pub begin: [NodeIndex; VOLUMES.len()],
    /// The steps, each with the time that passes after it.
    pub steps: Vec<(Step, Duration)>,
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |v: usize| format!("{} on {}", VOLUMES[v], NODES[self.begin[v]]);
        write!(f, "SEED={}: {}", self.seed, (0..VOLUMES.len()).map(at).collect::<Vec<_>>().join(", "))?;
        for (number, (step, after)) in self.steps.iter().enumerate() {
            write!(f, "; {}: {step} ({} ms)", number + 1, after.as_millis())?;
        }
        Ok(())
    }
}

/// The steps that `STEPS` names, such as `1-3,5`, of so many.
///
/// # Panics
/// When it names none.
pub fn kept(text: &str, of: usize) -> Vec<usize> {
    let number = |text: &str| text.trim().parse::<usize>().unwrap_or_else(|_| panic!("STEPS: {text:?}"));
    let mut kept: Vec<usize> = text
        .split(',')
        .flat_map(|part| match part.split_once('-') {
            Some((first, last)) => number(first)..=number(last),
            None => number(part)..=number(part),
        })
        .filter(|n| (1..=of).contains(n))
        .collect();
    kept.dedup();
    kept
}

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (splitmix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`.
    fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).expect("a small number");
        usize::try_from(self.next() % end).expect("a small number")
    }

    /// One of them, by their weights.
    fn weighted<T: Copy>(&mut self, of: &[(usize, T)]) -> T {
        let mut left = self.below(of.iter().map(|(weight, _)| weight).sum());
        for (weight, each) in of {
            match left.checked_sub(*weight) {
                Some(less) => left = less,
                None => return *each,
            }
        }
        of[0].1
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Power {
    On,
    Paused,
    Off,
    /// On its way: nothing is done to it any more.
    Booting,
}

/// What the generator believes of the world.
#[derive(Debug)]
struct Model {
    power: [Power; 3],
    agent: [bool; 3],
    api: [bool; 3],
    api_server: bool,
    link: [[bool; 3]; 3],
    at: [Option<NodeIndex>; VOLUMES.len()],
    /// Machines that may still go off: each boot costs a good part of a minute.
    boots: usize,
}

impl Model {
    fn new(begin: [NodeIndex; VOLUMES.len()], boots: usize) -> Self {
        Self {
            power: [Power::On; 3],
            agent: [true; 3],
            api: [true; 3],
            api_server: true,
            link: [[true; 3]; 3],
            at: begin.map(Some),
            boots,
        }
    }

    fn isolated(&self, node: NodeIndex) -> bool {
        (0..3).filter(|other| *other != node).all(|other| !self.link[node][other] || !self.link[other][node])
    }

    /// Its kubelet is not heard of, or nothing that it writes arrives: orchestrators and people give it up.
    fn given_up(&self, node: NodeIndex) -> bool {
        self.power[node] != Power::On || !self.api[node] || self.isolated(node)
    }

    /// What makes sense now, with weights.
    fn choices(&self) -> Vec<(usize, Step)> {
        let mut all = Vec::new();
        for a in 0..3 {
            match self.power[a] {
                Power::On => {
                    all.extend([(2, Step::Isolate(a)), (2, Step::Pause(a))]);
                    match self.agent[a] {
                        true => all.extend([(3, Step::KillAgent(a)), (2, Step::ReplaceAgent(a))]),
                        false => all.push((6, Step::StartAgent(a))),
                    }
                    all.push(if self.api[a] { (2, Step::CutApi(a)) } else { (5, Step::HealApi(a)) });
                    if self.boots > 0 {
                        all.extend([(4, Step::Pull(a)), (2, Step::Reboot(a))]);
                    }
                }
                Power::Paused => all.push((8, Step::Resume(a))),
                Power::Off => all.push((8, Step::Boot(a))),
                Power::Booting => {}
            }
            for b in 0..3 {
                if a < b && self.link[a][b] && self.link[b][a] {
                    all.extend([
                        (2, Step::Cut(a, b)),
                        (1, Step::CutOneWay(a, b)),
                        (1, Step::CutOneWay(b, a)),
                    ]);
                } else if a < b {
                    all.push((5, Step::Heal(a, b)));
                }
            }
        }
        all.push(if self.api_server { (2, Step::PauseApi) } else { (16, Step::ResumeApi) });
        for volume in 0..VOLUMES.len() {
            let here = self.at[volume];
            for to in (0..3).filter(|to| Some(*to) != here && self.power[*to] == Power::On) {
                match here {
                    Some(from) if self.given_up(from) => all.push((6, Step::Take(volume, to))),
                    _ => all.push((3, Step::Move(volume, to))),
                }
            }
            if here.is_some_and(|from| !self.given_up(from)) {
                all.push((1, Step::Detach(volume)));
            }
        }
        all
    }

    fn apply(&mut self, step: Step) {
        let Self { power, agent, api, api_server, link, at, boots } = self;
        match step {
            Step::KillAgent(a) => agent[a] = false,
            Step::StartAgent(a) => agent[a] = true,
            Step::ReplaceAgent(_) => {}
            Step::Cut(a, b) => (link[a][b], link[b][a]) = (false, false),
            Step::CutOneWay(a, b) => link[a][b] = false,
            Step::Heal(a, b) => (link[a][b], link[b][a]) = (true, true),
            Step::Isolate(a) => {
                for other in (0..3).filter(|other| *other != a) {
                    (link[a][other], link[other][a]) = (false, false);
                }
            }
            Step::CutApi(a) => api[a] = false,
            Step::HealApi(a) => api[a] = true,
            Step::PauseApi => *api_server = false,
            Step::ResumeApi => *api_server = true,
            Step::Pause(a) => power[a] = Power::Paused,
            Step::Resume(a) => power[a] = Power::On,
            Step::Pull(a) => (power[a], *boots) = (Power::Off, boots.saturating_sub(1)),
            Step::Boot(a) => (power[a], agent[a], api[a]) = (Power::Booting, true, true),
            Step::Reboot(a) => {
                (power[a], agent[a], api[a]) = (Power::Booting, true, true);
                *boots = boots.saturating_sub(1);
            }
            Step::Move(volume, to) | Step::Take(volume, to) => at[volume] = Some(to),
            Step::Detach(volume) => at[volume] = None,
        }
    }
}

impl Sequence {
    /// Made from a seed.
    pub fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let begin = [(); VOLUMES.len()].map(|()| random.below(3));
        let boots = random.weighted(&[(5, 0), (4, 1), (1, 2)]);
        let mut model = Model::new(begin, boots);
        let length = 4 + random.below(6);
        let mut steps = Vec::new();
        for _ in 0..length {
            let step = random.weighted(&model.choices());
            model.apply(step);
            // Most follow each other closely: what one begins is not over when the next one comes.
            let longest = random.weighted(&[(4, 300), (4, 1500), (1, 5000)]);
            let after = u64::try_from(random.below(longest)).expect("a small number");
            steps.push((step, Duration::from_millis(after)));
        }
        Self { seed, begin, steps }
    }

    /// Where the pods of the volume that is shared run, all the time.
    pub fn sharers(&self) -> [NodeIndex; SHARERS] {
        let first = usize::try_from(self.seed % 3).expect("a small number");
        std::array::from_fn(|sharer| (first + sharer) % NODES.len())
    }

    /// What the names of its files begin with.
    pub fn prefix(&self) -> String {
        format!("{}-", self.seed)
    }

    /// Whether a file is of another sequence. Pods remove those before they write, and nobody flushes that: a loss of power may
    /// bring them back.
    pub fn is_of_another(&self, file: &str) -> bool {
        let seed = file.split_once('-').and_then(|(seed, _)| seed.parse::<u64>().ok());
        seed.is_some_and(|seed| seed != self.seed)
    }

    /// Only these of its steps, by their numbers from 1.
    pub fn only(mut self, kept: &[usize]) -> Self {
        let mut number = 0;
        self.steps.retain(|_| {
            number += 1;
            kept.contains(&number)
        });
        self
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::mem::discriminant;

    use super::*;

    #[test]
    fn a_seed_makes_the_same_sequence_for_ever() {
        assert_eq!(Sequence::new(7), Sequence::new(7));
        assert_ne!(Sequence::new(7), Sequence::new(8));
        // The generator as it is: a change of it makes every seed that was ever reported another sequence.
        let text: String = (0..200).map(|seed| Sequence::new(seed).to_string()).collect();
        let sum = text.bytes().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        assert_eq!(sum, 16_165_204_292_805_498_714, "say so where seeds are written down");
    }

    #[test]
    fn each_step_makes_sense_when_it_comes() {
        for seed in 0..500 {
            let sequence = Sequence::new(seed);
            let mut model = Model::new(sequence.begin, 2);
            for (step, _) in &sequence.steps {
                let sense = model.choices().iter().any(|(_, choice)| choice == step);
                assert!(sense, "{step} in {sequence}");
                if let Step::Take(volume, _) = step {
                    assert!(model.at[*volume].is_some_and(|from| model.given_up(from)), "{sequence}");
                }
                model.apply(*step);
            }
        }
    }

    #[test]
    fn every_kind_of_step_is_tried_often_and_boots_are_few() {
        let all: Vec<Sequence> = (0..500).map(Sequence::new).collect();
        let steps: Vec<Step> = all.iter().flat_map(|s| s.steps.iter().map(|(step, _)| *step)).collect();
        let mut kinds = Vec::new();
        for step in &steps {
            if !kinds.contains(&discriminant(step)) {
                kinds.push(discriminant(step));
            }
        }
        assert_eq!(kinds.len(), 19, "every kind of step");
        for kind in kinds {
            let count = steps.iter().filter(|step| discriminant(*step) == kind).count();
            assert!(count >= 20, "only {count} of {kind:?}");
        }
        let boots = |s: &Sequence| {
            s.steps.iter().filter(|(step, _)| matches!(step, Step::Pull(_) | Step::Reboot(_))).count()
        };
        assert!(all.iter().map(boots).max() <= Some(2));
        let volumes: BTreeSet<_> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Take(volume, node) => Some((*volume, *node)),
                _ => None,
            })
            .collect();
        assert_eq!(volumes.len(), VOLUMES.len() * 3, "each volume is taken to each node");
    }

    #[test]
    fn files_are_of_the_sequence_whose_seed_they_begin_with_or_of_nobody() {
        let sequence = Sequence::new(12);
        assert_eq!(sequence.prefix(), "12-");
        assert!(sequence.is_of_another("1-union0") && sequence.is_of_another("123-union0"));
        assert!(!sequence.is_of_another("12-union0") && !sequence.is_of_another("shadow"));
    }

    #[test]
    fn a_sequence_is_made_shorter_by_the_numbers_of_its_steps() {
        let whole = Sequence::new(3);
        assert_eq!(kept("1-2,4", whole.steps.len()), [1, 2, 4]);
        let part = whole.clone().only(&kept("1-2,4", whole.steps.len()));
        assert_eq!(part.steps, [whole.steps[0], whole.steps[1], whole.steps[3]]);
        assert_eq!(kept("2-99", 3), [2, 3]);
    }
}
