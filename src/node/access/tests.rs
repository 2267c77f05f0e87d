use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Mutex;

use super::carry::{Held, Next, Pass};
use super::exporter::{Asked, Key, Settled};
use super::mark::Kept;
use super::tally::Tally;
use super::*;
use crate::domain::access::shared::{SharedMark, Sharing, SharingReport};
use crate::domain::access::{Access, Epoch, ExportReport, Generation, Mark};
use crate::domain::split::BranchFormat;
use crate::domain::{Bytes, NodeName};
use crate::node::keys::KeyFiles;
use crate::node::transport::{Endpoint, ExportId, Exported, Owner, Peer, Right, Secret, Source};

/// A kernel that can fail at one of its calls, before or after it did what was asked for.
#[derive(Default)]
struct Kernel {
    exports: BTreeMap<u64, (bool, Vec<String>)>,
    calls: u32,
    fail: Option<(u32, When)>,
    durable: bool,
    /// What each that was let in was to prove.
    keys: Vec<Option<Secret>>,
    /// It is a directory, which goes to several.
    many: bool,
    /// Who may only read.
    readers: Vec<String>,
    /// Who is heard, of which generation.
    heard: Vec<(String, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    Before,
    After,
}

#[derive(Default)]
struct FakeOwner(Mutex<Kernel>);

impl FakeOwner {
    fn act(&self, work: impl FnOnce(&mut Kernel)) -> Result<(), TransportError> {
        let mut kernel = self.0.lock().unwrap();
        kernel.calls += 1;
        let failing = kernel.fail.filter(|(at, _)| *at == kernel.calls).map(|(_, when)| when);
        if failing != Some(When::Before) {
            work(&mut kernel);
        }
        let open: Vec<_> = kernel.exports.values().flat_map(|(_, allowed)| allowed.clone()).collect();
        assert!(open.len() <= 1 || kernel.many, "two nodes may write: {open:?}");
        match failing {
            None => Ok(()),
            Some(_) => {
                Err(TransportError::Unable { action: "go on", reason: "it was told to fail".to_owned() })
            }
        }
    }

