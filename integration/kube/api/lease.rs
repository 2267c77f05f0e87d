//! Leader election on a real API server.
