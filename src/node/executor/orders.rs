//! Who may use a branch: the order of its object, carried out and reported.

use std::collections::BTreeMap;

use jiff::Timestamp;
use tracing::warn;

use super::work::{Worker, blocking};
use crate::domain::reach::Transport;
use crate::domain::{NodeName, Secret};
use crate::node::access::{Asked, Key, Settled};
use crate::store::object::{Branch, BranchStatus, EXPORTED, StorageNode, condition, set_condition};
use crate::store::{Pair, StoreError};

impl Worker {
    /// Carries out the order of the branch, and notes in its status what is to be written there. The inner error says why it is
    /// to be tried again.
    pub(super) async fn carry_out(
        &self,
        branch: &mut Branch,
        deleting: bool,
    ) -> Result<Result<(), String>, StoreError> {
        let identities = self.identities(branch).await?;
        let key = Key::Stored(if deleting { None } else { self.key(branch).await? });
        let (exporter, asked) = (self.exporter.clone(), branch.clone());
        let outcome = blocking(move || {
            exporter.settle(&Asked {
                spec: &asked.spec,
                wanted: asked.spec.access.as_ref(),
                deleting,
                identities: &identities,
                key,
                reported: asked.status.export.as_ref(),
                sharing: asked.spec.sharing.as_ref(),
                shared: asked.status.sharing.as_ref(),
            })
        })
        .await
        .map_err(|e| e.to_string());
        let before = condition(&branch.status.conditions, EXPORTED).map(|c| c.message.clone());
        let outcome = note(&mut branch.status, outcome);
        if let Err(reason) = &outcome
            && before.as_ref() != Some(reason)
        {
            warn!(branch.id = branch.meta.name, error = reason, "who may use a branch cannot be settled yet");
        }
        Ok(outcome)
    }

    /// What the node that the branch is for proves to have; `None` where it proves nothing. The leader made the key before the
    /// order, where both nodes can use one.
    async fn key(&self, branch: &Branch) -> Result<Option<Secret>, StoreError> {
        let owner = &branch.spec.node;
        let wanted = branch.spec.access.as_ref().and_then(|access| access.consumer.as_ref());
        let image = Transport::between_nodes(branch.spec.format) == Transport::NvmeTcp;
        match wanted.filter(|node| image && *node != owner) {
            Some(consumer) => {
                self.store.keys().get(&Pair { owner: owner.clone(), consumer: consumer.clone() }).await
            }
            None => Ok(None),
        }
    }

    /// What the nodes that the branch is for call themselves to the transport.
    async fn identities(&self, branch: &Branch) -> Result<BTreeMap<NodeName, String>, StoreError> {
        let alone = branch.spec.access.as_ref().and_then(|access| access.consumer.as_ref());
        let shared = branch.spec.sharing.iter().flat_map(|sharing| &sharing.consumers);
        let transport = Transport::between_nodes(branch.spec.format);
        let mut identities = BTreeMap::new();
        for consumer in alone.into_iter().chain(shared).filter(|node| **node != branch.spec.node) {
            let node = self.store.nodes().get(consumer.as_str()).await?;
            if let Some(identity) = node.and_then(|node| identity(&node, transport)) {
                identities.insert(consumer.clone(), identity);
            }
        }
        Ok(identities)
    }
}

/// What the node calls itself to owners: its name on the transport, or, where there are none, its address.
fn identity(node: &StorageNode, transport: Transport) -> Option<String> {
    match transport {
        Transport::NvmeTcp => {
            node.status.transports.iter().find(|t| t.transport == transport)?.identity.clone()
        }
        Transport::Nfs => node.status.network.as_ref()?.addresses.first().cloned(),
        Transport::Local => None,
    }
}