    fn allowed(&self) -> Vec<(u64, String)> {
        let kernel = self.0.lock().unwrap();
        kernel.exports.iter().flat_map(|(g, (_, all))| all.iter().map(|a| (*g, a.clone()))).collect()
    }
}

impl Owner for FakeOwner {
    fn export(&self, id: &ExportId, _: &Source) -> Result<Endpoint, TransportError> {
        self.act(|kernel| {
            kernel.exports.retain(|g, _| *g == id.generation.0);
            kernel.exports.entry(id.generation.0).or_insert((true, Vec::new()));
        })?;
        Ok(Endpoint { address: "10.0.0.1:4420".parse().unwrap(), name: id.generation.to_string() })
    }
    fn allow(
        &self,
        id: &ExportId,
        peer: &Peer,
        right: Right,
        key: Option<&Secret>,
    ) -> Result<(), TransportError> {
        self.act(|kernel| {
            kernel.keys.push(key.cloned());
            kernel.readers.retain(|reader| *reader != peer.identity);
            kernel.readers.extend((right == Right::Read).then(|| peer.identity.clone()));
            let (_, allowed) = kernel.exports.get_mut(&id.generation.0).expect("it is exported");
            if !allowed.contains(&peer.identity) {
                allowed.push(peer.identity.clone());
            }
        })
    }
    fn fence(&self, _: &ExportId, peer: &Peer) -> Result<(), TransportError> {
        self.act(|kernel| kernel.exports.values_mut().for_each(|(_, a)| a.retain(|p| *p != peer.identity)))
    }
    fn hear(&self, id: &ExportId, _: &Source, peer: &Peer) -> Result<(), TransportError> {
        self.0.lock().unwrap().heard.push((peer.identity.clone(), id.generation.0));
        // Nothing depends on it.
        Err(TransportError::Unable { action: "hear", reason: "it was told to fail".to_owned() })
    }
    fn unexport(&self, _: &BranchId) -> Result<(), TransportError> {
        self.act(|kernel| kernel.exports.clear())
    }
    fn grown(&self, _: &ExportId) -> Result<Bytes, TransportError> {
        Ok(Bytes::ZERO)
    }
    fn durable(&self, _: &Source) -> Result<bool, TransportError> {
        Ok(self.0.lock().unwrap().durable)
    }
    fn exports(&self) -> Result<Vec<Exported>, TransportError> {
        let address = "10.0.0.1:4420".parse().unwrap();
        let readers = self.0.lock().unwrap().readers.clone();
        let tell = |(g, (whole, allowed)): (&u64, &(bool, Vec<String>))| Exported {
            id: ExportId { branch: "v-0".parse().unwrap(), generation: Generation(*g) },
            endpoint: whole.then(|| Endpoint { address, name: g.to_string() }),
            allowed: allowed.clone(),
            readers: allowed.iter().filter(|peer| readers.contains(peer)).cloned().collect(),
        };
        Ok(self.0.lock().unwrap().exports.iter().map(tell).collect())
    }
}

/// A branch whose mark can fail to be written, before or after it is on the disk.
#[derive(Default)]
struct FakeBranch {
    kept: RefCell<Option<Kept>>,
    shared: RefCell<Option<SharedMark>>,
    here: Cell<bool>,
    encrypted: Cell<bool>,
    fail: Cell<Option<When>>,
}

impl FakeBranch {
    fn mark(&self) -> Mark {
        match &*self.kept.borrow() {
            Some(Kept::Mark(mark)) => mark.clone(),
            other => panic!("no mark: {other:?}"),
        }
    }
}

impl Held for &FakeBranch {
    fn kept(&self) -> Result<Kept, BranchError> {
        Ok(self.kept.borrow().clone().unwrap_or(Kept::Nothing))
    }
    fn remember(&self, mark: &Mark) -> Result<(), BranchError> {
        let fail = self.fail.take();
        if fail != Some(When::Before) {
            *self.kept.borrow_mut() = Some(Kept::Mark(mark.clone()));
        }
        let failed = || BranchError::Mark { branch: "v-0".parse().unwrap(), reason: "told to".to_owned() };
        fail.map_or(Ok(()), |_| Err(failed()))
    }
    fn kept_shared(&self) -> Result<Kept<SharedMark>, BranchError> {
        Ok(self.shared.borrow().clone().map_or(Kept::Nothing, Kept::Mark))
    }
    fn remember_shared(&self, mark: &SharedMark) -> Result<(), BranchError> {
        *self.shared.borrow_mut() = Some(mark.clone());
        Ok(())
    }
    fn here(&self) -> Result<bool, BranchError> {
        Ok(self.here.get())
    }
    fn source(&self) -> Source {
        let encrypted = self.encrypted.get();
        Source::Image { path: "/p/branches/v-0/disk.img".into(), write_through: true, encrypted }
    }
}

/// One node's branch, and what others see of it.
#[derive(Default)]
struct World {
    owner: FakeOwner,
    branch: FakeBranch,
    boot: u32,
    wanted: Option<Access>,
    deleting: bool,
    reported: Option<ExportReport>,
    sharing: Option<Sharing>,
    shared: Option<SharingReport>,
    unable: Option<TransportError>,
    /// The store's.
    key: Option<Secret>,
    /// No store answers.
    alone: bool,
    state: Option<tempfile::TempDir>,
}

impl World {
    fn order(&mut self, consumer: Option<&str>, epoch: u64) {
        let consumer = consumer.map(|name| name.parse().unwrap());
        self.wanted = Some(Access { consumer, epoch: Epoch(epoch) });
    }

