//! A client for the API server that KUBECONFIG names, and a namespace for each test.

#![allow(dead_code, reason = "each test file takes what it needs")]

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client};

/// A client with all rights.
///
/// # Panics
/// Where no API server is named: these tests do not pass without one.
pub async fn client() -> Client {
    assert!(
        std::env::var_os("KUBECONFIG").is_some(),
        "KUBECONFIG is not set: run integration/kube/run --api-only -- cargo test --test kube_api"
    );
    Client::try_default().await.expect("a client for the API server in KUBECONFIG")
}

/// A new namespace with a name of its own; what is made in it is the test's. The server ends with the run, and its
/// namespaces with it.
pub async fn namespace(client: &Client) -> String {
    let name = format!("test-{}", uuid::Uuid::new_v4().simple());
    let namespace = Namespace {
        metadata: ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() },
        ..Namespace::default()
    };
    Api::all(client.clone()).create(&Default::default(), &namespace).await.expect("a namespace");
    name
}
