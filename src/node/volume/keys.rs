//! Keys by which this node proves to owners who it is, and they to it, and by which they encrypt.
//!
//! They are read from the store while a volume is staged, after the branches were given to this node (the leader makes a key
//! before that), and kept beside the state: what is attached anew later, with or without a store that answers, is attached
//! with what is kept.

use std::collections::BTreeSet;

use super::error::VolumeError;
use super::remote::AttachError;
use super::{Core, Volumes};
use crate::domain::reach::Transport;
use crate::domain::{BranchId, NodeName, Secret};
use crate::store::Pair;
use crate::store::object::{Branch, BranchSpec, VolumeSplit};
use crate::store::view::{requires_authentication, requires_encryption};

impl Volumes {
    /// Takes the keys for those of the branches that are given to this node by others.
    ///
    /// # Errors
    /// [`VolumeError::Incomplete`] where the volume's class requires a key and there is none, or encryption, and a branch was made
    /// without.
    pub(super) async fn take_keys(
        &self,
        split: &VolumeSplit,
        branches: &[Branch],
    ) -> Result<(), VolumeError> {
        let volume = &split.spec.volume;
        let required = requires_authentication(split);
        let encrypted = requires_encryption(split);
        let incomplete = |reason: String| VolumeError::Incomplete { volume: volume.clone(), reason };
        if encrypted && let Some(branch) = readable(&self.core.node, branches) {
            return Err(incomplete(format!(
                "its class requires encryption, and branch {branch} on another node is not encrypted on the network (was the \
                 definition of Branch in the cluster brought up to date?)"
            )));
        }
        for (owner, transport) in given(&self.core.node, branches) {
            let pair = Pair { owner: owner.clone(), consumer: self.core.node.clone() };
            let key = match transport {
                Transport::NvmeTcp => self.store.keys().get(&pair).await,
                Transport::Local | Transport::Nfs => Ok(None),
            };
            let key = key.map_err(|source| VolumeError::Store { volume: volume.clone(), source })?;
            if required && key.is_none() {
                return Err(incomplete(format!(
                    "its class requires authentication, and there is no key for {pair} over {transport}"
                )));
            }
            if encrypted && key.as_ref().is_none_or(|key| key.tls().is_none()) {
                return Err(incomplete(format!(
                    "its class requires encryption, and there is no key for {pair} that does"
                )));
            }
            if transport != Transport::NvmeTcp {
                continue;
            }
            let files = self.core.keys.clone();
            let kept = tokio::task::spawn_blocking(move || files.keep(&pair, key.as_ref()));
            match kept.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(incomplete(error.to_string())),
                Err(ended) => return Err(incomplete(ended.to_string())),
            }
        }
        Ok(())
    }
}

/// A branch of another node whose connections are not encrypted.
fn readable<'a>(node: &NodeName, branches: &'a [Branch]) -> Option<&'a BranchId> {
    let plain = |branch: &&Branch| branch.spec.node != *node && !branch.spec.encrypted;
    branches.iter().find(plain).map(|branch| &branch.spec.id)
}

/// Owners that give this node branches, and by what they go.
fn given(node: &NodeName, branches: &[Branch]) -> BTreeSet<(NodeName, Transport)> {
    let to_this = |branch: &&Branch| {
        let consumer = branch.spec.access.as_ref().and_then(|access| access.consumer.as_ref());
        branch.spec.node != *node && consumer == Some(node)
    };
    let by = |branch: &Branch| (branch.spec.node.clone(), Transport::between_nodes(branch.spec.format));
    branches.iter().filter(to_this).map(by).collect()
}

impl Core {
    /// What this node shares with the owner of the branch, and is to use for it: a key to encrypt with where it is encrypted,
    /// and none where it is not.
    pub(super) fn key(&self, spec: &BranchSpec, transport: Transport) -> Result<Option<Secret>, AttachError> {
        if transport != Transport::NvmeTcp {
            return Ok(None);
        }
        let pair = Pair { owner: spec.node.clone(), consumer: self.node.clone() };
        let kept = self.keys.kept(&pair);
        let kept = kept.map_err(|source| AttachError::Key { branch: spec.id.clone(), source })?;
        if !spec.encrypted {
            return Ok(kept.map(Secret::without_tls));
        }
        if kept.as_ref().is_none_or(|key| key.tls().is_none()) {
            return Err(AttachError::Plain { branch: spec.id.clone(), pair });
        }
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::access::{Access, Epoch};
    use crate::domain::split::BranchFormat;
    use crate::store::contract;

    #[test]
    fn keys_are_of_the_owners_that_give_this_node_something() {
        let branch = |owner: &str, format, consumer: Option<&str>| {
            let mut branch = contract::branch("v", 0, owner);
            branch.spec.format = format;
            branch.spec.access =
                Some(Access { consumer: consumer.map(|c| c.parse().unwrap()), epoch: Epoch(2) });
            branch
        };
        let branches = [
            branch("b", BranchFormat::Image, Some("b")),
            branch("a", BranchFormat::Image, Some("b")),
            branch("a", BranchFormat::Image, Some("b")),
            branch("c", BranchFormat::Directory, Some("b")),
            branch("d", BranchFormat::Image, Some("c")),
            branch("e", BranchFormat::Image, None),
        ];
        let found = given(&"b".parse().unwrap(), &branches);
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        assert_eq!(found, [(node("a"), Transport::NvmeTcp), (node("c"), Transport::Nfs)].into());
    }

    #[test]
    fn a_branch_of_another_node_that_everybody_could_read_is_found() {
        let branch = |owner: &str, encrypted| {
            let mut branch = contract::branch("v", 0, owner);
            branch.spec.encrypted = encrypted;
            branch
        };
        let here: NodeName = "a".parse().unwrap();
        assert_eq!(readable(&here, &[branch("a", false), branch("b", true)]), None);
        assert!(readable(&here, &[branch("b", true), branch("b", false)]).is_some());
    }
}
