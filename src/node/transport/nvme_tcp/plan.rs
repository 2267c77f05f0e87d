//! Which steps bring the target's tree from what it is to what it should be. Pure: a tree in, steps out.
//!
//! Steps that were interrupted anywhere are followed by a new plan from what is there then.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use super::{NAMESPACE, names};
use crate::platform::nvme::target::{Port, Step, TargetView};

/// Listeners of this driver have numbers from here: those of other users of the target begin at 1.
const FIRST_PORT: u16 = 21_700;
/// How many there may be; one for each address of the storage network.
const PORTS: u16 = 64;

/// One after them, that nothing is ever linked to.
pub(super) const TRIAL_PORT: u16 = FIRST_PORT + PORTS;

/// An export as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) nqn: String,
    pub(super) serial: String,
    pub(super) model: &'static str,
    /// The image.
    pub(super) path: String,
    pub(super) uuid: String,
    pub(super) listeners: Vec<SocketAddr>,
    /// By listeners that take encrypted connections only.
    pub(super) encrypted: bool,
}

/// What a peer proves, and what the owner proves to it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) peer: String,
    pub(super) owner: String,
}

/// Why a peer is not let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Nothing whole is exported under that name.
    NotExported,
    /// This one has it.
    Held(String),
    /// The peer must not prove anything here, but must for other branches.
    KeyedElsewhere,
}

/// The subsystem has what was wanted, takes requests wherever it is linked, and is linked to listeners of the right kind only.
pub(super) fn sound(view: &TargetView, wanted: &Wanted) -> bool {
    let Some(subsystem) = view.subsystems.get(&wanted.nqn) else { return false };
    let mut linked = view.ports.values().filter(|port| port.linked.contains(&wanted.nqn));
    let only = subsystem.namespaces.len() == 1;
    let namespace = subsystem.namespaces.get(&NAMESPACE);
    !subsystem.allow_any_host
        && subsystem.serial == wanted.serial
        && linked.all(|port| port.encrypts == wanted.encrypted)
        && only
        && namespace
            .is_some_and(|n| n.enabled && !n.buffered && n.path == wanted.path && n.uuid == wanted.uuid)
}

/// Makes an export that does not exist, or links a sound one to the listeners that it lacks. `None` where there are no numbers
/// for listeners left.
pub(super) fn build(view: &TargetView, wanted: &Wanted) -> Option<Vec<Step>> {
    let subsystem = subsystem_at(&wanted.nqn);
    let mut steps = Vec::new();
    if !view.subsystems.contains_key(&wanted.nqn) {
        let namespace = subsystem.join("namespaces").join(NAMESPACE.to_string());
        let write = |at: &Path, name: &str, value: &str| Step::Write(at.join(name), value.to_owned());
        steps.extend([
            Step::Make(subsystem.clone()),
            write(&subsystem, "attr_allow_any_host", "0"),
            write(&subsystem, "attr_serial", &wanted.serial),
            write(&subsystem, "attr_model", wanted.model),
            Step::Make(namespace.clone()),
            write(&namespace, "device_path", &wanted.path),
            write(&namespace, "device_uuid", &wanted.uuid),
            write(&namespace, "buffered_io", "0"),
            write(&namespace, "enable", "1"),
        ]);
    }
    let mut taken = Vec::new();
    for listener in &wanted.listeners {
        let (number, mut prepare) = port(view, *listener, wanted.encrypted, &taken)?;
        taken.push(number);
        steps.append(&mut prepare);
        let linked = view.ports.get(&number).is_some_and(|p| p.linked.contains(&wanted.nqn));
        if !linked {
            steps.push(Step::Link(port_at(number).join("subsystems").join(&wanted.nqn), subsystem.clone()));
        }
    }
    Some(steps)
}

/// The number of the listener at this address, and the steps that make it.
fn port(view: &TargetView, listener: SocketAddr, encrypted: bool, taken: &[u16]) -> Option<(u16, Vec<Step>)> {
    let ours = FIRST_PORT..FIRST_PORT + PORTS;
    let free = |n: &u16| !taken.contains(n);
    let there =
        |n: &u16| view.ports.get(n).is_some_and(|p| p.listens() == Some(listener) && p.encrypts == encrypted);
    if let Some(number) = ours.clone().filter(free).find(there) {
        return Some((number, Vec::new()));
    }
    // One that listens for nobody can be set to another address.
    let idle = |n: &u16| view.ports.get(n).is_none_or(|p| p.linked.is_empty());
    let number = ours.filter(free).find(idle)?;
    let at = port_at(number);
    let family = if listener.is_ipv4() { "ipv4" } else { "ipv6" };
    let address = listener.ip().to_string();
    let service = listener.port().to_string();
    let write = |name: &str, value: &str| Step::Write(at.join(name), value.to_owned());
    let mut steps = Vec::new();
    // One that encrypted is made anew: kernels without TLS have nothing to take that back with.
    if view.ports.get(&number).is_some_and(|p| p.encrypts) {
        steps.push(Step::Remove(at.clone()));
    }
    steps.extend([
        Step::Make(at.clone()),
        write("addr_trtype", "tcp"),
        write("addr_adrfam", family),
        write("addr_traddr", &address),
        write("addr_trsvcid", &service),
    ]);
    if encrypted {
        steps.extend([write("addr_tsas", "tls1.3"), write("addr_treq", "required")]);
    }
    Some((number, steps))
}

