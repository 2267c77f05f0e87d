//! Pools on real disks.
