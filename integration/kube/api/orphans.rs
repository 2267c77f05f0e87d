//! The orphan scan on a real API server.
