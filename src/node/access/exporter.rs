//! Carrying out the orders for this node's branches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use super::carry::{Next, Pass};
use super::tally::Tally;
use super::{AccessError, ExportCounts, LocalUse};
use crate::domain::access::shared::{Sharing, SharingReport};
use crate::domain::access::{Access, ExportReport};
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName, Secret};
use crate::node::branch::{BranchError, Branches};
use crate::node::keys::KeyFiles;
use crate::node::transport::{Owner, TransportError, Transports};
use crate::store::object::BranchSpec;

/// Looks at one branch in a row. An order takes two or three: one that does it, one that ends this node's use in between, one
/// that finds nothing left to do.
const LOOKS: u32 = 8;

/// By which key the node that a branch is opened to is known.
#[derive(Clone, Debug)]
pub(in crate::node) enum Key {
    /// The one that was kept when the kernel was told last: the store was not asked.
    Kept,
    /// The store's; `None`: by none.
    Stored(Option<Secret>),
}

/// What is known of a branch from elsewhere than its own node.
#[derive(Clone, Debug)]
pub(in crate::node) struct Asked<'a> {
    /// The branch.
    pub(in crate::node) spec: &'a BranchSpec,
    /// `Branch.spec.access`; `None` also where the store was not asked.
    pub(in crate::node) wanted: Option<&'a Access>,
    /// The branch is to go.
    pub(in crate::node) deleting: bool,
    /// What other nodes call themselves to the transport.
    pub(in crate::node) identities: &'a BTreeMap<NodeName, String>,
    /// The key of the node that is to have it.
    pub(in crate::node) key: Key,
    /// `Branch.status.export`.
    pub(in crate::node) reported: Option<&'a ExportReport>,
    /// `Branch.spec.sharing`; `None` also where the store was not asked.
    pub(in crate::node) sharing: Option<&'a Sharing>,
    /// `Branch.status.sharing`.
    pub(in crate::node) shared: Option<&'a SharingReport>,
}

/// All that can be done for a branch is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// What was seen, where that is news.
    pub report: Option<ExportReport>,
    /// The same of those who share it.
    pub shared: Option<Box<SharingReport>>,
    /// The other nodes that it is open to.
    pub open_to: Vec<NodeName>,
    /// Another node that it is to be open to, and that has not published what it calls itself.
    pub waits_for: Option<NodeName>,
    /// The transport that the branch goes by.
    pub transport: Transport,
}

/// Carries out orders for the branches of one node. Functions block; those for one branch follow one another.
pub struct Exporter {
    node: NodeName,
    branches: Arc<Branches>,
    transports: Arc<Transports>,
    uses: Arc<dyn LocalUse>,
    keys: KeyFiles,
    tally: Tally,
    open: Mutex<BTreeSet<BranchId>>,
}

impl std::fmt::Debug for Exporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exporter").field("node", &self.node).finish_non_exhaustive()
    }
}

/// Branches whose exports nobody reaches until all is done for them.
#[derive(Default)]
pub(super) struct Opening(BTreeMap<Transport, (Arc<dyn Owner>, Vec<BranchId>)>);

impl Opening {
    /// Lets those in who are allowed; the branches whose exports cannot be reached now, and why.
    pub(super) fn open(mut self) -> Vec<(BranchId, TransportError)> {
        self.open_all()
    }

    fn open_all(&mut self) -> Vec<(BranchId, TransportError)> {
        std::mem::take(&mut self.0)
            .into_values()
            .flat_map(|(owner, branches)| owner.open(&branches))
            .collect()
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        self.open_all();
    }
}

impl Exporter {
    /// For the branches of `node`.
    #[must_use]
    pub fn new(
        node: NodeName,
        branches: Arc<Branches>,
        transports: Arc<Transports>,
        uses: Arc<dyn LocalUse>,
        keys: KeyFiles,
    ) -> Self {
        Self { node, branches, transports, uses, keys, tally: Tally::default(), open: Mutex::default() }
    }

