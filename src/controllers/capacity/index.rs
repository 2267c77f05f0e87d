//! The picture: classes, the room of nodes, what is to be published of them, and what is.

//!
//! A volume may take pools of many nodes, so a change of one node concerns all that reach it. That is computed in two steps:
//! what nodes that attach alike get from others (an [`Offer`] for each class, made anew by [`Index::refresh_offers`]), and
//! what a node's own pools change of it. A node's own change is seen in its own figures at once, in those of others with the
//! next offers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::decide::{Step, decide};
use super::object::{Figures, Found, name};
use crate::controllers::class::Class;
use crate::controllers::splitter::{NodeRoom, is_silent};
use crate::domain::policy::{Authentication, Encryption, Policy};
use crate::domain::pool::PoolView;
use crate::domain::reach::{Attaches, Network, NodeReach, Transport};
use crate::domain::split::{Offer, Reach, Request, Sharing, capacity_within};
use crate::domain::volume::VolumeMode;
use crate::domain::{Bytes, NodeName};

/// The longest value of a label (<https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/>): the kubelet
/// can give a node with a longer name no label for topology, and no selector names it.
const MAX_LABEL: usize = 63;

/// What shall be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) class: Arc<str>,
    pub(super) node: NodeName,
    pub(super) figures: Figures,
}

/// A class whose parameters are right.
#[derive(Debug)]
struct Usable {
    policy: Policy,
    /// Nodes that it allows; none: all.
    nodes: Vec<NodeName>,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    /// Each with what it means; nothing where that is wrong.
    classes: BTreeMap<Arc<str>, (Class, Option<Usable>)>,
    nodes: BTreeMap<NodeName, NodeRoom>,
    /// What the nodes can carry between each other, for classes of each of the [`demands`].
    networks: [Network; 3],
    /// What nodes that attach alike get from others, by class.
    offers: HashMap<(Arc<str>, Attaches), Offer>,
    /// A node that serves others is another than when the offers were made.
    stale: bool,
    /// By the name of the object, as the next.
    wanted: HashMap<String, Wanted>,
    found: HashMap<String, Found>,
}

impl Index {
    /// What to do about the object of that name.
    pub(super) fn step(&self, name: &str) -> Step {
        decide(self.wanted.get(name).map(|wanted| wanted.figures), self.found.get(name))
    }

    pub(super) fn wanted(&self, name: &str) -> Option<&Wanted> {
        self.wanted.get(name)
    }

    pub(super) fn found(&self, name: &str) -> Option<&Found> {
        self.found.get(name)
    }

    pub(super) fn class_names(&self) -> impl Iterator<Item = &str> {
        self.classes.keys().map(|name| &**name)
    }

    /// All names under which something is wanted or was found.
    pub(super) fn names(&self) -> HashSet<String> {
        self.wanted.keys().chain(self.found.keys()).cloned().collect()
    }

    pub(super) fn found_names(&self) -> impl Iterator<Item = &String> {
        self.found.keys()
    }

    /// Takes a class; the objects that it concerns are returned.
    pub(super) fn put_class(&mut self, class: Class, now: Timestamp) -> Vec<String> {
        if self.classes.get(class.name.as_str()).is_some_and(|(known, _)| *known == class) {
            return Vec::new();
        }
        let read = class.policy().and_then(|(policy, _)| Ok(Usable { policy, nodes: class.nodes()? }));
        if let Err(reason) = &read {
            tracing::warn!(class = class.name, reason, "no capacity is published for this class");
        }
        let name: Arc<str> = class.name.as_str().into();
        self.offers.retain(|(class, _), _| *class != name);
        self.classes.insert(name.clone(), (class, read.ok()));
        let nodes: Vec<NodeName> = self.nodes.keys().cloned().collect();
        nodes.iter().map(|node| self.refresh(&name, node, now)).collect()
    }

    /// A class is gone; the objects that this concerns are returned.
    pub(super) fn remove_class(&mut self, class: &str, now: Timestamp) -> Vec<String> {
        let Some((name, _)) = self.classes.remove_entry(class) else { return Vec::new() };
        self.offers.retain(|(class, _), _| *class != name);
        let nodes: Vec<NodeName> = self.nodes.keys().cloned().collect();
        nodes.iter().map(|node| self.refresh(&name, node, now)).collect()
    }