    /// One attempt, as the executor makes it.
    fn settle(&mut self) -> Result<Settled, AccessError> {
        let spec = crate::store::contract::branch("v", 0, "a").spec;
        // What is shared is a directory.
        let format = if self.sharing.is_some() { BranchFormat::Directory } else { spec.format };
        let spec = BranchSpec { id: "v-0".parse().unwrap(), format, ..spec };
        self.owner.0.lock().unwrap().many |= self.sharing.is_some();
        let identities = ["b", "c"].map(|n| (n.parse::<NodeName>().unwrap(), format!("nqn.{n}"))).into();
        let asked = Asked {
            spec: &spec,
            wanted: self.wanted.as_ref(),
            deleting: self.deleting,
            identities: &identities,
            key: if self.alone { Key::Kept } else { Key::Stored(self.key.clone()) },
            reported: self.reported.as_ref(),
            sharing: self.sharing.as_ref(),
            shared: self.shared.as_ref(),
        };
        let state = self.state.get_or_insert_with(|| tempfile::tempdir().unwrap());
        let keys = KeyFiles::new(&crate::platform::Host::new(), state.path());
        let (node, boot_id, tally) = ("a".parse().unwrap(), self.boot.to_string(), Tally::default());
        for _ in 0..8 {
            let owner: Result<&dyn Owner, _> = self.unable.as_ref().map_or(Ok(&self.owner), Err);
            let pass = Pass {
                asked: &asked,
                held: &&self.branch,
                node: &node,
                boot_id: &boot_id,
                transport: Transport::NvmeTcp,
                owner,
                keys: &keys,
                tally: &tally,
            };
            match pass.run()? {
                Next::Again => {}
                Next::EndHere => self.branch.here.set(false),
                Next::Settled(settled) => {
                    if let Some(report) = &settled.report {
                        self.reported = Some(report.clone());
                    }
                    if let Some(report) = &settled.shared {
                        self.shared = Some((**report).clone());
                    }
                    return Ok(settled);
                }
            }
            let open = self.owner.allowed();
            let both = !open.is_empty() && self.branch.here.get();
            assert!(!both || self.sharing.is_some(), "{open:?} and this node may write");
        }
        panic!("it does not come to rest");
    }

