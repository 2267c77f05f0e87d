//! Plans are carried out on a model of the target that refuses what the kernel refuses (`drivers/nvme/target/configfs.c`), and
//! are interrupted after every single step.

use std::collections::BTreeSet;

use super::*;
use crate::platform::nvme::target::{HostEntry, Namespace, Subsystem};

#[derive(Clone, Debug, Default, PartialEq)]
struct Model(TargetView);

impl Model {
    /// Takes the step as the kernel would, or tells why it would not.
    fn take(&mut self, step: &Step) -> Result<(), String> {
        let parts: Vec<String> = step.path().iter().map(|p| p.to_string_lossy().into_owned()).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let view = &mut self.0;
        let linked = |view: &TargetView, nqn: &str| view.ports.values().any(|p| p.linked.contains(nqn));
        match (step, parts.as_slice()) {
            (Step::Make(_), ["subsystems", nqn]) => {
                view.subsystems.entry((*nqn).into()).or_default();
            }
            (Step::Make(_), ["subsystems", nqn, "namespaces", n]) => {
                let subsystem = view.subsystems.get_mut(*nqn).ok_or("ENOENT")?;
                subsystem.namespaces.entry(n.parse().unwrap()).or_default();
            }
            (Step::Make(_), ["hosts", nqn]) => {
                view.hosts
                    .entry((*nqn).into())
                    .or_insert(HostEntry { authenticates: true, ..Default::default() });
            }
            (Step::Make(_), ["ports", n]) => {
                view.ports.entry(n.parse().unwrap()).or_default();
            }
            (Step::Write(_, value), ["subsystems", nqn, name]) => {
                let subsystem = view.subsystems.get_mut(*nqn).ok_or("ENOENT")?;
                match *name {
                    "attr_allow_any_host" => subsystem.allow_any_host = value == "1",
                    "attr_serial" => subsystem.serial = value.clone(),
                    "attr_model" => subsystem.model = value.clone(),
                    _ => return Err("ENOENT".into()),
                }
            }
            (Step::Write(_, value), ["subsystems", nqn, "namespaces", n, name]) => {
                let subsystem = view.subsystems.get_mut(*nqn).ok_or("ENOENT")?;
                let namespace = subsystem.namespaces.get_mut(&n.parse().unwrap()).ok_or("ENOENT")?;
                if *name != "enable" && namespace.enabled {
                    return Err(format!("EBUSY: {name} of an enabled namespace"));
                }
                match *name {
                    "device_path" => namespace.path = value.clone(),
                    "device_uuid" => namespace.uuid = value.clone(),
                    "buffered_io" => namespace.buffered = value == "1",
                    "enable" if value == "1" && namespace.path.is_empty() => {
                        return Err("EINVAL: no device".into());
                    }
                    "enable" => namespace.enabled = value == "1",
                    _ => return Err("ENOENT".into()),
                }
            }
            (Step::Write(_, value), ["hosts", nqn, name]) => {
                let host = view.hosts.get_mut(*nqn).ok_or("ENOENT")?;
                match *name {
                    "dhchap_key" => host.key = value.clone(),
                    "dhchap_ctrl_key" => host.controller_key = value.clone(),
                    _ => return Err("ENOENT".into()),
                }
            }
            (Step::Write(_, value), ["ports", n, name]) => {
                let port = view.ports.get_mut(&n.parse().unwrap()).ok_or("ENOENT")?;
                if !port.linked.is_empty() {
                    return Err("EACCES: the port listens".into());
                }
                match *name {
                    "addr_trtype" => port.transport = value.clone(),
                    "addr_adrfam" => port.family = value.clone(),
                    "addr_traddr" => port.address = value.clone(),
                    "addr_trsvcid" => port.service = value.clone(),
                    "addr_tsas" if port.transport != "tcp" => return Err("EINVAL".into()),
                    "addr_tsas" => {}
                    "addr_treq" => port.encrypts = value == "required",
                    _ => return Err("ENOENT".into()),
                }
            }
            (Step::Link(_, to), ["ports", n, "subsystems", nqn]) => {
                let subsystem = view.subsystems.get(*nqn).ok_or("ENOENT")?;
                assert_eq!(to, &subsystem_at(nqn));
                // Not the kernel's rule but ours: nothing can be reached before it is whole and closed to strangers.
                let whole =
                    subsystem.namespaces.get(&1).is_some_and(|n| n.enabled) && !subsystem.allow_any_host;
                assert!(whole, "{nqn} is reachable before it is whole");
                let number: u16 = n.parse().unwrap();
                let listens = view.ports.get(&number).and_then(Port::listens).ok_or("EINVAL: no address")?;
                let other = |(m, p): (&u16, &Port)| {
                    *m != number && !p.linked.is_empty() && p.listens() == Some(listens)
                };
                if view.ports.iter().any(other) {
                    return Err("EADDRINUSE".into());
                }
                view.ports.get_mut(&number).unwrap().linked.insert((*nqn).into());
            }
            (Step::Link(_, to), ["subsystems", nqn, "allowed_hosts", host]) => {
                assert_eq!(to, &host_at(host));
                view.hosts.get(*host).ok_or("ENOENT: no such host")?;
                view.subsystems.get_mut(*nqn).ok_or("ENOENT")?.allowed.insert((*host).into());
            }
            (Step::Unlink(_), ["ports", n, "subsystems", nqn]) => {
                if let Some(port) = view.ports.get_mut(&n.parse().unwrap()) {
                    port.linked.remove(*nqn);
                }
            }
            (Step::Unlink(_), ["subsystems", nqn, "allowed_hosts", host]) => {
                let reachable = linked(view, nqn);
                let subsystem = view.subsystems.get_mut(*nqn).ok_or("ENOENT")?;
                assert!(
                    !reachable && subsystem.namespaces.is_empty(),
                    "{host} is taken off the list but not fenced"
                );
                subsystem.allowed.remove(*host);
            }
            (Step::Remove(_), ["subsystems", nqn]) => {
                if linked(view, nqn) || view.subsystems.get(*nqn).is_some_and(|s| !s.allowed.is_empty()) {
                    return Err("EBUSY: linked".into());
                }
                view.subsystems.remove(*nqn);
            }
            (Step::Remove(_), ["subsystems", nqn, "namespaces", n]) => {
                view.subsystems.get_mut(*nqn).ok_or("ENOENT")?.namespaces.remove(&n.parse().unwrap());
            }
            (Step::Remove(_), ["hosts", host]) => {
                if view.subsystems.values().any(|s| s.allowed.contains(*host)) {
                    return Err("EBUSY: allowed somewhere".into());
                }
                view.hosts.remove(*host);
            }
            (Step::Remove(_), ["ports", n]) => {
                let number: u16 = n.parse().unwrap();
                if view.ports.get(&number).is_some_and(|p| !p.linked.is_empty()) {
                    return Err("EBUSY: it listens".into());
                }
                view.ports.remove(&number);
            }
            (step, _) => return Err(format!("no such place: {step:?}")),
        }
        Ok(())
    }

