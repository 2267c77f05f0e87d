//! The layers of `src/` import only what lies below them, and only `platform` is unsafe or runs commands.
//!
//! The rules stand in `docs/ARCHITECTURE.md` for people and here for the test command.

use std::fs;
use std::path::{Path, PathBuf};

/// A layer, and the layers that it may import besides itself.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("domain", &[]),
    ("store", &["domain"]),
    ("platform", &["domain"]),
    ("node", &["domain", "store", "platform"]),
    ("controllers", &["domain", "store"]),
    ("csi", &["domain", "store", "node"]),
];

/// Crates that one layer must not know.
const MUST_NOT_NAME: &[(&str, &[&str])] = &[
    (
        "domain",
        &[
            "tokio",
            "nix",
            "rustix",
            "libc",
            "tonic",
            "axum",
            "kube",
            "redb",
            "std::fs",
            "std::process",
            "std::net",
        ],
    ),
    ("store", &["nix", "rustix", "libc", "tonic", "axum", "std::process"]),
    ("platform", &["tokio", "tonic", "axum", "kube", "redb"]),
    ("node", &["tonic", "axum", "kube", "redb", "libc", "std::process::Command"]),
    ("controllers", &["nix", "rustix", "libc", "tonic", "axum", "redb", "std::process", "std::fs"]),
    ("csi", &["nix", "rustix", "libc", "axum", "kube", "redb", "std::process::Command"]),
];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a source folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The file's code without comments and without what follows its `#[cfg(test)] mod tests`.
fn code(path: &Path) -> Vec<(usize, String)> {
    let text = fs::read_to_string(path).expect("a source file");
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim() == "#[cfg(test)]" {
            break;
        }
        let line = line.split("//").next().unwrap_or_default();
        lines.push((number + 1, line.to_owned()));
    }
    lines
}

fn layer_of(path: &Path) -> Option<String> {
    let first = path.strip_prefix("src").ok()?.components().next()?;
    let name = first.as_os_str().to_string_lossy();
    Some(name.strip_suffix(".rs").unwrap_or(&name).to_owned())
}

fn is_test_file(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n == "tests.rs") || path.components().any(|c| c.as_os_str() == "tests")
}

/// Names imported from the crate in a line: `crate::a::…` and the groups `crate::{a::…, b}`.
fn crate_imports(line: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (at, _) in line.match_indices("crate::") {
        let rest = &line[at + "crate::".len()..];
        let take =
            |text: &str| text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        match rest.strip_prefix('{') {
            Some(group) => {
                let mut depth = 0;
                let mut item = String::new();
                for c in group.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => names.push(take(std::mem::take(&mut item).trim())),
                        _ if depth == 0 => item.push(c),
                        _ => {}
                    }
                }
                names.push(take(item.trim()));
            }
            None => names.push(take(rest)),
        }
    }
    names.retain(|n| !n.is_empty());
    names
}

#[test]
fn every_layer_imports_only_what_lies_below_it() {
    let mut files = Vec::new();
    sources(Path::new("src"), &mut files);
    let mut faults = Vec::new();
    for (layer, allowed) in MAY_IMPORT {
        let mine: Vec<_> = files.iter().filter(|f| layer_of(f).as_deref() == Some(layer)).collect();
        assert!(
            !mine.is_empty(),
            "layer {layer} has no files: is the layout in docs/ARCHITECTURE.md still true?"
        );
        let forbidden = MUST_NOT_NAME.iter().find(|(l, _)| l == layer).map_or(&[][..], |(_, c)| *c);
        for file in mine.iter().filter(|f| !is_test_file(f)) {
            for (number, line) in code(file) {
                for name in crate_imports(&line) {
                    if name != *layer && !allowed.contains(&name.as_str()) {
                        faults.push(format!("{}:{number}: {layer} imports crate::{name}", file.display()));
                    }
                }
                for name in forbidden {
                    let path = format!("{name}::");
                    let starts = line.match_indices(&path).any(|(at, _)| {
                        !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
                    });
                    if starts || line.trim() == format!("use {name};") {
                        faults.push(format!("{}:{number}: {layer} names {name}", file.display()));
                    }
                }
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn only_the_platform_layer_is_unsafe_or_runs_commands() {
    let mut files = Vec::new();
    sources(Path::new("src"), &mut files);
    let faults: Vec<_> = files
        .iter()
        .filter(|f| layer_of(f).as_deref() != Some("platform") && !is_test_file(f))
        .flat_map(|file| {
            code(file).into_iter().filter_map(move |(number, line)| {
                let bad = ["unsafe {", "unsafe fn", "allow(unsafe_code)", "Command::new("]
                    .iter()
                    .find(|bad| line.contains(**bad) && !line.contains("clap"))?;
                Some(format!("{}:{number}: {bad}", file.display()))
            })
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_check_sees_a_forbidden_import() {
    assert_eq!(crate_imports("use crate::store::{Event, Store};"), ["store"]);
    assert_eq!(crate_imports("use crate::{domain::Bytes, csi::{a, b}, node};"), ["domain", "csi", "node"]);
    assert_eq!(crate_imports("let x = crate::platform::Host::new();"), ["platform"]);
    assert_eq!(layer_of(Path::new("src/node/volume/mod.rs")).as_deref(), Some("node"));
    assert_eq!(layer_of(Path::new("src/http.rs")).as_deref(), Some("http"));
}
