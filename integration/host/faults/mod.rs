//! Faults, against the real agent: what ends, hangs, fails or fills up, and what its users notice.

mod branches;
mod crash;
mod ground;
mod union;
