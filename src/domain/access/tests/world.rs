//! The parties and what lies between them, small enough to be searched.
//!
//! What is modelled and how:
//! - **Store**: the `Branch` object (spec and status), and every state it ever had. A read may give any of them; a write
//!   lands only on the state that it was decided on, as with a resourceVersion. Two states with the same content are taken
//!   for one, which lets more writes land than a real store would.
//! - **Leaders**: any number, at any time, each with any `attached` list that there ever was.
//! - **Owner**: its agent decides on any state that the branch ever had, then does its actions one by one; it may crash
//!   before each. A report lands at once or never: it is alone, and what it was decided on must still be there when it
//!   lands. The kernel, and the mark on the disk, stay. The machine may reboot, cleanly or not. Its branch may be durable or
//!   not, become so at any time, and cease to be while it is not exported.
//! - **Consumers**: their agents decide on any state that the branch ever had. A partition is that a party does nothing for
//!   as long as it likes; that is always among the runs. What a consumer attached stays in its kernel, which reconnects
//!   whenever the owner lets it.
//! - **Writes** are not made: in each state it is asked who could write now, and whether that may be.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::*;
use crate::domain::NodeName;

/// A node: 0 is the owner.
pub(super) type Node = u8;

/// The order of nobody-or-somebody at an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Order {
    pub(super) to: Option<Node>,
    pub(super) epoch: u16,
}

/// A report, of the figures that matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Told {
    pub(super) generation: u16,
    pub(super) exported: bool,
    pub(super) allowed: Order,
    pub(super) boot: u16,
}

/// The `Branch` object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Object {
    pub(super) access: Option<Order>,
    pub(super) told: Option<Told>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Noted {
    generation: u16,
    order: Order,
    peer: Option<Node>,
    boot: u16,
    clean: bool,
    durable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Act {
    Fence(Option<Node>),
    Unexport,
    Remember(Noted),
    Export(u16),
    Allow(Node),
    Report(Told),
}

/// What a consumer's kernel has, with what was true when it was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Attachment {
    generation: u16,
    epoch: u16,
    /// The owner's crashes that lost completed writes, until then.
    crashes: u8,
}

/// A rule that is left out, to see that the search finds what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Broken {
    Nothing,
    /// The leader grants in place of the revocation.
    GrantsOverAHolder,
    /// The leader grants to another node what was never governed, as if its owner did not use it.
    GrantsTheUngoverned,
    /// The leader takes whatever its owner wants for settled, as if it had never been governed.
    SettlesForTheOwner,
    /// The leader does not wait for the owner's report, as if after a time.
    GrantsWithoutAReport,
    /// The leader writes whatever became of the object since.
    WritesWithoutVersion,
    /// The leader grants at the epoch of the revocation.
    ReusesAnEpoch,
    /// The owner takes the right and leaves the connections.
    SparesLiveConnections,
    /// The owner does not see that it uses the branch itself.
    OverlooksItsOwnUse,
    /// The owner notes the order before it fenced the one before.
    NotesBeforeFencing,
    /// The owner exports each grant under the same name.
    KeepsTheGeneration,
    /// The owner goes on with its generation after a crash.
    IgnoresCrashes,
    /// The owner says that its branch is durable, and it is not.
    ClaimsDurability,
    /// What is durable now is taken to have been so in the boot that crashed.
    TakesNowForThen,
    /// A clean stop makes an earlier crash clean.
    StopsAlwaysClean,
    /// The owner obeys whatever it reads.
    ForgetsItsMark,
    /// The owner reports what it is about to do.
    ReportsWhatIsMeant,
    /// The owner node attaches its own branch by the object instead of by the mark.
    TrustsTheObjectAtHome,
    /// The consumer keeps what is of another time.
    KeepsOldAttachments,
}

