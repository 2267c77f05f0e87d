//! Keys by which two nodes prove to each other who they are, and encrypt what they send.
//!
//! A pair of nodes, of which one owns branches and the other uses them, shares one key for all branches between them. Who
//! opens branches to nodes makes it; both nodes read it. Where nodes do not meet there are no keys ([`NoKeys`]).
//!
//! Invariants: a key is never changed in its place and never part of an object that is listed, watched, logged or shown. One
//! that is taken away ([`Keys::remove`]) is made anew, as another, when it is needed again.

use async_trait::async_trait;

use super::StoreError;
use super::object::StorageNode;
use crate::domain::{NodeName, Secret};

/// Two nodes that share a key; the other way round they share another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    /// Where branches lie.
    pub owner: NodeName,
    /// Where they are used.
    pub consumer: NodeName,
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "branches of node {} on node {}", self.owner, self.consumer)
    }
}

/// The keys of all pairs.
#[async_trait]
pub trait Keys: Send + Sync {
    /// The pair's key, if it has one.
    ///
    /// # Errors
    /// [`StoreError::Malformed`] where something else has its place, [`StoreError::Backend`].
    async fn get(&self, pair: &Pair) -> Result<Option<Secret>, StoreError>;

    /// Makes the pair a key where it has none; `owner` is the pair's owner, with which the key goes. False where there are no
    /// keys at all.
    ///
    /// # Errors
    /// As [`Keys::get`].
    async fn ensure(&self, pair: &Pair, owner: &StorageNode) -> Result<bool, StoreError>;

    /// Takes the pair's key away; true when it had one.
    ///
    /// # Errors
    /// [`StoreError::Backend`].
    async fn remove(&self, pair: &Pair) -> Result<bool, StoreError>;
}

/// That there are no keys.
#[derive(Clone, Copy, Debug)]
pub struct NoKeys;

#[async_trait]
impl Keys for NoKeys {
    async fn get(&self, _: &Pair) -> Result<Option<Secret>, StoreError> {
        Ok(None)
    }

    async fn ensure(&self, _: &Pair, _: &StorageNode) -> Result<bool, StoreError> {
        Ok(false)
    }

    async fn remove(&self, _: &Pair) -> Result<bool, StoreError> {
        Ok(false)
    }
}

/// A new key, from 366 random bits.
#[must_use]
pub fn generate() -> Secret {
    let random: Vec<u8> = (0..3).flat_map(|_| uuid::Uuid::new_v4().into_bytes()).collect();
    Secret::of(&random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_another() {
        let (a, b) = (generate(), generate());
        assert!(a.tls().is_some() && a != b && a.tls() != b.tls());
    }
}
