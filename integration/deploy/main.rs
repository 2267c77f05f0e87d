//! What is under `deploy/` in Kubernetes' YAML, read by the program's own parsers.

mod rights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use union_csi::config::{self, Overrides};
use union_csi::controllers::cluster::DRIVER;
use union_csi::domain::Bytes;
use union_csi::domain::policy::Policy;

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

/// Every object in the YAML files directly in this directory of `deploy/`, with its file's name.
fn objects(directory: &str) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(deploy().join(directory)).expect("the directory") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|e| e != "yaml") {
            continue;
        }
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).expect("the file");
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        all.extend(documents.into_iter().map(|object| (name.clone(), object)));
    }
    assert!(!all.is_empty(), "{directory} has objects");
    all
}

fn strings(value: &Value) -> BTreeMap<String, String> {
    let map = value.as_object().into_iter().flatten();
    map.map(|(k, v)| (k.clone(), v.as_str().unwrap_or_else(|| panic!("{k} is not text")).to_owned()))
        .collect()
}

/// Every mapping with this key, however deep.
fn holding<'v>(value: &'v Value, key: &str, found: &mut Vec<&'v Value>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get(key));
            map.values().for_each(|v| holding(v, key, found));
        }
        Value::Array(list) => list.iter().for_each(|v| holding(v, key, found)),
        _ => {}
    }
}

#[test]
fn the_parameters_of_every_class_are_understood() {
    let mut strategies = Vec::new();
    for (file, class) in objects("base").into_iter().chain(objects("examples")) {
        if class["kind"] != "StorageClass" {
            continue;
        }
        assert_eq!(class["provisioner"], DRIVER, "{file}");
        let parameters = strings(&class["parameters"]);
        let policy = Policy::parse(&parameters);
        assert!(policy.is_ok(), "{file}: {}: {policy:?}", class["metadata"]["name"]);
        strategies.extend(parameters.get("strategy").cloned());
    }
    for strategy in ["fewest", "balanced", "spread"] {
        assert!(strategies.iter().any(|s| s == strategy), "there is an example for {strategy}");
    }
}

#[test]
fn the_attributes_of_inline_volumes_are_understood() {
    let mut seen = 0;
    for (file, object) in objects("examples") {
        let mut volumes = Vec::new();
        holding(&object, "csi", &mut volumes);
        for volume in volumes {
            seen += 1;
            assert_eq!(volume["driver"], DRIVER, "{file}");
            let mut attributes = strings(&volume["volumeAttributes"]);
            let size = attributes.remove("size").expect("a size");
            size.parse::<Bytes>().unwrap_or_else(|e| panic!("{file}: {e}"));
            let policy = Policy::parse(&attributes);
            assert!(policy.is_ok(), "{file}: {policy:?}");
        }
    }
    assert!(seen > 0, "there is an example of an inline volume");
}

#[test]
fn claims_of_the_examples_name_classes_that_exist() {
    let classes: Vec<Value> = objects("base")
        .into_iter()
        .chain(objects("examples"))
        .filter(|(_, o)| o["kind"] == "StorageClass")
        .map(|(_, o)| o["metadata"]["name"].clone())
        .collect();
    for (file, object) in objects("examples") {
        let mut named = Vec::new();
        holding(&object, "storageClassName", &mut named);
        for name in named {
            assert!(classes.contains(name), "{file}: there is no class {name}");
        }
    }
}

#[test]
fn the_configuration_in_the_config_map_is_that_of_an_agent_in_a_cluster() {
    let (_, map) = objects("base").into_iter().find(|(file, _)| file == "configmap.yaml").expect("the map");
    let text = map["data"]["agent.yaml"].as_str().expect("agent.yaml");
    let config = config::parse(Path::new("agent.yaml"), text, &Overrides::default(), "node-1")
        .unwrap_or_else(|faults| panic!("{faults}"));
    assert_eq!(config.pools_under.len(), 1, "a mounted disk becomes a pool by itself");
    assert_eq!(config.http_listen, config::DEFAULT_LISTEN.parse().ok());
}

#[test]
fn the_driver_object_is_named_as_the_driver() {
    let (_, driver) =
        objects("base").into_iter().find(|(_, o)| o["kind"] == "CSIDriver").expect("the driver");
    assert_eq!(driver["metadata"]["name"], DRIVER);
}