/// What happens next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// Somebody wants the volume elsewhere.
    Want(Option<Node>),
    /// A leader that knows that `attached` list, and for a broken one that state of the branch, decides and writes.
    Lead { attached: usize, read: usize },
    /// The owner's agent reads that state of the branch and decides.
    OwnerDecides { read: usize },
    /// It does its next action.
    OwnerActs,
    /// It crashes and is started again.
    OwnerAgentCrashes,
    /// The owner's machine reboots.
    OwnerReboots { clean: bool },
    /// The owner's branch becomes durable or ceases to be.
    Turns,
    /// A node's agent reads that state of the branch and does what it decides.
    Consume { node: Node, needed: bool, read: usize },
    /// A consumer's machine reboots.
    ConsumerReboots(Node),
    /// The store is restored from a backup of that state.
    Restore { read: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) object: Object,
    /// All states of the object, the newest last.
    pub(super) past: Vec<Object>,
    pub(super) wanted: Option<Node>,
    pub(super) wanted_past: Vec<Option<Node>>,
    noted: Option<Noted>,
    boot: u16,
    /// What is completed survives a crash.
    pub(super) durable: bool,
    /// Crashes that lost completed writes.
    crashes: u8,
    /// Generation and who is allowed.
    export: Option<(u16, BTreeSet<Node>)>,
    /// Connections that the owner's kernel serves.
    live: BTreeSet<(Node, u16)>,
    /// The owner node uses its branch, since the order of that epoch.
    here: Option<u16>,
    pub(super) plan: VecDeque<Act>,
    attached: Vec<BTreeSet<Attachment>>,
    /// The newest epoch that was ever reported.
    reported: u16,
    restored: bool,
    /// Leaders write whomever they like, whenever they like: what is left is what the owner alone keeps.
    pub(super) lawless: bool,
    pub(super) broken: Broken,
}

fn name(node: Node) -> NodeName {
    format!("n{node}").parse().unwrap()
}

fn number(name: &str) -> Node {
    name[name.len() - 1..].parse().unwrap()
}

fn small(n: u64) -> u16 {
    u16::try_from(n).unwrap()
}

impl Order {
    fn full(self) -> Access {
        Access { consumer: self.to.map(name), epoch: Epoch(self.epoch.into()) }
    }

    fn of(access: &Access) -> Self {
        Self { to: access.consumer.as_ref().map(|n| number(n.as_str())), epoch: small(access.epoch.0) }
    }
}

impl Told {
    fn full(self) -> ExportReport {
        let remote = self.allowed.to.map(|to| if to == 0 { Transport::Local } else { Transport::NvmeTcp });
        ExportReport {
            generation: Generation(self.generation.into()),
            address: self.exported.then(|| "a".to_owned()),
            name: self.exported.then(|| self.generation.to_string()),
            transport: remote,
            allowed: self.allowed.full(),
            boot_id: self.boot.to_string(),
        }
    }

    fn of(report: &ExportReport) -> Self {
        Self {
            generation: small(report.generation.0),
            exported: report.name.is_some(),
            allowed: Order::of(&report.allowed),
            boot: report.boot_id.parse().unwrap(),
        }
    }
}

impl Noted {
    fn full(self) -> Mark {
        Mark {
            generation: Generation(self.generation.into()),
            access: self.order.full(),
            peer: self.peer.map(|peer| peer.to_string()),
            boot_id: self.boot.to_string(),
            clean: self.clean,
            durable: self.durable,
        }
    }

    fn of(mark: &Mark) -> Self {
        Self {
            generation: small(mark.generation.0),
            order: Order::of(&mark.access),
            peer: mark.peer.as_deref().map(number),
            boot: mark.boot_id.parse().unwrap(),
            clean: mark.clean,
            durable: mark.durable,
        }
    }
}

impl World {
    /// The owner and so many other nodes; `used`: the owner node uses the branch since before there were orders.
    pub(super) fn new(others: u8, used: bool, broken: Broken) -> Self {
        let wanted = used.then_some(0);
        Self {
            object: Object::default(),
            past: vec![Object::default()],
            wanted,
            wanted_past: vec![wanted],
            noted: None,
            boot: 1,
            durable: false,
            crashes: 0,
            export: None,
            live: BTreeSet::new(),
            here: used.then_some(0),
            plan: VecDeque::new(),
            attached: vec![BTreeSet::new(); usize::from(others) + 1],
            reported: 0,
            restored: false,
            lawless: false,
            broken,
        }
    }

