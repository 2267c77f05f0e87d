//! From the schema of a Rust type to the structural schema that Kubernetes asks for.
//!
//! Structural means: every value has one type, and nothing refers elsewhere
//! (<https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema>).

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::Described;

/// The schema of `T`.
pub(super) fn schema<T: Described>() -> Value {
    let settings = SchemaSettings::openapi3().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    shape(&mut schema);
    schema
}

fn shape(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    // Titles repeat type names; what a missing field means is the program's to say, not the API server's to write;
    // no field is ever written as null.
    for noise in ["$schema", "title", "default", "nullable"] {
        fields.remove(noise);
    }
    if fields.remove("x-kubernetes-int-or-string").is_some() {
        // Amounts are read as quantities too where people write them; the program writes numbers.
        fields.remove("anyOf");
        fields.insert("type".to_owned(), json!("integer"));
        fields.insert("format".to_owned(), json!("int64"));
        fields.insert("minimum".to_owned(), json!(0));
        let of_type = |text: &Value| text.as_str().is_some_and(|t| t.starts_with("An amount of bytes"));
        if fields.get("description").is_some_and(of_type) {
            fields.insert("description".to_owned(), json!("Bytes."));
        }
    }
    if let Some(Value::Array(choices)) = fields.remove("anyOf") {
        // Optional: one choice, or nothing.
        let mut something = choices.into_iter().filter(|c| !is_null(c));
        if let (Some(Value::Object(one)), None) = (something.next(), something.next()) {
            for (key, value) in one {
                fields.entry(key).or_insert(value);
            }
            return shape(schema);
        }
    }
    if let Some(Value::Array(words)) = fields.remove("oneOf") {
        // Words, each with a description of its own.
        let words: Vec<Value> = words.iter().flat_map(words_of).collect();
        fields.insert("type".to_owned(), json!("string"));
        fields.insert("enum".to_owned(), Value::Array(words));
    }
    if let Some(Value::Array(types)) = fields.get("type") {
        let one = types.iter().find(|t| *t != "null").cloned();
        fields.extend(one.map(|one| ("type".to_owned(), one)));
    }
    if fields.get("format") == Some(&json!("uint32")) {
        fields.insert("maximum".to_owned(), json!(u32::MAX));
    }
    if fields.get("type") == Some(&json!("integer")) {
        fields.insert("format".to_owned(), json!("int64"));
    }
    if let Some(Value::String(text)) = fields.get_mut("description") {
        *text = plain(text);
    }
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(shape);
    }
    for inner in ["items", "additionalProperties"] {
        fields.get_mut(inner).into_iter().for_each(shape);
    }
}

fn is_null(schema: &Value) -> bool {
    schema.get("type") == Some(&json!("null")) || schema.get("enum") == Some(&json!([null]))
}

fn words_of(choice: &Value) -> Vec<Value> {
    match (choice.get("enum"), choice.get("const")) {
        (Some(Value::Array(words)), _) => words.clone(),
        (_, Some(word)) => vec![word.clone()],
        _ => Vec::new(),
    }
}

/// Documentation without its links to other items, in one line.
fn plain(text: &str) -> String {
    text.replace(['`', '[', ']'], "").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The schema of a field, by its path of properties; `*`: of the items of a list.
pub(super) fn at<'a>(schema: &'a mut Value, path: &[&str]) -> Option<&'a mut Map<String, Value>> {
    let mut here = schema;
    for step in path {
        here = match *step {
            "*" => here.get_mut("items")?,
            field => here.get_mut("properties")?.get_mut(field)?,
        };
    }
    here.as_object_mut()
}
