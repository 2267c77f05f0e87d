//! CSIStorageCapacity on a real API server.