    pub(super) fn nodes(&self) -> Node {
        u8::try_from(self.attached.len()).unwrap()
    }

    /// Everything that can happen but faults and wishes, less what changes nothing or the same as another.
    pub(super) fn steps(&self) -> Vec<Event> {
        let newest = self.past.len() - 1;
        let mut events = Vec::new();
        let read_from = if self.broken == Broken::WritesWithoutVersion { 0 } else { newest };
        for attached in 0..self.wanted_past.len() {
            events.extend((read_from..=newest).map(|read| Event::Lead { attached, read }));
        }
        if self.plan.is_empty() {
            // Of old states only the order matters: what is reported on them does not land.
            let mut orders = BTreeSet::from([self.object.access]);
            let first = |(_, past): &(usize, &Object)| orders.insert(past.access);
            events.extend(
                self.past[..newest]
                    .iter()
                    .enumerate()
                    .filter(first)
                    .map(|(read, _)| Event::OwnerDecides { read }),
            );
            events.push(Event::OwnerDecides { read: newest });
            let at_home = |read| Event::Consume { node: 0, needed: self.here.is_none(), read };
            events.extend((if self.here.is_none() { 0 } else { newest }..=newest).map(at_home));
        } else {
            events.extend([Event::OwnerActs, Event::OwnerAgentCrashes]);
        }
        for node in 1..self.nodes() {
            if !self.attached[usize::from(node)].is_empty() {
                // By force or not, and whatever was read: it is gone.
                events.push(Event::Consume { node, needed: false, read: newest });
                continue;
            }
            let opened =
                |(_, past): &(usize, &Object)| past.told.is_some_and(|told| self.lets(node, told.generation));
            let reads = self.past.iter().enumerate().filter(opened);
            events.extend(reads.map(|(read, _)| Event::Consume { node, needed: true, read }));
        }
        events
    }

    /// The world after the event, itself where nothing comes of it.
    pub(super) fn after(&self, event: Event) -> Self {
        let mut next = self.clone();
        match event {
            Event::Want(node) => {
                next.wanted = node;
                if !next.wanted_past.contains(&node) {
                    next.wanted_past.push(node);
                }
            }
            Event::Lead { attached, read } => next.lead(self.wanted_past[attached], self.past[read]),
            Event::OwnerDecides { read } => next.decide(self.past[read]),
            Event::OwnerActs => {
                if let Some(act) = next.plan.pop_front() {
                    next.act(act);
                }
            }
            Event::OwnerAgentCrashes => next.plan.clear(),
            Event::OwnerReboots { clean } => next.reboot(clean),
            Event::Turns if self.may_turn() => next.durable = !next.durable,
            Event::Turns => {}
            Event::Consume { node, needed, read } => next.consume(node, needed, self.past[read]),
            Event::ConsumerReboots(node) => {
                next.attached[usize::from(node)].clear();
                next.live.retain(|(peer, _)| *peer != node);
            }
            Event::Restore { read } => {
                next.restored = true;
                next.write(self.past[read]);
            }
        }
        next
    }

    /// Whether the branch's durability may change now.
    pub(super) fn may_turn(&self) -> bool {
        self.plan.is_empty() && (!self.durable || self.export.is_none())
    }

    fn write(&mut self, object: Object) {
        if object == self.object {
            return;
        }
        self.object = object;
        // The order of reads does not matter, and so not when a state was last there.
        self.past.retain(|past| *past != object);
        self.past.sort_unstable();
        self.past.push(object);
    }

