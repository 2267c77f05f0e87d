//! The Container Storage Interface, version 1.12: parse, call, reply.