    fn take_all(&mut self, steps: &[Step]) {
        for step in steps {
            self.take(step).unwrap_or_else(|error| panic!("{step:?}: {error}\nafter {:#?}", self.0));
        }
    }

    /// What the owner does to export: end what is not sound, then build.
    fn export(&mut self, wanted: &Wanted, stop_after: Option<usize>) -> bool {
        let mut left = stop_after.unwrap_or(usize::MAX);
        let unsound = self.0.subsystems.contains_key(&wanted.nqn) && !sound(&self.0, wanted);
        let ending = if unsound { end(&self.0, &wanted.nqn) } else { Vec::new() };
        for step in ending {
            if left == 0 {
                return false;
            }
            left -= 1;
            self.take_all(&[step]);
        }
        for step in build(&self.0, wanted).expect("a number for the listener") {
            if left == 0 {
                return false;
            }
            left -= 1;
            self.take_all(&[step]);
        }
        true
    }
}

fn wanted(nqn: &str) -> Wanted {
    Wanted {
        nqn: nqn.into(),
        serial: format!("serial of {nqn}"),
        model: "model",
        path: format!("/pool/{nqn}/image"),
        uuid: format!("uuid of {nqn}"),
        listeners: vec!["10.0.0.1:4420".parse().unwrap(), "[fd00::1]:4420".parse().unwrap()],
        encrypted: false,
    }
}

