//! Keys by which this node proves to owners who it is, and they to it.
//!
//! They are read from the store while a volume is staged, after the branches were given to this node (the leader makes a key
//! before that), and kept beside the state: what is attached anew later, with or without a store that answers, is attached
//! with what is kept.

use std::collections::BTreeSet;

use super::error::VolumeError;
use super::remote::AttachError;
use super::{Core, Volumes};
use crate::domain::reach::Transport;
use crate::domain::{NodeName, Secret};
use crate::store::Pair;
use crate::store::object::{Branch, BranchSpec, VolumeSplit};
use crate::store::view::requires_authentication;

impl Volumes {
    /// Takes the keys for those of the branches that are given to this node by others.
    ///
    /// # Errors
    /// [`VolumeError::Incomplete`] where the volume's class requires a key and there is none.
    pub(super) async fn take_keys(
        &self,
        split: &VolumeSplit,
        branches: &[Branch],
    ) -> Result<(), VolumeError> {
        let volume = &split.spec.volume;
        let required = requires_authentication(split);
        let incomplete = |reason: String| VolumeError::Incomplete { volume: volume.clone(), reason };
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
    /// What this node proves to have to the owner of the branch.
    pub(super) fn key(&self, spec: &BranchSpec, transport: Transport) -> Result<Option<Secret>, AttachError> {
        if transport != Transport::NvmeTcp {
            return Ok(None);
        }
        let pair = Pair { owner: spec.node.clone(), consumer: self.node.clone() };
        self.keys.kept(&pair).map_err(|source| AttachError::Key { branch: spec.id.clone(), source })
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
}
