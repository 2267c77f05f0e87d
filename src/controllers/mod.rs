//! What the leader does for the whole cluster.
