//! How the attachments of other nodes' branches stand, read from the kernel once for all volumes that ask at one time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::record::{Record, Remote};
use super::types::LinkState;
use crate::domain::access::Generation;
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName};
use crate::node::transport::{Attached, Link, TransportError, Transports};

/// How long a reading serves: with hundreds of branches it costs milliseconds, and each volume asks.
const FRESH: Duration = Duration::from_millis(400);

/// How one branch's attachment stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkSeen {
    /// It answers.
    Live,
    /// Its owner does not answer; what uses it waits.
    Connecting,
    /// The kernel gave it up, or has none.
    Gone,
    /// The kernel could not be asked.
    Unknown,
}

impl LinkSeen {
    /// As it is told.
    pub(super) const fn state(self) -> LinkState {
        match self {
            Self::Live => LinkState::Live,
            Self::Connecting => LinkState::Away,
            Self::Gone => LinkState::Gone,
            Self::Unknown => LinkState::Unknown,
        }
    }
}

/// Readings of the kernel.
#[derive(Debug, Default)]
pub(super) struct Links {
    read: Mutex<BTreeMap<Transport, Arc<Mutex<Option<Reading>>>>>,
}

#[derive(Clone, Debug)]
struct Reading {
    at: Instant,
    attached: Option<Arc<ByBranch>>,
}

/// Attachments, by their branches: each volume asks for a few of hundreds.
type ByBranch = BTreeMap<BranchId, Vec<Attached>>;

/// The attachments that concern one volume.
#[derive(Clone, Debug, Default)]
pub(super) struct VolumeLinks {
    attached: Vec<Attached>,
    unread: BTreeSet<Transport>,
}

impl Links {
    /// The attachments of the record's branches, on `node`.
    pub(super) fn of(&self, transports: &Transports, node: &NodeName, record: &Record) -> VolumeLinks {
        let mut links = VolumeLinks::default();
        if !record.has_remote() {
            return links;
        }
        let remote = || record.branches.iter().map(|b| &b.spec).filter(|spec| spec.node != *node);
        let ids: BTreeSet<&BranchId> = remote().map(|spec| &spec.id).collect();
        let used: BTreeSet<_> = remote().map(|spec| Transport::between_nodes(spec.format)).collect();
        for transport in used {
            match self.read(transports, transport) {
                Some(all) => {
                    links.attached.extend(ids.iter().filter_map(|id| all.get(*id)).flatten().cloned());
                }
                None => {
                    links.unread.insert(transport);
                }
            }
        }
        links
    }

    /// Forgets what was read: it was changed.
    pub(super) fn forget(&self, transport: Transport) {
        let slot = self.slot(transport);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn read(&self, transports: &Transports, transport: Transport) -> Option<Arc<ByBranch>> {
        let slot = self.slot(transport);
        // Held while the kernel is asked: whoever asks meanwhile has the same question.
        let mut reading = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = reading.as_ref().filter(|r| r.at.elapsed() < FRESH) {
            return known.attached.clone();
        }
        let attached = match transports.consumer(transport).and_then(|consumer| consumer.attachments()) {
            Ok(attached) => {
                let mut by_branch = ByBranch::new();
                for each in attached {
                    by_branch.entry(each.id.branch.clone()).or_default().push(each);
                }
                Some(Arc::new(by_branch))
            }
            // It was not found to work here, or not looked for yet.
            Err(TransportError::Unable { .. }) => None,
            Err(error) => {
                tracing::warn!(transport = transport.as_str(), error = %error, "attachments of other nodes' branches cannot be read");
                None
            }
        };
        *reading = Some(Reading { at: Instant::now(), attached: attached.clone() });
        attached
    }

    fn slot(&self, transport: Transport) -> Arc<Mutex<Option<Reading>>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).entry(transport).or_default().clone()
    }
}

impl VolumeLinks {
    /// The generations of the branch that are attached.
    pub(super) fn held(&self, branch: &BranchId) -> Vec<Generation> {
        self.attached.iter().filter(|a| a.id.branch == *branch).map(|a| a.id.generation).collect()
    }

    /// How the branch's attachment stands that is on record.
    pub(super) fn seen(&self, branch: &BranchId, remote: &Remote) -> LinkSeen {
        let ours =
            self.attached.iter().find(|a| a.id.branch == *branch && a.id.generation == remote.generation);
        match ours.map(|a| a.link) {
            Some(Link::Live) => LinkSeen::Live,
            Some(Link::Connecting) => LinkSeen::Connecting,
            None if self.unread.contains(&remote.transport) => LinkSeen::Unknown,
            Some(Link::Dead) | None => LinkSeen::Gone,
        }
    }
}
