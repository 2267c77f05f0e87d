//! Tests on a whole cluster, each with real kubelets and pods: `integration/kube/run --nodes 3 -- cargo test --test kube`.
