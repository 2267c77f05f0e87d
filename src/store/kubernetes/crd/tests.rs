//! That the definitions are what Kubernetes takes, as far as it can be said without it.

use super::*;

fn documents() -> [Value; 3] {
    [
        document::<VolumeSplit>(&SPLIT, rules::split()),
        document::<Branch>(&BRANCH, rules::branch()),
        document::<StorageNode>(&NODE, rules::node()),
    ]
}

#[test]
fn each_definition_is_one() {
    for document in documents() {
        serde_json::from_value::<CustomResourceDefinition>(document).unwrap();
    }
    let names: Vec<_> = crds().into_iter().filter_map(|c| c.metadata.name).collect();
    assert_eq!(names, ["volumesplits.union.io", "branches.union.io", "storagenodes.union.io"]);
}

#[test]
fn every_value_has_one_type_and_nothing_refers_elsewhere() {
    fn check(path: &str, schema: &Value) {
        for odd in ["$ref", "oneOf", "anyOf", "allOf", "not", "const", "title", "default"] {
            assert!(schema.get(odd).is_none(), "{path} has {odd}: {schema}");
        }
        assert!(schema.get("type").is_some_and(Value::is_string), "{path} has no type: {schema}");
        for (field, inner) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            check(&format!("{path}.{field}"), inner);
        }
        for inner in ["items", "additionalProperties"] {
            schema.get(inner).into_iter().for_each(|inner| check(&format!("{path}[]"), inner));
        }
    }
    for document in documents() {
        check("", &document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]);
    }
}

#[test]
fn every_column_and_selected_field_is_in_the_schema() {
    for document in documents() {
        let version = &document["spec"]["versions"][0];
        let schema = &version["schema"]["openAPIV3Schema"];
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let selected = version.get("selectableFields").and_then(Value::as_array);
        for column in columns.iter().chain(selected.into_iter().flatten()) {
            let path = column["jsonPath"].as_str().unwrap();
            if path.starts_with(".metadata") {
                continue;
            }
            let mut here = schema;
            for step in path.trim_start_matches('.').split('.') {
                let (field, list) = step.split_once('[').map_or((step, false), |(f, _)| (f, true));
                here = &here["properties"][field];
                assert!(!here.is_null(), "{path} is not in the schema");
                if list {
                    break;
                }
            }
        }
    }
}
