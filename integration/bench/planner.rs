//! How the planner's time grows with the cluster.
fn main() {}