    /// Takes the room of a node, or that it is gone; the objects that this concerns are returned.
    pub(super) fn put_node(
        &mut self,
        node: &NodeName,
        room: Option<NodeRoom>,
        now: Timestamp,
    ) -> Vec<String> {
        match room.as_ref().and_then(|room| room.reach.clone()) {
            Some(reach) => {
                for (network, policy) in self.networks.iter_mut().zip(demands()) {
                    network.put(reach.under(&policy).into_owned());
                }
            }
            None => self.networks.iter_mut().for_each(|network| network.remove(node)),
        }
        let serves = |room: &Option<NodeRoom>| room.as_ref().is_some_and(serves_others);
        let after = serves(&room);
        let before = match room {
            Some(room) => self.nodes.insert(node.clone(), room),
            None => self.nodes.remove(node),
        };
        self.stale |= after || serves(&before);
        if before.is_none() && node.as_str().len() > MAX_LABEL {
            tracing::warn!(
                node = node.as_str(),
                "no capacity is published for this node: its name is longer than a label's value, so no topology names it"
            );
        }
        self.refresh_node(node, now)
    }

    /// Looks at a node again, because time went by; the objects that this concerns are returned.
    pub(super) fn refresh_node(&mut self, node: &NodeName, now: Timestamp) -> Vec<String> {
        self.stale |=
            self.nodes.get(node).is_some_and(|room| serves_others(room) && is_silent(room.heartbeat, now));
        let classes: Vec<Arc<str>> = self.classes.keys().cloned().collect();
        classes.iter().map(|class| self.refresh(class, node, now)).collect()
    }

    /// Whether what nodes get from others may be another than what was computed.
    pub(super) const fn is_stale(&self) -> bool {
        self.stale
    }

    /// Computes anew what nodes get from others; the objects that this concerns are returned.
    pub(super) fn refresh_offers(&mut self, now: Timestamp) -> Vec<String> {
        self.stale = false;
        let policies = demands();
        let kinds: HashSet<Attaches> = (self.nodes.keys())
            .flat_map(|node| policies.each_ref().map(|policy| self.attaches(node, policy)))
            .collect();
        self.offers.retain(|(_, kind), _| kinds.contains(kind));
        let mut changed = HashSet::new();
        let known: Vec<(Arc<str>, Attaches)> = self.offers.keys().cloned().collect();
        for (class, kind) in known {
            let Some(offer) = self.offer(&class, kind, now) else { continue };
            let key = (class, kind);
            if self.offers.get(&key) != Some(&offer) {
                self.offers.insert(key.clone(), offer);
                changed.insert(key);
            }
        }
        let concerned = |node: &NodeName| {
            let usable =
                self.classes.iter().filter_map(|(class, (_, usable))| Some((class, usable.as_ref()?)));
            let classes = usable.filter(|(class, usable)| {
                changed.contains(&((*class).clone(), self.attaches(node, &usable.policy)))
            });
            classes.map(|(class, _)| (class.clone(), node.clone())).collect::<Vec<_>>()
        };
        let concerned: Vec<_> = self.nodes.keys().flat_map(concerned).collect();
        concerned.iter().map(|(class, node)| self.refresh(class, node, now)).collect()
    }

    /// What nodes that attach so get from others, as it is now.
    fn offer(&self, class: &str, attaches: Attaches, now: Timestamp) -> Option<Offer> {
        let policy = &self.classes.get(class)?.1.as_ref()?.policy;
        let pools = self
            .nodes
            .values()
            .filter(|room| serves_others(room) && !is_silent(room.heartbeat, now))
            .flat_map(|room| &room.pools);
        Offer::counts(attaches, policy)
            .then(|| Offer::new(attaches, VolumeMode::Filesystem, policy, pools, self.network(policy)))
    }

