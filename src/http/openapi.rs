//! The OpenAPI 3.1 document, made from the table of routes and the types that they answer with.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::api::Problem;
use super::plan;
use super::routes::{Answer, ROUTES};

/// The document of `/openapi.json`.
#[must_use]
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|s| {
        s.definitions_path = "/components/schemas".into();
        s.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let problem = generator.subschema_for::<Problem>();
    let mut paths = Map::new();
    for route in ROUTES {
        let content = match &route.answer {
            Answer::Json(schema) => json!({ "application/json": { "schema": schema(&mut generator) } }),
            Answer::Text(media) => json!({ *media: { "schema": { "type": "string" } } }),
        };
        let operation = json!({
            "summary": route.summary,
            "parameters": parameters(route.path),
            "responses": {
                "200": { "description": "The answer.", "content": content },
                "default": {
                    "description": "What is wrong.",
                    "content": { "application/json": { "schema": problem } },
                },
            },
        });
        paths.insert(route.path.to_owned(), json!({ "get": operation }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Union CSI",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The state of one large volume from the free space of many disks. Read-only. Amounts are bytes.",
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "paths": paths,
        "components": { "schemas": generator.take_definitions(true) },
    })
}

fn parameters(path: &str) -> Vec<Value> {
    let parameter = |name: &str, place: &str, required: bool, description: &str| {
        json!({
            "name": name, "in": place, "required": required, "description": description,
            "schema": { "type": "string" },
        })
    };
    match path {
        "/v1/volumes/{id}" => {
            vec![parameter("id", "path", true, "The volume's id, or the name that it was asked for under.")]
        }
        "/v1/plan" => plan::OWN
            .iter()
            .map(|(name, meaning)| parameter(name, "query", *name == "size", meaning))
            .chain(plan::class_parameters().map(|(name, meaning)| parameter(&name, "query", false, &meaning)))
            .collect(),
        _ => Vec::new(),
    }
}