fn peer(name: &str) -> String {
    format!("nqn.2026-01.io.union:host:{name}")
}

fn keys(key: &str) -> Keys {
    Keys { peer: key.into(), owner: format!("owner's {key}") }
}

fn exported(names: &[&str]) -> Model {
    let mut model = Model::default();
    for name in names {
        model.export(&wanted(name), None);
    }
    model
}

#[test]
fn an_export_is_made_once_and_then_left_alone() {
    let model = exported(&["a"]);
    assert!(sound(&model.0, &wanted("a")));
    assert_eq!(model.0.ports.values().filter(|p| p.linked.contains("a")).count(), 2);
    assert_eq!(build(&model.0, &wanted("a")), Some(Vec::new()));
}

#[test]
fn an_export_that_was_interrupted_after_any_step_is_made_whole() {
    let whole = exported(&["a"]);
    let mut stopped_at = 0;
    loop {
        let mut model = Model::default();
        if model.export(&wanted("a"), Some(stopped_at)) {
            break;
        }
        model.export(&wanted("a"), None);
        assert_eq!(model, whole, "stopped after {stopped_at} steps");
        stopped_at += 1;
    }
    assert!(stopped_at > 15, "all steps were tried");
}

#[test]
fn an_end_that_was_interrupted_after_any_step_can_be_finished_or_turned_into_an_export() {
    let mut open = exported(&["a", "b"]);
    open.take_all(&admit(&open.0, "a", &peer("one"), None).unwrap());
    let steps = end(&open.0, "a");
    for stopped_at in 0..=steps.len() {
        let mut model = open.clone();
        model.take_all(&steps[..stopped_at]);
        let mut ended = model.clone();
        ended.take_all(&end(&ended.0, "a"));
        // What is left behind by an end that had got past the subsystem goes with the next one that ends.
        ended.take_all(&end(&ended.0, "b"));
        assert_eq!(ended.0, TargetView::default(), "stopped after {stopped_at}");

        model.export(&wanted("a"), None);
        let subsystem = &model.0.subsystems["a"];
        assert!(sound(&model.0, &wanted("a")), "stopped after {stopped_at}");
        let was_fenced = stopped_at > steps.iter().position(|s| matches!(s, Step::Remove(_))).unwrap();
        assert!(!was_fenced || subsystem.allowed.is_empty(), "a fence that got past the namespace holds");
    }
}

#[test]
fn ending_one_export_leaves_the_others_and_what_is_not_ours() {
    let mut model = exported(&["a", "b"]);
    model.take_all(&admit(&model.0, "a", &peer("one"), None).unwrap());
    model.take_all(&admit(&model.0, "b", &peer("one"), None).unwrap());
    model.0.hosts.insert("nqn.foreign".into(), HostEntry::default());
    model.0.ports.insert(1, Port::default());
    let mut without = model.clone();
    without.take_all(&end(&without.0, "a"));
    assert_eq!(without.0.subsystems.keys().collect::<Vec<_>>(), ["b"]);
    assert_eq!(without.0.subsystems["b"], model.0.subsystems["b"]);
    assert!(without.0.hosts.contains_key(&peer("one")), "it is allowed elsewhere");
    without.take_all(&end(&without.0, "b"));
    assert_eq!(without.0.hosts.keys().collect::<Vec<_>>(), ["nqn.foreign"]);
    assert_eq!(without.0.ports.keys().collect::<Vec<_>>(), [&1]);
}

