//! Tests on a whole cluster, each with real kubelets and pods: `integration/kube/run --nodes 3 -- cargo test --test kube`.

mod disturbed;
mod install;
mod life;
mod lost_node;
mod objects;
mod pods;
mod refusals;
mod room;
mod support;
