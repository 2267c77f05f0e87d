//! Volumes on the real machine: staged, published, broken and healed.

mod fabric;
mod faults;
mod healing;
mod life;
mod model;
mod orders;
mod refusals;
mod remote;
mod rig;
