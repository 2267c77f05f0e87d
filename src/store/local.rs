//! The embedded store: one redb file.