    /// What was done since the agent started.
    #[must_use]
    pub fn counts(&self) -> ExportCounts {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.tally.counts(u64::try_from(open).unwrap_or(u64::MAX))
    }

    /// Where the branches lie.
    pub(super) fn branches(&self) -> &Branches {
        &self.branches
    }

    /// The node whose branches these are.
    pub(super) const fn node(&self) -> &NodeName {
        &self.node
    }

    /// Does what is to be done for the branch until nothing is left.
    ///
    /// # Errors
    /// [`AccessError`]: what was done until then stays, and the next call goes on.
    pub(in crate::node) fn settle(&self, asked: &Asked<'_>) -> Result<Settled, AccessError> {
        let mut opening = Opening::default();
        self.hold(&mut opening, asked.spec);
        let settled = self.look_until_settled(asked);
        let settled = match opening.open().pop() {
            Some((branch, source)) => Err(AccessError::Transport { branch, action: "export it", source }),
            None => settled,
        };
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match &settled {
            Ok(settled) if !settled.open_to.is_empty() => drop(open.insert(asked.spec.id.clone())),
            Ok(_) => drop(open.remove(&asked.spec.id)),
            Err(_) => Tally::count(&self.tally.failures),
        }
        settled
    }

    /// Lets nobody reach exports of the branch that are made from now on, until `opening` is opened.
    pub(super) fn hold(&self, opening: &mut Opening, spec: &BranchSpec) {
        let transport = Transport::between_nodes(spec.format);
        // Without that end nothing is exported.
        let Ok(owner) = self.transports.owner(transport) else { return };
        let (owner, branches) = opening.0.entry(transport).or_insert_with(|| (owner, Vec::new()));
        owner.hold(&spec.id);
        branches.push(spec.id.clone());
    }

    fn look_until_settled(&self, asked: &Asked<'_>) -> Result<Settled, AccessError> {
        let branch = &asked.spec.id;
        let transport = Transport::between_nodes(asked.spec.format);
        let boot_id = self.branches.boot_id(branch)?;
        // Set while this node's use is ended, until nothing is left to do: it must not begin anew in between.
        let mut closed = None;
        for _ in 0..LOOKS {
            let held = match self.branches.hold(asked.spec) {
                Ok(held) => held,
                Err(BranchError::Missing { .. }) if asked.deleting => return self.end_without_files(asked),
                Err(e) => return Err(e.into()),
            };
            let owner = self.transports.owner(transport);
            let owner = owner.as_ref().map(|owner| owner.as_ref());
            let pass = Pass {
                asked,
                held: &held,
                node: &self.node,
                boot_id: &boot_id,
                transport,
                owner,
                keys: &self.keys,
                tally: &self.tally,
            };
            match pass.run()? {
                Next::Again => {}
                Next::Settled(settled) => return Ok(settled),
                Next::EndHere => {
                    drop(held);
                    if closed.is_none() {
                        closed = Some(self.branches.close(branch));
                    }
                    let begun = std::time::Instant::now();
                    self.uses
                        .end(asked.spec)
                        .map_err(|reason| AccessError::Used { branch: branch.clone(), reason })?;
                    Tally::count(&self.tally.ended);
                    tracing::info!(
                        branch.id = %branch, epoch = asked.wanted.map(|wanted| wanted.epoch.0),
                        duration.seconds = begun.elapsed().as_secs_f64(),
                        "this node's own use of the branch is ended"
                    );
                }
            }
        }
        Err(AccessError::Restless { branch: branch.clone() })
    }

    /// The files of a branch that is to go are gone already: of its export there may be something left.
    fn end_without_files(&self, asked: &Asked<'_>) -> Result<Settled, AccessError> {
        let transport = Transport::between_nodes(asked.spec.format);
        let branch = &asked.spec.id;
        if let Ok(owner) = self.transports.owner(transport) {
            owner.unexport(branch).map_err(|source| AccessError::Transport {
                branch: branch.clone(),
                action: "end its export",
                source,
            })?;
        }
        Ok(Settled { report: None, shared: None, open_to: Vec::new(), waits_for: None, transport })
    }
}
