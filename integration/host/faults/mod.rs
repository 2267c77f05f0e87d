//! Faults, against the real agent: what ends, hangs, fails or fills up, and what its users notice.

#![allow(clippy::print_stdout, reason = "what these tests measure is for people")]

mod attach;
mod branches;
mod crash;
mod ground;
mod union;
