//! The three watches as one stream of changes.

use std::collections::HashSet;

use futures::stream::{self, BoxStream, StreamExt};

use crate::controllers::watch::{Heard, Told};
use crate::store::object::{Branch, StorageNode, VolumeSplit};

/// What happened to the objects.
pub(super) enum Change {
    Split(Box<VolumeSplit>),
    NoSplit(String),
    /// No others than these exist: a watch was begun again.
    OnlySplits(HashSet<String>),
    Branch(Box<Branch>),
    NoBranch(String),
    OnlyBranches(HashSet<String>),
    Node(Box<StorageNode>),
    NoNode(String),
    OnlyNodes(HashSet<String>),
    /// All objects of one kind have been reported for the first time.
    FirstRead,
}

/// All changes, beginning with all objects.
pub(super) fn feed(heard: &mut Heard) -> BoxStream<'static, Change> {
    let splits = heard.splits().map(|told| match told {
        Told::Here(_, split) => Change::Split(Box::new(split)),
        Told::Gone(name) => Change::NoSplit(name),
        Told::Only(names) => Change::OnlySplits(names),
        Told::FirstRead => Change::FirstRead,
    });
    let branches = heard.branches().map(|told| match told {
        Told::Here(_, branch) => Change::Branch(Box::new(branch)),
        Told::Gone(name) => Change::NoBranch(name),
        Told::Only(names) => Change::OnlyBranches(names),
        Told::FirstRead => Change::FirstRead,
    });
    let nodes = heard.nodes().map(|told| match told {
        Told::Here(_, node) => Change::Node(Box::new(node)),
        Told::Gone(name) => Change::NoNode(name),
        Told::Only(names) => Change::OnlyNodes(names),
        Told::FirstRead => Change::FirstRead,
    });
    stream::select_all([splits.boxed(), branches.boxed(), nodes.boxed()]).boxed()
}
