//! Overhead.
