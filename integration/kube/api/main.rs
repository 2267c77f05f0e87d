//! Tests against a real API server, without kubelets: `integration/kube/run --api-only -- cargo test --test kube_api`.

mod support;

mod access;
mod attacher;
mod capacity;
mod deploy;
mod keys;
mod lease;
mod orphans;
mod provisioner;
mod store;
