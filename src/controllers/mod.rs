//! What the leader does for the whole cluster.
//!
//! A controller watches objects, keeps a synchronous picture of them, decides by pure functions, and writes what it
//! decided. It calls no other role. The [`splitter`] works on any store; the others are what users know from the official
//! CSI sidecars, and exist in Kubernetes only. Each write is checked against the held [`lease`].

pub mod access;
pub mod attacher;
pub mod capacity;
mod class;
pub mod cluster;
mod events;
pub mod lease;
pub mod orphans;
pub mod permissions;
pub mod provisioner;
mod queue;
pub mod splitter;
mod watch;

pub use watch::Watches;
