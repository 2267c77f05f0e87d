//! What is tried with several machines.

mod network;
