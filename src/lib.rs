//! Union CSI: one large volume from the free space of many disks.
//!
//! The program is laid out in layers; a module imports only from the layers below it (see `docs/ARCHITECTURE.md`,
//! checked by `integration/layers.rs`):
//!
//! - [`domain`]: pure values and decisions. No I/O, no clock, no Kubernetes, no gRPC.
//! - [`store`]: desired and observed state as objects, with watches. One contract, several implementations.
//! - [`platform`]: the operating system, one file per kernel facility. The only `unsafe`, ioctl and external commands.
//! - [`node`]: what an instance does on its own machine: pools, branches, unions, mounts.
//! - [`controllers`]: what the leader does for the whole cluster: splitting claims into branches.
//! - [`csi`]: the Container Storage Interface, version 1.12, as a thin translation.
//! - [`app`], [`cli`], [`config`], [`http`], [`telemetry`]: wiring and the view from outside.

pub mod app;
pub mod cli;
pub mod config;
pub mod controllers;
pub mod csi;
pub mod domain;
pub mod http;
pub mod node;
pub mod platform;
pub mod store;
pub mod telemetry;
