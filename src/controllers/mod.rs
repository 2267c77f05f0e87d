//! What the leader does for the whole cluster.
//!
//! A controller watches objects, keeps a synchronous picture of them, decides by pure functions, and writes what it
//! decided to the store. It calls no other role.

pub mod splitter;
