//! Exports after a reboot, from the marks alone.

use std::collections::BTreeMap;

use super::AccessError;
use super::exporter::{Asked, Exporter, Key, Opening};
use super::mark::{self, Kept};
use crate::domain::BranchId;
use crate::domain::access::Mark;
use crate::domain::access::shared::SharedMark;
use crate::store::object::BranchSpec;

/// An export that is not back.
#[derive(Debug)]
pub(in crate::node) struct Missed {
    /// The branch.
    pub(in crate::node) branch: BranchId,
    /// Why.
    pub(in crate::node) error: AccessError,
}

impl Exporter {
    /// The branches, in pools that can be used now, that were given to another node as far as their marks tell.
    pub(in crate::node) fn given(&self) -> Vec<BranchSpec> {
        self.branches().specs(&self.node().clone(), |host, place| {
            let alone = mark::read::<Mark>(host, place);
            let shared = mark::read::<SharedMark>(host, place);
            matches!(alone, Ok(Kept::Mark(m)) if m.access.consumer.as_ref().is_some_and(|to| to != self.node()))
                || matches!(shared, Ok(Kept::Mark(m)) if m.consumers.iter().any(|sharer| sharer.node != *self.node()))
        })
    }

    /// Brings the exports of these branches back, as their marks say; tells which are not. Those who used them come back as soon as
    /// somebody listens, and a listener is shared by all: so all are whole before one is opened.
    pub(in crate::node) fn restore(&self, given: &[BranchSpec]) -> Vec<Missed> {
        let nobody = BTreeMap::new();
        let mut missed = Vec::new();
        let mut opening = Opening::default();
        for spec in given {
            self.hold(&mut opening, spec);
        }
        for spec in given {
            let asked = Asked {
                spec,
                wanted: None,
                deleting: false,
                identities: &nobody,
                key: Key::Kept,
                reported: None,
                sharing: None,
                shared: None,
            };
            if let Err(error) = self.settle(&asked) {
                missed.push(Missed { branch: spec.id.clone(), error });
            }
        }
        let closed = opening.open().into_iter().map(|(branch, source)| {
            let error = AccessError::Transport { branch: branch.clone(), action: "export it", source };
            Missed { branch, error }
        });
        missed.extend(closed);
        missed
    }
}