/// The status after an order was carried out, or was not.
fn note(status: &mut BranchStatus, outcome: Result<Settled, String>) -> Result<(), String> {
    let settled = match outcome {
        Ok(settled) => settled,
        Err(reason) => {
            set_condition(&mut status.conditions, Timestamp::now(), EXPORTED, false, "Failed", &reason);
            return Err(reason);
        }
    };
    if let Some(report) = settled.report {
        status.export = Some(report);
    }
    if let Some(report) = settled.shared {
        status.sharing = Some(*report);
    }
    let now = Timestamp::now();
    match (settled.waits_for, &*settled.open_to) {
        (Some(node), _) => {
            let reason = format!(
                "node {node}, which the branch is for, has not published what it calls itself over {}",
                settled.transport
            );
            set_condition(&mut status.conditions, now, EXPORTED, false, "Unknown", &reason);
            return Err(reason);
        }
        (None, [_, ..]) => {
            let nodes: Vec<&str> = settled.open_to.iter().map(NodeName::as_str).collect();
            let message = format!("open to node {} over {}", nodes.join(", "), settled.transport);
            set_condition(&mut status.conditions, now, EXPORTED, true, "Open", &message);
        }
        (None, []) => status.conditions.retain(|c| c.kind != EXPORTED),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::access::{Access, Epoch, ExportReport};

    fn settled(open_to: Option<&str>, waits_for: Option<&str>) -> Settled {
        let node = |name: &str| name.parse().unwrap();
        let (open_to, waits_for) = (open_to.map(node).into_iter().collect(), waits_for.map(node));
        Settled { report: None, shared: None, open_to, waits_for, transport: Transport::NvmeTcp }
    }

    fn told(status: &BranchStatus) -> Option<(bool, String)> {
        condition(&status.conditions, EXPORTED).map(|c| (c.status, c.message.clone()))
    }

    #[test]
    fn people_see_whom_a_branch_is_open_to_and_why_it_is_not() {
        let mut status = BranchStatus::default();
        note(&mut status, Ok(settled(None, None))).unwrap();
        assert_eq!(told(&status), None, "it is used at home");
        note(&mut status, Err("the port is taken".to_owned())).unwrap_err();
        assert_eq!(told(&status), Some((false, "the port is taken".to_owned())));
        note(&mut status, Ok(settled(None, Some("b")))).unwrap_err();
        assert!(told(&status).unwrap().1.contains("node b"));
        note(&mut status, Ok(settled(Some("b"), None))).unwrap();
        assert_eq!(told(&status), Some((true, "open to node b over nvme-tcp".to_owned())));
        note(&mut status, Ok(settled(None, None))).unwrap();
        assert_eq!(told(&status), None);
    }

    #[test]
    fn a_report_is_kept_until_there_is_another() {
        let report =
            ExportReport { allowed: Access { consumer: None, epoch: Epoch(3) }, ..ExportReport::default() };
        let mut status = BranchStatus::default();
        note(&mut status, Ok(Settled { report: Some(report.clone()), ..settled(None, None) })).unwrap();
        note(&mut status, Ok(settled(None, None))).unwrap();
        note(&mut status, Err("x".to_owned())).unwrap_err();
        assert_eq!(status.export, Some(report));
    }

    #[test]
    fn a_node_is_known_by_its_name_over_nvme_and_by_its_first_address_over_nfs() {
        let node: StorageNode = serde_json::from_value(serde_json::json!({
            "meta": {"name": "b"}, "spec": {"node": "b"},
            "status": {
                "transports": [{"transport": "nvme-tcp", "owner": {"able": true}, "consumer": {"able": true},
                    "authentication": {"able": true}, "identity": "nqn.b"}],
                "network": {"interface": "e", "addresses": ["10.0.0.2", "10.0.0.3"]}
            }
        }))
        .unwrap();
        assert_eq!(identity(&node, Transport::NvmeTcp).as_deref(), Some("nqn.b"));
        assert_eq!(identity(&node, Transport::Nfs).as_deref(), Some("10.0.0.2"));
    }
}