#[test]
fn a_tree_of_another_image_or_open_to_everybody_is_not_taken_for_the_export() {
    let good = exported(&["a"]);
    type Change = fn(&mut Subsystem);
    let changes: [(&str, Change); 6] = [
        ("another image", |s| s.namespaces.get_mut(&1).unwrap().path = "/other".into()),
        ("another uuid", |s| s.namespaces.get_mut(&1).unwrap().uuid = "other".into()),
        ("the page cache", |s| s.namespaces.get_mut(&1).unwrap().buffered = true),
        ("not enabled", |s| s.namespaces.get_mut(&1).unwrap().enabled = false),
        ("a second namespace", |s| drop(s.namespaces.insert(2, Namespace::default()))),
        ("open to all", |s| s.allow_any_host = true),
    ];
    for (what, change) in changes {
        let mut model = good.clone();
        change(model.0.subsystems.get_mut("a").unwrap());
        assert!(!sound(&model.0, &wanted("a")), "{what}");
        model.export(&wanted("a"), None);
        assert_eq!(model, good, "{what}");
    }
}

#[test]
fn one_peer_is_let_in_and_no_second_one() {
    let mut model = exported(&["a"]);
    assert_eq!(admit(&model.0, "b", &peer("one"), None), Err(Refusal::NotExported));
    model.take_all(&admit(&model.0, "a", &peer("one"), None).unwrap());
    assert_eq!(admit(&model.0, "a", &peer("one"), None), Ok(Vec::new()), "twice is once");
    assert_eq!(admit(&model.0, "a", &peer("two"), None), Err(Refusal::Held(peer("one"))));
    model.take_all(&end(&model.0, "a"));
    model.export(&wanted("a"), None);
    model.take_all(&admit(&model.0, "a", &peer("two"), None).unwrap());
    assert_eq!(model.0.subsystems["a"].allowed, BTreeSet::from([peer("two")]));
}

#[test]
fn nobody_is_let_in_while_an_export_is_half_made() {
    let mut model = Model::default();
    model.export(&wanted("a"), Some(6));
    assert_eq!(admit(&model.0, "a", &peer("one"), None), Err(Refusal::NotExported));
}

#[test]
fn a_key_is_there_before_its_peer_is_let_in() {
    let model = exported(&["a"]);
    let steps = admit(&model.0, "a", &peer("one"), Some(&keys("k"))).unwrap();
    for stopped_at in 0..=steps.len() {
        let mut model = model.clone();
        model.take_all(&steps[..stopped_at]);
        let inside = !model.0.subsystems["a"].allowed.is_empty();
        assert!(!inside || model.0.hosts[&peer("one")].key == "k", "let in without its key");
        model.take_all(&admit(&model.0, "a", &peer("one"), Some(&keys("k"))).unwrap());
        let host = &model.0.hosts[&peer("one")];
        assert_eq!((host.key.as_str(), host.controller_key.as_str()), ("k", "owner's k"));
    }
}

#[test]
fn keys_are_changed_and_only_given_up_where_nothing_else_needs_them() {
    let mut model = exported(&["a", "b"]);
    model.take_all(&admit(&model.0, "a", &peer("one"), Some(&keys("k"))).unwrap());
    model.take_all(&admit(&model.0, "b", &peer("one"), Some(&keys("new"))).unwrap());
    assert_eq!(model.0.hosts[&peer("one")].key, "new");
    let mut apart = exported(&["a", "b"]);
    apart.take_all(&admit(&apart.0, "a", &peer("one"), Some(&keys("k"))).unwrap());
    assert_eq!(admit(&apart.0, "b", &peer("one"), None), Err(Refusal::KeyedElsewhere));
    // A host that nothing is open to, with an old key: left by an interrupted end.
    let mut left = exported(&["a"]);
    left.0
        .hosts
        .insert(peer("one"), HostEntry { authenticates: true, key: "old".into(), ..Default::default() });
    left.take_all(&admit(&left.0, "a", &peer("one"), None).unwrap());
    assert!(left.0.hosts[&peer("one")].key.is_empty());
}