    fn lead(&mut self, wanted: Option<Node>, read: Object) {
        let claimants: Vec<Claimant> = wanted
            .map(|node| Claimant { node: name(node), out_of_service: false, reads: false })
            .into_iter()
            .collect();
        let owner = name(0);
        let access = read.access.map(Order::full);
        let report = read.told.map(Told::full);
        let decision = leader_step(&Led {
            claimants: &claimants,
            owner: &owner,
            owner_down: None,
            access: access.as_ref(),
            report: report.as_ref(),
        });
        let epoch = read.access.unwrap_or_default().epoch;
        let order = match (decision, self.broken) {
            _ if self.lawless => Order { to: wanted, epoch: epoch + 1 },
            (LeaderDecision::Grant(access), Broken::ReusesAnEpoch) => {
                Order { epoch: epoch.max(1), ..Order::of(&access) }
            }
            (LeaderDecision::Revoke(access), Broken::GrantsTheUngoverned) if epoch == 0 => {
                Order { to: wanted, ..Order::of(&access) }
            }
            (_, Broken::SettlesForTheOwner) if wanted == Some(0) => return,
            (LeaderDecision::Revoke(access), Broken::GrantsOverAHolder) => {
                Order { to: wanted, ..Order::of(&access) }
            }
            (LeaderDecision::Wait(Waiting::Fenced { .. }), Broken::GrantsWithoutAReport)
                if wanted.is_some() =>
            {
                Order { to: wanted, epoch: epoch + 1 }
            }
            (LeaderDecision::Grant(access) | LeaderDecision::Revoke(access), _) => Order::of(&access),
            (LeaderDecision::Wait(_) | LeaderDecision::Settled, _) => return,
        };
        if self.object == read || self.broken == Broken::WritesWithoutVersion {
            self.write(Object { access: Some(order), ..self.object });
        }
    }

    fn decide(&mut self, read: Object) {
        if !self.plan.is_empty() {
            return;
        }
        let mut mark = self.noted.map(Noted::full);
        if let Some(mark) = &mut mark {
            match self.broken {
                Broken::IgnoresCrashes => mark.boot_id = self.boot.to_string(),
                Broken::TakesNowForThen => mark.durable = self.durable,
                _ => {}
            }
            if let (Broken::ForgetsItsMark, Some(order)) = (self.broken, read.access) {
                mark.access = order.full();
                mark.peer = order.to.map(|to| to.to_string());
            }
        }
        let export = self.export.as_ref().map(|(generation, allowed)| Exported {
            generation: Generation((*generation).into()),
            address: "a".to_owned(),
            name: generation.to_string(),
            transport: Transport::NvmeTcp,
            allowed: allowed.iter().map(ToString::to_string).collect(),
            readers: Vec::new(),
        });
        let identities: BTreeMap<NodeName, String> =
            (1..self.nodes()).map(|node| (name(node), node.to_string())).collect();
        let (access, reported) = (read.access.map(Order::full), read.told.map(Told::full));
        let actions = owner_step(&Owned {
            node: &name(0),
            wanted: access.as_ref(),
            deleting: false,
            mark: mark.as_ref(),
            boot_id: &self.boot.to_string(),
            durable: self.durable || self.broken == Broken::ClaimsDurability,
            export: export.as_ref(),
            here: self.here.is_some() && self.broken != Broken::OverlooksItsOwnUse,
            identities: &identities,
            reported: reported.as_ref(),
        });
        self.plan = actions.iter().map(Act::of).collect();
        match self.broken {
            Broken::NotesBeforeFencing => {
                self.plan.make_contiguous().sort_by_key(|act| !matches!(act, Act::Remember(_)));
            }
            Broken::KeepsTheGeneration => {
                let kept = self.noted.map_or(1, |noted| noted.generation.max(1));
                for act in &mut self.plan {
                    match act {
                        Act::Remember(noted) => noted.generation = kept,
                        Act::Export(generation) => *generation = kept,
                        _ => {}
                    }
                }
            }
            Broken::ReportsWhatIsMeant => {
                let meant = self.plan.iter().find_map(|act| match act {
                    Act::Remember(noted) => Some(*noted),
                    _ => None,
                });
                let report = |noted: Noted| Told {
                    generation: noted.generation,
                    exported: noted.peer.is_some(),
                    allowed: noted.order,
                    boot: noted.boot,
                };
                if let Some(meant) = meant.filter(|_| read == self.object) {
                    self.report(report(meant));
                }
            }
            _ => {}
        }
        if let Some(Act::Report(told)) = self.plan.front().copied() {
            self.plan.clear();
            if read == self.object {
                self.report(told);
            }
        }
    }

