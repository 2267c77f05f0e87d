//! What is tried with several machines.

mod bare_nvme;
mod cluster_consumer;
mod cluster_faults;
mod cluster_keys;
mod cluster_life;
mod cluster_off;
mod cluster_random;
mod cluster_shared;
mod cluster_tls;
mod cluster_write_through;
mod exchange;
mod network;
mod nfs;
mod nvme;
mod owner;
mod sharing;
mod survey;
mod tls;
mod transport;
mod write_through;