    /// What the nodes can carry between each other for such a class.
    fn network(&self, policy: &Policy) -> &Network {
        let [any, authenticated, encrypted] = &self.networks;
        if policy.requires_encryption() {
            encrypted
        } else if policy.requires_authentication() {
            authenticated
        } else {
            any
        }
    }

    /// By what a node can attach branches of others for such a class.
    fn attaches(&self, node: &NodeName, policy: &Policy) -> Attaches {
        self.network(policy).node(node).map(NodeReach::attaches).unwrap_or_default()
    }

    /// When the node published last.
    pub(super) fn heartbeat(&self, node: &NodeName) -> Option<Timestamp> {
        self.nodes.get(node)?.heartbeat
    }

    /// Takes what was told of an object; `false` where that is older than what is known.
    pub(super) fn put_found(&mut self, name: &str, found: Found) -> bool {
        if let (Found::Own(new), Some(Found::Own(known))) = (&found, self.found.get(name))
            && new.uid == known.uid
            && new.version < known.version
        {
            return false;
        }
        self.found.insert(name.to_owned(), found);
        true
    }

    /// An object is gone.
    pub(super) fn remove_found(&mut self, name: &str) {
        self.found.remove(name);
    }

    /// Computes what is wanted for a class on a node; the object's name is returned.
    fn refresh(&mut self, class: &Arc<str>, node: &NodeName, now: Timestamp) -> String {
        let name = name(class, node);
        match self.figures(class, node, now) {
            Some(figures) => {
                let wanted = Wanted { class: class.clone(), node: node.clone(), figures };
                self.wanted.insert(name.clone(), wanted);
            }
            None => {
                self.wanted.remove(&name);
            }
        }
        name
    }

    fn figures(&mut self, class: &Arc<str>, node: &NodeName, now: Timestamp) -> Option<Figures> {
        let usable = self.classes.get(class)?.1.as_ref()?;
        let room = self.nodes.get(node)?;
        if node.as_str().len() > MAX_LABEL || !(usable.nodes.is_empty() || usable.nodes.contains(node)) {
            return None;
        }
        let attaches = self.attaches(node, &usable.policy);
        let from_others = Offer::counts(attaches, &usable.policy);
        if room.pools.is_empty() && !from_others {
            return None;
        }
        if is_silent(room.heartbeat, now) {
            // Kept, with nothing to have: what comes back is one write, and people see that it is known.
            return Some(Figures::NONE);
        }
        // A class says nothing of block volumes; files need a filesystem, so this is what either has at least.
        if !from_others {
            return Some(alone(node, &usable.policy, &room.pools, self.network(&usable.policy)));
        }
        let key = (class.clone(), attaches);
        if !self.offers.contains_key(&key) {
            let offer = self.offer(class, attaches, now)?;
            self.offers.insert(key.clone(), offer);
        }
        let (usable, room) = (self.classes.get(class)?.1.as_ref()?, self.nodes.get(node)?);
        Some(
            self.offers.get(&key)?.on(node, &usable.policy, &room.pools, self.network(&usable.policy)).into(),
        )
    }
}

/// Classes that differ in what they require of the network: nothing, authentication, encryption.
fn demands() -> [Policy; 3] {
    let authentication = Authentication::Required;
    let encryption = Encryption::Required;
    [
        Policy::default(),
        Policy { authentication, ..Policy::default() },
        Policy { encryption, ..Policy::default() },
    ]
}

/// Whether others may get something of it.
fn serves_others(room: &NodeRoom) -> bool {
    let owns = |reach: &NodeReach| [Transport::NvmeTcp, Transport::Nfs].iter().any(|by| reach.owns(*by));
    !room.pools.is_empty() && room.reach.as_ref().is_some_and(owns)
}

/// What a node has that gets nothing from others.
fn alone(node: &NodeName, policy: &Policy, own: &[PoolView], network: &Network) -> Figures {
    let request = Request {
        // The size does not matter to the question.
        size: Bytes::ZERO,
        limit: None,
        mode: VolumeMode::Filesystem,
        consumer: Some(node.clone()),
        topology: vec![node.clone()],
        reach: Reach::OneNode,
        sharing: Sharing::Exclusive,
    };
    capacity_within(&request, policy, own, network).into()
}
