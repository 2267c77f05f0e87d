//! What is tried with several machines.

mod bare_nvme;
mod network;
mod nfs;
mod nvme;
mod transport;
