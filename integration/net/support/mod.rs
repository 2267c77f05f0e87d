//! Several small virtual machines on a network of their own.

#![allow(dead_code, reason = "each test uses some of it")]

pub mod bare;
mod channel;
pub mod cluster;
pub mod faults;
mod image;
mod machine;
mod network;
pub mod random;
mod shared;
mod switch;
mod trouble;

#[allow(unused_imports, reason = "some tests name them")]
pub use machine::{Machine, Output, Running};
pub use network::{Network, Options};
pub use shared::{on, on_shared};
pub use trouble::Trouble;

/// What tests return: the first thing that did not go as it should ends them.
pub type Result<T = ()> = std::result::Result<T, Trouble>;
