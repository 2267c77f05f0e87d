//! `union-csi crds`: the CustomResourceDefinitions that a cluster needs.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::json;
use snafu::ResultExt;

use super::output::Out;
use super::{CliError, DONE, cli_error};
use crate::store::kubernetes::crds;

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi crds | kubectl apply --server-side -f -\n  \
    union-csi crds --output json | kubectl diff -f -\n\n\
They are those of this version of the program: install them before its first agent starts, and before an upgrade.")]
pub(super) struct Args {
    /// How to write them
    #[arg(long, short, value_enum, default_value_t)]
    output: Notation,
}

/// How definitions are written.
#[derive(Clone, Copy, Debug, Default, clap::ValueEnum)]
enum Notation {
    /// One document each.
    #[default]
    Yaml,
    /// One list.
    Json,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let definitions = crds();
    match args.output {
        Notation::Json => out.json(&json!({"apiVersion": "v1", "kind": "List", "items": definitions}))?,
        Notation::Yaml => {
            for definition in &definitions {
                out.print(&format!("---\n{}", yaml(definition)?))?;
            }
        }
    }
    Ok(DONE)
}

/// The definition as a YAML document.
pub(super) fn yaml(definition: &CustomResourceDefinition) -> Result<String, CliError> {
    serde_saphyr::to_string(definition).map_err(std::io::Error::other).context(cli_error::OutputSnafu)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Compares `deploy/crds/` with what the code says now, or writes it when `UNION_CSI_WRITE_DOCS` is set.
    #[test]
    fn the_document_of_each_definition_in_deploy_is_up_to_date() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/crds");
        let write = std::env::var_os("UNION_CSI_WRITE_DOCS").is_some();
        for definition in crds() {
            let path = directory.join(format!("{}.yaml", definition.spec.names.plural));
            let wanted = format!(
                "# Made by `union-csi crds`; do not edit: change the types in src/store/object.rs instead.\n{}",
                yaml(&definition).unwrap()
            );
            if write {
                std::fs::write(&path, &wanted).unwrap();
            }
            let found = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(
                found == wanted,
                "{} is not up to date: run UNION_CSI_WRITE_DOCS=1 cargo test --lib document -- --test-threads=1, and \
                 review what changed",
                path.display()
            );
        }
    }

    #[test]
    fn what_is_written_as_yaml_is_read_as_the_same_definition() {
        for definition in crds() {
            let text = yaml(&definition).unwrap();
            let read: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap();
            assert_eq!(read, definition, "{text}");
        }
    }
}
