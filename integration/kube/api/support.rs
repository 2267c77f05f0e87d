//! A client for the API server that KUBECONFIG names, and a namespace for each test.

#![allow(dead_code, reason = "each test file takes what it needs")]

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::{await_condition, conditions};
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

/// Installs the CustomResourceDefinitions, as often as wanted, and waits until they are served.
///
/// # Panics
/// Where the API server refuses one, or does not serve it in half a minute.
pub async fn definitions(client: &Client) {
    let api: Api<CustomResourceDefinition> = Api::all(client.clone());
    for definition in union_csi::store::kubernetes::crds() {
        let name = definition.metadata.name.clone().expect("a name");
        let apply = PatchParams::apply("tests").force();
        api.patch(&name, &apply, &Patch::Apply(&definition)).await.expect("the definition is taken");
        let established = await_condition(api.clone(), &name, conditions::is_crd_established());
        tokio::time::timeout(Duration::from_secs(30), established).await.expect("in time").expect("served");
    }
}