    fn act(&mut self, act: Act) {
        let ends = self.broken != Broken::SparesLiveConnections;
        match act {
            Act::Fence(None) => self.here = None,
            Act::Fence(Some(node)) => {
                self.export.iter_mut().for_each(|(_, allowed)| {
                    allowed.remove(&node);
                });
                self.live.retain(|(peer, _)| !ends || *peer != node);
            }
            Act::Unexport => {
                self.export = None;
                self.live.retain(|_| !ends);
            }
            Act::Remember(noted) => {
                self.noted = Some(noted);
                if let (Some(0), Some(since)) = (noted.order.to, &mut self.here) {
                    *since = noted.order.epoch;
                }
            }
            Act::Export(generation) => {
                if self.export.as_ref().is_none_or(|(old, _)| *old != generation) {
                    self.export = Some((generation, BTreeSet::new()));
                    self.live.retain(|_| !ends);
                }
            }
            Act::Allow(node) => {
                self.export.iter_mut().for_each(|(_, allowed)| {
                    allowed.insert(node);
                });
            }
            Act::Report(told) => self.report(told),
        }
    }

    fn report(&mut self, told: Told) {
        self.write(Object { told: Some(told), ..self.object });
        self.reported = self.reported.max(told.allowed.epoch);
    }

    fn reboot(&mut self, clean: bool) {
        if clean {
            // The agent stops the exports first, and is not in the middle of anything.
            self.plan.clear();
            let always = self.broken == Broken::StopsAlwaysClean;
            self.noted = self.noted.map(|noted| {
                let stopped = noted.full().stopped(&self.boot.to_string());
                if always {
                    Noted { clean: true, ..noted }
                } else {
                    stopped.as_ref().map_or(noted, Noted::of)
                }
            });
        } else if self.export.is_some() && !self.durable {
            // Without an export nothing was completed that a peer relies on: the one before was stopped, or ended with all
            // its peers fenced.
            self.crashes += 1;
        }
        self.boot += 1;
        self.plan.clear();
        self.export = None;
        self.live.clear();
        self.here = None;
    }

    fn consume(&mut self, node: Node, needed: bool, read: Object) {
        // At home the decision is made under the lock that the owner's plan is done under.
        if node == 0 && !self.plan.is_empty() {
            return;
        }
        let (access, report) = (read.access.map(Order::full), read.told.map(Told::full));
        let mut mark = self.noted.map(Noted::full).filter(|_| node == 0);
        if self.broken == Broken::TrustsTheObjectAtHome {
            mark = report.as_ref().map(|report| Mark { access: report.allowed.clone(), ..Mark::default() });
        }
        let held: Vec<Held> = self.attached[usize::from(node)]
            .iter()
            .map(|a| Held { generation: Generation(a.generation.into()), epoch: Some(Epoch(a.epoch.into())) })
            .collect();
        let decision = consumer_step(&Consuming {
            node: &name(node),
            owner: &name(0),
            needed,
            access: access.as_ref(),
            report: report.as_ref(),
            held: &held,
            here: node == 0 && self.here.is_some(),
            mark: mark.as_ref(),
        });
        match decision {
            ConsumerDecision::AttachHere => {
                self.here = Some(mark.map_or(0, |mark| small(mark.access.epoch.0)));
            }
            ConsumerDecision::DetachHere => self.here = None,
            ConsumerDecision::ForceDetach(_) if self.broken == Broken::KeepsOldAttachments => {}
            ConsumerDecision::Detach(generation) | ConsumerDecision::ForceDetach(generation) => {
                let generation = small(generation.0);
                self.attached[usize::from(node)].retain(|a| a.generation != generation);
                self.live.remove(&(node, generation));
            }
            ConsumerDecision::Attach { generation, epoch } => {
                let generation = small(generation.0);
                if self.lets(node, generation) {
                    let epoch = small(epoch.0);
                    let attachment = Attachment { generation, epoch, crashes: self.crashes };
                    self.attached[usize::from(node)].insert(attachment);
                    self.live.insert((node, generation));
                }
            }
            ConsumerDecision::Wait(_) | ConsumerDecision::Settled => {}
        }
    }

