//! PersistentVolumeClaims on a real API server.