    /// The kernel forgets what it exported, and what was attached.
    fn reboot(&mut self) {
        self.boot += 1;
        self.owner.0.lock().unwrap().exports.clear();
        self.branch.here.set(false);
    }
}

/// The orders that the tests go through, each from where the one before ended.
const ORDERS: [(Option<&str>, u64); 7] =
    [(Some("b"), 1), (None, 2), (Some("c"), 3), (None, 4), (Some("a"), 5), (None, 6), (Some("b"), 7)];

fn obeyed(world: &World, consumer: Option<&str>, epoch: u64) {
    let allowed = world.owner.allowed();
    let other = consumer.filter(|node| *node != "a");
    let names: Vec<_> = allowed.iter().map(|(_, name)| name.clone()).collect();
    assert_eq!(names, other.map(|node| format!("nqn.{node}")).into_iter().collect::<Vec<_>>());
    let mark = world.branch.mark();
    assert_eq!(
        (mark.access.epoch, mark.access.consumer.as_ref().map(NodeName::as_str)),
        (Epoch(epoch), consumer)
    );
    let report = world.reported.as_ref().unwrap();
    assert_eq!(report.allowed, mark.access, "what is reported is what was carried out");
    assert_eq!(report.generation, mark.generation);
    for (generation, _) in allowed {
        assert_eq!(Generation(generation), mark.generation);
    }
}

#[test]
fn a_branch_goes_from_node_to_node_and_each_grant_has_a_generation_of_its_own() {
    let mut world = World::default();
    let mut generations = Vec::new();
    for (consumer, epoch) in ORDERS {
        world.branch.here.set(consumer.is_none() && world.branch.kept.borrow().is_none());
        world.order(consumer, epoch);
        world.settle().unwrap();
        obeyed(&world, consumer, epoch);
        if consumer.is_some_and(|node| node != "a") {
            generations.push(world.branch.mark().generation.0);
        }
        let calls = world.owner.0.lock().unwrap().calls;
        assert_eq!(world.settle().unwrap().report, None, "there is nothing left to tell");
        assert_eq!(world.owner.0.lock().unwrap().calls, calls, "nor to do");
    }
    assert_eq!(generations, [1, 2, 3]);
}

#[test]
fn whichever_call_fails_before_or_after_its_effect_the_next_attempt_ends_as_ordered() {
    let mut failures = 0;
    for when in [When::Before, When::After] {
        for order in 0..ORDERS.len() {
            for at in 1.. {
                let mut world = World::default();
                for (consumer, epoch) in &ORDERS[..order] {
                    world.order(*consumer, *epoch);
                    world.settle().unwrap();
                }
                // Used at home by whom it was given to.
                world.branch.here.set(order > 0 && ORDERS[order - 1].0 == Some("a"));
                let (consumer, epoch) = ORDERS[order];
                world.order(consumer, epoch);
                let begun = world.owner.0.lock().unwrap().calls;
                world.owner.0.lock().unwrap().fail = Some((begun + at, when));
                let first = world.settle();
                if first.is_ok() {
                    break;
                }
                failures += 1;
                world.settle().unwrap();
                obeyed(&world, consumer, epoch);
            }
        }
    }
    assert!(failures > 10, "{failures}");
}

#[test]
fn a_mark_that_is_not_written_is_no_order_carried_out() {
    for when in [When::Before, When::After] {
        let mut world = World::default();
        world.order(Some("b"), 1);
        world.settle().unwrap();
        world.order(None, 2);
        world.branch.fail.set(Some(when));
        world.settle().unwrap_err();
        assert_eq!(world.reported.as_ref().unwrap().allowed.epoch, Epoch(1));
        world.settle().unwrap();
        obeyed(&world, None, 2);
    }
}

#[test]
fn what_this_node_uses_is_ended_before_another_may_have_it() {
    let mut world = World::default();
    world.branch.here.set(true);
    world.order(None, 1);
    world.settle().unwrap();
    assert!(!world.branch.here.get());
    world.order(Some("b"), 2);
    world.settle().unwrap();
    obeyed(&world, Some("b"), 2);
}

#[test]
fn after_a_reboot_the_mark_alone_tells_what_to_export_and_under_which_name() {
    for (durable, generation) in [(true, 1), (false, 2)] {
        let mut world = World::default();
        world.owner.0.lock().unwrap().durable = durable;
        world.order(Some("b"), 1);
        world.settle().unwrap();
        world.reboot();
        let wanted = world.wanted.take();
        let settled = world.settle().unwrap();
        assert_eq!(settled.open_to, ["b".parse::<NodeName>().unwrap()]);
        assert_eq!(world.owner.allowed(), [(generation, "nqn.b".to_owned())]);
        let calls = world.owner.0.lock().unwrap().calls;
        world.wanted = wanted;
        world.settle().unwrap();
        assert_eq!(world.owner.0.lock().unwrap().calls, calls, "the object says nothing new");
    }
}

#[test]
fn a_fenced_node_stays_fenced_through_a_reboot() {
    let mut world = World::default();
    world.order(Some("b"), 1);
    world.settle().unwrap();
    let old = world.wanted.clone();
    world.order(None, 2);
    world.settle().unwrap();
    world.reboot();
    // The object is read as it was before.
    world.wanted = old;
    world.settle().unwrap();
    assert_eq!(world.owner.allowed(), []);
}

#[test]
fn who_lost_the_branch_while_its_owner_was_off_is_heard_and_nobody_else() {
    // Whether the machine comes back to it, to another consumer, to none, or to its own use.
    for (consumer, heard) in [(Some("b"), false), (Some("c"), true), (None, true), (Some("a"), true)] {
        let mut world = World::default();
        world.order(Some("b"), 1);
        world.settle().unwrap();
        world.reboot();
        world.order(consumer, 2);
        world.settle().unwrap();
        obeyed(&world, consumer, 2);
        let expected = heard.then(|| ("nqn.b".to_owned(), 1));
        assert_eq!(
            world.owner.0.lock().unwrap().heard,
            expected.into_iter().collect::<Vec<_>>(),
            "{consumer:?}"
        );

        // Whoever loses it while the machine runs is fenced in its kernel, which knows it.
        let count = world.owner.0.lock().unwrap().heard.len();
        for (consumer, epoch) in [(Some("b"), 3), (Some("c"), 4), (None, 5)] {
            world.order(consumer, epoch);
            world.settle().unwrap();
        }
        assert_eq!(world.owner.0.lock().unwrap().heard.len(), count);
    }
}

#[test]
fn a_lost_mark_gives_every_right_anew_and_one_of_a_newer_program_is_left_alone() {
    let mut world = World::default();
    world.order(Some("b"), 1);
    world.settle().unwrap();
    *world.branch.kept.borrow_mut() = Some(Kept::Lost("{".to_owned()));
    world.settle().unwrap();
    obeyed(&world, Some("b"), 1);
    assert_eq!(world.branch.mark().generation, Generation(2));

    *world.branch.kept.borrow_mut() = Some(Kept::Newer("form 2".to_owned()));
    world.order(None, 2);
    world.settle().unwrap_err();
    assert_eq!(world.owner.allowed().len(), 1);
}

#[test]
fn what_is_half_made_or_there_twice_is_ended_and_made_anew() {
    for half in [true, false] {
        let mut world = World::default();
        world.order(Some("b"), 1);
        world.settle().unwrap();
        {
            let mut kernel = world.owner.0.lock().unwrap();
            match half {
                true => kernel.exports.get_mut(&1).unwrap().0 = false,
                false => drop(kernel.exports.insert(0, (true, Vec::new()))),
            }
        }
        world.settle().unwrap();
        obeyed(&world, Some("b"), 1);
        assert_eq!(world.owner.allowed(), [(1, "nqn.b".to_owned())]);
    }
}

#[test]
fn while_exports_cannot_be_seen_nobody_is_told_that_they_are_gone() {
    let unable = || TransportError::Unable { action: "export branches", reason: "no address".to_owned() };
    let mut world = World::default();
    world.order(Some("b"), 1);
    world.settle().unwrap();
    world.order(None, 2);
    world.unable = Some(unable());
    let error = world.settle().unwrap_err();
    assert!(matches!(error, AccessError::Unseen { .. }), "{error}");
    // In another boot nothing can stand of it.
    world.reboot();
    world.settle().unwrap();
    assert_eq!(world.reported.as_ref().unwrap().allowed.epoch, Epoch(2));
}

#[test]
fn a_node_that_cannot_export_serves_its_own_branches() {
    let mut world = World {
        unable: Some(TransportError::Unable { action: "x", reason: String::new() }),
        ..World::default()
    };
    assert_eq!(world.settle().unwrap().report, None, "never governed");
    world.order(Some("a"), 1);
    world.branch.here.set(true);
    world.settle().unwrap();
    assert!(world.branch.here.get());
    world.order(Some("b"), 3);
    let error = world.settle().unwrap_err();
    assert!(matches!(error, AccessError::Transport { .. }), "{error}");
}

#[test]
fn a_node_that_tells_nothing_of_itself_is_waited_for() {
    let mut world = World::default();
    world.order(Some("d"), 1);
    let settled = world.settle().unwrap();
    assert_eq!(settled.waits_for.as_ref().map(NodeName::as_str), Some("d"));
    assert_eq!(world.owner.allowed(), []);
    assert_eq!(world.reported.as_ref().unwrap().allowed, Access { consumer: None, epoch: Epoch(1) });
}

#[test]
fn a_branch_that_is_to_go_is_taken_from_everybody_whatever_the_order_says() {
    let mut world = World::default();
    world.order(Some("b"), 1);
    world.settle().unwrap();
    world.deleting = true;
    let settled = world.settle().unwrap();
    assert_eq!((world.owner.allowed(), settled.open_to, settled.waits_for), (Vec::new(), Vec::new(), None));
}

/// Until it is done; how often it failed.
fn insist(world: &mut World) -> u32 {
    let failed = world.settle().is_err();
    if failed {
        world.settle().unwrap();
    }
    u32::from(failed)
}

#[test]
fn a_shared_branch_is_let_to_those_who_are_named_whichever_call_fails_and_then_to_one_alone() {
    let sharing = |nodes: &[&str], epoch| {
        let consumers = nodes.iter().map(|node| node.parse().unwrap()).collect();
        // The last in the alphabet only reads.
        let readers = nodes.iter().filter(|node| **node == "c").map(|node| node.parse().unwrap()).collect();
        Some(Sharing { consumers, readers, epoch: Epoch(epoch) })
    };
    let orders: [&[&str]; 4] = [&["a", "b", "c"], &["c"], &["b", "c"], &[]];
    let mut failures = 0;
    for when in [When::Before, When::After] {
        for fails in 1..40 {
            let mut world = World::default();
            // Used at home before anybody else wanted it, and given to one alone before.
            world.branch.here.set(true);
            world.owner.0.lock().unwrap().fail = Some((fails, when));
            for (epoch, nodes) in (1..).zip(orders) {
                world.sharing = sharing(nodes, epoch);
                failures += insist(&mut world);
                let allowed: Vec<_> = world.owner.allowed().into_iter().map(|(_, name)| name).collect();
                let named = |list: &[&str]| -> Vec<String> {
                    let others = list.iter().filter(|node| **node != "a");
                    others.map(|node| format!("nqn.{node}")).collect()
                };
                let mut expected = named(nodes);
                expected.sort();
                let mut found = allowed.clone();
                found.sort();
                assert_eq!(found, expected);
                assert_eq!(world.branch.here.get(), nodes.contains(&"a"));
                let readers = world.owner.exports().unwrap().into_iter().flat_map(|export| export.readers);
                assert!(
                    readers.eq(nodes.contains(&"c").then(|| "nqn.c".to_owned())),
                    "whom it lets only read"
                );
                let report = world.shared.clone().unwrap();
                assert_eq!(report.epoch, Epoch(epoch));
                assert!(report.consumers.iter().map(|sharer| sharer.node.as_str()).eq(nodes.iter().copied()));
                let generation = world.branch.shared.borrow().as_ref().unwrap().generation;
                assert_eq!(generation, Generation(1), "whoever stays keeps what it has");
                if !nodes.is_empty() {
                    // A reboot, and no store to ask.
                    world.reboot();
                    world.branch.here.set(nodes.contains(&"a"));
                    let asked = world.sharing.take();
                    world.sharing = sharing(nodes, 0);
                    failures += insist(&mut world);
                    assert_eq!(world.owner.allowed().len(), expected.len());
                    world.sharing = asked;
                }
            }
            // From here on one node has it alone, under a name that was not yet.
            world.order(Some("c"), 1);
            failures += insist(&mut world);
            assert_eq!(world.owner.allowed(), [(2, "nqn.c".to_owned())]);
            assert_eq!(world.reported.as_ref().unwrap().allowed, world.branch.mark().access);
        }
    }
    assert!(failures > 10, "{failures}");
}

#[test]
fn who_is_to_leave_a_shared_branch_since_its_owner_was_off_is_heard() {
    let sharing = |nodes: &[&str], epoch| {
        let consumers = nodes.iter().map(|node| node.parse().unwrap()).collect();
        Some(Sharing { consumers, epoch: Epoch(epoch), ..Sharing::default() })
    };
    let mut world = World { sharing: sharing(&["b", "c"], 1), ..World::default() };
    world.settle().unwrap();
    world.reboot();
    world.sharing = sharing(&["c"], 2);
    world.settle().unwrap();
    assert_eq!(world.owner.0.lock().unwrap().heard, [("nqn.b".to_owned(), 1)]);
    // The kernel knows this one.
    world.sharing = sharing(&[], 3);
    world.settle().unwrap();
    assert_eq!(world.owner.0.lock().unwrap().heard.len(), 1);

    world.sharing = sharing(&["c"], 4);
    world.settle().unwrap();
    world.reboot();
    world.sharing = sharing(&[], 5);
    world.settle().unwrap();
    assert_eq!(world.owner.allowed(), []);
    assert_eq!(world.owner.0.lock().unwrap().heard[1..], [("nqn.c".to_owned(), 2)]);
}

#[test]
fn who_was_let_in_with_a_key_is_let_in_with_the_same_after_a_reboot_without_a_store() {
    let mut world = World::default();
    let first = crate::store::keys::generate();
    world.key = Some(first.clone());
    world.order(Some("b"), 1);
    world.settle().unwrap();
    world.reboot();
    (world.alone, world.wanted) = (true, None);
    world.settle().unwrap();
    let shown = first.clone().without_tls();
    assert_eq!(world.owner.0.lock().unwrap().keys, [Some(shown.clone()), Some(shown)]);

    (world.alone, world.key) = (false, None);
    world.order(None, 2);
    world.settle().unwrap();
    world.order(Some("b"), 3);
    world.settle().unwrap();
    assert_eq!(world.owner.0.lock().unwrap().keys.last(), Some(&None), "the store has none any more");
    world.reboot();
    world.alone = true;
    world.settle().unwrap();
    assert_eq!(world.owner.0.lock().unwrap().keys.last(), Some(&None));
}

#[test]
fn a_key_to_encrypt_with_is_for_branches_that_are_encrypted_also_after_a_reboot_without_a_store() {
    let mut world = World::default();
    let key = crate::store::keys::generate();
    world.branch.encrypted.set(true);
    world.key = Some(key.clone());
    world.order(Some("b"), 1);
    world.settle().unwrap();
    world.reboot();
    (world.alone, world.wanted) = (true, None);
    world.settle().unwrap();
    assert_eq!(world.owner.0.lock().unwrap().keys, [Some(key.clone()), Some(key.clone())]);

    // Without such a key it is opened to nobody, whoever forgot it.
    for key in [None, Some(key.without_tls())] {
        let mut world = World { key, ..World::default() };
        world.branch.encrypted.set(true);
        world.order(Some("b"), 1);
        let error = world.settle().unwrap_err().to_string();
        assert!(error.contains("encrypted"), "{error}");
        assert_eq!(world.owner.0.lock().unwrap().keys, []);
    }
}
