//! The picture: classes, the room of nodes, what is to be published of them, and what is.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use jiff::Timestamp;

use super::decide::{Step, decide};
use super::object::{Figures, Found, name};
use crate::controllers::class::Class;
use crate::controllers::splitter::{NodeRoom, is_silent};
use crate::domain::NodeName;
use crate::domain::policy::Policy;
use crate::domain::split::capacity_on;
use crate::domain::volume::VolumeMode;

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
        self.classes.insert(name.clone(), (class, read.ok()));
        let nodes: Vec<NodeName> = self.nodes.keys().cloned().collect();
        nodes.iter().map(|node| self.refresh(&name, node, now)).collect()
    }

    /// A class is gone; the objects that this concerns are returned.
    pub(super) fn remove_class(&mut self, class: &str, now: Timestamp) -> Vec<String> {
        let Some((name, _)) = self.classes.remove_entry(class) else { return Vec::new() };
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
        let before = match room {
            Some(room) => self.nodes.insert(node.clone(), room),
            None => self.nodes.remove(node),
        };
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
        let classes: Vec<Arc<str>> = self.classes.keys().cloned().collect();
        classes.iter().map(|class| self.refresh(class, node, now)).collect()
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

    fn figures(&self, class: &str, node: &NodeName, now: Timestamp) -> Option<Figures> {
        let usable = self.classes.get(class)?.1.as_ref()?;
        let room = self.nodes.get(node).filter(|room| !room.pools.is_empty())?;
        if node.as_str().len() > MAX_LABEL || !(usable.nodes.is_empty() || usable.nodes.contains(node)) {
            return None;
        }
        if is_silent(room.heartbeat, now) {
            // Kept, with nothing to have: what comes back is one write, and people see that it is known.
            return Some(Figures::NONE);
        }
        // A class says nothing of block volumes; files need a filesystem, so this is what either has at least.
        Some(capacity_on(node, VolumeMode::Filesystem, &usable.policy, &room.pools).into())
    }
}
