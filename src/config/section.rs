//! The tree of the file as sections and typed settings: what is there, what has the wrong shape, and where.

use std::path::Path;

use super::fault::{Fault, Origin};
use super::keys;
use super::scalar::{Wrong, wrong};
use super::yaml::{Name, Node, Value};
use crate::domain::spelling;

/// A setting as typed, and where.
#[derive(Clone)]
pub(super) struct Typed {
    pub(super) text: String,
    pub(super) key: String,
    pub(super) origin: Origin,
}

/// A mapping of the file.
#[derive(Clone, Copy)]
pub(super) struct Section<'n> {
    pub(super) entries: &'n [(Name, Node)],
}

impl<'n> Section<'n> {
    pub(super) const EMPTY: Self = Self { entries: &[] };

    pub(super) fn find(self, name: &str) -> Option<&'n (Name, Node)> {
        self.entries.iter().find(|(key, _)| key.text == name)
    }
}

pub(super) struct Reader<'a> {
    pub(super) file: &'a Path,
    pub(super) faults: Vec<Fault>,
}
impl Reader<'_> {
    pub(super) fn at(&self, line: u64) -> Origin {
        Origin::File { path: self.file.to_owned(), line }
    }

    pub(super) fn fault(&mut self, origin: Origin, key: &str, Wrong { problem, remedy }: Wrong) {
        self.faults.push(Fault { origin, key: key.to_owned(), problem, remedy });
    }

    /// The faults in the order of the file, those of flags after them.
    pub(super) fn sorted(mut self) -> Vec<Fault> {
        self.faults.sort_by_key(|fault| match fault.origin {
            Origin::File { line, .. } => line,
            Origin::Flag(_) | Origin::Default => u64::MAX,
        });
        self.faults
    }

    /// A mapping; `path` is its place in the table of keys, `at` what it is called in faults.
    pub(super) fn section<'n>(&mut self, node: &'n Node, path: &str, at: &str) -> Section<'n> {
        let Value::Map(entries) = &node.value else {
            if !matches!(node.value, Value::Null) {
                let problem = format!("is {}, not a mapping", node.value.kind());
                self.fault(self.at(node.line), at, wrong(problem, "write its keys below it, indented"));
            }
            return Section::EMPTY;
        };
        for (name, _) in entries {
            let Some(known) = keys::children(path) else { continue };
            if known.contains(&name.text.as_str()) {
                continue;
            }
            let key = if at.is_empty() { name.text.clone() } else { format!("{at}.{}", name.text) };
            let remedy = match spelling::nearest(&name.text, known.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("remove it; known here are {}", known.join(", ")),
            };
            self.fault(self.at(name.line), &key, wrong("unknown key", remedy));
        }
        Section { entries }
    }

    pub(super) fn subsection<'n>(&mut self, parent: Section<'n>, name: &str) -> Section<'n> {
        match parent.find(name) {
            Some((_, node)) => self.section(node, name, name),
            None => Section::EMPTY,
        }
    }

    pub(super) fn list<'n>(&mut self, parent: Section<'n>, name: &str) -> &'n [Node] {
        self.list_at(parent, name, name)
    }

    pub(super) fn list_at<'n>(&mut self, parent: Section<'n>, name: &str, key: &str) -> &'n [Node] {
        match parent.find(name) {
            Some((_, Node { value: Value::List(list), .. })) => list,
            None | Some((_, Node { value: Value::Null, .. })) => &[],
            Some((name, node)) => {
                let problem = format!("is {}, not a list", node.value.kind());
                self.fault(self.at(name.line), key, wrong(problem, "begin each element with '- '"));
                &[]
            }
        }
    }

    pub(super) fn map_at<'n>(&mut self, parent: Section<'n>, name: &str, key: &str) -> &'n [(Name, Node)] {
        match parent.find(name) {
            Some((_, node)) => self.section(node, key_path(key), key).entries,
            None => &[],
        }
    }

    /// A single value, as typed; a value that YAML reads as something else than was written is a fault.
    pub(super) fn scalar(&mut self, node: &Node, key: &str) -> Option<Typed> {
        let text = match &node.value {
            Value::Text(text) => text.clone(),
            Value::Int(n) => n.to_string(),
            Value::Bool(_) | Value::Float => {
                let problem = format!("YAML reads this as {}", node.value.kind());
                self.fault(self.at(node.line), key, wrong(problem, "write it in quotes"));
                return None;
            }
            Value::Null => {
                let fault = wrong("has no value", "give one, or leave the key out for its default");
                self.fault(self.at(node.line), key, fault);
                return None;
            }
            Value::List(_) | Value::Map(_) => {
                let problem = format!("is {}, not a single value", node.value.kind());
                self.fault(self.at(node.line), key, wrong(problem, "write one value"));
                return None;
            }
        };
        Some(Typed { text, key: key.to_owned(), origin: self.at(node.line) })
    }

    pub(super) fn text(&mut self, section: Section<'_>, name: &str, key: &str) -> Option<Typed> {
        let (name, node) = section.find(name)?;
        let mut typed = self.scalar(node, key)?;
        typed.origin = self.at(name.line);
        Some(typed)
    }

    /// The flag if it was given, else what the file has.
    pub(super) fn flagged(
        &mut self,
        section: Section<'_>,
        name: &str,
        key: &str,
        given: Option<&String>,
        flag: &'static str,
    ) -> Option<Typed> {
        let typed = self.text(section, name, key);
        match given {
            Some(text) => Some(Typed { text: text.clone(), key: String::new(), origin: Origin::Flag(flag) }),
            None => typed,
        }
    }

    pub(super) fn parsed<T>(
        &mut self,
        typed: Option<Typed>,
        default: T,
        parse: impl Fn(&str) -> Result<T, Wrong>,
    ) -> T {
        let Some(Typed { text, key, origin }) = typed else { return default };
        parse(&text).unwrap_or_else(|fault| {
            self.fault(origin, &key, fault);
            default
        })
    }

    pub(super) fn required<T>(
        &mut self,
        section: Section<'_>,
        name: &str,
        key: &str,
        line: u64,
        parse: impl Fn(&str) -> Result<T, Wrong>,
    ) -> Option<T> {
        if section.find(name).is_none() {
            self.fault(self.at(line), key, wrong("is missing", format!("add `{name}: …`")));
            return None;
        }
        let typed = self.text(section, name, key);
        self.parsed(typed, None, |text| parse(text).map(Some))
    }
}

/// The place of a mapping with free keys in the table of keys.
fn key_path(key: &str) -> &str {
    match key {
        key if key.starts_with("pools[") => "pools[].labels",
        key if key.starts_with("poolsUnder[") => "poolsUnder[].labels",
        key => key,
    }
}