#[test]
fn listeners_are_shared_kept_apart_from_those_of_others_and_set_anew_when_idle() {
    let mut model = exported(&["a", "b"]);
    assert_eq!(model.0.ports.len(), 2, "one for each address");
    // A listener that lost its last user in the middle of being ended, and addresses that changed.
    model.take_all(&[Step::Unlink(port_at(FIRST_PORT).join("subsystems/a"))]);
    model.take_all(&[Step::Unlink(port_at(FIRST_PORT).join("subsystems/b"))]);
    let mut moved = wanted("c");
    moved.listeners = vec!["10.0.0.2:4421".parse().unwrap()];
    model.export(&moved, None);
    assert_eq!(model.0.ports[&FIRST_PORT].listens(), Some(moved.listeners[0]));
    model.0.ports.insert(1, Port::default());
    model.export(&wanted("a"), None);
    assert!(model.0.ports[&1].linked.is_empty(), "not ours");
    assert_eq!(model.0.ports.values().filter(|p| p.linked.contains("a")).count(), 2);
}

#[test]
fn what_is_encrypted_is_at_listeners_that_encrypt_and_nothing_else_is() {
    let secret = |nqn: &str| Wanted {
        encrypted: true,
        serial: format!("encrypted serial of {nqn}"),
        listeners: vec!["10.0.0.1:4421".parse().unwrap()],
        ..wanted(nqn)
    };
    let mut model = exported(&["a"]);
    model.export(&secret("b"), None);
    model.export(&secret("c"), None);
    let at = |model: &Model, nqn: &str| -> Vec<bool> {
        model.0.ports.values().filter(|p| p.linked.contains(nqn)).map(|p| p.encrypts).collect()
    };
    assert_eq!((at(&model, "a"), at(&model, "b")), (vec![false; 2], vec![true]));
    assert_eq!(model.0.ports.len(), 3, "b and c share one");
    // One is not taken for the other, whichever it was.
    for changed in [secret("a"), wanted("b")] {
        assert!(!sound(&model.0, &changed));
        model.export(&changed, None);
        assert!(
            sound(&model.0, &changed) && at(&model, &changed.nqn).iter().all(|e| *e == changed.encrypted)
        );
    }
    // Somebody opened another way to it.
    let plain = *model.0.ports.iter().find(|(_, p)| !p.encrypts).unwrap().0;
    model.0.ports.get_mut(&plain).unwrap().linked.insert("c".to_owned());
    assert!(!sound(&model.0, &secret("c")));
    model.export(&secret("c"), None);
    assert_eq!(at(&model, "c"), [true]);
}

#[test]
fn a_listener_that_encrypted_and_is_idle_is_made_anew_for_others() {
    let mut model = Model::default();
    let idle = Port { encrypts: true, transport: "tcp".to_owned(), ..Port::default() };
    model.0.ports.insert(FIRST_PORT, idle);
    model.export(&wanted("a"), None);
    assert!(sound(&model.0, &wanted("a")) && !model.0.ports[&FIRST_PORT].encrypts);
}

#[test]
fn there_are_not_more_listeners_than_numbers_for_them() {
    let mut model = Model::default();
    let mut many = wanted("a");
    many.listeners = (0..PORTS).map(|n| SocketAddr::from(([10, 0, 0, 1], 5000 + n))).collect();
    model.export(&many, None);
    assert_eq!(model.0.ports.len(), usize::from(PORTS));
    assert_eq!(build(&model.0, &wanted("b")), None);
}

#[test]
fn what_is_withdrawn_is_reached_by_nobody_and_is_whole_again_when_it_is_built() {
    let mut open = exported(&["a", "b"]);
    open.take_all(&admit(&open.0, "a", &peer("one"), None).unwrap());
    let foreign = Port { linked: ["nqn.foreign".to_owned()].into(), ..Port::default() };
    open.0.ports.insert(1, foreign.clone());
    let mut withdrawn = open.clone();
    withdrawn.take_all(&withdraw(&withdrawn.0));
    assert_eq!(withdrawn.0.subsystems, open.0.subsystems, "exports and rights stay");
    assert_eq!(withdrawn.0.ports.remove(&1), Some(foreign), "a listener of somebody else stays");
    assert!(withdrawn.0.ports.values().all(|port| port.linked.is_empty()));
    withdrawn.export(&wanted("a"), None);
    withdrawn.export(&wanted("b"), None);
    open.0.ports.remove(&1);
    assert_eq!(withdrawn, open);
}
