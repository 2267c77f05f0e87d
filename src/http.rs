//! Read-only HTTP.
