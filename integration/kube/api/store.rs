//! The contract of the store on a real API server.
