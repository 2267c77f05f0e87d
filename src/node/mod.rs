//! What an instance does on its own machine.
//!
//! - [`pool`]: what the configured pools are and have.
//! - [`transport`]: reaching a branch from another node: exporting it to one consumer, attaching it there.
//! - [`survey`]: what of that this machine can do, and its place on the network.
//! - [`access`]: who may use a branch of this node: carrying out the orders of its object.
//! - [`branch`]: branches on disk: making, finding, attaching, removing.
//! - [`executor`]: brings this node's branches to what the store wants, and tells the store what is.
//! - [`union`]: joins attached branches: bind, overlayfs, or a supervised MergerFS process.
//! - [`volume`]: staging and publishing, on top of all of them; what CSI calls.
//! - [`keys`]: keys that it shares with other nodes, as its kernel was told them.
//! - `alarm`: cuts unions off filesystems that fail, before anything else is done about it.
//! - [`heal`]: finds what died and puts it back under running workloads.
//!
//! Mount state is read from the kernel each time, never from memory.

pub mod access;
mod alarm;
pub mod branch;
pub mod executor;
pub mod handshake;
pub mod heal;
pub mod keys;
pub mod pool;
pub mod survey;
pub mod transport;
pub mod union;
pub mod volume;