    /// Whether the owner's kernel takes a connection of the node to that name.
    fn lets(&self, node: Node, generation: u16) -> bool {
        self.export
            .as_ref()
            .is_some_and(|(exported, allowed)| *exported == generation && allowed.contains(&node))
    }

    /// Who could write to the branch now, since which order, and since how many crashes of the owner.
    fn writers(&self) -> Vec<(Node, u16, u8)> {
        let remote = (0..).zip(&self.attached).flat_map(|(node, attached): (Node, _)| {
            attached.iter().map(move |attachment| (node, attachment))
        });
        remote
            .filter(|(node, a)| self.live.contains(&(*node, a.generation)) || self.lets(*node, a.generation))
            .map(|(node, a)| (node, a.epoch, a.crashes))
            .chain(self.here.map(|epoch| (0, epoch, self.crashes)))
            .collect()
    }

    /// What is promised.
    pub(super) fn check(&self) -> Result<(), String> {
        let writers = self.writers();
        if writers.len() > 1 {
            return Err(format!("{} can write at once: {writers:?}", writers.len()));
        }
        for (node, epoch, crashes) in writers {
            if epoch < self.reported {
                return Err(format!(
                    "node {node} can write by order {epoch}, and {} was reported",
                    self.reported
                ));
            }
            if crashes < self.crashes {
                return Err(format!("node {node} can write on as if its owner had not crashed"));
            }
            if self.restored || self.lawless {
                continue;
            }
            let order = self.object.access.unwrap_or_default();
            let fenced = self.object.told.is_some_and(|told| told.allowed == order);
            if order.epoch > 0 && order.to != Some(node) && (order.to.is_some() || fenced) {
                return Err(format!("node {node} can write, and the branch is given to {:?}", order.to));
            }
        }
        Ok(())
    }

    /// Wherever the volume is wanted: it comes there, and to rest.
    pub(super) fn check_settles(&self) -> Result<(), String> {
        self.wanted_past
            .iter()
            .try_for_each(|wanted| Self { wanted: *wanted, ..self.clone() }.check_settles_there())
    }

    /// All parties act on what is, in turn, until nothing changes: then whoever is wanted has the branch, and nobody else.
    fn check_settles_there(&self) -> Result<(), String> {
        let mut world = self.clone();
        for _ in 0..40 {
            let before = world.clone();
            let now = |world: &Self| world.past.len() - 1;
            let wanted = world.wanted_past.iter().position(|wanted| *wanted == world.wanted).unwrap();
            world = world.after(Event::Lead { attached: wanted, read: now(&world) });
            world = world.after(Event::OwnerDecides { read: now(&world) });
            while !world.plan.is_empty() {
                world = world.after(Event::OwnerActs);
            }
            for node in 0..world.nodes() {
                let needed = world.wanted == Some(node);
                world = world.after(Event::Consume { node, needed, read: now(&world) });
            }
            world.check()?;
            if world == before {
                let holders: Vec<Option<Node>> =
                    world.writers().into_iter().map(|(node, ..)| Some(node)).collect();
                let expected: Vec<Option<Node>> = world.wanted.into_iter().map(Some).collect();
                let left: usize = world.attached.iter().map(BTreeSet::len).sum();
                return if holders == expected && left <= 1 {
                    Ok(())
                } else {
                    Err(format!("{:?} is wanted, {holders:?} have it at rest: {world:?}", world.wanted))
                };
            }
        }
        Err(format!("it does not come to rest: {world:?}"))
    }
}

impl Act {
    fn of(action: &OwnerAction) -> Self {
        match action {
            OwnerAction::Fence(Peer::Here) => Self::Fence(None),
            OwnerAction::Fence(Peer::Remote(peer)) => Self::Fence(Some(number(peer))),
            OwnerAction::Unexport => Self::Unexport,
            OwnerAction::Remember(mark) => Self::Remember(Noted::of(mark)),
            OwnerAction::Export(generation) => Self::Export(small(generation.0)),
            OwnerAction::Allow(peer) => Self::Allow(number(peer)),
            OwnerAction::Report(report) => Self::Report(Told::of(report)),
        }
    }
}