/// Ends whatever there is under that name: no new connections and an end to the living ones, then no requests under way, and
/// only then the list of who was allowed.
pub(super) fn end(view: &TargetView, nqn: &str) -> Vec<Step> {
    let Some(subsystem) = view.subsystems.get(nqn) else { return Vec::new() };
    let at = subsystem_at(nqn);
    let mut steps = Vec::new();
    let linked = || view.ports.iter().filter(|(_, p)| p.linked.contains(nqn));
    for (number, _) in linked() {
        steps.push(Step::Unlink(port_at(*number).join("subsystems").join(nqn)));
    }
    for (number, namespace) in &subsystem.namespaces {
        let at = at.join("namespaces").join(number.to_string());
        if namespace.enabled {
            steps.push(Step::Write(at.join("enable"), "0".to_owned()));
        }
        steps.push(Step::Remove(at));
    }
    for host in &subsystem.allowed {
        steps.push(Step::Unlink(at.join("allowed_hosts").join(host)));
    }
    steps.push(Step::Remove(at));
    steps.extend(idle_hosts(view, nqn).map(|host| Step::Remove(host_at(host))));
    let only_here = |p: &Port| p.linked.iter().all(|other| other == nqn);
    for (number, port) in view.ports.iter().filter(|(n, _)| (FIRST_PORT..FIRST_PORT + PORTS).contains(n)) {
        if only_here(port) {
            steps.push(Step::Remove(port_at(*number)));
        }
    }
    steps
}

/// Has no listener of this driver listen any more, and ends the connections there. Exports stay.
pub(super) fn withdraw(view: &TargetView) -> Vec<Step> {
    let ours = view.ports.iter().filter(|(number, _)| (FIRST_PORT..FIRST_PORT + PORTS).contains(number));
    let links = ours.flat_map(|(number, port)| {
        port.linked.iter().map(|nqn| port_at(*number).join("subsystems").join(nqn))
    });
    links.map(Step::Unlink).collect()
}

/// Nodes of this driver that are allowed nowhere but at `except`: their keys need not stay.
fn idle_hosts<'a>(view: &'a TargetView, except: &'a str) -> impl Iterator<Item = &'a str> {
    let used = move |host: &str| view.subsystems.iter().any(|(n, s)| n != except && s.allowed.contains(host));
    view.hosts.keys().map(String::as_str).filter(move |host| names::is_host(host) && !used(host))
}

/// Lets one peer in.
pub(super) fn admit(
    view: &TargetView,
    nqn: &str,
    peer: &str,
    keys: Option<&Keys>,
) -> Result<Vec<Step>, Refusal> {
    let subsystem = view.subsystems.get(nqn).ok_or(Refusal::NotExported)?;
    if !subsystem.namespaces.get(&NAMESPACE).is_some_and(|n| n.enabled) {
        return Err(Refusal::NotExported);
    }
    if let Some(holder) = subsystem.allowed.iter().find(|h| *h != peer) {
        return Err(Refusal::Held(holder.clone()));
    }
    let at = host_at(peer);
    let known = view.hosts.get(peer);
    let mut steps = Vec::new();
    match (known, keys) {
        (None, _) => steps.push(Step::Make(at.clone())),
        // A key cannot be taken back, only changed: the host is made anew.
        (Some(host), None) if !host.key.is_empty() => {
            if view.subsystems.values().any(|s| s.allowed.contains(peer)) {
                return Err(Refusal::KeyedElsewhere);
            }
            steps.extend([Step::Remove(at.clone()), Step::Make(at.clone())]);
        }
        (Some(_), _) => {}
    }
    if let Some(keys) = keys {
        if known.is_none_or(|h| h.key != keys.peer) {
            steps.push(Step::Write(at.join("dhchap_key"), keys.peer.clone()));
        }
        if known.is_none_or(|h| h.controller_key != keys.owner) {
            steps.push(Step::Write(at.join("dhchap_ctrl_key"), keys.owner.clone()));
        }
    }
    if !subsystem.allowed.contains(peer) {
        steps.push(Step::Link(subsystem_at(nqn).join("allowed_hosts").join(peer), at));
    }
    Ok(steps)
}

fn subsystem_at(nqn: &str) -> PathBuf {
    Path::new("subsystems").join(nqn)
}

fn host_at(nqn: &str) -> PathBuf {
    Path::new("hosts").join(nqn)
}

fn port_at(number: u16) -> PathBuf {
    Path::new("ports").join(number.to_string())
}

#[cfg(test)]
mod tests;
