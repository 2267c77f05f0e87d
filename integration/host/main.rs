//! Tests against the real machine: real mounts, real loop devices, real mergerfs, real files.
//!
//! They need root and a private mount namespace, so that nothing that they mount is seen elsewhere or outlives them:
//! `scripts/test host`, or by hand `unshare --mount --propagation private cargo test --test host -- NAME`.

#[path = "../support/agent.rs"]
mod agent;
mod bad_input;
mod branch;
mod container;
mod executor;
mod faults;
mod leaders;
mod lifecycle;
mod overhead;
mod platform;
mod platform_fuse;
mod pool;
mod semantics;
mod support;
mod union;
mod volume;
